"""From evaluations of policies and trained samplers to the rows of a table, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sosampler.baselines.registry import list_systems
from sosampler.paper.experiments import (
    ACCURACY,
    FIDELITY,
    INDEPENDENCE,
    THROUGHPUT,
    PaperColumn,
    column_for,
    data_sets,
    metric_for,
    read_paper,
    rows_elsewhere,
)
from sosampler.paper.plan import ExperimentPlan, LeftOut, Pair, PlannedCell, RowRecipe, extra_policies, rows_of
from sosampler.paper.request import Request, seeds_of
from sosampler.paper.tables import name_in_words

Row = dict[str, Any]
"""A row of an evaluation, as its JSON has it: shares, not percent."""

UNIFORM = "uniform"
_FIDELITY = "fidelity"
# Where all rows of one cell agree, so that their mean is the number itself.
_MEANS = ("gmacs", "sampler_gmacs", "classifier_gmacs", "frames_classified", "frames_decoded")


def policies_of(
    plan: ExperimentPlan, cells: Sequence[PlannedCell], seeds: Sequence[int], folder: Path
) -> dict[str, str]:
    """What `evaluate` is given: names, and folders of what was trained."""
    found = {name: name for name in extra_policies(plan.experiment, cells)}
    for cell in cells:
        names = cell.policy_names(seeds)
        if cell.training is None:
            found[names[0]] = names[0]
            continue
        for name, seed in zip(names, seeds, strict=True):
            place = str(cell.training.folder(folder, seed))
            found[name] = f"{place}@{cell.recipe.dial}" if cell.recipe.dial else place
    return found


def rows_of_cell(cell: PlannedCell, seeds: Sequence[int], rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of a cell, one a seed; of a system with its dial turned, such a list for each value."""
    names = cell.policy_names(seeds)
    count = cell.num_candidates
    here = [row for row in rows if row["num_candidates"] == count]
    if cell.recipe.dial is None:
        # All candidates are one clip, whatever N is; a system decides for itself.
        wanted = {cell.num_frames, None} | ({count} if cell.recipe.policy == "all" else set())
        found = [row for name in names for row in here if row["policy"] == name and row["num_frames"] in wanted]
        return [found] if found else []
    by_value: dict[str, list[Row]] = {}
    for name in names:
        for row in here:
            before, _, value = row["policy"].rpartition("@")
            if before == name:
                by_value.setdefault(value, []).append(row)
    return list(by_value.values())


def result_rows(
    plan: ExperimentPlan, parts: Mapping[str, Any], seeds: Sequence[int], metric: str, column: PaperColumn | None
) -> list[dict[str, Any]]:
    """Rows of the result in the order of the recipes: means over seeds in percent, and the paper's figure."""
    found = []
    for cell in plan.cells:
        measured = parts[part_name(cell.num_candidates)]["rows"]
        for rows in rows_of_cell(cell, seeds, measured):
            found.append(_result_row(cell, rows, _versus(rows, measured, metric), metric, column))
    return found


def part_name(num_candidates: int) -> str:
    """Under which an evaluation stands in evaluation.json."""
    return f"T={num_candidates}"


def _result_row(
    cell: PlannedCell, rows: Sequence[Row], versus: dict[str, Any], metric: str, column: PaperColumn | None
) -> dict[str, Any]:
    recipe, first = cell.recipe, rows[0]
    told: dict[str, Any] = {
        "row": recipe.row,
        "title": recipe.title,
        "num_frames": first["num_frames"],
        "num_candidates": first["num_candidates"],
        "trained": None if cell.training is None else cell.training.name,
        "seeds": len(rows) if cell.training is not None else 0,
        "dial": first["policy"].rpartition("@")[2] if recipe.dial else None,
        **_spread("score", [_percent(row[metric]) for row in rows]),
        "score_ci95": _mean_bounds([row["ci95"].get(metric) for row in rows]),
        "top1": _mean([_percent(row["top1"]) for row in rows]),
        "mAP": _mean([_percent(row["mAP"]) for row in rows]),
        **_spread("fidelity", [_percent(row["fidelity"]) for row in rows]),
        **_spread("recovered", [_percent(row["recovered"]) for row in rows]),
        **versus,
        **{name: _mean([row[name] for row in rows]) for name in _MEANS},
        "note": recipe.note,
    }
    told["paper"] = figures_beside(recipe, first, column)
    return told


