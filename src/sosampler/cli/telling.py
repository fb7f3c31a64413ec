"""Progress of long work over videos: a bar for people, a line now and then for log files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from sosampler.data.shards import Progress

_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def telling(what: str) -> Iterator[Callable[[Progress], None]]:
    """A function that is told after each video; rate and time left go to standard error."""
    begin = time.monotonic()  # the first video takes its time too
    with ExitStack() as stack:
        tell: Callable[[Progress], None] | None = None

        def on_progress(progress: Progress) -> None:
            nonlocal tell
            if tell is None:
                tell = _bar(what, progress, stack) if sys.stderr.isatty() else _lines(what, progress, begin)
            tell(progress)

        yield on_progress


def _bar(what: str, first: Progress, stack: ExitStack) -> Callable[[Progress], None]:
    from sosampler.progress import progress_bar

    bar = stack.enter_context(progress_bar(what, first.total, done=first.before))

    def tell(progress: Progress) -> None:
        bar.advance(text=f"{progress.failed} failed" if progress.failed else "")

    return tell


def _lines(what: str, first: Progress, begin: float) -> Callable[[Progress], None]:
    last = begin
    if first.before:
        typer.echo(f"{what}: going on, {first.before} of {first.total} videos are done", err=True)

    def tell(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES or progress.done == progress.total:
            last = now
            typer.echo(line_of(what, progress, now - begin), err=True)

    return tell


def line_of(what: str, progress: Progress, seconds: float) -> str:
    """How far, how fast, how long still."""
    rate = (progress.done - progress.before) / max(seconds, 1e-3)
    left = (progress.total - progress.done) / rate if rate else 0.0
    failed = f", {progress.failed} failed" if progress.failed else ""
    still = f", {_clock(left)} left" if progress.done < progress.total else ""
    return f"{what}: {progress.done} of {progress.total} videos{failed}, {rate:.2f} a second{still}"


def _clock(seconds: float) -> str:
    """
    >>> _clock(59.6), _clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
