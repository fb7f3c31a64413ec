"""OCSampler's way to teach a sampler: one step of REINFORCE for a whole set of frames.

After Lin et al., "OCSampler: Compressing Videos to One Clip with Single-step Sampling", CVPR 2022. The network is that
of `SOSampler`; only the loss differs. N frames are drawn without replacement with the softmax of the scores as weights,
the frozen classifier looks at the clip, and the set's log likelihood is pushed up or down by how much better the clip
did than a baseline clip. To use the sampler, the N best scores are taken.

Taken over: the network and its softmax over T, both rewards (`confidence` is the default for 2-D classifiers, `label`
that for 3-D ones), the uniform clip as baseline or a second draw.

Different, and why:
- The likelihood of a set is exact at any N (`set_log_prob`). The published code sums over N! orders up to N = 8. Beyond
  that it takes the likelihood of the drawn order (here "ordered"), or, for 3-D classifiers, of the eight frames of
  lowest probability alone, which is no likelihood.
- The weight of the entropy is the weight. The published schedule sets it to 0 at the first step, whatever is asked for;
  0 here does the same.
- Videos with several labels count by the geometric mean of their labels' probabilities, as everywhere in this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.samplers.losses import frame_targets
from sosampler.samplers.ranking import check_labels, real_candidates
from sosampler.samplers.recipe import REWARDS, OCSamplerSettings
from sosampler.samplers.set_likelihood import entropy, plackett_luce_log_prob, sample_without_replacement, set_log_prob

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SamplerOutput


# The published subset of ten candidates; for other numbers the middles of equal stretches.
_UNIFORM_6_OF_10 = (0, 1, 3, 5, 7, 9)

ClipProbs = Callable[[Tensor], Tensor]  # positions [B, N] in time order -> class probabilities of the clips [B, C]


class OCSamplerLoss(nn.Module):
    """−mean(advantage · log P(drawn set) + weight · entropy), whose gradient is minus that of the expected reward.

    The value itself says little; the parts tell how training goes: "reward" and "baseline" are the mean rewards of the
    drawn clips and the baseline's, "advantage" their difference, "policy" the first term and "entropy" the policy's
    entropy in nats. The classifier is asked twice for every video, without gradient.
    """

    def __init__(self, settings: OCSamplerSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or OCSamplerSettings()

    def forward(
        self,
        output: SamplerOutput,
        clip_probs: ClipProbs,
        labels: Tensor | None,  # [B, C]; not looked at by the reward "confidence"
        mask: Tensor | None = None,  # [B, T]
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        settings, scores = self.settings, output.scores
        drawn = sample_without_replacement(scores, settings.num_frames, generator, mask)
        with torch.no_grad():
            reward = self._reward(drawn, clip_probs, labels)
            baseline = self._reward(self._baseline(scores, mask, generator), clip_probs, labels)
        log_likelihood = set_log_prob if settings.likelihood == "set" else plackett_luce_log_prob
        advantage = reward - baseline
        policy = -(advantage * log_likelihood(scores, drawn, mask)).mean()
        spread = entropy(scores, mask).mean()
        parts = {
            "policy": policy,
            "entropy": spread,
            "reward": reward.mean(),
            "baseline": baseline.mean(),
            "advantage": advantage.mean(),
        }
        return policy - settings.entropy * spread, {name: part.detach() for name, part in parts.items()}

    def _reward(self, positions: Tensor, clip_probs: ClipProbs, labels: Tensor | None) -> Tensor:
        probs = clip_probs(positions.sort(dim=1).values)
        if probs.dim() != 2 or probs.shape[0] != positions.shape[0]:
            raise InvalidArgument(
                f"clip_probs gave the shape {list(probs.shape)} for {positions.shape[0]} clips; "
                "return class probabilities of shape [videos, classes]"
            )
        return clip_reward(probs, labels, self.settings.reward)

    def _baseline(self, scores: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        if self.settings.baseline == "sample":
            return sample_without_replacement(scores, self.settings.num_frames, generator, mask)
        real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
        return uniform_subset(real, self.settings.num_frames)


def clip_reward(probs: Tensor, labels: Tensor | None, kind: str) -> Tensor:
    """How well a clip did, from its class probabilities [B, C]; [B].

    "confidence": the highest probability, whether right or wrong.
    "label": the probability of the true label; if another class is higher, less by the probability of that.
    """
    probs = probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
    highest = probs.amax(dim=1)
    if one_of("reward", kind, REWARDS) == "confidence":
        return highest
    if labels is None:
        raise InvalidArgument("the reward 'label' needs labels; give them [videos, classes], or use 'confidence'")
    true = check_labels(labels, probs.shape[0], probs.shape[1])
    confidence = frame_targets(probs[:, None], true, "label")[:, 0]
    right = probs.masked_fill(~true, -torch.inf).amax(dim=1) >= highest
    return torch.where(right, confidence, confidence - highest)


def uniform_subset(mask: Tensor, num_frames: int) -> Tensor:
    """N positions [B, N] spread evenly over the real candidates of each video, in time order.

    The middle of each of N equal stretches; of ten candidates OCSampler's six.

    >>> uniform_subset(torch.ones(1, 10, dtype=torch.bool), 6).tolist()
    [[0, 1, 3, 5, 7, 9]]
    >>> uniform_subset(torch.ones(1, 12, dtype=torch.bool), 4).tolist()
    [[1, 4, 7, 10]]
    """
    mask = mask.bool()
    real_candidates(mask, mask.shape[0], mask.shape[1], num_frames)
    count = mask.sum(dim=1, keepdim=True)  # [B, 1]
    steps = 2 * torch.arange(num_frames, device=mask.device) + 1
    ranks = steps * count // (2 * num_frames)  # among the real candidates
    if num_frames == len(_UNIFORM_6_OF_10):
        published = torch.tensor(_UNIFORM_6_OF_10, device=mask.device)
        ranks = torch.where(count == 10, published, ranks)
    real_first = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return real_first.gather(1, ranks)
