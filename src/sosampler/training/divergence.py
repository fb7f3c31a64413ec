"""When a training has come to nothing: numbers that are no numbers any more."""

from __future__ import annotations

import math

import torch
from torch import nn

from sosampler.errors import InvalidArgument


class Diverged(InvalidArgument):
    """A training came to nothing, as with too high a rate; what it was given may be all right."""


def is_finite(network: nn.Module) -> bool:
    """Whether all weights and running statistics are numbers."""
    real = [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
    return all(torch.stack([tensor.isfinite().all() for tensor in real]).tolist()) if real else True


def check_loss(loss: float, *networks: nn.Module, step: int, lr: float, precision: str) -> None:
    """Say so where the loss is no number and training cannot recover.

    In float16 a step whose gradients overflow is left out and the next may be a good one, unless weights or the
    statistics of a batch norm were hit: those stay broken.
    """
    if math.isfinite(loss) or (precision == "float16" and all(is_finite(network) for network in networks)):
        return
    raise diverged(f"the loss is {loss} near step {step}", lr=lr, precision=precision)


def diverged(what: str, *, lr: float, precision: str) -> Diverged:
    more = "" if precision == "float32" else " or train with precision='float32'"
    return Diverged(f"{what}; lower the learning rate (lr={lr:.3g}){more}")


def finite_or_none(value: float) -> float | None:
    """For files: JSON has no word for numbers that are none."""
    return value if math.isfinite(value) else None
