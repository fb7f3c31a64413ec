"""Show experiments of `sosampler reproduce` in a report: each table with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.figures.curves import report_figures
from sosampler.paper.experiments import CASES, CURVE, list_experiments
from sosampler.paper.results import mean_rows
from sosampler.paper.tables import grid_of, with_titles
from sosampler.report.load import RESULT_FILE, RUN_FILE, Experiments, Grid, independence_figure, read_object
from sosampler.report.page import Part

_FACTS = ("device", "versions", "machine", "git", "begun", "ended")


def experiments_part(run: Experiments) -> Part:
    """Return all experiments with one bank and one classifier, in the paper's order."""
    order = {name: index for index, name in enumerate(list_experiments())}
    results = {folder: read_object(folder / RESULT_FILE) for folder in run.folders}
    folders = sorted(run.folders, key=lambda folder: order.get(str(results[folder]["experiment"]), len(order)))
    grids = [_grid(folder, results[folder]) for folder in folders]
    notes = [f"Started and not finished, so it is not shown: {folder}." for folder in run.unfinished]
    if not folders:
        return Part(title=f"{run.path.parent.name}, {run.path.name}", notes=notes, facts={"run": str(run.path)})
    where, names, facts = [], [], {}
    for folder in folders:
        with _explaining(folder):
            result = results[folder]
            bank, classifier = result["bank"], result["classifier"]
            where.append(f"{bank['videos']} videos of {bank['split']} in {bank['name']}")
            names.append(f"{bank['name']}, {classifier['name']}")
            path = folder / RUN_FILE
            run_facts = read_object(path) if path.is_file() else {}
            facts[result["experiment"]] = {
                **{"bank": bank, "classifier": classifier, "seeds": result.get("seeds")},
                **{name: run_facts[name] for name in _FACTS if run_facts.get(name) is not None},
            }
    count = f"{len(folders)} {'table or figure' if len(folders) == 1 else 'tables and figures'} of the paper"
    return Part(
        title=names[0],
        summary=f"{count}, measured on {', and on '.join(dict.fromkeys(where))}.",
        grids=grids,
        notes=notes,
        facts={"run": str(run.path), **joined_facts(facts)},
    )


def joined_facts(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the facts of several experiments: those once that all share, the others by experiment.

    >>> joined_facts({"table1": {"seeds": [0], "device": "cpu"}, "table3": {"seeds": [0, 1], "device": "cpu"}})
    {'seeds': {'table1': [0], 'table3': [0, 1]}, 'device': 'cpu'}
    """
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for about in facts.values() for name in about):
        values: dict[str, Any] = {experiment: about.get(name) for experiment, about in facts.items()}
        first = next(iter(values.values()))
        if all(value == first for value in values.values()):
            joined[name] = first
        elif all(value is None or isinstance(value, Mapping) for value in values.values()):
            joined[name] = joined_facts({experiment: value or {} for experiment, value in values.items()})
        else:
            joined[name] = values
    return joined


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Raise an error that names the file which is not of a reproduction."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InvalidArgument(
            f"{folder / RESULT_FILE}: is not what `sosampler reproduce` writes ({type(error).__name__}: {error}); "
            "delete the folder and run the experiment again"
        ) from error


def _grid(folder: Path, result: dict[str, Any]) -> Grid:
    with _explaining(folder):
        grid = grid_of(result)
        kind = result["kind"]
        rows, metric = with_titles(result)["rows"], result["metric"]
        drawn = report_figures(mean_rows(rows, metric), metric) if kind == CURVE else []
    below = list(grid.below)
    if kind == CASES and result.get("videos"):
        below.append(f"the videos are shown in {folder / 'report' / 'index.html'}")
    return replace(grid, below=below, figures=drawn, images=independence_figure(folder))
