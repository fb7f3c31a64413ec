"""How good a sampler is on videos it is not trained on: what the classifier makes of the frames it chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sosampler.classifiers.devices import autocast
from sosampler.classifiers.outputs import activate
from sosampler.data.bank import Bank
from sosampler.data.bank_teachers import Teacher
from sosampler.data.positions import uniform_positions
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.policies.semi_optimal import label_confidence, top_n
from sosampler.samplers import SOSampler
from sosampler.training.processes import sent
from sosampler.training.sampler_data import VideoTable, uniform
from sosampler.training.sampler_frames import FrameSource

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
