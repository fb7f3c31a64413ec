"""LiteEval against a plain loop over one video, and on videos whose light features hint at the frames that matter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sosampler.baselines.base import BaselineOutput, Views, decoded_frames, draw_uniform, predict, video_gmacs
from sosampler.baselines.liteeval import LiteEval, State, synchronise
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import two_sets

C, T, D, LIGHT = 4, 10, 8, 5


def problem(batch: int, seed: int) -> tuple[Views, Tensor, Tensor]:
    """Two of ten frames show the class, the others another one less clearly; one light feature hints at which is which.

    Returns views, labels, and where the class is shown.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    shown = torch.rand(batch, T, generator=generator).argsort(dim=1) < 2
    others = torch.randint(C, (batch, T), generator=generator)
    heavy = 0.5 * torch.randn(batch, T, D, generator=generator)
    heavy[:, :, :C] += F.one_hot(torch.where(shown, classes[:, None], others), C) * torch.where(shown, 3, 2)[:, :, None]
    light = 0.5 * torch.randn(batch, T, LIGHT, generator=generator)
    light[:, :, 0] += 4.0 * shown - 2
    return two_sets(heavy, light), F.one_hot(classes, C).bool(), shown


def small(kind: type[LiteEval] = LiteEval, **given: Any) -> LiteEval:
    torch.manual_seed(0)
    return kind(D, LIGHT, C, **{"coarse_width": 6, "fine_width": 10, "target": 0.2, **given})


class AtRandom(LiteEval):
    """The same with gates that open by chance for the target share of frames."""

    def _gate_logits(self, coarse: State, fine: State) -> Tensor:
        opened = draw_uniform((len(fine[0]),), None, fine[0].device) < self.config["target"]
        return torch.stack([~opened, opened], dim=1) * 100.0


@cache
def trained(kind: type[LiteEval] = LiteEval, target: float = 0.2) -> LiteEval:
    system = small(kind, target=target)
    views, labels, _ = problem(800, seed=1)
    fit(system, views, labels, epochs=15, lr=0.03, batch_size=100)
    return system


def untrained(**given: Any) -> LiteEval:
    """Random weights whose gate opens for about half of the frames."""
    system, (views, _, _) = small(**given), problem(100, seed=0)
    with torch.no_grad():
        system.gate.weight.mul_(20)
        for weight in system.coarse.parameters():
            weight.mul_(3)
        system.gate.bias.zero_()
        for _ in range(30):
            usage = system.run(views).seen_heavy.float().mean()
            system.gate.bias[1] += 4 * (0.5 - usage)
    return system


def by_hand(system: LiteEval, heavy: Tensor, light: Tensor) -> tuple[Tensor, list[bool]]:
    """One video [L, D] and [L, d]: probabilities and where the gate opened."""
    width, opened = system.config["coarse_width"], []
    coarse = [torch.zeros(1, width) for _ in range(2)]
    fine = [torch.zeros(1, system.config["fine_width"]) for _ in range(2)]
    with torch.no_grad():
        for place in range(len(heavy)):
            coarse = list(system.coarse(light[None, place], tuple(coarse)))
            _, opens = system.gate(torch.cat([coarse[0], fine[0]], dim=1))[0].softmax(dim=0)
            opened.append(bool(opens > system.config["gate_open"]))
            if opened[-1]:
                fine = list(system.fine(torch.cat([heavy[None, place], light[None, place]], dim=1), tuple(fine)))
            else:
                for number in range(2):
                    fine[number] = fine[number].clone()
                    fine[number][0, :width] = coarse[number][0]
        return system.classify(fine[0]).softmax(dim=1)[0], opened


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return float(labels.gather(1, output.probabilities.argmax(dim=1, keepdim=True)).float().mean())


@pytest.mark.parametrize("gate_open", [0.5, 0.2, 0.8])
def test_run_is_the_loop_by_hand(gate_open: float) -> None:
    system, (views, _, _) = untrained().with_threshold(gate_open), problem(40, seed=2)
    assert isinstance(system, LiteEval)
    output = system.run(views)
    for number in range(40):
        probabilities, opened = by_hand(system, views.heavy[number], views.light[number])
        assert output.seen_heavy[number].tolist() == opened
        assert torch.allclose(output.probabilities[number], probabilities, atol=1e-5)
    assert 0.2 < output.seen_heavy.float().mean() < 0.8
    assert output.seen_light.all()


