"""Turn evaluations of policies and trained samplers into the rows of a table, over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sosampler.paper.experiments import (
    ACCURACY,
    FIDELITY,
    THROUGHPUT,
    Pair,
    PaperColumn,
    column_for,
    data_sets,
    read_paper,
)
from sosampler.paper.plan import ExperimentPlan, PlannedCell
from sosampler.paper.tables import name_in_words

Row = dict[str, Any]
"""A row of an evaluation, as in its JSON: fractions, not percent."""

UNIFORM = "uniform"
# Equal in all rows of one cell, so that their mean is the number itself.
_MEANS = ("gmacs", "sampler_gmacs", "classifier_gmacs", "frames_classified", "frames_decoded")
_WITH_OTHER_METHODS = (ACCURACY, FIDELITY, THROUGHPUT)
# Advice of `evaluate` about its policies, which are fixed here.
_ADVICE = ("add it to the policies", "add the policy")
_LEARNT_FROM = {
    "dev": ", by which samplers keep their best epoch",
    "train": ", which samplers and baselines learn from",
}


def policies_of(plan: ExperimentPlan, cells: Sequence[PlannedCell]) -> dict[str, str]:
    """Return the policies for `evaluate`, some for comparison only: names, and folders of what was trained."""
    policies = {}
    for cell in cells:
        for name, seed in zip(cell.policy_names(plan.seeds), plan.seeds, strict=False):  # a policy has one name
            policies[name] = name if cell.training is None else str(cell.training.folder(plan.folder, seed))
            if cell.recipe.threshold:
                policies[name] += f"@{cell.recipe.threshold}"
    compared = (UNIFORM, "optimal") if plan.experiment.kind == FIDELITY else (UNIFORM,)
    return {name: name for name in compared if name not in policies} | policies


def rows_of_cell(cell: PlannedCell, seeds: Sequence[int], rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of a cell, one a seed; of a baseline with several thresholds, such a list for each."""
    # "all" is one clip of all candidates, whatever N is; a baseline decides on N by itself.
    wanted = {cell.num_frames, None} | ({cell.num_candidates} if cell.recipe.policy == "all" else set())
    by_threshold: dict[str, list[Row]] = {}
    for name in cell.policy_names(seeds):
        for row in rows:
            policy, _, threshold = row["policy"].rpartition("@") if cell.recipe.threshold else (row["policy"], "", "")
            is_wanted = cell.recipe.threshold or row["num_frames"] in wanted
            if policy == name and is_wanted and row["num_candidates"] == cell.num_candidates:
                by_threshold.setdefault(threshold, []).append(row)
    return list(by_threshold.values())


def part_name(num_candidates: int) -> str:
    """Return the name of an evaluation in evaluation.json."""
    return f"T={num_candidates}"


def result_rows(
    plan: ExperimentPlan, parts: Mapping[str, Any], metric: str, column: PaperColumn | None
) -> list[dict[str, Any]]:
    """Return the rows of a result in order: means over seeds in percent, and the paper's figure."""
    result = []
    for cell in plan.cells:
        measured = parts[part_name(cell.num_candidates)]["rows"]
        for rows in rows_of_cell(cell, plan.seeds, measured):
            first = rows[0]
            result.append(
                {
                    "row": cell.recipe.row,
                    "title": cell.recipe.title,
                    "num_frames": first["num_frames"],
                    "num_candidates": first["num_candidates"],
                    "trained": None if cell.training is None else cell.training.name,
                    "seeds": len(rows) if cell.training is not None else 0,
                    "dial": first["policy"].rpartition("@")[2] if cell.recipe.threshold else None,
                    **_spread("score", _percents(rows, metric)),
                    "score_ci95": _mean_bounds([row["ci95"].get(metric) for row in rows]),
                    "top1": _mean(_percents(rows, "top1")),
                    "mAP": _mean(_percents(rows, "mAP")),
                    **_spread("fidelity", _percents(rows, "fidelity")),
                    **_spread("recovered", _percents(rows, "recovered")),
                    **_versus(rows, measured, metric),
                    **{name: _mean([row[name] for row in rows]) for name in _MEANS},
                    "note": cell.recipe.note,
                    "paper": _figures_beside(cell, first["num_frames"], column),
                }
            )
    return result


def _figures_beside(cell: PlannedCell, num_frames: int | None, column: PaperColumn | None) -> dict[str, Any] | None:
    """Return what the paper prints for a row, where it is certain that it is of this row.

    A figure without a number of frames cannot stand beside several N, or several thresholds.
    """
    recipe = cell.recipe
    if recipe.paper_row is None:
        return None
    figures = _paper_figures(recipe.paper_row, num_frames, cell.num_candidates, column)
    several = recipe.threshold is not None or (len(recipe.pairs) > 1 and figures and figures["num_frames"] is None)
    return None if several else figures


def _paper_figures(
    name: str, num_frames: int | None, num_candidates: int, column: PaperColumn | None
) -> dict[str, Any] | None:
    """Return what the paper prints for a row, in percent."""
    figure = None if column is None else column.find(name, num_frames, num_candidates)
    if figure is None or column is None:
        return None
    return {
        **{key: figure[key] for key in ("table", "row", "metric", "num_frames")},
        "score": figure["value"],
        "versus_uniform": column.versus_uniform(figure),
        "gmacs": figure.get("gmacs"),
        "videos_per_second": figure.get("videos_per_second"),
    }


