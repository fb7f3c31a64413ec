"""Search for the optimal subset: of all N of T candidates the one whose clip is most confident in the true labels.

By enumeration where there are few subsets. Classifiers that average logits have a certified search beyond that
(`sosampler.policies.certified`), others a beam search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
import torch
from torch import Tensor

from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import ACTIVATIONS, check_labels, log_confidence, real_candidates

ClipLogConfidence = Callable[[Tensor], Tensor]  # positions [B, K, n] in time order -> [B, K], for any n

DEFAULT_MAX_SUBSETS = 20_000
# Subsets held at a time, and numbers gathered for them (64 MiB of float64).
_BLOCK = 16_384
_MAX_NUMBERS = 2**23
# Numbers of a table that fit into the cache of a processor core (1 MiB of float64).
_NUMBERS_IN_CACHE = 2**17
# Log confidences this close are ties: sums of the same rows in another order differ by less.
_TIE = 1e-12


@dataclass(frozen=True)
class OptimalChoice:
    """The best known subset of each video, and how much better any other could be."""

    positions: Tensor  # [B, N] in time order
    log_confidence: Tensor  # [B] of the chosen
    log_bound: Tensor  # [B] no subset has more
    method: str  # "enumeration", "certified" or "beam"

    @property
    def gap(self) -> Tensor:
        """Upper bound on how much more confident the best subset can be, in probability [B]."""
        return (self.log_bound.exp() - self.log_confidence.exp()).clamp_min(0)


def subset_blocks(num_candidates: int, num_frames: int, block: int = _BLOCK) -> Iterator[Tensor]:
    """Yield all subsets as sorted positions [K, N] in lexicographic order, at most `block` at a time."""
    every = combinations(range(num_candidates), num_frames)
    while rows := list(islice(every, block)):
        yield torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(rows), num_frames))


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

    def value(self, total: Tensor) -> Tensor:
        """Loss of sums [B, ..., K] -> [B, ...]."""
        if self.weights is None:
            return total.logsumexp(-1)
        weights = self.weights.reshape(len(total), *(1,) * (total.dim() - 2), total.shape[-1])
        return -(torch.nn.functional.logsigmoid(total) * weights).sum(-1)  # softplus is cut off at 20

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


def clip_loss(logits: Tensor, labels: Tensor, num_frames: int, activation: str) -> ClipLoss:
    """Return the `ClipLoss` of N frames; in float64, since bounds are compared to 1e-6 and less."""
    rows, positive = logits.double(), labels.double()
    share = positive / positive.sum(1, keepdim=True)
    if activation == "softmax":
        return ClipLoss((rows - (rows * share[:, None]).sum(-1, keepdim=True)) / num_frames, None)
    width = int(labels.sum(1).max())  # classes that are no label do not matter; padding has weight 0
    true = positive.topk(width, dim=1).indices
    return ClipLoss(rows.gather(2, true[:, None].expand(-1, rows.shape[1], -1)) / num_frames, share.gather(1, true))


def optimal_by_enumeration(
    clip_log_confidence: ClipLogConfidence,
    batch: int,
    num_candidates: int,
    num_frames: int,
    *,
    mask: Tensor | None = None,
    max_subsets: int = DEFAULT_MAX_SUBSETS,
    block: int = 1024,
    device: torch.device | str | None = None,
) -> OptimalChoice:
    """Evaluate every subset by `clip_log_confidence(positions [B, K, N])` -> [B, K]. Ties: the earliest."""
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    number = math.comb(num_candidates, num_frames)
    if number > check_int("max_subsets", max_subsets):
        raise InvalidArgument(
            f"{num_frames} of {num_candidates} candidates are {number} subsets, more than max_subsets={max_subsets}; "
            "raise max_subsets, give fewer candidates, or use beam_search"
        )

    blocks = subset_blocks(num_candidates, num_frames, check_int("block", block))
    return _best_of(blocks, lambda rows: clip_log_confidence(rows.expand(batch, -1, -1)), mask, device)


def optimal_pooled(
    features: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    pool_logits: Callable[[Tensor], Tensor],
    activation: str = "softmax",
    mask: Tensor | None = None,
) -> OptimalChoice:
    """Evaluate every subset of a classifier that pools features [B, T, D]: `pool_logits([..., N, D])` -> [..., C].

    For one that averages logits `optimal_mean_logits` is faster, and allows more subsets.
    """
    one_of("activation", activation, ACTIVATIONS)
    batch, num_candidates, width = features.shape
    block = max(1, min(_BLOCK, _MAX_NUMBERS // max(1, batch * check_int("num_frames", num_frames) * width)))
    videos = torch.arange(batch, device=features.device)[:, None, None]

    def clip_log_confidence(positions: Tensor) -> Tensor:
        logits = pool_logits(features[videos, positions])  # [B, K, C]
        return log_confidence(logits, check_labels(labels, batch, logits.shape[-1]), activation)

    size, device = (batch, num_candidates, num_frames), features.device
    return optimal_by_enumeration(clip_log_confidence, *size, mask=mask, block=block, device=device)


def optimal_mean_logits(
    logits: Tensor,
    labels: Tensor,
    num_frames: int,
    *,
    activation: str = "softmax",
    mask: Tensor | None = None,
    max_subsets: int = DEFAULT_MAX_SUBSETS,
) -> OptimalChoice:
    """Search for pi_o of a classifier that averages the logits [B, T, C] of its frames.

    By enumeration of at most `max_subsets`, else by `certified_mean_logits`, whose remaining gap is reported.
    """
    batch, num_candidates, num_classes = logits.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    if math.comb(num_candidates, num_frames) > max_subsets:
        from sosampler.policies.certified import certified_mean_logits

        return certified_mean_logits(logits, labels, num_frames, activation=activation, mask=mask)
    one_of("activation", activation, ACTIVATIONS)
    loss = clip_loss(usable_logits(logits, mask), check_labels(labels, batch, num_classes), num_frames, activation)

    def evaluate(rows: Tensor) -> Tensor:
        # A subset is a row of zeros and ones; the sums of all are one matrix product.
        member = torch.zeros(len(rows), num_candidates, dtype=torch.float64, device=logits.device)
        member.scatter_(1, rows, 1.0)
        size = max(1, in_cache // (len(rows) * loss.rows.shape[2]))
        values = member.new_empty(batch, len(rows))
        for begin in range(0, batch, size):
            videos = slice(begin, begin + size)
            part = loss.at(videos)
            values[videos] = -part.value(member @ part.rows)
        return values

    in_cache = _NUMBERS_IN_CACHE if logits.device.type == "cpu" else _MAX_NUMBERS
    block = max(1, min(_BLOCK, _MAX_NUMBERS // max(1, batch), in_cache // num_classes))
    return _best_of(subset_blocks(num_candidates, num_frames, block), evaluate, mask, logits.device)


def usable_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logits [B, T, C] in float64, 0 where a candidate is not real and may hold anything."""
    rows = logits.double()
    if mask is not None:
        rows = rows.masked_fill(~mask[..., None], 0.0)
    if not bool(rows.isfinite().all()):
        raise InvalidArgument("the logits hold values that are not finite; give finite logits of every real candidate")
    return rows


