"""Weights of a 2-D ResNet-50 as a start for SlowOnly: the same network, its kernels stretched along time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from sosampler._util.validation import one_of
from sosampler.classifiers.nets.resnet3d import STAGES, slowonly_r50
from sosampler.errors import InvalidArgument

How = Literal["centre", "mean"]
HOW: tuple[How, ...] = ("centre", "mean")

COUNTER = "num_batches_tracked"  # of a batch norm: many files leave it out, and inference never reads it
MOST_NAMED = 8  # keys in one message


def inflate_resnet50(state_2d: Mapping[str, Tensor], *, how: How = "centre") -> dict[str, Tensor]:
    """A state dict for `slowonly_r50` from one of a 2-D ResNet-50 with the names of torchvision and timm.

    Args:
        state_2d: conv1, bn1, layer1 .. layer4 and perhaps fc; without fc the result has no head.
        how: "centre" puts each kernel at the middle frame: the net then sees each frame as the 2-D net does and
            averages. "mean" spreads it evenly over the frames, as I3D does: the same on a static clip, but for the
            first and last frames, whose neighbours are missing.
    """
    one_of("how", how, HOW)
    names = _names_3d()
    if not any(key.startswith("fc.") for key in state_2d):
        names = {key: name for key, name in names.items() if not key.startswith("fc.")}
    missing = [key for key in names if key not in state_2d and not key.endswith(COUNTER)]
    unknown = [key for key in state_2d if key not in names]
    if missing or unknown:
        raise InvalidArgument(
            f"the weights are not those of a ResNet-50 with torchvision's names: missing {_listed(missing)}; "
            f"unknown {_listed(unknown)}; give conv1, bn1, layer1 .. layer4 and, where there is a head, fc"
        )
    with torch.device("meta"):
        target = slowonly_r50(num_classes=len(state_2d["fc.weight"]) if "fc.weight" in state_2d else 1).state_dict()
    wrong = [key for key in names if key in state_2d and state_2d[key].shape != _shape_2d(target[names[key]])]
    if wrong:
        told = [f"{key} {tuple(state_2d[key].shape)}, not {tuple(_shape_2d(target[names[key]]))}" for key in wrong]
        raise InvalidArgument(f"weights of another shape than a ResNet-50 has: {_listed(told)}; give a plain ResNet-50")
    return {
        name: _inflated(state_2d[key], target[name].shape, how)
        if key in state_2d
        else torch.zeros((), dtype=torch.long)
        for key, name in names.items()
    }


def _names_3d() -> dict[str, str]:
    """From each key of the 2-D net to the key in SlowOnly."""
    modules = {"conv1": "blocks.0.conv", "bn1": "blocks.0.norm", "fc": "blocks.5.proj"}
    for stage, (depth, *_) in enumerate(STAGES, start=1):
        modules[f"layer{stage}.0.downsample.0"] = f"blocks.{stage}.res_blocks.0.branch1_conv"
        modules[f"layer{stage}.0.downsample.1"] = f"blocks.{stage}.res_blocks.0.branch1_norm"
        for block in range(depth):
            for number, letter in enumerate("abc", start=1):
                branch = f"blocks.{stage}.res_blocks.{block}.branch2"
                modules[f"layer{stage}.{block}.conv{number}"] = f"{branch}.conv_{letter}"
                modules[f"layer{stage}.{block}.bn{number}"] = f"{branch}.norm_{letter}"
    return {f"{old}.{tensor}": f"{new}.{tensor}" for old, new in modules.items() for tensor in _tensors(new)}


def _tensors(module_3d: str) -> tuple[str, ...]:
    """What a module of SlowOnly holds, told from its name."""
    leaf = module_3d.rpartition(".")[2]
    if "conv" in leaf:
        return ("weight",)
    return ("weight", "bias", "running_mean", "running_var", COUNTER) if "norm" in leaf else ("weight", "bias")


def _shape_2d(tensor: Tensor) -> torch.Size:
    """The shape without the frames of a kernel [outputs, inputs, frames, rows, columns]."""
    shape = tensor.shape
    return torch.Size((*shape[:2], *shape[3:])) if len(shape) == 5 else shape


def _inflated(weight: Tensor, shape: torch.Size, how: How) -> Tensor:
    if len(shape) != 5:
        return weight.clone()
    frames = shape[2]
    if how == "mean":
        return (weight / frames).unsqueeze(2).repeat(1, 1, frames, 1, 1)
    inflated = weight.new_zeros(shape)
    inflated[:, :, frames // 2] = weight
    return inflated


def _listed(keys: list[str]) -> str:
    if len(keys) > MOST_NAMED:
        keys = [*keys[:MOST_NAMED], f"and {len(keys) - MOST_NAMED} more"]
    return ", ".join(keys) or "none"
