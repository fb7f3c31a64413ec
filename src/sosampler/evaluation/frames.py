"""Pictures of a bank for an evaluation: each read once, by threads, some videos at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.data.bank import Bank
from sosampler.video.reader import Frames
from sosampler.video.timeline import Indices

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
