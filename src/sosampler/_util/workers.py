"""Child processes that work on tasks: one pool, one bounded window of futures, and memory that processes share.

The processes are plain subprocesses: unlike those of `multiprocessing` they import neither the caller's main module nor
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sosampler.errors import SosamplerError

CAN_SHARE_MEMORY = os.name == "posix"
"""Whether a child process can inherit open files, such as memory that it shares with this process."""

# One thread for each process: the processes are the parallelism.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Ctrl-C reaches the children too: they end when the parent closes their pipe, without a traceback of their own. The
# package is imported from where the parent imported it.
_CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import json, sys; sys.path[:] = json.loads("
    "sys.argv[1]); from sosampler._util.workers import _serve; _serve()"
)

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Any], Any]
"""A function that a child process applies to each task."""


def in_order(
    submit: Callable[[Task], Future[Result]],
    tasks: Iterable[Task],
    has_room: Callable[[Sequence[Future[Result]]], bool],
) -> Iterator[Result]:
    """Yield results in the order of the tasks, which are taken only as far ahead as there is room.

    `has_room`: whether another task may start, given the futures that are under way or wait to be taken; one always may
    where there are none. Where the iteration ends early, tasks that have not started are cancelled. Where `tasks`
    raises, the results of the tasks before come first.
    """
    pending: deque[Future[Result]] = deque()
    remaining, failure, is_exhausted = iter(tasks), None, False
    try:
        while True:
            while not is_exhausted and (not pending or has_room(pending)):
                try:
                    pending.append(submit(next(remaining)))
                except StopIteration:
                    is_exhausted = True
                except Exception as error:  # noqa: BLE001 - raised below
                    is_exhausted, failure = True, error
            if not pending:
                break
            yield pending.popleft().result()
        if failure is not None:
            raise failure
    finally:
        for future in pending:
            future.cancel()


class WorkerDied(SosamplerError):
    """A child process died while it worked on a task; `code`: its exit code, or the negative number of a signal."""

    def __init__(self, code: int, work: str) -> None:
        self._by_signal = code < 0
        self._ended = f"ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
        super().__init__(
            f"a process for {work} {self._ended}; run it again to continue, with more free memory if that ran out"
        )

    def over(self, name: str) -> str:
        """Return what happened as the failure of one video."""
        why = "the file may be damaged, or memory ran out" if self._by_signal else "its output above tells why"
        return f"{name}: the process that decoded it {self._ended}; {why}"


class WorkerTimedOut(WorkerDied):
    """A child process took too long over a task, and was ended."""

    def __init__(self, code: int, work: str, timeout: float) -> None:
        super().__init__(code, work)
        self._timeout = timeout

    def over(self, name: str) -> str:
        return did_not_return(name, self._timeout)


def did_not_return(name: str, timeout: float) -> str:
    """Return the failure of a video over which a decoder did not return."""
    return (
        f"{name}: the decoder did not return within the limit timeout={timeout:g} seconds, so the file is probably "
        "damaged; if you trust it, raise the limit with --timeout or Limits(timeout=...)"
    )


# Readers look at the clock themselves. Where a decoder does not return to them, it is given up this much later.
GRACE_SECONDS = 5.0
_abandoned: list[threading.Thread] = []


def within(timeout: float, work: Callable[[], Result]) -> Result:
    """Do the work in a thread, and raise `TimeoutError` where it does not return.

    That thread is left as it is: it ends with the process, for which see `abandoned_threads`.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    thread = threading.Thread(target=run, name="sosampler-watched", daemon=True)
    thread.start()
    wait([done], _seconds(timeout))
    if not done.done():
        _abandoned.append(thread)
        raise TimeoutError
    return done.result()


def abandoned_threads() -> set[threading.Thread]:
    """Return the threads that `within` gave up and that still run: the interpreter would wait for them at its end."""
    return {thread for thread in _abandoned if thread.is_alive()}


