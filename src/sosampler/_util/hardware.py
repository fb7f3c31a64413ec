"""What this machine has: cores, memory, devices, and the precision each is fast in."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util import limits
from sosampler.errors import InvalidArgument, MissingDependency, first_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sosampler")

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")
_UNKNOWN_MEMORY = 4 << 30  # bytes, where the system reports nothing
_MAX_CACHE = 16 << 30  # bytes
_SHARE_OF_MEMORY = 0.4

BFLOAT16_VARIABLE = "SOSAMPLER_CPU_BFLOAT16"  # "0" or "1" in the environment skips the trial
_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
_MIN_BFLOAT16_GAIN = 1.3
_TRIAL_SECONDS = 120


# ---- cores and memory


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, capped by the CPU quota of its container."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *(int(quota) for quota in _quotas())]))


def free_memory() -> int:
    """Return the bytes of memory available without swapping or exceeding the limit of a container."""
    return max(0, min([_free_on_the_machine(), *_left_in_groups()]))


def default_cache_bytes(processes: int = 1) -> int:
    """Return two fifths of the free memory, at most 16 GiB, shared between the processes of one machine."""
    return min(int(_SHARE_OF_MEMORY * free_memory()), _MAX_CACHE) // processes


def free_shared_memory() -> int | None:
    """Return the free bytes of /dev/shm; None where there is none. Docker gives 64 MB by default."""
    return shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None


def _free_on_the_machine() -> int:
    available = _statistic(_PROC / "meminfo", "MemAvailable:")
    if available is not None:
        return available << 10
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _UNKNOWN_MEMORY


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes left under each memory limit of this process's control groups, v2 and v1."""
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder in _groups("memory"):
        for limit_file, used_file, cached in files:
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None:
                # Inactive page cache is given up when memory runs short.
                yield limit - used + (_statistic(folder / "memory.stat", cached) or 0)


def _quotas() -> Iterator[float]:
    """Yield CPU quotas, in cores."""
    for folder in _groups("cpu"):
        quota = _text(folder / "cpu.max").split()  # "max 100000" or "200000 100000"
        if len(quota) == 2 and quota[0].isdigit():
            yield int(quota[0]) / int(quota[1])
        quota_time, period_time = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_time is not None and period_time and quota_time > 0:
            yield quota_time / period_time


def _groups(controller: str) -> Iterator[Path]:
    """Yield the control groups of this process and their parents; in a container the top one is its own."""
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


def _statistic(path: Path, name: str) -> int | None:
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.split()[:1] == [name]), None)


def _text(path: Path) -> str:
    """Read a system file; empty where it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- forked processes


def _use_one_thread() -> None:
    """Let a forked process run networks with one thread: the others of the parent's pool are not there, and a parallel
    step would wait for them for ever. torch does the same in the workers of its data loader."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_one_thread)


# ---- devices


def check_device(given: Any) -> torch.device:
    """Return the device, or raise where this machine does not have it."""
    import torch

    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise InvalidArgument(
            f"device={given!r} cannot be used here ({first_line(error)}); choose one of: {', '.join(there)}"
        ) from error
    return device


def resolve_device(given: Any = None) -> torch.device:
    """Return the given device, checked; by default the GPU if there is one, else the CPU."""
    import torch

    return check_device(("cuda" if torch.cuda.is_available() else "cpu") if given is None else given)


def autocast(device: torch.device, precision: str) -> Any:
    """Return a context in which networks run in this precision."""
    import torch

    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


# ---- bfloat16 on a CPU
#
# CPU flags are not enough: a virtual machine may show them and then stop the program at the first such instruction,
# and some chips support bfloat16 but run it slower than float32. So a child process tries it.

# A convolution and a matrix product of common sizes; prints the speed of bfloat16 relative to float32.
_TRIAL = """
import time, torch
torch.set_num_threads(1)
best = {}
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        image = torch.ones(4, 128, 28, 28, dtype=dtype).to(memory_format=torch.channels_last)
        net = torch.nn.Sequential(torch.nn.Conv2d(128, 128, 3, padding=1), torch.nn.Conv2d(128, 256, 1))
        net = net.to(dtype).to(memory_format=torch.channels_last)
        table = torch.ones(64, 256, dtype=dtype)
        float((table @ table.T).sum())
        net(image)
        times = []
        for _ in range(5):
            begin = time.process_time()
            net(image)
            times.append(time.process_time() - begin)
        best[dtype] = min(times)
print(best[torch.float32] / best[torch.bfloat16])
"""


@cache
def cpu_is_fast_in_bfloat16() -> bool:
    """Return whether bfloat16 pays on this CPU; takes a few seconds, once a process, on chips that claim it."""
    forced = os.environ.get(BFLOAT16_VARIABLE)
    if forced in ("0", "1"):
        return forced == "1"
    return (bfloat16_gain() or 0.0) >= _MIN_BFLOAT16_GAIN


@cache
def bfloat16_crashes() -> bool:
    """Return whether the CPU claims bfloat16 but ends the process at such an instruction."""
    return bfloat16_gain() == 0.0


@cache
def bfloat16_gain() -> float | None:
    """Return the speed of bfloat16 relative to float32; 0 if it ends the process, None where it is not supported."""
    if not any(flag in _text(_PROC / "cpuinfo") for flag in _BFLOAT16_FLAGS):
        return None
    try:
        trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("bfloat16 on this CPU could not be tried (%s); using float32", type(error).__name__)
        return None
    if trial.returncode != 0:
        log.info("bfloat16 on this CPU ends the process (code %d); using float32", trial.returncode)
        return 0.0
    gain = float(trial.stdout.split()[-1])  # libraries may print more (ONEDNN_VERBOSE)
    log.info("bfloat16 on this CPU is %.2f times as fast as float32", gain)
    return gain


# ---- memory: glibc returns large freed blocks to the system after every layer, which is slow

KEEP = "SOSAMPLER_KEEP_MEMORY"  # "0" in the environment leaves the allocator alone
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
# mmap: the maximum that mallopt takes, and more than one layer of a batch needs. trim: never, because a training step
# frees several times as much at its end and needs it again immediately.
_SETTINGS = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: -1}


@cache
def keep_memory() -> bool:
    """Let freed memory stay with the process; return whether that is possible (glibc) and not switched off."""
    if os.environ.get(KEEP, "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())


# ---- ONNX Runtime


def onnx_options(onnxruntime: Any) -> Any:
    """Return options of a session whose activations share a limited memory with those of all such sessions.

    A file of a few bytes can describe a constant of terabytes.
    """
    _limit_onnx_memory()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@cache
def _limit_onnx_memory() -> None:
    import onnxruntime as ort

    kind = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # A limit on its own: the other settings are ONNX Runtime's defaults.
    ort.create_and_register_allocator(kind, ort.OrtArenaCfg({"max_mem": limits.MAX_ONNX_BYTES}))


def import_torch() -> Any:
    """Return torch, or raise with how to install it."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("torch is not installed; install it with: pip install 'sosampler[train]'") from error
    return torch
