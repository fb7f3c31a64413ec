"""The model card of the general sampler, the facts that its config.json keeps, and the tables of its page."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.speed_table import LAYOUTS
from sosampler.bench.select import AUTO, EXACT, KEYFRAME, PROCESS, THUMBNAIL, THUMBNAIL_KEYS

_CARD = """\
---
library_name: sosampler
tags:
- frame-selection
- video-summarization
---

# General frame sampler

Chooses frames of any video without training: clear pictures that show what the video shows, none twice. It ships with
sosampler as `model.onnx` and runs on onnxruntime, without torch.

```python
import sosampler as so

so.select("video.mp4", num_frames=8)  # the default policy, "general"
```

## What it is

| | |
|---|---|
| network | MobileNetV2, ImageNet start weights (MIT), 128x128 RGB, each frame by itself; weights in half precision |
| says of each frame | how much of its content is left (log-odds), and 1280 features |
| chooses by | quality, likeness to the other candidates, movement, unlikeness to the chosen, coverage in time |
| settings of the choice | {settings} |
| cost | 0.098 giga multiply-adds a candidate |

## What it learned from

No labels. {pictures}
Each picture was shown as it is and spoiled: blurred by movement or focus, darkened, bleached, plain, written on, half
way over to another picture, noisy, coarse, heavily compressed. The teacher is ImageNet's ResNet-50. The student learned
what the teacher still says of the spoiled frame compared with the clean one, how sure it is, and which frames it finds
alike.
{frames} frames, {steps} steps of {batch}, AdamW, on {device} in {seconds:.0f} s, seed {seed}; all of the network is
trained, and kept is epoch {epoch}, the best on dev. Then all weights are taken {share:.0f} % of the way back to
ImageNet's, which on dev gave back likeness and cost little of what was learned about faults. The licences of most
pictures and clips are not stated by their sources; none of them is in the package. On held-out pictures, before that:
cross-entropy of what is left {retained} ({retained_before} before training), mean squared error of likeness {likeness}
({likeness_before} before).

The settings of the choice were set later, with the network as it is, on held-out pictures and groups: composed films
and slide shows, clips of a single shot (UCF101, MSVD, airtlab, yoga), streams of action clips (UCF101, J-HMDB, MSVD)
and golf swings. Nothing was trained on them, and none of them is in the package.

## Limits

- Sports, everyday objects, people in rooms, golf and yoga: that is what it saw. Medical, satellite, screen and
  microscope pictures and night scenes were not among it. Drawings and computer-made shapes look plain to it.
- A frame half way between two shots is found by its neighbours among the candidates, or by the network. In long
  videos, whose candidates lie many seconds apart, the network alone is left.
- Slides, credits and other frames of text are taken for title cards and avoided. Give `prefer="text"` where text is the
  content: that choice is made without the network.
- It prefers what the video shows most. A single short shot of something else is left out when few frames are asked for.
- It looks at 128 x 128 pixels: slight blur of a large frame is invisible to it.
- It knows nothing of your classifier or your question; a sampler trained for them chooses better.
- Faults in its measurement are made in the same way as those in its training, from other pictures, clips and fonts.
"""


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the facts into config.json, and the card."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["about"] = about(results["training"], results["choice"])
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(config["about"]), encoding="utf-8")


def about(trained: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Facts, as plain JSON values."""
    return {
        "data": "2080 web pictures of 22 sports and of ImageNet, and 1076 frames of 269 clips (airtlab, yoga, golfdb)",
        "teacher": "ResNet-50, ImageNet",
        **{name: trained[name] for name in ("frames", "steps", "epoch", "seconds", "device")},
        "batch": trained["settings"]["pictures"] * (1 + trained["settings"]["spoiled"]),
        "seed": trained["settings"]["seed"],
        "share_of_start": trained.get("share_of_start", 0.0),
        "dev": {name: trained["dev"][name] for name in _LOSSES},
        "dev_of_imagenet": {name: trained["dev_of_imagenet"][name] for name in _LOSSES},
        "choice": chosen["chosen"],
    }


_LOSSES = ("retained", "sure", "likeness")


def card(facts: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in facts["choice"].items())
    return _CARD.format(
        settings=settings,
        pictures=f"{facts['data']}.",
        **{name: facts[name] for name in ("frames", "steps", "batch", "epoch", "device", "seconds", "seed")},
        share=100 * facts["share_of_start"],
        retained=facts["dev"]["retained"],
        likeness=facts["dev"]["likeness"],
        retained_before=facts["dev_of_imagenet"]["retained"],
        likeness_before=facts["dev_of_imagenet"]["likeness"],
    )


# ---- tables


