"""Densities of kernels between frames: one curve for each frame rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.video.candidates import segment_centres

Values = NDArray[np.float64]

# Equal values would make a curve without width.
_MIN_WIDTH = 0.004
_MAX_VALUES = 5000  # of more, as many quantiles draw the same curve
_CLIP = 4.0  # times the tallest reference curve
_PANEL = (6.4, 4.2)  # inches


def density(values: ArrayLike, grid: ArrayLike) -> Values:
    """Return the Gaussian kernel density of values in 0..1 at the points of a grid, by Silverman's rule.

    What falls below 0 or above 1 is reflected, so that the density integrates to one over 0..1.
    """
    data, points = np.asarray(values, dtype=np.float64), np.asarray(grid, dtype=np.float64)
    if not len(data):
        raise InvalidArgument("a density needs at least one value; none were given")
    if data.min() < 0 or data.max() > 1:
        raise InvalidArgument(f"values run from {data.min():.3g} to {data.max():.3g}; kernels lie in 0..1")
    width = max(silverman(data), _MIN_WIDTH)
    if len(data) > _MAX_VALUES:
        data = np.sort(data)[segment_centres(len(data), _MAX_VALUES)]
    folded = np.concatenate([data, -data, 2 - data])
    total = np.array([np.exp(-(((point - folded) / width) ** 2) / 2).sum() for point in points])
    return np.asarray(total / (len(data) * width * np.sqrt(2 * np.pi)))


def silverman(data: Values) -> float:
    """Return 0.9 min(standard deviation, IQR / 1.34) n^(-1/5); the IQR is left out where it is zero."""
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


def independence_figure(result: Any, path: str | Path) -> Path:
    """Draw an `Independence`: for each classifier a panel, for each rate a curve."""
    panels = []
    for facts in result.classifiers:
        rows = [row for row in result.of(facts.classifier) if len(row.kernel.values)]
        curves = [
            Curve(f"{row.rate:g} fps", row.kernel.values, number / max(len(rows) - 1, 1))
            for number, row in enumerate(rows)
        ]
        curves.append(Curve("same video, far apart", facts.far.values))
        if len(facts.cross.values):
            curves.append(Curve("different videos", facts.cross.values))
        passed = "no measured rate" if facts.verdict is None else f"up to {facts.verdict:g} fps"
        warned = "; RANDOM WEIGHTS" if facts.untrained else ""
        title = f"{facts.classifier}, bandwidth {facts.bandwidth:.3g}{warned}"
        panels.append(Panel(title, tuple(curves), f"frames are independent: {passed}"))
    return draw(panels, path, title=f"Adjacent frames of {result.videos} videos")


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
    lowest = min(float(curve.values.min()) for curve in panel.curves)
    grid = np.linspace(max(0.0, np.floor(lowest * 20 - 1) / 20), 1, 1001)
    dashes = iter(("--", ":", "-."))
    heights, references = [], []
    for curve in panel.curves:
        style = {"color": "0.45", "linestyle": next(dashes)} if curve.shade is None else {"color": colours(curve.shade)}
        heights.append(density(curve.values, grid))
        axes.plot(grid, heights[-1], label=curve.label, linewidth=1.6, **style)
        if curve.shade is None:
            references.append(heights[-1].max())
    tallest = max(height.max() for height in heights)
    # Near-duplicates at high rates make peaks beside which nothing else would be visible.
    top = min(tallest, _CLIP * max(references)) if references else tallest
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel("kernel of two frames\n" + panel.below if panel.below else "kernel of two frames")
    axes.set_ylabel("density" if top == tallest else "density (higher peaks are clipped)")
    axes.set_xlim(grid[0], 1)
    axes.set_ylim(0, 1.05 * top)
    axes.legend(fontsize="small", frameon=False, loc="upper left")
