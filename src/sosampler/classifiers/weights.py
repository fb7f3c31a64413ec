"""Weights files: safetensors, or torch files without pickled code."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sosampler._util import limits
from sosampler._util.files import replacing
from sosampler._util.hardware import free_memory
from sosampler.errors import WeightsError, first_line

State = dict[str, Tensor]

# Children of torchvision's ResNet in a Sequential, by their numbers; those between have no weights.
_RESNET_CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}

# Keys under which published checkpoints keep their tensors.
_INNER = ("state_dict", "model_state", "model_state_dict", "model")
_MAX_SHOWN = 4


Network = TypeVar("Network", bound=nn.Module)
_SLACK = 1 << 20  # numbers that a network may have more than its file has bytes, such as constants that are not saved


def check_numbers(values: dict[str, Any], where: str) -> None:
    """Refuse sizes of a stranger's config that would take hours or gigabytes even without weights."""
    level: list[tuple[str, Any]] = list(values.items())
    while level:
        for key, value in level:
            if isinstance(value, int) and abs(value) > limits.MAX_CONFIG_NUMBER:
                raise WeightsError(
                    f"{where}: {key}={value} must be at most {limits.MAX_CONFIG_NUMBER} (limits.MAX_CONFIG_NUMBER)"
                )
            if isinstance(value, int) and ("layers" in key or "depth" in key) and value > limits.MAX_LAYERS:
                raise WeightsError(f"{where}: {key}={value} must be at most {limits.MAX_LAYERS} (limits.MAX_LAYERS)")
        level = [
            (key if isinstance(value, list) else str(inner[0]), inner[1])
            for key, value in level
            if isinstance(value, (dict, list))
            for inner in (value.items() if isinstance(value, dict) else enumerate(value))
        ]


def build_within(build: Callable[[], Network], weights: Path, config: Path) -> Network:
    """Build the network that a stranger's `config` describes, if its `weights` file could fill it.

    It is built without memory first: a few digits in a config could ask for terabytes.
    """
    check_network_size(build, weights.stat().st_size if weights.is_file() else 0, config)
    return build()


def check_network_size(build: Callable[[], nn.Module], num_bytes: int, config: Path) -> None:
    """Refuse a network that has more numbers than its weights file has bytes; no memory is taken for it."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            numbers = sum(tensor.numel() for tensor in build().state_dict().values())
    except RuntimeError as error:  # torch cannot even count the bytes of one layer
        raise WeightsError(f"{config}: describes a network that cannot be built ({first_line(error)})") from error
    if numbers > num_bytes + _SLACK:
        raise WeightsError(
            f"{config}: describes a network of {numbers} numbers, but its weights file has only {num_bytes} bytes; "
            "copy both files again"
        )


def read_state(path: str | Path, *, names_as_they_are: bool = False) -> State:
    """Return all tensors of a weights file, on the CPU, floating-point ones in float32."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file; give a .safetensors file or a torch file of weights")
    size, free = path.stat().st_size, free_memory()
    if size > free:
        raise WeightsError(f"{path}: has {size >> 20} MiB, but {free >> 20} MiB of memory are free; free some")
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not state:
        raise WeightsError(f"{path}: holds no tensors; give a file with a network's weights")
    if sum(tensor.numel() for tensor in state.values()) > 4 * size + _SLACK:  # 4: tensors may share their numbers
        raise WeightsError(f"{path}: holds tensors larger than the file, by repeating numbers; save them in full")
    if not names_as_they_are and all(key.startswith("module.") for key in state):  # DataParallel's
        state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}


def _read_safetensors(path: Path) -> State:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise WeightsError(f"{path}: is not a complete safetensors file ({error}); fetch or save it again") from error


def _read_torch(path: Path) -> State:
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        unpacked = 0  # of an old version, or no file of torch, which is found below
    if unpacked > path.stat().st_size:
        raise WeightsError(f"{path}: is compressed, as torch.save writes none; unpack it, and save it again")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: cannot be read with weights_only=True: it is damaged, or holds Python objects besides tensors, "
            "which could run code; save its state dict as safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, OSError, AttributeError, struct.error) as error:
        raise WeightsError(f"{path}: was not written by torch.save ({error}); download or save it again") from error
    for key in _INNER:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path}: holds a {type(loaded).__name__} but must hold a state dict; save one")
    return {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, Tensor)}


