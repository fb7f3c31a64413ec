"""Choosing frames that differ: against slow rules, brute force and the methods on scores."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sosampler.errors import InvalidArgument
from sosampler.policies import score_rules as redundancy
from sosampler.policies.base import choose_one
from sosampler.policies.registry import get_policy
from sosampler.policies.visual import dpp_order, farthest_first_order, kts, pixel_features, thumbnails


def farthest_first(features: Any, num_frames: Any) -> np.ndarray:
    return np.sort(farthest_first_order(features, num_frames))


def dpp_diverse(features: Any, num_frames: Any) -> np.ndarray:
    return np.sort(dpp_order(features, num_frames))


BY_FEATURES: dict[str, Callable[..., Any]] = {
    "farthest": farthest_first,
    "dpp": dpp_diverse,
    "kts": kts,
    "thumbnail": thumbnails,
}
by_features = pytest.mark.parametrize("rule", BY_FEATURES.values(), ids=BY_FEATURES)


class TestWhateverIsGiven:
    @by_features
    @settings(max_examples=40)
    @given(
        features=arrays(
            np.float64,
            st.tuples(st.integers(1, 20), st.integers(1, 3)),
            elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.integers(0, 2).map(float),
        ),
        data=st.data(),
    )
    def test_n_distinct_frames_in_time_order(self, rule: Any, features: np.ndarray, data: st.DataObject) -> None:
        num_frames = data.draw(st.integers(1, len(features)))
        before = features.copy()
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            found = rule(features, num_frames)
        assert found.dtype == np.int64
        assert found.shape == (num_frames,)
        assert (np.diff(found) > 0).all()
        assert 0 <= found[0] <= found[-1] < len(features)
        np.testing.assert_array_equal(features, before)

    @by_features
    @pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
    def test_features_of_any_size(self, rule: Any, scale: float) -> None:
        features = np.random.default_rng(0).normal(size=(20, 4))
        np.testing.assert_array_equal(rule(features * scale, 6), rule(features, 6))

    @pytest.mark.parametrize(("order", "rule"), [(farthest_first_order, farthest_first), (dpp_order, dpp_diverse)])
    def test_choices_grow_in_their_order(self, order: Any, rule: Any) -> None:
        features = np.random.default_rng(3).normal(size=(15, 4))
        features[4] = features[2]
        whole = order(features, 15).tolist()
        assert sorted(whole) == list(range(15))
        for number in range(1, 16):
            assert order(features, number).tolist() == whole[:number]
            assert rule(features, number).tolist() == sorted(whole[:number])


def distances(features: np.ndarray) -> np.ndarray:
    return np.array([[np.sqrt(((x - y) ** 2).sum()) for y in features] for x in features])


whole_features = arrays(np.float64, st.tuples(st.integers(1, 14), st.integers(1, 3)), elements=st.integers(0, 6))


class TestFarthestFirst:
    @given(features=whole_features, data=st.data())
    def test_is_the_slow_traversal(self, features: np.ndarray, data: st.DataObject) -> None:
        count = len(features)
        number = data.draw(st.integers(1, count))
        between = distances(features)
        chosen = [(count - 1) // 2]
        while len(chosen) < number:
            nearest = {t: min(between[t, c] for c in chosen) for t in range(count) if t not in chosen}
            chosen.append(max(nearest, key=lambda t: (nearest[t], -t)))
        assert farthest_first_order(features, number).tolist() == chosen

    @given(features=whole_features, data=st.data())
    def test_is_at_most_twice_as_far_as_the_best_possible(self, features: np.ndarray, data: st.DataObject) -> None:
        features = features[:9]
        number = data.draw(st.integers(1, len(features)))
        between = distances(features)
        least = min(between[:, list(some)].min(1).max() for some in combinations(range(len(features)), number))
        found = farthest_first(features, number)
        assert between[:, found].min(1).max() <= 2 * least + 1e-9

    def test_one_frame_of_every_shot(self) -> None:
        shots = np.repeat(np.random.default_rng(0).normal(0, 10, (5, 8)), [3, 9, 1, 4, 7], axis=0)
        shots += np.random.default_rng(1).normal(0, 0.1, shots.shape)
        found = farthest_first(shots, 5)
        assert np.digitize(found, [3, 12, 13, 17]).tolist() == [0, 1, 2, 3, 4]

    def test_tells_near_duplicates_far_from_the_origin_apart(self) -> None:
        features = 1e6 + np.array([[0.0], [1e-3], [0.0], [0.0], [0.0]])
        assert farthest_first(features, 2).tolist() == [1, 2]


class TestDPP:
    @pytest.mark.parametrize("seed", range(12))
    def test_is_the_dpp_of_scores_with_equal_ones(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count, number = int(rng.integers(2, 50)), int(rng.integers(1, 9))
        number = min(number, count)
        features = rng.normal(size=(count, 16)) * rng.choice([0.01, 1.0, 50.0])
        features[rng.integers(0, count, count // 4)] = features[0]  # duplicates too
        together = features[None]
        similarity = redundancy.gaussian_kernel(together, redundancy.median_bandwidth(together))
        expected = redundancy.dpp(np.full((1, count), 0.3), similarity, number)
        np.testing.assert_array_equal(dpp_diverse(features, number), expected[0])

    def test_same_median_where_most_frames_are_equal(self) -> None:
        """More than half of the pairs are equal frames: the bandwidth is 1 in the units of the features."""
        features = np.zeros((10, 2))
        features[[3, 6]] = [[40.0, 0.0], [40.0, 1.0]]
        together = features[None]
        assert redundancy.median_bandwidth(together).item() == 1
        for number in range(1, 11):
            similarity = redundancy.gaussian_kernel(together, 1.0)
            expected = redundancy.dpp(np.zeros((1, 10)), similarity, number)[0]
            np.testing.assert_array_equal(dpp_diverse(features, number), expected)

    @pytest.mark.parametrize("seed", range(4))
    def test_every_step_gains_the_most_volume(self, seed: int) -> None:
        features = np.random.default_rng(seed).normal(size=(9, 3))
        pairs = np.sort(distances(features)[np.triu_indices(9, 1)])
        kernel = np.exp(-(distances(features) ** 2) / (2 * pairs[(len(pairs) - 1) // 2] ** 2))
        chosen: list[int] = []
        for number in range(1, 7):
            volumes = [np.linalg.det(kernel[np.ix_([*chosen, t], [*chosen, t])]) for t in range(9)]
            left = [t for t in range(9) if t not in chosen]
            chosen.append(0 if number == 1 else max(left, key=lambda t: volumes[t]))
            assert dpp_order(features, number).tolist() == chosen

    def test_duplicates_come_last(self) -> None:
        features = np.repeat(np.eye(4), 3, axis=0)
        assert dpp_diverse(features, 4).tolist() == [0, 3, 6, 9]
        assert dpp_diverse(features, 6).tolist() == [0, 1, 2, 3, 6, 9]


def scatter(features: np.ndarray, bounds: tuple[int, ...]) -> Fraction:
    """By the Gram matrix, as the paper has it: what is left of the kernel's trace, segment by segment, exactly."""
    gram = [[int(x @ y) for y in features] for x in features]
    left = Fraction(0)
    for begin, end in pairwise(bounds):
        inside = range(begin, end)
        left += sum(gram[t][t] for t in inside) - Fraction(sum(gram[s][t] for s in inside for t in inside), end - begin)
    return left


