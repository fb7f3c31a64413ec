"""Fused convolutions, and a first convolution that reads 2 x 2 blocks of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sosampler._util.validation import one_of

# How a fused convolution computes. eager: one operator after the other. onednn: one operator, on the CPU. triton: the
# convolution, then one kernel for the rest, on a GPU. cudnn: one operator for ReLU in half precision, on a GPU, else as
# triton.
CONV_BACKENDS = ("eager", "onednn", "triton", "cudnn")
GPU_BACKENDS = ("triton", "cudnn")
# oneDNN's name and arguments of each activation.
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
        self.in_place = False  # whether the output may overwrite `other`, because no later layer reads it
        self.backend = "eager"
        self._packed: Any = None  # the weights in oneDNN's own order, which no state dict can hold

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if self.backend == "onednn":
            return self._onednn(x, other)
        if self.backend in GPU_BACKENDS and x.is_cuda:
            if (
                self.backend == "cudnn"
                and self.activation == "relu"
                and x.dtype in _CUDNN_TYPES
                and self.bias is not None
            ):
                return self._cudnn(x, other)
            from sosampler.engine.kernels.triton_kernels import finish_conv

            return finish_conv(self._convolve(x, None), self.bias, other, self.activation)
        return finish_conv_eager(self._convolve(x, self.bias), None, other, self.activation)

    def _convolve(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, self.weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _onednn(self, x: Tensor, other: Tensor | None) -> Tensor:
        shape = (self.padding, self.stride, self.dilation, self.groups)
        if self._packed is None:
            # Ordered for inputs of this shape; others are accepted too, a little slower.
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *shape, list(x.shape))
        name, arguments = _ONEDNN[self.activation]
        onednn = torch.ops.mkldnn._convolution_pointwise
        if other is None:
            return onednn(x, self._packed, self.bias, *shape, name, arguments, "")
        # After an addition oneDNN supports ReLU only.
        after: tuple[Any, ...] = ("add", None, "relu" if self.activation == "relu" else None, [], None)
        if self.in_place and all(part.is_contiguous(memory_format=torch.channels_last) for part in (x, other)):
            # Saves a tenth of a ResNet-50's time: new memory is read before it is written.
            in_place = torch.ops.mkldnn._convolution_pointwise_.binary
            output = in_place(other, x, self._packed, self.bias, *shape, *after)
        else:
            output = onednn.binary(x, other, self._packed, self.bias, *shape, *after)
        return output.clamp_(0, 6) if self.activation == "relu6" else output

    def _cudnn(self, x: Tensor, other: Tensor | None) -> Tensor:
        shape = (self.stride, self.padding, self.dilation, self.groups)
        if other is None:
            output: Tensor = torch.cudnn_convolution_relu(x, self.weight, self.bias, *shape)
        else:
            output = torch.cudnn_convolution_add_relu(x, self.weight, other, 1.0, self.bias, *shape)
        return output

    def extra_repr(self) -> str:
        sizes = f"{self.weight.shape[1] * self.groups}, {self.weight.shape[0]}, stride={self.stride}"
        return f"{sizes}, groups={self.groups}, activation={self.activation}, {self.backend}"


def finish_conv_eager(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    """Compute activation(x + bias[channel] + other) with torch's operators, into new memory."""
    if bias is not None:
        x = x + bias.view(1, -1, 1, 1)
    if other is not None:
        x = x + other
    if activation == "relu":
        return F.relu(x)
    return F.relu6(x) if activation == "relu6" else x


def set_conv_backend(net: nn.Module, backend: str) -> None:
    """Set how the fused convolutions of a network compute; call it after the last `to`."""
    one_of("backend", backend, CONV_BACKENDS)
    for module in net.modules():
        if isinstance(module, FusedConv):
            fits = backend != "onednn" or (module.weight.device.type == "cpu" and module.weight.dtype in _ONEDNN_TYPES)
            module.backend = backend if fits else "eager"
            module._packed = None


