"""Progress of long work: counts for a callback, and a bar on standard error where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """How far a run has come; passed to `on_progress` after each video."""

    total: int
    done: int = 0  # videos, failed ones and those of earlier runs included
    failed: int = 0  # in this run
    before: int = 0  # videos that an earlier run had done
    stage: str = ""  # counts start anew with each, such as "sound"


OnProgress = Callable[[Progress], None]


class Bar:
    """A progress bar; without one of rich it shows nothing."""

    def __init__(self, progress: Any = None, task: Any = None) -> None:
        self._progress, self._task = progress, task

    def advance(self, by: int = 1, text: str = "") -> None:
        self._update(advance=by, **({"text": text} if text else {}))

    def reach(self, done: int) -> None:
        self._update(completed=done)

    def _update(self, **changes: Any) -> None:
        if self._progress is not None:
            self._progress.update(self._task, **changes)


@contextmanager
def progress_bar(what: str, total: int, *, done: int = 0) -> Iterator[Bar]:
    """Show a bar for `total` steps of which `done` are done; silent where standard error is no terminal."""
    if not sys.stderr.isatty() or total <= done:
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task(what, total=total, completed=done, text=""))
