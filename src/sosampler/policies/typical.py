"""Frames that are clear, show what the video shows, and are not the same picture twice.

From a quality [T] and features [T, D] of the candidates, whoever made them; NumPy alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler.checks import real_number
from sosampler.errors import InvalidArgument
from sosampler.policies.selectors import number_of_frames
from sosampler.video.timeline import Indices

Numbers = NDArray[np.float64]

# A quality below this is as bad as this: nothing is gained by telling black from blacker.
_LEAST_QUALITY = 1e-3


def typical_order(
    quality: ArrayLike,
    features: ArrayLike,
    num_frames: int,
    *,
    clearness: float = 0.2,
    sharpness: float = 4.0,
    movement: float = 1.0,
    most_movement: float = 0.1,
    redundancy: float = 1.0,
    alike: float = 0.7,
) -> tuple[Indices, Numbers]:
    """N candidates in the order in which they are chosen, and the value of every candidate by itself [T].

    The value is `clearness` · log quality + typicality + `movement` · unrest. Typicality is the mean likeness to the
    other candidates, each counted by its quality: a frame that shows the theme of the video resembles many others, a
    stray one resembles none. Unrest is how far a frame differs from its two neighbours in time, up to `most_movement`
    and less if it is unclear itself: within a shot, frames in which something happens come before those in which
    nothing does, and a cut counts no more than a movement. Each step takes the candidate whose value less
    `redundancy` · repetition is highest; repetition is 0 up to a likeness `alike` to the nearest chosen frame and 1 for
    the same picture. The first n of the order are the choice of n.

    Source: typicality is the relevance of centroid- and graph-based summaries (LexRank's degree centrality: Erkan and
    Radev, 2004), the trade against what is chosen is maximal marginal relevance (Carbonell and Goldstein, 1998).
    Different: likeness below `alike` is no repetition, so that themes may be shown more than once, from other sides.

    Args:
        quality: [T] in 0..1.
        features: [T, D]; likeness is their cosine, negative ones count as 0.
        num_frames: N.
        clearness: weight of the quality.
        sharpness: power of the likeness in the typicality; a high one counts near relatives alone.
        movement: weight of the unrest.
        most_movement: the unlikeness, 1 - likeness, beyond which unrest does not grow.
        redundancy: weight of the repetition.
        alike: from which likeness on a frame begins to repeat another; below 1.

    >>> order, value = typical_order([1, 1, 1, 0.01], [[1, 0], [1, 0.1], [0, 1], [1, 0]], 3)
    >>> order.tolist()
    [1, 2, 0]
    """
    qualities, likeness = _checked(quality, features)
    num_frames = number_of_frames(num_frames, len(qualities))
    if real_number("alike", alike, at_least=0) >= 1:
        raise InvalidArgument(f"alike={alike} is not allowed; give a number from 0 to below 1")
    value = real_number("clearness", clearness, at_least=0) * np.log(np.maximum(qualities, _LEAST_QUALITY))
    value += typicality(qualities, likeness ** real_number("sharpness", sharpness, above=0))
    value += real_number("movement", movement, at_least=0) * unrest(
        qualities, likeness, real_number("most_movement", most_movement, at_least=0)
    )
    weight = real_number("redundancy", redundancy, at_least=0)
    repetition = np.square(np.clip((likeness - alike) / (1 - alike), 0, 1))
    order = np.empty(num_frames, dtype=np.int64)
    repeated = np.zeros(len(value))
    left = np.ones(len(value), dtype=bool)
    for step in range(num_frames):
        pick = int(np.where(left, value - weight * repeated, -np.inf).argmax())
        order[step], left[pick] = pick, False
        repeated = np.maximum(repeated, repetition[pick])
    return order, value


def typicality(quality: Numbers, likeness: Numbers) -> Numbers:
    """Mean likeness [T, T] of each candidate to the others, weighed by their quality; 0 where there is no other."""
    others = likeness.copy()
    np.fill_diagonal(others, 0.0)
    total = quality.sum() - quality
    return np.asarray(np.divide(others @ quality, total, out=np.zeros(len(quality)), where=total > _LEAST_QUALITY))


def unrest(quality: Numbers, likeness: Numbers, most: float) -> Numbers:
    """How far each candidate differs from its neighbours in time, their mean, at most `most`; 0 for a single one.

    It counts in full from a quality of a half on: that a black frame differs from what is around it is no movement.
    """
    if len(likeness) == 1:
        return np.zeros(1)
    steps = 1 - np.diag(likeness, 1)  # [T - 1]
    before, after = np.concatenate([steps[:1], steps]), np.concatenate([steps, steps[-1:]])
    return np.asarray(np.minimum((before + after) / 2, most) * np.minimum(1, 2 * quality))


def _checked(quality: ArrayLike, features: ArrayLike) -> tuple[Numbers, Numbers]:
    """Quality [T] within 0..1, and the likeness of all pairs [T, T] within 0..1; what is no number counts as 0."""
    try:
        qualities, rows = np.array(quality, dtype=np.float64), np.array(features, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument("quality or features are no numbers; give [T] and [T, D]") from None
    if qualities.ndim != 1 or rows.ndim != 2 or not rows.size or len(rows) != len(qualities):
        raise InvalidArgument(
            f"quality has shape {list(qualities.shape)} and features {list(rows.shape)}; give [T] and [T, D]"
        )
    rows[~np.isfinite(rows).all(1)] = 0
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return np.clip(np.nan_to_num(qualities), 0, 1), np.clip(unit @ unit.T, 0, 1)
