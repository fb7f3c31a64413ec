"""Damaged files by number, the child process that opens them, and the parent that watches it."""

from __future__ import annotations

import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutate import damaged
from tests.fuzz.seeds import read_seeds, write_seeds

# Of one file: seconds of CPU time, seconds of wall-clock time after which its process is killed, and bytes of memory
# beyond what the process had before and the frames that it returns, which `Limits.max_bytes` bounds.
MAX_SECONDS, KILL_SECONDS = 24.0, 90.0
MAX_BYTES = 1 << 30
# Address space of a process; torch alone takes gigabytes of it.
_ADDRESSES = {"pyav": 4 << 30, "torchcodec": 24 << 30}
_FILES_PER_PROCESS = 50


@dataclass(frozen=True)
class Settings:
    out: Path  # results.READER.jsonl, seeds and failing files
    reader: str = "pyav"

    @property
    def seeds(self) -> Path:
        return self.out / "seeds"

    @property
    def results(self) -> Path:
        return self.out / f"results.{self.reader}.jsonl"


# ---- files by number


def make_case(number: int, seeds: dict[str, bytes], reader: str) -> tuple[str, bytes, dict[str, Any]]:
    """Return name, contents and the arguments of `select` of a damaged file; the same for the same number."""
    rng = np.random.default_rng([17, number])
    name = sorted(seeds)[number % len(seeds)]
    data = damaged(seeds[name], Path(name).suffix, rng)
    policy = str(rng.choice(["uniform", "uniform", "all", "keyframe", "frame-difference"]))
    options: dict[str, Any] = {"policy": policy, "decoder": reader, "threads": int(rng.integers(1, 4))}
    options["size"] = [None, None, 32, (40, 56)][rng.integers(4)]
    options["grid"] = str(rng.choice(["uniform", "linspace", "jitter"]))
    if policy != "keyframe":
        options["candidates"] = str(rng.choice(["exact", "keyframe", "snap"]))
    match int(rng.integers(0, 5)):
        case 0 if policy != "keyframe":
            options["fps"] = float(rng.choice([0.5, 5, 30]))
        case 1:
            options |= {"start": -1.0, "end": float(rng.choice([0.5, 100.0]))}
    if "fps" not in options:
        options["num_candidates" if policy == "all" else "num_frames"] = int(rng.choice([1, 4, 8]))
    return name, data, options


# ---- in the child process


def serve(folder: str, reader: str) -> None:
    """Open the files whose numbers come on standard input; print a line before and after each."""
    limit = _ADDRESSES[reader]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What libraries print must not get between the results.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    import av

    import sosampler as so

    av.logging.set_level(None)
    seeds = read_seeds(Path(folder) / "seeds")
    so.select(seeds["h264.mp4"], 2, policy="frame-difference", decoder=reader)  # imports what all files need
    for line in sys.stdin:
        number = int(line)
        results.write(f"{number}\n")
        results.flush()
        results.write(json.dumps({"number": number, **_open(number, seeds, reader, Path(folder))}) + "\n")
        results.flush()


def _open(number: int, seeds: dict[str, bytes], reader: str, folder: Path) -> dict[str, Any]:
    import sosampler as so

    name, data, options = make_case(number, seeds, reader)
    path = folder / f"{os.getpid()}{Path(name).suffix}"
    source: Any = data
    if number % 2:  # others as bytes
        path.write_bytes(data)
        source = path
    before = _reset_peak()
    began, returned = time.process_time(), 0
    try:
        sel = so.select(source, **options)
        returned = 0 if sel.frames is None else sel.frames.nbytes
        outcome, text = "selection", f"{len(sel)} frames, {len(sel.notes)} notes"
        if not (np.diff(sel.frame_indices) >= 0).all() or not (np.diff(sel.pts_seconds) >= 0).all():
            outcome = "foreign"
            text = f"times go back: {sel.frame_indices.tolist()}, {sel.pts_seconds.tolist()}"
    except so.SosamplerError as error:
        outcome, text = "foreign" if "an unexpected error" in str(error) else "refusal", str(error)
    except Exception as error:  # noqa: BLE001 - what this is looking for
        outcome, text = "foreign", f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    path.unlink(missing_ok=True)
    grown = max(0, _peak() - before - returned)
    return {"outcome": outcome, "text": text[:300], "seconds": round(seconds, 3), "bytes": grown}


