"""GPU kernels of batch norm in training together with the activation behind it, where channels lie side by side.

torch's own read and write the values of a layer about twelve times a step, with the activation apart. Here it is eight
times: sums, then values; sums of gradients, then gradients, with the activation told from the input. In a small network
that is most of what a step costs. Numbers are added in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sosampler.engine.kernels.triton_kernels import launch, tl, triton

_BLOCK = 1024  # values a program, where each is taken by itself
# Values at once, where they are summed over rows; on the way back each takes twice the registers.
_TILE_ROWS, _TILE_ROWS_BACK, _TILE_CHANNELS = 32, 16, 64
_PROGRAMS = 1056  # about, that sum: 8 for each of an H200's processors
_FINAL_CHANNELS, _FINAL_ROWS = 4, 512  # of the sums of all programs

Running = tuple[Tensor, Tensor, Tensor]  # mean, variance, and the number of batches


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, running: Running, momentum: float, eps: float, relu6: bool
) -> tuple[Tensor, Tensor]:
    """[F, C, H, W] channels last -> the same normalised and activated, and what `gradients` needs: [4, C].

    `running` follows in place.
    """
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    sums, parts = _sums(x, x, x, rows, channels, False, False)
    kept = torch.empty(4, channels, device=x.device, dtype=torch.float32)  # mean, 1 / deviation, scale, bias
    launch(
        *(_finish_forward, (triton.cdiv(channels, _FINAL_CHANNELS),)),
        *(x, sums, weight, bias, *running, kept, parts, rows, channels, momentum, eps),
        block_channels=_FINAL_CHANNELS,
        block_rows=_FINAL_ROWS,
    )
    found = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    launch(_apply, grid, x, found, kept, x.numel(), channels, relu6=relu6, block=_BLOCK)
    return found, kept


def gradients(x: Tensor, given: Tensor, kept: Tensor, relu6: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of the input [F, C, H, W], the weight and the bias, for the output's gradient `given`."""
    rows, channels = x.numel() // x.shape[1], x.shape[1]
    sums, parts = _sums(x, given, kept, rows, channels, True, relu6)
    found = torch.empty_like(x)
    # Gradients of weight and bias; that of x is scale * given + slope * (x - mean) + offset.
    told = torch.empty(4, channels, device=x.device, dtype=torch.float32)
    launch(
        *(_finish_backward, (triton.cdiv(channels, _FINAL_CHANNELS),)),
        *(sums, kept, told, parts, rows, channels),
        block_channels=_FINAL_CHANNELS,
        block_rows=_FINAL_ROWS,
    )
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    launch(_apply_backward, grid, x, given, found, kept, told, x.numel(), channels, relu6=relu6, block=_BLOCK)
    return found, told[0], told[1]


