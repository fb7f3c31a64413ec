"""Choosing by scores without learning: every rule against a slow one that follows its definition word for word."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sosampler.policies import positional as rules
from sosampler.policies.score_rules import (
    METHODS,
    aks,
    difference_peaks,
    inverse_transform,
    motion_uniform,
    temporal_nms,
)
from sosampler.policies.visual import change_scores

BY_SCORES: dict[str, Callable[..., Any]] = {
    "peaks": difference_peaks,
    "peaks apart": lambda scores, n: difference_peaks(scores, n, spacing=2),
    "aks": aks,
    "aks eager": lambda scores, n: aks(scores, n, threshold=0.2, max_depth=3),
    "its": inverse_transform,
    "its steep": lambda scores, n: inverse_transform(scores, n, power=40),
    "nms": temporal_nms,
    "nms wide": lambda scores, n: temporal_nms(scores, n, window=9),
}
by_scores = pytest.mark.parametrize("rule", BY_SCORES.values(), ids=BY_SCORES)


@st.composite
def scored(draw: st.DrawFn, most: int = 40, *, highest: int = 20) -> tuple[list[int], int]:
    """Whole scores, so that ties and plateaus are common, and a number of frames."""
    scores = draw(st.lists(st.integers(0, highest), min_size=1, max_size=most))
    return scores, draw(st.integers(1, len(scores)))


def check_choice(positions: Any, num_candidates: int, num_frames: int) -> None:
    assert positions.dtype == np.int64
    assert positions.shape == (num_frames,)
    assert (np.diff(positions) > 0).all()
    assert 0 <= positions[0] <= positions[-1] < num_candidates


class TestWhateverIsGiven:
    @by_scores
    @settings(max_examples=40)
    @given(
        scores=arrays(np.float64, st.integers(1, 50), elements=st.floats(allow_nan=True, allow_infinity=True)),
        data=st.data(),
    )
    def test_n_distinct_candidates_in_time_order(self, rule: Any, scores: np.ndarray, data: st.DataObject) -> None:
        num_frames = data.draw(st.integers(1, len(scores)))
        before = scores.copy()
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            check_choice(rule(scores, num_frames), len(scores), num_frames)
        np.testing.assert_array_equal(scores, before)

    @by_scores
    @settings(max_examples=30)
    @given(case=scored(), scale=st.sampled_from([0.125, 4.0, 1024.0]), shift=st.integers(-512, 512))
    def test_only_relative_scores_count(self, rule: Any, case: Any, scale: float, shift: int) -> None:
        scores, num_frames = np.array(case[0], dtype=np.float64), case[1]
        np.testing.assert_array_equal(rule(scores * scale + shift, num_frames), rule(scores, num_frames))

    @by_scores
    def test_one_nan_is_not_chosen(self, rule: Any) -> None:
        """It would be the highest if it counted as anything else than the lowest."""
        scores = np.random.default_rng(1).random(24)
        for t in range(24):
            with_nan = scores.copy()
            with_nan[t] = np.nan
            with_lowest = scores.copy()
            with_lowest[t] = -1.0
            if rule in (aks, BY_SCORES["aks eager"], BY_SCORES["its steep"], inverse_transform):
                with_lowest[t] = np.delete(scores, t).min()  # these look at the range too
            np.testing.assert_array_equal(rule(with_nan, 5), rule(with_lowest, 5))

    def test_methods_are_called_by_their_suffixes(self) -> None:
        assert {"aks": aks, "its": inverse_transform, "nms": temporal_nms} == METHODS


def slow_spaced(order: list[int], number: int, window: int) -> list[int]:
    """Ask of every candidate in turn how near the chosen ones are; then take the first of what is left."""
    chosen: list[int] = []
    for t in order:
        if len(chosen) < number and all(abs(t - c) > window for c in chosen):
            chosen.append(t)
    chosen += [t for t in dict.fromkeys(order) if t not in chosen][: number - len(chosen)]
    return sorted(chosen)


class TestTemporalNMS:
    @given(case=scored(), window=st.integers(0, 12))
    def test_is_the_slow_suppression(self, case: Any, window: int) -> None:
        scores, number = case
        order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
        assert temporal_nms(scores, number, window=window).tolist() == slow_spaced(order, number, window)

    @given(scored())
    def test_no_window_is_the_best(self, case: Any) -> None:
        scores, number = case
        np.testing.assert_array_equal(temporal_nms(scores, number, window=0), rules.top(np.array(scores), number))

    @given(case=scored(60))
    def test_its_own_window_is_the_widest_that_never_runs_out(self, case: Any) -> None:
        scores, number = case
        count = len(scores)
        fits = [w for w in range(count) if (number - 1) * (2 * w + 1) < count]
        own = max(fits, default=0) if number > 1 else 0
        assert temporal_nms(scores, number).tolist() == temporal_nms(scores, number, window=own).tolist()
        assert (np.diff(temporal_nms(scores, number)) > own).all()


def slow_peaks(scores: list[int]) -> list[int]:
    """Flood the curve: a maximum is parted from a higher one at the highest level that keeps both above water."""
    count = len(scores)
    found: dict[int, tuple[int, int]] = {}
    for t in range(count):
        if t and scores[t - 1] == scores[t]:
            continue
        end = t
        while end + 1 < count and scores[end + 1] == scores[t]:
            end += 1
        below = [scores[s] < scores[t] for s in (t - 1, end + 1) if 0 <= s < count]
        if not below or not all(below):
            continue
        saddle = min(scores)
        for level in range(min(scores), scores[t] + 1):
            low = high = t
            while low > 0 and scores[low - 1] >= level:
                low -= 1
            while high < count - 1 and scores[high + 1] >= level:
                high += 1
            if max(scores[low : high + 1]) > scores[t]:
                saddle = level
        found[t] = (scores[t] - saddle, -t)
    return sorted(found, key=lambda t: found[t], reverse=True)


class TestDifferencePeaks:
    @given(case=scored(highest=8), spacing=st.none() | st.integers(0, 6))
    def test_are_the_peaks_of_the_flooded_curve(self, case: Any, spacing: int | None) -> None:
        scores, number = case
        order = slow_peaks(scores) + sorted(range(len(scores)), key=lambda t: (-scores[t], t))
        window = len(scores) // (4 * number) if spacing is None else spacing
        found = difference_peaks(scores, number, spacing=spacing)
        assert found.tolist() == slow_spaced(order, number, window)

    def test_a_maximum_goes_before_a_larger_slope(self) -> None:
        scores = [0, 4, 9, 8, 7, 1, 3, 0]
        assert difference_peaks(scores, 2, spacing=0).tolist() == [2, 6]
        assert rules.top(np.array(scores), 2).tolist() == [2, 3]

    def test_prominence_counts_and_not_height(self) -> None:
        scores = [0, 9, 7, 8, 0, 5, 0]
        assert difference_peaks(scores, 2, spacing=0).tolist() == [1, 5]

    def test_of_many_equal_peaks_the_earliest(self) -> None:
        assert difference_peaks([0, 1] * 40, 20, spacing=0).tolist() == list(range(1, 40, 2))

    def test_both_ends_may_be_peaks(self) -> None:
        assert difference_peaks([5, 1, 2, 1, 6], 2).tolist() == [0, 4]

    def test_equal_changes_are_spread(self) -> None:
        assert difference_peaks(np.zeros(40), 5).tolist() == [0, 3, 6, 9, 12]  # 40 / 5 / 4 = 2 between

    def test_every_cut_is_found(self) -> None:
        """Shots of different lengths that drift and flicker: the cuts are the maxima, not the flicker's best."""
        rng = np.random.default_rng(0)
        cuts = [7, 19, 24, 33]
        frames = np.zeros((40, 32, 32, 3), dtype=np.uint8)
        for begin, end in zip([0, *cuts], [*cuts, 40], strict=True):
            shot = rng.integers(60, 190, (32, 32, 3))
            frames[begin:end] = np.clip(shot + rng.normal(0, 8, (end - begin, 32, 32, 3)), 0, 255)
        assert difference_peaks(change_scores(frames), 4).tolist() == cuts


