"""Policies as pure functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sosampler.errors import InvalidArgument
from sosampler.policies.positional import FRAMEEXIT_ORDER_10, frameexit_order, top
from sosampler.policies.registry import get_policy, list_policies, pool_size
from sosampler.policies.score_rules import METHODS, aks, difference_peaks, inverse_transform, temporal_nms
from sosampler.policies.visual import change_scores, dpp_diverse, farthest_first, pixel_features

LOOKING = [name for name in list_policies() if get_policy(name).needs_frames]


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, int]:
    num_candidates = draw(st.integers(1, 120))
    return num_candidates, draw(st.integers(1, num_candidates))


@pytest.mark.parametrize("name", [name for name in list_policies() if name not in ("all", *LOOKING)])
@given(choice=choices(), seed=st.integers(0, 99))
def test_n_distinct_candidates_in_time_order(name: str, choice: tuple[int, int], seed: int) -> None:
    num_candidates, num_frames = choice
    positions = get_policy(name).choose(num_candidates, num_frames, None, seed).positions
    assert len(positions) == num_frames
    assert (np.diff(positions) > 0).all()
    assert 0 <= positions[0] <= positions[-1] < num_candidates


def test_uniform_spreads_over_the_candidates() -> None:
    assert get_policy("uniform").choose(10, 5, None, 0).positions.tolist() == [1, 3, 5, 7, 9]


def test_centre_takes_the_middle() -> None:
    assert get_policy("centre").choose(11, 3, None, 0).positions.tolist() == [4, 5, 6]


def test_random_follows_its_seed() -> None:
    policy = get_policy("random")
    first, same, other = (policy.choose(50, 8, None, seed).positions.tolist() for seed in (3, 3, 4))
    assert first == same != other


def test_random_takes_every_candidate_equally_often() -> None:
    drawn = np.concatenate([get_policy("random").choose(10, 3, None, seed).positions for seed in range(3000)])
    expected = 900  # of each of ten; the standard deviation is 25
    assert np.abs(np.bincount(drawn, minlength=10) - expected).max() < 125


class TestFrameExit:
    def test_published_order(self) -> None:
        assert frameexit_order(10) == [5, 0, 9, 2, 7, 4, 6, 3, 8, 1] == list(FRAMEEXIT_ORDER_10)

    @given(st.integers(1, 200))
    def test_every_order_is_a_permutation(self, count: int) -> None:
        assert sorted(frameexit_order(count)) == list(range(count))

    @given(st.integers(3, 200))
    def test_middle_then_ends(self, count: int) -> None:
        if count != 10:
            assert frameexit_order(count)[:3] == [count // 2, 0, count - 1]

    def test_gaps_close_breadth_first(self) -> None:
        """No gap is cut again while one at least three times as wide is left."""
        order = frameexit_order(65)
        for seen in range(3, 65):
            gaps = np.diff(sorted(order[:seen]))
            assert gaps.max() <= 2 * gaps.min()


class TestFrameDifference:
    def test_scores_are_the_share_of_the_change(self) -> None:
        frames = np.zeros((4, 8, 8, 3), dtype=np.uint8)
        frames[2:] = 255
        assert change_scores(frames).tolist() == [0.0, 0.0, 1.0, 0.0]

    def test_one_frame(self) -> None:
        assert change_scores(np.zeros((1, 8, 8, 3), dtype=np.uint8)).tolist() == [0.0]

    def test_finds_the_cut(self) -> None:
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 20, (20, 32, 32, 3), dtype=np.uint8)
        frames[13:] += 100
        assert get_policy("frame-difference").choose(20, 1, frames, 0).positions.tolist() == [13]

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.data())
    def test_top_is_the_best_by_sorting(self, scores: list[float], data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(scores)))
        chosen = top(np.array(scores), count)
        assert sorted(np.array(scores)[chosen]) == sorted(scores)[-count:]
        assert (np.diff(chosen) > 0).all()

    def test_of_equal_scores_the_earlier(self) -> None:
        assert top(np.array([1.0, 2.0, 2.0, 2.0]), 2).tolist() == [1, 2]


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """uint8 [T, 24, 32, 3]: pictures that share parts with their neighbours."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (count, 24, 32, 3), dtype=np.uint8)
    for t in range(1, count):
        same = rng.integers(0, 32)
        frames[t, :, :same] = frames[t - 1, :, :same]
    return frames


