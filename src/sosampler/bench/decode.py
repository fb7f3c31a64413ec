"""Measure how fast candidates are decoded: keyframe and exact ones, against torchcodec.

A natural clip is looped to minutes and encoded anew with a known keyframe layout.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np

from sosampler._util.environment import circumstances, compare, in_turns
from sosampler._util.files import replacing
from sosampler.errors import SosamplerError, VideoError
from sosampler.video.candidates import keyframe_positions, segment_centres
from sosampler.video.reader import FrameBatch
from sosampler.video.source import open_video

FPS = 30
# A chunk that holds a whole number of 250- and of 30-frame groups is encoded once and repeated packet by packet without
# a keyframe out of place, so that minutes of video cost the encoding of seconds. The shorter tail makes 8750 frames of
# all: of 9000, the centres of 6 and of 10 segments would always be keyframes, unlike in real videos.
CHUNK_FRAMES, CHUNK_REPEATS, TAIL_FRAMES = 1500, 5, 1250

# Distance of keyframes for x264. None leaves its own choice: at most 250 frames apart, and at scene cuts.
KEYFRAME_LAYOUTS: dict[str, int | None] = {"gop250": 250, "default": None, "gop30": 30}


def looped_video(clip: Path, out: Path, *, keyframe_interval: int | None) -> Path:
    """Write `clip`, looped to 8750 frames (4:52) of 720p at 30 fps, as H.264 (x264 preset medium, crf 23) to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    chunk, tail = out.with_name(f"{out.stem}.chunk.mp4"), out.with_name(f"{out.stem}.tail.mp4")
    try:
        for part, frames in ((chunk, CHUNK_FRAMES), (tail, TAIL_FRAMES)):
            encode_chunk(clip, part, frames=frames, keyframe_interval=keyframe_interval)
        with replacing(out) as temporary:
            join_packets([chunk] * CHUNK_REPEATS + [tail], temporary)
    finally:
        chunk.unlink(missing_ok=True)
        tail.unlink(missing_ok=True)
    return out


