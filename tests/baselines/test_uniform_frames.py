"""A baseline's own layers on evenly spread frames: what its search is compared with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sosampler.baselines.base import Baseline, UniformFrames, Views
from sosampler.baselines.frameexit import FrameExit
from sosampler.baselines.liteeval import LiteEval
from sosampler.baselines.marl import MARL
from sosampler.baselines.registry import create_baseline
from sosampler.policies.positional import uniform
from tests.factories import on_heavy_features, replaced, two_sets, with_sets_of

SETTINGS: dict[str, dict[str, Any]] = {
    "frameexit": {"max_frames": 6, "neck_width": 8, "gate_widths": [4, 2]},
    "liteeval": {"light_width": 3, "coarse_width": 4, "fine_width": 8},
    "adaframe": {"light_width": 3, "hidden": 8, "width": 4, "memory_frames": 8, "search_memory": True},
    "marl": {"hidden": 8, "width": 4},
    "ar-net": {"light_width": 3, "r34_width": 3, "r18_width": 3, "hidden": 8},
    "listen-to-look": {"light_width": 3, "hidden": 8, "width": 4},
}


def lively(name: str) -> Baseline:
    torch.manual_seed(0)
    system = create_baseline(name, heavy_width=5, num_classes=4, **SETTINGS[name])
    for weight in system.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return system.eval()


def random_views(videos: int = 12, candidates: int = 8) -> Views:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(videos, candidates, 5, generator=generator)
    light = torch.randn(videos, candidates, 3, generator=generator)
    counts = torch.randint(1, candidates + 1, (videos, 1), generator=generator)
    return two_sets(heavy, light, torch.arange(candidates) < counts)


@pytest.mark.parametrize("name", on_heavy_features())
@pytest.mark.parametrize("num_frames", [1, 3, 8])
def test_sees_the_frames_of_the_policy_uniform_and_no_others(name: str, num_frames: int) -> None:
    system, views = UniformFrames(lively(name), num_frames), with_sets_of(name, random_views())
    output = system.run(views)
    assert system.feature_sets == lively(name).feature_sets  # by which `evaluate` finds its features
    for video, count in enumerate(views.real.sum(1).tolist()):
        wanted = uniform(count, num_frames).tolist() if count > num_frames else list(range(count))
        assert output.seen_heavy[video].nonzero()[:, 0].tolist() == wanted
    unseen = {one: ~output.seen_in(one)[:, :, None] for one in views.sets}
    poisoned = replaced(views, **{one: views[one].masked_fill(unseen[one], math.nan) for one in views.sets})
    assert torch.equal(system.run(poisoned).probabilities, output.probabilities)
    assert torch.allclose(output.probabilities.sum(1), torch.ones(12), atol=1e-5)


@pytest.mark.parametrize("name", on_heavy_features())
def test_costs_are_those_of_the_layers_that_run(name: str) -> None:
    system = UniformFrames(lively(name), 3)
    views = with_sets_of(name, replace(random_views().some(torch.arange(1)), mask=None))
    with FlopCounterMode(display=False) as counter:
        output = system.run(views)
    assert float(system.own_gmacs(output)[0]) == pytest.approx(counter.get_total_flops() / 2 / 1e9)
    # Where all frames are seen, deciding is all that is saved.
    every = lively(name).run(views)._replace(seen={"heavy": views.real, "light": output.seen_light})
    every = every if every.steps is None else every._replace(steps=torch.tensor([8]))
    assert float(UniformFrames(lively(name), 8).own_gmacs(UniformFrames(lively(name), 8).run(views))[0]) < float(
        lively(name).own_gmacs(every)[0]
    )


def by_hand(system: Baseline, heavy: Tensor, light: Tensor, seen: list[int]) -> Tensor:
    """Return the logits or probabilities of one video, [C]."""
    if isinstance(system, FrameExit):
        return system.classifiers[len(seen) - 1](system.neck(heavy[seen]).amax(0))
    if isinstance(system, MARL):
        return system.classify(heavy[seen]).softmax(-1).mean(0).log()
    assert isinstance(system, LiteEval)
    coarse = fine = None
    for step in range(len(heavy)):
        coarse = system.coarse(light[step], coarse)
        if step in seen:
            fine = system.fine(torch.cat([heavy[step], light[step]]), fine)
        else:
            rest = (torch.zeros(8), torch.zeros(8)) if fine is None else fine
            fine = tuple(torch.cat([new, old[4:]]) for new, old in zip(coarse, rest, strict=True))
    assert fine is not None
    return system.classify(fine[0])


@pytest.mark.parametrize("name", ["frameexit", "liteeval", "marl"])
def test_output_by_hand(name: str) -> None:
    system, views = lively(name), random_views()
    output = UniformFrames(system, 3).run(views)
    for video, count in enumerate(views.real.sum(1).tolist()):
        seen = output.seen_heavy[video].nonzero()[:, 0].tolist()
        with torch.no_grad():
            expected = by_hand(system, views.heavy[video, :count], views.light[video, :count], seen).softmax(-1)
        assert torch.allclose(output.probabilities[video], expected, atol=1e-5)


def test_systems_that_would_have_seen_just_these_frames_say_the_same() -> None:
    views = replace(random_views(), mask=None)
    # FrameExit without gates that close, over all of its frames.
    system = FrameExit(5, 4, max_frames=8, neck_width=8, gate_widths=[4, 2], first_exit=1, gate_exit=0).eval()
    assert torch.allclose(UniformFrames(system, 8).run(views).probabilities, system.run(views).probabilities)
    # MARL's agents before they move.
    agents = lively("marl").with_threshold(3)
    torch.nn.init.zeros_(agents.policy.weight)  # type: ignore[union-attr, arg-type]
    torch.nn.init.zeros_(agents.policy.bias)  # type: ignore[union-attr, arg-type]
    assert torch.allclose(UniformFrames(agents, 3).run(views).probabilities, agents.run(views).probabilities)
    # LiteEval with every gate open.
    opened = lively("liteeval").with_threshold(0)
    assert torch.allclose(UniformFrames(opened, 8).run(views).probabilities, opened.run(views).probabilities)
    # AdaFrame, which starts in the middle.
    first, views = lively("adaframe"), replace(random_views(candidates=7), mask=None)
    one = UniformFrames(first, 1).run(views)
    memory, state, middle = first._start(views)  # type: ignore[operator]
    assert one.seen_heavy.nonzero()[:, 1].tolist() == middle.tolist()
    with torch.no_grad():
        step, _ = first.step(views.heavy[:, 3], torch.full((12,), 0.5), memory, state)  # type: ignore[operator]
    assert torch.allclose(one.probabilities, step.logits.softmax(-1), atol=1e-6)
