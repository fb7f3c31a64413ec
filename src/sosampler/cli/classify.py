"""`sosampler classify`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sosampler._util.files import replacing
from sosampler.cli.options import (
    ADDRESS_HELP,
    ENGINE_HELP,
    AutoMax,
    AutoMin,
    AutoTolerance,
    check_engine,
    check_folder,
    number_or_auto,
    run_rows,
)
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.rows import Journal

if TYPE_CHECKING:
    from sosampler.inference.pipeline import Pipeline, Prediction


Row = dict[str, Any]

_SUFFIXES = (".jsonl", ".csv")
_DEFAULT_POLICY = "uniform"
# Columns of a CSV, each from a row as `Prediction.to_dict` gives it. Lists become JSON inside their cell.
_COLUMNS: dict[str, Callable[[Row], Any]] = {
    # A file name need not be text; what is not becomes \\xNN.
    "video": lambda row: os.fsencode(row["video"]).decode("utf-8", "backslashreplace"),
    "label": lambda row: row["label"],
    "probability": lambda row: row["probability"],
    "top_labels": lambda row: [each["label"] for each in row["top"]],
    "top_probabilities": lambda row: [each["probability"] for each in row["top"]],
    "policy": lambda row: row["selection"]["policy"],
    "num_frames": lambda row: row["selection"]["num_frames"],
    "num_candidates": lambda row: row["selection"]["num_candidates"],
    "frame_indices": lambda row: row["selection"]["frame_indices"],
    "pts_seconds": lambda row: row["selection"]["pts_seconds"],
    "scores": lambda row: row["selection"]["scores"],
    "duration": lambda row: row["selection"]["metadata"]["duration"],
    "seconds": lambda row: row["timing"]["total"],
    "notes": lambda row: row["selection"]["notes"],
}


def classify_command(
    videos: Annotated[
        list[str],
        typer.Argument(
            help="Video files, folders of videos, folders of frame images, patterns in quotes, or a CSV, JSONL or "
            "Parquet file with a column of paths."
        ),
    ],
    classifier: Annotated[
        str, typer.Option("--classifier", "-c", help="Folder of a saved classifier, or the name of one.")
    ],
    sampler: Annotated[
        Path | None, typer.Option("--sampler", "-s", help="Folder of a trained sampler, which chooses the frames.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help=f"Choose by a rule instead, as in select.  [default: {_DEFAULT_POLICY}]"),
    ] = None,
    num_frames: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--num-frames",
            metavar="INTEGER|auto",
            parser=number_or_auto,
            help="Frames that the classifier sees; auto leaves that to the sampler.  [default: 6]",
        ),
    ] = None,
    auto_min: AutoMin = None,
    auto_max: AutoMax = None,
    auto_tolerance: AutoTolerance = None,
    num_candidates: Annotated[int, typer.Option("-t", "--num-candidates", help="Frames to choose from.")] = 10,
    top: Annotated[int, typer.Option("--top", help="How many classes to tell.")] = 5,
    candidates: Annotated[
        str | None,
        typer.Option("--candidates", help="exact, keyframe (many times faster) or snap.  [default: exact]"),
    ] = None,
    grid: Annotated[
        str, typer.Option("--grid", help="Where candidates lie: uniform, linspace, stratified or jitter.")
    ] = "uniform",
    start: Annotated[float | None, typer.Option("--start", help="First moment, in seconds of the timestamps.")] = None,
    end: Annotated[float | None, typer.Option("--end", help="End, in seconds of the timestamps.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="For random choices.")] = 0,
    size: Annotated[
        int | None,
        typer.Option("--size", help="Short side of the frames.  [default: 256, more if a network takes more]"),
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="A file with the classifier's weights.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the classifier, e.g. head=frameexit.")
    ] = None,
    input_size: Annotated[int | None, typer.Option("--input-size", help="Height and width of its input.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="float32, bfloat16, float16; int8 after `sosampler quantize`.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Videos that the classifier sees at once.")] = 8,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Videos decoded at a time.  [default: one a core]")
    ] = None,
    decoder: Annotated[str, typer.Option("--decoder", help="pyav or torchcodec.")] = "pyav",
    folder_fps: Annotated[float | None, typer.Option("--folder-fps", help="Rate of a folder of frame images.")] = None,
    max_pixels: Annotated[int | None, typer.Option("--max-pixels", help="Refuse larger frames.")] = None,
    max_frames: Annotated[int | None, typer.Option("--max-frames", help="Refuse videos with more frames.")] = None,
    max_duration: Annotated[
        float | None, typer.Option("--max-duration", help="Refuse longer videos (seconds).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a row per video: .jsonl or .csv; resumes if killed.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: Annotated[str, typer.Option("--engine", help=ENGINE_HELP)] = "local",
    address: Annotated[str | None, typer.Option("--address", help=ADDRESS_HELP)] = None,
) -> None:
    """Name what videos show, from a few frames of each. Exit code 1 if some of many failed."""
    from sosampler.video.discover import listed_videos
    from sosampler.video.limits import Limits
    from sosampler.video.source import import_torch

    if sampler is not None and policy is not None:
        raise InvalidArgument(f"--sampler {sampler} and --policy {policy} were both given; give one of them")
    on_ray = check_engine(engine, address)
    if on_ray:
        check_folder(out)
    elif out is not None:
        _check_out(out)
    paths = listed_videos(videos)
    import_torch()  # says how to install it
    from sosampler.cli.options import key_values
    from sosampler.inference.pipeline import Pipeline, load_classifier

    network: Any = classifier
    here = "cpu" if on_ray else device  # of a cluster, the workers' devices count
    settings = {"weights": weights, "input_size": input_size, **key_values(option or [])}
    if weights is not None or input_size is not None or option:
        network = load_classifier(classifier, device=here, **settings)
    given = {"max_pixels": max_pixels, "max_frames": max_frames, "max_duration": max_duration}
    chooser = _as_folder(sampler) if sampler is not None else policy or _DEFAULT_POLICY
    pipeline = Pipeline(
        chooser,
        network,
        num_candidates=num_candidates,
        num_frames=num_frames,
        auto_min=auto_min,
        auto_max=auto_max,
        auto_tolerance=auto_tolerance,
        candidates=candidates,
        size=size,
        batch_size=batch_size,
        device=here,
        precision=precision,
        top=top,
        workers=workers,
        grid=grid,
        start=start,
        end=end,
        seed=seed,
        decoder=decoder,
        folder_fps=folder_fps,
        limits=Limits(**{key: value for key, value in given.items() if value is not None}),  # type: ignore[arg-type]
    )
    if not on_ray:
        raise typer.Exit(_run(paths, pipeline, out, json_output))
    from sosampler.integrations.ray.cluster import RaySettings
    from sosampler.integrations.ray.rows import classify_on_ray

    assert out is not None, "checked above"
    folder, wide = out, RaySettings(address, decoders=workers, batch_size=batch_size)
    code = run_rows(
        lambda tell: classify_on_ray(
            paths,
            folder,
            pipeline,
            sampler=chooser,
            classifier=classifier,
            classifier_settings=settings,
            precision=precision,
            settings=wide,
            device=device,
            on_progress=tell,
        ),
        "classifying",
        json_output,
    )
    raise typer.Exit(code)


def _as_folder(sampler: Path) -> Path:
    """So that a folder's name is never taken for that of a rule."""
    if not sampler.is_dir():
        raise InvalidArgument(f"--sampler {sampler}: no such folder; give the folder of a trained sampler")
    return sampler


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in _SUFFIXES:
        raise InvalidArgument(
            f"--out {out}: the ending {out.suffix!r} is unknown; choose one of: {', '.join(_SUFFIXES)}"
        )
    if out.is_dir():
        raise InvalidArgument(f"--out {out}: is a folder; give the name of a file")
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out {out}: the folder {out.parent} does not exist; make it first")


