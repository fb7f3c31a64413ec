"""How the command line ends where a decoder has not returned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sosampler._util.workers import abandoned_threads, within
from sosampler.cli import main as module


def test_it_ends_at_once_for_threads_of_its_own_alone(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that were given up before, by other work of the process, do not end it."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    release = threading.Event()
    try:
        before = abandoned_threads()
        with pytest.raises(TimeoutError):
            within(0.01, release.wait)
        assert len(abandoned_threads() - before) == 1
        assert command("--help").code == 0
        assert not codes

        def stuck() -> None:
            with pytest.raises(TimeoutError):
                within(0.01, release.wait)
            raise SystemExit(2)

        monkeypatch.setattr(module, "_main", stuck)
        assert command("--help").code == 2
        assert codes == [2]
    finally:
        release.set()
