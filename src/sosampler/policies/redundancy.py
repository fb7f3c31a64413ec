"""Choose frames with high scores that differ from each other, from scores [B, T] and a similarity [B, T, T].

Ranking by score alone takes near-duplicates where there are many candidates. `mask` [B, T] is True for a real
candidate (None: all are).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument

Numbers = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

# What is left of a frame's variance once the chosen ones explain it; below this it is rounding.
_SMALLEST_VARIANCE = 1e-10


def gaussian_kernel(features: ArrayLike, bandwidth: ArrayLike) -> Numbers:
    """Return exp(-|x - y|^2 / (2 bandwidth^2)) between frames: features [..., T, D] -> [..., T, T].

    `bandwidth` is one number, or one per video [...].
    """
    features = _floats(features)
    width = np.asarray(bandwidth, dtype=features.dtype)
    if not ((width > 0) & np.isfinite(width)).all():
        raise InvalidArgument(
            f"bandwidth={bandwidth!r} must be finite numbers above 0, such as median_bandwidth(features)"
        )
    return np.asarray(np.exp(-np.square(distances(features)) / (2 * np.square(width)[..., None, None])))


def distances(features: Numbers) -> Numbers:
    """Return the Euclidean distances between frames: features [..., T, D] -> [..., T, T]."""
    table = np.zeros((*features.shape[:-1], features.shape[-2]), dtype=features.dtype)
    for t in range(features.shape[-2]):
        # Differences, not the product form: that loses near-duplicates to cancellation.
        table[..., t] = np.sqrt(np.square(features - features[..., t : t + 1, :]).sum(-1))
    return table


def median_bandwidth(features: ArrayLike, mask: Mask | None = None, *, pooled: bool = False) -> Numbers:
    """Return the median distance between two frames of a video: features [B, T, D] -> [B], or [] over all if pooled.

    Of an even number of pairs the lower one in the middle. Where more than half of the pairs are equal frames, or
    there is one frame only, it is 1.
    """
    features = _floats(features)
    batch, num_candidates = features.shape[:2]
    real = np.ones((batch, num_candidates), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    pairs = np.triu(real[:, None] & real[:, :, None], 1)
    table = distances(np.where(real[..., None], features, 0))  # padding may hold anything
    medians = [lower_median(table[pairs])] if pooled else [lower_median(table[b][pairs[b]]) for b in range(batch)]
    widths = np.asarray(medians[0] if pooled else medians, dtype=features.dtype)
    return np.where(widths > 0, widths, np.ones_like(widths))


def lower_median(values: Numbers) -> float:
    """Return the median, of an even number the lower one in the middle; 0 of none."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle]) if len(values) else 0.0


def mmr(
    scores: ArrayLike, similarity: ArrayLike, num_frames: int, *, trade_off: float = 0.7, mask: Mask | None = None
) -> Indices:
    """Maximal marginal relevance: choose again and again the candidate with the highest

        trade_off * score - (1 - trade_off) * its greatest similarity to a chosen one,

    the first by score alone. Scores and similarities are compared as they are: bring scores to 0..1 before.
    Positions [B, N] in time order; of equal ones the earlier.
    """
    share = check_float("trade_off", trade_off, at_least=0)
    if share > 1:
        raise InvalidArgument(f"trade_off={trade_off} must be a number between 0 and 1")
    table, alike, left = _checked(scores, similarity, num_frames, mask)
    videos = np.arange(len(table))
    nearest = np.zeros_like(table)
    chosen = np.empty((len(table), num_frames), dtype=np.int64)
    for step in range(num_frames):
        chosen[:, step] = pick = _highest(share * table - (1 - share) * nearest if step else table, left)
        to_pick = alike[videos, pick]
        nearest = np.maximum(nearest, to_pick) if step else to_pick
        left[videos, pick] = False
    return np.sort(chosen, axis=1)


