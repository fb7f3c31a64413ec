"""Densities of kernels between frames: one curve for each frame rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.video.candidates import segment_centres

if TYPE_CHECKING:
    from sosampler.evaluation.independence import Independence


Values = NDArray[np.float64]

# Equal values would make a curve without width.
_LEAST_WIDTH = 0.004
_MOST_VALUES = 5000  # of more, as many quantiles draw the same curve
_CUT = 4.0  # times the tallest reference curve
_PANEL = (6.4, 4.2)  # inches


def density(values: ArrayLike, grid: ArrayLike) -> Values:
    """Gaussian kernel density of values in 0..1 at the points of a grid, by Silverman's rule.

    What would fall below 0 or above 1 is folded back, so that the whole of it lies inside and adds up to one.
    """
    data, points = np.asarray(values, dtype=np.float64), np.asarray(grid, dtype=np.float64)
    if not len(data):
        raise InvalidArgument("a density needs at least one value; none were given")
    if data.min() < 0 or data.max() > 1:
        raise InvalidArgument(f"values run from {data.min():.3g} to {data.max():.3g}; kernels lie in 0..1")
    width = max(silverman(data), _LEAST_WIDTH)
    if len(data) > _MOST_VALUES:
        data = np.sort(data)[segment_centres(len(data), _MOST_VALUES)]
    folded = np.concatenate([data, -data, 2 - data])
    total = np.array([np.exp(-(((point - folded) / width) ** 2) / 2).sum() for point in points])
    found: Values = total / (len(data) * width * np.sqrt(2 * np.pi))
    return found


def silverman(data: Values) -> float:
    """0.9 min(standard deviation, IQR / 1.34) n^(-1/5); the IQR is left out where it is zero."""
    if len(data) < 2:
        return 0.0
    deviation = float(data.std(ddof=1))
    middle = float(np.subtract(*np.quantile(data, (0.75, 0.25)))) / 1.34
    shrink: float = len(data) ** -0.2
    return 0.9 * min(deviation, middle or deviation) * shrink


@dataclass(frozen=True, eq=False)
class Curve:
    """Values in 0..1 under one name."""

    label: str
    values: Values
    shade: float | None = None  # 0..1 on the colour scale; None for a dashed grey reference


@dataclass(frozen=True, eq=False)
class Panel:
    """Curves in one pair of axes."""

    title: str
    curves: tuple[Curve, ...]
    below: str = ""


def independence_figure(found: Independence, path: str | Path) -> Path:
    """Draw what `independence` found: for each classifier a panel, for each rate a curve."""
    panels = []
    for facts in found.classifiers:
        rows = [row for row in found.of(facts.classifier) if len(row.kernel.values)]
        curves = [
            Curve(f"{row.rate:g} fps", row.kernel.values, place / max(len(rows) - 1, 1))
            for place, row in enumerate(rows)
        ]
        curves.append(Curve("same video, far apart", facts.far.values))
        if len(facts.cross.values):
            curves.append(Curve("different videos", facts.cross.values))
        passed = "no measured rate" if facts.verdict is None else f"up to {facts.verdict:g} fps"
        warned = "; RANDOM WEIGHTS" if facts.untrained else ""
        title = f"{facts.classifier}, bandwidth {facts.bandwidth:.3g}{warned}"
        panels.append(Panel(title, tuple(curves), f"frames stand by themselves: {passed}"))
    return draw(panels, path, title=f"Adjacent frames of {found.videos} videos")


def draw(panels: Sequence[Panel], path: str | Path, *, title: str = "") -> Path:
    """Write a figure of densities, in the format of the path's suffix."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("figures need matplotlib; install sosampler[train]") from error

    if not panels:
        raise InvalidArgument("there is nothing to draw; give at least one panel")
    target = Path(path)
    figure = Figure(figsize=(_PANEL[0] * len(panels), _PANEL[1]), layout="constrained", dpi=130)
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _fill(axes, panel, colormaps["viridis_r"])
    with replacing(target) as temporary:
        figure.savefig(temporary)
    return target


def _fill(axes: Any, panel: Panel, colours: Any) -> None:
    least = min(float(curve.values.min()) for curve in panel.curves)
    grid = np.linspace(max(0.0, np.floor(least * 20 - 1) / 20), 1, 1001)
    dashes = iter(("--", ":", "-."))
    heights, references = [], []
    for curve in panel.curves:
        look = {"color": "0.45", "linestyle": next(dashes)} if curve.shade is None else {"color": colours(curve.shade)}
        heights.append(density(curve.values, grid))
        axes.plot(grid, heights[-1], label=curve.label, linewidth=1.6, **look)
        if curve.shade is None:
            references.append(heights[-1].max())
    tallest = max(height.max() for height in heights)
    # Near-duplicates at high rates make spikes beside which nothing else would be seen.
    top = min(tallest, _CUT * max(references)) if references else tallest
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("kernel of two frames\n" + panel.below if panel.below else "kernel of two frames")
    axes.set_ylabel("density" if top == tallest else "density (higher peaks are cut)")
    axes.set_xlim(grid[0], 1)
    axes.set_ylim(0, 1.05 * top)
    axes.legend(fontsize="small", frameon=False, loc="upper left")
