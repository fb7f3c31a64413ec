"""Densities of kernels between frames: one curve for each frame rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.video.candidates import segment_centres

Values = NDArray[np.float64]

_MIN_WIDTH = 0.004  # equal values would make a curve without width
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
    reflected = np.concatenate([data, -data, 2 - data])
    total = np.array([np.exp(-(((point - reflected) / width) ** 2) / 2).sum() for point in points])
    return np.asarray(total / (len(data) * width * np.sqrt(2 * np.pi)))


def silverman(data: Values) -> float:
    """Return 0.9 min(standard deviation, IQR / 1.34) n^(-1/5); the IQR is left out where it is zero."""
    if len(data) < 2:
        return 0.0
    deviation = float(data.std(ddof=1))
    middle = float(np.subtract(*np.quantile(data, (0.75, 0.25)))) / 1.34
    shrink: float = len(data) ** -0.2
    return 0.9 * min(deviation, middle or deviation) * shrink


def independence_figure(result: Any, path: str | Path) -> Path:
    """Draw an `Independence` in the format of the path's suffix: a panel for each classifier, a curve for each rate."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("figures need matplotlib; install sosampler[train]") from error

    target, count = Path(path), len(result.classifiers)
    figure = Figure(figsize=(_PANEL[0] * count, _PANEL[1]), layout="constrained", dpi=130)
    figure.suptitle(f"Adjacent frames of {result.videos} videos")
    for axes, facts in zip(figure.subplots(1, count, squeeze=False)[0], result.classifiers, strict=True):
        _draw_panel(axes, facts, result.of(facts.classifier), colormaps["viridis_r"])
    with replacing(target) as temporary:
        figure.savefig(temporary)
    return target


def _draw_panel(axes: Any, facts: Any, rows: Any, colours: Any) -> None:
    rows = [row for row in rows if len(row.kernel.values)]
    references = {"same video, far apart": facts.far.values}
    if len(facts.cross.values):
        references["different videos"] = facts.cross.values
    curves = [
        (f"{row.rate:g} fps", row.kernel.values, {"color": colours(number / max(len(rows) - 1, 1))})
        for number, row in enumerate(rows)
    ]
    curves += [
        (label, values, {"color": "0.45", "linestyle": dash})
        for (label, values), dash in zip(references.items(), ("--", ":"), strict=False)
    ]
    lowest = min(float(values.min()) for _, values, _ in curves)
    grid = np.linspace(max(0.0, np.floor(lowest * 20 - 1) / 20), 1, 1001)
    heights = [density(values, grid) for _, values, _ in curves]
    for (label, _, style), height in zip(curves, heights, strict=True):
        axes.plot(grid, height, label=label, linewidth=1.6, **style)
    tallest = max(height.max() for height in heights)
    # Near-duplicates at high rates make peaks beside which nothing else would be visible.
    top = min(tallest, _CLIP * max(height.max() for height in heights[len(rows) :]))
    passed = "no measured rate" if facts.verdict is None else f"up to {facts.verdict:g} fps"
    warning = "; RANDOM WEIGHTS" if facts.untrained else ""
    axes.set_title(f"{facts.classifier}, bandwidth {facts.bandwidth:.3g}{warning}", fontsize="medium")
    axes.set_xlabel(f"kernel of two frames\nframes stand by themselves: {passed}")
    axes.set_ylabel("density" if top == tallest else "density (higher peaks are clipped)")
    axes.set_xlim(grid[0], 1)
    axes.set_ylim(0, 1.05 * top)
    axes.legend(fontsize="small", frameon=False, loc="upper left")
