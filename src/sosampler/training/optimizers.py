"""The optimisers of all trainings."""

from __future__ import annotations

import torch
from torch import nn


def make_optimizer(
    network: nn.Module, name: str, *, lr: float, weight_decay: float, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """ "adamw" or "sgd" for what is trainable; weight decay for weights alone, not for biases and norms."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
