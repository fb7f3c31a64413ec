"""The semi-optimal and the optimal policy against brute force written out in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from sosampler.errors import InvalidArgument
from sosampler.policies import positional as rules
from sosampler.policies.optimal import (
    ClipLoss,
    OptimalChoice,
    beam_search,
    clip_loss,
    optimal_by_enumeration,
    optimal_mean_logits,
    optimal_pooled,
    subset_blocks,
)
from sosampler.samplers.sosampler import label_confidence, log_confidence, top_n

Pool = Callable[[torch.Tensor], torch.Tensor]


def random_labels(batch: int, classes: int, most: int, rng: np.random.Generator) -> torch.Tensor:
    labels = torch.zeros(batch, classes, dtype=torch.bool)
    for row in labels:
        row[rng.choice(classes, rng.integers(1, most + 1), replace=False)] = True
    return labels


def plain_log_confidence(logits: list[float], labels: list[bool], activation: str) -> float:
    if activation == "softmax":
        total = math.log(sum(math.exp(x) for x in logits))
        logs = [x - total for x in logits]
    else:
        logs = [-math.log1p(math.exp(-x)) for x in logits]
    true = [value for value, is_label in zip(logs, labels, strict=True) if is_label]
    return sum(true) / len(true)


def brute_force(
    features: torch.Tensor, labels: torch.Tensor, number: int, pool: Pool, activation: str, mask: torch.Tensor | None
) -> tuple[list[list[int]], list[float]]:
    """Best subset and log confidence of each video, one subset after the other."""
    subsets_found, values = [], []
    for b in range(len(features)):
        real = range(features.shape[1]) if mask is None else [t for t in range(features.shape[1]) if mask[b, t]]
        best, best_value = [], -math.inf
        for subset in itertools.combinations(real, number):
            logits = pool(features[b, list(subset)]).tolist()
            value = plain_log_confidence(logits, labels[b].tolist(), activation)
            if value > best_value + 1e-12:
                best, best_value = list(subset), value
        subsets_found.append(best)
        values.append(best_value)
    return subsets_found, values


class TestTopN:
    def test_is_the_numpy_rule_and_ties_go_to_the_earlier(self) -> None:
        scores = torch.randint(0, 4, (200, 12), generator=torch.Generator().manual_seed(0)).float()
        for number in (1, 5, 12):
            expected = np.stack([rules.top(row.numpy(), number) for row in scores])
            assert top_n(scores, number).tolist() == expected.tolist()

    def test_never_takes_a_masked_candidate_even_among_the_worst_scores(self) -> None:
        scores = torch.tensor([[-math.inf, 9.0, -math.inf, math.nan, 1.0]])
        mask = torch.tensor([[True, False, True, True, False]])
        assert top_n(scores, 1, mask).tolist() == [[0]]
        assert top_n(scores, 3, mask).tolist() == [[0, 2, 3]]

    def test_nan_is_the_lowest_score(self) -> None:
        assert top_n(torch.tensor([[math.nan, 0.0, 1.0]]), 2).tolist() == [[1, 2]]

    def test_whole_numbers_are_scores_too(self) -> None:
        scores = torch.tensor([[3, -1, 7, 7, 0]])
        for kind in (torch.int64, torch.int32, torch.float16):
            assert top_n(scores.to(kind), 2).tolist() == [[2, 3]]
        mask = torch.tensor([[True, True, False, False, True]])
        assert top_n(scores, 2, mask).tolist() == [[0, 4]]
        assert top_n(scores > 0, 2).tolist() == [[0, 2]]

    def test_too_few_real_candidates_are_refused(self) -> None:
        mask = torch.tensor([[True, True, True], [True, False, False]])
        with pytest.raises(InvalidArgument, match="num_frames=2 is more than the 1 real"):
            top_n(torch.zeros(2, 3), 2, mask)
        with pytest.raises(InvalidArgument, match="num_frames=4"):
            top_n(torch.zeros(2, 3), 4)
        with pytest.raises(InvalidArgument, match="num_frames=0"):
            top_n(torch.zeros(2, 3), 0)
        with pytest.raises(InvalidArgument, match=r"shape \[1, 3\]"):
            top_n(torch.zeros(2, 3), 1, mask[:1])


class TestConfidence:
    def test_is_the_geometric_mean_of_the_true_labels_probabilities(self) -> None:
        probs = torch.tensor([[[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]]])
        assert label_confidence(probs, torch.tensor([[1, 0, 0]]))[0].tolist() == pytest.approx([0.5, 0.1])
        both = label_confidence(probs, torch.tensor([[1, 0, 1]]))
        assert both[0].tolist() == pytest.approx([math.sqrt(0.15), 0.1])
        assert probs.amax(-1)[0].tolist() == pytest.approx([0.5, 0.8])

    def test_probability_zero_is_clamped_and_other_classes_do_not_matter(self) -> None:
        probs = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
        assert label_confidence(probs, torch.tensor([[1, 0]])).item() == pytest.approx(1e-12)
        assert label_confidence(probs, torch.tensor([[0, 1]])).item() == 1.0
        assert log_confidence(torch.tensor([[0.0, -math.inf]]), torch.tensor([[1, 0]])).item() == 0.0

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    def test_from_logits_it_is_the_plain_formula(self, activation: str) -> None:
        logits = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        labels = random_labels(4, 5, 3, np.random.default_rng(1))
        for b, t in itertools.product(range(4), range(3)):
            expected = plain_log_confidence(logits[b, t].tolist(), labels[b].tolist(), activation)
            assert log_confidence(logits, labels, activation)[b, t].item() == pytest.approx(expected)

    def test_a_video_without_a_label_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="no label"):
            label_confidence(torch.full((2, 3, 2), 0.5), torch.tensor([[1, 0], [0, 0]]))
        with pytest.raises(InvalidArgument, match=r"\[2, 2\]"):
            label_confidence(torch.full((2, 3, 2), 0.5), torch.tensor([[1, 0]]))


class TestSubsets:
    @pytest.mark.parametrize(("candidates", "number"), [(1, 1), (5, 2), (8, 8), (9, 4)])
    def test_are_all_combinations_in_order_however_they_are_blocked(self, candidates: int, number: int) -> None:
        expected = [list(c) for c in itertools.combinations(range(candidates), number)]
        blocks = list(subset_blocks(candidates, number, block=7))
        assert max(map(len, blocks)) <= 7
        assert torch.cat(blocks).tolist() == expected


LINEAR = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
POOLS: dict[str, Pool] = {
    "mean": lambda x: x.mean(-2),
    "max": lambda x: x.amax(-2) @ LINEAR,
}


class TestOptimal:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
    @pytest.mark.parametrize("pool", ["mean", "max"])
    def test_is_brute_force(self, pool: str, activation: str, masked: bool) -> None:
        rng = np.random.default_rng(3)
        classes = {"mean": 6, "max": 4}[pool]
        for number, candidates in ((1, 5), (3, 6), (4, 8), (7, 8)):
            features = torch.from_numpy(rng.normal(0, 3, (5, candidates, 6)))
            labels = random_labels(5, classes, 3, rng)
            mask = None
            if masked:
                mask = torch.ones(5, candidates, dtype=torch.bool)
                for row in mask[: 5 if candidates > number else 0]:
                    row[rng.integers(candidates)] = False
            positions, values = brute_force(features, labels, number, POOLS[pool], activation, mask)
            results = [
                optimal_pooled(features, labels, number, pool_logits=POOLS[pool], activation=activation, mask=mask)
            ]
            if pool == "mean":
                results.append(optimal_mean_logits(features, labels, number, activation=activation, mask=mask))
            for result in results:
                assert result.positions.tolist() == positions
                assert result.log_confidence.tolist() == pytest.approx(values)
                assert result.method == "enumeration"
                assert result.gap.max() == 0

    def test_with_one_frame_the_semi_optimal_policy_is_optimal(self) -> None:
        logits = 3 * torch.randn(50, 20, 7, generator=torch.Generator().manual_seed(2))
        labels = random_labels(50, 7, 3, np.random.default_rng(2))
        for activation in ("softmax", "sigmoid"):
            probs = logits.softmax(-1) if activation == "softmax" else logits.sigmoid()
            alone = top_n(label_confidence(probs.double(), labels), 1)
            assert torch.equal(alone, optimal_mean_logits(logits, labels, 1, activation=activation).positions)

    def test_is_at_least_as_confident_as_the_semi_optimal_policy_and_sometimes_more(self) -> None:
        logits = 3 * torch.randn(50, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        labels = random_labels(50, 5, 1, np.random.default_rng(4))
        best = optimal_mean_logits(logits, labels, 4)
        alone = top_n(label_confidence(logits.softmax(-1), labels), 4)
        value = log_confidence(logits.gather(1, alone[..., None].expand(-1, -1, 5)).mean(1), labels)
        assert (best.log_confidence >= value - 1e-12).all()
        assert (best.log_confidence > value + 1e-6).any()

    def test_equal_frames_go_to_the_earliest(self) -> None:
        frames = torch.tensor([[2.0, 0.1, 0.3], [0.7, 0.2, 0.1]])
        logits = frames[torch.tensor([1, 0, 0, 1, 0, 0, 1, 0])][None]
        labels = torch.tensor([[1, 0, 0]])
        assert optimal_mean_logits(logits, labels, 3).positions.tolist() == [[1, 2, 4]]
        assert optimal_mean_logits(logits, labels, 6).positions.tolist() == [[0, 1, 2, 4, 5, 7]]
        assert optimal_mean_logits(logits, labels, 3, max_subsets=1).positions.tolist() == [[1, 2, 4]]
        assert optimal_mean_logits(logits, labels, 6, max_subsets=1).positions.tolist() == [[0, 1, 2, 4, 5, 7]]

    @pytest.mark.parametrize("block", [1, 2, 100])
    @pytest.mark.parametrize(("gain", "winner"), [(5e-13, 0), (5e-12, 1)])
    def test_sums_in_another_order_are_ties(self, gain: float, winner: int, block: int) -> None:
        """Values closer than rounding go to the earlier subset, within a block of subsets and across blocks."""
        values = torch.tensor([-1.0, -1.0 + gain, -2.0], dtype=torch.float64)
        best = optimal_by_enumeration(lambda p: values[p[..., 0]], 1, 3, 1, block=block)
        assert best.positions.tolist() == [[winner]]

    @pytest.mark.parametrize("block", [1, 4])
    def test_exact_ties_go_to_the_earliest_subset(self, block: int) -> None:
        best = optimal_by_enumeration(lambda p: torch.zeros(p.shape[:2], dtype=torch.float64), 2, 5, 3, block=block)
        assert best.positions.tolist() == [[0, 1, 2]] * 2

    def test_as_many_subsets_as_allowed_are_enumerated(self) -> None:
        logits, labels = torch.randn(2, 6, 3), torch.tensor([[1, 0, 0], [0, 1, 0]])
        assert optimal_mean_logits(logits, labels, 3, max_subsets=20).method == "enumeration"
        assert optimal_mean_logits(logits, labels, 3, max_subsets=19).method == "certified"
        values = lambda p: torch.zeros(p.shape[:2])  # noqa: E731
        assert optimal_by_enumeration(values, 1, 6, 3, max_subsets=20).method == "enumeration"
        with pytest.raises(InvalidArgument, match="20 subsets, more than max_subsets=19"):
            optimal_by_enumeration(values, 1, 6, 3, max_subsets=19)

    def test_frames_in_another_order_are_chosen_all_the_same(self) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = 3 * torch.randn(20, 10, 5, dtype=torch.float64, generator=generator)
        labels = random_labels(20, 5, 2, np.random.default_rng(5))
        order = torch.randperm(10, generator=generator)
        for most in (20_000, 1):
            chosen = optimal_mean_logits(logits, labels, 4, max_subsets=most).positions
            shuffled = optimal_mean_logits(logits[:, order], labels, 4, max_subsets=most).positions
            assert torch.equal(order[shuffled].sort(1).values, chosen)
            assert (chosen.diff(dim=1) > 0).all()

    def test_what_masked_candidates_hold_does_not_matter(self) -> None:
        logits = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(6))
        labels = random_labels(6, 4, 2, np.random.default_rng(6))
        mask = torch.ones(6, 8, dtype=torch.bool)
        mask[:, 6:] = False
        for most in (20_000, 1):
            alone = optimal_mean_logits(logits[:, :6], labels, 3, max_subsets=most)
            padded = logits.clone()
            padded[:, 6:] = math.nan
            among = optimal_mean_logits(padded, labels, 3, mask=mask, max_subsets=most)
            assert torch.equal(alone.positions, among.positions)
            assert torch.allclose(alone.log_confidence, among.log_confidence, atol=1e-12)

    def test_inputs_that_cannot_be_served_are_refused(self) -> None:
        logits, labels = torch.zeros(1, 30, 3), torch.tensor([[1, 0, 0]])
        with pytest.raises(InvalidArgument, match="142506 subsets, more than max_subsets=20000"):
            optimal_pooled(logits, labels, 5, pool_logits=POOLS["mean"])
        for most in (20_000, 1):
            with pytest.raises(InvalidArgument, match="not finite"):
                optimal_mean_logits(logits / 0, labels, 2, max_subsets=most)
            with pytest.raises(InvalidArgument, match="activation='relu'"):
                optimal_mean_logits(logits, labels, 2, activation="relu", max_subsets=most)
            with pytest.raises(InvalidArgument, match="more than the 30 real"):
                optimal_mean_logits(logits, labels, 31, max_subsets=most)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_derivatives_are_those_of_autograd(activation: str) -> None:
    """By which the certified search finds its bounds; wrong ones would make it slow, not wrong."""
    logits = 2 * torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    labels = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]])
    loss = clip_loss(logits, labels, 2, activation)
    weights = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for video in range(3):
        alone = loss.at(slice(video, video + 1))

        def value(w: torch.Tensor, alone: ClipLoss = alone) -> torch.Tensor:
            return alone.value((w[:, None] * alone.rows[0]).sum(0)[None])[0]

        total = (weights[video][:, None] * alone.rows[0]).sum(0)[None]
        slope = alone.rows[0] @ alone.gradient(total)[0]
        torch.testing.assert_close(slope, torch.autograd.functional.jacobian(value, weights[video]))
        factor = alone.hessian_factor(total)[0]
        torch.testing.assert_close(factor @ factor.T, torch.autograd.functional.hessian(value, weights[video]))


def spread_classifier(seed: int, batch: int, candidates: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Depends on pairs of frames, so that no frame has a value of its own."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randn(batch, candidates, candidates, dtype=torch.float64, generator=generator)

    def clip_log_confidence(positions: torch.Tensor) -> torch.Tensor:
        assert (positions.diff(dim=-1) > 0).all(), "in time order"
        videos = torch.arange(batch)[:, None, None, None]
        return pairs[videos, positions[..., :, None], positions[..., None, :]].mean((-1, -2)) - 5

    return clip_log_confidence


class TestBeam:
    @pytest.mark.parametrize("number", [1, 3, 6, 7])
    @pytest.mark.parametrize("masked", [False, True])
    def test_of_full_width_is_enumeration(self, number: int, masked: bool) -> None:
        classifier = spread_classifier(0, 6, 8)
        mask = None
        if masked:
            mask = torch.ones(6, 8, dtype=torch.bool)
            mask[torch.arange(6), torch.arange(6)] = False
        exact = optimal_by_enumeration(classifier, 6, 8, number, mask=mask, block=11)
        beam = beam_search(classifier, 6, 8, number, width=math.comb(8, 4), mask=mask, swaps=False, block=13)
        assert torch.equal(beam.positions, exact.positions)
        assert torch.allclose(beam.log_confidence, exact.log_confidence)
        assert beam.method == "beam"
        assert beam.log_bound.tolist() == [0.0] * 6

    def test_a_narrow_one_reports_its_own_value_and_swaps_leave_no_better_neighbour(self) -> None:
        classifier = spread_classifier(1, 10, 12)
        exact = optimal_by_enumeration(classifier, 10, 12, 5)
        greedy = beam_search(classifier, 10, 12, 5, width=1, swaps=False)
        swapped = beam_search(classifier, 10, 12, 5, width=1)
        for result in (greedy, swapped):
            assert torch.equal(classifier(result.positions[:, None])[:, 0], result.log_confidence)
            assert (result.log_confidence <= exact.log_confidence + 1e-12).all()
        assert (swapped.log_confidence >= greedy.log_confidence).all()
        assert swapped.log_confidence.sum() > greedy.log_confidence.sum() + 0.01
        for b, chosen in enumerate(swapped.positions.tolist()):
            for out, new in itertools.product(chosen, set(range(12)) - set(chosen)):
                neighbour = torch.tensor(sorted({*chosen, new} - {out}))
                value = classifier(neighbour.expand(10, 1, -1))[b, 0]
                assert value <= swapped.log_confidence[b] + 1e-6

    def test_asks_about_every_set_once_and_never_about_too_many_at_a_time(self) -> None:
        seen: list[tuple[int, ...]] = []

        def classifier(positions: torch.Tensor) -> torch.Tensor:
            assert positions.shape[1] <= 5
            seen.extend(map(tuple, positions[0].tolist()))
            return -positions.double().sum(-1) - 1

        result = beam_search(classifier, 1, 7, 3, width=100, swaps=False, block=5)
        assert result.positions.tolist() == [[0, 1, 2]]
        assert len(seen) == len(set(seen)) == 7 + 21 + 35

    def test_videos_that_nothing_improves_are_not_asked_about_again(self) -> None:
        classifier = spread_classifier(1, 10, 12)
        mask = torch.ones(10, 12, dtype=torch.bool)
        mask[3, 5:] = False  # nothing to exchange
        asked: list[list[int]] = []

        def narrowed(videos: np.ndarray) -> Callable[[torch.Tensor], torch.Tensor]:
            asked.append(videos.tolist())

            def some(positions: torch.Tensor) -> torch.Tensor:
                everybody = positions[:1].expand(10, -1, -1).clone()
                everybody[videos] = positions
                return classifier(everybody)[videos]

            return some

        together = beam_search(classifier, 10, 12, 5, width=1, mask=mask)
        apart = beam_search(classifier, 10, 12, 5, width=1, mask=mask, narrowed=narrowed)
        assert torch.equal(apart.positions, together.positions)
        assert torch.equal(apart.log_confidence, together.log_confidence)
        assert asked[0] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert all(set(after) <= set(before) for before, after in itertools.pairwise(asked))
        assert set(asked[1]) < set(asked[0])

    @pytest.mark.parametrize(("gain", "chosen"), [(5e-7, [0, 1]), (5e-6, [2, 3])])
    def test_an_exchange_must_gain_more_than_a_network_is_sure_of(self, gain: float, chosen: list[int]) -> None:
        """A beam of one grows to 0 1; the better 2 3 is two exchanges away, each of which gains a little."""
        value = {(0,): -1.0, (0, 1): -2.0, (0, 2): -2.0 + gain, (2, 3): -2.0 + 2 * gain}

        def classifier(positions: torch.Tensor) -> torch.Tensor:
            grows = positions.shape[-1] == 2 and len(positions[0]) == 3  # 0 with each of the others
            seen = [value.get(tuple(one), -9.0) for one in positions[0].tolist()]
            if grows:
                seen = [-2.0 if one == [0, 1] else -9.0 for one in positions[0].tolist()]
            return torch.tensor([seen], dtype=torch.float64)

        assert beam_search(classifier, 1, 4, 2, width=1).positions.tolist() == [chosen]

    def test_ties_go_to_the_earliest_set(self) -> None:
        result = beam_search(lambda p: torch.zeros(p.shape[:2]), 2, 6, 3, width=4)
        assert result.positions.tolist() == [[0, 1, 2]] * 2


def test_gap_is_in_probability_and_never_negative() -> None:
    value, bound = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.75, 0.25 - 1e-6]).log()
    choice = OptimalChoice(torch.zeros(2, 1, dtype=torch.int64), value, bound, "certified")
    assert choice.gap.tolist() == pytest.approx([0.25, 0.0])
