"""AdaFrame: an agent jumps between frames of a video and stops when it expects no further gain.

After Wu, Xiong, Ma, Socher and Davis, "AdaFrame: Adaptive Frame Selection for Fast Video Recognition", CVPR 2019.

As in the paper: an LSTM whose input is the heavy features of the current frame and a context, which it reads by
attention from a global memory of light features (16 frames there). Every step gives class scores, the next location
(the mean of a Gaussian over 0..1 with a fixed deviation of 0.1) and a utility, the expected further reward. The reward
is the growth of the best margin so far, p_label − the highest other p. Locations learn by REINFORCE with the utility as
baseline, the utility by regression on the discounted reward, the scores by cross-entropy at the last step. At run time
the mean is the location, and the agent stops once the utility V has been below its maximum by more than mu for more
than p steps in a row: V_max − V_t > mu. mu is the threshold, p is `patience`.

Different, or chosen here where the paper does not specify it:
- A frame is seen once: the next frame is the unseen one nearest to the location, in training too. Locations that may
  come back did: they settled at two frames, whatever the number of steps.
- Location and utility read the state without a gradient to it, so that LSTM, memory and class layer learn by the
  cross-entropy alone. The cross-entropy does not teach the state where the class can be seen, so the location also
  reads a memory of its own, which learns by the reward (`search_memory`; without it, where only the light features hint
  at the right frames, locations learned nothing).
- Positions are encoded as sines and cosines of the position in 0..1, for any T. The context holds them, and the LSTM
  also gets the position of the current frame.
- The first frame is in the middle of the video. A video with fewer frames than steps ends at its last one.
- loss_at="every" takes the cross-entropy at every step: better answers where it stops early.

No weight's shape depends on `max_steps`, `patience` or `mu`: trained weights work with other values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_bool, check_float, check_int, one_of
from sosampler.baselines.base import (
    Baseline,
    BaselineOutput,
    Loss,
    Rng,
    Views,
    candidates_of_ranks,
    evenly_spread,
    matrix_gmacs,
)
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import log_label_confidence

_WAVES = 4  # sine and cosine of 1/2, 1, 2 and 4 periods a video
_NEVER_STOPS = 1e9  # as mu; utilities are within about 0..2
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
    search: Tensor | None  # [B, M, W], entries for locations

    def read(self, entries: Tensor, query: Tensor) -> Tensor:
        """Return the mean [B, W] of `entries` or `search` by attention to a query [B, W]."""
        similarity = (entries @ query[:, :, None])[:, :, 0] / math.sqrt(entries.shape[2])
        attention = similarity.masked_fill(~self.real, -math.inf).softmax(dim=1)
        return (attention[:, None] @ entries)[:, 0]


class AdaFrame(Baseline):
    """An LSTM with a global memory that chooses its next frame."""

    name = "adaframe"
    feature_sets = ("heavy", "light")
    threshold = "mu"
    threshold_values = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 2.0)  # the margin grows by at most 2: then it never stops early

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
        patience: int = 0,  # p, steps in a row for which the utility may be below its maximum by more than mu
        mu: float = 0.0,  # how far below its maximum the utility may be
        search_memory: bool = False,  # locations have a memory of their own
        loss_at: str = "last",  # step of the cross-entropy, or "every"
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
            "patience": check_int("patience", patience, at_least=0),
            "mu": check_float("mu", mu, at_least=0),
            "search_memory": check_bool("search_memory", search_memory),
            "loss_at": one_of("loss_at", loss_at, ("last", "every")),
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
        self.search = SearchMemory(light_width, width, hidden) if search_memory else None

    def remember(self, views: Views, *, search: bool = True) -> Memory:
        """Encode the light features of evenly spread real candidates; `search`: also for locations."""
        positions, real = evenly_spread(views.real, self.config["memory_frames"])
        light = views.light.take_along_dim(positions[:, :, None], 1)
        waves = encode_locations(relative_position(positions, views.real))
        entries, of_search = self.memorise(light) + self.place(waves), None
        if search and self.search is not None:
            of_search = self.search.memorise(light) + self.search.place(waves)
        return Memory(entries, real, positions, of_search)

    def step(
        self, frames: Tensor, locations: Tensor, memory: Memory, state: tuple[Tensor, Tensor]
    ) -> tuple[StepOutput, tuple[Tensor, Tensor]]:
        """Return output and next state from heavy features [B, D] of the frames at locations [B] in 0..1."""
        state = self._advance(frames, locations, memory, state)
        hidden = state[0].detach()  # rewards change the heads alone
        location = self.locate(hidden)
        if self.search is not None and memory.search is not None:
            location = location + self.search.towards(memory.read(memory.search, self.search.ask(hidden)))
        return StepOutput(self.classify(state[0]), location[:, 0].sigmoid(), self.value(hidden)[:, 0]), state

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return cross-entropy, mean over videos, + REINFORCE and squared error of the utility, means over jumps."""
        rows = torch.arange(len(labels), device=labels.device).repeat_interleave(self.config["rollouts"])
        labels, views = labels[rows], views.some(rows)
        memory, state, position = self._start(views)
        unseen, steps = views.real, views.real.sum(dim=1, keepdim=True).clamp_max(self.max_steps)  # steps [B, 1]
        source = views.heavy.device if generator is None else generator.device  # so that every device draws the same
        outputs, jumps = [], []  # drawn locations around those of the agent, S − 1 of [B]
        for step in range(self.max_steps):
            unseen = unseen.scatter(1, position[:, None], False)
            frames = views.heavy.take_along_dim(position[:, None, None], 1)[:, 0]
            output, state = self.step(frames, relative_position(position, views.real), memory, state)
            outputs.append(output)
            if step + 1 < self.max_steps:
                # The draw has no gradient. One beyond 0..1 keeps its likelihood and means the first or last frame.
                noise = torch.randn(position.shape, generator=generator, device=source).to(position.device)
                jumps.append(output.location.detach() + self.deviation * noise)
                nearest = nearest_candidate(jumps[-1].clamp(0, 1), views.real, unseen)
                position = torch.where(unseen.any(dim=1), nearest, position)  # what follows the last frame is not used
        logits, means, utilities = (torch.stack(values, dim=1) for values in zip(*outputs, strict=True))  # [B, S, ...]
        jumped = torch.arange(1, self.max_steps, device=steps.device) < steps  # bool [B, S − 1]
        rewards = margin_gains(margins(self.activate(logits.detach()), labels)) * jumped
        returns, utilities = discounted(rewards, self.config["discount"]), utilities[:, :-1]
        # Log-likelihood of the drawn locations up to a constant; the means carry the gradient of the policy.
        log_likelihood = -(((torch.stack(jumps, dim=1) - means[:, :-1]) / self.deviation) ** 2) / 2
        losses, number = self.label_loss(logits, labels[:, None]), jumped.sum().clamp_min(1)
        if self.config["loss_at"] == "last":
            prediction = losses.gather(1, steps - 1).mean()
        else:
            took = torch.arange(self.max_steps, device=steps.device) < steps
            prediction = ((losses * took).sum(dim=1) / steps[:, 0]).mean()
        policy = -(log_likelihood * (returns - utilities.detach()) * jumped).sum() / number
        utility = (((utilities - returns) ** 2) * jumped).sum() / number
        total = prediction + self.config["policy_weight"] * policy + self.config["utility_weight"] * utility
        parts = {"prediction": prediction, "policy": policy, "utility": utility, "reward": rewards.sum(dim=1).mean()}
        return total, {key: value.detach() for key, value in parts.items()}

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        real = views.real
        memory, state, position = self._start(views)
        unseen, searching = real, real.any(dim=1)
        steps = torch.zeros_like(position)
        below = torch.zeros_like(position)  # steps in a row with a utility below its maximum by more than mu
        probabilities = views.heavy.new_zeros(len(real), self.config["num_classes"])
        highest = views.heavy.new_full((len(real),), -math.inf)
        for _ in range(self.max_steps):
            unseen = unseen & ~(searching[:, None] & _one_hot(position, real))
            frames = views.heavy.take_along_dim(position[:, None, None], 1)[:, 0]
            output, state = self.step(frames, relative_position(position, real), memory, state)
            probabilities = torch.where(searching[:, None], self.activate(output.logits), probabilities)
            steps += searching
            highest = torch.maximum(highest, output.utility)
            below = torch.where(highest - output.utility > self.config["mu"], below + 1, 0)
            searching = searching & (below <= self.patience) & unseen.any(dim=1)
            if not bool(searching.any()):
                break
            # Videos that have stopped keep their position, so that no further frame is read.
            position = torch.where(searching, nearest_candidate(output.location, real, unseen), position)
        return BaselineOutput(probabilities, {"heavy": real & ~unseen, "light": self._remembered(memory, real)}, steps)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        search = [] if self.search is None else [self.search]
        return self._gmacs(
            seen, [self, *search], [self.classify, self.locate, self.value, *(one.towards for one in search)]
        )

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Visit the chosen frames in time order."""
        memory, empty = self.remember(views, search=False), views.heavy.new_zeros(len(chosen), self.config["hidden"])
        state, steps = (empty, empty), chosen.sum(dim=1)
        for step in range(int(steps.max())):
            position = candidates_of_ranks(torch.full_like(steps, step)[:, None], chosen)[:, 0]
            frames = views.heavy.take_along_dim(position[:, None, None], 1)[:, 0]
            following = self._advance(frames, relative_position(position, views.real), memory, state)
            here = (step < steps)[:, None]
            state = (torch.where(here, following[0], state[0]), torch.where(here, following[1], state[1]))
        probabilities = self.activate(self.classify(state[0]))
        return BaselineOutput(probabilities, {"heavy": chosen, "light": self._remembered(memory, views.real)}, steps)

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self._gmacs(seen, [self], []) + matrix_gmacs(self.classify)

    def with_each_step(self) -> Iterator[tuple[int, Baseline]]:
        for steps in range(2, self.max_steps + 1):
            yield steps, self._with_settings({"max_steps": steps, "mu": _NEVER_STOPS})

    def _advance(
        self, frames: Tensor, locations: Tensor, memory: Memory, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the state after frames [B, D] at locations [B], read together with a context from the memory."""
        context = memory.read(memory.entries, self.ask(state[0]))
        inputs = [frames, self.place(encode_locations(locations)), context]
        hidden, cell = self.cell(torch.cat(inputs, dim=1), state)
        return hidden, cell

    def _gmacs(
        self, seen: BaselineOutput, memories: Sequence[AdaFrame | SearchMemory], heads: Sequence[nn.Module]
    ) -> Tensor:
        """Return giga multiply-adds [B]: the memories once; reading them, LSTM and `heads` at each step."""
        remembered = seen.seen_light.sum(dim=1)
        attention = 2 * remembered * self.config["width"] / 1e9  # similarities, then the weighted sum
        entries = sum(matrix_gmacs(memory.memorise, memory.place) for memory in memories)
        reading = sum(attention + matrix_gmacs(memory.ask) for memory in memories)
        steps = seen.seen_heavy.sum(dim=1) if seen.steps is None else seen.steps
        return remembered * entries + steps * (reading + matrix_gmacs(self.place, self.cell, *heads))

    @staticmethod
    def _remembered(memory: Memory, real: Tensor) -> Tensor:
        return torch.zeros_like(real).scatter_(1, memory.positions, True)

    def _start(self, views: Views) -> tuple[Memory, tuple[Tensor, Tensor], Tensor]:
        """Return the memory, a state of zeros, and the middle of each video."""
        empty = views.heavy.new_zeros(len(views.heavy), self.config["hidden"])
        middle = nearest_candidate(views.heavy.new_full((len(views.heavy),), 0.5), views.real)
        return self.remember(views), (empty, empty), middle