def _versus(rows: Sequence[Row], measured: Sequence[Row], metric: str) -> dict[str, Any]:
    """Return points above uniform with as many frames, mean and deviation over seeds.

    The interval is paired by video, which evaluations do for their main metric alone.
    """
    empty = {"versus_uniform": None, "versus_uniform_sd": None, "versus_uniform_ci95": None}
    versus = [row["versus_uniform"] for row in rows]
    if rows[0]["policy"] == UNIFORM or metric == FIDELITY or None in versus:
        return empty
    if all(comparison["metric"] == metric for comparison in versus):
        spread = _spread("versus_uniform", _percents(versus, "difference"))
        return {**spread, "versus_uniform_ci95": _mean_bounds([comparison["ci95"] for comparison in versus])}
    uniform = _uniform_scores(measured, metric)
    others = [uniform.get(_compared_pair(row)) for row in rows]
    points = [None if other is None else 100 * (row[metric] - other) for row, other in zip(rows, others, strict=True)]
    return empty | _spread("versus_uniform", points)


def _compared_pair(row: Row) -> Pair:
    """Return N and T of the uniform frames that a row is compared with."""
    return int(row["versus_uniform"]["num_frames"]), int(row["num_candidates"])


def _uniform_scores(measured: Sequence[Row], metric: str) -> dict[Pair, float]:
    return {(row["num_frames"], row["num_candidates"]): row[metric] for row in measured if row["policy"] == UNIFORM}


def missing_uniform(measured: Sequence[Row], metric: str) -> list[Pair]:
    """Return N and T of uniform rows that differences in a metric need and that were not measured."""
    if metric == FIDELITY:
        return []
    compared = [row for row in measured if row["versus_uniform"] is not None]
    wanted = {_compared_pair(row) for row in compared if row["versus_uniform"]["metric"] != metric}
    return sorted(wanted - _uniform_scores(measured, metric).keys())


def mean_rows(rows: Sequence[dict[str, Any]], metric: str) -> list[Row]:
    """Return rows of a result in the form of an evaluation's, for figures and pages."""

    def fraction(percent: float | None) -> float | None:
        return None if percent is None else percent / 100

    return [
        {
            "policy": row["title"] if row["dial"] is None else f"{row['title']}@{row['dial']}",
            **{name: row[name] for name in ("num_frames", "num_candidates", *_MEANS)},
            **{name: fraction(row[name]) for name in ("top1", "mAP", "fidelity", "recovered")},
            metric: fraction(row["score"]),
            "ci95": {} if row["score_ci95"] is None else {metric: [bound / 100 for bound in row["score_ci95"]]},
            "versus_uniform": None,
        }
        for row in rows
    ]


def _mean_bounds(intervals: Sequence[Sequence[float] | None]) -> list[float] | None:
    """Return 95 % intervals over videos, their ends averaged over seeds, in percent."""
    known = [bounds for bounds in intervals if bounds is not None]
    if not known or len(known) < len(intervals):
        return None
    return [100 * statistics.fmean(bounds[side] for bounds in known) for side in (0, 1)]


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and, of several values, standard deviation."""
    known = [value for value in values if value is not None]
    return {name: _mean(values), f"{name}_sd": statistics.stdev(known) if len(known) > 1 else None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _percents(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [None if row[name] is None else 100 * row[name] for row in rows]


# ---- results


def metric_of(plan: ExperimentPlan) -> str:
    """Return the metric of an experiment: the paper's for its data sets, the bank's own for others."""
    if plan.experiment.kind == FIDELITY:
        return FIDELITY
    own = "mAP" if plan.location.bank.multi_label else "top1"
    return str(data_sets()[plan.location.data]["metric"]) if plan.location.data else own


def _column_of(plan: ExperimentPlan) -> PaperColumn | None:
    """Return the paper's column beside a plan."""
    experiment, location = plan.experiment, plan.location
    prints = experiment.kind in _WITH_OTHER_METHODS
    return column_for(experiment.tables, location.data, location.paper_classifier, in_any=not prints)


def empty_result(plan: ExperimentPlan) -> dict[str, Any]:
    """Return a result with everything but the rows."""
    location, experiment = plan.location, plan.experiment
    column = _column_of(plan)
    left_out = []
    for cell in plan.left_out:
        decides = cell.training is not None and cell.training.is_baseline  # on N by itself
        pair = {"num_frames": None if decides else cell.num_frames, "num_candidates": cell.num_candidates}
        more = {"why": cell.why, "paper": _figures_beside(cell, pair["num_frames"], column)}
        left_out.append({"row": cell.recipe.row, "title": cell.recipe.title, **pair, **more})
    return {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "title": experiment.title,
        "claim": experiment.claim,
        "bank": {
            "name": location.bank_name,
            "path": str(location.bank.path),
            "data": location.data,
            "split": location.split,
            "videos": location.sizes.get(location.split, 0),
        },
        "classifier": {
            "name": location.classifier_name,
            "network": location.about["name"],
            "fingerprint": location.about["fingerprint"],
            "paper": location.paper_classifier,
        },
        "metric": metric_of(plan),
        "unit": "percent",
        "seeds": list(plan.seeds),
        "paper": None if column is None else {"title": read_paper()["source"]["title"], "column": column.title},
        "rows": [],
        "left_out": left_out,
        "elsewhere": [],
        "notes": [],
        "files": [],
        "refused": plan.refused or None,
    }


