"""Synthetic videos: images that carry their frame number, so that "the right frame" can be checked by its pixels."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

_BITS = 16
# The code fills this share of the height; two rows, bits above, inverted bits below.
_CODE_SHARE = 0.25


def draw_number(frame: np.ndarray, number: int) -> np.ndarray:
    """Write `number` < 65536 into the top of the frame [H, W, 3] as black and white blocks, and return the frame."""
    height, width, _ = frame.shape
    row = max(4, int(height * _CODE_SHARE / 2))
    edges = np.arange(_BITS + 1) * width // _BITS
    for bit in range(_BITS):
        value = 235 if number >> (_BITS - 1 - bit) & 1 else 20
        frame[:row, edges[bit] : edges[bit + 1]] = value
        frame[row : 2 * row, edges[bit] : edges[bit + 1]] = 255 - value
    return frame


def read_number(frame: np.ndarray) -> int:
    """The number that `draw_number` wrote, from a frame that was encoded, decoded and perhaps resized."""
    height, width, _ = frame.shape
    row = max(4 if height >= 32 else 1, int(height * _CODE_SHARE / 2))
    grey = frame.mean(axis=2)
    edges = np.arange(_BITS + 1) * width // _BITS
    number = 0
    for bit in range(_BITS):
        left, right = edges[bit], edges[bit + 1]
        inset = (right - left) // 4  # block borders blur
        above = grey[row // 4 : max(row // 4 + 1, row - row // 4), left + inset : right - inset].mean()
        below = grey[row + row // 4 : max(row + row // 4 + 1, 2 * row - row // 4), left + inset : right - inset].mean()
        if abs(above - below) < 60:
            raise ValueError(f"no frame number can be read: bit {bit} is grey ({above:.0f} over {below:.0f})")
        number = number << 1 | int(above > below)
    return number


def numbered_frame(number: int, width: int = 192, height: int = 128) -> np.ndarray:
    """A smooth coloured image that moves with its number, [H, W, 3] uint8."""
    y, x = np.mgrid[0:height, 0:width]
    frame = np.empty((height, width, 3), dtype=np.uint8)
    for channel, speed in enumerate((1.0, 1.7, 2.3)):
        wave = np.sin((x + number * speed) / 23.0 + channel) + np.cos((y - number * speed) / 17.0)
        frame[..., channel] = (127 + 60 * wave).clip(0, 255)
    return draw_number(frame, number)


def encode_video(
    frames: Iterable[np.ndarray],
    out: Path | None = None,
    *,
    fps: int | Fraction = 30,
    pts: Sequence[int] | None = None,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    container_format: str = "mp4",
    codec_options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    rotation: int = 0,
    colorspace: int | None = None,
    keyframes: Collection[int] = (),
) -> bytes:
    """Encode RGB frames [H, W, 3] to a file, or to bytes, which are returned in either case.

    `pts` in ticks of 1/fps gives a variable rate or a late start; by default frame i has pts i. `keyframes` are forced,
    as at cuts, beside those of the encoder.
    """
    import av
    from av.video.frame import PictureType

    buffer = io.BytesIO()
    rate = Fraction(fps)
    with av.open(buffer, "w", format=container_format, options=container_options or {}) as container:
        stream: Any = None
        for number, frame in enumerate(frames):
            if stream is None:
                stream = container.add_stream(codec, rate=rate, options=codec_options or {})
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt = pix_fmt
                stream.codec_context.time_base = 1 / rate
                stream.codec_context.thread_count = 1  # the same bytes on every machine
                if rotation:
                    stream.set_display_rotation(rotation)
                if colorspace is not None:
                    stream.codec_context.colorspace = colorspace
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            image.pts = number if pts is None else pts[number]
            image.time_base = 1 / rate
            if number in keyframes:
                image.pict_type = PictureType.I
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    data = buffer.getvalue()
    if out is not None:
        from sosampler._util.files import replacing

        with replacing(out) as temporary:
            temporary.write_bytes(data)
    return data


def numbered_video(
    out: Path | None = None,
    *,
    num_frames: int = 90,
    width: int = 192,
    height: int = 128,
    gop: int = 30,
    **encoding: Any,
) -> bytes:
    """A video whose frames carry their numbers, with a keyframe every `gop` frames and what B-frames x264 likes."""
    codec = encoding.get("codec", "libx264")
    turns = encoding.get("rotation", 0) // 90  # frames are stored turned, so that a player shows them upright
    options = {"g": str(gop)}
    if codec == "libx264":
        options |= {"x264-params": f"keyint={gop}:min-keyint={gop}:scenecut=0:log-level=error", "preset": "veryfast"}
    encoding["codec_options"] = options | encoding.pop("codec_options", {})
    upright = (numbered_frame(number, width, height) for number in range(num_frames))
    frames = (np.ascontiguousarray(np.rot90(frame, -turns)) for frame in upright)
    return encode_video(frames, out, **encoding)
