"""pi_o with a proof for classifiers that average logits, where enumeration ends.

Relax (`relaxation`), round, improve by swaps: that gives a subset and a bound no subset can exceed. Where the two
are further apart than wanted, branch and bound closes in, within a budget of nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.policies.branch_and_bound import (
    SWAPS_AT_ONCE,
    BranchAndBound,
    Equals,
    Incumbent,
    improve_by_swaps,
    loss_of,
)
from sosampler.policies.optimal import OptimalChoice, clip_loss, usable_logits
from sosampler.policies.semi_optimal import ACTIVATIONS, log_confidence
from sosampler.samplers.ranking import check_labels, real_candidates, top_n

# Numbers of the largest table per chunk of videos (32 MiB of float64; a handful of such are alive at once).
_MAX_NUMBERS = 2**22


def certified_mean_logits(
    logits: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    activation: str = "softmax",
    mask: Tensor | None = None,
    tolerance: float = 5e-4,
    max_nodes: int = 1000,
) -> OptimalChoice:
    """The subset whose averaged logits [B, T, C] are most confident in the labels, and a bound on any subset's.

    It first tries to prove that the subset is the best; where that takes more than a hundred relaxations it is content
    with a gap of `tolerance` in probability, and after `max_nodes` it reports the gap that is left.
    """
    one_of("activation", activation, ACTIVATIONS)
    real_number("tolerance", tolerance, above=0)
    whole_number("max_nodes", max_nodes)
    batch, num_candidates, num_classes = logits.shape
    labels = check_labels(labels, batch, num_classes)
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    logits = usable_logits(logits, mask)
    real = torch.ones(batch, num_candidates, dtype=torch.bool, device=logits.device) if mask is None else mask
    per_video = max(num_candidates**2, num_classes * max(num_candidates, SWAPS_AT_ONCE))
    chunk = max(1, _MAX_NUMBERS // per_video)
    parts = [
        _search(
            logits[i : i + chunk],
            labels[i : i + chunk],
            real[i : i + chunk],
            num_frames,
            activation,
            tolerance,
            max_nodes,
        )
        for i in range(0, batch, chunk)
    ]
    if not parts:
        empty = torch.zeros(0, dtype=torch.float64, device=logits.device)
        return OptimalChoice(
            torch.zeros(0, num_frames, dtype=torch.int64, device=logits.device), empty, empty, "certified"
        )
    return OptimalChoice(
        torch.cat([part.positions for part in parts]),
        torch.cat([part.log_confidence for part in parts]),
        torch.cat([part.log_bound for part in parts]),
        "certified",
    )


def _search(
    logits: Tensor, labels: Tensor, real: Tensor, num_frames: int, activation: str, tolerance: float, max_nodes: int
) -> OptimalChoice:
    loss = clip_loss(logits, labels, num_frames, activation)
    alone = log_confidence(logits, labels, activation)
    start = improve_by_swaps(loss, _members(top_n(alone, num_frames, real), real), real)
    best = Incumbent(start, loss_of(loss, start))
    equals = Equals.of(loss, real)
    bound = BranchAndBound(loss, real, num_frames, best, equals).run(tolerance, max_nodes)
    chosen = equals.earliest(torch.arange(len(real), device=real.device), best.chosen.double()) > 0.5
    positions = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :num_frames].sort(1).values
    value = -loss_of(loss, chosen)
    return OptimalChoice(positions, value, torch.maximum(value, -bound), "certified")


def _members(positions: Tensor, like: Tensor) -> Tensor:
    """Positions [B, N] as bool [B, T]."""
    return torch.zeros_like(like).scatter_(1, positions, torch.ones_like(positions, dtype=torch.bool))
