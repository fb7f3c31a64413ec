"""Steps of a training as CUDA graphs: a small network's kernels take less time to run than to start one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sosampler.engine.cuda_graphs import capture, kind_of

Losses = dict[str, Tensor]


@dataclass(frozen=True)
class _Step:
    """One captured step and the memory that it reads and writes."""

    graph: Any
    inputs: list[Tensor]
    losses: Losses
    gradients: list[Tensor | None]  # of the network's parameters


class GraphedSteps:
    """Forward and backward of a training step, one graph for each combination of input shapes.

    Args:
        compute: takes tensors on the device, gives losses, and leaves gradients in the network's parameters, which had
            none; does not wait for the device.
        network: its buffers, such as the running statistics of batch norms, follow once for each call.

    Losses stay what they are until the next call. Graphs share their memory: of several shapes the largest counts.
    """

    def __init__(self, compute: Callable[..., Losses], network: nn.Module) -> None:
        self._compute = compute
        self._network = network
        self._steps: dict[Any, _Step] = {}
        self._pool: Any = None
        self._stream: Any = None  # of the first capture

    def __call__(self, *inputs: Tensor) -> Losses:
        key = kind_of(inputs)
        if key not in self._steps:
            self._steps[key] = self._captured(inputs)
        step = self._steps[key]
        for buffer, tensor in zip(step.inputs, inputs, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        step.graph.replay()
        for parameter, gradient in zip(self._network.parameters(), step.gradients, strict=True):
            parameter.grad = gradient
        return step.losses

    def _captured(self, inputs: tuple[Tensor, ...]) -> _Step:
        device = inputs[0].device
        random = torch.cuda.get_rng_state(device)
        kept = [buffer.clone() for buffer in self._network.buffers()]
        buffers = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]

        def computed() -> Losses:
            self._network.zero_grad(set_to_none=True)
            return self._compute(*buffers)

        self._stream = torch.cuda.Stream(device) if self._stream is None else self._stream
        graph, losses = capture(computed, self._stream, self._pool)
        self._pool = graph.pool() if self._pool is None else self._pool
        for buffer, before in zip(self._network.buffers(), kept, strict=True):
            buffer.copy_(before)
        torch.cuda.set_rng_state(random, device)
        return _Step(graph, buffers, losses, [parameter.grad for parameter in self._network.parameters()])

    def __len__(self) -> int:
        return len(self._steps)
