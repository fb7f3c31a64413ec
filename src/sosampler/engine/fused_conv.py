"""A convolution that also adds and activates, in one pass over its output where the device's library can."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.checks import one_of

ACTIVATIONS = ("relu", "relu6")
# steps: one operator after the other. onednn: all in one, on the CPU. triton: the convolution, then one pass for the
# rest, on a GPU. cudnn: all in one for ReLU in half precision, on a GPU, else as triton.
WAYS = ("steps", "onednn", "triton", "cudnn")
GPU_WAYS = ("triton", "cudnn")
# How oneDNN is told: the operation and its numbers.
_ONEDNN: dict[str | None, tuple[str, list[float]]] = {
    None: ("none", []),
    "relu": ("relu", []),
    "relu6": ("hardtanh", [0.0, 6.0]),
}
_ONEDNN_TYPES = (torch.float32, torch.bfloat16)
_CUDNN_TYPES = (torch.float16, torch.bfloat16)


class FusedConv(nn.Module):
    """activation(conv(x) + other): x [F, C, H, W], `other` of the output's shape or None. For inference only."""

    def __init__(self, conv: nn.Conv2d, activation: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.detach().clone(), requires_grad=False)
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach().clone(), requires_grad=False)
        self.activation = activation
        self.stride, self.padding, self.dilation = (
            [int(number) for number in pair] for pair in (conv.stride, conv.padding, conv.dilation)
        )
        self.groups = conv.groups
        self.reuses = False  # whether the output may take the memory of `other`, which nobody reads afterwards
        self.way = "steps"
        self._packed: Any = None  # the weights in oneDNN's own order, which no state dict can hold

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if self.way == "onednn":
            return self._by_onednn(x, other)
        if self.way in GPU_WAYS and x.is_cuda:
            in_one = self.way == "cudnn" and self.activation == "relu" and x.dtype in _CUDNN_TYPES
            return self._by_cudnn(x, other) if in_one and self.bias is not None else self._by_triton(x, other)
        x = self._convolved(x, self.bias)
        if other is not None:
            x = x + other
        if self.activation == "relu":
            return F.relu(x)
        return F.relu6(x) if self.activation == "relu6" else x

    def _convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _by_onednn(self, x: Tensor, other: Tensor | None) -> Tensor:
        shape = (self.padding, self.stride, self.dilation, self.groups)
        if self._packed is None:
            # Ordered for inputs of this shape; others are taken too, a little slower.
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *shape, list(x.shape))
        name, numbers = _ONEDNN[self.activation]
        onednn = torch.ops.mkldnn._convolution_pointwise
        if other is None:
            found: Tensor = onednn(x, self._packed, self.bias, *shape, name, numbers, "")
        else:
            # Behind an addition oneDNN knows ReLU alone.
            after: tuple[Any, ...] = ("add", None, "relu" if self.activation == "relu" else None, [], None)
            if self.reuses and _channels_last(x) and _channels_last(other):
                # A tenth of a ResNet-50's time: new memory is read before it is written.
                in_place = torch.ops.mkldnn._convolution_pointwise_.binary
                found = in_place(other, x, self._packed, self.bias, *shape, *after)
            else:
                found = onednn.binary(x, other, self._packed, self.bias, *shape, *after)
            if self.activation == "relu6":
                found.clamp_(0, 6)
        return found

    def _by_triton(self, x: Tensor, other: Tensor | None) -> Tensor:
        from sosampler.engine.triton_kernels import finish

        return finish(self._convolved(x, None), self.bias, other, self.activation)

    def _by_cudnn(self, x: Tensor, other: Tensor | None) -> Tensor:
        shape = (self.stride, self.padding, self.dilation, self.groups)
        if other is None:
            found: Tensor = torch.cudnn_convolution_relu(x, self.weight, self.bias, *shape)
        else:
            found = torch.cudnn_convolution_add_relu(x, self.weight, other, 1.0, self.bias, *shape)
        return found

    def extra_repr(self) -> str:
        out, into = self.weight.shape[0], self.weight.shape[1] * self.groups
        return f"{into}, {out}, stride={self.stride}, groups={self.groups}, activation={self.activation}, {self.way}"


def _channels_last(x: Tensor) -> bool:
    return bool(x.is_contiguous(memory_format=torch.channels_last))


def set_way(net: nn.Module, way: str) -> None:
    """How the fused convolutions of a network compute from now on; call it after the last `to`."""
    one_of("way", way, WAYS)
    for module in net.modules():
        if isinstance(module, FusedConv):
            fits = way != "onednn" or (module.weight.device.type == "cpu" and module.weight.dtype in _ONEDNN_TYPES)
            module.way = way if fits else "steps"
            module._packed = None