class TestKTS:
    @settings(max_examples=60)
    @given(features=whole_features, data=st.data())
    def test_is_the_best_of_all_segmentations(self, features: np.ndarray, data: st.DataObject) -> None:
        """Least scatter, then the most even lengths; of each segment the frame with the least distance to the rest."""
        features = features[:9]
        count = len(features)
        number = data.draw(st.integers(1, count))
        cuts = combinations(range(1, count), number - 1)
        every = [(0, *middle, count) for middle in cuts]
        cost = {bounds: (scatter(features, bounds), int(np.square(np.diff(bounds)).sum())) for bounds in every}
        best = [bounds for bounds in every if cost[bounds] == min(cost.values())]
        squared = ((features[:, None] - features) ** 2).sum(-1)

        def medoid(begin: int, end: int) -> int:
            middle = Fraction(begin + end - 1, 2)
            return min(range(begin, end), key=lambda t: (squared[t, begin:end].sum(), abs(t - middle), t))

        choices = [[medoid(a, b) for a, b in pairwise(bounds)] for bounds in best]
        assert kts(features, number).tolist() in choices

    @pytest.mark.parametrize("lengths", [(3, 9, 1, 4, 7), (1, 1, 20), (12, 2)])
    def test_one_frame_of_every_shot(self, lengths: tuple[int, ...]) -> None:
        """Shots drift within, and the cut is larger than the drift."""
        rng = np.random.default_rng(0)
        shots = np.repeat(rng.normal(0, 10, (len(lengths), 8)), lengths, axis=0)
        shots += np.cumsum(rng.normal(0, 0.2, shots.shape), axis=0)
        found = kts(shots, len(lengths))
        bounds = np.cumsum(lengths)[:-1]
        assert np.digitize(found, bounds).tolist() == list(range(len(lengths)))

    def test_a_stray_frame_does_not_stand_for_its_segment(self) -> None:
        features = np.array([[0.0], [1.0], [7.0], [1.0], [0.0], [30.0], [30.0]])
        assert kts(features, 2).tolist() == [1, 5]  # not 2, the middle; of the two equal ones the earlier

    def test_a_still_video_is_cut_evenly(self) -> None:
        assert kts(np.full((9, 4), 0.1), 3).tolist() == [1, 4, 7]
        assert kts(np.full((8, 4), 0.1), 4).tolist() == [0, 2, 4, 6]
        assert kts(np.full((7, 4), 0.1), 1).tolist() == [3]
        # Equal scatter but for the lengths: the two still halves share the frames evenly.
        halves = np.repeat([[0.1], [0.7]], 6, axis=0)
        assert kts(halves, 4).tolist() == [1, 4, 7, 10]

    def test_far_from_the_origin(self) -> None:
        features = 1e6 + np.array([[0.0], [0.0], [0.0], [1e-3], [1e-3]])
        assert kts(features, 2).tolist() == [1, 3]


