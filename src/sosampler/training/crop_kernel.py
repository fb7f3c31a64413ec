"""Random crops on a GPU, normalised and with channels side by side, in one pass; torch's operators take six."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler.engine.kernels.triton_kernels import launch, tl, triton
from sosampler.training.distributed import sent
from sosampler.training.sampler_augment import Cuts, Normaliser, points_to_look_at

_BLOCK = 256  # pixels a program


def normalised_crops(
    frames: Tensor,
    cuts: Cuts,
    sizes: np.ndarray,
    size: tuple[int, int],
    times: int,
    normaliser: Normaliser,
    dtype: torch.dtype,
) -> Tensor:
    """`normaliser(cut(...))` of uint8 [F, H, W, 3] where `can_use(frames)`: [F, 3, h, w], channels last."""
    frames = frames.contiguous()
    points = points_to_look_at(cuts, sizes, size, times)
    across, down = (sent(torch.from_numpy(found), frames.device) for found in points)
    found = torch.empty(len(frames), *size, 3, device=frames.device, dtype=dtype)
    number = found.numel() // 3
    launch(
        *(_crop, (triton.cdiv(number, _BLOCK),), frames, across, down, normaliser.scale, normaliser.offset, found),
        *(number, *frames.shape[1:3], *size),
        times=times,
        block=_BLOCK,
    )
    return found.permute(0, 3, 1, 2)


def _define() -> Any:
    @triton.jit
    def cropping(  # type: ignore[no-untyped-def]
        frames,
        across,
        down,
        scale,
        offset,
        found,
        number,
        height,
        width,
        rows,
        columns,
        times: tl.constexpr,
        block: tl.constexpr,
    ):
        place = tl.program_id(0) * block + tl.arange(0, block)
        inside = place < number
        column = place % columns
        row = (place // columns) % rows
        frame = place // (columns * rows)
        picture = frames + frame.to(tl.int64) * height * width * 3
        red = tl.zeros((block,), tl.float32)
        green = tl.zeros((block,), tl.float32)
        blue = tl.zeros((block,), tl.float32)
        for below in range(times):
            y = tl.load(down + (frame * rows + row) * times + below, mask=inside, other=0.0)
            top = tl.minimum(y.to(tl.int32), height - 1)
            low = tl.minimum(top + 1, height - 1)
            lower = y - top
            for right in range(times):
                x = tl.load(across + (frame * columns + column) * times + right, mask=inside, other=0.0)
                first = tl.minimum(x.to(tl.int32), width - 1)
                second = tl.minimum(first + 1, width - 1)
                later = x - first
                for corner in tl.static_range(4):
                    weight = (lower if corner >= 2 else 1.0 - lower) * (later if corner % 2 == 1 else 1.0 - later)
                    pixel = (
                        picture + ((low if corner >= 2 else top) * width + (second if corner % 2 == 1 else first)) * 3
                    )
                    red += weight * tl.load(pixel, mask=inside, other=0).to(tl.float32)
                    green += weight * tl.load(pixel + 1, mask=inside, other=0).to(tl.float32)
                    blue += weight * tl.load(pixel + 2, mask=inside, other=0).to(tl.float32)
        share = 1.0 / (times * times)
        where = found + place.to(tl.int64) * 3
        red = red * share * tl.load(scale) + tl.load(offset)
        green = green * share * tl.load(scale + 1) + tl.load(offset + 1)
        blue = blue * share * tl.load(scale + 2) + tl.load(offset + 2)
        tl.store(where, red.to(found.dtype.element_ty), mask=inside)
        tl.store(where + 1, green.to(found.dtype.element_ty), mask=inside)
        tl.store(where + 2, blue.to(found.dtype.element_ty), mask=inside)

    return cropping


_crop: Any = _define() if triton is not None else None
