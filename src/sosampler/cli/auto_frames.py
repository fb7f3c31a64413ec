"""`-n auto` for every command that chooses frames: its options, and what `-n` may be."""

from __future__ import annotations

from typing import Annotated

import typer

from sosampler.auto_frames import AUTO, DEFAULT_LEAST, DEFAULT_MOST, DEFAULT_TOLERANCE

AutoMin = Annotated[
    int | None, typer.Option("--auto-min", help=f"Least frames of -n auto.  [default: {DEFAULT_LEAST}]")
]
AutoMax = Annotated[int | None, typer.Option("--auto-max", help=f"Most frames of -n auto.  [default: {DEFAULT_MOST}]")]
AutoTolerance = Annotated[
    float | None,
    typer.Option(
        "--auto-tolerance",
        help=f"How much less -n auto may expect for the sake of fewer frames.  [default: {DEFAULT_TOLERANCE}]",
    ),
]


def number_or_auto(text: str) -> int | str:
    """Parses `-n`: a whole number, or "auto".

    >>> number_or_auto("6"), number_or_auto("auto")
    (6, 'auto')
    """
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer, and not {AUTO}.") from None
