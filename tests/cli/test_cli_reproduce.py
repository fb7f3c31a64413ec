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
from tests.sampler_banks import make_bank

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["table1"], "--bank is missing"),
        (["list", "table1"], "list stands alone"),
        (["table1", "--bank", "x", "--seeds", "0;1"], "--seeds '0;1' is not allowed"),
        (["table1", "--bank", "x", "--set", "lr"], "write KEY=VALUE"),
        (["tabel1", "--bank", "x"], "'tabel1' is unknown"),
    ],
)
def test_bad_arguments(arguments: list[str], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        run(*arguments)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from sosampler.cli import reproduce; reproduce._list(True); "
        "print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
