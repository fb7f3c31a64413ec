"""Policies as pure functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sosampler as so
from sosampler.errors import InvalidArgument
from sosampler.policies import registry
from sosampler.policies.base import Batch, Policy, choose_one, top
from sosampler.policies.positional import FRAMEEXIT_ORDER_10, frameexit_order
from sosampler.policies.registry import METHOD_NAMES, get_policy, list_policies
from sosampler.policies.score_rules import (
    METHODS,
    aks,
    difference_peaks,
    dpp,
    facility_location,
    gaussian_kernel,
    inverse_transform,
    median_bandwidth,
    mmr,
    motion_uniform,
    temporal_nms,
)
from sosampler.policies.visual import change_scores, dpp_order, farthest_first_order, pixel_features

LOOKING = [name for name in list_policies() if get_policy(name).needs_frames]


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, int]:
    num_candidates = draw(st.integers(1, 120))
    return num_candidates, draw(st.integers(1, num_candidates))


@pytest.mark.parametrize("name", [name for name in list_policies() if name not in ("all", *LOOKING)])
@given(choice=choices(), seed=st.integers(0, 99))
def test_n_distinct_candidates_in_time_order(name: str, choice: tuple[int, int], seed: int) -> None:
    num_candidates, num_frames = choice
    positions = choose_one(get_policy(name), num_candidates, num_frames, None, seed=seed).positions
    assert len(positions) == num_frames
    assert (np.diff(positions) > 0).all()
    assert 0 <= positions[0] <= positions[-1] < num_candidates


def test_uniform_spreads_over_the_candidates() -> None:
    assert choose_one(get_policy("uniform"), 10, 5, None, seed=0).positions.tolist() == [1, 3, 5, 7, 9]


def test_centre_takes_the_middle() -> None:
    assert choose_one(get_policy("centre"), 11, 3, None, seed=0).positions.tolist() == [4, 5, 6]


def test_as_many_candidates_as_a_policy_needs() -> None:
    needed = {name: [get_policy(name).default_candidates(count) for count in (4, 12)] for name in list_policies()}
    assert needed["uniform"] == needed["keyframe"] == needed["all"] == [4, 12]
    assert needed["frameexit"] == [10, 12]
    assert needed["centre"] == needed["random"] == [32, 48]


def test_random_follows_its_seed() -> None:
    policy = get_policy("random")
    first, same, other = (choose_one(policy, 50, 8, None, seed=seed).positions.tolist() for seed in (3, 3, 4))
    assert first == same != other


def test_random_takes_every_candidate_equally_often() -> None:
    drawn = np.concatenate([choose_one(get_policy("random"), 10, 3, None, seed=seed).positions for seed in range(3000)])
    expected = 900  # of each of ten; the standard deviation is 25
    assert np.abs(np.bincount(drawn, minlength=10) - expected).max() < 125


class TestFrameExit:
    def test_published_order(self) -> None:
        assert frameexit_order(10) == [5, 0, 9, 2, 7, 4, 6, 3, 8, 1] == list(FRAMEEXIT_ORDER_10)

    def test_other_numbers_go_gap_by_gap_from_left_to_right(self) -> None:
        assert frameexit_order(1) == [0]
        assert frameexit_order(2) == [1, 0]
        assert frameexit_order(4) == [2, 0, 3, 1]
        assert frameexit_order(9) == [4, 0, 8, 2, 6, 1, 3, 5, 7]
        assert frameexit_order(12) == [6, 0, 11, 3, 8, 1, 4, 7, 9, 2, 5, 10]

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
        assert choose_one(get_policy("frame-difference"), 20, 1, frames, seed=0).positions.tolist() == [13]

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
        by_change, by_content = "frame-difference difference-peaks motion-uniform", "farthest-first dpp kts thumbnail"
        assert " ".join(LOOKING) == f"{by_change} {by_content} general general-text"
        for name in LOOKING:
            assert [get_policy(name).default_candidates(n) for n in (1, 8, 20)] == [32, 32, 80]

    @pytest.mark.parametrize("name", [*LOOKING, *(f"frame-difference+{method}" for method in METHODS)])
    @pytest.mark.parametrize("count", [1, 2, 3, 11])
    @pytest.mark.parametrize("still", [False, True])
    def test_n_distinct_candidates_in_time_order(self, name: str, count: int, still: bool) -> None:
        policy = get_policy(name)
        frames = pictures(1).repeat(count, axis=0) if still else pictures(count)
        for num_frames in range(1, count + 1):
            choice = choose_one(policy, count, num_frames, frames, seed=0)
            assert choice.positions.shape == (num_frames,)
            assert (np.diff(choice.positions) > 0).all()
            assert 0 <= choice.positions[0] <= choice.positions[-1] < count
            assert choice.scores is None or choice.scores.shape == (count,)

    @pytest.mark.parametrize("num_frames", [1, 4, 9])
    @pytest.mark.parametrize(("name", "rule"), [("farthest-first", farthest_first_order), ("dpp", dpp_order)])
    def test_unlike_pictures(self, name: str, rule: Callable[..., np.ndarray], num_frames: int) -> None:
        frames = pictures(20)
        choice = choose_one(get_policy(name), 20, num_frames, frames, seed=0)
        assert choice.positions.tolist() == sorted(rule(pixel_features(frames), num_frames))
        assert choice.scores is None

    @pytest.mark.parametrize("name", ["farthest-first", "dpp", "kts"])
    def test_one_of_each_shot(self, name: str) -> None:
        """Three still shots of different lengths: three frames are one of each."""
        shots = pictures(3)
        of = [0] * 3 + [1] * 14 + [2] * 2
        chosen = choose_one(get_policy(name), len(of), 3, shots[of], seed=0).positions
        assert [of[place] for place in chosen] == [0, 1, 2]

    def test_peaks_of_the_change(self) -> None:
        frames = pictures(20)
        scores = change_scores(frames)
        choice = choose_one(get_policy("difference-peaks"), 20, 5, frames, seed=0)
        assert choice.positions.tolist() == difference_peaks(scores, 5).tolist() != top(scores, 5).tolist()
        np.testing.assert_array_equal(choice.scores, scores)

    def test_equal_steps_of_the_motion(self) -> None:
        """Still but for eight candidates in the middle, which take all but the rest of N."""
        frames = pictures(1).repeat(24, axis=0)
        frames[8:16] = pictures(8, seed=1)
        choice = choose_one(get_policy("motion-uniform"), 24, 5, frames, seed=0)
        assert choice.positions.tolist() == motion_uniform(change_scores(frames), 5).tolist()
        assert ((choice.positions >= 8) & (choice.positions <= 16)).all()
        still = choose_one(get_policy("motion-uniform"), 24, 5, frames[:1].repeat(24, axis=0), seed=0)
        assert still.positions.tolist() == choose_one(get_policy("uniform"), 24, 5).positions.tolist()

    @pytest.mark.parametrize(("method", "rule"), [("aks", aks), ("its", inverse_transform), ("nms", temporal_nms)])
    def test_methods_on_the_change(self, method: str, rule: Callable[..., np.ndarray]) -> None:
        frames = pictures(20)
        scores = change_scores(frames)
        policy = get_policy(f"frame-difference+{method}")
        assert (policy.name, policy.needs_frames, policy.fingerprint()) == (f"frame-difference+{method}", True, None)
        choice = choose_one(policy, 20, 5, frames, seed=0)
        assert choice.positions.tolist() == rule(scores, 5).tolist() != top(scores, 5).tolist()
        np.testing.assert_array_equal(choice.scores, scores)


def test_names() -> None:
    assert list_policies("frame*") == ["frame-difference", "frameexit"]
    with pytest.raises(InvalidArgument, match="policy='best' is unknown; choose one of: uniform, random"):
        get_policy("best")
    with pytest.raises(InvalidArgument, match=r"policy='generla' is unknown, did you mean 'general'\? choose one of"):
        get_policy("generla")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uniform+nms", "'uniform' has no scores, .*put one method behind a policy with scores: frame-difference, "),
        ("dpp+nms", "'dpp' has no scores"),
        (
            "frame-difference+best",
            r"is unknown, did you mean 'frame-difference'\?.*\+aks, \+its, \+nms, \+mmr, \+dpp, \+facility go",
        ),
        ("+nms", "is unknown; choose one of"),
        ("frame-difference+nms+nms", r"'frame-difference\+nms' has a method already"),
        ("nowhere.to_be_found:Policy", "cannot be imported .*give MODULE:CLASS"),
        ("collections:Counter", "is a Counter; give a Policy"),
    ],
)
def test_what_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        get_policy(name)
    assert name in str(raised.value) or "Counter" in name


# ---- a policy of one's own


class Brightest(Policy):
    """Writes scores only."""

    name, description, needs = "brightest", "the N brightest", frozenset({"frames"})

    def scores(self, batch: Batch) -> np.ndarray:
        assert batch.frames is not None
        return batch.frames.mean(axis=(2, 3, 4))


class Last(Policy):
    """Writes choose only, and sees no frames."""

    def choose(self, batch: Batch, num_frames: int) -> np.ndarray:
        return batch.counts[:, None] - num_frames + np.arange(num_frames)


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test registers are forgotten after it."""
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))


