"""The scripts that measure samplers: their tables, their times, what they say when a training fails."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.accuracy import samplers
from benchmarks.tables import results_page, results_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_figure_stands_in_its_column(tmp_path: Path) -> None:
    empty = {"fidelity": None, "recovered": None, "gmacs": None}
    lines = [
        {"policy": "uniform", "num_frames": 1, "num_candidates": 10, "top1": 0.25} | empty,
        {"policy": "all", "num_frames": 10, "num_candidates": 10, "top1": 0.5} | empty,
        {"policy": "default", "num_frames": 6, "num_candidates": 10, "top1": 0.75, "top1_sd": 0.01} | empty,
    ]
    (tmp_path / "samplers.json").write_text(json.dumps({"table": lines}))
    table = results_table.tables(tmp_path / "samplers.json")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    at = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    assert {key: value for key, value in at["uniform"].items() if value} == {"N=1": "25.0"}
    assert {key: value for key, value in at["all ten"].items() if value} == {"N=10": "50.0"}
    assert {key: value for key, value in at["**SOSampler+**"].items() if value} == {"N=6": "75.0 ± 1.0"}


def test_the_pages_of_results_are_those_of_the_files() -> None:
    docs = BENCHMARKS.parent / "docs"
    paths = [docs / "results.md", *(docs / "results").iterdir()]
    written = {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert results_page.pages() == written, "write them again: python benchmarks/tables/results_page.py"


def test_the_page_holds_what_is_measured_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = results_page
    monkeypatch.setattr(page, "HERE", tmp_path)
    assert "|" not in "".join(page.pages().values())
    line = {"num_frames": 6, "num_candidates": 10, "top1": 0.7654, "fidelity": 0.5, "recovered": None, "gmacs": 25.81}
    result = {
        "table": [line | {"policy": "default", "top1_sd": 0.004, "seeds": 2}],
        "reels": {"train, dev, test": [270, 30, 300], "longer": 50},
        **{"seeds": [4, 5], "device": "a machine"},
    }
    (tmp_path / "samplers.json").write_text(json.dumps(result))
    pages = page.pages()
    text = pages["results/reels.md"]
    for told in ("76.5 ± 0.4", "| 50.0 | 25.8 |", "270 reels", "seeds 4, 5 on a machine"):
        assert told in text
    assert "Longer reels" not in text
    assert set(pages) == {"results.md", "results/reels.md", "results/claims.md"}
    assert "[Reels: " in pages["results.md"]
    assert "**By how much?**" not in pages["results.md"], "which needs policies that were not measured"


def test_seconds_are_those_of_all_epochs(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"epoch": 0, "seconds": 1.5}\n{"epoch": 1, "seconds": 2.0}\n')
    assert samplers.epoch_seconds(tmp_path) == 3.5


@pytest.mark.slow
def test_a_failing_training_is_told_in_its_words(tmp_path: Path) -> None:
    given = argparse.Namespace(
        recipes=list(samplers.RECIPES),
        work=tmp_path,
        seeds=[0],
        variants=False,
        epochs=1,
        sampler_weights=tmp_path / "none",
        parallel=3,
    )
    with pytest.raises(SystemExit, match=r"(?s)seed 0: .*sosampler: .*bank10"):
        samplers.train_samplers(given)
