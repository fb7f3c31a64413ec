"""OCSampler's loss: rewards by hand, its gradient against enumeration, and that it learns to choose."""

from __future__ import annotations

import math
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sosampler.errors import InvalidArgument
from sosampler.policies.positional import uniform
from sosampler.samplers.ocsampler import (
    ClipProbs,
    OCSamplerLoss,
    clip_reward,
    entropy,
    plackett_luce_log_prob,
    set_log_prob,
    uniform_subset,
)
from sosampler.samplers.recipe import BASELINES, LIKELIHOODS, REWARDS, OCSamplerSettings
from sosampler.samplers.sosampler import top_n

every_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS)
every_baseline = pytest.mark.parametrize("baseline", BASELINES)
every_reward = pytest.mark.parametrize("reward", REWARDS)


class Output(NamedTuple):
    """What a sampler gives, as far as the loss looks at it."""

    scores: Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    return nn.functional.one_hot(labels, num_classes).bool()


def mean_of_frames(frame_probs: Tensor) -> ClipProbs:
    """A classifier of clips that averages the probabilities of its frames [B, T, C]."""

    def clip_probs(positions: Tensor) -> Tensor:
        return frame_probs.gather(1, positions[:, :, None].expand(-1, -1, frame_probs.shape[2])).mean(dim=1)

    return clip_probs


class Videos(NamedTuple):
    features: Tensor  # [B, T, D]: the sampler sees a noisy hint of which frames are good
    frame_probs: Tensor  # [B, T, C]
    labels: Tensor  # [B, C]
    good: Tensor  # [B, T] frames that show the class


def make_videos(count: int, num_candidates: int = 10, num_good: int = 3, seed: int = 0) -> Videos:
    """Good frames are sure of the class, the others of nothing."""
    rng = generator(seed)
    labels = torch.randint(4, (count,), generator=rng)
    good = torch.rand(count, num_candidates, generator=rng).argsort(dim=1) < num_good
    logits = 0.3 * torch.randn(count, num_candidates, 4, generator=rng)
    logits += 4.0 * good[:, :, None] * one_hot(labels, 4)[:, None]
    features = torch.randn(count, num_candidates, 6, generator=rng)
    features[:, :, 2] += 3.0 * good
    return Videos(features, logits.softmax(dim=-1), one_hot(labels, 4), good)


def learn(scores: nn.Parameter, loss: OCSamplerLoss, clip_probs: ClipProbs, labels: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam([scores], lr=0.1)
    rng = generator(7)
    for _ in range(steps):
        total, _ = loss(Output(scores), clip_probs, labels, None, rng)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


class TestReward:
    PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]])
    LABELS = one_hot(torch.tensor([0, 1, 1]), 3)

    def test_confidence_is_the_highest_probability(self) -> None:
        assert clip_reward(self.PROBS, None, "confidence").tolist() == pytest.approx([0.7, 0.5, 0.4])

    def test_label_punishes_wrong_answers(self) -> None:
        # Right; wrong by 0.2; as high as another class, which counts as right.
        assert clip_reward(self.PROBS, self.LABELS, "label").tolist() == pytest.approx([0.7, 0.3 - 0.5, 0.4])

    def test_several_labels_count_by_their_geometric_mean(self) -> None:
        labels = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
        actual = clip_reward(self.PROBS[:2], labels, "label").tolist()
        assert actual == pytest.approx([math.sqrt(0.7 * 0.2), math.sqrt(0.3 * 0.2) - 0.5])

    def test_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="the reward 'label' needs labels"):
            clip_reward(self.PROBS, None, "label")
        with pytest.raises(InvalidArgument, match="a video has no label"):
            clip_reward(self.PROBS, torch.zeros(3, 3), "label")
        with pytest.raises(InvalidArgument, match="reward='mean' is unknown"):
            clip_reward(self.PROBS, self.LABELS, "mean")


