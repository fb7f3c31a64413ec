"""FrameExit against a plain loop over one video at a time, and on videos of which some need more frames than others."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sosampler.baselines.base import BaselineOutput, Views, predict
from sosampler.baselines.frameexit import FrameExit, exit_labels, running_max, visiting_order
from sosampler.errors import InvalidArgument
from sosampler.policies.positional import FRAMEEXIT_ORDER_10, frameexit_order
from sosampler.training.train_baseline import fit
from tests.factories import two_sets

C, T, D = 4, 10, 12


def problem(batch: int, seed: int) -> tuple[Views, Tensor]:
    """Half of the videos show their class in every frame, half in two of ten and noise in the rest."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    shown = torch.rand(batch, T, generator=generator).argsort(dim=1) < 2
    shown[: batch // 2] = True
    heavy = torch.randn(batch, T, D, generator=generator)
    heavy[:, :, :C] += 6 * F.one_hot(classes, C)[:, None] * shown[:, :, None]
    return two_sets(heavy, torch.full((batch, T, 1), torch.nan)), F.one_hot(classes, C).bool()  # light is never read


def small(**given: Any) -> FrameExit:
    torch.manual_seed(0)
    return FrameExit(D, C, **{"neck_width": 16, "gate_widths": (8, 4), "first_exit": 0.97, **given})


@cache
def trained(beta: float = 1e-3) -> FrameExit:
    """All have the same classifiers."""
    system, (views, labels) = small(beta=beta), problem(1000, seed=1)
    if beta == 1e-3:
        fit(system, views, labels, epochs={"classifiers": 8}, lr=0.02, batch_size=100)
    else:
        system.load_state_dict(trained().state_dict() | small().gates.state_dict(prefix="gates."))
    fit(system, views, labels, epochs={"gates": 5}, lr=0.02, batch_size=100)
    return system


def untrained(**given: Any) -> FrameExit:
    """Random weights; about a quarter of the videos leaves at each step."""
    system, (views, _) = small(**given), problem(200, seed=0)
    with torch.no_grad():
        if isinstance(system.neck, nn.Sequential):  # running statistics that are not those of a new layer
            system.neck(views.heavy.flatten(0, 1) * 2 + 1)
        system.eval()
        found = system.neck(views.heavy.flatten(0, 1)).unflatten(0, (200, T))
        pooled = running_max(found[:, list(FRAMEEXIT_ORDER_10)])
        for step, gate in enumerate(system.gates, start=1):
            gate.decide.weight.mul_(20)
            gate.decide.bias.sub_(gate(pooled[:, step], pooled[:, step - 1]).quantile(0.25))
        first = system.classifiers[0](pooled[:, 0]).softmax(dim=1).amax(dim=1).quantile(0.75)
    return with_exits(system, first_exit=float(first))


def by_hand(system: FrameExit, heavy: Tensor) -> tuple[Tensor, list[int], int]:
    """One video [L, D], L <= max_frames: probabilities, the frames used in order, the gates asked."""
    system.eval()
    order = frameexit_order(len(heavy))
    with torch.no_grad():
        for step in range(len(order)):
            pooled = [system.neck(heavy[order[: number + 1]]).amax(dim=0, keepdim=True) for number in range(step + 1)]
            probabilities = system.classifiers[step](pooled[-1]).softmax(dim=1)[0]
            if step == len(order) - 1:
                return probabilities, order, max(0, step - 1)
            if step == 0 and probabilities.max() > system.config["first_exit"]:
                return probabilities, order[:1], 0
            if step > 0 and system.gates[step - 1](pooled[-1], pooled[-2]).sigmoid() < system.config["gate_exit"]:
                return probabilities, order[: step + 1], step
    raise AssertionError("the last frame always exits")


def with_exits(system: FrameExit, **exits: float) -> FrameExit:
    system.config |= exits
    return system


def without_first_exit(system: FrameExit) -> FrameExit:
    return with_exits(deepcopy(system), first_exit=2)


def frames(output: BaselineOutput) -> Tensor:
    return output.seen_heavy.sum(dim=1)


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return float(labels.gather(1, output.probabilities.argmax(dim=1, keepdim=True)).float().mean())


def test_visits_go_from_coarse_to_fine_over_real_frames() -> None:
    real = torch.ones(3, T, dtype=torch.bool)
    real[1, 6:] = False  # 6 frames
    real[2, [0, 3, 4, 5, 8]] = False  # 1 2 6 7 9 are real
    visits, visited = visiting_order(real, 10)
    assert visits[0].tolist() == list(FRAMEEXIT_ORDER_10)
    assert visits[1][visited[1]].tolist() == frameexit_order(6)
    assert visits[2][visited[2]].tolist() == [[1, 2, 6, 7, 9][rank] for rank in frameexit_order(5)]
    assert visited.sum(dim=1).tolist() == [10, 6, 5]


def test_more_frames_than_classifiers_are_thinned_evenly() -> None:
    visits, visited = visiting_order(torch.ones(1, 40, dtype=torch.bool), 10)
    assert visited.all()
    assert visits[0].tolist() == [4 * rank + 2 for rank in FRAMEEXIT_ORDER_10]


def test_running_max_is_the_max_over_each_prefix() -> None:
    values = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))
    pooled = running_max(values)
    for step in range(7):
        assert torch.equal(pooled[:, step], values[:, : step + 1].amax(dim=1))