def finished_result(plan: ExperimentPlan, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with the rows of finished evaluations, and the paper's rows of methods that the package lacks."""
    result, column = empty_result(plan), _column_of(plan)
    result["rows"] = result_rows(plan, parts, result["metric"], column)
    of_evaluations = [note for part in parts.values() for note in part["notes"] if applies_here(note)]
    result["notes"] = [*_notes_on_plan(plan), *dict.fromkeys(of_evaluations)]
    if plan.request.bootstrap and any(_has_no_interval(row) for row in result["rows"]):
        result["notes"].append(
            f"points to uniform in {result['metric']} have no interval here: videos are paired in the bank's own metric"
        )
    if column is not None:
        result["notes"] += _notes_on_paper(plan, column, result["rows"])
        if plan.experiment.kind in _WITH_OTHER_METHODS:
            known, titles = [recipe.paper_row for recipe in plan.experiment.rows], read_paper()["elsewhere"]
            for row in column.rows(plan.experiment.tables[0]):
                if row["row"] not in known:
                    pair = {"num_frames": row["num_frames"], "num_candidates": row["num_candidates"]}
                    figures = _paper_figures(row["row"], **pair, column=column)
                    title = titles.get(row["row"], row["row"])
                    result["elsewhere"].append({"row": row["row"], "title": title, **pair, "paper": figures})
    return result


def _has_no_interval(row: Mapping[str, Any]) -> bool:
    """Return whether a difference is in another metric than the one by which evaluations pair videos."""
    return row["versus_uniform"] is not None and row["versus_uniform_sd"] is None and row["versus_uniform_ci95"] is None


def applies_here(note: str) -> bool:
    """Return whether a note of `evaluate` gives no advice about policies, which are fixed here."""
    return not any(advice in note for advice in _ADVICE)


def _notes_on_plan(plan: ExperimentPlan) -> Iterator[str]:
    location, request = plan.location, plan.request
    if location.split != "test":
        why = _LEARNT_FROM[location.split] if plan.trainings else ""
        yield f"the bank has no labelled test videos, so everything is measured on {location.split}{why}"
    if plan.trainings and not location.sizes.get("dev"):
        yield "the bank has no dev split, so the last epoch of each sampler is kept"
    if plan.trainings and request.weights is None:
        yield "no weights were given (--weights), so samplers start from random ones"
    if plan.trainings and request.changes:
        yield f"recipes were changed: {', '.join(f'{name}={value}' for name, value in request.changes.items())}"


def _notes_on_paper(plan: ExperimentPlan, column: PaperColumn, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the paper's figures leave out, how large its data set is, and from which tables figures are."""
    yield from column.notes()
    if column.same_data:
        in_paper, location = data_sets()[column.data], plan.location
        ours = {"train": location.sizes.get("train", 0), "test": location.sizes.get(location.split, 0)}
        ours["classes"] = len(location.bank.classes)
        theirs = {name: in_paper[name] for name in ours}
        if None not in theirs.values() and theirs != ours:
            yield (
                f"the paper's {in_paper['title']} has {theirs['train']} videos to train on, {theirs['test']} to "
                f"measure on and {theirs['classes']} classes; this bank has {ours['train']}, {ours['test']} and "
                f"{ours['classes']}"
            )
    titles: dict[str, list[str]] = {}
    for row in rows:
        if row["paper"] is not None and row["paper"]["table"] != plan.experiment.name:
            titles.setdefault(row["paper"]["table"], []).append(row["title"])
    for name, of_rows in titles.items():
        yield f"the paper's figure of {', '.join(dict.fromkeys(of_rows))} is from its {name_in_words(name)}"


def independence_result(plan: ExperimentPlan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `independence` measured in the form of a result; single facts are those of the first network."""
    networks = [
        {name: facts[name] for name in ("classifier", "bandwidth", "bandwidth_of", "verdict")}
        for facts in measured["classifiers"]
    ]
    notes = []
    for facts in networks:
        rate = facts["verdict"]
        words = "no rate that was measured" if rate is None else f"up to {rate:g} frames a second"
        of_network = f" for {facts['classifier']}" if len(networks) > 1 else ""
        notes.append(f"frames are independent{of_network}: {words}")
    notes += [measured["criterion"], *measured["notes"]]
    first = {name: networks[0][name] for name in ("bandwidth", "bandwidth_of", "verdict")}
    return empty_result(plan) | {
        **{"seeds": [], "metric": "redundant", "unit": "share", "rows": list(measured["rows"]), "notes": notes},
        **{"networks": networks, **first},
    }
