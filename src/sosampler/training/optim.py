"""Optimisers, schedules, the moving average of weights, precision and divergence: what every training shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from sosampler._util.hardware import cpu_is_fast_in_bfloat16
from sosampler._util.validation import one_of
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.pooled import import_timm
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import MOBILENET

if TYPE_CHECKING:
    from sosampler.samplers.recipe import SamplerRecipe
    from sosampler.training.classifier_data import ClassifierRecipe
    from sosampler.training.distributed import Processes


def make_optimizer(
    network: nn.Module,
    recipe: SamplerRecipe | ClassifierRecipe,
    epoch_steps: int,
    own_groups: Sequence[dict[str, Any]] = (),
    **sgd: Any,
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Create the recipe's optimiser, "adamw" or "sgd" with the options `sgd`, and its schedule by `warmup_cosine`.

    For the trainable parameters; biases and norms have no weight decay. Parameters in `own_groups` have the rate and
    the decay that these give them.
    """
    others = {parameter for group in own_groups for parameter in group["params"]}
    trainable = [weight for weight in network.parameters() if weight.requires_grad and weight not in others]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
        *own_groups,
    ]
    if recipe.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=recipe.lr)
    else:
        optimizer = torch.optim.SGD(groups, lr=recipe.lr, **sgd)
    steps = epoch_steps * recipe.epochs
    return optimizer, LambdaLR(optimizer, lambda step: warmup_cosine(step, steps, recipe.warmup))


def freeze_first(network: nn.Module, share: float) -> list[nn.Module]:
    """Freeze the first layers, as many as hold at most this share of the parameters, and return them.

    Early layers are much the same for all images; with few videos a class they are better left as they were trained
    on many. The caller keeps the returned layers in evaluation mode, so that batch norms do not follow the new data.
    """
    layers = [layer for layer in network.modules() if not any(layer.children())]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    first = [layer for layer, end in zip(layers, accumulate(sizes), strict=True) if end <= share * sum(sizes)]
    for layer in first:
        layer.requires_grad_(False)
    return first


def warmup_cosine(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate of a step relative to the peak: a linear warm-up, then half a cosine down to 0.

    `warmup` is the share of all steps in which the rate rises.

    >>> [round(warmup_cosine(step, 10, 0.2), 3) for step in range(10)]
    [0.5, 1.0, 1.0, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def moving_average(network: nn.Module, decay: float) -> Any:
    """Return timm's exponential moving average of a network; `update(network, step)` follows optimiser step `step`.

    The decay of the first steps is (1 + step) / (10 + step), so that the random start is soon forgotten.
    """

    class MovingAverage(import_timm().utils.ModelEmaV3):  # type: ignore[misc]
        def get_decay(self, step: int | None = None) -> float:
            return decay if step is None else min(decay, (1 + step) / (10 + step))

    average = MovingAverage(network, decay=decay)
    average.module.requires_grad_(False)
    return average


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generator of the CPU and that of the device a network runs on, not those of all other GPUs."""
    seed %= 2**63
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[number].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


# ---- divergence


class Diverged(InvalidArgument):
    """Training diverged, for example because of too high a learning rate; its data may be fine."""


def is_finite(network: nn.Module) -> bool:
    """Return whether all weights and running statistics are finite."""
    values = network.state_dict().values()
    return all(bool(tensor.isfinite().all()) for tensor in values if tensor.is_floating_point())


def check_loss(loss: float, *networks: nn.Module, step: int, lr: float, precision: str) -> None:
    """Raise `Diverged` where the loss is not finite and training cannot recover.

    In float16 a step whose gradients overflow is skipped and the next may succeed, unless weights or the statistics of
    a batch norm were hit: those stay broken.
    """
    if not math.isfinite(loss) and not (precision == "float16" and all(is_finite(network) for network in networks)):
        raise diverged(f"the loss is {loss} near step {step}", lr=lr, precision=precision)


def diverged(reason: str, lr: float, precision: str) -> Diverged:
    more = "" if precision == "float32" else " or train with precision='float32'"
    return Diverged(f"{reason}; lower the learning rate (lr={lr:.3g}){more}")


def finite_or_none(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return value if math.isfinite(value) else None


# ---- precision


def settled_precision(device: torch.device, precision: str | None) -> str:
    """Return the given precision; by default bfloat16 on GPUs that have it, float16 on others and float32 elsewhere.

    GPUs that only emulate bfloat16 (before NVIDIA's Ampere) are slower in it than in float32.
    """
    if precision is not None:
        return one_of("precision", precision, PRECISIONS)
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def sampler_precision(processes: Processes, precision: str | None, begun: Any, recipe: SamplerRecipe) -> str:
    """Return the precision in which `train` trains a sampler.

    By default it is that of `settled_precision`, but bfloat16 also for MobileNetV2 on CPUs that are fast in it. A trial
    decides that, so a run that has `begun` keeps its precision, and several processes, whose trials could disagree, do
    not try.
    """
    on_cpu = processes.device.type == "cpu" and processes.count == 1
    if precision is None and on_cpu and recipe.backbone == MOBILENET:
        if begun in PRECISIONS:
            return str(begun)
        return "bfloat16" if cpu_is_fast_in_bfloat16() else "float32"
    return settled_precision(processes.device, precision)
