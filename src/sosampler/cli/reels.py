"""`sosampler reels` and `sosampler demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument

_MOVES = ("pan", "zoom", "blur", "fade")


def reels_command(
    pictures: Annotated[
        str,
        Argument(
            help="A folder with one folder of pictures per class, or with train and test that hold such folders, and "
            "a folder 'distractors' beside them. Or: procedural. For streams: a manifest of video clips."
        ),
    ],
    out: Annotated[Path, Option(help="Folder to write to; a run that was killed resumes.")],
    to: Annotated[str, Option(help="bank (candidate frames alone) or mp4 (files and a manifest).")] = "bank",
    preset: Annotated[
        str, Option(help="demo, sports22, or of clips: streams, long-streams; the options below change it.")
    ] = "demo",
    background: Annotated[
        list[Path] | None,
        Option(help="Of streams: a manifest or folder of videos without a class; repeatable. Rows without label too."),
    ] = None,
    classifier_share: Annotated[
        float, Option(help="Of streams: share of the train and dev groups set apart, in classifier.csv.")
    ] = 0.5,
    count_train: Annotated[int | None, Option(help="Reels to train on.  [default: 300; sports22: 2700]")] = None,
    count_dev: Annotated[int | None, Option(help="Reels to validate on.  [default: 100; sports22: 300]")] = None,
    count_test: Annotated[int | None, Option(help="Reels to test on.  [default: 100; sports22: 3000]")] = None,
    classes: Annotated[int | None, Option(help="Of procedural pictures.  [default: 8]")] = None,
    num_shots: Annotated[tuple[int, int] | None, Option(help="Min. and max. number of shots of a reel.")] = None,
    share: Annotated[
        tuple[float, float] | None, Option(help="Min. and max. share of shots (streams: of time) with the class.")
    ] = None,
    min_class_shots: Annotated[int | None, Option(help="Min. number of shots with the class.")] = None,
    seconds_per_shot: Annotated[tuple[float, float] | None, Option(help="Min. and max. seconds of a shot.")] = None,
    fps: Annotated[int | None, Option(help="Frames per second.")] = None,
    num_candidates: Annotated[int | None, Option("-t", "--num-candidates", help="Frames stored of each reel.")] = None,
    size: Annotated[int | None, Option(help="Side of the frames in pixels.")] = None,
    pan: Annotated[float | None, Option(help="Max. camera move, as a share of its view.")] = None,
    zoom: Annotated[float | None, Option(help="Max. change of the view's size, as a share.")] = None,
    blur: Annotated[float | None, Option(help="Max. blur, as a share of the frame.")] = None,
    fade: Annotated[float | None, Option(help="Max. length of a dissolve, as a share of a shot.")] = None,
    fades: Annotated[float | None, Option(help="Of streams: share of the cuts that are dissolves.")] = None,
    no_moves: Annotated[bool, Option("--no-moves", help="No pan, zoom, blur or fade.")] = False,
    quality: Annotated[int, Option(help="JPEG quality of a bank, 1 to 100.")] = 90,
    crf: Annotated[int, Option(help="x264 quality of mp4 files, 0 to 51.")] = 18,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
    workers: Annotated[
        int | None, Option(help="Processes that render for a bank, or write streams.  [default: one per core]")
    ] = None,
    json_output: shared.Json = False,
) -> None:
    """Make labelled untrimmed videos from pictures or clips: shots of a class among shots of something else."""
    ranges = shared.given(locals(), "num_shots", "share", "seconds_per_shot")
    moves = shared.given(locals(), *_MOVES)
    changes = shared.given(locals(), "min_class_shots", "fps", "num_candidates", "size", "fades")
    from sosampler.datasets.manifest import Manifest
    from sosampler.reels.make import default_counts, make_reels

    # One number for a range without width, as in recipes.
    changes |= {name: low if low == high else (low, high) for name, (low, high) in ranges.items()}
    if no_moves and moves:
        stray = ", ".join(f"--{name}" for name in moves)
        raise InvalidArgument(f"{stray} cannot be given with --no-moves; give one or the other")
    changes |= dict.fromkeys(_MOVES, 0.0) if no_moves else moves
    given = {"train": count_train, "dev": count_dev, "test": count_test}
    counts = default_counts(preset) | shared.given(given, *given)
    with shared.show_progress("making reels") as on_progress:
        made = make_reels(
            pictures,
            out,
            to=to,
            preset=preset,
            recipe=changes,
            counts=counts,
            seed=seed,
            num_classes=classes,
            background=background,
            classifier_share=classifier_share,
            quality=quality,
            crf=crf,
            workers=workers,
            say=shared.say,
            on_progress=on_progress,
        )
    if isinstance(made, Manifest):
        manifest = str(out / "manifest.csv")
        num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        result = {"path": str(out), "manifest": manifest, **made.counts(), "bytes": num_bytes}
        shared.echo(result, f"{manifest}: {made!r}", json_output)
        raise typer.Exit(1 if len(made) < sum(counts.values()) else 0)
    from sosampler.bank.inspect import bank_info

    typer.echo(json.dumps(bank_info(out)) if json_output else f"{made!r}")


@shared.stoppable()
def demo_command(
    out: Annotated[Path, Option("--out", "-o", help="A new folder; a killed demonstration resumes in it.")] = Path(
        "demo"
    ),
    seed: Annotated[int, Option(help="Seed of images and networks.")] = 0,
    json_output: Annotated[bool, Option("--json", help="Print the evaluation as one JSON object.")] = False,
) -> None:
    """Run everything once on synthetic videos.

    It trains a classifier, prepares a bank, trains a sampler, compares all policies and writes a report.
    """
    from sosampler.demo import run_demo

    result = run_demo(out, seed=seed, say=lambda text: typer.echo(text, err=json_output))
    if json_output:
        typer.echo(json.dumps(result))