def tables(result: dict[str, Any]) -> dict[str, str]:
    """What `measure` found, in Markdown, by set."""
    films = _table(
        [
            "policy",
            "N",
            "faulty (95 %)",
            "black or white",
            "blurred",
            "title",
            "transition",
            "shots shown (95 %)",
        ],
        [
            [
                *(row["policy"], row["num_frames"]),
                _with_interval(row, "faulty"),
                *(_percent(value) for value in (row["black"] + row["white"], row["blurred"], row["title"])),
                _percent(row["transition"]),
                _with_interval(row, "shots shown"),
            ]
            for row in _sorted(result["films"]["rows"])
        ],
    )
    stills = _table(
        ["policy", "N", "repeated (95 %)", "pictures shown (95 %)"],
        [
            [row["policy"], row["num_frames"], _with_interval(row, "repeated"), _with_interval(row, "shots shown")]
            for row in _sorted(result["stills"]["rows"])
        ],
    )
    return {
        "overview": _overview(result),
        "films": films,
        "stills": stills,
        "single": _measured(result["single"], ("largest gap", "bunched")),
        "streams": _measured(result["streams"], ("actions shown", "shots shown")),
        "talks": _measured(result["talks"], ("shots shown", "repeated")),
        "reels": _by_number(result["reels"]["rows"], "top1"),
        "golf": _by_number(result["golf"]["rows"], "hit"),
        "candidates": _candidates(result["candidates"]),
    }


def same_choice(part: dict[str, Any]) -> str:
    """For how many clips the choice does not depend on the size of the frames."""
    return (
        f"The choice does not depend on the size of the frames: with {len(part['sizes'])} sizes it is the same for "
        f"{part['same']} of {part['videos']} clips of a single shot."
    )


_TIMED = {
    "`general`, `auto` candidates": AUTO,
    "`general`, `exact` candidates": EXACT,
    "`general`, `keyframe` candidates": KEYFRAME,
    "`general`, `auto` candidates, `sosampler select` from its start on": PROCESS,
    "ffmpeg's `thumbnail` filter": THUMBNAIL,
    "ffmpeg's `thumbnail` filter on keyframes alone": THUMBNAIL_KEYS,
}


def times(result: dict[str, Any]) -> str:
    """What `bench select` found, in seconds: medians over the clips of medians over the rounds."""
    lines = []
    for title, way in _TIMED.items():
        cells = []
        for layout in LAYOUTS:
            rounds = [video["seconds"][way] for video in result["videos"] if video["layout"] == layout]
            cells.append(f"{median(median(seconds) for seconds in rounds):.2f}")
        lines.append([title, *cells])
    return _table(["keyframes:", *LAYOUTS.values()], lines)


_OVERVIEW = {
    "faulty frames": ("films", "faulty"),
    "shots shown": ("films", "shots shown"),
    "largest gap": ("single", "largest gap"),
    "bunched": ("single", "bunched"),
    "golf moments": ("golf", "hit"),
    "action clips": ("streams", "actions shown"),
}


def _overview(result: dict[str, Any], number: int = 8) -> str:
    """One line a policy: what matters most, at N = 8."""
    names = dict.fromkeys(row["policy"] for part, _ in _OVERVIEW.values() for row in result[part]["rows"])
    lines = []
    for name in names:
        line = [name]
        for part, key in _OVERVIEW.values():
            rows = [row for row in result[part]["rows"] if (row["policy"], row["num_frames"]) == (name, number)]
            line.append(_percent(rows[0][key]) if rows else "")
        lines.append(line)
    return _table(["policy", *_OVERVIEW], lines)


def _candidates(part: dict[str, Any]) -> str:
    """One line a kind of candidates."""
    keys = {name: where for name, where in _OVERVIEW.items() if where[0] in part}
    modes = [row["candidates"] for row in part["films"]["rows"]]
    of = {(name, row["candidates"]): row for name, found in part.items() if name != "seconds" for row in found["rows"]}
    lines = [[f"`{mode}`", *(_with_interval(of[name, mode], key) for name, key in keys.values())] for mode in modes]
    return _table(["candidates", *(f"{name} (95 %)" for name in keys)], lines)


def _measured(part: dict[str, Any], keys: tuple[str, ...]) -> str:
    rows = [
        [row["policy"], row["num_frames"], *(_with_interval(row, key) for key in keys)] for row in _sorted(part["rows"])
    ]
    return _table(["policy", "N", *(f"{key} (95 %)" for key in keys)], rows)


def _by_number(rows: list[dict[str, Any]], key: str) -> str:
    numbers = sorted({row["num_frames"] for row in rows})
    names = list(dict.fromkeys(row["policy"] for row in rows))
    of = {(row["policy"], row["num_frames"]): row for row in rows}
    lines = [[name, *(_with_interval(of.get((name, n)), key) for n in numbers)] for name in names]
    return _table(["policy", *(f"N={number}" for number in numbers)], lines)


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["num_frames"])


def _with_interval(row: dict[str, Any] | None, key: str) -> str:
    if row is None:
        return ""
    low, high = row[f"{key} ci95"]
    return f"{_percent(row[key])} ({_percent(low)} to {_percent(high)})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
