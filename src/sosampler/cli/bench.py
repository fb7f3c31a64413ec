"""`sosampler bench`."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure speed as ratios in one run.", no_args_is_help=True, rich_markup_mode=None)
