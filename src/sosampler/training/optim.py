"""The optimisers of all trainings."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from sosampler._util.validation import one_of
from sosampler.classifiers.base import PRECISIONS
from sosampler.errors import InvalidArgument


def make_optimizer(
    network: nn.Module, name: str, *, lr: float, weight_decay: float, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """ "adamw" or "sgd" for what is trainable; weight decay for weights alone, not for biases and norms."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)


class RunningMean:
    """A copy of a network that follows it: each step takes the share 1 - decay of the difference.

    The decay grows over the first steps, (1 + step) / (10 + step), so that the random start is soon forgotten.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.decay = decay
        self._pairs = self._matched(network)

    def _matched(self, network: nn.Module) -> tuple[list[torch.Tensor], ...]:
        """Tensors that are averaged, here and there, and whole numbers, which are copied."""
        ours, theirs = self.network.state_dict(), network.state_dict()
        real = [key for key in ours if ours[key].is_floating_point()]
        whole = [key for key in ours if key not in real]
        return tuple([state[key] for key in keys] for keys in (real, whole) for state in (ours, theirs))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After optimiser step number `step`, from 0."""
        ours, theirs, our_counts, their_counts = self._pairs
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        if our_counts:
            torch._foreach_copy_(our_counts, their_counts)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and that of the device a network runs on, not those of all other GPUs."""
    seed %= 2**63
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[number].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


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


def settled_precision(device: torch.device, precision: str | None) -> str:
    """What was asked for; else bfloat16 on GPUs that have it, float16 on others and float32 elsewhere.

    GPUs that only imitate bfloat16 (before NVIDIA's Ampere) are slower in it than in float32.
    """
    if precision is not None:
        return one_of("precision", precision, PRECISIONS)
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
