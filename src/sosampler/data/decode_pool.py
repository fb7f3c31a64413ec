"""Videos decoded side by side in processes of their own, results in order, memory bounded."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sosampler.data.bank_format import Failure, StoredVideo
from sosampler.data.decode_worker import DecodeTask, attempt

# The package is found where this process found it, however that was arranged.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sosampler.data.decode_worker import serve; serve()"
)
# One thread a process: the processes are the parallelism.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Decoded videos that wait to be taken: no more are begun beyond this.
_MAX_WAITING_BYTES = 256 << 20


class _Worker:
    """One decoding process. A plain subprocess: it does not import the caller's main module, as spawn would."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, task: DecodeTask) -> StoredVideo | Failure:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([str(folder) for folder in sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(task, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer: StoredVideo | Failure = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._process = None
            return Failure(f"{task.path}: the process that decoded it ended with {_ending(_clear(process))}")
        return answer

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
            _clear(process)


def _clear(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # the rest of a task that nobody reads any more
    return code


def _ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}; the file may be damaged, or memory ran out"
    return f"exit code {code}; what it printed says why"


class DecodePool:
    """`workers` processes, started when they are first needed; 0 decodes in this process."""

    def __init__(self, workers: int) -> None:
        self._threads = max(workers, 1)
        self._in_process = workers == 0
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="sosampler-decode")

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(self, *_: Any) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._executor.shutdown(wait=True)
        for worker in self._workers:
            worker.reap()

    def _decode(self, task: DecodeTask) -> StoredVideo | Failure:
        if self._in_process:
            return attempt(task)
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _Worker()
            self._workers.append(worker)
        return worker(task)

    def results(self, tasks: Iterable[DecodeTask]) -> Iterator[StoredVideo | Failure]:
        """In the order of the tasks. Two videos a worker are under way or wait to be taken, fewer if they are large."""
        pending: deque[Future[StoredVideo | Failure]] = deque()
        ahead, left = iter(tasks), True
        while left or pending:
            while left and len(pending) <= 2 * self._threads and _waiting_bytes(pending) < _MAX_WAITING_BYTES:
                task = next(ahead, None)
                left = task is not None
                if task is not None:
                    pending.append(self._executor.submit(self._decode, task))
            if pending:
                yield pending.popleft().result()


def _waiting_bytes(pending: Iterable[Future[StoredVideo | Failure]]) -> int:
    done = (future.result() for future in pending if future.done())
    return sum(sum(map(len, video.jpegs)) for video in done if isinstance(video, StoredVideo))
