"""Videos in batches with the teacher's outputs, and the probabilities of chosen clips.

Clips are pooled from stored features where the classifier allows it; else it is run on stored frames, read in chunks.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.bank.annotate import views_of
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.classifiers.base import activate
from sosampler.errors import InvalidArgument
from sosampler.policies.optimal import (
    DEFAULT_MAX_SUBSETS,
    OptimalChoice,
    beam_search,
    optimal_by_enumeration,
    optimal_mean_logits,
    optimal_pooled,
)
from sosampler.samplers.sosampler import SMALLEST_PROBABILITY, log_label_confidence
from sosampler.video.candidates import uniform_positions

_MAX_NUMBERS = 1 << 26  # of features that are gathered at a time (256 MiB of float32)
_MAX_FRAMES = 512  # that a classifier gets at a time
# Subsets of one video that are enumerated even if the optimal policy is not among those to evaluate, and clips that a
# classifier is always run on in its search.
_MAX_CLIPS = 1000


# ---- the teacher's outputs


@dataclass(eq=False)
class TeacherBatch:
    """The teacher's outputs for B videos with T candidates each; policies see it as `Batch.teacher`.

    A short video repeats frames among its candidates. Here each frame is listed once and the rest is padding at the
    end, so that no frame is chosen twice while another is left.
    """

    clips: Clips
    beam_width: int
    indices: Indices  # [B], which videos of the split
    slots: Indices  # [B, T], the stored frame of each candidate; padding repeats the last one
    counts: Indices  # [B], real candidates
    mask: Tensor  # bool [B, T], True for a real one
    labels: Tensor  # bool [B, C]
    frame_probs: Tensor  # float32 [B, T, C], the classifier's probabilities for each frame alone
    features: Tensor | None = None  # float32 [B, T, D], what a pooled classifier joins
    chunk: FrameChunk | None = None  # for classifiers that must see the frames of each clip
    shows_class: NDArray[np.bool_] | None = None  # [B, T], where the bank knows it; means nothing for padding
    # Of the classifier, before its class layer, and the position in the bank of each video of the split; for probes
    class_inputs: tuple[Features, Sequence[int]] | None = None
    search: OptimalChoice | None = None  # of the last `optimal`

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_candidates(self) -> int:
        return int(self.slots.shape[1])

    @property
    def real(self) -> Tensor | None:
        """The mask, or None where nothing is masked."""
        return None if (self.counts == self.num_candidates).all() else self.mask

    def rows(self, rows: Indices) -> TeacherBatch:
        """Return some of the videos."""
        here = torch.from_numpy(rows).to(self.mask.device)
        return replace(
            self,
            indices=self.indices[rows],
            slots=self.slots[rows],
            counts=self.counts[rows],
            mask=self.mask[here],
            labels=self.labels[here],
            frame_probs=self.frame_probs[here],
            features=None if self.features is None else self.features[here],
            shows_class=None if self.shows_class is None else self.shows_class[rows],
            search=None,
        )

    def label_log_confidence(self) -> NDArray[np.float64]:
        """Return each frame's log confidence in the labels [B, T]."""
        return np.asarray(log_label_confidence(self.clips.frame_log_probs(self), self.labels).double().cpu())

    def max_log_confidence(self) -> NDArray[np.float64]:
        """Return each frame's log probability of its most probable class [B, T]."""
        return np.asarray(self.clips.frame_log_probs(self).amax(-1).double().cpu())

    def expected_log_confidence(self) -> NDArray[np.float64]:
        """Return log sum_c b(c) p_t(c) of each frame [B, T], b being the classifier's answer from all real frames."""
        belief = torch.empty(self.labels.shape, dtype=torch.float64, device=self.mask.device)  # log b [B, C]
        for count in np.unique(self.counts).tolist():
            rows = np.flatnonzero(self.counts == count)
            every = torch.arange(count, device=self.mask.device).expand(len(rows), 1, -1)
            belief[torch.from_numpy(rows).to(belief.device)] = self.clips.log_probs(self.rows(rows), every)[:, 0]
        belief = belief.log_softmax(-1)  # probabilities of independent classes need not sum to 1
        return np.asarray((self.clips.frame_log_probs(self) + belief[:, None]).logsumexp(-1).cpu())

    def frame_logits(self) -> NDArray[np.float64]:
        """Return the teacher's logits for each frame alone [B, T, C]."""
        return np.asarray(self.clips.frame_logits(self).cpu())

    def frame_features(self) -> NDArray[np.float32]:
        """Return what the teacher pools, or else its probabilities, [B, T, D]."""
        return np.asarray((self.frame_probs if self.features is None else self.features).cpu())

    def probed_features(self) -> NDArray[np.floating[Any]]:
        """Return the classifier's features before its class layer, [B, T, D]."""
        assert self.class_inputs is not None, "checked by `answer_refusal`"
        features, positions = self.class_inputs
        videos = zip(self.indices.tolist(), self.slots, strict=True)
        return np.stack([features[positions[index]][row] for index, row in videos])

    def optimal(self, num_frames: int) -> Indices:
        """Return the positions [B, N] of the clip that is most confident in the labels."""
        self.search = self.clips.optimal(self, num_frames)
        return np.asarray(self.search.positions.cpu())


