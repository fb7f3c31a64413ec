"""What an evaluation knows about the candidates of some videos, laid out as one batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.video.candidates import uniform_positions
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices


@dataclass(frozen=True, eq=False)
class CandidateView:
    """B videos with T candidates each.

    A short video repeats frames among its candidates. Here each frame stands once and the rest is padding at the end,
    so that no frame is chosen twice while another is left.
    """

    numbers: Indices  # [B], which videos of the split
    slots: Indices  # [B, T], the stored frame of each candidate; padding names the last one again
    counts: Indices  # [B], real candidates
    mask: Tensor  # bool [B, T], True for a real one
    labels: Tensor  # bool [B, C]
    frame_probs: Tensor  # float32 [B, T, C], what the classifier says about each frame alone
    features: Tensor | None = None  # float32 [B, T, D], what a pooled classifier joins
    scores: dict[str, Tensor] = field(default_factory=dict)  # [B, T] of each policy that looks at pixels
    similarity: dict[str, Tensor] = field(default_factory=dict)  # [B, T, T] of those that mind redundancy
    expected: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # [B, T] of those that decide on N
    pixels: FrameChunk | None = None
    cache: dict[str, Tensor] = field(default_factory=dict)  # what choosers compute once for all N

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def num_candidates(self) -> int:
        return int(self.slots.shape[1])

    @property
    def real(self) -> Tensor | None:
        """The mask, where anything is masked."""
        return None if (self.counts == self.num_candidates).all() else self.mask

    def some(self, rows: NDArray[Any]) -> CandidateView:
        """Some of the videos; `rows` as NumPy indexes."""
        here = torch.from_numpy(np.flatnonzero(rows) if rows.dtype == bool else rows).to(self.mask.device)
        return replace(
            self,
            numbers=self.numbers[rows],
            slots=self.slots[rows],
            counts=self.counts[rows],
            mask=self.mask[here],
            labels=self.labels[here],
            frame_probs=self.frame_probs[here],
            features=None if self.features is None else self.features[here],
            scores={key: value[here] for key, value in self.scores.items()},
            similarity={key: value[here] for key, value in self.similarity.items()},
            expected={key: value[rows] for key, value in self.expected.items()},
            cache={},
        )


def candidate_slots(stored: int, num_candidates: int) -> tuple[Indices, int]:
    """Stored frames [T] of the candidates of a video, and how many of them are real.

    >>> candidate_slots(3, 5)
    (array([0, 1, 2, 2, 2]), 3)
    """
    count = min(stored, num_candidates)
    slots = np.full(num_candidates, count - 1, dtype=np.int64)
    slots[:count] = uniform_positions(stored, count)
    return slots, count


class Videos:
    """The videos that are evaluated: labels, lengths, and the teacher's answers as views.

    Args:
        teacher: of the split's bank.
        places: which of its videos.
        labels: multi-hot bool [V, C].
        device: where views live.
        with_features: whether the classifier joins kept features.
    """

    def __init__(
        self,
        teacher: Teacher,
        places: Sequence[int],
        labels: NDArray[np.bool_],
        device: torch.device,
        *,
        with_features: bool,
    ) -> None:
        self.teacher, self.places, self.labels = teacher, list(places), labels
        self.device, self.with_features = device, with_features
        self.lengths = np.array([len(teacher[place].frame_probs) for place in self.places], dtype=np.int64)
        self.scores: dict[tuple[str, int], NDArray[np.float32]] = {}  # by policy and T: [V, T]
        self.similarity: dict[tuple[str, int], NDArray[np.float32]] = {}  # [V, T, T]
        self.expected: dict[tuple[str, int], NDArray[np.float64]] = {}  # [V, T]

    def __len__(self) -> int:
        return len(self.places)

    def numbers_a_candidate(self) -> int:
        """Numbers that a view holds for each candidate."""
        features = self.teacher.about["features"]
        return int(self.labels.shape[1] + (features["width"] if self.with_features else 0))

    def slots(self, number: int, num_candidates: int) -> tuple[Indices, int]:
        return candidate_slots(int(self.lengths[number]), num_candidates)

    def views(
        self, numbers: Indices, candidates: Sequence[int], pixels: FrameChunk | None = None
    ) -> dict[int, CandidateView]:
        """The same videos with each number of candidates; the teacher's rows are read once."""
        answers = [self.teacher[self.places[number]] for number in numbers.tolist()]
        views = {}
        for num_candidates in candidates:
            both = [self.slots(number, num_candidates) for number in numbers.tolist()]
            slots, counts = np.stack([slots for slots, _ in both]), np.array([count for _, count in both])
            probs = np.stack([answer.frame_probs[row] for answer, row in zip(answers, slots, strict=True)])
            features = None
            if self.with_features:
                kept = np.stack([answer.features[row] for answer, row in zip(answers, slots, strict=True)])
                features = torch.from_numpy(kept).to(self.device).float()
            views[num_candidates] = CandidateView(
                numbers=numbers,
                slots=slots,
                counts=counts,
                mask=torch.from_numpy(np.arange(num_candidates) < counts[:, None]).to(self.device),
                labels=torch.from_numpy(self.labels[numbers]).to(self.device),
                frame_probs=torch.from_numpy(probs).to(self.device).float(),
                features=features,
                scores=self._kept(self.scores, numbers, num_candidates),
                similarity=self._kept(self.similarity, numbers, num_candidates),
                expected={
                    key: table[numbers] for (key, count), table in self.expected.items() if count == num_candidates
                },
                pixels=pixels,
            )
        return views

    def _kept(
        self, tables: dict[tuple[str, int], NDArray[np.float32]], numbers: Indices, num_candidates: int
    ) -> dict[str, Tensor]:
        return {
            key: torch.from_numpy(table[numbers]).to(self.device)
            for (key, count), table in tables.items()
            if count == num_candidates
        }


