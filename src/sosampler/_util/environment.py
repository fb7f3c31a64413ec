"""Time several variants in turns, so that a busy machine affects all alike; describe the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sosampler import __version__


def in_turns(variants: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round; one more round before warms the file cache."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            begin = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def compare(seconds: dict[str, list[float]], *, way: str, reference: str) -> dict[str, Any]:
    """Return how many times faster a variant is than a reference: by medians, and in the worst and the best round."""
    by_round = sorted(r / w for r, w in zip(seconds[reference], seconds[way], strict=True))
    return {
        "way": way,
        "reference": reference,
        "times_faster": statistics.median(seconds[reference]) / statistics.median(seconds[way]),
        "times_faster_by_round": [by_round[0], by_round[-1]],
    }


def peak_memory_mb() -> float:
    """Return the most memory that this process has had so far."""
    # Where it can be read: getrusage would count what the parent had before it started this process.
    peak = re.search(r"^VmHWM:\s*(\d+)", _read(Path("/proc/self/status")), re.MULTILINE)
    if peak:
        return int(peak[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def circumstances(packages: tuple[str, ...]) -> dict[str, Any]:
    """Return versions and machine, for the header of every result file."""
    versions = {"sosampler": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    cpu = re.search(r"^model name\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    machine = {
        "cpu": cpu[1].strip() if cpu else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions, "machine": machine}


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
