"""One video becomes JPEG frames; and the process that does nothing else, so that a broken file can kill only itself."""

from __future__ import annotations

import hashlib
import io
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.validation import real_number, whole_number
from sosampler._util.workers import DecodePool, ProcessEnded, code_of, death_of, parent_pipes, start_process
from sosampler.bank.format import Failure, StoredVideo
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.candidates import offer
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import capped_size
from sosampler.video.limits import Limits, Size, check_size
from sosampler.video.reader import Frames, VideoMetadata, VideoReader
from sosampler.video.source import open_video

# Above this a rate is a slip of the pen; and moments of one video at its rate, each of which is looked up.
_MAX_FPS = 10_000
_MAX_MOMENTS = 2_000_000
# A bank keeps memory bounded, so one video of it is: frames, and bytes of JPEG.
MAX_FRAMES_A_VIDEO = 4096
_MAX_JPEG_BYTES = 128 << 20
# Decoded pictures held at a time; all 64 of the usual size fit.
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class FrameSettings:
    """Which frames of a video a bank keeps, and how. Decides the bytes of the bank together with the videos."""

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
        if whole_number("quality", self.quality) > 100:
            raise InvalidArgument(f"quality={self.quality} is not allowed; give a whole number from 1 to 100")
        if self.fps is not None and real_number("fps", self.fps, above=0) > _MAX_FPS:
            raise InvalidArgument(f"fps={self.fps:g} is not allowed; give at most {_MAX_FPS} frames a second")
        if self.folder_fps is not None:
            real_number("folder_fps", self.folder_fps, above=0)
        if self.num_candidates is not None and whole_number("num_candidates", self.num_candidates) > MAX_FRAMES_A_VIDEO:
            raise InvalidArgument(
                f"num_candidates={self.num_candidates} is not allowed; a bank keeps {MAX_FRAMES_A_VIDEO} frames of a "
                "video at most, give fewer"
            )
        self.options()  # says what is wrong with the rest

    def options(
        self, *, start: float | None = None, end: float | None = None, video_id: str | None = None
    ) -> SelectOptions:
        """What `select` would be told to offer the same frames."""
        return SelectOptions(
            policy="all",
            num_candidates=self.num_candidates,
            fps=self.fps,
            candidates=self.candidates,
            grid=self.grid,
            snap_tolerance=self.snap_tolerance,
            seed=self.seed if video_id is None else _seed_of(self.seed, video_id),
            on_short="fewer",
            start=start,
            end=end,
        )

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        return {**told, "size": list(self.size) if isinstance(self.size, tuple) else self.size}


def _seed_of(seed: int, video_id: str) -> int:
    """Each video its own, whatever the order of the manifest."""
    return int.from_bytes(hashlib.sha256(f"{seed} {video_id}".encode()).digest()[:6], "big")


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
    """Decode the frames that the settings offer."""
    settings = task.settings
    reader = open_video(task.path, threads=1, limits=task.limits, folder_fps=settings.folder_fps)
    try:
        notes: list[str] = []
        moments = (settings.fps or 0) * _part(reader.metadata, task.start, task.end)[1]
        if moments > _MAX_MOMENTS:
            raise VideoError(
                f"{task.path}: fps={settings.fps:g} asks for {moments:.0f} moments, over the {_MAX_MOMENTS} that are "
                "allowed for one video; lower fps, or cut the video with start and end"
            )
        options = settings.options(start=task.start, end=task.end, video_id=task.video_id)
        wanted = np.unique(offer(reader, options, notes).frame_indices)
        if len(wanted) > MAX_FRAMES_A_VIDEO:
            raise VideoError(
                f"{task.path}: fps={settings.fps:g} gives {len(wanted)} frames, over the {MAX_FRAMES_A_VIDEO} that a "
                "bank keeps of one video; lower fps, or cut the video with start and end"
            )
        jpegs, frame_indices, pts_seconds = _encoded(reader, wanted, settings, notes)
        metadata = reader.metadata
        notes[:0] = reader.notes
        # A damaged frame is replaced by a neighbour, which may be there already.
        frame_indices, first = np.unique(frame_indices, return_index=True)
        start_seconds, duration = _part(metadata, task.start, task.end)
        width, height = Image.open(io.BytesIO(jpegs[0])).size
        return StoredVideo(
            jpegs=[jpegs[place] for place in first],
            frame_indices=frame_indices,
            pts_seconds=pts_seconds[first],
            width=width,
            height=height,
            start_seconds=start_seconds,
            duration=duration,
            fps=metadata.fps,
            total_num_frames=metadata.total_num_frames,
            notes=tuple(dict.fromkeys(notes)),
        )
    finally:
        reader.close()


