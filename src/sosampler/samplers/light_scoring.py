"""`samplers.scoring` without torch and without padding: from what the heads say to the score that ranks frames.

Apart from the network, because that looks at a long video in stretches, and a belief is about all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler.errors import WeightsError

Numbers = NDArray[np.float64]

# As in `samplers.scoring`.
_SALIENCY = {"saliency": "max"}
_BELIEF = {"belief", "relevance", "importance"}
_MOST_WITNESSES = 10
_LEAST = 1e-4


def check_scoring(settings: dict[str, Any], where: str) -> None:
    """These are settings that `scores_of` knows, or say so."""
    if settings and settings != _SALIENCY and set(settings) != _BELIEF:
        raise WeightsError(
            f"{where}: scores frames by {settings}, which this version of sosampler does not know; "
            "install the version that exported it"
        )


def scores_of(
    settings: dict[str, Any], importance: NDArray, class_logits: NDArray | None, *, multi_label: bool = False
) -> NDArray[np.float32]:
    """importance [B, T], class_logits [B, T, C] -> scores [B, T]."""
    if not settings:
        return importance.astype(np.float32)
    assert class_logits is not None, "a sampler that scores by classes has a class head"
    logits, head = class_logits.astype(np.float64), importance.astype(np.float64)
    if settings == _SALIENCY:
        return _saliency(logits, multi_label).astype(np.float32)
    log_probs = -np.logaddexp(0, -logits) if multi_label else _log_softmax(logits)
    about = log_belief(settings, head, logits, multi_label=multi_label)[:, None]  # [B, 1, C]
    log_of_mean = _logsumexp(about + log_probs)[..., 0]
    mean_of_log = (np.exp(about) * log_probs).sum(-1)
    scores = settings["importance"] * head + 0.5 * log_of_mean + 0.5 * mean_of_log
    return np.asarray(scores, dtype=np.float32)


def sigmoid(numbers: Numbers) -> Numbers:
    """Without overflow.

    >>> sigmoid(np.array([-1e4, 0.0, 1e4])).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.asarray(0.5 * (1 + np.tanh(numbers / 2)))


def has_belief(settings: dict[str, Any]) -> bool:
    """Whether a sampler with these settings asks what the whole video is about."""
    return set(settings) == _BELIEF


def log_belief(settings: dict[str, Any], importance: Numbers, logits: Numbers, *, multi_label: bool) -> Numbers:
    """What the video is about, as far as all of its frames tell: log probabilities [B, C]."""
    slope, offset = settings["relevance"]
    relevance = sigmoid(slope * importance + offset)[..., None]  # [B, T, 1]
    shares = sigmoid(logits) if multi_label else np.exp(_log_softmax(logits))
    if multi_label:
        shares = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-12)
    evidence = np.log(np.maximum(1 - relevance + relevance * shares.shape[-1] * shares, _LEAST))  # [B, T, C]
    count = importance.shape[1]
    return _log_softmax(settings["belief"] * min(count, _MOST_WITNESSES) / count * evidence.sum(1))


def _saliency(logits: Numbers, multi_label: bool) -> Numbers:
    """How sure the class head is of any class, as log-odds."""
    highest = logits.max(-1)
    if multi_label:
        return np.asarray(highest)
    others = logits.copy()
    np.put_along_axis(others, logits.argmax(-1, keepdims=True), -np.inf, axis=-1)
    return np.asarray(highest - _logsumexp(others)[..., 0])


def _logsumexp(numbers: Numbers) -> Numbers:
    """Over the last dimension, which stays with length one."""
    highest = numbers.max(-1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(numbers - highest).sum(-1, keepdims=True)))


def _log_softmax(numbers: Numbers) -> Numbers:
    return np.asarray(numbers - _logsumexp(numbers))