def test_exit_labels_follow_the_tolerance() -> None:
    losses = torch.tensor([[0.1, 0.1, 0.1, 0.1]])
    assert exit_labels(losses, 0.1).tolist() == [[True, True, True, True]]
    assert exit_labels(losses, 0.09).tolist() == [[False, True, True, True]]
    assert exit_labels(losses, 0.1001 / math.exp(1)).tolist() == [[False, False, True, True]]
    random = torch.rand(50, 10, generator=torch.Generator().manual_seed(0))
    assert (exit_labels(random, 0.02) <= exit_labels(random, 0.05)).all()
    assert exit_labels(random, 0.02).sum() < exit_labels(random, 0.05).sum()


@pytest.mark.parametrize("neck_width", [16, None])
def test_run_is_the_loop_by_hand(neck_width: int | None) -> None:
    system, (views, _) = untrained(neck_width=neck_width), problem(60, seed=2)
    output = system.run(views)
    used = []
    for number in range(60):
        probabilities, order, asked = by_hand(system, views.heavy[number])
        assert output.seen_heavy[number].nonzero()[:, 0].tolist() == sorted(order)
        assert torch.allclose(output.probabilities[number], probabilities, atol=1e-5)
        assert output.steps is not None
        assert int(output.steps[number]) == asked
        used.append(len(order))
    assert len(set(used)) >= 4  # first exit, gates and the last frame were all met
    assert {1, T} <= set(used)
    assert not output.seen_light.any()


def test_short_videos_end_at_their_last_frame() -> None:
    system = untrained()
    views, _ = problem(40, seed=3)
    lengths = torch.arange(40) % T + 1
    mask = torch.arange(T) < lengths[:, None]
    heavy = views.heavy.masked_fill(~mask[:, :, None], torch.nan)
    output = system.run(two_sets(heavy, views.light, mask))
    for number, length in enumerate(lengths.tolist()):
        probabilities, order, _ = by_hand(system, views.heavy[number, :length])
        assert output.seen_heavy[number].nonzero()[:, 0].tolist() == sorted(order)
        assert torch.allclose(output.probabilities[number], probabilities, atol=1e-5)
    # Where the real candidates stand does not matter.
    turned = system.run(two_sets(heavy.roll(3, dims=1)[:1], views.light[:1], mask.roll(3, dims=1)[:1]))
    assert torch.allclose(turned.probabilities, output.probabilities[:1])


def test_only_the_frames_it_counts_are_read() -> None:
    system, (views, _) = untrained(), problem(60, seed=2)
    output = system.run(views)
    unread = system.run(two_sets(views.heavy.masked_fill(~output.seen_heavy[:, :, None], torch.nan), views.light))
    assert torch.equal(unread.probabilities, output.probabilities)
    assert torch.equal(unread.seen_heavy, output.seen_heavy)
    # Each frame that it counts is read: the features of a closed relu carry no NaN on, those of a plain maximum do.
    plain = untrained(neck_width=None)
    output = plain.run(views)
    for number in range(60):
        place = output.seen_heavy[number].nonzero()[-1, 0]
        heavy = views.heavy[number : number + 1].clone()
        heavy[0, place] = torch.nan
        assert plain.run(two_sets(heavy, views.light[:1])).probabilities.isnan().any()


def test_costs_are_the_operations_that_run() -> None:
    system, (views, _) = untrained(), problem(25, seed=4)
    own = system.own_gmacs(system.run(views))
    for number in range(25):
        one = views.some(torch.tensor([number]))
        with FlopCounterMode(display=False) as counter:
            system.run(one)
        assert float(own[number]) == pytest.approx(counter.get_total_flops() / 2e9)
    assert len(set(own.tolist())) >= 4


