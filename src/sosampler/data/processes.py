"""Processes that answer tasks: each is told once what it works with, then gets a task at a time."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

from sosampler.data.child_processes import ProcessEnded, ask, clear, code_of, parent_pipes, start_process
from sosampler.errors import SosamplerError

_START = code_of("sosampler.data.processes:serve")

Answer = Callable[[Any], Any]


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessPool:
    """Processes that are started when they are first needed, and ended with the `with` block, also in mid-task.

    Args:
        num_processes: how many at most.
        server: "module:function"; the function is called once in each process, with `told`, and gives the function
            that answers tasks there.
        told: what every process is told when it starts.
        files: open files that the processes inherit under the same numbers.
        work: for messages, such as "rendering".
    """

    def __init__(
        self, num_processes: int, server: str, told: Any, *, files: Sequence[int] = (), work: str = "this"
    ) -> None:
        self._first = pickle.dumps((server, told), protocol=pickle.HIGHEST_PROTOCOL)
        self._files, self._work = tuple(files), work
        self._own = threading.local()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = False
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="sosampler-process")
        self._num_processes = num_processes

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_over = True  # a thread on its way to start a process finds out
        for process in self._processes:
            process.kill()  # it keeps nothing that could be lost
        self._threads.shutdown(wait=True)
        for process in self._processes:
            clear(process)

    def submit(self, task: Any) -> Future[Any]:
        """Its answer, or the error that it ended with, later."""
        return self._threads.submit(self._ask, task)

    def results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Answers in the order of the tasks, of which few are taken ahead."""
        pending: deque[Future[Any]] = deque()
        for task in tasks:
            pending.append(self.submit(task))
            if len(pending) > 2 * self._num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _ask(self, task: Any) -> Any:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = self._started()
        try:
            went_well, answer = ask(process, task)
        except ProcessEnded as error:
            self._own.process = None
            raise SosamplerError(
                f"a process for {self._work} {error}; call again to go on, with more free memory if that ran out"
            ) from error
        if went_well:
            return answer
        raise answer

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_over:
                raise SosamplerError(f"{self._work} is over")  # nobody waits for this answer
            process = start_process(_START, files=self._files)
            self._processes.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, which its first task will find out
            process.stdin.write(self._first)
        return process


# --- in the process ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """Learn what to work with, then answer tasks until the parent wants no more."""
    tasks, send = parent_pipes()
    for first in tasks:
        answer = _answering(*first)
        for task in tasks:
            send(_attempt(answer, task))


def _answering(server: str, told: Any) -> Answer:
    module, _, name = server.partition(":")
    found: Answer = getattr(import_module(module), name)(told)
    return found


def _attempt(answer: Answer, task: Any) -> tuple[bool, Any]:
    try:
        return True, answer(task)
    except Exception as error:  # noqa: BLE001 - raised again where the answer was asked for
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - of a library, with arguments of its own
            return False, SosamplerError(f"{type(error).__name__}: {error}")
        return False, error
