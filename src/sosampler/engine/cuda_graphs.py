"""CUDA graphs: all kernels of a batch are started by one call, which is what small batches wait for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Outputs = tuple[Tensor | None, ...]
Captured = TypeVar("Captured")
_KEPT = 4  # shapes whose graph and memory are kept
_WARM_UP = 3  # runs before the capture: libraries choose their kernels and take their workspace


def kind_of(tensors: Iterable[Tensor]) -> Any:
    """What tensors must have in common to go into the same buffers."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def capture(compute: Callable[[], Captured], stream: Any, pool: Any = None) -> tuple[Any, Captured]:
    """`compute()` as a graph, and what it gave in the capture, after some runs.

    `stream`: of the device; torch's own for captures is that of the device it was first used on. Graphs with the same
    `pool` of memory want the same one.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            compute()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device), torch.cuda.graph(graph, pool=pool, stream=stream):
        found = compute()
    return graph, found


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
        key = kind_of(inputs)
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
        graph, outputs = capture(lambda: self._computed(buffers), torch.cuda.Stream(device))
        return graph, buffers, outputs

    def _computed(self, buffers: list[Tensor]) -> Outputs:
        """With cuDNN's fastest kernels, which it finds by trying in the first run."""
        tf32 = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
            return self._compute(*buffers)

    def __len__(self) -> int:
        return len(self._graphs)


KEEP = "SOSAMPLER_KEEP_MEMORY"  # "0" in the environment leaves the allocator alone
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_BYTES = 1 << 30  # the most that mallopt takes as an int, and more than one layer of a batch needs
_NEVER = -1  # a step of training frees several times as much at its end, and needs it again at once
_SETTINGS = {_MMAP_THRESHOLD: _BYTES, _TRIM_THRESHOLD: _NEVER}


@cache
def keep_memory() -> bool:
    """Let freed memory stay with the process, once; whether that is possible here (glibc) and wanted.

    SOSAMPLER_KEEP_MEMORY=0 in the environment asks for the allocator's own thresholds.
    """
    if os.environ.get(KEEP, "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # mallopt returns 1 where it took the value.
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS.items())