def test_cost_is_monotone_in_both_thresholds() -> None:
    system, (views, _) = untrained(), problem(100, seed=5)
    by_first = [frames(with_exits(system, first_exit=value).run(views)) for value in (0, 0.29, 0.32, 0.4, 1)]
    assert by_first[0].tolist() == [1] * 100
    for fewer, more in pairwise(by_first):
        assert (fewer <= more).all()
    by_gate = [frames(with_exits(system, gate_exit=value).run(views)) for value in (1.1, 0.7, 0.5, 0.2, 0)]
    assert by_gate[0].tolist() == [2] * 100
    assert by_gate[-1].tolist() == [T] * 100
    for fewer, more in pairwise(by_gate):
        assert (fewer <= more).all()
    assert len({int(used.sum()) for used in by_first}) >= 4
    assert len({int(used.sum()) for used in by_gate}) >= 4
    assert system.config["gate_exit"] == 0


def test_loss_of_classifiers_is_the_mean_over_steps() -> None:
    system, (views, labels) = small(), problem(6, seed=6)
    system.eval()
    mask = torch.arange(T) < torch.tensor([10, 10, 4, 1, 2, 7])[:, None]
    loss, parts = system.loss(
        two_sets(views.heavy.masked_fill(~mask[:, :, None], torch.nan), views.light, mask), labels
    )
    expected, last = [], []
    for number, length in enumerate(mask.sum(dim=1).tolist()):
        order = frameexit_order(length)
        steps = [
            system.classifiers[step](system.neck(views.heavy[number, order[: step + 1]]).amax(dim=0))
            for step in range(length)
        ]
        losses = F.cross_entropy(torch.stack(steps), labels[number].long().argmax().expand(length), reduction="none")
        expected.append(losses.mean())
        last.append(losses[-1])
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    assert parts["last"].item() == pytest.approx(torch.stack(last).mean().item(), rel=1e-5)


def test_loss_of_gates_is_taught_where_they_decide() -> None:
    system, (views, labels) = small(beta=0.4), problem(6, seed=6)
    system.eval()
    mask = torch.arange(T) < torch.tensor([10, 10, 4, 1, 2, 7])[:, None]
    loss, parts = system.loss(two_sets(views.heavy, views.light, mask), labels, phase="gates")
    logits, wanted = [], []
    for number, length in enumerate(mask.sum(dim=1).tolist()):
        order = frameexit_order(length)
        pooled = [system.neck(views.heavy[number, order[: step + 1]]).amax(dim=0)[None] for step in range(length)]
        for step in range(1, length - 1):
            label_loss = F.cross_entropy(system.classifiers[step](pooled[step]), labels[number].long().argmax()[None])
            logits.append(system.gates[step - 1](pooled[step], pooled[step - 1]))
            wanted.append(float(label_loss > 0.4 * math.exp(step / 2)))
    expected = F.binary_cross_entropy_with_logits(torch.cat(logits), torch.tensor(wanted))
    assert 0 < sum(wanted) < len(wanted)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert parts["exits"].item() == pytest.approx(1 - sum(wanted) / len(wanted))


def test_short_videos_alone_teach_gates_nothing() -> None:
    system, (views, labels) = small(), problem(8, seed=6)
    mask = torch.arange(T) < torch.tensor([2] * 6 + [5] * 2)[:, None]
    short = two_sets(views.heavy, views.light, mask).some(torch.arange(6))
    system.train_phase("gates")
    loss, parts = system.loss(short, labels[:6], phase="gates")
    loss.backward()
    assert loss.item() == 0
    assert all(float(value) == 0 for value in parts.values())
    assert all(not weight.grad.any() for weight in system.gates.parameters())
    # Among others they stop no training, and gates that decide are taught.
    before = {key: value.clone() for key, value in system.gates.state_dict().items()}
    fit(system, two_sets(views.heavy, views.light, mask), labels, epochs={"gates": 3}, batch_size=1)
    assert any(not torch.equal(value, before[key]) for key, value in system.gates.state_dict().items())
    with pytest.raises(InvalidArgument, match=r"no gate has anything to decide.* at least 3 candidates"):
        fit(system, short, labels[:6], epochs={"gates": 1})


