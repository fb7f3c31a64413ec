"""Multiply-adds, by torch's own counter of what the operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@torch.no_grad()
def count_gmacs(module: nn.Module, *inputs: Tensor) -> float:
    """Giga multiply-adds of `module(*inputs)`: convolutions, matrix products and attention.

    Runs on the meta device: shapes only, no memory and no arithmetic; a module that looks at values is run for real.
    One multiply-add counts once (papers on video write it "GFLOPs"); additions, normalisations and activations are not
    counted.
    """
    training = module.training
    module.eval()
    try:
        return _count_on_meta(module, inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return _count(lambda: module(*(_zeros_beside(module, tensor) for tensor in inputs)))  # it looks at values
    finally:
        module.train(training)


def _count_on_meta(module: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    meta = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    shapes = tuple(tensor.to("meta") for tensor in inputs)
    return _count(lambda: functional_call(module, meta, shapes))


def _count(run: Callable[[], Any]) -> float:
    # The plain form of attention is two batched products, which every version of the counter knows.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops()) / 2e9


def _zeros_beside(module: nn.Module, like: Tensor) -> Tensor:
    anchor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    return torch.zeros(like.shape, dtype=like.dtype, device=anchor.device)


def to_channels_last(net: nn.Module) -> list[Tensor]:
    """Lay out what 2-D convolutions hold as they work fastest, the same numbers. Returns the tensors that changed.

    Those of 3-D convolutions have five dimensions and stay as they are: `net.to(memory_format=...)` would refuse them.
    """
    changed = []
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.ndim == 4 and tensor.is_contiguous():
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
            changed.append(tensor)
    return changed