def _reset_peak() -> int:
    """Forget the largest memory use so far, and return the present one; Linux alone has it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()  # then growth alone is seen
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


# ---- in the parent


def run(numbers: Iterable[int], settings: Settings, *, workers: int = 1) -> dict[str, Any]:
    """Open the files that have no result yet, and return the summary of all of these."""
    settings.seeds.mkdir(parents=True, exist_ok=True)
    write_seeds(settings.seeds)
    wanted = list(numbers)
    known = {result["number"] for result in _known(settings)}
    todo = [number for number in wanted if number not in known]
    lock = threading.Lock()
    with open(settings.results, "a", encoding="utf-8") as file, ThreadPoolExecutor(workers) as threads:

        def work(batch: list[int]) -> None:
            for result in _results(batch, settings):
                with lock:
                    file.write(json.dumps(result) + "\n")
                    file.flush()

        batches = [todo[at : at + _FILES_PER_PROCESS] for at in range(0, len(todo), _FILES_PER_PROCESS)]
        for future in [threads.submit(work, batch) for batch in batches]:
            future.result()
    chosen = set(wanted)
    return _summary([result for result in _known(settings) if result["number"] in chosen], settings)


def _known(settings: Settings) -> list[dict[str, Any]]:
    if not settings.results.exists():
        return []
    lines = settings.results.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _results(numbers: list[int], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the result of each file; a new process opens what comes after one that killed its own."""
    while numbers:
        child = f"from tests.fuzz.run import serve; serve({str(settings.out)!r}, {settings.reader!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write("".join(f"{number}\n" for number in numbers))
        process.stdin.close()
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        begun = None
        try:
            while line := lines.get(timeout=KILL_SECONDS):
                if line.startswith("{"):
                    begun = None
                    result = json.loads(line)
                    numbers.remove(result["number"])
                    yield result
                else:
                    begun = int(line)
            code = process.wait()
            outcome = {"outcome": "crash", "text": f"exit code {code}", "seconds": 0.0, "bytes": 0}
        except queue.Empty:
            outcome = {"outcome": "hang", "text": "did not return", "seconds": KILL_SECONDS, "bytes": 0}
        finally:
            process.kill()
            process.wait()
        if begun is not None:
            numbers.remove(begun)
            yield {"number": begun, **outcome}
        elif numbers:
            raise RuntimeError(f"a child process ended before it opened a file ({outcome}); try tests.fuzz.run.serve")


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _summary(results: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Count outcomes, list what must not be, and keep these files."""
    outcomes = Counter(result["outcome"] for result in results)
    bad = {
        "crashes": [result for result in results if result["outcome"] == "crash"],
        "foreign": [result for result in results if result["outcome"] == "foreign"],
        "over_time": [result for result in results if result["seconds"] > MAX_SECONDS],
        "over_memory": [result for result in results if result["bytes"] > MAX_BYTES],
    }
    seeds, failing = read_seeds(settings.seeds), settings.out / "failing"
    for result in [each for kind in bad.values() for each in kind]:
        failing.mkdir(exist_ok=True)
        name, data, options = make_case(result["number"], seeds, settings.reader)
        stem = failing / f"{settings.reader}_{result['number']}_{name}"
        stem.write_bytes(data)
        stem.with_name(stem.name + ".json").write_text(json.dumps({"options": options, **result}))
    return {
        "reader": settings.reader,
        "files": len(results),
        "selections": outcomes["selection"],
        "refusals": outcomes["refusal"],
        "max_seconds": max((result["seconds"] for result in results), default=0.0),
        "max_bytes": max((result["bytes"] for result in results), default=0),
        **bad,
    }
