"""Stored JPEGs become pixels, in threads of this process or in processes of their own.

A device is fed by one thread, which competes with every decoding thread of its process for the interpreter: processes
leave it to the device. Where the network runs on processors it is what takes the time, and threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager
from queue import LifoQueue
from typing import Any, Protocol

import numpy as np

from sosampler._util.workers import CAN_SHARE_MEMORY, Answer, ProcessPool, SharedPixels
from sosampler.bank.bank import decode_jpeg
from sosampler.video.reader import Frames

# Decoded frames of all batches together; a batch larger than that goes alone.
_MAX_DECODED_BYTES = 512 << 20
# Batches that are decoded, wait for the device or are on it; a batch is decoded by several processes at once.
BATCHES_AHEAD = 4
_FRAMES_A_TASK = 16
# Below so many frames processes are hardly started when all is done.
_LEAST_FRAMES = 4000
_MAX_PROCESSES = 16


class Room:
    """So many bytes for all threads together: `taking` waits until there is room, or until nobody else has any."""

    def __init__(self, num_bytes: int) -> None:
        self._all, self._taken = num_bytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + num_bytes <= self._all)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


class FrameDecoder(Protocol):
    """Decodes batches, called by several threads at once."""

    def decoded(self, jpegs: list[bytes], names: list[str]) -> AbstractContextManager[Frames]:
        """JPEGs of one size -> uint8 [F, H, W, 3], to be used within the `with` block; names are for messages."""


class InThread:
    """Decodes in the thread that asks."""

    def __init__(self) -> None:
        self._room = Room(_MAX_DECODED_BYTES)

    @contextmanager
    def decoded(self, jpegs: list[bytes], names: list[str]) -> Iterator[Frames]:
        first = decode_jpeg(jpegs[0], repr(names[0]))
        with self._room.taking(len(jpegs) * first.nbytes):
            frames = np.empty((len(jpegs), *first.shape), dtype=np.uint8)
            frames[0] = first
            _decode_into(frames[1:], jpegs[1:], names[1:])
            yield frames


class InProcesses:
    """Decodes in processes, into memory that they share with this one. Enter it to start them."""

    def __init__(self, num_processes: int) -> None:
        self._room = Room(_MAX_DECODED_BYTES)
        self._batches = [SharedPixels() for _ in range(BATCHES_AHEAD)]
        self._idle: LifoQueue[int] = LifoQueue()
        for number in range(BATCHES_AHEAD):
            self._idle.put(number)
        files = [batch.file for batch in self._batches]
        self._pool = ProcessPool(
            num_processes, "sosampler.bank.frame_decoding:decoder", files, files=files, work="decoding stored frames"
        )

    def __enter__(self) -> InProcesses:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.__exit__()
        for batch in self._batches:
            batch.close()

    @contextmanager
    def decoded(self, jpegs: list[bytes], names: list[str]) -> Iterator[Frames]:
        first = decode_jpeg(jpegs[0], repr(names[0]))
        shape = (len(jpegs), *first.shape)
        with self._room.taking(len(jpegs) * first.nbytes):
            number = self._idle.get()
            try:
                frames = self._batches[number].array(shape)
                frames[0] = first
                parts = [slice(begin, begin + _FRAMES_A_TASK) for begin in range(1, len(jpegs), _FRAMES_A_TASK)]
                tasks = [self._pool.submit((number, shape, part, jpegs[part], names[part])) for part in parts]
                wait(tasks)  # also where one fails: the others still write there
                for task in tasks:
                    task.result()
                yield frames
            finally:
                if len(jpegs) * first.nbytes > _MAX_DECODED_BYTES // BATCHES_AHEAD:
                    self._batches[number].empty()  # so many of them would be too much
                self._idle.put(number)


def num_decoding_processes(device_type: str, cores: int, num_frames: int) -> int:
    """How many processes pay for so many frames; 0: threads do.

    >>> num_decoding_processes("cuda", 16, 30_000), num_decoding_processes("cuda", 2, 30_000)
    (15, 0)
    """
    if device_type == "cpu" or not CAN_SHARE_MEMORY or cores < 4 or num_frames < _LEAST_FRAMES:
        return 0
    return min(cores - 1, _MAX_PROCESSES)  # one for what feeds the device


def _decode_into(frames: Frames, jpegs: list[bytes], names: list[str]) -> None:
    for place, data in enumerate(jpegs):
        frames[place] = decode_jpeg(data, repr(names[place]))


# --- in a process -----------------------------------------------------------------------------------------------------


def decoder(files: list[int]) -> Answer:
    """Answers (batch, its shape, part, JPEGs, names) with None once the part is decoded into the shared memory."""
    batches = [SharedPixels(file) for file in files]

    def answer(task: tuple[int, tuple[int, ...], slice, list[bytes], list[str]]) -> None:
        number, shape, part, jpegs, names = task
        _decode_into(batches[number].array(shape)[part], jpegs, names)

    return answer
