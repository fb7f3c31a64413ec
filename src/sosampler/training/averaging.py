"""A running mean of a network's weights, which is steadier than the weights themselves."""

from __future__ import annotations

import copy

import torch
from torch import nn


class RunningMean:
    """A copy of a network that follows it: each step takes the share 1 - decay of the difference.

    The decay grows over the first steps, (1 + step) / (10 + step), so that the random start is soon forgotten.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.decay = decay
        self._pairs = self._matched(network)

    def _matched(self, network: nn.Module) -> tuple[list[torch.Tensor], ...]:
        """Tensors that are averaged, here and there, and whole numbers, which are copied."""
        ours, theirs = self.network.state_dict(), network.state_dict()
        real = [key for key in ours if ours[key].is_floating_point()]
        whole = [key for key in ours if key not in real]
        return tuple([state[key] for key in keys] for keys in (real, whole) for state in (ours, theirs))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After optimiser step number `step`, from 0."""
        ours, theirs, our_counts, their_counts = self._pairs
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        if our_counts:
            torch._foreach_copy_(our_counts, their_counts)
