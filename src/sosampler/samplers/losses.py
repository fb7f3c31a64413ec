"""What the frozen classifier thinks of each single frame, as a target for the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.samplers.ranking import check_labels
from sosampler.samplers.recipe import GUIDANCE, PREDICTIONS, TARGET_SPACES, TARGETS, SamplerRecipe

if TYPE_CHECKING:
    from sosampler.samplers.ocsampler import ClipProbs
    from sosampler.samplers.sosampler import SamplerOutput


LEAST_PROBABILITY = 1e-12  # below it a logarithm says nothing more


def frame_targets(
    frame_probs: Tensor,  # [B, T, C]
    labels: Tensor,  # [B, C], 1 or True for each true label; at least one a video
    kind: str = "label",
    space: str = "probability",
) -> Tensor:
    """How good each frame is on its own, [B, T].

    "label": the probability of the true label; of several, the geometric mean.
    "max": the highest probability of any class, right or wrong.
    In space "log" it is the logarithm of that, which tells bad frames from very bad ones.
    """
    one_of("kind", kind, TARGETS)
    one_of("space", space, TARGET_SPACES)
    probs = frame_probs.to(torch.promote_types(frame_probs.dtype, torch.float32))
    if kind == "max":
        confidence = probs.amax(dim=-1)
        return _log(confidence) if space == "log" else confidence
    shares = label_shares(labels, probs.dtype)[:, None, :]
    mean_log = (_log(probs) * shares).sum(dim=-1)
    if space == "log":
        return mean_log
    # A single label's probability is taken as it is: through log and exp, frames that are equal might come apart.
    single = (shares > 0).sum(dim=-1) == 1
    return torch.where(single, (probs * shares).sum(dim=-1), mean_log.exp())


def label_shares(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels as a distribution over classes, [B, C]: every true label of a video has the same share."""
    true = labels.to(dtype)
    return true / true.sum(dim=-1, keepdim=True)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(LEAST_PROBABILITY).log()


_LOWEST = torch.finfo(torch.float32).min  # takes no part in a softmax, and unlike -inf makes no NaN


def hinge_ranking(
    predicted: Tensor, target: Tensor, *, margin: float, weighted: bool, mask: Tensor | None = None
) -> Tensor:
    """Sum over pairs of w · max(0, margin − sign(Δtarget)·Δpredicted), mean over videos.

    This is Eq. 3 of the paper with its sign mended: as printed it would punish the right order. w is |Δtarget| if
    `weighted`, as in the authors' code, else 1; pairs with equal targets never count.
    """
    weight, ahead = _pairs(predicted, target, weighted, mask)
    return (weight * F.relu(margin - ahead)).sum(dim=(1, 2)).mean() / 2


