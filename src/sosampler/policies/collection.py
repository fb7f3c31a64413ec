"""Choose a few hundred frames of a whole collection, among up to hundreds of thousands of candidates."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices

FEATURE_DIMS = 256
# Similarities above it are of the same image: features are stored in float16.
_SAME = 1 - 1e-4
# A repeated image counts this much of its quality: below every other one, and the clearer copies first.
_REPEATED = 1e-6


class Chosen(NamedTuple):
    """M candidates in the order of choice."""

    positions: Indices  # [M]
    distances: NDArray[np.float32]  # [M], 0..1: 1 - the greatest cosine to one that was chosen before


def choose_distinct(
    quality: ArrayLike, features: ArrayLike, total: int, *, groups: ArrayLike | None = None, at_least: int = 0
) -> Chosen:
    """Choose again and again the candidate with the highest

        quality * (1 - its greatest cosine to a chosen one),

    the first by quality alone; of equal ones the earlier. Negative cosines count as 0.

    Source: greedy k-center, the core-set choice of active learning (Sener and Savarese, "Active Learning for
    Convolutional Neural Networks: A Core-Set Approach", ICLR 2018). Different: the distance counts by the quality of
    the candidate, because what lies farthest from everything is often a blurred or black frame.

    Each step is one product of all features with those of the chosen one: O(N M D) time, and no memory but the features
    and a few numbers a candidate.

    Args:
        quality: [N], 0..1.
        features: [N, D], of any length.
        total: M; with fewer candidates all are chosen.
        groups: [N] int, the video of each, for `at_least`.
        at_least: so many of each video, or all it has. The choice is free as long as what is left of the budget
            suffices for the videos that lack some, and then among these alone.

    >>> features = [[1, 0], [1, 0.1], [0, 1], [1, 1]]
    >>> choose_distinct([0.9, 1, 0.8, 0.1], features, 3).positions.tolist()
    [1, 2, 3]
    """
    weight = np.asarray(quality, dtype=np.float32)
    rows = unit_rows(features)
    number = min(total, len(weight))
    groups = np.zeros(len(weight), dtype=np.int64) if groups is None else np.asarray(groups)
    sizes = np.bincount(groups, minlength=1) if len(groups) else np.zeros(1, dtype=np.int64)
    missing = np.minimum(sizes, at_least)  # of each video
    nearest = np.zeros(len(weight), dtype=np.float32)  # greatest cosine to a chosen one
    free = np.ones(len(weight), dtype=bool)
    positions, distances = np.empty(number, dtype=np.int64), np.empty(number, dtype=np.float32)
    for step in range(number):
        value = weight * np.maximum(1 - nearest, _REPEATED)
        allowed = free if number - step > missing.sum() else free & (missing > 0)[groups]
        pick = int(np.where(allowed, value, -1).argmax())
        positions[step], distances[step] = pick, 1 - nearest[pick]
        cosines = rows @ rows[pick]
        np.maximum(nearest, np.where(cosines >= _SAME, 1, cosines), out=nearest)
        free[pick] = False
        missing[groups[pick]] = max(0, missing[groups[pick]] - 1)
    return Chosen(positions, distances)


def unit_rows(features: ArrayLike) -> NDArray[np.float32]:
    """Return features [N, D] of length 1; zeros stay zeros."""
    rows = np.asarray(features).astype(np.float32)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(length > 0, length, 1)
    return rows


def reduced(features: NDArray[Any]) -> NDArray[np.float16]:
    """Return features [N, D] of length 1 in at most `FEATURE_DIMS` dimensions, by a fixed random projection.

    The error of a cosine c has a standard deviation of about (1 - c^2) / sqrt(FEATURE_DIMS): 0.06 at 0, 0.03 at 0.7,
    0.006 at 0.95. What repeats stays apart from what does not.
    """
    rows = unit_rows(features)
    if rows.shape[1] > FEATURE_DIMS:
        rows = unit_rows(rows @ _projection(rows.shape[1]))
    return rows.astype(np.float16)


@lru_cache(maxsize=4)
def _projection(dims: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((dims, FEATURE_DIMS), dtype=np.float32)
