"""Confidence intervals of accuracy: percentile bootstrap over videos, paired between policies.

All policies share the resamples, so that what makes a video hard for all of them cancels in their difference.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.validation import check_int
from sosampler.evaluation.metrics import top1_hits, weighted_average_precision

if TYPE_CHECKING:
    from torch import Tensor


Draws = NDArray[np.float64]

# Random numbers drawn at a time.
_MAX_NUMBERS = 1 << 24


def resample_counts(num_videos: int, draws: int, seed: int) -> NDArray[np.float32]:
    """Return how often each video is in each of `draws` resamples with replacement, [num_videos, draws]."""
    rng = np.random.default_rng(check_int("seed", seed, at_least=0))
    num_videos = check_int("num_videos", num_videos)
    counts = np.empty((num_videos, check_int("draws", draws, at_least=0)), dtype=np.float32)
    size = max(1, _MAX_NUMBERS // num_videos)
    for begin in range(0, draws, size):
        some = min(size, draws - begin)
        drawn = rng.integers(num_videos, size=(some, num_videos)) + np.arange(some)[:, None] * num_videos
        counts[:, begin : begin + some] = (
            np.bincount(drawn.ravel(), minlength=some * num_videos).reshape(some, num_videos).T
        )
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

    def __init__(self, all_and_draws: Draws, *, centred: bool = False, lowest: float = 0.0) -> None:
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
    """The resamples that all policies share.

    Args:
        targets: multi-hot bool [V, C].
        draws: number of resamples; 0 for values without intervals.
        seed: of the resamples.
        device: of the computation.
    """

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
