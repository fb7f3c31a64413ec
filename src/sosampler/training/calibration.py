"""From scores that only rank to confidences: sigmoid(a * score + b), fitted to what the classifier said."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_STEPS = 100
_RIDGE = 1e-6  # keeps a finite where scores part good frames from bad ones completely


def fit_calibration(scores: ArrayLike, confidences: ArrayLike) -> tuple[float, float]:
    """(a, b) with the least cross-entropy between confidences in 0..1 and sigmoid(a * score + b).

    Newton's method on scores of mean 0 and deviation 1, with steps halved where they would do harm. Scores that are
    all the same get a = 0.

    >>> scores = np.linspace(-3, 3, 50)
    >>> [round(number, 2) for number in fit_calibration(scores, 1 / (1 + np.exp(-(2 * scores - 1))))]
    [2.0, -1.0]
    """
    x, y = (np.asarray(values, dtype=np.float64).ravel() for values in (scores, confidences))
    mean, spread = x.mean(), x.std()
    inputs = np.stack([(x - mean) / (spread or 1.0), np.ones_like(x)], 1)  # [F, 2]
    weights = np.zeros(2)
    value = _cross_entropy(weights, inputs, y)
    for _ in range(_STEPS):
        said = _sigmoid(inputs @ weights)
        slope = inputs.T @ (said - y) / len(y) + _RIDGE * weights
        curve = (inputs * (said * (1 - said))[:, None]).T @ inputs / len(y) + _RIDGE * np.eye(2)
        step = np.linalg.solve(curve, slope)
        while (tried := _cross_entropy(weights - step, inputs, y)) > value and np.abs(step).max() > 1e-12:
            step = step / 2
        if tried >= value or np.abs(step).max() < 1e-10:
            break
        weights, value = weights - step, tried
    a = weights[0] / (spread or 1.0) if spread else 0.0
    return float(a), float(weights[1] - a * mean)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    found: np.ndarray = 0.5 * (1 + np.tanh(0.5 * values))
    return found


def _cross_entropy(weights: np.ndarray, inputs: np.ndarray, y: np.ndarray) -> float:
    logits = inputs @ weights
    return float((np.logaddexp(0, logits) - y * logits).mean() + 0.5 * _RIDGE * (weights**2).sum())
