"""What worker processes of tests run; imports little, since each of them imports it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from sosampler._util.workers import SharedPixels
from sosampler.errors import InvalidArgument


class Odd(Exception):
    """Cannot travel: it does not come back from a pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def deadly(_: None) -> Any:
    """Decodes videos, but dies over those called "wide"."""
    from sosampler.bank.decode import decode_or_fail

    return lambda task: os.kill(os.getpid(), signal.SIGSEGV) if "wide" in task.path else decode_or_fail(task)


def deadly_decoder(slots: list[int]) -> Any:
    """Decodes for a pipeline, but dies over the video 2.mp4."""
    from sosampler.inference.decode import serve

    work = serve(slots)

    def decode(task_and_slot: Any) -> Any:
        if "2.mp4" in str(task_and_slot[0].source):
            os.kill(os.getpid(), signal.SIGSEGV)
        return work(task_and_slot)

    return decode


def server(told: Any) -> Any:
    """Answers (name of what to do, value) with what it was told, the value and its process."""

    def answer(task: tuple[str, Any]) -> Any:
        name, value = task
        if name == "wait":
            time.sleep(value)
        elif name == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "refuse":
            raise InvalidArgument(value)
        elif name == "odd":
            raise Odd("what", "ever")
        elif name == "print":
            os.write(1, b"not an answer")
        elif name == "fill":
            SharedPixels(told).array((value + 1,))[value] = value
        return told, value, os.getpid()

    return answer