def histogram(frame: np.ndarray) -> np.ndarray:
    return np.concatenate([np.bincount(frame[..., channel].ravel(), minlength=256) for channel in range(3)])


def shades(count: int, seed: int = 0) -> np.ndarray:
    """uint8 [T, 24, 32, 3]: pictures between dark and bright, with some noise."""
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 200, (count, 1, 1, 3))
    return np.asarray(level + rng.integers(0, 56, (count, 24, 32, 3)), dtype=np.uint8)


class TestThumbnail:
    @pytest.mark.parametrize(("count", "number"), [(12, 1), (12, 3), (11, 4), (5, 5), (1, 1)])
    def test_is_the_nearest_to_the_mean_of_each_segment(self, count: int, number: int) -> None:
        frames = shades(count)
        table = np.stack([histogram(frame) for frame in frames])
        expected = []
        for k in range(number):
            segment = range(count * k // number, count * (k + 1) // number)
            mean = [Fraction(int(sum(table[t, i] for t in segment)), len(segment)) for i in range(768)]
            expected.append(min(segment, key=lambda t: sum((mean[i] - int(table[t, i])) ** 2 for i in range(768))))
        assert thumbnails(table, number).tolist() == expected
        assert choose_one(get_policy("thumbnail"), count, number, frames).positions.tolist() == expected

    @pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not on the path")
    @pytest.mark.parametrize("seed", range(4))
    def test_is_the_frame_that_ffmpeg_takes(self, seed: int) -> None:
        """One segment, which ffmpeg calls a batch."""
        frames = shades(9, seed)
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "32x24", "-i", "-"]
        wanted = ["-vf", "format=rgb24,thumbnail=n=9", "-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
        command = ["ffmpeg", "-v", "error", *source, *wanted]
        taken = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=True).stdout
        index = [frame.tobytes() for frame in frames].index(taken)
        assert choose_one(get_policy("thumbnail"), 9, 1, frames).positions.tolist() == [index]

    def test_of_equal_frames_the_first(self) -> None:
        assert choose_one(get_policy("thumbnail"), 6, 2, shades(1).repeat(6, axis=0)).positions.tolist() == [0, 3]
        table = np.array([[9, 0], [3, 3], [0, 9], [3, 3]])
        assert thumbnails(table, 1).tolist() == [1]


