"""Figures of an evaluation: SVG for a report, and `write_cost_curve`, accuracy against cost for a paper or a README.

Kinds of policies differ in colour, dash and the filling of their marks, policies of one kind in the shape of their
marks: nothing depends on colour alone.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler._util.text import escaped
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.policies.registry import (
    ANSWER,
    AUTO_SUFFIX,
    get_policy,
    is_system,
    line_of,
    list_policies,
    split_threshold,
)

RULE, LEARNED, SYSTEM, ORACLE = "rule", "learned", "system", "oracle"

MEANINGS = {  # kinds of policies and what they know
    RULE: "without learning: by positions in time, or by how much frames differ",
    LEARNED: "scores the candidates with a small network",
    SYSTEM: "sees one frame after another, decides when to stop, and classifies with layers of its own",
    ORACLE: "knows the classifier's outputs for every candidate; a bound, not a method",
}

# lengths of line and gap, in line widths
_DASHES = {RULE: (4.0, 2.2), LEARNED: (), SYSTEM: (6.0, 1.6, 1.2, 1.6), ORACLE: (1.2, 1.8)}
_NUM_COLOURS = {RULE: 1, LEARNED: 3, SYSTEM: 4, ORACLE: 1}
# matplotlib's marks, and the same as text: filled ones, for oracles open ones
_MARKS = {
    RULE: (("s", "■"), ("X", "✖"), ("P", "✚"), ("v", "▼"), ("^", "▲"), ("d", "♦"), ("H", "⬣")),
    LEARNED: (("o", "●"), ("p", "⬟"), ("h", "⬢"), ("D", "◆"), ("*", "★")),
    SYSTEM: (("<", "◀"), (">", "▶"), ("D", "◆"), ("*", "★"), ("d", "♦")),
    ORACLE: (("D", "◇"), ("^", "△"), ("v", "▽"), ("s", "□"), ("p", "⬠")),
}


@dataclass(frozen=True)
class Look:
    """How one policy is drawn."""

    kind: str
    colour: str  # name of a colour of the page: "rule", "learned-1", "system-1", "oracle"
    mark: str  # matplotlib's name
    symbol: str  # the same as text
    dash: tuple[float, ...]


def kind_of(policy: str) -> str:
    """Return the kind of a policy by its name.

    >>> kind_of("uniform"), kind_of("dpp"), kind_of("semi-optimal+mmr"), kind_of("runs/a"), kind_of("runs/a+dpp")
    ('rule', 'rule', 'oracle', 'learned', 'learned')
    """
    base = policy.split("+")[0]
    if base not in list_policies(oracles=True):
        return LEARNED
    known = get_policy(base, teacher=True)
    return ORACLE if known.needs_teacher else LEARNED if known.has_weights else RULE


def looks_of(policies: Iterable[str], systems: Collection[str] = ()) -> dict[str, Look]:
    """Return how each policy is drawn, in order of first appearance.

    Names in `systems` are baselines. All thresholds NAME@VALUE are drawn like NAME, which is returned too.
    """
    looks: dict[str, Look] = {}
    used = dict.fromkeys(MEANINGS, 0)
    for policy in dict.fromkeys(policies):
        of_system = policy in systems
        name = split_threshold(policy)[0] if of_system else policy
        if name not in looks:
            kind = kind_of(policy)
            if of_system and kind != ORACLE and not name.endswith((AUTO_SUFFIX, f"+{ANSWER}")):
                kind = SYSTEM
            number = used[kind]
            used[kind] += 1
            mark, symbol = _MARKS[kind][number % len(_MARKS[kind])]
            several = _NUM_COLOURS[kind]
            colour = kind if several == 1 else f"{kind}-{number % several + 1}"
            looks[name] = Look(kind, colour, mark, symbol, _DASHES[kind])
        looks[policy] = looks[name]
    return looks


def looks_of_rows(rows: Sequence[Mapping[str, Any]], more: Iterable[str] = ()) -> dict[str, Look]:
    """Return the same for rows of an evaluation, as in its JSON, and further policies."""
    systems = {row["policy"] for row in rows if is_system(row)}
    return looks_of([*(row["policy"] for row in rows), *more], systems)


Row = Mapping[str, Any]  # of an evaluation, as in its JSON

METRIC_NAMES = {"top1": "top-1 accuracy", "mAP": "mean average precision"}

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
    "system-3": "#a8322a",
    "system-4": "#0a6b74",
}
# Placeholders for the colours of the page in SVG; no figure has these by chance.
_PLACEHOLDERS = {name: f"#0102{number:02x}" for number, name in enumerate(COLOURS, start=3)}
_SIZE = (5.7, 3.8)  # inches of one panel
_LABEL_LETTERS = 26
_MAX_WITH_BARS = 12  # curves of a panel; the intervals of more would hide them
_FILLS = ("full", "none", "left", "top", "right", "bottom")  # of the marks, where a policy has several lines
_FRAMES_AXIS = "frames given to the classifier (N)"
_LABEL_STEP = 0.06  # minimum distance of two labels, as a share of the panel's height


@dataclass(frozen=True)
class Figure:
    """A figure with its title and caption."""

    svg: str
    title: str
    caption: str


@dataclass(frozen=True)
class Line:
    """One policy in one panel, or one baseline with all its thresholds."""

    policy: str
    name: str  # the policy's, and T where it has a line for each
    xs: list[float]
    ys: list[float]  # percent
    bounds: list[tuple[float, float] | None]
    number: int = 0  # which of the policy's lines


def accuracy_figures(rows: Sequence[Row], metric: str) -> list[Figure]:
    """Draw accuracy against N and, where they are known, against multiply-adds: two figures for each T with several N.

    Where no T has several, but N grows with T, as in 8 of 30, 16 of 60, the pairs make one curve. Baselines, which have
    no N, are in the figures of cost, even where no policy has several N.
    """
    looks = looks_of_rows(rows)
    by_candidates = {
        f"{count} candidates": [row for row in rows if row["num_candidates"] == count]
        for count in dict.fromkeys(row["num_candidates"] for row in rows)
    }
    figures = []
    for of_what, part in by_candidates.items():
        if any(len(line.xs) > 1 for line in _lines_of_frames(part, metric)):
            figures += _two_figures(part, metric, looks, of_what)
    if figures:
        return figures
    with_frames = [row for row in rows if row["policy"] != "all" and not is_system(row)]
    pairs = sorted({(row["num_candidates"], row["num_frames"]) for row in with_frames})
    if len(pairs) > 1 and len({frames for _, frames in pairs}) == len(pairs):
        of_what = ", ".join(f"{frames} of {count}" for count, frames in pairs)
        return _two_figures(rows, metric, looks, of_what)
    return [figure for of_what, part in by_candidates.items() for figure in _cost_figure(part, metric, looks, of_what)]


def _lines_of_frames(rows: Sequence[Row], metric: str) -> list[Line]:
    return lines_of([row for row in rows if row["policy"] != "all" and not is_system(row)], metric, "num_frames")


def _two_figures(rows: Sequence[Row], metric: str, looks: Mapping[str, Look], of_what: str) -> list[Figure]:
    every_candidate = [row for row in rows if row["policy"] == "all"]
    level = 100 * every_candidate[0][metric] if len(every_candidate) == 1 else None
    figure = Figure(
        _draw(_lines_of_frames(rows, metric), looks, _FRAMES_AXIS, axis_name(metric), level),
        f"Accuracy against the number of frames, {of_what}",
        "Higher and further left is better. Bars: 95 % interval of the learned samplers and of uniform. "
        "Solid: learned; dashed: rules; dotted: oracles."
        + (" Horizontal line: the classifier gets every candidate." if level is not None else ""),
    )
    return [figure, *_cost_figure(rows, metric, looks, of_what)]


def _cost_figure(rows: Sequence[Row], metric: str, looks: Mapping[str, Look], of_what: str) -> list[Figure]:
    """Draw accuracy against cost; nothing where there are no two curves, and no baseline beside something else."""
    known = [row for row in rows if row.get("gmacs") is not None]
    lines = lines_of(known, metric, "gmacs")
    systems = any(is_system(row) for row in known)
    if sum(len(line.xs) > 1 for line in lines) < 2 and not (systems and len(known) > 1):
        return []
    return [
        Figure(
            _draw(lines, looks, "GMACs of sampler and classifier, a video", axis_name(metric)),
            f"Accuracy against cost, {of_what}",
            "Multiply-adds of scoring the candidates and classifying the chosen, in billions. Oracles are "
            "not here: what they know has no cost."
            + (" Dash-dotted: systems, mean over videos of the frames that they used." if systems else ""),
        )
    ]


def report_figures(rows: Sequence[Row], metric: str) -> list[Figure]:
    """Draw all figures of the rows: accuracy against N, cost and T, and fidelity against N."""
    looks, figures = looks_of_rows(rows), accuracy_figures(rows, metric)
    with_frames = [row for row in rows if row["policy"] != "all" and not is_system(row)]
    for count in sorted({row["num_frames"] for row in with_frames}):
        lines = lines_of([row for row in with_frames if row["num_frames"] == count], metric, "num_candidates")
        if any(len(line.xs) > 1 for line in lines):
            svg = _draw(lines, looks, "candidates (T)", axis_name(metric))
            caption = "The gain by more candidates; the classifier gets as many frames as before."
            title = f"Accuracy against the number of candidates, {count} frame{'' if count == 1 else 's'} chosen"
            figures.append(Figure(svg, title, caption))
    known = [row for row in rows if row["policy"] != "optimal" and row.get("fidelity") is not None]
    for count in dict.fromkeys(row["num_candidates"] for row in known):
        lines = _lines_of_frames([row for row in known if row["num_candidates"] == count], "fidelity")
        if any(len(line.xs) > 1 for line in lines):
            svg = _draw(lines, looks, _FRAMES_AXIS, "fidelity, %")
            caption = (
                "Mean share of the optimal frames that a policy chose too. Chance alone gives N of T; other sets of "
                "frames may be nearly as good as the optimal one."
            )
            figures.append(Figure(svg, f"Fidelity to the optimal choice, {count} candidates", caption))
    return figures


def axis_name(metric: str) -> str:
    return f"{METRIC_NAMES[metric]}, %"


def lines_of(rows: Sequence[Row], metric: str, x_name: str) -> list[Line]:
    """Return the rows as curves over `x_name`. A policy with several points at one T has a curve for each T."""
    lines = []
    for policy in dict.fromkeys(line_of(row) for row in rows):
        of_policy = [row for row in rows if line_of(row) == policy]
        distinct = list(dict.fromkeys(row.get("num_candidates") for row in of_policy))
        split = len(distinct) > 1 and len(of_policy) > len(distinct)
        for number, count in enumerate(distinct if split else [None]):
            points = [row for row in of_policy if not split or row.get("num_candidates") == count]
            points.sort(key=lambda row: float(row[x_name]))
            name = f"{shortened(policy)}, T={count}" if split else shortened(policy)
            xs, ys = [float(row[x_name]) for row in points], [100 * float(row[metric]) for row in points]
            intervals = [(row.get("ci95") or {}).get(metric) for row in points]
            bounds = [None if ends is None else (100 * ends[0], 100 * ends[1]) for ends in intervals]
            lines.append(Line(policy, name, xs, ys, bounds, number))
    return lines


def spread(wanted: Sequence[float], step: float) -> list[float]:
    """Move labels apart until none is nearer to another than `step`, in their order.

    >>> spread([0.0, 0.01, 1.0], 0.1)
    [-0.045, 0.055, 1.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[int]] = []
    middles: list[float] = []
    for index in order:
        groups.append([index])
        middles.append(wanted[index])
        # A group that touches the one before joins it, around the mean of its members.
        while len(groups) > 1 and middles[-1] - middles[-2] < step * (len(groups[-1]) + len(groups[-2])) / 2 - 1e-12:
            last = groups.pop()
            groups[-1] += last
            middles.pop()
            middles[-1] = sum(wanted[member] for member in groups[-1]) / len(groups[-1])
    moved = [0.0] * len(wanted)
    for group, middle in zip(groups, middles, strict=True):
        for number, index in enumerate(group):
            moved[index] = round(middle + (number - (len(group) - 1) / 2) * step, 9)
    return moved


