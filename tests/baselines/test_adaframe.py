"""The agent that jumps: where it looks, when it stops, what it learns."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sosampler.baselines.adaframe import (
    AdaFrame,
    Memory,
    StepOutput,
    discounted,
    margin_gains,
    margins,
    nearest_candidate,
    relative_position,
)
from sosampler.baselines.base import (
    Views,
    evenly_spread,
    load_system,
    predict,
    save_baseline,
    video_gmacs,
)
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import replaced, two_sets

SMALL: dict[str, Any] = {"heavy_width": 6, "light_width": 3, "num_classes": 4, "hidden": 12, "width": 8}


def random_views(videos: int = 5, candidates: int = 9, seed: int = 0, masked: bool = True) -> Views:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.randn(videos, candidates, 6, generator=generator)
    light = torch.randn(videos, candidates, 3, generator=generator)
    mask = torch.rand(videos, candidates, generator=generator) < 0.6
    mask[torch.arange(videos), torch.randint(candidates, (videos,), generator=generator)] = True
    return two_sets(heavy, light, mask if masked else None)


def lively(seed: int = 0, **settings: Any) -> AdaFrame:
    """Random weights, large enough that every video gets its own locations."""
    torch.manual_seed(seed)
    system = AdaFrame(**{**SMALL, **settings})
    for weight in system.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return system


def hinted_videos(videos: int, seed: int) -> tuple[Views, Tensor]:
    """Two neighbouring frames of ten show the class; light features tell which, but not the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = F.one_hot(torch.randint(4, (videos,), generator=generator), 4)
    start = torch.randint(9, (videos, 1), generator=generator)
    shows = (torch.arange(10) >= start) & (torch.arange(10) < start + 2)
    heavy = 0.3 * torch.randn(videos, 10, 6, generator=generator)
    heavy[:, :, :4] += 2 * labels[:, None] * shows[:, :, None]
    light = 0.3 * torch.randn(videos, 10, 3, generator=generator)
    light[:, :, 0] += 2 * shows
    return two_sets(heavy, light), labels.float()


class AnywhereNext(AdaFrame):
    """The same network, but its locations are random."""

    def step(
        self, frames: Tensor, places: Tensor, memory: Memory, state: tuple[Tensor, Tensor]
    ) -> tuple[StepOutput, tuple[Tensor, Tensor]]:
        look, state = super().step(frames, places, memory, state)
        return look._replace(location=torch.rand(len(frames))), state


class ScriptedUtility(AdaFrame):
    """Says utilities from a list, one a step."""

    script: tuple[float, ...] = ()

    def remember(self, views: Views) -> Memory:
        self.spoken = 0
        return super().remember(views)

    def step(
        self, frames: Tensor, places: Tensor, memory: Memory, state: tuple[Tensor, Tensor]
    ) -> tuple[StepOutput, tuple[Tensor, Tensor]]:
        look, state = super().step(frames, places, memory, state)
        utility = torch.full_like(look.utility, self.script[self.spoken])
        self.spoken += 1
        return look._replace(utility=utility), state


def test_nearest_candidate_is_the_nearest_real_one() -> None:
    real = random_views(videos=200, candidates=7).real
    locations = torch.rand(200, generator=torch.Generator().manual_seed(1))
    locations[:20], locations[20:40], locations[40:60] = 0, 1, 0.5
    got = nearest_candidate(locations, real)
    for video in range(200):
        there = [t for t in range(7) if real[video, t]]
        wanted = there[0] + float(locations[video]) * (there[-1] - there[0])
        assert int(got[video]) == min(there, key=lambda t: (abs(t - wanted), t))
        allowed = torch.tensor([t in there[1:] for t in range(7)])
        if len(there) > 1:  # the extent stays that of the video
            one = nearest_candidate(locations[video, None], real[video, None], allowed[None])
            assert int(one) == min(there[1:], key=lambda t: (abs(t - wanted), t))


def test_place_of_a_candidate_leads_back_to_it() -> None:
    real = random_views(videos=50, candidates=8).real
    for position in range(8):
        rows = real[:, position]
        places = relative_position(torch.full((50,), position), real)
        assert bool((nearest_candidate(places[rows], real[rows]) == position).all())
    padded = torch.tensor([[True, True, True, False, False]])
    assert relative_position(torch.tensor([[0, 1, 2]]), padded).tolist() == [[0, 0.5, 1]]