def figures_beside(recipe: RowRecipe, told: Row, column: PaperColumn | None) -> dict[str, Any] | None:
    """What the paper prints for a row, where it is clear that it is of this row.

    One figure that does not say of how many frames cannot stand beside several N, or values of a dial.
    """
    figures = paper_figures(recipe.paper_row, told, column)
    several = recipe.dial is not None or (len(recipe.pairs) > 1 and figures and figures["num_frames"] is None)
    return None if several else figures


def paper_figures(row: str, told: Row, column: PaperColumn | None) -> dict[str, Any] | None:
    """What the paper prints for a row, in percent."""
    figure = None if column is None else column.find(row, told["num_frames"], told["num_candidates"])
    if figure is None or column is None:
        return None
    return {
        "table": figure["table"],
        "row": figure["row"],
        "metric": figure["metric"],
        "num_frames": figure["num_frames"],
        "score": figure["value"],
        "versus_uniform": column.versus_uniform(figure),
        "gmacs": figure.get("gmacs"),
        "videos_per_second": figure.get("videos_per_second"),
    }


def _versus(rows: Sequence[Row], measured: Sequence[Row], metric: str) -> dict[str, Any]:
    """Points above uniform with as many frames, mean and deviation over seeds.

    The interval is paired by video, which evaluations do for their main metric alone.
    """
    empty = {"versus_uniform": None, "versus_uniform_sd": None, "versus_uniform_ci95": None}
    versus = [row["versus_uniform"] for row in rows]
    if rows[0]["policy"] == UNIFORM or metric == _FIDELITY or any(one is None for one in versus):
        return empty
    if all(one["metric"] == metric for one in versus):
        told = _spread("versus_uniform", [_percent(one["difference"]) for one in versus])
        return {**told, "versus_uniform_ci95": _mean_bounds([one["ci95"] for one in versus])}
    uniform = _uniform_scores(measured, metric)
    others = [uniform.get(_compared(row)) for row in rows]
    differences = [None if other is None else row[metric] - other for row, other in zip(rows, others, strict=True)]
    return empty | _spread("versus_uniform", [_percent(one) for one in differences])


def _compared(row: Row) -> Pair:
    """N and T of the uniform frames that a row is compared with."""
    return int(row["versus_uniform"]["num_frames"]), int(row["num_candidates"])


def _uniform_scores(measured: Sequence[Row], metric: str) -> dict[Pair, float]:
    return {(row["num_frames"], row["num_candidates"]): row[metric] for row in measured if row["policy"] == UNIFORM}


def missing_uniform(measured: Sequence[Row], metric: str) -> list[Pair]:
    """N and T of uniform rows that differences in a metric need and that were not kept."""
    if metric == _FIDELITY:
        return []
    there = _uniform_scores(measured, metric)
    compared = [row for row in measured if row["versus_uniform"] is not None]
    wanted = [_compared(row) for row in compared if row["versus_uniform"]["metric"] != metric]
    return sorted({pair for pair in wanted if pair not in there})


def mean_rows(rows: Sequence[dict[str, Any]], metric: str) -> list[Row]:
    """Rows of a result in the form of an evaluation's, for the figures and pages that draw these."""
    found = []
    for row in rows:
        share = None if row["score"] is None else row["score"] / 100
        bounds = row["score_ci95"]
        found.append(
            {
                "policy": row["title"] if row["dial"] is None else f"{row['title']}@{row['dial']}",
                **{name: row[name] for name in ("num_frames", "num_candidates", *_MEANS)},
                "top1": row["top1"] / 100,
                "mAP": row["mAP"] / 100,
                metric: share,
                "ci95": {} if bounds is None else {metric: [bound / 100 for bound in bounds]},
                "fidelity": None if row["fidelity"] is None else row["fidelity"] / 100,
                "recovered": None if row["recovered"] is None else row["recovered"] / 100,
                "versus_uniform": None,
            }
        )
    return found


