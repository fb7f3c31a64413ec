"""Draw the bar chart of README.md: how long it takes to choose eight frames, beside other tools.

    python benchmarks/tables/select_chart.py benchmarks/results/select.json --out docs/images/select_speed.svg

Takes the result of `sosampler bench select --peers PYTHON`. One bar a tool and keyframe layout: the median over clips
of the median over rounds, from the start of the process on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from sosampler.bench.select import PROCESS, SCENEDETECT, THUMBNAIL, VIDEO_SAMPLER
from sosampler.figures.curves import import_matplotlib

TOOLS = {PROCESS: "#0b6e6e", VIDEO_SAMPLER: "#8a94a0", THUMBNAIL: "#aab2bb", SCENEDETECT: "#c8ced4"}  # colour
LAYOUTS = {"gop250": "a keyframe every 250 frames", "default": "x264's choice", "gop30": "every 30 frames"}


def medians(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the seconds of each tool and layout that were measured."""
    rows: dict[tuple[str, str], list[float]] = {}
    for video in result["videos"]:
        for tool in TOOLS:
            if tool in video["seconds"]:
                rows.setdefault((tool, video["layout"]), []).append(statistics.median(video["seconds"][tool]))
    return {key: statistics.median(seconds) for key, seconds in rows.items()}


def draw(result: dict[str, Any], out: Path) -> None:
    _, figure_class, _ = import_matplotlib()
    seconds = medians(result)
    tools = [tool for tool in TOOLS if any(tool == name for name, _ in seconds)]
    figure = figure_class(figsize=(7.2, 0.5 + 0.26 * (len(tools) + 1) * len(LAYOUTS)))
    axes = figure.add_subplot()
    ticks = []
    for group, layout in enumerate(LAYOUTS):
        for place, tool in enumerate(tools):
            if (tool, layout) not in seconds:
                continue
            height = -(group * (len(tools) + 1) + place)
            value = seconds[tool, layout]
            axes.barh(height, value, height=0.85, color=TOOLS[tool])
            axes.text(value, height, f" {value:.1f} s", va="center", fontsize=8)
        ticks.append(-(group * (len(tools) + 1) + (len(tools) - 1) / 2))
    axes.set_yticks(ticks, list(LAYOUTS.values()), fontsize=9)
    machine = result["machine"]
    axes.set_xlabel(
        f"seconds for 8 frames of five minutes of 720p ({machine['cores']} cores, {machine['cpu']})", fontsize=8
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    patches = [axes.barh([0], [0], color=TOOLS[tool]) for tool in tools]
    axes.legend(patches, tools, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(tools))
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(json.loads(given.result.read_text(encoding="utf-8")), given.out)


if __name__ == "__main__":
    main()
