"""The model card of a sampler: what it is, for which classifier, how it was trained, how to use it."""

from __future__ import annotations

import json
from typing import Any

MARK = "<!-- written by sosampler; without this line the file is left as it is -->"

_HEAD = """\
---
library_name: sosampler
tags:
- video-classification
- frame-selection
---
"""

_WHAT = """\
# Frame sampler

A small network that looks at every candidate frame of a video and scores how much it tells about what the video
shows. The best few frames go to a video classifier, which stays as it is; the rest need not be looked at.
"""

_USE = """\
## Use

```python
import sosampler as so

sampler = so.SOSampler.from_pretrained("this folder, or its id on the hub")
chosen = so.select("video.mp4", 6, policy=sampler)       # the frames and their times
scores = sampler.score(frames)                           # uint8 [B, T, 3, H, W] -> [B, T]
```
"""


def model_card(config: dict[str, Any], num_parameters: int, gmacs_per_frame: float) -> str:
    """The text of README.md; `config` holds a sampler's arguments, its `about` what training told."""
    about = config.get("about") or {}
    parts = [_HEAD + MARK + "\n", _WHAT, _network(config, num_parameters, gmacs_per_frame)]
    parts.append(_training(about) if about else "## Training\n\nNothing is known about its training.\n")
    parts += [_limits(config, about), _USE]
    return "\n".join(parts)


def _network(config: dict[str, Any], num_parameters: int, gmacs_per_frame: float) -> str:
    shift = config["shift"]
    rows = {
        "backbone": config["backbone"],
        "temporal shift": f"one in {shift} channels to each side" if shift else "none, frames are looked at one by one",
        "input": f"RGB, {config['input_size']}x{config['input_size']}, ImageNet's mean and std",
        "classes of its class head": config["num_classes"] or "no class head",
        "score": config["scoring"] or "the importance head",
        "calibration": config["calibration"] or "none, scores only rank",
        "parameters": f"{num_parameters / 1e6:.2f} M",
        "cost": f"{gmacs_per_frame:.3f} giga multiply-adds a candidate",
    }
    return "## Network\n\n" + _table(rows)


def _training(about: dict[str, Any]) -> str:
    """Single values as a table, what holds more as JSON below it."""
    single = {key: value for key, value in about.items() if not isinstance(value, (dict, list))}
    larger = {key: value for key, value in about.items() if isinstance(value, (dict, list))}
    text = "## Training\n\n" + (_table(single) if single else "")
    for key, value in larger.items():
        text += f"\n{_cell(key)}:\n\n{_code(value)}"
    return text


def _limits(config: dict[str, Any], about: dict[str, Any]) -> str:
    classifier = about.get("classifier")
    whose = f"the classifier {_cell(classifier)}" if isinstance(classifier, str) else "its classifier"
    text = (
        "## Limits\n\n"
        f"Its scores say which frames {whose} is likely to be sure about.\n"
        "For other classifiers and other kinds of videos measure first: `sosampler evaluate`.\n"
    )
    if config["shift"]:
        text += "Through the shift a score also depends on the neighbouring candidates, so on how densely they lie.\n"
    if config["scoring"]:
        text += "A score also depends on what the other candidates show, so compare scores within one video only.\n"
    return text


def _table(rows: dict[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {_cell(key)} | {_cell(value)} |\n" for key, value in rows.items())


def _cell(value: Any) -> str:
    """One line that cannot break out of its place."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _code(value: Any) -> str:
    return "```json\n" + json.dumps(value, indent=1).replace("```", "'''") + "\n```\n"
