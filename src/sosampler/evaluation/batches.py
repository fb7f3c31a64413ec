"""The videos of an evaluation in batches: their candidates, the teacher's outputs, and stored frames in chunks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.video.candidates import uniform_positions


@dataclass(frozen=True, eq=False)
class TeacherBatch:
    """The teacher's outputs for B videos with T candidates each.

    A short video repeats frames among its candidates. Here each frame is listed once and the rest is padding at the
    end, so that no frame is chosen twice while another is left.
    """

    indices: Indices  # [B], which videos of the split
    slots: Indices  # [B, T], the stored frame of each candidate; padding repeats the last one
    counts: Indices  # [B], real candidates
    mask: Tensor  # bool [B, T], True for a real one
    labels: Tensor  # bool [B, C]
    frame_probs: Tensor  # float32 [B, T, C], the classifier's probabilities for each frame alone
    features: Tensor | None = None  # float32 [B, T, D], what a pooled classifier joins
    chunk: FrameChunk | None = None  # for classifiers that must see the frames of each clip

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
        )


def candidate_slots(stored: int, num_candidates: int) -> tuple[Indices, int]:
    """Return the stored frames [T] of the candidates of a video, and how many of them are real.

    >>> candidate_slots(3, 5)
    (array([0, 1, 2, 2, 2]), 3)
    """
    count = min(stored, num_candidates)
    slots = np.full(num_candidates, count - 1, dtype=np.int64)
    slots[:count] = uniform_positions(stored, count)
    return slots, count


class Videos:
    """The evaluated videos: labels, lengths, and the teacher's outputs in batches.

    Args:
        teacher: of the split's bank.
        positions: of the videos in the bank.
        labels: multi-hot bool [V, C].
        device: of the batches.
        with_features: whether the classifier pools stored features.
    """

    def __init__(
        self,
        teacher: Teacher,
        positions: Sequence[int],
        labels: NDArray[np.bool_],
        device: torch.device,
        *,
        with_features: bool,
    ) -> None:
        self.teacher, self.positions, self.labels = teacher, list(positions), labels
        self.device, self.with_features = device, with_features
        self.lengths = np.array([len(teacher[position].frame_probs) for position in self.positions], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def numbers_a_candidate(self) -> int:
        """Return how many numbers a batch holds for each candidate."""
        features = self.teacher.about["features"]
        return int(self.labels.shape[1] + (features["width"] if self.with_features else 0))

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
            if self.with_features:
                stored = np.stack([output.features[row] for output, row in zip(outputs, slots, strict=True)])
                features = torch.from_numpy(stored).to(self.device).float()
            batches[num_candidates] = TeacherBatch(
                indices=indices,
                slots=slots,
                counts=counts,
                mask=torch.from_numpy(np.arange(num_candidates) < counts[:, None]).to(self.device),
                labels=torch.from_numpy(self.labels[indices]).to(self.device),
                frame_probs=torch.from_numpy(probs).to(self.device).float(),
                features=features,
                chunk=chunk,
            )
        return batches


# ---- stored frames

_MAX_THREADS = 8
# Frames of one chunk; the next one is being read meanwhile.
CHUNK_BYTES = 256 << 20
# Frames that go to a network together; a GPU resizes them in float32, which takes four times as much.
_STACK_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class StoredFrames:
    """Some of the stored frames of one video, in their stored size."""

    stored: Indices  # [S] ascending, which of the stored frames
    frames: Frames  # uint8 [S, H, W, 3]
    positions: NDArray[np.float32]  # [S] in 0..1, relative to the length of the video
    pts_seconds: Seconds  # [S]

    def find(self, slots: Indices) -> Indices:
        """Return where the stored frames `slots` are in `frames`."""
        return np.searchsorted(self.stored, slots).astype(np.int64)


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

    def stacked(self, indices: Sequence[int], slots: Sequence[Indices]) -> tuple[Frames, NDArray[np.float32]]:
        """Return the stored frames `slots` of videos of one size, uint8 [B, N, H, W, 3], and their positions [B, N]."""
        pairs = [(self.videos[index], row) for index, row in zip(indices, slots, strict=True)]
        frames = np.stack([video.frames[video.find(row)] for video, row in pairs])
        return frames, np.stack([video.positions[video.find(row)] for video, row in pairs]).astype(np.float32)

    def pts_seconds(self, indices: Sequence[int], slots: Sequence[Indices]) -> Seconds:
        """Return the times of the stored frames `slots`, [B, N]."""
        pairs = [(self.videos[index], row) for index, row in zip(indices, slots, strict=True)]
        return np.stack([video.pts_seconds[video.find(row)] for video, row in pairs])


def read_chunks(
    bank: Bank, positions: Sequence[int], wanted: Sequence[Indices], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[FrameChunk]:
    """Read the stored frames `wanted` of the videos at `positions` of the bank, in order; videos count from 0."""
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, "sosampler-evaluate") as pool:
        pending: deque[tuple[int, Future[StoredFrames]]] = deque()
        upcoming = iter(enumerate(zip(positions, wanted, strict=True)))

        def submit_one() -> None:
            for index, (position, stored) in upcoming:
                pending.append((index, pool.submit(_read, bank, position, stored)))
                return

        for _ in range(2 * threads):
            submit_one()
        chunk: dict[int, StoredFrames] = {}
        size = 0
        try:
            while pending:
                index, future = pending.popleft()
                chunk[index] = future.result()
                submit_one()
                size += chunk[index].frames.nbytes
                if size >= chunk_bytes:
                    yield FrameChunk(chunk)
                    chunk, size = {}, 0
            if chunk:
                yield FrameChunk(chunk)
        finally:
            for _, future in pending:
                future.cancel()


def _read(bank: Bank, position: int, stored: Indices) -> StoredFrames:
    item = bank[position]
    return StoredFrames(stored, item.frames(stored), item.positions[stored], item.pts_seconds[stored])
