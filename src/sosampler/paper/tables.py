"""Write a result as Markdown, text or CSV: our figure, the paper's in the next column, and points above uniform."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from sosampler._util.text import csv_cell, escaped
from sosampler._util.validation import one_of
from sosampler.report.load import Grid
from sosampler.samplers.registry import TITLES

STYLES = ("markdown", "text", "csv")
_METRICS = {"top1": "top-1, %", "mAP": "mAP, %", "fidelity": "fidelity, %"}

Row = dict[str, Any]

# Titles of rows in results that were written before the recipes had names of their own.
_FORMER_TITLES = {
    "SOSampler": TITLES["paper"],
    "SOSampler with as many frames": TITLES["paper"],
    "SOSampler, authors' code": TITLES["authors"],
    "SOSampler, our recipe": TITLES["default"],
}


def table(result: dict[str, Any], style: str = "text") -> str:
    """Return a result in one of `STYLES`.

    Rows that are left out have a footnote with the reason. Our figures are means over seeds with their standard
    deviation, or with one seed or none a 95 % interval over videos.
    """
    one_of("style", style, STYLES)
    if style == "csv":
        return _csv(with_titles(result))
    grid = grid_of(result)
    lines = [list(grid.head), *grid.rows]
    if style == "markdown":
        head = [f"## {grid.title}", "", *(f"{line}  " for line in grid.above)]
        parts = [*head, "", *_markdown(lines), "", *(f"- {line}" for line in grid.below)]
        parts = [part.replace("<", "&lt;") for part in parts]
    else:
        parts = [grid.title, *grid.above, "", *_aligned(lines), "", *grid.below]
    return "\n".join(map(escaped, parts)).rstrip() + "\n"


def with_titles(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result of any version with the present titles, and no figure of the paper beside this package's recipe.

    >>> old = {"title": "SOSampler, our recipe", "paper": {"score": 77.7}}
    >>> with_titles({"rows": [old], "left_out": []})["rows"]
    [{'title': 'SOSampler+', 'paper': None}]
    """

    def named(row: Row) -> Row:
        title = _FORMER_TITLES.get(row.get("title", ""))
        if title is None:
            return row
        return {**row, "title": title, **({"paper": None} if title == TITLES["default"] else {})}

    return {**result, **{key: [named(row) for row in result[key]] for key in ("rows", "left_out")}}


def grid_of(result: dict[str, Any]) -> Grid:
    """Return a result as a table with the lines above and below it."""
    result = with_titles(result)
    by_rate = result["kind"] == "independence" and result["rows"]
    head, *rows = _independence(result) if by_rate else _lines(result)
    bank, seeds = result["bank"], len(result["seeds"])
    networks = [network["classifier"] for network in result.get("networks", ())]
    named = result["classifier"]["name"] if len(networks) < 2 else " and ".join(networks)
    measured = f"{bank['videos']} videos of {bank['split']} in {bank['name']}, classifier {named}"
    if any(row.get("seeds") for row in result["rows"]):
        measured += f", {seeds} {'seed' if seeds == 1 else 'seeds'}"
    above = [measured, f"The paper claims: {result['claim']}"]
    if result["paper"] is not None:
        above.append(f"In the columns of the paper: {result['paper']['column']}.")
    title = f"{name_in_words(result['experiment'])}: {result['title']}"
    return Grid(title, head, rows, above, _footnotes(result))


def name_in_words(name: str) -> str:
    """Return the name as the paper writes it.

    >>> name_in_words("table3"), name_in_words("figureII")
    ('Table 3', 'Figure II')
    """
    for kind in ("table", "figure"):
        if name.startswith(kind):
            return f"{kind.capitalize()} {name.removeprefix(kind)}"
    return name


# ---- the grid of rows


def _lines(result: dict[str, Any]) -> list[list[str]]:
    """Return header and rows; empty columns are left out."""
    marks = {key: number for number, key in enumerate(_reasons(result), start=1)}
    rows = [{**row, "mark": marks.get(row.get("note"))} for row in result["rows"]]
    rows += [{**row, "instead": "left out", "mark": marks[row["why"]]} for row in result["left_out"]]
    rows += [{**row, "instead": "not in this package"} for row in result["elsewhere"]]
    if not rows:
        return [[str(result["refused"] or "nothing was measured")]]
    # The paper's metric may differ from ours where the bank is of another data set.
    paper_metric = next((row["paper"]["metric"] for row in rows if row.get("paper")), result["metric"])
    columns: dict[str, Callable[[Row], str]] = {
        "method": _method,
        "N": _frames,
        "T": lambda row: str(row["num_candidates"] or ""),
        f"ours: {_METRICS[result['metric']]}": lambda row: row.get("instead") or _spread(row, "score"),
        f"paper: {_METRICS[paper_metric]}": lambda row: _printed(row, "score"),
        "ours: to uniform": lambda row: _spread(row, "versus_uniform", sign=True),
        "paper: to uniform": lambda row: _printed(row, "versus_uniform", sign=True),
        "ours: GMACs": lambda row: _number(row.get("gmacs"), places=2),
        "paper: GFLOPs": lambda row: _printed(row, "gmacs"),
        "ours: videos/s": lambda row: _number(row.get("videos_per_second")),
        "paper: videos/s": lambda row: _printed(row, "videos_per_second"),
        "ours: times uniform": lambda row: _number(row.get("times_uniform"), places=2),
    }
    texts = {name: [text(row) for row in rows] for name, text in columns.items()}
    used = {name: column for name, column in texts.items() if any(column)}
    return [list(used), *map(list, zip(*used.values(), strict=True))]