def _run(videos: list[Path], pipeline: Pipeline, out: Path | None, json_output: bool) -> int:
    """Classify all; returns the exit code: 0, 1 if some of many failed. A single failure is raised."""
    failures: list[dict[str, str]] = []
    printed: list[Row] = []
    # Rows of many videos are kept beside the file until all are there: run again after a kill, it goes on.
    journal = Journal(out, _identity(pipeline)) if out is not None and len(videos) > 1 else None
    todo = [video for video in videos if journal is None or str(video) not in journal.done]
    if len(todo) < len(videos):
        typer.echo(f"continuing: {len(videos) - len(todo)} of {len(videos)} videos are done", err=True)
    rows: list[Row] = []  # of a single video
    try:
        for video, result in zip(todo, _results(todo, pipeline, alone=len(videos) == 1), strict=True):
            if isinstance(result, SosamplerError):
                if len(videos) == 1:
                    raise result
                failures.append({"video": str(video), "error": str(result)})
                continue
            row = result.to_dict()
            if journal is not None:
                _keep(row, journal)
            elif out is not None:
                rows.append(row)
            if json_output and journal is None:
                printed.append(row)
            elif not json_output:
                typer.echo(_describe(result))
    finally:
        if journal is not None:
            journal.close()
    written = 0
    if out is not None:
        with _writing(out) as write:
            for row in rows if journal is None else journal.rows(str(video) for video in videos):
                write(row)
                written += 1
        _write_failures(out, failures)
        if journal is not None:
            journal.path.unlink()
    _report(videos, failures, printed, out, written, json_output)
    return 1 if failures else 0


