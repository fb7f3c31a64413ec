"""One process or several: who writes, which share of a batch is whose, and how gradients meet.

Several are started by `accelerate launch` on GPUs, by `torchrun` on processors; each runs the same program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from sosampler._util.devices import check_device
from sosampler.classifiers.pooled import import_timm
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError

# How long the others wait while one evaluates; NCCL alone would give up after ten minutes.
_PATIENCE = timedelta(minutes=30)


class OtherProcessFailed(SosamplerError):
    """Another process of the run found what is wrong and says it."""


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
            network = synchronised(network)
        prepared: nn.Module = self._accelerator.prepare_model(network)
        return prepared

    def total(self, sums: Tensor) -> Tensor:
        """A tensor summed over processes."""
        if self._accelerator is None:
            return sums
        found: Tensor = self._accelerator.reduce(sums, reduction="sum")
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the processes do side by side, or one of them alone: all go on, or none does.

        Bad input that any of them finds ends all. The first of those that found it raises it, the others raise
        `OtherProcessFailed`, so that nobody waits for one that is gone and each sentence is said once.
        """
        own: SosamplerError | OSError | None = None
        try:
            yield
        except (SosamplerError, OSError) as error:
            own = error
        told = self._gathered(None if own is None else str(own))
        first = next((rank for rank, text in enumerate(told) if text is not None), None)
        if first is None:
            return
        if own is not None and first == self.rank:
            raise own
        raise OtherProcessFailed(f"process {first} of {self.count}: {told[first]}") from own

    def _gathered(self, text: str | None) -> list[str | None]:
        """What each process says; waits for all."""
        if self._accelerator is None:
            return [text]
        found: list[str | None] = [None] * self.count
        torch.distributed.all_gather_object(found, text)
        return found


def synchronised(network: nn.Module) -> nn.Module:
    """The network with batch statistics of all processes, around the same parameters.

    By timm's own way, which knows its layers that are batch norm and activation in one; PyTorch's loses the activation.
    """
    found: nn.Module = import_timm().layers.convert_sync_batchnorm(network)
    return found


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the program goes on while it travels."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _accelerator(*, cpu: bool) -> Any:
    try:
        from accelerate import (  # type: ignore[import-untyped]
            Accelerator,
            DistributedDataParallelKwargs,
            InitProcessGroupKwargs,
        )
    except ImportError as error:
        raise MissingDependency("training in several processes needs accelerate; install sosampler[train]") from error
    # Autocast, batches and schedules are the loop's own.
    # The loss reaches every head, but some networks of timm have weights that no output depends on.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    patient = InitProcessGroupKwargs(timeout=_PATIENCE)
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[unused, patient])


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
