"""Single videos: where a sampler does well or badly, found by a rule and not by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sosampler.classifiers.outputs import activate
from sosampler.data.bank import Bank
from sosampler.data.teachers import views_of
from sosampler.evaluation.metrics import confidences, multi_hot, top1_hits
from sosampler.evaluation.rows import Cell, Evaluation


@dataclass(frozen=True, eq=False)
class Judged:
    """What the classifier makes of the clips that one policy chose."""

    confidence: NDArray[np.float64]  # [V] in the true labels
    right: NDArray[np.bool_]  # [V]


def judge(
    bank: Bank, teacher: str, classifier: Any, evaluation: Evaluation, policy: str, num_frames: int, num_candidates: int
) -> Judged:
    """Ask about the chosen clip of every video: from kept features where the classifier pools them.

    Args:
        bank: the split that was evaluated.
        teacher: name of the classifier's answers.
        classifier: itself, or None for one that averages logits, which the bank keeps.
    """
    answers = bank.teacher(teacher)
    places = {row.item.id: place for place, row in enumerate(bank.rows)}
    rows = [places[name] for name in evaluation.ids]
    chosen = evaluation.chosen(policy, num_frames, num_candidates)
    probs = np.stack([_probs(bank, answers, classifier, row, slots) for row, slots in zip(rows, chosen, strict=True)])
    labels = multi_hot([bank.rows[row].item.labels for row in rows], len(bank.classes))
    return Judged(confidences(probs, labels).astype(np.float64), top1_hits(probs, labels))


@torch.no_grad()
def _probs(bank: Bank, answers: Any, classifier: Any, row: int, slots: NDArray[np.int64]) -> NDArray[np.float32]:
    """[C] of one clip."""
    if answers.about["features"] is not None:
        features = torch.from_numpy(answers[row].features[slots].astype(np.float32))
        if answers.pooling == "mean":
            found = activate(features.mean(0), "sigmoid" if answers.about.get("multi_label") else "softmax")
        else:
            found = classifier.pool(features[None])[0]
        return np.asarray(found.cpu(), dtype=np.float32)
    video = bank[row]
    frames = torch.from_numpy(video.frames(slots).transpose(0, 3, 1, 2).copy())[None]
    where = torch.from_numpy(video.positions[slots])[None]
    said = [classifier.clip_probs(view, where) for view in views_of(frames, int(answers.about["views"]))]
    return np.asarray(torch.stack(said).mean(0)[0].float().cpu(), dtype=np.float32)


def choose_cases(sampler: Judged, uniform: Judged, *, success: bool, count: int) -> list[int]:
    """Videos in which one is right and the other wrong, those first whose confidence in the label differs most.

    Args:
        success: the sampler is the one that is right.
    """
    better, worse = (sampler, uniform) if success else (uniform, sampler)
    fits = np.flatnonzero(better.right & ~worse.right)
    gain = better.confidence[fits] - worse.confidence[fits]
    return [int(video) for video in fits[np.argsort(-gain, kind="stable")][:count]]


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
    )
