"""Weights files: safetensors, or torch files without pickled code; what does not fit is named."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sosampler.errors import WeightsError

State = dict[str, Tensor]

# Where published checkpoints keep their tensors.
_INNER = ("state_dict", "model_state", "model_state_dict", "model")
_SHOWN = 4


def read_state(path: str | Path, *, names_as_they_are: bool = False) -> State:
    """All tensors of a weights file, on the CPU, floating-point ones in float32.

    A prefix `module.` on every name (DataParallel's) is taken off unless names are to stay as they are.
    """
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file; give a .safetensors file or a torch file of weights")
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not found:
        raise WeightsError(f"{path}: holds no tensors; give a file with a network's weights")
    if not names_as_they_are and all(key.startswith("module.") for key in found):
        found = {key.removeprefix("module."): tensor for key, tensor in found.items()}
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in found.items()}


def _read_safetensors(path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded: State = load_file(path)
    except SafetensorError as error:
        raise WeightsError(f"{path}: is not a whole safetensors file ({error}); fetch or save it again") from error
    return loaded


def _read_torch(path: Path) -> State:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: cannot be read with weights_only=True: it is damaged, or holds Python objects besides tensors, "
            "which could run code; save its state dict as safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, OSError, AttributeError, struct.error) as error:
        raise WeightsError(f"{path}: is not a file that torch.save wrote ({error}); fetch or save it again") from error
    for key in _INNER:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path}: holds a {type(loaded).__name__} instead of a dict of tensors; save a state dict")
    return {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, Tensor)}


def without_head(state: State, head: Sequence[str]) -> State:
    """The state without its last, class-wise layers."""
    return {key: tensor for key, tensor in state.items() if not key.startswith(tuple(f"{name}." for name in head))}


def classes_of(state: State, head: Sequence[str]) -> int | None:
    """How many classes the first layer of `head` has in a state; None where it is not there."""
    for key in (f"{name}.{leaf}" for name in head[:1] for leaf in ("weight", "bias")):
        if key in state:
            return int(state[key].shape[0])
    return None


def load_weights(net: nn.Module, state: State, *, where: str, head: Sequence[str] = (), new_head: bool = False) -> None:
    """Put a state into a network; every key must be there with its shape, except the head where `new_head`."""
    own = net.state_dict()
    if new_head:
        if not head:
            raise WeightsError(f"{where}: new_head=True needs a network whose head is known; load all weights instead")
        state = without_head(state, head)
        expected = set(without_head(own, head))
    else:
        expected = set(own)
    missing = sorted(key for key in expected - set(state) if not key.endswith("num_batches_tracked"))
    unexpected = sorted(key for key in set(state) - set(own) if not key.endswith("num_batches_tracked"))
    shapes = sorted(key for key in expected & set(state) if own[key].shape != state[key].shape)
    if missing or unexpected or shapes:
        said = []
        if missing:
            said.append(f"{len(missing)} missing: {some_of(missing)}")
        if unexpected:
            said.append(f"{len(unexpected)} unknown: {some_of(unexpected)}")
        if shapes:
            pairs = [f"{key} {list(state[key].shape)} in the file, {list(own[key].shape)} here" for key in shapes]
            said.append(f"{len(shapes)} of another shape: {some_of(pairs)}")
        only_head = not missing and not unexpected and not without_head(dict.fromkeys(shapes, torch.empty(0)), head)
        advice = (
            "give the num_classes of the file, or new_head=True to start with a fresh head"
            if shapes and only_head
            else "give the weights of this very network"
        )
        raise WeightsError(f"{where}: does not fit the network; {'; '.join(said)}; {advice}")
    net.load_state_dict({**own, **{key: tensor for key, tensor in state.items() if key in own}})


def some_of(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, and {len(names) - _SHOWN} more"
