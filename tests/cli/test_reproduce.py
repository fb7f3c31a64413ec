"""`sosampler reproduce` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sosampler.cli.reproduce import reproduce_command
from sosampler.errors import InvalidArgument
from sosampler.paper.experiments import list_experiments
from tests.factories import make_bank

app = typer.Typer()
app.command()(reproduce_command)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bank(tmp_path_factory.mktemp("cli") / "bank", stored=10, train=4, dev=6).path


def test_list_names_every_experiment() -> None:
    lines = run("list").splitlines()
    assert [line.split()[0] for line in lines] == list_experiments()
    told = json.loads(run("list", "--json"))["experiments"]
    assert [one["name"] for one in told] == list_experiments()
    assert told[0]["data"] == ["activitynet", "mini_kinetics"]


def test_a_table_on_standard_output(bank: Path, tmp_path: Path) -> None:
    options = ("--bank", f"mini_kinetics={bank}", "--out", tmp_path / "out", "--bootstrap", "10", "--device", "cpu")
    text = run("table1", "table2", *options)
    assert "Table 1: " in text
    assert "Table 2: " in text
    assert "the paper on Mini-Kinetics with ResNet50; another classifier" in text
    assert "83.8" in text
    told = json.loads(run("table2", "table1", *options, "--json"))["results"]
    assert [one["experiment"] for one in told] == ["table1", "table2"]
    assert told[0]["folder"] == str(tmp_path / "out" / "mini_kinetics" / "by-hand" / "table1")
    assert told[0]["metric"] == "top1"


def test_a_dry_run_prints_the_plan_and_writes_nothing(bank: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (
        "--bank",
        f"mini_kinetics={bank}",
        "--out",
        out,
        "--seeds",
        "0,3",
        "--bootstrap",
        "10",
        "--device",
        "cpu",
    )
    before = {path: path.stat().st_mtime_ns for path in bank.rglob("*")}
    plans = json.loads(run("table1", "figure4", "table5", *options, "--dry-run", "--json"))
    assert plans["dry_run"] is True
    table1, table5, figure4 = plans["plans"]
    assert [row["policy"] for row in table1["rows"]] == ["uniform", "all", "semi-optimal", "optimal"]
    assert (table1["state"], table1["trainings"], table1["refused"]) == ("missing", [], None)
    assert table1["evaluations"] == [{"num_candidates": 10, "state": "missing"}]
    assert table1["folder"] == str(out / "mini_kinetics" / "by-hand" / "table1")
    assert "30 candidates are needed" in table5["refused"]
    assert figure4["refused"] is None
    assert {(one["name"], one["seed"]) for one in figure4["trainings"]} >= {("paper", 0), ("paper", 3)}
    assert {one["state"] for one in figure4["trainings"]} == {"missing"}
    assert all("candidates" in row["why"] for row in figure4["left_out"])
    text = run("table1", "figure4", "table5", *options, "--dry-run")
    assert "  missing   training paper, seed 3\n" in text
    assert "  row       uniform, 6 of 10: policy uniform\n" in text
    assert "cannot be made: 30 candidates" in text
    assert text.splitlines()[-1].endswith("evaluations are to be run")
    assert not out.exists()
    assert {path: path.stat().st_mtime_ns for path in bank.rglob("*")} == before


def test_a_dry_run_knows_what_is_finished(bank: Path, tmp_path: Path) -> None:
    options = ("--bank", bank, "--out", tmp_path, "--bootstrap", "0", "--device", "cpu")
    run("table1", *options)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    (plan,) = json.loads(run("table1", *options, "--dry-run", "--json"))["plans"]
    assert plan["state"] == "finished"
    assert plan["evaluations"] == [{"num_candidates": 10, "state": "finished"}]
    assert "0 of 0 trainings and 0 evaluations are to be run" in run("table1", *options, "--dry-run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(InvalidArgument, match="bootstrap was 0, is 5"):
        run("table1", *options[:-4], "--bootstrap", "5", "--device", "cpu", "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table1"], "--bank is missing"),
        (["list", "table1"], "list is given with other names; give it alone"),
        (["table1", "--bank", "x", "--seeds", "0;1"], "--seeds '0;1' must be numbers"),
        (["table1", "--bank", "x", "--set", "lr"], "must be KEY=VALUE"),
        (["tabel1", "--bank", "x"], "'tabel1' is unknown"),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        run(*arguments)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from sosampler.cli import reproduce; reproduce._list(True); "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
