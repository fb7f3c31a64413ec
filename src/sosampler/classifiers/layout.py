"""How weights lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def to_channels_last(net: nn.Module) -> list[Tensor]:
    """Lay out what 2-D convolutions hold as they work fastest, the same numbers. Returns the tensors that changed.

    Those of 3-D convolutions have five dimensions and stay as they are: `net.to(memory_format=...)` would refuse them.
    """
    changed = []
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.ndim == 4 and tensor.is_contiguous():
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
            changed.append(tensor)
    return changed
