"""Format the numbers, columns and facts of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sosampler.figures.curves import MEANINGS, Row, looks_of_rows
from sosampler.policies.registry import is_system

NOTHING = "\N{EN DASH}"
"""Where a number is not known."""
SHORT_NAMES = {"top1": "top-1", "mAP": "mAP"}


def percent(value: float | None, *, sign: bool = False) -> str:
    """Format a fraction in percent.

    >>> percent(0.1234), percent(-0.05, sign=True), percent(-1e-9), percent(None)
    ('12.3', '−5.0', '0.0', '–')
    """
    return NOTHING if value is None else _fixed(100 * value, 1, sign=sign)


def _fixed(value: float, places: int, *, sign: bool = False) -> str:
    rounded = round(value, places) + 0.0  # there is no -0.0
    return f"{rounded:{'+' if sign else ''}.{places}f}".replace("-", "\N{MINUS SIGN}")


def between(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    """Format a 95 % interval.

    >>> between([0.1, 0.25]), between(None)
    (' (95 %: 10.0 to 25.0)', '')
    """
    return f" (95 %: {percent(bounds[0], sign=sign)} to {percent(bounds[1], sign=sign)})" if bounds else ""


def score(value: float | None) -> str:
    """Format a sampler's score, short enough for a small cell.

    >>> score(0.8349), score(-12.3), score(None)
    ('0.83', '−12', '–')
    """
    if value is None:
        return NOTHING
    return _fixed(value, 2 if abs(value) < 9.995 else 0)


def count(frames: float | None) -> str:
    """Format a number of frames.

    >>> count(6), count(3.42), count(None)
    ('6', '3.4', '–')
    """
    return NOTHING if frames is None else str(frames) if isinstance(frames, int) else f"{frames:.1f}"


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> clock(75.26), clock(3.04), clock(-0.5)
    ('1:15.3', '0:03.0', '−0:00.5')
    """
    tenths = abs(round(10 * seconds))
    sign = "\N{MINUS SIGN}" if seconds < 0 and tenths else ""
    return f"{sign}{tenths // 600}:{tenths % 600 // 10:02d}.{tenths % 10}"


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return names and values as text, depth first; what is empty is left out.

    >>> flat({"bank": {"name": "b", "size": None}, "pairs": [[1, 4], [2, 4]]})
    [('bank: name', 'b'), ('pairs', '1 of 4; 2 of 4')]
    """
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            pairs += flat(value, f"{label}: ")
        elif isinstance(value, (list, tuple)):
            if value:
                pairs.append((label, "; ".join(_text(inner) for inner in value)))
        elif value is not None and value != "":
            pairs.append((label, _text(value)))
    return pairs


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return (" of " if len(value) == 2 else ", ").join(_text(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


_NO_GAP = 1e-6  # what rounding leaves


@dataclass(frozen=True)
class Column:
    """A column of the table and its meaning."""

    name: str
    meaning: str
    is_empty: bool


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Group rows by N and T: policies first, then learned, then oracles; baselines follow the rows of the same T."""
    looks = looks_of_rows(rows)
    distinct = {(row["num_candidates"], row["num_frames"]) for row in rows}
    pairs = sorted(distinct, key=lambda pair: (pair[0], pair[1] is None, pair[1] or 0))
    order = list(MEANINGS)
    return [
        {
            "num_frames": frames,
            "num_candidates": candidates,
            "rows": sorted(
                (row for row in rows if (row["num_candidates"], row["num_frames"]) == (candidates, frames)),
                key=lambda row: order.index(looks[row["policy"]].kind),
            ),
        }
        for candidates, frames in pairs
    ]


def columns_of(rows: Sequence[Row], metric: str) -> dict[str, Column]:
    """Return the columns; one is empty where no row has a value."""

    def lacks(name: str) -> bool:
        return all(row.get(name) is None for row in rows)

    baselines = any(is_system(row) for row in rows)
    main, other = SHORT_NAMES[metric], SHORT_NAMES["mAP" if metric == "top1" else "top1"]
    several = metric == "mAP"  # labels of a video
    meanings = {
        "top-1": f"share of videos {'one of whose true classes' if several else 'whose true class'} gets the highest "
        "probability from the chosen frames",
        "mAP": "mean average precision: for each class the videos are ranked by its probability; the mean over classes",
    }
    return {
        "policy": Column(
            "policy", "what chooses N of the T candidates. Its sign and colour are those of the figures", False
        ),
        "main": Column(
            f"{main}, %",
            f"{meanings[main]}. Below it, and as a bar from 0 to 100, the 95 % interval of a bootstrap over videos",
            False,
        ),
        "other": Column(f"{other}, %", meanings[other], lacks("mAP" if metric == "top1" else "top1")),
        "versus": Column(
            "against uniform",
            f"difference in {main} from the uniform choice of as many frames"
            + (" (of a baseline: as many as it takes in the mean, rounded up)" if baselines else "")
            + ", in percentage points, with the 95 % interval of the paired bootstrap: where it holds 0, the "
            "difference may be chance",
            lacks("versus_uniform"),
        ),
        "recovered": Column(
            "recovered, %",
            f"share of the semi-optimal oracle's gain in {main} over uniform that this policy reaches",
            lacks("recovered"),
        ),
        "fidelity": Column(
            "fidelity, %",
            "mean share of the optimal set's frames that were chosen too; there may be other sets as good",
            lacks("fidelity"),
        ),
        "confidence": Column(
            "confidence, %",
            "mean over videos of "
            + ("the geometric mean of the probabilities" if several else "the probability")
            + f" that the classifier gives the true class{'es' if several else ''}",
            lacks("confidence"),
        ),
        "gmacs": Column(
            "GMACs",
            "billions of multiply-adds for one video: scoring T candidates plus classifying N frames; none for "
            "oracles, which know the labels"
            + ("; of a baseline its light network and its own layers, plus the heavy network" if baselines else ""),
            lacks("gmacs"),
        ),
        "frames": Column(
            "frames",
            "frames that are classified: N; of a baseline those that it classified, mean over videos",
            not baselines,
        ),
        "decoded": Column(
            "decoded",
            "frames that must be decoded: all T to score them, or only the N"
            + ("; of a baseline those that any of its networks saw, mean over videos" if baselines else ""),
            lacks("frames_decoded"),
        ),
    }


def search_of(rows: Sequence[Row], metric: str) -> str:
    """Return how the optimal policy was searched, and what the search may have missed."""
    searched = [row for row in rows if row.get("gap")]
    if not searched:
        return ""
    methods = " and ".join(dict.fromkeys(str(row["method"]) for row in searched))
    missed = max(float(row["gap"]["max"]) for row in searched)
    what = "true class a {}probability" if metric == "top1" else "labels a {}confidence"
    bound = (
        f"no other set of frames gives the {what.format('')} that is higher by more than {missed:.2g}"
        if missed > _NO_GAP
        else f"no other set of frames gives the {what.format('higher ')}"
    )
    return f"The optimal policy was found by {methods}: {bound}."
