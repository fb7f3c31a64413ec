"""Losses of a sampler: targets, ranking losses and their weighted sum. `mask` [B, T]: real candidates, None for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import one_of
from sosampler.classifiers.base import label_shares
from sosampler.errors import InvalidArgument
from sosampler.samplers.onnx_sampler import MIN_LIKELIHOOD, SamplerOutput
from sosampler.samplers.recipe import BELIEF, GUIDANCE, TARGET_SPACES, TARGETS, OCSamplerSettings, SamplerRecipe

ClipProbs = Callable[[Tensor], Tensor]  # indices [B, N] in time order -> class probabilities of the clips [B, C]

_MIN_PROBABILITY = 1e-12  # clamp before a logarithm
_LOWEST = torch.finfo(torch.float32).min  # has no weight in a softmax, and unlike -inf makes no NaN


def frame_targets(
    frame_probs: Tensor,  # [B, T, C]
    labels: Tensor,  # [B, C], 1 or True for each true label; at least one per video
    kind: str = "label",
    space: str = "probability",
) -> Tensor:
    """Return the classifier's confidence in each frame alone, [B, T].

    "label": the probability of the true label, or the geometric mean of several.
    "max": the highest probability of any class, right or wrong.
    The space "log" is the logarithm of that, which separates bad frames from very bad ones.
    """
    one_of("kind", kind, TARGETS)
    one_of("space", space, TARGET_SPACES)
    probs = at_least_float32(frame_probs)
    if kind == "max":
        confidence = probs.amax(dim=-1)
        return _log(confidence) if space == "log" else confidence
    shares = label_shares(labels, probs.dtype)[:, None, :]
    mean_log = (_log(probs) * shares).sum(dim=-1)
    if space == "log":
        return mean_log
    # A single label's probability is used directly: log and exp could break ties between equal frames.
    single = (shares > 0).sum(dim=-1) == 1
    return torch.where(single, (probs * shares).sum(dim=-1), mean_log.exp())


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(_MIN_PROBABILITY).log()


def hinge_ranking(
    predicted: Tensor, target: Tensor, *, margin: float, weighted: bool, mask: Tensor | None = None
) -> Tensor:
    """Sum w · max(0, margin − sign(Δtarget)·Δpredicted) over pairs, mean over videos.

    This is Eq. 3 of the paper with its sign corrected: as printed it would penalise the right order. w is |Δtarget| if
    `weighted`, as in the authors' code, else 1; pairs with equal targets do not count.
    """
    weight, ahead = _pairs(predicted, target, weighted, mask)
    return (weight * F.relu(margin - ahead)).sum(dim=(1, 2)).mean() / 2


def squared_error(predicted: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Average the squared difference over the frames of a video, then over videos."""
    predicted, target = _real(predicted, mask), _real(target, mask)
    return _mean_over_frames((predicted - target) ** 2, mask).mean()


