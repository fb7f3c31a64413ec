"""Policies by the pixels of the candidates, without learning: how much frames change, and how they differ."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler._util.arrays import Frames, Indices
from sosampler.errors import InvalidArgument
from sosampler.policies.base import Batch, Numbers, Policy, Scores
from sosampler.policies.positional import centre
from sosampler.policies.score_rules import (
    difference_peaks,
    gaussian_kernel,
    greedy_dpp,
    median_bandwidth,
    motion_uniform,
    squared_distances,
)

# Frames are compared as small images: noise and small shifts average out, and it costs nothing.
_SIDE = 64  # pixels


def change_scores(frames: Frames) -> np.ndarray:
    """Return how much each frame [T, H, W, 3] differs from the one before it: mean absolute grey difference, 0..1, [T].

    The first frame has none before it and is compared with the second.
    """
    small = np.stack([_thumbnail(frame, "L") for frame in frames])  # [T, 64, 64]
    if len(small) < 2:
        return np.zeros(len(small))
    change = np.abs(np.diff(small, axis=0)).mean(axis=(1, 2)) / 255
    return np.concatenate([change[:1], change])


def _thumbnail(frame: Frames, mode: str) -> NDArray[np.float32]:
    image = Image.fromarray(frame).convert(mode)
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX, reducing_gap=2.0), dtype=np.float32)


class FrameDifference(Policy):
    name = "frame-difference"
    description = "the N candidates at which the image changes most"
    needs = frozenset({"frames"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("change", lambda: self._change(batch))

    def _change(self, batch: Batch) -> Scores:
        assert batch.frames is not None, "it needs frames"
        scores = np.zeros((len(batch), batch.num_candidates), dtype=np.float32)
        for row, count in enumerate(batch.counts.tolist()):
            scores[row, :count] = change_scores(batch.frames[row, :count])
        return scores

    def unit_scores(self, batch: Batch) -> Scores:
        return self.scores(batch).astype(np.float64)  # in 0..1 already


class DifferencePeaks(FrameDifference):
    name = "difference-peaks"
    description = "the N most prominent peaks of the change between frames"

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        rows = zip(self.unit_scores(batch), batch.counts.tolist(), strict=True)
        return np.stack([difference_peaks(scores[:count], num_frames) for scores, count in rows])


class MotionUniform(FrameDifference):
    name = "motion-uniform"
    description = "frames at equal steps of the cumulative motion: dense where much moves"

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        rows = zip(self.unit_scores(batch), batch.counts.tolist(), strict=True)
        return np.stack([motion_uniform(scores[:count], num_frames) for scores, count in rows])


class _GreedyOrder(Policy):
    """Choose the first N of an order by the features of the frames; no candidate has a score of its own."""

    needs = frozenset({"frames"})
    order: Callable[[ArrayLike, int], Indices]  # features [T, D], N -> the first N

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        order = batch.cached(("order", self.name), lambda: self._order(batch))
        return np.sort(order[:, :num_frames], axis=1)

    def _order(self, batch: Batch) -> Indices:
        """All real candidates of each video, padding behind them, [B, T]."""
        features = self.features(batch)
        order = np.tile(np.arange(batch.num_candidates), (len(batch), 1))
        for row, count in enumerate(batch.counts.tolist()):
            order[row, :count] = self.order(features[row, :count], count)
        return order


_COLOUR_CELLS = 8  # a side
_EDGE_CELLS = 4  # a side
_DIRECTIONS = 8  # over half a turn: an edge from dark to bright is the same as one from bright to dark
# Between two photographs, or two frames of a clip, mean gradients differ about a thirtieth as much as mean colours do
# (median over pairs); with this weight the edges count about half as much as the colours.
_EDGE_WEIGHT = 16.0


def farthest_first_order(features: ArrayLike, num_frames: int) -> Indices:
    """Return again and again the frame that is farthest from all before it: the first n are the choice of n.

    Source: the farthest-first traversal of Gonzalez ("Clustering to minimize the maximum intercluster distance", 1985),
    as VKF uses it on the embeddings of a Video-LLM's encoder ("Beyond Pixels: Embedding-Guided Keyframe Selection for
    VidLLMs", ICML 2026 workshop). Taken: the traversal, whose greatest distance from any frame to a chosen one is at
    most twice the smallest possible. Different: Euclidean distance between features [T, D] of any kind, here usually
    `pixel_features`, and a fixed start, the middle frame in time.

    >>> farthest_first_order([[0.0], [1.0], [2.0], [9.0]], 3).tolist()
    [1, 3, 0]
    """
    descriptors = np.asarray(features, dtype=np.float64)
    order = np.empty(num_frames, dtype=np.int64)
    nearest = np.full(len(descriptors), np.inf)  # distance to a chosen one
    pick = int(centre(len(descriptors), 1)[0])
    for step in range(num_frames):
        order[step] = pick
        # Differences, not the product form: that loses near-duplicates to cancellation.
        nearest = np.minimum(nearest, np.sqrt(np.square(descriptors - descriptors[pick]).sum(1)))
        nearest[pick] = -np.inf  # never again
        pick = int(nearest.argmax())
    return order


def dpp_order(features: ArrayLike, num_frames: int) -> Indices:
    """Return the greedy mode of a determinantal point process on a Gaussian kernel, in the order of choice.

    These are frames that span the largest volume. The first is a tie between all, hence the first one in time.

    Source: Kulesza and Taskar, "Determinantal Point Processes for Machine Learning", 2012, and for the greedy steps by
    Cholesky rows Chen, Zhang and Zhou, NeurIPS 2018; used on video frames by MDP3 (Sun et al., ICCV 2025). Taken:
    kernel, determinant, greedy steps. Different: no query and no scores, so it is `score_rules.dpp` with equal scores
    and the median distance as bandwidth; the video is not split into segments.

    >>> dpp_order([[0.0], [0.1], [5.0], [5.1]], 2).tolist()
    [0, 3]
    """
    rows = np.asarray(features, dtype=np.float64)[None]
    kernel, left = gaussian_kernel(rows, median_bandwidth(rows)), np.ones(rows.shape[:2], dtype=bool)
    order: Indices = greedy_dpp(np.zeros(left.shape), kernel, num_frames, left)[0]
    return order


class FarthestFirst(_GreedyOrder):
    name = "farthest-first"
    description = "again and again the frame least like those chosen, from the middle on"
    order = staticmethod(farthest_first_order)


class Dpp(_GreedyOrder):
    name = "dpp"
    description = "N frames unlike each other: greedy mode of a determinantal point process"
    order = staticmethod(dpp_order)


# Of segmentations whose scatter differs by less than this share of the video's, the one with the most even lengths is
# taken: a still video is cut evenly.
_EQUAL_SCATTER = 1e-6


def kts(features: ArrayLike, num_frames: int) -> Indices:
    """Cut the video into the N segments with the least scatter, and return the medoid of each, [N].

    Scatter is the squared distance of frames from the mean of their segment, summed up; it is the cost of the source
    with a linear kernel of the features [T, D]. Dynamic programming finds the least of all segmentations. The medoid
    is the frame nearest to the mean of its segment; of equal ones that next to the middle, then the earlier.

    Source: Potapov, Douze, Harchaoui and Schmid, "Category-Specific Video Summarization", ECCV 2014 (kernel temporal
    segmentation). Taken: cost, kernel and dynamic programming. Different: the number of segments is given, so there is
    no penalty that chooses it; `pixel_features` of T candidates instead of Fisher vectors of all frames; and one frame
    stands for a segment, where the source scores segments.

    >>> kts([[0.0], [0.1], [0.0], [5.0], [9.0], [9.2], [9.1]], 3).tolist()
    [0, 3, 6]
    """
    rows = np.asarray(features, dtype=np.float64)
    count = len(rows)
    squared = squared_distances(rows)
    # Scatter of the frames a..b-1 at [a, b]: the squared distances of all pairs, by twice their number.
    sums = np.zeros((count + 1, count + 1))
    sums[1:, 1:] = squared.cumsum(0).cumsum(1)
    places, ends = np.arange(count + 1), np.diagonal(sums)
    lengths = places - places[:, None]
    scatter = (ends + ends[:, None] - 2 * sums) / (2 * np.maximum(lengths, 1))
    unit = _EQUAL_SCATTER * scatter[0, count] / count**2
    cost = np.square(lengths, dtype=np.float64) + (scatter / unit if unit > 0 else 0.0)
    cost[lengths < 1] = np.inf
    best = np.where(places == 0, 0.0, np.inf)  # the least cost of the frames before b in k segments, here k = 0
    starts = np.empty((num_frames, count + 1), dtype=np.int64)  # of the last of k + 1 segments that end at b
    for k in range(num_frames):
        table = best[:, None] + cost
        starts[k] = table.argmin(0)
        best = table.min(0)
    chosen, end = np.empty(num_frames, dtype=np.int64), count
    for k in reversed(range(num_frames)):
        start = int(starts[k, end])
        inside = squared[start:end, start:end].sum(1)
        off_middle = np.abs(2 * np.arange(start, end) - (start + end - 1))
        chosen[k] = start + np.lexsort((off_middle, inside))[0]
        end = start
    return chosen


class Kts(Policy):
    name = "kts"
    description = "one frame of each of the N segments that kernel change points part"
    needs = frozenset({"frames"})

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        rows = zip(self.features(batch), batch.counts.tolist(), strict=True)
        return np.stack([kts(features[:count], num_frames) for features, count in rows])


def thumbnails(histograms: ArrayLike, num_frames: int) -> Indices:
    """Return the frame of each of N equal segments whose histogram is nearest to the mean of its segment, [N].

    Source: the filter `thumbnail` of ffmpeg. Taken: RGB histograms [T, 768] with a bin for each value of a channel, the
    squared distance to the mean histogram, and the first of equal frames. Different: N segments of T candidates instead
    of batches of a given number of neighbouring frames.

    >>> thumbnails([[4, 0], [3, 1], [0, 4], [0, 4], [1, 3], [1, 3]], 2).tolist()
    [1, 4]
    """
    table = np.asarray(histograms, dtype=np.float64)
    bounds = np.arange(num_frames + 1) * len(table) // num_frames
    chosen = np.empty(num_frames, dtype=np.int64)
    for k, (start, end) in enumerate(pairwise(bounds.tolist())):
        segment = table[start:end]
        chosen[k] = start + np.square(segment - segment.mean(0)).sum(1).argmin()
    return chosen


class Thumbnail(Policy):
    name = "thumbnail"
    description = "of each of N equal segments the frame with the most typical colours, as ffmpeg's thumbnail filter"
    needs = frozenset({"frames"})

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        histograms = batch.cached("histograms", lambda: self._histograms(batch))
        rows = zip(histograms, batch.counts.tolist(), strict=True)
        return np.stack([thumbnails(histogram[:count], num_frames) for histogram, count in rows])

    def _histograms(self, batch: Batch) -> Indices:
        """Pixels of each value of red, green and blue, [B, T, 768]."""
        assert batch.frames is not None, "it needs frames"
        return np.array([[Image.fromarray(frame).histogram() for frame in video] for video in batch.frames])


def pixel_features(frames: Frames) -> NDArray[np.float32]:
    """Return cheap descriptors [T, 320] of frames [T, H, W, 3] uint8, for `farthest_first_order` and `dpp_order`.

    Source: layout descriptors of image retrieval; the colours are those of MPEG-7's colour layout before its
    transform, the edges a coarse histogram of oriented gradients (Dalal and Triggs, CVPR 2005). Different: no blocks
    that overlap, no normalisation by contrast (a fade to black is a change), and both parts are scaled so that
    their distances compare: plain black and plain white are 1 apart.

    192 numbers are mean colours in 8 x 8 cells, 128 mean gradients by direction in 4 x 4 cells.
    """
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        given = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, np.ndarray) else type(frames).__name__
        raise InvalidArgument(f"frames are {given}; give images as a NumPy array, uint8 [T, H, W, 3]")
    if not frames.size:
        raise InvalidArgument(f"frames have shape {list(frames.shape)}; give at least one frame with pixels")
    return np.stack([_descriptor(_thumbnail(frame, "RGB") / np.float32(255)) for frame in frames])


def _descriptor(image: NDArray[np.float32]) -> NDArray[np.float32]:
    colours = _cell_means(image, _COLOUR_CELLS)
    grey = image @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    down, right = np.gradient(grey)
    turn = np.arctan2(down, right) / np.pi % 1  # 0..1 over half a turn
    # A gradient is shared by the two directions next to its own, so that no small turn is a jump.
    distance = np.abs(turn[..., None] * _DIRECTIONS - np.arange(_DIRECTIONS))
    share = np.maximum(0, 1 - np.minimum(distance, _DIRECTIONS - distance))
    edges = _cell_means(np.hypot(down, right)[..., None] * share, _EDGE_CELLS)
    parts = (colours / np.sqrt(colours.size), _EDGE_WEIGHT * edges / np.sqrt(edges.size))
    joined: NDArray[np.float32] = np.concatenate([part.ravel() for part in parts], dtype=np.float32)
    return joined


def _cell_means(image: NDArray[np.float32], cells: int) -> NDArray[np.float32]:
    """[64, 64, C] -> [cells, cells, C]"""
    side = _SIDE // cells
    means: NDArray[np.float32] = image.reshape(cells, side, cells, side, -1).mean(axis=(1, 3))
    return means


# ---- the rule of the general sampler

# Lower qualities count as this: black frames need not be ranked.
_MIN_QUALITY = 1e-3
_GRID = (
    32  # neighbours in time lie this share of the video apart: a denser grid of candidates is compared in larger steps
)
_LARGER = 0.75  # weight of the larger of both differences: where a movement begins or ends counts too
_COVERING = 8  # from as many chosen frames on coverage counts in full
_FEW_ROWS = 64
_BLEND = (
    0.2,
    0.45,
)  # of the change between two frames, what a mixture of them leaves over: surely one, and surely none
_BLEND_CHANGE = 0.2  # so much must two frames differ, of 0..1, so that a mixture of them differs from movement
_BLEND_SHARE = (0.1, 0.9)  # of the later frame in a mixture


def typical_order(
    quality: ArrayLike,
    features: ArrayLike,
    num_frames: int,
    *,
    times: ArrayLike | None = None,
    clearness: float = 0.3,
    clear: float = 0.65,
    sharpness: float = 4.0,
    movement: float = 8.0,
    most_movement: float = 0.1,
    redundancy: float = 0.3,
    alike: float = 0.7,
    coverage: float = 2.0,
    reach: float = 1 / 16,
    still: float = 0.003,
) -> tuple[Indices, Numbers]:
    """Return N candidates in the order of choice, and the value of every candidate by itself [T].

    The value is `clearness` · log quality + typicality + `movement` · unrest. Qualities above `clear` count as that.
    Typicality is the mean similarity to the other candidates, each counted by its quality: a frame that shows the theme
    of the video resembles many others, a stray one resembles none. Unrest is how far a frame differs from its two
    neighbours in time, up to `most_movement` and less if it is unclear itself: within a shot, frames in which something
    happens come before those in which nothing does, and a cut counts no more than a movement.

    Each step takes the candidate with the highest value - `redundancy` · repetition + `coverage` · what it adds.
    Repetition is 0 up to a similarity `alike` to the nearest chosen frame and 1 for the same image. A candidate covers
    itself, those of its shot (a similarity of `alike`) less and less up to `reach` away, a share of the video, and all
    that show the same still image (1 - similarity far below `still`). What it adds is the sum of what no chosen frame
    covers yet, each candidate counted by its quality; about 1 within a long shot, apart from all that is chosen.
    Coverage counts more with each step, in full from the 9th on: one or two frames go where most happens, eight are
    spread over the video. The first n of the order are the choice of n.

    Source: typicality is the relevance of centroid- and graph-based summaries (LexRank's degree centrality: Erkan and
    Radev, 2004), the trade against what is chosen is maximal marginal relevance (Carbonell and Goldstein, 1998),
    coverage is facility location (Lin and Bilmes, 2011) in time. Different: similarity below `alike` is no repetition,
    so that themes may be shown more than once, from other sides.

    Qualities [T] are in 0..1; similarity is the cosine of features [T, D], negative ones count as 0. In the typicality
    it is taken to the power `sharpness`: a high one counts near relatives alone. `times` [T] are seconds or frame
    numbers; without them the candidates lie evenly.

    >>> order, value = typical_order([1, 1, 1, 0.01], [[1, 0], [1, 0.1], [0, 1], [1, 0]], 3)
    >>> order.tolist()
    [1, 2, 0]
    """
    qualities, rows = np.asarray(quality, dtype=np.float64), np.asarray(features, dtype=np.float64)
    clean = np.minimum(qualities / clear, 1)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    similarity = np.clip(_products(unit), 0, 1)
    value = clearness * np.log(np.maximum(clean, _MIN_QUALITY))
    value += typicality(qualities, similarity**sharpness)
    value += movement * unrest(qualities, similarity, most_movement)
    repetition = np.square(np.clip((similarity - alike) / (1 - alike), 0, 1))
    near = np.clip(1 - time_apart(len(value), times) / reach, 0, 1) * (similarity >= alike)
    covers = np.maximum(near, np.clip(1 - (1 - similarity) / still, 0, 1))
    weight = clean / (len(value) * reach)  # a frame that covers `reach` on both sides, each half, adds 1
    order = np.empty(num_frames, dtype=np.int64)
    repeated, covered = np.zeros(len(value)), np.zeros(len(value))
    left = np.ones(len(value), dtype=bool)
    for step in range(num_frames):
        adds = weight @ np.maximum(covers - covered[:, None], 0)
        worth = value - redundancy * repeated + coverage * min(1.0, step / _COVERING) * adds
        pick = int(np.where(left, worth, -np.inf).argmax())
        order[step], left[pick] = pick, False
        repeated, covered = np.maximum(repeated, repetition[pick]), np.maximum(covered, covers[pick])
    return order, value


def _products(rows: Numbers) -> Numbers:
    """Products of all pairs of rows [T, D]: [T, T].

    Few rows are multiplied without BLAS: on a busy machine waking its threads takes tens of times as long.
    """
    return np.einsum("td,sd->ts", rows, rows) if len(rows) <= _FEW_ROWS else rows @ rows.T


def typicality(quality: Numbers, similarity: Numbers) -> Numbers:
    """Mean similarity [T, T] of each candidate to the others, weighed by their quality; 0 where there is no other."""
    others = similarity.copy()
    np.fill_diagonal(others, 0.0)
    total = quality.sum() - quality
    return np.asarray(np.divide(others @ quality, total, out=np.zeros(len(quality)), where=total > _MIN_QUALITY))


def unrest(quality: Numbers, similarity: Numbers, most: float) -> Numbers:
    """How far each candidate differs from its two neighbours in time, at most `most`; 0 for a single one.

    It counts in full from a quality of a half on: that a black frame differs from what is around it is no movement.
    """
    count = len(similarity)
    if count == 1:
        return np.zeros(1)
    lag, places = min(neighbour_step(count), count - 1), np.arange(count)
    before = np.where(places >= lag, places - lag, np.minimum(places + lag, count - 1))
    after = np.where(places + lag < count, places + lag, np.maximum(places - lag, 0))
    steps = 1 - np.stack([similarity[places, before], similarity[places, after]])
    differs = _LARGER * steps.max(0) + (1 - _LARGER) * steps.min(0)
    return np.asarray(np.minimum(differs, most) * np.minimum(1, 2 * quality))


def neighbour_step(num_candidates: int) -> int:
    """How many candidates on a neighbour in time lies: as far away in the video whether T is 32 or 320.

    >>> [neighbour_step(count) for count in (8, 32, 64, 320)]
    [1, 1, 2, 10]
    """
    return max(1, round(num_candidates / _GRID))


def time_apart(count: int, times: ArrayLike | None = None) -> Numbers:
    """How far candidates lie apart, as a share of the video: [T, T].

    >>> time_apart(4)[0].tolist(), time_apart(3, [0, 1, 5])[0].round(3).tolist()
    ([0.0, 0.25, 0.5, 0.75], [0.0, 0.133, 0.667])
    """
    at = np.arange(count, dtype=np.float64) if times is None else np.asarray(times, dtype=np.float64)
    apart = np.abs(at - at[:, None])
    span = apart.max() * count / max(1, count - 1)  # each candidate stands for as much before it as behind it
    return np.asarray(apart / span if span > 0 else apart)


def blends(frames: Frames) -> Numbers:
    """How sure each frame [T, H, W, 3] is a mixture of the one before it and the one behind it, 0..1, [T].

    So are frames in a cross-fade or a fade from or to black; outside of the video everything is black. Frames of a
    movement are no such mixture: their edges lie elsewhere.
    """
    step = max(1, min(frames.shape[1:3]) // (4 * _SIDE))  # of large frames some pixels are enough, and much faster
    small = np.stack([_thumbnail(frame[::step, ::step], "RGB").ravel() for frame in frames]) / np.float32(255)
    surely = np.zeros(len(small))
    for lag in range(1, neighbour_step(len(small)) + 1):
        black = np.zeros_like(small[:1]).repeat(lag, axis=0)
        padded = np.concatenate([black, small, black])
        before, after = padded[: len(small)], padded[2 * lag :]
        change = after - before
        size = np.maximum(np.linalg.norm(change, axis=1), 1e-9)
        share = ((small - before) * change).sum(1) / size**2
        rest = np.linalg.norm(small - before - share[:, None] * change, axis=1) / size
        mixed = (share > _BLEND_SHARE[0]) & (share < _BLEND_SHARE[1])
        mixed &= size > _BLEND_CHANGE * np.sqrt(small.shape[1])
        surely = np.maximum(surely, np.where(mixed, np.clip((_BLEND[1] - rest) / (_BLEND[1] - _BLEND[0]), 0, 1), 0))
    return surely


def edge_maps(frames: Frames) -> NDArray[np.float32]:
    """Where edges lie, as on written pages: lengths of the grey gradients of 128 x 128 pixels, [T, 16384]."""
    maps = []
    for frame in frames:
        small = Image.fromarray(frame).convert("L").resize((2 * _SIDE, 2 * _SIDE), Image.Resampling.BOX)
        maps.append(np.hypot(*np.gradient(np.asarray(small, dtype=np.float32) / 255)).ravel())
    return np.stack(maps)
