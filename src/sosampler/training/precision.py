"""In which precision networks are trained."""

from __future__ import annotations

import torch

from sosampler.checks import one_of
from sosampler.classifiers.base import PRECISIONS


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
