"""Confidence of single frames, by which the semi-optimal policies rank them.

The search space of pi_s grows with T instead of with the number of subsets. Batched torch code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler._util.validation import one_of
from sosampler.samplers.ranking import check_labels, log_label_confidence, top_n

ACTIVATIONS = ("softmax", "sigmoid")
# Probabilities are clamped here before the logarithm; logits need no clamp.
SMALLEST_PROBABILITY = 1e-12


def log_confidence(logits: Tensor, labels: Tensor, activation: str = "softmax") -> Tensor:
    """Return the log confidence in the labels of a classifier's logits [B, ..., C], without a clamp: [B, ...]."""
    softmax = one_of("activation", activation, ACTIVATIONS) == "softmax"
    log_probs = logits.log_softmax(-1) if softmax else torch.nn.functional.logsigmoid(logits)
    return log_label_confidence(log_probs, labels)


def label_confidence(frame_probs: Tensor, labels: Tensor) -> Tensor:
    """Return each frame's confidence in the labels, the geometric mean of their probabilities: [B, T, C] -> [B, T]."""
    labels = check_labels(labels, frame_probs.shape[0], frame_probs.shape[-1])
    return log_label_confidence(frame_probs.clamp_min(SMALLEST_PROBABILITY).log(), labels).exp()


def max_confidence(frame_probs: Tensor) -> Tensor:
    """Return each frame's confidence in its most probable class, which needs no labels: [B, T, C] -> [B, T]."""
    return frame_probs.amax(-1)


def semi_optimal(confidence: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
    """Choose the N frames with the highest `label_confidence` or `max_confidence` [B, T]."""
    return top_n(confidence, num_frames, mask)
