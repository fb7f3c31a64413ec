"""The folder of a saved sampler: config.json, model.safetensors and README.md; never pickled weights."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from sosampler.classifiers.registry import CONFIG, WEIGHTS
from sosampler.classifiers.weights import State, load_weights, read_state, some_of
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.files import replacing
from sosampler.samplers.card import MARK, model_card
from sosampler.saved_folders import check_place, saved_kind

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
