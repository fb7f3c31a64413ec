"""Names of the rows of baselines: NAME@VALUE, where VALUE is the threshold. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Not all that Python reads as a number: "1_0", " 3" and "nan" are more likely names.
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

AUTO_SUFFIX = "+auto"  # ends the name of a sampler's rows with num_frames="auto", before any @
EVERY = "all"  # behind the @: every threshold of the baseline


def split_threshold(text: str) -> tuple[str, str]:
    """Split NAME@VALUE; a text that does not end in a number or "all" is a name as a whole.

    >>> split_threshold("runs/a@0.3"), split_threshold("a@all"), split_threshold("me@home"), split_threshold("a")
    (('runs/a', '0.3'), ('a', 'all'), ('me@home', ''), ('a', ''))
    """
    name, _, value = text.rpartition("@")
    return (name, value) if name and (value == EVERY or number_of(value) is not None) else (text, "")


def number_of(text: str) -> float | None:
    """Return an int where it is one, because some thresholds are counts; None for what is no number.

    >>> number_of("3"), number_of("0.30"), number_of("-1e-3"), number_of("1_0"), number_of("inf")
    (3, 0.3, -0.001, None, None)
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else None


def is_system(row: Mapping[str, Any]) -> bool:
    """Return whether a row of an evaluation, as in its JSON, has no N: a baseline, or NAME+auto."""
    return row["num_frames"] is None


def line_of(row: Mapping[str, Any]) -> str:
    """Return the name of the curve that a row is a point of: one for all thresholds.

    >>> line_of({"policy": "a@0.3", "num_frames": None}), line_of({"policy": "a@3", "num_frames": 4})
    ('a', 'a@3')
    """
    return split_threshold(row["policy"])[0] if is_system(row) else str(row["policy"])