def squared_error(predicted: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Squared difference, mean over the frames of a video, then over videos."""
    predicted, target = _real(predicted, mask), _real(target, mask)
    return _mean_over_frames((predicted - target) ** 2, mask).mean()


def pairwise_logistic(scores: Tensor, target: Tensor, *, weighted: bool = True, mask: Tensor | None = None) -> Tensor:
    """Weighted mean over all pairs of the batch of softplus(−sign(Δtarget)·Δscores), weight |Δtarget| or 1.

    The mean makes it independent of T, and a video whose frames are equally good has no say. 0 if all pairs are ties.
    It is a mean over the pairs at hand: of several processes each takes that of its own part of the batch.
    """
    weight, ahead = _pairs(scores, target, weighted, mask)
    total = weight.sum()
    return (weight * F.softplus(-ahead)).sum() / total.clamp_min(torch.finfo(total.dtype).tiny)


def listwise(scores: Tensor, target: Tensor, *, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of softmax(scores) against softmax(target / temperature), both over T; mean over videos."""
    wanted = softmax_over_frames(_raised(target) / temperature, mask)
    log_given = _fill(_raised(scores), mask, _LOWEST).log_softmax(dim=-1)
    return -(wanted * _real(log_given, mask)).sum(dim=-1).mean()


def label_guidance(
    class_logits: Tensor, labels: Tensor, *, multi_label: bool, mask: Tensor | None = None, average: str = "logits"
) -> Tensor:
    """How badly all frames of a video together name its labels, mean over videos.

    One label: cross-entropy, where several true labels share the target equally. `multi_label`: binary cross-entropy,
    mean over classes. `average` says what is averaged over the frames before that: the logits or the probabilities.
    """
    one_of("average", average, GUIDANCE[:2])
    logits = _real(class_logits, mask)
    if multi_label:
        return _multi_label_guidance(logits, labels.to(logits.dtype), mask, average)
    if average == "logits":
        return F.cross_entropy(_mean_over_frames(logits, mask), label_shares(labels, logits.dtype))
    log_mean = _log_mean_over_frames(logits.log_softmax(dim=-1), mask)
    return -(log_mean * label_shares(labels, logits.dtype)).sum(dim=-1).mean()


def frame_guidance(class_logits: Tensor, labels: Tensor, *, multi_label: bool, mask: Tensor | None = None) -> Tensor:
    """How badly each frame by itself names the labels of its video; every video has at least one.

    This is distillation from a teacher that is sure of the labels; several exclusive ones share the target equally.
    """
    dtype = torch.promote_types(class_logits.dtype, torch.float32)
    true = labels.bool()
    target = true.to(dtype) if multi_label else label_shares(true, dtype)
    return distillation(class_logits, target[:, None].expand(class_logits.shape), multi_label=multi_label, mask=mask)


def distillation(class_logits: Tensor, frame_probs: Tensor, *, multi_label: bool, mask: Tensor | None = None) -> Tensor:
    """Kullback-Leibler divergence of the sampler's class distribution from the classifier's, for each frame.

    Summed over classes (`multi_label`: of one yes-or-no distribution a class, mean over classes), mean over the frames
    of a video, then over videos.
    """
    logits, probs = _real(class_logits, mask), _real(frame_probs, mask)
    if multi_label:
        others = (1 - probs).clamp_min(0)  # rounding may have taken a probability above 1
        divergence = _divergence(probs, F.logsigmoid(logits)) + _divergence(others, F.logsigmoid(-logits))
        return _mean_over_frames(divergence.mean(dim=-1), mask).mean()
    return _mean_over_frames(_divergence(probs, logits.log_softmax(dim=-1)).sum(dim=-1), mask).mean()


def calibration(importance: Tensor, confidence: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy between confidences in 0..1 and sigmoid(importance), mean over frames, then over videos.

    It pins down the level of the importance, which a ranking leaves open.
    """
    given, wanted = _real(importance, mask), _real(confidence, mask)
    return _mean_over_frames(F.binary_cross_entropy_with_logits(given, wanted, reduction="none"), mask).mean()


def softmax_over_frames(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax over T; frames that are not real get 0."""
    return _real(_fill(_raised(values), mask, _LOWEST).softmax(dim=-1), mask)


class SamplerLoss(nn.Module):
    """The whole loss of a recipe: lam · rank + (1 − lam) · guidance + distill · distillation + calibrate · calibration.

    The first two are Eq. 4. Returns the total and its unweighted parts, without gradient; guidance and distillation
    are there with a class head, calibration with a weight. With loss "reinforce" the rank part is that of
    `OCSamplerLoss`, which asks `clip_probs` (positions [B, N] -> class probabilities of the clips [B, C]).
    """

    def __init__(self, recipe: SamplerRecipe, *, multi_label: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.multi_label = multi_label
        self.reinforce: nn.Module | None = None
        if recipe.loss == "reinforce":
            from sosampler.samplers.ocsampler import OCSamplerLoss
            from sosampler.samplers.recipe import OCSamplerSettings

            self.reinforce = OCSamplerLoss(OCSamplerSettings(**recipe.reinforce))

    def forward(
        self,
        output: SamplerOutput,
        frame_probs: Tensor,  # [B, T, C] of the frozen classifier
        labels: Tensor,  # [B, C]
        mask: Tensor | None = None,
        clip_probs: ClipProbs | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        recipe = self.recipe
        if self.reinforce is None:
            parts = {"rank": self._rank(output, frame_probs, labels, mask)}
        else:
            assert clip_probs is not None, "whoever trains by rewards says what the classifier makes of a clip"
            rank, parts = self.reinforce(output, clip_probs, labels, mask)
            parts = {"rank": rank, **parts}
        total = recipe.lam * parts["rank"]
        if recipe.calibrate:
            confidence = frame_targets(frame_probs, labels, recipe.target, "probability")
            parts["calibrate"] = calibration(output.importance, confidence, mask=mask)
            total = total + recipe.calibrate * parts["calibrate"]
        if recipe.class_head:
            logits = output.class_logits
            if logits is None:
                raise InvalidArgument(
                    f"the recipe {recipe.name!r} teaches class names, but the sampler has no class head; "
                    "give the sampler its classes, or set class_head to false and distill to 0"
                )
            parts["guidance"] = self._guidance(logits, labels, mask)
            parts["distill"] = distillation(logits, frame_probs, multi_label=self.multi_label, mask=mask)
            # Parts of weight 0 stay in the sum, so that every head has a gradient on every process.
            total = total + (1 - recipe.lam) * parts["guidance"] + recipe.distill * parts["distill"]
        return total, {name: part.detach() for name, part in parts.items()}

    def _guidance(self, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        if self.recipe.guidance == "frames":
            return frame_guidance(logits, labels, multi_label=self.multi_label, mask=mask)
        return label_guidance(logits, labels, multi_label=self.multi_label, mask=mask, average=self.recipe.guidance)

    def _rank(self, output: SamplerOutput, frame_probs: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        recipe = self.recipe
        target = frame_targets(frame_probs, labels, recipe.target, recipe.target_space)
        if recipe.tau is not None:
            target = softmax_over_frames(target / recipe.tau, mask)
        predicted = _predicted(output.importance, recipe.prediction, mask)
        if recipe.loss == "hinge":
            return hinge_ranking(predicted, target, margin=recipe.margin, weighted=recipe.weighted, mask=mask)
        if recipe.loss == "mse":
            return squared_error(predicted, target, mask=mask)
        if recipe.loss == "logistic":
            return pairwise_logistic(predicted, target, weighted=recipe.weighted, mask=mask)
        return listwise(predicted, target, temperature=recipe.temperature, mask=mask)


def _predicted(importance: Tensor, prediction: str, mask: Tensor | None) -> Tensor:
    """What is compared with the target. Always of the importance head: how it becomes a score is not learned."""
    one_of("prediction", prediction, PREDICTIONS)
    if prediction == "softmax":
        return softmax_over_frames(importance, mask)
    if prediction == "softmax-sigmoid":
        return softmax_over_frames(_real(importance, mask).sigmoid(), mask)
    return _real(importance, mask).sigmoid() if prediction == "sigmoid" else importance


def _pairs(predicted: Tensor, target: Tensor, weighted: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight of each ordered pair and by how much its better frame is ahead in `predicted`; both [B, T, T].

    Both are symmetric, so every pair of frames is there twice.
    """
    predicted, target = _real(predicted, mask), _real(target, mask)
    gap = target[:, :, None] - target[:, None, :]
    weight = gap.abs() if weighted else gap.sign().abs()
    if mask is not None:
        weight = weight * (mask[:, :, None] & mask[:, None, :])
    return weight, gap.sign() * (predicted[:, :, None] - predicted[:, None, :])


def _multi_label_guidance(logits: Tensor, labels: Tensor, mask: Tensor | None, average: str) -> Tensor:
    if average == "logits":
        return F.binary_cross_entropy_with_logits(_mean_over_frames(logits, mask), labels)
    log_yes = _log_mean_over_frames(F.logsigmoid(logits), mask)
    log_no = _log_mean_over_frames(F.logsigmoid(-logits), mask)
    return -(labels * log_yes + (1 - labels) * log_no).mean()


def _divergence(probs: Tensor, log_given: Tensor) -> Tensor:
    return torch.xlogy(probs, probs) - probs * log_given


def _mean_over_frames(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T] or [B, T, C] -> [B] or [B, C]."""
    total = _real(values, mask).sum(dim=1)
    return total / _num_frames(values, mask)


def _log_mean_over_frames(log_values: Tensor, mask: Tensor | None) -> Tensor:
    """Logarithm of the mean over frames of what the [B, T, C] are logarithms of; [B, C]."""
    return _fill(log_values, mask, _LOWEST).logsumexp(dim=1) - _num_frames(log_values, mask).log()


def _num_frames(values: Tensor, mask: Tensor | None) -> Tensor:
    """How many frames of each video are real, in a shape that divides [B] or [B, C]."""
    if mask is None:
        return torch.full((), values.shape[1], dtype=values.dtype, device=values.device)  # made there: nothing waits
    count = mask.sum(dim=1).clamp_min(1).to(values.dtype)
    return count if values.dim() == 2 else count[:, None]


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """At least float32, and 0 where there is no real frame."""
    return _fill(_raised(values), mask, 0.0)


def _fill(values: Tensor, mask: Tensor | None, number: float) -> Tensor:
    if mask is None:
        return values
    unreal = ~mask if values.dim() == 2 else ~mask[:, :, None]
    return values.masked_fill(unreal, number)


def _raised(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
