"""`write_cost_curve`: accuracy against cost, as a figure for a paper or a README."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.figures.curves import (
    MEANINGS,
    METRIC_NAMES,
    ORACLE,
    Line,
    Look,
    Row,
    axis_name,
    draw_line,
    dress,
    import_matplotlib,
    lines_of,
    looks_of_rows,
    shortened,
)
from sosampler.policies.registry import line_of

SUFFIXES = (".svg", ".png")

# The light colours of the page of a report.
COLOURS = {
    "paper": "#ffffff",
    "grid": "#e4e7ec",
    "ink": "#16191d",
    "faint": "#59616b",
    "rule": "#59616b",
    "oracle": "#9a4a00",
    "learned-1": "#0060a8",
    "learned-2": "#00704f",
    "learned-3": "#7a2f8f",
    "system-1": "#a3195b",
    "system-2": "#6b5900",
}
_HEADINGS = {"rule": "rules", "learned": "learned samplers", "system": "systems", "oracle": "oracles"}
_PANEL = (4.7, 4.3)  # inches
_LEGEND_WIDTH, _LEGEND_LINE = 2.5, 0.225  # inches
_SIDE_BY_SIDE, _WIDEST = 7.0, 70.0  # points between curves that would hide each other, and from the first to the last
_NAMED = 4  # curves that a remark names; of more it gives the number
_DPI = 160


def write_cost_curve(
    rows: Sequence[Row], metric: str, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draw two panels: a metric with its 95 % intervals against giga multiply-adds, and against decoded frames.

    One curve a policy over its N; one a baseline over its thresholds, whose rows are called NAME@VALUE. The first panel
    is left out where no multiply-adds are known; a remark names the policies whose are not.

    Args:
        rows: of an evaluation, as in its JSON. Used are policy, num_frames (None for a baseline), frames_decoded,
            gmacs, the metric, ci95, and num_candidates where there are several T.
        metric: "top1" or "mAP".
        path: a .svg or .png file; its folder is made.
        title: above the panels.
    """
    target = check_curve_file(path)
    figure = cost_figure(rows, metric, title=title)
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = target.suffix[1:].lower()
    matplotlib, *_ = import_matplotlib()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}  # the same rows, the same bytes
    with replacing(target) as temporary, matplotlib.rc_context(_style()):
        figure.savefig(temporary, format=kind, dpi=_DPI, facecolor=COLOURS["paper"], metadata=metadata)
    return target


