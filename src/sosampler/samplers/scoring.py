"""From what the sampler's heads say about each frame to the score by which frames are ranked.

Without settings the score is the importance head alone, as in the paper. With a belief the video is looked at as a
whole first:

1. The importance head is trained to be the log-odds of the confidence that the classifier will have in the true label,
   so sigmoid(slope · importance + offset) =: r_t says how far frame t shows what the video is about.
2. A frame is read as a draw from "shows the class c" with chance r_t, and from anything else otherwise. What it says
   for class c is then log(1 − r_t + r_t · C · q_t(c)), with q_t the class head; summed over frames this is the evidence
   for c, and its softmax the belief b(c). Frames that show nothing of the kind say nothing, however sure the class
   head is about them.
3. The score is what the classifier's log confidence in the believed class is expected to be: half the logarithm of the
   mean Σ b(c) q_t(c), which decides who is best, half the mean of the logarithm Σ b(c) log q_t(c), which tells the less
   harmful of the rest from the more harmful; plus a share of the importance itself.

Frames of a real video resemble each other, so evidence is not added up beyond that of ten frames.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import real_number
from sosampler.errors import InvalidArgument
from sosampler.samplers.losses import saliency

SETTINGS = ("belief", "relevance", "importance")
SALIENCY = {"saliency": "max"}
_MOST_WITNESSES = 10.0  # frames whose evidence adds up
_LEAST = 1e-4  # no frame rules a class out


class Scoring(nn.Module):
    """importance [B, T], class_logits [B, T, C] or None, mask [B, T] or None -> scores [B, T]. Has nothing to learn.

    Args:
        settings: {} for the importance alone; {"belief": strength of the evidence, "relevance": [slope, offset],
            "importance": its share in the score}; or {"saliency": "max"}, how sure the class head is of any class, as
            log-odds (SCSampler).
        multi_label: whether the class logits are independent (sigmoid) or exclude each other (softmax).
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
                f"scoring={self.settings} is not allowed; give {{}} for the importance alone, {SALIENCY}, or all of: "
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
            raise InvalidArgument(f"relevance={slope_and_offset!r} is not allowed; give [slope, offset]")
        self.belief = real_number("belief", self.settings["belief"], above=0.0)
        self.slope = real_number("relevance[0]", slope_and_offset[0])
        self.offset = real_number("relevance[1]", slope_and_offset[1])
        self.importance = real_number("importance", self.settings["importance"], at_least=0.0)

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
        """What the video is about, as far as all of its frames tell: log probabilities [B, C]."""
        relevance = torch.sigmoid(self.slope * importance + self.offset)[..., None]  # [B, T, 1]
        shares = class_logits.sigmoid() if self.multi_label else class_logits.softmax(-1)
        if self.multi_label:
            shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)
        evidence = (1 - relevance + relevance * shares.shape[-1] * shares).clamp_min(_LEAST).log()  # [B, T, C]
        real = torch.ones_like(importance) if mask is None else mask.to(importance.dtype)
        # Padding may hold anything, NaN too.
        evidence = torch.where(real[..., None] > 0, evidence, torch.zeros_like(evidence))
        count = real.sum(1, keepdim=True).clamp_min(1.0)  # [B, 1]
        strength = self.belief * count.clamp_max(_MOST_WITNESSES) / count
        return (strength * evidence.sum(1)).log_softmax(-1)
