"""Accuracy of class probabilities: pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.validation import check_int

if TYPE_CHECKING:
    from torch import Tensor


_MAX_WEIGHTINGS = 256  # at a time: so many that the weights of all rows stay in a processor's cache
_SMALLEST_PROBABILITY = 1e-12


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


# ---- confidence intervals: percentile bootstrap over videos, paired between policies

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

    def __init__(self, all_and_draws: NDArray[np.float64], *, centred: bool = False, lowest: float = 0.0) -> None:
        self.value = float(all_and_draws[0])
        self.draws = all_and_draws[1:]
        self._centred, self._lowest = centred, lowest

    @cached_property
    def ci95(self) -> tuple[float, float] | None:
        if not self._centred or not len(self.draws):
            return interval(self.draws)
        return interval(np.clip(self.draws - self.draws.mean() + self.value, self._lowest, 1.0))

    def minus(self, other: Measured) -> Measured:
        """Return the difference of two metrics on the same resamples."""
        pair = [np.concatenate(([metric.value], metric.draws)) for metric in (self, other)]
        return Measured(pair[0] - pair[1], centred=self._centred or other._centred, lowest=-1.0)


class Resamples:
    """The resamples that all policies share; targets are multi-hot [V, C], no draws give values without intervals."""

    def __init__(self, targets: NDArray[np.bool_], draws: int, seed: int, device: Any = "cpu") -> None:
        import torch

        self._truth = targets
        counts = resample_counts(len(targets), draws, seed)
        # The first column counts every video once: the metric itself.
        table = np.concatenate((np.ones((len(targets), 1), dtype=np.float32), counts), axis=1)
        self._counts: Tensor = torch.from_numpy(table).to(device)
        self._targets: Tensor = torch.from_numpy(targets).to(device)

    def top1(self, probabilities: NDArray[np.float32]) -> Measured:
        """Of probabilities [V, C]."""
        import torch

        hits = torch.from_numpy(top1_hits(probabilities, self._truth)).to(self._counts)
        return Measured(((hits @ self._counts).double() / len(self._truth)).cpu().numpy())

    def mean_average_precision(self, probabilities: NDArray[np.float32]) -> Measured:
        """Of probabilities [V, C]; a resample leaves out the classes it has no video of."""
        import torch

        scores = torch.from_numpy(probabilities).to(self._counts.device)
        return Measured(weighted_average_precision(scores, self._targets, self._counts).cpu().numpy(), centred=True)