@pytest.mark.usefixtures("no_names")
class TestOwnPolicies:
    def test_scores_are_enough(self) -> None:
        frames = pictures(12)
        choice = choose_one(Brightest(), 12, 3, frames)
        assert choice.scores is not None
        assert choice.positions.tolist() == top(frames.mean((1, 2, 3)), 3).tolist()
        np.testing.assert_array_equal(choice.scores, frames.mean((1, 2, 3)))

    def test_padding_is_never_chosen(self) -> None:
        frames = np.stack([pictures(6), pictures(6, seed=1)])
        frames[1, 4:] = 255  # the brightest, but padding
        chosen = Brightest().choose(Batch(6, np.array([6, 4]), frames), 4)
        assert chosen[1].tolist() == [0, 1, 2, 3]
        assert chosen[0].tolist() == choose_one(Brightest(), 6, 4, frames[0]).positions.tolist()

    @pytest.mark.parametrize("given", [Last, Last(), "tests.policies.test_registry:Last"])
    def test_however_it_is_given(self, given: Any, clip: Path) -> None:
        selection = so.select(clip, 3, policy=given, num_candidates=9)
        assert selection.policy == "Last"
        assert selection.frame_indices.tolist() == selection.candidates.frame_indices[-3:].tolist()

    def test_registered(self, clip: Path) -> None:
        assert "brightest" not in list_policies()
        so.register_policy(Brightest())
        assert list_policies("bright*") == ["brightest"]
        by_name, itself = (so.select(clip, 3, policy=given) for given in ("brightest", Brightest()))
        assert by_name.frame_indices.tolist() == itself.frame_indices.tolist()
        with pytest.raises(InvalidArgument, match="a policy called 'brightest' is there already"):
            so.register_policy(Brightest())
        with pytest.raises(InvalidArgument, match="cannot be called 'a=b'"):
            so.register_policy(Brightest().renamed("a=b"))

    @pytest.mark.parametrize("method", METHOD_NAMES)
    @pytest.mark.parametrize("base", ["brightest", "general", "difference-peaks"])
    def test_every_method_wraps_every_policy_with_scores(self, base: str, method: str) -> None:
        so.register_policy(Brightest())
        frames, policy = pictures(12), get_policy(f"{base}+{method}")
        batch = Batch(12, np.array([12]), frames[None])
        if method in METHODS:
            expected = METHODS[method](policy.unit_scores(batch)[0].astype(np.float64), 4)
        else:
            features = policy.features(batch)
            kernel = gaussian_kernel(features, median_bandwidth(features))
            pick = {"mmr": mmr, "dpp": dpp, "facility": facility_location}[method]
            expected = pick(policy.unit_scores(batch).astype(np.float32), kernel.astype(np.float32), 4)[0]
        choice = choose_one(policy, 12, 4, frames)
        assert choice.positions.tolist() == expected.tolist()
        assert choice.scores is not None

    @pytest.mark.parametrize(
        "positions", [[[0, 1]], [[0, 0, 1]], [[2, 1, 0]], [[0, 1, 12]], [[-1, 0, 1]], [0, 1, 2], [[0.0, 1.0, 2.0]]]
    )
    def test_a_wrong_choice_is_reported(self, positions: Any) -> None:
        class Wrong(Policy):
            def choose(self, batch: Batch, num_frames: int) -> Any:
                return np.array(positions)

        with pytest.raises(InvalidArgument, match=r"the policy 'Wrong' chose .* must return 3 distinct positions"):
            choose_one(Wrong(), 12, 3)

    def test_wrong_classes_are_reported(self) -> None:
        class Shapeless(Policy):
            def scores(self, batch: Batch) -> np.ndarray:
                return np.zeros(batch.num_candidates)

        class Greedy(Policy):
            needs = frozenset({"everything"})

        with pytest.raises(InvalidArgument, match=r"have shape \[5\]; return a number for each .* \[1, 5\]"):
            choose_one(Shapeless(), 5, 2)
        with pytest.raises(InvalidArgument, match="neither scores nor choose"):
            choose_one(Policy().renamed("nothing"), 5, 2)
        with pytest.raises(InvalidArgument, match='needs everything; needs must be a set of "frames"'):
            get_policy(Greedy())

    def test_auto_by_its_own_expectations(self) -> None:
        class Deciding(Brightest):
            def expected(self, batch: Batch) -> np.ndarray:
                return np.array([[0.1, 0.9, 0.9, 0.9]])

        assert choose_one(Deciding(), 4, 4, pictures(4), auto=so.Auto()).positions.shape == (2,)
        with pytest.raises(InvalidArgument, match="not for the policy 'brightest'"):
            choose_one(Brightest(), 4, 4, pictures(4), auto=so.Auto())


@pytest.mark.parametrize("name", ["optimal", "semi-optimal", "semi-optimal-max", "semi-optimal+mmr"])
def test_select_refuses_oracles(name: str, clip: Path) -> None:
    assert name not in list_policies()
    with pytest.raises(InvalidArgument, match="needs the outputs of a teacher, which only a bank has; use it in eval"):
        so.select(clip, 3, policy=name)


def test_methods_without_torch(clip: Path) -> None:
    code = (
        "import sys\nsys.modules.update(torch=None, torchvision=None)\nimport sosampler as so\n"
        f"for policy in ('general+mmr', 'frame-difference+dpp'): so.select({str(clip)!r}, 4, policy=policy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
