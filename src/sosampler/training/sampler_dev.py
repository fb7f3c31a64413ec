"""From scores that only rank to confidences: sigmoid(a * score + b), fitted to what the classifier said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sosampler._util.devices import autocast
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.classifiers.outputs import activate
from sosampler.errors import InvalidArgument
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.samplers.ranking import label_confidence, top_n
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.distributed import sent
from sosampler.training.sampler_data import FrameSource, VideoTable, uniform
from sosampler.video.candidates import uniform_positions

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


_LEAST = 1e-7  # half precision keeps nothing smaller


def clip_answers(frame_probs: Tensor, *, multi_label: bool) -> Callable[[Tensor], Tensor]:
    """frame_probs [B, T, C] -> a function from positions [B, N] to the probabilities [B, C] of these clips.

    The softmax of mean logits is that of mean log probabilities, since what a frame's logits have in common cancels.
    """
    probs = frame_probs.float().clamp(_LEAST, 1 - _LEAST)
    scores = probs.logit() if multi_label else probs.log()  # [B, T, C]

    def answers(positions: Tensor) -> Tensor:
        chosen = scores.gather(1, positions[..., None].expand(-1, -1, scores.shape[2])).mean(1)
        return chosen.sigmoid() if multi_label else torch.softmax(chosen, dim=-1)

    return answers


def check_rewards(recipe: SamplerRecipe, pooling: str | None, name: str, num_candidates: int, wanted: int) -> None:
    """Whether loss="reinforce" can be trained from this teacher and with so few candidates."""
    if recipe.loss != "reinforce":
        return
    if pooling != "mean":
        raise InvalidArgument(
            f"recipe {recipe.name!r} needs a classifier that averages the logits of frames, so that its answers about "
            f"clips follow from the bank; {name} does not. Take another classifier, or another recipe"
        )
    if num_candidates < wanted:
        raise InvalidArgument(
            f"recipe {recipe.name!r} draws {wanted} frames, but the bank offers {num_candidates}; "
            f"set reinforce={{num_frames: {max(1, num_candidates // 2)}}}, or prepare more frames a video"
        )


MOST_FRAMES = 6  # chosen of each video, or half of the candidates where that is less
_FRAMES_AT_ONCE = 512


class EvaluationSet:
    """Videos in their fixed view: T frames evenly spread, uncut, with what the teacher said about them.

    The measure is top-1 (mAP for several labels a video) of the classifier on the chosen N frames where the teacher
    pools by the mean and its logits were kept; otherwise the mean confidence in the labels of the chosen frames, each
    by itself.
    """

    def __init__(
        self, bank: Bank, rows: Sequence[int], teacher: Teacher, source: FrameSource, *, num_candidates: int
    ) -> None:
        table = VideoTable(bank, rows, teacher)
        self.source, self.labels = source, table.labels
        self._videos = np.arange(len(table))
        self._positions = uniform(table.counts, num_candidates)  # [V, T]
        self.num_candidates = num_candidates
        self.num_frames = max(1, min(MOST_FRAMES, num_candidates // 2))
        probs = table.probs(self._videos, self._positions).float()
        self.confidence = label_confidence(probs, self.labels)  # [V, T]
        self._multi_label = bank.multi_label
        self._activation = "sigmoid" if teacher.about.get("multi_label", bank.multi_label) else "softmax"
        self._logits: Tensor | None = None
        if teacher.pooling == "mean" and teacher.about["features"]:
            kept = [teacher[row].features[places] for row, places in zip(rows, self._positions, strict=True)]
            self._logits = torch.from_numpy(np.stack(kept)).float()  # [V, T, C]

    def __len__(self) -> int:
        return len(self._videos)

    @property
    def metric(self) -> str:
        if self._logits is None:
            return "confidence"
        return "mAP" if self._multi_label else "top1"

    @torch.no_grad()
    def scores(self, sampler: SOSampler, precision: str) -> Tensor:
        """What the sampler says of all frames, float32 [V, T] on the CPU."""
        sampler.eval()
        device, normalised = sampler.device, sampler.preprocessing.normalised
        found = []
        at_once = min(len(self), max(1, _FRAMES_AT_ONCE // self.num_candidates))
        for begin in range(0, len(self), at_once):
            # The last batch is filled up with the last video: a GPU takes seconds to get ready for a new shape.
            videos = np.minimum(np.arange(begin, begin + at_once), len(self) - 1)
            frames = sent(self.source.frames(videos, self._positions[videos]), device)  # [B, T, h, w, 3]
            with autocast(device, precision):
                said = sampler(normalised(frames.movedim(-1, -3)))
            found.append(said.scores.float())
        return torch.cat(found)[: len(self)].cpu()

    def measure(self, chosen: Tensor) -> float:
        """The measure of chosen positions [V, N]."""
        if self._logits is None:
            return float(self.confidence.gather(1, chosen).mean())
        clips = self._logits.gather(1, chosen[..., None].expand(-1, -1, self._logits.shape[2])).mean(1)  # [V, C]
        probabilities, truth = activate(clips, self._activation).numpy(), self.labels.numpy()
        return mean_average_precision(probabilities, truth) if self._multi_label else top1(probabilities, truth)

    def of_scores(self, scores: Tensor) -> float:
        """The measure of the N frames with the highest scores [V, T]."""
        return self.measure(top_n(scores, self.num_frames))

    def of_uniform(self) -> float:
        """The measure of N frames evenly spread: what a sampler must beat."""
        places = torch.from_numpy(uniform_positions(self.num_candidates, self.num_frames))
        return self.measure(places.expand(len(self), -1))

    def of_semi_optimal(self) -> float:
        """The measure of the N frames with the highest confidence in the labels: what a sampler learns to do."""
        return self.of_scores(self.confidence)
