"""Candidate arithmetic, without any video."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sosampler.errors import InvalidArgument
from sosampler.video.candidates import (
    GRIDS,
    at_cuts,
    authors_jitter,
    grid_indices,
    keyframe_in_segments,
    keyframe_positions,
    keyframes_and_exact,
    linspace_ends,
    nearest_in_order,
    positions_of,
    rate_times,
    segment_centres,
    segment_ends,
    short_of,
    snap,
    stratified_positions,
    stratified_random,
    uniform_positions,
)

totals = st.integers(1, 20_000)
counts = st.integers(1, 300)


class TestGrids:
    @given(totals, counts)
    def test_segment_centres_are_exact_and_never_leave_their_segment(self, total: int, count: int) -> None:
        places = segment_centres(total, count)
        assert places.tolist() == [(2 * i + 1) * total // (2 * count) for i in range(count)]
        segment = np.arange(count) * total / count
        assert (places >= np.floor(segment)).all()
        assert (places < np.ceil(segment + total / count)).all()
        assert 0 <= places[0] <= places[-1] < total

    @given(totals, counts)
    def test_segment_centres_are_a_mirror_image_of_themselves_up_to_a_frame(self, total: int, count: int) -> None:
        places = segment_centres(total, count)
        assert np.abs(places + places[::-1] - (total - 1)).max() <= 1

    @given(totals, counts)
    def test_linspace_is_frameexits_formula(self, total: int, count: int) -> None:
        expected = [int(min(max(x, 0), total - 1)) for x in np.linspace(0, total, count)]
        assert linspace_ends(total, count).tolist() == expected

    def test_linspace_holds_both_ends(self) -> None:
        places = linspace_ends(3000, 10)
        assert (places[0], places[-1]) == (0, 2999)

    @given(counts, st.integers(1, 40), st.integers(0, 2**32 - 1))
    def test_stratified_takes_one_frame_of_each_segment(self, count: int, longer: int, seed: int) -> None:
        total = count * longer + seed % count
        places = stratified_random(total, count, seed)
        edges = np.arange(count + 1) * total // count
        assert (places >= edges[:-1]).all()
        assert (places < edges[1:]).all()
        assert places.tolist() == stratified_random(total, count, seed).tolist()

    def test_stratified_reaches_every_frame(self) -> None:
        seen = np.concatenate([stratified_random(12, 4, seed) for seed in range(200)])
        assert np.unique(seen).tolist() == list(range(12))

    def test_jitter_is_the_authors_grid(self) -> None:
        """Offsets inside the segments that their pipeline takes for 3000 frames and T=10, every time."""
        offsets = authors_jitter(3000, 10) % 300 / 300
        assert np.round(offsets, 2).tolist() == [0.56, 0.74, 0.40, 0.58, 0.07, 0.59, 0.17, 0.40, 0.43, 0.63]

    def test_jitter_leaves_the_global_generator_alone(self) -> None:
        np.random.seed(1)
        before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
        authors_jitter(3000, 10)
        assert (np.random.get_state()[1] == before).all()  # type: ignore[index]

    @given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
    def test_jitter_stays_inside_and_in_order(self, total: int, count: int, seed: int) -> None:
        places = authors_jitter(total, count, seed)
        assert len(places) == count
        assert (np.diff(places) >= 0).all()
        assert 0 <= places[0] <= places[-1] < total
        if total >= count:
            assert len(np.unique(places)) == count
        if count <= total < 2 * count:
            assert np.diff(places).max(initial=1) <= 2  # gaps of one frame at most

    @given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
    def test_jitter_by_its_rule(self, total: int, count: int, seed: int) -> None:
        drawn = np.random.RandomState(seed)
        if total < count:
            start = drawn.randint(total)
            expected = sorted((start + number) % total for number in range(count))
        elif total < 2 * count:
            skipped = set(drawn.choice(count + 1, total - count, replace=False).tolist())
            expected = [number + len([gap for gap in skipped if gap <= number]) for number in range(count)]
        else:
            edges = [number * total // count for number in range(count + 1)]
            lengths = [end - begin for begin, end in itertools.pairwise(edges)]
            expected = [begin + offset for begin, offset in zip(edges, drawn.randint(lengths), strict=False)]
        assert authors_jitter(total, count, seed).tolist() == expected

    def test_a_short_video_repeats_its_frames_evenly_in_training_too(self) -> None:
        assert stratified_random(3, 5, 0).tolist() == [0, 0, 1, 2, 2]

    @pytest.mark.parametrize("grid", GRIDS)
    @given(total=totals, count=counts)
    def test_every_grid_gives_distinct_frames_in_order_where_there_are_enough(
        self, grid: str, total: int, count: int
    ) -> None:
        places = grid_indices(total, count, grid=grid, seed=0)  # type: ignore[arg-type]
        assert len(places) == count
        assert 0 <= places[0] <= places[-1] < total
        assert (np.diff(places) >= (1 if total >= count else 0)).all()


class TestShortVideos:
    @pytest.mark.parametrize("grid", GRIDS)
    def test_repeat_keeps_the_number_and_uses_every_frame(self, grid: str) -> None:
        places = grid_indices(5, 12, grid=grid, on_short="repeat")  # type: ignore[arg-type]
        assert len(places) == 12
        assert np.unique(places).tolist() == [0, 1, 2, 3, 4]
        assert np.bincount(places).max() - np.bincount(places).min() <= 1

    @pytest.mark.parametrize("grid", GRIDS)
    def test_fewer_gives_each_frame_once(self, grid: str) -> None:
        assert grid_indices(5, 12, grid=grid, on_short="fewer").tolist() == [0, 1, 2, 3, 4]  # type: ignore[arg-type]

    @pytest.mark.parametrize("grid", GRIDS)
    def test_error_says_what_is_there(self, grid: str) -> None:
        with pytest.raises(InvalidArgument, match="12 candidates were requested but only 5 frames"):
            grid_indices(5, 12, grid=grid, on_short="error")  # type: ignore[arg-type]

    def test_nothing_is_never_repeated(self) -> None:
        for on_short in ("repeat", "fewer", "error"):
            with pytest.raises(InvalidArgument, match="3 candidates were requested but only 0 keyframes are there"):
                short_of(0, 3, on_short, what="keyframes")  # type: ignore[arg-type]

    @pytest.mark.parametrize(("name", "value"), [("grid", "square"), ("on_short", "maybe")])
    def test_unknown_words(self, name: str, value: str) -> None:
        with pytest.raises(InvalidArgument, match=f"{name}='{value}' is unknown; choose one of"):
            grid_indices(5, 12, **{name: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("count", [0, -3, 2.5, "8", True, None])
    def test_number_of_candidates_must_be_a_whole_number(self, count: object) -> None:
        with pytest.raises(InvalidArgument, match="an int of at least 1"):
            grid_indices(5, count)  # type: ignore[arg-type]


sorted_places = st.lists(st.integers(0, 60), min_size=1, max_size=9, unique=True).map(sorted)


class TestKeyframes:
    @given(sorted_places, st.data())
    def test_least_total_distance_by_brute_force(self, places: list[int], data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(places)))
        targets = sorted(data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)))
        chosen = nearest_in_order(targets, places)
        assert (np.diff(chosen) > 0).all()
        cost = np.abs(np.array(places)[chosen] - targets).sum()
        best = min(
            np.abs(np.array(places)[list(subset)] - targets).sum()
            for subset in itertools.combinations(range(len(places)), count)
        )
        assert cost == best

    def test_nothing_to_match_and_too_little_to_match_with(self) -> None:
        assert nearest_in_order([], [4, 5]).tolist() == []
        with pytest.raises(ValueError, match="2 targets need as many options, got 1"):
            nearest_in_order([1, 2], [1])

    def test_one_keyframe_each_even_where_one_is_nearest_to_two(self) -> None:
        assert keyframe_positions([10, 12], [0, 11, 40]).tolist() == [0, 1]

    @pytest.mark.parametrize(("on_short", "expected"), [("repeat", [0, 0, 1, 1]), ("fewer", [0, 1])])
    def test_too_few_keyframes(self, on_short: str, expected: list[int]) -> None:
        assert keyframe_positions([1, 2, 3, 4], [0, 30], on_short=on_short).tolist() == expected  # type: ignore[arg-type]

    def test_too_few_keyframes_repeat_unless_told_otherwise(self) -> None:
        assert keyframe_positions([1, 2, 3, 4], [0, 30]).tolist() == [0, 0, 1, 1]

    def test_too_few_keyframes_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="only 2 keyframes"):
            keyframe_positions([1, 2, 3], [0, 30], on_short="error")

    def test_an_hour_of_keyframes_takes_no_time(self) -> None:
        keys = np.arange(0, 108_000, 30)
        chosen = nearest_in_order(segment_centres(108_000, 256), keys)
        assert np.abs(keys[chosen] - segment_centres(108_000, 256)).max() <= 15


def nearest_target(targets: list[int], frame: int) -> int:
    """The number of the target to whose segment a frame belongs: the nearest, of two the earlier."""
    return min(range(len(targets)), key=lambda number: (abs(targets[number] - frame), number))


class TestSegments:
    """Candidates "auto": a keyframe where a segment has one, else the exact frame."""

    @given(sorted_places, st.integers(61, 90))
    def test_a_segment_ends_where_the_next_target_is_nearer(self, targets: list[int], last: int) -> None:
        ends = segment_ends(np.array(targets), last)
        owners = [nearest_target(targets, frame) for frame in range(last)]
        assert ends.tolist() == [max(f for f in range(last) if owners[f] == t) + 1 for t in range(len(targets))]

    @given(sorted_places, sorted_places)
    def test_of_the_keyframes_of_a_segment_the_nearest_of_two_the_earlier(
        self, targets: list[int], keys: list[int]
    ) -> None:
        expected = []
        for number, target in enumerate(targets):
            own = [place for place, key in enumerate(keys) if nearest_target(targets, key) == number]
            expected.append(min(own, key=lambda place: (abs(keys[place] - target), place), default=-1))
        assert keyframe_in_segments(targets, keys).tolist() == expected

    @given(sorted_places, st.data())
    def test_all_keyframes_and_exact_frames_for_the_rest(self, targets: list[int], data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.integers(0, 60), max_size=len(targets) - 1, unique=True).map(sorted))
        places = [*nearest_in_order(keys, targets)]
        kept = [target for place, target in enumerate(targets) if place not in places]
        given = targets.copy()
        assert keyframes_and_exact(given, keys).tolist() == sorted(kept + keys)
        assert given == targets

    def test_a_video_with_fewer_frames_than_candidates_is_left_as_it_is(self) -> None:
        assert keyframes_and_exact([0, 0, 1, 2], [2]).tolist() == [0, 0, 1, 2]

    def test_a_keyframe_that_comes_early_sits_at_a_cut(self) -> None:
        seconds = np.array([0, 10, 20, 29, 37.9, 47.0])  # gaps 10 10 9 8.9 9.1; due from 9 on
        assert at_cuts(seconds).tolist() == [True, False, False, False, True, False]
        assert at_cuts(seconds[:1]).tolist() == [True]
        assert at_cuts(seconds[:1]).dtype == bool
        assert at_cuts(seconds[:0]).tolist() == []


class TestSnap:
    @staticmethod
    def run(targets: list[int], keys: list[int], tolerance: float, rate: float = 10.0) -> list[int]:
        seconds = np.array(targets) / rate
        return snap(targets, seconds, keys, np.array(keys) / rate, tolerance=tolerance).tolist()

    def test_moves_within_the_tolerance_only(self) -> None:
        assert self.run([4, 24, 47], [0, 20, 50], tolerance=0.35) == [4, 24, 50]
        assert self.run([4, 24, 47], [0, 20, 50], tolerance=0.4) == [0, 20, 50]

    def test_a_keyframe_goes_to_its_nearest_target(self) -> None:
        assert self.run([18, 21], [20], tolerance=1.0) == [18, 20]

    def test_of_two_at_the_same_distance_the_earlier(self) -> None:
        assert self.run([5], [0, 10], tolerance=1.0) == [0]
        assert self.run([18, 22], [20], tolerance=1.0) == [20, 22]

    def test_twins_of_a_short_video_move_together(self) -> None:
        assert self.run([3, 3, 6], [4], tolerance=1.0) == [4, 4, 6]

    def test_without_keyframes_nothing_moves(self) -> None:
        assert self.run([1, 2], [], tolerance=1.0) == [1, 2]

    @given(
        st.lists(st.integers(0, 200), min_size=1, max_size=30).map(sorted),
        st.lists(st.integers(0, 200), max_size=20, unique=True).map(sorted),
        st.floats(0, 3),
    )
    def test_snapped_candidates(self, targets: list[int], keys: list[int], tolerance: float) -> None:
        snapped = self.run(targets, keys, tolerance)
        assert snapped == sorted(snapped)
        assert len(set(snapped)) == len(set(targets))
        for before, after in zip(targets, snapped, strict=True):
            assert after == before or (after in keys and abs(after - before) / 10.0 <= tolerance + 1e-9)

    @given(
        st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True).map(sorted),
        st.lists(st.integers(0, 60), min_size=1, max_size=5, unique=True).map(sorted),
        st.integers(0, 12),
    )
    def test_is_the_slow_rule(self, targets: list[int], keys: list[int], reach: int) -> None:
        """Each target asks for its nearest keyframe, which answers the nearest of those that ask."""
        expected = list(targets)
        asked = [min(keys, key=lambda key: (abs(key - target), key)) for target in targets]
        for key in set(asked):
            asking = [place for place in range(len(targets)) if asked[place] == key]
            winner = min(asking, key=lambda place: (abs(targets[place] - key), place))
            if abs(targets[winner] - key) <= reach:
                expected[winner] = key
        assert self.run(targets, keys, reach / 10) == expected

    def test_negative_tolerance(self) -> None:
        with pytest.raises(InvalidArgument, match="snap_tolerance=-1"):
            self.run([1], [2], tolerance=-1)


class TestRate:
    def test_times_start_at_the_first_frame(self) -> None:
        assert rate_times(10.0, 13.0, 1.0).tolist() == [10.0, 11.0, 12.0]
        assert rate_times(0.0, 1.0, 2.5).tolist() == [0.0, 0.4, 0.8]

    def test_one_time_at_least(self) -> None:
        assert rate_times(0.0, 0.04, 1.0).tolist() == [0.0]
        assert rate_times(2.0, 2.0, 1.0).tolist() == [2.0]

    def test_no_time_at_the_end_for_a_rounding_error(self) -> None:
        assert (0.1 + 0.2) * 10 > 3
        assert len(rate_times(0.0, 0.1 + 0.2, 10.0)) == 3
        assert len(rate_times(0.0, 0.3001, 10.0)) == 4

    @pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "1"])
    def test_bad_rates(self, fps: object) -> None:
        with pytest.raises(InvalidArgument, match="fps="):
            rate_times(0.0, 1.0, fps)  # type: ignore[arg-type]


class TestStored:
    """Frames of a bank, of which some are taken again."""

    def test_positions_are_shares_of_the_video_that_have_passed(self) -> None:
        passed = positions_of(np.array([5.0, 6.0, 7.5, 15.0, 16.0, 4.0]), 5.0, 10.0)
        assert passed.dtype == np.float32
        assert passed.tolist() == pytest.approx([0, 0.1, 0.25, 1, 1, 0])
        assert positions_of(np.array([5.0, 6.0]), 5.0, 0.5).tolist() == [0, 1]
        still = positions_of(np.array([5.0, 6.0]), 5.0, 0.0)
        assert still.tolist() == [0, 0]
        assert still.dtype == np.float32

    @given(st.integers(1, 50), st.integers(1, 50))
    def test_uniform_positions_are_the_nearest_to_the_centres(self, stored: int, count: int) -> None:
        positions = uniform_positions(stored, count)
        for number, position in enumerate(positions.tolist()):
            centre = (number + 0.5) * stored / count
            assert position <= centre <= position + 1 + 1e-9
        if count == stored:
            assert positions.tolist() == list(range(stored))

    def test_random_positions_reach_all_of_a_part_alike(self) -> None:
        """5 frames in 2 parts: the first has two, the second three."""
        rng = np.random.default_rng(0)
        drawn = np.array([stratified_positions(5, 2, rng) for _ in range(3000)])
        assert np.bincount(drawn[:, 0]) / 3000 == pytest.approx([1 / 2] * 2, abs=0.04)
        assert np.bincount(drawn[:, 1])[2:] / 3000 == pytest.approx([1 / 3] * 3, abs=0.04)

    @given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 99))
    def test_random_positions_are_one_of_each_part(self, stored: int, count: int, seed: int) -> None:
        positions = stratified_positions(stored, count, np.random.default_rng(seed))
        assert positions.dtype == np.int64
        if stored < count:
            assert positions.tolist() == uniform_positions(stored, count).tolist()
            return
        edges = [number * stored // count for number in range(count + 1)]
        assert all(low <= at < high for at, (low, high) in zip(positions, itertools.pairwise(edges), strict=True))
