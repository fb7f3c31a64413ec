"""Random numbers by seed, without touching those of devices that are not used."""

from __future__ import annotations

import torch


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and that of the device a network runs on, not those of all other GPUs."""
    seed %= 2**63
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[number].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
