"""The result of an evaluation: rows with metrics and intervals, as text, CSV, JSON and a run folder."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices
from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument
from sosampler.evaluation.metrics import Measured, Resamples, confidences, multi_hot, shared_share, top1_hits

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank
    from sosampler.bank.outputs import Teacher

EVALUATION_FILE, VIDEOS_FILE = "evaluation.json", "videos.jsonl"
KIND, VERSION = "sosampler videos", 2
_DIGITS = 5  # of every number in the file but times
_MILLISECONDS = 3  # digits behind the point of times, which may be far from 0
# Gaps of the optimal policy below this share of probability do not matter.
_SMALL_GAP = 1e-3
# Sums on a GPU have no fixed order, so that equal clips may differ by rounding; no metric is finer than this.
_ROUNDING = 1e-9
_NAMES = {"top1": "top-1 %", "mAP": "mAP %"}


@dataclass(frozen=True)
class Cell:
    """One policy with N of T."""

    policy: str
    num_frames: int | None  # None: a baseline, or num_frames="auto", which decide on N
    num_candidates: int


@dataclass(frozen=True)
class Spent:
    """The cost of a policy for one video; where it decides on N the mean over videos."""

    frames_classified: float
    frames_decoded: float
    sampler_gmacs: float | None
    classifier_gmacs: float | None


@dataclass(eq=False)
class Tally:
    """Results of one cell, video by video."""

    probs: NDArray[np.float32]  # [V, C] of the chosen clips
    # [V, N] stored frames that were chosen, in time order; where N differs by video [V, T], padded with -1
    slots: Indices
    gap: NDArray[np.float64] | None = None  # [V]
    methods: set[str] = field(default_factory=set)
    seconds: float = 0.0

    @classmethod
    def empty(cls, labels: NDArray[np.bool_], num_frames: int) -> Tally:
        return cls(np.zeros(labels.shape, dtype=np.float32), np.zeros((len(labels), num_frames), dtype=np.int64))


@dataclass(frozen=True)
class EvaluationRow:
    """One policy with N of T, or one baseline. Metrics are shares in 0..1; what is unknown is None."""

    policy: str
    num_frames: int | None  # N; None for a baseline or NAME+auto, which decide on it
    num_candidates: int
    top1: float
    mAP: float
    confidence: float  # mean over videos of the clip's confidence in its labels
    fidelity: float | None  # mean share of the optimal set that was chosen
    recovered: float | None  # share of the semi-optimal policy's gain over uniform, in the main metric
    gmacs: float | None  # sampler_gmacs + classifier_gmacs
    # Of scoring T candidates; of a baseline its light network and own layers; None for oracles.
    sampler_gmacs: float | None
    # Of a clip of N; of a baseline the heavy network; None where the classifier is not at hand.
    classifier_gmacs: float | None
    frames_classified: float  # N; of a baseline those that the heavy network saw, mean over videos
    frames_decoded: float  # of a baseline those that any network saw, mean over videos
    ci95: dict[str, tuple[float, float]]  # of top1 and mAP
    # num_frames of uniform (where a row decides on N its mean, rounded up), metric, difference, ci95; paired by video
    versus_uniform: dict[str, Any] | None
    seconds: float  # of scoring, choosing and classifying all videos
    gap: dict[str, float] | None = None  # of the optimal policy: bound on what its search missed, in probability
    method: str | None = None  # how the optimal policy searched

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples
        return values


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rows, what they were evaluated on, and the frames that each policy chose."""

    rows: tuple[EvaluationRow, ...]
    facts: dict[str, Any]  # bank, split, teacher, seed, versions, notes, ...
    ids: tuple[str, ...]  # of the videos
    choices: Mapping[Cell, Indices]  # [V, N] stored frames; where N differs by video [V, T], padded with -1
    per_video: PerVideo | None = field(default=None, repr=False)

    @property
    def metric(self) -> str:
        """The main metric: "mAP" where videos have several labels, else "top1"."""
        return str(self.facts["metric"])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.facts["notes"])

    def row(self, policy: str, num_frames: int | None = None, num_candidates: int | None = None) -> EvaluationRow:
        """Return the first row of a policy, with these numbers where they are given."""
        for row in self.rows:
            fits = num_frames in (None, row.num_frames) and num_candidates in (None, row.num_candidates)
            if row.policy == policy and fits:
                return row
        raise KeyError(f"no row of {policy!r} with num_frames={num_frames}, num_candidates={num_candidates}")

    def chosen(self, policy: str, num_frames: int | None = None, num_candidates: int | None = None) -> Indices:
        """Return the stored frames [V, N] that a policy chose, video by video as in `ids`, in time order.

        Of a baseline or NAME+auto [V, T]: those that the (heavy) classifier saw, padded with -1.
        """
        row = self.row(policy, num_frames, num_candidates)
        return self.choices[Cell(policy, row.num_frames, row.num_candidates)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self.facts, "rows": [row.to_dict() for row in self.rows]}

    def table(self) -> str:
        """Return the rows as text."""
        return text_table(self.rows, self.metric)

    def __str__(self) -> str:
        return self.table()

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        # File names may hold lone surrogates, which UTF-8 cannot encode.
        return _write(path, re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text))

    def write_run(self, folder: str | os.PathLike[str]) -> Path:
        """Write `folder`/evaluation.json and videos.jsonl, the choice and the prediction for every video.

        `sosampler report` makes a page of such a folder. Each file is replaced whole, and a videos.jsonl of other rows
        is recognised by its digest.
        """
        target, per_video = Path(folder), self.per_video
        fits = per_video is not None and len(per_video.positions) == len(self.ids)
        if per_video is None or not fits or set(per_video.predictions) != set(self.choices):
            raise InvalidArgument("this evaluation has no results of single videos; write one that so.evaluate made")
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{target}: the folder cannot be made ({error.strerror}); give another") from error
        with replacing(target / VIDEOS_FILE) as temporary:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.writelines(video_lines(self, per_video))
            self.write_json(target / EVALUATION_FILE)
        return target

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        return _write(path, csv_text(self.rows))

    def write_curve(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Draw the main metric against multiply-adds and against decoded frames; a .svg or .png file."""
        from sosampler.figures.curves import write_cost_curve

        if title is None:
            title = f"{self.facts['num_videos']} videos of {self.facts['split']}, {self.facts['teacher']['name']}"
        return write_cost_curve([row.to_dict() for row in self.rows], self.metric, path, title=title)


def _write(path: str | os.PathLike[str], text: str) -> Path:
    target = Path(path)
    if target.is_dir():
        raise InvalidArgument(f"{target} is a folder; give the name of a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    return target


# ---- metrics


class Measuring:
    """Turns the tallies of all cells, also of those that are only compared with, into rows; labels are [V, C]."""

    def __init__(
        self, tallies: Mapping[Cell, Tally], labels: NDArray[np.bool_], metric: str, resamples: Resamples
    ) -> None:
        self._tallies, self._labels, self._metric, self._resamples = tallies, labels, metric, resamples
        self._measured: dict[Cell, dict[str, Measured]] = {}

    def _of(self, cell: Cell) -> dict[str, Measured]:
        if cell not in self._measured:
            probs = self._tallies[cell].probs
            self._measured[cell] = {
                "top1": self._resamples.top1(probs),
                "mAP": self._resamples.mean_average_precision(probs),
            }
        return self._measured[cell]

    def row(self, cell: Cell, spent: Spent, *, against: int | None) -> EvaluationRow:
        """Return the row of a cell; `against`: N of the uniform and semi-optimal choices that it is compared with."""
        tally, measured = self._tallies[cell], self._of(cell)
        gmacs = None
        if spent.sampler_gmacs is not None and spent.classifier_gmacs is not None:
            gmacs = spent.sampler_gmacs + spent.classifier_gmacs
        gap = None
        if tally.gap is not None:
            share = float((tally.gap < _SMALL_GAP).mean())
            gap = {"max": float(tally.gap.max()), "mean": float(tally.gap.mean()), "share_below_1e-3": share}
        return EvaluationRow(
            **vars(cell),
            **vars(spent),
            top1=measured["top1"].value,
            mAP=measured["mAP"].value,
            confidence=float(confidences(tally.probs, self._labels).mean()),
            fidelity=self._fidelity(cell),
            # The best choice for another classifier means nothing for a baseline.
            recovered=None if cell.num_frames is None else self._recovered(cell, against),
            gmacs=gmacs,
            ci95={name: metric.ci95 for name, metric in measured.items() if metric.ci95 is not None},
            versus_uniform=self._versus_uniform(cell, against),
            seconds=round(tally.seconds, 4),
            gap=gap,
            method=" and ".join(sorted(tally.methods)) or None,
        )

    def _other(self, cell: Cell, policy: str, against: int | None) -> Cell | None:
        other = None if against is None else Cell(policy, against, cell.num_candidates)
        return other if other in self._tallies else None

    def _fidelity(self, cell: Cell) -> float | None:
        best = self._other(cell, "optimal", cell.num_frames)
        shares = None if best is None else shared_share(self._tallies[cell].slots, self._tallies[best].slots)
        return None if shares is None else float(shares.mean())

    def _versus_uniform(self, cell: Cell, against: int | None) -> dict[str, Any] | None:
        uniform = self._other(cell, "uniform", against)
        if uniform is None:
            return None
        difference = self._of(cell)[self._metric].minus(self._of(uniform)[self._metric])
        value = difference.value if abs(difference.value) > _ROUNDING else 0.0
        return {"num_frames": against, "metric": self._metric, "difference": value, "ci95": difference.ci95}

    def _recovered(self, cell: Cell, against: int | None) -> float | None:
        uniform, semi_optimal = self._other(cell, "uniform", against), self._other(cell, "semi-optimal", against)
        if uniform is None or semi_optimal is None:
            return None
        low, high = self._of(uniform)[self._metric].value, self._of(semi_optimal)[self._metric].value
        # Without a gain there is no share of it.
        return (self._of(cell)[self._metric].value - low) / (high - low) if high - low > _ROUNDING else None


# ---- text and CSV


def text_table(rows: Sequence[EvaluationRow], metric: str) -> str:
    """Return a table for people: metrics in percent, the main one first and with its 95 % interval.

    N and decoded of a baseline are means over videos, with decimals. Where uniform has another N than the row, that N
    follows the difference.
    """
    other = "mAP" if metric == "top1" else "top1"
    heads = ["policy", "N", "T", _NAMES[metric], "95 %", _NAMES[other], "vs uniform", "95 %"]
    # Without the classifier at hand only the cost of the samplers is known.
    whole = any(row.gmacs is not None for row in rows)
    cost = "gmacs" if whole else "sampler_gmacs"
    some_cost = any(getattr(row, cost) for row in rows)
    heads += ["fidelity %", "recovered %", "GMACs" if whole else "sampler GMACs", "decoded"]
    lines = [heads]
    for row in rows:
        versus, price = row.versus_uniform or {}, getattr(row, cost)
        difference = _percent(versus.get("difference"), sign=True)
        if versus and versus["num_frames"] != row.num_frames:
            difference += f" (N={versus['num_frames']})"
        cells = [row.policy, _frames(row.frames_classified), str(row.num_candidates)]
        cells += [_percent(getattr(row, metric)), _bounds(row.ci95.get(metric)), _percent(getattr(row, other))]
        cells += [difference, _bounds(versus.get("ci95"), sign=True), _percent(row.fidelity), _percent(row.recovered)]
        cells += [f"{price:.2f}" if some_cost and price is not None else "", _frames(row.frames_decoded)]
        lines.append(cells)
    # Empty columns are left out.
    shown = [column for column in range(len(heads)) if any(line[column] for line in lines[1:])]
    widths = [max(len(line[column]) for line in lines) for column in shown]
    text = []
    for line in lines:
        cells = [line[column].rjust(width) for column, width in zip(shown, widths, strict=True)]
        cells[0] = line[shown[0]].ljust(widths[0])
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _percent(value: float | None, *, sign: bool = False) -> str:
    """
    >>> _percent(0.1234), _percent(0.05, sign=True), _percent(-0.0001, sign=True), _percent(None)
    ('12.3', '+5.0', '+0.0', '')
    """
    if value is None:
        return ""
    rounded = round(100 * value, 1) + 0.0  # no -0.0
    return f"{rounded:{'+' if sign else ''}.1f}"


def _frames(count: float) -> str:
    """
    >>> _frames(6), _frames(3.42), _frames(3.0)
    ('6', '3.4', '3.0')
    """
    return str(count) if isinstance(count, int) else f"{count:.1f}"


def _bounds(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    return "" if bounds is None else f"{_percent(bounds[0], sign=sign)}..{_percent(bounds[1], sign=sign)}"


def csv_text(rows: Sequence[EvaluationRow]) -> str:
    """Return one line a row, one column a number; what is unknown is empty."""
    flat = [_flat(row) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: EvaluationRow) -> dict[str, Any]:
    flat = row.to_dict()
    ci95, versus, gap = flat.pop("ci95"), flat.pop("versus_uniform") or {}, flat.pop("gap") or {}
    for name in ("top1", "mAP"):
        flat[f"{name}_low"], flat[f"{name}_high"] = ci95.get(name, (None, None))
    flat["versus_uniform"] = versus.get("difference")
    flat["versus_uniform_low"], flat["versus_uniform_high"] = versus.get("ci95") or (None, None)
    flat["versus_uniform_num_frames"] = versus.get("num_frames")
    return flat | {f"gap_{name}": gap.get(name) for name in ("max", "mean", "share_below_1e-3")}


# ---- videos.jsonl


@dataclass(frozen=True, eq=False)
class Predictions:
    """What the classifier predicts from the clips that one policy chose, video by video; of a baseline its own."""

    predicted: Indices  # [V] the most probable class
    probability: NDArray[np.float64]  # [V] of that class
    confidence: NDArray[np.float64]  # [V] in the labels
    right: NDArray[np.bool_]  # [V] whether the most probable class is a label

    @classmethod
    def of(cls, probabilities: ArrayLike, labels: ArrayLike) -> Predictions:
        """From probabilities [V, C] and labels, multi-hot [V, C]."""
        probs = np.asarray(probabilities, dtype=np.float64)
        predicted = probs.argmax(1)
        probability = np.take_along_axis(probs, predicted[:, None], axis=1)[:, 0]
        return cls(predicted, probability, confidences(probs, labels), top1_hits(probs, labels))


@dataclass(frozen=True, eq=False)
class PerVideo:
    """What `Evaluation.write_run` writes besides the rows."""

    bank: Bank  # the split
    positions: tuple[int, ...]  # of the videos in it
    teacher: Teacher
    predictions: Mapping[Cell, Predictions]
    scores: Mapping[tuple[str, int], NDArray[np.float32]]  # by policy and T: [V, T]; with the padding of short videos


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest by which videos.jsonl names its rows: two files cannot be replaced in one step."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:32]


def video_lines(evaluation: Evaluation, per_video: PerVideo) -> Iterator[str]:
    """Yield the lines of videos.jsonl: a header, then each video."""
    cells = list(per_video.predictions)
    header = {
        "kind": KIND,
        "version": VERSION,
        "evaluation": rows_digest([row.to_dict() for row in evaluation.rows]),
        "videos": len(evaluation.ids),
        "classes": list(per_video.bank.classes),
        "rows": [list(vars(cell).values()) for cell in cells],
    }
    yield _line(header)
    counts = list(dict.fromkeys(cell.num_candidates for cell in cells))
    for index, (name, position) in enumerate(zip(evaluation.ids, per_video.positions, strict=True)):
        values = {
            "id": name,
            "labels": list(per_video.bank[position].labels),
            "candidates": {str(count): _candidates(per_video, index, count) for count in counts},
            "answers": [_prediction(per_video.predictions[cell], index, evaluation.choices[cell]) for cell in cells],
        }
        yield _line(values)


def _candidates(per_video: PerVideo, index: int, count: int) -> dict[str, Any]:
    """Return each real candidate once, in time order."""
    video = per_video.bank[per_video.positions[index]]
    slots = video.uniform(min(count, len(video)))
    probs = per_video.teacher[per_video.positions[index]].frame_probs[slots]
    labels = multi_hot([video.labels] * len(slots), probs.shape[1])
    return {
        "slots": slots.tolist(),
        "positions": _rounded(video.positions[slots]),
        "seconds": [round(float(seconds), _MILLISECONDS) for seconds in video.pts_seconds[slots]],
        "confidence": _rounded(confidences(probs, labels)),  # from each frame alone
        "scores": {
            policy: _rounded(table[index, : len(slots)])
            for (policy, candidates), table in per_video.scores.items()
            if candidates == count
        },
    }


def _prediction(predictions: Predictions, index: int, choices: Indices) -> dict[str, Any]:
    return {
        "predicted": int(predictions.predicted[index]),
        "probability": _short(predictions.probability[index]),
        "confidence": _short(predictions.confidence[index]),
        "right": bool(predictions.right[index]),
        "chosen": [slot for slot in choices[index].tolist() if slot >= 0],  # without the padding
    }


def _rounded(values: NDArray[Any]) -> list[float | None]:
    return [_short(value) for value in values]


def _short(value: float) -> float | None:
    """
    >>> _short(0.123456789), _short(float("nan"))
    (0.12346, None)
    """
    return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"