def dpp(
    scores: ArrayLike, similarity: ArrayLike, num_frames: int, *, trade_off: float = 0.7, mask: Mask | None = None
) -> Indices:
    """Greedy mode of a determinantal point process with kernel q_i * similarity_ij * q_j, q = exp(weight * score).

    weight = trade_off / (2 (1 - trade_off)): 0 counts diversity alone, towards 1 scores alone. Each step takes the
    candidate that raises the determinant of the chosen frames' kernel most; a row of its Cholesky factor is all that
    is added (Chen, Zhang and Zhou 2018). `similarity` must be positive semidefinite, as `gaussian_kernel` is.
    Positions [B, N] in time order; of equal ones the earlier.
    """
    share = check_float("trade_off", trade_off, at_least=0)
    if share >= 1:
        raise InvalidArgument(f"trade_off={trade_off} must be a number from 0 to below 1")
    table, alike, left = _checked(scores, similarity, num_frames, mask)
    # log det(q S q) = 2 sum log q + log det S: the factor of S alone never overflows, whatever the scores.
    return np.sort(greedy_dpp(share / (1 - share) * table.astype(np.float64), alike, num_frames, left), axis=1)


def greedy_dpp(quality: Numbers, similarity: Numbers, num_frames: int, left: Mask) -> Indices:
    """Return the candidates [B, N] in the order of choice, by quality [B, T] = 2 log q, among those `left` [B, T]."""
    similarity = similarity.astype(np.float64)
    videos = np.arange(len(quality))
    variance = np.diagonal(similarity, axis1=1, axis2=2).copy()  # of each candidate, given the chosen ones
    factor = np.zeros((*quality.shape, num_frames))  # [B, T, N]
    chosen = np.empty((len(quality), num_frames), dtype=np.int64)
    for step in range(num_frames):
        with np.errstate(invalid="ignore"):  # of masked candidates, which may hold NaN
            value = quality + np.log(np.maximum(variance, _SMALLEST_VARIANCE))
        chosen[:, step] = pick = _highest(value, left)
        row, spread = factor[videos, pick], variance[videos, pick][:, None]
        column = similarity[videos, pick] - (factor * row[:, None]).sum(-1)
        column /= np.sqrt(np.maximum(spread, _SMALLEST_VARIANCE))
        column[spread[:, 0] <= _SMALLEST_VARIANCE] = 0.0  # a duplicate explains nothing new
        factor[..., step] = column
        variance = variance - np.square(column)
        left[videos, pick] = False
    return chosen


def _floats(values: ArrayLike) -> Numbers:
    table = np.asarray(values)
    return table if np.issubdtype(table.dtype, np.floating) else table.astype(np.float64)


def _checked(
    scores: ArrayLike, similarity: ArrayLike, num_frames: int, mask: Mask | None
) -> tuple[Numbers, Numbers, Mask]:
    """Return scores [B, T], similarity [B, T, T] and the candidates that may be chosen, bool [B, T]."""
    table, alike = _floats(scores), _floats(similarity)
    batch, num_candidates = table.shape
    if alike.shape != (batch, num_candidates, num_candidates):
        raise InvalidArgument(
            f"the similarity has shape {list(alike.shape)}; for scores of shape {list(table.shape)} give "
            f"[{batch}, {num_candidates}, {num_candidates}]"
        )
    left = np.ones(table.shape, dtype=bool) if mask is None else np.array(mask, dtype=bool)
    fewest = int(left.sum(1).min()) if batch else num_candidates
    if check_int("num_frames", num_frames) > fewest:
        raise InvalidArgument(
            f"num_frames={num_frames} is more than the {fewest} real candidates of a video; "
            "choose fewer frames or give more candidates"
        )
    return table, alike, left


def _highest(value: Numbers, left: Mask) -> Indices:
    """Return the position [B] of the highest value among those left, of equal ones the first."""
    value = np.where(np.isnan(value), -np.inf, value)
    best = np.where(left, value, -np.inf).max(1, keepdims=True)
    return np.asarray(((value >= best) & left).argmax(1))
