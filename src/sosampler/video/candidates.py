"""Which frames are candidates: pure arithmetic on frame numbers, no video needed.

A grid places T positions on F frames; keyframe and snapped candidates move them to frames that are cheap to decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices, Seconds
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument

Grid = Literal["uniform", "linspace", "stratified", "jitter"]
Mode = Literal["exact", "keyframe", "snap", "auto"]
OnShort = Literal["repeat", "fewer", "error"]

MODES: tuple[Mode, ...] = ("exact", "keyframe", "snap", "auto")
ON_SHORT: tuple[OnShort, ...] = ("repeat", "fewer", "error")

# A keyframe that comes after this share of the longest distance between two was due, as encoders put one every so many
# frames. One that comes earlier was put there because the image changed: at a cut, or in the middle of a fade.
_DUE = 0.9
# Seconds behind such a keyframe at which "auto" looks.
BEHIND_CUT = 0.3
# Share of the segments that must have a keyframe for "auto" to take keyframes at all.
KEYFRAME_SHARE = 0.75

# The authors' test pipeline re-seeds NumPy's global generator with this number before every video.
AUTHORS_SEED = 255


def segment_centres(total: int, count: int) -> Indices:
    """The middle frame of each of `count` equal segments; frames repeat evenly where total < count.

    >>> segment_centres(100, 4).tolist()
    [12, 37, 62, 87]
    >>> segment_centres(2, 4).tolist()
    [0, 0, 1, 1]
    """
    # Ints throughout: floor((i + 1/2) * total / count) without rounding error.
    return (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * count)


def linspace_ends(total: int, count: int) -> Indices:
    """FrameExit's grid, first and last frame included: int(clip(linspace(0, F, T), 0, F - 1)).

    >>> linspace_ends(100, 5).tolist()
    [0, 25, 50, 75, 99]
    """
    return np.clip(np.linspace(0, total, count), 0, total - 1).astype(np.int64)


def stratified_random(total: int, count: int, seed: int | None = None) -> Indices:
    """One uniformly random frame of each segment, the grid for training."""
    return stratified_positions(total, count, np.random.default_rng(seed))


def authors_jitter(total: int, count: int, seed: int | None = None) -> Indices:
    """The grid on which the paper's code tests: stratified jitter from a generator re-seeded for each video.

    For comparison only: its offsets inside the segments are arbitrary. F >= 2T: one random frame a segment;
    T <= F < 2T: an increasing subset with gaps of one frame at most; F < T: a random start, wrapped around.
    """
    legacy = np.random.RandomState(AUTHORS_SEED if seed is None else seed)
    if total < count:
        start = legacy.randint(0, total)
        return np.sort(np.arange(start, start + count, dtype=np.int64) % total)
    if total < 2 * count:
        gaps = np.zeros(count + 1, dtype=np.int64)
        gaps[legacy.choice(count + 1, total - count, replace=False)] = 1
        return np.arange(count, dtype=np.int64) + np.cumsum(gaps)[:-1]
    edges = np.arange(count + 1, dtype=np.int64) * total // count
    return edges[:-1] + legacy.randint(np.diff(edges))


_GRIDS: dict[str, Callable[[int, int, int | None], Indices]] = {
    "uniform": lambda total, count, seed: segment_centres(total, count),
    "linspace": lambda total, count, seed: linspace_ends(total, count),
    "stratified": stratified_random,
    "jitter": authors_jitter,
}
GRIDS: tuple[str, ...] = tuple(_GRIDS)


def grid_indices(
    total: int, count: int, *, grid: Grid = "uniform", on_short: OnShort = "repeat", seed: int | None = None
) -> Indices:
    """`count` frame numbers out of `total`, in time order.

    Where the video has fewer frames than `count`: "repeat" repeats frames evenly, so that the number holds;
    "fewer" gives every frame once; "error" refuses. The same three words serve for keyframes.
    """
    count = check_int("num_candidates", count)
    one_of("grid", grid, GRIDS)
    if total >= count:
        return _GRIDS[grid](total, count, seed)
    short = short_of(total, count, on_short, what="frames")
    if grid == "jitter" and on_short == "repeat":
        return authors_jitter(total, count, seed)  # the authors wrap around
    return short


def short_of(available: int, wanted: int, on_short: OnShort, *, what: str) -> Indices:
    """Positions to take where only `available` < `wanted` things exist."""
    one_of("on_short", on_short, ON_SHORT)
    if on_short == "error" or not available:
        raise InvalidArgument(
            f"{wanted} candidates were requested but only {available} {what} are there; "
            'ask for fewer, or allow on_short="repeat" or "fewer"'
        )
    if on_short == "fewer":
        return np.arange(available, dtype=np.int64)
    return segment_centres(available, wanted)


def nearest_in_order(targets: ArrayLike, options: ArrayLike) -> Indices:
    """Match each sorted target to a distinct option, in order, with the smallest total distance.

    Taking the nearest option would give one option to several targets. Needs len(options) >= len(targets);
    both sorted. Returns positions in `options`. Dynamic programming over (target, option), O(T * K):
    cost[t, k] = |options[k] - targets[t]| + min over k' < k of cost[t - 1, k'].
    """
    target, option = np.asarray(targets, dtype=np.int64), np.asarray(options, dtype=np.int64)
    count, available = len(target), len(option)
    if count > available:
        raise ValueError(f"{count} targets need as many options, got {available}")
    if not count:
        return np.empty(0, dtype=np.int64)
    # Target t can use options t .. t + slack only, since t options must lie before it and count - 1 - t after it.
    slack = available - count + 1
    best = np.empty((count, slack), dtype=np.int64)  # [t, j]: the best j' <= j for target t at option t + j'
    cost = np.zeros(slack, dtype=np.int64)
    offsets = np.arange(slack)
    for t in range(count):
        cost = cost + np.abs(option[t : t + slack] - target[t])
        lowest = np.minimum.accumulate(cost)
        # Where the running minimum falls, the argmin is here; elsewhere it is the last index where it fell.
        fell = np.concatenate([[True], lowest[1:] < lowest[:-1]])
        best[t] = np.maximum.accumulate(np.where(fell, offsets, 0))
        cost = lowest
    chosen = np.empty(count, dtype=np.int64)
    j = slack - 1
    for t in range(count - 1, -1, -1):
        j = best[t, j]
        chosen[t] = t + j
    return chosen


def keyframe_positions(targets: ArrayLike, keyframes: ArrayLike, *, on_short: OnShort = "repeat") -> Indices:
    """Return positions in `keyframes`: a distinct keyframe near each target, if there are enough of them."""
    target, keys = np.asarray(targets), np.asarray(keyframes)
    if len(keys) < len(target):
        return short_of(len(keys), len(target), on_short, what="keyframes")
    return nearest_in_order(target, keys)


def keyframes_and_exact(targets: ArrayLike, keyframes: ArrayLike) -> Indices:
    """Return all K < T keyframes, and exact frames for the T - K targets that are left, in time order.

    >>> keyframes_and_exact([10, 30, 50, 70], [0, 66]).tolist()
    [0, 30, 50, 66]
    """
    frames, keys = np.array(targets, dtype=np.int64), np.asarray(keyframes, dtype=np.int64)
    if len(np.unique(frames)) < len(frames):  # a video with fewer frames than candidates: every frame is one
        return frames
    frames[nearest_in_order(keys, frames)] = keys
    return np.sort(frames)


def keyframe_in_segments(targets: ArrayLike, keyframes: ArrayLike) -> Indices:
    """Return for each of T distinct targets the position of a keyframe that can stand for it; -1 where none can.

    The frames that are nearer to a target than to any other are its segment; the middle between two belongs to the
    earlier. Of the keyframes in it the nearest to the target counts, of two the earlier.

    >>> keyframe_in_segments([10, 30, 50], [0, 8, 21, 22]).tolist()
    [1, 3, -1]
    """
    target, keys = np.asarray(targets, dtype=np.int64), np.asarray(keyframes, dtype=np.int64)
    segment = np.searchsorted(segment_ends(target, np.iinfo(np.int64).max), keys, side="right")  # [K]
    order = np.lexsort((keys, np.abs(keys - target[segment]), segment))
    segments, first = np.unique(segment[order], return_index=True)
    positions = np.full(len(target), -1, dtype=np.int64)
    positions[segments] = order[first]
    return positions


def segment_ends(targets: Indices, last: int) -> Indices:
    """Return the end of each target's segment, the first frame that is nearer to the next one; `last` for the last.

    >>> segment_ends(np.array([10, 30, 51]), 60).tolist()
    [21, 41, 60]
    """
    return np.append((targets[:-1] + targets[1:]) // 2 + 1, last)


def at_cuts(keyframe_seconds: Seconds) -> NDArray[np.bool_]:
    """Return which keyframes came before they were due, and so sit at a cut; the first one does.

    >>> at_cuts(np.array([0.0, 2.0, 4.0, 4.5, 6.5])).tolist()
    [True, False, False, True, False]
    """
    gaps = np.diff(keyframe_seconds)
    return np.concatenate([[True], gaps < _DUE * gaps.max()]) if len(gaps) else np.ones(len(keyframe_seconds), bool)


def snap(
    targets: ArrayLike, target_seconds: Seconds, keyframes: ArrayLike, keyframe_seconds: Seconds, *, tolerance: float
) -> Indices:
    """Move each target to its nearest keyframe if that lies within `tolerance` seconds; the rest stay exact.

    A keyframe goes to its nearest target only, so that two candidates never become one frame.
    """
    check_float("snap_tolerance", tolerance, at_least=0)
    keys = np.asarray(keyframes, dtype=np.int64)
    # A short video repeats frames; twins move together.
    target, where, twin = np.unique(np.asarray(targets, dtype=np.int64), return_index=True, return_inverse=True)
    if not len(keys) or not len(target):
        return target[twin]
    times = np.asarray(target_seconds)[where]
    right = np.clip(np.searchsorted(keyframe_seconds, times), 0, len(keys) - 1)
    left = np.maximum(right - 1, 0)
    # To the nanosecond, so that of two at the same distance the earlier wins and not the rounding error.
    to_left, to_right = (np.round(np.abs(keyframe_seconds[side] - times), 9) for side in (left, right))
    nearest, distance = np.where(to_left <= to_right, left, right), np.minimum(to_left, to_right)
    snapped = target.copy()
    for key in np.unique(nearest):
        contenders = np.flatnonzero(nearest == key)
        winner = contenders[np.argmin(distance[contenders])]
        if distance[winner] <= tolerance:
            snapped[winner] = keys[key]
    return snapped[twin]


def rate_times(first: float, end: float, fps: float) -> Seconds:
    """Return times first, first + 1/fps, ... before `end`; at least one."""
    check_float("fps", fps, above=0)
    count = max(1, int(np.ceil((end - first) * fps - 1e-9)))
    return first + np.arange(count, dtype=np.float64) / fps


def positions_of(pts_seconds: Seconds, start_seconds: float, duration: float) -> NDArray[np.float32]:
    """Return for each frame [T] the fraction of the video, 0..1, that has passed when it is shown."""
    if duration <= 0:
        return np.zeros(len(pts_seconds), dtype=np.float32)
    return np.clip((pts_seconds - start_seconds) / duration, 0, 1).astype(np.float32)


def uniform_positions(stored: int, count: int) -> Indices:
    """The stored frame nearest to the centre of each of `count` equal segments; the grid for testing.

    All differ where count <= stored; a shorter video repeats its frames evenly, so that the number holds.

    >>> uniform_positions(64, 4).tolist(), uniform_positions(3, 5).tolist()
    ([8, 24, 40, 56], [0, 0, 1, 2, 2])
    """
    # Frame j stands for the segment j .. j + 1, so the one nearest to a centre x is floor(x).
    return segment_centres(check_int("stored", stored), check_int("count", count))


def stratified_positions(stored: int, count: int, rng: np.random.Generator) -> Indices:
    """One random stored frame of each of `count` equal segments, in time order; the grid for training.

    A video with fewer frames than that repeats them evenly.
    """
    if check_int("stored", stored) < check_int("count", count):
        return segment_centres(stored, count)
    edges = np.arange(count + 1, dtype=np.int64) * stored // count
    return rng.integers(edges[:-1], edges[1:], dtype=np.int64)
