"""What an evaluation makes of systems that do not fit the bank, or that fit it in another way than in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sosampler.bank.bank import Bank
from sosampler.baselines.base import load_system
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import mean_average_precision, top1
from sosampler.policies.registry import number_of
from sosampler.training.train_baseline import TrainedSystem
from sosampler.training.train_sampler import TrainedSampler
from tests.factories import (
    BASELINE_HEAVY_GMACS,
    BASELINE_LIGHT_GMACS,
    LABELS,
    OTHER,
    TAUGHT_LENGTHS,
    frame_exit,
    given_bank,
    keep,
    one_hot,
    peek,
    random_logits,
    said,
    seen_of,
    teach,
)
from tests.factories import NUM_CANDIDATES as T

ASKED: dict[str, Any] = {"num_frames": 2, "num_candidates": T, "bootstrap": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bank, list[np.ndarray]]:
    return given_bank(tmp_path_factory.mktemp("checks") / "bank")


@pytest.fixture(scope="module")
def bank(both: tuple[Bank, list[np.ndarray]]) -> Bank:
    return both[0]


# ---- what differs from training is told


def test_another_number_of_candidates_is_told_once_a_system(bank: Bank) -> None:
    asked = {**ASKED, "num_candidates": [T, 3, 5]}
    found = evaluate(bank, {"a@all": peek(), "b": peek()}, **asked)
    told = [note for note in found.notes if "was trained with 8 candidates" in note]
    assert [note.split()[0] for note in told] == ["a", "b"]
    assert "but has 3 and 5 here" in told[0]
    assert not [note for note in evaluate(bank, peek(), **ASKED).notes if "was trained with" in note]


def test_another_judge_is_told_once_a_system(tmp_path: Path) -> None:
    bank, _ = given_bank(tmp_path / "bank")
    teach(bank, random_logits(TAUGHT_LENGTHS, LABELS, seed=9), name="99" * 8)
    found = evaluate(Bank(bank.path), {"a@all": peek(), "b@1": peek()}, classifier="99" * 8, **ASKED)
    told = [note.split()[0] for note in found.notes if "classifies with" in note]
    assert told == ["a", "b"]


def test_comparisons_that_are_left_out_are_told_once(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosampler.evaluation.clip_scores.MeanClips.needs_frames", True)
    found = evaluate(bank, {"a@all": peek()}, **ASKED)
    (told,) = [note for note in found.notes if "no comparison" in note]
    assert "no comparison of a@1, a@2, a@4 with 'uniform'" in told
    assert told.endswith("num_frames=1,2 of 8")


def test_what_a_split_is_used_for(tmp_path: Path) -> None:
    """Systems are not chosen by dev."""
    uses = {"dev": "by which samplers keep their best epoch", "train": "which samplers and baselines learn from"}
    for split, use in uses.items():
        bank, _ = given_bank(tmp_path / split, splits=[split] * len(TAUGHT_LENGTHS))
        (told,) = [note for note in evaluate(bank, peek(), **ASKED).notes if "no test split" in note]
        assert f"evaluated on {split}, {use}" in told


# ---- as many frames of uniform


@pytest.mark.parametrize(("num_candidates", "most", "mean", "frames"), [(4, 2, 1.25, 2), (6, 4, 2.25, 3), (8, 3, 2, 2)])
def test_uniform_has_no_fewer_frames_than_a_system(
    both: tuple[Bank, list[np.ndarray]], num_candidates: int, most: int, mean: float, frames: int
) -> None:
    bank, tables = both
    asked = {**ASKED, "num_candidates": num_candidates}
    found = evaluate(bank, {"a": peek(most=most), "uniform": "uniform"}, **asked)
    row, uniform = found.row("a"), evaluate(bank, "uniform", **{**asked, "num_frames": frames}).row("uniform")
    assert row.frames_classified == mean
    assert row.versus_uniform is not None
    assert row.versus_uniform["num_frames"] == frames
    own = top1(said(tables, seen_of(tables, num_candidates, most)), one_hot(LABELS))
    assert row.versus_uniform["difference"] == pytest.approx(own - uniform.top1)
    line = next(line for line in found.table().splitlines() if line.startswith("a "))
    assert f"{100 * (own - uniform.top1):+.1f} (N={frames})" in line
    assert "(N=" not in next(line for line in found.table().splitlines() if line.startswith("uniform"))


# ---- labels and classes


@pytest.mark.parametrize("several", [False, True])
def test_the_bank_s_labels_decide_the_metric_and_not_the_baseline_s_activation(tmp_path: Path, several: bool) -> None:
    """ActivityNet's way: softmax and cross-entropy, and mAP of sets of labels."""
    bank, _ = given_bank(tmp_path / "bank", multi_label=several)
    for activation in (False, True):
        result = evaluate(bank, {"mine": peek(multi_label=activation)}, **ASKED)
        assert result.facts["systems"]["mine"]["multi_label"] is activation
        assert result.row("mine").versus_uniform["metric"] == ("mAP" if several else "top1")


def test_classes_are_compared_by_their_names(bank: Bank) -> None:
    system = peek()
    system.about["classes"] = 3
    with pytest.raises(InvalidArgument, match="has no record of its class names"):
        evaluate(bank, {"mine": system}, **ASKED)


# ---- features


