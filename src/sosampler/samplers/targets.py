"""What the frozen classifier thinks of each single frame, as a target for the sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler.checks import one_of
from sosampler.samplers.recipe import TARGET_SPACES, TARGETS

LEAST_PROBABILITY = 1e-12  # below it a logarithm says nothing more


def frame_targets(
    frame_probs: Tensor,  # [B, T, C]
    labels: Tensor,  # [B, C], 1 or True for each true label; at least one a video
    kind: str = "label",
    space: str = "probability",
) -> Tensor:
    """How good each frame is on its own, [B, T].

    "label": the probability of the true label; of several, the geometric mean.
    "max": the highest probability of any class, right or wrong.
    In space "log" it is the logarithm of that, which tells bad frames from very bad ones.
    """
    one_of("kind", kind, TARGETS)
    one_of("space", space, TARGET_SPACES)
    probs = frame_probs.to(torch.promote_types(frame_probs.dtype, torch.float32))
    if kind == "max":
        confidence = probs.amax(dim=-1)
        return _log(confidence) if space == "log" else confidence
    shares = label_shares(labels, probs.dtype)[:, None, :]
    mean_log = (_log(probs) * shares).sum(dim=-1)
    if space == "log":
        return mean_log
    # A single label's probability is taken as it is: through log and exp, frames that are equal might come apart.
    single = (shares > 0).sum(dim=-1) == 1
    return torch.where(single, (probs * shares).sum(dim=-1), mean_log.exp())


def label_shares(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels as a distribution over classes, [B, C]: every true label of a video has the same share."""
    true = labels.to(dtype)
    return true / true.sum(dim=-1, keepdim=True)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(LEAST_PROBABILITY).log()
