"""A convolution that also adds and activates, in one pass over its output where the device's library can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sosampler._util.validation import one_of

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
        from sosampler.engine.kernels.triton_kernels import finish

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


BLOCK_CHANNELS = 16
_SIDE = 2  # pixels of a block


@dataclass(frozen=True)
class Blocks:
    """How a picture is cut into blocks."""

    kernel: int  # of the convolution that there was
    padding: int

    @property
    def before(self) -> int:
        """Zeros before each row and column, in pixels: the padding, made even so that blocks begin with it."""
        return self.padding + self.padding % _SIDE

    @property
    def taps(self) -> int:
        """Blocks that one output looks at, along a side."""
        return -(-(self.kernel + self.before - self.padding) // _SIDE)

    def count(self, size: int) -> int:
        """Blocks along a side of so many pixels: those that the outputs look at."""
        return (size + 2 * self.padding - self.kernel) // _SIDE + self.taps

    def of(self, pictures: Tensor) -> Tensor:
        """[F, 3, H, W] -> [F, 16, rows, columns], channels last."""
        rows, columns = (self.count(size) for size in pictures.shape[-2:])
        after = [
            _SIDE * count - self.before - size for count, size in zip((rows, columns), pictures.shape[-2:], strict=True)
        ]
        padded = F.pad(pictures, (self.before, after[1], self.before, after[0]))  # what nobody looks at is cut off
        cells = padded.unflatten(-1, (columns, _SIDE)).unflatten(2, (rows, _SIDE))  # [F, 3, rows, 2, columns, 2]
        found = cells.permute(0, 2, 4, 3, 5, 1).flatten(3)  # [F, rows, columns, 12]
        return F.pad(found, (0, BLOCK_CHANNELS - found.shape[-1])).permute(0, 3, 1, 2)

    def weights(self, weight: Tensor) -> Tensor:
        """[C, 3, kernel, kernel] -> [C, 16, taps, taps]."""
        shift = self.before - self.padding
        size = self.taps * _SIDE
        whole = F.pad(weight, (shift, size - self.kernel - shift) * 2)  # [C, 3, 2 * taps, 2 * taps]
        cells = whole.unflatten(3, (self.taps, _SIDE)).unflatten(2, (self.taps, _SIDE))  # [C, 3, taps, 2, taps, 2]
        found = cells.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)  # [C, 12, taps, taps]
        return F.pad(found, (0, 0, 0, 0, 0, BLOCK_CHANNELS - found.shape[1]))


def see_blocks(net: nn.Module) -> Blocks | None:
    """Let a fused network begin with blocks, in place; None, and nothing changes, where its beginning is another."""
    if not isinstance(net, fx.GraphModule):
        return None
    first = next(node for node in net.graph.nodes if node.op == "placeholder")
    users = list(first.users)
    if len(users) != 1 or users[0].op != "call_module" or len(users[0].args) != 1:
        return None
    name = str(users[0].target)
    conv = net.get_submodule(name)
    if not isinstance(conv, FusedConv) or (blocks := blocks_for(conv)) is None:
        return None
    plain = nn.Conv2d(BLOCK_CHANNELS, len(conv.weight), blocks.taps, bias=conv.bias is not None)
    with torch.no_grad():
        plain.weight.copy_(blocks.weights(conv.weight))
        if conv.bias is not None and plain.bias is not None:
            plain.bias.copy_(conv.bias)
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, FusedConv(plain, conv.activation))
    return blocks


def blocks_for(conv: nn.Conv2d | FusedConv) -> Blocks | None:
    """How pictures are cut for this convolution; None where it is another than such a first one."""
    kernel, padding = tuple(conv.weight.shape[-2:]), conv.padding
    fits = (
        conv.weight.shape[1] == 3
        and conv.groups == 1
        and tuple(conv.stride) == (2, 2)
        and tuple(conv.dilation) == (1, 1)
        and kernel[0] == kernel[1]
        and not isinstance(padding, str)
        and padding[0] == padding[1]
    )
    return Blocks(kernel[0], int(padding[0])) if fits else None
