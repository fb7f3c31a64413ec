"""Frames that differ from each other, by descriptors [T, D] of any kind; no scores, no learning, no torch.

All give N distinct positions, in time order if not said otherwise; of equal candidates the earlier goes first. A frame
whose descriptor is not finite is taken when all others are.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler.checks import one_of, real_number
from sosampler.errors import InvalidArgument
from sosampler.policies.rules import centre
from sosampler.policies.selectors import number_of_frames
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

Features = NDArray[np.float64]

STARTS = ("centre", "first", "typical")

# As in the redundancy policies: what is left of a frame's variance below this is rounding.
_SMALLEST_VARIANCE = 1e-10

_THUMBNAIL = 64  # pixels a side; noise and small shifts average out
_COLOUR_CELLS = 8  # a side
_EDGE_CELLS = 4  # a side
_DIRECTIONS = 8  # over half a turn: an edge from dark to bright is the same as one from bright to dark
# Between two photographs, or two frames of a clip, mean gradients differ about a thirtieth as much as mean colours do
# (median over pairs); with this weight the edges count about half as much as the colours.
_EDGE_WEIGHT = 16.0


def farthest_first(
    features: ArrayLike, num_frames: int, *, start: Literal["centre", "first", "typical"] = "centre"
) -> Indices:
    """Again and again the frame that is farthest from all that are chosen.

    Source: the farthest-first traversal of Gonzalez ("Clustering to minimize the maximum intercluster distance", 1985),
    as VKF uses it on the embeddings of a Video-LLM's encoder ("Beyond Pixels: Embedding-Guided Keyframe Selection for
    VidLLMs", ICML 2026 workshop). Taken: the traversal, whose greatest distance from any frame to a chosen one is at
    most twice the least possible. Different: Euclidean distance between descriptors of any kind, here usually
    `pixel_features`, and a start that is the same every time.

    Args:
        features: [T, D].
        num_frames: N.
        start: "centre", the middle frame in time; "first", the first one; "typical", the one next to the mean.

    >>> farthest_first([[0.0], [1.0], [2.0], [9.0]], 3).tolist()
    [0, 1, 3]
    """
    return np.sort(farthest_first_order(features, num_frames, start=start))


def farthest_first_order(
    features: ArrayLike, num_frames: int, *, start: Literal["centre", "first", "typical"] = "centre"
) -> Indices:
    """What `farthest_first` chooses, in the order in which it does: its first n are the choice of n."""
    descriptors, known, _ = _checked(features)
    num_frames = number_of_frames(num_frames, len(descriptors))
    one_of("start", start, STARTS)
    left = np.ones(len(descriptors), dtype=bool)
    order = np.empty(num_frames, dtype=np.int64)
    value = -_distance_to_start(descriptors, known, start)
    nearest = np.full(len(descriptors), np.inf)  # distance to a chosen one
    for step in range(num_frames):
        order[step] = pick = _highest(value, left, known)
        left[pick] = False
        value = nearest = np.minimum(nearest, _distances(descriptors, descriptors[pick]))
    return order


def dpp_diverse(features: ArrayLike, num_frames: int, *, bandwidth: float | None = None) -> Indices:
    """Greedy mode of a determinantal point process on a Gaussian kernel: the frames that span the largest volume.

    Source: Kulesza and Taskar, "Determinantal Point Processes for Machine Learning", 2012, and for the greedy steps by
    Cholesky rows Chen, Zhang and Zhou, NeurIPS 2018; used on video frames by MDP3 (Sun et al., ICCV 2025). Taken:
    kernel, determinant, greedy steps. Different: no query and no scores, so it is `redundancy.dpp` with equal scores,
    which it agrees with, for where there is no torch; the video is not cut into segments.

    The first choice is a tie between all frames, hence the first one.

    Args:
        features: [T, D].
        num_frames: N.
        bandwidth: of the kernel exp(-|x - y|^2 / (2 bandwidth^2)), in the units of the features; the median distance
            between two frames if not given.

    >>> dpp_diverse([[0.0], [0.1], [5.0], [5.1]], 2).tolist()
    [0, 3]
    """
    return np.sort(dpp_order(features, num_frames, bandwidth=bandwidth))


def dpp_order(features: ArrayLike, num_frames: int, *, bandwidth: float | None = None) -> Indices:
    """What `dpp_diverse` chooses, in the order in which it does: its first n are the choice of n."""
    if bandwidth is not None:
        bandwidth = real_number("bandwidth", bandwidth, above=0)
    descriptors, known, exponent = _checked(features)
    num_frames = number_of_frames(num_frames, len(descriptors))
    kernel = _kernel(descriptors, known, bandwidth, exponent)
    left = np.ones(len(kernel), dtype=bool)
    order = np.empty(num_frames, dtype=np.int64)
    variance = np.ones(len(kernel))  # of each frame, given the chosen ones
    factor = np.zeros((len(kernel), num_frames))
    for step in range(num_frames):
        order[step] = pick = _highest(np.maximum(variance, _SMALLEST_VARIANCE), left, known)
        left[pick] = False
        if known[pick] and variance[pick] > _SMALLEST_VARIANCE:  # a duplicate explains nothing new
            factor[:, step] = (kernel[pick] - factor @ factor[pick]) / np.sqrt(variance[pick])
            variance = variance - factor[:, step] ** 2
    return order


def pixel_features(frames: Frames) -> NDArray[np.float32]:
    """What frames [T, H, W, 3] uint8 look like, cheaply: descriptors [T, 320] for `farthest_first` and `dpp_diverse`.

    Source: layout descriptors of picture retrieval; the colours are those of MPEG-7's colour layout before its
    transform, the edges a coarse histogram of oriented gradients (Dalal and Triggs, CVPR 2005). Different: no blocks
    that overlap, no normalisation by contrast (a fade to black is a change), and both parts are scaled so that
    their distances compare: plain black and plain white are 1 apart.

    192 numbers are mean colours in 8 x 8 cells, 128 mean gradients by direction in 4 x 4 cells.
    """
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        found = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, np.ndarray) else type(frames).__name__
        raise InvalidArgument(f"frames are {found}; give pictures as a NumPy array, uint8 [T, H, W, 3]")
    if not frames.size:
        raise InvalidArgument(f"frames have shape {list(frames.shape)}; give at least one frame with pixels")
    return np.stack([_descriptor(_thumbnail(frame)) for frame in frames])


def _thumbnail(frame: Frames) -> NDArray[np.float32]:
    small = Image.fromarray(frame).resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(small, dtype=np.float32) / np.float32(255)  # [64, 64, 3]


def _descriptor(picture: NDArray[np.float32]) -> NDArray[np.float32]:
    colours = _cell_means(picture, _COLOUR_CELLS)
    grey = picture @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    down, right = np.gradient(grey)
    turn = np.arctan2(down, right) / np.pi % 1  # 0..1 over half a turn
    # A gradient is shared by the two directions next to its own, so that no small turn is a jump.
    distance = np.abs(turn[..., None] * _DIRECTIONS - np.arange(_DIRECTIONS))
    share = np.maximum(0, 1 - np.minimum(distance, _DIRECTIONS - distance))
    edges = _cell_means(np.hypot(down, right)[..., None] * share, _EDGE_CELLS)
    parts = (colours / np.sqrt(colours.size), _EDGE_WEIGHT * edges / np.sqrt(edges.size))
    joined: NDArray[np.float32] = np.concatenate([part.ravel() for part in parts], dtype=np.float32)
    return joined


def _cell_means(picture: NDArray[np.float32], cells: int) -> NDArray[np.float32]:
    """[64, 64, C] -> [cells, cells, C]"""
    side = _THUMBNAIL // cells
    means: NDArray[np.float32] = picture.reshape(cells, side, cells, side, -1).mean(axis=(1, 3))
    return means


def _checked(features: ArrayLike) -> tuple[Features, NDArray[np.bool_], int]:
    """Features [T, D] within -1..1, which of them are finite, and the power of two by which they were divided.

    A power of two changes no digit, and squares of what is left neither overflow nor vanish.
    """
    try:
        numbers = np.array(features, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument("features are no numbers; give one row of numbers for each candidate") from None
    if numbers.ndim != 2 or not numbers.size:
        raise InvalidArgument(f"features have shape {list(numbers.shape)}; give a row for each candidate, [T, D]")
    known = np.asarray(np.isfinite(numbers).all(1))
    numbers[~known] = 0
    exponent = int(np.frexp(np.abs(numbers).max())[1])
    return np.ldexp(numbers, -exponent), known, exponent


def _highest(value: Features, left: NDArray[np.bool_], known: NDArray[np.bool_]) -> int:
    """Position of the highest value among those left, of equal ones the first; the unknown in time order at last."""
    if not (left & known).any():
        return int(left.argmax())
    return int(np.where(left & known, value, -np.inf).argmax())


def _distances(descriptors: Features, point: Features) -> Features:
    # Differences, not the product form: that loses near-duplicates to cancellation.
    return np.asarray(np.sqrt(np.square(descriptors - point).sum(1)))


def _distance_to_start(descriptors: Features, known: NDArray[np.bool_], start: str) -> Features:
    """How far every frame is from where to start: in time, or from the mean of the descriptors."""
    if start == "typical":
        return _distances(descriptors, descriptors.sum(0) / max(1, known.sum()))  # the unknown are zeros
    first = 0 if start == "first" else int(centre(len(descriptors), 1)[0])
    return np.abs(np.arange(len(descriptors), dtype=np.float64) - first)


def _kernel(descriptors: Features, known: NDArray[np.bool_], bandwidth: float | None, exponent: int) -> Features:
    """[T, T] of descriptors that were divided by 2^exponent; the bandwidth was not yet."""
    distance = np.zeros((len(descriptors), len(descriptors)))
    for t, point in enumerate(descriptors):
        distance[t, t + 1 :] = _distances(descriptors[t + 1 :], point)
    distance += distance.T
    width = float(np.ldexp(1.0 if bandwidth is None else bandwidth, -exponent))
    if bandwidth is None:
        pairs = distance[known][:, known][np.triu_indices(int(known.sum()), 1)]
        middle = (len(pairs) - 1) // 2  # the lower one of two in the middle, as torch has it
        median = float(np.partition(pairs, middle)[middle]) if len(pairs) else 0.0
        width = median if median > 0 else width  # more than half of the pairs equal, or one frame: 1
    with np.errstate(over="ignore"):  # infinitely far is as good as very far
        return np.exp(-np.square(distance / max(width, float(np.finfo(np.float64).tiny))) / 2)
