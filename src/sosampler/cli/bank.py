"""`sosampler bank`: information about a bank, checks of its files, and subsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Inspect, check and copy a bank that `prepare` wrote.", no_args_is_help=True, rich_markup_mode=None
)

BankArgument = Annotated[Path, typer.Argument(help="The bank's folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("info")
def info_command(bank: BankArgument, json_output: JsonOption = False) -> None:
    """Show videos, classes, splits, settings, teachers, features and size."""
    from sosampler.bank.inspect import bank_info

    info = bank_info(bank)
    typer.echo(json.dumps(info) if json_output else _described(info))


@app.command("verify")
def verify_command(
    bank: BankArgument,
    json_output: JsonOption = False,
) -> None:
    """Read all files and report what is damaged or missing; exit code 1 if something is."""
    from sosampler.bank.inspect import verify_bank

    problems = verify_bank(bank)
    if json_output:
        typer.echo(json.dumps({"path": str(bank), "sound": not problems, "problems": problems}))
    else:
        typer.echo("\n".join(problems) if problems else f"{bank}: sound")
    raise typer.Exit(1 if problems else 0)


@app.command("subset")
def subset_command(
    bank: BankArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for the smaller bank.")],
    limit: Annotated[int | None, typer.Option("--limit", help="Max. number of videos, spread over classes.")] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--classes", help="Only videos of this class; may be repeated.")
    ] = None,
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="Only train, dev or test; may be repeated.")
    ] = None,
    max_mb: Annotated[float | None, typer.Option("--max-mb", help="Max. size on disk in megabytes.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Copy some of the videos into a smaller bank."""
    from sosampler.bank.inspect import bank_info
    from sosampler.bank.subset import subset
    from sosampler.cli.options import show_progress

    with show_progress("copying") as on_progress:
        subset(
            bank,
            out,
            limit=limit,
            classes=classes or None,
            splits=splits or None,
            max_mb=max_mb,
            on_progress=on_progress,
        )
    info = bank_info(out)
    typer.echo(json.dumps(info) if json_output else _described(info))


def _described(info: dict[str, Any]) -> str:
    splits = ", ".join(f"{count} {name}" for name, count in info["splits"].items())
    state = (
        "" if info["complete"] else f"  NOT FINISHED: {info['shards']['finished']} of {info['shards']['total']} shards"
    )
    lines = [
        f"{info['path']}: {info['num_videos']} videos ({splits or 'none'}), {info['num_failed']} failed{state}",
        f"  {info['num_classes']} classes{', several per video' if info['multi_label'] else ''}: "
        + ", ".join(info["classes"][:8])
        + (", ..." if info["num_classes"] > 8 else ""),
        f"  {info['num_frames'] or 'unknown'} frames, {info['bytes'] / 1e6:.1f} MB, from {info['source']}",
        "  " + ", ".join(f"{key}={value}" for key, value in info["settings"].items() if value is not None),
    ]
    for teacher in info["teachers"]:
        stored = teacher["features"]
        features = f", {stored['width']} features in {stored['precision']}" if stored else ""
        lines.append(
            f"  teacher {teacher['folder']}: {teacher['name']}, views={teacher['views']}{features}, "
            f"{teacher['bytes'] / 1e6:.1f} MB{'' if teacher['complete'] else ', NOT FINISHED'}"
        )
    for features in info["features"]:
        lines.append(
            f"  features {features['name']}: {features['width']} in {features['precision']} of the "
            f"{features['network']} {features['network_name']}, {features['gmacs']:.3g} GMACs per frame, "
            f"{features['bytes'] / 1e6:.1f} MB{'' if features['complete'] else ', NOT FINISHED'}"
        )
    return "\n".join(lines)
