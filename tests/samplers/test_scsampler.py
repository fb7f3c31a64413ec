"""SCSampler's losses and scores against plain loops and torch's own losses, and its recipe."""

from __future__ import annotations

import math
from importlib.resources import as_file, files
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from sosampler.samplers.losses import SamplerLoss, frame_guidance, frame_targets, hinge_ranking, saliency
from sosampler.samplers.recipe import _OPTIONAL, SETTINGS, SamplerRecipe, read_recipe


class Output(NamedTuple):
    scores: Tensor
    importance: Tensor
    class_logits: Tensor | None = None


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def one_hot(labels: list[int], num_classes: int) -> Tensor:
    return F.one_hot(torch.tensor(labels), num_classes).bool()


def recipe() -> SamplerRecipe:
    with as_file(files("sosampler.samplers").joinpath("recipes", "scsampler-rank.yaml")) as path:
        return read_recipe(path)


def ac_loss(logits: Tensor, labels: Tensor, *, multi_label: bool = False, mask: Tensor | None = None) -> Tensor:
    return frame_guidance(logits, labels, multi_label=multi_label, mask=mask)


def sal_rank_loss(
    scores: Tensor, probs: Tensor, labels: Tensor, *, margin: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    return hinge_ranking(scores, frame_targets(probs, labels, "label"), margin=margin, weighted=False, mask=mask)


class TestClassifier:
    def test_is_the_cross_entropy_of_every_frame(self) -> None:
        logits, labels = 3 * normal(3, 5, 4), [2, 0, 3]
        wanted = F.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).repeat_interleave(5))
        torch.testing.assert_close(ac_loss(logits, one_hot(labels, 4)), wanted)

    def test_is_not_that_of_the_mean_of_the_frames(self) -> None:
        """Frames that say the opposite of each other, each very sure, are not forgiven."""
        logits = torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
        assert ac_loss(logits, one_hot([0], 2)).item() == pytest.approx(4.5, abs=1e-3)

    def test_several_labels(self) -> None:
        logits, labels = normal(2, 5, 4), torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]])
        every = labels[:, None].double().expand(-1, 5, -1)
        wanted = F.binary_cross_entropy_with_logits(logits, every)
        torch.testing.assert_close(ac_loss(logits, labels, multi_label=True), wanted)
        shares = every / every.sum(dim=-1, keepdim=True)
        entropy = torch.tensor([math.log(2), 0.0]).mean()
        wanted = F.cross_entropy(logits.flatten(0, 1), shares.flatten(0, 1)) - entropy
        torch.testing.assert_close(ac_loss(logits, labels), wanted)

    @pytest.mark.parametrize("multi_label", [False, True])
    def test_masked_frames_do_not_count(self, multi_label: bool) -> None:
        logits, labels = normal(2, 5, 4), one_hot([1, 2], 4)
        padded = torch.cat([logits, torch.full((2, 2, 4), math.nan)], dim=1).requires_grad_()
        mask = torch.arange(7).expand(2, -1) < 5
        actual = ac_loss(padded, labels, multi_label=multi_label, mask=mask)
        torch.testing.assert_close(actual, ac_loss(logits, labels, multi_label=multi_label))
        assert torch.autograd.grad(actual, padded)[0][:, 5:].eq(0).all()

    def test_training_finds_the_frames_that_show_the_class(self) -> None:
        """A linear classifier of frames, of which three in ten show the class and the rest noise."""
        labels = torch.randint(3, (200,), generator=generator())
        good = torch.rand(200, 10, generator=generator(1)).argsort(dim=1) < 3
        frames = normal(200, 10, 8, seed=2).float()
        frames[:, :, :3] += 4.0 * good[:, :, None] * F.one_hot(labels, 3)[:, None]
        torch.manual_seed(0)
        network = torch.nn.Linear(8, 3)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
        for _ in range(60):
            loss = ac_loss(network(frames[:100]), F.one_hot(labels[:100], 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        best = saliency(network(frames[100:])).topk(3, dim=1).indices
        assert good[100:].gather(1, best).float().mean() > 0.75  # 0.3 by chance


class TestSaliency:
    def test_is_the_highest_probability(self) -> None:
        logits = 3 * normal(2, 5, 4)
        torch.testing.assert_close(saliency(logits), logits.softmax(dim=-1).amax(dim=-1))
        torch.testing.assert_close(saliency(logits, multi_label=True), logits.sigmoid().amax(dim=-1))

    def test_log_odds_are_those_of_the_probability(self) -> None:
        logits = 3 * normal(2, 5, 4)
        torch.testing.assert_close(saliency(logits, log_odds=True), torch.logit(logits.softmax(dim=-1).amax(dim=-1)))
        multi = saliency(logits, multi_label=True, log_odds=True)
        torch.testing.assert_close(multi, torch.logit(logits.sigmoid().amax(dim=-1)))

    def test_log_odds_separate_very_confident_frames(self) -> None:
        logits = torch.tensor([[[30.0, 0.0, 0.0], [40.0, 0.0, 0.0]]])
        assert saliency(logits)[0, 0] == saliency(logits)[0, 1]
        sure, surer = saliency(logits, log_odds=True)[0].tolist()
        assert (sure, surer) == pytest.approx((30 - math.log(2), 40 - math.log(2)))

    def test_half_precision_comes_back_as_float32(self) -> None:
        logits = normal(1, 3, 4)
        actual = saliency(logits.half())
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), saliency(logits), atol=1e-3, rtol=0)

    def test_gradient(self) -> None:
        logits = normal(2, 3, 4).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: saliency(x, log_odds=True), logits)