BLOCK_CHANNELS = 16  # 12 values of 2 x 2 RGB pixels, padded
_SIDE = 2  # pixels


@dataclass(frozen=True)
class SpaceToDepth:
    """Rearrangement of images into 2 x 2 blocks, and of a stride-2 convolution to one of stride 1 over them."""

    kernel: int  # of the original convolution
    padding: int

    @property
    def pad_before(self) -> int:
        """Zeros before each row and column, in pixels: the padding, made even so that blocks begin with it."""
        return self.padding + self.padding % _SIDE

    @property
    def taps(self) -> int:
        """Kernel size in blocks."""
        return -(-(self.kernel + self.pad_before - self.padding) // _SIDE)

    def num_blocks(self, size: int) -> int:
        """Return the number of blocks along a side of `size` pixels that the convolution reads."""
        return (size + 2 * self.padding - self.kernel) // _SIDE + self.taps

    def rearrange(self, images: Tensor) -> Tensor:
        """Rearrange images [F, 3, H, W] -> [F, 16, rows, columns], channels last."""
        height, width = images.shape[-2:]
        rows, columns = self.num_blocks(height), self.num_blocks(width)
        below, right = (_SIDE * rows - self.pad_before - height), (_SIDE * columns - self.pad_before - width)
        padded = F.pad(images, (self.pad_before, right, self.pad_before, below))  # negative: pixels that are not read
        cells = padded.unflatten(-1, (columns, _SIDE)).unflatten(2, (rows, _SIDE))  # [F, 3, rows, 2, columns, 2]
        blocks = cells.permute(0, 2, 4, 3, 5, 1).flatten(3)  # [F, rows, columns, 12]
        return F.pad(blocks, (0, BLOCK_CHANNELS - blocks.shape[-1])).permute(0, 3, 1, 2)

    def rearrange_weight(self, weight: Tensor) -> Tensor:
        """Rearrange weights [C, 3, kernel, kernel] -> [C, 16, taps, taps]."""
        shift = self.pad_before - self.padding
        padded = F.pad(weight, (shift, self.taps * _SIDE - self.kernel - shift) * 2)  # [C, 3, 2 * taps, 2 * taps]
        cells = padded.unflatten(3, (self.taps, _SIDE)).unflatten(2, (self.taps, _SIDE))  # [C, 3, taps, 2, taps, 2]
        blocks = cells.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)  # [C, 12, taps, taps]
        return F.pad(blocks, (0, 0, 0, 0, 0, BLOCK_CHANNELS - blocks.shape[1]))


def use_space_to_depth(net: nn.Module) -> SpaceToDepth | None:
    """Make the first convolution of a fused network read blocks, if it is one of RGB images with stride 2, in place."""
    if not isinstance(net, fx.GraphModule):
        return None
    images = next(node for node in net.graph.nodes if node.op == "placeholder")
    users = list(images.users)
    if len(users) != 1 or users[0].op != "call_module" or len(users[0].args) != 1:
        return None
    name = str(users[0].target)
    conv = net.get_submodule(name)
    if not isinstance(conv, FusedConv):
        return None
    (channels, height, width), (above, left) = conv.weight.shape[1:], conv.padding
    if channels != 3 or conv.groups != 1 or conv.stride != [2, 2] or conv.dilation != [1, 1]:
        return None
    if height != width or above != left:
        return None
    blocks = SpaceToDepth(int(height), above)
    plain = nn.Conv2d(BLOCK_CHANNELS, len(conv.weight), blocks.taps, bias=conv.bias is not None)
    with torch.no_grad():
        plain.weight.copy_(blocks.rearrange_weight(conv.weight))
        if conv.bias is not None and plain.bias is not None:
            plain.bias.copy_(conv.bias)
    net.set_submodule(name, FusedConv(plain, conv.activation))
    return blocks
