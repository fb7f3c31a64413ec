"""The dev split of a sampler's training: its score by the teacher's outputs, and the calibration of scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sosampler._util.arrays import Indices
from sosampler._util.hardware import autocast
from sosampler.bank.bank import Bank
from sosampler.bank.format import Shown
from sosampler.bank.outputs import Teacher
from sosampler.evaluation.result import SharedSources, mean_average_precision, top1, top1_hits
from sosampler.samplers.answer import Evidence
from sosampler.samplers.sosampler import Scoring, SOSampler, label_confidence, mean_over_candidates, top_n
from sosampler.training.answers import NUM_FRAMES, DevAnswers, standard_error, with_groups
from sosampler.training.distributed import send
from sosampler.training.rewards import ClipClassifier, clip_outputs
from sosampler.training.sampler_data import FrameSource, VideoTable
from sosampler.video.candidates import uniform_positions

RANKINGS = ("belief", "importance")  # by which frames are ranked
MAX_FRAMES = 6  # chosen of each video, or half of the candidates where that is less
_FRAMES_AT_A_TIME = 512
_RIDGE = 1e-6  # keeps the slope finite where scores separate good frames from bad ones completely


class DevOutputs(NamedTuple):
    """What a sampler gives for the videos of a dev set, float32 on the CPU."""

    scores: Tensor  # [V, T]
    features: Tensor  # [V, D], means over T
    class_logits: Tensor | None  # [V, T, C]


class DevSet:
    """Videos in a fixed view: T frames evenly spread, without random crops, with the teacher's outputs.

    The metric is top-1 (mAP for several labels a video) of the classifier on the chosen N frames where the teacher
    pools by the mean and its logits are in the bank, or where OCSampler has `clips` classified, then with the N that it
    draws; otherwise the mean confidence in the labels of the chosen frames, each by itself.
    """

    def __init__(
        self,
        bank: Bank,
        rows: Sequence[int],
        teacher: Teacher,
        source: FrameSource,
        *,
        num_candidates: int,
        clips: ClipClassifier | None = None,
        num_frames: int = 0,
    ) -> None:
        table = VideoTable(bank, rows, teacher)
        self.source, self.labels, self._rows, self._clips = source, table.labels, table.rows, clips
        self._positions = np.stack([uniform_positions(int(count), num_candidates) for count in table.counts])  # [V, T]
        self.num_candidates = num_candidates
        self.num_frames = max(1, min(MAX_FRAMES, num_candidates // 2))
        if clips is not None:
            self.num_frames = min(num_frames, num_candidates)
        self._probs = table.probs[table.frame_rows(np.arange(len(rows)), self._positions)]  # float16 [V, T, C]
        self.confidence = label_confidence(self._probs.float(), self.labels)  # [V, T]
        self._sigmoid = teacher.multi_label
        self._groups = [bank.rows[row].item.group_key for row in rows]
        made_of = [bank.shown.get(bank.rows[row].item.id, Shown()).sources for row in rows]
        known = [tuple(each) for each in made_of if each is not None]
        self._sources = known if len(known) == len(rows) else ()
        self._logits: Tensor | None = None
        self.metric = "confidence"
        if clips is not None:
            self.metric = "mAP" if bank.multi_label else "top1"
        elif teacher.pooling == "mean" and teacher.about["features"]:
            logits = [teacher[row].features[chosen] for row, chosen in zip(rows, self._positions, strict=True)]
            self._logits = torch.from_numpy(np.stack(logits)).float()  # [V, T, C]
            self.metric = "mAP" if bank.multi_label else "top1"

    def __len__(self) -> int:
        return len(self._positions)

    def scores(self, sampler: SOSampler, precision: str) -> Tensor:
        """Return the sampler's scores of all frames, float32 [V, T] on the CPU."""
        return self.outputs(sampler, precision).scores

    @torch.no_grad()
    def outputs(self, sampler: SOSampler, precision: str) -> DevOutputs:
        """Run the sampler on all videos."""
        sampler.eval()
        device, normalised = sampler.device, sampler.preprocessing.normalised
        scores, features, class_logits = [], [], []
        batch = min(len(self), max(1, _FRAMES_AT_A_TIME // self.num_candidates))
        for begin in range(0, len(self), batch):
            # The last batch is filled up with the last video: a GPU takes seconds to prepare for a new shape.
            videos = np.minimum(np.arange(begin, begin + batch), len(self) - 1)
            frames = send(self.source.frames(videos, self._positions[videos]), device)  # [B, T, h, w, 3]
            with autocast(device, precision):
                output = sampler(normalised(frames.movedim(-1, -3)))
            scores.append(output.scores.float())
            features.append(mean_over_candidates(output.features.float()))
            if output.class_logits is not None:
                class_logits.append(output.class_logits.float())
        parts = [torch.cat(part)[: len(self)].cpu() if part else None for part in (scores, features, class_logits)]
        return DevOutputs(*parts)

    def answers(
        self, sampler: SOSampler, outputs: DevOutputs, probe: NDArray[np.float64] | None = None
    ) -> DevAnswers | None:
        """Return what answers of these videos are made of; None where the classifier has no logits of single frames.

        `probe`: what the sampler's probe makes of the frames, [V, T, C + 1].
        """
        if self._logits is None:
            return None
        real = np.ones(self._positions.shape, dtype=bool)
        real[:, 1:] = np.diff(self._positions, axis=1) > 0  # a short video repeats frames, which count once
        class_logits = None if outputs.class_logits is None else outputs.class_logits.double().numpy()
        return DevAnswers(
            Evidence(sampler.confidences(outputs.scores).double().numpy(), class_logits, real),
            self._logits.double().numpy(),
            outputs.scores.double().numpy(),
            self.labels.bool().numpy(),
            self._groups,
            multi_label=self._sigmoid,
            metric=self.metric,
            sources=self._sources,
            probe=probe,
        )

    @cached_property
    def shared(self) -> SharedSources:
        return SharedSources(with_groups(self._sources, self._groups), self.labels.bool().numpy())

    def clip_probs(self, videos: Indices, chosen: Tensor) -> Tensor:
        """Return the classifier's probabilities [B, C] of videos [B] at chosen positions [B, N], on the CPU."""
        if self._clips is not None:
            return self._clips(
                self._rows[videos], np.take_along_axis(self._positions[videos], chosen.numpy(), axis=1)
            ).cpu()
        if self._logits is None:
            return clip_outputs(self._probs[videos], multi_label=self._sigmoid)(chosen)
        logits = self._logits[videos].take_along_dim(chosen[..., None], 1).mean(1)
        return logits.sigmoid() if self._sigmoid else logits.softmax(-1)

    def measure(self, chosen: Tensor) -> float:
        """Return the metric of chosen positions [V, N]."""
        if self.metric == "confidence":
            return float(self.confidence.gather(1, chosen).mean())
        return self.measure_probs(self.clip_probs(np.arange(len(self)), chosen))

    def values(self, chosen: Tensor) -> NDArray[np.float64]:
        """Return for each video [V] whether the classifier is right, or its confidence where that is the metric."""
        if self.metric == "confidence":
            return np.asarray(self.confidence.gather(1, chosen).double().mean(1))
        probs = self.clip_probs(np.arange(len(self)), chosen).numpy()
        return top1_hits(probs, self.labels.bool().numpy()).astype(np.float64)

    def measure_probs(self, probs: Tensor) -> float:
        """Return top-1 or mAP of clips with probabilities [V, C]."""
        probabilities, truth = probs.numpy(), self.labels.numpy()
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


def choose_ranking(
    sampler: SOSampler, dev: DevSet, outputs: DevOutputs, precision: str
) -> tuple[DevOutputs, dict[str, Any]]:
    """Rank by the importance alone, without the belief, where that is better on dev by more than chance.

    Chance is two standard errors, as for answers, of top-1 also where the metric is mAP. Returns the outputs by what is
    kept, given those with the belief, and what both measure; `ahead` is by how much the importance is, in top-1.
    """
    by_belief, sampler.scoring = sampler.scoring, Scoring()
    alone = dev.outputs(sampler, precision)
    numbers = [number for number in NUM_FRAMES if number <= dev.num_candidates]
    chosen = [[top_n(each.scores, number) for number in numbers] for each in (outputs, alone)]
    measured = [[dev.measure(frames) for frames in of_ranking] for of_ranking in chosen]
    with_belief, without = (np.mean([dev.values(frames) for frames in of_ranking], axis=0) for of_ranking in chosen)
    ahead, error = float((without - with_belief).mean()), standard_error(without - with_belief, dev.shared)
    kept = RANKINGS[1 if ahead > 2 * error else 0]
    if kept == RANKINGS[0]:
        sampler.scoring = by_belief
    facts = {"kept": kept, "num_frames": numbers, "metric": dev.metric, "ahead": ahead, "standard_error": error}
    return outputs if kept == RANKINGS[0] else alone, {**facts, **dict(zip(RANKINGS, measured, strict=True))}


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
