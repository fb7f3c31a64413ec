"""pi_o by beam search, for classifiers of which nothing is known but what they say about a clip."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sosampler._util.validation import whole_number
from sosampler.policies.optimal import OptimalChoice
from sosampler.samplers.ranking import real_candidates

ClipLogConfidence = Callable[[Tensor], Tensor]  # positions [B, K, n] in time order -> [B, K], for any n
# A network's answers about one clip differ by about as much from batch to batch, in log confidence.
_LEAST_GAIN = 1e-6


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
    """Grow sets one frame at a time, keeping the `width` best of each size, then exchange frames while it helps.

    The classifier sees at most `block` sets of each video in one call. `narrowed(videos)` gives the same function for
    some of the videos; with it those that no exchange improves are not asked about again. Nothing is proven: the bound
    is confidence 1.
    """
    width, block = whole_number("width", width), whole_number("block", block)
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    real = np.ones((batch, num_candidates), bool) if mask is None else mask.cpu().numpy()

    beams = [np.zeros((1, 0), np.int64) for _ in range(batch)]  # of each video [W, n]
    best = torch.zeros(batch)
    for _ in range(num_frames):
        grown = [_grown(beam, real[b]) for b, beam in enumerate(beams)]
        values = _evaluate(clip_log_confidence, grown, block, device)
        order = [value.argsort(descending=True, stable=True)[:width].cpu().numpy() for value in values]
        beams = [sets[kept] for sets, kept in zip(grown, order, strict=True)]
        best = torch.stack([value.max() for value in values]) if values else best
    chosen = [beam[:1] for beam in beams]  # the best of each, [1, N]
    active = [b for b in range(batch) if swaps and real[b].sum() > num_frames]
    while active:
        asked, ask = (active, narrowed(np.array(active))) if narrowed else (list(range(batch)), clip_log_confidence)
        exchanged = {b: _exchanged(chosen[b][0], real[b]) if b in active else chosen[b] for b in asked}
        found = dict(zip(asked, _evaluate(ask, list(exchanged.values()), block, device), strict=True))
        active = [b for b in active if bool(found[b].max() > best[b] + _LEAST_GAIN)]
        for b in active:
            winner = int(found[b].argmax())
            chosen[b], best[b] = exchanged[b][winner : winner + 1], found[b][winner]
    positions = torch.from_numpy(np.concatenate(chosen) if batch else np.zeros((0, num_frames), np.int64)).to(device)
    return OptimalChoice(positions, best, torch.zeros_like(best), "beam")


def _grown(beam: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Every set of the beam [W, n] with one more real candidate, each set once, in lexicographic order [K, n + 1]."""
    candidates = np.flatnonzero(real)
    pairs = np.concatenate(
        [np.repeat(beam, len(candidates), axis=0), np.tile(candidates, len(beam))[:, None]],
        axis=1,
    )
    pairs = pairs[(pairs[:, :-1] != pairs[:, -1:]).all(1)]
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _exchanged(chosen: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The sets that differ from the chosen [N] by one candidate, in lexicographic order [N * (T - N), N]."""
    others = np.setdiff1d(np.flatnonzero(real), chosen)
    sets = [np.concatenate([np.delete(chosen, place), [other]]) for place in range(len(chosen)) for other in others]
    return np.unique(np.sort(np.array(sets, np.int64).reshape(-1, len(chosen)), axis=1), axis=0)


def _evaluate(
    clip_log_confidence: ClipLogConfidence, sets: list[np.ndarray], block: int, device: torch.device | str | None
) -> list[Tensor]:
    """Values of each video's sets; videos with fewer are filled up with their first set."""
    if not sets:
        return []
    most = max(len(rows) for rows in sets)
    full = np.stack([np.concatenate([rows, np.repeat(rows[:1], most - len(rows), axis=0)]) for rows in sets])
    positions = torch.from_numpy(full).to(device)  # [B, K, n]
    values = torch.cat([clip_log_confidence(part) for part in positions.split(block, dim=1)], dim=1)
    return [value[: len(rows)] for value, rows in zip(values, sets, strict=True)]