def test_one_video_of_one_frame_cannot_be_normalised() -> None:
    views, labels = problem(6, seed=6)
    mask = torch.arange(T) < torch.tensor([1, 5, 5, 5, 5, 5])[:, None]
    masked = two_sets(views.heavy, views.light, mask)
    with pytest.raises(InvalidArgument, match="1 videos have one frame; give a larger batch_size"):
        fit(small(), masked, labels, epochs={"classifiers": 1}, batch_size=1)
    fit(small(), masked, labels, epochs={"classifiers": 1}, batch_size=5)  # that is three and three
    fit(small(neck_width=None), masked, labels, epochs={"classifiers": 1}, batch_size=1)  # nothing is normalised
    with pytest.raises(InvalidArgument, match="6 videos have one frame"):
        fit(small(max_frames=1), views, labels, epochs={"classifiers": 1}, batch_size=1)


def test_each_phase_trains_its_own_part() -> None:
    system, (views, labels) = small(), problem(32, seed=7)
    system.train_phase("classifiers")
    system.loss(views, labels, phase="classifiers")[0].backward()
    assert all(weight.grad is not None for weight in system.phase_parameters("classifiers"))
    assert all(weight.grad is None for weight in system.gates.parameters())
    first = {key: value.clone() for key, value in system.state_dict().items()}
    assert (first["neck.1.running_mean"] != 0).any()
    system.zero_grad()
    fit(system, views, labels, epochs={"gates": 1})
    changed = {key for key, value in system.state_dict().items() if not torch.equal(value, first[key])}
    assert {key.split(".")[0] for key in changed} == {"gates"}
    assert len({key.split(".")[1] for key in changed}) == T - 2  # all gates
    parts = set(system.phase_parameters("gates")) | set(system.phase_parameters("classifiers"))
    assert parts == set(system.parameters())


def test_gates_have_the_published_sizes() -> None:
    system = FrameExit(2048, 200, neck_width=4096)
    assert len(system.classifiers) == 10
    assert len(system.gates) == 8
    shapes = [tuple(layer.weight.shape) for layer in system.gates[0].modules() if isinstance(layer, nn.Linear)]
    assert shapes == [(128, 4096), (64, 128), (1, 128)]
    assert system.config["first_exit"] == 0.99


def test_it_spends_frames_where_they_are_needed() -> None:
    system, (views, labels) = trained(), problem(600, seed=8)
    output = predict(system, views)
    used = frames(output).float()
    easy, hard = used[:300].mean(), used[300:].mean()
    assert hard > easy + 2
    # The same classifiers on the same mean number of random frames for every video, rounded up.
    count = math.ceil(float(used.mean()))
    picks = torch.rand(600, T, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :count]
    with torch.no_grad():
        heavy = views.heavy.gather(1, picks[:, :, None].expand(-1, -1, D))
        pooled = system.neck(heavy.flatten(0, 1)).unflatten(0, heavy.shape[:2]).amax(dim=1)
        plain = system.classifiers[count - 1](pooled)
    random = accuracy(BaselineOutput(plain, output.seen), labels)
    assert accuracy(output, labels) > random + 0.06
    assert used.mean() < 0.5 * T


def test_gates_close_earlier_with_a_larger_beta() -> None:
    views, labels = problem(600, seed=8)
    outputs = [predict(without_first_exit(trained(beta)), views) for beta in (1e-5, 1e-3, 10.0)]
    used = [float(frames(output).float().mean()) for output in outputs]
    assert used[0] > used[1] + 1 > used[2] + 2
    assert used[0] > 0.9 * T
    assert used[2] < 2.1  # every loss is good enough, and the first gate stands behind the second frame
    assert accuracy(outputs[0], labels) > accuracy(outputs[2], labels) + 0.1


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels = problem(40, seed=9)
    results = []
    for seed in (0, 0, 1):
        system = small()
        fit(system, views, labels, epochs=2, seed=seed, batch_size=16)
        results.append(system.run(views).probabilities)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("max_frames", [1, 2, 3])
def test_few_classifiers(max_frames: int) -> None:
    system, (views, labels) = small(max_frames=max_frames), problem(20, seed=10)
    fit(system, views, labels, epochs={"classifiers": 1})
    assert frames(system.run(views)).max() <= max_frames
    if max_frames < 3:
        with pytest.raises(InvalidArgument, match="at least 3"):
            system.loss(views, labels, phase="gates")
    history = fit(system, views, labels, epochs={"gates": 1})
    assert len(history) == (max_frames == 3)  # else there is nothing to train


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_frames": 0}, "max_frames"),
        ({"beta": 0.0}, "beta"),
        ({"gate_widths": (8,)}, "gate_widths"),
        ({"first_exit": math.nan}, "first_exit"),
        ({"multi_label": "yes"}, "multi_label"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        small(**given)
