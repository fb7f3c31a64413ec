"""Rank candidates by score, and score them by their confidence in the labels. Batched torch code.

`mask` [B, T] is True for a real candidate (None: all are); positions are returned in time order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler._util.validation import check_int, one_of
from sosampler.errors import InvalidArgument

ACTIVATIONS = ("softmax", "sigmoid")
# Probabilities are clamped here before the logarithm; logits need no clamp.
SMALLEST_PROBABILITY = 1e-12


def real_candidates(mask: Tensor | None, batch: int, num_candidates: int, num_frames: int) -> Tensor | None:
    """Check that every video has `num_frames` real candidates, and return the mask as bool [B, T] or None."""
    num_frames = check_int("num_frames", num_frames)
    fewest = num_candidates
    if mask is not None:
        if tuple(mask.shape) != (batch, num_candidates):
            raise InvalidArgument(
                f"the mask has shape {list(mask.shape)}, but there are {batch} videos with {num_candidates} "
                f"candidates each; give a mask of shape [{batch}, {num_candidates}]"
            )
        mask = mask.bool()
        fewest = int(mask.sum(1).min()) if batch else num_candidates
    if num_frames > fewest:
        raise InvalidArgument(
            f"num_frames={num_frames} is more than the {fewest} real candidates of a video; "
            "choose fewer frames or give more candidates"
        )
    return mask


def check_labels(labels: Tensor, batch: int, num_classes: int) -> Tensor:
    """Return the labels as bool [B, C], each row with at least one positive."""
    if tuple(labels.shape) != (batch, num_classes):
        raise InvalidArgument(
            f"the labels have shape {list(labels.shape)}; give a multi-hot table of shape [{batch}, {num_classes}]"
        )
    positive = labels.bool()
    if not bool(positive.any(1).all()):
        raise InvalidArgument("a video has no label; give at least one positive class in every row of the labels")
    return positive


def top_n(scores: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
    """Return the positions [B, N] of the N highest scores [B, T]; of equal ones the earlier, NaN counts as lowest.

    >>> top_n(torch.tensor([[0.1, 0.9, 0.9, 0.2, 0.9]]), 2).tolist()
    [[1, 2]]
    """
    batch, num_candidates = scores.shape
    mask = real_candidates(mask, batch, num_candidates, num_frames)
    scores = scores if scores.is_floating_point() else scores.double()  # integers have no lowest value
    lowest = -float("inf")
    order = scores.masked_fill(scores.isnan(), lowest).argsort(dim=1, descending=True, stable=True)
    if mask is not None:  # real candidates first, whatever their scores are
        order = order.gather(1, (~mask).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    return order[:, :num_frames].sort(dim=1).values


def log_label_confidence(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of log p over the true labels: log_probs [B, ..., C], labels [B, C] -> [B, ...]."""
    between = (1,) * (log_probs.dim() - 2)
    weights = labels.to(log_probs.dtype)
    weights = (weights / weights.sum(1, keepdim=True)).reshape(labels.shape[0], *between, labels.shape[1])
    # A class that is no label may have log p = -inf; 0 times it is NaN, so it is masked instead.
    return (log_probs.masked_fill(weights == 0, 0.0) * weights).sum(-1)


def log_confidence(logits: Tensor, labels: Tensor, activation: str = "softmax") -> Tensor:
    """Return the log confidence in the labels of a classifier's logits [B, ..., C], without a clamp: [B, ...]."""
    softmax = one_of("activation", activation, ACTIVATIONS) == "softmax"
    log_probs = logits.log_softmax(-1) if softmax else torch.nn.functional.logsigmoid(logits)
    return log_label_confidence(log_probs, labels)


def label_confidence(frame_probs: Tensor, labels: Tensor) -> Tensor:
    """Return each frame's confidence in the labels, the geometric mean of their probabilities: [B, T, C] -> [B, T]."""
    labels = check_labels(labels, frame_probs.shape[0], frame_probs.shape[-1])
    return log_label_confidence(frame_probs.clamp_min(SMALLEST_PROBABILITY).log(), labels).exp()
