"""Probabilities of chosen clips: pooled from stored features where the classifier allows it, else by running it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.bank.annotate import views_of
from sosampler.bank.outputs import Teacher
from sosampler.classifiers.base import activate
from sosampler.errors import InvalidArgument
from sosampler.evaluation.batches import TeacherBatch
from sosampler.policies.optimal import (
    DEFAULT_MAX_SUBSETS,
    OptimalChoice,
    beam_search,
    optimal_by_enumeration,
    optimal_mean_logits,
    optimal_pooled,
)
from sosampler.samplers.sosampler import SMALLEST_PROBABILITY, log_label_confidence

_MAX_NUMBERS = 1 << 26  # of features that are gathered at a time (256 MiB of float32)
_MAX_FRAMES = 512  # that a classifier gets at a time
# Subsets of one video that are enumerated even if the optimal policy is not among those to evaluate, and clips that a
# classifier is always run on in its search.
_MAX_CLIPS = 1000


class Clips(Protocol):
    """A frozen classifier, as an evaluation needs it."""

    needs_frames: bool

    def frame_log_probs(self, batch: TeacherBatch) -> Tensor:
        """Return the log probabilities of each frame as a clip of one, float64 [B, T, C]."""
        ...

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Return the probabilities float32 [B, C] of the clips of the candidates at `positions` [B, N]."""
        ...

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        """Return whether the optimal policy is cheap enough to compare others with it in any case."""
        ...

    def optimal(self, batch: TeacherBatch, num_frames: int, beam_width: int) -> OptimalChoice: ...


class MeanClips:
    """Average stored logits; needs no network."""

    needs_frames = False

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def frame_log_probs(self, batch: TeacherBatch) -> Tensor:
        return log_probabilities(_features(batch), self.activation)

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        return _pooled(batch, positions, lambda features: activate(features.mean(-2), self.activation))

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        return math.comb(num_candidates, num_frames) <= _MAX_CLIPS

    def optimal(self, batch: TeacherBatch, num_frames: int, beam_width: int) -> OptimalChoice:
        return optimal_mean_logits(
            _features(batch), batch.labels, num_frames, activation=self.activation, mask=batch.real
        )


