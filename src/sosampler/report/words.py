"""Numbers and facts of a report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "\N{EN DASH}"
"""Where a number is not known."""
SHORT_NAMES = {"top1": "top-1", "mAP": "mAP"}


def percent(value: float | None, *, sign: bool = False) -> str:
    """
    >>> percent(0.1234), percent(-0.05, sign=True), percent(-1e-9), percent(None)
    ('12.3', '−5.0', '0.0', '–')
    """
    return NOTHING if value is None else _fixed(100 * value, 1, sign=sign)


def _fixed(value: float, places: int, *, sign: bool = False) -> str:
    rounded = round(value, places) + 0.0  # there is no -0.0
    return f"{rounded:{'+' if sign else ''}.{places}f}".replace("-", "\N{MINUS SIGN}")


def between(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    """
    >>> between([0.1, 0.25]), between(None)
    (' (95 %: 10.0 to 25.0)', '')
    """
    return f" (95 %: {percent(bounds[0], sign=sign)} to {percent(bounds[1], sign=sign)})" if bounds else ""


def score(value: float | None) -> str:
    """A score of a sampler, short enough for a small cell.

    >>> score(0.8349), score(-12.3), score(None)
    ('0.83', '−12', '–')
    """
    if value is None:
        return NOTHING
    return _fixed(value, 2 if abs(value) < 9.995 else 0)


def count(frames: float | None) -> str:
    """
    >>> count(6), count(3.42), count(None)
    ('6', '3.4', '–')
    """
    return NOTHING if frames is None else str(frames) if isinstance(frames, int) else f"{frames:.1f}"


def clock(seconds: float) -> str:
    """
    >>> clock(75.26), clock(3.04), clock(-0.5)
    ('1:15.3', '0:03.0', '−0:00.5')
    """
    tenths = abs(round(10 * seconds))
    sign = "\N{MINUS SIGN}" if seconds < 0 and tenths else ""
    return f"{sign}{tenths // 600}:{tenths % 600 // 10:02d}.{tenths % 10}"


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Names and values as text, depth first; what is empty is left out.

    >>> flat({"bank": {"name": "b", "size": None}, "pairs": [[1, 4], [2, 4]]})
    [('bank: name', 'b'), ('pairs', '1 of 4; 2 of 4')]
    """
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            found += flat(value, f"{label}: ")
        elif isinstance(value, (list, tuple)):
            if value:
                found.append((label, "; ".join(_text(one) for one in value)))
        elif value is not None and value != "":
            found.append((label, _text(value)))
    return found


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " of ".join(_text(one) for one in value) if len(value) == 2 else ", ".join(_text(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
