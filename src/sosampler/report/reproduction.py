"""Experiments of `sosampler reproduce` in a report: each table with the paper's figures beside ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.report.curves import report_figures
from sosampler.report.grids import Grid, grid_of_markdown, pictures_of
from sosampler.report.page import Part
from sosampler.report.runs import RESULT_FILE, Experiments, read_object

_RUN_FILE = "run.json"
_FACTS = ("device", "versions", "machine", "git", "begun", "ended")


def experiments_part(run: Experiments) -> Part:
    """All experiments with one bank and one classifier, in the paper's order."""
    from sosampler.reproduce.experiments import list_experiments

    order = {name: place for place, name in enumerate(list_experiments())}
    results = {folder: read_object(folder / RESULT_FILE) for folder in run.folders}
    folders = sorted(run.folders, key=lambda folder: order.get(str(results[folder]["experiment"]), len(order)))
    grids = [_grid(folder, results[folder]) for folder in folders]
    first = results[folders[0]]
    bank, classifier = first["bank"], first["classifier"]
    count = f"{len(folders)} {'table or figure' if len(folders) == 1 else 'tables and figures'} of the paper"
    summary = f"{count}, measured on {bank['videos']} videos of {bank['split']} in {bank['name']}."
    return Part(
        title=f"{bank['name']}, {classifier['name']}",
        summary=summary,
        grids=grids,
        facts={"bank": bank, "classifier": classifier, "seeds": first.get("seeds"), **_circumstances(folders[0])},
    )


def _circumstances(folder: Path) -> dict[str, Any]:
    path = folder / _RUN_FILE
    told = read_object(path) if path.is_file() else {}
    return {name: told[name] for name in _FACTS if told.get(name) is not None}


def _grid(folder: Path, result: dict[str, Any]) -> Grid:
    from sosampler.reproduce.experiments import CASES, CURVE
    from sosampler.reproduce.measuring import mean_rows
    from sosampler.reproduce.tables import table

    try:
        grid = grid_of_markdown(table(result, "markdown"))
        kind = result["kind"]
        drawn = report_figures(mean_rows(result["rows"], result["metric"]), result["metric"]) if kind == CURVE else []
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{folder / RESULT_FILE}: is not what `sosampler reproduce` writes ({type(error).__name__}: {error}); "
            "delete the folder and run the experiment again"
        ) from error
    below = list(grid.below)
    if kind == CASES and result.get("videos"):
        below.append(f"the videos are shown in {folder / 'report' / 'index.html'}")
    return replace(grid, below=below, figures=drawn, pictures=pictures_of(folder))