def _keep(row: Row, journal: Journal) -> None:
    try:
        journal.add(row)
    except OSError as error:
        raise _not_writable(journal.out, error) from error


def _not_writable(out: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"--out {out}: cannot be written ({error.strerror}); make room, or give another")


def _identity(pipeline: Pipeline) -> Row:
    """What must be equal for an interrupted run to be continued."""
    from sosampler.classifiers.factory import classifier_identity

    who = classifier_identity(pipeline.classifier, pipeline.precision)
    return {**pipeline.options.identity(), "classifier": who, "precision": pipeline.precision, "top": pipeline.top}


def _results(videos: list[Path], pipeline: Pipeline, *, alone: bool) -> Iterator[Prediction | SosamplerError]:
    from sosampler._util.progress import progress_bar

    if alone:  # all cores for its decoding
        yield pipeline(videos[0], on_error="return")
        return
    with progress_bar("classifying", len(videos)) as bar:
        for result in pipeline.stream(videos):
            yield result
            bar.advance()


def _report(
    videos: list[Path],
    failures: list[dict[str, str]],
    printed: list[Row],
    out: Path | None,
    written: int,
    as_json: bool,
) -> None:
    if as_json and len(videos) == 1:
        typer.echo(json.dumps(printed[0]))
    elif as_json:
        summary: Row = {"num_videos": len(videos), "num_failed": len(failures)}
        # With --out the rows are in the file; printing them again would need memory for all.
        summary |= {"out": str(out), "num_written": written} if out is not None else {"predictions": printed}
        typer.echo(json.dumps({**summary, "failures": failures}))
    if out is not None:
        typer.echo(f"{written} predictions written to {out}", err=True)
    for failure in failures:
        typer.echo(f"failed: {failure['error']}", err=True)
    if failures:
        rest = "; the rest are done" if len(failures) < len(videos) else ""
        typer.echo(f"{len(failures)} of {len(videos)} videos failed{rest}", err=True)


@contextmanager
def _writing(out: Path) -> Iterator[Callable[[Row], None]]:
    """A function that takes rows one by one; the file appears when all are written."""
    import csv

    try:
        with replacing(out) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
            if out.suffix.lower() == ".jsonl":
                yield lambda row: _write(file, row)
            else:
                table = csv.DictWriter(file, fieldnames=list(_COLUMNS))
                table.writeheader()
                yield lambda row: table.writerow({name: _cell(value(row)) for name, value in _COLUMNS.items()})
    except BrokenPipeError:
        raise  # nobody reads what is printed; the file is not at fault
    except OSError as error:
        raise _not_writable(out, error) from error


def _write(file: Any, row: Row) -> None:
    file.write(json.dumps(row) + "\n")


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def _write_failures(out: Path, failures: list[dict[str, str]]) -> None:
    """What failed, beside the rows."""
    failed = out.with_name(out.name + ".failed.jsonl")
    if not failures:
        failed.unlink(missing_ok=True)
        return
    with replacing(failed) as temporary:
        temporary.write_text("".join(json.dumps(failure) + "\n" for failure in failures), encoding="utf-8")


def _describe(prediction: Prediction) -> str:
    selection = prediction.selection
    lines = [
        f"{prediction.video}: {prediction.label} {prediction.probability:.3f} "
        f"({len(selection)} of {selection.num_candidates} {selection.candidates.mode} candidates, {selection.policy}, "
        f"{prediction.timing['total']:.2f} s)"
    ]
    lines += [f"  {probability:.3f}  {label}" for label, probability in prediction.top[1:]]
    lines += [f"  note: {note}" for note in selection.notes]
    return "\n".join(lines)
