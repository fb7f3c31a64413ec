"""Synthetic videos: pictures that carry their frame number, so that "the right frame" can be checked by its pixels."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
    """A smooth coloured picture that moves with its number, [H, W, 3] uint8."""
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
) -> bytes:
    """Encode RGB frames [H, W, 3] to a file, or to bytes, which are returned in either case.

    `pts` in ticks of 1/fps gives a variable rate or a late start; without it frame i stands at i.
    """
    import av

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
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = number if pts is None else pts[number]
            picture.time_base = 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    data = buffer.getvalue()
    if out is not None:
        from sosampler.files import replacing

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


# --- the demo's film -------------------------------------------------------------------------------------------------

# Scenes of the demo: title, seconds, hue, number of shapes. Their lengths differ on purpose.
_SCENES = (
    ("opening", 9.0, 0.58, 1),
    ("kick-off", 3.0, 0.33, 3),
    ("passes", 14.0, 0.38, 5),
    ("foul", 2.0, 0.02, 2),
    ("replay", 6.0, 0.10, 4),
    ("corner", 3.0, 0.46, 6),
    ("goal", 2.5, 0.86, 9),
    ("crowd", 8.5, 0.72, 7),
)


def story_frames(fps: int = 24, width: int = 480, height: int = 270) -> Iterable[np.ndarray]:
    """Frames of a small film in eight scenes of unequal length, for demonstrations."""
    font = ImageFont.load_default(size=height // 8)
    rng = np.random.default_rng(7)
    for title, seconds, hue, shapes in _SCENES:
        paths = rng.uniform(0, 2 * np.pi, size=(shapes, 4))
        background = _gradient(hue, width, height)
        for step in range(int(seconds * fps)):
            picture = Image.fromarray(background)
            draw = ImageDraw.Draw(picture)
            for index, (a, b, c, d) in enumerate(paths):
                x = width * (0.5 + 0.4 * np.sin(a + step / fps * (1 + b / 4)))
                y = height * (0.55 + 0.3 * np.cos(c + step / fps * (1 + d / 4)))
                radius = height * (0.05 + 0.015 * (index % 4))
                colour = _rgb((hue + 0.5 + 0.06 * index) % 1.0, 0.75, 0.95)
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
            draw.text((width * 0.04, height * 0.04), title, font=font, fill=(255, 255, 255))
            yield np.asarray(picture)


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def _gradient(hue: float, width: int, height: int) -> np.ndarray:
    top = np.array(_rgb(hue, 0.55, 0.75), dtype=np.float64)
    bottom = np.array(_rgb(hue, 0.8, 0.3), dtype=np.float64)
    share = np.linspace(0, 1, height)[:, None, None]
    return np.broadcast_to(top * (1 - share) + bottom * share, (height, width, 3)).astype(np.uint8)
