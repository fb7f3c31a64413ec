"""The optimal policy: of all subsets of N candidates the one whose clip is most confident in the true labels.

By enumeration where there are few subsets. Classifiers that average logits have a certified search beyond that
(`sosampler.policies.certified`), others a beam search (`sosampler.policies.beam`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
import torch
from torch import Tensor

from sosampler._util.validation import one_of, whole_number
from sosampler.errors import InvalidArgument
from sosampler.policies.semi_optimal import ACTIVATIONS, log_confidence
from sosampler.samplers.ranking import check_labels, real_candidates

DEFAULT_MAX_SUBSETS = 20_000
# Subsets held at once, and numbers gathered for them at once (64 MiB of float64).
_BLOCK = 16_384
_MAX_NUMBERS = 2**23
# Numbers of a table that a processor core goes through several times without fetching them again (1 MiB of float64).
_NUMBERS_IN_CACHE = 2**17
# Log confidences this close are ties: sums of the same rows in another order differ by less.
_TIE = 1e-12


@dataclass(frozen=True)
class OptimalChoice:
    """The best subset found for each video, and how much better any other could be."""

    positions: Tensor  # [B, N] in time order
    log_confidence: Tensor  # [B] of the chosen
    log_bound: Tensor  # [B] no subset has more
    method: str  # "enumeration", "certified" or "beam"

    @property
    def gap(self) -> Tensor:
        """How much confidence the choice can be short of the best subset's at most, in probability [B]."""
        return (self.log_bound.exp() - self.log_confidence.exp()).clamp_min(0)


def count_subsets(num_candidates: int, num_frames: int) -> int:
    """
    >>> count_subsets(10, 6)
    210
    """
    return math.comb(num_candidates, num_frames)


def subset_blocks(num_candidates: int, num_frames: int, block: int = _BLOCK) -> Iterator[Tensor]:
    """All subsets as sorted positions [K, N] in lexicographic order, at most `block` at a time."""
    every = combinations(range(num_candidates), num_frames)
    while rows := list(islice(every, block)):
        yield torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(rows), num_frames))


def subsets(num_candidates: int, num_frames: int) -> Tensor:
    """All subsets at once, int64 [K, N]; see `subset_blocks` where there are many.

    >>> subsets(4, 2).tolist()
    [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    """
    return torch.cat(list(subset_blocks(num_candidates, num_frames)))


def optimal_by_enumeration(
    clip_log_confidence: Callable[[Tensor], Tensor],
    batch: int,
    num_candidates: int,
    num_frames: int,
    *,
    mask: Tensor | None = None,
    max_subsets: int = DEFAULT_MAX_SUBSETS,
    block: int = 1024,
    device: torch.device | str | None = None,
) -> OptimalChoice:
    """Ask any classifier for every subset: `clip_log_confidence(positions [B, K, N])` -> [B, K]. Ties: the earliest."""
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    _affordable(num_candidates, num_frames, max_subsets)

    def evaluate(rows: Tensor) -> Tensor:
        return clip_log_confidence(rows.expand(batch, -1, -1))

    return _best_of_all(evaluate, batch, num_candidates, num_frames, mask, whole_number("block", block), device)