def encode_chunk(
    clip: Path, out: Path, *, frames: int, keyframe_interval: int | None, width: int = 1280, height: int = 720
) -> None:
    options = {"preset": "medium", "crf": "23"}
    if keyframe_interval is not None:
        options["x264-params"] = f"keyint={keyframe_interval}:min-keyint={keyframe_interval}:scenecut=0"
    with av.open(str(out), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number, frame in enumerate(itertools.islice(_frames_forever(clip), frames)):
            resized = frame.reformat(width=width, height=height, format="yuv420p", interpolation="BICUBIC")
            resized.pts, resized.time_base, resized.pict_type = number, Fraction(1, FPS), 0
            container.mux(stream.encode(resized))
        container.mux(stream.encode(None))


def _frames_forever(clip: Path) -> Iterator:  # yields av.VideoFrame
    while True:
        frames_before = 0
        with av.open(str(clip)) as container:
            for frame in container.decode(video=0):
                frames_before += 1
                yield frame
        if not frames_before:
            raise VideoError(f"{clip}: no frame could be decoded; give a video that plays")


def join_packets(parts: list[Path], out: Path) -> None:
    """Concatenate videos of the same encoding without encoding again."""
    with av.open(str(parts[0])) as first, av.open(str(out), "w") as container:
        copy = container.add_stream_from_template(first.streams.video[0])
        offset = 0  # ticks
        for part in parts:
            with av.open(str(part)) as source:
                stream = source.streams.video[0]
                assert stream.time_base is not None
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue  # the empty packet that ends the stream
                    packet.pts += offset
                    packet.dts += offset
                    packet.stream = copy
                    container.mux(packet)
                offset += round(stream.frames / FPS / stream.time_base)


# Pairs that are compared, and the required ratio by keyframe layout; others are reported only.
_BARS: list[tuple[str, str, dict[str, float]]] = [
    ("keyframe T=32", "torchcodec exact T=32", {"gop250": 20, "default": 15, "gop30": 4}),
    ("keyframe T=32", "torchcodec same keyframes T=32, approximate", {}),
    ("keyframe T=32", "torchcodec same keyframes T=32, exact", {}),
    ("exact T=32", "torchcodec exact T=32", {"gop250": 1, "default": 1, "gop30": 1}),
    ("keyframe T=10", "torchcodec exact N=6", {}),
    ("keyframe T=10, 2 threads", "torchcodec exact N=6", {"gop30": 1}),
    ("keyframe T=10, 2 threads", "torchcodec exact N=6, 2 threads", {"gop30": 1}),
    ("exact T=32, 2 threads", "torchcodec exact T=32, 2 threads", {}),
    ("exact T=32, 2 threads", "exact T=32", {}),
    ("keyframe T=32, 2 threads", "keyframe T=32", {}),
]


def read_exact(video: Path, count: int, threads: int) -> FrameBatch:
    with closing(open_video(video, threads=threads)) as reader:
        return reader.read(segment_centres(reader.total_num_frames, count))


def read_keyframes(video: Path, count: int, threads: int) -> FrameBatch:
    with closing(open_video(video, threads=threads)) as reader:
        centres = segment_centres(reader.total_num_frames, count)
        frames, _ = reader.locate_keyframes(keyframe_positions(centres, reader.keyframe_indices()))
        return reader.read(frames)


def read_torchcodec(video: Path, count: int, threads: int, seek_mode: Literal["exact", "approximate"] = "exact") -> Any:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(video, seek_mode=seek_mode, num_ffmpeg_threads=threads, dimension_order="NHWC")
    return decoder.get_frames_at(segment_centres(len(decoder), count).tolist())


def read_torchcodec_indices(video: Path, indices: list[int], seek_mode: Literal["exact", "approximate"]) -> Any:
    """Read given frames; where they are in the file is not searched, only read."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(video, seek_mode=seek_mode, num_ffmpeg_threads=1, dimension_order="NHWC")
    return decoder.get_frames_at(indices)


def _variants(video: Path) -> dict[str, Callable[[], Any]]:
    keyframes = read_keyframes(video, 32, 1).frame_indices.tolist()
    variants: dict[str, Callable[[], Any]] = {
        "torchcodec same keyframes T=32, approximate": lambda: read_torchcodec_indices(video, keyframes, "approximate"),
        "torchcodec same keyframes T=32, exact": lambda: read_torchcodec_indices(video, keyframes, "exact"),
    }
    for name, read, count in (
        ("torchcodec exact T=32", read_torchcodec, 32),
        ("exact T=32", read_exact, 32),
        ("keyframe T=32", read_keyframes, 32),
        ("torchcodec exact N=6", read_torchcodec, 6),
        ("keyframe T=10", read_keyframes, 10),
    ):
        variants |= {name: partial(read, video, count, 1), f"{name}, 2 threads": partial(read, video, count, 2)}
    return variants


def bench_decode(
    clips: list[Path], *, work: Path, rounds: int = 3, hour: bool = True, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure every clip, looped to five minutes of 720p, in three keyframe layouts. Videos in `work` are reused."""
    from sosampler.video.torchcodec_reader import import_decoders

    import_decoders()
    result: dict[str, Any] = {
        "benchmark": "decode",
        "what": "seconds to open a 720p H.264 file of 8750 frames and have T frames as RGB arrays in full size",
        **circumstances(("av", "torchcodec", "torch", "numpy")),
        "rounds": rounds,
        "videos": [],
    }
    for video, clip, layout in looped_videos(clips, work, say):
        say(f"measuring {video.name}")
        ours, theirs = read_exact(video, 32, 1), read_torchcodec(video, 32, 1)
        difference = int(np.abs(ours.frames.astype(np.int16) - theirs.data.numpy()).max())
        keyframes = read_keyframes(video, 32, 1)
        with closing(open_video(video)) as reader:
            num_keyframes = len(reader.keyframe_indices())
        seconds = in_turns(_variants(video), rounds=rounds)
        result["videos"].append(
            {
                "clip": clip.name,
                "layout": layout,
                "bytes": video.stat().st_size,
                "num_keyframes": num_keyframes,
                "largest_pixel_difference_of_exact_frames_to_torchcodec": difference,
                "same_times_as_torchcodec": bool((ours.pts_seconds == theirs.pts_seconds.numpy()).all()),
                "distinct_keyframes_of_32": len(np.unique(keyframes.frame_indices)),
                "seconds": seconds,
                "comparisons": list(_compared(seconds, layout)),
            }
        )
    if hour:
        result["hour"] = bench_hour(clips[0], work=work, say=say)
    return result


def _compared(seconds: dict[str, list[float]], layout: str) -> Iterator[dict[str, Any]]:
    same = [reference for _, reference, _ in _BARS if "same keyframes" in reference]
    for variant, reference, bars in _BARS:
        row = compare(seconds, way=variant, reference=reference)
        bar = bars.get(layout)
        row |= {"bar": bar, "met": None if bar is None else row["times_faster"] >= bar}
        if (variant, reference) == ("keyframe T=32", "torchcodec exact T=32"):
            ratios = [compare(seconds, way=variant, reference=other)["times_faster"] for other in same]
            row["torchcodec_same_keyframes"] = ratios  # approximate, exact
        yield row


def looped_videos(clips: list[Path], work: Path, say: Callable[[str], None]) -> Iterator[tuple[Path, Path, str]]:
    for clip in clips:
        for layout, interval in KEYFRAME_LAYOUTS.items():
            video = work / f"{clip.stem}.{layout}.mp4"
            if not video.exists():
                say(f"encoding {video.name}")
                looped_video(clip, video, keyframe_interval=interval)
            yield video, clip, layout


# Runs in a process of its own, so that the peak is of this reading alone.
_PEAK = """
import json, sys
from pathlib import Path
import numpy, av, sosampler.bench.decode as bench, sosampler.video.pyav_reader
from sosampler._util.environment import peak_memory_mb
before = peak_memory_mb()
batch = getattr(bench, sys.argv[2])(Path(sys.argv[1]), int(sys.argv[3]), 1)
grown = peak_memory_mb() - before
print(json.dumps({"grown_mb": grown, "frames_mb": batch.frames.nbytes / 2**20, "frames": len(batch)}))
"""


def bench_hour(clip: Path, *, work: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure by how much the process grows while it reads frames of a one-hour video."""
    video = work / f"{clip.stem}.hour.mp4"
    if not video.exists():
        say(f"encoding {video.name}")
        chunk = work / f"{clip.stem}.hour.chunk.mp4"
        encode_chunk(clip, chunk, frames=CHUNK_FRAMES, keyframe_interval=None)
        with replacing(video) as temporary:
            join_packets([chunk] * (3600 * FPS // CHUNK_FRAMES), temporary)
        chunk.unlink()
    rows = []
    for function, count in (("read_exact", 32), ("read_keyframes", 32), ("read_keyframes", 100)):
        say(f"measuring {video.name}: {function} {count}")
        command = [sys.executable, "-c", _PEAK, str(video), function, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SosamplerError(f"reading {video} in a process of its own failed: {done.stderr.strip()[-300:]}")
        rows.append({"what": function, "candidates": count, **json.loads(done.stdout)})
    return {"seconds": 3600, "bytes": video.stat().st_size, "bar_grown_mb": 500, "rows": rows}


def ratio_lines(videos: list[dict[str, Any]]) -> list[str]:
    """Return a header and every comparison of every video as text."""
    rows = [("clip", "keyframes", "variant", "reference", "times faster")]
    for video in videos:
        for row in video["comparisons"]:
            rows.append((video["clip"], video["layout"], row["way"], row["reference"], f"{row['times_faster']:.2f}"))
    return [
        f"{clip:<34}{layout:<11}{variant:<32}{reference:<46}{ratio:>12}"
        for clip, layout, variant, reference, ratio in rows
    ]


def table(result: dict[str, Any]) -> str:
    """Return the ratios as text."""
    lines = ratio_lines(result["videos"])
    for row in result.get("hour", {}).get("rows", []):
        lines.append(
            f"one hour, {row['what']} {row['candidates']}: memory grew by {row['grown_mb']:.0f} MB, "
            f"{row['frames_mb']:.0f} MB of it the frames"
        )
    return "\n".join(lines)
