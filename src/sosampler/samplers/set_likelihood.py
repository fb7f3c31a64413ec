"""How likely a set of frames is when frames are drawn one by one, without replacement, in proportion to weights.

Weights come as logarithms [B, T], up to a constant for each video: raw scores of a sampler are good log weights.
`mask` [B, T] is True at real candidates (None: all are); the others have no weight, whatever their scores are.

The probability of drawing frames in a given order is a product (Plackett-Luce). The probability of a set is the sum
over all N! orders of its frames, but also one integral (Kool, van Hoof, Welling, "Estimating Gradients for Discrete
Random Variables by Sampling without Replacement", ICLR 2020). Let every frame wait for an exponential time with its
weight as rate: the N first to ring are a draw. The first of those left over, of weight R together, rings at time x/R
with x exponential, and all of the set must have rung before:

    P(S) = ∫ exp(−x) Π_{i in S} (1 − exp(−x·w_i/R)) dx,  x from 0 to infinity.

With x = exp(v) the logarithm of the integrand,

    f(v) = v − exp(v) + Σ_{i in S} log(1 − exp(−exp(v + log w_i − log R))),

is concave in v, has its top at 0 <= v <= log(1 + N), and falls off at least as fast as exp(v) on the left and as
exp(−exp(v)) on the right, for any weights. So the stretch that counts is found by bisection, and Gauss-Legendre nodes
on both sides of the top give the integral to 13 digits, or 10 where the weights are hundreds of orders apart. Weights
enter as log w_i − log R only, in which nothing cancels when the set has almost all of the weight, nor underflows when
it has almost none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.samplers.ranking import real_candidates

_NODES = 64  # on each side of the top
_DROP = 40.0  # the integrand is left out where it is below exp(−40) of its top
_BISECTIONS = 12  # the ends of the stretch need no precision, its top neither: to 0.01 and 0.001
_LEFT = -(_DROP + 1)  # f falls by the drop between 0 and here: its slope is at least 1 − exp(v)
_RIGHT = 4.0  # and between the top and this far beyond: by exp(4) − 1 − 4 = 49.6 or more
_SMALL = -40.0  # log(1 − exp(−exp(y))) is y to 17 digits below


def plackett_luce_log_prob(log_weights: Tensor, order: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log probability [B] of drawing the frames `order` [B, N] one after the other, in that order."""
    weights = _prepared(log_weights, order, mask)
    drawn = torch.nn.functional.one_hot(order, weights.shape[1]).bool()  # [B, N, T]
    gone = (drawn.cumsum(dim=1) > 0) & ~drawn  # drawn before this step
    left = weights[:, None, :].masked_fill(gone, -torch.inf).logsumexp(dim=-1)  # [B, N]
    return _as_given((weights.gather(1, order) - left).sum(dim=1), log_weights)