def test_features_keep_their_precision(tmp_path: Path) -> None:
    """Logits beyond what half precision holds are numbers as any others."""
    bank, tables = given_bank(tmp_path / "bank")
    wide = [table.astype(np.float32) for table in tables]
    for table in wide:
        table[:, 1:] = 70000 + table[:, 1:] * 1.001  # in half precision infinite, and closer together than its steps
    keep(bank, "wide", wide, BASELINE_HEAVY_GMACS, "ef" * 8, precision="float32")
    system = peek()
    system.about["heavy"] = {"name": "wide", "fingerprint": "ef" * 8}
    found = evaluate(Bank(bank.path), {"a": system}, **ASKED)
    probs, truth = said(wide, seen_of(tables, T, 3)), one_hot(LABELS)
    assert found.row("a").top1 == pytest.approx(top1(probs, truth))
    assert found.row("a").mAP == pytest.approx(mean_average_precision(probs, truth))
    assert found.row("a").confidence > 0.2


def test_numbers_that_are_not_finite_are_no_answer(tmp_path: Path) -> None:
    bank, tables = given_bank(tmp_path / "bank")
    broken = [table.copy() for table in tables]
    for video in (3, 5):
        broken[video][:, 2] = np.nan
    keep(bank, "broken", broken, BASELINE_HEAVY_GMACS, "ef" * 8)
    system = peek()
    system.about["heavy"] = {"name": "broken", "fingerprint": "ef" * 8}
    with pytest.raises(InvalidArgument) as raised:
        evaluate(Bank(bank.path), {"a@2": system}, **ASKED)
    assert "a@2: probabilities of 2 of 8 videos are not finite, 'v3' the first" in str(raised.value)
    assert "features broken and light" in str(raised.value)


@pytest.mark.parametrize("own", ["aaa", "elsewhere"])
def test_finished_features_are_taken_before_unfinished_ones(both: Any, tmp_path: Path, own: str) -> None:
    """Even if the unfinished ones have the name that the system knows."""
    bank, tables = given_bank(tmp_path / "bank")
    keep(bank, "aaa", tables, BASELINE_HEAVY_GMACS)  # of the network of "heavy"
    sorted(bank.folder.features("aaa").path.glob("*.arrow"))[-1].unlink()
    system = peek()
    system.about["heavy"]["name"] = own
    known, found = (
        evaluate(where, {"a": one}, **ASKED).row("a") for where, one in ((both[0], peek()), (Bank(bank.path), system))
    )
    assert {**found.to_dict(), "seconds": 0} == {**known.to_dict(), "seconds": 0}


# ---- what the classifier costs


def test_kept_features_say_what_the_classifier_costs(bank: Bank, tmp_path: Path) -> None:
    """It is not at hand, but a frame in it has a price, and its clips are means over frames."""
    found = evaluate(bank, ["uniform", "optimal", peek()], **{**ASKED, "num_frames": [1, 4]})
    assert not [note for note in found.notes if "GMACs" in note]
    assert [found.row("uniform", frames).gmacs for frames in (1, 4)] == [BASELINE_HEAVY_GMACS, 4 * BASELINE_HEAVY_GMACS]
    assert found.row("uniform", 4).classifier_gmacs == 4 * BASELINE_HEAVY_GMACS
    assert found.row("optimal", 4).gmacs is None
    # Those of another network, or of a sampler, say nothing about it.
    other, _ = given_bank(tmp_path / "bank")
    about = other.folder.features("heavy").header
    told = json.loads(about.read_text())
    for change in ({"fingerprint": OTHER}, {"network": "sampler"}):
        about.write_text(json.dumps({**told, **change}))
        found = evaluate(Bank(other.path), "uniform", **ASKED)
        assert found.row("uniform").gmacs is None
        assert [note for note in found.notes if "no GMACs of the classifier" in note]


# ---- what training returns


class Glance:
    """Stands in for a sampler: the brightest frames."""

    calibration = None

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}

    def look(self, frames: Tensor, mask: Tensor | None = None) -> Any:
        return type("Said", (), {"scores": frames.float().mean((2, 3, 4)), "features": None})

    def gmacs(self, num_candidates: int) -> float:
        return BASELINE_LIGHT_GMACS * num_candidates


def test_what_training_returns_can_be_evaluated(bank: Bank, tmp_path: Path) -> None:
    folder = frame_exit(tmp_path / "run")
    system = TrainedSystem(load_system(folder), Path(folder), {"metric": "top1", "dev": None})
    glance: Any = Glance()
    sampler = TrainedSampler(glance, tmp_path / "sampler", {"metric": "top1", "dev": None})

    def rows(policies: Any) -> dict[str, tuple[float, float]]:
        return {row.policy: (row.top1, row.frames_decoded) for row in evaluate(bank, policies, **ASKED).rows}

    plain = rows({"fe": folder, "mine": glance})
    assert rows({"fe": system, "mine": sampler}) == plain
    assert rows([system, sampler]) == {"sosampler": plain["mine"], "frameexit": plain["fe"]}
    assert rows(system) == {"frameexit": plain["fe"]}
    assert rows(sampler) == {"sosampler": plain["mine"]}
    assert rows({"fe@0.95": system}) == rows({"fe": f"{folder}@0.95"})


# ---- numbers behind an @


@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), ("-2", -2), ("0.30", 0.3), (".5", 0.5), ("5.", 5.0), ("1e-3", 0.001), ("2E+1", 20.0)],
)
def test_numbers_are_read(text: str, number: float) -> None:
    found = number_of(text)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize("text", ["", "1_0", "1_0.5", " 3", "3 ", "nan", "inf", "-inf", "\u0663", "0x3", "1e", "."])
def test_what_python_alone_takes_for_a_number(text: str) -> None:
    assert number_of(text) is None
