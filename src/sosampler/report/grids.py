"""Tables of a report that others have laid out: reproductions of the paper, and the independence of frames."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.report.curves import Figure

INDEPENDENCE_FILE, INDEPENDENCE_PICTURE = "independence.json", "independence.png"
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST_PICTURE = 2 << 20  # bytes


@dataclass(frozen=True)
class Picture:
    """A picture from a file, inside of a link."""

    uri: str
    words: str


@dataclass(frozen=True)
class Grid:
    """A table of texts with its head, what stands above and below it, and what belongs to it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()


def grid_of_markdown(text: str) -> Grid:
    """A page of Markdown with one table: heading, paragraphs, the table, a list.

    >>> grid_of_markdown("## T\\n\\nIt says a.  \\n\\n| who | N |\\n| --- | ---: |\\n| a\\\\|b | 1 |\\n\\n- note").rows
    [['a|b', '1']]
    """
    title, above, below, table = "", [], [], []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| "):
            table.append([cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif line.startswith("- "):
            below.append(line.removeprefix("- "))
        else:
            above.append(line)
    head, rows = (table[0], table[2:]) if table else ([], [])  # below the head is a ruler
    return Grid(title, head, rows, above, below)


def independence_grid(folder: Path) -> Grid | None:
    """What `sosampler independence` wrote into a folder; None where there is nothing."""
    path = folder / INDEPENDENCE_FILE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rows = [_rate(row) for row in told["rows"]]
        verdicts = [_verdict(facts) for facts in told["classifiers"]]
        below = [str(told["criterion"]), *map(str, told["notes"])]
        videos = int(told["videos"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise InvalidArgument(
            f"{path}: is not what `sosampler independence` writes ({type(error).__name__}: {error}); write it again"
        ) from error
    head = ["classifier", "frames a second", "pairs", "mean likeness", "redundant, %", "stands by itself"]
    above = [f"{videos} videos.", *verdicts]
    return Grid("How alike neighbouring frames are", head, rows, above, below, pictures=pictures_of(folder))


def _rate(row: Mapping[str, Any]) -> list[str]:
    mean = "" if row["mean"] is None else f"{row['mean']:.3f}"
    redundant = "" if row["redundant"] is None else f"{100 * row['redundant']:.1f}"
    passes = {True: "yes", False: "no", None: ""}[row["passes"]]
    return [str(row["classifier"]), f"{row['rate']:g}", str(row["pairs"]), mean, redundant, passes]


def _verdict(facts: Mapping[str, Any]) -> str:
    rate = facts["verdict"]
    words = "at no rate that was measured" if rate is None else f"up to {rate:g} frames a second"
    return f"For {facts['classifier']} frames stand by themselves {words}."


def pictures_of(folder: Path) -> list[Picture]:
    """The densities that `sosampler independence` drew."""
    path = folder / INDEPENDENCE_PICTURE
    data = path.read_bytes() if path.is_file() and path.stat().st_size <= _LARGEST_PICTURE else b""
    if not data.startswith(_PNG):
        return []
    words = "Densities of the likeness of neighbouring frames: a curve for each rate, dashed for frames far apart"
    return [Picture("data:image/png;base64," + base64.b64encode(data).decode("ascii"), words)]
