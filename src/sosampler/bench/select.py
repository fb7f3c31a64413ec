"""Measure how long `select` takes: by kinds of candidates, against a bare loop, and against other tools.

The videos are those of `bench decode`: a natural clip, looped to five minutes of 720p, in three keyframe layouts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from sosampler._util.environment import circumstances
from sosampler.bench.decode import looped_videos
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.options import DEFAULT_NUM_FRAMES
from sosampler.inference.select import select
from sosampler.policies.learned import GENERAL_SIZE, general_sampler
from sosampler.video.limits import target_size

# Variants: how the result calls them.
AUTO, EXACT, KEYFRAME = "select", "select, exact candidates", "select, keyframe candidates"
AUTO_ALONE, BARE = "select, 1 thread", "bare PyAV loop and network, 1 thread"
PROCESS = "sosampler select"
THUMBNAIL, THUMBNAIL_KEYS = "ffmpeg thumbnail", "ffmpeg thumbnail, keyframes only"
SCENEDETECT, VIDEO_SAMPLER = "PySceneDetect", "video-sampler"

# Pairs that are compared, and how many times as fast the first must be, by keyframe layout; others are reported only.
_LAYOUTS = ("gop250", "default", "gop30")
_BARS: list[tuple[str, str, dict[str, float]]] = [
    (AUTO, EXACT, {"gop250": 6, "default": 6, "gop30": 2}),
    (AUTO, KEYFRAME, {}),
    (AUTO_ALONE, BARE, dict.fromkeys(_LAYOUTS, 1 / 1.3)),
    (PROCESS, THUMBNAIL, dict.fromkeys(_LAYOUTS, 1)),
    (PROCESS, THUMBNAIL_KEYS, {}),
    (PROCESS, SCENEDETECT, dict.fromkeys(_LAYOUTS, 1)),
    (PROCESS, VIDEO_SAMPLER, dict.fromkeys(_LAYOUTS, 1)),
]

_SCENES = "import sys; from scenedetect import ContentDetector, detect; detect(sys.argv[1], ContentDetector())"


def bench_select(
    clips: list[Path],
    *,
    work: Path,
    rounds: int = 3,
    peers: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every clip, looped to five minutes of 720p, in three keyframe layouts. Videos in `work` are reused.

    `peers`: a Python in whose environment PySceneDetect and video-sampler are installed.
    """
    result: dict[str, Any] = {
        "benchmark": "select",
        "what": f"seconds to choose {DEFAULT_NUM_FRAMES} frames of a 720p H.264 file of 8750 frames; the tools of "
        "others, and `sosampler select` beside them, as processes from their start on",
        **circumstances(("av", "onnxruntime", "numpy")),
        "peers": _peer_versions(peers),
        "rounds": rounds,
        "videos": [],
    }
    for video, clip, layout in looped_videos(clips, work, say):
        say(f"measuring {video.name}")
        chosen = select(video, DEFAULT_NUM_FRAMES)
        seconds, cpu_seconds = _timed(_variants(video, chosen, peers), rounds)
        result["videos"].append(
            {
                "clip": clip.name,
                "layout": layout,
                "bytes": video.stat().st_size,
                "num_keyframes": chosen.metadata.num_keyframes,
                "num_candidates": chosen.num_candidates,
                "largest_move_seconds": float(np.abs(chosen.candidates.moved_seconds).max()),
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "comparisons": _compared(seconds, cpu_seconds, layout),
            }
        )
    return result


