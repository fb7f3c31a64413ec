"""The first convolution of a network on a GPU, whose matrix units are idle where there are three channels.

One of stride 2 sees the picture as blocks of 2 x 2 pixels. With the 12 values of a block as channels, and four zeros so
that their number suits the device, it is one of stride 1 with half the taps along each side: the same sums, several
times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sosampler.engine.fused_conv import FusedConv

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
