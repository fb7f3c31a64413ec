"""Decode many videos in parallel, in order and in bounded memory.

Processes return small objects through their pipes; pixels go into slots, pieces of unnamed shared memory. A slot holds
one video at a time, so what is decoded and not yet taken is bounded, and nothing is left behind however a process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from sosampler._util.arrays import Frames
from sosampler._util.hardware import usable_cores
from sosampler._util.workers import (
    CAN_SHARE_MEMORY,
    ProcessPool,
    WorkerDied,
    did_not_return,
    in_order,
    unnamed_memory,
    within,
)
from sosampler.errors import InvalidArgument, LimitExceeded, SosamplerError, VideoError, errors_of
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import open_candidates, select_with
from sosampler.inference.selection import CandidateFrames, Selection
from sosampler.video.limits import Limits
from sosampler.video.source import source_name

# From this many videos on, starting processes pays off.
PROCESSES_FROM = 12
# Bytes of frames that are decoded and not yet taken, or being decoded. Above it no worker gets a second video.
MAX_WAITING_BYTES = 256 << 20
MAX_WORKERS = 32
_MAX_BATCH = 256  # videos: each keeps a file open until the batch is full
_MAX_AHEAD = 64  # videos
_SERVER = f"{__name__}:serve"
_T = TypeVar("_T")


# ---- one video


def attempt(name: str, work: Callable[[], _T]) -> _T | SosamplerError:
    """Return what `work` returns, or the error of this video; `errors_of` tells which are raised nevertheless."""
    try:
        with errors_of(name):
            return work()
    except (VideoError, InvalidArgument) as error:
        return error


def attempt_each(names: Sequence[str], work: Callable[[slice], Sequence[_T]]) -> list[_T | SosamplerError]:
    """Return what `work` returns for all videos together; where it fails, for each alone, or that one's error."""
    if len(names) > 1:
        outcome = attempt(names[0], lambda: work(slice(None)))
        if not isinstance(outcome, SosamplerError):
            return list(outcome)
    return [attempt(name, partial(_first, work, row)) for row, name in enumerate(names)]


def _first(work: Callable[[slice], Sequence[_T]], row: int) -> _T:
    return work(slice(row, row + 1))[0]


@dataclass(frozen=True)
class Unfit:
    """Candidates that were not decoded: the policy must see them in another size than they would be kept in."""


Outcome = Selection | CandidateFrames | Unfit | SosamplerError


class Step(Protocol):
    """A function of a video that can be pickled, for engines that send work to other processes or machines."""

    @property
    def options(self) -> SelectOptions: ...

    def __call__(self, source: Any, /) -> Any: ...


@dataclass(frozen=True)
class DecodeStep:
    """Decode a video: the frames that the options' policy chooses, or all candidates for a network."""

    options: SelectOptions
    choose: bool = True
    min_size: int = 1  # short side, in pixels, that the network must see, as far as the video has it
    enlarge: bool = False  # whether `size` may exceed the video's own

    @classmethod
    def of_candidates(cls, options: SelectOptions) -> DecodeStep:
        """Return the step that decodes all candidates for the options' policy, which chooses elsewhere."""
        return cls(options.with_all_candidates(), choose=False, min_size=options.resolved_policy.min_size or 1)

    def __call__(self, source: Any) -> Outcome:
        return attempt(source_name(source), lambda: self._decode(source))

    def _decode(self, source: Any) -> Outcome:
        if self.choose:
            return select_with(source, self.options, enlarge=self.enlarge)
        with open_candidates(source, self.options, enlarge=self.enlarge) as opened:
            if not opened.can_score(self.min_size):
                return Unfit()
            return replace(opened.decode(), **opened.summary())


@dataclass(frozen=True, eq=False)
class FrameTask:
    """One video and what to do with it."""

    source: Any
    step: Step
    otherwise: DecodeStep | None = None  # where the candidates are unfit: choose in this process

    @property
    def timeout(self) -> float:
        """Seconds that it may take."""
        return (self.step.options.limits or Limits()).timeout

    def run(self) -> Any:
        """Do it in this process."""
        try:
            return within(self.timeout, lambda: self.settle(self.step(self.source)))
        except TimeoutError:
            return LimitExceeded(did_not_return(source_name(self.source), self.timeout))

    def settle(self, outcome: Any) -> Any:
        """Return the outcome of the step, or of the other one where the candidates are unfit."""
        return self.otherwise(self.source) if isinstance(outcome, Unfit) and self.otherwise else outcome

    def can_travel(self) -> bool:
        """Return whether another process can do it: it finds the policy by its name."""
        return isinstance(self.step.options.policy, str) and isinstance(self.source, (str, Path, bytes))


# ---- in the decoding process

_Answer = tuple[Any, tuple[int, ...] | None]  # the outcome, and the shape of the frames that are in the slot


def serve(slots: list[int]) -> Callable[[tuple[FrameTask, int]], _Answer]:
    """Return the function that does tasks in a process, each with its slot."""

    def work(task_and_slot: tuple[FrameTask, int]) -> _Answer:
        task, slot = task_and_slot
        outcome = task.step(task.source)
        if not slots or not isinstance(outcome, (Selection, CandidateFrames)) or outcome.frames is None:
            return outcome, None
        frames = outcome.frames
        failure = attempt(source_name(task.source), lambda: _fill(slots[slot], frames))
        return (replace(outcome, frames=None), frames.shape) if failure is None else (failure, None)

    return work


