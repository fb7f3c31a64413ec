"""Videos decoded once, side by side, in processes of their own; their frames wait in shared memory, in order.

The processes live and die as those of `prepare` do. What comes back through their pipes is small; pixels go into slots,
pieces of memory without a name that all of them write to. A slot is lent to one video at a time, so what is decoded
but not yet taken is bounded, and nothing is left behind however anybody ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.workers import CAN_SHARE_MEMORY, ProcessPool, WorkerDied, in_order, unnamed_memory
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference import select as choosing
from sosampler.inference.candidates import offer
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import select_with
from sosampler.inference.selection import Candidates, Selection
from sosampler.video.limits import target_size
from sosampler.video.reader import Frames, VideoMetadata
from sosampler.video.source import source_name
from sosampler.video.timeline import Indices, Seconds

# Frames that are decoded and not yet taken, or being decoded: beyond this no worker is given more than one video.
MAX_WAITING_BYTES = 256 << 20
_SERVER = "sosampler.inference.decode:decoder"


@dataclass(frozen=True, eq=False)
class OfferedVideo:
    """The candidates of one video, decoded, before anybody has chosen. Each frame is there once."""

    video: str
    candidates: Candidates  # [T]
    frame_indices: Indices  # [D] of the frames; another than offered only where a damaged frame had to be replaced
    pts_seconds: Seconds  # [D]
    metadata: VideoMetadata
    timing: dict[str, float]  # seconds, by the names that a selection has
    notes: tuple[str, ...]
    frames: Frames | None = None  # [D, H, W, 3]; None while they are in a slot


@dataclass(frozen=True)
class Unfit:
    """Candidates that were not decoded: whoever chooses must see them in another size than they would be kept in."""


Outcome = Selection | OfferedVideo | Unfit | SosamplerError


@dataclass(frozen=True, eq=False)
class FrameTask:
    """One video. With `choose` the options' own policy chooses at once, and no more is decoded than that needs."""

    source: Any
    options: SelectOptions
    choose: bool
    # Short side that candidates must have for whoever chooses later, as far as the video has it.
    least_size: int = 1
    # How to choose in one go, in this process, from candidates that are unfit.
    otherwise: SelectOptions | None = None

    def can_travel(self) -> bool:
        return isinstance(self.options.policy, str) and isinstance(self.source, (str, Path, bytes))


# ---- one video


def attempt(task: FrameTask) -> Outcome:
    """The chosen frames, all candidates, or what is wrong with this video."""
    try:
        return select_with(task.source, task.options, no_larger=True) if task.choose else _offer_frames(task)
    except (VideoError, InvalidArgument) as error:
        name = source_name(task.source)
        # An argument can be at fault for one video only: its length, its range. Then the text lacks the name.
        return error if name in str(error) else _because(error, type(error)(f"{name}: {error}"))
    except OSError as error:
        told = f"{source_name(task.source)}: cannot be read ({error.strerror or error}); check its permissions"
        return _because(error, VideoError(told))


def _offer_frames(task: FrameTask) -> OfferedVideo | Unfit:
    options = task.options
    begin = time.perf_counter()
    reader = choosing.open_with(task.source, options)
    try:
        width, height = reader.metadata.width, reader.metadata.height
        size = choosing.capped_size(options.size, reader.metadata)
        opened = time.perf_counter()
        notes: list[str] = []
        candidates = offer(reader, options, notes)
        listed = time.perf_counter()
        distinct = np.unique(candidates.frame_indices)
        shown = target_size(width, height, size)
        large = 3 * shown[0] * shown[1] * len(distinct) > choosing.MAX_KEPT_BYTES
        if large or isinstance(size, tuple) or min(shown) < min(task.least_size, width, height):
            return Unfit()
        batch = reader.read(distinct, size=size)
        done = time.perf_counter()
        return OfferedVideo(
            video=source_name(task.source),
            candidates=candidates,
            frame_indices=batch.frame_indices,
            pts_seconds=batch.pts_seconds,
            metadata=reader.metadata,
            timing=choosing.timing(begin, opened, listed, done),
            notes=tuple(dict.fromkeys((*reader.notes, *notes, *batch.notes))),
            frames=batch.frames,
        )
    except MemoryError as error:
        raise InvalidArgument(
            f"{reader.name}: what was asked for does not fit into memory; ask for fewer candidates or a smaller size"
        ) from error
    finally:
        reader.close()


def _because(cause: Exception, error: SosamplerError) -> SosamplerError:
    error.__cause__ = cause
    return error


# ---- the process that does nothing else


_Answer = tuple[Outcome, tuple[int, ...] | None]  # and the shape of the frames that are in the slot


def decoder(slots: list[int]) -> Callable[[tuple[FrameTask, int]], _Answer]:
    """Return the function that decodes a task into the slot that is lent to it."""
    return lambda sent: _answer(sent[0], slots[sent[1]] if slots else None)


