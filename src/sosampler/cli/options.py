"""The options that commands share, each written once, and how commands report progress and results.

Defaults come from `SelectOptions`. Nothing heavy is imported here: `sosampler --help` must be fast.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.inference.options import SelectOptions
from sosampler.policies.auto import AUTO, DEFAULT_MAX, DEFAULT_MIN, DEFAULT_TOLERANCE

if TYPE_CHECKING:
    from sosampler._util.progress import OnProgress, Progress
    from sosampler.inference.many import RunSummary
    from sosampler.inference.rows import Row

# ---- options


def number_or_auto(text: str) -> int | str:
    """Parse `-n`: an int, or "auto".

    >>> number_or_auto("6"), number_or_auto("auto")
    (6, 'auto')
    """
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer, and not {AUTO}.") from None


def num_frames_option(help_text: str) -> Any:
    """Return the option `-n` with this help."""
    return typer.Option("-n", "--num-frames", metavar="INTEGER|auto", parser=number_or_auto, help=help_text)


Videos = Annotated[
    list[str],
    typer.Argument(
        help="Video files, folders of videos, folders of frame images, patterns in quotes, or a CSV, JSONL or "
        "Parquet file with a column of paths."
    ),
]
Sampler = Annotated[
    Path | None, typer.Option("--sampler", "-s", help="Folder of a trained sampler, which chooses the frames.")
]
AutoMin = Annotated[
    int | None, typer.Option("--auto-min", help=f"Minimum frames of -n auto.  [default: {DEFAULT_MIN}]")
]
AutoMax = Annotated[
    int | None, typer.Option("--auto-max", help=f"Maximum frames of -n auto.  [default: {DEFAULT_MAX}]")
]
AutoTolerance = Annotated[
    float | None,
    typer.Option(
        "--auto-tolerance",
        help=f"How much accuracy -n auto may give up for fewer frames.  [default: {DEFAULT_TOLERANCE}]",
    ),
]
Candidates = Annotated[
    str | None, typer.Option("--candidates", help="exact, keyframe (many times faster) or snap.  [default: exact]")
]
Grid = Annotated[str, typer.Option("--grid", help="Where candidates lie: uniform, linspace, stratified or jitter.")]
Start = Annotated[float | None, typer.Option("--start", help="First moment, in seconds of the timestamps.")]
End = Annotated[float | None, typer.Option("--end", help="End, in seconds of the timestamps.")]
OnShort = Annotated[str, typer.Option("--on-short", help="Too few frames: repeat, fewer or error.")]
SnapTolerance = Annotated[float, typer.Option("--snap-tolerance", help="Seconds, for --candidates snap.")]
Seed = Annotated[int, typer.Option("--seed", help="For random choices.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...  [default: the GPU if there is one]")]
Decoder = Annotated[str, typer.Option("--decoder", help="pyav or torchcodec.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Per video.  [default: all for one video, 1 for many]")]
Workers = Annotated[int | None, typer.Option("--workers", help="Videos decoded at a time.  [default: one a core]")]
FolderFps = Annotated[float | None, typer.Option("--folder-fps", help="Rate of a folder of frame images.")]
MaxPixels = Annotated[int | None, typer.Option("--max-pixels", help="Refuse larger frames.")]
MaxFrames = Annotated[int | None, typer.Option("--max-frames", help="Refuse videos with more frames.")]
MaxDuration = Annotated[float | None, typer.Option("--max-duration", help="Refuse longer videos (seconds).")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write a row per video: .parquet, .jsonl, .csv, or a folder of Parquet files; resumes if killed.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray: on a cluster, with --out.")]
ADDRESS_HELP = "HOST:PORT of a Ray cluster, or auto.  [default: one that is started on this machine]"
Address = Annotated[str | None, typer.Option("--address", help=ADDRESS_HELP)]


def select_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `select` among the options of a command, with its limits; not the policy."""
    names = {field.name for field in fields(SelectOptions)} - {"policy"}
    return {**{name: value for name, value in given.items() if name in names}, "limits": limits_of(given)}


def limits_of(given: dict[str, Any]) -> Any:
    """Return the `Limits` that the options --max-* set."""
    from sosampler.video.limits import Limits

    names = ("max_pixels", "max_frames", "max_duration")
    return Limits(**{name: given[name] for name in names if given[name] is not None})


def policy_or_sampler(policy: str | None, sampler: Path | None) -> str | Path | None:
    """Return what --policy or --sampler names; a folder is returned as a path, so it is never taken for a name."""
    if sampler is None:
        return policy
    if policy is not None:
        raise InvalidArgument(f"--sampler {sampler} and --policy {policy} were both given; give one of them")
    if not sampler.is_dir():
        raise InvalidArgument(f"--sampler {sampler}: no such folder; give the folder of a trained sampler")
    return sampler


