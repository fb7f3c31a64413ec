"""What result.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sosampler.reproduce.experiments import ACCURACY, FIDELITY, INDEPENDENCE, THROUGHPUT
from sosampler.reproduce.measuring import figures_beside, paper_figures, result_rows
from sosampler.reproduce.paper import PaperColumn, column_for, data_sets, metric_for, read_paper, rows_elsewhere
from sosampler.reproduce.plan import ExperimentPlan, LeftOut
from sosampler.reproduce.request import Request, seeds_of
from sosampler.reproduce.rows import rows_of
from sosampler.reproduce.tables import name_in_words
from sosampler.systems import list_systems

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
