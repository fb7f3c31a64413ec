"""Temporal shift: a share of the channels comes from the next frame, as large a share from the one before.

Costs no multiply-adds, and lets a 2-D network compare neighbouring frames.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_OTHER_SIDES = (0, 0, 0, 0, 0, 0)  # nothing at the sides of W, H and C


class Neighbours(NamedTuple):
    """Which of F = B * T frames lie beside another one of the same video; bool [F, 1, 1, 1] each."""

    has_next: Tensor
    has_previous: Tensor


def find_neighbours(frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Neighbours:
    """The neighbours among frames [B * T, ...] of videos of T = `num_frames`.

    `mask` bool [B, T]: a masked frame is nobody's neighbour, so that nothing leaks out of padding. T may differ from
    call to call, and may be symbolic in a traced graph.
    """
    place = torch.arange(frames.shape[0], device=frames.device) % num_frames
    has_next, has_previous = place < num_frames - 1, place > 0
    if mask is not None:
        real = mask.reshape(-1)
        has_next = has_next & pad(real, (0, 1))[1:]
        has_previous = has_previous & pad(real, (1, 0))[:-1]
    return Neighbours(has_next.view(-1, 1, 1, 1), has_previous.view(-1, 1, 1, 1))


def shift_channels(x: Tensor, fold: int, neighbours: Neighbours) -> Tensor:
    """[F, C, H, W]: channels [0, fold) from the next frame, [fold, 2 * fold) from the one before, zeros at the ends.

    Works along the first dimension of the flat batch, with operators that keep channels-last memory as it is.
    """
    later, earlier, rest = x.split([fold, fold, x.shape[1] - 2 * fold], dim=1)
    # Padded before it is cut, so that no length can become zero or one, for which graphs would be special.
    later = pad(later, (*_OTHER_SIDES, 0, 1))[1:]
    earlier = pad(earlier, (*_OTHER_SIDES, 1, 0))[:-1]
    # Chosen, not multiplied: zero times NaN is NaN.
    later = torch.where(neighbours.has_next, later, 0.0)
    earlier = torch.where(neighbours.has_previous, earlier, 0.0)
    return torch.cat([later, earlier, rest], dim=1)


def temporal_shift(x: Tensor, num_frames: int, div: int, mask: Tensor | None = None) -> Tensor:
    """[B * T, C, H, W] -> the same shape; the first C // div channels take frame t + 1, the next C // div frame t - 1.

    What would come from beyond an end, or from a frame that `mask` [B, T] calls padding, is zero.
    """
    return shift_channels(x, x.shape[1] // div, find_neighbours(x, num_frames, mask))
