"""The first convolution of a sampler in training on a GPU: it sees pictures as blocks of pixels, as in the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.engine.blocks import Blocks
from sosampler.engine.triton_kernels import as_blocks, can_use, dense


class FastStem(nn.Conv2d):
    """A convolution of stride 2 over pictures; names and weights are those of the plain one.

    Its gradient is that of the weights alone; pictures that want one too, evaluation and the CPU are left to torch.
    """

    def __init__(self, conv: nn.Conv2d, blocks: Blocks) -> None:
        numbers: Any = (conv.kernel_size, conv.stride, conv.padding)
        super().__init__(conv.in_channels, conv.out_channels, *numbers, bias=False, device="meta")  # draws nothing
        self.weight = conv.weight
        self.train(conv.training)
        self._blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.requires_grad or not can_use(x) or not dense(x):
            return super().forward(x)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return F.conv2d(as_blocks(x, dtype, self._blocks), self._blocks.weights(self.weight))
