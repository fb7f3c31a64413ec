"""Metrics with their intervals, and the result of an evaluation: rows as text, CSV, JSON and a run folder."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices
from sosampler._util.files import replacing, write_text
from sosampler._util.text import csv_cell, escaped
from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from sosampler.bank.bank import Bank
    from sosampler.bank.outputs import Teacher

EVALUATION_FILE, VIDEOS_FILE = "evaluation.json", "videos.jsonl"
CSV_BEGIN = "policy,num_frames,num_candidates,"  # of the table that `write_csv` writes
KIND, VERSION = "sosampler videos", 2
_DIGITS = 5  # of every number in the file but times
_MILLISECONDS = 3  # digits behind the point of times, which may be far from 0
_MAX_WEIGHTINGS = 256  # at a time: so many that the weights of all rows stay in a processor's cache
_SMALLEST_PROBABILITY = 1e-12
_NAMES = {"top1": "top-1 %", "mAP": "mAP %"}


# ---- metrics: pure functions on arrays


def top1_hits(probabilities: ArrayLike, targets: ArrayLike) -> NDArray[np.bool_]:
    """Return which rows [B] have a label (multi-hot [B, C]) as their most probable class [B, C]."""
    scores, truth = np.asarray(probabilities), np.asarray(targets)
    return np.asarray(truth[np.arange(len(truth)), scores.argmax(1)], dtype=bool)


def top1(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """Return the share of rows whose most probable class [B, C] is one of their labels (multi-hot [B, C]).

    >>> top1([[0.9, 0.1], [0.2, 0.8]], [[1, 0], [1, 0]])
    0.5
    """
    return float(top1_hits(probabilities, targets).mean())


def mean_average_precision(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """Return the mean over classes of the average precision of their scores, as scikit-learn defines it.

    Classes without a positive are left out. NaN where none is left.
    """
    from sklearn.metrics import average_precision_score

    scores, truth = np.asarray(probabilities), np.asarray(targets).astype(bool)
    present = truth.any(0)
    if not present.any():
        return float("nan")
    return float(average_precision_score(truth[:, present], scores[:, present], average="macro"))


def weighted_average_precision(probabilities: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return `mean_average_precision` for R weightings of the same rows, [R]; NaN where no positive has any weight.

    `probabilities` and `targets` (multi-hot bool) are [B, C], `weights` [B, R]: how often each row counts.
    """
    import torch

    # All (class, row) entries, class after class and within a class the highest score first. As in scikit-learn equal
    # scores stand behind one threshold; those of positives are the thresholds, [G].
    num_rows, num_classes = targets.shape
    rows = probabilities.argsort(0, descending=True).T.flatten()
    classes = torch.arange(num_classes, device=rows.device).repeat_interleave(num_rows)
    scores, hit = probabilities[rows, classes], targets.bool()[rows, classes]
    first = torch.ones_like(hit)
    first[1:] = (classes[1:] != classes[:-1]) | (scores[1:] != scores[:-1])
    group = first.cumsum(0) - 1
    with_positive = torch.zeros(int(first.sum()), dtype=torch.bool, device=rows.device).index_fill_(0, group[hit], True)
    threshold = (with_positive.cumsum(0) - with_positive.long())[group]  # the highest one that an entry reaches
    class_of = classes[first][with_positive]
    reaching = threshold < len(class_of)
    reaching &= class_of[threshold.clamp_max(max(0, len(class_of) - 1))] == classes
    begin = torch.searchsorted(class_of, class_of)  # the first threshold of the same class

    def sums(entries: Tensor, weights: Tensor) -> Tensor:
        """Weights of the entries of each threshold, [G, r]."""
        offsets = torch.searchsorted(threshold[entries], torch.arange(len(class_of), device=rows.device))
        return torch.nn.functional.embedding_bag(rows[entries], weights, offsets, mode="sum").double()

    def sums_so_far(each: Tensor) -> Tensor:
        """Of all thresholds of the class down to each."""
        total = each.cumsum(0)
        return total - (total - each)[begin]

    parts = []
    for part in weights.to(torch.float32).split(_MAX_WEIGHTINGS, dim=1):
        part = part.contiguous()
        right = sums(hit, part)
        precision = sums_so_far(right) / sums_so_far(sums(reaching, part)).clamp_min(1e-9)
        totals = right.new_zeros(2, num_classes, part.shape[1])
        totals[0].index_add_(0, class_of, right * precision)
        totals[1].index_add_(0, class_of, right)
        parts.append((totals[0] / totals[1]).nanmean(0))  # a class without positives is 0 / 0
    return torch.cat(parts)


