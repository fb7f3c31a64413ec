"""Processes that answer tasks through their pipes: how they are started, asked, served and cleared away.

They are plain subprocesses: unlike those of `multiprocessing` they import neither the caller's main module nor
anything that the work does not need, and they inherit no lock of a thread.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler.errors import SosamplerError

# One thread a process: the processes are the parallelism.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

CAN_SHARE_MEMORY = os.name == "posix"
"""Whether a process can be handed open files, such as memory that it shares with this one."""


class ProcessEnded(Exception):
    """A process died over a task."""

    def __init__(self, code: int) -> None:
        self.by_signal = code < 0
        super().__init__(f"ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}")


def code_of(server: str) -> str:
    """What `start_process` is to run so that "module:function" serves, with what the process is told.

    Ctrl-C reaches such a process too; it ends when the parent closes its pipe, and not with a traceback before. The
    package is found where the parent found it, however that was arranged.
    """
    module, _, function = server.partition(":")
    return (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import {function}; {function}(*map(json.loads, sys.argv[2:]))"
    )


def start_process(code: str, *told: Any, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """A process that runs `code`; its arguments are this one's `sys.path` and what it is `told`, each as JSON.

    It inherits `files` under the same numbers.
    """
    path = [str(folder) for folder in sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(json.dumps, (path, *told))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **_ONE_THREAD},
        pass_fds=tuple(files),
    )


def ask(process: subprocess.Popen[bytes], task: Any) -> Any:
    """Its answer. Raises `ProcessEnded` if it died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(task, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        raise ProcessEnded(process.wait()) from error


def clear(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process and close its pipes."""
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # the rest of a task that nobody reads any more


class DecodingProcess:
    """One process that decodes. It is started when it is first asked, and again after it died over a video."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, task: Any) -> Any:
        """Its answer. Raises `ProcessEnded` if it died."""
        process = self._process
        if process is None:
            process = self._process = self._start()
        try:
            return ask(process, task)
        except ProcessEnded:
            self._process = None
            clear(process)
            raise

    def stop(self) -> None:
        """End the process, also in the middle of a video; it keeps nothing that could be lost."""
        process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """Clear up after `stop`, once no thread waits for an answer any more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it may have been started after `stop`
            clear(process)


def death_of(name: str, ended: ProcessEnded) -> str:
    """What is told of a video over which a process died."""
    why = "the file may be damaged, or memory ran out" if ended.by_signal else "what it printed says why"
    return f"{name}: the process that decoded it {ended}; {why}"


class DecodePool:
    """`workers` processes, started when they are first needed; 0 works in this process.

    A subclass says how a process is started and what it is sent.
    """

    def __init__(self, workers: int) -> None:
        self._threads = max(workers, 1)
        self._in_process = workers == 0
        self._local = threading.local()
        self._workers: list[DecodingProcess] = []
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="sosampler-decode")

    def __exit__(self, *_: Any) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._executor.shutdown(wait=True)
        for worker in self._workers:
            worker.reap()

    def _worker(self) -> DecodingProcess:
        """Return the process of this thread."""
        worker: DecodingProcess | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = DecodingProcess(self._start_process)
            self._workers.append(worker)
        return worker

    def _start_process(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError


# ---- in the process


def parent_pipes() -> tuple[Iterator[Any], Callable[[Any], None]]:
    """Tasks from standard input until it ends, when the parent closes it or dies; and what sends answers back."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not run into the answers

    def tasks() -> Iterator[Any]:
        while True:
            try:
                task = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            yield task

    def send(answer: Any) -> None:
        try:
            pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; nobody wants the rest, nor a traceback

    return tasks(), send


_START = code_of("sosampler._util.workers:serve")

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
