"""Triton kernels for the steps between convolutions: each reads and writes its values once.

Triton comes with torch's CUDA builds; without it torch's own operators are used. README.md explains each kernel.
"""

from __future__ import annotations

import logging
import os
import subprocess
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sosampler.engine.kernels.blocks import BLOCK_CHANNELS, SpaceToDepth, finish_conv_eager
from sosampler.errors import first_line

log = logging.getLogger("sosampler")

triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:
    triton = tl = None

_BLOCK = 1024  # values per program
_CELLS = 64  # 2 x 2 pixel blocks per program
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then kernels run on the CPU too, for tests
_ACTIVATION_CODES = {None: 0, "relu": 1, "relu6": 2}


def can_use(x: Tensor) -> bool:
    """Return whether kernels run on the device of this tensor."""
    if triton is None:
        return False
    return _can_compile(x.device) if x.is_cuda else _INTERPRETED


@cache
def _can_compile(device: torch.device) -> bool:
    """Try to compile once: Triton needs a C compiler and Python's headers, which small containers lack."""
    x = torch.zeros(1, 1, 1, 1, device=device)
    try:
        _launch(_finish, (1,), x, x, x, 1, 1, has_bias=False, has_other=False, activation=1, block=_BLOCK)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        log.warning(
            "GPU kernels cannot be compiled (%s); torch's operators are used, which are slower. "
            "Install gcc and Python's headers",
            first_line(error),
        )
        return False
    return True


def _launch(kernel: Any, grid: tuple[int, ...], x: Tensor, /, *arguments: Any, **settings: Any) -> None:
    """Run a kernel on the device of its first argument, which need not be the current device."""
    with torch.cuda.device_of(x):
        kernel[grid](x, *arguments, **settings)