def _sums(
    x: Tensor, given: Tensor, kept: Tensor, rows: int, channels: int, backward: bool, relu6: bool
) -> tuple[Tensor, int]:
    """Two sums for each channel [2, parts, C], of parts of the rows each.

    Several rows side by side are taken for one with more channels, until their number fills whole tiles.
    """
    beside = 1
    while (channels * beside) % _TILE_CHANNELS and rows % (2 * beside) == 0:
        beside *= 2
    rows, wide = rows // beside, channels * beside
    across = triton.cdiv(wide, _TILE_CHANNELS)
    tile_rows = _TILE_ROWS_BACK if backward else _TILE_ROWS
    tiles = triton.cdiv(rows, tile_rows)
    each = triton.cdiv(tiles, max(1, _PROGRAMS // across))  # tiles a program
    programs = triton.cdiv(tiles, each)
    sums = torch.empty(2, programs * beside, channels, device=x.device, dtype=torch.float32)
    launch(
        *(_sum, (programs, across)),
        *(x, given, kept, sums, rows, wide, channels, each),
        backward=backward,
        relu6=relu6,
        block_rows=tile_rows,
        block_channels=_TILE_CHANNELS,
    )
    return sums, programs * beside


def _define_over_parts() -> Any:
    """Apart, for kernels find each other by the names of a module alone."""

    @triton.jit
    def over_parts(  # type: ignore[no-untyped-def]
        sums,
        parts,
        channels,
        channel,
        real,
        block_channels: tl.constexpr,
        block_rows: tl.constexpr,
    ):
        total = tl.zeros((block_rows, block_channels), tl.float32)
        for start in range(0, parts, block_rows):
            row = start + tl.arange(0, block_rows)
            inside = (row < parts)[:, None] & real[None, :]
            total += tl.load(sums + row[:, None] * channels + channel[None, :], mask=inside, other=0.0)
        return tl.sum(total, 0)

    return over_parts


_over_parts: Any = _define_over_parts() if triton is not None else None


def _define() -> tuple[Any, ...]:
    @triton.jit
    def summing(  # type: ignore[no-untyped-def]
        x,
        given,
        kept,
        sums,
        rows,
        wide,
        channels,
        each,
        backward: tl.constexpr,
        relu6: tl.constexpr,
        block_rows: tl.constexpr,
        block_channels: tl.constexpr,
    ):
        program = tl.program_id(0)
        column = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
        real = column < wide
        channel = column % channels
        row = tl.arange(0, block_rows)
        first = tl.zeros((block_rows, block_channels), tl.float32)
        second = tl.zeros((block_rows, block_channels), tl.float32)
        if backward:
            middle = tl.load(kept + channel, mask=real, other=0.0)[None, :]
            scale = tl.load(kept + 2 * channels + channel, mask=real, other=0.0)[None, :]
            bias = tl.load(kept + 3 * channels + channel, mask=real, other=0.0)[None, :]
        else:
            # Around any value of the channel, or squares of large numbers would hide small differences.
            middle = tl.load(x + channel, mask=real, other=0.0).to(tl.float32)[None, :]
        places = row[:, None] * wide + column[None, :]  # in a tile
        begin = program.to(tl.int64) * each * block_rows * wide
        for tile in range(program * each, program * each + each):
            inside = (row < rows - tile * block_rows)[:, None] & real[None, :]
            values = tl.load(x + begin + places, mask=inside, other=0.0).to(tl.float32) - middle
            if backward:
                slopes = tl.load(given + begin + places, mask=inside, other=0.0).to(tl.float32)
                if relu6:
                    shown = values * scale + bias
                    slopes = tl.where((shown > 0.0) & (shown < 6.0), slopes, 0.0)
                first += slopes
                second += slopes * values
            else:
                values = tl.where(inside, values, 0.0)
                first += values
                second += values * values
            begin += block_rows * wide
        where = program * wide + column
        tl.store(sums + where, tl.sum(first, 0), mask=real)
        tl.store(sums + tl.num_programs(0) * wide + where, tl.sum(second, 0), mask=real)

    @triton.jit
    def finishing_forward(  # type: ignore[no-untyped-def]
        x,
        sums,
        weight,
        bias,
        running_mean,
        running_variance,
        batches,
        kept,
        parts,
        rows,
        channels,
        momentum,
        eps,
        block_channels: tl.constexpr,
        block_rows: tl.constexpr,
    ):
        channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
        real = channel < channels
        first = _over_parts(sums, parts, channels, channel, real, block_channels, block_rows)
        second = _over_parts(sums + parts * channels, parts, channels, channel, real, block_channels, block_rows)
        beside = first / rows
        variance = tl.maximum(second / rows - beside * beside, 0.0)
        mean = beside + tl.load(x + channel, mask=real, other=0.0).to(tl.float32)
        sharpness = 1.0 / tl.sqrt(variance + eps)
        scale = sharpness * tl.load(weight + channel, mask=real, other=0.0)
        tl.store(kept + channel, mean, mask=real)
        tl.store(kept + channels + channel, sharpness, mask=real)
        tl.store(kept + 2 * channels + channel, scale, mask=real)
        tl.store(kept + 3 * channels + channel, tl.load(bias + channel, mask=real, other=0.0), mask=real)
        before = tl.load(running_mean + channel, mask=real, other=0.0)
        tl.store(running_mean + channel, before + momentum * (mean - before), mask=real)
        before = tl.load(running_variance + channel, mask=real, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(running_variance + channel, before + momentum * (unbiased - before), mask=real)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)

    @triton.jit
    def finishing_backward(  # type: ignore[no-untyped-def]
        sums,
        kept,
        told,
        parts,
        rows,
        channels,
        block_channels: tl.constexpr,
        block_rows: tl.constexpr,
    ):
        channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
        real = channel < channels
        first = _over_parts(sums, parts, channels, channel, real, block_channels, block_rows)
        second = _over_parts(sums + parts * channels, parts, channels, channel, real, block_channels, block_rows)
        sharpness = tl.load(kept + channels + channel, mask=real, other=0.0)
        scale = tl.load(kept + 2 * channels + channel, mask=real, other=0.0)
        of_bias = first
        of_weight = second * sharpness
        slope = -scale * sharpness * of_weight / rows
        tl.store(told + channel, of_weight, mask=real)
        tl.store(told + channels + channel, of_bias, mask=real)
        tl.store(told + 2 * channels + channel, slope, mask=real)
        tl.store(told + 3 * channels + channel, -scale * of_bias / rows, mask=real)

    @triton.jit
    def applying(x, found, kept, number, channels, relu6: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        channel = places % channels
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        values -= tl.load(kept + channel, mask=inside, other=0.0)
        scale = tl.load(kept + 2 * channels + channel, mask=inside, other=0.0)
        values = values * scale + tl.load(kept + 3 * channels + channel, mask=inside, other=0.0)
        if relu6:
            values = tl.minimum(
                tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL
            )
        tl.store(found + places, values.to(found.dtype.element_ty), mask=inside)

    @triton.jit
    def applying_backward(  # type: ignore[no-untyped-def]
        x,
        given,
        found,
        kept,
        told,
        number,
        channels,
        relu6: tl.constexpr,
        block: tl.constexpr,
    ):
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        channel = places % channels
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        values -= tl.load(kept + channel, mask=inside, other=0.0)
        slopes = tl.load(given + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(kept + 2 * channels + channel, mask=inside, other=0.0)
        if relu6:
            shown = values * scale + tl.load(kept + 3 * channels + channel, mask=inside, other=0.0)
            slopes = tl.where((shown > 0.0) & (shown < 6.0), slopes, 0.0)
        slope = tl.load(told + 2 * channels + channel, mask=inside, other=0.0)
        offset = tl.load(told + 3 * channels + channel, mask=inside, other=0.0)
        values = scale * slopes + slope * values + offset
        tl.store(found + places, values.to(found.dtype.element_ty), mask=inside)

    return summing, finishing_forward, finishing_backward, applying, applying_backward


_sum: Any
_finish_forward: Any
_finish_backward: Any
_apply: Any
_apply_backward: Any
_sum, _finish_forward, _finish_backward, _apply, _apply_backward = _define() if triton is not None else (None,) * 5
