"""The dev split of a sampler's training: its score by the teacher's outputs, and the calibration of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sosampler._util.hardware import autocast
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.errors import InvalidArgument
from sosampler.evaluation.result import mean_average_precision, top1
from sosampler.samplers.recipe import SamplerRecipe, drawn_frames
from sosampler.samplers.sosampler import SOSampler, label_confidence, top_n
from sosampler.training.distributed import send
from sosampler.training.sampler_data import FrameSource, VideoTable
from sosampler.video.candidates import uniform_positions

MAX_FRAMES = 6  # chosen of each video, or half of the candidates where that is less
_FRAMES_AT_A_TIME = 512
_SMALLEST = 1e-7  # half precision has nothing smaller
_RIDGE = 1e-6  # keeps the slope finite where scores separate good frames from bad ones completely


class DevSet:
    """Videos in a fixed view: T frames evenly spread, without random crops, with the teacher's outputs.

    The metric is top-1 (mAP for several labels a video) of the classifier on the chosen N frames where the teacher
    pools by the mean and its logits are in the bank; otherwise the mean confidence in the labels of the chosen frames,
    each by itself.
    """

    def __init__(
        self, bank: Bank, rows: Sequence[int], teacher: Teacher, source: FrameSource, *, num_candidates: int
    ) -> None:
        table = VideoTable(bank, rows, teacher)
        self.source, self.labels = source, table.labels
        self._positions = np.stack([uniform_positions(int(count), num_candidates) for count in table.counts])  # [V, T]
        self.num_candidates = num_candidates
        self.num_frames = max(1, min(MAX_FRAMES, num_candidates // 2))
        probs = table.probs[table.frame_rows(np.arange(len(rows)), self._positions)].float()
        self.confidence = label_confidence(probs, self.labels)  # [V, T]
        self._sigmoid = teacher.multi_label
        self._logits: Tensor | None = None
        self.metric = "confidence"
        if teacher.pooling == "mean" and teacher.about["features"]:
            logits = [teacher[row].features[chosen] for row, chosen in zip(rows, self._positions, strict=True)]
            self._logits = torch.from_numpy(np.stack(logits)).float()  # [V, T, C]
            self.metric = "mAP" if bank.multi_label else "top1"

    def __len__(self) -> int:
        return len(self._positions)

    @torch.no_grad()
    def scores(self, sampler: SOSampler, precision: str) -> Tensor:
        """Return the sampler's scores of all frames, float32 [V, T] on the CPU."""
        sampler.eval()
        device, normalised = sampler.device, sampler.preprocessing.normalised
        scores = []
        batch = min(len(self), max(1, _FRAMES_AT_A_TIME // self.num_candidates))
        for begin in range(0, len(self), batch):
            # The last batch is filled up with the last video: a GPU takes seconds to prepare for a new shape.
            videos = np.minimum(np.arange(begin, begin + batch), len(self) - 1)
            frames = send(self.source.frames(videos, self._positions[videos]), device)  # [B, T, h, w, 3]
            with autocast(device, precision):
                output = sampler(normalised(frames.movedim(-1, -3)))
            scores.append(output.scores.float())
        return torch.cat(scores)[: len(self)].cpu()

    def measure(self, chosen: Tensor) -> float:
        """Return the metric of chosen positions [V, N]."""
        if self._logits is None:
            return float(self.confidence.gather(1, chosen).mean())
        clips = self._logits.take_along_dim(chosen[..., None], 1).mean(1)  # [V, C]
        probabilities = (clips.sigmoid() if self._sigmoid else clips.softmax(-1)).numpy()
        truth = self.labels.numpy()
        return mean_average_precision(probabilities, truth) if self.metric == "mAP" else top1(probabilities, truth)

    def of_scores(self, scores: Tensor) -> float:
        """Return the metric of the N frames with the highest scores [V, T]."""
        return self.measure(top_n(scores, self.num_frames))

    def of_uniform(self) -> float:
        """Return the metric of N frames evenly spread, which a sampler must beat."""
        chosen = torch.from_numpy(uniform_positions(self.num_candidates, self.num_frames))
        return self.measure(chosen.expand(len(self), -1))

    def of_semi_optimal(self) -> float:
        """Return the metric of the N frames with the highest confidence in the labels, which a sampler imitates."""
        return self.of_scores(self.confidence)


def fit_calibration(scores: ArrayLike, confidences: ArrayLike) -> tuple[float, float]:
    """Fit (a, b) so that sigmoid(a * score + b) has the lowest cross-entropy with confidences in 0..1 (Platt scaling).

    Scores that are all the same get a = 0.

    >>> scores = np.linspace(-3, 3, 50)
    >>> [round(number, 2) for number in fit_calibration(scores, 1 / (1 + np.exp(-(2 * scores - 1))))]
    [2.0, -1.0]
    """
    from sklearn.linear_model import LogisticRegression

    x, y = (np.asarray(values, dtype=np.float64).ravel() for values in (scores, confidences))
    mean, spread = x.mean(), x.std() or 1.0
    # scikit-learn takes hard labels: every frame counts as both, weighted by its confidence.
    inputs = np.concatenate([x, x])[:, None]
    labels = np.repeat([1, 0], len(x))
    model = LogisticRegression(C=1 / (_RIDGE * len(x)), solver="newton-cholesky", tol=1e-10)
    model.fit((inputs - mean) / spread, labels, sample_weight=np.concatenate([y, 1 - y]))
    a = float(model.coef_[0, 0] / spread) if x.std() else 0.0
    return a, float(model.intercept_[0] - a * mean)


def clip_outputs(frame_probs: Tensor, *, multi_label: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from positions [B, N] to the probabilities [B, C] of these clips, from frame_probs [B, T, C].

    The softmax of mean logits is that of mean log probabilities, since what a frame's logits have in common cancels.
    """
    probs = frame_probs.float().clamp(_SMALLEST, 1 - _SMALLEST)
    scores = probs.logit() if multi_label else probs.log()  # [B, T, C]

    def outputs(positions: Tensor) -> Tensor:
        chosen = scores.take_along_dim(positions[..., None], 1).mean(1)
        return chosen.sigmoid() if multi_label else torch.softmax(chosen, dim=-1)

    return outputs


def check_rewards(recipe: SamplerRecipe, pooling: str | None, name: str, num_candidates: int) -> None:
    """Refuse loss="reinforce" where this teacher or so few candidates give no rewards."""
    if recipe.loss != "reinforce":
        return
    if pooling != "mean":
        raise InvalidArgument(
            f"recipe {recipe.name!r} needs a classifier that averages the logits of frames, so that its outputs for "
            f"clips follow from the bank; {name} does not. Use another classifier or another recipe"
        )
    if num_candidates < (drawn := drawn_frames(recipe)):
        raise InvalidArgument(
            f"recipe {recipe.name!r} draws {drawn} frames, but the bank has {num_candidates}; "
            f"set reinforce={{num_frames: {max(1, num_candidates // 2)}}}, or prepare more frames a video"
        )
