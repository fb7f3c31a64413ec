"""Choosing frames that differ: the fast rules against slow, direct ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sosampler.policies.base import top
from sosampler.policies.score_rules import dpp, facility_location, gaussian_kernel, median_bandwidth, mmr


def random_videos(batch: int, candidates: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((batch, candidates)), rng.normal(0, 1, (batch, candidates, 4))


def slow_mmr(scores: np.ndarray, similarity: np.ndarray, number: int, share: float, real: np.ndarray) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < number:
        values = {}
        for t in np.flatnonzero(real):
            if t not in chosen:
                penalty = max((similarity[t, c] for c in chosen), default=0.0)
                values[t] = share * scores[t] - (1 - share) * penalty if chosen else scores[t]
        chosen.append(max(values, key=lambda t: (values[t], -t)))
    return sorted(map(int, chosen))


def slow_dpp(scores: np.ndarray, similarity: np.ndarray, number: int, share: float, real: np.ndarray) -> list[int]:
    """Recompute the determinant of every larger set."""
    quality = np.exp(share / (2 * (1 - share)) * scores)
    kernel = quality[:, None] * similarity * quality[None]
    chosen: list[int] = []
    while len(chosen) < number:
        values = {
            t: np.linalg.det(kernel[np.ix_([*chosen, t], [*chosen, t])])
            for t in np.flatnonzero(real)
            if t not in chosen
        }
        chosen.append(max(values, key=lambda t: (values[t], -t)))
    return sorted(map(int, chosen))


def slow_facility(scores: np.ndarray, similarity: np.ndarray, number: int, share: float, real: np.ndarray) -> list[int]:
    """Recompute the whole sum for every larger set."""
    there = np.flatnonzero(real)

    def value(chosen: list[int]) -> float:
        covered = [max(similarity[t, c] for c in chosen) for t in there]
        return float(share * sum(scores[c] for c in chosen) + (1 - share) * np.mean(covered))

    chosen: list[int] = []
    while len(chosen) < number:
        values = {t: value([*chosen, t]) for t in there if t not in chosen}
        chosen.append(max(values, key=lambda t: (values[t], -t)))
    return sorted(map(int, chosen))


class TestKernel:
    def test_is_the_formula_written_as_a_loop(self) -> None:
        _, features = random_videos(3, 6, 0)
        widths = np.array([0.5, 1.0, 3.0])
        kernel = gaussian_kernel(features, widths)
        for b in range(3):
            for i in range(6):
                for j in range(6):
                    squared = sum((features[b, i, d] - features[b, j, d]).item() ** 2 for d in range(4))
                    assert kernel[b, i, j].item() == pytest.approx(math.exp(-squared / (2 * widths[b].item() ** 2)))
        np.testing.assert_allclose(gaussian_kernel(features[1], 1.0), kernel[1])

    def test_tells_near_duplicates_far_from_the_origin_apart(self) -> None:
        features = np.array([[1000.0, 0.0], [1000.0, 0.01], [1000.0, 0.0]], dtype=np.float32)
        kernel = gaussian_kernel(features, 0.01)
        assert kernel[0, 2] == 1.0
        assert kernel[0, 1].item() == pytest.approx(math.exp(-0.5), rel=1e-3)

    def test_median_bandwidth_is_the_median_over_pairs_of_real_frames(self) -> None:
        _, features = random_videos(4, 6, 1)
        mask = np.ones((4, 6), dtype=bool)
        mask[2, 4:] = False
        per_video = median_bandwidth(features, mask)
        for b in range(4):
            real = np.flatnonzero(mask[b]).tolist()
            pairs = [float(np.linalg.norm(features[b, i] - features[b, j])) for i in real for j in real if i < j]
            assert per_video[b].item() == pytest.approx(sorted(pairs)[(len(pairs) - 1) // 2])

    def test_median_bandwidth_of_one_picture_is_one(self) -> None:
        assert median_bandwidth(np.zeros((2, 5, 3))).tolist() == [1.0, 1.0]
        assert median_bandwidth(np.zeros((2, 1, 3))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(("fast", "slow"), [(mmr, slow_mmr), (dpp, slow_dpp), (facility_location, slow_facility)])
def test_is_the_slow_rule(fast, slow, share: float, masked: bool) -> None:  # type: ignore[no-untyped-def]
    scores, features = random_videos(25, 12, 2)
    if fast is facility_location and not share:
        share = 0.01  # without scores, two frames that cover each other add the same, and rounding decides
    similarity = gaussian_kernel(features, median_bandwidth(features))
    real = np.random.default_rng(2).random((25, 12)) < 0.6 if masked else np.ones((25, 12), dtype=bool)
    real[:, :5] = True
    for number in (1, 2, 5):
        chosen = fast(scores, similarity, number, trade_off=share, mask=real if masked else None)
        expected = [slow(scores[b], similarity[b], number, share, real[b]) for b in range(25)]
        assert chosen.tolist() == expected


def test_frames_may_be_the_opposite_of_each_other() -> None:
    """Similarities below 0, as cosines have them, speak for a frame."""
    scores, features = random_videos(25, 12, 5)
    unit = features / np.linalg.norm(features, axis=-1, keepdims=True)
    cosines = unit @ unit.transpose(0, 2, 1)
    assert cosines.min() < -0.9
    for number in (2, 3, 5):
        expected = [slow_mmr(scores[b], cosines[b], number, 0.3, np.ones(12)) for b in range(25)]
        assert mmr(scores, cosines, number, trade_off=0.3).tolist() == expected


@pytest.mark.parametrize("rule", [mmr, dpp, facility_location])
class TestBoth:
    def test_the_trade_off_that_is_documented(self, rule) -> None:  # type: ignore[no-untyped-def]
        scores, features = random_videos(25, 12, 6)
        scores /= 10  # as much as frames differ in how well they stand for the others
        similarity = gaussian_kernel(features, median_bandwidth(features))
        own = rule(scores, similarity, 4)
        np.testing.assert_array_equal(own, rule(scores, similarity, 4, trade_off=0.7))
        assert (own != rule(scores, similarity, 4, trade_off=0.99)).any()

    def test_take_one_of_two_equal_frames_where_ranking_takes_both(self, rule) -> None:  # type: ignore[no-untyped-def]
        scores = np.array([[0.9, 0.9, 0.8, 0.1]])
        similarity = gaussian_kernel(np.array([[[0.0], [0.0], [9.0], [-9.0]]]), 1.0)
        assert top(scores, 2).tolist() == [[0, 1]]
        assert rule(scores, similarity, 2).tolist() == [[0, 2]]

    def test_fill_up_with_duplicates_by_score_where_nothing_else_is_left(self, rule) -> None:  # type: ignore[no-untyped-def]
        scores = np.array([[0.2, 0.6, 0.4, 0.5]])
        assert rule(scores, np.ones((1, 4, 4)), 3).tolist() == [[1, 2, 3]]
        assert rule(np.zeros((1, 4)), np.ones((1, 4, 4)), 2).tolist() == [[0, 1]]

    def test_a_score_that_is_no_number_is_the_lowest(self, rule) -> None:  # type: ignore[no-untyped-def]
        scores, similarity = np.array([[math.nan, 0.2, 0.1, 0.3]]), np.eye(4)[None]
        assert rule(scores, similarity, 1).tolist() == [[3]]
        assert rule(scores, similarity, 3).tolist() == [[1, 2, 3]]
        assert rule(scores, similarity, 4).tolist() == [[0, 1, 2, 3]]

    def test_what_masked_candidates_hold_does_not_matter(self, rule) -> None:  # type: ignore[no-untyped-def]
        scores, features = random_videos(5, 8, 3)
        similarity = gaussian_kernel(features, 1.0)
        alone = rule(scores[:, :6], similarity[:, :6, :6], 4)
        scores[:, 6:], similarity[:, 6:], similarity[:, :, 6:] = math.nan, math.nan, math.nan
        mask = np.tile(np.arange(8) < 6, (5, 1))
        np.testing.assert_array_equal(rule(scores, similarity, 4, mask=mask), alone)


def test_a_duplicate_explains_nothing_of_the_others() -> None:
    """Two equal frames whose scores are worth it; then one unlike them before a better one that is like them."""
    features = np.array([[[0.0], [0.0], [0.15], [9.0]]])
    scores = np.array([[30.0, 30.0, 1.0, 0.5]])
    assert dpp(scores, gaussian_kernel(features, 1.0), 3).tolist() == [[0, 1, 3]]


def test_mmr_with_full_trade_off_is_ranking() -> None:
    scores, features = random_videos(10, 9, 4)
    np.testing.assert_array_equal(mmr(scores, gaussian_kernel(features, 1.0), 4, trade_off=1.0), top(scores, 4))


def test_whole_numbers_are_scores_too() -> None:
    scores, alike = np.array([[3, 1, 2, 3]]), np.eye(4)[None]
    for pick in (mmr, dpp, facility_location):
        assert pick(scores, alike, 2).tolist() == pick(scores.astype(float), alike, 2).tolist() == [[0, 3]]
