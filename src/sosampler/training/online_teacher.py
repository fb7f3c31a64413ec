"""The frozen classifier asked about the very crops that the sampler sees, instead of what the bank kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sosampler.classifiers.base import Classifier
from sosampler.training.distributed import sent
from sosampler.training.sampler_augment import Normaliser, cut, points_a_pixel
from sosampler.training.sampler_data import Batch

_FRAMES_AT_ONCE = 256


class OnlineTeacher:
    """Probabilities of crops.

    `sizes`: [V, 2] height and width of the pictures of all videos.
    """

    def __init__(self, classifier: Classifier, sizes: np.ndarray, device: torch.device) -> None:
        self.classifier = classifier.eval()
        self._size = classifier.preprocessing.size
        self._normalised = Normaliser(classifier.preprocessing, device)
        self._points = points_a_pixel(sizes, self._size)

    @torch.no_grad()
    def __call__(self, pictures: Tensor, batch: Batch) -> Tensor:
        """Probabilities [B, T, C] of each crop as a clip of one, at the classifier's own input size.

        Args:
            pictures: the frames of the batch on the device, uint8 [B * T, h, w, 3].
        """
        times = sent(batch.times.flatten(), pictures.device)[:, None]  # [B * T, 1]
        found = []
        for begin in range(0, len(pictures), _FRAMES_AT_ONCE):
            part = slice(begin, begin + _FRAMES_AT_ONCE)
            crops = cut(pictures[part], batch.draw.cuts.part(part), batch.sizes[part], self._size, self._points)
            clips = self._normalised(crops)[:, None]  # [F, 1, 3, h, w]
            found.append(self.classifier.probabilities(self.classifier.scores(clips, times[part])))
        return torch.cat(found).unflatten(0, batch.draw.positions.shape)
