"""`sosampler independence`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def independence_command(
    videos: Annotated[
        list[str], typer.Argument(help="Videos, folders of videos, one manifest (CSV, JSONL), or one bank.")
    ],
    classifier: Annotated[
        list[str],
        typer.Option("--classifier", "-c", help="Whose features: a name or a saved folder; give it again for more."),
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", help="A file with its weights; one for each --classifier, 'none' for none."),
    ] = None,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Frames a second, such as 0.5,1,2,4.  [default: 0.1 to 25]")
    ] = None,
    moments: Annotated[int, typer.Option("--moments", help="Most pairs a video gives at each rate.")] = 16,
    max_videos: Annotated[int, typer.Option("--max-videos", help="More are not looked at; drawn by --seed.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Of the videos that are drawn.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for independence.json and the figure independence.png.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Up to which frame rate do frames stand by themselves? Exit code 1 if some videos could not be read."""
    from sosampler import independence  # says how to install what it needs
    from sosampler.evaluation.independence import RATES

    steps = RATES if rates is None else _numbers(rates)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is told before the long work
    found = independence(
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
    written = [] if out is None else [str(path) for path in found.write(out)]
    for failure in found.failures[:10]:
        typer.echo(f"failed: {failure['error']}", err=True)
    if json_output:
        typer.echo(json.dumps({**found.to_dict(), "files": written}))
    else:
        typer.echo("\n".join([found.table(), *(f"wrote {path}" for path in written)]))
    raise typer.Exit(1 if found.failures else 0)


def _numbers(text: str) -> list[float]:
    from sosampler.errors import InvalidArgument

    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"--rates {text!r} is not allowed; give numbers such as 0.5,1,2,4") from error
