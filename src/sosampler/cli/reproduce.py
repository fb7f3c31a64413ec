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
            help="[NAME=]FOLDER; may be repeated. The NAME activitynet, mini_kinetics, mini_sports1m or coin puts that "
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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the results.")] = Path("reproduced"),
    weights: Annotated[
        str | None, typer.Option("--weights", help="Start of the samplers' MobileNetV2: a file, or 'pretrained'.")
    ] = None,
    light: Annotated[
        str | None,
        typer.Option("--light", help="Light network of baselines: folder of a sampler, or features of the bank."),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Separated by commas; each sampler is trained with each.")
    ] = "0,1,2",
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained and evaluated, and write nothing.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make the paper's tables and figures from your bank.

    The paper's own figures stand beside. Each sampler is trained once, however many tables show it. A killed run
    resumes when it is started again.
    """
    if LIST in names:
        if len(names) > 1 or bank:
            raise InvalidArgument(f"{LIST} is given with other names; give it alone, or leave it out")
        _list(json_output)
        return
    if not bank:
        raise InvalidArgument("--bank is missing; give the folder of a bank, which `sosampler prepare` writes")
    parts = [part.strip() for part in seeds.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidArgument(f"--seeds {seeds!r} must be numbers separated by commas, for example 0,1,2")

    from sosampler.paper.run import plan_reproduction, reproduce
    from sosampler.samplers.recipe import read_settings

    arguments: dict[str, Any] = {
        "out": out,
        "classifiers": classifier or None,
        "weights": weights,
        "light": light,
        "seeds": [int(part) for part in parts],
        "epochs": epochs,
        "settings": read_settings(setting or []),
        "device": device,
        "precision": precision,
        "workers": workers,
        "bootstrap": bootstrap,
        "say": lambda text: typer.echo(text, err=True),
    }
    if dry_run:
        plans = plan_reproduction(names, bank, **arguments)
        typer.echo(json.dumps({"dry_run": True, "plans": plans}) if json_output else _plan_text(plans))
        return
    reproductions = reproduce(names, bank, **arguments)
    if json_output:
        typer.echo(json.dumps({"results": [{"folder": str(one.folder), **one.result} for one in reproductions]}))
        return
    typer.echo("\n\n".join(one.table() for one in reproductions if not one.refused).rstrip())


def _plan_text(plans: list[dict[str, Any]]) -> str:
    """Return one paragraph for each experiment, and at the end what is missing in all."""
    lines = []
    trainings: dict[str, str] = {}
    for plan in plans:
        lines.append(f"{plan['experiment']} ({plan['bank']['name']}, {plan['classifier']}): {plan['title']}")
        lines.append(f"  {plan['state']:<9} {plan['folder']}")
        if plan["refused"]:
            lines.append(f"  cannot be made: {plan['refused']}")
            continue
        trainings |= {training["folder"]: training["state"] for training in plan["trainings"]}
        for row in plan["rows"]:
            source = f"training {row['training']}" if row["training"] else f"policy {row['policy']}"
            lines.append(f"  row       {row['title']}, {row['num_frames']} of {row['num_candidates']}: {source}")
        for row in plan["left_out"]:
            lines.append(f"  left out  {row['title']}, {row['num_frames']} of {row['num_candidates']}: {row['why']}")
        lines += [f"  {one['state']:<9} training {one['name']}, seed {one['seed']}" for one in plan["trainings"]]
        lines += [
            f"  {one['state']:<9} evaluation with {one['num_candidates']} candidates" for one in plan["evaluations"]
        ]
    to_train = sum(state != "finished" for state in trainings.values())
    to_evaluate = sum(part["state"] != "finished" for plan in plans for part in plan["evaluations"])
    lines.append(f"{to_train} of {len(trainings)} trainings and {to_evaluate} evaluations are to be run")
    return "\n".join(lines)


def _list(json_output: bool) -> None:
    """Print all experiments, without torch."""
    from sosampler.paper.experiments import EXPERIMENTS, KINDS

    if json_output:
        listed: list[dict[str, Any]] = [
            {"name": one.name, "title": one.title, "makes": KINDS[one.kind], "claim": one.claim, "data": list(one.data)}
            for one in EXPERIMENTS.values()
        ]
        typer.echo(json.dumps({"experiments": listed}))
        return
    width = max(len(name) for name in EXPERIMENTS)
    for one in EXPERIMENTS.values():
        typer.echo(f"{one.name:<{width}}  {one.title}; {KINDS[one.kind]}; in the paper: {', '.join(one.data)}")
