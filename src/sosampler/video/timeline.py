"""When each frame is shown: presentation timestamps in exact ticks, in presentation order."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


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
