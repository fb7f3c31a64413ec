"""Memory and bfloat16 of the machine, and the benchmark of the engine."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import sosampler as so
from benchmarks.speed.frame_engine import REFERENCE, bench_sampler, table
from benchmarks.speed.frames import agreement, eager_way, lively_sampler, picture_frames, smooth_frames
from benchmarks.speed.in_processes import in_turns_of_processes
from sosampler._util import hardware
from sosampler.engine.frame_engine import FrameEngine
from sosampler.errors import InvalidArgument
from tests.engine.variants import bad_way, dying_way, good_way


def test_memory_is_kept_with_glibc_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.keep_memory.cache_clear()
    monkeypatch.setenv(hardware.KEEP, "0")
    assert hardware.keep_memory() is False
    hardware.keep_memory.cache_clear()
    monkeypatch.delenv(hardware.KEEP)
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert hardware.keep_memory() is False
    hardware.keep_memory.cache_clear()


class Trial:
    """Stands in for a child process that tries bfloat16."""

    def __init__(self, returncode: int, stdout: str = "") -> None:
        self.returncode, self.stdout = returncode, stdout


def forget_trials() -> None:
    for function in (hardware.bfloat16_gain, hardware.cpu_is_fast_in_bfloat16):
        function.cache_clear()
    hardware.bfloat16_crashes.cache_clear()


TRIALS = [
    (Trial(-4), False),
    (Trial(0, "1.1\n"), False),
    (Trial(0, "2.9\n"), True),
    (Trial(0, "onednn_verbose,v1,primitive,exec,cpu,reorder,0.05\n2.9\n"), True),
]


@pytest.mark.parametrize(("trial", "good"), TRIALS)
def test_bfloat16_on_the_cpu_is_tried(monkeypatch: pytest.MonkeyPatch, trial: Trial, good: bool, tmp_path: Any) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags: avx512f amx_bf16\n")
    monkeypatch.delenv(hardware.BFLOAT16_VARIABLE, raising=False)
    monkeypatch.setattr(hardware, "_PROC", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: trial)
    try:
        forget_trials()
        assert hardware.cpu_is_fast_in_bfloat16() is good
        assert hardware.bfloat16_crashes() is (trial.returncode != 0)
        if trial.returncode:
            with pytest.raises(InvalidArgument, match="ends the process"):
                FrameEngine(lively_sampler(input_size=32), num_frames=2, precision="bfloat16")
        flags.write_text("flags: avx2\n")
        forget_trials()
        assert hardware.cpu_is_fast_in_bfloat16() is False
        assert hardware.bfloat16_crashes() is False
        monkeypatch.setenv(hardware.BFLOAT16_VARIABLE, "1")
        forget_trials()
        assert hardware.cpu_is_fast_in_bfloat16() is True
    finally:
        forget_trials()


# ---- benchmarks


def test_ways_in_processes() -> None:
    ways = {"good": (good_way, 3), "bad": (bad_way, 0), "dying": (dying_way, 0)}
    seconds, facts, failed = in_turns_of_processes(ways, rounds=2, repeats=2)
    assert list(seconds) == ["good"]
    assert len(seconds["good"]) == 2
    assert facts == {"good": {"number": 3}}
    assert failed == {"bad": "ValueError: cannot be built", "dying": "its process ended with code 7"}


def test_the_reference_is_sampler_and_classifier() -> None:
    """At sizes that need no resize, the reference code agrees with sampler and classifier."""
    sampler = lively_sampler(input_size=64)
    torch.manual_seed(0)
    classifier = so.create_classifier("timm:resnet18", num_classes=3, input_size=64)
    classifier.preprocessing = replace(classifier.preprocessing, resize=64)
    frames = smooth_frames(2, 5, (64, 64)).movedim(-1, -3).contiguous()
    chosen = sampler.choose(frames, 2)
    expected = classifier.clip_probs(torch.stack([frames[video, chosen[video]] for video in range(2)]))
    assert torch.allclose(eager_way(sampler, classifier, 2)(frames), expected, atol=1e-5)
    assert torch.allclose(eager_way(sampler, classifier, 2, one_at_a_time=True)(frames), expected, atol=1e-5)
    half = eager_way(sampler, classifier, 2, autocast=True)(frames)  # last: weights become channels-last
    assert half.dtype == torch.float32
    assert torch.allclose(half.sum(1), torch.ones(2), atol=1e-3)


def test_pictures_as_frames(tmp_path: Any) -> None:
    for number in range(3):
        Image.fromarray(np.full((9, 7, 3), 50 * number, np.uint8)).save(tmp_path / f"{number}.png")
    frames = picture_frames(tmp_path, 2, 4, (16, 20))
    assert frames.shape == (2, 4, 16, 20, 3)
    assert sorted(frames.flatten().unique().tolist()) == [0, 50, 100]
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidArgument, match="no pictures"):
        picture_frames(tmp_path / "none", 1, 1, (4, 4))


def test_agreement_counts_videos_and_frames() -> None:
    sampler = lively_sampler(input_size=32)
    frames = smooth_frames(4, 6, (32, 32))

    class Engine:
        def run(self, given: Tensor) -> Any:
            chosen = sampler.choose(given.movedim(-1, -3), 2)
            chosen[0] = torch.tensor([5, 5])  # one of each batch is wrong
            return type("Result", (), {"chosen": chosen})

    chosen = sampler.choose(frames.movedim(-1, -3), 2)
    shared = [1.0, 1.0] + [float((chosen[wrong] == 5).any()) / 2 for wrong in (0, 2)]
    assert agreement(Engine(), sampler, frames, 2, batch=2) == (0.5, sum(shared) / 4)
    assert agreement(FrameEngine(sampler, num_frames=2, precision="float32"), sampler, frames, 2) == (1.0, 1.0)


@pytest.mark.slow
def test_bench_sampler() -> None:
    ways = ["engine", "engine, int8"]
    result = bench_sampler(classifier="timm:test_resnet", batches=(1,), size=(64, 80), rounds=1, videos=2, ways=ways)
    (row,) = result["batches"]
    assert set(row["videos_per_second"]) == {REFERENCE, *ways}
    assert row["failed"] == {}
    assert [row["facts"][way]["same_frames_chosen"] for way in ways] == [1.0, 1.0]
    assert [row["facts"][way]["frames_in_common"] for way in ways] == [1.0, 1.0]
    assert "int8" in row["facts"]["engine, int8"]["engine"]
    assert row["baselines"] == {"eager": pytest.approx(row["comparisons"][0]["times_faster"])}
    assert "videos/s" in table(result)
