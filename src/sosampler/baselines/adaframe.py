"""AdaFrame: an agent jumps between frames of a video and stops when it expects no further gain.

After Wu, Xiong, Ma, Socher and Davis, "AdaFrame: Adaptive Frame Selection for Fast Video Recognition", CVPR 2019.

As in the paper: an LSTM whose input is the heavy features of the current frame and a context, which it reads by
attention from a global memory of light features (16 frames there). Every step gives class scores, the next location
(the mean of a Gaussian over 0..1) and a utility, the expected further reward. The reward is the growth of the best
margin so far, p_label − the highest other p. Locations learn by REINFORCE with the utility as baseline, the utility by
regression on the discounted reward, the scores by cross-entropy. At run time the mean is the location.

Different, or chosen here where the paper does not specify it:
- Positions are encoded as sines and cosines of the position in 0..1, for any T. The context holds them, and the LSTM
  also gets the position of the current frame.
- Cross-entropy is taken at every step, because at run time any step may be the last.
- It stops when the utility has not exceeded its highest value for `patience` steps in a row.
- The first frame is in the middle of the video. A frame may be seen twice; the heavy network runs for it once.

No weight's shape depends on `max_steps` or `patience`: trained weights work with other values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int
from sosampler.baselines.base import Baseline, BaselineOutput, Loss, Rng, Views, candidates_of_ranks, matrix_gmacs
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import log_label_confidence

_WAVES = 4  # sine and cosine of 1/2, 1, 2 and 4 periods a video
_SMALLEST = 1e-12  # probabilities are clamped here before a logarithm


class StepOutput(NamedTuple):
    """The agent's output after a frame."""

    logits: Tensor  # [B, C]
    location: Tensor  # [B] in 0..1, of the next frame
    utility: Tensor  # [B], expected further reward


class Memory(NamedTuple):
    """Encoded light features of some frames."""

    entries: Tensor  # [B, M, W]
    real: Tensor  # bool [B, M], False = the video has fewer frames
    positions: Tensor  # int64 [B, M], candidates


