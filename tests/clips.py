"""The zoo: small videos of every awkward kind, made here, whose frames carry their numbers."""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np

from sosampler.video.synthetic import numbered_frame, numbered_video

FPS = 30
# Where the tests run with an older PyAV, which cannot write all of them: a folder with the clips to test.
MADE_BEFORE = os.environ.get("SOSAMPLER_TESTS_CLIPS")


@dataclass(frozen=True)
class Clip:
    """A video and what is true of it."""

    name: str
    make: Callable[[], bytes]
    numbers: list[int]  # the number that each frame shows, in presentation order
    ticks: list[int]  # when each frame is shown, in 1/30 s
    suffix: str = ".mp4"
    size: tuple[int, int] = (192, 128)  # width, height, upright
    exact_times: bool = True  # False: the container rounds times (to milliseconds) or has none
    torchcodec: str | None = None  # why torchcodec is not expected to agree
    notes: str = ""  # what a note must say

    @property
    def data(self) -> bytes:
        return _made(self.name)

    @property
    def seconds(self) -> np.ndarray:
        return np.array(self.ticks) / FPS

    def __str__(self) -> str:
        return self.name


@cache
def _made(name: str) -> bytes:
    if MADE_BEFORE:
        return (Path(MADE_BEFORE) / name).read_bytes()
    return BY_NAME[name].make()


class _Unseekable(io.RawIOBase):
    """A pipe: what a recorder writes into, so that no index and no duration can be written back."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.buffer.write(data)


def piped(num_frames: int, container_format: str, codec: str = "libx264") -> bytes:
    sink = _Unseekable()
    with av.open(sink, "w", format=container_format) as container:
        stream: Any = container.add_stream(codec, rate=FPS, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = 192, 128, "yuv420p"
        stream.codec_context.time_base = Fraction(1, FPS)
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return sink.buffer.getvalue()


def boxes(data: bytes, kind: bytes) -> list[int]:
    """Offsets of the contents of all MP4 boxes of a kind."""
    found, start = [], 0
    while (at := data.find(kind, start)) >= 0:
        found.append(at + 4)
        start = at + 4
    return found


def trimmed_by_edit_list(skip: int, num_frames: int = 60) -> bytes:
    """An MP4 whose edit list starts `skip` frames into the track: those frames are decoded but never shown."""
    data = bytearray(numbered_video(num_frames=num_frames, gop=30))
    timescale = struct.unpack(">I", data[boxes(data, b"mdhd")[0] + 12 :][:4])[0]
    (entry,) = boxes(data, b"elst")
    assert data[entry] == 0, "expected a version 0 edit list"
    duration, media_time = struct.unpack(">II", data[entry + 8 :][:8])
    movie_scale = struct.unpack(">I", data[boxes(data, b"mvhd")[0] + 12 :][:4])[0]
    duration -= skip * movie_scale // FPS
    media_time += skip * timescale // FPS
    data[entry + 8 : entry + 16] = struct.pack(">II", duration, media_time)
    return bytes(data)


def index_first(data: bytes) -> bytes:
    """The same MP4 with its index in front, as for the web; PyAV writes that to a file alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with (
            av.open(io.BytesIO(data)) as source,
            av.open(str(path), "w", options={"movflags": "faststart"}) as container,
        ):
            copy = container.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.stream = copy
                    container.mux(packet)
        moved = path.read_bytes()
    assert moved.find(b"moov") < moved.find(b"mdat")
    return moved


def without_usability_information(data: bytes) -> bytes:
    """The same H.264 in MP4, whose header no longer states how far frames are reordered, as of many cameras."""
    start = boxes(data, b"avcC")[0] + 8  # of the sequence parameter set
    header = data[start : start + 32].replace(b"\0\0\3", b"\0\0")
    bits, at = "".join(f"{byte:08b}" for byte in header), 32

    def number() -> int:  # in the Exp-Golomb code
        nonlocal at
        zeros = bits.index("1", at) - at
        at += 2 * zeros + 1
        return int(bits[at - zeros - 1 : at], 2) - 1

    assert header[1] == 100, "expected the high profile"
    _, chroma, *_ = [number() for _ in range(4)]  # which set, chroma format, two bit depths
    at += 2  # lossless, scaling matrix
    _, order_kind, *_ = [number() for _ in range(4)]  # logarithms of counters, their kind, number of references
    at += 1  # gaps
    assert (chroma, order_kind, number(), number()) == (1, 0, 192 // 16 - 1, 128 // 16 - 1), "not understood"
    assert bits[at : at + 4] == "1101", "expected frames only, direct 8x8, no cropping, and the information"
    at += 3
    cleared = bytearray(data)
    cleared[start + at // 8] ^= 0x80 >> at % 8  # vui_parameters_present_flag
    return bytes(cleared)


def late_b_frames() -> bytes:
    """A recording whose first two seconds have no B-frames, and whose header does not announce those that follow.

    In Matroska, since an MP4 says of each frame by how much it is late. FFmpeg itself loses frames of this file.
    """
    made, copied = io.BytesIO(), io.BytesIO()
    with av.open(made, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=FPS, options=_HIERARCHICAL)
        stream.width, stream.height, stream.pix_fmt = 192, 128, "yuv420p"
        for number in range(90):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number), format="rgb24")
            if number < 60:
                frame.pict_type = av.video.frame.PictureType.P
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    unstated = without_usability_information(made.getvalue())
    with av.open(io.BytesIO(unstated)) as source, av.open(copied, "w", format="matroska") as container:
        copy = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                container.mux(packet)
    return copied.getvalue()


