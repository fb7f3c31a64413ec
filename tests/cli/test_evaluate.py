"""`sosampler evaluate`."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sosampler.bank.bank import Bank
from sosampler.cli.evaluate import evaluate_command
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.policies.registry import list_policies
from tests.factories import frame_exit, given_bank, random_logits, teach, write_bank

LENGTHS = [8] * 9
LABELS = [(number % 3,) for number in range(9)]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    made = write_bank(tmp_path_factory.mktemp("evaluate") / "bank", LENGTHS, LABELS, splits=["dev"] * 3 + ["test"] * 6)
    teach(made, random_logits(LENGTHS, LABELS))
    return made


def run(*arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(evaluate_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_json_is_what_the_function_gives(bank: Bank, tmp_path: Path) -> None:
    done = run(bank.path, "-n", "1,2", "-t", 8, "--bootstrap", 30, "--json", "--out", tmp_path / "e.json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["num_frames"], told["num_candidates"], told["split"], told["num_videos"]) == ([1, 2], 8, "test", 6)
    expected = evaluate(bank, num_frames=[1, 2], num_candidates=8, bootstrap=30).to_dict()
    for row, other in zip(told["rows"], expected["rows"], strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}
    assert json.loads((tmp_path / "e.json").read_text()) == told


def test_table_and_csv(bank: Bank, tmp_path: Path) -> None:
    done = run(
        *(bank.path, "--policies", "uniform, centre", "-p", "all", "--pairs", "2/4,4/8", "--split", "dev"),
        *("--bootstrap", 0, "--csv", tmp_path / "rows.csv"),
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["uniform", "2", "4"],
        ["centre", "2", "4"],
        ["all", "4", "4"],
        ["uniform", "4", "8"],
        ["centre", "4", "8"],
        ["all", "8", "8"],
    ]
    assert "3 videos of dev, classifier given" in done.stderr
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == [line.split()[0] for line in lines[1:]]
    assert (rows[0]["top1_low"], rows[0]["frames_decoded"]) == ("", "2")


def test_systems_and_a_curve(tmp_path: Path) -> None:
    made, _ = given_bank(tmp_path / "bank")
    folder = frame_exit(tmp_path / "run")
    done = run(
        *(made.path, "--policies", f"uniform,me={folder}@all,{folder}@0.5", "-n", "1,2", "-t", 8, "--bootstrap", 20),
        *("--curve", tmp_path / "new" / "curve.svg", "--csv", tmp_path / "rows.csv"),
    )
    assert done.exit_code == 0, done.output
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert names[:2] == ["uniform", "uniform"]
    assert names[-1] == f"{folder}@0.5"
    assert all(name.startswith("me@0.") for name in names[2:-1])
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == names
    assert all(1 <= float(row["frames_classified"]) <= 6 for row in rows)
    assert (tmp_path / "new" / "curve.svg").read_text(encoding="utf-8").count("<svg") == 1


def test_progress_and_notes_go_to_standard_error(bank: Bank) -> None:
    done = run(bank.path, "-p", "frame-difference", "-n", 2, "-t", 8, "--split", "test", "--bootstrap", 0, "--json")
    assert done.exit_code == 0, done.output
    assert "evaluating: 6 of 6 videos" in done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "two"), "-n 'two' must be ints or auto"),
        (("-n", ","), "-n ',' must be ints or auto"),
        (("--pairs", "8"), "--pairs '8' must be N/T"),
        (("-p", "best", "-t", "8"), "policy='best' is unknown"),
        (("-t", "9"), "num_candidates=9 is more than the bank stores"),
        (("--policies", ""), "--policies is empty; name some"),
        (("--policies", ",", "-p", "uniform"), "--policies is empty; name some"),
        (("--views", "3", "-t", "8"), "views=3 is not in this bank"),
        (("--curve", "x.pdf"), "x.pdf: curves are written as .svg or .png"),
    ],
)
def test_wrong_arguments(bank: Bank, arguments: tuple[str, ...], message: str) -> None:
    done = run(bank.path, *arguments)
    assert isinstance(done.exception, InvalidArgument)
    assert message in str(done.exception)


@pytest.mark.parametrize("option", ["--csv", "--out", "--curve"])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("folder", "is a folder; give the name of a file"),
        ("file/x.json", "is a file, not a folder; give another path"),
        ("file/deep/x.json", "is a file, not a folder; give another path"),
        ("closed/x.json", "nothing can be written into"),
        ("closed/new/x.json", "nothing can be written into"),
    ],
)
def test_places_that_cannot_be_written_are_told_before_the_work(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").write_text("")
    access = os.access
    # Whoever may do everything is refused nothing by the rights of a folder.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    monkeypatch.setattr("sosampler.evaluate", lambda *given, **options: pytest.fail("the work was begun"))
    done = run(bank.path, option, tmp_path / place)
    assert isinstance(done.exception, InvalidArgument)
    assert str(done.exception).startswith(f"{option} {tmp_path / place}: ")
    assert said in str(done.exception)


def test_two_results_need_two_files(bank: Bank, tmp_path: Path) -> None:
    done = run(bank.path, "--csv", tmp_path / "x", "--out", tmp_path / "x")
    assert isinstance(done.exception, InvalidArgument)
    assert "--csv and --out name the same file" in str(done.exception)


def test_numbers_are_shown_even_if_a_file_cannot_be_written(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = run(bank.path, "-p", "uniform", "-n", 2, "-t", 8, "--bootstrap", 0, "--csv", tmp_path / "rows.csv")
    assert isinstance(done.exception, OSError)
    assert done.stdout.splitlines()[1].split()[:3] == ["uniform", "2", "8"]
    assert not (tmp_path / "rows.csv").exists()


def test_places_are_made(bank: Bank, tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep" / "e.json"
    done = run(bank.path, "-p", "uniform", "-n", 2, "-t", 8, "--bootstrap", 0, "--out", out)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["rows"]
    with pytest.raises(InvalidArgument, match="is a folder; give the name of a file"):
        evaluate(bank, "uniform", num_frames=2, num_candidates=8, bootstrap=0).write_csv(tmp_path)


def test_help_names_all_policies() -> None:
    told = " ".join(run("--help").stdout.replace("│", " ").split())
    for name in (
        *list_policies(oracles=True),
        "NAME=FOLDER",
        "+mmr",
        "+dpp",
        "+aks",
        "+its",
        "+nms",
        "FOLDER+answer",
        "FOLDER@VALUE",
        "FOLDER@all",
        "--curve",
    ):
        assert name in told
