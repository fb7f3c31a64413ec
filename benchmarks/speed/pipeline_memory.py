"""How much memory a pipeline takes: over many videos, and for a long one. In processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler.bench.decode import CHUNK_FRAMES, FPS, encode_chunk, join_packets
from sosampler.errors import SosamplerError

Say = Callable[[str], None]

_MANY = """
import json, sys, time
from itertools import islice
from pathlib import Path
import psutil, torch
import sosampler as so
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video
work, count, settled = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
videos = [work / f"small.{number}.mp4" for number in range(3)]
for video, (width, height) in zip(videos, [(96, 64), (64, 64), (64, 96)]):
    numbered_video(video, num_frames=12, width=width, height=height)
classifier = so.create_classifier("timm:test_resnet", num_classes=3, input_size=32)
sampler = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
pipe = so.Pipeline(sampler, classifier, num_candidates=6, num_frames=3, workers=2)
def used():
    me = psutil.Process()
    return sum(one.memory_info().rss for one in (me, *me.children(recursive=True))) / 2**20
begin = time.perf_counter()
results = pipe.stream((videos[number % 3] for number in range(count)), on_error="raise")
for _ in islice(results, settled): pass
before = most = used()
for number, _ in enumerate(results):
    if number % 250 == 0:
        most = max(most, used())
for video in videos: video.unlink()
print(json.dumps({"videos": count, "settled_after": settled, "mb_then": before, "most_mb_later": most,
                  "grown_mb": most - before, "videos_a_second": count / (time.perf_counter() - begin)}))
"""

_HOUR = """
import json, sys, time
import torch
import sosampler as so
from sosampler._util.environment import peak_memory_mb
from sosampler.samplers.sosampler import SOSampler
classifier = so.create_classifier("resnet50")
pipe = so.Pipeline(SOSampler().freeze(), classifier, num_candidates=256, num_frames=8, candidates="keyframe")
pipe(sys.argv[2])
before, begin = peak_memory_mb(), time.perf_counter()
chosen = pipe(sys.argv[1]).selection
print(json.dumps({"grown_mb": peak_memory_mb() - before, "seconds": time.perf_counter() - begin,
                  "decoding_seconds": chosen.timing["total"], "candidates": len(chosen.candidates),
                  "distinct": len(set(chosen.candidates.frame_indices.tolist())), "frames": len(chosen),
                  "height": chosen.metadata.height, "duration": chosen.metadata.duration}))
"""


def watch_many(work: Path, count: int) -> dict[str, Any]:
    """Measure memory of a pipeline and its decoding processes: after 500 small videos, and the maximum after that."""
    work.mkdir(parents=True, exist_ok=True)
    return _in_own_process(_MANY, str(work), str(count), str(min(500, count // 2)))


def watch_hour(clip: Path, work: Path, say: Say) -> dict[str, Any]:
    """Measure the growth of the process with 256 keyframe candidates of an hour of 1080p, and the time."""
    video, chunk = work / f"{clip.stem}.hour1080.mp4", work / f"{clip.stem}.hour1080.chunk.mp4"
    if not video.exists():
        say(f"encoding {video.name}")
        encode_chunk(clip, chunk, frames=CHUNK_FRAMES, keyframe_interval=250, width=1920, height=1080)
        with replacing(video) as temporary:
            join_packets([chunk] * (3600 * FPS // CHUNK_FRAMES), temporary)
        chunk.unlink()
    say(f"watching memory over {video.name}")
    return {"bytes": video.stat().st_size, **_in_own_process(_HOUR, str(video), str(clip))}


def _in_own_process(code: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SosamplerError(f"measuring memory in a process of its own failed: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
