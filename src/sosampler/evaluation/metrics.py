"""Accuracy of class probabilities: pure functions on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def top1(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """Share of rows whose most probable class [B, C] is one of their labels (multi-hot [B, C]).

    >>> top1([[0.9, 0.1], [0.2, 0.8]], [[1, 0], [1, 0]])
    0.5
    """
    scores, truth = np.asarray(probabilities), np.asarray(targets)
    return float(truth[np.arange(len(truth)), scores.argmax(1)].astype(bool).mean())


def mean_average_precision(probabilities: ArrayLike, targets: ArrayLike) -> float:
    """Mean over classes of the average precision of their scores, as scikit-learn defines it.

    Classes without a positive are left out. NaN where none is left.
    """
    from sklearn.metrics import average_precision_score

    scores, truth = np.asarray(probabilities), np.asarray(targets).astype(bool)
    present = truth.any(0)
    if not present.any():
        return float("nan")
    return float(average_precision_score(truth[:, present], scores[:, present], average="macro"))
