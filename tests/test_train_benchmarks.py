"""The scripts that measure samplers: their tables, their times, what they say when a training fails."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_stands_in_its_column(tmp_path: Path) -> None:
    empty = {"fidelity": None, "recovered": None, "gmacs": None}
    lines = [
        {"policy": "uniform", "num_frames": 1, "num_candidates": 10, "top1": 0.25} | empty,
        {"policy": "all", "num_frames": 10, "num_candidates": 10, "top1": 0.5} | empty,
        {"policy": "default", "num_frames": 6, "num_candidates": 10, "top1": 0.75, "top1_sd": 0.01} | empty,
    ]
    (tmp_path / "samplers.json").write_text(json.dumps({"table": lines}))
    table = script("results_table").tables(tmp_path / "samplers.json")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    at = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    assert {key: value for key, value in at["uniform"].items() if value} == {"N=1": "25.0"}
    assert {key: value for key, value in at["all ten"].items() if value} == {"N=10": "50.0"}
    assert {key: value for key, value in at["**default recipe**"].items() if value} == {"N=6": "75.0 ± 1.0"}


def test_seconds_are_those_of_all_epochs(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"epoch": 0, "seconds": 1.5}\n{"epoch": 1, "seconds": 2.0}\n')
    assert script("samplers").epoch_seconds(tmp_path) == 3.5


def test_a_failing_training_is_told_in_its_words(tmp_path: Path) -> None:
    given = argparse.Namespace(
        work=tmp_path, seeds=[0], variants=False, epochs=1, sampler_weights=tmp_path / "none", parallel=3
    )
    with pytest.raises(SystemExit, match=r"(?s)seed 0: .*sosampler: .*bank10"):
        script("samplers").train_samplers(given)
