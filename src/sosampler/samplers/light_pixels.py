"""Frames for a sampler's network without torch: resize without aliasing and centre crop, in NumPy.

Scores of neighbouring frames lie close, so a level of a pixel more or less can change who is chosen. Therefore this
does what torch does with uint8 on the CPU, digit by digit: triangles as wide as the scale, weights rounded to 16 bits,
first along rows, then along columns, with levels in between. Pillow, with finer weights, is off by one here and there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sosampler.errors import InvalidArgument

Pixels = NDArray[np.uint8]

_MOST_BITS = 22  # of a weight, where all are small; those of a weight and its sign fit into 16


@dataclass(frozen=True)
class LightPreprocessing:
    """What `classifiers.preprocessing.Preprocessing` is to torch, up to the normalisation, which the network does."""

    resize: int  # the short side; the crop is a square of as many pixels

    @property
    def size(self) -> tuple[int, int]:
        return self.resize, self.resize

    def __call__(self, frames: Pixels) -> Pixels:
        """uint8 [F, 3, H, W] -> uint8 [F, 3, size, size]"""
        height, width = frames.shape[2:]
        down, across = (_cropped_taps(side, min(height, width), self.resize) for side in (height, width))
        # Rows that are cropped away need not be resized.
        first, last = int(down.places.min()), int(down.places.max()) + 1
        down = down._replace(places=down.places - first)
        small = np.empty((len(frames), 3, *self.size), dtype=np.uint8)
        for place, frame in enumerate(np.moveaxis(frames, 1, -1)):
            rows = np.ascontiguousarray(frame[first:last]).reshape(last - first, width * 3)  # as decoders have them
            columns = _weighed(rows, across.for_colours(), axis=1)
            small[place] = _weighed(columns, down, axis=0).reshape(*self.size, 3).transpose(2, 0, 1)
        return small


class Taps(NamedTuple):
    """Which pixels of a row or column make up each new one, and by how much: whole numbers in units of 2^-bits."""

    places: NDArray[np.int64]  # [new, K]
    weights: NDArray[np.int32]  # [new, K]
    bits: int

    def for_colours(self) -> Taps:
        """For rows of which each pixel is three numbers; [3 new, K]."""
        places = self.places[:, None] * 3 + np.arange(3)[:, None]  # [new, 3, K]
        return Taps(places.reshape(-1, self.places.shape[1]), self.weights.repeat(3, axis=0), self.bits)


def _cropped_taps(side: int, short: int, target: int) -> Taps:
    """Of a side of a frame, for the middle of what it becomes; rounded as torchvision rounds."""
    between = int(target * side / short)
    first = round((between - target) / 2)
    taps = _taps(side, between)
    middle = slice(first, first + target)
    return Taps(taps.places[middle], taps.weights[middle], taps.bits)


@lru_cache(maxsize=32)
def _taps(before: int, after: int) -> Taps:
    """For a side of `before` pixels that becomes one of `after`."""
    if before == after:
        return Taps(np.arange(after)[:, None], np.ones((after, 1), dtype=np.int32), 0)
    scale = before / after
    support = max(scale, 1.0)
    centre = scale * (np.arange(after) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), before)
    places = first[:, None] + np.arange(2 * math.ceil(support) + 1)  # [after, K]
    shares = np.maximum(1 - np.abs((places - centre[:, None] + 0.5) / support), 0)
    shares[places >= end[:, None]] = 0
    shares /= shares.sum(1, keepdims=True)
    bits = 0
    while bits < _MOST_BITS and int(0.5 + shares.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    weights = (shares * (1 << bits) + 0.5).astype(np.int32)
    return Taps(np.minimum(places, before - 1), weights, bits)


def _weighed(picture: Pixels, taps: Taps, *, axis: int) -> Pixels:
    """uint8 [H, L] with one axis brought to another length."""
    if not taps.bits:  # as it is, but for the crop
        return np.take(picture, taps.places[:, 0], axis=axis)
    shape = (len(taps.places), picture.shape[1]) if axis == 0 else (len(picture), len(taps.places))
    total = np.full(shape, 1 << (taps.bits - 1), dtype=np.int32)  # so that the shift below rounds
    part = np.empty_like(total)
    for places, weights in zip(taps.places.T, taps.weights.T, strict=True):
        if weights.any():
            np.multiply(np.take(picture, places, axis=axis), weights[:, None] if axis == 0 else weights, out=part)
            total += part
    return (total >> taps.bits).clip(0, 255).astype(np.uint8)


def check_clips(frames: Any) -> Pixels:
    """Frames as a NumPy array uint8 [B, T, 3, H, W], or say what is wrong with them."""
    if not isinstance(frames, np.ndarray):
        raise InvalidArgument(f"frames are a {type(frames).__name__}; give a NumPy array, uint8 [B, T, 3, H, W]")
    if frames.ndim != 5 or frames.shape[2] != 3 or frames.dtype != np.uint8:
        hint = ""
        if frames.ndim == 4:
            hint = "; put one video's frames into a batch of one: frames[None]"
        elif frames.ndim == 5 and frames.shape[4] == 3:
            hint = "; the channels stand last: np.moveaxis(frames, -1, -3) puts them in their place"
        raise InvalidArgument(f"frames are {frames.dtype} {list(frames.shape)}; give uint8 [B, T, 3, H, W]{hint}")
    if 0 in frames.shape:
        raise InvalidArgument(f"frames have shape {list(frames.shape)}; nothing is in them, give at least one frame")
    return frames