def key_values(texts: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE options of a classifier; ints, floats, true and false are read as such, the rest as text.

    >>> key_values(["head=frameexit", "num_frames=16", "drop_rate=0.5", "stride_on_1x1=true"])
    {'head': 'frameexit', 'num_frames': 16, 'drop_rate': 0.5, 'stride_on_1x1': True}
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier() or not value:
            raise InvalidArgument(f"--option {text!r} must be KEY=VALUE, for example head=frameexit")
        values[key] = _value(value)
    return values


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_engine(engine: str, address: str | None) -> bool:
    """Return whether the engine is Ray."""
    if one_of("--engine", engine, ("local", "ray")) == "ray":
        return True
    if address is not None:
        raise InvalidArgument(f"--address {address} is of --engine ray; add that, or leave the address out")
    return False


def check_ray_out(out: Path | None, **unsupported: Any) -> Path:
    """Return --out; `unsupported` are options, by name, that a cluster cannot do."""
    from sosampler.inference.rows import check_out

    for option, value in unsupported.items():
        if value is not None:
            raise InvalidArgument(
                f"--{option.replace('_', '-')} does not go with --engine ray, which gives rows without pixels; "
                "leave it out"
            )
    if out is None:
        raise InvalidArgument(
            "--engine ray prints no rows; write them with --out FOLDER, or to a .parquet, .jsonl or .csv file"
        )
    return check_out(out)


# ---- progress

_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def show_progress(what: str, *, lines: bool = True) -> Iterator[OnProgress]:
    """Give a function to call after each video: a bar on a terminal, elsewhere lines with rate and time left."""
    begin = time.monotonic()  # the time of the first video counts too
    with ExitStack() as stack:
        show: Callable[[Progress], None] | None = None

        def on_progress(progress: Progress) -> None:
            nonlocal show
            if show is None:
                if progress.before:
                    typer.echo(f"continuing: {progress.before} of {progress.total} videos are done", err=True)
                show = _bar(what, progress, stack) if sys.stderr.isatty() or not lines else _lines(what, begin)
            show(progress)

        yield on_progress


def _bar(what: str, first: Progress, stack: ExitStack) -> Callable[[Progress], None]:
    from sosampler._util.progress import progress_bar

    bar = stack.enter_context(progress_bar(what, first.total, done=first.before))
    return lambda progress: bar.advance(text=f"{progress.failed} failed" if progress.failed else "")


def _lines(what: str, begin: float) -> Callable[[Progress], None]:
    last = begin

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES or progress.done == progress.total:
            last = now
            typer.echo(line_of(what, progress, now - begin), err=True)

    return show


def line_of(what: str, progress: Progress, seconds: float) -> str:
    """Return how many videos are done, how fast, and the time left."""
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


# ---- results

# Failures that are printed; all are in the file of failures.
_MAX_PRINTED = 10
_VERBS = {"selections": "selecting", "predictions": "classifying"}


def run_and_report(
    work: Callable[[Callable[[Row], None], OnProgress], RunSummary],
    what: str,
    *,
    one: bool,
    json_output: bool,
    ray: bool,
) -> int:
    """Run over all videos, print rows or a summary, and return the exit code: 1 if some failed.

    Args:
        work: takes functions to call with each row and after each video.
        what: "selections" or "predictions".
        one: whether there is a single video, whose row is printed by itself.
        json_output: print one JSON object.
        ray: whether a cluster does the work; it prints progress where there is no terminal too, and no rows.
    """
    from sosampler.inference.many import describe_row

    rows: list[Row] = []
    started = False

    def on_row(row: Row) -> None:
        if json_output or one:
            rows.append(row)
        else:
            typer.echo(describe_row(row))

    with show_progress(_VERBS[what], lines=ray) as show:

        def on_progress(progress: Progress) -> None:
            nonlocal started
            started = True
            show(progress)

        done = work(on_row, on_progress)
    if done.num_before and not started:
        typer.echo(f"continuing: {done.num_before} of {done.num_videos} videos are done", err=True)
    if done.damaged:
        typer.echo(f"{len(done.damaged)} damaged files in {done.out} were made again", err=True)
    if one and rows:
        typer.echo(json.dumps(rows[0]) if json_output else describe_row(rows[0]))
    elif json_output:
        summary: dict[str, Any] = {"num_videos": done.num_videos, "num_failed": len(done.failures)}
        if done.out is None:
            summary[what] = rows
        else:  # the rows are in the file
            summary |= {"out": str(done.out), "num_written": done.num_rows, "num_done_before": done.num_before}
        typer.echo(json.dumps({**summary, "failures": done.failures}))
    if done.out is not None:
        typer.echo(f"{done.num_rows} {what} written to {done.out}", err=json_output or one)
    for failure in done.failures[:_MAX_PRINTED]:
        typer.echo(f"failed: {failure['error']}", err=True)
    if done.failures:
        rest = "; the rest are done" if len(done.failures) < done.num_videos else ""
        listed = "" if done.failed_path is None else f"; see {done.failed_path}"
        typer.echo(f"{len(done.failures)} of {done.num_videos} videos failed{rest}{listed}", err=True)
    return 1 if done.failures else 0
