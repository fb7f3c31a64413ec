"""From what the classifier said about chosen clips to the rows of an evaluation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sosampler.errors import InvalidArgument
from sosampler.evaluation.bootstrap import Measured, Resamples
from sosampler.evaluation.metrics import confidences, shared_share
from sosampler.files import replacing
from sosampler.video.timeline import Indices

if TYPE_CHECKING:
    from sosampler.evaluation.per_video import PerVideo

# Gaps of the optimal policy below this share of probability do not matter.
_SMALL_GAP = 1e-3
# Sums on a GPU have no fixed order, so that equal clips may differ by rounding; no metric is finer than this.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Cell:
    """One policy with N of T."""

    policy: str
    num_frames: int | None  # None: a system, or a sampler with num_frames="auto", which decide for themselves
    num_candidates: int

    @property
    def wanted(self) -> int:
        """N of a policy."""
        assert self.num_frames is not None, "who decides for itself is not told how many frames to look at"
        return self.num_frames


@dataclass(frozen=True)
class Spent:
    """What a policy takes for a video; of who decides on N the means over videos."""

    frames_classified: float
    frames_decoded: float
    sampler_gmacs: float | None
    classifier_gmacs: float | None


@dataclass(eq=False)
class Tally:
    """What came out of one cell, video by video."""

    probs: NDArray[np.float32]  # [V, C] of the chosen clips
    # [V, N] stored frames that were chosen, in time order; of who decides on N [V, T], filled up with -1
    slots: Indices
    gap: NDArray[np.float64] | None = None  # [V]
    methods: set[str] = field(default_factory=set)
    seconds: float = 0.0

    @classmethod
    def empty(cls, num_videos: int, num_classes: int, num_frames: int) -> Tally:
        return cls(
            np.zeros((num_videos, num_classes), dtype=np.float32), np.zeros((num_videos, num_frames), dtype=np.int64)
        )


@dataclass(frozen=True)
class EvaluationRow:
    """One policy with N of T, or one system. Metrics are shares in 0..1; what could not be measured is None."""

    policy: str
    num_frames: int | None  # N; None for a system, or for NAME+auto, which decide for themselves
    num_candidates: int
    top1: float
    mAP: float
    confidence: float  # mean over videos of the clip's confidence in its labels
    fidelity: float | None  # mean share of the optimal set that was chosen
    recovered: float | None  # share of the semi-optimal policy's gain over uniform, in the main metric
    gmacs: float | None  # sampler_gmacs + classifier_gmacs
    # Of scoring T candidates; of a system its light network and own layers; None for oracles, which know the answers.
    sampler_gmacs: float | None
    # Of a clip of N; of a system the heavy network; None where the classifier is not at hand.
    classifier_gmacs: float | None
    frames_classified: float  # N; of who decides on it those that went through the heavy network, mean over videos
    frames_decoded: float  # of a system those that any network saw, mean over videos
    ci95: dict[str, tuple[float, float]]  # of top1 and mAP
    # num_frames of uniform (of who decides on it its mean rounded up), metric, difference, ci95; paired by video
    versus_uniform: dict[str, Any] | None
    seconds: float  # scoring, choosing and judging all videos
    gap: dict[str, float] | None = None  # of the optimal policy: what its search may have missed, in probability
    method: str | None = None  # how the optimal policy searched

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        told = asdict(self)
        told["ci95"] = {name: list(bounds) for name, bounds in self.ci95.items()}
        if self.versus_uniform is not None and self.versus_uniform["ci95"] is not None:
            told["versus_uniform"]["ci95"] = list(self.versus_uniform["ci95"])
        return told


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Rows, what they were measured on, and which frames each policy chose."""

    rows: tuple[EvaluationRow, ...]
    facts: dict[str, Any]  # bank, split, teacher, seed, versions, notes, ...
    ids: tuple[str, ...]  # of the videos
    choices: Mapping[Cell, Indices]  # [V, N] stored frames; of who decides on N [V, T], filled up with -1
    per_video: PerVideo | None = field(default=None, repr=False)

    @property
    def metric(self) -> str:
        """The main metric: "mAP" where videos have several labels, else "top1"."""
        return str(self.facts["metric"])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.facts["notes"])

    def row(self, policy: str, num_frames: int | None = None, num_candidates: int | None = None) -> EvaluationRow:
        """The first row of a policy, with these numbers where they are given."""
        for row in self.rows:
            fits = num_frames in (None, row.num_frames) and num_candidates in (None, row.num_candidates)
            if row.policy == policy and fits:
                return row
        raise KeyError(f"no row of {policy!r} with num_frames={num_frames}, num_candidates={num_candidates}")

    def chosen(self, policy: str, num_frames: int | None = None, num_candidates: int | None = None) -> Indices:
        """Stored frames [V, N] that a policy chose, video by video as in `ids`, in time order.

        Of who decides on N [V, T]: those that went through the heavy network, and behind them -1, because it sees more
        of one video than of another.
        """
        row = self.row(policy, num_frames, num_candidates)
        return self.choices[Cell(policy, row.num_frames, row.num_candidates)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.facts, "rows": [row.to_dict() for row in self.rows]}

    def table(self) -> str:
        """As text."""
        from sosampler.evaluation.table import text_table

        return text_table(self.rows, self.metric)

    def __str__(self) -> str:
        return self.table()

    def write_json(self, path: str | os.PathLike[str]) -> Path:
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        # Names of files may hold halves of letters, which UTF-8 has not.
        return _write(path, re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text))

    def write_run(self, folder: str | os.PathLike[str]) -> Path:
        """Write `folder`/evaluation.json and videos.jsonl, which says of every video what was chosen and answered.

        `sosampler report` makes a page of such a folder. Each file is replaced whole, and a videos.jsonl of other rows
        is told from one of these.
        """
        from sosampler.evaluation.per_video import EVALUATION_FILE, VIDEOS_FILE, video_lines

        target, kept = Path(folder), self.per_video
        if kept is None or set(kept.answers) != set(self.choices) or len(kept.places) != len(self.ids):
            raise InvalidArgument("nothing is known of the single videos of this evaluation; write one of so.evaluate")
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{target}: the folder cannot be made ({error.strerror}); give another") from error
        with replacing(target / VIDEOS_FILE) as temporary:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.writelines(video_lines(self, kept))
            self.write_json(target / EVALUATION_FILE)
        return target

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        from sosampler.evaluation.table import csv_text

        return _write(path, csv_text(self.rows))

    def write_curve(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Draw the main metric against multiply-adds and against decoded frames; a .svg or .png file."""
        from sosampler.report.cost_curve import write_cost_curve

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


class Measuring:
    """Turns tallies into rows.

    Args:
        tallies: of all cells, also of those that are only measured against.
        labels: multi-hot bool [V, C].
        metric: the main one, "top1" or "mAP".
        resamples: shared by all cells.
    """

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
        """The row of a cell; `against`: N of the uniform and semi-optimal choices that it is compared with."""
        tally, measured = self._tallies[cell], self._of(cell)
        both = spent.sampler_gmacs is not None and spent.classifier_gmacs is not None
        gap = tally.gap
        return EvaluationRow(
            policy=cell.policy,
            num_frames=cell.num_frames,
            num_candidates=cell.num_candidates,
            top1=measured["top1"].value,
            mAP=measured["mAP"].value,
            confidence=float(confidences(tally.probs, self._labels).mean()),
            fidelity=self._fidelity(cell),
            # How near a system comes to the best choice for another classifier says nothing about it.
            recovered=None if cell.num_frames is None else self._recovered(cell, against),
            gmacs=(spent.sampler_gmacs or 0.0) + (spent.classifier_gmacs or 0.0) if both else None,
            sampler_gmacs=spent.sampler_gmacs,
            classifier_gmacs=spent.classifier_gmacs,
            frames_classified=spent.frames_classified,
            frames_decoded=spent.frames_decoded,
            ci95={name: one.ci95 for name, one in measured.items() if one.ci95 is not None},
            versus_uniform=self._versus_uniform(cell, against),
            seconds=round(tally.seconds, 4),
            gap=None
            if gap is None
            else {
                "max": float(gap.max()),
                "mean": float(gap.mean()),
                "share_below_1e-3": float((gap < _SMALL_GAP).mean()),
            },
            method=" and ".join(sorted(tally.methods)) or None,
        )

    def _other(self, cell: Cell, policy: str, against: int | None) -> Cell | None:
        other = None if against is None else Cell(policy, against, cell.num_candidates)
        return other if other in self._tallies else None

    def _fidelity(self, cell: Cell) -> float | None:
        best = self._other(cell, "optimal", cell.num_frames)
        if best is None:
            return None
        return float(shared_share(self._tallies[cell].slots, self._tallies[best].slots).mean())

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
        # Without a gain there is nothing of which a share could be recovered.
        return (self._of(cell)[self._metric].value - low) / (high - low) if high - low > _ROUNDING else None
