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
    bank: Annotated[Path, typer.Argument(help="A bank with the answers of a classifier.")],
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            help="By commas: uniform, random, centre, frameexit, all, keyframe, frame-difference, difference-peaks, "
            "farthest-first, dpp, general; the oracles semi-optimal, semi-optimal-max, optimal; folders of samplers, "
            "also as NAME=FOLDER; MODULE:CLASS. +mmr or +dpp behind a folder or a policy with scores avoids redundant "
            "frames; +aks, +its or +nms spreads the choice in time. Folders of trained baselines too: "
            "FOLDER@VALUE sets their threshold, FOLDER@all evaluates all its values.  "
            "[default: uniform,random,all,semi-optimal-max,semi-optimal,optimal]",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="One policy; give it again for more.")
    ] = None,
    num_frames: Annotated[
        str,
        typer.Option("-n", "--num-frames", help="N, or several by commas; auto among them lets samplers decide on N."),
    ] = "6",
    num_candidates: Annotated[str, typer.Option("-t", "--num-candidates", help="T, or several by commas.")] = "10",
    pairs: Annotated[
        str | None, typer.Option("--pairs", help="N/T pairs by commas instead, for example 8/30,16/60.")
    ] = None,
    classifier: Annotated[
        str | None, typer.Option("--classifier", "-c", help="Folder of the saved classifier, or name of a teacher.")
    ] = None,
    views: Annotated[
        int | None, typer.Option("--views", help="Which teacher, where the classifier taught with several views.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="train, dev or test.  [default: test, else dev, else train]")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random policy and the bootstrap.")] = 0,
    bootstrap: Annotated[int, typer.Option("--bootstrap", help="Resamples for 95 % intervals; 0 for none.")] = 2000,
    beam_width: Annotated[
        int, typer.Option("--beam-width", help="Of the search for the optimal policy where a classifier must be run.")
    ] = 16,
    auto_min: AutoMin = None,
    auto_max: AutoMax = None,
    auto_tolerance: Annotated[
        str | None,
        typer.Option(
            "--auto-tolerance",
            help="How much less -n auto may expect for the sake of fewer frames, or several by commas.  "
            f"[default: {DEFAULT_TOLERANCE}]",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rows into this file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write everything into this JSON file.")] = None,
    curve: Annotated[
        Path | None, typer.Option("--curve", help="Draw accuracy against cost into this .svg or .png file.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder for everything, video by video; `sosampler report` makes a page of it."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure policies, trained samplers and systems on the videos of a bank: accuracy, cost, nearness to the best."""
    asked = [*_texts(policies), *(policy or [])]
    if policies is not None and not _texts(policies):
        raise InvalidArgument("--policies is empty; name some, or leave it out for the default")
    numbers = _numbers_or_auto("-n", num_frames), _numbers("-t", num_candidates)
    tolerances = None if auto_tolerance is None else _tolerances(auto_tolerance)
    listed = None if pairs is None else [_pair(text) for text in _texts(pairs)]
    _check_files({"--csv": csv, "--out": out, "--curve": curve})
    if run is not None:
        _check_folder("--run", run)

    from sosampler import evaluate  # says how to install what it needs
    from sosampler.cli.options import telling

    given: dict[str, Any] = {"policies": asked} if asked else {}
    with telling("looking") as on_progress:
        found = evaluate(
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
    # Printed first: whatever happens to the files, the numbers are not lost.
    if json_output:
        typer.echo(json.dumps(found.to_dict()))
    else:
        facts = found.facts
        typer.echo(f"{facts['num_videos']} videos of {facts['split']}, classifier {facts['teacher']['name']}", err=True)
        typer.echo(found.table())
    if csv is not None:
        found.write_csv(csv)
    if out is not None:
        found.write_json(out)
    if curve is not None:
        found.write_curve(curve)
    if run is not None:
        found.write_run(run)


def _check_files(options: dict[str, Path | None]) -> None:
    """A place that cannot be written is told before the long work."""
    given = {option: path for option, path in options.items() if path is not None}
    for option, path in given.items():
        if path.is_dir():
            raise InvalidArgument(f"{option} {path}: is a folder; give the name of a file")
        _check_folder(option, path.parent, path)
    places = [path.absolute() for path in given.values()]
    if len(places) > len(set(places)):
        same = [option for option, path in given.items() if places.count(path.absolute()) > 1]
        raise InvalidArgument(f"{' and '.join(same)} name the same file, {given[same[0]]}; give each its own")
    if "--curve" in given:
        from sosampler.figures.cost_curve import check_curve_file

        check_curve_file(given["--curve"])


def _check_folder(option: str, folder: Path, given: Path | None = None) -> None:
    """A folder that is there or can be made; `given` is what the option named."""
    place = folder.absolute()
    found = next(one for one in (place, *place.parents) if one.exists())  # the others will be made
    if not found.is_dir():
        raise InvalidArgument(f"{option} {given or folder}: {found} is a file, not a folder; give another place")
    if not os.access(found, os.W_OK | os.X_OK):
        raise InvalidArgument(f"{option} {given or folder}: nothing can be written into {found}; give another place")


def _texts(given: str | None) -> list[str]:
    return [text.strip() for text in (given or "").split(",") if text.strip()]


def _numbers(option: str, given: str) -> list[int]:
    texts = _texts(given)
    if not texts or not all(text.isdecimal() for text in texts):
        raise InvalidArgument(f"{option} {given!r} is not allowed; give whole numbers by commas, for example 1,2,4")
    return [int(text) for text in texts]


def _numbers_or_auto(option: str, given: str) -> list[int | str]:
    texts = _texts(given)
    if not texts or not all(text.isdecimal() or text == AUTO for text in texts):
        raise InvalidArgument(
            f"{option} {given!r} is not allowed; give whole numbers, or {AUTO}, by commas, for example 1,2,4,{AUTO}"
        )
    return [text if text == AUTO else int(text) for text in texts]


def _tolerances(given: str) -> list[float]:
    try:
        return [float(text) for text in _texts(given)]
    except ValueError:
        raise InvalidArgument(
            f"--auto-tolerance {given!r} is not allowed; give numbers by commas, for example 0.01,0.02"
        ) from None


def _pair(text: str) -> tuple[int | str, int]:
    frames, _, candidates = text.partition("/")
    if not ((frames.isdecimal() or frames == AUTO) and candidates.isdecimal()):
        raise InvalidArgument(f"--pairs {text!r} is not allowed; write N/T, for example 8/30")
    return (frames if frames == AUTO else int(frames)), int(candidates)
