"""`sosampler reels`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def reels_command(
    pictures: Annotated[
        str,
        typer.Argument(
            help="A folder with one folder of pictures per class, or with train and test that hold such folders, and "
            "a folder 'distractors' beside them. Or: procedural."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; a run that was killed resumes.")],
    to: Annotated[str, typer.Option("--to", help="bank (candidate frames alone) or mp4 (files and a manifest).")] = (
        "bank"
    ),
    preset: Annotated[str, typer.Option("--preset", help="demo or sports22; the options below change it.")] = "demo",
    count_train: Annotated[
        int | None, typer.Option("--count-train", help="Reels to train on.  [default: 300; sports22: 2700]")
    ] = None,
    count_dev: Annotated[
        int | None, typer.Option("--count-dev", help="Reels to validate on.  [default: 100; sports22: 300]")
    ] = None,
    count_test: Annotated[
        int | None, typer.Option("--count-test", help="Reels to test on.  [default: 100; sports22: 3000]")
    ] = None,
    classes: Annotated[int | None, typer.Option("--classes", help="Of procedural pictures.  [default: 8]")] = None,
    num_shots: Annotated[
        tuple[int, int] | None, typer.Option("--num-shots", help="Min. and max. number of shots of a reel.")
    ] = None,
    share: Annotated[
        tuple[float, float] | None, typer.Option("--share", help="Min. and max. share of shots with the class.")
    ] = None,
    min_class_shots: Annotated[
        int | None, typer.Option("--min-class-shots", help="Min. number of shots with the class.")
    ] = None,
    seconds_per_shot: Annotated[
        tuple[float, float] | None, typer.Option("--seconds-per-shot", help="Min. and max. seconds of a shot.")
    ] = None,
    fps: Annotated[int | None, typer.Option("--fps", help="Frames per second.")] = None,
    num_candidates: Annotated[
        int | None, typer.Option("-t", "--num-candidates", help="Frames that a bank stores of each reel.")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", help="Side of the frames in pixels.")] = None,
    pan: Annotated[float | None, typer.Option("--pan", help="Max. camera move, as a share of its view.")] = None,
    zoom: Annotated[float | None, typer.Option("--zoom", help="Max. change of the view's size, as a share.")] = None,
    blur: Annotated[float | None, typer.Option("--blur", help="Max. blur, as a share of the frame.")] = None,
    fade: Annotated[
        float | None, typer.Option("--fade", help="Max. length of a dissolve, as a share of a shot.")
    ] = None,
    no_moves: Annotated[bool, typer.Option("--no-moves", help="No pan, zoom, blur or fade.")] = False,
    quality: Annotated[int, typer.Option("--quality", help="JPEG quality of a bank, 1 to 100.")] = 90,
    crf: Annotated[int, typer.Option("--crf", help="x264 quality of mp4 files, 0 to 51.")] = 18,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that render for a bank.  [default: one per core]")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make labelled untrimmed videos from pictures: shots of a class among shots of something else."""
    from sosampler.cli.options import show_progress
    from sosampler.datasets.manifest import Manifest
    from sosampler.reels.make import default_counts, make_reels

    changes: dict[str, Any] = {
        "num_shots": _narrow(num_shots),
        "share": _narrow(share),
        "min_class_shots": min_class_shots,
        "seconds_per_shot": _narrow(seconds_per_shot),
        "fps": fps,
        "num_candidates": num_candidates,
        "size": size,
        **_moves({"pan": pan, "zoom": zoom, "blur": blur, "fade": fade}, no_moves),
    }
    counts = {"train": count_train, "dev": count_dev, "test": count_test}
    given = {split: count for split, count in counts.items() if count is not None}
    with show_progress("making reels") as on_progress:
        made = make_reels(
            pictures,
            out,
            to=to,
            preset=preset,
            recipe={name: value for name, value in changes.items() if value is not None},
            counts={**default_counts(preset), **given},
            seed=seed,
            num_classes=classes,
            quality=quality,
            crf=crf,
            workers=workers,
            on_progress=on_progress,
        )
    if isinstance(made, Manifest):
        manifest = str(out / "manifest.csv")
        result = {"path": str(out), "manifest": manifest, **made.counts(), "bytes": _bytes_below(out)}
        typer.echo(json.dumps(result) if json_output else f"{manifest}: {made!r}")
        return
    from sosampler.bank.inspect import bank_info

    typer.echo(json.dumps(bank_info(out)) if json_output else f"{made!r}")


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _narrow(pair: tuple[Any, Any] | None) -> Any:
    """Return one number for a range without width, as in recipes."""
    return pair[0] if pair is not None and pair[0] == pair[1] else pair


def _moves(given: dict[str, float | None], no_moves: bool) -> dict[str, float | None]:
    if not no_moves:
        return given
    stray = [f"--{name}" for name, value in given.items() if value is not None]
    if stray:
        from sosampler.errors import InvalidArgument

        raise InvalidArgument(f"{', '.join(stray)} cannot be given with --no-moves; give one or the other")
    return dict.fromkeys(given, 0.0)
