"""How many videos a second are told: what is run for it, and how."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sosampler as so
from sosampler.paper import throughput
from sosampler.paper.plan import Request
from tests.factories import TINY


def test_speed_is_told_as_a_ratio_to_uniform() -> None:
    ways = {"uniform": lambda: time.sleep(0.01), "slow": lambda: time.sleep(0.04)}
    found = throughput.measure(ways, 8, rounds=3)
    assert found["uniform"]["times_uniform"] == 1.0
    assert 0.1 < found["slow"]["times_uniform"] < 0.5
    assert found["slow"]["videos_per_second"] < 8 / 0.04


class Counting:
    """A classifier, sampler and light network that write down what they are shown."""

    def __init__(self) -> None:
        self.clips: list[torch.Tensor] = []
        self.glances: list[int] = []

    def clip_probs(self, frames: torch.Tensor) -> None:
        self.clips.append(frames[:, :, 0, 0, 0])

    def choose(self, frames: torch.Tensor, num_frames: int) -> torch.Tensor:
        return torch.arange(frames.shape[1] - num_frames, frames.shape[1]).expand(len(frames), -1)

    def look(self, frames: torch.Tensor) -> None:
        assert frames.shape[1] == 1, "each by itself"
        self.glances.append(len(frames))


@pytest.mark.parametrize("given", ["sampler", "features", "weights"])
def test_the_light_network_is_as_precise_as_the_classifier(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sosampler.baselines import base as lights

    sampler = so.SOSampler(backbone=TINY, shift=0, input_size=32)
    monkeypatch.setattr(lights, "light_network", lambda weights, input_size: sampler)
    classifier = SimpleNamespace(precision="float16", device=torch.device("cpu"))
    more: dict[str, Any] = {"sampler": {"light": sampler}, "features": {"light": "x"}, "weights": {"weights": "x"}}
    found = throughput.light_network_of(Request(Path("out"), (0,), **more[given]), classifier)
    assert (None if found is None else found.precision) == (None if given == "features" else "float16")
    if given == "sampler":
        assert sampler.precision == "float32", "trainings are told apart by what it computes in"


def test_ways_show_the_classifier_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.arange(3 * 8, dtype=torch.uint8).reshape(3, 8, 1, 1, 1).expand(-1, -1, 3, 2, 2)
    seen = Counting()
    throughput.clip_run(seen, frames, lambda part: torch.tensor([2, 6]).expand(len(part), -1), batch=2)()
    assert torch.cat(seen.clips).tolist() == [[2, 6], [10, 14], [18, 22]]
    assert [len(clip) for clip in seen.clips] == [2, 1]
    seen = Counting()
    throughput.clip_run(seen, frames, lambda part: seen.choose(part, 2), batch=2)()
    assert torch.cat(seen.clips).tolist() == [[6, 7], [14, 15], [22, 23]]

    from sosampler.baselines import base

    heavy = torch.zeros(3, 8, dtype=torch.bool)
    heavy[0, [1, 5]] = heavy[1, 0] = heavy[2, 7] = True
    light = torch.zeros_like(heavy)
    light[:, :4] = True
    views = SimpleNamespace(some=lambda rows: rows)
    monkeypatch.setattr(
        base,
        "predict",
        lambda system, rows: base.BaselineOutput(
            torch.zeros(len(rows), 2), {"heavy": heavy[rows], "light": light[rows]}
        ),
    )
    seen = Counting()
    throughput.baseline_run(None, views, seen, {"light": seen}, frames, batch=2)()
    batches = [clip.flatten().tolist() for clip in seen.clips]
    assert batches == [[1, 8], [5], [23]], "a frame of every video of the batch, then the next of those that go on"
    assert all(clip.shape[1] == 1 for clip in seen.clips)
    assert seen.glances == [8, 4]
