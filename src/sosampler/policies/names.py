"""Names of rows that a system has: NAME@VALUE, where VALUE is where its dial stands. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Not all that Python reads as a number: "1_0", " 3" and "nan" are more likely names.
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

AUTO_SUFFIX = "+auto"  # ends the name of a sampler's rows with num_frames="auto", before any @
EVERY = "all"  # behind the @: every value that the system offers


def split_dial(text: str) -> tuple[str, str]:
    """A name and the value behind its @; a text that does not end in a number or "all" is a name as a whole.

    >>> split_dial("runs/a@0.3"), split_dial("a@all"), split_dial("me@home"), split_dial("a")
    (('runs/a', '0.3'), ('a', 'all'), ('me@home', ''), ('a', ''))
    """
    name, _, value = text.rpartition("@")
    return (name, value) if name and (value == EVERY or number_of(value) is not None) else (text, "")


def number_of(text: str) -> float | None:
    """An int where it is one, because dials that count want whole numbers; None for what is no number.

    >>> number_of("3"), number_of("0.30"), number_of("-1e-3"), number_of("1_0"), number_of("inf")
    (3, 0.3, -0.001, None, None)
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else None


def is_system(row: Mapping[str, Any]) -> bool:
    """Whether a row of an evaluation, as its JSON has it, was told no number of frames: a system, or NAME+auto."""
    return row["num_frames"] is None


def line_of(row: Mapping[str, Any]) -> str:
    """The name of the curve that a row is a point of: one for all values of a dial.

    >>> line_of({"policy": "a@0.3", "num_frames": None}), line_of({"policy": "a@3", "num_frames": 4})
    ('a', 'a@3')
    """
    return split_dial(row["policy"])[0] if is_system(row) else str(row["policy"])