def _best_of(
    blocks: Iterator[Tensor],
    evaluate: Callable[[Tensor], Tensor],
    mask: Tensor | None,
    device: torch.device | str | None,
) -> OptimalChoice:
    """Return the first of the best subsets, in the order of the blocks; `evaluate(rows [K, N])` -> [B, K]."""
    best, chosen = None, None
    for block in blocks:
        values = evaluate(block.to(device))  # [B, K]
        rows = block.to(values.device)
        if mask is not None:
            values = values.masked_fill(~mask.to(values.device)[:, rows].all(-1), -torch.inf)
        top = values.amax(1, keepdim=True)
        first = (values >= top - _TIE).to(torch.uint8).argmax(1)
        value, subset = top[:, 0], rows[first]
        if best is None or chosen is None:
            best, chosen = value, subset
        else:
            better = value > best + _TIE
            best, chosen = torch.where(better, value, best), torch.where(better[:, None], subset, chosen)
    assert best is not None and chosen is not None, "there is a subset"  # noqa: PT018
    return OptimalChoice(chosen, best, best, "enumeration")


# ---- beam search

_MIN_GAIN = 1e-6  # of log confidence: a network's outputs for one clip differ as much from batch to batch


def beam_search(
    clip_log_confidence: ClipLogConfidence,
    batch: int,
    num_candidates: int,
    num_frames: int,
    *,
    width: int = 16,
    mask: Tensor | None = None,
    device: torch.device | str | None = None,
    swaps: bool = True,
    block: int = 1024,
    narrowed: Callable[[np.ndarray], ClipLogConfidence] | None = None,
) -> OptimalChoice:
    """Search by a beam, for classifiers that must be run on every clip: nothing is proven, the bound is confidence 1.

    Sets grow one frame at a time, the `width` best of each size are kept, and then frames are exchanged while it helps.
    The classifier sees at most `block` sets of each video in one call. `narrowed(videos)` returns the same function for
    some of the videos; with it those that no exchange improves are not classified again.
    """
    width, block = check_int("width", width), check_int("block", block)
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    real = np.ones((batch, num_candidates), bool) if mask is None else mask.cpu().numpy()

    beams = [np.zeros((1, 0), np.int64) for _ in range(batch)]  # of each video [W, n]
    best = torch.zeros(batch)
    for _ in range(num_frames):
        grown = [_grown(beam, real[b]) for b, beam in enumerate(beams)]
        values = _evaluate(clip_log_confidence, grown, block, device)
        order = [value.argsort(descending=True, stable=True)[:width].cpu().numpy() for value in values]
        beams = [sets[best_first] for sets, best_first in zip(grown, order, strict=True)]
        best = torch.stack([value.max() for value in values]) if values else best
    chosen = [beam[:1] for beam in beams]  # the best of each, [1, N]
    active = [b for b in range(batch) if swaps and real[b].sum() > num_frames]
    while active:
        videos = active if narrowed else list(range(batch))
        function = narrowed(np.array(active)) if narrowed else clip_log_confidence
        exchanged = {b: _exchanged(chosen[b][0], real[b]) if b in active else chosen[b] for b in videos}
        values_of = dict(zip(videos, _evaluate(function, list(exchanged.values()), block, device), strict=True))
        active = [b for b in active if bool(values_of[b].max() > best[b] + _MIN_GAIN)]
        for b in active:
            winner = int(values_of[b].argmax())
            chosen[b], best[b] = exchanged[b][winner : winner + 1], values_of[b][winner]
    positions = torch.from_numpy(np.concatenate(chosen) if batch else np.zeros((0, num_frames), np.int64)).to(device)
    return OptimalChoice(positions, best, torch.zeros_like(best), "beam")


