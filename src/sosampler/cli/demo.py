"""`sosampler demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    out: Annotated[
        Path, typer.Option("--out", help="A new folder for everything; run again, it goes on where it was killed.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option("--seed", help="Other pictures, other networks.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the evaluation as one JSON object.")] = False,
) -> None:
    """Everything once, on drawn videos: a classifier, a bank, a trained sampler, all policies compared, a report."""
    from sosampler.demo import run_demo

    told = run_demo(out, seed=seed, say=lambda text: typer.echo(text, err=json_output))
    if json_output:
        typer.echo(json.dumps(told))
