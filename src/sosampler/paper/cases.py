"""Single videos: where a sampler does well or badly, found by a rule and not by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sosampler.evaluation.result import Cell, Evaluation
from sosampler.paper.plan import Pair
from sosampler.report.compare import cases
from sosampler.report.load import Said


def chosen_cases(evaluation: Evaluation, sampler: str, uniform: str, pair: Pair, *, success: bool) -> list[int]:
    """Numbers of the videos that one policy gets right and the other wrong, the largest lead in confidence first.

    Args:
        evaluation: of `evaluate` itself, which knows the single videos.
        sampler, uniform: names of the policies.
        pair: N and T.
        success: the sampler is the one that is right.
    """
    return cases(_said(evaluation, sampler, pair), _said(evaluation, uniform, pair), success=success)


def _said(evaluation: Evaluation, policy: str, pair: Pair) -> list[Said]:
    cell = Cell(policy, *pair)
    assert evaluation.per_video is not None, "an evaluation that was just made knows its videos"
    answers, chosen = evaluation.per_video.predictions[cell], evaluation.choices[cell]
    told = zip(answers.predicted, answers.probability, answers.confidence, answers.right, chosen, strict=True)
    return [
        Said(int(predicted), float(probability), float(confidence), bool(right), tuple(slots.tolist()))
        for predicted, probability, confidence, right, slots in told
    ]


def narrowed(evaluation: Evaluation, videos: Sequence[int], names: dict[str, str]) -> Evaluation:
    """Some of the videos of an evaluation, in this order, and policies under other names."""
    numbers = np.asarray(videos, dtype=np.int64)
    return replace(
        evaluation,
        rows=tuple(replace(row, policy=names.get(row.policy, row.policy)) for row in evaluation.rows),
        ids=tuple(evaluation.ids[number] for number in numbers.tolist()),
        choices={
            Cell(names.get(cell.policy, cell.policy), cell.num_frames, cell.num_candidates): slots[numbers]
            for cell, slots in evaluation.choices.items()
        },
        per_video=None,  # which is of all videos
    )