@pytest.mark.parametrize("count", [1, 3, 5, 20])
def test_memory_is_spread_over_real_candidates(count: int) -> None:
    real = random_views(videos=60, candidates=12).real
    positions, used = evenly_spread(real, count)
    for video in range(60):
        there = [t for t in range(12) if real[video, t]]
        n = len(there)
        wanted = there if n <= count else [there[int((i + 0.5) * n / count)] for i in range(count)]
        assert positions[video, used[video]].tolist() == wanted
        assert set(positions[video].tolist()) == set(wanted)


def test_reward_is_growth_of_best_margin() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(20, 5, 4, generator=generator)
    labels = torch.rand(20, 4, generator=generator) < 0.4
    labels[:, 0] = True
    labels[0] = True  # no other class is left
    margin = margins(probabilities, labels.float())
    gains = margin_gains(margin)
    returns = discounted(gains, 0.8)
    for video in range(20):
        best, wanted = -math.inf, []
        for step in range(5):
            row = probabilities[video, step].tolist()
            true = [p for p, label in zip(row, labels[video], strict=True) if label]
            other = [p for p, label in zip(row, labels[video], strict=True) if not label]
            m = math.prod(true) ** (1 / len(true)) - max(other, default=0)
            assert float(margin[video, step]) == pytest.approx(m, abs=1e-5)
            wanted.append(max(0.0, m - best))
            best = max(best, m)
        assert gains[video].tolist() == pytest.approx(wanted[1:], abs=1e-5)
        sums = [sum(0.8 ** (k - t) * wanted[1:][k] for k in range(t, 4)) for t in range(4)]
        assert returns[video].tolist() == pytest.approx(sums, abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_reads_only_what_it_says(masked: bool) -> None:
    system = lively(max_steps=4, patience=2, memory_frames=3)
    views = random_views(videos=40, masked=masked)
    output = system.run(views)
    assert not bool((output.seen_heavy & ~views.real).any())
    assert not bool((output.seen_light & ~views.real).any())
    assert output.seen_light.sum(1).tolist() == views.real.sum(1).clamp(max=3).tolist()
    assert len({tuple(row.tolist()) for row in output.seen_heavy}) > 5  # the videos differ in what is looked at
    poisoned = two_sets(
        views.heavy.masked_fill(~output.seen_heavy[:, :, None], math.nan),
        views.light.masked_fill(~output.seen_light[:, :, None], math.nan),
        views.mask,
    )
    again = system.run(poisoned)
    assert torch.equal(again.probabilities, output.probabilities)
    assert torch.equal(again.seen_heavy, output.seen_heavy)
    assert torch.allclose(output.probabilities.sum(1), torch.ones(40))


def test_all_that_is_marked_was_read() -> None:
    system = lively(max_steps=3, patience=3)
    torch.nn.init.zeros_(system.locate.weight)  # locations are fixed: poison cannot lead elsewhere
    views = random_views(videos=6)
    output = system.run(views)
    for video, position in output.seen_heavy.nonzero().tolist():
        heavy = views.heavy.clone()
        heavy[video, position] = math.nan
        assert bool(system.run(replaced(views, heavy=heavy)).probabilities[video].isnan().all())
    for video, position in output.seen_light.nonzero().tolist():
        light = views.light.clone()
        light[video, position] = math.nan
        assert bool(system.run(replaced(views, light=light)).probabilities[video].isnan().all())


@pytest.mark.parametrize(
    ("script", "mu", "patience", "steps"),
    [
        ((1, 2, 3, 4, 5, 6), 0, 0, 6),  # rises all the time: until max_steps
        ((1, 1, 1, 1, 1, 1), 0, 0, 6),  # equal is not below
        ((5, 4, 3, 2, 1, 0), 0, 0, 2),
        ((5, 4, 3, 2, 1, 0), 0, 2, 4),  # for more than two steps
        ((5, 4, 3, 2, 1, 0), 1, 0, 3),  # by more than 1
        ((5, 4, 3, 2, 1, 0), 3.5, 1, 6),
        ((5, 4, 3, 2, 1, 0), 9, 0, 6),
        ((1, 0, 2, 1, 3, 1), 0, 1, 6),  # every new height starts the count again
        ((3, 1, 2, 1, 1, 1), 0, 1, 3),  # a rise below the highest is none
        ((3, 1, 2.5, 1, 1, 1), 0.6, 1, 5),  # but one to within mu of it
    ],
)
def test_when_it_stops(script: tuple[float, ...], mu: float, patience: int, steps: int) -> None:
    torch.manual_seed(0)
    system = ScriptedUtility(**SMALL, max_steps=6, patience=patience, mu=mu)
    system.script = script
    views = random_views(masked=False)
    output = system.run(views)
    assert output.steps is not None
    assert output.steps.tolist() == [steps] * 5
    # Its output is that of an agent that may take just so many steps.
    short = ScriptedUtility(**SMALL, max_steps=steps, patience=9)
    short.script = script
    short.load_state_dict(system.state_dict())
    assert torch.equal(short.run(views).probabilities, output.probabilities)
    assert torch.equal(short.run(views).seen_heavy, output.seen_heavy)


@pytest.mark.parametrize("patience", [0, 1])
def test_a_lower_mu_stops_no_later(patience: int) -> None:
    system = lively(max_steps=9, patience=patience)
    views = random_views(videos=60, candidates=12, masked=False)
    steps = [system.with_threshold(mu).run(views).steps for mu in system.threshold_values]
    for cheap, costly in pairwise(steps):
        assert cheap is not None
        assert costly is not None
        assert bool((cheap <= costly).all())
    assert float(steps[0].float().mean()) + 1 < float(steps[-1].float().mean())  # type: ignore[union-attr]
    assert bool((steps[0] >= 2 + patience).all())  # type: ignore[operator]


@pytest.mark.parametrize("masked", [False, True])
def test_every_step_sees_another_frame(masked: bool) -> None:
    system = lively(max_steps=12, search_memory=True)
    views = random_views(videos=30, candidates=9, masked=masked)
    frames = views.real.sum(1)
    before = torch.zeros_like(views.real)
    for steps, other in system.with_each_step():
        output = other.run(views)
        assert output.seen_heavy.sum(1).tolist() == frames.clamp(max=steps).tolist()
        assert output.steps is not None
        assert output.steps.tolist() == frames.clamp(max=steps).tolist()
        assert bool((output.seen_heavy >= before).all())  # the same search, one step further
        before = output.seen_heavy
    assert steps == 12


def test_videos_do_not_influence_each_other() -> None:
    system = lively(max_steps=6, patience=1, search_memory=True)
    views = random_views(videos=12)
    together = system.run(views)
    assert together.steps is not None
    assert len(set(together.steps.tolist())) > 1  # some stop earlier than others
    for video in range(12):
        alone = system.run(views.some(torch.tensor([video])))
        assert torch.equal(alone.seen_heavy[0], together.seen_heavy[video])
        assert torch.allclose(alone.probabilities[0], together.probabilities[video], atol=1e-6)


def test_padding_does_not_move_locations() -> None:
    system = lively(max_steps=8, mu=9, search_memory=True)  # more steps than frames
    views = random_views(candidates=6, masked=False)
    padding = torch.full((5, 3, 6), math.nan), torch.full((5, 3, 3), math.nan)
    mask = torch.tensor([True] * 6 + [False] * 3).expand(5, 9)
    padded = two_sets(torch.cat([views.heavy, padding[0]], 1), torch.cat([views.light, padding[1]], 1), mask)
    plain, output = system.run(views), system.run(padded)
    assert torch.equal(output.seen_heavy[:, :6], plain.seen_heavy)
    assert torch.allclose(output.probabilities, plain.probabilities, atol=1e-6)
    labels = torch.eye(4)[[0, 1, 2, 3, 0]]
    total, parts = system.loss(padded, labels, generator=torch.Generator().manual_seed(0))
    _, same = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(
        {name: float(part) for name, part in same.items()}, rel=1e-4
    )
    total.backward()
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in system.parameters())


