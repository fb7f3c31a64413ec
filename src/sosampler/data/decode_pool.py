"""Videos decoded side by side in processes of their own, results in order, memory bounded."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sosampler.data.bank_format import Failure, StoredVideo
from sosampler.data.child_processes import ProcessEnded, ask, clear, code_of, start_process
from sosampler.data.decode_worker import DecodeTask, attempt

_START = code_of("sosampler.data.decode_worker:serve")
# Decoded videos that wait to be taken: no more are begun beyond this.
_MAX_WAITING_BYTES = 256 << 20


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
    """`workers` processes, started when they are first needed; 0 decodes in this process."""

    def __init__(self, workers: int) -> None:
        self._threads = max(workers, 1)
        self._in_process = workers == 0
        self._local = threading.local()
        self._workers: list[DecodingProcess] = []
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
        try:
            answer: StoredVideo | Failure = self._worker().ask(task)
            return answer
        except ProcessEnded as ended:
            return Failure(death_of(task.path, ended))

    def _worker(self) -> DecodingProcess:
        """The process of this thread."""
        worker: DecodingProcess | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = DecodingProcess(self._start_process)
            self._workers.append(worker)
        return worker

    def _start_process(self) -> subprocess.Popen[bytes]:
        return start_process(_START)

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