def test_gates_at_the_ends_of_the_dial() -> None:
    system, (views, _, _) = untrained(), problem(20, seed=2)
    assert system.with_threshold(0).run(views).seen_heavy.all()
    assert not system.with_threshold(1).run(views).seen_heavy.any()


def test_masked_frames_are_never_visited() -> None:
    system, (views, _, _) = untrained(), problem(20, seed=3)
    mask = torch.rand(20, T, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 4] = True
    unreal = ~mask[:, :, None]
    output = system.run(
        two_sets(*(features.masked_fill(unreal, torch.nan) for features in (views.heavy, views.light)), mask)
    )
    assert torch.equal(output.seen_light, mask)
    for number in range(20):
        real = mask[number]
        probabilities, opened = by_hand(system, views.heavy[number, real], views.light[number, real])
        assert output.seen_heavy[number, real].tolist() == opened
        assert torch.allclose(output.probabilities[number], probabilities, atol=1e-5)
        assert not output.seen_heavy[number, ~real].any()


def test_no_heavy_feature_is_read_where_the_gate_is_closed() -> None:
    system, (views, _, _) = untrained(), problem(40, seed=2)
    output = system.run(views)
    closed = ~output.seen_heavy[:, :, None]
    unread = system.run(two_sets(views.heavy.masked_fill(closed, torch.nan), views.light))
    assert torch.equal(unread.probabilities, output.probabilities)
    assert torch.equal(unread.seen_heavy, output.seen_heavy)
    # What it counts is read.
    for number in (output.seen_heavy.any(dim=1)).nonzero()[:, 0].tolist():
        heavy = views.heavy[number : number + 1].clone()
        heavy[0, output.seen_heavy[number].nonzero()[-1, 0]] = torch.nan
        assert system.run(two_sets(heavy, views.light[number : number + 1])).probabilities.isnan().any()


def test_it_is_online() -> None:
    system, (views, _, _) = untrained(), problem(40, seed=4)
    whole, start = system.run(views), system.run(two_sets(views.heavy[:, :6], views.light[:, :6]))
    assert torch.equal(whole.seen_heavy[:, :6], start.seen_heavy)
    longer = two_sets(torch.cat([views.heavy] * 3, dim=1), torch.cat([views.light] * 3, dim=1))
    assert torch.equal(system.run(longer).seen_heavy[:, :T], whole.seen_heavy)


def test_synchronising_copies_the_coarse_state_into_the_fine_one() -> None:
    fine = torch.arange(10.0).view(2, 5), torch.arange(10.0, 20).view(2, 5)
    coarse = torch.full((2, 3), -1.0), torch.full((2, 3), -2.0)
    hidden, cell = synchronise(fine, coarse)
    assert hidden.tolist() == [[-1, -1, -1, 3, 4], [-1, -1, -1, 8, 9]]
    assert cell.tolist() == [[-2, -2, -2, 13, 14], [-2, -2, -2, 18, 19]]


def test_costs_are_the_operations_that_run() -> None:
    system, (views, _, _) = untrained(), problem(12, seed=5)
    output = system.run(views)
    own = system.own_gmacs(output)
    for number in range(12):
        with FlopCounterMode(display=False) as counter:
            system.run(views.some(torch.tensor([number])))
        assert float(own[number]) == pytest.approx(counter.get_total_flops() / 2e9)
    assert len(set(own.tolist())) > 2
    heavy_frames = output.seen_heavy.sum(dim=1)
    assert torch.allclose(video_gmacs(system, output, {"heavy": 4.0, "light": 0.1}), 4.0 * heavy_frames + 0.1 * T + own)
    assert decoded_frames(output).tolist() == [T] * 12


