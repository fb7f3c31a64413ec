"""Processes that answer tasks through their pipes: how they are started, asked, served and cleared away.

They are plain subprocesses: unlike those of `multiprocessing` they import neither the caller's main module nor
anything that the work does not need, and they inherit no lock of a thread.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
