"""The first convolution of a sampler in training on a GPU: it sees pictures as blocks of pixels, as in the engine."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.engine.kernels.blocks import Blocks
from sosampler.engine.kernels.triton_kernels import as_blocks, can_use, dense
from sosampler.training.same_conv import SameConv


class FastStem(SameConv):
    """A convolution of stride 2 over pictures.

    Its gradient is that of the weights alone; pictures that want one too, evaluation and the CPU are left to torch.
    """

    def __init__(self, conv: nn.Conv2d, blocks: Blocks) -> None:
        super().__init__(conv)
        self._blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.requires_grad or not can_use(x) or not dense(x):
            return super().forward(x)
        return F.conv2d(as_blocks(x, self.type_for(x), self._blocks), self._blocks.weights(self.weight))
