"""OCSampler's training of a sampler: one step of REINFORCE for a set of frames.

After Lin et al., "OCSampler: Compressing Videos to One Clip with Single-step Sampling", CVPR 2022. The network is that
of `SOSampler`; only the loss differs. N frames are drawn without replacement with the softmax of the scores as weights,
the frozen classifier classifies the clip, and the set's log likelihood is raised or lowered by the clip's reward above
that of a baseline clip. In inference the N highest scores are selected. How a clip is classified, from what a bank
stores or by the classifier itself, and the budget module are in `training.rewards`.

Different from the published code:
- The likelihood of a set is exact at any N (`set_log_prob`). The published code sums over N! orders up to N = 8. Beyond
  that it takes the likelihood of the drawn order (here "ordered"), or, for 3-D classifiers, of the eight frames of
  lowest probability alone, which is no likelihood.
- The entropy weight is constant. The published schedule sets it to 0 at the first step; 0 here does the same.
- For videos with several labels the reward is the geometric mean of their probabilities, as elsewhere in this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.samplers.losses import ClipProbs, at_least_float32, frame_targets
from sosampler.samplers.onnx_sampler import SamplerOutput
from sosampler.samplers.recipe import REWARDS, OCSamplerSettings
from sosampler.samplers.sosampler import check_labels, real_candidates

# The published subset of ten candidates; for other numbers the centres of equal segments.
_UNIFORM_6_OF_10 = (0, 1, 3, 5, 7, 9)


class OCSamplerLoss(nn.Module):
    """−mean(advantage · log P(drawn set) + weight · entropy), whose gradient is minus that of the expected reward.

    Parts: "reward" and "baseline" are mean rewards of the drawn and the baseline clips, "advantage" their difference,
    "policy" the first term, "entropy" in nats. The classifier runs twice for every video, without gradient.
    """

    def __init__(self, settings: OCSamplerSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or OCSamplerSettings()

    def forward(
        self,
        output: SamplerOutput,
        clip_probs: ClipProbs,
        labels: Tensor | None,  # [B, C]; not used by the reward "confidence"
        mask: Tensor | None = None,  # [B, T]
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        settings, scores = self.settings, output.scores
        drawn = sample_without_replacement(scores, settings.num_frames, generator, mask)
        if settings.baseline == "sample":
            other = sample_without_replacement(scores, settings.num_frames, generator, mask)
        else:
            real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
            other = uniform_subset(real, settings.num_frames)
        with torch.no_grad():
            reward, baseline = (self._reward(indices, clip_probs, labels) for indices in (drawn, other))
        log_likelihood = set_log_prob if settings.likelihood == "set" else plackett_luce_log_prob
        advantage = reward - baseline
        policy = -(advantage * log_likelihood(scores, drawn, mask)).mean()
        mean_entropy = entropy(scores, mask).mean()
        parts = {"policy": policy, "entropy": mean_entropy, "reward": reward, "baseline": baseline}
        parts = {name: part.detach().mean() for name, part in {**parts, "advantage": advantage}.items()}
        return policy - settings.entropy * mean_entropy, parts

    def _reward(self, indices: Tensor, clip_probs: ClipProbs, labels: Tensor | None) -> Tensor:
        probs = clip_probs(indices.sort(dim=1).values)
        if probs.dim() != 2 or probs.shape[0] != indices.shape[0]:
            raise InvalidArgument(
                f"clip_probs returned the shape {list(probs.shape)} for {indices.shape[0]} clips but must return "
                "[videos, classes]; return class probabilities"
            )
        return clip_reward(probs, labels, self.settings.reward)


def clip_reward(probs: Tensor, labels: Tensor | None, kind: str) -> Tensor:
    """Return the reward [B] of clips with class probabilities [B, C].

    "confidence": the highest probability, right or wrong.
    "label": the probability of the true label, minus that of the highest class if that is another one.
    """
    probs = at_least_float32(probs.detach())
    highest = probs.amax(dim=1)
    if one_of("reward", kind, REWARDS) == "confidence":
        return highest
    if labels is None:
        raise InvalidArgument("the reward 'label' needs labels; give them [videos, classes], or use 'confidence'")
    true = check_labels(labels, probs.shape[0], probs.shape[1])
    confidence = frame_targets(probs[:, None], true, "label")[:, 0]
    right = probs.masked_fill(~true, -torch.inf).amax(dim=1) >= highest
    return torch.where(right, confidence, confidence - highest)


def uniform_subset(mask: Tensor, num_frames: int) -> Tensor:
    """Return N indices [B, N] spread evenly over the real candidates of each video, in time order.

    They are the centres of N equal segments, or OCSampler's published six of ten candidates.

    >>> uniform_subset(torch.ones(1, 10, dtype=torch.bool), 6).tolist()
    [[0, 1, 3, 5, 7, 9]]
    >>> uniform_subset(torch.ones(1, 12, dtype=torch.bool), 4).tolist()
    [[1, 4, 7, 10]]
    """
    mask = mask.bool()
    real_candidates(mask, mask.shape[0], mask.shape[1], num_frames)
    count = mask.sum(dim=1, keepdim=True)  # [B, 1]
    steps = 2 * torch.arange(num_frames, device=mask.device) + 1
    ranks = steps * count // (2 * num_frames)  # among the real candidates
    if num_frames == len(_UNIFORM_6_OF_10):
        ranks = torch.where(count == 10, torch.tensor(_UNIFORM_6_OF_10, device=mask.device), ranks)
    real_first = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return real_first.gather(1, ranks)


# ---- the likelihood of a set
#
# Frames are drawn one by one, without replacement, in proportion to weights. Weights are given
# as logarithms [B, T], up to a constant for each video, such as a sampler's raw scores. `mask` [B, T] is True for real
# candidates (None: all are); padding has no weight.
#
# The probability of drawing frames in a given order is a product (Plackett-Luce). The probability of a set is the sum
# over all N! orders of its frames, which equals one integral (Kool, van Hoof, Welling, "Estimating Gradients for
# Discrete Random Variables by Sampling without Replacement", ICLR 2020). Let every frame have
# a clock with an exponential time whose rate is its weight: the first N to ring are a draw. The first of the others, of
# total weight R, rings at time x/R with x exponential, and all of the set must ring before:
#
#     P(S) = ∫ exp(−x) Π_{i in S} (1 − exp(−x·w_i/R)) dx,  x from 0 to infinity.
#
# With x = exp(v) the logarithm of the integrand,
#
#     f(v) = v − exp(v) + Σ_{i in S} log(1 − exp(−exp(v + log w_i − log R))),
#
# is concave in v, has its maximum at 0 <= v <= log(1 + N), and falls off at least as fast as exp(v) on the left and as
# exp(−exp(v)) on the right, for any weights. So bisection finds the interval that matters, and Gauss-Legendre nodes
# on both sides of the maximum give the integral to 13 digits, or 10 where the weights are hundreds of orders apart.
# Weights enter as log w_i − log R only, in which nothing cancels when the set has almost all of the weight, nor
# underflows when it has almost none.

_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(64)  # in -1..1, for each side of the maximum
_DROP = 40.0  # the integrand is cut off below exp(−40) of its maximum
_BISECTIONS = 12  # the interval's ends and the maximum need little precision: 0.01 and 0.001
_LEFT = -(_DROP + 1)  # f falls by the drop between 0 and here: its slope is at least 1 − exp(v)
_RIGHT = 4.0  # and between the maximum and this far beyond: by exp(4) − 1 − 4 = 49.6 or more
_SMALL = -40.0  # below it log(1 − exp(−exp(y))) equals y to 17 digits


def plackett_luce_log_prob(log_weights: Tensor, order: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the log probability [B] of drawing the frames `order` [B, N] in that order."""
    weights = _check_set(log_weights, order, mask)
    drawn = torch.nn.functional.one_hot(order, weights.shape[1]).bool()  # [B, N, T]
    before = (drawn.cumsum(dim=1) > 0) & ~drawn  # drawn in an earlier step
    remaining = weights[:, None, :].masked_fill(before, -torch.inf).logsumexp(dim=-1)  # [B, N]
    return _like_input((weights.gather(1, order) - remaining).sum(dim=1), log_weights)


