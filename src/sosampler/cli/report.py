"""`sosampler report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `sosampler evaluate --run`, `demo`, `reproduce` or `independence`, or the JSON file of an "
            "evaluation."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    videos: Annotated[int, typer.Option("--videos", help="Maximum number of videos shown of each run.")] = 12,
    bank: Annotated[
        Path | None, typer.Option("--bank", help="Bank with the frames, if it is not where the run names it.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make one HTML page of one or several runs.

    It has the main comparison, tables, curves, and videos with the chosen frames.
    """
    from sosampler.paper.page import experiments_part
    from sosampler.report.run_report import write_run_report

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        typer.echo(f"note: {text}", err=True)

    path = write_run_report(runs, out, title=title, videos=videos, bank=bank, experiments=experiments_part, say=note)
    size = path.stat().st_size
    if json_output:
        typer.echo(json.dumps({"report": str(path), "bytes": size, "notes": notes}))
    else:
        typer.echo(f"{path}: {size / 1e6:.1f} MB", err=True)
