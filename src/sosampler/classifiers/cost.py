"""Count multiply-adds with torch's FLOP counter."""

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
    """Return the giga multiply-adds of `module(*inputs)`: convolutions, matrix products and attention.

    Runs on the meta device: shapes only, no memory and no arithmetic; a module that reads values runs on its own
    device. One multiply-add counts once (papers on video call it "GFLOPs"); additions, normalisations and activations
    are not counted.
    """
    training = module.training
    module.eval()
    try:
        meta = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        shapes = tuple(tensor.to("meta") for tensor in inputs)
        return _count(lambda: functional_call(module, meta, shapes))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):  # it reads values
        anchor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
        zeros = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=anchor.device) for tensor in inputs]
        return _count(lambda: module(*zeros))
    finally:
        module.train(training)


def _count(run: Callable[[], Any]) -> float:
    # Plain attention is two batched products, which every version of the counter supports.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops()) / 2e9


def to_channels_last(net: nn.Module) -> list[Tensor]:
    """Store the weights of 2-D convolutions channels last, which is faster; return the tensors that changed.

    Weights of 3-D convolutions are left alone: `net.to(memory_format=...)` would refuse them.
    """
    changed = []
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.ndim == 4 and tensor.is_contiguous():
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
            changed.append(tensor)
    return changed
