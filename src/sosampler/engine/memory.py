"""Keep freed memory in the process: glibc returns large blocks to the system after every layer otherwise."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

KEEP = "SOSAMPLER_KEEP_MEMORY"  # "0" in the environment leaves the allocator alone
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
# mmap: the maximum that mallopt takes, and more than one layer of a batch needs. trim: never, because a training step
# frees several times as much at its end and needs it again immediately.
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: -1}


@cache
def keep_memory() -> bool:
    """Let freed memory stay with the process; return whether that is possible (glibc) and not switched off.

    SOSAMPLER_KEEP_MEMORY=0 in the environment keeps the allocator's own thresholds.
    """
    if os.environ.get(KEEP, "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())
