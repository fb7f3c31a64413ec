"""A convolution that stands in for another one in training and goes about it differently."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SameConv(nn.Conv2d):
    """Shape and weights are those of the other, which has no bias and zeros around; so are the names in a state."""

    def __init__(self, conv: nn.Conv2d) -> None:
        numbers: Any = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
        super().__init__(conv.in_channels, conv.out_channels, *numbers, bias=False, device="meta")  # draws nothing
        self.weight = conv.weight
        self.train(conv.training)

    def type_for(self, x: Tensor) -> torch.dtype:
        """In which torch would compute it: autocast's, where that is on."""
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