def test_one_candidate_is_enough() -> None:
    output = lively().run(random_views(candidates=1, masked=False))
    assert output.seen_heavy.tolist() == [[True]] * 5
    assert bool(output.probabilities.isfinite().all())


def test_gradients_reach_every_weight() -> None:
    system, views = lively(max_steps=3, search_memory=True), random_views(masked=False)
    labels = torch.eye(4)[[0, 1, 2, 3, 0]]
    total, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    total.backward()
    for name, weight in system.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().sum()) > 0, name
    assert not any(part.requires_grad for part in parts.values())
    together = parts["prediction"] + parts["policy"] + parts["utility"]
    assert float(total.detach()) == pytest.approx(float(together), rel=1e-5)


def test_reward_and_cross_entropy_teach_different_layers() -> None:
    heads = ("locate", "value", "search")
    gradients = []
    for weight in (0.0, 1.0):
        system = lively(max_steps=4, search_memory=True, policy_weight=weight, utility_weight=weight)
        views, labels = random_views(masked=False), torch.eye(4)[[0, 1, 2, 3, 0]]
        system.loss(views, labels, generator=torch.Generator().manual_seed(0))[0].backward()
        gradients.append({name: parameter.grad for name, parameter in system.named_parameters()})
    for name, by_label in gradients[0].items():
        both = gradients[1][name]
        assert both is not None
        if name.startswith(heads):
            assert by_label is None or not bool(by_label.any()), name
            assert bool(both.any()), name
        else:
            assert by_label is not None
            assert torch.equal(by_label, both), name


