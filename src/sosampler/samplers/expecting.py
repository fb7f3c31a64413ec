"""What a sampler expects of the k best candidates, from what its network said: on torch or without it, the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler.policies.adaptive import Numbers, expected_by_belief, expected_by_confidence
from sosampler.samplers.light_scoring import has_belief, log_belief, sigmoid


def why_no_number(sampler: Any, name: str) -> str | None:
    """None for a sampler that knows what a frame is worth; else what it lacks to decide how many are needed."""
    if not hasattr(sampler, "look") or not hasattr(sampler, "config"):
        return (
            f"{name}: a {type(sampler).__name__} gives scores that only rank, so that num_frames='auto' has nothing to "
            "go by; give a number, or an SOSampler"
        )
    if not has_belief(sampler.config["scoring"]) and sampler.calibration is None:
        return (
            f"{name}: this sampler is not calibrated, so that num_frames='auto' has nothing to go by; give a number, "
            "or train it again, which calibrates it"
        )
    return None


def expected_of(sampler: Any, said: Any, counts: NDArray[np.int64] | None = None) -> Numbers:
    """[B, T]: at [:, k - 1] what is expected of the k best candidates; −inf where a video has fewer.

    Args:
        sampler: `SOSampler` or `OnnxSampler`, one of which `why_no_number` knows nothing.
        said: what its `look` gave for B videos with T candidates.
        counts: real candidates of each video [B]; the others stand at the end. None: all are real.
    """
    scores, importance, logits = (_numbers(part) for part in (said.scores, said.importance, said.class_logits))
    assert scores is not None, "whoever looks gives scores"
    if counts is None:
        return _of_whole(sampler, scores, importance, logits)
    expected = np.full(scores.shape, -np.inf)
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        parts = [None if part is None else part[rows, :count] for part in (scores, importance, logits)]
        expected[rows, :count] = _of_whole(sampler, *parts)  # type: ignore[arg-type]
    return expected


def _of_whole(sampler: Any, scores: Numbers, importance: Numbers | None, logits: Numbers | None) -> Numbers:
    settings, multi_label = sampler.config["scoring"], sampler.config["multi_label"]
    if has_belief(settings):
        assert importance is not None, "a belief is drawn from both heads"
        assert logits is not None, "a belief is drawn from both heads"
        belief = log_belief(settings, importance, logits, multi_label=multi_label)
        return expected_by_belief(scores, logits, belief, multi_label=multi_label)
    slope, offset = sampler.calibration
    return expected_by_confidence(scores, sigmoid(slope * scores + offset))


def _numbers(part: Any) -> Numbers | None:
    """float64, of a tensor on any device too."""
    if part is None:
        return None
    return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part, dtype=np.float64)
