"""The frozen classifier asked about the very crops that the sampler sees, instead of what the bank kept."""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler.classifiers.base import Classifier
from sosampler.training.processes import sent
from sosampler.training.sampler_augment import cut
from sosampler.training.sampler_data import Batch

_FRAMES_AT_ONCE = 256


@torch.no_grad()
def ask_about_crops(classifier: Classifier, pictures: Tensor, batch: Batch) -> Tensor:
    """Probabilities [B, T, C] of each crop as a clip of one, at the classifier's own input size.

    Args:
        pictures: the frames of the batch on the device, uint8 [B * T, h, w, 3].
    """
    classifier.eval()
    preprocessing = classifier.preprocessing
    times = sent(batch.times.flatten(), pictures.device)[:, None]  # [B * T, 1]
    found = []
    for begin in range(0, len(pictures), _FRAMES_AT_ONCE):
        part = slice(begin, begin + _FRAMES_AT_ONCE)
        crops = cut(pictures[part], batch.draw.cuts.part(part), batch.sizes[part], preprocessing.size)
        clips = preprocessing.normalised(crops)[:, None]  # [F, 1, 3, h, w]
        found.append(classifier.probabilities(classifier.scores(clips, times[part])))
    return torch.cat(found).unflatten(0, batch.draw.positions.shape)