def _reasons(result: dict[str, Any]) -> list[str]:
    """Return notes and reasons, each once, in the order of the rows."""
    notes = [row["note"] for row in result["rows"] if row.get("note")]
    return list(dict.fromkeys([*notes, *(row["why"] for row in result["left_out"])]))


def _footnotes(result: dict[str, Any]) -> list[str]:
    lines = [f"[{number}] {text}" for number, text in enumerate(_reasons(result), start=1)]
    rows = result["rows"]
    if any(row.get("score_sd") is not None for row in rows):
        lines.append("±: standard deviation over seeds")
    if any(row.get("score_ci95") is not None and row.get("score_sd") is None for row in rows):
        lines.append("(a to b): 95 % of resamples of the videos lie between")
    if any("score" in row and row["num_frames"] is None for row in rows):
        lines.append(
            "A baseline decides by itself how many frames it classifies: its N is the mean, and it is compared with as "
            "many uniform frames, rounded up"
        )
    return [*lines, *(f"note: {text}" for text in result["notes"])]


def _method(row: Row) -> str:
    threshold = f" @{row['dial']}" if row.get("dial") else ""
    mark = f" [{row['mark']}]" if row.get("mark") else ""
    return f"{row['title']}{threshold}{mark}"


def _frames(row: Row) -> str:
    """Return N; of a baseline the mean number of frames that it classified."""
    if row["num_frames"] is None and row.get("frames_classified") is not None:
        return f"{row['frames_classified']:.1f}"
    return str(row["num_frames"] or "")


def _spread(row: Row, name: str, *, sign: bool = False) -> str:
    """Return a mean with its standard deviation or its interval."""
    value, deviation, bounds = row.get(name), row.get(f"{name}_sd"), row.get(f"{name}_ci95")
    if value is None:
        return ""
    text = _number(value, sign=sign)
    if deviation is not None:
        return f"{text} ± {deviation:.1f}"
    if bounds is None:
        return text
    return f"{text} ({_number(bounds[0], sign=sign)} to {_number(bounds[1], sign=sign)})"


def _number(value: float | None, *, places: int = 1, sign: bool = False) -> str:
    """Format a number.

    >>> _number(12.345), _number(-0.01, sign=True), _number(None)
    ('12.3', '+0.0', '')
    """
    if value is None:
        return ""
    rounded = round(value + 1e-9, places) + 0.0  # halves are rounded up, and there is no -0.0
    return f"{rounded:{'+' if sign else ''}.{places}f}"


def _printed(row: Row, name: str, *, sign: bool = False) -> str:
    """Format a figure of the paper with as many decimals as it prints, at least one.

    >>> [_printed({"paper": {"score": score}}, "score") for score in (88.65, 77.7, 701.0, None)]
    ['88.65', '77.7', '701.0', '']
    """
    return _number((row.get("paper") or {}).get(name), places=2, sign=sign).removesuffix("0")


# ---- independence of frames


def _independence(result: dict[str, Any]) -> list[list[str]]:
    lines = [["frames a second", "pairs", "mean similarity", "redundant, %", "independent"]]
    several = len({row.get("classifier") for row in result["rows"]}) > 1
    for row in result["rows"]:
        passes = {True: "yes", False: "no", None: ""}[row["passes"]]
        redundant = None if row["redundant"] is None else 100 * row["redundant"]
        rate = f"{row['rate']:g}"
        cells = [rate, str(row["pairs"]), _number(row["mean"], places=3), _number(redundant), passes]
        lines.append([str(row["classifier"]), *cells] if several else cells)
    return [["classifier", *lines[0]], *lines[1:]] if several else lines


# ---- styles


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(line)} |" for line in (head, ruler, *rows)]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return text


def _csv(result: dict[str, Any]) -> str:
    """Return one line a row and one column a number; what is not known is empty."""
    flat = [_flat(row, result) for row in [*result["rows"], *result["left_out"], *result["elsewhere"]]]
    names = list(dict.fromkeys(name for row in flat for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: Row, result: dict[str, Any]) -> Row:
    flat: Row = {"experiment": result["experiment"], "bank": result["bank"]["name"]}
    flat |= {"classifier": result["classifier"]["name"], "metric": result["metric"]}
    for name, value in row.items():
        if name == "paper":
            flat |= {f"paper_{key}": inner for key, inner in (value or {}).items()}
        elif name.endswith("_ci95"):
            flat[f"{name}_low"], flat[f"{name}_high"] = value or (None, None)
        elif not isinstance(value, (dict, list)):
            flat[name] = value
    return {name: csv_cell(value) for name, value in flat.items()}