def _answer(task: FrameTask, file: int | None) -> _Answer:
    try:
        outcome = attempt(task)
        if file is None or not isinstance(outcome, (Selection, OfferedVideo)) or outcome.frames is None:
            return outcome, None
        _fill(file, outcome.frames)
        return replace(outcome, frames=None), outcome.frames.shape
    except SosamplerError:
        raise  # an error that every other video would have too
    except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to, the other videos go on
        reason = f"cannot be decoded ({type(error).__name__}: {error}); the file may be damaged"
        return VideoError(f"{source_name(task.source)}: {reason}"), None


# ---- slots


def _fill(file: int, frames: Frames) -> None:
    """Put the frames into a slot, which then is exactly as large as they are."""
    os.ftruncate(file, frames.nbytes)
    data = np.ascontiguousarray(frames).data.cast("B")
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)


def _take(file: int, out: Frames) -> None:
    """Copy the frames of a slot into `out`, which is contiguous."""
    data = out.data.cast("B")
    taken = 0
    while taken < len(data):
        count = os.preadv(file, [data[taken:]], taken)
        if not count:
            raise SosamplerError("a decoding process left fewer pixels than it told; run it again")
        taken += count


class Decoded:
    """What became of one video. Its frames stay where they are until they are taken, once."""

    def __init__(self, outcome: Outcome, pool: FramePool, slot: int, shape: tuple[int, ...] | None) -> None:
        self.outcome = outcome
        self._pool, self._slot = pool, slot
        self._in_slot = shape is not None
        frames = getattr(outcome, "frames", None)
        self.shape: tuple[int, ...] | None = shape if frames is None else frames.shape
        self.nbytes = 0 if self.shape is None else int(np.prod(self.shape))
        if not self.nbytes:
            pool._give_back(slot)

    def take(self, out: Frames | None = None) -> Frames:
        """The frames, in `out` where that is given (contiguous uint8 of `shape`); their place is free for the next."""
        assert self.shape is not None, "there are frames to take"
        if self._in_slot:
            out = np.empty(self.shape, dtype=np.uint8) if out is None else out
            _take(self._pool._files[self._slot], out)
        else:
            assert isinstance(self.outcome, (Selection, OfferedVideo))
            assert self.outcome.frames is not None
            if out is None:
                out = self.outcome.frames
            else:
                out[:] = self.outcome.frames
            self.outcome = replace(self.outcome, frames=None)
        self._pool._give_back(self._slot, self.nbytes)
        return out


# ---- the processes


class FramePool:
    """Decodes `workers` videos at a time, in as many processes, or in threads of this one.

    Args:
        workers: how many at a time.
        processes: False for threads of this process.
        ahead: videos that are decoded beyond what the caller holds and has not taken.
        held: videos that the caller holds at most before it takes their frames.
    """

    def __init__(self, workers: int, *, processes: bool, ahead: int, held: int) -> None:
        self._in_process = not processes
        self._ahead = ahead
        self._free = list(range(ahead + held))
        # Where a process cannot be handed open files, pixels go through the pipe.
        self._files = [unnamed_memory() for _ in self._free] if processes and CAN_SHARE_MEMORY else []
        self._pool = ProcessPool(workers, _SERVER, self._files, files=self._files, work="decoding")
        self._waiting_bytes = 0  # decoded and not taken
        self._largest = 0  # bytes of the largest video of late: what those under way will probably need

    def __enter__(self) -> FramePool:
        return self

    def __exit__(self, *about: Any) -> None:
        self._pool.__exit__(*about)
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def decoded(self, tasks: Iterable[FrameTask]) -> Generator[Decoded, None, None]:
        """In the order of the tasks. Few are looked at ahead; memory does not grow with their number."""
        for answer, slot in in_order(self._submit, tasks, self._has_room):
            yield self._arrived(answer, slot)

    def _submit(self, task: FrameTask) -> Future[tuple[_Answer, int]]:
        slot = self._free.pop()
        return self._pool.threads.submit(lambda: (self._ask(task, slot), slot))

    def _has_room(self, pending: Sequence[Future[tuple[_Answer, int]]]) -> bool:
        if len(pending) < min(self._pool.num_threads, self._ahead):
            return True  # no worker waits, however large videos are
        expected = self._waiting_bytes + (len(pending) + 1) * self._largest
        return len(pending) < self._ahead and expected <= MAX_WAITING_BYTES

    def _ask(self, task: FrameTask, slot: int) -> _Answer:
        answer: _Answer
        if self._in_process or not task.can_travel():
            answer = attempt(task), None
        else:
            try:
                answer = self._pool.call((replace(task, otherwise=None), slot))
            except WorkerDied as died:
                answer = VideoError(died.over(source_name(task.source))), None
        if isinstance(answer[0], Unfit):
            assert task.otherwise is not None, "whoever asks for candidates says how to choose where they are unfit"
            return attempt(FrameTask(task.source, task.otherwise, choose=True)), None
        return answer

    def _arrived(self, answer: _Answer, slot: int) -> Decoded:
        outcome, shape = answer
        arrived = Decoded(outcome, self, slot, shape)
        self._waiting_bytes += arrived.nbytes
        # One large video among small ones is soon forgotten.
        self._largest = max(arrived.nbytes, self._largest * 3 // 4)
        return arrived

    def _give_back(self, slot: int, nbytes: int = 0) -> None:
        self._free.append(slot)
        self._waiting_bytes -= nbytes
