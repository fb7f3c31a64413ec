"""`-n auto` for every command that chooses frames: its options, and what `-n` may be."""

from __future__ import annotations

from typing import Annotated

import typer

from sosampler.auto_frames import AUTO, DEFAULT_LEAST, DEFAULT_MOST, DEFAULT_TOLERANCE
from sosampler.errors import InvalidArgument

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


def number_or_auto(option: str, text: str | None) -> int | str | None:
    """A number of frames as it was typed: whole, or "auto".

    >>> number_or_auto("-n", "6"), number_or_auto("-n", "auto"), number_or_auto("-n", None)
    (6, 'auto', None)
    """
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{option} {text!r} is not allowed; give a whole number, or {AUTO}") from None
