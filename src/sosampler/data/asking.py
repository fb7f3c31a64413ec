"""Asking a network about stored frames, a batch at a time: what is common to teachers and to features."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler.checks import whole_number
from sosampler.data.bank_format import AnswersFolder, BankFolder
from sosampler.data.frame_decoding import FrameDecoder, InThread
from sosampler.errors import ClassifierError

# Frames that go through the network at once: on a processor each thread has such a batch.
_CPU_BATCH, _DEVICE_BATCH = 8, 128
_FLOAT16_MAX = float(np.finfo(np.float16).max)

Tables = tuple[np.ndarray, ...]
"""What a network says about T frames: [T, any width] each, one for each column of its shards."""


class Asker(ABC):
    """A network, and how it is asked. `ask` is called by several threads at once.

    A subclass says what is asked (`_answers`) and how it is kept (`schema`, `about`, `answers_folder`).
    """

    made: str  # for messages: what was done, such as "this teacher was prepared"
    remedy: str  # for messages: what to do where it was made differently
    decisive: tuple[str, ...]  # keys of `about` that must not change from one run to the next

    def __init__(self, device: Any, batch: int | None) -> None:
        self.device = torch.device(device)
        default_batch = _CPU_BATCH if self.device.type == "cpu" else _DEVICE_BATCH
        self.batch = default_batch if batch is None else whole_number("batch", batch)
        self.batch_given = batch is not None  # otherwise what was begun goes on with its own
        self.decoder: FrameDecoder = InThread()
        self._device_lock = threading.Lock()

    @property
    @abstractmethod
    def net(self) -> Any:
        """The module that does the work, None where there is none."""

    @property
    @abstractmethod
    def schema(self) -> Any:
        """Columns of the shards."""

    @property
    @abstractmethod
    def bytes_a_frame(self) -> int:
        """Of what is kept."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The head of the folder."""

    @abstractmethod
    def answers_folder(self, folder: BankFolder) -> AnswersFolder:
        """Where the answers lie in a bank."""

    @abstractmethod
    def _answers(self, frames: Tensor, positions: np.ndarray) -> Tables:
        """uint8 [1, F, 3, H, W] and positions [F] in 0..1 -> what is kept about each frame."""

    def ask(self, jpegs: list[bytes], positions: np.ndarray, names: list[str]) -> Tables:
        """About F frames of one size, each by itself; positions [F] in 0..1, and the video of each."""
        with self.decoder.decoded(jpegs, names) as decoded:
            frames = as_tensor(decoded)
            if self.device.type == "cpu":
                return self._answers(frames, positions)
            with self._device_lock:  # one batch at a time on the device, while others are decoded
                return self._answers(frames, positions)


def as_tensor(frames: np.ndarray) -> Tensor:
    """uint8 [F, H, W, 3] -> [1, F, 3, H, W]"""
    return torch.from_numpy(frames).permute(0, 3, 1, 2)[None]


def blank_frame() -> Tensor:
    """uint8 [1, 1, 3, 64, 64], for a first question."""
    return as_tensor(np.zeros((1, 64, 64, 3), dtype=np.uint8))


def kept_features(features: Tensor, precision: str, name: str, remedy: str) -> np.ndarray:
    """[F, D] in the precision in which it is kept; the remedy is for those that half precision cannot hold."""
    kept: np.ndarray = features.float().cpu().numpy()
    if precision == "float32":
        return kept
    if float(np.abs(kept).max()) > _FLOAT16_MAX:
        raise ClassifierError(f"{name} gives features too large for half precision; {remedy}")
    small: np.ndarray = kept.astype(np.float16)
    return small
