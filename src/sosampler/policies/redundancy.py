"""Choosing frames that are confident and differ from each other.

Ranking by score alone takes near-duplicates where many candidates are offered. Both rules here start from scores
[B, T] of any policy and a similarity [B, T, T] between frames, such as `gaussian_kernel` of their features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler._util.validation import real_number
from sosampler.errors import InvalidArgument
from sosampler.policies.semi_optimal import real_candidates

# What is left of a frame's variance once the chosen ones explain it; below this it is rounding.
_SMALLEST_VARIANCE = 1e-10


def gaussian_kernel(features: Tensor, bandwidth: float | Tensor) -> Tensor:
    """exp(-|x - y|^2 / (2 bandwidth^2)) between frames: features [..., T, D] -> [..., T, T], 1 for equal frames.

    bandwidth is one number, or one per video [...].
    """
    width = torch.as_tensor(bandwidth, dtype=features.dtype, device=features.device)
    if not bool(((width > 0) & width.isfinite()).all()):
        raise InvalidArgument(
            f"bandwidth={bandwidth} is not allowed; give finite numbers above 0, such as median_bandwidth(features)"
        )
    # Differences, not the product form: that loses near-duplicates to cancellation.
    squared = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist").square()
    return (-squared / (2 * width[..., None, None].square())).exp()


def median_bandwidth(features: Tensor, mask: Tensor | None = None, *, pooled: bool = False) -> Tensor:
    """Median distance between two different frames of a video: features [B, T, D] -> [B], or [] over all if pooled.

    Where more than half of the pairs are equal frames, or there is one frame only, it is 1.
    """
    batch, num_candidates = features.shape[:2]
    distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
    real = torch.ones(batch, num_candidates, dtype=torch.bool, device=features.device) if mask is None else mask.bool()
    pairs = (real[:, None] & real[:, :, None]).triu(1)
    distance = distance.masked_fill(~pairs, float("nan")).flatten(1)
    median = distance.flatten().nanmedian() if pooled else distance.nanmedian(1).values
    return torch.where(median > 0, median, torch.ones_like(median))


def mmr(
    scores: Tensor, similarity: Tensor, num_frames: int, *, trade_off: float = 0.7, mask: Tensor | None = None
) -> Tensor:
    """Maximal marginal relevance: again and again the candidate with the highest

        trade_off * score - (1 - trade_off) * its greatest similarity to a chosen one,

    the first by score alone. Scores and similarities are compared as they are: bring scores to 0..1 before.
    Positions [B, N] in time order; of equal ones the earlier.
    """
    share = real_number("trade_off", trade_off, at_least=0)
    if share > 1:
        raise InvalidArgument(f"trade_off={trade_off} is not allowed; give a number between 0 and 1")
    left = _candidates(scores, similarity, num_frames, mask)
    scores = scores if scores.is_floating_point() else scores.to(similarity.dtype)
    nearest = torch.zeros_like(scores)
    chosen: list[Tensor] = []
    for step in range(num_frames):
        value = share * scores - (1 - share) * nearest if step else scores
        pick = _highest(value, left)
        to_pick = _row(similarity, pick)
        nearest = torch.maximum(nearest, to_pick) if step else to_pick
        left = left.scatter(1, pick, False)
        chosen.append(pick)
    return torch.cat(chosen, 1).sort(1).values


def dpp(
    scores: Tensor, similarity: Tensor, num_frames: int, *, trade_off: float = 0.7, mask: Tensor | None = None
) -> Tensor:
    """Greedy mode of a determinantal point process with kernel q_i * similarity_ij * q_j, q = exp(weight * score).

    weight = trade_off / (2 (1 - trade_off)): 0 looks at diversity alone, towards 1 at scores alone. Each step takes the
    candidate that raises the determinant of the chosen frames' kernel most; a row of its Cholesky factor is all that
    is added (Chen, Zhang and Zhou 2018). `similarity` must be positive semidefinite, as `gaussian_kernel` is.
    Positions [B, N] in time order; of equal ones the earlier.
    """
    share = real_number("trade_off", trade_off, at_least=0)
    if share >= 1:
        raise InvalidArgument(f"trade_off={trade_off} is not allowed; give a number from 0 to below 1")
    left = _candidates(scores, similarity, num_frames, mask)
    # log det(q S q) = 2 sum log q + log det S: the factor of S alone never overflows, whatever the scores.
    quality = share / (1 - share) * scores.double()
    similarity = similarity.double()
    variance = similarity.diagonal(dim1=1, dim2=2).clone()  # of each candidate, given the chosen ones
    factor = torch.zeros(*scores.shape, num_frames, dtype=torch.float64, device=scores.device)  # [B, T, N]
    chosen: list[Tensor] = []
    for step in range(num_frames):
        pick = _highest(quality + variance.clamp_min(_SMALLEST_VARIANCE).log(), left)
        own = factor.gather(1, pick[..., None].expand(-1, -1, num_frames))  # [B, 1, N]
        spread = variance.gather(1, pick)
        column = (_row(similarity, pick) - (factor * own).sum(-1)) / spread.clamp_min(_SMALLEST_VARIANCE).sqrt()
        column = column.masked_fill(spread <= _SMALLEST_VARIANCE, 0.0)  # a duplicate explains nothing new
        factor[..., step] = column
        variance = variance - column.square()
        left = left.scatter(1, pick, False)
        chosen.append(pick)
    return torch.cat(chosen, 1).sort(1).values


def _candidates(scores: Tensor, similarity: Tensor, num_frames: int, mask: Tensor | None) -> Tensor:
    """Who may be chosen, bool [B, T], after the shapes are checked."""
    batch, num_candidates = scores.shape
    if tuple(similarity.shape) != (batch, num_candidates, num_candidates):
        raise InvalidArgument(
            f"the similarity has shape {list(similarity.shape)}; for scores of shape {list(scores.shape)} give "
            f"[{batch}, {num_candidates}, {num_candidates}]"
        )
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    return torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.clone()


def _highest(value: Tensor, left: Tensor) -> Tensor:
    """Position [B, 1] of the highest value among those left, of equal ones the first."""
    value = value.masked_fill(value.isnan(), -float("inf"))
    top = value.masked_fill(~left, -float("inf")).amax(1, keepdim=True)
    return ((value >= top) & left).to(torch.uint8).argmax(1, keepdim=True)


def _row(table: Tensor, pick: Tensor) -> Tensor:
    """Row pick [B, 1] of each table [B, T, T] -> [B, T]."""
    return table.gather(1, pick[..., None].expand(-1, -1, table.shape[2]))[:, 0]
