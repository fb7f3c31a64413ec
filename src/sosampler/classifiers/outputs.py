"""Turn a network's outputs into probabilities, and check them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sosampler.errors import ClassifierError

# softmax: one class per video, probabilities sum to one. sigmoid: several labels per video, independent.
ACTIVATIONS = ("softmax", "sigmoid")
OUTPUTS = ("logits", "probabilities")

_SUM_TOLERANCE = 1e-2  # error of a sum over a thousand classes in half precision


def activate(logits: Tensor, activation: str) -> Tensor:
    """Turn logits [..., C] into probabilities [..., C] in float32."""
    logits = logits.float()
    return logits.softmax(-1) if activation == "softmax" else logits.sigmoid()


def unwrap_output(output: Any, name: str) -> Tensor:
    """Return a module's scores: a tensor, the `logits` of an object or dict, or the first item of a tuple."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise ClassifierError(
            f"{name} returned a {type(output).__name__}; it must return a tensor [B, classes], "
            "an object or dict with `logits`, or a tuple that starts with one"
        )
    return first


def check_shape(scores: Tensor, batch: int, num_classes: int, name: str) -> Tensor:
    """Return scores, which must have the shape [B, C]."""
    if scores.ndim != 2 or scores.shape[0] != batch:
        raise ClassifierError(
            f"{name} returned shape {list(scores.shape)} for {batch} clips; it must return [{batch}, {num_classes}]: "
            "one row of class scores per clip"
        )
    if scores.shape[1] != num_classes:
        raise ClassifierError(
            f"{name} returned {scores.shape[1]} scores per clip but {num_classes} classes have names; "
            "give as many class names (or num_classes) as the network has outputs"
        )
    return scores


def check_finite(scores: Tensor, name: str) -> Tensor:
    """Return scores [B, ...], which must be neither NaN nor infinite."""
    bad = ~torch.isfinite(scores).flatten(1).all(1)
    if bad.any():
        raise ClassifierError(
            f"{name} returned NaN or infinite scores for {int(bad.sum())} of {len(bad)} clips "
            f"(the first is number {int(bad.nonzero()[0])} of its batch); check its weights and its normalisation, "
            "or run it with precision='float32'"
        )
    return scores


def looks_like_probabilities(scores: Tensor) -> bool:
    """Return whether rows [B, C] are distributions: in 0..1, with a sum of one."""
    scores = scores.float()
    inside = scores.shape[-1] > 1 and bool(((scores >= 0) & (scores <= 1)).all())
    return inside and bool(((scores.sum(-1) - 1).abs() < _SUM_TOLERANCE).all())


def check_probabilities(scores: Tensor, activation: str, name: str) -> Tensor:
    """Return rows [B, C], which must be probabilities."""
    check_finite(scores, name)
    low, high = float(scores.min()), float(scores.max())
    if low < -1e-6 or high > 1 + 1e-6:
        raise ClassifierError(
            f"{name} returned values from {low:.3g} to {high:.3g} but must return probabilities; "
            "these are logits: wrap it with outputs='logits', or apply softmax (sigmoid for several labels) yourself"
        )
    if activation == "softmax" and not looks_like_probabilities(scores):
        total = float(scores.float().sum(-1)[0])
        raise ClassifierError(
            f"{name} returned rows with a sum of {total:.3g} but must return probabilities with a sum of 1; "
            "wrap it with outputs='logits' if these are logits, with multi_label=True if classes are independent"
        )
    return scores


def check_logits(scores: Tensor, name: str) -> Tensor:
    """Return rows [B, C], which must be logits: a second softmax would flatten them."""
    check_finite(scores, name)
    if looks_like_probabilities(scores):
        raise ClassifierError(
            f"{name} returned rows in 0..1 with a sum of 1 but must return logits: softmax was applied already; "
            "wrap it with outputs='probabilities'"
        )
    return scores
