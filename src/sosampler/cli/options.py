"""The options that commands share, each written once, and how commands report progress and results.

Defaults come from `SelectOptions`. Nothing heavy is imported here: `sosampler --help` must be fast.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Argument, Option

from sosampler._util.progress import Bar, OnProgress, Progress, progress_bar
from sosampler._util.text import escaped
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.inference.options import SelectOptions
from sosampler.policies.auto import AUTO, DEFAULT_MAX, DEFAULT_MIN, DEFAULT_TOLERANCE
from sosampler.video.limits import TIMEOUT, Limits

if TYPE_CHECKING:
    from sosampler.inference.many import RunSummary
    from sosampler.inference.rows import Row
    from sosampler.inference.uploads import Upload

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
    return Option("-n", "--num-frames", metavar="INTEGER|auto", parser=number_or_auto, help=help_text)


Videos = Annotated[
    list[str],
    Argument(
        help="Video files, folders of videos, folders of frame images, patterns in quotes, addresses (with "
        "--allow-scheme), a CSV, JSONL or Parquet file with a column of paths, or a "
        "text file with a path a line."
    ),
]
Sampler = Annotated[Path | None, Option("--sampler", "-s", help="Folder of a trained sampler, which chooses frames.")]
AutoMin = Annotated[int | None, Option(help=f"Minimum frames of -n auto.  [default: {DEFAULT_MIN}]")]
AutoMax = Annotated[int | None, Option(help=f"Maximum frames of -n auto.  [default: {DEFAULT_MAX}]")]
AutoTolerance = Annotated[
    float | None,
    Option(help=f"How much accuracy -n auto may give up for fewer frames.  [default: {DEFAULT_TOLERANCE}]"),
]
AutoSure = Annotated[
    float | None,
    Option(
        help="With -n auto and --answer fused or probed: ask for frames until the most probable class has this "
        "probability.  "
        "[default: what loses at most --auto-tolerance on dev]"
    ),
]
Answer = Annotated[
    str | None,
    Option(
        help="What is made of the classifier's answers for the chosen frames: mean, weighted, fused or probed.  "
        "[default: the best on dev in the sampler's training]"
    ),
]
Candidates = Annotated[
    str | None, Option(help="auto, exact, keyframe (many times faster) or snap.  [default: auto or exact, by policy]")
]
Grid = Annotated[str, Option(help="Where candidates lie: uniform, linspace, stratified or jitter.")]
Start = Annotated[float | None, Option(help="First moment, in seconds of the timestamps.")]
End = Annotated[float | None, Option(help="End, in seconds of the timestamps.")]
OnShort = Annotated[str, Option(help="Too few frames: repeat, fewer or error.")]
SnapTolerance = Annotated[float, Option(help="Seconds, for --candidates snap.")]
Seed = Annotated[int, Option(help="For random choices.")]
Weights = Annotated[str | None, Option(help="A file with the classifier's weights.")]
ClassifierOption = Annotated[list[str] | None, Option(help="KEY=VALUE of the classifier, e.g. head=frameexit.")]
InputSize = Annotated[int | None, Option(help="Height and width of its input.")]
Device = Annotated[str | None, Option(help="cpu, cuda, ...  [default: the GPU if there is one]")]
Precision = Annotated[str | None, Option(help="float32, bfloat16 or float16.")]
Decoder = Annotated[str, Option(help="pyav or torchcodec.")]
Threads = Annotated[int | None, Option(help="Per video.  [default: all for one video, 1 for many]")]
Workers = Annotated[int | None, Option(help="Videos decoded at a time.  [default: one a core]")]
FolderFps = Annotated[float | None, Option(help="Rate of a folder of frame images.")]
MaxPixels = Annotated[int | None, Option(help="Refuse larger frames.")]
MaxFrames = Annotated[int | None, Option(help="Refuse videos with more frames.")]
MaxDuration = Annotated[float | None, Option(help="Refuse longer videos (seconds).")]
MaxBytes = Annotated[int | None, Option(help="Refuse to decode more bytes.  [default: 4 GiB, less for tiny files]")]
Timeout = Annotated[float | None, Option(help=f"Seconds for one video.  [default: {TIMEOUT:g}]")]
MaxRead = Annotated[int | None, Option(help="Refuse to read more bytes of an address.  [default: 4 GiB]")]
Retries = Annotated[
    int | None, Option(help=f"How often a failed request to an address is repeated.  [default: {Limits.retries}]")
]
Shard = Annotated[
    str | None, Option(metavar="I/N", help="Only the I-th of N parts of the videos, by their names; from 1/N to N/N.")
]
Metrics = Annotated[Path | None, Option(help="Write counters here, for Prometheus' textfile collector.")]
Schemes = Annotated[
    list[str],
    Option("--allow-scheme", help="Open addresses that begin so: https, http, s3, gs or hf; may be repeated."),
]
Out = Annotated[
    str | None,
    Option(
        "--out",
        "-o",
        metavar="<path>",
        help="A row per video: .parquet, .jsonl, .csv or folder (Parquet); or such a file at s3://, gs://, hf://. "
        "Resumes.",
    ),
]
Bootstrap = Annotated[int, Option(help="Resamples for 95 % intervals; 0 for none.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Start again where --out holds another run.")]
Replace = Annotated[bool, Option("--overwrite", help="Replace what --out holds of something else.")]
Exclusive = Annotated[
    bool | None,
    Option(
        "--exclusive/--independent",
        help="Classes exclude each other (softmax), or not (sigmoid).  [default: as the manifest or importer says]",
    ),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
Engine = Annotated[str, Option(help="local, or ray: on a cluster, with --out.")]
Address = Annotated[
    str | None, Option(help="HOST:PORT of a Ray cluster, or auto.  [default: one that is started here]")
]


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the options but for those with these names."""
    return {name: value for name, value in options.items() if name not in names}