def l2_norm(predicted: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the Euclidean norm of the difference over T, mean over videos: the regression loss as the paper prints it.

    Its gradient has length one however small the difference is, where that of `squared_error` vanishes; it is 0, not
    NaN, where both are equal.
    """
    return torch.linalg.vector_norm(_real(predicted, mask) - _real(target, mask), dim=1).mean()


def pairwise_logistic(scores: Tensor, target: Tensor, *, weighted: bool = True, mask: Tensor | None = None) -> Tensor:
    """Average softplus(−sign(Δtarget)·Δscores) over all pairs of the batch, with weight |Δtarget| or 1.

    The mean makes it independent of T, and a video whose frames are equally good has no weight. 0 if all pairs are
    ties. With several processes each averages over its own part of the batch.
    """
    weight, ahead = _pairs(scores, target, weighted, mask)
    total = weight.sum()
    return (weight * F.softplus(-ahead)).sum() / total.clamp_min(torch.finfo(total.dtype).tiny)


def listwise(scores: Tensor, target: Tensor, *, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of softmax(scores) and softmax(target / temperature) over T, mean over videos."""
    target_probs = softmax_over_frames(at_least_float32(target) / temperature, mask)
    log_probs = _fill(at_least_float32(scores), mask, _LOWEST).log_softmax(dim=-1)
    return -(target_probs * _real(log_probs, mask)).sum(dim=-1).mean()


def label_guidance(
    class_logits: Tensor, labels: Tensor, *, multi_label: bool, mask: Tensor | None = None, average: str = "logits"
) -> Tensor:
    """Return the classification loss of all frames of a video together, mean over videos.

    Cross-entropy, where several true labels share the target equally; `multi_label`: binary cross-entropy, mean over
    classes. `average`: what is averaged over frames before that, "logits" or "probabilities".
    """
    one_of("average", average, GUIDANCE[:2])
    logits = _real(class_logits, mask)
    if multi_label:
        true = labels.to(logits.dtype)
        if average == "logits":
            return F.binary_cross_entropy_with_logits(_mean_over_frames(logits, mask), true)
        log_yes = _log_mean_over_frames(F.logsigmoid(logits), mask)
        log_no = _log_mean_over_frames(F.logsigmoid(-logits), mask)
        return -(true * log_yes + (1 - true) * log_no).mean()
    if average == "logits":
        return F.cross_entropy(_mean_over_frames(logits, mask), label_shares(labels, logits.dtype))
    log_mean = _log_mean_over_frames(logits.log_softmax(dim=-1), mask)
    return -(log_mean * label_shares(labels, logits.dtype)).sum(dim=-1).mean()


def belief_guidance(
    importance: Tensor, class_logits: Tensor, labels: Tensor, *, multi_label: bool, mask: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of the belief about a video's class, mean over videos.

    As in `Scoring`, a frame shows the class with probability r = sigmoid(importance) and otherwise says nothing, so it
    is evidence log(1 - r + r p C) for a class to which the class head gives p. So both heads learn from the labels
    which frames show them, and a frame of something else need not be named by the label, as with `label_guidance`.
    The constants of `Scoring` (strength, slope, at most ten frames) are for the ranking only; here all are 1.
    """
    relevance, logits = _real(importance, mask).sigmoid(), _real(class_logits, mask)
    evidence = class_evidence(relevance, logits, multi_label=multi_label)
    return F.cross_entropy(_real(evidence, mask).sum(dim=1), label_shares(labels, evidence.dtype))


def class_evidence(relevance: Tensor, class_logits: Tensor, *, multi_label: bool) -> Tensor:
    """Return what each frame says about the video's class, log(1 - r + r p C) [B, T, C], from r [B, T] and logits of p.

    Of classes that do not exclude each other, p is made to sum to 1.
    """
    probs = class_logits.sigmoid() if multi_label else class_logits.softmax(dim=-1)
    if multi_label:
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(_MIN_PROBABILITY)
    relevance = relevance[..., None]
    return (1 - relevance + relevance * probs.shape[-1] * probs).clamp_min(MIN_LIKELIHOOD).log()


def frame_guidance(class_logits: Tensor, labels: Tensor, *, multi_label: bool, mask: Tensor | None = None) -> Tensor:
    """Return the loss of each frame alone: distillation from a teacher that is certain of the labels (at least one)."""
    logits, true = at_least_float32(class_logits), labels.bool()
    target = true.to(logits.dtype) if multi_label else label_shares(true, logits.dtype)
    return distillation(logits, target[:, None].expand(logits.shape), multi_label=multi_label, mask=mask)


def distillation(class_logits: Tensor, frame_probs: Tensor, *, multi_label: bool, mask: Tensor | None = None) -> Tensor:
    """Return the Kullback-Leibler divergence of the sampler's class distribution from the classifier's, per frame.

    Summed over classes (`multi_label`: of one binary distribution per class, mean over classes), mean over the frames
    of a video, then over videos.
    """
    logits, probs = _real(class_logits, mask), _real(frame_probs, mask)
    if multi_label:
        others = (1 - probs).clamp_min(0)  # rounding may leave a probability above 1
        yes = F.kl_div(F.logsigmoid(logits), probs, reduction="none")
        no = F.kl_div(F.logsigmoid(-logits), others, reduction="none")
        return _mean_over_frames((yes + no).mean(dim=-1), mask).mean()
    divergence = F.kl_div(logits.log_softmax(dim=-1), probs, reduction="none")
    return _mean_over_frames(divergence.sum(dim=-1), mask).mean()


def calibration(importance: Tensor, confidence: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of confidences and sigmoid(importance): the level, which a ranking leaves open."""
    logits, targets = _real(importance, mask), _real(confidence, mask)
    return _mean_over_frames(F.binary_cross_entropy_with_logits(logits, targets, reduction="none"), mask).mean()


def softmax_over_frames(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Apply softmax over T; padding gets 0."""
    return _real(_fill(at_least_float32(values), mask, _LOWEST).softmax(dim=-1), mask)


class SamplerLoss(nn.Module):
    """The loss of a recipe: lam · rank + (1 − lam) · guidance + distill · distillation + calibrate · calibration.

    The first two are Eq. 4. Returns the total and its unweighted parts, without gradient; guidance and distillation
    need a class head, calibration a weight above 0. With loss "reinforce" the rank part is `OCSamplerLoss`, which calls
    `clip_probs` (indices [B, N] -> class probabilities of the clips [B, C]).
    """

    def __init__(self, recipe: SamplerRecipe, *, multi_label: bool = False) -> None:
        super().__init__()
        self.recipe = recipe
        self.multi_label = multi_label
        self.reinforce: nn.Module | None = None
        if recipe.loss == "reinforce":
            from sosampler.samplers.ocsampler import OCSamplerLoss

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
            assert clip_probs is not None, "training by rewards needs the classifier's output for a clip"
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
                    f"the recipe {recipe.name!r} trains a class head, but the sampler has none; "
                    "give the sampler num_classes, or set class_head to false and distill to 0"
                )
            options: dict[str, Any] = {"multi_label": self.multi_label, "mask": mask}
            if recipe.guidance == "frames":
                parts["guidance"] = frame_guidance(logits, labels, **options)
            elif recipe.guidance == BELIEF:
                parts["guidance"] = belief_guidance(output.importance, logits, labels, **options)
            else:
                parts["guidance"] = label_guidance(logits, labels, average=recipe.guidance, **options)
            parts["distill"] = distillation(logits, frame_probs, **options)
            # Parts of weight 0 stay in the sum, so that every head has a gradient in every process.
            total = total + (1 - recipe.lam) * parts["guidance"] + recipe.distill * parts["distill"]
        return total, {name: part.detach() for name, part in parts.items()}

    def _rank(self, output: SamplerOutput, frame_probs: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        recipe = self.recipe
        target = frame_targets(frame_probs, labels, recipe.target, recipe.target_space)
        if recipe.tau is not None:
            target = softmax_over_frames(target / recipe.tau, mask)
        predicted = output.importance  # the scoring has nothing to learn
        if recipe.prediction.endswith("sigmoid"):
            predicted = _real(predicted, mask).sigmoid()
        if recipe.prediction.startswith("softmax"):
            predicted = softmax_over_frames(predicted, mask)
        if recipe.loss == "hinge":
            return hinge_ranking(predicted, target, margin=recipe.margin, weighted=recipe.weighted, mask=mask)
        if recipe.loss == "mse":
            return squared_error(predicted, target, mask=mask)
        if recipe.loss == "l2":
            return l2_norm(predicted, target, mask=mask)
        if recipe.loss == "logistic":
            return pairwise_logistic(predicted, target, weighted=recipe.weighted, mask=mask)
        return listwise(predicted, target, temperature=recipe.temperature, mask=mask)


def _pairs(predicted: Tensor, target: Tensor, weighted: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weight of each pair, and the lead of its better frame; [B, T, T], symmetric: pairs count twice."""
    predicted, target = _real(predicted, mask), _real(target, mask)
    gap = target[:, :, None] - target[:, None, :]
    weight = gap.abs() if weighted else gap.sign().abs()
    if mask is not None:
        weight = weight * (mask[:, :, None] & mask[:, None, :])
    return weight, gap.sign() * (predicted[:, :, None] - predicted[:, None, :])


def _mean_over_frames(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average [B, T] or [B, T, C] over real frames: [B] or [B, C]."""
    return _real(values, mask).sum(dim=1) / _num_frames(values, mask)


def _log_mean_over_frames(log_values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logarithm of the mean over frames of exp(log_values) [B, T, C]: [B, C]."""
    return _fill(log_values, mask, _LOWEST).logsumexp(dim=1) - _num_frames(log_values, mask).log()


def _num_frames(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of real frames of each video, in a shape that broadcasts to [B] or [B, C]."""
    if mask is None:
        return values.new_full((), values.shape[1])  # on the device: no synchronisation
    count = mask.sum(dim=1).clamp_min(1).to(values.dtype)
    return count if values.dim() == 2 else count[:, None]


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values in at least float32, with 0 for padding."""
    return _fill(at_least_float32(values), mask, 0.0)


def _fill(values: Tensor, mask: Tensor | None, number: float) -> Tensor:
    if mask is None:
        return values
    padding = ~mask if values.dim() == 2 else ~mask[:, :, None]
    return values.masked_fill(padding, number)


def at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def saliency(class_logits: Tensor, *, multi_label: bool = False, log_odds: bool = False) -> Tensor:
    """Return the highest class probability [B, T] of logits [B, T, C], or its `log_odds`, which do not become ties."""
    logits = at_least_float32(class_logits)
    highest, best = logits.max(dim=-1)
    if not multi_label:  # log p − log(1 − p), where 1 − p is the sum of the other classes
        highest = highest - logits.scatter(-1, best[..., None], -torch.inf).logsumexp(dim=-1)
    return highest if log_odds else highest.sigmoid()