def _draw(
    lines: Sequence[Line], looks: Mapping[str, Look], x_name: str, y_name: str, level: float | None = None
) -> str:
    """Return a figure as SVG; `level`: of the policy that takes every candidate, a horizontal line."""
    matplotlib, figure_class, canvas_class = import_matplotlib()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sosampler", "font.size": 10.5}):
        figure = figure_class(figsize=_SIZE, layout="constrained")
        canvas_class(figure)
        axes = figure.add_subplot()
        dress(axes, x_name, y_name, _PLACEHOLDERS)
        for line in lines:
            look = looks[line.policy]
            bars = look.kind in (LEARNED, SYSTEM) or line.policy == "uniform"
            draw_line(axes, line, look, _PLACEHOLDERS, bars=bars)
        if level is not None:
            axes.axhline(level, color=_PLACEHOLDERS["rule"], linewidth=1, zorder=1)
        every_x = sorted({x for line in lines for x in line.xs})
        if all(x == int(x) for x in every_x):
            axes.set_xticks(every_x)
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(100.8, high))
        _label_ends(axes, lines, looks, level)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _page_colours(stream.getvalue())


def import_matplotlib() -> tuple[Any, Any, Any]:
    """Return matplotlib, its Figure, and a canvas that needs no screen."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise MissingDependency("figures need matplotlib; install it with: pip install 'sosampler[train]'") from error
    return matplotlib, MatplotlibFigure, FigureCanvasSVG


def dress(axes: Any, x_name: str, y_name: str, colours: Mapping[str, str]) -> None:
    """Set the names, ticks and grid of a panel."""
    axes.set_xlabel(x_name, color=colours["ink"])
    axes.set_ylabel(y_name, color=colours["ink"])
    axes.tick_params(which="both", colors=colours["faint"], labelcolor=colours["ink"], length=3)
    axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.04, y=0.08)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours["faint"])


def draw_line(
    axes: Any, line: Line, look: Look, colours: Mapping[str, str], *, bars: bool, transform: Any = None
) -> Any:
    """Draw a curve with its marks and, with `bars`, its intervals; `transform` if it is not that of the data."""
    colour = colours[look.colour]
    strong = look.kind in (LEARNED, SYSTEM)
    placed = {} if transform is None else {"transform": transform}
    fills = (_FILLS[1], _FILLS[0], *_FILLS[2:]) if look.kind == ORACLE else _FILLS
    fill = fills[line.number % len(fills)]
    for x, bounds in zip(line.xs, line.bounds, strict=True) if bars else ():
        if bounds is not None:
            axes.vlines(x, *bounds, color=colour, linewidth=5, alpha=0.22, zorder=2, **placed)
    (drawn,) = axes.plot(
        line.xs,
        line.ys,
        color=colour,
        linewidth=2.6 if look.kind == LEARNED else 1.8 if strong else 1.5,
        linestyle=(0, look.dash) if look.dash else "-",
        marker=look.mark,
        markersize=(9 if look.mark == "*" else 7) if strong else 5.5,
        fillstyle="full" if fill == "none" else fill,
        markerfacecolor=colours["paper"] if fill == "none" else colour,
        markerfacecoloralt=colours["paper"],
        markeredgecolor=colour,
        markeredgewidth=0 if fill == "full" else 1.3,
        zorder=5 if strong else 3,
        clip_on=False,
        **placed,
    )
    return drawn


def _label_ends(axes: Any, lines: Sequence[Line], looks: Mapping[str, Look], level: float | None) -> None:
    """Write the names at the right ends, instead of a legend."""
    low, high = axes.get_ylim()
    ends = [(line.policy, line.name, line.xs[-1], line.ys[-1]) for line in lines]
    if level is not None:
        ends.append(("all", "all", axes.get_xlim()[1], level))
    arrow = {"arrowstyle": "-", "color": _PLACEHOLDERS["grid"], "linewidth": 0.8, "shrinkA": 1, "shrinkB": 5}
    heights = spread([(y - low) / (high - low) for *_, y in ends], _LABEL_STEP)
    for (policy, name, x, y), height in zip(ends, heights, strict=True):
        look = looks[policy]
        axes.annotate(
            f"{look.symbol} {name}",
            xy=(x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            color=_PLACEHOLDERS[look.colour],
            fontweight="bold" if look.kind == LEARNED else "normal",
            verticalalignment="center",
            annotation_clip=False,
            parse_math=False,  # a $ in a name is a $
            # From the side of the letters, not through them.
            arrowprops=dict(arrow, relpos=(0, 0.5)),
        )


def shortened(policy: str) -> str:
    """Return the end of a long name: samplers are often named by their folder."""
    name = escaped(policy)  # also lone surrogates of file names, which cannot be drawn
    return name if len(name) <= _LABEL_LETTERS else f"…{name[1 - _LABEL_LETTERS :]}"


def _page_colours(svg: str) -> str:
    """Return the <svg> element alone, with the page's colours and fonts, as wide as its container."""
    svg = svg[svg.index("<svg") :]
    for name, placeholder in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    svg = re.sub(r"font: (?:(bold|\d+) )?([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    svg = svg.replace("font-weight: ; ", "")
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


# ---- accuracy against cost, as a file

SUFFIXES = (".svg", ".png")

_HEADINGS = {"rule": "rules", "learned": "learned samplers", "system": "systems", "oracle": "oracles"}
_PANEL = (4.7, 4.3)  # inches
_LEGEND_WIDTH, _LEGEND_LINE = 2.5, 0.225  # inches
_SIDE_BY_SIDE, _WIDEST = 7.0, 70.0  # points between curves that would hide each other, and from the first to the last
_NAMED = 4  # curves that a remark names; of more it gives the number
_DPI = 160
# Letters as shapes: they are the same wherever the file is shown.
_STYLE = {"svg.fonttype": "path", "svg.hashsalt": "sosampler", "font.family": "DejaVu Sans", "font.size": 10}


def write_cost_curve(
    rows: Sequence[Row], metric: str, path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draw two panels: a metric with its 95 % intervals against giga multiply-adds, and against decoded frames.

    One curve a policy over its N; one a baseline over its thresholds, whose rows are called NAME@VALUE. The first panel
    is left out where no multiply-adds are known; a remark names the policies whose are not.

    Args:
        rows: of an evaluation, as in its JSON. Used are policy, num_frames (None for a baseline), frames_decoded,
            gmacs, the metric, ci95, and num_candidates where there are several T.
        path: a .svg or .png file; its folder is made.
    """
    target = check_curve_file(path)
    figure = cost_figure(rows, metric, title=title)
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = target.suffix[1:].lower()
    matplotlib, *_ = import_matplotlib()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}  # the same rows, the same bytes
    with replacing(target) as temporary, matplotlib.rc_context(_STYLE):
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
    from matplotlib.transforms import ScaledTranslation

    looks = looks_of_rows(rows)
    priced = lines_of([row for row in rows if (row.get("gmacs") or 0) > 0], metric, "gmacs")
    decoded = lines_of(rows, metric, "frames_decoded")
    entries = _legend_entries(decoded, looks)
    bars = len(decoded) <= _MAX_WITH_BARS
    panels = 2 if priced else 1
    height = max(_PANEL[1], _LEGEND_LINE * len(entries) + 0.9)
    with matplotlib.rc_context(_STYLE):
        figure = figure_class(figsize=(panels * _PANEL[0] + _LEGEND_WIDTH, height), layout="constrained")
        canvas_class(figure)
        *first, last = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        for axes in first:
            dress(axes, "GMACs a video, mean (log scale)", axis_name(metric), COLOURS)
            for line in priced:
                draw_line(axes, line, looks[line.policy], COLOURS, bars=bars)
            _log_axis(axes, [x for line in priced for x in line.xs])
        dress(last, "decoded frames a video, mean", "" if first else axis_name(metric), COLOURS)
        moved = _side_by_side(decoded)
        handles = []
        for line, by in zip(decoded, moved, strict=True):
            transform = last.transData + ScaledTranslation(by / 72, 0, figure.dpi_scale_trans) if by else None
            handles.append(draw_line(last, line, looks[line.policy], COLOURS, bars=bars, transform=transform))
        last.set_ylim(*_heights(decoded))
        # The last curve that was moved is inside; 72 points an inch.
        room = [1 - (max(0.0, by) + 12) / (72 * _PANEL[0]) for by in moved]
        last.set_xlim(0, max(line.xs[-1] / share for line, share in zip(decoded, room, strict=True)))
        last.xaxis.get_major_locator().set_params(integer=True)
        _add_legend(figure, entries, handles)
        text = _remarks(rows, priced, decoded, looks)
        figure.supxlabel(text, fontsize=8.5, color=COLOURS["faint"], x=0.01, ha="left", parse_math=False)
        if title:
            figure.suptitle(escaped(title), fontsize=11.5, color=COLOURS["ink"], x=0.01, ha="left", parse_math=False)
    return figure


def _log_axis(axes: Any, xs: Sequence[float]) -> None:
    from matplotlib import ticker

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    marks = ticker.LogLocator(subs=(1, 2, 5), numticks=50).tick_values(low, high)
    ticks = [tick for tick in marks if low <= tick <= high]
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


def _remarks(rows: Sequence[Row], priced: Sequence[Line], decoded: Sequence[Line], looks: Mapping[str, Look]) -> str:
    """Return the text below the panels; it names the policies whose multiply-adds are unknown, without oracles."""
    remarks = []
    if any(bounds is not None for line in decoded for bounds in line.bounds) and len(decoded) <= _MAX_WITH_BARS:
        remarks.append("bars: 95 % intervals")
    if priced and any(looks[line.policy].kind == ORACLE for line in decoded):
        remarks.append("oracles: what they know has no price in GMACs")
    if any(_side_by_side(decoded)):
        remarks.append("curves side by side decode the same number of frames")
    text = "; ".join(remarks)
    unpriced = [row for row in rows if not (row.get("gmacs") or 0) > 0 and looks[line_of(row)].kind != ORACLE]
    names = list(dict.fromkeys(shortened(line_of(row)) for row in unpriced))
    if names and not priced:
        text += "\nno panel of GMACs: those of the classifier are not known"
    elif names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        text += f"\nnot in the panel of GMACs, because theirs are not known: {', '.join(names[:_NAMED])}{more}"
    return text.strip()