def set_log_prob(log_weights: Tensor, chosen: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the exact log probability [B] that the first N frames drawn are `chosen` [B, N], in any order."""
    weights = _check_set(log_weights, chosen, mask)
    in_set = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, value=True)
    others = weights.masked_fill(in_set, -torch.inf)
    certain = others.isneginf().all(dim=1)  # no other frame
    # Any finite value works in these rows: the result is replaced, and the gradient has no NaN.
    log_rest = others.masked_fill(certain[:, None], 0.0).logsumexp(dim=1, keepdim=True)
    log_prob = _log_integral(weights.gather(1, chosen) - log_rest)
    return _like_input(log_prob.masked_fill(certain, 0.0), log_weights)


def sample_without_replacement(
    log_weights: Tensor, num_frames: int, generator: torch.Generator | None = None, mask: Tensor | None = None
) -> Tensor:
    """Draw N indices [B, N], in the order drawn; `.sort(dim=1)` gives time order.

    The N highest log weights with Gumbel noise are a draw; a CPU generator gives the same draws on any device.
    """
    batch, num_candidates = log_weights.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    weights = log_weights.detach().double()
    device = weights.device if generator is None else generator.device
    times = torch.empty(weights.shape, dtype=torch.float64, device=device).exponential_(generator=generator)
    keys = weights - times.clamp_min(torch.finfo(torch.float64).tiny).log().to(weights.device)
    if mask is not None:
        keys = keys.masked_fill(~mask, -torch.inf)
    return keys.topk(num_frames, dim=1).indices


def entropy(log_weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the entropy [B], in nats, of the first frame drawn: log T for equal weights, 0 if it is certain."""
    log_probs = _masked(log_weights, mask).log_softmax(dim=1)
    impossible = log_probs.isneginf()
    log_probs = log_probs.masked_fill(impossible, 0.0)
    return _like_input(-(log_probs.exp() * log_probs).masked_fill(impossible, 0.0).sum(dim=1), log_weights)


def _log_integral(ratios: Tensor) -> Tensor:
    """Return log P(S) [B] from log w_i − log R of the set's frames [B, N]."""
    low, top, high = _interval(ratios.detach())  # the integral does not depend on the nodes: no gradient
    numbers = (_NODES + 1) / 2, np.log(_NODE_WEIGHTS / 2)  # in 0..1
    at, log_weights = (torch.as_tensor(each, device=ratios.device) for each in numbers)
    left, right = (top - low)[:, None], (high - top)[:, None]  # [B, 1]
    nodes = torch.cat([low[:, None] + left * at, top[:, None] + right * at], dim=1)  # [B, K]
    log_widths = torch.cat([left.log() + log_weights, right.log() + log_weights], dim=1)
    log_prob = (_log_integrand(nodes, ratios) + log_widths).logsumexp(dim=1)
    return log_prob - log_prob.detach().clamp_min(0.0)  # rounding must not make it positive


def _log_integrand(v: Tensor, ratios: Tensor) -> Tensor:
    """Return f(v) [B, K] for ratios [B, N]."""
    log_rate = v[:, :, None] + ratios[:, None, :]
    # log(1 − exp(−exp(y))): the log probability that a clock of log rate y rings within a unit of time.
    small = log_rate < _SMALL
    rate = log_rate.masked_fill(small, 0.0).clamp_max(7.0).exp()  # exp(−exp(7)) is 0 already
    log_rung = torch.where(small, log_rate, torch.log(-torch.expm1(-rate)))
    return v - v.exp() + log_rung.sum(dim=-1)


def _interval(ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the left end, the maximum and the right end of the interval where the integrand is not negligible."""
    zero = torch.zeros_like(ratios[:, :1])  # [B, 1]

    def falling(v: Tensor) -> Tensor:
        rate = (v + ratios).clamp(-700.0, 6.0).exp()  # beyond these x/(exp(x) − 1) is 1 or 0
        return 1 - v.exp() + (rate / rate.expm1()).sum(dim=1, keepdim=True) < 0

    top = _bisect(falling, zero, zero + math.log1p(ratios.shape[1]))
    threshold = _log_integrand(top, ratios) - _DROP
    outer = torch.cat([zero + _LEFT, top + _RIGHT], dim=1)
    ends = _bisect(lambda v: _log_integrand(v, ratios) > threshold, outer, top.expand(-1, 2))
    return ends[:, 0], top[:, 0], ends[:, 1]


def _bisect(reached: Callable[[Tensor], Tensor], start: Tensor, end: Tensor) -> Tensor:
    """Return where `reached` changes from false to true between `start` and `end`, element by element."""
    for _ in range(_BISECTIONS):
        middle = (start + end) / 2
        inside = reached(middle)
        start, end = torch.where(inside, start, middle), torch.where(inside, middle, end)
    return (start + end) / 2


def _check_set(log_weights: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    """Return the log weights in float64, masked, after checking the indices `chosen`."""
    weights = _masked(log_weights, mask)
    batch, num_candidates = weights.shape
    if chosen.dim() != 2 or chosen.shape[0] != batch or not 1 <= chosen.shape[1] <= num_candidates:
        raise InvalidArgument(
            f"the chosen indices have shape {list(chosen.shape)} but must be [{batch}, N] with N from 1 to "
            f"{num_candidates} for log weights of shape {list(weights.shape)}"
        )
    ordered = chosen.sort(dim=1).values
    outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= num_candidates)
    if bool((outside | (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)).any()):
        raise InvalidArgument(f"the chosen indices of a video must be different and in 0..{num_candidates - 1}")
    if not bool(weights.gather(1, chosen).isfinite().all()):
        raise InvalidArgument(
            "a chosen frame is masked, or its log weight is not finite; choose real candidates, or lower the learning "
            "rate of the network that computes the log weights"
        )
    return weights


def _masked(log_weights: Tensor, mask: Tensor | None) -> Tensor:
    if log_weights.dim() != 2:
        raise InvalidArgument(f"the log weights have shape {list(log_weights.shape)} but must be [videos, candidates]")
    real_candidates(mask, log_weights.shape[0], log_weights.shape[1], num_frames=1)
    weights = log_weights.double()
    return weights if mask is None else weights.masked_fill(~mask.bool(), -torch.inf)


def _like_input(values: Tensor, like: Tensor) -> Tensor:
    """Return values in the type of `like`, at least float32."""
    return values.to(torch.promote_types(like.dtype, torch.float32))