def _grown(beam: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return every set of the beam [W, n] with one more real candidate, in lexicographic order [K, n + 1]."""
    candidates = np.flatnonzero(real)
    pairs = np.column_stack([np.repeat(beam, len(candidates), axis=0), np.tile(candidates, len(beam))])
    pairs = pairs[(pairs[:, :-1] != pairs[:, -1:]).all(1)]
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _exchanged(chosen: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the sets that differ from the chosen [N] by one candidate, in lexicographic order [N * (T - N), N]."""
    others = np.setdiff1d(np.flatnonzero(real), chosen)
    sets = [np.concatenate([np.delete(chosen, index), [other]]) for index in range(len(chosen)) for other in others]
    return np.unique(np.sort(np.array(sets, np.int64).reshape(-1, len(chosen)), axis=1), axis=0)


def _evaluate(
    clip_log_confidence: ClipLogConfidence, sets: list[np.ndarray], block: int, device: torch.device | str | None
) -> list[Tensor]:
    """Return the values of each video's sets; videos with fewer are padded with their first set."""
    if not sets:
        return []
    largest = max(len(rows) for rows in sets)
    full = np.stack([np.concatenate([rows, np.repeat(rows[:1], largest - len(rows), axis=0)]) for rows in sets])
    positions = torch.from_numpy(full).to(device)  # [B, K, n]
    values = torch.cat([clip_log_confidence(part) for part in positions.split(block, dim=1)], dim=1)
    return [value[: len(rows)] for value, rows in zip(values, sets, strict=True)]
