"""`sosampler reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument

LIST = "list"


@shared.stoppable()
def reproduce_command(
    names: Annotated[
        list[str],
        Argument(help="table1 to table7, tableI, tableII, figure1, 2, 4, I, II, III; all; or list.", metavar="NAME"),
    ],
    bank: Annotated[
        list[str] | None,
        Option(
            help="[NAME=]FOLDER; may be repeated. The NAME activitynet, mini_kinetics, mini_sports1m or coin puts that "
            "column of the paper beside."
        ),
    ] = None,
    classifier: Annotated[
        list[str] | None,
        Option(
            "--classifier", "-c", help="[NAME=] and a saved folder or teacher; repeatable.  [default: all teachers]"
        ),
    ] = None,
    out: Annotated[Path, Option("--out", "-o", help="Folder of the results.")] = Path("reproduced"),
    weights: Annotated[str | None, Option(help="Start of the samplers' MobileNetV2: a file, or 'pretrained'.")] = None,
    light: Annotated[str | None, Option(help="Light network: folder of a sampler, or features of the bank.")] = None,
    features: Annotated[
        list[str] | None, Option(help="SET=SOURCE of further networks of baselines, e.g. r34=FOLDER; repeatable.")
    ] = None,
    seeds: Annotated[str, Option(help="Separated by commas; each sampler is trained with each.")] = "0,1,2",
    epochs: Annotated[int | None, Option(help="Instead of those of the recipes.")] = None,
    setting: Annotated[list[str] | None, Option("--set", help="KEY=VALUE of every recipe, e.g. batch_size=32.")] = None,
    bootstrap: shared.Bootstrap = 2000,
    device: shared.Device = None,
    precision: shared.Precision = None,
    workers: Annotated[int | None, Option(min=0, help="Threads or processes that decode.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be run, and write nothing.")] = False,
    json_output: shared.Json = False,
) -> None:
    """Make the paper's tables and figures from your bank.

    The paper's own figures stand beside. SOSampler has three rows: as the paper prints it, as in the authors' code, and
    SOSampler+, this package's recipe, of which the paper has no figure. Each sampler is trained once, however many
    tables show it. A killed run resumes when it is started again.
    """
    arguments = shared.without(locals(), "names", "bank", "classifier", "setting", "dry_run", "json_output")
    if LIST in names:
        if len(names) > 1 or bank:
            raise InvalidArgument(f"{LIST} is given with other names; give it alone, or leave it out")
        _list(json_output)
        return
    if not bank:
        raise InvalidArgument("--bank is missing; give the folder of a bank, which `sosampler prepare` writes")
    parts = shared.listed(seeds)
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidArgument(f"--seeds {seeds!r} must be numbers separated by commas, for example 0,1,2")

    from sosampler.paper.run import plan_reproduction, reproduce
    from sosampler.samplers.recipe import read_settings

    arguments |= {"classifiers": classifier or None, "seeds": [int(part) for part in parts], "say": shared.say}
    arguments["settings"] = read_settings(setting or [])
    arguments["features"] = shared.named_sources(features)
    if dry_run:
        plans = plan_reproduction(names, bank, **arguments)
        shared.echo({"dry_run": True, "plans": plans}, _plan_text(plans), json_output)
        return
    reproductions = reproduce(names, bank, **arguments)
    results = [{"folder": str(one.folder), **one.result} for one in reproductions]
    tables = "\n\n".join(one.table() for one in reproductions if not one.refused)
    shared.echo({"results": results}, tables.rstrip(), json_output)


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
        for row in plan["rows"] + plan["left_out"]:
            source = f"training {row['training']}" if row.get("training") else f"policy {row.get('policy')}"
            shown, what = ("left out", row["why"]) if "why" in row else ("row", source)
            lines.append(f"  {shown:<9} {row['title']}, {row['num_frames']} of {row['num_candidates']}: {what}")
        for one in plan["trainings"]:
            lines.append(f"  {one['state']:<9} training {one['name']}, seed {one['seed']}")
        for one in plan["evaluations"]:
            lines.append(f"  {one['state']:<9} evaluation with {one['num_candidates']} candidates")
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
