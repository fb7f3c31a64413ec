"""Single videos on which a sampler does well or badly, chosen by their numbers and not by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler.evaluation.result import VIDEOS_FILE, Evaluation
from sosampler.paper.experiments import Pair
from sosampler.paper.plan import ExperimentPlan, Request
from sosampler.paper.tables import name_in_words
from sosampler.report.compare import cases
from sosampler.report.load import RowKey, RunVideos, read_run_videos
from sosampler.report.page import write_report
from sosampler.report.strips import strip_of

_UNIFORM = "uniform"


def chosen_cases(videos: RunVideos, sampler: str, pair: Pair, *, success: bool) -> list[int]:
    """Return indices of videos that the sampler gets right and uniform wrong (or not), the largest lead first."""
    of_sampler, of_uniform = videos.predictions((sampler, *pair)), videos.predictions((_UNIFORM, *pair))
    return cases(of_sampler, of_uniform, success=success)


def write_cases(
    plan: ExperimentPlan, request: Request, evaluation: Evaluation, run: Path, result: dict[str, Any], folder: Path
) -> None:
    """Write a page of videos with the frames that each policy chose; adds to the result.

    Args:
        run: folder into which the evaluation was written.
    """
    experiment, pair = plan.experiment, plan.cells[0].pair
    names = {cell.policy_names(request.seeds[:1])[0]: cell for cell in plan.cells}
    videos = read_run_videos(run / VIDEOS_FILE)
    if experiment.success is None:
        indices, shown = list(range(min(request.num_cases, len(videos.videos)))), "the first videos"
    else:
        sampler = next(name for name, cell in names.items() if cell.training)
        indices = chosen_cases(videos, sampler, pair, success=experiment.success)[: request.num_cases]
        right, wrong = ("the sampler", "uniform") if experiment.success else ("uniform", "the sampler")
        shown = f"videos that {right} gets right and {wrong} wrong, by the difference of confidence in the label"
    result["videos"] = [videos.videos[index].id for index in indices]
    result["notes"].append(f"shown are {shown}: {len(indices)}")
    keys: list[RowKey] = [(name, *pair) for name in names]
    bank = plan.location.bank.split(plan.location.split)
    strips = []
    for index in indices:
        strip = strip_of(videos, videos.videos[index], keys, bank)
        lines = tuple(replace(line, policy=names[line.policy].recipe.title) for line in strip.lines)
        strips.append(replace(strip, lines=lines))
    rows = [row.to_dict() for row in evaluation.rows if row.policy in names]
    page = write_report(
        folder / "report",
        f"{name_in_words(experiment.name)}: {experiment.title}",
        [{**row, "policy": names[row["policy"]].recipe.title} for row in rows],
        curves=[],
        strips=strips,
        facts={name: result[name] for name in ("bank", "classifier", "metric", "seeds", "notes")},
        metric=evaluation.metric,
        intro=f"The paper claims: {experiment.claim} Shown are {shown}.",
        headline=pair,
    )
    result["files"].append(str(page.relative_to(folder)))