def _mean_bounds(intervals: Sequence[Sequence[float] | None]) -> list[float] | None:
    """95 % intervals over videos, their ends averaged over seeds, in percent."""
    known = [bounds for bounds in intervals if bounds is not None]
    if not known or len(known) < len(intervals):
        return None
    return [100 * statistics.fmean(bounds[side] for bounds in known) for side in (0, 1)]


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and, of several, standard deviation."""
    known = [value for value in values if value is not None]
    several = len(known) > 1
    return {name: _mean(values), f"{name}_sd": statistics.stdev(known) if several else None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


_WITH_OTHER_SYSTEMS = (ACCURACY, FIDELITY, THROUGHPUT)
_ADVICE = (
    "add it to the policies",
    "add the policy",
)  # of `evaluate`, whose policies are not the user's to choose here
_LEARNT_FROM = {
    "dev": ", by which samplers keep their best epoch",
    "train": ", which samplers and systems learn from",
}


def metric_of(plan: ExperimentPlan) -> str:
    """What is shown of an experiment: the paper's metric for its data sets, the bank's own for others."""
    if plan.experiment.kind == FIDELITY:
        return FIDELITY
    return metric_for(plan.place.data, "mAP" if plan.place.bank.multi_label else "top1")


def empty_result(plan: ExperimentPlan, request: Request) -> dict[str, Any]:
    """Everything but the rows."""
    place, experiment = plan.place, plan.experiment
    column = column_of(plan)
    return {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "title": experiment.title,
        "claim": experiment.claim,
        "bank": {
            "name": place.bank_name,
            "path": str(place.bank.path),
            "data": place.data,
            "split": place.split,
            "videos": place.sizes.get(place.split, 0),
        },
        "classifier": {
            "name": place.classifier_name,
            "network": place.about["name"],
            "fingerprint": place.about["fingerprint"],
            "paper": place.paper_classifier,
        },
        "metric": metric_of(plan),
        "unit": "percent",
        "seeds": list(seeds_of(plan, request)),
        "paper": None if column is None else {"title": read_paper()["source"]["title"], "column": column.title},
        "rows": [],
        "left_out": [_left_out(row, column) for row in plan.left_out],
        "elsewhere": [],
        "notes": [],
        "files": [],
        "refused": plan.refused or None,
    }


def finished_result(
    plan: ExperimentPlan, request: Request, parts: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """The rows from finished evaluations, those that cannot be had, and those of systems that this package lacks."""
    experiment = plan.experiment
    told = empty_result(plan, request)
    column = column_of(plan)
    told["rows"] = result_rows(plan, parts, seeds, told["metric"], column)
    if column is not None and experiment.kind in _WITH_OTHER_SYSTEMS:
        told["elsewhere"] = _elsewhere(plan, column)
    told["notes"] = [*_own_notes(plan, request), *_notes_of(parts), *_without_interval(told, request)]
    if column is not None:
        told["notes"] += [*_notes_on_paper(plan, column), *_printed_in(plan, told["rows"])]
    return told


def _left_out(row: LeftOut, column: PaperColumn | None) -> dict[str, Any]:
    """A system decides for itself how many frames it looks at, also where it cannot be had."""
    decides = row.recipe.sampler in list_systems()
    pair = {"num_frames": None if decides else row.num_frames, "num_candidates": row.num_candidates}
    figures = figures_beside(row.recipe, pair, column)
    return {"row": row.recipe.row, "title": row.recipe.title, **pair, "why": row.why, "paper": figures}


def column_of(plan: ExperimentPlan) -> PaperColumn | None:
    """The paper's column beside a plan."""
    experiment, place = plan.experiment, plan.place
    prints = experiment.kind in _WITH_OTHER_SYSTEMS
    return column_for(experiment.tables, place.data, place.paper_classifier, in_any=not prints)


