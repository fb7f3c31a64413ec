"""Policies that need neither learning nor pixels, but the positions of T candidates alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sosampler._util.arrays import Indices
from sosampler.policies.base import Batch, Policy, top
from sosampler.video.candidates import segment_centres

# FrameExit writes its order for ten frames out: the middle, the ends, then what lies between.
FRAMEEXIT_ORDER_10 = (5, 0, 9, 2, 7, 4, 6, 3, 8, 1)


def uniform(num_candidates: int, num_frames: int) -> Indices:
    """Choose the middle candidate of each of N equal segments."""
    return segment_centres(num_candidates, num_frames)


def centre(num_candidates: int, num_frames: int) -> Indices:
    """Choose the N candidates next to the middle of the video."""
    first = (num_candidates - num_frames) // 2
    return np.arange(first, first + num_frames, dtype=np.int64)


def frameexit_order(num_candidates: int) -> list[int]:
    """Return all T candidates in FrameExit's coarse-to-fine order.

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
    """Choose the first N of FrameExit's order, in time order."""
    return np.sort(np.array(frameexit_order(num_candidates)[:num_frames], dtype=np.int64))


class _Positional(Policy):
    """Choose by the number of real candidates."""

    positions: Callable[[int, int], Indices]  # T, N -> positions [N]

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        by_count = {count: self.positions(count, num_frames) for count in set(batch.counts.tolist())}
        return np.stack([by_count[count] for count in batch.counts.tolist()])


class Uniform(_Positional):
    name = "uniform"
    description = "the middle of each of N equal segments"

    positions = staticmethod(uniform)

    def default_candidates(self, num_frames: int) -> int:
        return num_frames


class Keyframe(Uniform):
    name = "keyframe"
    description = "N of the encoder's own keyframes, evenly spread; the cheapest to decode"
    candidate_mode = "keyframe"


class Everything(Uniform):
    name = "all"
    description = "every candidate"

    @staticmethod
    def positions(num_candidates: int, num_frames: int) -> Indices:
        return np.arange(num_candidates, dtype=np.int64)


class Centre(_Positional):
    name = "centre"
    description = "the N candidates next to the middle"
    positions = staticmethod(centre)


class FrameExitOrder(_Positional):
    name = "frameexit"
    description = "the first N of FrameExit's coarse-to-fine order"
    positions = staticmethod(frameexit)

    def default_candidates(self, num_frames: int) -> int:
        return max(10, num_frames)


class Random(Policy):
    """The same candidates for the same seed; in a split also for the same T and position of the video."""

    name = "random"
    description = "N candidates drawn by seed"

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        if batch.indices is None:
            drawn = [
                np.random.default_rng(batch.seed).choice(count, num_frames, replace=False)
                for count in batch.counts.tolist()
            ]
            return np.sort(np.stack(drawn), axis=1).astype(np.int64)
        # One table of numbers for the whole split, whatever its batches are: [videos, T], row by row.
        count, first = batch.num_candidates, int(batch.indices.min())
        generator = np.random.default_rng([batch.seed, count])
        generator.bit_generator.advance(first * count)  # type: ignore[attr-defined]  # PCG64 can
        table = generator.random((int(batch.indices.max()) + 1 - first, count))
        return top(table[batch.indices - first], num_frames, batch.counts)
