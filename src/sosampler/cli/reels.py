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
            help="A folder with one folder of pictures a class, or with train and test that hold such folders, and "
            "a folder 'distractors' beside them. Or: procedural."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; goes on where it was killed.")],
    to: Annotated[str, typer.Option("--to", help="bank (candidate frames alone) or mp4 (files and a manifest).")] = (
        "bank"
    ),
    preset: Annotated[str, typer.Option("--preset", help="demo or sports22; what follows changes it.")] = "demo",
    count_train: Annotated[
        int | None, typer.Option("--count-train", help="Reels to train on.  [default: 300; sports22: 2700]")
    ] = None,
    count_dev: Annotated[
        int | None, typer.Option("--count-dev", help="Reels to choose by.  [default: 100; sports22: 300]")
    ] = None,
    count_test: Annotated[
        int | None, typer.Option("--count-test", help="Reels to test on.  [default: 100; sports22: 3000]")
    ] = None,
    classes: Annotated[int | None, typer.Option("--classes", help="Of procedural pictures.  [default: 8]")] = None,
    num_shots: Annotated[
        tuple[int, int] | None, typer.Option("--num-shots", help="Least and most shots of a reel.")
    ] = None,
    share: Annotated[
        tuple[float, float] | None, typer.Option("--share", help="Least and most share of shots with the class.")
    ] = None,
    min_class_shots: Annotated[
        int | None, typer.Option("--min-class-shots", help="Every reel shows its class so often.")
    ] = None,
    seconds_per_shot: Annotated[
        tuple[float, float] | None, typer.Option("--seconds-per-shot", help="Least and most seconds of a shot.")
    ] = None,
    fps: Annotated[int | None, typer.Option("--fps", help="Frames a second.")] = None,
    num_candidates: Annotated[
        int | None, typer.Option("-t", "--num-candidates", help="Frames that a bank keeps of each reel.")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", help="Side of the frames in pixels.")] = None,
    pan: Annotated[float | None, typer.Option("--pan", help="Camera moves by this share of its view at most.")] = None,
    zoom: Annotated[float | None, typer.Option("--zoom", help="View grows or shrinks by this share at most.")] = None,
    blur: Annotated[float | None, typer.Option("--blur", help="Blur of this share of the frame at most.")] = None,
    fade: Annotated[float | None, typer.Option("--fade", help="Shots dissolve over this share at most.")] = None,
    no_moves: Annotated[bool, typer.Option("--no-moves", help="No pan, zoom, blur or fade.")] = False,
    quality: Annotated[int, typer.Option("--quality", help="Of a bank's JPEGs, 1 to 100.")] = 90,
    crf: Annotated[int, typer.Option("--crf", help="x264's quality of mp4 files, 0 to 51.")] = 18,
    seed: Annotated[int, typer.Option("--seed", help="Other reels.")] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that render for a bank.  [default: one a core]")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make untrimmed videos with labels out of pictures: shots of a class among shots of something else."""
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
        told = {"path": str(out), "manifest": manifest, **made.counts(), "bytes": _bytes_below(out)}
        typer.echo(json.dumps(told) if json_output else f"{manifest}: {made!r}")
        return
    from sosampler.bank.inspect import bank_info

    typer.echo(json.dumps(bank_info(out)) if json_output else f"{made!r}")


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _narrow(pair: tuple[Any, Any] | None) -> Any:
    """A range without width is one number, as recipes write it."""
    return pair[0] if pair is not None and pair[0] == pair[1] else pair


def _moves(given: dict[str, float | None], none_at_all: bool) -> dict[str, float | None]:
    if not none_at_all:
        return given
    stray = [f"--{name}" for name, value in given.items() if value is not None]
    if stray:
        from sosampler.errors import InvalidArgument

        raise InvalidArgument(f"{', '.join(stray)} was given together with --no-moves; give one or the other")
    return dict.fromkeys(given, 0.0)