@pytest.mark.parametrize("budget_per", ["video", "batch"])
def test_the_budget_term_counts_drawn_gates(budget_per: str) -> None:
    system, (views, labels, _) = untrained(budget_per=budget_per, target=0.3, budget=5.0), problem(30, seed=6)
    with torch.no_grad():
        system.gate.weight.mul_(1e4)  # so sure that no noise turns a gate
        system.gate.bias.mul_(1e4)
    mask = torch.arange(T) < (torch.arange(30) % T + 1)[:, None]
    views = two_sets(
        *(features.masked_fill(~mask[:, :, None], torch.nan) for features in (views.heavy, views.light)), mask
    )
    output = system.run(views)
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    used, lengths = output.seen_heavy.sum(dim=1), mask.sum(dim=1)
    usage = used / lengths if budget_per == "video" else used.sum() / lengths.sum()
    budget = ((usage - 0.3) ** 2).mean()
    label = F.nll_loss(output.probabilities.log(), labels.long().argmax(dim=1))
    assert parts["usage"].item() == pytest.approx((used.sum() / lengths.sum()).item(), rel=1e-5)
    assert parts["budget"].item() == pytest.approx(budget.item(), rel=1e-4)
    assert parts["label"].item() == pytest.approx(label.item(), rel=1e-4)
    assert loss.item() == pytest.approx((label + 5 * budget).item(), rel=1e-4)


def test_gradients_reach_every_layer_and_no_padding() -> None:
    system, (views, labels, _) = small(), problem(20, seed=7)
    mask = torch.arange(T) < (torch.arange(20) % T + 1)[:, None]
    sets = views.sets.values()
    poisoned = [features.masked_fill(~mask[:, :, None], torch.nan).requires_grad_() for features in sets]
    loss, _ = system.loss(two_sets(poisoned[0], poisoned[1], mask), labels, generator=torch.Generator().manual_seed(0))
    loss.backward()
    for name, weight in system.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name
    for features in poisoned:
        assert features.grad is not None
        assert not features.grad[~mask].any()
        assert features.grad[mask].any()


def test_the_gate_is_drawn_with_its_own_probability() -> None:
    system = small(temperature=(5.0, 5.0))
    with torch.no_grad():
        system.gate.weight.zero_()
        system.gate.bias.copy_(torch.tensor([0.0, 1.2]))
    views, labels, _ = problem(500, seed=8)
    _, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    assert parts["usage"].item() == pytest.approx(torch.tensor(1.2).sigmoid().item(), abs=0.02)


def test_the_temperature_falls() -> None:
    system = small(temperature=(4.0, 0.25))
    assert [system.temperature(progress) for progress in (0, 0.5, 1)] == pytest.approx([4, 1, 0.25])


@pytest.mark.parametrize("target", [0.2, 0.6])
def test_the_budget_term_moves_usage_to_its_target(target: float) -> None:
    views, labels, _ = problem(300, seed=9)
    system = trained(target=target)
    _, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    assert parts["usage"].item() == pytest.approx(target, abs=0.06)
    assert predict(system, views).seen_heavy.float().mean().item() == pytest.approx(target, abs=0.12)


def test_it_looks_where_the_light_features_hint_and_beats_random_frames() -> None:
    views, labels, shown = problem(600, seed=9)
    output, guessing = predict(trained(), views), trained(AtRandom)
    torch.manual_seed(0)  # its gates draw by themselves
    random = predict(guessing, views)
    frames, random_frames = (one.seen_heavy.float().sum(dim=1).mean().item() for one in (output, random))
    assert frames <= random_frames + 0.2
    assert output.seen_heavy[shown].float().mean() > 0.8
    assert output.seen_heavy[~shown].float().mean() < 0.1
    assert accuracy(output, labels) > accuracy(random, labels) + 0.2
    assert accuracy(output, labels) > 0.85


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels, _ = problem(40, seed=10)
    results = []
    for seed in (0, 0, 1):
        system = small()
        fit(system, views, labels, epochs=2, seed=seed, batch_size=16, lr=0.03)
        results.append(system.run(views).probabilities)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fine_width": 5}, "coarse_width=6"),
        ({"target": 1.5}, "share of frames from 0 to 1"),
        ({"budget": -1.0}, "budget"),
        ({"budget_per": "frame"}, "video, batch"),
        ({"temperature": (5.0,)}, "at the start and at the end"),
        ({"temperature": (5.0, 0.0)}, "temperature"),
        ({"gate_open": 1.01}, "probability from 0 to 1"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        small(**given)
