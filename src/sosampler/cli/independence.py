"""`sosampler independence`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sosampler.errors import InvalidArgument


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