class PooledClips:
    """Pool stored features by the classifier's own pool."""

    needs_frames = False

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier
        self.activation: str = classifier.activation

    @torch.no_grad()
    def _pool_logits(self, features: Tensor) -> Tensor:
        """[..., N, D] -> float64 [..., C], on the features' device."""
        logits: Tensor = self.classifier.pool_logits(features.to(self.classifier.device))
        return logits.double().to(features.device)

    def frame_log_probs(self, batch: TeacherBatch) -> Tensor:
        features = _features(batch).unsqueeze(-2)  # [B, T, 1, D], each frame a clip of one
        size = max(1, _MAX_NUMBERS // (features.shape[1] * features.shape[3]))
        return torch.cat([log_probabilities(self._pool_logits(part), self.activation) for part in features.split(size)])

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        return _pooled(batch, positions, lambda features: self.classifier.pool(features).to(features.device))

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        return math.comb(num_candidates, num_frames) <= _MAX_CLIPS

    def optimal(self, batch: TeacherBatch, num_frames: int, beam_width: int) -> OptimalChoice:
        if math.comb(batch.num_candidates, num_frames) <= DEFAULT_MAX_SUBSETS:
            return optimal_pooled(
                _features(batch),
                batch.labels,
                num_frames,
                pool_logits=self._pool_logits,
                activation=self.activation,
                mask=batch.real,
            )
        return _beam(self._clip_log_confidence, batch, num_frames, beam_width)

    def _clip_log_confidence(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Of the clips at positions [B, K, n]: [B, K]."""
        features, videos = _features(batch), torch.arange(len(batch), device=batch.mask.device)[:, None, None]
        size = max(1, _MAX_NUMBERS // (len(batch) * positions.shape[2] * features.shape[2]))
        parts = []
        for part in positions.split(size, dim=1):  # [B, k, n]
            logits = self._pool_logits(features[videos, part])
            parts.append(log_label_confidence(log_probabilities(logits, self.activation), batch.labels))
        return torch.cat(parts, dim=1)


class ClassifiedClips:
    """Run the classifier on the frames of each clip, once for each clip of a chunk."""

    needs_frames = True

    def __init__(self, classifier: Any, views: int) -> None:
        self.classifier, self.views = classifier, views

    def frame_log_probs(self, batch: TeacherBatch) -> Tensor:
        # Banks store probabilities in float16, in which all frames of a confident classifier tie; so it is run.
        alone = torch.arange(batch.num_candidates)[None, :, None].expand(len(batch), -1, 1)
        return self._log_probs(batch, alone)

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        return torch.from_numpy(self._clip_probs(batch, positions[:, None])[:, 0]).to(positions.device)

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        return False

    def optimal(self, batch: TeacherBatch, num_frames: int, beam_width: int) -> OptimalChoice:
        # A beam classifies at most this many clips: at each size, so many sets times so many frames to add.
        max_clips = max(_MAX_CLIPS, beam_width * batch.num_candidates * num_frames)
        if math.comb(batch.num_candidates, num_frames) > max_clips:
            return _beam(self._clip_log_confidence, batch, num_frames, beam_width)
        return optimal_by_enumeration(
            partial(self._clip_log_confidence, batch),
            len(batch),
            batch.num_candidates,
            num_frames,
            mask=batch.real,
            device=batch.mask.device,
            max_subsets=max_clips,
        )

    def _clip_log_confidence(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Of the clips at positions [B, K, n]: [B, K]."""
        return log_label_confidence(self._log_probs(batch, positions), batch.labels)

    def _log_probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Of the clips at positions [B, K, n], float64 [B, K, C]."""
        probs = torch.from_numpy(self._clip_probs(batch, positions)).to(batch.labels.device)
        return probs.double().clamp_min(SMALLEST_PROBABILITY).log()

    def _clip_probs(self, batch: TeacherBatch, positions: Tensor) -> NDArray[np.float32]:
        """Return the probabilities [B, K, C] of the clips at positions [B, K, n]."""
        chunk = batch.chunk
        assert chunk is not None, "frames are read where clips need them"
        slots = np.take_along_axis(batch.slots[:, None], positions.cpu().numpy(), axis=2)  # [B, K, n] stored frames
        keys = [
            [(index, tuple(clip)) for clip in clips]
            for index, clips in zip(batch.indices.tolist(), slots.tolist(), strict=True)
        ]
        new = list(dict.fromkeys(key for row in keys for key in row if key not in chunk.clip_probs))
        for group in chunk.groups((index for index, _ in new), slots.shape[2], _MAX_FRAMES):
            clips = [new[position] for position in group.tolist()]
            frames, where = chunk.stacked([index for index, _ in clips], [np.array(clip) for _, clip in clips])
            tensor = torch.from_numpy(frames).permute(0, 1, 4, 2, 3)  # [B, n, 3, H, W]
            chunk.clip_probs.update(zip(clips, self._run(tensor, torch.from_numpy(where)), strict=True))
        return np.stack([np.stack([chunk.clip_probs[key] for key in row]) for row in keys])

    @torch.no_grad()
    def _run(self, frames: Tensor, positions: Tensor) -> NDArray[np.float32]:
        probs = [self.classifier.clip_probs(view, positions) for view in views_of(frames, self.views)]
        mean: NDArray[np.float32] = torch.stack(probs).mean(0).float().cpu().numpy()
        return mean


def clips_for(teacher: Teacher, classifier: Any) -> Clips:
    """Return how clips of this teacher are classified; `classifier` is None where only its outputs are at hand."""
    about = teacher.about
    stored = about["features"] is not None
    if stored and teacher.pooling == "mean":
        return MeanClips("sigmoid" if about.get("multi_label") else "softmax")
    if classifier is None:
        why = f"joins frames by its own {teacher.pooling!r} pool" if stored else "stores no features of its frames"
        raise InvalidArgument(
            f"{teacher.bank.path}: the teacher {about['name']!r} {why}, so the classifier itself is needed; "
            "give it as classifier (--classifier FOLDER)"
        )
    if stored and hasattr(classifier, "pool_logits"):
        return PooledClips(classifier)
    return ClassifiedClips(classifier, int(about["views"]))


def gmacs_of_clips(clips: Clips, classifier: Any, teacher: Teacher) -> Callable[[int], float] | None:
    """Return the giga multiply-adds of a clip of N frames, by N; None where they are unknown.

    Where the classifier is not at hand, features of it that the bank stores have the cost of one frame: the Nth part
    of a clip, because such a classifier averages over frames that it sees one by one.
    """
    if hasattr(classifier, "gmacs"):
        return lambda num_frames: float(classifier.gmacs(num_frames))
    if isinstance(clips, MeanClips):
        for about in teacher.bank.feature_sets.values():
            if about["network"] == "classifier" and about["fingerprint"] == teacher.about["fingerprint"]:
                a_frame = float(about["gmacs"])
                return lambda num_frames: num_frames * a_frame
    return None


def log_probabilities(logits: Tensor, activation: str) -> Tensor:
    """Return exact logarithms of the probabilities of logits [..., C], float64."""
    logits = logits.double()
    return logits.log_softmax(-1) if activation == "softmax" else torch.nn.functional.logsigmoid(logits)


def _features(batch: TeacherBatch) -> Tensor:
    assert batch.features is not None, "batches hold features where clips are pooled from them"
    return batch.features


def _pooled(batch: TeacherBatch, positions: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `pool` of the gathered features [b, N, D], some videos at a time: [B, C]."""
    features = _features(batch)
    size = max(1, _MAX_NUMBERS // (positions.shape[1] * features.shape[2]))
    parts = []
    for some, where in zip(features.split(size), positions.to(features.device).split(size), strict=True):
        parts.append(pool(some.gather(1, where[..., None].expand(-1, -1, features.shape[2]))))
    return torch.cat(parts)


def _beam(
    clip_log_confidence: Callable[[TeacherBatch, Tensor], Tensor], batch: TeacherBatch, num_frames: int, width: int
) -> OptimalChoice:
    return beam_search(
        partial(clip_log_confidence, batch),
        len(batch),
        batch.num_candidates,
        num_frames,
        width=width,
        mask=batch.real,
        device=batch.mask.device,
        narrowed=lambda videos: partial(clip_log_confidence, batch.rows(videos)),
    )