def test_cross_entropy_is_that_of_the_last_step() -> None:
    views, labels = random_views(videos=6, candidates=4, seed=3), torch.eye(4)[[0, 1, 2, 3, 0, 1]]
    assert views.real.sum(1).min() < 3 < views.real.sum(1).max()  # some videos end early
    system = lively(max_steps=3, deviation=1e-9, mu=9)  # it goes where it would go
    step_of = {
        steps: -(system.with_threshold(9)._with_settings({"max_steps": steps})).run(views).probabilities.log()
        for steps in (2, 3)
    }
    first = lively(max_steps=2, deviation=1e-9)
    last = (step_of[3] * labels).sum(1)
    assert float(system.loss(views, labels)[1]["prediction"]) == pytest.approx(float(last.mean()), rel=1e-4)
    # At every step: the mean over the steps of a video, then over videos.
    every = first._with_settings({"loss_at": "every"})
    memory, state, middle = first._start(views)
    frames = views.heavy.take_along_dim(middle[:, None, None], 1)[:, 0]
    output, _ = first.step(frames, relative_position(middle, views.real), memory, state)
    start = F.cross_entropy(output.logits, labels.argmax(1), reduction="none")
    second = (step_of[2] * labels).sum(1)
    wanted = torch.where(views.real.sum(1) > 1, (start + second) / 2, start).mean()
    assert float(every.loss(views, labels)[1]["prediction"]) == pytest.approx(float(wanted.detach()), rel=1e-4)


@pytest.mark.parametrize(("label", "sign"), [(2, 1), (3, -1)])
@pytest.mark.parametrize("baseline", [0.0, 0.5])
def test_policy_gradient_is_that_of_expected_reward(baseline: float, label: int, sign: int) -> None:
    system = lively(seed=7, max_steps=2, deviation=0.3, utility_weight=0)
    torch.nn.init.zeros_(system.value.weight)
    torch.nn.init.constant_(system.value.bias, baseline)  # any baseline gives the same gradient, only noisier
    views = random_views(videos=1, candidates=3, seed=4, masked=False)
    labels = torch.eye(4)[[label]]

    # All that can happen: after the middle it sees one of the two other frames, split at 1/2.
    memory, empty = system.remember(views), torch.zeros(1, 12)
    first, state = system.step(views.heavy[:, 1], torch.tensor([0.5]), memory, (empty, empty))
    rewards = []
    for position in (0, 2):
        second, _ = system.step(views.heavy[:, position], torch.tensor([position / 2]), memory, state)
        both = torch.stack([first.logits, second.logits], dim=1).softmax(-1)
        rewards.append(float(margin_gains(margins(both, labels)).detach()))
    earlier = torch.distributions.Normal(first.location, 0.3).cdf(torch.tensor(0.5))
    chances = torch.cat([earlier, 1 - earlier])
    (exact,) = torch.autograd.grad((chances * torch.tensor(rewards)).sum(), system.locate.bias)

    many = 40_000
    rows = torch.zeros(many, dtype=torch.long)
    total, _ = system.loss(views.some(rows), labels[rows], generator=torch.Generator().manual_seed(0))
    (estimate,) = torch.autograd.grad(total, system.locate.bias)
    assert sign * float(exact) > 0.06  # well above the noise of the estimate
    assert float(-estimate) == pytest.approx(float(exact), rel=0.1)


