"""GPU kernels for what stands between convolutions: each reads and writes its values once.

Needs triton, which comes with torch's CUDA builds; without it the same is done by torch's operators.
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

from sosampler.engine.kernels.blocks import BLOCK_CHANNELS, Blocks
from sosampler.errors import first_line

log = logging.getLogger("sosampler")

triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:
    triton = tl = None

_BLOCK = 1024  # values a program
_CELLS = 64  # blocks of pixels a program
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then kernels run on the CPU too, for tests
_NUMBERS = {None: 0, "relu": 1, "relu6": 2}


def have_triton() -> bool:
    return triton is not None


def can_use(x: Tensor) -> bool:
    """Whether kernels run where this tensor lies."""
    if triton is None:
        return False
    return _can_be_compiled(x.device) if x.is_cuda else _INTERPRETED


@cache
def _can_be_compiled(device: torch.device) -> bool:
    """Triton needs a C compiler and Python's headers, which small containers lack: try it once."""
    x = torch.zeros(1, 1, 1, 1, device=device)
    try:
        launch(_finish, (1,), x, x, x, 1, 1, has_bias=False, has_other=False, activation=1, block=_BLOCK)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        log.warning(
            "kernels for the GPU cannot be compiled here (%s); torch's operators are used, which are slower. "
            "Install gcc and the headers of Python",
            first_line(error),
        )
        return False
    return True


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, /, *arguments: Any, **settings: Any) -> None:
    """Run a kernel on the device where its first argument lies, which need not be the current one."""
    with torch.cuda.device_of(x):
        kernel[grid](x, *arguments, **settings)


