"""`sosampler datasets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sosampler.cli import options as shared
from sosampler.errors import InvalidArgument

app = typer.Typer(help="Public data sets, and manifests made from their official files.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def list_command(context: typer.Context, json_output: shared.Json = False) -> None:
    """List the public data sets that can be imported: videos, classes, metric, where to get them."""
    if context.invoked_subcommand is not None:
        return
    from sosampler.datasets.catalog import CATALOG, FRAME_LISTS

    if json_output:
        typer.echo(json.dumps({"datasets": [known.to_dict() for known in CATALOG]}))
        return
    typer.echo(f"{'name':<18}{'videos':>10}{'classes':>9}  {'metric':<8}{'import':<13}where")
    for known in CATALOG:
        typer.echo(
            f"{known.name:<18}{known.videos:>10,}{known.classes:>9}  {known.metric:<8}{known.reader:<13}{known.where}"
        )
        typer.echo(f"{'':<18}{known.files}")
    typer.echo(FRAME_LISTS)


@app.command("import")
def import_command(
    dataset: Annotated[str, Argument(help="activitynet, kinetics, sports1m, coin or frames.")],
    annotations: Annotated[list[str], Argument(help="Official files; FILE=train, dev, test if the name has no split.")],
    videos: Annotated[Path, Option(help="Folder with the videos or frame folders, at any depth.")],
    out: Annotated[Path, Option(help="Manifest to write, .csv or .jsonl.")],
    classes: Annotated[Path | None, Option(help="Class names, one a line: classes of numbers, or their order.")] = None,
    subset: Annotated[
        list[Path] | None, Option(help="File that names classes or videos to import; repeatable.")
    ] = None,
    segments: Annotated[
        bool, Option("--segments", help="Write start and end: Kinetics in whole videos, COIN's annotated part.")
    ] = False,
    split_map: Annotated[
        list[str] | None, Option("--map", help="SUBSET=SPLIT, as validation=dev; by default validation is test.")
    ] = None,
    layout: Annotated[str, Option(help="Frame lists: auto, count (dir n label), range, video (file label).")] = "auto",
    dev_share: Annotated[float, Option(help="Share of train that becomes dev.")] = 0.0,
    seed: Annotated[int, Option(help="Random seed of the dev split.")] = 0,
    exclusive: shared.Exclusive = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace OUT where it exists.")] = False,
    json_output: shared.Json = False,
) -> None:
    """Turn a data set's official files into a manifest. Missing videos are counted and listed in OUT.missing.txt."""
    options = shared.without(
        locals(), "dataset", "annotations", "subset", "split_map", "out", "overwrite", "json_output"
    )
    from sosampler._util.files import check_replaceable
    from sosampler._util.locks import locked_file
    from sosampler.datasets.importers.build import check_out, import_dataset, missing_list

    check_out(out, [*map(Path, annotations), *(subset or []), *([classes] if classes else [])])
    # A manifest that was written by hand looks the same, but has no list of missing videos beside it.
    check_replaceable(out, "an imported data set", lambda file: missing_list(file).exists(), overwrite=overwrite)
    mapping = {}
    for pair in split_map or []:
        word, equals, split = pair.partition("=")
        if not word or not equals:
            raise InvalidArgument(f"--map {pair!r} is not SUBSET=SPLIT; write for example --map validation=dev")
        mapping[word] = split
    imported = import_dataset(dataset, annotations, subset=subset or (), split_map=mapping, **options)
    with locked_file(out):
        classes_file, missing_file = imported.write(out)
    files = {"classes_file": str(classes_file), "missing_file": str(missing_file)}
    result = {"dataset": dataset, "out": str(out), **files, **imported.to_dict()}
    shared.echo(result, _describe(result), json_output)


def _describe(result: dict[str, Any]) -> str:
    splits = ", ".join(f"{count} {name}" for name, count in result["splits"].items())
    lines = [
        f"{result['videos']} videos of {result['classes']} classes ({splits}) written to {result['out']}",
        f"classes in {result['classes_file']}",
        f"{result['missing']} videos are missing, listed in {result['missing_file']}",
    ]
    notes = {
        "unlabelled": "without a label, not imported",
        "overlapping": "removed from training, since their video is also in a later split",
        "repeated": "further lines about the same video",
        "unknown_in_subset": "lines of the subset that name no video of the data set",
    }
    return "\n".join(lines + [f"{result[name]} {text}" for name, text in notes.items() if result[name]])
