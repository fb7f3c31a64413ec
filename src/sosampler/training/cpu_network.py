"""A sampler's network made ready for training on a CPU; what it computes stays the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sosampler.samplers.sosampler import SOSampler
from sosampler.training.same_conv import SameConv


class StridedDepthwise(SameConv):
    """A depthwise convolution with a stride.

    oneDNN has no fast way back through it in bfloat16: four such layers took half of a step of MobileNetV2. Their
    gradients are computed in float32, ten times as fast.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            shape = (self.stride, self.padding, self.dilation, self.groups)
            found: Tensor = _BackInFloat32.apply(x, self.weight, shape)
        return found


class _BackInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        return F.conv2d(x, weight.to(x.dtype), None, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.shape
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], False)
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            *(given.float(), x.float(), weight.float(), None),
            *(stride, padding, dilation, False, (0, 0), groups, wanted),
        )
        return (
            None if of_x is None else of_x.to(x.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
        )


def prepare_network(sampler: SOSampler) -> None:
    """In place: channels side by side, and a fast way back through depthwise convolutions with a stride."""
    sampler.to(memory_format=torch.channels_last)
    for parent in list(sampler.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and _is_strided_depthwise(child):
                setattr(parent, name, StridedDepthwise(child))


def _is_strided_depthwise(conv: nn.Conv2d) -> bool:
    depthwise = conv.groups == conv.in_channels > 1
    plain = conv.bias is None and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    return depthwise and plain and max(conv.stride) > 1