class TestPixelFeatures:
    def test_shape_and_scale(self) -> None:
        frames = np.stack([np.full((20, 30, 3), value, dtype=np.uint8) for value in (0, 255, 51)])
        features = pixel_features(frames)
        assert features.shape == (3, 320)
        assert features.dtype == np.float32
        np.testing.assert_allclose(distances(features.astype(float))[0], [0, 1, 0.2], atol=1e-6)

    def test_colours_are_the_means_of_cells(self) -> None:
        frame = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
        colours = pixel_features(frame)[0, :192].reshape(8, 8, 3) * np.sqrt(192)
        for row in range(8):
            for column in range(8):
                cell = frame[0, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] / 255
                np.testing.assert_allclose(colours[row, column], cell.mean((0, 1)), atol=1e-5)

    def test_does_not_depend_on_the_resolution(self) -> None:
        small = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
        large = small.repeat(4, axis=1).repeat(4, axis=2)
        np.testing.assert_allclose(pixel_features(large), pixel_features(small), atol=1e-6)

    @pytest.mark.parametrize("shape", [(1, 1), (1, 500), (7, 3), (479, 853)])
    def test_pictures_of_any_shape(self, shape: tuple[int, int]) -> None:
        frames = np.random.default_rng(0).integers(0, 256, (2, *shape, 3), dtype=np.uint8)
        assert np.isfinite(pixel_features(frames)).all()

    def test_sees_the_direction_of_stripes_of_one_colour(self) -> None:
        stripes = np.zeros((64, 64, 3), dtype=np.uint8)
        stripes[:, np.arange(64) % 8 < 4] = 200
        upright, lying = pixel_features(np.stack([stripes, stripes.transpose(1, 0, 2)]))
        np.testing.assert_allclose(upright[:192], lying[:192], atol=1e-6)
        edges = upright[192:].reshape(16, 8), lying[192:].reshape(16, 8)
        assert (edges[0].argmax(1) == 0).all()  # brightness changes to the right
        assert (edges[1].argmax(1) == 4).all()  # a quarter of a turn
        assert np.linalg.norm(upright - lying) > 0.3

    def test_an_inverted_edge_has_the_same_direction(self) -> None:
        ramp = np.broadcast_to(np.arange(0, 256, 4, dtype=np.uint8)[None, :, None], (64, 64, 3))
        both = pixel_features(np.stack([ramp, ramp[:, ::-1]]))[:, 192:]
        np.testing.assert_allclose(both[0], both[1], atol=1e-6)

    def test_noise_is_less_than_another_picture(self) -> None:
        rng = np.random.default_rng(0)
        shots = rng.integers(30, 220, (2, 6, 8, 3), dtype=np.uint8).repeat(20, axis=1).repeat(20, axis=2)
        frames = np.repeat(shots, 5, axis=0) + rng.integers(0, 20, (10, 120, 160, 3), dtype=np.uint8)
        between = distances(pixel_features(frames).astype(float))
        assert between[:5, :5].max() < 0.2 * between[:5, 5:].min()
        for rule in (farthest_first, dpp_diverse):
            assert (rule(pixel_features(frames), 2) // 5).tolist() == [0, 1]

    @pytest.mark.parametrize(
        "frames",
        [
            np.zeros((2, 4, 4, 3)),
            np.zeros((4, 4, 3), dtype=np.uint8),
            np.zeros((2, 3, 4, 4), dtype=np.uint8),
            np.zeros((0, 4, 4, 3), dtype=np.uint8),
            np.zeros((2, 0, 4, 3), dtype=np.uint8),
            [[1]],
        ],
    )
    def test_refuses_what_are_no_pictures(self, frames: Any) -> None:
        with pytest.raises(InvalidArgument, match="frames"):
            pixel_features(frames)