def finish_conv(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    """Compute activation(x + bias[channel] + other) in place of x: [F, C, H, W], channels last."""
    if bias is None and other is None and activation is None:
        return x
    if not can_use(x) or not _is_dense(x):
        return finish_conv_eager(x, bias, other, activation)
    if other is not None and (other.stride() != x.stride() or other.dtype != x.dtype):
        other = other.to(x.dtype).contiguous(memory_format=torch.channels_last)
        if other.stride() != x.stride():
            return finish_conv_eager(x, bias, other, activation)
    size = x.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _launch(
        *(_finish, grid, x, x if bias is None else bias, x if other is None else other, size, x.shape[1]),
        has_bias=bias is not None,
        has_other=other is not None,
        activation=_ACTIVATION_CODES[activation],
        block=_BLOCK,
    )
    return x


def centre_pixels(pixels: Tensor, middle: int, width: int, dtype: torch.dtype) -> Tensor:
    """Subtract `middle` from uint8 [F, H, W] and pad rows with zeros: [F, H, width]."""
    if not can_use(pixels):
        # In one pass: the tensor without dimensions decides the type.
        centred = torch.sub(pixels, torch.tensor(middle, dtype=dtype))
        return F.pad(centred, (0, width - pixels.shape[-1]))
    pixels = pixels.contiguous()
    output = torch.empty(*pixels.shape[:2], width, device=pixels.device, dtype=dtype)
    before = pixels.shape[-1]
    unit = min(before & -before, 16)  # bytes that can be read together: the largest power of two in a row
    grid = (len(pixels) * pixels.shape[1],)
    block = triton.next_power_of_2(width)
    _launch(_centre, grid, pixels, output, before // unit, width, middle, unit=unit, block=block)
    return output


def normalise(pixels: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype, *, offset: float = 0.0) -> Tensor:
    """Compute (round(pixels + offset) - mean) * scale: pixels [F, h, W] are clamped to 0..255; mean and scale [W]."""
    if not can_use(pixels):
        rounded = (pixels.float() + offset).round_().clamp_(0, 255)
        return torch.sub(rounded, mean).mul_(scale).to(dtype)
    pixels = pixels.contiguous()
    output = torch.empty_like(pixels, dtype=dtype)
    size = pixels.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    _launch(_normalise, grid, pixels, output, mean, scale, size, pixels.shape[-1], offset, block=_BLOCK)
    return output


def normalise_to_blocks(
    pixels: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype, blocks: SpaceToDepth, *, offset: float = 0.0
) -> Tensor:
    """Normalise and rearrange into 2 x 2 blocks: pixels [F, h, w * 3] -> [F, 16, rows, columns], channels last."""
    frames, height, width = pixels.shape[0], pixels.shape[1], pixels.shape[2] // 3
    if not can_use(pixels):
        normalised = normalise(pixels, mean, scale, dtype, offset=offset)
        return blocks.rearrange(normalised.unflatten(2, (-1, 3)).permute(0, 3, 1, 2))
    pixels = pixels.contiguous()
    rows, columns = blocks.num_blocks(height), blocks.num_blocks(width)
    output = torch.empty(frames, rows, columns, BLOCK_CHANNELS, device=pixels.device, dtype=dtype)
    cells = frames * rows * columns
    _launch(
        *(_normalise_blocks, (triton.cdiv(cells, _CELLS),), pixels, output, mean, scale),
        *(cells, height, width, rows, columns, blocks.pad_before, offset),
        block=_CELLS,
        channels=BLOCK_CHANNELS,
    )
    return output.permute(0, 3, 1, 2)


def max_pool(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Max-pool [F, C, H, W] with the values of `F.max_pool2d`."""
    if not can_use(x) or not _is_dense(x):
        return F.max_pool2d(x, kernel, stride, padding)
    frames, channels, height, width = x.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    shape = (frames, channels, rows, columns)
    output = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    grid = (triton.cdiv(output.numel(), _BLOCK),)
    sizes = (output.numel(), channels, height, width, rows, columns)
    _launch(_max_pool, grid, x, output, *sizes, kernel=kernel, stride=stride, padding=padding, block=_BLOCK)
    return output


def _is_dense(x: Tensor) -> bool:
    """Return whether the channels of a pixel lie side by side, and pixels without gaps."""
    return bool(x.is_contiguous(memory_format=torch.channels_last)) and (x.stride(1) == 1 or x.shape[1] == 1)


if triton is not None:  # sums are in float32, as in a convolution that adds its bias itself

    @triton.jit
    def _round_pixels(values):  # type: ignore[no-untyped-def]
        # A float32 as large as 1.5 * 2**23 has no fraction, and halves go to the even neighbour, as torch rounds.
        return tl.minimum(tl.maximum((values + 12582912.0) - 12582912.0, 0.0), 255.0)

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        x,
        bias,
        other,
        size,
        channels,
        has_bias: tl.constexpr,
        has_other: tl.constexpr,
        activation: tl.constexpr,
        block: tl.constexpr,
    ):
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = index < size
        values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            values += tl.load(bias + index % channels, mask=inside, other=0.0).to(tl.float32)
        if has_other:
            values += tl.load(other + index, mask=inside, other=0.0).to(tl.float32)
        if activation >= 1:
            values = tl.maximum(values, 0.0)
        if activation == 2:
            values = tl.minimum(values, 6.0)
        tl.store(x + index, values.to(x.dtype.element_ty), mask=inside)

    @triton.jit
    def _centre(pixels, output, units, after, middle, unit: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        before = units * unit
        inside = column < before
        values = tl.load(pixels + row * before + column, mask=inside, other=0).to(tl.float32) - middle
        values = tl.where(inside, values, 0.0).to(output.dtype.element_ty)
        tl.store(output + row * after + column, values, mask=column < after)

    @triton.jit
    def _normalise(pixels, output, mean, scale, size, width, offset, block: tl.constexpr):  # type: ignore[no-untyped-def]
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = index < size
        values = tl.load(pixels + index, mask=inside, other=0.0).to(tl.float32)
        values = _round_pixels(values + offset)
        column = index % width
        values -= tl.load(mean + column, mask=inside, other=0.0)
        values *= tl.load(scale + column, mask=inside, other=0.0)
        tl.store(output + index, values.to(output.dtype.element_ty), mask=inside)

    @triton.jit
    def _normalise_blocks(  # type: ignore[no-untyped-def]
        pixels,
        output,
        mean,
        scale,
        size,
        height,
        width,
        rows,
        columns,
        pad_before,
        offset,
        block: tl.constexpr,
        channels: tl.constexpr,
    ):
        cell = tl.program_id(0) * block + tl.arange(0, block)[:, None]
        channel = tl.arange(0, channels)[None, :]
        colour = channel % 3
        x = 2 * (cell % columns) + (channel // 3) % 2 - pad_before
        y = 2 * ((cell // columns) % rows) + channel // 6 - pad_before
        image = pixels + (cell // (columns * rows)).to(tl.int64) * (height * width * 3)
        real = cell < size
        inside = real & (channel < 12) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
        values = tl.load(image + (y * width + x) * 3 + colour, mask=inside, other=0.0).to(tl.float32)
        values = _round_pixels(values + offset)
        values -= tl.load(mean + colour)
        values *= tl.load(scale + colour)
        values = tl.where(inside, values, 0.0)
        target = output + cell.to(tl.int64) * channels + channel
        tl.store(target, values.to(output.dtype.element_ty), mask=real)

    @triton.jit
    def _max_pool(  # type: ignore[no-untyped-def]
        x,
        output,
        size,
        channels,
        height,
        width,
        rows,
        columns,
        kernel: tl.constexpr,
        stride: tl.constexpr,
        padding: tl.constexpr,
        block: tl.constexpr,
    ):
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        channel = index % channels
        cell = index // channels
        left = (cell % columns) * stride - padding
        top = ((cell // columns) % rows) * stride - padding
        frame = cell // (columns * rows)
        highest = tl.full((block,), float("-inf"), tl.float32)
        for down in tl.static_range(kernel):
            for right in tl.static_range(kernel):
                y, column = top + down, left + right
                inside = (index < size) & (y >= 0) & (y < height) & (column >= 0) & (column < width)
                source = ((frame * height + y) * width + column) * channels + channel
                values = tl.load(x + source, mask=inside, other=float("-inf")).to(tl.float32)
                highest = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
        tl.store(output + index, highest.to(output.dtype.element_ty), mask=index < size)
