"""GPU kernels for what stands between convolutions: each reads and writes its values once.

Needs triton, which comes with torch's CUDA builds; without it the same is done by torch's operators.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

triton: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:
    triton = None

_BLOCK = 1024  # values a program
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then kernels run on the CPU too, for tests
_NUMBERS = {None: 0, "relu": 1, "relu6": 2}


def have_triton() -> bool:
    return triton is not None


def finish(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    """activation(x + bias[channel] + other), in place of x: [F, C, H, W], channels last."""
    if triton is None or not _dense(x) or (not x.is_cuda and not _INTERPRETED):
        return _by_steps(x, bias, other, activation)
    if other is not None and (other.stride() != x.stride() or other.dtype != x.dtype):
        other = other.to(x.dtype).contiguous(memory_format=torch.channels_last)
        if other.stride() != x.stride():
            return _by_steps(x, bias, other, activation)
    number = x.numel()
    grid = (triton.cdiv(number, _BLOCK),)
    _finish[grid](
        *(x, x if bias is None else bias, x if other is None else other, number, x.shape[1]),
        has_bias=bias is not None,
        has_other=other is not None,
        activation=_NUMBERS[activation],
        block=_BLOCK,
    )
    return x


def normalise(levels: Tensor, mean: Tensor, scale: Tensor, dtype: torch.dtype, *, offset: float = 0.0) -> Tensor:
    """(grey level - mean) * scale in one pass: levels + offset [F, h, W], rounded to 0..255; mean and scale [W]."""
    if triton is None or (not levels.is_cuda and not _INTERPRETED):
        whole = (levels.float() + (offset + 0.5)).floor_().clamp_(0, 255)
        return torch.sub(whole, mean).mul_(scale).to(dtype)
    levels = levels.contiguous()
    found = torch.empty_like(levels, dtype=dtype)
    grid = (triton.cdiv(levels.numel(), _BLOCK),)
    _normalise[grid](levels, found, mean, scale, levels.numel(), levels.shape[-1], offset + 0.5, block=_BLOCK)
    return found


def _dense(x: Tensor) -> bool:
    """Whether the channels of a pixel lie side by side, and pixels without gaps."""
    return bool(x.is_contiguous(memory_format=torch.channels_last)) and (x.stride(1) == 1 or x.shape[1] == 1)


def _by_steps(x: Tensor, bias: Tensor | None, other: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        x = x + bias.view(1, -1, 1, 1)
    if other is not None:
        x = x + other
    if activation == "relu":
        return F.relu(x)
    return F.relu6(x) if activation == "relu6" else x


def _define() -> tuple[Any, Any]:
    """The kernels. Numbers are added in float32, as in a convolution that does it itself."""

    @triton.jit
    def finishing(  # type: ignore[no-untyped-def]
        x,
        bias,
        other,
        number,
        channels,
        has_bias: tl.constexpr,  # type: ignore[name-defined]
        has_other: tl.constexpr,  # type: ignore[name-defined]
        activation: tl.constexpr,  # type: ignore[name-defined]
        block: tl.constexpr,  # type: ignore[name-defined]
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
    def normalising(levels, found, mean, scale, number, width, half_more, block: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        values = tl.load(levels + places, mask=inside, other=0.0).to(tl.float32)
        values = tl.minimum(tl.maximum(tl.floor(values + half_more), 0.0), 255.0)
        column = places % width
        values -= tl.load(mean + column, mask=inside, other=0.0)
        values *= tl.load(scale + column, mask=inside, other=0.0)
        tl.store(found + places, values.to(found.dtype.element_ty), mask=inside)

    return finishing, normalising


_finish: Any
_normalise: Any
_finish, _normalise = _define() if triton is not None else (None, None)