def is_frameexit_release(state: State) -> bool:
    """Return whether a state has the layout of the checkpoints that FrameExit's authors released.

    It holds backbone.0 to 7, mlp.layers.0 and 1, a classifier for each number of frames, and exit_selector.0, ...
    """
    return {"backbone.0.weight", "mlp.layers.0.weight", "classifiers.0.weight"} <= state.keys()


def frameexit_classifiers(state: State) -> int:
    """Return the number of classifiers in a released checkpoint of FrameExit: the most frames that it sees."""
    return sum(key.startswith("classifiers.") and key.endswith(".weight") for key in state)


def from_frameexit_release(state: State, exit_frames: int | None = None) -> State:
    """Rename a released checkpoint of FrameExit to our ResNet-50 with head "frameexit".

    `exit_frames`: whose classifier is taken, that for so many frames; None: the last. Gates are left out.
    """
    last = frameexit_classifiers(state)
    number = last if exit_frames is None else exit_frames
    if number > last:
        raise WeightsError(f"exit_frames={number}: the checkpoint has classifiers for up to {last} frames; give less")
    renamed: State = {}
    for key, tensor in state.items():
        part, _, rest = key.partition(".")
        if part == "backbone":
            child, _, leaf = rest.partition(".")
            renamed[f"backbone.{_RESNET_CHILDREN.get(child, child)}.{leaf}"] = tensor
        elif key.startswith("mlp.layers."):
            renamed[key.replace("mlp.layers.", "neck.")] = tensor
        elif key.startswith(f"classifiers.{number - 1}."):
            renamed[key.replace(f"classifiers.{number - 1}.", "fc.")] = tensor
        elif part not in ("classifiers", "exit_selector"):
            renamed[key] = tensor  # unknown: refused when it is loaded
    return renamed


def without_head(state: State, head: Sequence[str]) -> State:
    """Return the state without the layers of `head`."""
    return {key: tensor for key, tensor in state.items() if not key.startswith(tuple(f"{name}." for name in head))}


def classes_of(state: State, head: Sequence[str]) -> int | None:
    """Return the number of classes of the first layer of `head` in a state; None if it is not there."""
    keys = [f"{name}.{leaf}" for name in head[:1] for leaf in ("weight", "bias")]
    return next((len(state[key]) for key in keys if key in state), None)


def load_weights(net: nn.Module, state: State, *, where: str, head: Sequence[str] = (), new_head: bool = False) -> None:
    """Load a state into a network; every key must match in name and shape, except the head with `new_head`."""
    current = net.state_dict()
    expected = set(current)
    if new_head:
        if not head:
            raise WeightsError(f"{where}: new_head=True needs a network with a known head; leave new_head out")
        state = without_head(state, head)
        expected = set(without_head(current, head))
    missing = sorted(key for key in expected - set(state) if not key.endswith("num_batches_tracked"))
    unexpected = sorted(key for key in set(state) - set(current) if not key.endswith("num_batches_tracked"))
    shapes = sorted(key for key in expected & set(state) if current[key].shape != state[key].shape)
    pairs = [f"{key} {list(state[key].shape)} in the file, {list(current[key].shape)} here" for key in shapes]
    if problems := counted({"missing": missing, "unknown": unexpected, "of another shape": pairs}):
        advice = "give weights of the same network"
        if not missing and not unexpected and not without_head({key: state[key] for key in shapes}, head):
            advice = "give the num_classes of the file, or new_head=True for a new last layer"
        raise WeightsError(f"{where}: does not fit the network; {problems}; {advice}")
    net.load_state_dict({**current, **{key: tensor for key, tensor in state.items() if key in current}})


def write_state(path: Path, state: State, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors; the file appears complete."""
    from safetensors.torch import save

    # Copies, because tensors that share memory cannot be saved.
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save(copies, metadata=metadata))  # save_file would make it readable by its owner only


def counted(problems: dict[str, list[str]]) -> str:
    """Return how many names have each problem and the first of them, "2 missing: a, b"; "" without any."""
    return "; ".join(f"{len(names)} {problem}: {some_of(names)}" for problem, names in problems.items() if names)


def some_of(names: list[str]) -> str:
    """Return the first few of many names, and how many more there are."""
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown if len(names) <= _MAX_SHOWN else f"{shown}, and {len(names) - _MAX_SHOWN} more"