def confidences(probabilities: ArrayLike, targets: ArrayLike) -> NDArray[np.float64]:
    """Return the confidence of each row in its labels: the geometric mean of their probabilities, [B].

    >>> confidences([[0.9, 0.4], [0.2, 0.8]], [[1, 1], [1, 0]]).round(3).tolist()
    [0.6, 0.2]
    """
    logs = np.log(np.maximum(np.asarray(probabilities, dtype=np.float64), _SMALLEST_PROBABILITY))
    truth = np.asarray(targets).astype(bool)
    return np.asarray(np.exp((logs * truth).sum(1) / truth.sum(1)))


def calibration_error(probabilities: ArrayLike, targets: ArrayLike, num_bins: int = 15) -> float:
    """Return the expected calibration error (ECE) of the probability of each row's most probable class.

    Rows are put into `num_bins` bins of equal width by that probability. The error is the mean over rows of the
    distance between the share of hits and the mean probability of their bin.

    >>> round(calibration_error([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [[1, 0], [0, 1], [0, 1]]), 3)
    0.4
    """
    scores = np.asarray(probabilities, dtype=np.float64)
    highest, hits = scores.max(1), top1_hits(scores, targets)
    bins = np.minimum((highest * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.bincount(bins, hits, num_bins) - np.bincount(bins, highest, num_bins)
    return float(np.abs(gaps).sum() / len(scores))


def shared_share(chosen: ArrayLike, best: ArrayLike) -> NDArray[np.float64]:
    """Return the fidelity of each row: the share of the best set [B, N] that was chosen [B, N], as sets.

    >>> shared_share([[0, 1, 2], [3, 3, 4]], [[0, 2, 5], [3, 4, 4]]).round(2).tolist()
    [0.67, 1.0]
    """
    ours, theirs = np.asarray(chosen), np.asarray(best)
    first = np.ones(theirs.shape, dtype=bool)  # rows are sorted, so a repeat follows its like
    first[:, 1:] = theirs[:, 1:] != theirs[:, :-1]
    inside = (theirs[:, :, None] == ours[:, None, :]).any(2)
    return np.asarray((inside & first).sum(1) / first.sum(1))


def multi_hot(labels: Sequence[Sequence[int]], num_classes: int) -> NDArray[np.bool_]:
    """Return the labels of each row as a table [B, C]."""
    table = np.zeros((len(labels), num_classes), dtype=bool)
    for row, positives in enumerate(labels):
        table[row, list(positives)] = True
    return table


# ---- confidence intervals: percentile bootstrap over videos or groups, paired between policies
#
# Videos that share pictures are not independent, and a video is made of several: no resampling of pictures gives whole
# videos. Weights for a video from random weights of its pictures do not help either: their mean carries 1 / k^2 of what
# k pictures do to the variance, their product makes the video's own noise 2^k times as large. So videos are resampled
# as always, and the spread is stretched by what shared pictures add to the variance (Cameron, Gelbach and Miller 2011,
# for clusters that overlap): with the influence r_i of each video on the metric,
#
#     Var = sum_i r_i^2 + sum over pictures p of sum_{i != j that show p} r_i r_j.

_MAX_NUMBERS = 1 << 24  # random ones that are drawn at a time


def resample_counts(num_videos: int, draws: int, seed: int) -> NDArray[np.float32]:
    """Return how often each video is in each of `draws` resamples with replacement, [num_videos, draws]."""
    rng = np.random.default_rng(check_int("seed", seed, at_least=0))
    num_videos = check_int("num_videos", num_videos)
    counts = np.empty((num_videos, check_int("draws", draws, at_least=0)), dtype=np.float32)
    size = max(1, _MAX_NUMBERS // num_videos)
    for begin in range(0, draws, size):
        some = min(size, draws - begin)
        drawn = rng.integers(num_videos, size=(some, num_videos)) + np.arange(some)[:, None] * num_videos
        times = np.bincount(drawn.ravel(), minlength=some * num_videos)
        counts[:, begin : begin + some] = times.reshape(some, num_videos).T
    return counts


def interval(draws: ArrayLike) -> tuple[float, float] | None:
    """Return the middle 95 % of the resampled values; None where there are none.

    >>> interval(range(101))
    (2.5, 97.5)
    """
    values = np.asarray(draws, dtype=np.float64)
    if not values.size:
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


class Measured:
    """A metric: its value on all videos, and on each resample.

    A resample holds a video several times, and copies of a positive lift each other in the ranking: average precision
    comes out higher on resamples than it is (by 0.7 points with 15 videos a class). `centred` moves the interval by the
    mean difference, without which it holds the truth too rarely.
    """

    def __init__(
        self,
        all_and_draws: NDArray[np.float64],
        *,
        centred: bool = False,
        lowest: float = 0.0,
        influence: NDArray[np.float64] | None = None,
        shared: SharedSources | None = None,
    ) -> None:
        self.value = float(all_and_draws[0])
        self.draws = all_and_draws[1:]
        self._centred, self._lowest = centred, lowest
        self._influence, self._shared = influence, shared  # [V], derivative by the weight of each video

    @cached_property
    def ci95(self) -> tuple[float, float] | None:
        stretch = 1.0
        if self._shared is not None and self._influence is not None:
            stretch = self._shared.stretch(self._influence)
        if not len(self.draws) or not (self._centred or stretch > 1):
            return interval(self.draws)
        middle = self.draws.mean() if self._centred else self.value
        return interval(np.clip(self.value + stretch * (self.draws - middle), self._lowest, 1.0))

    def minus(self, other: Measured) -> Measured:
        """Return the difference of two metrics on the same resamples."""
        pair = [np.concatenate(([metric.value], metric.draws)) for metric in (self, other)]
        influence = None
        if self._influence is not None and other._influence is not None:
            influence = self._influence - other._influence
        centred = self._centred or other._centred
        return Measured(pair[0] - pair[1], centred=centred, lowest=-1.0, influence=influence, shared=self._shared)


class SharedSources:
    """Which videos show the same pictures, or other sources; [V] lists of names, and targets, multi-hot [V, C].

    Reels that share a picture are mostly of one class. Differences between classes would look like effects of pictures,
    so influences are centred within each set of labels.
    """

    def __init__(self, sources: Sequence[Iterable[Hashable]], targets: NDArray[np.bool_]) -> None:
        number: dict[Hashable, int] = {}
        # Each name once and in order, so that sums do not depend on a hash.
        listed = [(row, name) for row, names in enumerate(sources) for name in dict.fromkeys(names)]
        pairs = [(row, number.setdefault(name, len(number))) for row, name in listed]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        self._rows, self._names = table.T  # of every (video, source) pair
        self._classes = np.unique(targets, axis=0, return_inverse=True)[1].reshape(-1)  # [V], set of labels
        self._sizes = np.bincount(self._classes)
        # Ordered pairs of videos of one class that share a source, by class.
        keys, times = np.unique(self._names * len(self._sizes) + self._classes[self._rows], return_counts=True)
        self._pairs = np.bincount(keys % len(self._sizes), times * (times - 1), len(self._sizes))

    def __bool__(self) -> bool:
        """Whether any source is in two videos."""
        return bool((np.bincount(self._names) > 1).any()) if len(self._names) else False

    @cached_property
    def overlapping(self) -> bool:
        """Whether a video shares several sources with others, so that videos do not fall apart into groups."""
        shared = np.bincount(self._names) > 1
        return bool((np.bincount(self._rows[shared[self._names]]) > 1).any())

    def spread_of_classes(self, influence: NDArray[np.float64]) -> float:
        """Return the standard deviation of the sum of influences [V] that are 0 on the mean, if classes are drawn."""
        return float(np.sqrt(np.square(np.bincount(self._classes, influence)).sum()))

    def stretch(self, influence: NDArray[np.float64]) -> float:
        """Return by how much the standard deviation grows, 1 or more, with the influence of each video [V]."""
        alone = float(np.square(influence).sum())
        if not alone > 0:
            return 1.0
        centred = influence - (np.bincount(self._classes, influence) / self._sizes)[self._classes]
        of_pairs = centred[self._rows]
        sums, squares = np.bincount(self._names, of_pairs), np.bincount(self._names, np.square(of_pairs))
        # The mean of a class takes 1 / size of the variance from every product of two of its videos.
        spread = np.bincount(self._classes, np.square(centred)) / np.maximum(self._sizes - 1, 1)
        between = float((np.square(sums) - squares).sum() + (self._pairs * spread / self._sizes).sum())
        return float(np.sqrt(max(1.0, 1.0 + between / alone)))


class Resamples:
    """The resamples that all policies share; targets are multi-hot [V, C], no draws give values without intervals.

    Args:
        groups: [V]; where several videos are of one group, groups are resampled instead of videos.
        sources: [V] of the pictures or videos that each is made of. Where some are shared, intervals are wider, as
            above; a group then counts as one more source.
    """

    def __init__(
        self,
        targets: NDArray[np.bool_],
        draws: int,
        seed: int,
        device: Any = "cpu",
        *,
        groups: Sequence[Hashable] | None = None,
        sources: Sequence[Iterable[Hashable]] | None = None,
    ) -> None:
        import torch

        self._truth = targets
        self.units = "videos"
        self._shared: SharedSources | None = None
        number: dict[Hashable, int] = {}
        group_of = [number.setdefault(group, len(number)) for group in groups or range(len(targets))]  # [V]
        if sources is not None:
            with_group = [[*names, ("group", group)] for names, group in zip(sources, group_of, strict=True)]
            self._shared = SharedSources(with_group, targets) or None
        if self._shared is not None:
            self.units = "videos and pictures"
            counts = resample_counts(len(targets), draws, seed)
        else:
            self.units = "groups" if len(number) < len(targets) else "videos"
            counts = resample_counts(len(number), draws, seed)[group_of]
        # The first column counts every video once: the metric itself.
        table = np.concatenate((np.ones((len(targets), 1), dtype=np.float32), counts), axis=1)
        self._counts: Tensor = torch.from_numpy(table).to(device)
        self._targets: Tensor = torch.from_numpy(targets).to(device)

    def top1(self, probabilities: NDArray[np.float32]) -> Measured:
        """Of probabilities [V, C]."""
        import torch

        right = top1_hits(probabilities, self._truth)
        hits = torch.from_numpy(right).to(self._counts)
        shares = ((hits @ self._counts).double() / self._counts.sum(0).double()).cpu().numpy()
        return Measured(shares, influence=(right - right.mean()) / len(right), shared=self._shared)

    def mean_average_precision(self, probabilities: NDArray[np.float32]) -> Measured:
        """Of probabilities [V, C]; a resample leaves out the classes it has no video of."""
        import torch

        scores = torch.from_numpy(probabilities).to(self._counts.device)
        values = weighted_average_precision(scores, self._targets, self._counts).cpu().numpy()
        influence = None
        if self._shared is not None:
            weights = self._counts[:, :1].clone().requires_grad_()
            with torch.enable_grad():
                precision = weighted_average_precision(scores, self._targets, weights)
            (slope,) = torch.autograd.grad(precision.sum(), weights)
            influence = slope[:, 0].double().cpu().numpy()
        return Measured(values, centred=True, influence=influence, shared=self._shared)


# ---- rows


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
    other_gmacs: dict[str, float] | None = None


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
    other_gmacs: dict[str, float] | None = None  # the whole cost of a baseline counted otherwise, by name
    # "mean", "weighted", "fused" or "probed" of the chosen frames; "sampler": its class head's; None for baselines
    answer: str | None = None
    ece: float | None = None  # expected calibration error of the answers, 15 bins of equal width

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `other_gmacs` only where there are any."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # lists for tuples
        if values["other_gmacs"] is None:
            del values["other_gmacs"]
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
    write_text(target, text)
    return target


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
    heads += ["fidelity %", "recovered %", "GMACs" if whole else "sampler GMACs", "decoded", "answer", "ECE %"]
    # Both columns are of interest where rows differ in their answers.
    answers = any(row.answer not in (None, "mean") for row in rows)
    lines = [heads]
    for row in rows:
        versus, price = row.versus_uniform or {}, getattr(row, cost)
        difference = _percent(versus.get("difference"), sign=True)
        if versus and versus["num_frames"] != row.num_frames:
            difference += f" (N={versus['num_frames']})"
        cells = [escaped(row.policy), _frames(row.frames_classified), str(row.num_candidates)]
        cells += [_percent(getattr(row, metric)), _bounds(row.ci95.get(metric)), _percent(getattr(row, other))]
        cells += [difference, _bounds(versus.get("ci95"), sign=True), _percent(row.fidelity), _percent(row.recovered)]
        cells += [f"{price:.2f}" if some_cost and price is not None else "", _frames(row.frames_decoded)]
        cells += [row.answer or "", _percent(row.ece)] if answers else ["", ""]
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
    flat = [{name: csv_cell(value) for name, value in _flat(row).items()} for row in rows]
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
