"""Limits against hostile files: a few bytes of header must not cost gigabytes or hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, LimitExceeded


@dataclass(frozen=True)
class Limits:
    """What a video may cost at most. Every check names the field that raises it."""

    max_pixels: int = 2 * 7680 * 4320
    """Pixels of one frame; the default is twice an 8K image."""
    max_frames: int = 10_000_000
    """Frames of one video; the default is 46 hours at 60 frames a second."""
    max_duration: float = 48 * 3600.0
    """Seconds of one video."""

    def __post_init__(self) -> None:
        check_int("max_pixels", self.max_pixels)
        check_int("max_frames", self.max_frames)
        check_float("max_duration", self.max_duration, above=0)

    def check_pixels(self, name: str, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            self._refuse(name, f"a frame of {width}x{height} = {width * height} pixels", "max_pixels")

    def check_frames(self, name: str, frames: int) -> None:
        if frames > self.max_frames:
            self._refuse(name, f"{frames} frames or more", "max_frames")

    def check_duration(self, name: str, seconds: float) -> None:
        if seconds > self.max_duration:
            self._refuse(name, f"a duration of {seconds:g} s", "max_duration")

    def _refuse(self, name: str, measured: str, field: str) -> None:
        option = "--" + field.replace("_", "-")
        raise LimitExceeded(
            f"{name}: {measured} is over the limit {field}={getattr(self, field):.12g}; "
            f"if you trust the file, raise it with {option} or Limits({field}=...)"
        )


Size = int | tuple[int, int] | None
"""None: as stored; an int: the short side, aspect ratio kept; (height, width): exactly that."""


def check_size(size: Any) -> Size:
    if size is None:
        return None
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise InvalidArgument(f"size={size!r} must be the short side, or (height, width)")
        height, width = size
        return check_int("size (height)", height), check_int("size (width)", width)
    return check_int("size", size)


def target_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """(width, height) after resizing an upright frame of `width` x `height`."""
    if size is None:
        return width, height
    if isinstance(size, tuple):
        return size[1], size[0]
    # Truncation of the long side, not rounding: what torchvision's Resize(short side) does.
    if width <= height:
        return size, max(1, int(size * height / width))
    return max(1, int(size * width / height)), size