def _encoded(
    reader: VideoReader, wanted: np.ndarray, settings: FrameSettings, notes: list[str]
) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """JPEGs, true frame numbers and times, a few pictures at a time."""
    size = capped_size(settings.size, reader.metadata)  # the rest would only cost room
    jpegs: list[bytes] = []
    frame_indices: list[np.ndarray] = []
    pts_seconds: list[np.ndarray] = []
    begin, at_once, total = 0, 1, 0  # the first picture tells how large they are
    while begin < len(wanted):
        batch = reader.read(wanted[begin : begin + at_once], size=size)
        begin += len(batch)
        at_once = max(1, _CHUNK_BYTES // batch.frames[0].nbytes)
        notes.extend(batch.notes)
        jpegs.extend(encode_jpeg(frame, settings.quality) for frame in batch.frames)
        frame_indices.append(batch.frame_indices)
        pts_seconds.append(batch.pts_seconds)
        total = sum(map(len, jpegs))
        if total > _MAX_JPEG_BYTES:
            raise VideoError(
                f"{reader.name}: its frames take more than {_MAX_JPEG_BYTES >> 20} MB; "
                "keep fewer or smaller ones with num_candidates, fps or size"
            )
    return jpegs, np.concatenate(frame_indices), np.concatenate(pts_seconds)


def _part(metadata: VideoMetadata, start: float | None, end: float | None) -> tuple[float, float]:
    """Where the part that is asked for begins, and how long it is."""
    begins = metadata.start_seconds if start is None else max(start, metadata.start_seconds)
    last = metadata.start_seconds + metadata.duration
    return begins, (last if end is None else min(end, last)) - begins


def encode_jpeg(frame: Frames, quality: int) -> bytes:
    """uint8 [H, W, 3] -> JPEG with halved colour."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def attempt(task: DecodeTask) -> StoredVideo | Failure:
    """`decode_video`, with the reason where the video is at fault."""
    try:
        return decode_video(task)
    except MemoryError:
        return Failure(f"{task.path}: does not fit into memory; keep fewer or smaller frames, or cut it")
    except SosamplerError as error:
        text = str(error)
    except OSError as error:  # also what PyAV raises for damaged files
        text = f"cannot be read ({error.strerror or error}); check the file and its permissions"
    except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to, the other videos go on
        text = f"cannot be decoded ({type(error).__name__}: {error}); the file may be damaged"
    return Failure(text if task.path in text else f"{task.path}: {text}")


def serve() -> None:
    """Answer tasks until the parent wants no more."""
    tasks, send = parent_pipes()
    for task in tasks:
        send(attempt(task))


_START = code_of("sosampler.bank.decode:serve")
# Decoded videos that wait to be taken: no more are begun beyond this.
_MAX_WAITING_BYTES = 256 << 20


class VideoPool(DecodePool):
    """`workers` processes that decode videos for a bank; 0 decodes in this process."""

    def __enter__(self) -> VideoPool:
        return self

    def _decode(self, task: DecodeTask) -> StoredVideo | Failure:
        if self._in_process:
            return attempt(task)
        try:
            answer: StoredVideo | Failure = self._worker().ask(task)
            return answer
        except ProcessEnded as ended:
            return Failure(death_of(task.path, ended))

    def _start_process(self) -> subprocess.Popen[bytes]:
        return start_process(_START)

    def results(self, tasks: Iterable[DecodeTask]) -> Iterator[StoredVideo | Failure]:
        """In the order of the tasks. Two videos a worker are under way or wait to be taken, fewer if they are large."""
        pending: deque[Future[StoredVideo | Failure]] = deque()
        ahead, left = iter(tasks), True
        while left or pending:
            while left and len(pending) <= 2 * self._threads and _waiting_bytes(pending) < _MAX_WAITING_BYTES:
                task = next(ahead, None)
                left = task is not None
                if task is not None:
                    pending.append(self._executor.submit(self._decode, task))
            if pending:
                yield pending.popleft().result()


def _waiting_bytes(pending: Iterable[Future[StoredVideo | Failure]]) -> int:
    done = (future.result() for future in pending if future.done())
    return sum(sum(map(len, video.jpegs)) for video in done if isinstance(video, StoredVideo))
