"""`sosampler evaluate`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler.cli.options import AutoMax, AutoMin
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, DEFAULT_TOLERANCE


def evaluate_command(
    bank: Annotated[Path, typer.Argument(help="A bank with the outputs of a classifier.")],
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            help="Separated by commas: uniform, random, centre, frameexit, all, keyframe, frame-difference, "
            "difference-peaks, "
            "farthest-first, dpp, general; the oracles semi-optimal, semi-optimal-max, optimal; folders of samplers, "
            "also as NAME=FOLDER; MODULE:CLASS. +mmr or +dpp behind a folder or a policy with scores avoids redundant "
            "frames; +aks, +its or +nms spreads the choice in time. Folders of trained baselines too: "
            "FOLDER@VALUE sets their threshold, FOLDER@all evaluates all its values.  "
            "[default: uniform,random,all,semi-optimal-max,semi-optimal,optimal]",
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="One policy; may be repeated.")] = None,
    num_frames: Annotated[
        str,
        typer.Option("-n", "--num-frames", help="N, or several separated by commas; with auto, samplers decide on N."),
    ] = "6",
    num_candidates: Annotated[
        str, typer.Option("-t", "--num-candidates", help="T, or several separated by commas.")
    ] = "10",
    pairs: Annotated[
        str | None, typer.Option("--pairs", help="Instead, N/T pairs separated by commas, for example 8/30,16/60.")
    ] = None,
    classifier: Annotated[
        str | None, typer.Option("--classifier", "-c", help="Folder of the saved classifier, or name of a teacher.")
    ] = None,
    views: Annotated[
        int | None, typer.Option("--views", help="Which teacher, where the bank has outputs for several views.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="train, dev or test.  [default: test, else dev, else train]")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random policy and the bootstrap.")] = 0,
    bootstrap: Annotated[int, typer.Option("--bootstrap", help="Resamples for 95 % intervals; 0 for none.")] = 2000,
    beam_width: Annotated[
        int, typer.Option("--beam-width", help="Beam width of the optimal policy where a classifier must be run.")
    ] = 16,
    auto_min: AutoMin = None,
    auto_max: AutoMax = None,
    auto_tolerance: Annotated[
        str | None,
        typer.Option(
            "--auto-tolerance",
            help="Expected loss that -n auto accepts for fewer frames, or several separated by commas.  "
            f"[default: {DEFAULT_TOLERANCE}]",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rows into this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write everything into this JSON file.")] = None,
    curve: Annotated[
        Path | None, typer.Option("--curve", help="Draw accuracy against cost into this .svg or .png file.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder for the results of every video; `sosampler report` makes a page of it."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure policies on the videos of a bank.

    Policies, trained samplers and baselines are compared by accuracy, cost and their distance to the optimum.
    """
    names = [*_texts(policies), *(policy or [])]
    if policies is not None and not _texts(policies):
        raise InvalidArgument("--policies is empty; name some policies, or leave it out for the default")
    numbers = _numbers("-n", num_frames, or_auto=True), _numbers("-t", num_candidates)
    tolerances = None if auto_tolerance is None else _tolerances(auto_tolerance)
    listed = None if pairs is None else [_pair(text) for text in _texts(pairs)]
    _check_files({"--csv": csv, "--out": out, "--curve": curve})
    if run is not None:
        _check_folder("--run", run)

    from sosampler import evaluate  # raises with what to install
    from sosampler.cli.options import show_progress

    given: dict[str, Any] = {"policies": names} if names else {}
    with show_progress("evaluating") as on_progress:
        evaluation = evaluate(
            bank,
            **given,
            num_frames=numbers[0],
            num_candidates=numbers[1],
            pairs=listed,
            classifier=classifier,
            views=views,
            split=split,
            seed=seed,
            bootstrap=bootstrap,
            device=device,
            precision=precision,
            beam_width=beam_width,
            auto_min=auto_min,
            auto_max=auto_max,
            auto_tolerance=tolerances,
            on_progress=on_progress,
            say=lambda text: typer.echo(f"note: {text}", err=True),
        )
    # Printed first, so that the numbers are not lost if a file cannot be written.
    if json_output:
        typer.echo(json.dumps(evaluation.to_dict()))
    else:
        facts = evaluation.facts
        typer.echo(f"{facts['num_videos']} videos of {facts['split']}, classifier {facts['teacher']['name']}", err=True)
        typer.echo(evaluation.table())
    if csv is not None:
        evaluation.write_csv(csv)
    if out is not None:
        evaluation.write_json(out)
    if curve is not None:
        evaluation.write_curve(curve)
    if run is not None:
        evaluation.write_run(run)