def given(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return those of the named options that the user gave."""
    return {name: options[name] for name in names if options[name] is not None}


def select_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `select` among the options of a command, with its limits; not the policy."""
    names = {field.name for field in fields(SelectOptions)} - {"policy"}
    arguments = {name: value for name, value in options.items() if name in names}
    return {**arguments, "schemes": tuple(options["schemes"]), "limits": limits_of(options)}


def limits_of(options: dict[str, Any]) -> Any:
    """Return the `Limits` that those of the options --max-*, --timeout and --retries set that the command has."""
    return Limits(**given(options, *(field.name for field in fields(Limits) if field.name in options)))


def policy_or_sampler(policy: str | None, sampler: Path | None) -> str | Path | None:
    """Return what --policy or --sampler names; a folder is returned as a path, so it is never taken for a name."""
    if sampler is None:
        return policy
    if policy is not None:
        raise InvalidArgument(f"--sampler {sampler} and --policy {policy} were both given; give one of them")
    if not sampler.is_dir():
        raise InvalidArgument(f"--sampler {sampler}: no such folder; give the folder of a trained sampler")
    return sampler


def key_values(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE options of a classifier; ints, floats, true and false are read as such, the rest as text.

    >>> key_values(["head=frameexit", "num_frames=16", "drop_rate=0.5", "stride_on_1x1=true"])
    {'head': 'frameexit', 'num_frames': 16, 'drop_rate': 0.5, 'stride_on_1x1': True}
    """
    values: dict[str, Any] = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier() or not value:
            raise InvalidArgument(f"--option {text!r} must be KEY=VALUE, for example head=frameexit")
        values[key] = _value(value)
    return values


def named_sources(texts: Sequence[str] | None) -> dict[str, str] | None:
    """Parse NAME=SOURCE options of features; None where there are none.

    >>> named_sources(["r34=runs/r34", "r18=features=old"])
    {'r34': 'runs/r34', 'r18': 'features=old'}
    """
    sources: dict[str, str] = {}
    for text in texts or ():
        name, _, source = text.partition("=")
        if not name or not source or name in sources:
            raise InvalidArgument(f"--features {text!r} must be NAME=SOURCE, each name once, for example r34=runs/r34")
        sources[name] = source
    return sources or None


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def listed(text: str | None) -> list[str]:
    """Return the parts of an option that are separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def shard_of(videos: Sequence[Path | str], text: str | None) -> Sequence[Path | str]:
    """Return the videos of a part, --shard I/N; all without one."""
    if text is None:
        return videos
    from sosampler.video.discover import in_shard

    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InvalidArgument(f"--shard {text} must be I/N with I from 1 to N, for example 2/8")
    part = [video for video in videos if in_shard(video, int(number) - 1, int(count))]
    say(f"shard {text}: {len(part)} of {len(videos)} videos")
    return part


def check_engine(engine: str, address: str | None) -> bool:
    """Return whether the engine is Ray."""
    on_ray = one_of("--engine", engine, ("local", "ray")) == "ray"
    if address is not None and not on_ray:
        raise InvalidArgument(f"--address {address} is of --engine ray; add that, or leave the address out")
    return on_ray


def check_ray_out(out: Path | None, what: str, *, overwrite: bool = False, **unsupported: Any) -> Path:
    """Return --out for `what`, checked; `unsupported` are options, by name, that a cluster cannot do."""
    from sosampler.inference.rows import check_out

    for option in given(unsupported, *unsupported):
        raise InvalidArgument(
            f"--{option.replace('_', '-')} does not go with --engine ray, which gives rows without pixels; leave it out"
        )
    if out is None:
        raise InvalidArgument(
            "--engine ray prints no rows; write them with --out FOLDER, or to a .parquet, .jsonl or .csv file"
        )
    return check_out(out, what, overwrite=overwrite)


def place_of(out: str | None, *, overwrite: bool) -> tuple[Path | None, Upload | None]:
    """Return where rows are written, and how they come to an address from there if --out is one."""
    from sosampler.video.remote import is_address

    if out is None or not is_address(out):
        return (None if out is None else Path(out)), None
    from sosampler.inference.uploads import Upload

    upload = Upload.to(out, overwrite=overwrite)
    return upload.file, upload


# ---- progress

_SECONDS_BETWEEN_LINES = 30.0


def say(text: str) -> None:
    """Print one line on standard error."""
    typer.echo(escaped(text), err=True)


def echo(result: dict[str, Any], text: str, json_output: bool, *, err: bool = False) -> None:
    """Print a result as one JSON object, or as text; with `err` the text goes to standard error."""
    typer.echo(json.dumps(result) if json_output else escaped(text, lines=True), err=err and not json_output)


@contextmanager
def show_progress(what: str, *, lines: bool = True) -> Iterator[OnProgress]:
    """Give a function to call after each video: a bar on a terminal, elsewhere lines with rate and time left."""
    begin = last = time.monotonic()  # the time of the first video counts too
    bar: Bar | None = None
    stage = ""
    with ExitStack() as stack:

        def on_progress(progress: Progress) -> None:
            nonlocal bar, begin, last, stage
            if bar is None or progress.stage != stage:
                stack.close()  # the bar of the stage before
                if bar is not None:
                    begin = last = time.monotonic()
                stage = progress.stage
                if progress.before:
                    say(f"continuing: {progress.before} of {progress.total} videos are done")
                name = f"{what} {stage}".rstrip()
                bar = stack.enter_context(progress_bar(name, progress.total, done=progress.before))
            bar.advance(text=f"{progress.failed} failed" if progress.failed else "")
            now = time.monotonic()
            is_due = now - last >= _SECONDS_BETWEEN_LINES or progress.done == progress.total
            if is_due and lines and not sys.stderr.isatty():
                last = now
                say(line_of(f"{what} {stage}".rstrip(), progress, now - begin))

        yield on_progress


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


# ---- Ctrl-C

_SECONDS_TO_STOP = 0.8  # for what is under way; then the process ends as if it was killed, which loses nothing more
_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def stoppable() -> Iterator[None]:
    """End soon after Ctrl-C a command that resumes; decorates the command, because importing torch takes seconds too.

    Python raises KeyboardInterrupt only after the step of torch that is under way, which may take many seconds, and
    then waits for threads and processes that decode. Files are replaced whole, so that nothing breaks by ending early.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # A thread learns of the signal at once, through the socket that Python's own handler writes to.
    signalled = threading.Event()
    thread = threading.Thread(target=_end_after_signal, args=(reader, signalled), daemon=True)
    try:
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if signalled.wait(0.1):
            _stop_now()
        raise
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _end_after_signal(reader: socket.socket, signalled: threading.Event) -> None:
    with reader:
        while data := reader.recv(64):  # nothing where the other end is closed
            if signal.SIGINT in data:
                signalled.set()
                time.sleep(_SECONDS_TO_STOP)
                _stop_now()


def _stop_now() -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        say("sosampler: stopped; run the same command again to resume")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_INTERRUPTED)  # without waiting for threads that decode, and for torch


# ---- results

_MAX_PRINTED = 10  # failures; all are in the file of failures
_VERBS = {"selections": "selecting", "predictions": "classifying"}


def say_failures(failures: Sequence[dict[str, Any]]) -> None:
    for failure in failures[:_MAX_PRINTED]:
        say(f"failed: {failure['error']}")


def run_and_report(
    work: Callable[..., RunSummary],
    videos: Sequence[Path | str],
    what: str,
    *,
    json_output: bool,
    on_ray: bool,
    metrics: Path | None = None,
) -> NoReturn:
    """Run over all videos, print rows or a summary, and exit: with code 1 if some failed.

    Args:
        work: takes the videos, `on_progress`, `on_result` and, unless a cluster does the work, `on_row`.
        what: "selections" or "predictions".
        on_ray: a cluster prints progress where there is no terminal too, and no rows.
        metrics: a file for counters.
    """
    from sosampler.inference.counters import RunCounters
    from sosampler.inference.many import describe_row

    rows: list[Row] = []
    counters = RunCounters(len(videos), metrics)
    one, started = len(videos) == 1 and not on_ray, False

    def on_row(row: Row) -> None:
        if json_output or one:
            rows.append(row)
        else:
            typer.echo(describe_row(row))

    with show_progress(_VERBS[what], lines=on_ray) as show:

        def on_progress(progress: Progress) -> None:
            nonlocal started
            started = True
            show(progress)
            if line := counters.estimate(progress.total - progress.before):
                say(line)

        try:
            callbacks = {"on_progress": on_progress, "on_result": counters.add}
            done = work(videos, **callbacks, **({} if on_ray else {"on_row": on_row}))
        finally:
            counters.write()
    counters.write(finished=True)
    if done.num_before and not started:
        say(f"continuing: {done.num_before} of {done.num_videos} videos are done")
    if done.damaged:
        say(f"{len(done.damaged)} damaged files in {done.out} were made again")
    if one and rows:
        echo(rows[0], describe_row(rows[0]), json_output)
    elif json_output:
        summary: dict[str, Any] = {"num_videos": done.num_videos, "num_failed": len(done.failures)}
        summary["num_with_notes"] = done.num_with_notes
        if done.out is None:
            summary[what] = rows
        else:  # the rows are in the file
            summary |= {
                "out": done.uploaded or str(done.out),
                "num_written": done.num_rows,
                "num_done_before": done.num_before,
            }
        typer.echo(json.dumps({**summary, "failures": done.failures}))
    if done.out is not None:
        place = done.uploaded or done.out
        typer.echo(escaped(f"{done.num_rows} {what} written to {place}"), err=json_output or one)
    if done.num_with_notes and not one and done.out is not None:
        example = escaped(done.example_note or "")
        say(f"{done.num_with_notes} of {done.num_videos} videos have notes, such as: {example}")
    if done.same_label is not None:
        say(f"note: all videos got the label {done.same_label!r}; if they show different things, check the classifier")
    say_failures(done.failures)
    if done.failures:
        rest = "; the rest are done" if len(done.failures) < done.num_videos else ""
        listed = done.failed_path if done.uploaded is None else f"{done.uploaded}.failed.jsonl"
        see = "" if listed is None else f"; see {listed}"
        say(f"{len(done.failures)} of {done.num_videos} videos failed{rest}{see}")
    raise typer.Exit(1 if done.failures else 0)