def slow_aks(scores: list[int], number: int, threshold: Fraction, max_depth: int) -> list[int]:
    """The same judgement in exact arithmetic, stretch after stretch from a list of work to do."""
    low, span = min(scores), max(scores) - min(scores)
    work, chosen = [(list(range(len(scores))), number, 0)], []
    while work:
        stretch, budget, depth = work.pop()
        best = sorted(stretch, key=lambda t: (-scores[t], t))[:budget]
        if budget == 0:
            continue
        over = sum(Fraction(scores[t] - low, span or 1) for t in best) / budget
        over -= sum(Fraction(scores[t] - low, span or 1) for t in stretch) / len(stretch)
        if len(stretch) == budget or depth == max_depth or over >= threshold:
            chosen += best
            continue
        halves = stretch[: len(stretch) // 2], stretch[len(stretch) // 2 :]
        budgets = [budget // 2, budget // 2]
        if budget % 2:
            next_best = [sorted((scores[t] for t in half), reverse=True)[budget // 2 :][:1] for half in halves]
            budgets[0 if next_best[0] >= next_best[1] else 1] += 1  # a half without any left has the lesser, []
        work += [(half, share, depth + 1) for half, share in zip(halves, budgets, strict=True)]
    return sorted(chosen)


class TestAKS:
    @given(case=scored(), threshold=st.integers(1, 97), max_depth=st.integers(0, 6))
    def test_is_the_recursion_in_exact_arithmetic(self, case: Any, threshold: int, max_depth: int) -> None:
        scores, number = case  # 97 is prime, so no judgement is a tie
        found = aks(scores, number, threshold=threshold / 97, max_depth=max_depth)
        assert found.tolist() == slow_aks(scores, number, Fraction(threshold, 97), max_depth)

    @given(scored())
    def test_never_splitting_is_the_best(self, case: Any) -> None:
        scores, number = case
        best = rules.top(np.array(scores), number).tolist()
        assert aks(scores, number, max_depth=0).tolist() == aks(scores, number, threshold=0).tolist() == best

    def test_a_peak_is_taken_whole_and_a_plain_is_covered(self) -> None:
        peak = np.zeros(64)
        peak[40:44] = 1
        assert aks(peak, 4).tolist() == [40, 41, 42, 43]
        rough = np.random.default_rng(0).random(64)
        assert (np.bincount(aks(rough, 4) // 16, minlength=4) == 1).all()
        assert aks(rough, 64 // 16 * 2, threshold=2, max_depth=2).reshape(4, 2).tolist() == [
            (begin + rules.top(rough[begin : begin + 16], 2)).tolist() for begin in range(0, 64, 16)
        ]

    def test_what_stands_out_by_the_threshold_itself_is_taken(self) -> None:
        scores = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]  # the mean of the best is 1, of all 0.2
        assert aks(scores, 2).tolist() == [0, 1]
        assert aks(scores, 2, threshold=0.81).tolist() == [0, 5]

    def test_both_halves_are_split_as_deep(self) -> None:
        for seed in range(20):
            rough = np.random.default_rng(seed).random(64)
            for depth in (1, 2, 3):
                part = 64 >> depth
                best = [begin + rules.top(rough[begin : begin + part], 2) for begin in range(0, 64, part)]
                found = aks(rough, 2 << depth, threshold=2, max_depth=depth)
                np.testing.assert_array_equal(found, np.concatenate(best))

    def test_splits_five_times_unless_told_otherwise(self) -> None:
        rough = np.random.default_rng(0).random(256)
        np.testing.assert_array_equal(aks(rough, 64, threshold=2), aks(rough, 64, threshold=2, max_depth=5))
        assert (aks(rough, 64, threshold=2) != aks(rough, 64, threshold=2, max_depth=6)).any()

    def test_equal_scores_are_spread(self) -> None:
        assert aks(np.ones(32), 4).tolist() == [0, 8, 16, 24]


def slow_inverse_transform(scores: list[int], number: int, power: int) -> list[int]:
    """Exact fractions; equal steps are walked off one after the other."""
    low, span = min(scores), max(scores) - min(scores)
    weight = [Fraction(s - low, span) ** power if span else Fraction(1) for s in scores]
    chosen: list[int] = []
    while len(chosen) < number:
        rest = [t for t in range(len(scores)) if t not in chosen]
        if not any(weight[t] for t in rest):
            weight = [Fraction(1)] * len(scores)
        part = sum(weight[t] for t in rest) / (number - len(chosen))
        large = [t for t in rest if weight[t] >= part]
        if large:
            chosen += large
            continue
        passed, quantile = Fraction(0), part / 2
        for t in rest:
            passed += weight[t]
            if passed > quantile:
                chosen.append(t)
                quantile += part
    return sorted(chosen)


class TestInverseTransform:
    @given(case=scored(highest=16), power=st.integers(0, 4), data=st.data())
    def test_is_the_walk_in_exact_fractions(self, case: Any, power: int, data: st.DataObject) -> None:
        scores = [*case[0], 0, 16]  # a range that is a power of two leaves no rounding
        scores = data.draw(st.permutations(scores))
        number = min(case[1], len(scores))
        found = inverse_transform(scores, number, power=power)
        assert found.tolist() == slow_inverse_transform(scores, number, power)

    @given(count=st.integers(1, 200), value=st.floats(-1e6, 1e6), data=st.data())
    def test_equal_scores_are_the_uniform_rule(self, count: int, value: float, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, count))
        expected = rules.uniform(count, number)
        np.testing.assert_array_equal(inverse_transform(np.full(count, value), number), expected)
        np.testing.assert_array_equal(inverse_transform(np.arange(count) + value, number, power=0), expected)

    def test_where_no_frame_is_heavy_it_is_the_quantiles_of_the_distribution(self) -> None:
        scores = np.random.default_rng(0).random(400)
        weights = ((scores - scores.min()) / (scores.max() - scores.min())) ** 3
        distribution = np.cumsum(weights / weights.sum())
        expected = [int(np.argmax(distribution >= (i + 0.5) / 12)) for i in range(12)]
        assert weights.max() / weights.sum() < 1 / 12
        assert inverse_transform(scores, 12).tolist() == expected

    def test_chosen_frames_follow_the_scores(self) -> None:
        """Three quarters of the sum in one quarter of the video: three quarters of the frames."""
        scores = np.concatenate([[0.0], np.full(100, 9.0), np.full(299, 1.0)])
        found = inverse_transform(scores, 40, power=1)
        assert (found <= 100).sum() == pytest.approx(30, abs=1)

    def test_steep_is_nearly_the_best(self) -> None:
        scores = np.random.default_rng(0).random(50)
        np.testing.assert_array_equal(inverse_transform(scores, 4, power=5000), rules.top(scores, 4))

    def test_what_is_left_of_the_budget_is_spread(self) -> None:
        scores = np.zeros(21)
        scores[10] = 1
        assert inverse_transform(scores, 5).tolist() == [2, 7, 10, 13, 18]


class TestMotionUniform:
    def test_by_hand(self) -> None:
        """Roots 2 1 1 0 0 1 1 2 sum up to 2 3 4 4 4 5 6 8; middles of three parts of 8: 1.33, 4, 6.67."""
        assert motion_uniform([4, 1, 1, 0, 0, 1, 1, 4], 3).tolist() == [0, 5, 7]
        # Without the root 4 5 6 6 6 7 8 12; the ends hold a part of 4 each, and what is left is 1 2 2 2 3 4.
        assert motion_uniform([4, 1, 1, 0, 0, 1, 1, 4], 3, power=1).tolist() == [0, 5, 7]
        assert motion_uniform([9, 1, 1, 0, 0, 1, 1, 4], 1, power=1).tolist() == [0]
        assert motion_uniform([9, 1, 1, 0, 0, 1, 1, 4], 1).tolist() == [2]  # 3 4 5: the middle of 9 is 4.5

    @given(
        roots=st.lists(st.integers(0, 16), min_size=1, max_size=30),
        power=st.sampled_from([0.5, 1.0]),
        data=st.data(),
    )
    def test_is_the_walk_in_exact_fractions(self, roots: list[int], power: float, data: st.DataObject) -> None:
        motion = [root * root for root in [0, *roots, 16]]  # by 16, a power of two, nothing is rounded
        number = data.draw(st.integers(1, len(motion)))
        expected = slow_inverse_transform([round(value**power) for value in motion], number, 1)
        assert motion_uniform(motion, number, power=power).tolist() == expected

    @given(count=st.integers(1, 200), value=st.floats(0, 1e6), data=st.data())
    def test_still_and_steady_videos_are_uniform(self, count: int, value: float, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, count))
        expected = rules.uniform(count, number)
        np.testing.assert_array_equal(motion_uniform(np.full(count, value), number), expected)
        np.testing.assert_array_equal(motion_uniform(np.arange(count), number, power=0), expected)

    def test_between_chosen_frames_moves_about_as_much(self) -> None:
        motion = np.concatenate([np.full(300, 0.01), np.full(100, 0.09)])  # roots 0.1 and 0.3: 30 and 30
        assert (motion_uniform(motion, 20) < 300).sum() == 10
        assert (motion_uniform(motion, 20, power=1) < 300).sum() == 5  # 3 and 9
        curve = np.cumsum(np.sqrt(motion))
        np.testing.assert_allclose(np.diff(curve[motion_uniform(motion, 20)]), 3, atol=0.31)

    @pytest.mark.parametrize(("count", "number"), [(7, 7), (7, 6), (7, 1), (1, 1)])
    def test_one_great_motion_is_taken_once(self, count: int, number: int) -> None:
        motion = np.zeros(count)
        motion[count // 2] = 1
        found = motion_uniform(motion, number)
        check_choice(found, count, number)
        assert count // 2 in found
