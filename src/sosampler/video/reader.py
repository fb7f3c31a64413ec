"""The reader interface, a batch of decoded frames, and the metadata of a video."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sosampler.video.limits import Size
from sosampler.video.timeline import Indices, Seconds, Timeline


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


Frames = NDArray[np.uint8]


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


class VideoReader(Protocol):
    """One open video.

    Frame numbers count in presentation order from 0. `timeline` may read the whole file once;
    the keyframe methods need not, where the container keeps an index.
    """

    name: str
    decoder: str
    notes: list[str]

    @property
    def metadata(self) -> VideoMetadata: ...

    @property
    def total_num_frames(self) -> int: ...

    def timeline(self) -> Timeline: ...

    def keyframe_indices(self) -> Indices:
        """Frame numbers of all keyframes. May be off by the few frames that an open group of pictures shows first."""
        ...

    def locate_keyframes(self, positions: Indices) -> tuple[Indices, Seconds]:
        """True frame numbers and timestamps of some of the keyframes, given as positions in `keyframe_indices`."""
        ...

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        """Seconds from each of `frame_indices` to each of `others`, without a scan where there is an index."""
        ...

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        """Decode these frames, in any order, repeats allowed."""
        ...

    def close(self) -> None: ...
