"""One process or several: which one writes, which share of a batch each has, and how gradients are averaged.

`accelerate launch` starts several on GPUs, `torchrun` on CPUs; each runs the same program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from sosampler._util.hardware import check_device, resolve_device
from sosampler.classifiers.pooled import import_timm
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError

# How long the others wait while one evaluates; NCCL alone would give up after ten minutes.
_TIMEOUT = timedelta(minutes=30)


class OtherProcessFailed(SosamplerError):
    """Another process of the run failed and reports why."""


class Processes:
    """This process among all of the run.

    `alone`: ignore the variables that launchers set, for trainings in one process.
    """

    def __init__(self, device: str | None = None, *, alone: bool = False) -> None:
        self.count = 1 if alone else _number("WORLD_SIZE", 1)
        self.rank = _number("RANK", 0) if self.count > 1 else 0
        self.local_count = _number("LOCAL_WORLD_SIZE", self.count) if self.count > 1 else 1
        if self.count == 1:
            self._accelerator: Any = None
            self.device = resolve_device(device or None)
            return
        kind = None if device is None else check_device(device).type
        if device is not None and (kind not in ("cpu", "cuda") or ":" in device):
            raise InvalidArgument(
                f"device={device!r} must be cpu, cuda or left out with {self.count} processes: "
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
        """Whether this process writes files and messages."""
        return self.rank == 0

    def part(self, batch_size: int) -> slice:
        """Return this process's share of a batch."""
        return slice(self.rank * batch_size // self.count, (self.rank + 1) * batch_size // self.count)

    def wrapped(self, network: nn.Module) -> nn.Module:
        """Wrap a network so that gradients are averaged over processes, on GPUs with batch statistics of all."""
        if self._accelerator is None:
            return network
        if self.device.type == "cuda":
            network = synchronised(network)
        return self._accelerator.prepare_model(network)

    def total(self, sums: Tensor) -> Tensor:
        """Sum a tensor over processes."""
        return sums if self._accelerator is None else self._accelerator.reduce(sums, reduction="sum")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in all processes, or in one of them alone, and end all if it fails in any.

        The first process that failed raises its own error and the others `OtherProcessFailed`, so that none waits for
        one that is gone and each message is printed once.
        """
        own_error: SosamplerError | OSError | None = None
        try:
            yield
        except (SosamplerError, OSError) as error:
            own_error = error
        messages = self._gathered(None if own_error is None else str(own_error))
        for rank, message in enumerate(messages):
            if message is not None:
                if own_error is not None and rank == self.rank:
                    raise own_error
                raise OtherProcessFailed(f"process {rank} of {self.count}: {message}") from own_error

    def _gathered(self, message: str | None) -> list[str | None]:
        """Return the message of each process; waits for all."""
        if self._accelerator is None:
            return [message]
        messages: list[str | None] = [None] * self.count
        torch.distributed.all_gather_object(messages, message)
        return messages


def synchronised(network: nn.Module) -> nn.Module:
    """Return the network with batch statistics of all processes, around the same parameters.

    timm's conversion knows its layers that are batch norm and activation in one; PyTorch's loses the activation.
    """
    return import_timm().layers.convert_sync_batchnorm(network)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the copy."""
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
        raise MissingDependency(
            "training in several processes needs accelerate; install it with: pip install 'sosampler[train]'"
        ) from error
    # The loop does autocast, batches and schedules itself.
    # The loss reaches every head, but some networks of timm have weights that no output depends on.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    timeout = InitProcessGroupKwargs(timeout=_TIMEOUT)
    return Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[unused, timeout])


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
