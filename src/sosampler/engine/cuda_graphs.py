"""CUDA graphs: all kernels of a batch are started by one call, which is what small batches wait for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
_KEPT = 4  # shapes whose graph and memory are kept
_WARM_UP = 3  # runs before the capture: libraries choose their kernels and take their workspace


class GraphedCalls:
    """`compute(*tensors)` as CUDA graphs, one for each combination of input shapes.

    Args:
        compute: takes tensors on the device and gives tensors or None; does not wait for the device.
        kept: how many shapes are kept; the one unused for longest makes room.

    Inputs are copied into buffers of the graph, outputs out of them, so that results stay what they are.
    """

    def __init__(self, compute: Callable[..., Outputs], *, kept: int = _KEPT) -> None:
        self._compute = compute
        self._kept = kept
        self._graphs: OrderedDict[Any, tuple[Any, list[Tensor], Outputs]] = OrderedDict()

    def __call__(self, *inputs: Tensor) -> Outputs:
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        else:
            while len(self._graphs) >= self._kept:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._captured(inputs)
        graph, buffers, outputs = self._graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return tuple(None if output is None else output.clone() for output in outputs)

    def _captured(self, inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor], Outputs]:
        device = inputs[0].device
        buffers = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._computed(buffers)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # On this stream: torch's own for captures is that of the device it was first used on.
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=aside):
            outputs = self._computed(buffers)
        return graph, buffers, outputs

    def _computed(self, buffers: list[Tensor]) -> Outputs:
        """With cuDNN's fastest kernels, which it finds by trying in the first run."""
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            return self._compute(*buffers)

    def __len__(self) -> int:
        return len(self._graphs)