class SearchMemory(nn.Module):
    """The layers of a memory that locations read."""

    def __init__(self, light_width: int, width: int, hidden: int) -> None:
        super().__init__()
        self.memorise = nn.Linear(light_width, width)
        self.place = nn.Linear(1 + 2 * _WAVES, width)
        self.ask = nn.Linear(hidden, width)
        self.towards = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.towards.weight)


def encode_locations(locations: Tensor) -> Tensor:
    """Return locations in 0..1 [...] with their sines and cosines, [..., 9]."""
    angles = math.pi * locations[..., None] * 2.0 ** torch.arange(_WAVES, device=locations.device)
    return torch.cat([2 * locations[..., None] - 1, angles.sin(), angles.cos()], dim=-1)


def discount_factor(value: float) -> float:
    """Check that a discount is a number from 0 to 1."""
    factor = check_float("discount", value, at_least=0)
    if factor > 1:
        raise InvalidArgument(f"discount={value!r} must be a number from 0 to 1")
    return factor


def nearest_candidate(locations: Tensor, real: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Return the real candidate [B] nearest to a location [B] in 0..1; of two equally near ones the earlier.

    0 is the first real candidate and 1 the last, so that padding is no part of the video. `allowed`, bool [B, T]: those
    that may be returned, instead of all real ones.
    """
    position = torch.arange(real.shape[1], device=real.device)
    first, length = _extent(real)
    distance = (position - (first + locations * length)[:, None]).abs()
    return distance.masked_fill(~(real if allowed is None else allowed), math.inf).argmin(dim=1)


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


def _one_hot(positions: Tensor, real: Tensor) -> Tensor:
    """Return positions [B] as a mask, bool [B, T]."""
    return torch.arange(real.shape[1], device=real.device) == positions[:, None]


def _extent(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first real candidate of each video, and the distance to the last one; both [B]."""
    first = real.to(torch.uint8).argmax(dim=1)
    last = real.shape[1] - 1 - real.flip(1).to(torch.uint8).argmax(dim=1)
    return first, last - first
