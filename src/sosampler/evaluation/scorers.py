"""Policies that look at pictures: what they see becomes a score for each candidate, in one pass over the bank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sosampler.evaluation.batches import FrameChunk, Videos
from sosampler.policies.learned import expected_of
from sosampler.policies.visual import change_scores, dpp_order, farthest_first_order, pixel_features
from sosampler.video.timeline import Indices

# Candidates that a sampler is handed at once.
_FRAMES_AT_ONCE = 1024
# Multiply-adds of MobileNetV2 at the general sampler's input size, in billions a frame.
GENERAL_GMACS = 0.098
# Orders by likeness alone: the first n are the choice of n.
ORDERS: dict[str, Callable[[ArrayLike, int], Indices]] = {"farthest-first": farthest_first_order, "dpp": dpp_order}


class Looked(NamedTuple):
    """What whoever looked at candidates says about them."""

    scores: Tensor  # [B, T]
    similarity: Tensor | None = None  # [B, T, T] if wanted
    expected: NDArray[np.float64] | None = None  # [B, T], of the k best at k - 1, if wanted


class Scorer(Protocol):
    """Scores for candidates. Two policies with the same key share them."""

    key: str
    wants_similarity: bool

    def score(self, frames: Tensor, mask: Tensor) -> Looked:
        """uint8 [B, T, 3, H, W], bool [B, T], real candidates first."""
        ...

    def in_unit(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Scores [B, T] as numbers in 0..1."""
        ...

    def gmacs(self, num_candidates: int) -> float: ...


class SamplerScorer:
    """A learned sampler."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.key = f"sampler {id(sampler)}"
        self.wants_similarity = False
        self.wants_expected = False

    def score(self, frames: Tensor, mask: Tensor) -> Looked:
        said = self.sampler.look(frames, None if bool(mask.all()) else mask)
        similarity = kernel(said.features, mask.to(said.features.device)) if self.wants_similarity else None
        expected = expected_of(self.sampler, said, mask.sum(1).cpu().numpy()) if self.wants_expected else None
        return Looked(said.scores, similarity, expected)

    def in_unit(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.sampler.calibration is not None:
            calibrated: Tensor = self.sampler.confidences(scores)
            return calibrated
        # Only the order of its scores means something: from the lowest of a video to the highest.
        low = scores.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
        high = scores.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
        return ((scores - low) / (high - low).clamp_min(1e-9)).clamp(0, 1)

    def gmacs(self, num_candidates: int) -> float:
        return float(self.sampler.gmacs(num_candidates))


class DifferenceScorer:
    """How much the picture changes."""

    key, wants_similarity = "frame-difference", False

    def score(self, frames: Tensor, mask: Tensor) -> Looked:
        scores = torch.zeros(mask.shape)
        pictures = frames.permute(0, 1, 3, 4, 2).numpy()
        for row, count in enumerate(mask.sum(1).tolist()):
            scores[row, :count] = torch.from_numpy(change_scores(pictures[row, :count])).float()
        return Looked(scores)

    def in_unit(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores

    def gmacs(self, num_candidates: int) -> float:
        return 0.0


class DiverseScorer:
    """How early a greedy order takes a picture that is unlike the others."""

    wants_similarity = False

    def __init__(self, name: str) -> None:
        self.key, self._order = name, ORDERS[name]

    def score(self, frames: Tensor, mask: Tensor) -> Looked:
        scores = torch.zeros(mask.shape)
        pictures = frames.permute(0, 1, 3, 4, 2).numpy()
        for row, count in enumerate(mask.sum(1).tolist()):
            order = self._order(pixel_features(pictures[row, :count]), count)
            scores[row, torch.from_numpy(order)] = -torch.arange(count, dtype=torch.float32)
        return Looked(scores)

    def in_unit(self, scores: Tensor, mask: Tensor) -> Tensor:
        return 1 + scores / mask.shape[1]

    def gmacs(self, num_candidates: int) -> float:
        return 0.0


class GeneralScorer:
    """How early the general sampler takes a picture."""

    key, wants_similarity = "general", False

    def score(self, frames: Tensor, mask: Tensor) -> Looked:
        from sosampler.policies.learned import general_order

        scores = torch.zeros(mask.shape)
        pictures = frames.permute(0, 1, 3, 4, 2).cpu().numpy()
        for row, count in enumerate(mask.sum(1).tolist()):
            order, _ = general_order(pictures[row, :count], count)
            scores[row, torch.from_numpy(order)] = -torch.arange(count, dtype=torch.float32)
        return Looked(scores)

    def in_unit(self, scores: Tensor, mask: Tensor) -> Tensor:
        return 1 + scores / mask.shape[1]

    def gmacs(self, num_candidates: int) -> float:
        return GENERAL_GMACS * num_candidates


def kernel(features: Tensor, mask: Tensor) -> Tensor:
    """How alike candidates are: the Gaussian kernel of their features [B, T, D], [B, T, T].

    Its width is the median distance within each video, so that it says which of its frames are alike for this video.
    """
    from sosampler.policies.redundancy import gaussian_kernel, median_bandwidth

    parts = [
        gaussian_kernel(some, median_bandwidth(some, mask=real))
        for some, real in zip(features.split(64), mask.split(64), strict=True)
    ]
    return torch.cat(parts)


def score_chunk(
    scorers: Sequence[Scorer], videos: Videos, chunk: FrameChunk, candidates: Sequence[int]
) -> dict[tuple[str, int], float]:
    """Fill in the tables of `videos` for those in the chunk; seconds by scorer and number of candidates."""
    seconds: dict[tuple[str, int], float] = {}
    numbers = chunk.numbers
    for num_candidates in candidates:
        both = [videos.slots(number, num_candidates) for number in numbers.tolist()]
        counts = np.array([count for _, count in both])
        mask = np.arange(num_candidates) < counts[:, None]
        for group in chunk.by_shape(numbers.tolist()):
            at_once = chunk.clips_at_once(int(numbers[group[0]]), num_candidates, _FRAMES_AT_ONCE)
            for begin in range(0, len(group), at_once):
                places = group[begin : begin + at_once]
                here = numbers[places]
                frames, _ = chunk.stacked(here.tolist(), [both[place][0] for place in places.tolist()])
                for scorer in scorers:
                    begun = time.perf_counter()
                    said = scorer.score(frames, torch.from_numpy(mask[places]))
                    _table(videos.scores, scorer.key, num_candidates, len(videos), 2)[here] = said.scores.cpu().numpy()
                    if said.similarity is not None:
                        table = _table(videos.similarity, scorer.key, num_candidates, len(videos), 3)
                        table[here] = said.similarity.cpu().numpy()
                    if said.expected is not None:
                        table = _table(videos.expected, scorer.key, num_candidates, len(videos), 2, dtype=np.float64)
                        table[here] = said.expected
                    key = scorer.key, num_candidates
                    seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - begun
    return seconds


def _table(
    tables: dict[tuple[str, int], Any],
    key: str,
    num_candidates: int,
    num_videos: int,
    ndim: int,
    dtype: Any = np.float32,
) -> Any:
    if (key, num_candidates) not in tables:
        shape = (num_videos, *(num_candidates,) * (ndim - 1))
        tables[key, num_candidates] = np.zeros(shape, dtype=dtype)
    return tables[key, num_candidates]