def _check_files(options: dict[str, Path | None]) -> None:
    """Raise where a file cannot be written, before the long work."""
    given = {option: path for option, path in options.items() if path is not None}
    for option, path in given.items():
        if path.is_dir():
            raise InvalidArgument(f"{option} {path}: is a folder; give the name of a file")
        _check_folder(option, path.parent, path)
    paths = [path.absolute() for path in given.values()]
    if len(paths) > len(set(paths)):
        same = [option for option, path in given.items() if paths.count(path.absolute()) > 1]
        raise InvalidArgument(f"{' and '.join(same)} name the same file, {given[same[0]]}; give each its own")
    if "--curve" in given:
        from sosampler.figures.curves import check_curve_file

        check_curve_file(given["--curve"])


def _check_folder(option: str, folder: Path, given: Path | None = None) -> None:
    """Raise where a folder is not there and cannot be made; `given` is the path of the option."""
    path = folder.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())  # the others will be made
    if not existing.is_dir():
        raise InvalidArgument(f"{option} {given or folder}: {existing} is a file, not a folder; give another path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{option} {given or folder}: nothing can be written into {existing}; give another path")


def _texts(given: str | None) -> list[str]:
    return [text.strip() for text in (given or "").split(",") if text.strip()]


def _numbers(option: str, given: str, *, or_auto: bool = False) -> list[Any]:
    texts = _texts(given)
    if not texts or not all(text.isdecimal() or (or_auto and text == AUTO) for text in texts):
        allowed, example = (f"ints or {AUTO}", f"1,2,4,{AUTO}") if or_auto else ("ints", "1,2,4")
        raise InvalidArgument(f"{option} {given!r} must be {allowed} separated by commas, for example {example}")
    return [text if text == AUTO else int(text) for text in texts]


def _tolerances(given: str) -> list[float]:
    try:
        return [float(text) for text in _texts(given)]
    except ValueError:
        raise InvalidArgument(
            f"--auto-tolerance {given!r} must be numbers separated by commas, for example 0.01,0.02"
        ) from None


def _pair(text: str) -> tuple[int | str, int]:
    frames, _, candidates = text.partition("/")
    if not ((frames.isdecimal() or frames == AUTO) and candidates.isdecimal()):
        raise InvalidArgument(f"--pairs {text!r} must be N/T, for example 8/30")
    return (frames if frames == AUTO else int(frames)), int(candidates)


# ---- `sosampler independence`


def independence_command(
    videos: Annotated[
        list[str], typer.Argument(help="Videos, folders of videos, one manifest (CSV, JSONL), or one bank.")
    ],
    classifier: Annotated[
        list[str],
        typer.Option("--classifier", "-c", help="Network of the features: a name or a saved folder; may be repeated."),
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", help="File of weights; one for each --classifier, 'none' for none."),
    ] = None,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Frames a second, such as 0.5,1,2,4.  [default: 0.1 to 25]")
    ] = None,
    moments: Annotated[int, typer.Option("--moments", help="Maximum number of pairs of a video at each rate.")] = 16,
    max_videos: Annotated[int, typer.Option("--max-videos", help="Maximum number of videos; drawn by --seed.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the videos that are drawn.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for independence.json and the figure independence.png.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the frame rate up to which frames are independent.

    Exit code 1 if some videos could not be read.
    """
    from sosampler import independence  # raises with what to install
    from sosampler.evaluation.independence import RATES

    try:
        steps = RATES if rates is None else [float(part) for part in rates.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"--rates {rates!r} must be numbers such as 0.5,1,2,4") from error
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fails before the long work
    result = independence(
        videos[0] if len(videos) == 1 else videos,
        classifiers=classifier,
        weights=[None if file.lower() == "none" else file for file in weights] if weights else None,
        rates=steps,
        moments=moments,
        max_videos=max_videos,
        seed=seed,
        device=device,
        precision=precision,
        say=lambda text: typer.echo(text, err=True),
    )
    written = [] if out is None else [str(path) for path in result.write(out)]
    for failure in result.failures[:10]:
        typer.echo(f"failed: {failure['error']}", err=True)
    if json_output:
        typer.echo(json.dumps({**result.to_dict(), "files": written}))
    else:
        typer.echo("\n".join([result.table(), *(f"wrote {path}" for path in written)]))
    raise typer.Exit(1 if result.failures else 0)
