"""The choice over a whole collection against a brute force in float64."""

from __future__ import annotations

import numpy as np
import pytest

from sosampler.policies.collection import FEATURE_DIMS, choose_distinct, reduced, unit_rows


def brute_force(quality: np.ndarray, features: np.ndarray, total: int, videos: list[int], at_least: int) -> list[int]:
    """Look at every candidate and every chosen one, again at each step."""
    chosen: list[int] = []
    while len(chosen) < min(total, len(quality)):
        left = min(total, len(quality)) - len(chosen)
        lacking = {
            video: max(0, min(at_least, videos.count(video)) - sum(videos[one] == video for one in chosen))
            for video in set(videos)
        }
        forced = left <= sum(lacking.values())
        best, best_value = -1, -1.0
        for one in range(len(quality)):
            if one in chosen or (forced and not lacking[videos[one]]):
                continue
            cosines = [
                features[one] @ features[other] / np.linalg.norm(features[one]) / np.linalg.norm(features[other])
                for other in chosen
            ]
            value = float(quality[one]) * (1 - max([0.0, *cosines]))
            if value > best_value + 1e-9:
                best, best_value = one, value
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("at_least", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_brute_force(seed: int, at_least: int) -> None:
    rng = np.random.default_rng(seed)
    videos = np.sort(rng.integers(0, 5, 30)).tolist()
    quality, features = rng.uniform(0.05, 1, 30), rng.normal(size=(30, 6))
    # One video is far clearer than the rest, so that the others get something only because they must.
    quality[np.array(videos) == videos[0]] += 5
    chosen = choose_distinct(quality, features, 17, groups=videos, at_least=at_least)
    assert chosen.positions.tolist() == brute_force(quality, features, 17, videos, at_least)
    for video in set(videos):
        assert sum(videos[one] == video for one in chosen.positions) >= min(at_least, videos.count(video))


def test_the_distance_is_to_those_chosen_before() -> None:
    chosen = choose_distinct([1.0, 0.9, 0.5], [[1, 0], [0, 2], [3, 4]], 3)
    assert chosen.positions.tolist() == [0, 1, 2]
    np.testing.assert_allclose(chosen.distances, [1, 1, 1 - 0.8], atol=1e-6)


def test_repeated_images_come_last_and_the_clearest_of_them_first() -> None:
    same, other = [1.0, 2.0], [2.0, 1.9]
    chosen = choose_distinct([0.5, 0.6, 0.7, 0.1], [same, same, same, other], 4)
    assert chosen.positions.tolist() == [2, 3, 1, 0]


def test_blurred_outliers_do_not_win() -> None:
    features = np.array([[1, 0, 0], [0.9, 0.5, 0], [0, 0, 1]])  # the last is farthest from the first
    assert choose_distinct([1, 0.9, 0.05], features, 2).positions.tolist() == [0, 1]
    assert choose_distinct([1, 0.9, 0.9], features, 2).positions.tolist() == [0, 2]


def test_of_equal_ones_the_earlier_and_never_more_than_there_are() -> None:
    assert choose_distinct([1, 1, 1], np.eye(3), 2).positions.tolist() == [0, 1]
    assert choose_distinct([1, 1, 1], np.eye(3), 9).positions.tolist() == [0, 1, 2]
    assert choose_distinct([0, 0], np.zeros((2, 4)), 2).positions.tolist() == [0, 1]
    assert len(choose_distinct([], np.zeros((0, 4)), 2).positions) == 0


def test_reduced_features_keep_cosines_within_the_stated_error() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(2000, 1280))
    for cosine in (0.0, 0.7, 0.95):
        noise = rng.normal(size=first.shape)
        second = cosine * unit_rows(first) + np.sqrt(1 - cosine**2) * unit_rows(noise)
        before = (unit_rows(first) * unit_rows(second)).sum(1)
        after = (unit_rows(reduced(first)) * unit_rows(reduced(second))).sum(1)
        assert np.std(after - before) < 1.15 * (1 - cosine**2) / np.sqrt(FEATURE_DIMS)
        assert abs(np.mean(after - before)) < 0.01
    assert reduced(first).shape == (2000, FEATURE_DIMS)


def test_short_features_stay_as_they_are() -> None:
    features = np.random.default_rng(1).normal(size=(5, 8))
    np.testing.assert_allclose(reduced(features), features / np.linalg.norm(features, axis=1, keepdims=True), atol=1e-3)
