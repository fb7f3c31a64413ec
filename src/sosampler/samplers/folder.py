"""The folder of a saved sampler: config.json, model.safetensors and README.md; never pickled weights."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from sosampler._util.files import check_place, replacing, saved_kind
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.classifiers.weights import State, load_weights, read_state, some_of
from sosampler.errors import InvalidArgument, WeightsError, first_line

KIND = "sosampler sampler"  # how the folder is told from that of a classifier or of another library
CARD = "README.md"
EXPORTED = "model.onnx"  # written by `sosampler export`

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


Network = TypeVar("Network", bound=nn.Module)


class Savable(Protocol):
    """What a sampler must have to be written: its arguments as JSON values, its tensors, facts for the card."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def num_parameters(self) -> int: ...

    def gmacs(self, num_candidates: int) -> float: ...

    def state_dict(self) -> State: ...


def write_folder(folder: Path, sampler: Savable) -> None:
    """Each file appears whole or not at all, config.json last; a README.md of the user's own is left alone.

    Another sampler in the folder is replaced: its config.json goes first, so that a kill in between never leaves new
    weights under old settings.
    """
    from safetensors.torch import save

    check_place(folder, KIND, "sampler")
    folder.mkdir(parents=True, exist_ok=True)
    # Copies, because tensors that share memory cannot be saved.
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in sampler.state_dict().items()}
    (folder / CONFIG).unlink(missing_ok=True)
    (folder / EXPORTED).unlink(missing_ok=True)  # of the sampler before
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save(copies, metadata={"format": "pt"}))
    card = folder / CARD
    if not card.exists() or MARK in card.read_text(encoding="utf-8", errors="replace"):
        with replacing(card) as temporary:
            temporary.write_text(model_card(sampler.config, sampler.num_parameters, sampler.gmacs(1)), encoding="utf-8")
    with replacing(folder / CONFIG) as temporary:
        told = {"kind": KIND, **sampler.config}
        temporary.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_folder(folder: Path, build: type[Network], settings: dict[str, Any]) -> Network:
    """Build the sampler that config.json describes, with its weights, in evaluation mode.

    `settings` replace those of the file.
    """
    told = read_config(folder)
    known = [name for name in signature(build.__init__).parameters if name != "self"]
    for origin, names in ((str(folder / CONFIG), told), ("the call", settings)):
        strange = sorted(set(names) - set(known))
        if strange:
            raise WeightsError(
                f"{origin}: holds unknown settings ({some_of(strange)}); allowed are {', '.join(known)}; "
                "if a newer sosampler wrote them, install that one"
            )
    state = read_state(_weights_file(folder), names_as_they_are=True)
    if broken := not_finite(state):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(broken)} tensors hold numbers that are not finite: {some_of(broken)}; "
            "train or fetch the sampler again"
        )
    try:
        sampler: Network = build(**{**told, **settings})
    except (InvalidArgument, TypeError) as error:
        raise WeightsError(
            f"{folder / CONFIG}: {first_line(error)}; save the sampler again, or mend the file"
        ) from error
    load_weights(sampler, state, where=str(folder / WEIGHTS))
    sampler.eval()
    return sampler


def is_sampler_folder(path: Any) -> bool:
    """Whether this is a folder with the config.json of a saved sampler; looks at nothing else."""
    return saved_kind(path) == KIND


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in config.json, or what is wrong with the folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise WeightsError(
            f"{folder}: has no {CONFIG}, so it is not a saved sampler; give a folder that training wrote"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise WeightsError(f"{path}: is not JSON ({first_line(error)}); save the sampler again") from error
    if not isinstance(told, dict) or told.get("kind") != KIND:
        kind = told.get("kind") if isinstance(told, dict) else None
        what = f"a {kind}" if isinstance(kind, str) else "something else"
        raise WeightsError(f"{folder}: holds {what} instead of a sampler; give a folder that training a sampler wrote")
    return {key: value for key, value in told.items() if key != "kind"}


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = sorted(found.name for pattern in _PICKLED for found in folder.glob(pattern))
        if pickled:
            raise WeightsError(
                f"{folder}: has no {WEIGHTS} but {some_of(pickled)}; pickled weights could run code and are not "
                f"loaded; save the sampler with save_pretrained, which writes {WEIGHTS}"
            )
        raise WeightsError(f"{folder}: has no {WEIGHTS}; copy the whole folder, or save the sampler again")
    return path


def not_finite(state: State) -> list[str]:
    """Names of the tensors that hold numbers which are none."""
    real = {key: tensor for key, tensor in state.items() if tensor.is_floating_point()}
    return sorted(key for key, tensor in real.items() if not bool(torch.isfinite(tensor).all()))


def local_folder(source: str | Path, **options: Any) -> Path:
    """The folder itself, or where the files of an id on the Hugging Face hub were downloaded to.

    `options` are those of the hub's download: revision, token, cache_dir, force_download, local_files_only.
    """
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
    return _downloaded(source, options)


def _downloaded(repo: str, options: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=[CONFIG, WEIGHTS, CARD, EXPORTED], **options))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise WeightsError(
            f"{repo}: is no folder here, and the Hugging Face hub gave no such sampler ({first_line(error)}); "
            "check the name, the connection and, for a private one, the login; without a network, copy the sampler's "
            f"folder ({CONFIG}, {WEIGHTS}) to this machine and give its path instead"
        ) from error


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
