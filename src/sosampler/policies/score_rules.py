"""Choose N of T candidates from their scores, other than by the N highest.

The N highest scores are often neighbours. These methods trade some score for coverage of the video. All take scores
[T] of any scale, higher is better, and return N distinct positions in time order; of equal candidates the earlier goes
first. NaN counts as the lowest score. Policies call them with valid arguments, so they check none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices
from sosampler.policies.base import top

Scores = NDArray[np.float64]


def difference_peaks(change_scores: ArrayLike, num_frames: int, *, spacing: int | None = None) -> Indices:
    """Choose where the image changes: local maxima of the change first, then the largest changes left.

    Source: keyframe extractors such as Katna and video-keyframe-detector, which keep local maxima of the difference
    between frames. Taken: maxima come before larger values on the slope of another maximum. Different: they smooth the
    curve or threshold it and return as many frames as pass; here N is given, so maxima are ranked and others fill up
    the rest.

    A maximum is a run of equal scores with lower ones, or nothing, on either side; its first frame represents it.
    Maxima are ranked by how far they rise above the valley that parts them from a higher one; outside of the video
    everything is as low as its lowest score. Frames within `spacing` of a chosen one wait until nothing else is left; a
    quarter of T / N if not given.

    >>> difference_peaks([0, 9, 8, 0, 5, 0, 0, 3], 3).tolist()
    [1, 4, 7]
    """
    scores = _without_nan(change_scores)
    window = len(scores) // (4 * num_frames) if spacing is None else spacing
    peaks, prominences = _peaks(_finite(scores))
    order = np.concatenate([peaks[np.argsort(-prominences, kind="stable")], np.argsort(-scores, kind="stable")])
    return _spaced(order, len(scores), num_frames, window)


def temporal_nms(scores: ArrayLike, num_frames: int, *, window: int | None = None) -> Indices:
    """Non-maximum suppression in time: best first, and its neighbours are out.

    Source: the greedy suppression of object detectors, in the one-dimensional form used for moments of a video.
    Different: frames have no extent, so what overlaps is what lies within `window` positions; and when every candidate
    is chosen or suppressed before there are N, the best suppressed ones fill up. The window, on either side, is the
    widest that can never run out of candidates if not given; 0 is the plain N best.

    >>> temporal_nms([1, 9, 8, 2, 7, 3], 2, window=1).tolist(), temporal_nms([1, 9, 8, 2, 7, 3], 3, window=5).tolist()
    ([1, 4], [1, 2, 4])
    """
    scores = _without_nan(scores)
    if window is None:
        # N - 1 chosen ones block at most 2 window + 1 positions each, and one must be left for the last.
        window = 0 if num_frames == 1 else max(0, ((len(scores) - 1) // (num_frames - 1) - 1) // 2)
    return _spaced(np.argsort(-scores, kind="stable"), len(scores), num_frames, window)


def aks(scores: ArrayLike, num_frames: int, *, threshold: float = 0.8, max_depth: int = 5) -> Indices:
    """Adaptive keyframe sampling: take the best of a segment if they stand out, else split it and its budget in two.

    Source: Tang et al., "Adaptive Keyframe Sampling for Long Video Understanding", CVPR 2025 (AKS). Taken: the
    recursion with its test, mean of the n best minus mean of all at or above `threshold`, its end at `max_depth`,
    and both defaults. Different: scores are of any scale here, so they are brought to 0..1 over the video before they
    are tested; where a budget is odd, the half whose next best frame is better gets the extra one, so that N frames
    are returned for every N; a segment never gets more budget than it has frames. A threshold of 0 always takes (the
    plain N best), above 1 always splits.

    >>> aks([9, 8, 7, 0, 1, 2, 3, 4], 4, threshold=0).tolist(), aks([9, 8, 7, 0, 1, 2, 3, 4], 4, max_depth=1).tolist()
    ([0, 1, 2, 7], [0, 1, 6, 7])
    """
    scores = _without_nan(scores)
    if threshold == 0:  # checked here, because a difference of rounded means may fall below 0
        return top(scores, num_frames)
    unit = _in_unit(scores)

    def take(begin: int, end: int, budget: int, depth: int) -> list[Indices]:
        if budget == 0:
            return []
        if budget == end - begin:
            return [np.arange(begin, end)]
        best = begin + top(scores[begin:end], budget)
        if depth == max_depth or unit[best].mean() - unit[begin:end].mean() >= threshold:
            return [best]
        middle = (begin + end) // 2
        first = _budget_of_first_half(scores[begin:middle], scores[middle:end], budget)
        return take(begin, middle, first, depth + 1) + take(middle, end, budget - first, depth + 1)

    return np.concatenate(take(0, len(scores), num_frames, 0)).astype(np.int64)


def inverse_transform(scores: ArrayLike, num_frames: int, *, power: float = 3.0) -> Indices:
    """Frames at equal steps of the scores' cumulative sum: dense where scores are high, sparse elsewhere.

    Source: Liu et al., "BOLT: Boost Large Vision-Language Model Without Training for Long-form Video Understanding",
    CVPR 2025. Taken: scores brought to 0..1 over the video, sharpened by a power (3 or 2.5 there), summed up over time,
    and read off at equal quantiles. Different: the quantiles are the middles of N equal parts instead of their ends,
    so that equal scores give the uniform policy; and no frame comes twice. One that holds a whole part or more is
    taken once, and what is left of the budget is spread over the others likewise (systematic sampling with certain
    units). Where fewer than N candidates have any weight, the rest of the budget is spread evenly in time.

    A power of 0 is the uniform policy, a large one tends to the N best.

    >>> inverse_transform([1, 1, 1, 1, 1, 1], 3).tolist(), inverse_transform([0, 0, 0, 5, 6, 5, 6, 5], 3).tolist()
    ([1, 3, 5], [4, 5, 6])
    """
    return _at_equal_steps(_in_unit(_without_nan(scores)) ** power, num_frames)


def motion_uniform(change_scores: ArrayLike, num_frames: int, *, power: float = 0.5) -> Indices:
    """Frames at equal steps of the cumulative motion: between two of them about as much happens as between any others.

    Source: Zhi et al., "MGSampler: An Explainable Sampling Strategy for Video Action Recognition", ICCV 2021. Taken:
    the difference between neighbouring frames as the motion, smoothed by a power (0.5 there), summed up over time and
    read off at the middles of N equal parts. Different: among T candidates instead of all frames; their difference is
    that of `change_scores` [T], none below 0; no frame comes twice, as in `inverse_transform`. A still video is read
    off evenly in time.

    A power of 0 is the uniform policy, 1 the plain sum of the differences.

    >>> motion_uniform([1, 1, 1, 9, 9, 1, 1, 1], 4).tolist(), motion_uniform([0, 0, 0, 0, 0, 0], 3).tolist()
    ([1, 3, 4, 6], [1, 3, 5])
    """
    motion = np.asarray(change_scores, dtype=np.float64)
    # By the greatest: equal steps then have a weight of exactly 1, and rounding cannot move them.
    return _at_equal_steps((motion / (motion.max() or 1.0)) ** power, num_frames)


# Methods that choose from the scores of another policy, by the suffix of its name.
METHODS: dict[str, Callable[[Scores, int], Indices]] = {"aks": aks, "its": inverse_transform, "nms": temporal_nms}


def _without_nan(scores: ArrayLike) -> Scores:
    """Return the scores [T] with NaN as the lowest there is."""
    return np.where(np.isnan(scores), -np.inf, np.asarray(scores, dtype=np.float64))


def _finite(scores: Scores) -> Scores:
    """Return infinite scores as the lowest or highest finite one; zeros where there is none."""
    known = scores[np.isfinite(scores)]
    return np.clip(scores, known.min(), known.max()) if len(known) else np.zeros_like(scores)


def _in_unit(scores: Scores) -> Scores:
    """Return the scores from 0, the lowest, to 1, the highest; all 1 where they do not differ."""
    half = _finite(scores) / 2  # the range of halves cannot overflow
    span = half.max() - half.min()
    return (half - half.min()) / span if span > 0 else np.ones_like(half)


def _spaced(order: Indices, num_candidates: int, num_frames: int, window: int) -> Indices:
    """Return the first N of an order that are more than `window` apart; then the first of the others."""
    chosen = np.zeros(num_candidates, dtype=bool)
    blocked = np.zeros(num_candidates, dtype=bool)
    left = num_frames
    for out in (blocked, chosen):
        for t in order.tolist():
            if left and not out[t]:
                chosen[t] = True
                blocked[max(0, t - window) : t + window + 1] = True
                left -= 1
    return np.flatnonzero(chosen).astype(np.int64)


def _peaks(scores: Scores) -> tuple[Indices, Scores]:
    """Return the first positions of the local maxima, in time order, and their prominences. Equal scores have none."""
    starts = np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))  # of the runs of equal scores
    padded = np.concatenate([[-np.inf], scores[starts], [-np.inf]])
    is_peak = (padded[1:-1] > padded[:-2]) & (padded[1:-1] > padded[2:])
    peaks = starts[is_peak & (len(starts) > 1)]
    low = scores.min()
    valleys = [max(_valley(scores[t::-1], low), _valley(scores[t:], low)) for t in peaks.tolist()]
    # Halves, because a difference of finite numbers may overflow.
    return peaks, scores[peaks] / 2 - np.array(valleys) / 2


def _valley(side: Scores, low: float) -> float:
    """Return the lowest score between a maximum, which is the first, and a higher one; `low` where none is higher."""
    higher = side > side[0]
    return float(side[: int(higher.argmax())].min()) if higher.any() else low


def _budget_of_first_half(first: Scores, second: Scores, budget: int) -> int:
    """Return half the budget; an odd frame goes where the next best is better, of equal ones to the first half."""
    half = budget // 2
    if budget % 2 == 0:
        return half
    if half == len(first) or half == len(second):
        return half if half == len(first) else half + 1
    return half + bool(np.sort(first)[-1 - half] >= np.sort(second)[-1 - half])


def _at_equal_steps(weights: Scores, num_frames: int) -> Indices:
    """Return N distinct positions at equal steps of the cumulative sum of the weights [T], none of which is below 0.

    One that holds a whole step or more is taken once; the rest of N is spread over the others likewise, and evenly in
    time where they have no weight.
    """
    chosen = np.zeros(len(weights), dtype=bool)
    while left := num_frames - int(chosen.sum()):
        rest = np.flatnonzero(~chosen)
        share = weights[rest] if weights[rest].any() else np.ones(len(rest))
        outright = share * left >= share.sum()
        chosen[rest[outright] if outright.any() else rest[_at_quantiles(share, left)]] = True
    return np.flatnonzero(chosen).astype(np.int64)


def _at_quantiles(share: Scores, count: int) -> Indices:
    """Return the positions at the middles of `count` equal parts of the sum; none has a whole part, or comes twice."""
    reached = np.cumsum(share)
    steps = np.arange(count)
    positions: Indices = np.searchsorted(reached, (2 * steps + 1) * reached[-1] / (2 * count), side="right")
    positions = np.maximum.accumulate(positions - steps) + steps  # should rounding make two equal, the later moves on
    last = len(share) - count + steps
    return np.where(positions < last, positions, last)


# ---- high scores that differ from each other, from scores [B, T] and a similarity [B, T, T]

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
    return np.asarray(np.exp(-np.square(_distances(features)) / (2 * np.square(width)[..., None, None])))


def squared_distances(features: Numbers) -> Numbers:
    """Return the squared Euclidean distances between frames: features [..., T, D] -> [..., T, T]."""
    table = np.zeros((*features.shape[:-1], features.shape[-2]), dtype=features.dtype)
    for t in range(features.shape[-2]):
        # Differences, not the product form: that loses near-duplicates to cancellation.
        table[..., t] = np.square(features - features[..., t : t + 1, :]).sum(-1)
    return table


def _distances(features: Numbers) -> Numbers:
    """Return the Euclidean distances between frames: features [..., T, D] -> [..., T, T]."""
    return np.asarray(np.sqrt(squared_distances(features)))


def median_bandwidth(features: ArrayLike, mask: Mask | None = None) -> Numbers:
    """Return the median distance between two frames of a video: features [B, T, D] -> [B].

    Of an even number of pairs the lower one in the middle. Where more than half of the pairs are equal frames, or
    there is one frame only, it is 1.
    """
    features = _floats(features)
    batch, num_candidates = features.shape[:2]
    real = np.ones((batch, num_candidates), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    pairs = np.triu(real[:, None] & real[:, :, None], 1)
    table = _distances(np.where(real[..., None], features, 0))  # padding may hold anything
    widths = np.ones(batch, dtype=features.dtype)
    for b in range(batch):
        values = table[b][pairs[b]]
        middle = (len(values) - 1) // 2
        widths[b] = (np.partition(values, middle)[middle] if len(values) else 0) or 1
    return widths


def mmr(
    scores: ArrayLike, similarity: ArrayLike, num_frames: int, *, trade_off: float = 0.7, mask: Mask | None = None
) -> Indices:
    """Maximal marginal relevance: choose again and again the candidate with the highest

        trade_off * score - (1 - trade_off) * its greatest similarity to a chosen one,

    the first by score alone. Scores and similarities are compared as they are: bring scores to 0..1 before.
    Positions [B, N] in time order; of equal ones the earlier.
    """
    table, alike, left = _floats(scores), _floats(similarity), _may_be_chosen(scores, mask)
    videos = np.arange(len(table))
    nearest = np.zeros_like(table)
    chosen = np.empty((len(table), num_frames), dtype=np.int64)
    for step in range(num_frames):
        chosen[:, step] = pick = _highest(trade_off * table - (1 - trade_off) * nearest if step else table, left)
        to_pick = alike[videos, pick]
        nearest = np.maximum(nearest, to_pick) if step else to_pick
        left[videos, pick] = False
    return np.sort(chosen, axis=1)


def facility_location(
    scores: ArrayLike, similarity: ArrayLike, num_frames: int, *, trade_off: float = 0.7, mask: Mask | None = None
) -> Indices:
    """Choose again and again the candidate that adds most to

        trade_off * sum of the chosen scores + (1 - trade_off) * mean over all candidates of their greatest similarity
        to a chosen one:

    high scores, and frames that stand for the rest of the video. Scores and similarities are compared as they are:
    bring scores to 0..1 before.

    Source: facility location, the submodular coverage of document and image summaries (Lin and Bilmes, "A Class of
    Submodular Functions for Document Summarization", ACL 2011), beside relevance; the greedy choice reaches at least
    1 - 1/e of the best. Positions [B, N] in time order; of equal ones the earlier.
    """
    table, left = _floats(scores), _may_be_chosen(scores, mask)
    alike = np.where(left[:, None] & left[:, :, None], _floats(similarity), 0)  # padding may hold anything
    share = (1 - trade_off) * left / left.sum(1, keepdims=True)  # padding need not be represented
    videos = np.arange(len(table))
    shown = np.zeros_like(table)  # greatest similarity to a chosen one
    chosen = np.empty((len(table), num_frames), dtype=np.int64)
    for step in range(num_frames):
        adds = np.einsum("bt,btj->bj", share, np.maximum(alike - shown[..., None], 0))
        chosen[:, step] = pick = _highest(trade_off * table + adds, left)
        shown = np.maximum(shown, alike[videos, :, pick])
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
    # log det(q S q) = 2 sum log q + log det S: the factor of S alone never overflows, whatever the scores.
    quality = trade_off / (1 - trade_off) * np.asarray(scores, dtype=np.float64)
    return np.sort(greedy_dpp(quality, np.asarray(similarity), num_frames, _may_be_chosen(scores, mask)), axis=1)


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


def _may_be_chosen(scores: ArrayLike, mask: Mask | None) -> Mask:
    return np.ones(np.shape(scores), dtype=bool) if mask is None else mask.copy()


def _highest(value: Numbers, left: Mask) -> Indices:
    """Return the position [B] of the highest value among those left, of equal ones the first."""
    value = np.where(np.isnan(value), -np.inf, value)
    best = np.where(left, value, -np.inf).max(1, keepdims=True)
    return np.asarray(((value >= best) & left).argmax(1))
