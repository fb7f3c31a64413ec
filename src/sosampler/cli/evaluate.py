"""`sosampler evaluate`, `sosampler independence` and `sosampler report`."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, DEFAULT_TOLERANCE
from sosampler.samplers.registry import samplers_in_words


def evaluate_command(
    bank: Annotated[Path, Argument(help="A bank with the outputs of a classifier.")],
    policies: Annotated[
        str | None,
        Option(
            help="Separated by commas: uniform, random, centre, frameexit, all, keyframe, frame-difference, "
            "difference-peaks, motion-uniform, farthest-first, dpp, kts, thumbnail, general, general-text; the "
            "oracles semi-optimal, semi-optimal-max, attainable, class-frames, optimal; folders of samplers, also as "
            "NAME=FOLDER; MODULE:CLASS. +mmr or +dpp behind a folder or a policy with scores avoids redundant frames;"
            " +aks, +its or +nms spreads the choice in time; FOLDER+answer is the sampler's own answer, without the "
            "classifier; FOLDER+mean, FOLDER+weighted, FOLDER+fused and FOLDER+probed are rows with these "
            "answers. Folders of baselines too: FOLDER@VALUE sets their threshold, FOLDER@all evaluates all its "
            "values.  [default: uniform,random,all,semi-optimal-max,semi-optimal,optimal]"
        ),
    ] = None,
    policy: Annotated[list[str] | None, Option("--policy", "-p", help="One policy; may be repeated.")] = None,
    num_frames: Annotated[
        str, Option("-n", "--num-frames", help="N, or several separated by commas; with auto, samplers decide on N.")
    ] = "6",
    num_candidates: Annotated[str, Option("-t", "--num-candidates", help="T, or several separated by commas.")] = "10",
    pairs: Annotated[str | None, Option(help="Instead, N/T pairs separated by commas, for example 8/30,16/60.")] = None,
    classifier: Annotated[
        str | None, Option("--classifier", "-c", help="Folder of the saved classifier, or name of a teacher.")
    ] = None,
    views: Annotated[int | None, Option(help="Which teacher, where the bank has outputs for several views.")] = None,
    split: Annotated[str | None, Option(help="train, dev or test.  [default: test, else dev, else train]")] = None,
    seed: Annotated[int, Option(help="Seed of the random policy and the bootstrap.")] = 0,
    bootstrap: shared.Bootstrap = 2000,
    beam_width: Annotated[int, Option(help="Beam width of the optimal policy where a classifier must be run.")] = 16,
    auto_min: shared.AutoMin = None,
    auto_max: shared.AutoMax = None,
    auto_tolerance: Annotated[
        str | None,
        Option(
            help="Expected loss that -n auto accepts for fewer frames, or several separated by commas.  "
            f"[default: {DEFAULT_TOLERANCE}]"
        ),
    ] = None,
    auto_sure: shared.AutoSure = None,
    answer: shared.Answer = None,
    device: shared.Device = None,
    precision: shared.Precision = None,
    csv: Annotated[Path | None, Option(help="Write the rows into this file.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="Write everything into this JSON file.")] = None,
    curve: Annotated[Path | None, Option(help="Draw accuracy against cost into this .svg or .png file.")] = None,
    run: Annotated[Path | None, Option(help="Folder for results of every video, for `sosampler report`.")] = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Measure policies on the videos of a bank.

    Policies, trained samplers and baselines are compared by accuracy, cost and their distance to the optimum.
    """
    options = shared.without(locals(), "policies", "policy", "csv", "out", "curve", "run", "overwrite", "json_output")
    names = [*shared.listed(policies), *(policy or [])]
    if policies is not None and not shared.listed(policies):
        raise InvalidArgument("--policies is empty; name some policies, or leave it out for the default")
    if names:
        options["policies"] = names
    options["num_frames"] = _numbers("-n", num_frames, or_auto=True)
    options["num_candidates"] = _numbers("-t", num_candidates)
    if auto_tolerance is not None:
        options["auto_tolerance"] = _floats("--auto-tolerance", auto_tolerance, "0.01,0.02")
    if pairs is not None:
        options["pairs"] = [_pair(text) for text in shared.listed(pairs)]
    _check_files({"--csv": csv, "--out": out, "--curve": curve})
    if run is not None:
        _check_folder("--run", run)

    from sosampler import evaluate  # raises with what to install

    with ExitStack() as stack:
        _hold_files(stack, csv, out, curve, run, overwrite=overwrite)
        with shared.show_progress("evaluating") as on_progress:
            evaluation = evaluate(**options, on_progress=on_progress, say=lambda text: shared.say(f"note: {text}"))
        # Printed first, so that the numbers are not lost if a file cannot be written.
        if json_output:
            typer.echo(json.dumps(evaluation.to_dict()))
        else:
            facts = evaluation.facts
            shared.say(f"{facts['num_videos']} videos of {facts['split']}, classifier {facts['teacher']['name']}")
            typer.echo(evaluation.table())
            if titles := samplers_in_words(facts.get("samplers")):
                shared.say(titles)
        for name, path in {"csv": csv, "json": out, "curve": curve, "run": run}.items():
            if path is not None:
                getattr(evaluation, f"write_{name}")(path)


