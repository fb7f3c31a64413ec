"""A sampler's network made ready for a long training on a GPU; what it computes stays the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sosampler.engine.kernels.blocks import blocks_for
from sosampler.samplers.backbones import Neighbours, ShiftedBlock
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.depthwise import FastDepthwise, is_known
from sosampler.training.fused_norm import fuse_norms
from sosampler.training.shift_kernel import fast_shift
from sosampler.training.stem import FastStem


class FastShiftedBlock(ShiftedBlock):
    """The same block, its temporal shift by our kernel; names and weights are those of the plain one."""

    def __init__(self, block: ShiftedBlock) -> None:
        nn.Module.__init__(self)
        self.conv, self.fold = block.conv, block.fold
        self.train(block.training)

    def forward(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        return x + self.conv(fast_shift(x, self.fold, neighbours))


def prepare_network(sampler: SOSampler, *, norms: bool = True) -> None:
    """In place: channels side by side, and kernels of our own for what is not a multiplication of matrices.

    Only for training: such a network is neither traced nor exported, its weights are. `norms`: whether batch norms are
    among it; those of several processes share their statistics, which is torch's own work.
    """
    sampler.to(memory_format=torch.channels_last)
    if norms:
        fuse_norms(sampler)
    for parent in list(sampler.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is ShiftedBlock:
                setattr(parent, name, FastShiftedBlock(child))
            elif type(child) is nn.Conv2d and child.bias is None and child.padding_mode == "zeros":
                blocks = blocks_for(child)
                if is_known(child):
                    setattr(parent, name, FastDepthwise(child))
                elif blocks is not None:
                    setattr(parent, name, FastStem(child, blocks))
