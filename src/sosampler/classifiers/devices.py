"""Where a network runs."""

from __future__ import annotations

from typing import Any

import torch

from sosampler.errors import InvalidArgument


def check_device(given: Any) -> torch.device:
    """The device that is meant, or say that this machine has no such one."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        there = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise InvalidArgument(
            f"device={given!r} cannot be used here ({str(error).splitlines()[0]}); choose one of: "
            + ", ".join(["cpu", *there])
        ) from error
    return device