def finish(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    """activation(x + bias[channel] + other), in place of x: [F, C, H, W], channels last."""
    if bias is None and other is None and activation is None:
        return x
    if not can_use(x) or not dense(x):
        return _by_steps(x, bias, other, activation)
    if other is not None and (other.stride() != x.stride() or other.dtype != x.dtype):
        other = other.to(x.dtype).contiguous(memory_format=torch.channels_last)
        if other.stride() != x.stride():
            return _by_steps(x, bias, other, activation)
    number = x.numel()
    grid = (triton.cdiv(number, _BLOCK),)
    launch(
        *(_finish, grid, x, x if bias is None else bias, x if other is None else other, number, x.shape[1]),
        has_bias=bias is not None,
        has_other=other is not None,
        activation=_NUMBERS[activation],
        block=_BLOCK,
    )
    return x


def centred(levels: Tensor, middle: int, width: int, dtype: torch.dtype) -> Tensor:
    """uint8 [F, H, W] -> [F, H, width]: grey levels around the middle one, then zeros."""
    if not can_use(levels):
        # In one pass: the tensor without dimensions decides the type.
        found = torch.sub(levels, torch.tensor(middle, dtype=dtype))
        return F.pad(found, (0, width - levels.shape[-1]))
    levels = levels.contiguous()
    found = torch.empty(*levels.shape[:2], width, device=levels.device, dtype=dtype)
    before = levels.shape[-1]
    unit = min(before & -before, 16)  # bytes that can be read together: the largest power of two in a row
    block = triton.next_power_of_2(width)
    grid = (len(levels) * levels.shape[1],)
    launch(_centre, grid, levels, found, before // unit, width, middle, unit=unit, block=block)
    return found


def normalise(levels: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype, *, offset: float = 0.0) -> Tensor:
    """(grey level - mean) * scale in one pass: levels + offset [F, h, W], rounded to 0..255; mean and scale [W]."""
    if not can_use(levels):
        whole = (levels.float() + offset).round_().clamp_(0, 255)
        return torch.sub(whole, mean).mul_(scale).to(dtype)
    levels = levels.contiguous()
    found = torch.empty_like(levels, dtype=dtype)
    grid = (triton.cdiv(levels.numel(), _BLOCK),)
    numbers = (levels.numel(), levels.shape[-1], offset)
    launch(_normalise, grid, levels, found, mean, scale, *numbers, block=_BLOCK)
    return found


def normalise_blocks(
    levels: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype, blocks: Blocks, *, offset: float = 0.0
) -> Tensor:
    """The same, as blocks of 2 x 2 pixels with zeros around: levels [F, h, w * 3] -> [F, 16, rows, columns].

    Channels last: those of the block's pixels one after another, then zeros.
    """
    frames, height, width = levels.shape[0], levels.shape[1], levels.shape[2] // 3
    rows, columns = blocks.count(height), blocks.count(width)
    if not can_use(levels):
        whole = normalise(levels, mean, scale, dtype, offset=offset)
        return blocks.of(whole.unflatten(2, (-1, 3)).permute(0, 3, 1, 2))
    levels = levels.contiguous()
    found = torch.empty(frames, rows, columns, BLOCK_CHANNELS, device=levels.device, dtype=dtype)
    _fill_blocks(levels, found, (mean, scale), (height, width), blocks, offset, levels_are_rounded=True)
    return found.permute(0, 3, 1, 2)


def as_blocks(pictures: Tensor, dtype: torch.dtype, blocks: Blocks) -> Tensor:
    """`blocks.of` of normalised pictures [F, 3, H, W], channels last, in one pass. Needs `can_use(pictures)`."""
    frames, _, height, width = pictures.shape
    rows, columns = blocks.count(height), blocks.count(width)
    found = torch.empty(frames, rows, columns, BLOCK_CHANNELS, device=pictures.device, dtype=dtype)
    _fill_blocks(pictures, found, (pictures, pictures), (height, width), blocks, 0.0, levels_are_rounded=False)
    return found.permute(0, 3, 1, 2)


def _fill_blocks(
    levels: Tensor,
    found: Tensor,
    numbers: tuple[Tensor, Tensor],
    size: tuple[int, int],
    blocks: Blocks,
    offset: float,
    *,
    levels_are_rounded: bool,
) -> None:
    frames, rows, columns = found.shape[:3]
    cells = frames * rows * columns
    launch(
        *(_normalise_blocks, (triton.cdiv(cells, _CELLS),), levels, found, *numbers),
        *(cells, *size, rows, columns, blocks.before, offset),
        levels_are_rounded=levels_are_rounded,
        block=_CELLS,
        channels=BLOCK_CHANNELS,
    )


def max_pool(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """As torch's own of [F, C, H, W]; torch's takes several times as long where channels are last."""
    if not can_use(x) or not dense(x):
        return F.max_pool2d(x, kernel, stride, padding)
    frames, channels, height, width = x.shape
    rows, columns = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    shape = (frames, channels, rows, columns)
    found = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    grid = (triton.cdiv(found.numel(), _BLOCK),)
    sizes = (found.numel(), channels, height, width, rows, columns)
    launch(_max_pool, grid, x, found, *sizes, kernel=kernel, stride=stride, padding=padding, block=_BLOCK)
    return found


def dense(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side, and pixels without gaps."""
    return bool(x.is_contiguous(memory_format=torch.channels_last)) and (x.stride(1) == 1 or x.shape[1] == 1)


def made_dense(x: Tensor) -> Tensor:
    """The same values so that `dense` holds."""
    x = x.contiguous(memory_format=torch.channels_last)
    # Of one pixel torch calls both layouts the same.
    return x if dense(x) else torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def _by_steps(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        x = x + bias.view(1, -1, 1, 1)
    if other is not None:
        x = x + other
    if activation == "relu":
        return F.relu(x)
    return F.relu6(x) if activation == "relu6" else x


def _define_whole_levels() -> Any:
    """Apart, for kernels find each other by the names of a module alone."""

    @triton.jit
    def whole_levels(values):  # type: ignore[no-untyped-def]
        # A float32 as large as 1.5 * 2**23 has no fraction, and halves go to the even neighbour, as torch rounds.
        return tl.minimum(tl.maximum((values + 12582912.0) - 12582912.0, 0.0), 255.0)

    return whole_levels


_whole_levels: Any = _define_whole_levels() if triton is not None else None


def _define() -> tuple[Any, Any, Any, Any, Any]:
    """The kernels. Numbers are added in float32, as in a convolution that does it itself."""

    @triton.jit
    def finishing(  # type: ignore[no-untyped-def]
        x,
        bias,
        other,
        number,
        channels,
        has_bias: tl.constexpr,
        has_other: tl.constexpr,
        activation: tl.constexpr,
        block: tl.constexpr,
    ):
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            values += tl.load(bias + places % channels, mask=inside, other=0.0).to(tl.float32)
        if has_other:
            values += tl.load(other + places, mask=inside, other=0.0).to(tl.float32)
        if activation >= 1:
            values = tl.maximum(values, 0.0)
        if activation == 2:
            values = tl.minimum(values, 6.0)
        tl.store(x + places, values.to(x.dtype.element_ty), mask=inside)

    @triton.jit
    def centring(levels, found, units, after, middle, unit: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, block)
        before = units * unit
        real = column < before
        values = tl.load(levels + row * before + column, mask=real, other=0).to(tl.float32) - middle
        values = tl.where(real, values, 0.0).to(found.dtype.element_ty)
        tl.store(found + row * after + column, values, mask=column < after)

    @triton.jit
    def normalising(levels, found, mean, scale, number, width, offset, block: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        values = tl.load(levels + places, mask=inside, other=0.0).to(tl.float32)
        values = _whole_levels(values + offset)
        column = places % width
        values -= tl.load(mean + column, mask=inside, other=0.0)
        values *= tl.load(scale + column, mask=inside, other=0.0)
        tl.store(found + places, values.to(found.dtype.element_ty), mask=inside)

    @triton.jit
    def normalising_blocks(  # type: ignore[no-untyped-def]
        levels,
        found,
        mean,
        scale,
        number,
        height,
        width,
        rows,
        columns,
        before,
        offset,
        levels_are_rounded: tl.constexpr,
        block: tl.constexpr,
        channels: tl.constexpr,
    ):
        cell = tl.program_id(0) * block + tl.arange(0, block)[:, None]
        channel = tl.arange(0, channels)[None, :]
        colour = channel % 3
        x = 2 * (cell % columns) + (channel // 3) % 2 - before
        y = 2 * ((cell // columns) % rows) + channel // 6 - before
        picture = levels + (cell // (columns * rows)).to(tl.int64) * (height * width * 3)
        real = cell < number
        inside = real & (channel < 12) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
        values = tl.load(picture + (y * width + x) * 3 + colour, mask=inside, other=0.0).to(tl.float32)
        if levels_are_rounded:  # and normalised; else they are that already
            values = _whole_levels(values + offset)
            values -= tl.load(mean + colour)
            values *= tl.load(scale + colour)
            values = tl.where(inside, values, 0.0)
        where = found + cell.to(tl.int64) * channels + channel
        tl.store(where, values.to(found.dtype.element_ty), mask=real)

    @triton.jit
    def max_pooling(  # type: ignore[no-untyped-def]
        x,
        found,
        number,
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
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        channel = places % channels
        cell = places // channels
        left = (cell % columns) * stride - padding
        top = ((cell // columns) % rows) * stride - padding
        frame = cell // (columns * rows)
        highest = tl.full((block,), float("-inf"), tl.float32)
        for down in tl.static_range(kernel):
            for right in tl.static_range(kernel):
                y, column = top + down, left + right
                inside = (places < number) & (y >= 0) & (y < height) & (column >= 0) & (column < width)
                where = ((frame * height + y) * width + column) * channels + channel
                values = tl.load(x + where, mask=inside, other=float("-inf")).to(tl.float32)
                highest = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
        tl.store(found + places, highest.to(found.dtype.element_ty), mask=places < number)

    return finishing, centring, normalising, normalising_blocks, max_pooling


_finish: Any
_centre: Any
_normalise: Any
_normalise_blocks: Any
_max_pool: Any
_finish, _centre, _normalise, _normalise_blocks, _max_pool = _define() if triton is not None else (None,) * 5
