"""How many frames a video needs: the stopping rule against plain loops, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sosampler.errors import InvalidArgument
from sosampler.inference.options import SelectOptions, auto_of
from sosampler.policies.auto import Auto
from sosampler.policies.base import SHARE, SPREAD, count_frames, expected_by_belief, expected_by_confidence
from sosampler.policies.learned import SamplerOutputs, expected_of

VIDEOS, T, CLASSES = 40, 9, 4
RNG = np.random.default_rng(7)
# Scores with ties, and heads of which some are sure.
SCORES = RNG.integers(0, 5, (VIDEOS, T)) / 4.0
LOGITS = RNG.normal(0, 2, (VIDEOS, T, CLASSES))
BELIEF = np.log(RNG.dirichlet(np.full(CLASSES, 0.5), VIDEOS))
CONFIDENCES = RNG.uniform(0.01, 0.99, (VIDEOS, T))
AUTOS = [
    Auto(),
    Auto(tolerance=0),
    Auto(min=3, max=5, tolerance=0.05),
    Auto(min=2, max=2),
    Auto(max=100, tolerance=0.3),
]


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(value - max(logits)) for value in logits]
    return [weight / sum(weights) for weight in weights]


def best_first(scores: np.ndarray) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


def belief_by_hand(scores: np.ndarray, logits: np.ndarray, belief: np.ndarray, multi_label: bool) -> list[float]:
    """E_k of one video, k = 1 ... T, number by number."""
    order, found = best_first(scores), []
    for k in range(1, len(scores) + 1):
        means = []
        for c in range(logits.shape[1]):
            said = [logits[t][c] if multi_label else math.log(softmax(list(logits[t]))[c]) for t in order[:k]]
            means.append(math.sqrt(k) * (sum(said) / k) / SPREAD)
        wins = [1 / (1 + math.exp(-mean)) for mean in means] if multi_label else softmax(means)
        found.append(sum(math.exp(weight) * win for weight, win in zip(belief, wins, strict=True)))
    return found


def confidence_by_hand(scores: np.ndarray, confidences: np.ndarray) -> list[float]:
    order, found, none = best_first(scores), [], 1.0
    for t in order:
        if confidences[t] >= SHARE * confidences[order[0]]:
            none *= 1 - confidences[t]
        found.append(1 - none)
    return found


def count_by_hand(expected: list[float], auto: Auto) -> int:
    numbers = range(min(auto.min, len(expected)), min(auto.max, len(expected)) + 1)
    best = max(expected[k - 1] for k in numbers)
    return next(k for k in numbers if expected[k - 1] >= best - auto.tolerance)


# ---- against plain loops


@pytest.mark.parametrize("multi_label", [False, True])
def test_belief_is_what_loops_give(multi_label: bool) -> None:
    expected = expected_by_belief(SCORES, LOGITS, BELIEF, multi_label=multi_label)
    for row in range(VIDEOS):
        by_hand = belief_by_hand(SCORES[row], LOGITS[row], BELIEF[row], multi_label)
        np.testing.assert_allclose(expected[row], by_hand, rtol=1e-12)


def test_confidence_is_what_loops_give() -> None:
    expected = expected_by_confidence(SCORES, CONFIDENCES)
    for row in range(VIDEOS):
        np.testing.assert_allclose(expected[row], confidence_by_hand(SCORES[row], CONFIDENCES[row]), rtol=1e-12)


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("kind", ["belief", "confidence"])
def test_the_number_is_what_loops_give(kind: str, auto: Auto) -> None:
    expected = of_kind(kind)
    counts = count_frames(expected, auto)
    assert counts.tolist() == [count_by_hand(list(row), auto) for row in expected]
    assert len(set(counts.tolist())) > 1 or auto.min == auto.max, "a rule that never decides proves nothing"


def of_kind(kind: str, rows: Any = slice(None)) -> np.ndarray:
    if kind == "belief":
        return expected_by_belief(SCORES[rows], LOGITS[rows], BELIEF[rows])
    return expected_by_confidence(SCORES[rows], CONFIDENCES[rows])


# ---- what must hold


@pytest.mark.parametrize("kind", ["belief", "confidence"])
def test_more_tolerance_never_takes_more(kind: str) -> None:
    expected = of_kind(kind)
    counts = [count_frames(expected, Auto(tolerance=one)) for one in (0, 0.01, 0.05, 0.2, 1)]
    assert all((more <= less).all() for less, more in pairwise(counts))
    assert (counts[0] > counts[-1]).any()
    assert (counts[-1] == 1).all()


@pytest.mark.parametrize("kind", ["belief", "confidence"])
@pytest.mark.parametrize("auto", AUTOS)
def test_least_and_most_are_kept(kind: str, auto: Auto) -> None:
    counts = count_frames(of_kind(kind), auto)
    assert (counts >= auto.min).all()
    assert (counts <= min(auto.max, T)).all()


@pytest.mark.parametrize("kind", ["belief", "confidence"])
def test_one_by_one_is_the_same(kind: str) -> None:
    together = of_kind(kind)
    for row in range(VIDEOS):
        np.testing.assert_array_equal(of_kind(kind, rows=[row])[0], together[row])
        alone = count_frames(together[row : row + 1], AUTOS[0])
        assert alone[0] == count_frames(together, AUTOS[0])[row]


def best(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The `counts` [B] highest scores as bool [B, T]."""
    rank = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    return rank < counts[:, None]


