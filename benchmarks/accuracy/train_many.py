"""Many trainings in a few processes that stay: each starts torch, and tries out convolutions, once for all of its runs.

    with Trainers(3, logs) as trainers:
        replies = trainers.train({"name": {"bank": ..., "out": ..., "sampler": ..., "seed": 0}})

A task holds the arguments of `so.train`. Started as a program, this file is such a process: a task a line comes in, a
reply a line goes out.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sosampler._util.hardware import usable_cores

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import end_with_parent

Task = dict[str, Any]
Reply = dict[str, Any]  # seconds, and result or failed

_MARK = "reply "  # other lines that a library may print are passed over


class Trainers:
    """At most `parallel` processes; their output goes to `logs`."""

    def __init__(self, parallel: int, logs: Path) -> None:
        self._parallel, self._logs = parallel, logs
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.terminate()
            elif process.stdin is not None:
                process.stdin.close()  # it reads no further line and ends
        for process in self._processes:
            process.wait()

    def train(self, tasks: Mapping[str, Task], done: Callable[[str, Reply], None] | None = None) -> dict[str, Reply]:
        """Run all tasks, the first ones first; `done` is called for each in this thread.

        What the package refuses, or torch cannot do, is in the reply as "failed". A process that dies ends the whole.
        """
        waiting: queue.SimpleQueue[tuple[str, Task]] = queue.SimpleQueue()
        replies: queue.SimpleQueue[tuple[str, Reply | None]] = queue.SimpleQueue()
        for named in tasks.items():
            waiting.put(named)
        for place in range(min(self._parallel, len(tasks))):
            threading.Thread(target=_feed, args=(self._process(place), waiting, replies), daemon=True).start()
        found: dict[str, Reply] = {}
        while len(found) < len(tasks):
            name, reply = replies.get()
            if reply is None:
                raise SystemExit(f"{name}: its process died; see the logs in {self._logs}")
            found[name] = reply
            if done is not None:
                done(name, reply)
        return found

    def _process(self, place: int) -> subprocess.Popen[str]:
        """The process of a place; it stays for later calls. Together they have no more threads than there are cores."""
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self._parallel))}
        while len(self._processes) <= place:
            with (self._logs / f"trainer-{len(self._processes)}.log").open("a", encoding="utf-8") as log:
                started = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **threads},
                )
            self._processes.append(started)
        return self._processes[place]


def _feed(process: subprocess.Popen[str], waiting: Any, replies: Any) -> None:
    """Hand one task after another to a process until none is left."""
    while True:
        try:
            name, task = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            replies.put((name, _asked(process, task)))
        except (BrokenPipeError, EOFError):
            replies.put((name, None))
            return


def _asked(process: subprocess.Popen[str], task: Task) -> Reply:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(_MARK):
            reply: Reply = json.loads(line.removeprefix(_MARK))
            return reply
    raise EOFError


def run(task: Task) -> Reply:
    """One training, in this process."""
    import torch

    import sosampler as so
    from sosampler.errors import SosamplerError, first_line

    begin = time.perf_counter()
    try:
        summary: Reply = {"result": so.train(say=_say, **task).result}
    except SosamplerError as error:
        summary = {"failed": str(error)}
    except RuntimeError as error:  # a GPU that is too small for one must not end the others
        summary = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"seconds": round(time.perf_counter() - begin, 1), **summary}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    end_with_parent()
    for line in sys.stdin:
        task = json.loads(line)
        _say(f"-- {task['out']}")
        print(_MARK + json.dumps(run(task)), flush=True)


if __name__ == "__main__":
    main()