def optimal_pooled(
    features: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    pool_logits: Callable[[Tensor], Tensor],
    activation: str = "softmax",
    mask: Tensor | None = None,
    max_subsets: int = DEFAULT_MAX_SUBSETS,
) -> OptimalChoice:
    """Every subset of a classifier that pools frame features [B, T, D]: `pool_logits([..., N, D])` -> [..., C].

    What averages logits goes faster, and further, by `optimal_mean_logits`.
    """
    one_of("activation", activation, ACTIVATIONS)
    batch, num_candidates, width = features.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    block = max(1, min(_BLOCK, _MAX_NUMBERS // max(1, batch * num_frames * width)))
    videos = torch.arange(batch, device=features.device)[:, None, None]

    def clip_log_confidence(positions: Tensor) -> Tensor:
        logits = pool_logits(features[videos, positions])  # [B, K, C]
        return log_confidence(logits, check_labels(labels, batch, logits.shape[-1]), activation)

    return optimal_by_enumeration(
        clip_log_confidence,
        batch,
        num_candidates,
        num_frames,
        mask=mask,
        max_subsets=max_subsets,
        block=block,
        device=features.device,
    )


def optimal_mean_logits(
    logits: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    activation: str = "softmax",
    mask: Tensor | None = None,
    max_subsets: int = DEFAULT_MAX_SUBSETS,
    tolerance: float = 5e-4,
    max_nodes: int = 1000,
) -> OptimalChoice:
    """pi_o of a classifier that averages the logits [B, T, C] of its frames.

    Every subset where there are at most `max_subsets`, else `certified_mean_logits`, whose remaining gap is reported.
    """
    from sosampler.policies.certified import certified_mean_logits, clip_loss

    batch, num_candidates, num_classes = logits.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    if count_subsets(num_candidates, num_frames) > max_subsets:
        return certified_mean_logits(
            logits, labels, num_frames, activation=activation, mask=mask, tolerance=tolerance, max_nodes=max_nodes
        )
    one_of("activation", activation, ACTIVATIONS)
    loss = clip_loss(usable_logits(logits, mask), check_labels(labels, batch, num_classes), num_frames, activation)

    def evaluate(rows: Tensor) -> Tensor:
        # A subset is a row of zeros and ones; the sums of all are one matrix product.
        member = torch.zeros(len(rows), num_candidates, dtype=torch.float64, device=logits.device)
        member.scatter_(1, rows, 1.0)
        at_once = max(1, in_cache // (len(rows) * loss.rows.shape[2]))
        values = member.new_empty(batch, len(rows))
        for begin in range(0, batch, at_once):
            videos = slice(begin, begin + at_once)
            part = loss.at(videos)
            values[videos] = -part.value(member @ part.rows)
        return values

    in_cache = _NUMBERS_IN_CACHE if logits.device.type == "cpu" else _MAX_NUMBERS
    block = max(1, min(_BLOCK, _MAX_NUMBERS // max(1, batch), in_cache // num_classes))
    return _best_of_all(evaluate, batch, num_candidates, num_frames, mask, block, logits.device)


def usable_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [B, T, C] in float64, 0 where a candidate is not real and may hold anything."""
    rows = logits.double()
    if mask is not None:
        rows = rows.masked_fill(~mask[..., None], 0.0)
    if not bool(rows.isfinite().all()):
        raise InvalidArgument("the logits hold values that are not finite; give finite logits of every real candidate")
    return rows


def _affordable(num_candidates: int, num_frames: int, max_subsets: int) -> None:
    number = count_subsets(num_candidates, num_frames)
    if number > whole_number("max_subsets", max_subsets):
        raise InvalidArgument(
            f"{num_frames} of {num_candidates} candidates are {number} subsets, more than max_subsets={max_subsets}; "
            "raise max_subsets, offer fewer candidates, or use beam_search"
        )


def _best_of_all(
    evaluate: Callable[[Tensor], Tensor],
    batch: int,
    num_candidates: int,
    num_frames: int,
    mask: Tensor | None,
    block: int,
    device: torch.device | str | None,
) -> OptimalChoice:
    """The first of the best subsets in lexicographic order; `evaluate(rows [K, N])` -> [B, K]."""
    best, chosen = None, None
    for rows in subset_blocks(num_candidates, num_frames, block):
        rows = rows.to(device)
        values = evaluate(rows)  # [B, K]
        if mask is not None:
            real = mask.to(values.device)[:, rows.to(values.device)].all(-1)
            values = values.masked_fill(~real, -float("inf"))
        top = values.amax(1, keepdim=True)
        first = (values >= top - _TIE).to(torch.uint8).argmax(1)
        value, subset = top[:, 0], rows.to(values.device)[first]
        if best is None or chosen is None:
            best, chosen = value, subset
        else:
            better = value > best + _TIE
            best, chosen = torch.where(better, value, best), torch.where(better[:, None], subset, chosen)
    assert best is not None
    assert chosen is not None
    return OptimalChoice(chosen, best, best, "enumeration")
