"""Policies as pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sosampler.errors import InvalidArgument
from sosampler.policies import get_policy, list_policies
from sosampler.policies.difference import change_scores
from sosampler.policies.rules import FRAMEEXIT_ORDER_10, frameexit_order, top


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, int]:
    num_candidates = draw(st.integers(1, 120))
    return num_candidates, draw(st.integers(1, num_candidates))


@pytest.mark.parametrize("name", [name for name in list_policies() if name not in ("all", "frame-difference")])
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


def test_names() -> None:
    assert list_policies("frame*") == ["frame-difference", "frameexit"]
    with pytest.raises(InvalidArgument, match="policy='best' is unknown; choose one of: uniform, random"):
        get_policy("best")
