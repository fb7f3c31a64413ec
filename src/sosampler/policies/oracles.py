"""Policies that know the teacher's outputs, and the labels but for "semi-optimal-max": bounds for all others.

`Batch.teacher` computes what they need; `sosampler.evaluation` provides it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices
from sosampler.policies.base import Batch, Policy, Scores


class SemiOptimal(Policy):
    """pi_s: scores are log confidences of single frames, so that close ones near 1 stay apart."""

    name = "semi-optimal"
    description = "the N frames whose own confidence in the labels is highest"
    needs = frozenset({"teacher", "labels"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("label confidence", batch.teacher.label_log_confidence)

    def unit_scores(self, batch: Batch) -> Scores:
        return np.exp(self.scores(batch))

    def features(self, batch: Batch) -> NDArray[Any]:
        """The features or logits that the teacher pools, or else its probabilities."""
        features: NDArray[Any] = batch.teacher.frame_features()
        return features


class SemiOptimalMax(SemiOptimal):
    name = "semi-optimal-max"
    description = "the N frames that are most confident in any class"
    needs = frozenset({"teacher"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("max confidence", batch.teacher.max_log_confidence)


class Optimal(Policy):
    """pi_o: by enumeration, certified search or beam search, whichever the teacher and T allow."""

    name = "optimal"
    description = "the N frames whose clip is most confident in the labels"
    needs = frozenset({"teacher", "labels"})

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        positions: Indices = batch.teacher.optimal(num_frames)
        return positions
