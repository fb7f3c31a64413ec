"""Decoding: a video becomes JPEG frames for the bank, and stored JPEGs become pixels for a network."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from queue import LifoQueue
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.arrays import Frames
from sosampler._util.validation import check_int, one_of
from sosampler._util.workers import CAN_SHARE_MEMORY, ProcessPool, SharedPixels, Work, WorkerDied, in_order
from sosampler.bank.bank import decode_jpeg
from sosampler.bank.format import Failure, StoredVideo
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.decode import attempt
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import fit_size, list_candidates
from sosampler.video.candidates import MODES
from sosampler.video.limits import Limits, Size, check_size
from sosampler.video.reader import VideoReader
from sosampler.video.source import open_video

MAX_FRAMES_PER_VIDEO = 4096
# Times of one video at a rate, each of which is looked up.
_MAX_TIMES = 2_000_000
# Of one video in the bank, so that memory stays bounded.
_MAX_JPEG_BYTES = 128 << 20
# Decoded frames of one video that are held at a time; all 64 of the default size fit.
_CHUNK_BYTES = 32 << 20
# Decoded videos that wait to be taken: no more are started beyond this.
_MAX_WAITING_BYTES = 256 << 20
# Decoded frames of all batches together; a batch larger than that goes alone.
_MAX_DECODED_BYTES = 512 << 20
# Batches that are being decoded, wait for the device or are on it; several processes decode one batch.
BATCHES_AHEAD = 4
_FRAMES_PER_TASK = 16
# With fewer frames all is done before the processes have started.
_MIN_FRAMES = 4000
_MAX_PROCESSES = 16
_VIDEO_SERVER = "sosampler.bank.decode:video_decoder"


@dataclass(frozen=True, kw_only=True)
class FrameSettings:
    """Which frames of a video a bank stores, and how. Decides the bytes of the bank together with the videos."""

    num_candidates: int | None = 64  # None with fps
    fps: float | None = None
    size: Size = 256  # short side; smaller videos are not enlarged
    quality: int = 90
    candidates: str = "exact"
    grid: str = "uniform"
    snap_tolerance: float = SelectOptions.snap_tolerance
    seed: int = 0  # for grid="stratified", together with the video's id
    folder_fps: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_size(self.size))
        check_int("quality", self.quality, at_most=100)
        one_of("candidates", self.candidates, MODES)
        self.options()  # checks the others
        if (self.num_candidates or 0) > MAX_FRAMES_PER_VIDEO:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} must be at most {MAX_FRAMES_PER_VIDEO} frames of a video; "
                "give fewer"
            )

    def options(self, **more: Any) -> SelectOptions:
        """Return the options with which `select` has the same candidates."""
        names = ("num_candidates", "fps", "candidates", "grid", "snap_tolerance", "seed", "folder_fps")
        shared = {name: getattr(self, name) for name in names}
        return SelectOptions(**{"policy": "all", "on_short": "fewer", **shared, **more})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "size": list(self.size) if isinstance(self.size, tuple) else self.size}


@dataclass(frozen=True)
class DecodeTask:
    """One video to decode."""

    path: str
    video_id: str
    start: float | None
    end: float | None
    settings: FrameSettings
    limits: Limits


def decode_video(task: DecodeTask) -> StoredVideo:
    settings = task.settings
    opened = open_video(task.path, threads=1, limits=task.limits, folder_fps=settings.folder_fps)
    with closing(opened) as reader:
        notes: list[str] = []
        num_times = (settings.fps or 0) * reader.metadata.span(task.start, task.end)[1]
        if num_times > _MAX_TIMES:
            raise VideoError(
                f"{task.path}: fps={settings.fps:g} gives {num_times:.0f} times, more than the {_MAX_TIMES} of one "
                "video; lower fps, or limit the video with start and end"
            )
        # A seed of the video alone, independent of the order of the manifest.
        digest = hashlib.sha256(f"{settings.seed} {task.video_id}".encode()).digest()
        options = settings.options(start=task.start, end=task.end, seed=int.from_bytes(digest[:6], "big"))
        wanted = np.unique(list_candidates(reader, options, notes).frame_indices)
        if len(wanted) > MAX_FRAMES_PER_VIDEO:
            raise VideoError(
                f"{task.path}: fps={settings.fps:g} gives {len(wanted)} frames, more than the {MAX_FRAMES_PER_VIDEO} "
                "of one video in a bank; lower fps, or limit the video with start and end"
            )
        jpegs, frame_indices, pts_seconds = _encoded(reader, wanted, settings, notes)
        notes[:0] = reader.notes
        # A damaged frame is replaced by a neighbour, which may be there already.
        frame_indices, first = np.unique(frame_indices, return_index=True)
        start_seconds, duration = reader.metadata.span(task.start, task.end)
        width, height = Image.open(io.BytesIO(jpegs[0])).size
        return StoredVideo(
            jpegs=[jpegs[index] for index in first],
            frame_indices=frame_indices,
            pts_seconds=pts_seconds[first],
            width=width,
            height=height,
            start_seconds=start_seconds,
            duration=duration,
            fps=reader.metadata.fps,
            total_num_frames=reader.metadata.total_num_frames,
            notes=tuple(dict.fromkeys(notes)),
        )


def _encoded(
    reader: VideoReader, wanted: np.ndarray, settings: FrameSettings, notes: list[str]
) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Return JPEGs, frame indices and times; only a few decoded frames are held at a time."""
    size = fit_size(settings.size, reader.metadata)  # enlarging would only cost space
    jpegs: list[bytes] = []
    frame_indices: list[np.ndarray] = []
    pts_seconds: list[np.ndarray] = []
    begin, count = 0, 1  # the first frame shows how large they are
    while begin < len(wanted):
        batch = reader.read(wanted[begin : begin + count], size=size)
        begin += len(batch)
        count = max(1, _CHUNK_BYTES // batch.frames[0].nbytes)
        notes.extend(batch.notes)
        jpegs.extend(encode_jpeg(frame, settings.quality) for frame in batch.frames)
        frame_indices.append(batch.frame_indices)
        pts_seconds.append(batch.pts_seconds)
        if sum(map(len, jpegs)) > _MAX_JPEG_BYTES:
            raise VideoError(
                f"{reader.name}: its frames take more than {_MAX_JPEG_BYTES >> 20} MB; "
                "store fewer or smaller ones with num_candidates, fps or size"
            )
    return jpegs, np.concatenate(frame_indices), np.concatenate(pts_seconds)


def encode_jpeg(frame: Frames, quality: int) -> bytes:
    """Encode uint8 [H, W, 3] as JPEG with halved colour resolution."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def decode_or_fail(task: DecodeTask) -> StoredVideo | Failure:
    """Decode a video, or return why it cannot be decoded."""
    outcome = attempt(task.path, lambda: decode_video(task))
    return Failure(str(outcome)) if isinstance(outcome, SosamplerError) else outcome


# ---- videos, in child processes


def video_decoder(_: None) -> Work:
    """Return the function that a child process applies to each task."""
    return decode_or_fail


class VideoDecoder(ProcessPool):
    """Decodes videos in `workers` processes, so that a broken file can kill only those; 0 decodes in this process."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, _VIDEO_SERVER, work="decoding videos")

    def results(self, tasks: Iterable[DecodeTask]) -> Iterator[StoredVideo | Failure]:
        """Yield results in the order of the tasks.

        Two videos per worker are under way or wait to be taken, fewer if they are large.
        """

        def has_room(pending: Sequence[Future[StoredVideo | Failure]]) -> bool:
            done = (future.result() for future in pending if future.done())
            waiting = sum(sum(map(len, video.jpegs)) for video in done if isinstance(video, StoredVideo))
            return len(pending) <= 2 * self.num_threads and waiting < _MAX_WAITING_BYTES

        return in_order(self.submit, tasks, has_room)

    def call(self, task: DecodeTask, timeout: float | None = None) -> Any:
        try:
            return super().call(task, timeout or task.limits.timeout)
        except WorkerDied as died:
            return Failure(died.over(task.path))


# ---- stored frames


class FrameDecoder:
    """Decodes batches of stored JPEGs, for several threads at a time.

    A device is fed by one thread, which competes with every decoding thread of its process for the interpreter:
    processes, which share memory with this one, leave it to the device. Where the network runs on the CPU it takes most
    of the time: with 0 processes the thread that calls decodes.
    """

    def __init__(self, num_processes: int = 0) -> None:
        self._room = ByteBudget(_MAX_DECODED_BYTES)
        self._batches = [SharedPixels() for _ in range(BATCHES_AHEAD if num_processes else 0)]
        self._idle: LifoQueue[int] = LifoQueue()
        for number in range(len(self._batches)):
            self._idle.put(number)
        self._pool: ProcessPool | None = None
        if num_processes:
            files, server = [batch.file for batch in self._batches], "sosampler.bank.decode:frame_decoder"
            self._pool = ProcessPool(num_processes, server, files, files=files, work="decoding frames")

    def __enter__(self) -> FrameDecoder:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.__exit__(*error)
        for batch in self._batches:
            batch.close()

    @contextmanager
    def decoded(self, jpegs: list[bytes], names: list[str]) -> Iterator[Frames]:
        """Yield JPEGs of one size as uint8 [F, H, W, 3], to be used within the `with` block; names are for messages."""
        first = decode_jpeg(jpegs[0], repr(names[0]))
        shape, num_bytes = (len(jpegs), *first.shape), len(jpegs) * first.nbytes
        with self._room.taking(num_bytes):
            if self._pool is None:
                frames = np.empty(shape, dtype=np.uint8)
                frames[0] = first
                _decode_into(frames[1:], jpegs[1:], names[1:])
                yield frames
                return
            number = self._idle.get()
            try:
                frames = self._batches[number].array(shape)
                frames[0] = first
                parts = [slice(begin, begin + _FRAMES_PER_TASK) for begin in range(1, len(jpegs), _FRAMES_PER_TASK)]
                tasks = [self._pool.submit((number, shape, part, jpegs[part], names[part])) for part in parts]
                wait(tasks)  # also where one fails: the others still write there
                for task in tasks:
                    task.result()
                yield frames
            finally:
                if num_bytes > _MAX_DECODED_BYTES // BATCHES_AHEAD:
                    self._batches[number].empty()  # so many of them would be too much
                self._idle.put(number)


class ByteBudget:
    """A number of bytes that threads share: `taking` waits until there is room, or until no other thread has any."""

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


def num_frame_decoders(device_type: str, cores: int, num_frames: int) -> int:
    """Return how many processes are worth starting for so many frames; 0: threads suffice.

    >>> num_frame_decoders("cuda", 16, 30_000), num_frame_decoders("cuda", 2, 30_000)
    (15, 0)
    """
    if device_type == "cpu" or not CAN_SHARE_MEMORY or cores < 4 or num_frames < _MIN_FRAMES:
        return 0
    return min(cores - 1, _MAX_PROCESSES)  # one core feeds the device


def frame_decoder(files: list[int]) -> Work:
    """Return the function that decodes (batch, its shape, part, JPEGs, names) into memory shared with the parent."""
    batches = [SharedPixels(file) for file in files]

    def decode(task: tuple[int, tuple[int, ...], slice, list[bytes], list[str]]) -> None:
        number, shape, part, jpegs, names = task
        _decode_into(batches[number].array(shape)[part], jpegs, names)

    return decode


def _decode_into(frames: Frames, jpegs: list[bytes], names: list[str]) -> None:
    for row, data in enumerate(jpegs):
        frames[row] = decode_jpeg(data, repr(names[row]))