def with_damage(data: bytes, *, packets: set[int], share: float = 0.6) -> bytes:
    """The same file with noise in place of the pictures of some packets (numbers in decoding order)."""
    damaged, rng = bytearray(data), np.random.default_rng(0)
    with av.open(io.BytesIO(data)) as container:
        for number, packet in enumerate(container.demux(video=0)):
            if number in packets and packet.size:
                assert packet.pos is not None
                start = packet.pos + int(packet.size * (1 - share))
                noise = rng.integers(0, 256, packet.pos + packet.size - start, dtype=np.uint8)
                damaged[start : packet.pos + packet.size] = noise.tobytes()
    return bytes(damaged)


def audio_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _plain(name: str, num_frames: int = 75, **how: Any) -> Clip:
    facts = {key: how.pop(key) for key in ("suffix", "size", "exact_times", "torchcodec", "notes") if key in how}
    count, ticks = range(num_frames), how.get("pts") or list(range(num_frames))
    if "size" in facts:
        how["width"], how["height"] = facts["size"]
    return Clip(name, lambda: numbered_video(num_frames=num_frames, **how), list(count), list(ticks), **facts)


_IRREGULAR = np.cumsum(np.random.default_rng(3).choice([1, 1, 1, 2, 5], 75)).tolist()
_HIERARCHICAL = {
    "preset": "slow",
    "bf": "8",
    "x264-params": "keyint=30:min-keyint=30:scenecut=0:b-adapt=0:b-pyramid=normal:log-level=error",
}
_H265 = {"x265-params": "log-level=error:keyint=24:min-keyint=24"}

