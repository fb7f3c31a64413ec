"""`sosampler export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export_command(
    sampler: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a trained sampler, or its id on the Hugging Face hub.")
    ],
    format: Annotated[str, typer.Option("--format", "-f", help="onnx, torch-export or openvino.")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A file (.onnx, .pt2, .xml) or a folder.  [default: RUN/model.onnx, ...]"),
    ] = None,
    half: Annotated[
        bool, typer.Option("--half", help="Round weights to half precision: files of half the size.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trained sampler for another runtime, for any number of videos and candidates.

    model.onnx in the sampler's own folder is what `select --policy RUN` runs where torch is not installed.
    """
    from sosampler.checks import one_of
    from sosampler.export.formats import SUFFIXES

    one_of("--format", format, SUFFIXES)
    from sosampler.export import export_sampler

    done = export_sampler(sampler, format=format, out=out, half=half)
    if json_output:
        typer.echo(json.dumps(done.to_dict()))
    else:
        typer.echo(
            f"{done.file}: {done.bytes / 1e6:.1f} MB; its scores differ from torch's by {done.difference:.1e} at most",
            err=True,
        )
