"""From what a network returns to probabilities, and what is wrong where it returns something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sosampler.errors import ClassifierError

# softmax: one class a video, probabilities add up to one. sigmoid: several labels a video, each by itself.
ACTIVATIONS = ("softmax", "sigmoid")
OUTPUTS = ("logits", "probabilities")

# Half precision sums of a thousand classes are off by this much.
_SUM_TOLERANCE = 1e-2


def activate(logits: Tensor, activation: str) -> Tensor:
    """Logits [..., C] -> probabilities [..., C] in float32."""
    logits = logits.float()
    return logits.softmax(-1) if activation == "softmax" else logits.sigmoid()


def unwrap_output(output: Any, name: str) -> Tensor:
    """The scores that a module returned: a tensor, the `logits` of an output object, or the first of a tuple."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        found: Tensor = output["logits"]
        return found
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    if not isinstance(output, Tensor):
        raise ClassifierError(
            f"{name} returned a {type(output).__name__}; it must return a tensor [B, classes], "
            "an object or dict with `logits`, or a tuple that starts with one"
        )
    return output


def check_shape(scores: Tensor, batch: int, num_classes: int, name: str) -> Tensor:
    """Scores [B, C] as they must be."""
    if scores.ndim != 2 or scores.shape[0] != batch:
        raise ClassifierError(
            f"{name} returned shape {list(scores.shape)} for {batch} clips; it must return [{batch}, {num_classes}]: "
            "one row of class scores a clip"
        )
    if scores.shape[1] != num_classes:
        raise ClassifierError(
            f"{name} returned {scores.shape[1]} scores a clip but {num_classes} classes are named; "
            "give as many class names (or num_classes) as the network has outputs"
        )
    return scores


def check_finite(scores: Tensor, name: str) -> Tensor:
    """Neither NaN nor infinite."""
    bad = ~torch.isfinite(scores).flatten(1).all(1)
    if bad.any():
        raise ClassifierError(
            f"{name} returned NaN or infinite scores for {int(bad.sum())} of {len(bad)} clips "
            f"(the first is number {int(bad.nonzero()[0])} of its batch); check its weights and its normalisation, "
            "or run it with precision='float32'"
        )
    return scores


def looks_like_probabilities(scores: Tensor) -> bool:
    """Whether rows [B, C] are distributions: in 0..1, adding up to one."""
    if scores.shape[-1] < 2:
        return False
    scores = scores.float()
    inside = bool(((scores >= 0) & (scores <= 1)).all())
    return inside and bool(((scores.sum(-1) - 1).abs() < _SUM_TOLERANCE).all())


def check_probabilities(scores: Tensor, activation: str, name: str) -> Tensor:
    """Rows that are said to be probabilities, or say that they are logits."""
    check_finite(scores, name)
    low, high = float(scores.min()), float(scores.max())
    if low < -1e-6 or high > 1 + 1e-6:
        raise ClassifierError(
            f"{name} returned values from {low:.3g} to {high:.3g} where probabilities are needed; "
            "these are logits: wrap it with outputs='logits', or apply softmax (sigmoid for several labels) yourself"
        )
    if activation == "softmax" and not looks_like_probabilities(scores):
        total = float(scores.float().sum(-1)[0])
        raise ClassifierError(
            f"{name} returned rows that add up to {total:.3g} instead of 1; "
            "wrap it with outputs='logits' if these are logits, with multi_label=True if each class stands by itself"
        )
    return scores


def check_logits(scores: Tensor, name: str) -> Tensor:
    """Rows that are said to be logits, or say that softmax was taken already (twice would flatten them)."""
    check_finite(scores, name)
    if looks_like_probabilities(scores):
        raise ClassifierError(
            f"{name} returned rows in 0..1 that add up to 1 where logits are needed: softmax was taken already; "
            "wrap it with outputs='probabilities'"
        )
    return scores
