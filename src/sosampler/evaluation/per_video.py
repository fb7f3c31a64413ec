"""What an evaluation found video by video, and the file that keeps it: a line of JSON for each video."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler.evaluation.metrics import confidences, multi_hot, top1_hits
from sosampler.video.timeline import Indices

if TYPE_CHECKING:
    from sosampler.data.bank import Bank
    from sosampler.data.bank_teachers import Teacher, TeacherItem
    from sosampler.evaluation.rows import Cell, Evaluation

EVALUATION_FILE, VIDEOS_FILE = "evaluation.json", "videos.jsonl"
KIND, VERSION = "sosampler videos", 2
_DIGITS = 5  # of every number in the file but times
_MILLISECONDS = 3  # digits behind the point of times, which may be far from 0


@dataclass(frozen=True, eq=False)
class Answers:
    """What was made of the clips that one policy chose, video by video; a system's are its own."""

    predicted: Indices  # [V] the most probable class
    probability: NDArray[np.float64]  # [V] of that class
    confidence: NDArray[np.float64]  # [V] in the labels
    right: NDArray[np.bool_]  # [V] whether the most probable class is a label

    @classmethod
    def of(cls, probabilities: ArrayLike, labels: ArrayLike) -> Answers:
        """From probabilities [V, C] and labels, multi-hot [V, C]."""
        probs = np.asarray(probabilities, dtype=np.float64)
        predicted = probs.argmax(1)
        found = np.take_along_axis(probs, predicted[:, None], axis=1)[:, 0]
        return cls(predicted, found, confidences(probs, labels), top1_hits(probs, labels))


@dataclass(frozen=True, eq=False)
class PerVideo:
    """What `Evaluation.write_run` writes besides the rows."""

    bank: Bank  # the split
    places: tuple[int, ...]  # of the videos in it
    teacher: Teacher
    answers: Mapping[Cell, Answers]
    scores: Mapping[tuple[str, int], NDArray[np.float32]]  # by policy and T: [V, T]; what pads a short video is in it


def label_confidence(told: TeacherItem, labels: Sequence[int], slots: Indices) -> NDArray[np.float64]:
    """The classifier's confidence in the labels, from each stored frame alone."""
    probs = told.frame_probs[slots]
    return confidences(probs, multi_hot([labels], probs.shape[1]).repeat(len(probs), axis=0))


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Says whether rows and videos belong together: two files cannot be replaced at one stroke."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:32]


def video_lines(evaluation: Evaluation, kept: PerVideo) -> Iterator[str]:
    """The lines of videos.jsonl: first what they are about, then each video."""
    cells = list(kept.answers)
    yield _line(
        {
            "kind": KIND,
            "version": VERSION,
            "evaluation": rows_digest([row.to_dict() for row in evaluation.rows]),
            "videos": len(evaluation.ids),
            "classes": list(kept.bank.classes),
            "rows": [[cell.policy, cell.num_frames, cell.num_candidates] for cell in cells],
        }
    )
    counts = list(dict.fromkeys(cell.num_candidates for cell in cells))
    for number, (name, place) in enumerate(zip(evaluation.ids, kept.places, strict=True)):
        video = kept.bank[place]
        yield _line(
            {
                "id": name,
                "labels": list(video.labels),
                "candidates": {str(count): _candidates(kept, number, count) for count in counts},
                "answers": [_answer(kept.answers[cell], number, evaluation.choices[cell][number]) for cell in cells],
            }
        )


def _candidates(kept: PerVideo, number: int, count: int) -> dict[str, Any]:
    """Each real candidate once, in time order."""
    video = kept.bank[kept.places[number]]
    slots = video.uniform(min(count, len(video)))
    return {
        "slots": slots.tolist(),
        "positions": _rounded(video.positions[slots]),
        "seconds": [round(float(one), _MILLISECONDS) for one in video.pts_seconds[slots]],
        "confidence": _rounded(label_confidence(kept.teacher[kept.places[number]], video.labels, slots)),
        "scores": {
            policy: _rounded(table[number, : len(slots)])
            for (policy, same), table in kept.scores.items()
            if same == count
        },
    }


def _answer(answers: Answers, number: int, chosen: Indices) -> dict[str, Any]:
    return {
        "predicted": int(answers.predicted[number]),
        "probability": _short(answers.probability[number]),
        "confidence": _short(answers.confidence[number]),
        "right": bool(answers.right[number]),
        "chosen": [slot for slot in chosen.tolist() if slot >= 0],  # without what fills up a system's row
    }


def _rounded(values: NDArray[Any]) -> list[float | None]:
    return [_short(value) for value in values]


def _short(value: float) -> float | None:
    """
    >>> _short(0.123456789), _short(float("nan"))
    (0.12346, None)
    """
    return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None


def _line(told: dict[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":")) + "\n"
