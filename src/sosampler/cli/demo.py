"""`sosampler demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A new folder; a killed demonstration resumes in it.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of images and networks.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the evaluation as one JSON object.")] = False,
) -> None:
    """Run everything once on synthetic videos.

    It trains a classifier, prepares a bank, trains a sampler, compares all policies and writes a report.
    """
    from sosampler.demo import run_demo

    result = run_demo(out, seed=seed, say=lambda text: typer.echo(text, err=json_output))
    if json_output:
        typer.echo(json.dumps(result))
