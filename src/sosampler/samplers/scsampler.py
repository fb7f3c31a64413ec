"""SCSampler's two ways to teach a sampler, in terms of this package.

After Korbar, Tran and Torresani, "SCSampler: Sampling Salient Clips from Video for Efficient Action Recognition", ICCV
2019. Both score every frame (there: every clip) by itself with a light network, and the N best go to the classifier:

- AC: the light network is a classifier of its own, trained on single frames with the label of their video; how sure it
  is of any class is the score (`ac_loss`, `saliency`). The heavy classifier takes no part in it.
- SAL-RANK: the network gives a score, and of two frames the one in whose true label the heavy classifier is more
  confident should be ahead by a margin (`sal_rank_loss`). This is SOSampler's ranking with the label's confidence as
  target, all pairs alike, and raw scores in place of a softmax over T.

Different: frames in place of clips; pictures alone, where the paper also has compressed-domain motion and sound; the
network of `SOSampler` (without temporal shift, since frames are scored by themselves) in place of a ResNet-18; all
pairs of a video's frames at once. The paper's margin is on a scale of its own: with raw scores it only sets their unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sosampler.policies.semi_optimal import check_labels
from sosampler.samplers.losses import frame_guidance, hinge_ranking
from sosampler.samplers.targets import frame_targets


def ac_loss(class_logits: Tensor, labels: Tensor, *, multi_label: bool = False, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of each single frame [B, T, C] with the labels of its video [B, C].

    Mean over the frames of a video, then over videos; `multi_label`: binary cross-entropy, mean over classes first.
    The target's own entropy is taken off, so that 0 is the best there is.
    """
    true = check_labels(labels, class_logits.shape[0], class_logits.shape[-1])
    return frame_guidance(class_logits, true, multi_label=multi_label, mask=mask)


def saliency(class_logits: Tensor, *, multi_label: bool = False, log_odds: bool = False) -> Tensor:
    """How sure the light classifier is of any class: class logits [B, T, C] -> the highest probability [B, T].

    As `log_odds` the order is the same, but frames do not become ties where float32 rounds their probabilities to 1.
    """
    logits = class_logits.to(torch.promote_types(class_logits.dtype, torch.float32))
    highest, best = logits.max(dim=-1)
    if not multi_label:  # log p − log(1 − p), where 1 − p is the share of the other classes
        highest = highest - logits.scatter(-1, best[..., None], -torch.inf).logsumexp(dim=-1)
    return highest if log_odds else highest.sigmoid()


def sal_rank_loss(
    scores: Tensor, frame_probs: Tensor, labels: Tensor, *, margin: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Sum over pairs of max(0, margin − (score of the better − score of the worse)), mean over videos.

    The better frame is that in whose true label the classifier (`frame_probs` [B, T, C]) is more confident. The recipe
    "scsampler-rank" has the same as its ranking loss.
    """
    return hinge_ranking(scores, frame_targets(frame_probs, labels, "label"), margin=margin, weighted=False, mask=mask)
