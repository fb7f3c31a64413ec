"""Limits against hostile files: a few bytes of header must not cost gigabytes or hours.

docs/security.md lists all of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, LimitExceeded, SosamplerError, VideoError

# Bytes of decoded frames where `Limits.max_bytes` is not given. A file of a few kilobytes that asks for gigabytes is
# not a video: even a still image takes some bytes a second, which is 10,000 times less than its pixels.
MAX_BYTES = 4 << 30
MAX_BYTES_PER_FILE_BYTE = 100_000
MIN_MAX_BYTES = 256 << 20  # for the smallest files
# Bytes of all packets, as a multiple of the file: an edit list can show the same packets again and again.
MAX_PACKET_BYTES_PER_FILE_BYTE = 64
# Seconds for one video, and where someone waits for it: on the page of `sosampler ui`.
TIMEOUT, PAGE_TIMEOUT = 3600.0, 300.0
# Seconds to find one packet: FFmpeg looks for the next one in damaged data byte by byte, again and again.
MAX_PACKET_SECONDS = 15.0
# Seconds without a byte of an address, after which a request is given up; a request of 64 KiB may take as long.
MAX_STALL_SECONDS = 20.0


@dataclass(frozen=True)
class Limits:
    """What a video may cost at most. Every check names the field that raises it."""

    max_pixels: int = 2 * 7680 * 4320
    """Pixels of one frame; the default is twice an 8K image."""
    max_frames: int = 10_000_000
    """Frames of one video; the default is 46 hours at 60 frames a second."""
    max_duration: float = 48 * 3600.0
    """Seconds of one video."""
    max_bytes: int | None = None
    """Bytes of the decoded frames of one call; None: 4 GiB, and 100,000 times the file where that is less (but never
    below 256 MiB)."""
    timeout: float = TIMEOUT
    """Seconds that one video may take to read and decode."""
    max_read: int = 4 << 30
    """Bytes that may be read from one address."""
    retries: int = 2
    """How often a failed request to an address is repeated."""

    def __post_init__(self) -> None:
        check_int("max_pixels", self.max_pixels)
        check_int("max_frames", self.max_frames)
        check_float("max_duration", self.max_duration, above=0)
        if self.max_bytes is not None:
            check_int("max_bytes", self.max_bytes)
        check_float("timeout", self.timeout, above=0)
        check_int("max_read", self.max_read)
        check_int("retries", self.retries, at_least=0, at_most=100)

    def check_pixels(self, name: str, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            self._refuse(name, f"a frame of {width}x{height} = {width * height} pixels", "max_pixels")

    def check_frames(self, name: str, frames: int) -> None:
        if frames > self.max_frames:
            self._refuse(name, f"{frames} frames or more", "max_frames")

    def check_duration(self, name: str, seconds: float) -> None:
        if seconds > self.max_duration:
            self._refuse(name, f"a duration of {seconds:g} s", "max_duration")

    def check_moments(self, name: str, fps: float, seconds: float) -> None:
        """Refuse a rate that asks for more moments of a video than it may have frames."""
        if fps * seconds > self.max_frames:
            raise LimitExceeded(
                f"{name}: fps={fps:g} asks for {fps * seconds:.3g} frames of its {seconds:g} s, over the limit "
                f"max_frames={self.max_frames}; lower fps, or raise it with --max-frames or Limits(max_frames=...)"
            )

    def bytes_for(self, file_bytes: int | None) -> int:
        """Return how many bytes the decoded frames of a file of this size may take."""
        if self.max_bytes is not None:
            return self.max_bytes
        if file_bytes is None:
            return MAX_BYTES
        return min(MAX_BYTES, max(MIN_MAX_BYTES, MAX_BYTES_PER_FILE_BYTE * file_bytes))

    def check_bytes(self, name: str, frames: int, width: int, height: int, file_bytes: int | None) -> None:
        """Refuse an array of so many RGB frames of that size, before anything is decoded."""
        needed, allowed = 3 * width * height * frames, self.bytes_for(file_bytes)
        if needed > allowed:
            of_file = "" if file_bytes is None else f" from a file of {file_bytes} bytes"
            raise LimitExceeded(
                f"{name}: {frames} frames of {width}x{height} take {needed >> 20} MiB{of_file}, over the limit "
                f"max_bytes={allowed}; ask for fewer or smaller frames (num_frames, fps, size), or raise it with "
                "--max-bytes or Limits(max_bytes=...)"
            )

    def _refuse(self, name: str, measured: str, field: str) -> None:
        option = "--" + field.replace("_", "-")
        raise LimitExceeded(
            f"{name}: {measured} is over the limit {field}={getattr(self, field):.12g}; "
            f"if you trust the file, raise it with {option} or Limits({field}=...)"
        )


def check_packet_bytes(name: str, packet_bytes: int, file_bytes: int) -> None:
    """Refuse a file whose packets are many times as large as the file: the same bytes, shown again and again."""
    if packet_bytes > MAX_PACKET_BYTES_PER_FILE_BYTE * file_bytes > 0:
        raise VideoError(
            f"{name}: its index repeats the same frames until they are {MAX_PACKET_BYTES_PER_FILE_BYTE} times the file "
            "(MAX_PACKET_BYTES_PER_FILE_BYTE in sosampler.video.limits) or more; write the file again without its edit "
            "list, for example with ffmpeg -ignore_editlist 1 -i IN -c copy OUT"
        )


class TimeLimit:
    """The seconds that a reader has spent on its video, over all calls: enter it for each.

    A file that fails under FFmpeg (`fail`) ends like one whose time is over. `check` is for every loop over packets or
    frames. A call into FFmpeg that never returns is ended elsewhere, with the process that made it.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        self._left = limits.timeout
        self._end = self._step_end = float("inf")
        self._depth = 0
        self._failure: SosamplerError | None = None

    def __enter__(self) -> TimeLimit:
        if not self._depth:
            self._end = time.monotonic() + self._left
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._left = self._end - time.monotonic()
            self._end = float("inf")
        if self._failure is not None and kind is None:
            raise self._failure

    def fail(self, error: SosamplerError) -> None:
        """Let the next check raise this error. FFmpeg itself takes errors of a file for its end, or reads on."""
        self._failure = self._failure or error

    def begin_step(self, seconds: float) -> None:
        """Check, and begin a call into FFmpeg that reads from the file and may take so long."""
        self.check()
        self._step_end = time.monotonic() + seconds

    def extend_step(self, seconds: float) -> None:
        """Add seconds in which FFmpeg waited for bytes and searched nothing."""
        self._step_end += seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until `check` raises, at least a little more than none; call it entered."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def is_step_over(self) -> bool:
        return self._failure is not None or time.monotonic() > min(self._step_end, self._end)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() > self._end:
            raise timed_out(self._name, self._limits.timeout)


def timed_out(name: str, timeout: float) -> LimitExceeded:
    """Return the error of a video that takes longer than allowed."""
    return LimitExceeded(
        f"{name}: is not read within the limit timeout={timeout:g} seconds, so it may be damaged; if you trust the "
        "file, raise it with --timeout or Limits(timeout=...)"
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
