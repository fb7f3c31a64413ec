"""The folder of a trained baseline: config.json and model.safetensors; never pickled weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sosampler._util.files import check_place, replacing, saved_kind
from sosampler._util.hardware import check_device
from sosampler.baselines.base import Baseline
from sosampler.baselines.registry import baseline_arguments, create_baseline, list_systems
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.classifiers.weights import load_weights, read_state, some_of
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.samplers.folder import not_finite

KIND = "sosampler system"  # of the folder, in config.json
_KEYS = ("name", "config", "about")  # besides kind


def save_baseline(folder: str | Path, baseline: Baseline, about: Mapping[str, Any]) -> None:
    """Write a baseline; each file is written atomically, config.json last.

    Another baseline in the folder is replaced: its config.json is deleted first, so that a kill never leaves new
    weights with old settings.

    Args:
        folder: created where needed; one that holds something else is refused.
        baseline: of one of the classes of `list_systems`.
        about: how it was trained, as JSON values.
    """
    from safetensors.torch import save

    folder = Path(folder)
    check_place(folder, KIND, "baseline")
    if baseline.name not in list_systems():
        raise InvalidArgument(
            f"a {type(baseline).__name__} cannot be loaded by its name {baseline.name!r}, so it is not saved; "
            f"give one of: {', '.join(list_systems())}"
        )
    config = {"kind": KIND, "name": baseline.name, "config": baseline.config, "about": dict(about)}
    try:
        text = json.dumps(config, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"about={about!r} must be JSON values ({error}); convert them") from error
    folder.mkdir(parents=True, exist_ok=True)
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in baseline.state_dict().items()}
    (folder / CONFIG).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save(copies, metadata={"format": "pt"}))
    with replacing(folder / CONFIG) as temporary:
        temporary.write_text(text, encoding="utf-8")


def load_system(folder: str | Path, device: str | None = None) -> Baseline:
    """Load a trained baseline, frozen and in evaluation mode; its attribute `about` holds how it was trained.

    Args:
        folder: of `train`.
        device: None: the CPU.
    """
    target = None if device is None else check_device(device)
    if not isinstance(folder, (str, Path)):
        raise InvalidArgument(f"folder={folder!r} must be a path; give the folder of a trained baseline")
    folder = Path(folder)
    name, config, about = _read_config(folder)
    allowed = baseline_arguments(name)
    if unknown := sorted(set(config) - set(allowed)):
        raise WeightsError(
            f"{folder / CONFIG}: holds unknown settings ({some_of(unknown)}); allowed are {', '.join(allowed)}; "
            "if a newer sosampler wrote them, install that one"
        )
    if not (folder / WEIGHTS).is_file():
        raise WeightsError(f"{folder}: has no {WEIGHTS}; copy the whole folder, or train the baseline again")
    state = read_state(folder / WEIGHTS, names_as_they_are=True)
    if broken := not_finite(state):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(broken)} tensors hold numbers that are not finite: {some_of(broken)}; "
            "train or copy the baseline again"
        )
    try:
        with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
            baseline = create_baseline(name, **config)
    except (InvalidArgument, TypeError) as error:
        raise WeightsError(f"{folder / CONFIG}: {first_line(error)}; fix it, or train the baseline again") from error
    load_weights(baseline, state, where=str(folder / WEIGHTS))
    baseline.about = about
    baseline.requires_grad_(False).eval()
    return baseline if target is None else baseline.to(target)


def is_baseline_folder(path: Any) -> bool:
    """Return whether this is a folder with the config.json of a trained baseline."""
    return saved_kind(path) == KIND


def refuse_baseline_folder(argument: str, given: Any) -> None:
    """Refuse the folder of a baseline where another network is expected."""
    if is_baseline_folder(given):
        raise InvalidArgument(
            f"{argument}={str(given)!r} holds a trained baseline, which has no features and classifies whole videos "
            f"only; give the folder of a {argument if argument == 'classifier' else 'sampler without shift'}"
        )


def _read_config(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return name, config and `about` of the baseline in a folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; give that of a trained baseline")
    if not path.is_file():
        raise WeightsError(f"{folder}: has no {CONFIG}, so it is no trained baseline; give a folder of `train`")
    try:
        config_file = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise WeightsError(
            f"{path}: is not JSON ({first_line(error)}); train the baseline again, or copy the file again"
        ) from error
    if not isinstance(config_file, dict) or config_file.get("kind") != KIND:
        kind = config_file.get("kind") if isinstance(config_file, dict) else None
        what = f"a {kind}" if isinstance(kind, str) else "something else"
        raise WeightsError(
            f"{folder}: holds {what} instead of a baseline; give the folder of a trained {', '.join(list_systems())}"
        )
    missing = [key for key in _KEYS if key not in config_file]
    if missing or not isinstance(config_file["config"], dict) or not isinstance(config_file["about"], dict):
        lacks = f"lacks {', '.join(missing)}" if missing else "holds settings that are not those of a baseline"
        raise WeightsError(f"{path}: {lacks}; train the baseline again, or copy the file again")
    if config_file["name"] not in list_systems():
        raise WeightsError(
            f"{path}: {config_file['name']!r} is no baseline of this version ({', '.join(list_systems())}); "
            "if a newer sosampler wrote it, install that one"
        )
    return config_file["name"], config_file["config"], config_file["about"]