def candidate_slots(stored: int, num_candidates: int) -> tuple[Indices, int]:
    """Return the stored frames [T] of the candidates of a video, and how many of them are real.

    >>> candidate_slots(3, 5)
    (array([0, 1, 2, 2, 2]), 3)
    """
    count = min(stored, num_candidates)
    slots = np.full(num_candidates, count - 1, dtype=np.int64)
    slots[:count] = uniform_positions(stored, count)
    return slots, count


@dataclass(eq=False)
class Videos:
    """The evaluated videos: labels, lengths, and the teacher's outputs in batches."""

    teacher: Teacher
    positions: Sequence[int]  # in the bank
    labels: NDArray[np.bool_]  # multi-hot [V, C]
    device: torch.device
    clips: Clips
    beam_width: int

    shows_class: Sequence[NDArray[np.bool_]] | None = None  # of the stored frames of each video, where it is needed
    class_inputs: Features | None = None  # where the bank has them

    def __post_init__(self) -> None:
        self.lengths = np.array([len(self.teacher[position].frame_probs) for position in self.positions])

    def __len__(self) -> int:
        return len(self.positions)

    def numbers_a_candidate(self) -> int:
        """Return how many numbers a batch holds for each candidate."""
        width = 0 if self.clips.needs_frames else self.teacher.about["features"]["width"]
        return int(self.labels.shape[1] + width)

    def candidates(self, indices: Indices, num_candidates: int) -> tuple[Indices, Indices]:
        """Return the stored frames [B, T] of the candidates of some videos, and how many are real [B]."""
        both = [candidate_slots(length, num_candidates) for length in self.lengths[indices].tolist()]
        return np.stack([slots for slots, _ in both]), np.array([count for _, count in both], dtype=np.int64)

    def batches(
        self, indices: Indices, candidates: Sequence[int], chunk: FrameChunk | None = None
    ) -> dict[int, TeacherBatch]:
        """Return the same videos with each number of candidates; the teacher's rows are read once."""
        outputs = [self.teacher[self.positions[index]] for index in indices.tolist()]
        batches = {}
        for num_candidates in candidates:
            slots, counts = self.candidates(indices, num_candidates)
            probs = np.stack([output.frame_probs[row] for output, row in zip(outputs, slots, strict=True)])
            features = None
            if not self.clips.needs_frames:
                stored = np.stack([output.features[row] for output, row in zip(outputs, slots, strict=True)])
                features = torch.from_numpy(stored).to(self.device).float()
            batches[num_candidates] = TeacherBatch(
                self.clips,
                self.beam_width,
                indices,
                slots,
                counts,
                mask=torch.from_numpy(np.arange(num_candidates) < counts[:, None]).to(self.device),
                labels=torch.from_numpy(self.labels[indices]).to(self.device),
                frame_probs=torch.from_numpy(probs).to(self.device).float(),
                features=features,
                chunk=chunk,
                shows_class=None
                if self.shows_class is None
                else np.stack([self.shows_class[i][row] for i, row in zip(indices.tolist(), slots, strict=True)]),
                class_inputs=None if self.class_inputs is None else (self.class_inputs, self.positions),
            )
        return batches


# ---- clips


