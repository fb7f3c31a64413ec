"""Multiply-adds, by torch's own counter of what the operators do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@torch.no_grad()
def count_gmacs(module: nn.Module, *inputs: Tensor) -> float:
    """Giga multiply-adds of `module(*inputs)`: convolutions, matrix products and attention.

    Runs on the meta device: shapes only, no memory and no arithmetic. One multiply-add counts once (papers on video
    write it "GFLOPs"); additions, normalisations and activations are not counted.
    """
    meta = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    shapes = tuple(tensor.to("meta") for tensor in inputs)
    training = module.training
    module.eval()
    try:
        # The plain form of attention is two batched products, which every version of the counter knows.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            functional_call(module, meta, shapes)
    finally:
        module.train(training)
    return float(counter.get_total_flops()) / 2e9
