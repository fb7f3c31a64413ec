"""The reader interface, a batch of decoded frames, and the metadata of a video."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.video.limits import Size, target_size


@dataclass(frozen=True, eq=False)
class Timeline:
    """All frames of a video. The frame index is the position in this table, never time times rate."""

    pts: Indices  # [F] ticks, strictly increasing
    time_base: Fraction  # seconds a tick
    is_keyframe: NDArray[np.bool_]  # [F]
    end_pts: int  # when the last frame ceases to be shown

    def __post_init__(self) -> None:
        if self.pts.ndim != 1 or self.pts.shape != self.is_keyframe.shape or not len(self.pts):
            raise ValueError(f"a timeline needs F >= 1 timestamps and F flags, got {self.pts.shape = }")
        if np.any(np.diff(self.pts) <= 0):
            raise ValueError("the timestamps of a timeline must increase strictly")

    def __len__(self) -> int:
        return len(self.pts)

    def __repr__(self) -> str:
        start, end = self.seconds(0), self.to_seconds(self.end_pts)
        return f"Timeline({len(self)} frames, {self.is_keyframe.sum()} keyframes, {start:.3f}..{end:.3f} s)"

    @property
    def keyframe_indices(self) -> Indices:
        return np.flatnonzero(self.is_keyframe).astype(np.int64)

    def behind_keyframes(self, positions: Indices, behind: ArrayLike) -> Indices:
        """The frame on screen `behind` seconds after each of some keyframes, at most the last one of its group."""
        keys = self.keyframe_indices
        ends = np.append(keys[1:], len(self))[positions]
        moments = self.seconds(keys[positions]) + np.asarray(behind, dtype=np.float64)
        return np.clip(self.index_at(moments), keys[positions], ends - 1)

    @property
    def duration(self) -> float:
        """Seconds from the first frame's appearance to the last one's end."""
        return float(self.to_seconds(self.end_pts - int(self.pts[0])))

    def to_seconds(self, ticks: ArrayLike) -> Seconds:
        # One multiplication and one division in float64: what torchcodec computes, to the last bit.
        return np.asarray(ticks, dtype=np.float64) * self.time_base.numerator / self.time_base.denominator

    def seconds(self, frame_indices: ArrayLike) -> Seconds:
        return self.to_seconds(self.pts[np.asarray(frame_indices)])

    def index_at(self, seconds: ArrayLike) -> Indices:
        """The frame on screen at each time: the last one whose timestamp is not later."""
        moments = np.asarray(seconds, dtype=np.float64) + self._half_tick
        position = np.searchsorted(self.to_seconds(self.pts), moments, side="right") - 1
        return np.clip(position, 0, len(self) - 1).astype(np.int64)

    @property
    def _half_tick(self) -> float:
        """What a time may be off and still mean the same tick: 0.1 * 3 is not 0.3, and containers round."""
        return float(self.time_base) / 2

    def range_of(self, start: float | None, end: float | None) -> tuple[int, int]:
        """Half-open range of the frames whose timestamp t satisfies start <= t < end."""
        times = self.to_seconds(self.pts)
        first = 0 if start is None else int(np.searchsorted(times, start - self._half_tick, side="left"))
        last = len(self) if end is None else int(np.searchsorted(times, end - self._half_tick, side="left"))
        return first, last


@dataclass(frozen=True)
class VideoMetadata:
    """Figures of one video; counted from its packets or its container's index, not guessed from its header."""

    total_num_frames: int
    fps: float  # average: total_num_frames / duration
    duration: float  # seconds from the first frame's appearance to the last one's end
    start_seconds: float  # timestamp of the first frame; not always zero
    width: int  # pixels, upright
    height: int  # pixels, upright
    rotation: int  # degrees, counter-clockwise, already applied to width, height and frames
    codec: str
    num_keyframes: int
    decoder: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def span(self, start: float | None, end: float | None) -> tuple[float, float]:
        """Where the part between start and end begins, and how long it is, in seconds."""
        first, last = self.start_seconds, self.start_seconds + self.duration
        begins = first if start is None else max(start, first)
        return begins, (last if end is None else min(end, last)) - begins


