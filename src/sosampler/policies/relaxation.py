"""The convex relaxation behind the certified search.

A classifier that averages logits sees only the sum of the chosen rows. Minus the log confidence is a convex function
of that sum, so letting every candidate in by a weight between 0 and 1 gives a convex problem whose optimum no subset
can beat. It is solved by a primal-dual interior-point method: a dozen Newton steps for a whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_STEPS = 40
_INFINITY = float("inf")


@dataclass(frozen=True)
class ClipLoss:
    """Minus the log confidence of a clip as a function of the sum of its candidates' rows.

    softmax: rows are logits less the mean logit of the true labels, over N; the loss is logsumexp of the sum.
    sigmoid: rows are logits of the true labels alone, over N; the loss is the weighted sum of softplus(-sum).
    """

    rows: Tensor  # [B, T, K] float64
    weights: Tensor | None  # [B, K] weight of each label for sigmoid; None for softmax

    def at(self, videos: Tensor | slice) -> ClipLoss:
        return ClipLoss(self.rows[videos], None if self.weights is None else self.weights[videos])

    def _weights(self, total: Tensor) -> Tensor:
        assert self.weights is not None
        return self.weights.reshape(len(total), *(1,) * (total.dim() - 2), total.shape[-1])

    def value(self, total: Tensor) -> Tensor:
        """Loss of sums [B, ..., K] -> [B, ...]."""
        if self.weights is None:
            return total.logsumexp(-1)
        return -(torch.nn.functional.logsigmoid(total) * self._weights(total)).sum(-1)  # softplus is cut off at 20

    def gradient(self, total: Tensor) -> Tensor:
        """[B, K] -> [B, K]."""
        if self.weights is None:
            return total.softmax(-1)
        return -self.weights * torch.sigmoid(-total)

    def hessian_factor(self, total: Tensor) -> Tensor:
        """M [B, T, K] with M M' the second derivative with respect to the candidates' weights."""
        if self.weights is None:
            probs = total.softmax(-1)[:, None]
            return (self.rows - (self.rows * probs).sum(-1, keepdim=True)) * probs.sqrt()
        slope = torch.sigmoid(total)
        return self.rows * (self.weights * slope * (1 - slope)).sqrt()[:, None]


@dataclass(frozen=True)
class Relaxed:
    weights: Tensor  # [M, F] solution, 0 where not free
    bound: Tensor  # [M] no choice of `count` free candidates has a lower loss
    slopes: Tensor  # [M, F] derivative of the loss by weight at the point that gave the bound; +inf where not free


def lowest_sum(slopes: Tensor, count: Tensor) -> Tensor:
    """Sum of the `count` [M] lowest slopes [M, F] of each row, count >= 1."""
    return slopes.sort(dim=1).values.cumsum(1).gather(1, count[:, None] - 1)[:, 0]


def relax(loss: ClipLoss, base: Tensor, free: Tensor, count: Tensor, enough: Tensor, tolerance: float) -> Relaxed:
    """Minimise loss(base + sum of w * rows) over 0 <= w <= 1 of the free candidates with sum w = count.

    base [M, K] is the sum of what is chosen already; 0 < count < number of free ones in every row. Every step yields a
    bound that holds whatever the steps' quality: the loss is above its tangent, whose minimum is a sum of `count`
    slopes. A row is done when bound and value lie within `tolerance`, or the bound reaches `enough` [M].
    """
    loss = ClipLoss(loss.rows * free[..., None], loss.weights)
    w = free * (count.to(base.dtype) / free.sum(1))[:, None]
    found = Relaxed(w.clone(), torch.full_like(base[:, 0], -_INFINITY), torch.zeros_like(w))
    rows = torch.arange(len(base), device=base.device)  # those that are not done
    state: _State | None = None
    for _ in range(_MAX_STEPS):
        total = base + torch.einsum("mf,mfk->mk", w, loss.rows)
        value = loss.value(total)
        slopes = torch.einsum("mfk,mk->mf", loss.rows, loss.gradient(total))
        ranked = slopes.masked_fill(~free, _INFINITY)
        bound = value - (slopes * w).sum(1) + lowest_sum(ranked, count)
        better = bound > found.bound[rows]
        found.bound[rows[better]] = bound[better]
        found.slopes[rows[better]] = ranked[better]
        found.weights[rows] = w
        going = (value - found.bound[rows] > tolerance) & (found.bound[rows] < enough)
        left = int(going.sum())
        if not left:
            break
        if state is None:
            state = _first_state(w, slopes, ranked, free, count)
        if 2 * left < len(rows):  # leave behind what is done
            rows, base, free, count, enough = (part[going] for part in (rows, base, free, count, enough))
            total, slopes, loss = total[going], slopes[going], loss.at(going)
            w, low, high, level = (part[going] for part in state)
            state = (w, low, high, level)
        state = _newton(loss, total, slopes, free, count, state)
        w = state[0]
    return found


_State = tuple[Tensor, Tensor, Tensor, Tensor]  # w, multiplier of w >= 0, of w <= 1 [M, F]; of the sum [M, 1]


def _first_state(w: Tensor, slopes: Tensor, ranked: Tensor, free: Tensor, count: Tensor) -> _State:
    """Multipliers that fit the first slopes: those above the `count`-th lowest want out, those below want in."""
    level = -ranked.sort(dim=1).values.gather(1, count[:, None] - 1)
    over = (slopes + level) * free
    spread = over.abs().sum(1, keepdim=True) / free.sum(1, keepdim=True) + 1e-9
    return w, (over.clamp_min(0) + spread) * free, ((-over).clamp_min(0) + spread) * free, level


def _newton(loss: ClipLoss, total: Tensor, slopes: Tensor, free: Tensor, count: Tensor, state: _State) -> _State:
    """One primal-dual step towards a tenth of the present complementarity."""
    w, low, high, level = state
    inside = free.to(w.dtype)
    room, gap = w.masked_fill(~free, 1.0), (1 - w).masked_fill(~free, 1.0)
    centre = 0.1 * ((w * low + gap * high * inside).sum(1) / (2 * free.sum(1)))[:, None]
    diagonal = (low / room + high / gap).masked_fill(~free, 1.0)
    right = (-(slopes + level) + centre / room - centre / gap) * inside
    solved = _solve(loss.hessian_factor(total), diagonal, torch.stack([right, inside], -1))
    missing = count[:, None] - w.sum(1, keepdim=True)
    step_level = (solved[..., 0].sum(1, keepdim=True) - missing) / solved[..., 1].sum(1, keepdim=True)
    step = (solved[..., 0] - step_level * solved[..., 1]) * inside
    step_low = (centre / room - low - low / room * step) * inside
    step_high = (centre / gap - high + high / gap * step) * inside
    primal = torch.minimum(_longest(room, step), _longest(gap, -step))
    dual = torch.minimum(_longest(low, step_low), _longest(high, step_high))
    length = torch.minimum(primal, dual)
    # A system too ill-conditioned to solve gives no step; the bound so far holds.
    length = length.masked_fill(~(step.isfinite().all(1, keepdim=True) & step_level.isfinite()), 0.0)
    w, low, high, level = (
        old + torch.where(length > 0, length * new, 0.0)
        for old, new in zip(state, (step, step_low, step_high, step_level), strict=True)
    )
    return w, low, high, level


def _longest(value: Tensor, step: Tensor) -> Tensor:
    """How far [M, 1] the step can be followed, at most wholly, before a value [M, F] is at 1 % of itself."""
    ratio = torch.where(step < 0, -0.99 * value / step, torch.ones_like(value))
    return ratio.amin(1, keepdim=True).clamp_max(1.0)


def _solve(factor: Tensor, diagonal: Tensor, right: Tensor) -> Tensor:
    """(diag + M M')^-1 right for factor M [M, F, K]; in K dimensions where that is the smaller system."""
    candidates, classes = factor.shape[1:]
    if classes < candidates:
        scaled = factor / diagonal[..., None]
        small = scaled.mT @ factor
        small.diagonal(dim1=1, dim2=2).add_(1.0)
        plain = right / diagonal[..., None]
        root = torch.linalg.cholesky_ex(small).L
        return plain - scaled @ torch.cholesky_solve(factor.mT @ plain, root)
    system = factor @ factor.mT
    system.diagonal(dim1=1, dim2=2).add_(diagonal)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(system).L)
