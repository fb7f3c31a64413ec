"""Memory of a pipeline: the same for ten thousand videos as for five hundred, and bounded for an hour of video."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import sosampler as so
from sosampler.bench.decode import join_packets
from sosampler.inference.pipeline import Pipeline, Prediction
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video

MB = 2**20


def memory_mb() -> float:
    """Of this process and those that decode for it."""
    process = psutil.Process()
    return float(sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))) / MB


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    torch.manual_seed(0)
    sampler = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
    net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
    classifier = so.wrap_classifier(net, input_size=32, layout="BCHW", class_names=["a", "b", "c"])
    return Pipeline(sampler, classifier, num_candidates=4, num_frames=2, workers=2)


def videos_in(folder: Path, *, scale: int) -> list[Path]:
    """Of several sizes, so that slots grow and shrink; the last is broken."""
    for number, (width, height) in enumerate([(64, 48), (96, 64), (48, 64)]):
        numbered_video(folder / f"{number}.mp4", num_frames=6, width=scale * width, height=scale * height)
    (folder / "3.mp4").write_bytes(b"broken" * 10)
    return [folder / f"{number}.mp4" for number in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return videos_in(tmp_path_factory.mktemp("tiny"), scale=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The candidates of one take about a megabyte, so that keeping them would show at once."""
    return videos_in(tmp_path_factory.mktemp("small"), scale=5)


def growth(pipe: Pipeline, tiny: list[Path], *, videos: int, settled: int) -> float:
    """By how many MB the most that is used later exceeds what is used after `settled` videos."""
    results = pipe.stream(tiny[number % len(tiny)] for number in range(videos))
    good = sum(isinstance(result, Prediction) for result in islice(results, settled))
    before = most = memory_mb()
    for number, result in enumerate(results):
        good += isinstance(result, Prediction)
        if number % 100 == 0:
            most = max(most, memory_mb())
    assert good == videos * 3 // 4
    return most - before


def test_hundreds_of_videos(pipe: Pipeline, small: list[Path]) -> None:
    assert growth(pipe, small, videos=400, settled=200) < 24  # of about 150 that their candidates take


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_videos(pipe: Pipeline, tiny: list[Path]) -> None:
    grown = growth(pipe, tiny, videos=10_000, settled=500)
    assert grown < 16


_LONG = """
import json, sys, time
import torch
import sosampler as so
from sosampler._util.environment import peak_memory_mb
torch.manual_seed(0)
classifier = so.create_classifier("timm:test_resnet", num_classes=3, input_size=64)
sampler = so.SOSampler().freeze()
pipe = so.Pipeline(sampler, classifier, num_candidates=256, num_frames=8, candidates="keyframe", workers=2)
pipe(sys.argv[2])  # everything is imported and warm
before, begin = peak_memory_mb(), time.perf_counter()
results = [pipe(sys.argv[1])] if sys.argv[3] == "one" else list(pipe.stream([sys.argv[1]] * 14))
took, grown = time.perf_counter() - begin, peak_memory_mb() - before
chosen = results[-1].selection
print(json.dumps({"grown_mb": grown, "seconds": took, "results": len(results), "offered": len(chosen.candidates),
                  "distinct": len(set(chosen.candidates.frame_indices.tolist())),
                  "frames": chosen.metadata.total_num_frames, "height": chosen.metadata.height}))
"""
CHUNK, REPEATS = 250, 432


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An hour of 1080p at 30 frames a second, a keyframe every 250."""
    folder = tmp_path_factory.mktemp("hour")
    numbered_video(folder / "chunk.mp4", num_frames=CHUNK, width=1920, height=1080, gop=CHUNK)
    join_packets([folder / "chunk.mp4"] * REPEATS, folder / "hour.mp4")
    return folder / "hour.mp4"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["one", "many"])
def test_an_hour_of_1080p(hour: Path, clip: Path, how: str) -> None:
    """256 candidates are 90 MB in the size in which they are looked at; of many videos few are held at a time."""
    command = [sys.executable, "-c", _LONG, str(hour), str(clip), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    told = json.loads(done.stdout)
    assert (told["frames"], told["height"]) == (CHUNK * REPEATS, 1080)
    assert told["offered"] == told["distinct"] == 256
    assert told["results"] == (1 if how == "one" else 14)
    assert 50 < told["grown_mb"] < 600
