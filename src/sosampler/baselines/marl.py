"""MARL: several agents start evenly spread over the video and each moves to a better frame.

After Wu, He, Tan, Chen and Wen, "Multi-Agent Reinforcement Learning Based Frame Sampling for Effective Untrimmed Video
Recognition", ICCV 2019.

As in the paper: N agents on a uniform grid; at every step each stays or moves left or right by a stride. All share one
recurrent network (a GRU) that observes an agent's frame together with those of its two neighbours, and one policy.
The reward is the change of p_label of the averaged prediction. They stop when all stay; the prediction is the average
over their last frames. Every distinct frame on the way went through the heavy network, and counts.

Different, or chosen here where the paper does not specify it:
- The frame classifier is one linear layer on the frozen heavy features, trained along with the policy.
- An agent at the end of the video cannot move further (a move that overshoots ends at the last frame), so that "all
  stay" and "nothing moved" are the same.
- Baseline of REINFORCE: the mean return of the other `rollouts` of the same video, which leaves the gradient unbiased.
  An entropy bonus that fades with training keeps the agents moving at first.
- An agent also observes its position.

Light features are not used. No weight's shape depends on `agents`, `stride` or `max_steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.adaframe import discount_factor, discounted
from sosampler.baselines.base import (
    Baseline,
    BaselineOutput,
    Loss,
    Rng,
    Views,
    candidates_of_ranks,
    draw_gumbel,
    matrix_gmacs,
)
from sosampler.samplers.sosampler import log_label_confidence

STAY, LEFT, RIGHT = range(3)  # on a tie the first wins: stay
_SMALLEST = 1e-12  # probabilities are clamped here before a logarithm


class Episode(NamedTuple):
    """S moves of training; B counts every rollout."""

    probabilities: Tensor  # [B, S + 1, C], the averaged prediction before, between and after the moves
    log_likelihood: Tensor  # [B, S, N] of the moves that were drawn
    entropy: Tensor  # [B, S, N] of the policy
    moving: Tensor  # bool [B, S], False = all agents had stayed before, the video is done
    ranks: Tensor  # int64 [B, S + 1, N], positions of the agents, counted in real candidates


class MARL(Baseline):
    """Agents that step left or right until all stay."""

    name = "marl"
    threshold = "agents"
    threshold_values = (1, 2, 3, 5, 7, 10)

    def __init__(
        self,
        heavy_width: int,  # features of a frame from the heavy network
        num_classes: int,  # at least 2
        *,
        agents: int = 5,  # frames that the prediction is averaged over
        stride: int = 1,  # real candidates per move
        max_steps: int = 5,  # max moves of each agent
        hidden: int = 512,  # units of the GRU
        width: int = 256,  # of the observation of one frame
        discount: float = 0.9,  # of rewards, per step
        rollouts: int = 4,  # of every video in a training batch, at least 2
        policy_weight: float = 1.0,  # of the REINFORCE loss
        entropy_weight: float = 0.01,  # of the entropy bonus at the start of training; it falls to 0
        multi_label: bool = False,  # classes do not exclude each other
    ) -> None:
        config: dict[str, Any] = {
            "heavy_width": check_int("heavy_width", heavy_width),
            "num_classes": check_int("num_classes", num_classes, at_least=2),
            "agents": check_int("agents", agents),
            "stride": check_int("stride", stride),
            "max_steps": check_int("max_steps", max_steps),
            "hidden": check_int("hidden", hidden),
            "width": check_int("width", width),
            "discount": discount_factor(discount),
            "rollouts": check_int("rollouts", rollouts, at_least=2),
            "policy_weight": check_float("policy_weight", policy_weight, at_least=0),
            "entropy_weight": check_float("entropy_weight", entropy_weight, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self.agents, self.stride, self.max_steps = config["agents"], config["stride"], config["max_steps"]
        self.observe = nn.Linear(heavy_width, width)
        self.cell = nn.GRUCell(3 * width + 1, hidden)
        self.policy = nn.Linear(hidden, 3)
        self.classify = nn.Linear(heavy_width, num_classes)

    def start(self, real: Tensor) -> Tensor:
        """Return the start of the agents, int64 [B, N]: the middles of N equal segments of the real candidates."""
        number = torch.arange(self.agents, device=real.device)
        return ((2 * number + 1) * real.sum(dim=1, keepdim=True)) // (2 * self.agents)

    def advise(self, frames: Tensor, ranks: Tensor, real: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the moves [B, N, 3] and the next state, from heavy features [B, N, D]."""
        last = real.sum(dim=1, keepdim=True) - 1
        seen = self.observe(frames).relu()
        edge = torch.zeros_like(seen[:, :1])  # the outer agents have one neighbour
        left, right = torch.cat([edge, seen[:, :-1]], dim=1), torch.cat([seen[:, 1:], edge], dim=1)
        position = (ranks / last.clamp_min(1))[:, :, None]
        observed = torch.cat([left, seen, right, position], dim=2)
        state = self.cell(observed.flatten(0, 1), state.flatten(0, 1)).unflatten(0, ranks.shape)
        blocked = torch.stack([torch.zeros_like(ranks, dtype=torch.bool), ranks == 0, ranks == last], dim=2)
        # Not -inf: that times a probability of 0 would be NaN in the entropy.
        logits = self.policy(state).masked_fill(blocked, torch.finfo(state.dtype).min)
        return logits.log_softmax(dim=2), state

    def move(self, ranks: Tensor, actions: Tensor, real: Tensor) -> Tensor:
        """Return the ranks [B, N] after moves; never outside of the real candidates."""
        step = (actions == RIGHT).long() - (actions == LEFT).long()
        last = real.sum(dim=1, keepdim=True) - 1
        return (ranks + self.stride * step).clamp_min(0).minimum(last)

    def episode(self, views: Views, generator: Rng) -> Episode:
        """Run `max_steps` moves drawn from the policy; a video where all agents stayed is done."""
        real = views.real
        ranks = self.start(real)
        state = views.heavy.new_zeros(*ranks.shape, self.config["hidden"])
        moving = torch.ones(len(ranks), dtype=torch.bool, device=ranks.device)
        frames = views.heavy.take_along_dim(candidates_of_ranks(ranks, real)[:, :, None], 1)
        visited, predictions = [ranks], [self.average(frames)]
        likelihoods, entropies, movings = [], [], []
        for _ in range(self.max_steps):
            moves, state = self.advise(frames, ranks, real, state)
            noise = draw_gumbel(tuple(moves.shape), generator, moves.device)
            actions = (moves.detach() + noise).argmax(dim=2)  # a draw from the policy
            likelihoods.append(moves.gather(2, actions[:, :, None])[:, :, 0])
            entropies.append(-(moves.exp() * moves).sum(dim=2))
            movings.append(moving)
            ranks = torch.where(moving[:, None], self.move(ranks, actions, real), ranks)
            moving = moving & (actions != STAY).any(dim=1)
            frames = views.heavy.take_along_dim(candidates_of_ranks(ranks, real)[:, :, None], 1)
            visited.append(ranks)
            predictions.append(self.average(frames))
        return Episode(
            torch.stack(predictions, dim=1),
            torch.stack(likelihoods, dim=1),
            torch.stack(entropies, dim=1),
            torch.stack(movings, dim=1),
            torch.stack(visited, dim=1),
        )

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return cross-entropy of the averaged prediction, REINFORCE and entropy; means over videos, steps, agents."""
        rollouts = self.config["rollouts"]
        rows = torch.arange(len(labels), device=labels.device).repeat_interleave(rollouts)
        labels = labels[rows]
        episode = self.episode(views.some(rows), generator)
        confidence = log_label_confidence(episode.probabilities.detach().clamp_min(_SMALLEST).log(), labels).exp()
        rewards = confidence[:, 1:] - confidence[:, :-1]
        advantage = without_baseline(discounted(rewards, self.config["discount"]), rollouts)
        moving = episode.moving[:, :, None]
        policy = -(episode.log_likelihood * advantage[:, :, None] * moving).mean()
        entropy = (episode.entropy * moving).mean()
        average = episode.probabilities
        # Logits whose `activate` gives the average.
        logits = average.logit(eps=1e-6) if self.multi_label else average.clamp_min(_SMALLEST).log()
        prediction = self.label_loss(logits, labels[:, None]).mean()
        bonus = self.config["entropy_weight"] * (1 - progress) * entropy
        total = prediction + self.config["policy_weight"] * policy - bonus
        parts = {"prediction": prediction, "policy": policy, "entropy": entropy, "reward": rewards.sum(dim=1).mean()}
        return total, {key: value.detach() for key, value in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        real = views.real
        ranks = self.start(real)
        state = views.heavy.new_zeros(*ranks.shape, self.config["hidden"])
        moving = real.any(dim=1)
        steps = torch.zeros_like(ranks[:, 0])
        positions = candidates_of_ranks(ranks, real)
        seen = torch.zeros_like(real).scatter_(1, positions, True)
        for _ in range(self.max_steps):
            moves, state = self.advise(views.heavy.take_along_dim(positions[:, :, None], 1), ranks, real, state)
            actions = moves.argmax(dim=2)
            steps += moving
            moving = moving & (actions != STAY).any(dim=1)
            if not bool(moving.any()):
                break
            ranks = torch.where(moving[:, None], self.move(ranks, actions, real), ranks)
            positions = candidates_of_ranks(ranks, real)
            seen = seen.scatter(1, positions, True)
        probabilities = self.average(views.heavy.take_along_dim(positions[:, :, None], 1))
        return BaselineOutput(probabilities, {"heavy": seen}, steps)

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Average the class layer over the chosen frames: agents that do not move."""
        rows, positions = chosen.nonzero(as_tuple=True)
        each = self.activate(self.classify(views.heavy[rows, positions]))
        total = each.new_zeros(len(chosen), each.shape[1]).index_add_(0, rows, each)
        return BaselineOutput(total / chosen.sum(dim=1, keepdim=True), {"heavy": chosen})

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return matrix_gmacs(self.classify) * seen.seen_heavy.sum(dim=1)

    def average(self, frames: Tensor) -> Tensor:
        """Return the averaged prediction [B, C] from heavy features [B, N, D]."""
        return self.activate(self.classify(frames)).mean(dim=1)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        every = torch.full_like(seen.seen_heavy[:, 0], self.max_steps, dtype=torch.int64)
        steps = every if seen.steps is None else seen.steps
        return self.agents * (steps * matrix_gmacs(self.observe, self.cell, self.policy) + matrix_gmacs(self.classify))


def without_baseline(returns: Tensor, rollouts: int) -> Tensor:
    """Subtract from returns [B·K, S] the mean of the other K − 1 rollouts of the same video at the same step.

    >>> without_baseline(torch.tensor([[1.0], [2.0], [6.0]]), 3).tolist()
    [[-3.0], [-1.5], [4.5]]
    """
    grouped = returns.unflatten(0, (-1, rollouts))
    others = (grouped.sum(dim=1, keepdim=True) - grouped) / (rollouts - 1)
    return (grouped - others).flatten(0, 1)
