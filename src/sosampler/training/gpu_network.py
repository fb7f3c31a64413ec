"""A sampler's network made ready for a long training on a GPU; what it computes stays the same."""

from __future__ import annotations

import torch

from sosampler.samplers import SOSampler
from sosampler.samplers.backbones import ShiftedBlock
from sosampler.training.fused_norm import fuse_norms
from sosampler.training.shift_kernel import fast_shift


def prepare_network(sampler: SOSampler, *, norms: bool = True) -> None:
    """In place: channels side by side, and kernels of our own for what stands between convolutions.

    Only for training: such a network is neither traced nor exported, its weights are. `norms`: whether batch norms are
    among it; those of several processes share their statistics, which is torch's own work.
    """
    sampler.to(memory_format=torch.channels_last)
    if norms:
        fuse_norms(sampler)
    for block in sampler.modules():
        if isinstance(block, ShiftedBlock):
            block.shifted = fast_shift
