"""`-n auto` for every command that chooses frames: its options, and what `-n` may be."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, DEFAULT_MAX, DEFAULT_MIN, DEFAULT_TOLERANCE

if TYPE_CHECKING:
    from sosampler.bank.prepare import Progress
    from sosampler.integrations.ray.rows import RowsWritten


AutoMin = Annotated[int | None, typer.Option("--auto-min", help=f"Least frames of -n auto.  [default: {DEFAULT_MIN}]")]
AutoMax = Annotated[int | None, typer.Option("--auto-max", help=f"Most frames of -n auto.  [default: {DEFAULT_MAX}]")]
AutoTolerance = Annotated[
    float | None,
    typer.Option(
        "--auto-tolerance",
        help=f"How much less -n auto may expect for the sake of fewer frames.  [default: {DEFAULT_TOLERANCE}]",
    ),
]


def number_or_auto(text: str) -> int | str:
    """Parses `-n`: a whole number, or "auto".

    >>> number_or_auto("6"), number_or_auto("auto")
    (6, 'auto')
    """
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer, and not {AUTO}.") from None


def key_values(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a classifier: whole numbers, numbers, true and false are read as such, the rest as text.

    >>> key_values(["head=frameexit", "num_frames=16", "drop_rate=0.5", "stride_on_1x1=true"])
    {'head': 'frameexit', 'num_frames': 16, 'drop_rate': 0.5, 'stride_on_1x1': True}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier() or not value:
            raise InvalidArgument(f"--option {text!r} is not allowed; write KEY=VALUE, for example head=frameexit")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
    from sosampler._util.progress import progress_bar

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


ENGINES = ("local", "ray")
ENGINE_HELP = "local, or ray: on a cluster; --out is then a folder of Parquet files."
ADDRESS_HELP = "HOST:PORT of a Ray cluster, or auto.  [default: one that is started on this machine]"
# Failures that are told one by one; all are in the folder.
_MAX_TOLD = 10


def check_engine(engine: str, address: str | None) -> bool:
    """Whether Ray is meant."""
    if one_of("--engine", engine, ENGINES) == "ray":
        return True
    if address is not None:
        raise InvalidArgument(f"--address {address} is of --engine ray; add that, or leave the address out")
    return False


def check_folder(out: Path | None, **unfit: Any) -> Path:
    """The folder for rows; `unfit` are options, by name, that a cluster has no use for."""
    for option, value in unfit.items():
        if value is not None:
            raise InvalidArgument(
                f"--{option.replace('_', '-')} does not go with --engine ray, which gives rows without pixels; "
                "leave it out"
            )
    if out is None:
        raise InvalidArgument("--engine ray writes rows to a folder of Parquet files; give it with --out FOLDER")
    if out.suffix.lower() in (".jsonl", ".csv"):
        raise InvalidArgument(f"--out {out}: --engine ray writes a folder of Parquet files; give the name of a folder")
    return out


def run_rows(work: Callable[[Callable[[Progress], None]], RowsWritten], what: str, json_output: bool) -> int:
    """Do the work, which is given where to tell how far it is, and say what came of it; the exit code."""

    with telling(what) as on_progress:
        done = work(on_progress)
    if done.damaged:
        typer.echo(
            f"{len(done.damaged)} damaged files in {done.out} were deleted and their videos done again", err=True
        )
    if json_output:
        told = {"num_videos": done.num_videos, "num_done_before": done.num_before, "num_failed": len(done.failures)}
        typer.echo(json.dumps({**told, "out": str(done.out), "num_written": done.num_rows, "failures": done.failures}))
    else:
        typer.echo(f"{done.num_rows} rows in {done.out}, {done.num_before} of them from an earlier run")
    for failure in done.failures[:_MAX_TOLD]:
        typer.echo(f"failed: {failure['error']}", err=True)
    if done.failures:
        typer.echo(
            f"{len(done.failures)} of {done.num_videos} videos failed, see {done.out / '_failed.jsonl'}; the same "
            "command tries them again",
            err=True,
        )
    return 1 if done.failures else 0
