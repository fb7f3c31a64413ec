"""Systems in an evaluation: what they said and what they spent, against a slow computation video by video."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sosampler import wrap_classifier
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_features, add_teacher
from sosampler.baselines.base import Baseline, load_system, predict, video_gmacs
from sosampler.baselines.registry import create_baseline
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import Evaluation, mean_average_precision, top1
from sosampler.report.load import read_run_videos
from sosampler.report.page import strip_of, write_report
from sosampler.training.baseline_data import bank_views
from tests.factories import (
    BASELINE_HEAVY_GMACS,
    BASELINE_LIGHT_GMACS,
    FINGERPRINT,
    HEAVY,
    LABELS,
    LIGHT,
    OTHER,
    STEP_GMACS,
    TAUGHT_LENGTHS,
    Peek,
    about,
    confidence,
    distinct,
    frame_exit,
    given_bank,
    keep,
    one_hot,
    peek,
    random_logits,
    said,
    seen_of,
    sigmoid,
    small_net,
    softmax,
    tables_of,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bank, list[np.ndarray]]:
    return given_bank(tmp_path_factory.mktemp("systems") / "bank")


@pytest.fixture(scope="module")
def bank(both: tuple[Bank, list[np.ndarray]]) -> Bank:
    return both[0]


@pytest.fixture(scope="module")
def found(bank: Bank) -> Evaluation:
    return evaluate(bank, ["uniform", peek()], num_frames=[1, 4], num_candidates=T, bootstrap=60, seed=3)


# ---- numbers


def test_a_row_against_loops(both: tuple[Bank, list[np.ndarray]], found: Evaluation) -> None:
    _, tables = both
    row = found.row("peek")
    seen, truth = seen_of(tables, T, 3), one_hot(LABELS)
    counts = np.array([len(places) for places in seen])
    assert set(counts.tolist()) == {1, 2, 3}  # it decides for itself
    probs = said(tables, seen)
    assert (row.num_frames, row.num_candidates) == (None, T)
    assert row.top1 == pytest.approx(top1(probs, truth))
    assert row.mAP == pytest.approx(mean_average_precision(probs, truth))
    own = [confidence(one, labels) for one, labels in zip(probs, LABELS, strict=True)]
    assert row.confidence == pytest.approx(np.mean(own), abs=1e-5)
    offered = np.array([min(length, T) for length in TAUGHT_LENGTHS])
    light = np.minimum(offered, counts + 1)  # one ahead, but the last video has only three
    assert (light <= counts).any()
    assert row.frames_classified == pytest.approx(counts.mean())
    assert row.frames_decoded == pytest.approx(np.maximum(light, counts).mean())
    assert row.classifier_gmacs == pytest.approx(BASELINE_HEAVY_GMACS * counts.mean())
    assert row.sampler_gmacs == pytest.approx((BASELINE_LIGHT_GMACS * light + STEP_GMACS * (counts + 1)).mean())
    assert row.gmacs == pytest.approx((row.classifier_gmacs or 0) + (row.sampler_gmacs or 0))
    assert (row.fidelity, row.recovered, row.gap, row.method) == (None, None, None, None)
    chosen = found.chosen("peek")
    assert chosen.shape == (8, T)
    assert [[place for place in places if place >= 0] for places in chosen.tolist()] == seen
    assert chosen[0].tolist() == seen[0] + [-1] * (T - len(seen[0]))


def test_it_is_compared_with_as_many_uniform_frames(both: tuple[Bank, list[np.ndarray]], found: Evaluation) -> None:
    """Paired by video, on the same resamples as everybody; with a number of frames that nobody asked for."""
    bank, tables = both
    row, truth = found.row("peek"), one_hot(LABELS)
    probs = said(tables, seen_of(tables, T, 3))
    frames = math.ceil(row.frames_classified)
    assert frames == 2
    asked = evaluate(bank, "uniform", num_frames=frames, num_candidates=T, bootstrap=0)
    logits = random_logits(TAUGHT_LENGTHS, LABELS)
    uniform = np.stack(
        [softmax(one[places].mean(0)) for one, places in zip(logits, asked.chosen("uniform"), strict=True)]
    )
    drawn = np.random.default_rng(3).integers(8, size=(60, 8))
    differences = [top1(probs[rows], truth[rows]) - top1(uniform[rows], truth[rows]) for rows in drawn]
    assert row.versus_uniform is not None
    assert (row.versus_uniform["num_frames"], row.versus_uniform["metric"]) == (2, "top1")
    assert row.versus_uniform["difference"] == pytest.approx(top1(probs, truth) - top1(uniform, truth))
    assert row.versus_uniform["ci95"] == pytest.approx(np.percentile(differences, [2.5, 97.5]), abs=1e-6)
    draws = [top1(probs[rows], truth[rows]) for rows in drawn]
    assert row.ci95["top1"] == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=1e-6)
    # What is only measured against has no row.
    assert [(one.policy, one.num_frames) for one in found.rows] == [("uniform", 1), ("uniform", 4), ("peek", None)]
    assert found.row("uniform", 4).versus_uniform["num_frames"] == 4  # type: ignore[index]


def test_nearness_to_the_best_choice_is_not_asked_of_systems(bank: Bank) -> None:
    policies = ["uniform", "semi-optimal", "optimal", peek()]
    found = evaluate(bank, policies, num_frames=2, num_candidates=T, bootstrap=0)
    row = found.row("peek")
    assert found.row("semi-optimal").recovered == 1.0
    assert row.versus_uniform is not None
    assert row.versus_uniform["num_frames"] == 2
    assert (row.fidelity, row.recovered) == (None, None)


def test_each_number_of_candidates_has_one_row(both: tuple[Bank, list[np.ndarray]]) -> None:
    bank, tables = both
    found = evaluate(
        bank, {"uniform": "uniform", "a": peek()}, num_frames=[1, 2], num_candidates=[3, 8, 12], bootstrap=0
    )
    assert [(row.policy, row.num_frames, row.num_candidates) for row in found.rows] == [
        (policy, frames, count)
        for count in (3, 8, 12)
        for policy, frames in (("uniform", 1), ("uniform", 2), ("a", None))
    ]
    for count in (3, 8, 12):
        seen = seen_of(tables, count, 3)
        row = found.row("a", num_candidates=count)
        assert row.top1 == pytest.approx(top1(said(tables, seen), one_hot(LABELS)))
        assert row.frames_classified == pytest.approx(np.mean([len(places) for places in seen]))
        chosen = found.chosen("a", num_candidates=count)
        assert [[place for place in places if place >= 0] for places in chosen.tolist()] == seen
    assert len({row.frames_decoded for row in found.rows if row.policy == "a"}) > 1


def test_videos_are_those_of_the_others_in_their_order(tmp_path: Path) -> None:
    """Of one split, without those that have no label, and with several labels."""
    labels = [(0, 1), (), (0, 2), (0,), (1, 2), (2,), (0, 1, 2), (1,)]
    splits = ["test", "test", "dev", "test", "train", "test", "test", "test"]
    bank, tables = given_bank(tmp_path / "bank", labels, multi_label=True, splits=splits)
    kept = [0, 3, 5, 6, 7]
    system = peek(multi_label=True)
    found = evaluate(bank, ["uniform", system], num_frames=2, num_candidates=T, bootstrap=0)
    assert found.ids == tuple(f"v{place}" for place in kept)
    own = [tables[place] for place in kept]
    seen = seen_of(own, T, 3)
    probs, truth = said(own, seen, sigmoid), one_hot([labels[place] for place in kept])
    row = found.row("peek")
    assert found.metric == "mAP"
    assert row.mAP == pytest.approx(mean_average_precision(probs, truth))
    assert row.top1 == pytest.approx(top1(probs, truth))
    assert [[place for place in places if place >= 0] for places in found.chosen("peek").tolist()] == seen
    # The same as from the views that systems are trained on.
    views, hot = bank_views(bank.split("test"), heavy="heavy", light="light", num_candidates=T)
    output = predict(system, views)
    assert (hot.numpy() == truth).all()
    assert output.seen_heavy.sum(1).tolist() == [len(places) for places in seen]
    gmacs = video_gmacs(system, output, {"heavy": BASELINE_HEAVY_GMACS, "light": BASELINE_LIGHT_GMACS})
    assert row.gmacs == pytest.approx(float(gmacs.mean()))


def test_some_videos_at_a_time_change_nothing(
    bank: Bank, found: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sosampler.evaluation.plan._MAX_NUMBERS", 150)  # three videos
    again = evaluate(bank, ["uniform", peek()], num_frames=[1, 4], num_candidates=T, bootstrap=60, seed=3)
    for one, other in zip(found.rows, again.rows, strict=True):
        assert {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}


def test_a_trained_system_from_its_folder(bank: Bank, tmp_path: Path) -> None:
    folder = frame_exit(tmp_path / "run")
    found = evaluate(bank, [folder], num_frames=2, num_candidates=T, bootstrap=0, device="cpu")
    system = load_system(folder)
    views, hot = bank_views(bank.split("test"), heavy="heavy", num_candidates=T)
    output = predict(system, views)
    row = found.row(folder)
    assert row.top1 == pytest.approx(top1(output.probabilities, hot))
    assert row.frames_classified == pytest.approx(float(output.seen_heavy.sum(1).float().mean()))
    assert row.frames_decoded == row.frames_classified
    assert 1 < row.frames_classified < 6
    gmacs = video_gmacs(system, output, {"heavy": BASELINE_HEAVY_GMACS, "light": 0.0})
    assert row.gmacs == pytest.approx(float(gmacs.mean()), rel=1e-5)
    assert found.facts["systems"][folder]["system"] == "frameexit"
    assert found.facts["systems"][folder]["gate_exit"] == 0.25


# ---- features and classes


def test_features_are_found_by_their_network(tmp_path: Path) -> None:
    bank, tables = given_bank(tmp_path / "bank")
    zeros = [np.zeros_like(table) for table in tables]
    keep(bank, "again", zeros, 9.0)  # of the same network
    system = peek()
    system.about["heavy"]["name"] = "elsewhere"
    system.about["heavy"]["fingerprint"] = "ef" * 8
    keep(bank, "moved", tables, BASELINE_HEAVY_GMACS, "ef" * 8)
    bank = Bank(bank.path)
    known, moved = (
        evaluate(bank, {"a": one}, num_frames=2, num_candidates=T, bootstrap=0).row("a") for one in (peek(), system)
    )
    assert {**moved.to_dict(), "seconds": 0} == {**known.to_dict(), "seconds": 0}
    # Another network under the known name is not taken for it.
    system.about["heavy"] = {"name": "heavy", "fingerprint": "01" * 8}
    with pytest.raises(
        InvalidArgument, match=r"features of the heavy network heavy \(0101.*which a needs.*add_features"
    ):
        evaluate(bank, {"a": system}, num_frames=2, num_candidates=T)


def test_missing_features_and_wrong_classes(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, LABELS)
    teach(bank, random_logits(TAUGHT_LENGTHS, LABELS))

    def refused(system: Baseline) -> str:
        with pytest.raises(InvalidArgument) as raised:
            evaluate(Bank(bank.path), {"mine": system}, num_frames=2, num_candidates=T)
        return str(raised.value)

    text = refused(peek())
    assert "features of the heavy network heavy" in text
    assert "it has: none. `sosampler train`" in text
    keep(bank, "heavy", tables_of(TAUGHT_LENGTHS, LABELS), BASELINE_HEAVY_GMACS)
    text = refused(peek())
    assert f"features of the light network light ({OTHER})" in text
    assert "it has: heavy (net of heavy)" in text
    keep(bank, "light", [np.zeros((length, LIGHT + 1)) for length in TAUGHT_LENGTHS], BASELINE_LIGHT_GMACS, OTHER)
    assert "the features light have 3 numbers a frame, but mine needs 2" in refused(peek())
    other = peek()
    other.about["classes"] = ["run", "swim", "jump"]
    assert "mine was trained for 3 classes (run, swim, jump), but" in refused(other)
    assert "has no record of the features it was trained on" in refused(Peek(HEAVY, LIGHT, 3))


def test_another_judge_is_told(bank: Bank) -> None:
    found = evaluate(bank, ["uniform", peek()], num_frames=2, num_candidates=T, bootstrap=0)
    assert not [note for note in found.notes if "classifies with" in note]
    teach(bank, random_logits(TAUGHT_LENGTHS, LABELS, seed=9), name="99" * 8)
    try:
        other = evaluate(bank, ["uniform", peek()], num_frames=2, num_candidates=T, bootstrap=0, classifier="99" * 8)
    finally:
        for file in sorted(bank.folder.teacher("99" * 8).path.iterdir()):
            file.unlink()
        bank.folder.teacher("99" * 8).path.rmdir()
    assert [
        note
        for note in other.notes
        if f"peek classifies with given ({FINGERPRINT}), but the policies with given ({'99' * 8})" in note
    ]


def test_a_classifier_and_its_kept_features_are_known_as_the_same(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, LABELS)
    classifier = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW")
    add_teacher(bank, classifier)
    bank = add_features(bank, classifier)
    kept = bank.features(classifier)
    torch.manual_seed(0)
    system = create_baseline("frameexit", heavy_width=kept.width, num_classes=3, max_frames=4, neck_width=8)
    system.about = about(heavy={"name": kept.name, "fingerprint": classifier.fingerprint()}, light=None)
    found = evaluate(
        bank, ["uniform", system], num_frames=2, num_candidates=T, bootstrap=0, classifier=classifier, device="cpu"
    )
    assert not [note for note in found.notes if "classifies with" in note]
    row, uniform = found.row("frameexit"), found.row("uniform")
    assert uniform.gmacs == pytest.approx(2 * kept.gmacs)  # both count the same network
    assert row.classifier_gmacs == pytest.approx(row.frames_classified * kept.gmacs)


# ---- systems alone


def test_systems_alone_need_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the classifier would have to be run on them."""
    bank, _ = given_bank(tmp_path / "bank")
    classifier = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW")
    add_teacher(bank, classifier, features=False)
    monkeypatch.setattr("sosampler.evaluation.evaluate.read_chunks", lambda *given: pytest.fail("pictures are read"))
    found = evaluate(bank, {"a": peek()}, num_frames=2, num_candidates=T, bootstrap=0, classifier=classifier)
    assert found.row("a").versus_uniform is None
    assert any("no comparison of a with 'uniform'" in note and "num_frames=2 of 8" in note for note in found.notes)
    monkeypatch.undo()
    more = evaluate(
        bank, {"a": peek(), "uniform": "uniform"}, num_frames=2, num_candidates=T, bootstrap=0, classifier=classifier
    )
    versus = more.row("a").versus_uniform
    assert versus is not None
    assert versus["difference"] == pytest.approx(more.row("a").top1 - more.row("uniform").top1)


