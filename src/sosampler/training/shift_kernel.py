"""The temporal shift and its gradient on a GPU in one pass each, where channels lie side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sosampler.engine.kernels.triton_kernels import can_use, dense, launch, made_dense, tl, triton
from sosampler.samplers.backbones import Neighbours, shift_channels

_BLOCK = 1024


def fast_shift(x: Tensor, fold: int, neighbours: Neighbours) -> Tensor:
    """As `shift_channels`; torch's operators do it where the kernel does not apply."""
    if not can_use(x) or not dense(x):
        return shift_channels(x, fold, neighbours)
    found: Tensor = _Shift.apply(x, fold, *(there.flatten().view(torch.uint8) for there in neighbours))
    return found


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fold: int, has_next: Tensor, has_previous: Tensor) -> Tensor:
        ctx.save_for_backward(has_next, has_previous)
        ctx.fold = fold
        return _moved(x, fold, has_next, has_previous, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        return _moved(made_dense(given), ctx.fold, *ctx.saved_tensors, back=True), None, None, None


def _moved(x: Tensor, fold: int, has_next: Tensor, has_previous: Tensor, *, back: bool) -> Tensor:
    found = torch.empty_like(x)
    frames, channels = x.shape[:2]
    size = x[0].numel()
    grid = (frames, triton.cdiv(size, _BLOCK))
    launch(_move, grid, x, found, has_next, has_previous, frames, size, channels, fold, back=back, block=_BLOCK)
    return found


def _define() -> Any:
    @triton.jit
    def moving(  # type: ignore[no-untyped-def]
        x,
        found,
        has_next,
        has_previous,
        frames,
        size,
        channels,
        fold,
        back: tl.constexpr,
        block: tl.constexpr,
    ):
        frame = tl.program_id(0)
        place = tl.program_id(1) * block + tl.arange(0, block)
        channel = place % channels
        later = channel < fold
        earlier = (channel >= fold) & (channel < 2 * fold)
        if back:  # what a frame gave to its neighbours comes back from them
            from_later = tl.load(has_next + frame - 1, mask=frame > 0, other=0)
            from_earlier = tl.load(has_previous + frame + 1, mask=frame < frames - 1, other=0)
            step = tl.where(later, -1, tl.where(earlier, 1, 0))
        else:
            from_later = tl.load(has_next + frame)
            from_earlier = tl.load(has_previous + frame)
            step = tl.where(later, 1, tl.where(earlier, -1, 0))
        real = tl.where(later, from_later, tl.where(earlier, from_earlier, 1)) > 0
        source = (frame + step).to(tl.int64) * size + place
        values = tl.load(x + source, mask=(place < size) & real, other=0.0)
        tl.store(found + frame.to(tl.int64) * size + place, values, mask=place < size)

    return moving


_move: Any = _define() if triton is not None else None