class AdaFrame(Baseline):
    """An LSTM with a global memory that chooses its next frame."""

    name = "adaframe"
    threshold = "patience"
    threshold_values = (1, 2, 3, 4, 6, 10)  # from max_steps on, it never stops early

    def __init__(
        self,
        heavy_width: int,  # features of a frame from the heavy network
        light_width: int,  # features of a frame from the light network
        num_classes: int,  # at least 2
        *,
        hidden: int = 512,  # units of the LSTM
        width: int = 128,  # of the memory's entries
        memory_frames: int = 16,  # evenly spread candidates for the light network
        max_steps: int = 10,  # frames in training, and the maximum at run time
        patience: int = 2,  # stop after this many steps in a row without a new highest utility
        deviation: float = 0.1,  # standard deviation of the location in training
        discount: float = 0.9,  # of rewards, per step
        rollouts: int = 1,  # episodes of every video in a training batch
        policy_weight: float = 1.0,  # of the REINFORCE loss
        utility_weight: float = 1.0,  # of the regression of the utility
        multi_label: bool = False,  # classes do not exclude each other
    ) -> None:
        config: dict[str, Any] = {
            "heavy_width": check_int("heavy_width", heavy_width),
            "light_width": check_int("light_width", light_width),
            "num_classes": check_int("num_classes", num_classes, at_least=2),
            "hidden": check_int("hidden", hidden),
            "width": check_int("width", width),
            "memory_frames": check_int("memory_frames", memory_frames),
            "max_steps": check_int("max_steps", max_steps, at_least=2),
            "patience": check_int("patience", patience),
            "deviation": check_float("deviation", deviation, above=0),
            "discount": discount_factor(discount),
            "rollouts": check_int("rollouts", rollouts),
            "policy_weight": check_float("policy_weight", policy_weight, at_least=0),
            "utility_weight": check_float("utility_weight", utility_weight, at_least=0),
            "multi_label": check_bool("multi_label", multi_label),
        }
        super().__init__(config)
        self.max_steps, self.patience, self.deviation = config["max_steps"], config["patience"], config["deviation"]
        # Saved weights have these names of layers.
        self.place = nn.Linear(1 + 2 * _WAVES, width)
        self.memorise = nn.Linear(light_width, width)
        self.ask = nn.Linear(hidden, width)
        self.cell = nn.LSTMCell(heavy_width + 2 * width, hidden)
        self.classify = nn.Linear(hidden, num_classes)
        self.locate = nn.Linear(hidden, 1)
        self.value = nn.Linear(hidden, 1)
        nn.init.zeros_(self.locate.weight)  # it starts from the middle
        nn.init.zeros_(self.locate.bias)

    def remember(self, views: Views) -> Memory:
        """Encode the light features of evenly spread real candidates."""
        positions, real = evenly_spread(views.real, self.config["memory_frames"])
        light = views.light.take_along_dim(positions[:, :, None], 1)
        entries = self.memorise(light) + self._encode(relative_position(positions, views.real))
        return Memory(entries, real, positions)

    def step(
        self, frames: Tensor, locations: Tensor, memory: Memory, state: tuple[Tensor, Tensor]
    ) -> tuple[StepOutput, tuple[Tensor, Tensor]]:
        """Return output and next state from heavy features [B, D] of the frames at locations [B] in 0..1."""
        similarity = (memory.entries @ self.ask(state[0])[:, :, None])[:, :, 0] / math.sqrt(memory.entries.shape[2])
        attention = similarity.masked_fill(~memory.real, -math.inf).softmax(dim=1)
        context = (attention[:, None] @ memory.entries)[:, 0]
        state = self.cell(torch.cat([frames, self._encode(locations), context], dim=1), state)
        hidden = state[0]
        output = StepOutput(self.classify(hidden), self.locate(hidden)[:, 0].sigmoid(), self.value(hidden)[:, 0])
        return output, state

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the mean over videos and S steps of cross-entropy, REINFORCE and squared error of the utility."""
        rows = torch.arange(len(labels), device=labels.device).repeat_interleave(self.config["rollouts"])
        labels, views = labels[rows], views.some(rows)
        memory, state, position = self._start(views)
        source = views.heavy.device if generator is None else generator.device  # so that every device draws the same
        outputs, jumps = [], []  # drawn locations around those of the agent, S − 1 of [B]
        for step in range(self.max_steps):
            frames = views.heavy.take_along_dim(position[:, None, None], 1)[:, 0]
            output, state = self.step(frames, relative_position(position, views.real), memory, state)
            outputs.append(output)
            if step + 1 < self.max_steps:
                # The draw has no gradient. One beyond 0..1 keeps its likelihood and means the first or last frame.
                noise = torch.randn(position.shape, generator=generator, device=source).to(position.device)
                jumps.append(output.location.detach() + self.deviation * noise)
                position = nearest_candidate(jumps[-1].clamp(0, 1), views.real)
        logits, means, utilities = (torch.stack(values, dim=1) for values in zip(*outputs, strict=True))  # [B, S, ...]
        rewards = margin_gains(margins(self.activate(logits.detach()), labels))  # [B, S − 1]
        returns, utilities = discounted(rewards, self.config["discount"]), utilities[:, :-1]
        # Log-likelihood of the drawn locations up to a constant; the means carry the gradient of the policy.
        log_likelihood = -(((torch.stack(jumps, dim=1) - means[:, :-1]) / self.deviation) ** 2) / 2
        prediction = self.label_loss(logits, labels[:, None]).mean()
        policy = -(log_likelihood * (returns - utilities.detach())).mean()
        utility = ((utilities - returns) ** 2).mean()
        total = prediction + self.config["policy_weight"] * policy + self.config["utility_weight"] * utility
        parts = {"prediction": prediction, "policy": policy, "utility": utility, "reward": rewards.sum(dim=1).mean()}
        return total, {key: value.detach() for key, value in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        real = views.real
        memory, state, position = self._start(views)
        seen_heavy = torch.zeros_like(real)
        searching = real.any(dim=1)
        steps = torch.zeros_like(position)
        stale = torch.zeros_like(position)  # steps since the utility was highest
        probabilities = views.heavy.new_zeros(len(real), self.config["num_classes"])
        highest = views.heavy.new_full((len(real),), -math.inf)
        for _ in range(self.max_steps):
            seen_heavy |= searching[:, None] & (torch.arange(real.shape[1], device=real.device) == position[:, None])
            frames = views.heavy.take_along_dim(position[:, None, None], 1)[:, 0]
            output, state = self.step(frames, relative_position(position, real), memory, state)
            probabilities = torch.where(searching[:, None], self.activate(output.logits), probabilities)
            steps += searching
            stale = torch.where(output.utility > highest, 0, stale + 1)
            highest = torch.maximum(highest, output.utility)
            searching = searching & (stale < self.patience)
            if not bool(searching.any()):
                break
            # Videos that have stopped keep their position, so that no further frame is read.
            position = torch.where(searching, nearest_candidate(output.location, real), position)
        seen_light = torch.zeros_like(real).scatter_(1, memory.positions, True)
        return BaselineOutput(probabilities, seen_heavy, seen_light, steps)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        remembered = seen.seen_light.sum(dim=1)
        attention = 2 * remembered * self.config["width"] / 1e9  # similarities, then the weighted sum
        layers = (self.ask, self.place, self.cell, self.classify, self.locate, self.value)
        steps = seen.seen_heavy.sum(dim=1) if seen.steps is None else seen.steps
        return remembered * matrix_gmacs(self.memorise, self.place) + steps * (attention + matrix_gmacs(*layers))

    def _start(self, views: Views) -> tuple[Memory, tuple[Tensor, Tensor], Tensor]:
        """Return the memory, a state of zeros, and the middle of each video."""
        empty = views.heavy.new_zeros(len(views.heavy), self.config["hidden"])
        middle = nearest_candidate(views.heavy.new_full((len(views.heavy),), 0.5), views.real)
        return self.remember(views), (empty, empty), middle

    def _encode(self, locations: Tensor) -> Tensor:
        """Encode locations in 0..1 [...] as vectors [..., W]."""
        angles = math.pi * locations[..., None] * 2.0 ** torch.arange(_WAVES, device=locations.device)
        return self.place(torch.cat([2 * locations[..., None] - 1, angles.sin(), angles.cos()], dim=-1))


def discount_factor(value: float) -> float:
    """Check that a discount is a number from 0 to 1."""
    factor = check_float("discount", value, at_least=0)
    if factor > 1:
        raise InvalidArgument(f"discount={value!r} must be a number from 0 to 1")
    return factor


def evenly_spread(real: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, count] of evenly spread real candidates, and a mask [B, count]: a video may have fewer."""
    available = real.sum(dim=1, keepdim=True)
    number = torch.arange(count, device=real.device)
    # The middles of equal segments; a video with fewer candidates than segments gives each of them once.
    ranks = torch.where(available > count, ((2 * number + 1) * available) // (2 * count), number)
    used = ranks < available
    return candidates_of_ranks(torch.where(used, ranks, 0), real), used


def nearest_candidate(locations: Tensor, real: Tensor) -> Tensor:
    """Return the real candidate [B] nearest to a location [B] in 0..1; of two equally near ones the earlier.

    0 is the first real candidate and 1 the last, so that padding is no part of the video.
    """
    position = torch.arange(real.shape[1], device=real.device)
    first, length = _extent(real)
    distance = (position - (first + locations * length)[:, None]).abs()
    return distance.masked_fill(~real, math.inf).argmin(dim=1)


def relative_position(positions: Tensor, real: Tensor) -> Tensor:
    """Return locations in 0..1 of candidates [B, ...] between the first and the last real one of their video."""
    first, length = (value.reshape(-1, *(1,) * (positions.dim() - 1)) for value in _extent(real))
    return (positions - first) / length.clamp_min(1)


def margins(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return confidence in the labels [B, C] minus the highest other probability, [B, S, C] -> [B, S]."""
    confidence = log_label_confidence(probabilities.clamp_min(_SMALLEST).log(), labels).exp()
    return confidence - probabilities.masked_fill(labels[:, None] > 0, 0).amax(dim=-1)


def margin_gains(margin: Tensor) -> Tensor:
    """Return the growth of the best margin at each step after the first, [B, S] -> [B, S − 1], never negative."""
    best = margin.cummax(dim=1).values
    return best[:, 1:] - best[:, :-1]


def discounted(rewards: Tensor, discount: float) -> Tensor:
    """Return the discounted sum of the rewards from each step on, [B, S].

    >>> discounted(torch.tensor([[1.0, 0.0, 4.0]]), 0.5).tolist()
    [[2.0, 2.0, 4.0]]
    """
    returns = [torch.zeros_like(rewards[:, 0])]
    for reward in reversed(rewards.unbind(dim=1)):
        returns.append(reward + discount * returns[-1])
    return torch.stack(returns[:0:-1], dim=1)


def _extent(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first real candidate of each video, and the distance to the last one; both [B]."""
    first = real.to(torch.uint8).argmax(dim=1)
    last = real.shape[1] - 1 - real.flip(1).to(torch.uint8).argmax(dim=1)
    return first, last - first