class ProcessPool:
    """Worker processes, started when they are first needed and killed with the `with` block, also in mid-task.

    A process that dies over a task is replaced for the next one.

    Args:
        num_processes: how many at most; with 0 one thread of this process does the work.
        server: "module:function"; the function is called once in each process, with `config`, which is pickled, and
            returns the function that is applied to each task.
        files: open files that the processes inherit under the same numbers.
        work: for messages, such as "rendering".
    """

    def __init__(
        self, num_processes: int, server: str, config: Any = None, *, files: Sequence[int] = (), work: str = "this"
    ) -> None:
        self.num_threads = max(num_processes, 1)
        self.threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="sosampler-process")
        self._here = None if num_processes else _work_of(server, config)
        self._first = pickle.dumps((server, config), protocol=pickle.HIGHEST_PROTOCOL) if num_processes else b""
        self._files, self._name = tuple(files), work
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True  # no thread starts another process from here on
            for process in self._processes:
                process.kill()  # it keeps nothing that could be lost
        self.threads.shutdown(wait=True)
        for process in self._processes:
            _close(process)

    def submit(self, task: Any, timeout: float | None = None) -> Future[Any]:
        """Start a task; the future raises the error with which it ended."""
        return self.threads.submit(self.call, task, timeout)

    def results(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield results in the order of the tasks, of which few are taken ahead."""
        return in_order(self.submit, tasks, lambda pending: len(pending) <= 2 * self.num_threads)

    def call(self, task: Any, timeout: float | None = None) -> Any:
        """Run a task in the process of this thread, which must be one of `threads`.

        A process that does not return within `timeout` seconds and a few more is ended.
        """
        if (here := self._here) is not None:
            try:
                return here(task) if timeout is None else within(timeout, lambda: here(task))
            except TimeoutError:
                raise WorkerTimedOut(1, self._name, timeout or 0.0) from None
        process: subprocess.Popen[bytes] | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = _Watchdog(process, timeout)
        try:
            pickle.dump(task, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            pickle.load(process.stdout)  # it has begun: what it imports does not count
            with watchdog:
                succeeded, result = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._of_thread.process = None
            with self._lock:
                self._processes.remove(process)
            _close(process)
            if timeout is not None and watchdog.has_barked:
                raise WorkerTimedOut(process.returncode, self._name, timeout) from None
            raise WorkerDied(process.returncode, self._name) from None
        if not succeeded:
            raise result
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise SosamplerError(f"{self._name} has ended; start it again")
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps([str(folder) for folder in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=self._files,
            )
            self._processes.append(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, which its first task will show
            process.stdin.write(self._first)
        return process


class _Watchdog:
    """Ends a process that is still at work when the time is over; without a time it does nothing."""

    def __init__(self, process: subprocess.Popen[bytes], timeout: float | None) -> None:
        self.has_barked = False
        self._process = process
        self._timer = None if timeout is None else threading.Timer(_seconds(timeout), self._bark)

    def _bark(self) -> None:
        self.has_barked = True
        self._process.kill()

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _seconds(timeout: float) -> float:
    """Return when to give up; Python's clocks do not take more than some centuries."""
    return min(timeout + GRACE_SECONDS, threading.TIMEOUT_MAX)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # the rest of a task that is not read any more
            pipe.close()


# ---- in the child process


def _serve() -> None:
    """Work on tasks from standard input until it ends: when the parent closes it, or dies."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the results
    with suppress(EOFError):
        work = _work_of(*pickle.load(sys.stdin.buffer))
        while True:
            task = pickle.load(sys.stdin.buffer)
            _send(None, results)  # from here on its time counts
            _send(_attempt(work, task), results)


def _send(message: Any, results: Any) -> None:
    try:
        pickle.dump(message, results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent is gone: no traceback


def _work_of(server: str, config: Any) -> Work:
    module, _, name = server.partition(":")
    work: Work = getattr(import_module(module), name)(config)
    return work


def _attempt(work: Work, task: Any) -> tuple[bool, Any]:
    try:
        return True, work(task)
    except Exception as error:  # noqa: BLE001 - raised again in the parent
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - of a library, with arguments of its own
            return False, SosamplerError(f"{type(error).__name__}: {error}")
        return False, error


# ---- shared memory

Pixels = NDArray[np.uint8]


class SharedPixels:
    """Memory that grows as needed: new, or by its `file` that another process has opened and this one inherits."""

    def __init__(self, file: int | None = None) -> None:
        self._is_owner = file is None
        self.file = unnamed_memory() if file is None else file
        self._map: mmap.mmap | None = None

    def array(self, shape: Sequence[int]) -> Pixels:
        """Return the beginning of the memory as an array; only the process that made it enlarges it."""
        needed = math.prod(shape)
        if self._map is None or len(self._map) < needed:
            if self._is_owner:
                os.ftruncate(self.file, max(needed, 1))
            self._map = mmap.mmap(self.file, max(needed, 1))  # arrays of a smaller map keep that one alive
        return np.frombuffer(self._map, dtype=np.uint8, count=needed).reshape(shape)

    def empty(self) -> None:
        """Return the memory to the operating system, where it can, until it is written to again."""
        if self._map is not None and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close the file; the memory is freed once no array and no other process uses it."""
        self._map = None
        if self._is_owner:
            os.close(self.file)

    def __enter__(self) -> SharedPixels:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def unnamed_memory() -> int:
    """Open a file in memory that has no name; where there are none, in the folder for temporary files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sosampler", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sosampler-") as file:
        return os.dup(file.fileno())
