"""Evaluation with classifiers that have to be at hand: run on clips, or with a pool of their own."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sosampler import create_classifier, save_classifier, wrap_classifier
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_teacher
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import Cell
from tests.factories import (
    LABELS,
    TAUGHT_LENGTHS,
    distinct,
    small_net,
    write_bank,
)


class MeanOfFrames(nn.Module):
    """The mean of a frame network's logits, as a network of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)

    def forward(self, clips: Tensor) -> Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """A bank without a teacher, with pictures of two sizes."""
    return write_bank(tmp_path_factory.mktemp("pictured") / "bank", TAUGHT_LENGTHS, LABELS, wide=(1, 4))


def test_a_classifier_that_must_be_run_gives_what_a_pooled_one_gives(pictured: Bank) -> None:
    pooled = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW", name="pooled")
    clips = wrap_classifier(MeanOfFrames(), input_size=32, name="clips")
    for classifier in (pooled, clips):
        add_teacher(pictured, classifier)
    policies = ["uniform", "random", "all", "semi-optimal", "optimal", "frame-difference"]
    options: dict[str, Any] = {"num_frames": 3, "num_candidates": [5, 6], "bootstrap": 20, "policies": policies}
    fast = evaluate(pictured, classifier=pooled, **options)
    slow = evaluate(pictured, classifier=clips, **options)
    assert (fast.facts["teacher"]["pooling"], slow.facts["teacher"]["pooling"]) == ("mean", None)
    for row, other in zip(fast.rows, slow.rows, strict=True):
        assert (fast.choices[_cell(row)] == slow.choices[_cell(row)]).all()
        assert row.confidence == pytest.approx(other.confidence, abs=1e-5)
        assert row.top1 == other.top1
    assert slow.row("optimal").method == "enumeration"
    assert (fast.chosen("optimal") == slow.chosen("optimal")).all()
    # Unasked for, nothing is run for comparison.
    alone = evaluate(pictured, ["centre"], num_frames=3, num_candidates=6, bootstrap=0, classifier=clips).row("centre")
    assert (alone.fidelity, alone.recovered, alone.versus_uniform) == (None, None, None)


def _cell(row: Any) -> Cell:
    return Cell(row.policy, row.num_frames, row.num_candidates)


class Counting(MeanOfFrames):
    def __init__(self) -> None:
        super().__init__()
        self.clips = 0

    def forward(self, clips: Tensor) -> Tensor:
        self.clips += len(clips) if clips.device.type != "meta" else 0  # its cost is counted without numbers
        return super().forward(clips)


def test_no_clip_is_asked_about_twice(pictured: Bank) -> None:
    net = Counting()
    classifier = wrap_classifier(net, input_size=32, name="counting")
    add_teacher(pictured, classifier)
    net.clips = 0
    evaluate(
        pictured,
        ["uniform", "random", "centre", "semi-optimal", "optimal"],
        num_frames=2,
        num_candidates=5,
        classifier=classifier,
        bootstrap=0,
    )
    # All frames alone and all pairs of five; of the shortest video those of three, and one of padding.
    assert net.clips == 7 * (5 + 10) + 3 + 4


def test_beam_search_where_subsets_are_too_many(pictured: Bank) -> None:
    clips = wrap_classifier(MeanOfFrames(), input_size=32, name="clips")
    if clips.fingerprint() not in pictured.teachers:
        add_teacher(pictured, clips)
    found = evaluate(
        pictured,
        ["semi-optimal", "optimal"],
        num_frames=8,
        num_candidates=16,
        classifier=clips,
        bootstrap=0,
        beam_width=1,
    )
    row = found.row("optimal")
    assert row.method == "beam"
    assert row.confidence >= found.row("semi-optimal").confidence - 1e-3


def test_a_max_pool_is_the_classifiers_own(pictured: Bank, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = create_classifier("timm:test_resnet", num_classes=3, head="frameexit", input_size=32)
    classifier.requires_grad_(False)
    classifier.net.fc.weight.mul_(30)  # otherwise all answers are alike
    add_teacher(pictured, classifier)
    found = evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier, bootstrap=0)
    teacher = pictured.teacher(classifier)
    assert teacher.pooling == "max"

    def probs(number: int, places: Any) -> np.ndarray:
        features = torch.from_numpy(teacher[number].features[list(places)].astype(np.float32))
        found: np.ndarray = classifier.pool(features).numpy()
        return found

    for number, (label,) in enumerate(LABELS):
        offered = distinct(TAUGHT_LENGTHS[number], 6)
        count = min(3, len(offered))
        subsets = list(combinations(offered, count))
        best = max(float(probs(number, subset)[label]) for subset in subsets)
        chosen = found.chosen("optimal")[number].tolist()
        assert float(probs(number, chosen)[label]) == pytest.approx(best, abs=1e-5)
        alone = sorted(offered, key=lambda place: -float(probs(number, [place])[label]))[:count]
        assert set(found.chosen("semi-optimal")[number].tolist()) == set(alone)
    uniform = found.chosen("uniform")
    expected = np.mean([float(probs(number, uniform[number])[label]) for number, (label,) in enumerate(LABELS)])
    assert found.row("uniform").confidence == pytest.approx(expected, abs=1e-5)
    save_classifier(classifier, tmp_path / "saved")
    again = evaluate(
        pictured, "uniform", num_frames=3, num_candidates=6, classifier=tmp_path / "saved", bootstrap=0, device="cpu"
    )
    assert again.row("uniform").confidence == pytest.approx(expected, abs=1e-5)
    assert again.row("uniform").gmacs == pytest.approx(classifier.gmacs(3))
    with pytest.raises(InvalidArgument, match="'max' pool, so the classifier itself is needed"):
        evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier.fingerprint())


def test_a_teacher_without_features_needs_its_classifier(pictured: Bank) -> None:
    classifier = wrap_classifier(small_net(1, classes=3), input_size=32, layout="BCHW", name="bare")
    add_teacher(pictured, classifier, features=False)
    with pytest.raises(InvalidArgument, match="stores no features"):
        evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier.fingerprint())
    found = evaluate(pictured, "uniform", num_frames=3, num_candidates=6, classifier=classifier, bootstrap=0)
    expected = []
    for number, (label,) in enumerate(LABELS):
        shown = torch.from_numpy(pictured[number].frames(found.chosen("uniform")[number])).permute(0, 3, 1, 2)[None]
        expected.append(float(classifier.clip_probs(shown)[0, label]))
    assert found.row("uniform").confidence == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.row("uniform").classifier_gmacs == pytest.approx(classifier.gmacs(3))
