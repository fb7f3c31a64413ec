"""`sosampler reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sosampler.errors import InvalidArgument

LIST = "list"


def reproduce_command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="table1 to table7, tableI, tableII, figure1, 2, 4, I, II, III; all; or list.", metavar="NAME"
        ),
    ],
    bank: Annotated[
        list[str] | None,
        typer.Option(
            "--bank",
            help="[NAME=]FOLDER; may be repeated. As NAME activitynet, mini_kinetics, mini_sports1m or coin puts that "
            "column of the paper beside.",
        ),
    ] = None,
    classifier: Annotated[
        list[str] | None,
        typer.Option(
            "--classifier",
            "-c",
            help="[NAME=] and a saved folder or a teacher of the bank; may be repeated.  [default: all teachers]",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for everything.")] = Path("reproduced"),
    weights: Annotated[
        str | None, typer.Option("--weights", help="Start of the samplers' MobileNetV2: a file, or 'pretrained'.")
    ] = None,
    light: Annotated[
        str | None, typer.Option("--light", help="Light network of systems instead: folder of a sampler, or features.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="By commas; each sampler is trained with each.")] = "0,1,2",
    epochs: Annotated[int | None, typer.Option("--epochs", help="Instead of those of the recipes.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of every sampler's recipe, e.g. batch_size=32.")
    ] = None,
    bootstrap: Annotated[int, typer.Option("--bootstrap", help="Resamples for 95 % intervals; 0 for none.")] = 2000,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: the GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="float32, bfloat16 or float16.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Threads or processes that decode.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tables and figures of the paper from your bank, the paper's own figures beside. Killed, run it again.

    Samplers are trained once, however many tables show them; --out has them, every number, and the tables.
    """
    if LIST in names:
        if len(names) > 1 or bank:
            raise InvalidArgument(f"{LIST} stands alone; leave out the rest, or leave out {LIST}")
        _list(json_output)
        return
    if not bank:
        raise InvalidArgument("--bank is missing; give the folder of a bank, which `sosampler prepare` writes")
    numbers = _seeds(seeds)

    from sosampler.paper.run import reproduce
    from sosampler.samplers.recipe import read_settings

    found = reproduce(
        names,
        bank,
        out=out,
        classifiers=classifier or None,
        weights=weights,
        light=light,
        seeds=numbers,
        epochs=epochs,
        settings=read_settings(setting or []),
        device=device,
        precision=precision,
        workers=workers,
        bootstrap=bootstrap,
        say=lambda text: typer.echo(text, err=True),
    )
    if json_output:
        typer.echo(json.dumps({"results": [{"folder": str(one.folder), **one.result} for one in found]}))
        return
    typer.echo("\n\n".join(one.table() for one in found if not one.refused).rstrip())


def _list(json_output: bool) -> None:
    """All experiments, without torch."""
    from sosampler.paper.experiments import EXPERIMENTS, KINDS

    if json_output:
        told: list[dict[str, Any]] = [
            {"name": one.name, "title": one.title, "makes": KINDS[one.kind], "claim": one.claim, "data": list(one.data)}
            for one in EXPERIMENTS.values()
        ]
        typer.echo(json.dumps({"experiments": told}))
        return
    width = max(len(name) for name in EXPERIMENTS)
    for one in EXPERIMENTS.values():
        typer.echo(f"{one.name:<{width}}  {one.title}; {KINDS[one.kind]}; in the paper: {', '.join(one.data)}")


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidArgument(f"--seeds {text!r} is not allowed; give whole numbers by commas, for example 0,1,2")
    return [int(part) for part in parts]
