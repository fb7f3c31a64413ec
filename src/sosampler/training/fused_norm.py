"""Batch norm and the activation behind it in one, for training on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sosampler.engine.kernels.triton_kernels import can_use, dense, made_dense
from sosampler.training import norm_kernels


class FusedNorm(nn.BatchNorm2d):
    """Batch norm, then ReLU6 where `relu6`; names and weights are those of the plain one.

    Where the kernels do not apply (evaluation, the CPU, channels that do not lie side by side) torch's operators do it.
    """

    def __init__(self, norm: nn.BatchNorm2d, *, relu6: bool) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.train(norm.training)
        self.relu6 = relu6

    def forward(self, x: Tensor) -> Tensor:
        alone = x.numel() == x.shape[1]  # one value a channel: torch says that it has no deviation
        if not self.training or alone or not can_use(x) or not dense(x):
            x = super().forward(x)
            return F.relu6(x) if self.relu6 else x
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        found: Tensor = _Norm.apply(x, self.weight, self.bias, running, self.momentum, self.eps, self.relu6)
        return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: Any, momentum: float, eps: float, relu6: bool
    ) -> Tensor:
        found, kept = norm_kernels.normalise(x, weight, bias, running, momentum, eps, relu6)
        ctx.save_for_backward(x, kept)
        ctx.relu6 = relu6
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        x, kept = ctx.saved_tensors
        given = made_dense(given.to(x.dtype))
        return *norm_kernels.gradients(x, given, kept, ctx.relu6), None, None, None, None


def fuse_norms(network: nn.Module) -> int:
    """Replace batch norms, with a ReLU6 that follows in the same sequence, in place; how many were."""
    count = 0
    for parent in list(network.modules()):
        children = list(parent.named_children())
        for place, (name, child) in enumerate(children):
            if type(child) is not nn.BatchNorm2d or child.momentum is None:
                continue
            if not (child.affine and child.track_running_stats):
                continue
            follows = children[place + 1] if isinstance(parent, nn.Sequential) and place + 1 < len(children) else None
            relu6 = follows is not None and type(follows[1]) is nn.ReLU6
            setattr(parent, name, FusedNorm(child, relu6=relu6))
            if follows is not None and relu6:
                setattr(parent, follows[0], nn.Identity())
            count += 1
    return count