@pytest.mark.parametrize("search_memory", [False, True])
def test_costs_are_those_of_its_layers(search_memory: bool) -> None:
    system = lively(max_steps=4, mu=9, memory_frames=5, search_memory=search_memory)
    views = random_views(videos=1, masked=False)
    with FlopCounterMode(display=False) as counter:
        output = system.run(views)
    assert float(system.own_gmacs(output)[0]) == pytest.approx(counter.get_total_flops() / 2 / 1e9)
    fewer = output._replace(steps=torch.tensor([1]))
    assert float(system.own_gmacs(fewer)[0]) < float(system.own_gmacs(output)[0])
    whole = video_gmacs(system, output, {"heavy": 4.0, "light": 0.1})
    assert float(whole[0]) == pytest.approx(4 * int(output.seen_heavy.sum()) + 0.5, abs=1e-3)


def test_same_seed_same_weights_and_config_builds_it_again() -> None:
    views, labels = hinted_videos(32, seed=0)
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        system = AdaFrame(**SMALL, max_steps=3, search_memory=True)
        fit(system, views, labels, epochs=2, seed=5)
        twins.append(system)
    assert all(torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))
    again = AdaFrame(**json.loads(json.dumps(twins[0].config)))
    again.load_state_dict(twins[0].state_dict())
    assert torch.equal(again.run(views).probabilities, twins[0].run(views).probabilities)
    assert torch.equal(twins[0].run(views).seen_heavy, twins[0].run(views).seen_heavy)


def test_several_labels() -> None:
    system = lively(multi_label=True, max_steps=3)
    labels = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]])
    assert bool(system.loss(random_views(masked=False), labels)[0].isfinite())
    assert bool((system.run(random_views()).probabilities.sum(1) != 1).all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_steps": 1},
        {"patience": -1},
        {"mu": -0.1},
        {"loss_at": "first"},
        {"deviation": 0},
        {"discount": 1.5},
        {"num_classes": 1},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        AdaFrame(**{**SMALL, **wrong})


def test_a_folder_of_an_earlier_version_loads(tmp_path: Path) -> None:
    system = lively(max_steps=5, patience=2)
    save_baseline(tmp_path / "run", system, {})
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    for setting in ("mu", "search_memory", "loss_at"):
        del saved["config"][setting]
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    loaded = load_system(tmp_path / "run")
    assert (loaded.config["mu"], loaded.config["patience"]) == (0, 2)
    views = random_views()
    assert torch.equal(loaded.run(views).probabilities, system.run(views).probabilities)
    assert loaded.with_threshold(0.3).config["mu"] == 0.3


class Trained(NamedTuple):
    right: list[float]  # with 2, 3, ... steps
    frames: list[float]  # distinct ones
    system: AdaFrame
    unseen: Views


@cache
def trained(kind: type[AdaFrame]) -> Trained:
    views, labels = hinted_videos(2048, seed=1)
    unseen, truth = hinted_videos(512, seed=2)
    torch.manual_seed(1)
    system = kind(6, 3, 4, hidden=32, width=16, max_steps=4, search_memory=True, deviation=0.2)
    fit(system, views, labels, epochs=20, lr=2e-2, batch_size=128)
    outputs = [predict(other, unseen) for _, other in system.with_each_step()]
    right = [float((output.probabilities.argmax(1) == truth.argmax(1)).float().mean()) for output in outputs]
    frames = [float(output.seen_heavy.sum(1).float().mean()) for output in outputs]
    return Trained(right, frames, system, unseen)


@pytest.mark.slow
def test_learns_where_to_look() -> None:
    ours, anywhere = trained(AdaFrame), trained(AnywhereNext)
    assert ours.frames == anywhere.frames == [2, 3, 4]
    assert ours.right[-1] > anywhere.right[-1] + 0.1
    assert ours.right[-1] > 0.85


@pytest.mark.slow
def test_more_steps_see_more_frames_and_classify_better() -> None:
    ours = trained(AdaFrame)
    assert all(more > fewer for fewer, more in pairwise(ours.right))
    assert ours.right[-1] > ours.right[0] + 0.05
    # mu trades frames for accuracy.
    outputs = [predict(ours.system.with_threshold(mu), ours.unseen) for mu in (0, 0.1, 0.2, 0.4, 2)]
    frames = [float(output.seen_heavy.sum(1).float().mean()) for output in outputs]
    assert frames == sorted(frames)
    assert 2 <= frames[0] < 3 < frames[-1] == 4
