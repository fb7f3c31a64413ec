"""What result.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sosampler.reproduce.experiments import ACCURACY, FIDELITY, INDEPENDENCE, THROUGHPUT
from sosampler.reproduce.measuring import paper_figures, result_rows, versus_from_scores
from sosampler.reproduce.paper import PaperColumn, column_for, metric_for, read_paper, rows_elsewhere
from sosampler.reproduce.plan import ExperimentPlan, LeftOut
from sosampler.reproduce.request import Request, seeds_of
from sosampler.reproduce.rows import rows_of

_WITH_OTHER_SYSTEMS = (ACCURACY, FIDELITY, THROUGHPUT)


def empty_result(plan: ExperimentPlan, request: Request) -> dict[str, Any]:
    """Everything but the rows."""
    place, experiment = plan.place, plan.experiment
    column = column_of(plan)
    of_bank = "mAP" if place.bank.multi_label else "top1"
    metric = "fidelity" if experiment.kind == FIDELITY else metric_for(place.data, of_bank)
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
        "metric": metric,
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
    rows = result_rows(plan, parts, seeds, told["metric"], column)
    if experiment.kind != FIDELITY:
        versus_from_scores(rows)
    told["rows"] = rows
    if column is not None and experiment.kind in _WITH_OTHER_SYSTEMS:
        told["elsewhere"] = _elsewhere(plan, column)
    told["notes"] = [*_own_notes(plan, request), *_notes_of(parts)]
    return told


def _left_out(row: LeftOut, column: PaperColumn | None) -> dict[str, Any]:
    pair = {"num_frames": row.num_frames, "num_candidates": row.num_candidates}
    figures = paper_figures(row.recipe.paper_row, pair, column)
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
        notes.append(f"the bank has no labelled test videos, so everything is measured on {place.split}")
    if plan.trainings and not place.sizes.get("dev"):
        notes.append("the bank has no dev split, so the last epoch of each sampler is kept")
    if plan.trainings and request.weights is None:
        notes.append("no weights were given (--weights), so samplers begin with random ones")
    if plan.trainings and request.changes:
        changed = ", ".join(f"{name}={value}" for name, value in request.changes.items())
        notes.append(f"recipes were changed: {changed}")
    return notes


def _notes_of(parts: Mapping[str, Any]) -> list[str]:
    """Of the evaluations, each once."""
    return list(dict.fromkeys(note for told in parts.values() for note in told["notes"]))


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