class Clips(ABC):
    """A frozen classifier, as an evaluation needs it."""

    needs_frames = False

    @abstractmethod
    def log_probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Return the log probabilities of the clips at positions [B, K, n], float64 [B, K, C]."""

    @abstractmethod
    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Return the probabilities float32 [B, C] of the clips of the candidates at `positions` [B, N]."""

    @abstractmethod
    def optimal(self, batch: TeacherBatch, num_frames: int) -> OptimalChoice: ...

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        """Return whether the optimal policy is cheap enough to compare others with it in any case."""
        return math.comb(num_candidates, num_frames) <= _MAX_CLIPS

    def frame_log_probs(self, batch: TeacherBatch) -> Tensor:
        """Return the log probabilities of each frame as a clip of one, float64 [B, T, C]."""
        # From the clips: banks store probabilities in float16, in which all frames of a confident classifier tie.
        alone = torch.arange(batch.num_candidates, device=batch.mask.device)[None, :, None]
        return self.log_probs(batch, alone.expand(len(batch), -1, 1))

    def frame_logits(self, batch: TeacherBatch) -> Tensor:
        """Return the logits of each frame as a clip of one, float64 [B, T, C], where clips are pooled from features."""
        raise NotImplementedError

    def log_confidence(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        """Return the log confidence in the labels of the clips at positions [B, K, n], [B, K]."""
        width = 1 if batch.features is None else batch.features.shape[2]
        size = max(1, _MAX_NUMBERS // (len(batch) * positions.shape[2] * width))
        parts = positions.split(size, dim=1)
        return torch.cat([log_label_confidence(self.log_probs(batch, part), batch.labels) for part in parts], dim=1)

    def _beam(self, batch: TeacherBatch, num_frames: int) -> OptimalChoice:
        return beam_search(
            partial(self.log_confidence, batch),
            len(batch),
            batch.num_candidates,
            num_frames,
            width=batch.beam_width,
            mask=batch.real,
            device=batch.mask.device,
            narrowed=lambda videos: partial(self.log_confidence, batch.rows(videos)),
        )


class MeanClips(Clips):
    """Average stored logits; needs no network."""

    def __init__(self, activation: str) -> None:
        self.activation = activation

    def _logits(self, features: Tensor) -> Tensor:
        """[..., N, D] -> [..., C]"""
        return features.mean(-2)

    def frame_logits(self, batch: TeacherBatch) -> Tensor:
        return self._logits(_features(batch)[:, :, None]).double()

    def _pool(self, features: Tensor) -> Tensor:
        """[B, N, D] -> probabilities [B, C]"""
        return activate(features.mean(-2), self.activation)

    def log_probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        videos = torch.arange(len(batch), device=batch.mask.device)[:, None, None]
        logits = self._logits(_features(batch)[videos, positions]).double()  # exact, so that close clips do not tie
        return logits.log_softmax(-1) if self.activation == "softmax" else torch.nn.functional.logsigmoid(logits)

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        features = _features(batch)
        size = max(1, _MAX_NUMBERS // (positions.shape[1] * features.shape[2]))
        parts = []
        for some, where in zip(features.split(size), positions.to(features.device).split(size), strict=True):
            parts.append(self._pool(some.gather(1, where[..., None].expand(-1, -1, features.shape[2]))))
        return torch.cat(parts)

    def optimal(self, batch: TeacherBatch, num_frames: int) -> OptimalChoice:
        features = _features(batch)
        return optimal_mean_logits(features, batch.labels, num_frames, activation=self.activation, mask=batch.real)


class PooledClips(MeanClips):
    """Pool stored features by the classifier's own pool."""

    def __init__(self, classifier: Any) -> None:
        super().__init__(classifier.activation)
        self.classifier = classifier

    @torch.no_grad()
    def _logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier.pool_logits(features.to(self.classifier.device))
        return logits.double().to(features.device)

    def _pool(self, features: Tensor) -> Tensor:
        probs: Tensor = self.classifier.pool(features)
        return probs.to(features.device)

    def optimal(self, batch: TeacherBatch, num_frames: int) -> OptimalChoice:
        if math.comb(batch.num_candidates, num_frames) > DEFAULT_MAX_SUBSETS:
            return self._beam(batch, num_frames)
        return optimal_pooled(
            _features(batch),
            batch.labels,
            num_frames,
            pool_logits=self._logits,
            activation=self.activation,
            mask=batch.real,
        )


class ClassifiedClips(Clips):
    """Run the classifier on the frames of each clip, once for each clip of a chunk."""

    needs_frames = True

    def __init__(self, classifier: Any, views: int) -> None:
        self.classifier, self.views = classifier, views

    def log_probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        probs = torch.from_numpy(self._clip_probs(batch, positions)).to(batch.labels.device)
        return probs.double().clamp_min(SMALLEST_PROBABILITY).log()

    def probs(self, batch: TeacherBatch, positions: Tensor) -> Tensor:
        return torch.from_numpy(self._clip_probs(batch, positions[:, None])[:, 0]).to(positions.device)

    def enumerable(self, num_candidates: int, num_frames: int) -> bool:
        return False

    def optimal(self, batch: TeacherBatch, num_frames: int) -> OptimalChoice:
        # A beam classifies at most this many clips: at each size, so many sets times so many frames to add.
        max_clips = max(_MAX_CLIPS, batch.beam_width * batch.num_candidates * num_frames)
        if math.comb(batch.num_candidates, num_frames) > max_clips:
            return self._beam(batch, num_frames)
        return optimal_by_enumeration(
            partial(self.log_confidence, batch),
            len(batch),
            batch.num_candidates,
            num_frames,
            mask=batch.real,
            device=batch.mask.device,
            max_subsets=max_clips,
        )

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
            frames, where, _ = chunk.stacked([index for index, _ in clips], [np.array(clip) for _, clip in clips])
            tensor = torch.from_numpy(frames).permute(0, 1, 4, 2, 3)  # [B, n, 3, H, W]
            chunk.clip_probs.update(zip(clips, self._run(tensor, torch.from_numpy(where)), strict=True))
        return np.stack([np.stack([chunk.clip_probs[key] for key in row]) for row in keys])

    @torch.no_grad()
    def _run(self, frames: Tensor, positions: Tensor) -> NDArray[np.float32]:
        probs = [self.classifier.clip_probs(view, positions) for view in views_of(frames, self.views)]
        mean: NDArray[np.float32] = torch.stack(probs).mean(0).float().cpu().numpy()
        return mean


def _features(batch: TeacherBatch) -> Tensor:
    assert batch.features is not None, "batches hold features where clips are pooled from them"
    return batch.features


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
    if type(clips) is MeanClips:
        for about in teacher.bank.feature_sets.values():
            if about["network"] == "classifier" and about["fingerprint"] == teacher.about["fingerprint"]:
                a_frame = float(about["gmacs"])
                return lambda num_frames: num_frames * a_frame
    return None


# ---- stored frames

_MAX_THREADS = 8
# Frames of one chunk; the next one is being read meanwhile.
_CHUNK_BYTES = 256 << 20
# Frames that go to a network together; a GPU resizes them in float32, which takes four times as much.
_STACK_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class StoredFrames:
    """Some of the stored frames of one video, in their stored size."""

    stored: Indices  # [S] ascending, which of the stored frames
    frames: Frames  # uint8 [S, H, W, 3]
    positions: NDArray[np.float32]  # [S] in 0..1, relative to the length of the video
    pts_seconds: Seconds  # [S]


@dataclass(eq=False)
class FrameChunk:
    """Stored frames of some videos, by index, and the probabilities of their clips that were computed already."""

    videos: dict[int, StoredFrames]
    clip_probs: dict[tuple[int, tuple[int, ...]], NDArray[np.float32]] = field(default_factory=dict)

    @property
    def indices(self) -> Indices:
        return np.array(list(self.videos), dtype=np.int64)

    def groups(self, indices: Iterable[int], num_frames: int, max_frames: int) -> Iterator[NDArray[np.int64]]:
        """Group `indices` into clips of `num_frames` that go to a network together: positions among them, in order.

        Frames of a group have one size, and all fit into memory.
        """
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for position, index in enumerate(indices):
            by_shape.setdefault(self.videos[index].frames.shape[1:], []).append(position)
        for shape, positions in by_shape.items():
            size = max(1, min(max_frames, _STACK_BYTES // int(np.prod(shape))) // num_frames)
            for begin in range(0, len(positions), size):
                yield np.array(positions[begin : begin + size], dtype=np.int64)

    def stacked(self, indices: Sequence[int], slots: Sequence[Indices]) -> tuple[Frames, NDArray[np.float32], Seconds]:
        """Return stored frames of videos of one size, uint8 [B, N, H, W, 3], their positions and their times [B, N]."""
        videos = [self.videos[index] for index in indices]
        where = [np.searchsorted(video.stored, row) for video, row in zip(videos, slots, strict=True)]
        pairs = list(zip(videos, where, strict=True))
        return (
            np.stack([video.frames[row] for video, row in pairs]),
            np.stack([video.positions[row] for video, row in pairs]).astype(np.float32),
            np.stack([video.pts_seconds[row] for video, row in pairs]),
        )


def read_chunks(bank: Bank, positions: Sequence[int], wanted: Sequence[Indices]) -> Iterator[FrameChunk]:
    """Read the stored frames `wanted` of the videos at `positions` of the bank, in order; videos count from 0."""
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, "sosampler-evaluate") as pool:
        pending: deque[Future[StoredFrames]] = deque()
        upcoming = zip(positions, wanted, strict=True)

        def submit_one() -> None:
            for position, stored in upcoming:
                pending.append(pool.submit(_read, bank, position, stored))
                return

        for _ in range(2 * threads):
            submit_one()
        chunk: dict[int, StoredFrames] = {}
        size = 0
        try:
            for index in range(len(positions)):
                chunk[index] = pending.popleft().result()
                submit_one()
                size += chunk[index].frames.nbytes
                if size >= _CHUNK_BYTES or index == len(positions) - 1:
                    yield FrameChunk(chunk)
                    chunk, size = {}, 0
        finally:
            for future in pending:
                future.cancel()


def _read(bank: Bank, position: int, stored: Indices) -> StoredFrames:
    item = bank[position]
    return StoredFrames(stored, item.frames(stored), item.positions[stored], item.pts_seconds[stored])
