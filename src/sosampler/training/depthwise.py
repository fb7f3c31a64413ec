"""The way back through a depthwise convolution on a GPU, where channels lie side by side: one pass instead of two.

cuDNN computes the gradients of the input and of the weights one after the other, and in bfloat16 takes four times as
long for the first as it takes to read and write the values. Both need the same nine neighbours of the output's
gradient, so that one kernel gives both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sosampler.engine.kernels.triton_kernels import can_use, dense, launch, made_dense, tl, triton
from sosampler.training.same_conv import SameConv

_PIXELS, _CHANNELS, _WARPS = 16, 32, 4  # of a tile; of the output's gradient, which has fewer pixels with a stride
_PROGRAMS = 528  # about, in all
_TAPS = 9


class FastDepthwise(SameConv):
    """A depthwise convolution of 3 x 3 pixels.

    In evaluation, on the CPU and where channels do not lie side by side torch's operators do it.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not can_use(x) or not dense(x):
            return super().forward(x)
        found: Tensor = _Depthwise.apply(x.to(self.type_for(x)), self.weight, self.stride[0])
        return found


def is_known(conv: nn.Conv2d) -> bool:
    """Whether `FastDepthwise` is for this one, which has no bias and zeros around."""
    channels = conv.in_channels
    sizes = (conv.kernel_size, conv.padding, conv.dilation)
    return (
        conv.groups == channels == conv.out_channels > 1
        and sizes == ((3, 3), (1, 1), (1, 1))
        and conv.stride in ((1, 1), (2, 2))
    )


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        with torch.autocast(x.device.type, enabled=False):
            return F.conv2d(x, weight.to(x.dtype), None, stride, 1, 1, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight = gradients(x, made_dense(given.to(x.dtype)), weight, ctx.stride)
        return of_x, of_weight, None


def gradients(x: Tensor, given: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Of the input [F, C, H, W] and of the weight [C, 1, 3, 3], for the output's gradient `given`."""
    channels = x.shape[1]
    pixels = given.numel() // channels
    across = triton.cdiv(channels, _CHANNELS)
    tiles = triton.cdiv(pixels, _PIXELS)
    each = triton.cdiv(tiles, max(1, _PROGRAMS // across))  # tiles a program
    programs = triton.cdiv(tiles, each)
    found = torch.empty_like(x)
    sums = torch.empty(programs, channels, _TAPS, device=x.device, dtype=torch.float32)
    taps = weight.float().reshape(channels, _TAPS)
    launch(
        *(_BACK[stride], (across, programs), x, given, taps, found, sums),
        *(pixels, channels, *x.shape[2:], *given.shape[2:], each),
        block_pixels=_PIXELS,
        block_channels=_CHANNELS,
        num_warps=_WARPS,
    )
    of_weight = sums.sum(0).to(weight.dtype)
    return found, of_weight.as_strided(weight.shape, weight.stride())  # dense in any layout: one channel a filter


def _define_parts() -> tuple[Any, Any]:
    """What both kernels do. Apart, for kernels find each other by the names of a module alone."""

    @triton.jit
    def load_taps(taps, channel, real):  # type: ignore[no-untyped-def]
        where = taps + channel * 9
        return (
            tl.load(where, mask=real, other=0.0),
            tl.load(where + 1, mask=real, other=0.0),
            tl.load(where + 2, mask=real, other=0.0),
            tl.load(where + 3, mask=real, other=0.0),
            tl.load(where + 4, mask=real, other=0.0),
            tl.load(where + 5, mask=real, other=0.0),
            tl.load(where + 6, mask=real, other=0.0),
            tl.load(where + 7, mask=real, other=0.0),
            tl.load(where + 8, mask=real, other=0.0),
        )

    @triton.jit
    def store_sums(where, real, sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8):  # type: ignore[no-untyped-def]
        tl.store(where, tl.sum(sum0, 0), mask=real)
        tl.store(where + 1, tl.sum(sum1, 0), mask=real)
        tl.store(where + 2, tl.sum(sum2, 0), mask=real)
        tl.store(where + 3, tl.sum(sum3, 0), mask=real)
        tl.store(where + 4, tl.sum(sum4, 0), mask=real)
        tl.store(where + 5, tl.sum(sum5, 0), mask=real)
        tl.store(where + 6, tl.sum(sum6, 0), mask=real)
        tl.store(where + 7, tl.sum(sum7, 0), mask=real)
        tl.store(where + 8, tl.sum(sum8, 0), mask=real)

    return load_taps, store_sums


_load_taps: Any
_store_sums: Any
_load_taps, _store_sums = _define_parts() if triton is not None else (None, None)


def _define() -> tuple[Any, Any]:
    @triton.jit
    def back(  # type: ignore[no-untyped-def]
        values,
        given,
        taps,
        found,
        sums,
        pixels,
        channels,
        height,
        width,
        rows,
        columns,
        each,
        block_pixels: tl.constexpr,
        block_channels: tl.constexpr,
    ):
        """Stride 1: weight (i, j) was multiplied with a pixel where the output lies 1 - i lower, 1 - j to the right."""
        column = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
        channel = column[None, :]
        real = channel < channels
        weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7, weight8 = _load_taps(
            taps, channel, real
        )
        sum0 = tl.zeros((block_pixels, block_channels), tl.float32)
        sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8 = sum0, sum0, sum0, sum0, sum0, sum0, sum0, sum0
        row = columns * channels  # values of one
        program = tl.program_id(1)
        for tile in range(program * each, program * each + each):
            pixel = tile * block_pixels + tl.arange(0, block_pixels)
            x = pixel % width
            y = (pixel // width) % height
            inside = (pixel < pixels)[:, None] & real
            here = pixel.to(tl.int64)[:, None] * channels + channel
            before, behind = inside & (x > 0)[:, None], inside & (x < width - 1)[:, None]
            above, below = (y > 0)[:, None], (y < height - 1)[:, None]
            near = given + here
            shown = tl.load(values + here, mask=inside, other=0.0).to(tl.float32)
            slope0 = tl.load(near + row + channels, mask=below & behind, other=0.0).to(tl.float32)
            slope1 = tl.load(near + row, mask=below & inside, other=0.0).to(tl.float32)
            slope2 = tl.load(near + row - channels, mask=below & before, other=0.0).to(tl.float32)
            slope3 = tl.load(near + channels, mask=behind, other=0.0).to(tl.float32)
            slope4 = tl.load(near, mask=inside, other=0.0).to(tl.float32)
            slope5 = tl.load(near - channels, mask=before, other=0.0).to(tl.float32)
            slope6 = tl.load(near - row + channels, mask=above & behind, other=0.0).to(tl.float32)
            slope7 = tl.load(near - row, mask=above & inside, other=0.0).to(tl.float32)
            slope8 = tl.load(near - row - channels, mask=above & before, other=0.0).to(tl.float32)
            total = slope0 * weight0
            total += slope1 * weight1
            total += slope2 * weight2
            total += slope3 * weight3
            total += slope4 * weight4
            total += slope5 * weight5
            total += slope6 * weight6
            total += slope7 * weight7
            total += slope8 * weight8
            tl.store(found + here, total.to(found.dtype.element_ty), mask=inside)
            sum0 += shown * slope0
            sum1 += shown * slope1
            sum2 += shown * slope2
            sum3 += shown * slope3
            sum4 += shown * slope4
            sum5 += shown * slope5
            sum6 += shown * slope6
            sum7 += shown * slope7
            sum8 += shown * slope8
        where = sums + (program * channels + column) * 9
        _store_sums(where, column < channels, sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8)

    @triton.jit
    def back_strided(  # type: ignore[no-untyped-def]
        values,
        given,
        taps,
        found,
        sums,
        pixels,
        channels,
        height,
        width,
        rows,
        columns,
        each,
        block_pixels: tl.constexpr,
        block_channels: tl.constexpr,
    ):
        """Stride 2: of an output's pixel, and those to the right and below, come four of the input: even and odd."""
        column = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
        channel = column[None, :]
        real = channel < channels
        weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7, weight8 = _load_taps(
            taps, channel, real
        )
        sum0 = tl.zeros((block_pixels, block_channels), tl.float32)
        sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8 = sum0, sum0, sum0, sum0, sum0, sum0, sum0, sum0
        program = tl.program_id(1)
        for tile in range(program * each, program * each + each):
            pixel = tile * block_pixels + tl.arange(0, block_pixels)
            x = pixel % columns
            y = (pixel // columns) % rows
            frame = pixel // (columns * rows)
            inside = (pixel < pixels)[:, None] & real
            behind, below = inside & (x < columns - 1)[:, None], (y < rows - 1)[:, None]
            near = given + pixel.to(tl.int64)[:, None] * channels + channel
            slope = tl.load(near, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(near + channels, mask=behind, other=0.0).to(tl.float32)
            lower = tl.load(near + columns * channels, mask=below & inside, other=0.0).to(tl.float32)
            across = tl.load(near + (columns + 1) * channels, mask=below & behind, other=0.0).to(tl.float32)
            here = ((frame * height + 2 * y) * width + 2 * x).to(tl.int64)[:, None] * channels + channel
            # The last row and column of an odd number have no odd neighbour.
            odd_x, odd_y = inside & (2 * x + 1 < width)[:, None], (2 * y + 1 < height)[:, None]
            row = width * channels
            shown = tl.load(values + here, mask=inside, other=0.0).to(tl.float32)
            total = slope * weight4
            tl.store(found + here, total.to(found.dtype.element_ty), mask=inside)
            sum4 += shown * slope
            shown = tl.load(values + here + channels, mask=odd_x, other=0.0).to(tl.float32)
            total = slope * weight5
            total += right * weight3
            tl.store(found + here + channels, total.to(found.dtype.element_ty), mask=odd_x)
            sum5 += shown * slope
            sum3 += shown * right
            shown = tl.load(values + here + row, mask=odd_y & inside, other=0.0).to(tl.float32)
            total = slope * weight7
            total += lower * weight1
            tl.store(found + here + row, total.to(found.dtype.element_ty), mask=odd_y & inside)
            sum7 += shown * slope
            sum1 += shown * lower
            shown = tl.load(values + here + row + channels, mask=odd_y & odd_x, other=0.0).to(tl.float32)
            total = slope * weight8
            total += right * weight6
            total += lower * weight2
            total += across * weight0
            tl.store(found + here + row + channels, total.to(found.dtype.element_ty), mask=odd_y & odd_x)
            sum8 += shown * slope
            sum6 += shown * right
            sum2 += shown * lower
            sum0 += shown * across
        where = sums + (program * channels + column) * 9
        _store_sums(where, column < channels, sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8)

    return back, back_strided


_BACK: dict[int, Any] = dict(zip((1, 2), _define(), strict=True)) if triton is not None else {}