class TestUniformSubset:
    def test_six_of_ten_as_published(self) -> None:
        assert uniform_subset(torch.ones(2, 10, dtype=torch.bool), 6).tolist() == [[0, 1, 3, 5, 7, 9]] * 2

    @pytest.mark.parametrize(("num_candidates", "num_frames"), [(10, 5), (10, 4), (9, 6), (100, 32), (7, 7), (5, 1)])
    def test_otherwise_the_uniform_policy(self, num_candidates: int, num_frames: int) -> None:
        actual = uniform_subset(torch.ones(1, num_candidates, dtype=torch.bool), num_frames)
        assert actual[0].tolist() == uniform(num_candidates, num_frames).tolist()

    def test_spreads_over_real_candidates_only(self) -> None:
        mask = torch.tensor([[True] * 10 + [False] * 2, [True] * 12, [False, True] * 6])
        assert uniform_subset(mask, 6).tolist() == [
            [0, 1, 3, 5, 7, 9],
            uniform(12, 6).tolist(),
            [1, 3, 5, 7, 9, 11],
        ]
        with pytest.raises(InvalidArgument, match="num_frames=7 is more than the 6 real candidates"):
            uniform_subset(mask, 7)


class TestLoss:
    @every_likelihood
    @every_reward
    def test_is_the_printed_formula(self, likelihood: str, reward: str) -> None:
        videos = make_videos(5, 8)
        scores = torch.randn(5, 8, generator=generator(1))
        calls: list[Tensor] = []

        def clip_probs(positions: Tensor) -> Tensor:
            calls.append(positions)
            return mean_of_frames(videos.frame_probs)(positions)

        settings = OCSamplerSettings(num_frames=3, reward=reward, likelihood=likelihood, entropy=0.3)
        total, parts = OCSamplerLoss(settings)(Output(scores), clip_probs, videos.labels, None, generator(2))
        drawn, uniform_clip = calls
        assert uniform_clip.tolist() == [uniform(8, 3).tolist()] * 5
        assert torch.equal(drawn, drawn.sort(dim=1).values)
        mean_probs = mean_of_frames(videos.frame_probs)
        rewards = [clip_reward(mean_probs(chosen), videos.labels, reward) for chosen in calls]
        if likelihood == "set":
            log_prob = set_log_prob(scores, drawn)
        else:  # the order of drawing is known from the same draws
            waiting = torch.empty(5, 8, dtype=torch.float64).exponential_(generator=generator(2))
            order = (scores.double() - waiting.log()).argsort(dim=1, descending=True)[:, :3]
            assert torch.equal(order.sort(dim=1).values, drawn)
            log_prob = plackett_luce_log_prob(scores, order)
        policy = -((rewards[0] - rewards[1]) * log_prob).mean()
        torch.testing.assert_close(total, policy - 0.3 * entropy(scores).mean())
        torch.testing.assert_close(parts["policy"], policy)
        torch.testing.assert_close(parts["reward"], rewards[0].mean())
        torch.testing.assert_close(parts["advantage"], (rewards[0] - rewards[1]).mean())

    def test_a_second_draw_as_baseline_is_another_draw(self) -> None:
        calls: list[Tensor] = []

        def clip_probs(positions: Tensor) -> Tensor:
            calls.append(positions)
            return torch.full((200, 2), 0.5)

        loss = OCSamplerLoss(OCSamplerSettings(num_frames=2, baseline="sample"))
        loss(Output(torch.zeros(200, 6)), clip_probs, None, None, generator())
        first, second = calls
        assert 0 < (first == second).all(dim=1).double().mean() < 0.2  # 1 in 15

    @every_likelihood
    @every_baseline
    @every_reward
    def test_gradient_is_that_of_the_expected_reward(self, likelihood: str, baseline: str, reward: str) -> None:
        draws, every = 10_000, torch.combinations(torch.arange(5), 2)
        frame_probs = (3 * torch.randn(1, 5, 3, generator=generator(3), dtype=torch.float64)).softmax(dim=-1)
        labels = one_hot(torch.tensor([1]), 3)
        scores = torch.tensor([[0.5, -0.8, 0.2, 1.0, -0.3]], dtype=torch.float64, requires_grad=True)
        rewards = clip_reward(
            mean_of_frames(frame_probs.expand(len(every), -1, -1))(every), labels.expand(10, -1), reward
        )
        expected = (set_log_prob(scores.expand(len(every), -1), every).exp() * rewards).sum()
        wanted = torch.autograd.grad(expected, scores)[0][0]

        copies = scores.detach().expand(draws, -1).clone().requires_grad_()
        settings = OCSamplerSettings(num_frames=2, reward=reward, baseline=baseline, likelihood=likelihood)
        clip_probs = mean_of_frames(frame_probs.expand(draws, -1, -1))
        total, parts = OCSamplerLoss(settings)(Output(copies), clip_probs, labels.expand(draws, -1), None, generator(5))
        estimates = -draws * torch.autograd.grad(total, copies)[0]
        error = estimates.std(dim=0) / math.sqrt(draws)
        assert wanted.abs().max() > 8 * error.max()  # there is something to be found
        assert ((estimates.mean(dim=0) - wanted).abs() < 4.5 * error).all()
        assert parts["reward"].item() == pytest.approx(
            expected.item(), abs=4.5 * rewards.std().item() / math.sqrt(draws)
        )

    def test_the_likelihood_of_the_set_finds_the_same_gradient_with_less_noise(self) -> None:
        """Over all orders of drawing 3 of 6 frames, which equal scores make equally likely."""
        videos, orders = make_videos(1, 6), torch.tensor(list(permutations(range(6), 3)))
        rewards = clip_reward(
            mean_of_frames(videos.frame_probs.expand(len(orders), -1, -1))(orders), None, "confidence"
        )
        slopes = {}
        for log_prob in (set_log_prob, plackett_luce_log_prob):
            scores = torch.zeros(len(orders), 6, dtype=torch.float64, requires_grad=True)
            advantage = rewards - rewards.mean()
            slopes[log_prob] = torch.autograd.grad((advantage * log_prob(scores, orders)).sum(), scores)[0]
        by_set, by_order = slopes.values()
        torch.testing.assert_close(by_set.mean(dim=0), by_order.mean(dim=0))
        assert by_set.var(dim=0).sum() < by_order.var(dim=0).sum()

    def test_the_reward_gets_no_gradient_and_confidence_no_labels(self) -> None:
        videos = make_videos(4)
        frame_probs = videos.frame_probs.requires_grad_()
        scores = torch.zeros(4, 10, requires_grad=True)
        total, parts = OCSamplerLoss()(Output(scores), mean_of_frames(frame_probs), None, None, generator())
        total.backward()
        assert frame_probs.grad is None
        assert scores.grad is not None
        assert scores.grad.abs().max() > 0
        assert not any(part.requires_grad for part in parts.values())

    def test_same_generator_same_loss(self) -> None:
        videos, scores = make_videos(4), torch.randn(4, 10, generator=generator())
        clip_probs = mean_of_frames(videos.frame_probs)
        totals = [OCSamplerLoss()(Output(scores), clip_probs, None, None, generator(s))[0].item() for s in (1, 1, 2)]
        assert totals[0] == totals[1] != totals[2]

    @every_likelihood
    @every_baseline
    def test_masked_frames_are_neither_shown_nor_taught(self, likelihood: str, baseline: str) -> None:
        videos = make_videos(300)
        mask = torch.arange(10).expand(300, -1) < torch.randint(4, 11, (300, 1), generator=generator())
        scores = torch.randn(300, 10, generator=generator()).masked_fill(~mask, math.nan).requires_grad_()

        def clip_probs(positions: Tensor) -> Tensor:
            assert mask.gather(1, positions).all()
            return mean_of_frames(videos.frame_probs)(positions)

        settings = OCSamplerSettings(num_frames=3, likelihood=likelihood, baseline=baseline, entropy=0.1)
        total, _ = OCSamplerLoss(settings)(Output(scores), clip_probs, None, mask, generator())
        slopes = torch.autograd.grad(total, scores)[0]
        assert total.isfinite()
        assert slopes[~mask].abs().max() == 0
        assert (slopes[mask] != 0).all()

    @pytest.mark.parametrize(
        ("name", "value"),
        [("num_frames", 0), ("reward", "acc"), ("baseline", "none"), ("likelihood", "pl"), ("entropy", -0.1)],
    )
    def test_refuses_settings(self, name: str, value: object) -> None:
        with pytest.raises(InvalidArgument, match=f"{name}={value!r}"):
            OCSamplerSettings(**{name: value})  # type: ignore[arg-type]

    def test_refuses_wrong_outputs_and_too_few_candidates(self) -> None:
        loss = OCSamplerLoss(OCSamplerSettings(num_frames=3))
        with pytest.raises(InvalidArgument, match=r"clip_probs returned the shape \[2\] for 2 clips"):
            loss(Output(torch.zeros(2, 5)), lambda positions: torch.zeros(2), None)
        with pytest.raises(InvalidArgument, match="num_frames=3 is more than the 2 real candidates"):
            loss(Output(torch.zeros(1, 2)), lambda positions: torch.zeros(1, 2), None)


