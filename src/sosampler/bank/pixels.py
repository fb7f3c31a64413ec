"""Pixels of stored frames, and the sound around them, as tensors that are read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler._util.arrays import Indices
from sosampler._util.hardware import usable_cores
from sosampler.bank.bank import Bank, BankItem
from sosampler.video.limits import target_size

_MAX_THREADS = 16  # that decode


@dataclass(frozen=True)
class Shape:
    """The size of frames in training.

    `square`: the centre of `side` x `side` pixels, enlarged where images are smaller, as a network sees them in
    evaluation. Otherwise the short side is at most `side` and the other follows.
    """

    side: int
    square: bool = False

    def of(self, video: BankItem) -> tuple[int, int]:
        """Return (width, height) of a video's frames in this shape."""
        if self.square:
            return self.side, self.side
        return target_size(video.width, video.height, min(self.side, video.width, video.height))

    def read(self, video: BankItem, positions: Indices | None = None) -> np.ndarray:
        """Read frames of a video, uint8 [T, h, w, 3]."""
        if not self.square:
            return video.frames(positions, min(self.side, video.width, video.height), fast=True)
        frames = video.frames(positions, self.side)
        # The centre as torchvision's CenterCrop takes it.
        top, left = (round((length - self.side) / 2) for length in frames.shape[1:3])
        return frames[:, top : top + self.side, left : left + self.side]


class BankFrames:
    """Frames that are decoded for every batch. Pickles as its bank's path, for worker processes.

    `threads`: how many decode the videos of a batch.
    """

    def __init__(self, bank: Bank, rows: Sequence[int], shape: Shape, *, threads: int = 1) -> None:
        self._bank, self._rows, self._shape, self._threads = bank, rows, shape, max(1, threads)
        videos = [bank[row] for row in rows]
        # [V, 2] height and width of the frames of each video
        self.sizes = np.array([shape.of(video)[::-1] for video in videos], dtype=np.int64).reshape(-1, 2)
        self.counts = np.array([len(video) for video in videos], dtype=np.int64)
        self.nbytes = int((self.sizes.prod(1) * self.counts * 3).sum())  # of all frames, decoded

    def read(self, video: int, positions: Indices | None = None) -> np.ndarray:
        return self._shape.read(self._bank[self._rows[video]], positions)

    def frames(self, videos: Indices, positions: Indices) -> Tensor:
        """Return uint8 [B, T, h, w, 3] of videos [B] and positions [B, T]; small frames are padded right and below."""
        height, width = self.sizes[videos].max(0)
        canvas = np.zeros((*positions.shape, height, width, 3), dtype=np.uint8)

        def decode(row: int) -> None:
            frames = self.read(int(videos[row]), positions[row])
            canvas[row, :, : frames.shape[1], : frames.shape[2]] = frames

        if self._threads == 1:
            for row in range(len(videos)):
                decode(row)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(decode, range(len(videos))))
        return torch.from_numpy(canvas)


class StoredFrames:
    """Pixels of candidates, uint8 [V, T, 3, side, side]: centre squares, decoded when they are read.

    `rows`: videos of the bank [V]; `slots`: their stored frames [V, T].
    """

    def __init__(self, bank: Bank, rows: Sequence[int], slots: Indices, side: int) -> None:
        threads = min(usable_cores(), _MAX_THREADS)
        self._frames, self._slots = BankFrames(bank, rows, Shape(side, square=True), threads=threads), slots
        self.shape = (*slots.shape, 3, side, side)

    def __getitem__(self, index: Any) -> Tensor:
        videos, slots = _taken(index, self._slots)
        return self._frames.frames(videos, slots).permute(0, 1, 4, 2, 3)


class StoredSpectra:
    """The sound around candidates, float16 [V, T, 64, 100], read from the bank when it is taken.

    `rows`: videos of the bank [V]; `slots`: their stored frames [V, T].
    """

    def __init__(self, bank: Bank, rows: Sequence[int], slots: Indices) -> None:
        self._audio, self._rows, self._slots = bank.audio(), rows, slots
        self.shape = (*slots.shape, self._audio.bands, self._audio.columns)

    def __getitem__(self, index: Any) -> Tensor:
        videos, slots = _taken(index, self._slots)
        spectra = [self._audio[self._rows[video]].spectra[slots[row]] for row, video in enumerate(videos.tolist())]
        return torch.from_numpy(np.stack(spectra) if spectra else np.zeros((0, *self.shape[1:]), dtype=np.float16))


def _taken(index: Any, slots: Indices) -> tuple[Indices, Indices]:
    """Return the videos [K] of an index as `LazySet` has it, and their stored frames [K, N]; slots: [V, T]."""
    rows, positions = index if isinstance(index, tuple) else (index, None)
    videos = np.arange(len(slots))[rows.flatten().cpu().numpy()]
    taken = slots[videos]
    return videos, taken if positions is None else np.take_along_axis(taken, positions.cpu().numpy(), axis=1)
