"""Targets and losses of the sampler against plain loops, closed forms and torch's own losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sosampler.errors import InvalidArgument
from sosampler.samplers.losses import (
    SamplerLoss,
    belief_guidance,
    distillation,
    frame_targets,
    hinge_ranking,
    l2_norm,
    label_guidance,
    listwise,
    pairwise_logistic,
    softmax_over_frames,
    squared_error,
)
from sosampler.samplers.recipe import list_recipes, read_recipe
from sosampler.samplers.sosampler import Scoring

Loss = Callable[..., Tensor]

# Each takes predicted [B, T], target [B, T] and mask.
RANKING: dict[str, Loss] = {
    "hinge": lambda p, t, mask=None: hinge_ranking(p, t, margin=0.1, weighted=False, mask=mask),
    "hinge weighted": lambda p, t, mask=None: hinge_ranking(p, t, margin=0.1, weighted=True, mask=mask),
    "mse": squared_error,
    "l2": l2_norm,
    "logistic": lambda p, t, mask=None: pairwise_logistic(p, t, weighted=False, mask=mask),
    "logistic weighted": pairwise_logistic,
    "listwise": lambda p, t, mask=None: listwise(p, t, temperature=0.1, mask=mask),
}
# Each takes class logits [B, T, C], what the classifier says [B, T, C], labels [B, C] and mask.
CLASSES: dict[str, Loss] = {
    "guidance by logits": lambda x, p, y, m=None: label_guidance(x, y, multi_label=False, mask=m),
    "guidance by probabilities": lambda x, p, y, m=None: label_guidance(
        x, y, multi_label=False, mask=m, average="probabilities"
    ),
    "guidance by belief": lambda x, p, y, m=None: belief_guidance(x[..., 0], x, y, multi_label=False, mask=m),
    "multi-label guidance by belief": lambda x, p, y, m=None: belief_guidance(
        x[..., 0], x, y, multi_label=True, mask=m
    ),
    "distillation": lambda x, p, y, m=None: distillation(x, p, multi_label=False, mask=m),
    "multi-label guidance by logits": lambda x, p, y, m=None: label_guidance(x, y, multi_label=True, mask=m),
    "multi-label guidance by probabilities": lambda x, p, y, m=None: label_guidance(
        x, y, multi_label=True, mask=m, average="probabilities"
    ),
    "multi-label distillation": lambda x, p, y, m=None: distillation(x, p, multi_label=True, mask=m),
}
every_ranking_loss = pytest.mark.parametrize("loss", RANKING.values(), ids=RANKING)
every_class_loss = pytest.mark.parametrize("loss", CLASSES.values(), ids=CLASSES)


class Output(NamedTuple):
    """What a sampler gives, without the sampler."""

    scores: Tensor
    importance: Tensor
    class_logits: Tensor | None = None


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def logits_probs_labels(batch: int, frames: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    logits = 4 * random(batch, frames, classes, seed=seed) - 2
    probs = (5 * random(batch, frames, classes, seed=seed + 1)).softmax(dim=-1)
    labels = random(batch, classes, seed=seed + 2) < 0.3
    labels[:, 0] |= ~labels.any(dim=1)
    return logits, probs, labels


def padded(values: Tensor, extra: int = 3) -> Tensor:
    """The same with frames at the end that must not count, made of NaN to be sure."""
    return torch.cat([values, torch.full_like(values[:, :1], math.nan).repeat_interleave(extra, 1)], dim=1)


class TestTargets:
    def test_the_label_is_its_probability(self) -> None:
        probs = random(3, 4, 5).softmax(dim=-1)
        targets = frame_targets(probs, F.one_hot(torch.tensor([2, 0, 4]), 5))
        assert torch.equal(targets, torch.stack([probs[0, :, 2], probs[1, :, 0], probs[2, :, 4]]))

    def test_several_labels_are_a_geometric_mean(self) -> None:
        probs = torch.tensor([[[0.9, 0.4, 0.1], [0.5, 0.5, 0.9]]])
        targets = frame_targets(probs, torch.tensor([[True, True, False]]))
        torch.testing.assert_close(targets, torch.tensor([[math.sqrt(0.36), 0.5]]))

    def test_max_takes_any_class(self) -> None:
        probs = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])
        assert torch.equal(frame_targets(probs, torch.tensor([[0, 1]]), "max"), torch.tensor([[0.9, 0.7]]))

    @pytest.mark.parametrize("kind", ["label", "max"])
    def test_log_is_the_logarithm_and_never_infinite(self, kind: str) -> None:
        _, probs, labels = logits_probs_labels(2, 3, 4)
        log = frame_targets(probs, labels, kind, "log")
        torch.testing.assert_close(log.exp(), frame_targets(probs, labels, kind))
        assert frame_targets(torch.zeros(1, 2, 4), labels[:1], kind, "log").isfinite().all()

    def test_equal_frames_stay_equal(self) -> None:
        probs = random(1, 1, 3, dtype=torch.float32).expand(1, 67, 3)  # more frames than a vector register holds
        assert frame_targets(probs, torch.tensor([[1, 0, 0]])).unique().numel() == 1

    @pytest.mark.parametrize(("kind", "space"), [("labels", "log"), ("max", "odds")])
    def test_unknown_options(self, kind: str, space: str) -> None:
        with pytest.raises(InvalidArgument, match="choose one of"):
            frame_targets(torch.ones(1, 2, 3), torch.ones(1, 3), kind, space)


class TestEveryRankingLoss:
    @every_ranking_loss
    def test_the_right_order_costs_less(self, loss: Loss) -> None:
        target = random(4, 6)
        right = loss(target, target)
        assert right < loss(-target, target)
        assert right < loss(target.roll(1, dims=1), target)

    @every_ranking_loss
    def test_a_gradient_step_improves_the_order(self, loss: Loss) -> None:
        target = torch.tensor([[0.1, 0.5, 0.9]])
        predicted = torch.zeros(1, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(loss(predicted, target), predicted)
        assert slope[0, 2] < slope[0, 0]

    @every_ranking_loss
    def test_gradient(self, loss: Loss) -> None:
        predicted, target = random(2, 5, seed=1).requires_grad_(), random(2, 5, seed=2)
        mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
        assert torch.autograd.gradcheck(lambda p: loss(p, target), predicted)
        assert torch.autograd.gradcheck(lambda p: loss(p, target, mask=mask), predicted)

    @every_ranking_loss
    def test_the_order_of_frames_does_not_matter(self, loss: Loss) -> None:
        predicted, target, order = random(3, 7, seed=1), random(3, 7, seed=2), torch.randperm(7)
        torch.testing.assert_close(loss(predicted[:, order], target[:, order]), loss(predicted, target))

    @every_ranking_loss
    def test_masked_frames_do_not_count(self, loss: Loss) -> None:
        predicted, target = random(3, 5, seed=1), random(3, 5, seed=2)
        given = padded(predicted).requires_grad_()
        mask = torch.arange(8).expand(3, 8) < 5
        value = loss(given, padded(target), mask=mask)
        torch.testing.assert_close(value, loss(predicted, target))
        (slope,) = torch.autograd.grad(value, given)
        assert slope[:, :5].ne(0).any()
        assert slope[:, 5:].eq(0).all()

    @pytest.mark.parametrize("name", ["hinge", "hinge weighted", "mse", "l2", "listwise"])
    def test_videos_of_different_lengths(self, name: str) -> None:
        """These are means over videos; the logistic is one over pairs, see its double loop."""
        loss = RANKING[name]
        predicted, target = random(2, 6, seed=1), random(2, 6, seed=2)
        mask = torch.arange(6) < torch.tensor([[6], [4]])
        alone = (loss(predicted[:1], target[:1]) + loss(predicted[1:, :4], target[1:, :4])) / 2
        torch.testing.assert_close(loss(predicted, target, mask=mask), alone)

    @every_ranking_loss
    def test_half_precision_is_raised(self, loss: Loss) -> None:
        predicted, target = random(2, 5, seed=1).half(), random(2, 5, seed=2).half()
        value = loss(predicted, target)
        assert value.dtype == torch.float32
        assert value.shape == ()
        torch.testing.assert_close(value, loss(predicted.float(), target.float()))

    @every_ranking_loss
    def test_one_frame(self, loss: Loss) -> None:
        predicted = torch.ones(2, 1, requires_grad=True)
        value = loss(predicted, torch.ones(2, 1))
        value.backward()
        assert value == 0
        assert predicted.grad.eq(0).all()


class TestPairs:
    @pytest.mark.parametrize("weighted", [True, False])
    @pytest.mark.parametrize("margin", [0.0, 0.01, 0.3, 5.0])
    def test_hinge_is_a_double_loop(self, weighted: bool, margin: float) -> None:
        predicted, target = random(3, 6, seed=1), random(3, 6, seed=2)
        target[0, 3] = target[0, 1]
        expected = 0.0
        for p_hat, p in zip(predicted.tolist(), target.tolist(), strict=True):
            for i in range(6):
                for j in range(6):
                    if p[i] > p[j]:  # the better frame should be ahead by the margin
                        expected += (p[i] - p[j] if weighted else 1) * max(0.0, margin - (p_hat[i] - p_hat[j])) / 3
        assert hinge_ranking(predicted, target, margin=margin, weighted=weighted).item() == pytest.approx(expected)

    @pytest.mark.parametrize("weighted", [True, False])
    def test_logistic_is_a_double_loop_over_the_whole_batch(self, weighted: bool) -> None:
        scores, target = 6 * random(2, 5, seed=1), random(2, 5, seed=2)
        mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
        total, weights = 0.0, 0.0
        for video in range(2):
            for i in range(5):
                for j in range(5):
                    gap = (target[video, i] - target[video, j]).item()
                    if gap > 0 and mask[video, i] and mask[video, j]:
                        weight = gap if weighted else 1
                        total += weight * math.log1p(math.exp((scores[video, j] - scores[video, i]).item()))
                        weights += weight
        value = pairwise_logistic(scores, target, weighted=weighted, mask=mask).item()
        assert value == pytest.approx(total / weights)

    def test_hinge_far_from_its_margin_is_linear(self) -> None:
        """Where no pair reaches the margin, only the correlation counts: Σ Δp·Δp̂ over pairs = T·Σ p·p̂ − 1."""
        frames, margin = 40, 0.2
        target = (3 * random(1, frames, seed=3)).softmax(dim=-1)
        predicted = random(1, frames, seed=4).softmax(dim=-1)
        assert predicted.max() - predicted.min() < margin
        gaps = torch.pdist(target.T, p=1).sum()
        expected = margin * gaps - (frames * (target * predicted).sum() - 1)
        torch.testing.assert_close(hinge_ranking(predicted, target, margin=margin, weighted=True), expected)

    @pytest.mark.parametrize(
        "loss", [RANKING[name] for name in ("hinge", "hinge weighted", "logistic", "logistic weighted")]
    )
    def test_ties_do_not_count(self, loss: Loss) -> None:
        predicted = random(2, 5).requires_grad_()
        value = loss(predicted, torch.full((2, 5), 0.5, dtype=torch.float64))
        (slope,) = torch.autograd.grad(value, predicted)
        assert value == 0
        assert slope.eq(0).all()

    @pytest.mark.parametrize("weighted", [True, False])
    def test_equal_frames_may_be_in_any_order(self, weighted: bool) -> None:
        target = torch.tensor([[0.3, 0.3, 0.9]])
        one, other = torch.tensor([[0.4, -0.6, 0.1]]), torch.tensor([[-0.6, 0.4, 0.1]])
        for loss in (
            lambda predicted: hinge_ranking(predicted, target, margin=0.2, weighted=weighted),
            lambda predicted: pairwise_logistic(predicted, target, weighted=weighted),
        ):
            torch.testing.assert_close(loss(one), loss(other))

    def test_logistic_does_not_depend_on_the_number_of_frames(self) -> None:
        scores, target = random(1, 6, seed=1), random(1, 6, seed=2)
        twice = [values.repeat_interleave(2, dim=1) for values in (scores, target)]
        torch.testing.assert_close(pairwise_logistic(*twice), pairwise_logistic(scores, target))


class TestL2Norm:
    def test_by_hand(self) -> None:
        predicted, target = torch.tensor([[1.0, 2.0, 5.0], [0.0, 0.0, 0.0]]), torch.tensor([[1.0, 5.0, 1.0], [0.0] * 3])
        assert l2_norm(predicted, target).item() == pytest.approx((math.sqrt(3**2 + 4**2) + 0) / 2)

    def test_the_gradient_has_length_one_and_none_where_both_are_equal(self) -> None:
        predicted = torch.tensor([[0.3, 0.7], [0.2, 0.8]], requires_grad=True)
        target = torch.tensor([[0.3 + 3e-4, 0.7 - 4e-4], [0.2, 0.8]])
        l2_norm(predicted, target).backward()
        torch.testing.assert_close(predicted.grad, torch.tensor([[-0.3, 0.4], [0.0, 0.0]]), atol=1e-4, rtol=1e-3)

    def test_a_recipe_takes_it(self) -> None:
        recipe = read_recipe("paper", loss="l2", class_head=False, lam=1.0)
        importance, probs = random(2, 4, seed=1), random(2, 4, 3, seed=2).softmax(-1)
        _, parts = SamplerLoss(recipe)(Output(importance, importance), probs, torch.eye(3)[:2])
        difference = importance.softmax(1) - probs.amax(2).softmax(1)
        torch.testing.assert_close(parts["rank"], (difference**2).sum(1).sqrt().mean())


class TestAgainstTorch:
    def test_squared_error(self) -> None:
        predicted, target = random(3, 5, seed=1), random(3, 5, seed=2)
        torch.testing.assert_close(squared_error(predicted, target), F.mse_loss(predicted, target))

    @pytest.mark.parametrize("temperature", [0.05, 1.0])
    def test_listwise(self, temperature: float) -> None:
        scores, target = 5 * random(3, 5, seed=1), random(3, 5, seed=2)
        expected = F.cross_entropy(scores, (target / temperature).softmax(dim=-1))
        torch.testing.assert_close(listwise(scores, target, temperature=temperature), expected)

    def test_softmax_over_real_frames(self) -> None:
        values, mask = random(2, 6), torch.arange(6) < torch.tensor([[6], [2]])
        actual = softmax_over_frames(values, mask)
        torch.testing.assert_close(actual[1, :2], values[1, :2].softmax(dim=0))
        assert actual[1, 2:].eq(0).all()
        torch.testing.assert_close(actual[0], values[0].softmax(dim=0))

    def test_guidance_is_cross_entropy_of_mean_logits(self) -> None:
        logits, labels = random(3, 4, 5), torch.tensor([1, 4, 0])
        actual = label_guidance(logits, F.one_hot(labels, 5), multi_label=False)
        torch.testing.assert_close(actual, F.cross_entropy(logits.mean(dim=1), labels))

    def test_guidance_of_several_labels_is_that_of_their_geometric_mean(self) -> None:
        logits, _, labels = logits_probs_labels(3, 4, 5)
        together = frame_targets(logits.mean(dim=1, keepdim=True).softmax(dim=-1), labels, space="log")
        torch.testing.assert_close(label_guidance(logits, labels, multi_label=False), -together.mean())

    def test_guidance_of_mean_probabilities(self) -> None:
        logits, labels = random(3, 4, 5), torch.tensor([1, 4, 0])
        actual = label_guidance(logits, F.one_hot(labels, 5), multi_label=False, average="probabilities")
        torch.testing.assert_close(actual, F.nll_loss(logits.softmax(dim=-1).mean(dim=1).log(), labels))

    def test_guidance_of_many_labels(self) -> None:
        logits, _, labels = logits_probs_labels(3, 4, 5)
        wanted = labels.double()
        expected = F.binary_cross_entropy_with_logits(logits.mean(dim=1), wanted)
        torch.testing.assert_close(label_guidance(logits, labels, multi_label=True), expected)
        expected = F.binary_cross_entropy(logits.sigmoid().mean(dim=1), wanted)
        actual = label_guidance(logits, labels, multi_label=True, average="probabilities")
        torch.testing.assert_close(actual, expected)

    @pytest.mark.parametrize("multi_label", [False, True])
    def test_guidance_by_belief_is_that_of_the_scoring(self, multi_label: bool) -> None:
        """The belief is that by which frames are ranked, with relevance sigmoid(importance) and strength 1."""
        logits, _, labels = logits_probs_labels(3, 4, 5)
        importance = random(3, 4, seed=7)
        scoring = Scoring(
            {"belief": 1.0, "relevance": [1.0, 0.0], "importance": 0.2}, multi_label=multi_label, num_classes=5
        )
        shares = labels / labels.sum(dim=1, keepdim=True)
        expected = -(scoring.log_belief(importance, logits) * shares).sum(dim=1).mean()
        actual = belief_guidance(importance, logits, labels, multi_label=multi_label)
        torch.testing.assert_close(actual, expected)

    def test_guidance_by_belief_counts_all_frames_and_none_rules_a_class_out(self) -> None:
        """Twenty frames that are surely of the first of two classes: each is evidence of log 2 for it, and no less
        than log 1e-4 for the other. The scoring would count ten.
        """
        logits = torch.tensor([40.0, -40.0]).expand(1, 20, 2)
        importance = torch.full((1, 20), 40.0)
        other = belief_guidance(importance, logits, torch.tensor([[0, 1]]), multi_label=False)
        assert float(other) == pytest.approx(20 * (math.log(2) - math.log(1e-4)), rel=1e-5)

    def test_guidance_by_belief_teaches_which_frames_show_the_label(self) -> None:
        """A frame whose class is the label becomes more relevant, one of another class less."""
        logits = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]]], requires_grad=True)
        importance = torch.zeros(1, 2, requires_grad=True)
        belief_guidance(importance, logits, torch.tensor([[1, 0, 0]]), multi_label=False).backward()
        assert importance.grad[0, 0] < 0 < importance.grad[0, 1]
        assert logits.grad[0, 0, 0] < 0  # and its class head becomes surer of it

    def test_distillation_is_kl(self) -> None:
        logits, probs, _ = logits_probs_labels(3, 4, 5)
        expected = F.kl_div(logits.log_softmax(dim=-1).flatten(0, 1), probs.flatten(0, 1), reduction="batchmean")
        torch.testing.assert_close(distillation(logits, probs, multi_label=False), expected)

    def test_multi_label_distillation_is_binary_kl(self) -> None:
        logits, _, _ = logits_probs_labels(3, 4, 5)
        probs = random(3, 4, 5, seed=9)
        coins = torch.distributions.Bernoulli
        expected = torch.distributions.kl_divergence(coins(probs), coins(logits=logits)).mean()
        torch.testing.assert_close(distillation(logits, probs, multi_label=True), expected)

    @pytest.mark.parametrize("multi_label", [True, False])
    def test_distillation_of_sure_classifiers(self, multi_label: bool) -> None:
        probs = torch.tensor([[[1.0, 0.0, 0.0]]])
        logits = torch.tensor([[[60.0, -60.0, -60.0]]], requires_grad=True)
        value = distillation(logits, probs, multi_label=multi_label)
        value.backward()
        assert value.item() == pytest.approx(0, abs=1e-6)
        assert logits.grad.isfinite().all()

    def test_unknown_average(self) -> None:
        with pytest.raises(InvalidArgument, match="logits, probabilities"):
            label_guidance(torch.ones(1, 2, 3), torch.ones(1, 3), multi_label=False, average="scores")


class TestEveryClassLoss:
    @every_class_loss
    def test_the_right_classes_cost_less(self, loss: Loss) -> None:
        labels = F.one_hot(torch.tensor([1, 2]), 4).bool()
        probs = labels[:, None].expand(2, 3, 4) * 0.9 + 0.025
        right = 3 * labels[:, None].expand(2, 3, 4).double()
        assert loss(right, probs.double(), labels) < loss(right.roll(1, dims=-1), probs.double(), labels)

    @every_class_loss
    def test_gradient(self, loss: Loss) -> None:
        logits, probs, labels = logits_probs_labels(2, 3, 4)
        mask = torch.tensor([[True, True, True], [True, False, False]])
        logits.requires_grad_()
        assert torch.autograd.gradcheck(lambda x: loss(x, probs, labels), logits)
        assert torch.autograd.gradcheck(lambda x: loss(x, probs, labels, mask), logits)

    @every_class_loss
    def test_the_order_of_frames_does_not_matter(self, loss: Loss) -> None:
        (logits, probs, labels), order = logits_probs_labels(2, 6, 4), torch.randperm(6)
        torch.testing.assert_close(loss(logits[:, order], probs[:, order], labels), loss(logits, probs, labels))

    @every_class_loss
    def test_masked_frames_do_not_count(self, loss: Loss) -> None:
        logits, probs, labels = logits_probs_labels(2, 4, 3)
        given = padded(logits).requires_grad_()
        value = loss(given, padded(probs), labels, torch.arange(7).expand(2, 7) < 4)
        torch.testing.assert_close(value, loss(logits, probs, labels))
        (slope,) = torch.autograd.grad(value, given)
        assert slope[:, 4:].eq(0).all()

    @every_class_loss
    @pytest.mark.parametrize("few", [1, 2])
    def test_videos_of_different_lengths(self, loss: Loss, few: int) -> None:
        logits, probs, labels = logits_probs_labels(2, 5, 3)
        mask = torch.arange(5) < torch.tensor([[5], [few]])
        parts = loss(logits[:1], probs[:1], labels[:1]) + loss(logits[1:, :few], probs[1:, :few], labels[1:])
        torch.testing.assert_close(loss(logits, probs, labels, mask), parts / 2)


class TestWholeLoss:
    def output(self, classes: bool = True) -> tuple[Output, Tensor, Tensor]:
        logits, probs, labels = logits_probs_labels(3, 5, 4)
        importance = 4 * random(3, 5, seed=7) - 2
        return Output(importance + 0.5, importance, logits if classes else None), probs, labels

    def test_paper(self) -> None:
        """Eq. 3 with its sign mended and Eq. 4, written out."""
        output, probs, labels = self.output()
        total, parts = SamplerLoss(read_recipe("paper"))(output, probs, labels)
        target, predicted = probs.amax(dim=-1).softmax(dim=-1), output.importance.softmax(dim=-1)
        rank = sum(
            F.relu(0.01 - predicted[b, i] + predicted[b, j])
            for b in range(3)
            for i in range(5)
            for j in range(5)
            if target[b, i] > target[b, j]
        )
        mean = output.class_logits.softmax(dim=-1).mean(dim=1)
        guidance = -(mean.log() * labels / labels.sum(dim=1, keepdim=True)).sum(dim=1).mean()
        torch.testing.assert_close(parts["rank"], rank / 3)
        torch.testing.assert_close(parts["guidance"], guidance)
        torch.testing.assert_close(total, 0.99 * rank / 3 + 0.01 * guidance)

    @pytest.mark.parametrize("classes", [True, False])
    def test_authors(self, classes: bool) -> None:
        """As coded: the sigmoid, the weight of a pair, no label guidance; a class head that is there is let alone."""
        output, probs, labels = self.output(classes)
        total, parts = SamplerLoss(read_recipe("authors"))(output, probs, labels)
        target, predicted = probs.amax(dim=-1).softmax(dim=-1), output.importance.sigmoid().softmax(dim=-1)
        gaps, ahead = (x[:, :, None] - x[:, None, :] for x in (target, predicted))
        pairs = gaps.abs() * F.relu(0.01 - gaps.sign() * ahead)
        torch.testing.assert_close(total, 0.99 * pairs.triu(1).sum(dim=(1, 2)).mean())
        assert set(parts) == {"rank"}

    def test_default(self) -> None:
        recipe = read_recipe(
            "default",
            **{"loss": "logistic", "target": "label", "target_space": "probability"},
            **{"lam": 0.7, "distill": 2, "calibrate": 0.5, "guidance": "logits"},
        )
        output, probs, labels = self.output()
        total, parts = SamplerLoss(recipe)(output, probs, labels)
        confidence = frame_targets(probs, labels)
        rank = pairwise_logistic(output.importance, confidence)
        calibrate = F.binary_cross_entropy(output.importance.sigmoid(), confidence)
        guidance = label_guidance(output.class_logits, labels, multi_label=False)
        distill = distillation(output.class_logits, probs, multi_label=False)
        torch.testing.assert_close(total, 0.7 * rank + 0.3 * guidance + 2 * distill + 0.5 * calibrate)
        expected = {"rank": rank, "calibrate": calibrate, "guidance": guidance, "distill": distill}
        torch.testing.assert_close(parts, expected)
        total, parts = SamplerLoss(read_recipe("default", lam=0.7, guidance="belief"))(output, probs, labels)
        belief = belief_guidance(output.importance, output.class_logits, labels, multi_label=False)
        torch.testing.assert_close(parts["guidance"], belief)

    @pytest.mark.parametrize("target", ["label", "max"])
    @pytest.mark.parametrize(("loss", "prediction"), [("mse", "sigmoid"), ("listwise", "raw"), ("hinge", "raw")])
    def test_other_losses(self, loss: str, prediction: str, target: str) -> None:
        recipe = read_recipe(
            "default", loss=loss, prediction=prediction, target=target, target_space="log", temperature=0.4, margin=0.2
        )
        output, probs, labels = self.output()
        wanted = frame_targets(probs, labels, target, "log")
        expected = {
            "mse": lambda: squared_error(output.importance.sigmoid(), wanted),
            "listwise": lambda: listwise(output.importance, wanted, temperature=0.4),
            "hinge": lambda: hinge_ranking(output.importance, wanted, margin=0.2, weighted=recipe.weighted),
        }[loss]()
        _, parts = SamplerLoss(recipe)(output, probs, labels)
        torch.testing.assert_close(parts["rank"], expected)

    @pytest.mark.parametrize("loss", ["hinge", "mse", "l2", "logistic", "listwise"])
    @pytest.mark.parametrize("weighted", [True, False])
    def test_each_loss_knows_the_mask_the_weights_and_the_temperature(self, loss: str, weighted: bool) -> None:
        """tau sharpens targets that are normalised over the frames."""
        given = {"loss": loss, "weighted": weighted, "margin": 0.2, "temperature": 0.4}
        output, probs, labels = self.output()
        target, predicted = probs.amax(dim=-1), output.importance
        if loss in ("logistic", "listwise"):
            given |= {"tau": None, "prediction": "raw"}
        else:
            given |= {"tau": 0.3, "prediction": "softmax"}
            target, predicted = (target / 0.3).softmax(dim=-1), predicted.softmax(dim=-1)
        recipe = read_recipe("paper", class_head=False, lam=1.0, **given)
        expected = {
            "hinge": lambda: hinge_ranking(predicted, target, margin=0.2, weighted=weighted),
            "mse": lambda: squared_error(predicted, target),
            "l2": lambda: l2_norm(predicted, target),
            "logistic": lambda: pairwise_logistic(predicted, target, weighted=weighted),
            "listwise": lambda: listwise(predicted, target, temperature=0.4),
        }[loss]()
        _, parts = SamplerLoss(recipe)(output, probs, labels)
        torch.testing.assert_close(parts["rank"], expected)
        longer = Output(*(padded(values) for values in output))
        _, parts = SamplerLoss(recipe)(longer, padded(probs), labels, torch.arange(8).expand(3, 8) < 5)
        torch.testing.assert_close(parts["rank"], expected)

    @pytest.mark.parametrize("multi_label", [True, False])
    @pytest.mark.parametrize("name", sorted({*list_recipes()} - {"ocsampler"}))  # which has tests of its own
    def test_masked_frames_do_not_count(self, name: str, multi_label: bool) -> None:
        output, probs, labels = self.output()
        loss = SamplerLoss(read_recipe(name), multi_label=multi_label)
        longer = Output(*(padded(values).requires_grad_() for values in output))
        total, parts = loss(longer, padded(probs), labels, torch.arange(8).expand(3, 8) < 5)
        torch.testing.assert_close((total, parts), loss(output, probs, labels))
        slopes = torch.autograd.grad(total, longer, allow_unused=True)
        assert all(slope is None or slope[:, 5:].eq(0).all() for slope in slopes)

    @pytest.mark.parametrize("name", ["default", "paper", "authors", "scsampler-rank"])
    def test_descent_finds_the_order(self, name: str) -> None:
        """Free scores in place of a network: after some steps of each recipe's loss the best frames are on top."""
        _, probs, labels = self.output()
        recipe = read_recipe(name)
        importance = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
        logits = torch.zeros(3, 5, 4, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([importance, logits], lr=0.05)
        for _ in range(100):
            total, _ = SamplerLoss(recipe)(Output(importance, importance, logits), probs, labels)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        target = frame_targets(probs, labels, recipe.target)
        assert torch.equal(importance.argmax(dim=1), target.argmax(dim=1))
        assert torch.equal(importance.argmin(dim=1), target.argmin(dim=1))

    def test_every_head_has_a_gradient_even_at_weight_0(self) -> None:
        output, probs, labels = self.output()
        output.class_logits.requires_grad_()
        total, parts = SamplerLoss(read_recipe("default", lam=1.0, distill=0.0))(output, probs, labels)
        (slope,) = torch.autograd.grad(total, output.class_logits)
        assert slope.eq(0).all()
        assert not any(part.requires_grad for part in parts.values())

    def test_a_sampler_without_class_head(self) -> None:
        output, probs, labels = self.output(classes=False)
        with pytest.raises(InvalidArgument, match="the sampler has none"):
            SamplerLoss(read_recipe("paper"))(output, probs, labels)
