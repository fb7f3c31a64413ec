"""How much room a bank still needs, and the word about it where a disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sosampler.data.bank_format import BankFolder, BankHead
from sosampler.errors import SosamplerError

# What the system says when nothing more can be written: no space, quota, largest file.
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# For the estimate before the first video is written: 64 frames with a short side of 256 at quality 90.
_GUESSED_BYTES_A_VIDEO = 2 << 20

ShardPath = Callable[[int], Path]
"""Where a shard of one kind lies, by its number."""


@dataclass
class Tally:
    """One kind of shard: frames, or the answers of a classifier. Tells how much of it is there and how much is not."""

    head: BankHead
    path_of: ShardPath
    guess: int = _GUESSED_BYTES_A_VIDEO  # bytes a video, while none is there
    open_videos: int = 0  # in the shard that is being written
    open_bytes: int = 0

    def finished(self) -> tuple[int, int]:
        """Videos and bytes of the shards that are there; a shard that was broken off counts for nothing."""
        videos = num_bytes = 0
        for shard in range(self.head.num_shards):
            if self.path_of(shard).exists():
                videos += len(self.head.shard_range(shard))
                num_bytes += self.path_of(shard).stat().st_size
        return videos, num_bytes

    def needed(self) -> int:
        """Bytes of the videos that are in no finished shard."""
        videos, num_bytes = self.finished()
        return bytes_needed(
            self.head.num_items - videos, videos + self.open_videos, num_bytes + self.open_bytes, self.guess
        )


def bytes_needed(videos_left: int, videos_seen: int, bytes_seen: int, guess: int) -> int:
    """For the videos that are left, as large as those that were seen are on average; `guess` if none was.

    >>> bytes_needed(8, 4, 4000, 7), bytes_needed(8, 0, 0, 7), bytes_needed(0, 4, 4000, 7)
    (8000, 56, 0)
    """
    each = bytes_seen / videos_seen if videos_seen and bytes_seen else guess
    return round(each * videos_left)


def mean_bytes(tally: Tally) -> int:
    """Bytes a video of the shards that are there, to guess those of a copy."""
    videos, num_bytes = tally.finished()
    return bytes_needed(1, videos, num_bytes, tally.guess)


@contextmanager
def explaining_full_disk(folder: BankFolder, *tallies: Tally) -> Iterator[None]:
    """Turn the system's word for a full disk into one that says how much is needed.

    What was broken off must be gone when it is asked how much is free, so this is the outermost of the contexts.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SosamplerError(
            full_disk_text(folder.path, error.errno or 0, tallies, shutil.disk_usage(folder.path).free)
        ) from error


def full_disk_text(path: Path, code: int, tallies: Sequence[Tally], free: int) -> str:
    """How far it came, what is needed and what is free."""
    done = min(tally.finished()[0] for tally in tallies)
    return (
        f"{path}: cannot be written any further ({os.strerror(code)}) with {done} of {tallies[0].head.num_items} "
        f"videos finished; about {_megabytes(sum(tally.needed() for tally in tallies))} are needed for the rest, "
        f"{_megabytes(free)} are free. What is finished stays valid: make room and give the same command again, or "
        "prepare fewer, smaller frames in another folder"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"
