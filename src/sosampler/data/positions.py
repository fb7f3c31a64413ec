"""Which of the frames that a bank holds of a video are offered: pure arithmetic."""

from __future__ import annotations

import numpy as np

from sosampler.checks import whole_number
from sosampler.video.candidates import segment_centres
from sosampler.video.timeline import Indices


def uniform_positions(stored: int, count: int) -> Indices:
    """The stored frame nearest to the centre of each of `count` equal segments; the grid for testing.

    All differ where count <= stored; a shorter video repeats its frames evenly, so that the number holds.

    >>> uniform_positions(64, 4).tolist(), uniform_positions(3, 5).tolist()
    ([8, 24, 40, 56], [0, 0, 1, 2, 2])
    """
    # Frame j stands for the segment j .. j + 1, so the one nearest to a centre x is floor(x).
    return segment_centres(whole_number("stored", stored), whole_number("count", count))


def stratified_positions(stored: int, count: int, rng: np.random.Generator) -> Indices:
    """One random stored frame of each of `count` equal segments, in time order; the grid for training.

    A video with fewer frames than that repeats them evenly.
    """
    if whole_number("stored", stored) < whole_number("count", count):
        return segment_centres(stored, count)
    edges = np.arange(count + 1, dtype=np.int64) * stored // count
    return rng.integers(edges[:-1], edges[1:], dtype=np.int64)
