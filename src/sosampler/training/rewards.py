"""Rewards of OCSampler: the frozen classifier's probabilities for drawn clips; and its budget, learned from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler._util.arrays import Indices
from sosampler._util.hardware import autocast
from sosampler.bank.annotate import views_of
from sosampler.bank.outputs import Teacher
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import read_chunks
from sosampler.samplers.recipe import SamplerRecipe, drawn_frames
from sosampler.samplers.sosampler import top_n
from sosampler.training.distributed import send

_SMALLEST = 1e-7  # half precision has nothing smaller
_MAX_NUMBERS = 1 << 24  # of features that are pooled at a time (64 MiB of float32)
_MAX_FRAMES = 256  # that a classifier gets at a time
_RIDGE = 1e-2  # of the budget's weights, per video: features are many, videos may be few
_NEVER = -30.0  # logit of a number of frames that no video needed


def clip_outputs(frame_probs: Tensor, *, multi_label: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from positions [B, N] to the probabilities [B, C] of these clips, from frame_probs [B, T, C].

    For classifiers that average logits. The softmax of mean logits is that of mean log probabilities, since what a
    frame's logits have in common cancels.
    """
    probs = frame_probs.float().clamp(_SMALLEST, 1 - _SMALLEST)
    scores = probs.logit() if multi_label else probs.log()  # [B, T, C]

    def outputs(positions: Tensor) -> Tensor:
        chosen = scores.take_along_dim(positions[..., None], 1).mean(1)
        return chosen.sigmoid() if multi_label else torch.softmax(chosen, dim=-1)

    return outputs


class ClipClassifier:
    """A frozen classifier that does not average logits, for clips of stored frames.

    A pooled one joins the features in the bank by its own pool; any other is run on the frames, which are decoded for
    it, in the view of `evaluate`. Without gradient, in evaluation mode, in bounded memory.
    """

    def __init__(self, teacher: Teacher, classifier: Any, device: torch.device, precision: str) -> None:
        self.teacher, self.classifier, self.device, self.precision = teacher, classifier, device, precision
        self.pooled = bool(teacher.about["features"]) and hasattr(classifier, "pool")

    @torch.no_grad()
    def __call__(self, rows: Indices, stored: Indices) -> Tensor:
        """Return probabilities float32 [B, C] of the frames `stored` [B, N], in time order, of the bank's rows [B]."""
        return self._pool(rows, stored) if self.pooled else self._classify(rows, stored)

    def _pool(self, rows: Indices, stored: Indices) -> Tensor:
        size = max(1, _MAX_NUMBERS // (stored.shape[1] * int(self.teacher.about["features"]["width"])))
        parts = []
        for begin in range(0, len(rows), size):
            pairs = zip(rows[begin : begin + size].tolist(), stored[begin : begin + size], strict=True)
            features = np.stack([self.teacher[row].features[frames] for row, frames in pairs])  # [b, N, D]
            parts.append(self.classifier.pool(send(torch.from_numpy(features), self.device).float()))
        return torch.cat(parts).to(self.device).float()

    def _classify(self, rows: Indices, stored: Indices) -> Tensor:
        wanted = [np.unique(frames) for frames in stored]
        order, parts = [], []  # grouped by the size of frames
        for chunk in read_chunks(self.teacher.bank, rows.tolist(), wanted):
            for group in chunk.groups(chunk.indices.tolist(), stored.shape[1], _MAX_FRAMES):
                videos = chunk.indices[group]
                frames, times, _ = chunk.stacked(videos.tolist(), list(stored[videos]))
                clips = torch.from_numpy(frames).permute(0, 1, 4, 2, 3)  # [b, N, 3, H, W]
                with autocast(self.device, self.precision):
                    views = [
                        self.classifier.clip_probs(view, torch.from_numpy(times))
                        for view in views_of(clips, int(self.teacher.about["views"]))
                    ]
                order.append(videos)
                parts.append(torch.stack(views).mean(0).to(self.device).float())
        return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(order))).to(self.device)]


def check_classifier(recipe: SamplerRecipe, teacher: Teacher, classifier: Any, given: Any) -> None:
    """Check, for loss="reinforce", that there is what gives rewards; `given` is for the message."""
    if recipe.loss != "reinforce" or teacher.pooling == "mean":
        return
    if classifier is None:
        how = "sees the frames of a clip together"
        if teacher.pooling is not None:
            how = f"joins frames by its own {teacher.pooling!r} pool"
        named = "no classifier is given" if given is None else f"classifier={str(given)!r} only names its outputs"
        raise InvalidArgument(
            f"recipe {recipe.name!r} needs the outputs of {teacher.about['name']} for clips, which {how}, but {named}; "
            "give the classifier itself or its saved folder (--classifier FOLDER)"
        )
    if hasattr(classifier, "length"):  # how many frames it takes
        classifier.length.fitted(drawn_frames(recipe), classifier.name)


def check_candidates(recipe: SamplerRecipe, num_candidates: int) -> None:
    """Refuse loss="reinforce" where the bank has fewer candidates than it draws."""
    if num_candidates < (drawn := drawn_frames(recipe)):
        raise InvalidArgument(
            f"recipe {recipe.name!r} draws {drawn} frames, but the bank has {num_candidates}; "
            f"set reinforce={{num_frames: {max(1, num_candidates // 2)}}}, or prepare more frames a video"
        )


# ---- the budget: how many frames a video needs
#
# OCSampler's paper describes a module that predicts how many frames a video needs, supervised toward the fewest that
# give a confident and correct answer; its code has none. The form here is ours: one linear layer on the mean of the
# frozen sampler's features over T, with a softmax over 1..N.


def budget_targets(
    scores: Tensor,  # [V, T], of the trained sampler
    labels: Tensor,  # [V, C]
    clip_probs: Callable[[Indices, Tensor], Tensor],  # videos [B], positions [B, n] -> probabilities [B, C]
    num_frames: int,
    confidence: float,
) -> Tensor:
    """Return the fewest of the best frames with which the classifier is right and so confident, else N; int64 [V].

    Clips are classified only until one is enough.
    """
    targets = torch.full((len(scores),), num_frames)
    left = torch.arange(len(scores))
    for count in range(1, num_frames):
        if not len(left):
            break
        probs = clip_probs(left.numpy(), top_n(scores[left], count)).cpu()
        highest, best = probs.max(dim=1)
        right = labels[left].gather(1, best[:, None])[:, 0] > 0
        enough = right & (highest >= confidence)
        targets[left[enough]] = count
        left = left[~enough]
    return targets


def fit_budget(features: Tensor, targets: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """Fit a linear layer, weight [N, D] and bias [N], from features [V, D] to numbers of frames 1..N [V].

    Multinomial logistic regression: it has one solution, so that nothing depends on a rate or a seed.
    """
    from sklearn.linear_model import LogisticRegression

    x, y = features.double().numpy(), targets.numpy() - 1
    mean, spread = x.mean(0), x.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    weight, bias = np.zeros((num_frames, x.shape[1])), np.full(num_frames, _NEVER)
    numbers = np.unique(y)
    bias[numbers] = 0.0
    if len(numbers) > 1:
        model = LogisticRegression(C=1 / (_RIDGE * len(x)), max_iter=1000, tol=1e-8)
        model.fit((x - mean) / spread, y)
        # Of two numbers scikit-learn fits the log-odds of the second.
        rows = numbers[1:] if len(numbers) == 2 else numbers
        weight[rows] = model.coef_ / spread
        bias[rows] = model.intercept_ - weight[rows] @ mean
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