def _elsewhere(plan: ExperimentPlan, column: PaperColumn) -> list[dict[str, Any]]:
    known = [recipe.paper_row for recipe in rows_of(plan.experiment.name)]
    names = read_paper()["elsewhere"]
    found = []
    for row in rows_elsewhere(column, plan.experiment.tables[0], known):
        told = {"num_frames": row["num_frames"], "num_candidates": row["num_candidates"]}
        figures = paper_figures(row["row"], told, column)
        found.append({"row": row["row"], "title": names.get(row["row"], row["row"]), **told, "paper": figures})
    return found


def _own_notes(plan: ExperimentPlan, request: Request) -> list[str]:
    place = plan.place
    notes = []
    if place.split != "test":
        why = _LEARNT_FROM[place.split] if plan.trainings else ""
        notes.append(f"the bank has no labelled test videos, so everything is measured on {place.split}{why}")
    if plan.trainings and not place.sizes.get("dev"):
        notes.append("the bank has no dev split, so the last epoch of each sampler is kept")
    if plan.trainings and request.weights is None:
        notes.append("no weights were given (--weights), so samplers begin with random ones")
    if plan.trainings and request.changes:
        changed = ", ".join(f"{name}={value}" for name, value in request.changes.items())
        notes.append(f"recipes were changed: {changed}")
    return notes


def _without_interval(told: Mapping[str, Any], request: Request) -> list[str]:
    """Where differences are in another metric than the one by which evaluations pair videos."""
    bare = [
        row
        for row in told["rows"]
        if row["versus_uniform"] is not None and row["versus_uniform_sd"] is None and row["versus_uniform_ci95"] is None
    ]
    if not bare or not request.bootstrap:
        return []
    return [f"points to uniform in {told['metric']} have no interval here: videos are paired in the bank's own metric"]


def _notes_of(parts: Mapping[str, Any]) -> list[str]:
    """Of the evaluations, each once."""
    return list(dict.fromkeys(note for told in parts.values() for note in told["notes"] if can_be_followed(note)))


def can_be_followed(note: str) -> bool:
    """Whether a note of `evaluate` asks for nothing that only its own callers can give."""
    return not any(advice in note for advice in _ADVICE)


def _notes_on_paper(plan: ExperimentPlan, column: PaperColumn) -> list[str]:
    """What the paper's figures leave out, and how much of its data set this bank is."""
    notes = column.notes()
    if not column.same_data:
        return notes
    told, place = data_sets()[column.data], plan.place
    ours = {"train": place.sizes.get("train", 0), "test": place.sizes.get(place.split, 0)}
    ours["classes"] = len(place.bank.classes)
    theirs = {name: told[name] for name in ours}
    if None not in theirs.values() and theirs != ours:
        notes.append(
            f"the paper's {told['title']} has {theirs['train']} videos to train on, {theirs['test']} to measure on and "
            f"{theirs['classes']} classes; this bank has {ours['train']}, {ours['test']} and {ours['classes']}"
        )
    return notes


def _printed_in(plan: ExperimentPlan, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows whose figure of the paper stands in another of its tables."""
    own = plan.experiment.name
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["paper"] is not None and row["paper"]["table"] != own:
            titles = found.setdefault(row["paper"]["table"], [])
            titles += [] if row["title"] in titles else [row["title"]]
    return [f"the paper's figure of {', '.join(who)} is from its {name_in_words(of)}" for of, who in found.items()]


def independence_result(plan: ExperimentPlan, request: Request, found: Mapping[str, Any]) -> dict[str, Any]:
    """What `independence` measured, in the form of a result."""
    assert plan.experiment.kind == INDEPENDENCE
    (facts,) = found["classifiers"]
    verdict = facts["verdict"]
    words = "no rate that was measured" if verdict is None else f"up to {verdict:g} frames a second"
    told = empty_result(plan, request) | {"seeds": [], "metric": "redundant", "unit": "share"}
    notes = [f"frames stand by themselves: {words}", found["criterion"], *found["notes"]]
    bandwidth = {"bandwidth": facts["bandwidth"], "bandwidth_of": facts["bandwidth_of"], "verdict": verdict}
    return told | {"rows": list(found["rows"]), "notes": notes, **bandwidth}
