"""Print the README's table of decoding speed from decode.json."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "decode.json"
ROWS = [
    ("32 keyframe candidates, 1 thread", "keyframe T=32", "torchcodec exact T=32"),
    ("32 exact candidates, 1 thread", "exact T=32", "torchcodec exact T=32"),
    ("10 keyframe candidates, 1 thread, against 6 uniform frames", "keyframe T=10", "torchcodec exact N=6"),
    (
        "the same with 2 threads each",
        "keyframe T=10, 2 threads",
        "torchcodec exact N=6, 2 threads",
    ),
]
LAYOUTS = {"gop250": "every 250 frames", "default": "x264's choice", "gop30": "every 30 frames"}


def table(result: dict) -> str:
    """How many times faster than torchcodec, from the slowest to the fastest of the clips."""
    lines = [f"| keyframes: | {' | '.join(LAYOUTS.values())} |", "|---" * (1 + len(LAYOUTS)) + "|"]
    for title, way, reference in ROWS:
        cells = []
        for layout in LAYOUTS:
            ratios = [
                row["times_faster"]
                for video in result["videos"]
                if video["layout"] == layout
                for row in video["comparisons"]
                if (row["way"], row["reference"]) == (way, reference)
            ]
            cells.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(RESULTS.read_text())))
