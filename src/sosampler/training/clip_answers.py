"""What a classifier that averages logits says about any clip, from what it said about each frame."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.samplers.recipe import SamplerRecipe

_LEAST = 1e-7  # half precision keeps nothing smaller


def clip_answers(frame_probs: Tensor, *, multi_label: bool) -> Callable[[Tensor], Tensor]:
    """frame_probs [B, T, C] -> a function from positions [B, N] to the probabilities [B, C] of these clips.

    The softmax of mean logits is that of mean log probabilities, since what a frame's logits have in common cancels.
    """
    probs = frame_probs.float().clamp(_LEAST, 1 - _LEAST)
    scores = probs.logit() if multi_label else probs.log()  # [B, T, C]

    def answers(positions: Tensor) -> Tensor:
        chosen = scores.gather(1, positions[..., None].expand(-1, -1, scores.shape[2])).mean(1)
        return chosen.sigmoid() if multi_label else torch.softmax(chosen, dim=-1)

    return answers


def check_rewards(recipe: SamplerRecipe, pooling: str | None, name: str, num_candidates: int, wanted: int) -> None:
    """Whether loss="reinforce" can be trained from this teacher and with so few candidates."""
    if recipe.loss != "reinforce":
        return
    if pooling != "mean":
        raise InvalidArgument(
            f"recipe {recipe.name!r} needs a classifier that averages the logits of frames, so that its answers about "
            f"clips follow from the bank; {name} does not. Take another classifier, or another recipe"
        )
    if num_candidates < wanted:
        raise InvalidArgument(
            f"recipe {recipe.name!r} draws {wanted} frames, but the bank offers {num_candidates}; "
            f"set reinforce={{num_frames: {max(1, num_candidates // 2)}}}, or prepare more frames a video"
        )
