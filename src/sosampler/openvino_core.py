"""OpenVINO's way in, one for the whole process."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def openvino_core() -> Any:
    """The `openvino.Core` that everybody here shares; it lives until the process ends. OpenVINO must be installed.

    On Linux each core gives its thread a stack for signal handlers, and takes that memory away when it goes. It then
    puts back the stack that it had found; where two cores end in the order in which they began, that is the stack of
    the first, which is gone. The next signal, a Ctrl-C or the end of a child process, kills the process without a word.
    """
    with _ONE_AT_A_TIME:
        return _made()


@cache
def _made() -> Any:
    return import_module("openvino").Core()
