"""The accuracy expected of the k best frames, and the number of frames to choose by it. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler.errors import InvalidArgument
from sosampler.policies.auto import Auto

Numbers = NDArray[np.float64]

# Chosen on the dev reels of benchmarks/adaptive.py, as the tolerance was.
SPREAD = 0.7  # error of the sampler about one frame, in units of the softmax's logits
SHARE = 0.6


def expected_by_belief(
    scores: ArrayLike,
    class_logits: ArrayLike,
    log_belief: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    multi_label: bool = False,
    spread: float = SPREAD,
) -> Numbers:
    """Return the accuracy E_k expected of the k best frames at [:, k - 1]; −inf beyond a video's candidates.

    Args:
        scores: [B, T], by which frames are ranked.
        class_logits: [B, T, C], the sampler's prediction of the classifier's logits for each frame.
        log_belief: [B, C], log probabilities of the video's classes.
        mask: bool [B, T], True for a real candidate; None: all are.
        multi_label: whether classes are independent (sigmoid) or exclude each other (softmax).
        spread: error of the sampler about a single frame.
    """
    order, real = _best_first(scores, mask)
    ranked = np.take_along_axis(np.asarray(class_logits, dtype=np.float64), order[..., None], axis=1)
    ranked = np.where(real[..., None], ranked, 0.0)  # padding may hold anything
    if not multi_label:
        ranked = _log_softmax(ranked)
    taken = np.arange(1, order.shape[1] + 1, dtype=np.float64)[:, None]  # [T, 1]
    sharpened = np.cumsum(ranked, axis=1) / np.sqrt(taken) / spread  # √k times the mean over k
    wins = 0.5 * (1 + np.tanh(sharpened / 2)) if multi_label else np.exp(_log_softmax(sharpened))
    belief = np.exp(np.asarray(log_belief, dtype=np.float64))[:, None]  # [B, 1, C]
    return np.where(real, (wins * belief).sum(-1), -np.inf)


def expected_by_confidence(
    scores: ArrayLike, confidences: ArrayLike, mask: ArrayLike | None = None, *, share: float = SHARE
) -> Numbers:
    """Return the accuracy E_k expected of the k best frames at [:, k - 1]; −inf beyond a video's candidates.

    Args:
        scores: [B, T], by which frames are ranked.
        confidences: [B, T] in 0..1, expected of each frame alone.
        mask: bool [B, T], True for a real candidate; None: all are.
        share: of the first frame's confidence, below which a frame adds nothing.

    >>> expected_by_confidence([[3.0, 1.0, 2.0]], [[0.8, 0.1, 0.5]]).round(2).tolist()
    [[0.8, 0.9, 0.9]]
    """
    order, real = _best_first(scores, mask)
    ranked = np.take_along_axis(np.asarray(confidences, dtype=np.float64), order, axis=1)
    ranked = np.where(real, ranked, 0.0)
    adds = np.where(ranked >= share * ranked[:, :1], ranked, 0.0)
    return np.where(real, 1 - np.cumprod(1 - adds, axis=1), -np.inf)


def count_frames(expected: ArrayLike, auto: Auto) -> NDArray[np.int64]:
    """Return the number of frames [B] by the expected accuracy [B, T]; a video with fewer than `min` gives all.

    >>> count_frames([[0.5, 0.8, 0.81, 0.3]], Auto(tolerance=0.02)).tolist()
    [2]
    """
    table = np.asarray(expected, dtype=np.float64)
    possible = np.isfinite(table).sum(1)  # [B]
    lowest = np.minimum(auto.min, possible)
    number = np.arange(1, table.shape[1] + 1)
    allowed = (number >= lowest[:, None]) & (number <= np.minimum(auto.max, possible)[:, None])
    inside = np.where(allowed, table, -np.inf)
    best = inside.max(1, keepdims=True)
    return np.asarray(1 + (allowed & (inside >= best - auto.tolerance)).argmax(1), dtype=np.int64)


def _best_first(scores: ArrayLike, mask: ArrayLike | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the candidates [B, T] from the highest score to the lowest, masked ones last, and which are real."""
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or not table.shape[1]:
        raise InvalidArgument(f"scores have shape {list(table.shape)}; give [videos, candidates] with a candidate each")
    real = np.ones(table.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    if real.shape != table.shape or not real.any(1).all():
        raise InvalidArgument(
            f"the mask has shape {list(real.shape)} for scores of shape {list(table.shape)}; "
            "give one of the same shape, with a real candidate in each row"
        )
    # Sorted by the mask first, so that padding comes last whatever its score is, NaN too.
    order = np.lexsort((np.where(real, -table, 0.0), ~real), axis=1)
    return order, np.take_along_axis(real, order, axis=1)


def _log_softmax(logits: Numbers) -> Numbers:
    highest = logits.max(-1, keepdims=True)
    return np.asarray(logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True)))
