"""Memory without a name that this process shares with those of a `ProcessPool`: pixels go through no pipe.

The system takes it back when the last process that knows it ends, however that ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


class SharedPixels:
    """Room that grows as needed; `file` is its number, for this process and for those that inherit it."""

    def __init__(self, file: int | None = None) -> None:
        """Without `file` new room, otherwise that which another process has opened."""
        self._is_owner = file is None
        self.file = unnamed_memory() if file is None else file
        self._map: mmap.mmap | None = None

    def array(self, shape: Sequence[int]) -> Pixels:
        """The beginning of it as an array of this shape. Only the process that made it enlarges it."""
        needed = math.prod(shape)
        if self._map is None or len(self._map) < needed:
            if self._is_owner:
                os.ftruncate(self.file, max(needed, 1))
            self._map = mmap.mmap(self.file, max(needed, 1))  # arrays of a smaller map keep that one alive
        return np.frombuffer(self._map, dtype=np.uint8, count=needed).reshape(shape)

    def empty(self) -> None:
        """Give the memory back until it is written to again, where the system can; what it held is lost."""
        if self._map is not None and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Forget it; the memory goes once no array and no other process has it."""
        self._map = None
        if self._is_owner:
            os.close(self.file)

    def __enter__(self) -> SharedPixels:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def unnamed_memory() -> int:
    """An open file in memory that has no name; where there are none, in the folder for temporary files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sosampler", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sosampler-") as file:
        return os.dup(file.fileno())
