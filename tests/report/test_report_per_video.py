"""What a run keeps of each video: against a slow computation, and back from the file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from sosampler.bank.bank import Bank
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.cli.evaluate import evaluate_command
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import VERSION, Evaluation
from sosampler.policies.visual import change_scores
from sosampler.report.load import EvaluationRun, read_run_videos, read_runs
from tests.factories import (
    LABELS,
    TAUGHT_LENGTHS,
    confidence,
    distinct,
    frame_exit,
    given_bank,
    random_logits,
    sigmoid,
    softmax,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T
from tests.report.runs import text_of, write_made_up_run
from tests.report.test_page import Page

POLICIES = ["uniform", "semi-optimal", "optimal", "frame-difference", "all"]


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    return random_logits(TAUGHT_LENGTHS, LABELS)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, logits: list[np.ndarray]) -> Bank:
    found = write_bank(tmp_path_factory.mktemp("run") / "bank", TAUGHT_LENGTHS, LABELS)
    teach(found, logits)
    return found


@pytest.fixture(scope="module")
def found(bank: Bank) -> Evaluation:
    return evaluate(bank, POLICIES, pairs=[(2, T), (3, 6)], bootstrap=10)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "videos.jsonl").read_text(encoding="utf-8").splitlines()]


def check_answers(
    found: Evaluation,
    folder: Path,
    logits: list[np.ndarray],
    labels: list[tuple[int, ...]],
    activate: Callable[..., Any],
) -> None:
    head, *videos = lines_of(folder)
    for number, (video, truth) in enumerate(zip(videos, labels, strict=True)):
        for (policy, frames, count), told in zip(head["rows"], video["answers"], strict=True):
            chosen = found.chosen(policy, frames, count)[number].tolist()
            probs = activate(logits[number][chosen].astype(np.float64).mean(0))
            assert told["chosen"] == chosen
            assert told["predicted"] == int(probs.argmax())
            assert told["probability"] == pytest.approx(float(probs.max()), rel=1e-4)
            assert told["confidence"] == pytest.approx(confidence(probs, truth), rel=1e-4)
            assert told["right"] == (int(probs.argmax()) in truth)


def test_answers_against_loops(found: Evaluation, bank: Bank, logits: list[np.ndarray], tmp_path: Path) -> None:
    assert found.write_run(tmp_path / "new" / "run") == tmp_path / "new" / "run"
    folder = tmp_path / "new" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "videos.jsonl"]
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8")) == found.to_dict()
    head, *videos = lines_of(folder)
    assert head["classes"] == list(bank.classes)
    assert head["rows"] == [[row.policy, row.num_frames, row.num_candidates] for row in found.rows]
    assert [(video["id"], video["labels"]) for video in videos] == [(item.id, list(item.labels)) for item in bank.items]
    check_answers(found, folder, logits, LABELS, softmax)
    for place, row in enumerate(found.rows):  # the rows are means of what stands here
        assert row.top1 == pytest.approx(np.mean([video["answers"][place]["right"] for video in videos]))
        assert row.confidence == pytest.approx(
            np.mean([video["answers"][place]["confidence"] for video in videos]), abs=1e-5
        )


def test_candidates_are_told_with_places_and_scores(
    found: Evaluation, bank: Bank, logits: list[np.ndarray], tmp_path: Path
) -> None:
    _, *videos = lines_of(found.write_run(tmp_path))
    for number, video in enumerate(videos):
        assert list(video["candidates"]) == [str(T), "6"]
        for count, told in video["candidates"].items():
            slots = distinct(TAUGHT_LENGTHS[number], int(count))
            assert told["slots"] == slots
            assert told["seconds"] == pytest.approx(bank[number].pts_seconds[slots].tolist(), abs=1e-3)
            assert told["positions"] == pytest.approx(bank[number].positions[slots].tolist(), rel=1e-4)
            assert all(0 <= one <= 1 for one in told["positions"])
            alone = [softmax(logits[number][slot])[LABELS[number][0]] for slot in slots]
            assert told["confidence"] == pytest.approx(alone, abs=1e-3)
            assert list(told["scores"]) == ["frame-difference"]
            expected = change_scores(bank[number].frames(slots))
            assert told["scores"]["frame-difference"] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-6)


def test_times_far_from_the_beginning_keep_their_milliseconds(tmp_path: Path) -> None:
    times = 95443.7 + 0.25 * np.arange(8)
    entries = [
        FrameEntry(
            id=f"v{number}",
            labels=(number,),
            frames=np.zeros((8, 16, 16, 3), np.uint8),
            pts_seconds=times,
            split="test",
        )
        for number in range(3)
    ]
    made = write_frames(tmp_path / "bank", entries, classes=["a", "b", "c"])
    teach(made, random_logits([8] * 3, [(0,), (1,), (2,)]))
    found = evaluate(Bank(made.path), ["uniform"], num_frames=2, num_candidates=8, bootstrap=0)
    _, *videos = lines_of(found.write_run(tmp_path / "run"))
    assert videos[0]["candidates"]["8"]["seconds"] == pytest.approx(times.tolist(), abs=1e-3)
    text = text_of(tmp_path / "run", out=tmp_path)
    assert "<img" in text
    assert re.findall(r'class="time">([^<]*)', text)[:3] == ["1590:43.7", "1590:44.0", "1590:44.2"]


def test_a_path_with_half_a_letter_is_written_and_read(found: Evaluation, bank: Bank, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"bank-\xff")
    shutil.copytree(bank.path, odd)
    moved = replace(found, facts={**found.facts, "bank": str(odd), "split": "test \N{GREEK SMALL LETTER PI}"})
    folder = moved.write_run(tmp_path / os.fsdecode(b"run-\xff"))
    told = (folder / "evaluation.json").read_text(encoding="utf-8")
    assert "\N{GREEK SMALL LETTER PI}" in told
    assert json.loads(told) == moved.to_dict()
    assert "No frames are shown" in text_of(folder, out=tmp_path)
    (folder / "evaluation.json").write_text(told.replace(" \N{GREEK SMALL LETTER PI}", ""), encoding="utf-8")
    assert "No frames are shown" in text_of(folder, out=tmp_path)


def test_several_labels(tmp_path: Path) -> None:
    labels: list[tuple[int, ...]] = [(0, 1), (1,), (0, 2), (2,)]
    logits = random_logits([8] * 4, labels)
    many = write_bank(tmp_path / "bank", [8] * 4, labels, multi_label=True)
    teach(many, logits, multi_label=True)
    found = evaluate(many, ["uniform", "optimal"], num_frames=3, num_candidates=8, bootstrap=0)
    check_answers(found, found.write_run(tmp_path / "run"), logits, labels, sigmoid)
    assert read_runs(tmp_path / "run")[0].path == tmp_path / "run"


def test_systems_answer_for_themselves(tmp_path: Path) -> None:
    made, _ = given_bank(tmp_path / "bank")
    policies = {"exit": frame_exit(tmp_path / "system"), "uniform": "uniform"}
    found = evaluate(made, policies, num_frames=2, num_candidates=T, bootstrap=0)
    head, *videos = lines_of(found.write_run(tmp_path / "run"))
    place = head["rows"].index(["exit", None, T])
    for number, video in enumerate(videos):
        assert video["answers"][place]["chosen"] == [
            slot for slot in found.chosen("exit")[number].tolist() if slot >= 0
        ]
    assert found.row("exit").top1 == pytest.approx(np.mean([video["answers"][place]["right"] for video in videos]))
    alone = evaluate(made, {"exit": policies["exit"]}, num_candidates=T, bootstrap=0).write_run(tmp_path / "alone")
    for run, lines in ((tmp_path / "run", ["uniform", "exit"]), (alone, ["exit"])):
        films = [table for table in Page(text_of(run, out=tmp_path)).tables if table[0][0] == "candidates"]
        assert [line[0].split()[1] for line in films[0][1:]] == lines


def test_a_run_comes_back(found: Evaluation, tmp_path: Path) -> None:
    (run,) = read_runs(found.write_run(tmp_path))
    assert isinstance(run, EvaluationRun)
    assert run.videos is not None
    assert [video.id for video in run.videos.videos] == list(found.ids)
    key = ("optimal", 2, T)
    assert [said.chosen for said in run.videos.predictions(key)] == [
        tuple(row) for row in found.chosen("optimal", 2).tolist()
    ]
    assert [row["policy"] for row in run.rows] == [row.policy for row in found.rows]
    (alone,) = read_runs(tmp_path / "evaluation.json")
    assert isinstance(alone, EvaluationRun)
    assert alone.videos is None
    assert "evaluate --run" in alone.missing[-1]


def test_nothing_is_left_of_a_run_that_could_not_be_written(
    found: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.write_run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Evaluation, "write_json", fail)  # behind the videos, which are longer
    with pytest.raises(OSError, match="disk full"):
        found.write_run(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_evaluation_without_its_videos_is_refused(found: Evaluation, tmp_path: Path) -> None:
    for other in (replace(found, per_video=None), replace(found, ids=found.ids[:2])):
        with pytest.raises(InvalidArgument, match="no results of single videos"):
            other.write_run(tmp_path / "run")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgument, match="the folder cannot be made"):
        found.write_run(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- the command


def evaluate_by_command(*arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(evaluate_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_a_run(bank: Bank, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    done = evaluate_by_command(
        bank.path, "-p", "uniform", "-n", 2, "-t", T, "--bootstrap", 0, "--run", folder, "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert len(lines_of(folder)) == 1 + len(bank)


def test_the_command_tells_of_a_bad_folder_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = evaluate_by_command(tmp_path / "no bank", "--run", tmp_path / "file" / "run")
    assert isinstance(done.exception, InvalidArgument)
    assert f"--run {tmp_path / 'file' / 'run'}: {tmp_path / 'file'} is a file" in str(done.exception)


# ---- damage


def change(told: dict[str, Any], *path: Any) -> None:
    """Put the last of `path` at the place that the others name."""
    *way, last, value = path
    place: Any = told
    for step in way:
        place = place[step]
    place[last] = value


@pytest.mark.parametrize(
    ("line", "path"),
    [
        pytest.param(0, ("kind", "something"), id="another kind"),
        pytest.param(0, ("version", VERSION + 1), id="a later version"),
        pytest.param(0, ("version", 1), id="an earlier version"),
        pytest.param(0, ("classes", 0, 5), id="a class that is no text"),
        pytest.param(0, ("rows", 0, ["uniform", -1, 6]), id="a row with fewer than no frames"),
        pytest.param(1, ("labels", 0, 3), id="a label beyond the classes"),
        pytest.param(1, ("labels", []), id="no label"),
        pytest.param(1, ("id", None), id="no name"),
        pytest.param(1, ("answers", []), id="no answers"),
        pytest.param(1, ("answers", 0, "predicted", "run"), id="an answer that is no number"),
        pytest.param(1, ("answers", 0, "right", 1), id="neither right nor wrong"),
        pytest.param(1, ("answers", 0, "chosen", [77]), id="chosen what was not offered"),
        pytest.param(1, ("answers", 0, "probability", 1.5), id="a probability above 1"),
        pytest.param(1, ("answers", 0, "confidence", -0.5), id="a confidence below 0"),
        pytest.param(1, ("answers", 0, "confidence", float("nan")), id="a confidence that is no number"),
        pytest.param(1, ("answers", 0, "confidence", 10**400), id="a number beyond all"),
        pytest.param(1, ("candidates", "6", "confidence", 0, 2.0), id="a candidate's confidence above 1"),
        pytest.param(1, ("candidates", "6", "seconds", 0, float("inf")), id="a time without end"),
        pytest.param(1, ("candidates", "6", "slots", [5, 4, 3, 2, 1, 0]), id="candidates backwards"),
        pytest.param(1, ("candidates", "6", "slots", [0, 0, 1, 2, 3, 4]), id="a candidate twice"),
        pytest.param(0, ("videos", None), id="no number of videos"),
        pytest.param(1, ("candidates", "6", "seconds", [1.0]), id="too few times"),
        pytest.param(1, ("candidates", "6", "scores", "mine", ["x"] * 6), id="scores that are texts"),
        pytest.param(1, ("candidates", {}), id="no candidates"),
        pytest.param(1, ("candidates", []), id="a list of candidates"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, line: int, path: tuple[Any, ...]) -> None:
    write_made_up_run(tmp_path, ids=["a", "b"])
    file = tmp_path / "videos.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    change(lines[line], *path)
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InvalidArgument, match=rf"videos\.jsonl, line {line + 1}: .*evaluate --run"):
        read_run_videos(file)


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_a_file_that_was_cut_at_the_end_of_a_line_is_refused(tmp_path: Path, kept: int) -> None:
    write_made_up_run(tmp_path, ids=list("abcde"))
    file = tmp_path / "videos.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[: 1 + kept]))
    with pytest.raises(InvalidArgument, match=rf"is of 5 videos, but has {kept}; .*evaluate --run"):
        read_runs(tmp_path)


def test_videos_that_say_something_else_than_the_rows_are_refused(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, ids=[f"v{number}" for number in range(200)])
    file = tmp_path / "videos.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(read_runs(tmp_path)) == 1
    lines[7]["answers"][1]["right"] ^= True
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SosamplerError, match="belongs to another evaluation"):
        read_runs(tmp_path)


def test_as_many_videos_as_the_evaluation_has(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, ids=["a", "b"], num_videos=3)
    with pytest.raises(SosamplerError, match="belongs to another evaluation"):
        read_runs(tmp_path)


@pytest.mark.parametrize("text", ["", "not json", "[]", "null", "[" * 100_000, '{"kind": "sosampler videos"}'])
def test_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "videos.jsonl").write_text(text)
    with pytest.raises(InvalidArgument, match="line 1"):
        read_run_videos(tmp_path / "videos.jsonl")


def test_names_may_hold_anything(tmp_path: Path) -> None:
    names = ["a\nb", "line\u2028paragraph\u2029", "next\x85", "\x00", "\ud800", '"\\']
    write_made_up_run(tmp_path, ids=names)
    assert [video.id for video in read_run_videos(tmp_path / "videos.jsonl").videos] == names
    (tmp_path / "videos.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="is not text"):
        read_run_videos(tmp_path / "videos.jsonl")


def test_videos_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    write_made_up_run(tmp_path, ids=["a", "b"])
    kept = (tmp_path / "videos.jsonl").read_text()
    write_made_up_run(tmp_path, ids=["a", "b"], pairs=[(2, 6)], seed=1)
    (tmp_path / "videos.jsonl").write_text(kept)
    with pytest.raises(SosamplerError, match="belongs to another evaluation"):
        read_runs(tmp_path)
    write_made_up_run(tmp_path, ids=["a", "a"])
    with pytest.raises(InvalidArgument, match="in it twice"):
        read_runs(tmp_path)