_MAX_THREADS = 8
# Pictures of one chunk together; the next one is being read meanwhile.
CHUNK_BYTES = 256 << 20
# Pictures that go to a network together; a GPU resizes them in float32, which takes four times as much.
_STACK_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class VideoPictures:
    """Some of the stored frames of one video, in their stored size."""

    stored: Indices  # [S] ascending, which of the stored frames
    frames: Frames  # uint8 [S, H, W, 3]
    positions: NDArray[np.float32]  # [S] in 0..1, where they lie in the video

    def find(self, slots: Indices) -> Indices:
        """Where the stored frames `slots` are to be found here."""
        return np.searchsorted(self.stored, slots).astype(np.int64)


@dataclass(eq=False)
class FrameChunk:
    """Pictures of some videos, by their number, and what a classifier already said about clips of them."""

    videos: dict[int, VideoPictures]
    answers: dict[tuple[int, tuple[int, ...]], NDArray[np.float32]] = field(default_factory=dict)

    @property
    def numbers(self) -> Indices:
        return np.array(list(self.videos), dtype=np.int64)

    def by_shape(self, numbers: Iterable[int]) -> list[NDArray[np.int64]]:
        """Places among `numbers` of videos with pictures of one size, in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, number in enumerate(numbers):
            groups.setdefault(self.videos[number].frames.shape[1:], []).append(place)
        return [np.array(places, dtype=np.int64) for places in groups.values()]

    def clips_at_once(self, number: int, num_frames: int, most_frames: int) -> int:
        """Clips of `num_frames` that go to a network together, if their pictures are as large as this video's."""
        in_memory = _STACK_BYTES // int(self.videos[number].frames[0].nbytes)
        return max(1, min(most_frames, in_memory) // num_frames)

    def stacked(self, numbers: Sequence[int], slots: Sequence[Indices]) -> tuple[Tensor, Tensor]:
        """Stored frames `slots` of videos of one size: uint8 [B, N, 3, H, W], and where they lie, float [B, N]."""
        found = [self.videos[number].find(row) for number, row in zip(numbers, slots, strict=True)]
        pairs = list(zip(numbers, found, strict=True))
        frames = np.stack([self.videos[number].frames[row] for number, row in pairs])
        positions = np.stack([self.videos[number].positions[row] for number, row in pairs])
        return torch.from_numpy(frames).permute(0, 1, 4, 2, 3), torch.from_numpy(positions).float()


def read_chunks(
    bank: Bank, places: Sequence[int], wanted: Sequence[Indices], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[FrameChunk]:
    """Stored frames `wanted` of the videos at `places`, in order; videos are numbered from 0."""
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, "sosampler-evaluate") as pool:
        pending: deque[tuple[int, Future[VideoPictures]]] = deque()
        upcoming = iter(enumerate(zip(places, wanted, strict=True)))

        def submit_one() -> None:
            for number, (place, stored) in upcoming:
                pending.append((number, pool.submit(_read, bank, place, stored)))
                return

        for _ in range(2 * threads):
            submit_one()
        chunk: dict[int, VideoPictures] = {}
        size = 0
        try:
            while pending:
                number, future = pending.popleft()
                chunk[number] = future.result()
                submit_one()
                size += chunk[number].frames.nbytes
                if size >= chunk_bytes:
                    yield FrameChunk(chunk)
                    chunk, size = {}, 0
            if chunk:
                yield FrameChunk(chunk)
        finally:
            for _, future in pending:
                future.cancel()


def _read(bank: Bank, place: int, stored: Indices) -> VideoPictures:
    item = bank[place]
    return VideoPictures(stored, item.frames(stored), item.positions[stored])
