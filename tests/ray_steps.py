"""Steps for tests on a cluster: slow ones and deadly ones, so that machines can be killed in the middle.

Workers find this module by PYTHONPATH. A step runs in a process of its own, a child of Ray's worker.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil


def node() -> int:
    """The process that is the machine, as far as this cluster is concerned: the raylet above this one.

    0 where that is dead and the worker, which goes on for a moment, has not found out yet.
    """
    for parent in psutil.Process().parents():
        if parent.name().startswith("raylet"):
            return parent.pid
    return 0


@dataclass(frozen=True)
class Slowly:
    """Another step, with a pause before each video, and a note of who did it."""

    step: Any
    seconds: float
    notes: str  # folder for an empty file a video and attempt, named by video and node

    def __call__(self, video: str) -> Any:
        Path(self.notes, f"{Path(video).stem}-{node()}-{time.monotonic_ns()}").touch()
        time.sleep(self.seconds)
        return self.step(video)


@dataclass(frozen=True)
class DiesAt:
    """Kills its process at videos of this name, as a decoder can that meets a hostile file."""

    name: str

    def __call__(self, video: str) -> Any:
        if Path(video).stem == self.name:
            os._exit(9)
        return SimpleNamespace(to_dict=lambda: {"video": video, "number": len(video)})  # as a selection has it
