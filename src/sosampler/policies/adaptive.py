"""How many frames a video needs: the fewest of which little less is expected than of any other number.

Frames are taken best first. Of the k best, an expectation E_k says how likely a classifier that averages logits over
them names the right class, as far as whoever looked at the candidates can tell. The number is the smallest k from
`least` to `most` with E_k within `tolerance` of the best of them. Two expectations:

- By belief (`expected_by_belief`): the sampler believes that the video shows class c with probability b(c), and that
  the classifier sees q_t(c) in frame t. Over k frames the classifier's logits are the mean of log q_t, and what the
  sampler gets wrong about single frames averages out like 1 / √k. So class c is expected to win with probability
  softmax(√k · mean log q / spread)(c), and E_k is the mean of that over b. It rises while frames agree with the
  belief, and falls as soon as further ones would lead the classifier astray.
- By confidence (`expected_by_confidence`): all that is known is the confidence p_t which the classifier is expected to
  have in the true label from frame t alone. E_k is the probability that at least one of the frames shows it,
  1 − Π(1 − p_t). Frames with less than a `share` of the best one's confidence would dilute the others, and add nothing.

NumPy alone, batched: arrays are [B, T], masked candidates (`mask` False) are never counted, of equal scores the earlier
frame goes first, and the order of the candidates in the array decides nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler.auto_frames import AutoFrames
from sosampler.errors import InvalidArgument

Numbers = NDArray[np.float64]

# Chosen on the dev reels of benchmarks/adaptive.py, as the tolerance was.
SPREAD = 0.7  # how far off the sampler is about one frame, in units of the softmax's logits
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
    """E_k at [:, k - 1]; −inf where a video has fewer than k candidates.

    Args:
        scores: [B, T], by which frames are taken.
        class_logits: [B, T, C], what the sampler thinks the classifier says about each frame.
        log_belief: [B, C], log probabilities of what the video is about.
        mask: bool [B, T], True for a real candidate; None: all are.
        multi_label: whether class logits are independent (sigmoid) or exclude each other (softmax).
        spread: how far off the sampler is about a single frame.
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
    """E_k at [:, k - 1]; −inf where a video has fewer than k candidates.

    Args:
        scores: [B, T], by which frames are taken.
        confidences: [B, T] in 0..1, what is expected of each frame alone.
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


def count_frames(expected: ArrayLike, auto: AutoFrames) -> NDArray[np.int64]:
    """The number of frames [B] to take, from expectations [B, T]; a video with fewer than `least` gives all it has.

    >>> count_frames([[0.5, 0.8, 0.81, 0.3]], AutoFrames(tolerance=0.02)).tolist()
    [2]
    """
    table = np.asarray(expected, dtype=np.float64)
    possible = np.isfinite(table).sum(1)  # [B]
    least = np.minimum(auto.least, possible)
    number = np.arange(1, table.shape[1] + 1)
    allowed = (number >= least[:, None]) & (number <= np.minimum(auto.most, possible)[:, None])
    inside = np.where(allowed, table, -np.inf)
    best = inside.max(1, keepdims=True)
    return np.asarray(1 + (allowed & (inside >= best - auto.tolerance)).argmax(1), dtype=np.int64)


def chosen_mask(scores: ArrayLike, counts: ArrayLike, mask: ArrayLike | None = None) -> NDArray[np.bool_]:
    """The `counts` [B] best candidates of each video, as bool [B, T].

    >>> chosen_mask([[0.1, 0.9, 0.9], [0.2, 0.1, 0.3]], [1, 2]).tolist()
    [[False, True, False], [True, False, True]]
    """
    order, real = _best_first(scores, mask)
    first = np.arange(order.shape[1]) < np.asarray(counts)[:, None]
    chosen = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(chosen, order, first & real, axis=1)
    return chosen


def _best_first(scores: ArrayLike, mask: ArrayLike | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Candidates [B, T] from the highest score to the lowest, masked ones last; and which of these are real."""
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