def check_curve_file(path: str | os.PathLike[str]) -> Path:
    """Return the path, checked that a curve can be written there; also useful before a long work."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"{target}: curves are written as {' or '.join(SUFFIXES)}; give a file with this ending")
    if target.is_dir():
        raise InvalidArgument(f"{target} is a folder; give the name of a file")
    import_matplotlib()
    return target


def cost_figure(rows: Sequence[Row], metric: str, *, title: str | None = None) -> Any:
    """Return the same as a matplotlib Figure."""
    one_of("metric", metric, METRIC_NAMES)
    if not rows:
        raise InvalidArgument("a curve needs at least one row; evaluate a policy first")
    matplotlib, figure_class, canvas_class = import_matplotlib()
    looks = looks_of_rows(rows)
    priced = lines_of([row for row in rows if (row.get("gmacs") or 0) > 0], metric, "gmacs")
    decoded = lines_of(rows, metric, "frames_decoded")
    entries = _legend_entries(decoded, looks)
    panels = 2 if priced else 1
    height = max(_PANEL[1], _LEGEND_LINE * len(entries) + 0.9)
    with matplotlib.rc_context(_style()):
        figure = figure_class(figsize=(panels * _PANEL[0] + _LEGEND_WIDTH, height), layout="constrained")
        canvas_class(figure)
        *first, last = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        for axes in first:
            dress(axes, "GMACs a video, mean (log scale)", axis_name(metric), COLOURS)
            for line in priced:
                draw_line(axes, line, looks[line.policy], COLOURS, bars=True)
            _log_axis(axes, [x for line in priced for x in line.xs])
        dress(last, "decoded frames a video, mean", "" if first else axis_name(metric), COLOURS)
        moved = _side_by_side(decoded)
        handles = _draw_moved(figure, last, decoded, looks, moved)
        last.set_ylim(*_heights(decoded))
        last.set_xlim(0, _right_end(decoded, moved))
        last.xaxis.get_major_locator().set_params(integer=True)
        _add_legend(figure, entries, handles)
        remarks = [_remark(priced, decoded, looks), _remark_on_prices(rows, looks, panels)]
        text = "\n".join(remark for remark in remarks if remark)
        figure.supxlabel(text, fontsize=8.5, color=COLOURS["faint"], x=0.01, ha="left")
        if title:
            figure.suptitle(title, fontsize=11.5, color=COLOURS["ink"], x=0.01, ha="left")
    return figure


def _style() -> dict[str, Any]:
    # Letters as shapes: they are the same wherever the file is shown.
    return {"svg.fonttype": "path", "svg.hashsalt": "sosampler", "font.family": "DejaVu Sans", "font.size": 10}


def _log_axis(axes: Any, xs: Sequence[float]) -> None:
    from matplotlib import ticker

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [
        tick for tick in ticker.LogLocator(subs=(1, 2, 5), numticks=50).tick_values(low, high) if low <= tick <= high
    ]
    if len(ticks) < 3:  # little more than one decade: even steps
        ticks = [tick for tick in ticker.MaxNLocator(5).tick_values(min(xs), max(xs)) if low <= tick <= high]
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if f"{tick:e}"[0] == "1"]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _heights(lines: Sequence[Line]) -> tuple[float, float]:
    """Return the percent at the lower and the upper end, with room around all points and intervals."""
    every = [y for line in lines for y in line.ys]
    every += [y for line in lines for bounds in line.bounds for y in bounds or ()]
    room = max(1.0, 0.06 * (max(every) - min(every)))
    return max(0.0, min(every) - room), min(100.8, max(every) + room)


def _side_by_side(lines: Sequence[Line]) -> list[float]:
    """Return the points by which vertical curves at the same x are moved apart.

    >>> _side_by_side([Line("a", "a", xs, [1.0] * len(xs), []) for xs in ([8.0, 8.0], [1.0, 8.0], [8.0])])
    [-3.5, 0.0, 3.5]
    """
    vertical: dict[float, list[int]] = {}
    for number, line in enumerate(lines):
        if len(set(line.xs)) == 1:
            vertical.setdefault(line.xs[0], []).append(number)
    moved = [0.0] * len(lines)
    for beside in vertical.values():
        step = min(_SIDE_BY_SIDE, _WIDEST / len(beside))
        for order, number in enumerate(beside):
            moved[number] = step * (order - (len(beside) - 1) / 2)
    return moved


def _right_end(lines: Sequence[Line], moved: Sequence[float]) -> float:
    """Return where the axis ends, so that the last curve that was moved is inside."""
    width = 72 * _PANEL[0]  # points, about
    return max(line.xs[-1] / (1 - (max(0.0, by) + 12) / width) for line, by in zip(lines, moved, strict=True))


def _draw_moved(
    figure: Any, axes: Any, lines: Sequence[Line], looks: Mapping[str, Look], moved: Sequence[float]
) -> list[Any]:
    from matplotlib.transforms import ScaledTranslation

    handles = []
    for line, by in zip(lines, moved, strict=True):
        transform = axes.transData + ScaledTranslation(by / 72, 0, figure.dpi_scale_trans) if by else None
        handles.append(draw_line(axes, line, looks[line.policy], COLOURS, bars=True, transform=transform))
    return handles


def _legend_entries(lines: Sequence[Line], looks: Mapping[str, Look]) -> list[tuple[str, int | None]]:
    """Return the names of curves below the heading of their kind, with the line of each, None for a heading."""
    entries: list[tuple[str, int | None]] = []
    for kind in MEANINGS:
        of_kind = [number for number, line in enumerate(lines) if looks[line.policy].kind == kind]
        entries += [(_HEADINGS[kind], None), *((lines[number].name, number) for number in of_kind)] if of_kind else []
    return entries


def _add_legend(figure: Any, entries: Sequence[tuple[str, int | None]], handles: Sequence[Any]) -> None:
    from matplotlib.lines import Line2D

    nothing = Line2D([], [], linestyle="none")
    legend = figure.legend(
        [nothing if number is None else handles[number] for _, number in entries],
        [name for name, _ in entries],
        loc="outside right upper",
        frameon=False,
        fontsize=9.5,
        handlelength=3.6,
        labelspacing=0.42,
    )
    for text, (_, number) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)  # a $ in a name is a $
        text.set_color(COLOURS["faint" if number is None else "ink"])
        text.set_fontweight("bold" if number is None else "normal")


def _remark(priced: Sequence[Line], decoded: Sequence[Line], looks: Mapping[str, Look]) -> str:
    remarks = []
    if any(bounds is not None for line in decoded for bounds in line.bounds):
        remarks.append("bars: 95 % intervals")
    if priced and any(looks[line.policy].kind == "oracle" for line in decoded):
        remarks.append("oracles: what they know has no price in GMACs")
    if any(_side_by_side(decoded)):
        remarks.append("curves side by side decode the same number of frames")
    return "; ".join(remarks)


def _remark_on_prices(rows: Sequence[Row], looks: Mapping[str, Look], panels: int) -> str:
    """Name the policies whose multiply-adds are unknown, without oracles."""
    unpriced = [row for row in rows if not (row.get("gmacs") or 0) > 0 and looks[line_of(row)].kind != ORACLE]
    names = list(dict.fromkeys(shortened(line_of(row)) for row in unpriced))
    if not names:
        return ""
    if panels == 1:
        return "no panel of GMACs: those of the classifier are not known"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"not in the panel of GMACs, because theirs are not known: {', '.join(names[:_NAMED])}{more}"