@dataclass(frozen=True, eq=False)
class FrameBatch:
    """Decoded frames in the order of the request."""

    frames: Frames  # [N, H, W, 3] uint8 RGB, upright
    frame_indices: Indices  # [N]; another number than requested only where a damaged frame had to be replaced
    pts_seconds: Seconds  # [N]
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        count = len(self.frames)
        if self.frames.ndim != 4 or len(self.frame_indices) != count or len(self.pts_seconds) != count:
            raise ValueError(f"frames, indices and times do not fit: {self.frames.shape}, {len(self.frame_indices)}")

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"FrameBatch(frames={self.frames.shape}, frame_indices={self.frame_indices.tolist()})"


class FrameView(Protocol):
    """Some frames in a small size, for a policy to look at, and the way to have them in another."""

    batch: FrameBatch

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        """Return some of the frames, by the numbers with which the view was asked for, in another size."""
        ...


class RgbView:
    """The view of a reader that gives RGB frames only: they are kept in the stored size where that fits."""

    def __init__(self, reader: VideoReader, frame_indices: Indices, *, size: Size, max_bytes: int) -> None:
        self._reader, metadata = reader, reader.metadata
        self._row_of = {frame: row for row, frame in enumerate(frame_indices.tolist())}
        fits = 3 * metadata.width * metadata.height * len(frame_indices) <= max_bytes
        self._stored = reader.read(frame_indices) if fits else None
        self.batch = reader.read(frame_indices, size=size) if self._stored is None else self._in(self._stored, size)

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        if self._stored is None:
            return self._reader.read(frame_indices, size=size)
        rows, stored = [self._row_of[frame] for frame in frame_indices.tolist()], self._stored
        return self._in(FrameBatch(stored.frames[rows], stored.frame_indices[rows], stored.pts_seconds[rows]), size)

    def _in(self, batch: FrameBatch, size: Size) -> FrameBatch:
        # Not the metadata's: an open torchcodec decoder may have a size of its own.
        height, width = batch.frames.shape[1:3]
        frames = resized(batch.frames, *target_size(width, height, size))
        return FrameBatch(frames, batch.frame_indices, batch.pts_seconds, batch.notes)


def resized(frames: Frames, width: int, height: int) -> Frames:
    """Resize [N, H, W, 3] uint8 by PIL's bilinear filter, which widens with the scale: it is anti-aliased."""
    if frames.shape[1:3] == (height, width):
        return frames
    from PIL import Image

    images = [Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR) for frame in frames]
    return np.stack([np.asarray(image) for image in images])


class VideoReader(Protocol):
    """One open video.

    Frame numbers count in presentation order from 0. `timeline` may read the whole file once;
    the keyframe methods need not, where the container keeps an index.
    """

    name: str
    decoder: str
    notes: list[str]
    file_bytes: int | None  # None where it is unknown

    @property
    def transfer(self) -> dict[str, Any] | None:
        """Bytes and requests so far, of an address; None for other sources."""
        ...

    @property
    def metadata(self) -> VideoMetadata: ...

    @property
    def total_num_frames(self) -> int: ...

    def timeline(self) -> Timeline: ...

    def keyframe_indices(self) -> Indices:
        """Frame numbers of all keyframes. May be off by the few frames that an open group of pictures shows first."""
        ...

    def locate_keyframes(self, positions: Indices, behind: Seconds | None = None) -> tuple[Indices, Seconds]:
        """True frame numbers and timestamps of some of the keyframes, given as positions in `keyframe_indices`.

        With `behind`, of the frames so many seconds behind each, at most the last one before the next keyframe.
        """
        ...

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        """Seconds from each of `frame_indices` to each of `others`, without a scan where there is an index."""
        ...

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        """Decode these frames, in any order, repeats allowed."""
        ...

    def view(self, frame_indices: Indices, *, size: Size, max_bytes: int) -> FrameView:
        """Decode these frames for a policy. Up to `max_bytes` of them stay in memory and are not decoded again."""
        ...

    def close(self) -> None: ...