def _fill(file: int, frames: Frames) -> None:
    """Write the frames into a slot, which then has exactly their size."""
    os.ftruncate(file, frames.nbytes)
    data = np.ascontiguousarray(frames).data.cast("B")
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)


# ---- in this process


class Decoded:
    """The outcome of one video. Its frames stay where they are until they are taken, once."""

    def __init__(
        self, outcome: Outcome, pool: FramePool | None = None, slot: int = 0, shape: tuple[int, ...] | None = None
    ) -> None:
        self.outcome = outcome
        self._pool, self._slot = pool, slot
        self._in_slot = shape is not None
        frames = getattr(outcome, "frames", None)
        self.shape: tuple[int, ...] | None = shape if frames is None else frames.shape
        self.nbytes = 0 if self.shape is None else int(np.prod(self.shape))
        if pool is not None and not self.nbytes:
            pool._release(slot, 0)

    def take(self, out: Frames | None = None) -> Frames:
        """Return the frames, in `out` where that is given (contiguous uint8 of `shape`), and free their slot."""
        assert self.shape is not None, "there are frames to take"
        if self._in_slot:
            assert self._pool is not None
            out = np.empty(self.shape, dtype=np.uint8) if out is None else out
            data, taken = out.data.cast("B"), 0
            while taken < len(data):
                count = os.preadv(self._pool._files[self._slot], [data[taken:]], taken)
                if not count:
                    raise SosamplerError("a decoding process wrote fewer pixels than it reported; run it again")
                taken += count
        else:
            assert isinstance(self.outcome, (Selection, CandidateFrames)) and self.outcome.frames is not None  # noqa: PT018
            if out is None:
                out = self.outcome.frames
            else:
                out[:] = self.outcome.frames
            self.outcome = replace(self.outcome, frames=None)
        if self._pool is not None:
            self._pool._release(self._slot, self.nbytes)
        return out


class FramePool:
    """Decodes `workers` videos at a time, in as many processes, or in threads of this one.

    The caller holds at most `held` videos before it takes their frames; `ahead` more are decoded beyond these.
    """

    def __init__(self, workers: int, *, processes: bool, ahead: int, held: int) -> None:
        self._in_process, self._ahead = not processes, ahead
        self._free = list(range(ahead + held))
        # Where a process cannot inherit open files, pixels go through the pipe.
        self._files = [unnamed_memory() for _ in self._free] if processes and CAN_SHARE_MEMORY else []
        self._pool = ProcessPool(workers, _SERVER, self._files, files=self._files, work="decoding")
        self._waiting_bytes = 0  # decoded and not taken
        self._largest = 0  # bytes of the largest recent video: what those being decoded will probably need

    def __enter__(self) -> FramePool:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.__exit__(*exception)
        while self._files:
            os.close(self._files.pop())

    def decoded(self, tasks: Iterable[FrameTask]) -> Generator[Decoded, None, None]:
        """Yield outcomes in the order of the tasks. Few are begun ahead; memory does not grow with their number."""
        for (outcome, shape), slot in in_order(self._submit, tasks, self._has_room):
            decoded = Decoded(outcome, self, slot, shape)
            self._waiting_bytes += decoded.nbytes
            # One large video among small ones is soon forgotten.
            self._largest = max(decoded.nbytes, self._largest * 3 // 4)
            yield decoded

    def _submit(self, task: FrameTask) -> Future[tuple[_Answer, int]]:
        slot = self._free.pop()
        return self._pool.threads.submit(lambda: (self._do(task, slot), slot))

    def _has_room(self, pending: Sequence[Future[tuple[_Answer, int]]]) -> bool:
        if len(pending) < min(self._pool.num_threads, self._ahead):
            return True  # no worker waits, however large the videos are
        expected = self._waiting_bytes + (len(pending) + 1) * self._largest
        return len(pending) < self._ahead and expected <= MAX_WAITING_BYTES

    def _do(self, task: FrameTask, slot: int) -> _Answer:
        if self._in_process or not task.can_travel():
            return task.run(), None
        try:
            outcome, shape = self._pool.call((replace(task, otherwise=None), slot), task.timeout)
        except WorkerDied as died:
            return VideoError(died.over(source_name(task.source))), None
        return task.settle(outcome), shape

    def _release(self, slot: int, nbytes: int) -> None:
        self._free.append(slot)
        self._waiting_bytes -= nbytes


def decoded_batches(
    tasks: Iterable[FrameTask], *, workers: int | None, batch_size: int
) -> Generator[list[Decoded], None, None]:
    """Decode videos in parallel and a few ahead; yield `batch_size` in order, fewer where they are large.

    Few videos are decoded in threads of this process, many in processes; with workers=0 one after the other, here.
    """
    coming = iter(tasks)
    first = list(islice(coming, PROCESSES_FROM)) if workers != 0 else []
    count = min(usable_cores(), MAX_WORKERS) if workers is None else max(workers, 1)
    held = min(batch_size, _MAX_BATCH)
    ahead = 1 if workers == 0 else min(held + 2 * count, max(_MAX_AHEAD, 2 * count))
    with (
        FramePool(count, processes=len(first) >= PROCESSES_FROM, ahead=ahead, held=held) as pool,
        closing(pool.decoded(chain(first, coming))) as decoded,
    ):
        batch: list[Decoded] = []
        for video in decoded:
            batch.append(video)
            if len(batch) == held or sum(each.nbytes for each in batch) >= MAX_WAITING_BYTES // 2:
                yield batch
                batch = []
        if batch:
            yield batch
