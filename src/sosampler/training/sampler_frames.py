"""The pictures that a sampler is trained on, small: decoded once into memory where they fit, else read as needed.

Both ways give the same pixels. Large pictures are shrunk partly by the JPEG decoder (`fast` of `BankItem.frames`),
which halves the time of decoding and moves pixels a little: training cuts them at random anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sosampler.data.bank import Bank, BankItem
from sosampler.progress import progress_bar
from sosampler.training.machine import free_memory
from sosampler.training.processes import sent
from sosampler.video.sizes import target_size
from sosampler.video.timeline import Indices

_MOST_CACHE = 16 << 30
_SHARE_OF_MEMORY = 0.4
_SHARE_OF_DEVICE = 0.25


@dataclass(frozen=True)
class Shape:
    """How large the pictures of a store are.

    `square`: short side and centre cut to `side`, enlarged where they are smaller: what a network sees in evaluation.
    Otherwise the short side is at most `side`, the other follows.
    """

    side: int
    square: bool = False

    def of(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) of a stored picture in this shape."""
        if self.square:
            return self.side, self.side
        new_width, new_height = target_size(width, height, min(self.side, width, height))
        return new_height, new_width

    def read(self, video: BankItem, positions: Indices | None = None) -> np.ndarray:
        """uint8 [T, h, w, 3]"""
        if not self.square:
            size = min(self.side, video.width, video.height)
            return video.frames(positions, size, fast=True)
        frames = video.frames(positions, self.side)
        # The centre as torchvision's CenterCrop takes it.
        top, left = (round((length - self.side) / 2) for length in frames.shape[1:3])
        return frames[:, top : top + self.side, left : left + self.side]


class FrameSource(Protocol):
    """Where batches of frames come from."""

    sizes: np.ndarray  # [V, 2] height and width of the pictures of each video

    def frames(self, videos: Indices, positions: Indices) -> Tensor:
        """videos [B], positions [B, T] -> uint8 [B, T, h, w, 3], smaller pictures at the top left, the rest black."""
        ...


class BankFrames:
    """Frames that are decoded each time they are asked for. Pickles as its bank's path, for worker processes.

    `threads`: how many decode the videos of a batch.
    """

    def __init__(self, bank: Bank, rows: Sequence[int], shape: Shape, *, threads: int = 1) -> None:
        self._bank, self._rows, self._shape, self._threads = bank, rows, shape, max(1, threads)
        found = [bank[row] for row in rows]
        self.sizes = np.array([shape.of(video.width, video.height) for video in found], dtype=np.int64).reshape(-1, 2)
        self.counts = np.array([len(video) for video in found], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, decoded."""
        return int((self.sizes.prod(1) * self.counts * 3).sum())

    def read(self, video: int, positions: Indices | None = None) -> np.ndarray:
        return self._shape.read(self._bank[self._rows[video]], positions)

    def frames(self, videos: Indices, positions: Indices) -> Tensor:
        height, width = self.sizes[videos].max(0)
        canvas = np.zeros((*positions.shape, height, width, 3), dtype=np.uint8)

        def decode(row: int) -> None:
            read = self.read(int(videos[row]), positions[row])
            canvas[row, :, : read.shape[1], : read.shape[2]] = read

        if self._threads == 1:
            for row in range(len(videos)):
                decode(row)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(decode, range(len(videos))))
        return torch.from_numpy(canvas)


class CachedFrames:
    """All frames decoded, in memory or on the device: those of one size in one flat array."""

    def __init__(self, source: BankFrames, *, workers: int, show: bool = True) -> None:
        self.sizes = source.sizes
        kinds, self._kind = np.unique(source.sizes, axis=0, return_inverse=True)  # [K, 2], [V]
        self._first = np.zeros(len(self._kind), dtype=np.int64)  # of each video, in the array of its kind
        arrays = []
        for kind, (height, width) in enumerate(kinds.tolist()):
            members = self._kind == kind
            ends = np.cumsum(source.counts[members])
            self._first[members] = ends - source.counts[members]
            arrays.append(np.empty((ends[-1], height, width, 3), dtype=np.uint8))

        def decode(video: int) -> int:
            begin = self._first[video]
            arrays[self._kind[video]][begin : begin + source.counts[video]] = source.read(video)
            return int(source.counts[video])

        total = int(source.counts.sum())
        with ThreadPoolExecutor(max(1, workers)) as pool, progress_bar("decoding", total if show else 0) as bar:
            for count in pool.map(decode, range(len(self._kind))):
                bar.advance(count)
        self._arrays = [torch.from_numpy(array) for array in arrays]
        self.device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def to(self, device: torch.device) -> CachedFrames:
        self._arrays, self.device = [array.to(device) for array in self._arrays], device
        return self

    def frames(self, videos: Indices, positions: Indices) -> Tensor:
        kinds = self._kind[videos]
        places = torch.from_numpy(self._first[videos][:, None] + positions)  # [B, T] in the arrays of their kinds
        if len(found := np.unique(kinds)) == 1:
            array = self._arrays[found[0]]
            picked = array.index_select(0, sent(places.flatten(), self.device))
            return picked.unflatten(0, places.shape)
        height, width = self.sizes[videos].max(0).tolist()
        canvas = torch.zeros((*places.shape, height, width, 3), dtype=torch.uint8, device=self.device)
        for kind in found.tolist():
            rows = torch.from_numpy(np.flatnonzero(kinds == kind))
            array = self._arrays[kind]
            picked = array[sent(places[rows], self.device)]
            canvas[sent(rows, self.device), :, : array.shape[1], : array.shape[2]] = picked
        return canvas


def open_frames(
    bank: Bank,
    rows: Sequence[int],
    shape: Shape,
    *,
    cache_bytes: int,
    device: torch.device,
    workers: int,
    threads: int = 1,
    show: bool = True,
) -> CachedFrames | BankFrames:
    """Frames of some videos of a bank, in memory if they take at most `cache_bytes`, on the device if that has room.

    Otherwise `threads` decode each batch again.
    """
    source = BankFrames(bank, rows, shape, threads=threads)
    if source.nbytes > cache_bytes:
        return source
    cached = CachedFrames(source, workers=workers, show=show)
    if device.type == "cuda" and cached.nbytes <= _SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0]:
        return cached.to(device)
    return cached


def default_cache_bytes(processes: int = 1) -> int:
    """Two fifths of the memory that is free, at most 16 GiB, shared between the processes of one machine."""
    return min(int(_SHARE_OF_MEMORY * free_memory()), _MOST_CACHE) // processes
