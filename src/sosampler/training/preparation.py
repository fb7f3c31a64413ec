"""How a sampler is trained where nobody says: in which precision, and whether preparing its network pays."""

from __future__ import annotations

from typing import Any

import torch

from sosampler._util.cpu_bfloat16 import cpu_is_good_at_bfloat16
from sosampler.classifiers.base import PRECISIONS
from sosampler.samplers.backbones import MOBILENET
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.distributed import Processes
from sosampler.training.optim import settled_precision
from sosampler.training.sampler_data import SamplerBatches

# On an H200 a step of MobileNetV2 with 64 x 10 frames takes 93 ms as it is, 48 in channels-last memory, and 16 with
# kernels of our own and as a graph. But cuDNN spends 6.5 s on each new shape of a batch, that is on each T, and our
# kernels take about as long to be compiled: it pays from about so many steps on, for each T and once more.
STEPS_THAT_PAY = 100


def sampler_precision(processes: Processes, asked: str | None, begun: Any, recipe: SamplerRecipe) -> str:
    """What was asked for; else what suits the device, which for MobileNetV2 on some CPUs is bfloat16 too.

    There a trial decides, so that a run goes on as it has `begun`, and several processes, which might come to different
    answers, do not try.
    """
    if asked is None and processes.device.type == "cpu" and recipe.backbone == MOBILENET and processes.count == 1:
        if begun in PRECISIONS:
            return str(begun)
        return "bfloat16" if cpu_is_good_at_bfloat16() else "float32"
    return settled_precision(processes.device, asked)


def steps_that_pay(lengths: int) -> int:
    """From how many steps on a network is prepared for a GPU, with so many numbers of candidates."""
    return STEPS_THAT_PAY * (lengths + 1)


def preparation_pays(device: torch.device, batches: SamplerBatches, recipe: SamplerRecipe) -> bool:
    steps = len(batches) * recipe.epochs
    return device.type == "cuda" and steps >= steps_that_pay(len(batches.plan.num_candidates))


def can_be_graphed(network: SOSampler, precision: str, recipe: SamplerRecipe) -> bool:
    """Whether a step is known not to wait for the device: rewards do, and the scaler of float16 looks at gradients."""
    return network.backbone.name == MOBILENET and precision != "float16" and recipe.loss != "reinforce"