class TestThoseThatLook:
    def test_which_they_are(self) -> None:
        assert LOOKING == ["frame-difference", "difference-peaks", "farthest-first", "dpp", "general"]
        for name in LOOKING:
            assert get_policy(name).default_candidates is pool_size

    @pytest.mark.parametrize("name", [*LOOKING, *(f"frame-difference+{method}" for method in METHODS)])
    @pytest.mark.parametrize("count", [1, 2, 3, 11])
    def test_n_distinct_candidates_in_time_order(self, name: str, count: int) -> None:
        policy = get_policy(name)
        for num_frames in range(1, count + 1):
            choice = policy.choose(count, num_frames, pictures(count), 0)
            assert choice.positions.shape == (num_frames,)
            assert (np.diff(choice.positions) > 0).all()
            assert 0 <= choice.positions[0] <= choice.positions[-1] < count
            assert choice.scores is None or choice.scores.shape == (count,)

    @pytest.mark.parametrize("num_frames", [1, 4, 9])
    @pytest.mark.parametrize(("name", "rule"), [("farthest-first", farthest_first), ("dpp", dpp_diverse)])
    def test_unlike_pictures(self, name: str, rule: Callable[..., np.ndarray], num_frames: int) -> None:
        frames = pictures(20)
        choice = get_policy(name).choose(20, num_frames, frames, 0)
        assert choice.positions.tolist() == rule(pixel_features(frames), num_frames).tolist()
        assert choice.scores is None

    @pytest.mark.parametrize("name", ["farthest-first", "dpp"])
    def test_one_of_each_shot(self, name: str) -> None:
        """Three still shots of different lengths: three frames are one of each."""
        shots = pictures(3)
        of = [0] * 3 + [1] * 14 + [2] * 2
        chosen = get_policy(name).choose(len(of), 3, shots[of], 0).positions
        assert [of[place] for place in chosen] == [0, 1, 2]

    def test_peaks_of_the_change(self) -> None:
        frames = pictures(20)
        scores = change_scores(frames)
        choice = get_policy("difference-peaks").choose(20, 5, frames, 0)
        assert choice.positions.tolist() == difference_peaks(scores, 5).tolist() != top(scores, 5).tolist()
        np.testing.assert_array_equal(choice.scores, scores)

    @pytest.mark.parametrize(("method", "rule"), [("aks", aks), ("its", inverse_transform), ("nms", temporal_nms)])
    def test_methods_on_the_change(self, method: str, rule: Callable[..., np.ndarray]) -> None:
        frames = pictures(20)
        scores = change_scores(frames)
        policy = get_policy(f"frame-difference+{method}")
        assert (policy.name, policy.needs_frames, policy.identity) == (f"frame-difference+{method}", True, None)
        choice = policy.choose(20, 5, frames, 0)
        assert choice.positions.tolist() == rule(scores, 5).tolist() != top(scores, 5).tolist()
        np.testing.assert_array_equal(choice.scores, scores)


def test_names() -> None:
    assert list_policies("frame*") == ["frame-difference", "frameexit"]
    with pytest.raises(InvalidArgument, match="policy='best' is unknown; choose one of: uniform, random"):
        get_policy("best")


@pytest.mark.parametrize(
    "name", ["uniform+nms", "frame-difference+best", "dpp+nms", "+nms", "frame-difference+nms+nms"]
)
def test_what_takes_no_method_is_told_what_does(name: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        get_policy(name)
    told = str(raised.value)
    assert f"policy={name!r} is unknown; choose one of: {', '.join(list_policies())}, or give the folder" in told
    assert told.endswith("; +aks, +its, +nms go behind such a folder or frame-difference")