@pytest.mark.parametrize("kind", ["belief", "confidence"])
def test_the_order_of_candidates_does_not_matter(kind: str) -> None:
    apart = SCORES + np.arange(T) * 1e-4  # no ties, which go by time
    order = np.random.default_rng(1).permutation(T)

    def chosen(columns: Any) -> tuple[np.ndarray, np.ndarray]:
        scores = apart[:, columns]
        if kind == "belief":
            expected = expected_by_belief(scores, LOGITS[:, columns], BELIEF)
        else:
            expected = expected_by_confidence(scores, CONFIDENCES[:, columns])
        counts = count_frames(expected, AUTOS[0])
        return counts, best(scores, counts)

    (counts, mask), (others, shuffled) = chosen(np.arange(T)), chosen(order)
    assert counts.tolist() == others.tolist()
    np.testing.assert_array_equal(mask[:, order], shuffled)


@pytest.mark.parametrize("kind", ["belief", "confidence"])
def test_padding_changes_nothing(kind: str) -> None:
    real = np.random.default_rng(2).integers(1, T + 1, VIDEOS)
    mask = np.arange(T) < real[:, None]
    scores, logits = np.where(mask, SCORES, np.nan), np.where(mask[..., None], LOGITS, np.nan)
    scoring = {"relevance": (1.0, 0.0), "belief": 1.0, "importance": 1.0} if kind == "belief" else {}
    sampler = SimpleNamespace(config={"scoring": scoring, "multi_label": False}, calibration=(1.0, 0.0))

    def expect(rows: Any, columns: Any, counts: Any = None) -> np.ndarray:
        outputs = SamplerOutputs(scores[rows, columns], scores[rows, columns], logits[rows, columns], None)
        return expected_of(sampler, outputs, counts)

    expected = expect(slice(None), slice(None), real)
    counts = count_frames(expected, Auto(min=2, max=5))
    for row, count in enumerate(real.tolist()):
        short = expect([row], slice(count))
        np.testing.assert_allclose(expected[row, :count], short[0], rtol=1e-12)
        assert (expected[row, count:] == -np.inf).all()
        assert counts[row] == count_frames(short, Auto(min=2, max=5))[0]
        assert min(2, count) <= counts[row] <= count


def test_a_sure_video_needs_one_frame_and_a_doubtful_one_more() -> None:
    sure, doubtful = np.array([6.0, 0.0, 0.0]), np.array([0.3, 0.0, 0.0])
    logits = np.stack([np.tile(sure, (8, 1)), np.tile(doubtful, (8, 1))])
    belief = np.log([[0.98, 0.01, 0.01]] * 2)
    expected = expected_by_belief(np.zeros((2, 8)), logits, belief)
    assert count_frames(expected, Auto()).tolist() == [1, 8]


def test_a_frame_that_leads_astray_ends_it() -> None:
    logits = np.array([[[2.0, 0.0], [2.0, 0.0], [-6.0, 6.0], [-6.0, 6.0]]])
    expected = expected_by_belief([[4.0, 3.0, 2.0, 1.0]], logits, np.log([[0.9, 0.1]]))
    assert count_frames(expected, Auto(tolerance=0)).tolist() == [2]


# ---- what may be asked for


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min": 0}, "auto_min=0"),
        ({"max": 0}, "auto_max=0"),
        ({"min": 5, "max": 4}, "auto_min=5 is more than auto_max=4"),
        ({"tolerance": -0.1}, "auto_tolerance=-0.1"),
        ({"tolerance": float("nan")}, "auto_tolerance=nan"),
        ({"sure": 0.0}, "auto_sure=0"),
        ({"sure": 1.01}, "auto_sure=1.01 must be above 0 and at most 1"),
    ],
)
def test_bad_bounds(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Auto(**options)


def test_settings_ready_for_json() -> None:
    assert Auto(min=2, max=2).to_dict() == {"num_frames": "auto", "min": 2, "max": 2, "tolerance": 0.005}
    expected = np.array([0.123456789, 0.5, 0.7], dtype=np.float32)
    told = Auto(max=2, tolerance=0.1, sure=1.0).to_dict(expected)
    assert told["sure"] == 1.0
    assert told["expected"] == [0.123457, 0.5]


def test_bounds_without_auto_are_refused() -> None:
    assert auto_of(6, None, None, None) is None
    with pytest.raises(InvalidArgument, match=r"auto_max=4 is for num_frames='auto', not for num_frames=6"):
        SelectOptions(num_frames=6, auto_max=4, policy="uniform")
    with pytest.raises(InvalidArgument, match="num_frames='many'"):
        SelectOptions(num_frames="many", policy="uniform")


@pytest.mark.parametrize("policy", ["uniform", "all", "frame-difference", "frame-difference+aks", "keyframe"])
def test_rules_cannot_decide(policy: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"trained samplers.*policy '{policy.replace('+', '.')}'; give a number"):
        SelectOptions(num_frames="auto", policy=policy)


def test_scores_of_another_shape() -> None:
    with pytest.raises(InvalidArgument, match="scores have shape"):
        expected_by_confidence([1.0, 2.0], [1.0, 2.0])
