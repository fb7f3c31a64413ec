"""`sosampler evaluate`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sosampler.cli.evaluate import evaluate_command
from sosampler.data.bank import Bank
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from taught_banks import random_logits, teach, write_bank

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


def test_progress_and_notes_go_to_standard_error(bank: Bank) -> None:
    done = run(bank.path, "-p", "frame-difference", "-n", 2, "-t", 8, "--split", "test", "--bootstrap", 0, "--json")
    assert done.exit_code == 0, done.output
    assert "looking: 6 of 6 videos" in done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "two"), "-n 'two' is not allowed"),
        (("-n", ","), "-n ',' is not allowed"),
        (("--pairs", "8"), "--pairs '8' is not allowed; write N/T"),
        (("-p", "best", "-t", "8"), "policy='best' is unknown"),
        (("-t", "9"), "num_candidates=9 is more than the bank stores"),
    ],
)
def test_wrong_arguments(bank: Bank, arguments: tuple[str, ...], message: str) -> None:
    done = run(bank.path, *arguments)
    assert isinstance(done.exception, InvalidArgument)
    assert message in str(done.exception)
