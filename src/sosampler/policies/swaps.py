"""Local search on subsets: exchange one chosen candidate for another while that helps."""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler.policies.relaxation import ClipLoss

# Of those inside and of those outside, how many the tangent recommends most are paired in one step. Exchanges it
# calls no better need no look: the loss is convex and lies above its tangent.
_SIDE = 16
SWAPS_AT_ONCE = _SIDE**2
_LEAST_GAIN = 1e-13  # below it is rounding


def loss_of(loss: ClipLoss, chosen: Tensor) -> Tensor:
    """Loss of the subsets chosen [B, T] bool -> [B]."""
    return loss.value(torch.einsum("bt,btk->bk", chosen.to(loss.rows.dtype), loss.rows))


def improve_by_swaps(loss: ClipLoss, chosen: Tensor, free: Tensor, max_steps: int = 1000) -> Tensor:
    """Follow the best exchange of a chosen for another free candidate until none helps; chosen, free bool [B, T]."""
    chosen = chosen.clone()
    active = torch.arange(len(chosen), device=chosen.device)
    for _ in range(max_steps):
        if not len(active):
            break
        part, now = loss.at(active), chosen[active]
        leave, enter, gain = _best_swap(part, now, free[active])
        helps = gain > _LEAST_GAIN
        active, leave, enter = active[helps], leave[helps], enter[helps]
        chosen[active, leave] = False
        chosen[active, enter] = True
    return chosen


def _best_swap(loss: ClipLoss, chosen: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Who leaves, who enters [B], and how much the loss falls by it."""
    rows = loss.rows
    total = torch.einsum("bt,btk->bk", chosen.to(rows.dtype), rows)
    slopes = torch.einsum("btk,bk->bt", rows, loss.gradient(total))
    infinity = float("inf")
    # Best exchanges by tangent pair one of the highest slopes inside with one of the lowest outside.
    side = min(_SIDE, rows.shape[1])
    leaving = slopes.masked_fill(~(chosen & free), -infinity).topk(side, dim=1)
    entering = slopes.masked_fill(chosen | ~free, infinity).topk(side, dim=1, largest=False)
    promise = leaving.values[:, :, None] - entering.values[:, None, :]  # [B, side, side], -inf where impossible
    width = rows.shape[2]
    out = rows.gather(1, leaving.indices[..., None].expand(-1, -1, width))
    new = rows.gather(1, entering.indices[..., None].expand(-1, -1, width))
    after = loss.value(total[:, None, None] - out[:, :, None] + new[:, None])  # [B, side, side]
    gain = (loss.value(total)[:, None, None] - after).masked_fill(~(promise > 0), -infinity).flatten(1)
    best = gain.argmax(1, keepdim=True)
    leave = leaving.indices.gather(1, best // side)[:, 0]
    enter = entering.indices.gather(1, best % side)[:, 0]
    return leave, enter, gain.gather(1, best)[:, 0]
