"""An hour of video: memory stays bounded and the frames are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sosampler.bench.decode import join_packets
from sosampler.video.synthetic import numbered_video, read_number

CHUNK = 1500  # frames at 30 fps
REPEATS = 72

_MEASURE = """
import json, sys
import sosampler as so
from sosampler._util.environment import peak_memory_mb
from sosampler.video.synthetic import read_number
so.select(sys.argv[4], 2, policy="uniform")  # everything is imported and warm
before = peak_memory_mb()
sel = so.select(sys.argv[1], int(sys.argv[3]), policy="uniform", candidates=sys.argv[2])
grown = peak_memory_mb() - before
print(json.dumps({"grown_mb": grown, "numbers": [read_number(f) for f in sel.frames],
                  "indices": sel.frame_indices.tolist(), "total": sel.metadata.total_num_frames}))
"""


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hour")
    chunk = folder / "chunk.mp4"
    numbered_video(chunk, num_frames=CHUNK, gop=250)
    join_packets([chunk] * REPEATS, folder / "hour.mp4")
    return folder / "hour.mp4"


@pytest.mark.parametrize(("mode", "count"), [("exact", 32), ("keyframe", 256)])
def test_an_hour_in_bounded_memory(hour: Path, clip: Path, mode: str, count: int) -> None:
    command = [sys.executable, "-c", _MEASURE, str(hour), mode, str(count), str(clip)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    result = json.loads(done.stdout)
    assert result["total"] == CHUNK * REPEATS
    assert len(set(result["indices"])) == count
    assert result["numbers"] == [index % CHUNK for index in result["indices"]]
    assert 1 < result["grown_mb"] < 100  # the frames themselves are 2 to 18 MB


def test_reading_does_not_leak(hour: Path) -> None:
    """Files and memory are given back when a selection is done."""
    psutil = pytest.importorskip("psutil")
    import sosampler as so

    process = psutil.Process()
    for _ in range(5):
        so.select(hour, 4, candidates="keyframe", policy="uniform")
    files, memory = process.num_fds(), process.memory_info().rss
    for _ in range(40):
        sel = so.select(hour, 4, candidates="keyframe", threads=2, policy="uniform")
    assert sel.frames is not None
    assert read_number(sel.frames[0]) == sel.frame_indices[0] % CHUNK
    assert process.num_fds() <= files
    assert process.memory_info().rss - memory < 60 * 2**20
