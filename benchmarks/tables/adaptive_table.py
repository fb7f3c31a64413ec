"""The table and the picture of docs/adaptive.md, from adaptive.json.

python benchmarks/tables/adaptive_table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "adaptive.json"
NAMES = {"belief": "by belief (recipe `default`)", "importance": "by the importance head alone"}
_SHOWN = (1, 2, 3, 4, 6)
_MOST_DRAWN = 6  # frames; more only do harm
_COLOURS = {"belief": "#0060a8", "importance": "#00704f"}
_PAPER, _GRID, _INK, _FAINT = "#ffffff", "#e4e7ec", "#16191d", "#59616b"


def table(result: dict[str, Any]) -> str:
    """Return Markdown: fixed N, and the adaptive number at each tolerance, for each policy."""
    parts = []
    for name, rule in result["rules"].items():
        best = rule["dev_best_fixed"]
        lines = [
            f"| {NAMES[name]} | mean N | top-1, % | minus N = 1 | minus N = 2 | minus N = 3 | minus the same mean N |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rule["fixed"]:
            if row["num_frames"] in (*_SHOWN, best):
                note = ", best on dev" if row["num_frames"] == best else ""
                lines.append(
                    f"| N = {row['num_frames']}{note} | {row['num_frames']} | {_share(row['test_top1'])} | | | | |"
                )
        for row in rule["auto"]:
            default = " (default)" if row["tolerance"] == result["default"]["tolerance"] else ""
            differences = " | ".join(_difference(row["minus_fixed"].get(str(k))) for k in (1, 2, 3))
            lines.append(
                f"| auto, tolerance {row['tolerance']:g}{default} | {row['mean_frames']['value']:.2f} | "
                f"{_share(row['test_top1'])} | {differences} | {_difference(row['minus_mixed'])} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _share(measured: dict[str, Any]) -> str:
    low, high = measured["ci95"]
    return f"{100 * measured['value']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _difference(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    low, high = measured["ci95"]
    return f"{100 * measured['value']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def write_picture(result: dict[str, Any], path: Path) -> None:
    """Draw top-1 on test against the mean number of frames, a panel for each policy."""
    from sosampler._util.files import replacing
    from sosampler.figures.curves import import_matplotlib

    matplotlib, *_ = import_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": _FAINT, "text.color": _INK}):
        figure = Figure(figsize=(9.4, 4.0), facecolor=_PAPER, layout="constrained")
        axes = figure.subplots(1, len(result["rules"]), sharey=True, squeeze=False)[0]
        for axis, (name, rule) in zip(axes, result["rules"].items(), strict=True):
            _panel(axis, name, rule, result["default"]["tolerance"])
        axes[0].set_ylabel("top-1 on test, %")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=160, facecolor=_PAPER, metadata={"Software": None})


def _panel(axis: Any, name: str, rule: dict[str, Any], tolerance: float) -> None:
    colour = _COLOURS[name]
    fixed = [(row["num_frames"], row["test_top1"]) for row in rule["fixed"] if row["num_frames"] <= _MOST_DRAWN]
    by_itself = [(row["mean_frames"]["value"], row["test_top1"]) for row in rule["auto"]]
    for points, label, mark, line, ink in (
        (fixed, "fixed N", "s", "--", _FAINT),
        (by_itself, "auto, several tolerances", "o", "-", colour),
    ):
        across, up = [x for x, _ in points], [100 * measured["value"] for _, measured in points]
        bounds = [[100 * measured["ci95"][side] for _, measured in points] for side in (0, 1)]
        axis.fill_between(across, bounds[0], bounds[1], color=ink, alpha=0.12, linewidth=0)
        axis.plot(across, up, marker=mark, linestyle=line, color=ink, label=label, markersize=4.5, linewidth=1.4)
    default = next((row for row in rule["auto"] if row["tolerance"] == tolerance), None)
    if default is not None:
        point = default["mean_frames"]["value"], 100 * default["test_top1"]["value"]
        axis.plot(*point, marker="o", markersize=11, markerfacecolor="none", markeredgecolor=colour, linestyle="none")
        axis.annotate(
            f"default: {point[1]:.1f} % with {point[0]:.2f} frames",
            point,
            textcoords="axes fraction",
            xytext=(0.98, 0.95),
            horizontalalignment="right",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8},
        )
    axis.set_title(NAMES[name].replace("`", ""), fontsize=10)
    axis.set_xlabel("frames that the classifier sees, mean over videos")
    axis.grid(color=_GRID)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_xlim(0.8, _MOST_DRAWN + 0.2)
    axis.margins(y=0.12)
    axis.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(RESULTS.read_text(encoding="utf-8"))) + "\n")
