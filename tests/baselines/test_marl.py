"""The agents that walk: where they start and go, when they stop, what they learn."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sosampler.baselines.base import Views, predict, video_gmacs
from sosampler.baselines.marl import LEFT, MARL, RIGHT, STAY
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import replaced, two_sets

SMALL: dict[str, Any] = {"heavy_width": 6, "num_classes": 4, "hidden": 8, "width": 5}


def random_views(videos: int = 5, candidates: int = 12, seed: int = 0, masked: bool = True) -> Views:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.randn(videos, candidates, 6, generator=generator)
    mask = torch.rand(videos, candidates, generator=generator) < 0.6
    mask[torch.arange(videos), torch.randint(candidates, (videos,), generator=generator)] = True
    # Light features are never read.
    return two_sets(heavy, torch.full((videos, candidates, 2), math.nan), mask if masked else None)


def lively(seed: int = 0, **settings: Any) -> MARL:
    """Random weights, large enough that agents differ in what they do."""
    torch.manual_seed(seed)
    system = MARL(**{**SMALL, **settings})
    for weight in system.parameters():
        torch.nn.init.normal_(weight, std=0.8)
    return system


def with_wishes(stay: float, left: float, right: float, **settings: Any) -> MARL:
    """A policy that always wants the same."""
    system = lively(**settings)
    torch.nn.init.zeros_(system.policy.weight)
    with torch.no_grad():
        system.policy.bias[:] = torch.tensor([stay, left, right])
    return system


def walk(system: MARL, heavy: Tensor, real: Tensor) -> tuple[Tensor, set[int], int]:
    """One video by plain loops: its prediction, the frames on the way and the rounds of decisions."""
    there = [t for t in range(len(real)) if real[t]]
    count, agents = len(there), system.agents
    at = [int((i + 0.5) * count / agents) for i in range(agents)]
    memory = [torch.zeros(1, system.config["hidden"]) for _ in at]
    visited, rounds = {there[rank] for rank in at}, 0
    for _ in range(system.max_steps):
        rounds += 1
        seen = [system.observe(heavy[there[rank]]).relu() for rank in at]
        padded = [torch.zeros_like(seen[0]), *seen, torch.zeros_like(seen[0])]
        moved = list(at)
        for agent, rank in enumerate(at):
            place = torch.tensor([rank / max(1, count - 1)])
            observed = torch.cat([padded[agent], padded[agent + 1], padded[agent + 2], place])
            memory[agent] = system.cell(observed[None], memory[agent])
            wishes = system.policy(memory[agent])[0].tolist()
            allowed = {STAY: True, LEFT: rank > 0, RIGHT: rank < count - 1}
            best = max((move for move in allowed if allowed[move]), key=lambda move: wishes[move])
            step = {STAY: 0, LEFT: -system.stride, RIGHT: system.stride}[best]
            moved[agent] = min(max(rank + step, 0), count - 1)
        if moved == at:
            break
        at = moved
        visited |= {there[rank] for rank in at}
    predictions = [system.classify(heavy[there[rank]]).softmax(0) for rank in at]
    return torch.stack(predictions).mean(0), visited, rounds


def pointing_videos(videos: int, seed: int) -> tuple[Views, Tensor]:
    """Three neighbouring frames of 24 show the class; the others tell only on which side these are."""
    generator = torch.Generator().manual_seed(seed)
    labels = F.one_hot(torch.randint(4, (videos,), generator=generator), 4)
    start = torch.randint(22, (videos, 1), generator=generator)
    time = torch.arange(24)
    before, after = time < start, time >= start + 3
    heavy = 0.5 * torch.randn(videos, 24, 6, generator=generator)
    heavy[:, :, :4] += 3 * labels[:, None] * (~before & ~after)[:, :, None]
    heavy[:, :, 4] += before.float() - after.float()
    return two_sets(heavy, torch.zeros(videos, 24, 1)), labels.float()


class AimlessWalk(MARL):
    """The same network, but its moves are random."""

    def advise(self, frames: Tensor, ranks: Tensor, real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        advice, state = super().advise(frames, ranks, real, state)
        blocked = advice < -1e30
        return torch.rand(advice.shape).masked_fill(blocked, torch.finfo(advice.dtype).min).log_softmax(2), state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("agents", "stride"), [(1, 1), (3, 1), (4, 3), (20, 2)])
def test_walks_as_the_rules_say(agents: int, stride: int, masked: bool) -> None:
    system = lively(agents=agents, stride=stride, max_steps=4)
    with torch.no_grad():
        system.policy.bias[STAY] += 1.5
    views = random_views(videos=25, masked=masked)
    output = system.run(views)
    assert output.steps is not None
    rounds = []
    for video in range(25):
        prediction, visited, steps = walk(system, views.heavy[video], views.real[video])
        assert set(output.seen_heavy[video].nonzero()[:, 0].tolist()) == visited
        assert int(output.steps[video]) == steps
        assert torch.allclose(output.probabilities[video], prediction, atol=1e-5)
        rounds.append(steps)
    assert not bool((output.seen_heavy & ~views.real).any())
    assert not bool(output.seen_light.any())
    if agents < 20:
        assert len(set(rounds)) > 1  # some stop earlier than others


@pytest.mark.parametrize("masked", [False, True])
def test_reads_only_what_it_says(masked: bool) -> None:
    system = lively(agents=3, max_steps=3)
    views = random_views(videos=40, masked=masked)
    output = system.run(views)
    assert float(output.seen_heavy.float().mean()) < 0.8
    heavy = views.heavy.masked_fill(~output.seen_heavy[:, :, None], math.nan)
    again = system.run(replaced(views, heavy=heavy))
    assert torch.equal(again.probabilities, output.probabilities)
    assert torch.equal(again.seen_heavy, output.seen_heavy)
    assert torch.allclose(output.probabilities.sum(1), torch.ones(40))


def test_training_never_leaves_the_video() -> None:
    system = lively(agents=4, stride=3, max_steps=6)
    views = random_views(videos=30)
    views = replaced(views, heavy=views.heavy.masked_fill(~views.real[:, :, None], math.nan))
    episode = system.episode(views, torch.Generator().manual_seed(0))
    count = views.real.sum(1)[:, None, None]
    assert bool(((episode.ranks >= 0) & (episode.ranks < count)).all())
    jump = (episode.ranks[:, 1:] - episode.ranks[:, :-1]).abs()
    assert int(jump.max()) == 3
    assert bool(episode.probabilities.isfinite().all())
    # Once nobody has moved, nobody moves again, and the rest does not count.
    rested = (jump == 0).all(2)
    assert torch.equal(episode.moving[:, 1:], ~(rested[:, :-1].cummax(1).values))
    assert bool(system.loss(views, torch.eye(4)[torch.arange(30) % 4])[0].isfinite())


def test_start_on_a_uniform_grid() -> None:
    real = torch.tensor([[True] * 10, [True] * 3 + [False] * 7, [False] * 4 + [True] + [False] * 5])
    system = MARL(**SMALL, agents=5)
    assert system.start(real).tolist() == [[1, 3, 5, 7, 9], [0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    assert system.run(random_views(candidates=1, masked=False)).seen_heavy.tolist() == [[True]] * 5


def test_stops_when_all_stay() -> None:
    system = with_wishes(1, 0, 0, agents=3, max_steps=50)
    output = system.run(random_views(masked=False))
    assert output.steps is not None
    assert output.steps.tolist() == [1] * 5
    assert output.seen_heavy[0].nonzero()[:, 0].tolist() == [2, 6, 10]


def test_goes_on_while_one_moves() -> None:
    system = with_wishes(1, 0, 2, agents=3, stride=2, max_steps=50)
    output = system.run(random_views(masked=False))
    # From 2, 6 and 10 to the end at 11, where right is not offered: 2 needs 5 moves; in the 6th round all stay.
    assert output.steps is not None
    assert output.steps.tolist() == [6] * 5
    assert output.seen_heavy[0].nonzero()[:, 0].tolist() == [2, 4, 6, 8, 10, 11]
    assert torch.allclose(output.probabilities, system.classify(random_views().heavy[:, 11]).softmax(1), atol=1e-6)


def test_stops_after_max_steps_and_undecided_agents_stay() -> None:
    output = with_wishes(0, 0, 1, agents=1, max_steps=2).run(random_views(masked=False))
    assert output.seen_heavy[0].nonzero()[:, 0].tolist() == [6, 7, 8]
    tie = with_wishes(0, 0, 0, agents=1, max_steps=2).run(random_views(masked=False))
    assert tie.seen_heavy[0].nonzero()[:, 0].tolist() == [6]


def test_videos_do_not_influence_each_other() -> None:
    system = lively(agents=3, max_steps=4)
    views = random_views(videos=12)
    together = system.run(views)
    for video in range(12):
        alone = system.run(views.some(torch.tensor([video])))
        assert torch.equal(alone.seen_heavy[0], together.seen_heavy[video])
        assert torch.allclose(alone.probabilities[0], together.probabilities[video], atol=1e-6)


def test_gradients_reach_every_weight_and_reward_alone_moves_agents() -> None:
    views, labels = random_views(masked=False), torch.eye(4)[[0, 1, 2, 3, 0]]
    generator = torch.Generator().manual_seed(0)
    system = lively(max_steps=3)
    total, parts = system.loss(views, labels, generator=generator, progress=1.0)
    total.backward()
    for name, weight in system.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().sum()) > 0, name
    assert float(total.detach()) == pytest.approx(float(parts["prediction"] + parts["policy"]), rel=1e-5)
    blind = lively(max_steps=3, policy_weight=0, entropy_weight=0)
    blind.loss(views, labels, generator=generator)[0].backward()
    assert blind.classify.weight.grad is not None
    for layer in (blind.observe, blind.cell, blind.policy):
        assert all(weight.grad is None or not bool(weight.grad.any()) for weight in layer.parameters())


def test_entropy_bonus_fades() -> None:
    system, views, labels = lively(entropy_weight=0.5), random_views(masked=False), torch.eye(4)[[0, 1, 2, 3, 0]]
    for progress in (0.0, 0.5, 1.0):
        total, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0), progress=progress)
        wanted = parts["prediction"] + parts["policy"] - 0.5 * (1 - progress) * parts["entropy"]
        assert float(total.detach()) == pytest.approx(float(wanted), rel=1e-5)


def expected_gain(system: MARL, views: Views, labels: Tensor) -> Tensor:
    """Expected growth of p_label over an episode of one video, over all sequences of moves."""
    real = views.real

    def known(ranks: Tensor) -> Tensor:
        return (system.average(views.heavy[:, ranks[0]]) * labels).sum().detach()

    def value(ranks: Tensor, state: Tensor, left: int) -> Tensor:
        if not left:
            return known(ranks)
        advice, state = system.advise(views.heavy[:, ranks[0]], ranks, real, state)
        total = torch.zeros(())
        for moves in itertools.product(range(3), repeat=system.agents):
            chance = torch.stack([advice[0, agent, move] for agent, move in enumerate(moves)]).sum().exp()
            if float(chance.detach()) > 0:
                after = system.move(ranks, torch.tensor([moves]), real)
                done = all(move == STAY for move in moves)
                total = total + chance * value(after, state, 0 if done else left - 1)
        return total

    start = system.start(real)
    return value(start, torch.zeros(1, system.agents, system.config["hidden"]), system.max_steps) - known(start)


@pytest.mark.parametrize(("agents", "steps"), [(1, 1), (2, 1), (2, 2)])
def test_policy_gradient_is_that_of_expected_reward(agents: int, steps: int) -> None:
    system = lively(seed=1, agents=agents, max_steps=steps, discount=1.0, rollouts=3, entropy_weight=0, hidden=4)
    views, labels = random_views(videos=1, candidates=5, seed=2, masked=False), torch.eye(4)[:1]
    weights = [*system.observe.parameters(), *system.cell.parameters(), *system.policy.parameters()]
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(expected_gain(system, views, labels), weights)])
    rows = torch.zeros(15_000, dtype=torch.long)
    total, parts = system.loss(views.some(rows), labels[rows], generator=torch.Generator().manual_seed(0))
    sampled = torch.cat([g.flatten() for g in torch.autograd.grad(total, weights)])
    sampled = -sampled * agents * steps  # the loss is a mean over agents and steps
    assert float(parts["reward"]) == pytest.approx(float(expected_gain(system, views, labels).detach()), abs=0.01)
    assert float(F.cosine_similarity(sampled, exact, dim=0)) > 0.98
    assert float(sampled.norm() / exact.norm()) == pytest.approx(1, abs=0.1)


def test_costs_are_those_of_its_layers() -> None:
    system = with_wishes(0, 0, 1, agents=3, max_steps=4)
    views = random_views(videos=1, masked=False)
    with FlopCounterMode(display=False) as counter:
        output = system.run(views)
    own = float(system.own_gmacs(output)[0])
    assert own == pytest.approx(counter.get_total_flops() / 2 / 1e9)
    assert float(system.own_gmacs(output._replace(steps=torch.tensor([1])))[0]) < own
    whole = video_gmacs(system, output, {"heavy": 4.0, "light": 0.1})
    assert float(whole[0]) == pytest.approx(4 * int(output.seen_heavy.sum()), abs=1e-3)


def test_same_seed_same_weights_and_config_builds_it_again() -> None:
    views, labels = pointing_videos(32, seed=0)
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        system = MARL(**SMALL, agents=3)
        fit(system, views, labels, epochs=2, seed=5)
        twins.append(system)
    assert all(torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))
    again = MARL(**json.loads(json.dumps(twins[0].config)))
    again.load_state_dict(twins[0].state_dict())
    assert torch.equal(again.run(views).probabilities, twins[0].run(views).probabilities)
    assert torch.equal(again.run(views).seen_heavy, twins[0].run(views).seen_heavy)


def test_several_labels() -> None:
    system = lively(multi_label=True, max_steps=3)
    labels = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]])
    total, parts = system.loss(random_views(masked=False), labels)
    assert bool(total.isfinite())
    still = with_wishes(1e4, 0, 0, multi_label=True, agents=2, max_steps=1)
    views = random_views(masked=False)
    output, (_, parts) = still.run(views), still.loss(views, labels)
    losses = F.binary_cross_entropy(output.probabilities, labels, reduction="none").sum(1) / labels.sum(1)
    assert float(parts["prediction"]) == pytest.approx(float(losses.mean()))
    alone = still.classify(views.heavy[:, [3, 9]]).sigmoid().mean(1)
    assert torch.allclose(output.probabilities, alone, atol=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"agents": 0}, {"stride": 0}, {"max_steps": 0}, {"rollouts": 1}, {"discount": -1}, {"num_classes": 1}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        MARL(**{**SMALL, **wrong})


def test_learns_where_to_go() -> None:
    views, labels = pointing_videos(512, seed=1)
    unseen, truth = pointing_videos(512, seed=2)
    right, frames = {}, {}
    for kind, steps in ((MARL, 4), (AimlessWalk, 8)):  # who stays now and then needs more steps for as many frames
        torch.manual_seed(0)
        system = kind(6, 4, agents=3, stride=2, max_steps=steps, hidden=16, width=8, rollouts=2)
        fit(system, views, labels, epochs=20, lr=1e-2)
        output = predict(system, unseen)
        right[kind] = float((output.probabilities.argmax(1) == truth.argmax(1)).float().mean())
        frames[kind] = float(output.seen_heavy.sum(1).float().mean())
    assert frames[MARL] <= frames[AimlessWalk]
    assert right[MARL] > right[AimlessWalk] + 0.25
    assert right[MARL] > 0.85
