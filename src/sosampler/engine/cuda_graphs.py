"""CUDA graphs: one call starts all kernels of a batch. Small batches spend most of their time on such starts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
Captured = TypeVar("Captured")
_MAX_GRAPHS = 4  # input shapes whose graph and memory are kept
_WARM_UP = 3  # runs before the capture, in which libraries choose their kernels and allocate workspace


def kind_of(tensors: Iterable[Tensor]) -> Any:
    """Return what tensors must have in common to share buffers: shapes, strides and types."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def capture(compute: Callable[[], Captured], stream: Any, pool: Any = None) -> tuple[Any, Captured]:
    """Capture `compute()` as a graph after a few runs; return the graph and the outputs of the capture.

    `stream` must be of the device: torch's default capture stream is that of the device it was first used on. Graphs
    that share a memory `pool` need the same stream.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            compute()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device), torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = compute()
    return graph, outputs


class GraphedCalls:
    """`compute(*tensors)` as CUDA graphs, one for each combination of input shapes.

    Inputs are copied into the graph's buffers and outputs out of them, so that results are not overwritten.

    Args:
        compute: takes tensors on the device and returns tensors or None, without waiting for the device.
        max_graphs: how many shapes are kept; the least recently used one makes room.
    """

    def __init__(self, compute: Callable[..., Outputs], *, max_graphs: int = _MAX_GRAPHS) -> None:
        self._compute = compute
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Any, tuple[Any, list[Tensor], Outputs]] = OrderedDict()

    def __call__(self, *inputs: Tensor) -> Outputs:
        key = kind_of(inputs)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        else:
            while len(self._graphs) >= self._max_graphs:
                self._graphs.popitem(last=False)
            buffers = [torch.empty_like(tensor).copy_(tensor) for tensor in inputs]
            graph, outputs = capture(lambda: self._run(buffers), torch.cuda.Stream(inputs[0].device))
            self._graphs[key] = (graph, buffers, outputs)
        graph, buffers, outputs = self._graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        graph.replay()
        return tuple(None if output is None else output.clone() for output in outputs)

    def _run(self, buffers: list[Tensor]) -> Outputs:
        """Run with cuDNN's fastest kernels, which it finds by trying them in the first run."""
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            return self._compute(*buffers)

    def __len__(self) -> int:
        return len(self._graphs)
