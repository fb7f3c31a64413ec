"""Samplers by name and by folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SOSampler

# The recipe by which each is trained where no other is named.
RECIPES = {"sosampler": "default", "ocsampler": "ocsampler", "scsampler": "scsampler-rank"}


def list_samplers() -> list[str]:
    """Names of the samplers that can be trained.

    >>> list_samplers()
    ['sosampler', 'ocsampler', 'scsampler']
    """
    return list(RECIPES)


def load_sampler(path: str | Path, *, device: str | None = None) -> SOSampler:
    """A trained sampler, frozen: from its folder, or by its id on the Hugging Face hub."""
    from sosampler.classifiers.devices import check_device
    from sosampler.samplers.sosampler import SOSampler

    where = None if device is None else check_device(device)
    sampler = SOSampler.from_pretrained(path).freeze()
    return sampler if where is None else sampler.to(where)
