"""The steps of an experiment that use the rest of the package: evaluating, timing, drawing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sosampler.errors import MissingDependency
from sosampler.evaluation.result import Evaluation
from sosampler.paper.experiments import CURVE
from sosampler.paper.plan import ExperimentPlan, Pair, PlannedCell
from sosampler.paper.request import Request
from sosampler.paper.results import (
    UNIFORM,
    can_be_followed,
    independence_result,
    mean_rows,
    metric_of,
    missing_uniform,
    policies_of,
)
from sosampler.paper.tables import name_in_words

REPORT, CURVE_FILE = "report", "curve.svg"


def evaluate_part(
    plan: ExperimentPlan, num_candidates: int, seeds: Sequence[int], request: Request
) -> tuple[Evaluation, dict[str, Any]]:
    """All rows of one T in one evaluation, so that differences are paired by video; also as evaluation.json keeps it.

    Where the table shows another metric than the one by which evaluations compare, uniform rows are kept for every N
    that a row is compared with; a system's N is only known once it has run.
    """
    place, cells = plan.place, plan.parts[num_candidates]
    pairs = list(dict.fromkeys(cell.pair for cell in cells))
    found = _evaluated(plan, policies_of(plan, cells, seeds, place.folder(request.out)), pairs, seeds, request)
    told = found.to_dict()
    missing = missing_uniform(told["rows"], metric_of(plan))
    if missing:
        told["rows"] += _evaluated(plan, {UNIFORM: UNIFORM}, missing, seeds, request).to_dict()["rows"]
    return found, told


def _evaluated(
    plan: ExperimentPlan, policies: dict[str, str], pairs: Sequence[Pair], seeds: Sequence[int], request: Request
) -> Evaluation:
    from sosampler.evaluation.evaluate import evaluate

    place = plan.place
    return evaluate(
        place.bank.path,
        policies,
        pairs=list(pairs),
        classifier=place.judge,
        views=None if place.classifier is None else int(place.about["views"]),
        split=place.split,
        seed=seeds[0],
        bootstrap=request.bootstrap,
        device=request.device,
        precision=request.precision,
        say=lambda text: request.say(f"    note: {text}") if can_be_followed(text) else None,
    )


@contextmanager
def noting_what_is_missing(result: dict[str, Any]) -> Iterator[None]:
    """What was measured, perhaps for hours, is kept where a package that draws it is not installed."""
    try:
        yield
    except MissingDependency as error:
        result["notes"].append(f"not drawn: {error}")


# ---- independence of frames


def measure_independence(plan: ExperimentPlan, request: Request, folder: Path) -> dict[str, Any]:
    """Densities of the likeness of neighbouring frames: independence.json and independence.png."""
    from sosampler.evaluation.independence import independence

    found = independence(
        plan.place.bank.split(plan.place.split),
        classifiers=[plan.place.classifier],
        seed=request.seeds[0],
        device=request.device,
        precision=request.precision,
        say=lambda text: request.say(f"    note: {text}"),
    )
    result = independence_result(plan, request, found.to_dict())
    with noting_what_is_missing(result):
        result["files"] = [path.name for path in found.write(folder)]
    return result


# ---- videos a second


def measure_throughput(plan: ExperimentPlan, request: Request, result: dict[str, Any]) -> None:
    """Time every row on the same frames; fills in the rows of a result."""
    from sosampler.paper import throughput

    place, seed = plan.place, request.seeds[0]
    classifier = place.classifier
    counts = {cell.num_candidates for cell in plan.cells}
    part = place.bank.split(place.split)
    names, ways = [], {}
    frames_by = {count: throughput.frames_in_memory(part, count, classifier.device) for count in counts}
    for cell in plan.cells:
        frames = frames_by[cell.num_candidates]
        name = throughput.UNIFORM if cell.recipe.row == throughput.UNIFORM else f"{cell.recipe.row} {cell.pair}"
        way = _way(plan, cell, frames, request)
        names.append(name)
        if way is None:
            result["notes"].append(
                f"{cell.recipe.title} was not timed: its light network is not at hand; give --weights, or a "
                "sampler as --light"
            )
        else:
            ways[name] = way
    videos = len(next(iter(frames_by.values())))
    throughput.add_to_rows(result["rows"], throughput.measure(ways, videos), names)
    result["notes"].append(
        f"videos a second: {videos} videos with frames in memory on {classifier.device}, seed {seed}, batches of "
        f"{throughput.BATCH}, median of {throughput.ROUNDS} rounds; decoding is not in it"
    )
    reference = next(cell for cell in plan.cells if cell.recipe.row == throughput.UNIFORM)
    result["notes"].append(
        f"times uniform: uniform with {reference.num_frames} of {reference.num_candidates} frames is 1, whatever N a "
        "row has; points to uniform are to uniform with as many frames as the row"
    )


def _way(plan: ExperimentPlan, cell: PlannedCell, frames: Any, request: Request) -> Any:
    from sosampler.paper import throughput
    from sosampler.samplers.registry import load_sampler

    place, seed = plan.place, request.seeds[0]
    classifier, device = place.classifier, str(place.classifier.device)
    if cell.training is None:
        return throughput.uniform_way(classifier, frames, cell.num_frames)
    folder = cell.training.folder(place.folder(request.out), seed)
    if not cell.training.is_system:
        sampler = load_sampler(folder, device=device)
        sampler.precision = classifier.precision
        return throughput.sampler_way(sampler, classifier, frames, cell.num_frames)
    from sosampler.baselines.folder import load_system
    from sosampler.training.baseline_data import bank_views

    light = _light(request, classifier) if cell.training.needs_light else None
    if cell.training.needs_light and light is None:
        return None
    system = load_system(folder, device)
    kept = {name: (system.about.get(name) or {}).get("fingerprint") for name in ("heavy", "light")}
    views, _ = bank_views(place.bank.split(place.split), **kept, num_candidates=cell.num_candidates)
    import torch

    return throughput.system_way(system, views.some(torch.arange(len(frames))), classifier, light, frames)


def _light(request: Request, classifier: Any) -> Any:
    """The light network of systems where and as precise as the classifier; None where only its features are known."""
    from sosampler.baselines.base import light_network

    if request.light is None:
        found = None if request.weights is None else light_network(request.weights)
    else:
        # A copy: what the network computes in is part of what trainings are told apart by.
        found = copy.deepcopy(request.light) if hasattr(request.light, "look") else None
    if found is None:
        return None
    found.precision = classifier.precision
    return found.to(classifier.device)


# ---- single videos


def show_cases(
    plan: ExperimentPlan, request: Request, evaluation: Evaluation, result: dict[str, Any], folder: Path
) -> None:
    """A page with videos and the frames that were chosen of them; the videos are found by a rule."""
    from sosampler.paper.cases import chosen_cases, narrowed
    from sosampler.report.page import write_report
    from sosampler.report.strips import strips_of

    place, experiment = plan.place, plan.experiment
    part = place.bank.split(place.split)
    pair = plan.cells[0].pair
    names = {cell.policy_names(request.seeds[:1])[0]: cell.recipe.title for cell in plan.cells}
    if experiment.success is None:
        videos, rule = list(range(min(request.num_cases, len(evaluation.ids)))), "the first videos"
    else:
        sampler = next(cell.policy_names(request.seeds[:1])[0] for cell in plan.cells if cell.training)
        videos = chosen_cases(evaluation, sampler, UNIFORM, pair, success=experiment.success)[: request.num_cases]
        right, wrong = ("the sampler", "uniform") if experiment.success else ("uniform", "the sampler")
        rule = f"videos that {right} gets right and {wrong} wrong, by the difference of confidence in the label"
    shown = narrowed(evaluation, videos, names)
    result["videos"] = list(shown.ids)
    result["notes"].append(f"shown are {rule}: {len(videos)}")
    policies = [cell.recipe.title for cell in plan.cells]
    strips = strips_of(part, shown, policies, num_frames=pair[0], num_candidates=pair[1], count=len(videos))
    page = write_report(
        folder / REPORT,
        f"{name_in_words(experiment.name)}: {experiment.title}",
        [row.to_dict() for row in shown.rows if row.policy in policies],
        curves=[],
        strips=strips,
        facts=_facts(result),
        metric=evaluation.metric,
        intro=f"The paper claims: {experiment.claim} Shown are {rule}.",
        headline=pair,
    )
    result["files"].append(str(page.relative_to(folder)))


# ---- curves


def draw_figures(plan: ExperimentPlan, result: dict[str, Any], folder: Path) -> None:
    """For curves a page with the figures, and one figure as a file."""
    if plan.experiment.kind != CURVE:
        return
    from sosampler.figures.cost_curve import write_cost_curve
    from sosampler.report.page import write_report

    rows, metric = mean_rows(result["rows"], result["metric"]), result["metric"]
    title = f"{name_in_words(plan.experiment.name)}: {plan.experiment.title}"
    intro = f"The paper claims: {plan.experiment.claim}"
    page = write_report(folder / REPORT, title, rows, facts=_facts(result), metric=metric, intro=intro)
    where = f"{result['bank']['name']}, {result['classifier']['name']}"
    curve = write_cost_curve(rows, metric, folder / CURVE_FILE, title=f"{plan.experiment.title}: {where}")
    result["files"] += [str(path.relative_to(folder)) for path in (page, curve)]


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    kept = ("bank", "classifier", "metric", "seeds", "notes")
    return {name: result[name] for name in kept}