def set_log_prob(log_weights: Tensor, chosen: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log probability [B] that the first N frames drawn are those `chosen` [B, N], in whatever order.

    Exact up to rounding for any N, and differentiable. 0 where all real candidates are chosen.
    """
    weights = _prepared(log_weights, chosen, mask)
    taken = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, value=True)
    others = weights.masked_fill(taken, -torch.inf)
    certain = others.isneginf().all(dim=1)  # nothing is left over
    # In these rows any finite number does: the result is replaced, and no NaN goes back through the gradient.
    left_over = others.masked_fill(certain[:, None], 0.0).logsumexp(dim=1, keepdim=True)
    log_prob = _log_integral(weights.gather(1, chosen) - left_over)
    return _as_given(log_prob.masked_fill(certain, 0.0), log_weights)


def sample_without_replacement(
    log_weights: Tensor, num_frames: int, generator: torch.Generator | None = None, mask: Tensor | None = None
) -> Tensor:
    """N positions [B, N] drawn one after the other, in the order drawn; `.sort(dim=1)` for the order in time.

    Log weights with Gumbel noise, of which the N highest are such a draw. The noise is drawn where the generator lives,
    so that a generator of the CPU gives the same draws on any device.
    """
    batch, num_candidates = log_weights.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    weights = log_weights.detach().double()
    device = weights.device if generator is None else generator.device
    waiting = torch.empty(weights.shape, dtype=torch.float64, device=device).exponential_(generator=generator)
    keys = weights - waiting.clamp_min(torch.finfo(torch.float64).tiny).log().to(weights.device)
    if mask is not None:
        keys = keys.masked_fill(~mask, -torch.inf)
    return keys.topk(num_frames, dim=1).indices


def entropy(log_weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy [B], in nats, of which frame is drawn first: log T if all are alike, 0 if one has all the weight."""
    weights = _masked(log_weights, mask)
    log_probs = weights.log_softmax(dim=1)
    impossible = log_probs.isneginf()
    log_probs = log_probs.masked_fill(impossible, 0.0)
    return _as_given(-(log_probs.exp() * log_probs).masked_fill(impossible, 0.0).sum(dim=1), log_weights)


def _log_integral(ratios: Tensor) -> Tensor:
    """log P(S) [B] from log w_i − log R of the set's frames [B, N]."""
    fixed = ratios.detach()  # where the nodes lie does not matter to the integral, so they need no gradient
    low, top, high = _stretch(fixed)
    at, log_shares = (torch.as_tensor(numbers, device=ratios.device) for numbers in _nodes())
    left, right = (top - low)[:, None], (high - top)[:, None]  # [B, 1]
    nodes = torch.cat([low[:, None] + left * at, top[:, None] + right * at], dim=1)  # [B, K]
    log_widths = torch.cat([left.log() + log_shares, right.log() + log_shares], dim=1)
    log_prob = (_log_integrand(nodes, ratios) + log_widths).logsumexp(dim=1)
    return log_prob - log_prob.detach().clamp_min(0.0)  # rounding must not make it positive


def _log_integrand(places: Tensor, ratios: Tensor) -> Tensor:
    """f at places [B, K] for ratios [B, N]; [B, K]."""
    return places - places.exp() + _log_rung(places[:, :, None] + ratios[:, None, :]).sum(dim=-1)


def _stretch(ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the integrand rises above a negligible share of its top, where the top is, where it is negligible again."""
    zero = torch.zeros_like(ratios[:, :1])  # [B, 1]

    def falling(place: Tensor) -> Tensor:
        rate = (place + ratios).clamp(-700.0, 6.0).exp()  # beyond these x/(exp(x) − 1) is 1, and is 0
        return 1 - place.exp() + (rate / rate.expm1()).sum(dim=1, keepdim=True) < 0

    top = _turn(falling, zero, zero + math.log1p(ratios.shape[1]))
    least = _log_integrand(top, ratios) - _DROP
    outer = torch.cat([zero + _LEFT, top + _RIGHT], dim=1)
    ends = _turn(lambda places: _log_integrand(places, ratios) > least, outer, top.expand(-1, 2))
    return ends[:, 0], top[:, 0], ends[:, 1]


def _turn(reached: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> Tensor:
    """Where `reached` turns from false to true on the way from `start` to `end`, by bisection, each by itself."""
    for _ in range(_BISECTIONS):
        middle = (start + end) / 2
        there = reached(middle)
        start, end = torch.where(there, start, middle), torch.where(there, middle, end)
    return (start + end) / 2


def _log_rung(log_rate: Tensor) -> Tensor:
    """log(1 − exp(−exp(y))): the log probability that a clock of log rate y rings within a unit of time."""
    small = log_rate < _SMALL
    rate = log_rate.masked_fill(small, 0.0).clamp_max(7.0).exp()  # exp(−exp(7)) is 0 already
    return torch.where(small, log_rate, torch.log(-torch.expm1(-rate)))


@cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Legendre nodes on 0..1 and the logarithms of their weights."""
    at, weights = np.polynomial.legendre.leggauss(_NODES)
    return (at + 1) / 2, np.log(weights / 2)


def _prepared(log_weights: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    """Log weights in float64 with masked candidates out of play, and checks of what is chosen."""
    weights = _masked(log_weights, mask)
    batch, num_candidates = weights.shape
    if chosen.dim() != 2 or chosen.shape[0] != batch or not 1 <= chosen.shape[1] <= num_candidates:
        raise InvalidArgument(
            f"the chosen positions have shape {list(chosen.shape)}; for log weights of shape {list(weights.shape)} "
            f"give [{batch}, N] with N from 1 to {num_candidates}"
        )
    ordered = chosen.sort(dim=1).values
    outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= num_candidates)
    if bool((outside | (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)).any()):
        raise InvalidArgument(
            f"the chosen positions of a video repeat or are outside 0..{num_candidates - 1}; give different ones inside"
        )
    if not bool(weights.gather(1, chosen).isfinite().all()):
        raise InvalidArgument(
            "a chosen frame is masked, or its log weight is not finite; choose real candidates, and if a network gave "
            "the log weights lower its learning rate"
        )
    return weights


def _masked(log_weights: Tensor, mask: Tensor | None) -> Tensor:
    if log_weights.dim() != 2:
        raise InvalidArgument(f"the log weights have shape {list(log_weights.shape)}; give [videos, candidates]")
    real_candidates(mask, log_weights.shape[0], log_weights.shape[1], num_frames=1)
    weights = log_weights.double()
    return weights if mask is None else weights.masked_fill(~mask.bool(), -torch.inf)


def _as_given(values: Tensor, like: Tensor) -> Tensor:
    """float32 unless more was given."""
    return values.to(torch.promote_types(like.dtype, torch.float32))