def _variants(video: Path, chosen: Any, peers: Path | None) -> dict[str, Callable[[], Any]]:
    variants: dict[str, Callable[[], Any]] = {
        AUTO: partial(select, video, DEFAULT_NUM_FRAMES),
        EXACT: partial(select, video, DEFAULT_NUM_FRAMES, candidates="exact"),
        KEYFRAME: partial(select, video, DEFAULT_NUM_FRAMES, candidates="keyframe"),
        AUTO_ALONE: partial(select, video, DEFAULT_NUM_FRAMES, threads=1),
        BARE: partial(bare_loop, video, chosen.candidates.pts_seconds.tolist()),
        PROCESS: partial(
            _run, [sys.executable, "-m", "sosampler", "select", str(video), "-n", str(DEFAULT_NUM_FRAMES)]
        ),
    }
    if ffmpeg := shutil.which("ffmpeg"):
        every = chosen.metadata.total_num_frames // DEFAULT_NUM_FRAMES
        every_key = max(2, chosen.metadata.num_keyframes // DEFAULT_NUM_FRAMES)
        variants[THUMBNAIL] = partial(_run, thumbnail_command(ffmpeg, video, every))
        variants[THUMBNAIL_KEYS] = partial(_run, thumbnail_command(ffmpeg, video, every_key, "-skip_frame", "nokey"))
    if peers is not None:
        variants[SCENEDETECT] = partial(_run, [str(peers), "-c", _SCENES, str(video)])
        variants[VIDEO_SAMPLER] = partial(_run_video_sampler, peers, video)
    return variants


def bare_loop(video: Path, pts_seconds: list[float]) -> Any:
    """Decode and shrink the frames at these times as one would by hand, and run the network of `general` on them."""
    sampler, reformatter, small = general_sampler(), VideoReformatter(), []
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        assert stream.time_base is not None
        for seconds in pts_seconds:
            ticks = round(Fraction(seconds) / stream.time_base)
            container.seek(ticks, stream=stream)
            frame = next(each for each in container.decode(stream) if each.pts is not None and each.pts >= ticks)
            width, height = target_size(frame.width, frame.height, GENERAL_SIZE)
            shrunk = reformatter.reformat(
                frame, width=width, height=height, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1
            )
            left, top = (width - GENERAL_SIZE) // 2, (height - GENERAL_SIZE) // 2
            small.append(shrunk.to_ndarray()[top : top + GENERAL_SIZE, left : left + GENERAL_SIZE])
    return sampler.run_network(np.ascontiguousarray(np.stack(small).transpose(0, 3, 1, 2))[None])


def thumbnail_command(ffmpeg: str, video: Path, every: int, *before: str) -> list[str]:
    """Return the command that finds one frame of every so many; on small frames, since the filter holds them all."""
    chain = f"scale=-2:{GENERAL_SIZE},thumbnail=n={every}"
    return [ffmpeg, "-v", "error", *before, "-i", str(video), "-an", "-vf", chain, "-f", "null", "-"]


def _run_video_sampler(peers: Path, video: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sosampler-bench-") as folder:
        _run([str(peers.with_name("video_sampler")), "hash", str(video), folder])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SosamplerError(f"{Path(command[0]).name} failed on a video: {done.stderr.strip()[-300:]}")


def _peer_versions(peers: Path | None) -> dict[str, str]:
    """Return the versions of the other tools; raise where `peers` lacks them."""
    versions = {}
    if ffmpeg := shutil.which("ffmpeg"):
        answer = subprocess.run([ffmpeg, "-version"], capture_output=True, text=True, check=True).stdout
        versions["ffmpeg"] = answer.split()[2]
    if peers is not None:
        script = "from importlib.metadata import version; print(version('scenedetect'), version('video-sampler'))"
        try:
            done = subprocess.run([str(peers), "-c", script], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InvalidArgument(
                f"--peers {peers} must be a Python with PySceneDetect and video-sampler; install both there, or leave "
                f"it out ({error})"
            ) from error
        versions |= zip((SCENEDETECT, VIDEO_SAMPLER), done.stdout.split(), strict=True)
    return versions


def _timed(
    variants: dict[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each variant in each round, and those of the CPU, its processes included.

    They take turns. One more round before, without the tools that decode everything, warms the file cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            if not number and name in (THUMBNAIL, SCENEDETECT):
                continue
            began, busy = time.perf_counter(), sum(os.times()[:4])
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(sum(os.times()[:4]) - busy)
    return seconds, cpu_seconds


def _compared(
    seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]], layout: str
) -> list[dict[str, Any]]:
    rows = []
    for way, reference, bars in _BARS:
        if reference not in seconds:
            continue
        ratios = sorted(b / a for a, b in zip(seconds[way], seconds[reference], strict=True))
        cpu_ratio = statistics.median(cpu_seconds[reference]) / max(statistics.median(cpu_seconds[way]), 1e-9)
        bar, ratio = bars.get(layout), statistics.median(ratios)
        rows.append(
            {
                "way": way,
                "reference": reference,
                "times_faster": ratio,
                "times_faster_by_round": [ratios[0], ratios[-1]],
                "times_less_cpu": cpu_ratio,
                "bar": bar,
                "met": None if bar is None else ratio >= bar and (way != PROCESS or cpu_ratio >= bar),
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the ratios as text."""
    line = "{:<26}{:<9}{:<18}{:<38}{:>13}{:>10}{:>8}".format
    lines = [line("clip", "layout", "variant", "reference", "times faster", "less CPU", "bar")]
    for video in result["videos"]:
        for row in video["comparisons"]:
            bar = "" if row["bar"] is None else f"{row['bar']:.2f}" + ("" if row["met"] else " no")
            ratio, cpu = f"{row['times_faster']:.2f}", f"{row['times_less_cpu']:.2f}"
            lines.append(line(video["clip"], video["layout"], row["way"], row["reference"], ratio, cpu, bar))
    return "\n".join(lines)
