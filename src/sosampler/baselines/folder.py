"""The folder of a trained system: config.json and model.safetensors; never pickled weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sosampler._util.devices import check_device
from sosampler._util.files import check_place, replacing, saved_kind
from sosampler.baselines.base import Baseline
from sosampler.baselines.registry import baseline_arguments, create_baseline, list_systems
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.classifiers.weights import load_weights, read_state, some_of
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.samplers.folder import not_finite

KIND = "sosampler system"  # how the folder is told from that of a sampler, a classifier or of another library
_KEYS = ("name", "config", "about")  # besides kind


def save_baseline(folder: str | Path, system: Baseline, about: Mapping[str, Any]) -> None:
    """Write a system; each file appears whole or not at all, config.json last.

    Another system in the folder is replaced: its config.json goes first, so that a kill in between never leaves new
    weights under old settings.

    Args:
        folder: made where it is not there; one that holds something else is refused.
        system: of one of the classes that `list_systems` names.
        about: on what and how it was trained, as JSON values.
    """
    from safetensors.torch import save

    folder = Path(folder)
    check_place(folder, KIND, "system")
    if system.name not in list_systems():
        raise InvalidArgument(
            f"a {type(system).__name__} cannot be loaded again by its name {system.name!r}, so it is not saved; "
            f"give one of: {', '.join(list_systems())}"
        )
    told = {"kind": KIND, "name": system.name, "config": system.config, "about": dict(about)}
    try:
        text = json.dumps(told, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"about={about!r} cannot be written ({error}); give values that JSON has") from error
    folder.mkdir(parents=True, exist_ok=True)
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in system.state_dict().items()}
    (folder / CONFIG).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save(copies, metadata={"format": "pt"}))
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(text, encoding="utf-8")


def load_system(folder: str | Path, device: str | None = None) -> Baseline:
    """A trained system, frozen and in evaluation mode; its attribute `about` says on what and how it was trained.

    Args:
        folder: that `train` or `save_baseline` wrote.
        device: where it is to run; None: the CPU.
    """
    where = None if device is None else check_device(device)
    if not isinstance(folder, (str, Path)):
        raise InvalidArgument(f"a system cannot be read from {folder!r}; give its folder")
    folder = Path(folder)
    name, config, about = _read_config(folder)
    _check_settings(folder, name, config)
    if not (folder / WEIGHTS).is_file():
        raise WeightsError(f"{folder}: has no {WEIGHTS}; copy the whole folder, or train the system again")
    state = read_state(folder / WEIGHTS, names_as_they_are=True)
    if broken := not_finite(state):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(broken)} tensors hold numbers that are not finite: {some_of(broken)}; "
            "train or copy the system again"
        )
    try:
        with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
            system = create_baseline(name, **config)
    except (InvalidArgument, TypeError) as error:
        raise WeightsError(f"{folder / CONFIG}: {first_line(error)}; mend it, or train the system again") from error
    load_weights(system, state, where=str(folder / WEIGHTS))
    system.about = about
    system.requires_grad_(False).eval()
    return system if where is None else system.to(where)


def is_baseline_folder(path: Any) -> bool:
    """Whether this is a folder with the config.json of a trained system; looks at nothing else."""
    return saved_kind(path) == KIND


def refuse_baseline_folder(argument: str, given: Any) -> None:
    """Say so where the folder of a system was given as another network."""
    if is_baseline_folder(given):
        raise InvalidArgument(
            f"{argument}={str(given)!r} holds a trained system, which shows no features and answers about whole videos "
            f"only; give the folder of a {argument if argument == 'classifier' else 'sampler without shift'}"
        )


def _read_config(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name, settings and facts of the system in a folder, or what is wrong with the folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; give that of a trained system")
    if not path.is_file():
        raise WeightsError(f"{folder}: has no {CONFIG}, so it is no trained system; give a folder that train wrote")
    told = _json_of(path)
    if not isinstance(told, dict) or told.get("kind") != KIND:
        kind = told.get("kind") if isinstance(told, dict) else None
        what = f"a {kind}" if isinstance(kind, str) else "something else"
        raise WeightsError(
            f"{folder}: holds {what} instead of a system; give a folder that training one of "
            f"{', '.join(list_systems())} wrote"
        )
    missing = [key for key in _KEYS if key not in told]
    if missing or not isinstance(told["config"], dict) or not isinstance(told["about"], dict):
        lacks = f"lacks {', '.join(missing)}" if missing else "holds settings that are not those of a system"
        raise WeightsError(f"{path}: {lacks}; train the system again, or copy the file again")
    if told["name"] not in list_systems():
        raise WeightsError(
            f"{path}: {told['name']!r} is no system that this version knows ({', '.join(list_systems())}); "
            "if a newer sosampler wrote it, install that one"
        )
    return told["name"], told["config"], told["about"]


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise WeightsError(
            f"{path}: is not JSON ({first_line(error)}); train the system again, or copy the file again"
        ) from error


def _check_settings(folder: Path, name: str, config: dict[str, Any]) -> None:
    known = baseline_arguments(name)
    strange = sorted(set(config) - set(known))
    if strange:
        raise WeightsError(
            f"{folder / CONFIG}: holds unknown settings ({some_of(strange)}); allowed are {', '.join(known)}; "
            "if a newer sosampler wrote them, install that one"
        )
