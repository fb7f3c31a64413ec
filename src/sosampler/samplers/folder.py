"""The folder of a saved sampler: config.json, model.safetensors and README.md; never pickled weights."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from sosampler._util.files import check_place, saved_kind, write_text
from sosampler._util.hub import download
from sosampler.classifiers.weights import State, build_within, load_weights, read_state, some_of, write_state
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.samplers.recipe import title_of
from sosampler.samplers.registry import CONFIG, KIND, MODEL, WEIGHTS, read_config

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SOSampler

CARD = "README.md"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Network = TypeVar("Network", bound=nn.Module)


def write_folder(folder: Path, sampler: SOSampler) -> None:
    """Write a sampler; each file appears complete, config.json last. A README.md written by the user is kept.

    Another sampler in the folder is replaced: its config.json is removed first, so that an interruption never leaves
    new weights with old settings.
    """
    check_place(folder, KIND, "sampler")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    (folder / MODEL).unlink(missing_ok=True)  # of the previous sampler
    write_state(folder / WEIGHTS, sampler.state_dict(), metadata={"format": "pt"})
    card = folder / CARD
    if not card.exists() or MARK in card.read_text(encoding="utf-8", errors="replace"):
        write_text(card, model_card(sampler.config, sampler.num_parameters, sampler.gmacs(1)))
    write_text(folder / CONFIG, json.dumps({"kind": KIND, **sampler.config}, indent=1, allow_nan=False) + "\n")


def read_folder(folder: Path, build: type[Network], settings: dict[str, Any]) -> Network:
    """Build the sampler of config.json, with its weights, in evaluation mode; `settings` override the file's."""
    config = read_config(folder)
    known = [name for name in signature(build.__init__).parameters if name != "self"]
    for origin, names in ((str(folder / CONFIG), config), ("the call", settings)):
        if unknown := sorted(set(names) - set(known)):
            raise WeightsError(
                f"{origin}: holds unknown settings ({some_of(unknown)}); allowed are {', '.join(known)}; "
                "if a newer sosampler wrote them, install that version"
            )
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
        advice = "copy the complete folder, or save the sampler again"
        if pickled:
            advice = f"{some_of(pickled)} could run code and is not loaded; save the sampler with save_pretrained"
        raise WeightsError(f"{folder}: has no {WEIGHTS}; {advice}")
    state = read_state(folder / WEIGHTS, names_as_they_are=True)
    if broken := not_finite(state):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(broken)} tensors hold NaN or infinite values: {some_of(broken)}; "
            "train or download the sampler again"
        )
    try:
        sampler: Network = build_within(lambda: build(**{**config, **settings}), folder / WEIGHTS, folder / CONFIG)
    except (InvalidArgument, TypeError) as error:
        raise WeightsError(
            f"{folder / CONFIG}: {first_line(error)}; save the sampler again, or fix the file"
        ) from error
    load_weights(sampler, state, where=str(folder / WEIGHTS))
    sampler.eval()
    return sampler


def is_sampler_folder(path: Any) -> bool:
    """Return whether this is a folder with the config.json of a saved sampler."""
    return saved_kind(path) == KIND


def not_finite(state: State) -> list[str]:
    """Return the names of tensors that hold NaN or infinite values."""
    floats = {key: tensor for key, tensor in state.items() if tensor.is_floating_point()}
    return sorted(key for key, tensor in floats.items() if not bool(torch.isfinite(tensor).all()))


def local_folder(source: str | Path, **options: Any) -> Path:
    """Return a local folder: `source` itself, or the download of an id on the hub with these options."""
    if not isinstance(source, (str, Path)):
        raise InvalidArgument(f"a sampler cannot be read from {source!r}; give its folder, or an id on the hub")
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise WeightsError(f"{folder}: is a file; give the folder of a saved sampler")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise WeightsError(
            f"{source}: no such folder; give the folder of a saved sampler, or an id OWNER/NAME on the Hugging Face hub"
        )
    try:
        return download(source, [CONFIG, WEIGHTS, CARD, MODEL], **options)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{source}: is no local folder, and the Hugging Face hub has no such sampler ({first_line(error)}); "
            "check the name, the connection and, for a private one, the login; without a network, copy the sampler's "
            f"folder ({CONFIG}, {WEIGHTS}) to this machine and give its path instead"
        ) from error


# ---- the model card

MARK = "<!-- written by sosampler; without this line the file is left as it is -->"

_HEAD = f"""\
---
library_name: sosampler
tags:
- video-classification
- frame-selection
---
{MARK}

# Frame sampler

A small network that scores every candidate frame of a video by how well it shows what the video is about. The best
few frames go to a video classifier, which is not changed; the rest are not needed.
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
    """Return the text of README.md; `config` holds a sampler's arguments, its `about` the facts of its training."""
    about, shift = config["about"], config["shift"]
    recipe, probe = about.get("recipe"), config.get("probe")
    rows = {
        **({"trained as": title_of(recipe)} if isinstance(recipe, dict) and recipe else {}),
        "backbone": config["backbone"],
        "temporal shift": f"one in {shift} channels to each side" if shift else "none, each frame is seen alone",
        "input": f"RGB, {config['input_size']}x{config['input_size']}, ImageNet's mean and std",
        "classes of its class head": config["num_classes"] or "no class head",
        "score": config["scoring"] or "the importance head",
        "calibration": config["calibration"] or "none, scores only rank",
        **({"frames": f"1 to {config['budget']}, by its budget head"} if config.get("budget") else {}),
        **({"answer": config["answer"]["default"]} if config.get("answer") else {}),
        **({"probe": "of the classifier {classifier}, {width} features".format(**probe)} if probe else {}),
        "parameters": f"{num_parameters / 1e6:.2f} M",
        "cost": f"{gmacs_per_frame:.3f} giga multiply-adds per candidate",
    }
    return "\n".join([_HEAD, "## Network\n\n" + _table(rows), _training(about), _limits(config, about), _USE])


def _training(about: dict[str, Any]) -> str:
    """Return single values as a table, dicts and lists as JSON below it."""
    single = {key: value for key, value in about.items() if not isinstance(value, (dict, list))}
    text = "## Training\n\n" + (_table(single) if single else "" if about else "Unknown.\n")
    for key, value in about.items():
        if key not in single:
            code = json.dumps(value, indent=1).replace("```", "'''")
            text += f"\n{_cell(key)}:\n\n```json\n{code}\n```\n"
    return text


def _limits(config: dict[str, Any], about: dict[str, Any]) -> str:
    classifier = about.get("classifier")
    name = f"the classifier {_cell(classifier)}" if isinstance(classifier, str) else "its classifier"
    text = (
        "## Limits\n\n"
        f"A high score means that {name} is likely to be confident in the frame.\n"
        "For other classifiers and other kinds of videos, measure it with `sosampler evaluate` first.\n"
    )
    if config["shift"]:
        text += "Through the shift a score also depends on the neighbouring candidates, so on their distance in time.\n"
    if config["scoring"]:
        text += "A score also depends on what the other candidates show, so compare scores within one video only.\n"
    return text


def _table(rows: dict[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {_cell(key)} | {_cell(value)} |\n" for key, value in rows.items())


def _cell(value: Any) -> str:
    """Return one line that cannot break the table."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
