"""One process or several: who writes, which share of a batch is whose, and how gradients meet.

Several are started by `accelerate launch` on GPUs, by `torchrun` on processors; each runs the same program.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from sosampler.checks import one_of
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.devices import check_device
from sosampler.errors import InvalidArgument, MissingDependency


class Processes:
    """This process among all of the run."""

    def __init__(self, device: str | None = None) -> None:
        self.count = _number("WORLD_SIZE", 1)
        self.rank = _number("RANK", 0) if self.count > 1 else 0
        self.local_count = _number("LOCAL_WORLD_SIZE", self.count) if self.count > 1 else 1
        if self.count == 1:
            self._accelerator: Any = None
            self.device = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            return
        kind = None if device is None else check_device(device).type
        if device is not None and (kind not in ("cpu", "cuda") or ":" in device):
            raise InvalidArgument(
                f"device={device!r} is not allowed with {self.count} processes; give cpu, cuda or nothing: "
                "every process has a device of its own"
            )
        self._accelerator = _accelerator(cpu=kind == "cpu" or not torch.cuda.is_available())
        self.device = self._accelerator.device
        if self._accelerator.num_processes != self.count:
            raise InvalidArgument(
                f"WORLD_SIZE={self.count} but accelerate sees {self._accelerator.num_processes} processes; "
                "start them with `accelerate launch --num_processes N`, without GPUs with `torchrun --nproc-per-node N`"
            )

    @property
    def is_main(self) -> bool:
        """Whether this one writes and speaks."""
        return self.rank == 0

    def part(self, batch_size: int) -> slice:
        """The share of a batch that is this process's."""
        return slice(self.rank * batch_size // self.count, (self.rank + 1) * batch_size // self.count)

    def wrapped(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over processes; on GPUs its batch statistics are those of all."""
        if self._accelerator is None:
            return network
        if self.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        prepared: nn.Module = self._accelerator.prepare_model(network)
        return prepared

    def total(self, sums: Tensor) -> Tensor:
        """A tensor summed over processes."""
        if self._accelerator is None:
            return sums
        found: Tensor = self._accelerator.reduce(sums, reduction="sum")
        return found

    def wait(self) -> None:
        """For all the others."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()


def settled_precision(device: torch.device, precision: str | None) -> str:
    """What was asked for; else bfloat16 on GPUs that have it, float16 on others and float32 elsewhere."""
    if precision is not None:
        return one_of("precision", precision, PRECISIONS)
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the program goes on while it travels."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _accelerator(*, cpu: bool) -> Any:
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency("training in several processes needs accelerate; install sosampler[train]") from error
    # Autocast, batches and schedules are the loop's own.
    # Some ways of scoring leave a head out of the loss.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[unused])


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
