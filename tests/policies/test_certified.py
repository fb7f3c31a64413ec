"""The certified search: its bound must hold, its subset should be the best one, and both against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sosampler.errors import InvalidArgument
from sosampler.policies import certified
from sosampler.policies.certified import (
    BranchAndBound,
    Nodes,
    certified_mean_logits,
    improve_by_swaps,
    loss_of,
    relax,
)
from sosampler.policies.optimal import OptimalChoice, clip_loss, optimal_mean_logits
from sosampler.samplers.sosampler import log_confidence


def random_problem(
    batch: int, candidates: int, classes: int, *, seed: int, scale: float = 3.0, most_labels: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = torch.zeros(batch, classes, dtype=torch.bool)
    for row in labels:
        row[rng.choice(classes, rng.integers(1, most_labels + 1), replace=False)] = True
    return torch.from_numpy(rng.normal(0, scale, (batch, candidates, classes))), labels


def videos_with_distractors(batch: int, candidates: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of the video's class with margin N(4, 2), the others confident in one of six wrong classes."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (batch, candidates, classes))
    label = rng.integers(classes, size=(batch, 1))
    wrong = (label + 1 + rng.integers(classes - 1, size=(batch, 6))) % classes
    shown = np.take_along_axis(wrong, rng.integers(6, size=(batch, candidates)), 1)
    shown = np.where(rng.random((batch, candidates)) < rng.uniform(0.02, 0.6, (batch, 1)), label, shown)
    np.put_along_axis(
        logits,
        shown[..., None],
        np.take_along_axis(logits, shown[..., None], 2) + rng.normal(4, 2, (batch, candidates, 1)),
        2,
    )
    return torch.from_numpy(logits), torch.from_numpy(label == np.arange(classes))


def value_of(choice: OptimalChoice, logits: torch.Tensor, labels: torch.Tensor, activation: str) -> torch.Tensor:
    chosen = logits.gather(1, choice.positions[..., None].expand(-1, -1, logits.shape[2]))
    return log_confidence(chosen.mean(1), labels, activation)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0])
@pytest.mark.parametrize(("candidates", "classes", "number"), [(8, 5, 3), (12, 22, 6), (14, 3, 4), (9, 30, 8)])
def test_small_problems_are_solved_as_by_enumeration(
    candidates: int, classes: int, number: int, scale: float, activation: str
) -> None:
    logits, labels = random_problem(12, candidates, classes, seed=candidates, scale=scale, most_labels=3)
    exact = optimal_mean_logits(logits, labels, number, activation=activation)
    found = certified_mean_logits(logits, labels, number, activation=activation, tolerance=1e-9)
    assert found.method == "certified"
    assert torch.allclose(found.log_confidence, value_of(found, logits, labels, activation), atol=1e-10)
    assert (found.log_bound >= exact.log_confidence - 1e-9).all()  # a bound that holds
    assert (found.log_confidence <= exact.log_confidence + 1e-9).all()
    assert torch.allclose(found.log_confidence, exact.log_confidence, atol=2e-9, rtol=0)
    assert (found.positions == exact.positions).all(1).double().mean() >= 0.9  # but for ties within rounding
    assert found.gap.max() <= 1e-8
    usual = certified_mean_logits(logits, labels, number, activation=activation)
    assert usual.gap.max() <= 5e-4
    assert (usual.gap >= exact.log_confidence.exp() - usual.log_confidence.exp() - 1e-9).all()


@pytest.mark.parametrize("max_nodes", [1, 2, 5])
def test_the_bound_holds_when_the_budget_ends_early(max_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "improve_by_swaps", lambda loss, chosen, free: chosen)
    logits, labels = random_problem(150, 12, 6, seed=7, scale=8.0)
    exact = optimal_mean_logits(logits, labels, 4)
    found = certified_mean_logits(logits, labels, 4, max_nodes=max_nodes)
    true_gap = exact.log_confidence.exp() - found.log_confidence.exp()
    assert (found.gap >= true_gap - 1e-12).all()
    assert found.gap.max() > 1e-3, "the search was to end before it was done"
    if max_nodes == 1:
        assert true_gap.max() > 1e-3


def test_masked_candidates_are_never_chosen_and_the_rest_is_solved_alone() -> None:
    logits, labels = random_problem(25, 13, 5, seed=8)
    mask = torch.from_numpy(np.random.default_rng(8).random((25, 13)) < 0.7)
    mask[:, :5] = True
    mask[0, 5:] = False  # one video has exactly as many as are wanted
    exact = optimal_mean_logits(logits, labels, 5, mask=mask)
    found = certified_mean_logits(logits, labels, 5, mask=mask)
    assert mask.gather(1, found.positions).all()
    assert found.positions[0].tolist() == [0, 1, 2, 3, 4]
    assert torch.allclose(found.log_confidence, exact.log_confidence, atol=2e-9)


def test_long_videos_reach_a_gap_below_a_thousandth() -> None:
    logits, labels = videos_with_distractors(60, 100, 22, seed=0)
    found = certified_mean_logits(logits, labels, 32)
    assert (found.gap < 1e-3).double().mean() >= 0.99
    assert (found.gap < 1e-6).double().mean() >= 0.9
    middling = (found.log_confidence.exp() > 0.1) & (found.log_confidence.exp() < 0.9)
    assert middling.double().mean() > 0.3, "the test videos were to be neither sure nor lost"
    swapped = random_neighbours(found.positions, 100, seed=1)
    chosen = logits.gather(1, swapped[..., None].expand(-1, -1, 22))
    assert (log_confidence(chosen.mean(1), labels) <= found.log_bound + 1e-12).all()


def random_neighbours(positions: torch.Tensor, candidates: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    rows = positions.numpy().copy()
    for row in rows:
        row[rng.integers(len(row))] = rng.choice(np.setdiff1d(np.arange(candidates), row))
    return torch.from_numpy(rows)


def test_videos_of_few_different_frames_are_solved_by_how_many_of_each() -> None:
    scenes, labels = random_problem(10, 4, 12, seed=11, scale=4.0)
    which = torch.from_numpy(np.sort(np.random.default_rng(11).integers(4, size=(10, 40)), 1))
    logits = scenes.gather(1, which[..., None].expand(-1, -1, 12))
    found = certified_mean_logits(logits, labels, 8, max_nodes=100)
    assert found.gap.max() < 1e-8
    for b in range(10):
        best, sizes = -np.inf, torch.bincount(which[b], minlength=4).tolist()
        for counts in np.ndindex(*(min(size, 8) + 1 for size in sizes)):
            if sum(counts) == 8:
                mean = (torch.tensor(counts, dtype=torch.float64)[:, None] * scenes[b]).sum(0) / 8
                best = max(best, log_confidence(mean[None], labels[b : b + 1]).item())
        assert found.log_confidence[b].item() == pytest.approx(best, abs=1e-9)
        for scene in range(4):  # the earliest frames of each scene
            members = torch.nonzero(which[b] == scene)[:, 0].tolist()
            taken = [p for p in found.positions[b].tolist() if p in members]
            assert taken == members[: len(taken)]


def test_a_video_alone_is_solved_as_among_others_and_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = videos_with_distractors(12, 30, 8, seed=3)
    together = certified_mean_logits(logits, labels, 10)
    monkeypatch.setattr(certified, "_MAX_NUMBERS", 30 * 30 * 5)
    monkeypatch.setattr(certified, "_MAX_NODES", 3)
    chunked = certified_mean_logits(logits, labels, 10)
    assert torch.allclose(together.log_confidence, chunked.log_confidence, atol=2e-9)
    assert certified_mean_logits(logits[:0], labels[:0], 10).positions.shape == (0, 10)


def test_float32_logits_far_apart_do_no_harm() -> None:
    logits, labels = random_problem(20, 12, 4, seed=5, scale=200.0)
    logits = logits.float()
    exact = optimal_mean_logits(logits, labels, 5)
    found = certified_mean_logits(logits, labels, 5)
    assert torch.isfinite(found.log_bound).all()
    assert torch.allclose(found.log_confidence, exact.log_confidence, atol=1e-8)


def test_lost_labels_of_a_sigmoid_are_counted_to_the_last_digit() -> None:
    logits = torch.full((1, 6, 2), -20.5, dtype=torch.float64)
    found = certified_mean_logits(logits, torch.tensor([[1, 0]]), 2, activation="sigmoid")
    assert found.log_confidence.item() == pytest.approx(-20.5 - np.log1p(np.exp(-20.5)), abs=1e-12, rel=0)
    assert found.positions.tolist() == [[0, 1]]


@pytest.mark.parametrize("classes", [4, 40])  # the smaller system is in classes, or in candidates
def test_relaxation_closes_its_duality_gap_and_bounds_every_subset(classes: int) -> None:
    logits, labels = random_problem(40, 20, classes, seed=6)
    loss = clip_loss(logits, labels, 6, "softmax")
    free = torch.ones(40, 20, dtype=torch.bool)
    free[:, 17:] = False
    base = loss.rows[:, 17]  # one that is chosen already
    never = torch.full((40,), float("inf"), dtype=torch.float64)
    result = relax(loss, base, free, torch.full((40,), 5), never, 1e-10)
    assert torch.allclose(result.weights.sum(1), torch.tensor(5.0, dtype=torch.float64))
    assert (result.weights[:, 17:] == 0).all()
    assert result.weights.min() >= 0
    assert result.weights.max() <= 1
    value = loss.value(base + torch.einsum("bt,btk->bk", result.weights, loss.rows))
    assert (value - result.bound).abs().max() < 1e-9
    rng = np.random.default_rng(6)
    for _ in range(50):
        chosen = torch.zeros(40, 20, dtype=torch.bool)
        for row in chosen:
            row[rng.choice(17, 5, replace=False)] = True
        chosen[:, 17] = True
        assert (loss_of(loss, chosen) >= result.bound - 1e-12).all()


def test_swaps_end_where_no_exchange_helps() -> None:
    logits, labels = random_problem(20, 15, 6, seed=9)
    loss = clip_loss(logits, labels, 5, "softmax")
    start = torch.zeros(20, 15, dtype=torch.bool)
    start[:, :5] = True
    free = torch.ones(20, 15, dtype=torch.bool)
    free[:, 13:] = False
    chosen = improve_by_swaps(loss, start, free)
    assert (chosen.sum(1) == 5).all()
    assert not chosen[:, 13:].any()
    assert (start != chosen).any(1).double().mean() > 0.9
    best = loss_of(loss, chosen)
    for out in range(13):
        for new in range(13):
            possible = chosen[:, out] & ~chosen[:, new]
            neighbour = chosen.clone()
            neighbour[:, out], neighbour[:, new] = False, True
            assert (loss_of(loss, neighbour)[possible] >= best[possible] - 1e-12).all()


def test_branching_loses_no_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is split off is closed with a bound: with worthless bounds the search must walk the whole tree."""
    offered: set[tuple[int, ...]] = set()
    settle = BranchAndBound._settle

    def watch(self: BranchAndBound, leaves: Nodes, takes_rest: torch.Tensor) -> None:
        chosen = (leaves.fixed == 1) | ((leaves.fixed == 0) & takes_rest[:, None])
        offered.update(tuple(torch.nonzero(row)[:, 0].tolist()) for row in chosen)
        settle(self, leaves, takes_rest)

    monkeypatch.setattr(BranchAndBound, "_settle", watch)
    monkeypatch.setattr(BranchAndBound, "_worth", lambda self, video, bound: torch.ones_like(bound, dtype=torch.bool))
    logits, labels = random_problem(1, 7, 3, seed=1)
    certified_mean_logits(logits, labels, 3, max_nodes=10_000)
    assert len(offered) == 35


@pytest.mark.parametrize(("name", "value"), [("tolerance", 0), ("tolerance", "low"), ("max_nodes", 0)])
def test_settings_outside_their_range_are_refused(name: str, value: object) -> None:
    logits, labels = random_problem(1, 6, 3, seed=0)
    with pytest.raises(InvalidArgument, match=name):
        certified_mean_logits(logits, labels, 2, **{name: value})


@pytest.mark.parametrize("numbers_at_once", [2**22, 5])
def test_equal_rows_are_those_without_a_distance(numbers_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "_MAX_NUMBERS", numbers_at_once)
    generator = torch.Generator().manual_seed(0)
    for width in (1, 3, 4, 9):
        for values in (1, 2, 5):  # the more values, the fewer rows are equal
            rows = torch.randint(0, values, (4, 12, width), generator=generator).double()
            expected = torch.cdist(rows, rows, p=float("inf")) == 0
            assert torch.equal(certified._equal_rows(rows), expected)
