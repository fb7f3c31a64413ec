"""Where a network runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from sosampler.errors import InvalidArgument, first_line


def check_device(given: Any) -> torch.device:
    """The device that is meant, or say that this machine has no such one."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise InvalidArgument(
            f"device={given!r} cannot be used here ({first_line(error)}); choose one of: " + ", ".join(["cpu", *there])
        ) from error
    return device


def autocast(device: torch.device, precision: str) -> Any:
    """A context in which networks run in this precision."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))