class TestLearning:
    @every_likelihood
    @every_baseline
    def test_free_scores_find_the_good_frames(self, likelihood: str, baseline: str) -> None:
        videos = make_videos(16)
        scores = nn.Parameter(torch.zeros(16, 10))
        loss = OCSamplerLoss(OCSamplerSettings(num_frames=3, likelihood=likelihood, baseline=baseline))
        learn(scores, loss, mean_of_frames(videos.frame_probs), videos.labels, steps=120)
        actual = videos.good.gather(1, top_n(scores.detach(), 3)).double().mean().item()
        assert actual > 0.8  # 0.3 by chance; over seeds the uniform baseline gives 0.87 to 1, a second draw 1

    def test_only_the_label_tells_right_from_wrong_certainty(self) -> None:
        """Frames 0 to 2 are surer of a wrong class than 3 to 5 are of the right one."""
        frame_probs = torch.full((32, 9, 3), 1 / 3)
        frame_probs[:, :3] = torch.tensor([0.02, 0.96, 0.02])
        frame_probs[:, 3:6] = torch.tensor([0.8, 0.1, 0.1])
        labels = one_hot(torch.zeros(32, dtype=torch.int64), 3)
        chosen = {}
        for reward in REWARDS:
            scores = nn.Parameter(torch.zeros(1, 9))
            optimizer, rng = torch.optim.Adam([scores], lr=0.1), generator()
            loss = OCSamplerLoss(OCSamplerSettings(num_frames=3, reward=reward))
            for _ in range(80):
                total, _ = loss(Output(scores.expand(32, -1)), mean_of_frames(frame_probs), labels, None, rng)
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
            chosen[reward] = top_n(scores.detach(), 3)[0].tolist()
        assert chosen == {"confidence": [0, 1, 2], "label": [3, 4, 5]}

    def test_the_entropy_weight_keeps_the_policy_open(self) -> None:
        videos = make_videos(16)
        spread = []
        for weight in (0.0, 0.03, 3.0):
            scores = nn.Parameter(torch.randn(16, 10, generator=generator()))
            loss = OCSamplerLoss(OCSamplerSettings(num_frames=3, entropy=weight))
            learn(scores, loss, mean_of_frames(videos.frame_probs), videos.labels, steps=100)
            spread.append(entropy(scores.detach()).mean().item())
        assert spread[0] < spread[1] - 0.05 < spread[2] - 0.1
        assert spread[2] == pytest.approx(math.log(10), abs=0.02)  # nothing but the entropy counts

    @every_reward
    def test_a_network_learns_what_good_frames_look_like(self, reward: str) -> None:
        train, test = make_videos(512), make_videos(512, seed=1)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer, rng = torch.optim.Adam(network.parameters(), lr=0.01), generator()
        loss = OCSamplerLoss(OCSamplerSettings(num_frames=3, reward=reward))
        for step in range(100):
            rows = slice(64 * (step % 8), 64 * (step % 8 + 1))
            clip_probs = mean_of_frames(train.frame_probs[rows])
            output = Output(network(train.features[rows])[..., 0])
            total, _ = loss(output, clip_probs, train.labels[rows], None, rng)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

        def confidence(scores: Tensor) -> float:
            probs = mean_of_frames(test.frame_probs)(top_n(scores, 3))
            return clip_reward(probs, test.labels, "label").mean().item()

        best = confidence(test.good.double())
        by_chance = confidence(torch.rand(512, 10, generator=rng))
        assert confidence(network(test.features)[..., 0].detach()) > by_chance + 0.7 * (best - by_chance)
