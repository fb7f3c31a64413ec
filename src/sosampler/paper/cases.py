"""Single videos on which a sampler does well or badly, chosen by their numbers and not by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sosampler.evaluation.result import Cell, Evaluation
from sosampler.paper.experiments import Pair
from sosampler.paper.plan import ExperimentPlan, Request
from sosampler.paper.tables import name_in_words
from sosampler.report.compare import cases
from sosampler.report.load import Prediction

_UNIFORM = "uniform"


def chosen_cases(evaluation: Evaluation, sampler: str, uniform: str, pair: Pair, *, success: bool) -> list[int]:
    """Return the indices of videos that one policy gets right and the other wrong, the largest lead first.

    Args:
        evaluation: with the predictions for single videos.
        sampler, uniform: names of the policies.
        pair: N and T.
        success: the sampler is the one that is right.
    """
    of_sampler, of_uniform = _predictions(evaluation, sampler, pair), _predictions(evaluation, uniform, pair)
    return cases(of_sampler, of_uniform, success=success)


def _predictions(evaluation: Evaluation, policy: str, pair: Pair) -> list[Prediction]:
    cell = Cell(policy, *pair)
    assert evaluation.per_video is not None, "an evaluation that was just made has its videos"
    answers, chosen = evaluation.per_video.answers[cell], evaluation.choices[cell]
    videos = zip(answers.predicted, answers.probability, answers.confidence, answers.right, chosen, strict=True)
    return [
        Prediction(int(predicted), float(probability), float(confidence), bool(right), tuple(slots.tolist()))
        for predicted, probability, confidence, right, slots in videos
    ]


def narrowed(evaluation: Evaluation, videos: Sequence[int], names: dict[str, str]) -> Evaluation:
    """Return some of the videos of an evaluation, in this order, with its policies renamed."""
    indices = np.asarray(videos, dtype=np.int64)
    return replace(
        evaluation,
        rows=tuple(replace(row, policy=names.get(row.policy, row.policy)) for row in evaluation.rows),
        ids=tuple(evaluation.ids[index] for index in indices.tolist()),
        choices={
            Cell(names.get(cell.policy, cell.policy), cell.num_frames, cell.num_candidates): slots[indices]
            for cell, slots in evaluation.choices.items()
        },
        per_video=None,  # which is of all videos
    )


def write_cases(
    plan: ExperimentPlan, request: Request, evaluation: Evaluation, result: dict[str, Any], folder: Path
) -> None:
    """Write a page of videos with the frames that each policy chose; adds to the result."""
    from sosampler.report.page import write_report
    from sosampler.report.strips import strips_of

    experiment, pair = plan.experiment, plan.cells[0].pair
    seeds = request.seeds[:1]
    names = {cell.policy_names(seeds)[0]: cell.recipe.title for cell in plan.cells}
    if experiment.success is None:
        videos, shown = list(range(min(request.num_cases, len(evaluation.ids)))), "the first videos"
    else:
        sampler = next(cell.policy_names(seeds)[0] for cell in plan.cells if cell.training)
        videos = chosen_cases(evaluation, sampler, _UNIFORM, pair, success=experiment.success)[: request.num_cases]
        right, wrong = ("the sampler", "uniform") if experiment.success else ("uniform", "the sampler")
        shown = f"videos that {right} gets right and {wrong} wrong, by the difference of confidence in the label"
    part = narrowed(evaluation, videos, names)
    result["videos"] = list(part.ids)
    result["notes"].append(f"shown are {shown}: {len(videos)}")
    policies = [cell.recipe.title for cell in plan.cells]
    bank = plan.location.bank.split(plan.location.split)
    page = write_report(
        folder / "report",
        f"{name_in_words(experiment.name)}: {experiment.title}",
        [row.to_dict() for row in part.rows if row.policy in policies],
        curves=[],
        strips=strips_of(bank, part, policies, num_frames=pair[0], num_candidates=pair[1], count=len(videos)),
        facts={name: result[name] for name in ("bank", "classifier", "metric", "seeds", "notes")},
        metric=evaluation.metric,
        intro=f"The paper claims: {experiment.claim} Shown are {shown}.",
        headline=pair,
    )
    result["files"].append(str(page.relative_to(folder)))
