"""Scores from the sampler's heads: the belief against a plain loop, padding, order, and what it is good for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import Scoring

BELIEF = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}


def heads(batch: int = 3, frames: int = 5, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    importance = torch.randn(batch, frames, generator=generator, dtype=torch.float64)
    return importance, 2 * torch.randn(batch, frames, classes, generator=generator, dtype=torch.float64)


def by_hand(importance: list[float], logits: list[list[float]], *, multi_label: bool) -> list[float]:
    """Scores of one video, number by number."""
    frames, classes = len(importance), len(logits[0])
    if multi_label:
        probs = [[1 / (1 + math.exp(-x)) for x in row] for row in logits]
    else:
        probs = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in logits]
    evidence = [0.0] * classes
    for t in range(frames):
        relevance = 1 / (1 + math.exp(-(4 * importance[t] + 1)))
        for c in range(classes):
            share = probs[t][c] / sum(probs[t])
            evidence[c] += math.log(max(1e-4, 1 - relevance + relevance * classes * share))
    weights = [math.exp(2 * min(10, frames) / frames * actual) for actual in evidence]
    belief = [weight / sum(weights) for weight in weights]
    return [
        0.2 * importance[t]
        + 0.5 * math.log(sum(b * p for b, p in zip(belief, probs[t], strict=True)))
        + 0.5 * sum(b * math.log(p) for b, p in zip(belief, probs[t], strict=True))
        for t in range(frames)
    ]


def test_without_settings_the_importance_is_the_score() -> None:
    importance, logits = heads()
    assert Scoring()(importance, logits) is importance
    assert Scoring({})(importance, None) is importance


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("frames", [1, 5, 23])
def test_belief_by_hand(frames: int, multi_label: bool) -> None:
    importance, logits = heads(frames=frames)
    actual = Scoring(BELIEF, multi_label=multi_label, num_classes=4)(importance, logits)
    expected = [
        by_hand(a, b, multi_label=multi_label) for a, b in zip(importance.tolist(), logits.tolist(), strict=True)
    ]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_padding_changes_nothing() -> None:
    importance, logits = heads()
    scoring = Scoring(BELIEF, num_classes=4)
    longer = torch.cat([importance, torch.full((3, 2), float("nan"), dtype=torch.float64)], 1)
    more_logits = torch.cat([logits, torch.full((3, 2, 4), float("nan"), dtype=torch.float64)], 1)
    mask = torch.arange(7).expand(3, 7) < 5
    torch.testing.assert_close(scoring(longer, more_logits, mask)[:, :5], scoring(importance, logits))


def test_frames_in_another_order_have_the_same_scores() -> None:
    importance, logits = heads()
    order = torch.tensor([3, 0, 4, 1, 2])
    scoring = Scoring(BELIEF, num_classes=4)
    torch.testing.assert_close(scoring(importance[:, order], logits[:, order]), scoring(importance, logits)[:, order])


def test_a_sure_frame_of_another_class_falls_behind() -> None:
    """Three frames agree on class 0; one is as important by itself and surer, but shows class 1."""
    importance = torch.tensor([[1.0, 1.0, 1.0, 1.2]])
    logits = torch.zeros(1, 4, 4)
    logits[0, :3, 0], logits[0, 3, 1] = 4.0, 6.0
    assert Scoring()(importance, logits).argmax() == 3
    assert Scoring(BELIEF, num_classes=4)(importance, logits).argmin() == 3


def test_irrelevant_frames_do_not_change_the_belief() -> None:
    """Many sure frames of class 1 that show nothing to the point, against one relevant frame of class 0."""
    importance = torch.tensor([[2.0] + [-4.0] * 8])
    logits = torch.zeros(1, 9, 4)
    logits[0, 0, 0], logits[0, 1:, 1] = 5.0, 9.0
    scoring = Scoring(BELIEF, num_classes=4)
    assert scoring.log_belief(importance, logits).argmax() == 0
    assert scoring(importance, logits).argmax() == 0


def test_extreme_heads_stay_finite() -> None:
    importance = torch.tensor([[90.0, -90.0]], requires_grad=True)
    logits = torch.tensor([[[90.0, -90.0], [-90.0, 90.0]]], requires_grad=True)
    scores = Scoring(BELIEF, num_classes=2)(importance, logits)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert importance.grad.isfinite().all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "num_classes", "message"),
    [
        ({"blend": 1}, 4, "all of: belief, relevance, importance"),
        ({"belief": 1.0}, 4, "all of: belief, relevance, importance"),
        (BELIEF, None, "class head"),
        (BELIEF, 1, "class head"),
        ({**BELIEF, "belief": 0}, 4, "belief"),
        ({**BELIEF, "relevance": 3}, 4, "slope, offset"),
        ({**BELIEF, "relevance": [1, "a"]}, 4, r"relevance\[1\]"),
        ({**BELIEF, "importance": -1}, 4, "importance"),
    ],
)
def test_wrong_settings(settings: dict, num_classes: int | None, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Scoring(settings, num_classes=num_classes)