def test_systems_alone_say_nothing_about_policies(bank: Bank) -> None:
    found = evaluate(bank, peek(), num_frames=2, num_candidates=T, bootstrap=0)
    assert [row.policy for row in found.rows] == ["peek"]
    assert found.row("peek").versus_uniform is not None
    assert not [note for note in found.notes if "fidelity" in note or "GMACs" in note]


# ---- what comes back


def test_results_can_be_written_and_read(found: Evaluation, tmp_path: Path) -> None:
    row = found.row("peek")
    told = json.loads(found.write_json(tmp_path / "e.json").read_text())["rows"]
    assert told == [json.loads(json.dumps(one.to_dict())) for one in found.rows]
    assert (told[0]["frames_classified"], told[0]["frames_decoded"]) == (1, 1)
    assert isinstance(told[0]["frames_classified"], int)
    assert told[2]["num_frames"] is None
    assert told[2]["frames_classified"] == row.frames_classified
    assert told[2]["versus_uniform"]["num_frames"] == 2
    with found.write_csv(tmp_path / "e.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert lines[0].keys() == lines[2].keys()
    assert (lines[0]["num_frames"], lines[0]["frames_classified"], lines[2]["num_frames"]) == ("1", "1", "")
    assert float(lines[2]["frames_decoded"]) == row.frames_decoded
    assert float(lines[2]["gmacs"]) == row.gmacs
    assert lines[2]["versus_uniform_num_frames"] == "2"


def test_the_table_shows_means(found: Evaluation) -> None:
    heads, *lines = found.table().splitlines()
    row = found.row("peek")
    assert lines[0].split()[:3] == ["uniform", "1", "8"]
    assert lines[2].split()[:3] == ["peek", f"{row.frames_classified:.1f}", "8"]
    assert lines[2].split()[-2:] == [f"{row.gmacs:.2f}", f"{row.frames_decoded:.1f}"]
    assert "GMACs" in heads


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_curve_can_be_drawn(found: Evaluation, tmp_path: Path, ending: str) -> None:
    path = found.write_curve(tmp_path / "new" / f"curve.{ending}")
    assert [file.name for file in path.parent.iterdir()] == [f"curve.{ending}"]
    assert path.stat().st_size > 5000


def test_a_report_shows_systems(bank: Bank, tmp_path: Path) -> None:
    policies = {"a@all": peek(), "uniform": "uniform"}
    found = evaluate(bank, policies, num_frames=[1, 2, 4], num_candidates=T, bootstrap=10)
    videos = read_run_videos(found.write_run(tmp_path / "run") / "videos.jsonl")
    keys = [("uniform", 2, T), ("a@2", None, T)]
    strips = [strip_of(videos, video, keys, bank.split("test")) for video in videos.videos[:3]]
    for number, strip in enumerate(strips):
        offered = distinct(TAUGHT_LENGTHS[number])
        uniform, system = strip.lines
        assert [offered[place] for place in system.chosen] == [
            place for place in found.chosen("a@2")[number].tolist() if place >= 0
        ]
        assert system.answer is not None  # its own
        assert uniform.answer is not None
    rows = [row.to_dict() for row in found.rows]
    text = write_report(tmp_path, "t", rows, strips=strips, facts=found.facts).read_text(encoding="utf-8")
    assert "baselines, which decide for themselves how many of 8 frames" in text
    assert "sees one frame after another" in text
    assert f"<td>{found.row('a@4').frames_classified:.1f}</td>" in text