def _hold_files(
    stack: ExitStack, csv: Path | None, out: Path | None, curve: Path | None, run: Path | None, *, overwrite: bool
) -> None:
    """Refuse files of others, and a second evaluation that writes the same, until the stack is closed."""
    from sosampler._util.files import check_replaceable, is_json_with, remove_leftovers, starts_with
    from sosampler._util.locks import locked_file, locked_folder
    from sosampler.evaluation.result import CSV_BEGIN, EVALUATION_FILE, VIDEOS_FILE

    own = {out: is_json_with("rows", "num_candidates"), csv: starts_with(CSV_BEGIN)}
    for path in (path for path in (csv, out, curve) if path is not None):
        if path in own:
            check_replaceable(path, "an evaluation", own[path], overwrite=overwrite)
        stack.enter_context(locked_file(path))
    if run is not None:
        file = run / EVALUATION_FILE
        check_replaceable(file, "an evaluation", is_json_with("rows", "num_candidates"), overwrite=overwrite)
        stack.enter_context(locked_folder(run))
        remove_leftovers(file, run / VIDEOS_FILE)


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


def _numbers(option: str, given: str, *, or_auto: bool = False) -> list[Any]:
    texts = shared.listed(given)
    if not texts or not all(text.isdecimal() or (or_auto and text == AUTO) for text in texts):
        allowed, example = (f"ints or {AUTO}", f"1,2,4,{AUTO}") if or_auto else ("ints", "1,2,4")
        raise InvalidArgument(f"{option} {given!r} must be {allowed} separated by commas, for example {example}")
    return [text if text == AUTO else int(text) for text in texts]


def _floats(option: str, given: str, example: str) -> list[float]:
    try:
        return [float(text) for text in shared.listed(given)]
    except ValueError:
        raise InvalidArgument(
            f"{option} {given!r} must be numbers separated by commas, for example {example}"
        ) from None


def _pair(text: str) -> tuple[int | str, int]:
    frames, _, candidates = text.partition("/")
    if not ((frames.isdecimal() or frames == AUTO) and candidates.isdecimal()):
        raise InvalidArgument(f"--pairs {text!r} must be N/T, for example 8/30")
    return (frames if frames == AUTO else int(frames)), int(candidates)


# ---- `sosampler independence` and `sosampler report`


def independence_command(
    videos: Annotated[list[str], Argument(help="Videos, folders of videos, one manifest (CSV, JSONL), or one bank.")],
    classifier: Annotated[
        list[str],
        Option("--classifier", "-c", help="Network of the features: a name or a saved folder; may be repeated."),
    ],
    weights: Annotated[list[str] | None, Option(help="Weights: a file for each --classifier, or 'none'.")] = None,
    rates: Annotated[str | None, Option(help="Frames a second, such as 0.5,1,2,4.  [default: 0.1 to 25]")] = None,
    moments: Annotated[int, Option(help="Maximum number of pairs of a video at each rate.")] = 16,
    max_videos: Annotated[int, Option(help="Maximum number of videos; drawn by --seed.")] = 100,
    seed: Annotated[int, Option(help="Seed of the videos that are drawn.")] = 0,
    device: shared.Device = None,
    precision: shared.Precision = None,
    out: Annotated[Path | None, Option("--out", "-o", help="Folder for independence.json and .png.")] = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Find the frame rate up to which frames are independent.

    Exit code 1 if some videos could not be read.
    """
    options = shared.without(locals(), "videos", "classifier", "weights", "rates", "out", "overwrite", "json_output")
    from sosampler import independence  # raises with what to install

    if rates is not None:
        options["rates"] = _floats("--rates", rates, "0.5,1,2,4")
    if weights:
        options["weights"] = [None if file.lower() == "none" else file for file in weights]
    with ExitStack() as stack:
        if out is not None:  # fails before the long work
            from sosampler._util.files import check_replaceable, is_json_with, remove_leftovers
            from sosampler._util.locks import locked_folder

            values = out / "independence.json"
            check_replaceable(values, "such a result", is_json_with("rows", "classifiers"), overwrite=overwrite)
            stack.enter_context(locked_folder(out))
            remove_leftovers(values, out / "independence.png")
        measured = independence(
            videos[0] if len(videos) == 1 else videos, classifiers=classifier, **options, say=shared.say
        )
        written = [] if out is None else [str(path) for path in measured.write(out)]
    shared.say_failures(measured.failures)
    text = "\n".join([measured.table(), *(f"wrote {path}" for path in written)])
    shared.echo({**measured.to_dict(), "files": written}, text, json_output)
    raise typer.Exit(1 if measured.failures else 0)


def report_command(
    runs: Annotated[
        list[Path],
        Argument(
            help="Folders of `sosampler evaluate --run`, `demo`, `reproduce` or `independence`, or the JSON file of an "
            "evaluation."
        ),
    ],
    out: Annotated[Path, Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    title: Annotated[str | None, Option(help="Title of the page.")] = None,
    videos: Annotated[int, Option(help="Maximum number of videos shown of each run.")] = 12,
    bank: Annotated[Path | None, Option(help="Bank with the frames, if it is not where the run names it.")] = None,
    overwrite: shared.Replace = False,
    json_output: shared.Json = False,
) -> None:
    """Make one HTML page of one or several runs.

    It has the main comparison, tables, curves, and videos with the chosen frames.
    """
    from sosampler._util.files import check_replaceable
    from sosampler._util.locks import locked_file
    from sosampler.paper.page import experiments_part
    from sosampler.report.page import is_report
    from sosampler.report.run_report import write_run_report

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        shared.say(f"note: {text}")

    check_replaceable(out, "a report", is_report, overwrite=overwrite)
    options: dict[str, Any] = {"title": title, "videos": videos, "bank": bank}
    with locked_file(out):
        path = write_run_report(runs, out, **options, experiments=experiments_part, say=note)
    size = path.stat().st_size
    result = {"report": str(path), "bytes": size, "notes": notes}
    shared.echo(result, f"{path}: {size / 1e6:.1f} MB", json_output, err=True)