CLIPS: list[Clip] = [
    _plain("h264"),
    _plain("one_group", gop=250),
    _plain("all_intra", gop=1),
    _plain("tiny_groups", num_frames=35, gop=3),
    _plain("no_b_frames", codec_options={"bf": "0"}),
    _plain("deep_b_pyramid", codec_options={"preset": "slow", "bf": "8", "refs": "5"}),
    Clip(
        "unstated_reordering",
        lambda: without_usability_information(numbered_video(num_frames=75, codec_options=_HIERARCHICAL)),
        list(range(75)),
        list(range(75)),
    ),
    _plain("open_gop", codec_options={"x264-params": "keyint=15:min-keyint=15:scenecut=0:open-gop=1:bframes=3"}),
    _plain("variable_rate", pts=_IRREGULAR),
    _plain("late_start", pts=list(range(300, 375))),
    _plain("late_start_mkv", pts=list(range(300, 375)), container_format="matroska", suffix=".mkv", exact_times=False),
    Clip("edit_list", lambda: trimmed_by_edit_list(7), list(range(7, 60)), list(range(53))),
    _plain("rotated_90", rotation=90, size=(128, 192)),
    _plain("rotated_180", rotation=180),
    _plain("rotated_270", rotation=-90, size=(128, 192)),
    _plain("odd_size", size=(193, 129), pix_fmt="yuv444p"),
    _plain(
        "odd_size_vp9", size=(193, 129), codec="libvpx-vp9", codec_options={"deadline": "realtime", "cpu-used": "8"}
    ),
    _plain("ten_bit", pix_fmt="yuv420p10le"),
    _plain("interlaced", codec_options={"flags": "+ildct+ilme"}, notes="interlaced"),
    # Only the container says which colour matrix the picture has; the codec's own header does not.
    _plain("container_colours", codec="mpeg4", colorspace=1, container_options={"movflags": "write_colr"}),
    _plain("fragmented", container_options={"movflags": "frag_keyframe+empty_moov"}),
    _plain("hevc", codec="libx265", codec_options=_H265),
    _plain("hevc_ten_bit", codec="libx265", pix_fmt="yuv420p10le", codec_options=_H265),
    _plain("av1", num_frames=40, codec="libsvtav1", codec_options={"preset": "12"}),
    _plain(
        "vp9_webm",
        codec="libvpx-vp9",
        container_format="webm",
        suffix=".webm",
        exact_times=False,
        codec_options={"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "16"},
    ),
    _plain(
        "vp8_webm",
        codec="libvpx",
        container_format="webm",
        suffix=".webm",
        exact_times=False,
        codec_options={"deadline": "good", "cpu-used": "5", "auto-alt-ref": "1", "lag-in-frames": "16", "b": "300k"},
    ),
    _plain("mpeg4_avi", codec="mpeg4", container_format="avi", suffix=".avi"),
    _plain(
        "mpeg4_avi_b_frames",
        codec="mpeg4",
        container_format="avi",
        suffix=".avi",
        codec_options={"bf": "2"},
        torchcodec="torchcodec 0.17 cannot decode its last frames",
    ),
    _plain("mkv", container_format="matroska", suffix=".mkv", exact_times=False),
    Clip(
        "mkv_without_cues",
        lambda: piped(75, "matroska"),
        list(range(75)),
        list(range(75)),
        suffix=".mkv",
        exact_times=False,
    ),
    _plain(
        "mpeg_ts",
        container_format="mpegts",
        suffix=".ts",
        torchcodec="torchcodec 0.17 loses the last frames of a transport stream",
    ),
    _plain(
        "mpeg2_ps",
        codec="mpeg2video",
        container_format="vob",
        suffix=".vob",
        torchcodec="torchcodec 0.17 gives several frames of a program stream the same time",
    ),
    Clip(
        "raw_h264",
        lambda: piped(75, "h264"),
        list(range(75)),
        list(range(75)),
        suffix=".h264",
        exact_times=False,
        notes="timestamps",
        torchcodec="torchcodec cannot seek in an elementary stream",
    ),
    _plain("one_frame", num_frames=1),
    _plain("two_frames", num_frames=2),
]
BY_NAME = {clip.name: clip for clip in CLIPS}
if MADE_BEFORE:
    CLIPS = [clip for clip in CLIPS if (Path(MADE_BEFORE) / clip.name).exists()]


def video_with_sound(
    out: Path,
    samples: np.ndarray,
    *,
    rate: int = 44_100,
    codec: str = "aac",
    fps: int = 10,
    sound_starts: float = 0.0,
    pause: tuple[float, float] | None = None,
) -> Path:
    """A numbered video as long as mono samples in -1..1, with these as its sound.

    The sound begins `sound_starts` seconds after the first frame; packets of a `pause`, in seconds, are left out.
    """
    with av.open(str(out), "w") as container:
        video = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "g": "10"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream(codec, rate=rate)
        sound.layout = "mono"  # type: ignore[attr-defined]
        packets = []
        for number in range(round(len(samples) / rate * fps)):
            image = av.VideoFrame.from_ndarray(numbered_frame(number, 64, 48), format="rgb24")
            image.pts, image.time_base = number, Fraction(1, fps)
            packets += video.encode(image)
        packets += video.encode(None)
        for begin in range(0, len(samples), 1024):
            piece = samples[None, begin : begin + 1024].astype(np.float32)
            heard = av.AudioFrame.from_ndarray(piece, format="fltp", layout="mono")
            heard.sample_rate, heard.time_base = rate, Fraction(1, rate)
            heard.pts = begin + round(sound_starts * rate)
            packets += sound.encode(heard)  # type: ignore[attr-defined]
        packets += sound.encode(None)  # type: ignore[attr-defined]
        packets.sort(key=lambda packet: packet.dts * packet.time_base)  # interleaved, as files are
        for packet in packets:
            at = float(packet.pts * packet.time_base)
            if packet.stream is sound and pause is not None and pause[0] <= at < pause[1]:
                continue
            container.mux(packet)
    return out


def click_at(*moments: float, seconds: float, rate: int = 44_100) -> np.ndarray:
    """Silence, with a click of half a millisecond at some moments, [n]."""
    samples = np.zeros(round(seconds * rate), dtype=np.float32)
    for moment in moments:
        samples[round(moment * rate) : round((moment + 0.0005) * rate)] = 0.9
    return samples
