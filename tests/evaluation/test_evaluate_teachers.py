"""Evaluation: which teacher judges, what is asked of a classifier, what a reader of the numbers is told."""

from __future__ import annotations

import json
import re
import shutil
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
from sosampler.evaluation import clip_scores as frames
from sosampler.evaluation import evaluate as module
from sosampler.evaluation.evaluate import Measuring, evaluate
from sosampler.evaluation.result import Cell, Measured, Resamples, Spent, Tally, text_table
from tests.factories import FINGERPRINT, random_logits, small_net, teach, write_bank

LENGTHS = [8, 8, 5, 8, 8, 2]
LABELS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0,), (1,), (2,)]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    made = write_bank(tmp_path_factory.mktemp("taught") / "bank", LENGTHS, LABELS)
    teach(made, random_logits(LENGTHS, LABELS))
    return made


@pytest.fixture
def pictured(tmp_path: Path) -> Bank:
    """Without a teacher."""
    return write_bank(tmp_path / "bank", LENGTHS, LABELS)


class Sure(nn.Module):
    """A network of clips whose probabilities are all next to 0 and 1, and which remembers how many it saw at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)
        self.most = 0

    def forward(self, clips: Tensor) -> Tensor:
        self.most = max(self.most, clips.shape[0] * clips.shape[1])
        return 60 * self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


# ---- what is asked of a classifier


def test_the_best_frame_alone_is_the_best_clip_of_one_however_sure_the_classifier_is(pictured: Bank) -> None:
    classifier = wrap_classifier(Sure(), input_size=32, name="sure")
    add_teacher(pictured, classifier)
    kept = pictured.teacher(classifier)
    ties = 0
    for number, (label,) in enumerate(LABELS):
        probs = kept[number].frame_probs[:, label]
        ties += int((probs == probs.max()).sum() > 1)
    assert ties, "in half precision several frames of a video are equally good"
    found = evaluate(
        pictured,
        ["semi-optimal", "semi-optimal-max", "optimal"],
        num_frames=1,
        num_candidates=8,
        classifier=classifier,
        bootstrap=0,
    )
    assert (found.chosen("semi-optimal") == found.chosen("optimal")).all()
    assert found.row("semi-optimal").fidelity == 1.0
    for number, item in enumerate(pictured):
        shown = torch.from_numpy(item.frames()).permute(0, 3, 1, 2)[None]
        probs = classifier.frame_probs(shown)[0]
        assert found.chosen("semi-optimal-max")[number].tolist() == [int(probs.amax(-1).argmax())]


def test_few_pictures_at_a_time_where_they_are_large(pictured: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Sure()
    classifier = wrap_classifier(net, input_size=32, name="counting")
    add_teacher(pictured, classifier)
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 8, "classifier": classifier, "bootstrap": 0}
    policies = ["uniform", "semi-optimal", "frame-difference"]
    whole = evaluate(pictured, policies, **options)
    picture = pictured[0].frames()[0].nbytes
    monkeypatch.setattr(frames, "_STACK_BYTES", 4 * picture)
    net.most = 0
    few = evaluate(pictured, policies, **options)
    assert net.most == 4
    for policy in policies:
        assert (few.chosen(policy) == whole.chosen(policy)).all()
        assert few.row(policy).confidence == pytest.approx(whole.row(policy).confidence, abs=1e-6)


def test_likeness_counts_among_what_is_laid_out_at_once(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    classify = module._Run._classify

    def counting(self: Any, batches: dict[int, Any], cells: Any) -> None:
        seen.append(len(batches[8]))
        classify(self, batches, cells)

    monkeypatch.setattr(module._Run, "_classify", counting)
    monkeypatch.setattr(module, "_MAX_NUMBERS", 3 * 8 * 6)  # of three videos: probabilities and logits of 3 classes
    whole = evaluate(bank, "semi-optimal", num_frames=2, num_candidates=8, bootstrap=0)
    assert seen == [3, 3]
    seen.clear()
    evaluate(bank, "semi-optimal+dpp", num_frames=2, num_candidates=8, bootstrap=0)
    assert seen == [1] * 6
    assert whole.chosen("semi-optimal").shape == (6, 2)


# ---- which teacher judges


@pytest.fixture
def taught_twice(pictured: Bank, tmp_path: Path) -> tuple[Bank, Any]:
    """By a classifier with a pool of its own, with one view and, as by an earlier version, with two."""
    classifier = create_classifier("timm:test_resnet", num_classes=3, head="frameexit", input_size=32)
    save_classifier(classifier, tmp_path / "saved")
    add_teacher(pictured, classifier)
    plain = pictured.folder.teacher(classifier.fingerprint())
    double = pictured.folder.teacher(f"{classifier.fingerprint()}-2views")
    shutil.copytree(plain.path, double.path)
    double.header.write_text(json.dumps({**json.loads(plain.header.read_text()), "views": 2}))
    return pictured, classifier


def test_views_tell_teachers_apart(taught_twice: tuple[Bank, Any], tmp_path: Path) -> None:
    bank, classifier = taught_twice
    options: dict[str, Any] = {"policies": "uniform", "num_frames": 2, "num_candidates": 8, "bootstrap": 0}
    with pytest.raises(InvalidArgument, match=r"several fit.*Name one of them, or its views"):
        evaluate(bank, classifier=classifier, **options)
    for given in (classifier, tmp_path / "saved"):
        for views in (1, 2):
            found = evaluate(bank, classifier=given, views=views, device="cpu", **options)
            assert found.facts["teacher"]["views"] == views
    with pytest.raises(InvalidArgument, match="and views=3 is not in this bank"):
        evaluate(bank, classifier=classifier, views=3, **options)
    with pytest.raises(InvalidArgument, match="views=0 must be"):
        evaluate(bank, classifier=classifier, views=0, **options)


# ---- arguments of another kind


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": None}, "policies=None must be a list"),
        ({"policies": 5}, "policies=5 must be a list"),
        ({"pairs": 5}, "pairs=5 must be a list of (num_frames, num_candidates)"),
        ({"pairs": "8/30"}, "pairs='8/30' must be a list"),
        ({"classifier": 5}, "classifier is a int, which has no clip_probs; give a classifier of"),
        ({"classifier": nn.Linear(2, 2)}, "classifier is a Linear, which has no clip_probs"),
        ({"bank": None}, "bank=None must be a bank, or the folder of one"),
    ],
)
def test_arguments_of_another_kind_are_refused(bank: Bank, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        evaluate(**{"bank": bank, "policies": ["uniform"], "num_frames": 2, "num_candidates": 8, **options})


def test_a_sampler_is_no_classifier(bank: Bank) -> None:
    from sosampler.samplers.sosampler import SOSampler

    sampler = SOSampler(backbone="timm:test_resnet", input_size=32)
    with pytest.raises(InvalidArgument, match="classifier is a SOSampler, which has no clip_probs"):
        evaluate(bank, "uniform", num_frames=2, num_candidates=8, classifier=sampler)


# ---- what a reader is told


class Flat:
    """Stands in for a sampler."""

    calibration = None

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        self.about = about or {}

    def look(self, frames: Tensor, mask: Tensor | None = None) -> Any:
        return type("Said", (), {"scores": frames.float().mean((2, 3, 4)), "features": None})

    def gmacs(self, num_candidates: int) -> float:
        return 0.25 * num_candidates


def test_a_cost_that_is_not_known_is_told(bank: Bank, pictured: Bank) -> None:
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 8, "bootstrap": 0}
    found = evaluate(bank, {"mine": Flat(), "uniform": "uniform", "semi-optimal": "semi-optimal"}, **options)
    assert any("no GMACs of the classifier" in note and "--classifier" in note for note in found.notes)
    head, *rows = found.table().splitlines()
    assert "sampler GMACs" in head
    assert [row.split()[-2] for row in rows[:2]] == ["2.00", "0.00"]
    assert "GMACs" not in evaluate(bank, "uniform", **options).table()
    classifier = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW", name="at hand")
    add_teacher(pictured, classifier)
    known = evaluate(pictured, {"mine": Flat()}, classifier=classifier, **options)
    assert not any("GMACs" in note for note in known.notes)
    assert "sampler GMACs" not in known.table()


def test_comparisons_that_are_left_out_are_told(pictured: Bank, bank: Bank) -> None:
    classifier = wrap_classifier(Sure(), input_size=32, name="sure")
    add_teacher(pictured, classifier)
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 8, "bootstrap": 0}
    alone = evaluate(pictured, "centre", classifier=classifier, **options)
    assert alone.row("centre").versus_uniform is None
    assert any(note.startswith("no comparison with 'uniform' and 'semi-optimal'") for note in alone.notes)
    more = evaluate(pictured, ["centre", "uniform", "semi-optimal"], classifier=classifier, **options)
    assert more.row("centre").versus_uniform is not None
    assert not any("no comparison" in note for note in [*more.notes, *evaluate(bank, "centre", **options).notes])


def test_a_sampler_of_another_teacher_is_told(bank: Bank) -> None:
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 8, "bootstrap": 0}
    other = {"mine": Flat({"teacher": "cd" * 8, "classifier": "resnet50"})}
    notes = evaluate(bank, other, **options).notes
    assert any(note.startswith(f"mine was trained for the teacher {'cd' * 8} (resnet50)") for note in notes)
    for about in ({"teacher": FINGERPRINT, "classifier": "given"}, {}):
        assert not any("was trained for" in note for note in evaluate(bank, {"mine": Flat(about)}, **options).notes)


def test_rounding_is_no_gain() -> None:
    """Equal clips whose sums were rounded differently: nothing was gained of which a share could be recovered."""

    class Rounded(Resamples):
        """A metric that differs by rounding from one call to the next, as sums in no fixed order do."""

        calls = 0

        def top1(self, probabilities: Any) -> Measured:
            Rounded.calls += 1
            return Measured(np.array([super().top1(probabilities).value + Rounded.calls * 1e-15]))

    labels = np.eye(2, dtype=bool)[[0, 1, 0, 1]]
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]], dtype=np.float32)
    cells = [Cell(policy, 2, 2) for policy in ("uniform", "semi-optimal", "mine")]
    tallies = {cell: Tally(probs, np.zeros((4, 2), dtype=np.int64)) for cell in cells}
    measuring = Measuring(tallies, labels, "top1", Rounded(labels, 0, 0, torch.device("cpu")))
    rows = [measuring.row(cell, Spent(2, 2, 0.0, None), None, against=2) for cell in cells]
    for row in rows:
        assert row.recovered is None
        assert row.versus_uniform == {"num_frames": 2, "metric": "top1", "difference": 0.0, "ci95": None}
    assert "-0.0" not in text_table(rows, "top1")
