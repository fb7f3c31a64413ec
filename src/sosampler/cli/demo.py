"""`sosampler demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    out: Annotated[Path, typer.Option("--out", help="Folder for the video, the pictures and the JSON.")] = Path("demo"),
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a small film, choose frames from it in three ways and draw them."""
    from sosampler.demo import run_demo

    result = run_demo(out)
    if json_output:
        typer.echo(json.dumps(result))
        return
    for row in result["rows"]:
        shown = ", ".join(f"{seconds:.2f}" for seconds in row["pts_seconds"])
        typer.echo(
            f"{row['policy']:>16} ({row['candidates']['mode']}): {shown} s, {row['timing']['total'] * 1000:.0f} ms"
        )
    typer.echo(f"video {result['video']}, picture {result['contact_sheet']}, details {result['json']}")
