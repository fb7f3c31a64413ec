"""Turn the outputs of a sampler's heads into the score by which frames are ranked.

Without settings the score is the importance head alone, as in the paper. With a belief, a belief about the video's
class is formed from all frames first:

1. The importance head is trained to be the log-odds of the classifier's confidence in the true label, so
   sigmoid(slope · importance + offset) =: r_t is the probability that frame t shows the video's class.
2. A frame shows the class c with probability r_t, and anything otherwise. Its evidence for class c is then
   log(1 − r_t + r_t · C · q_t(c)), with q_t the class head; the softmax of its sum over frames is the belief b(c).
   Irrelevant frames have no influence, however confident the class head is about them.
3. The score is the expected log confidence of the classifier in the believed class: half the logarithm of the mean
   Σ b(c) q_t(c), which decides between the best frames, half the mean of the logarithm Σ b(c) log q_t(c), which orders
   the rest by how harmful they are; plus a fraction of the importance itself.

Frames of a real video resemble each other, so the evidence is limited to that of ten frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import check_float
from sosampler.errors import InvalidArgument
from sosampler.samplers.losses import saliency

SETTINGS = ("belief", "relevance", "importance")
SALIENCY = {"saliency": "max"}
_MAX_EVIDENCE_FRAMES = 10.0
_MIN_LIKELIHOOD = 1e-4  # no single frame rules a class out


class Scoring(nn.Module):
    """importance [B, T], class_logits [B, T, C] or None, mask [B, T] or None -> scores [B, T]. Has no parameters.

    Args:
        settings: {} for the importance alone; {"belief": strength of the evidence, "relevance": [slope, offset],
            "importance": its weight in the score}; or {"saliency": "max"}, the log-odds of the highest class
            probability (SCSampler).
        multi_label: whether classes are independent (sigmoid) or exclusive (softmax).
        num_classes: of the class head; None without one.
    """

    def __init__(
        self, settings: dict[str, Any] | None = None, *, multi_label: bool = False, num_classes: int | None = None
    ) -> None:
        super().__init__()
        self.settings = dict(settings or {})
        self.multi_label = multi_label
        if not self.settings:
            return
        if self.settings != SALIENCY and set(self.settings) != set(SETTINGS):
            raise InvalidArgument(
                f"scoring={self.settings} must be {{}} for the importance alone, {SALIENCY}, or all of: "
                f"{', '.join(SETTINGS)}"
            )
        if num_classes is None or num_classes < 2:
            raise InvalidArgument(
                f"scoring={self.settings} needs a class head with two classes or more, not num_classes={num_classes}; "
                "give num_classes, or scoring={}"
            )
        if self.settings == SALIENCY:
            return
        slope_and_offset = self.settings["relevance"]
        if not isinstance(slope_and_offset, (list, tuple)) or len(slope_and_offset) != 2:
            raise InvalidArgument(f"relevance={slope_and_offset!r} must be [slope, offset]")
        self.belief = check_float("belief", self.settings["belief"], above=0.0)
        self.slope = check_float("relevance[0]", slope_and_offset[0])
        self.offset = check_float("relevance[1]", slope_and_offset[1])
        self.importance = check_float("importance", self.settings["importance"], at_least=0.0)

    def forward(self, importance: Tensor, class_logits: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if not self.settings:
            return importance
        assert class_logits is not None, "a sampler that scores by classes has a class head"
        if self.settings == SALIENCY:
            return saliency(class_logits, multi_label=self.multi_label, log_odds=True)
        log_probs = F.logsigmoid(class_logits) if self.multi_label else class_logits.log_softmax(-1)
        log_belief = self.log_belief(importance, class_logits, mask)[:, None]  # [B, 1, C]
        log_of_mean = torch.logsumexp(log_belief + log_probs, dim=-1)
        mean_of_log = (log_belief.exp() * log_probs).sum(-1)
        return self.importance * importance + 0.5 * log_of_mean + 0.5 * mean_of_log

    def log_belief(self, importance: Tensor, class_logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the belief about the video's class from all of its frames: log probabilities [B, C]."""
        relevance = torch.sigmoid(self.slope * importance + self.offset)[..., None]  # [B, T, 1]
        probs = class_logits.sigmoid() if self.multi_label else class_logits.softmax(-1)
        if self.multi_label:
            probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-12)
        evidence = (1 - relevance + relevance * probs.shape[-1] * probs).clamp_min(_MIN_LIKELIHOOD).log()  # [B, T, C]
        real = torch.ones_like(importance) if mask is None else mask.to(importance.dtype)
        # Padding may hold any value, even NaN.
        evidence = torch.where(real[..., None] > 0, evidence, torch.zeros_like(evidence))
        count = real.sum(1, keepdim=True).clamp_min(1.0)  # [B, 1]
        strength = self.belief * count.clamp_max(_MAX_EVIDENCE_FRAMES) / count
        return (strength * evidence.sum(1)).log_softmax(-1)
