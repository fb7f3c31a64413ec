"""How much memory and how many cores a process may take: of the machine, or of the container it runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")
_UNKNOWN_MEMORY = 4 << 30  # where the system does not tell


def free_memory() -> int:
    """Bytes of memory that could be had without swapping or going over the limit of a container."""
    return max(0, min([_free_on_the_machine(), *_left_in_groups()]))


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its quota of time pays for."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *(int(quota) for quota in _quotas())]))


def free_shared_memory() -> int | None:
    """Bytes that processes may still hand to each other; None where the system does not tell. Docker gives 64 MB."""
    if not _SHARED.is_dir():
        return None
    found = os.statvfs(_SHARED)
    return found.f_bavail * found.f_frsize


def _free_on_the_machine() -> int:
    for line in _text(_PROC / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN_MEMORY


def _left_in_groups() -> Iterator[int]:
    """Bytes left under each limit of this process's control groups, of both versions."""
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _groups("memory"):
        for limit_file, used_file, cached in files:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                # Files that were read and not used since are given up when memory is asked for.
                yield limit - used + _statistic(folder / "memory.stat", cached)


def _quotas() -> Iterator[float]:
    """Cores' worth of time."""
    for folder in _groups("cpu"):
        told = _text(folder / "cpu.max").split()  # "max 100000" or "200000 100000"
        if len(told) == 2 and told[0].isdigit():
            yield int(told[0]) / int(told[1])
        quota_time, period_time = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_time is not None and period_time and quota_time > 0:
            yield quota_time / period_time


def _groups(controller: str) -> Iterator[Path]:
    """Folders that may limit this process: its own group and all above it; in a container the top is its own."""
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _GROUPS / controller if controllers else _GROUPS
        own = Path(path.lstrip("/"))
        yield from (folder for folder in (top / own, *(top / above for above in own.parents)) if folder.is_dir())


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _statistic(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.split()[:1] == [name]), 0)


def _text(path: Path) -> str:
    """What the system tells in a file; nothing where it has none or keeps it to itself."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
