"""Policies that need neither learning nor pixels: rules on the positions of T candidates."""

from __future__ import annotations

import numpy as np

from sosampler.video.candidates import segment_centres
from sosampler.video.timeline import Indices

# FrameExit writes its order for ten frames out: the middle, the ends, then what lies between.
FRAMEEXIT_ORDER_10 = (5, 0, 9, 2, 7, 4, 6, 3, 8, 1)


def uniform(num_candidates: int, num_frames: int) -> Indices:
    """The middle candidate of each of N equal stretches."""
    return segment_centres(num_candidates, num_frames)


def centre(num_candidates: int, num_frames: int) -> Indices:
    """The N candidates next to the middle of the video."""
    first = (num_candidates - num_frames) // 2
    return np.arange(first, first + num_frames, dtype=np.int64)


def random(num_candidates: int, num_frames: int, seed: int) -> Indices:
    """N candidates drawn without replacement, the same for the same seed."""
    return np.sort(np.random.default_rng(seed).choice(num_candidates, num_frames, replace=False)).astype(np.int64)


def frameexit_order(num_candidates: int) -> list[int]:
    """All T candidates in FrameExit's coarse-to-fine order.

    Its published list for T=10; for other T the middle, both ends, then breadth-first the middles of the gaps.

    >>> frameexit_order(9)
    [4, 0, 8, 2, 6, 1, 3, 5, 7]
    """
    if num_candidates == len(FRAMEEXIT_ORDER_10):
        return list(FRAMEEXIT_ORDER_10)
    middle, last = num_candidates // 2, num_candidates - 1
    order = list(dict.fromkeys((middle, 0, last)))
    gaps = [(0, middle), (middle, last)]
    while gaps:
        next_gaps: list[tuple[int, int]] = []
        for low, high in gaps:
            if high - low > 1:
                between = (low + high) // 2
                order.append(between)
                next_gaps += [(low, between), (between, high)]
        gaps = next_gaps
    return order


def frameexit(num_candidates: int, num_frames: int) -> Indices:
    """The first N of FrameExit's order, in time order."""
    return np.sort(np.array(frameexit_order(num_candidates)[:num_frames], dtype=np.int64))


def top(scores: np.ndarray, num_frames: int) -> Indices:
    """The N highest scores, in time order; of equal ones the earlier."""
    return np.sort(np.argsort(-scores, kind="stable")[:num_frames]).astype(np.int64)