class TestRanking:
    SCORES = torch.tensor([[0.2, 1.5, -0.3]])
    PROBS = torch.tensor([[[0.6, 0.4], [0.1, 0.9], [0.6, 0.4]]])  # the second is worst, the others equal

    def test_by_hand(self) -> None:
        # Margin 1: 1 − (0.2 − 1.5) and 1 − (−0.3 − 1.5); the tie does not count, nor how large the gap is.
        assert sal_rank_loss(self.SCORES, self.PROBS, one_hot([0], 2)).item() == pytest.approx(2.3 + 2.8)
        assert sal_rank_loss(self.SCORES, self.PROBS, one_hot([0], 2), margin=0.1).item() == pytest.approx(1.4 + 1.9)
        # For the other label the order is right, and by more than the margin.
        assert sal_rank_loss(self.SCORES, self.PROBS, one_hot([1], 2)).item() == 0

    def test_against_loops(self) -> None:
        scores, probs, labels = normal(3, 6), (2 * normal(3, 6, 4, seed=1)).softmax(dim=-1), [1, 0, 3]
        mask = torch.arange(6) < torch.tensor([[6], [4], [5]])
        total = 0.0
        for video, label in enumerate(labels):
            for i in range(6):
                for j in range(6):
                    if mask[video, i] and mask[video, j] and probs[video, i, label] > probs[video, j, label]:
                        total += max(0.0, 0.5 - (scores[video, i] - scores[video, j]).item())
        actual = sal_rank_loss(scores, probs, one_hot(labels, 4), margin=0.5, mask=mask)
        assert actual.item() == pytest.approx(total / 3)


class TestRecipe:
    def test_has_this_ranking_and_nothing_else(self) -> None:
        scores, probs, labels = normal(3, 6), (2 * normal(3, 6, 4, seed=1)).softmax(dim=-1), one_hot([1, 0, 3], 4)
        total, parts = SamplerLoss(recipe())(Output(scores, scores), probs, labels)
        torch.testing.assert_close(total, sal_rank_loss(scores, probs, labels, margin=recipe().margin))
        assert list(parts) == ["rank"]

    def test_file_is_complete(self) -> None:
        text = files("sosampler.samplers").joinpath("recipes", "scsampler-rank.yaml").read_text(encoding="utf-8")
        assert tuple(yaml.safe_load(text)) == tuple(
            name for name in SETTINGS if name not in _OPTIONAL or name == "answer"
        )

    def test_differs_from_the_default_in_the_loss_and_in_what_helps_few_clips(self) -> None:
        actual, default = recipe().to_dict(), read_recipe("default").to_dict()
        differing = {name for name in actual if actual[name] != default.get(name)}
        loss = {"loss", "prediction", "target", "target_space", "margin", "weighted", "lam", "distill", "calibrate"}
        assert actual["name"] == "scsampler-rank"
        others = {"name", "class_head", "scoring", "temperature", "guidance", "tau", "answer"}
        assert differing <= loss | others | {"dropout"}
        assert set(default) - set(actual) == {"freeze"}
