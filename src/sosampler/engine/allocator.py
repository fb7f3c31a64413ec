"""The C library's memory: kept for the next batch instead of given back after each layer.

glibc returns every large block to the system when it is freed, and the system clears it anew for the next layer: with
batches of frames that can cost more than the arithmetic. Thresholds are those of the whole process, so that memory that
was once needed stays with it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

KEEP = "SOSAMPLER_KEEP_MEMORY"  # "0" in the environment leaves the allocator alone
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_BYTES = 1 << 30  # the most that mallopt takes as an int, and more than one layer of a batch needs
_NEVER = -1  # a step of training frees several times as much at its end, and needs it again at once
_SETTINGS = {_MMAP_THRESHOLD: _BYTES, _TRIM_THRESHOLD: _NEVER}


@cache
def keep_memory() -> bool:
    """Let freed memory stay with the process, once; whether that is possible here (glibc) and wanted.

    SOSAMPLER_KEEP_MEMORY=0 in the environment asks for the allocator's own thresholds.
    """
    if os.environ.get(KEEP, "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # mallopt returns 1 where it took the value.
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())
