"""Samplers by name and by folder, and the systems that are trained in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sosampler.baselines.registry import list_systems
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SOSampler


# The recipe by which each is trained where no other is named.
RECIPES = {"sosampler": "default", "ocsampler": "ocsampler", "scsampler": "scsampler-rank"}


def list_samplers() -> list[str]:
    """Names of the samplers that can be trained, and then of the systems, which bring a classifier of their own.

    Examples:
        >>> list_samplers()
        ['sosampler', 'ocsampler', 'scsampler', 'frameexit', 'liteeval', 'adaframe', 'marl']
    """
    return [*RECIPES, *list_systems()]


def load_sampler(path: str | Path, *, device: str | None = None) -> SOSampler:
    """A trained sampler, frozen: from its folder, or by its id on the Hugging Face hub.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     so.SOSampler(backbone="timm:test_resnet", input_size=32).save_pretrained(folder)
        ...     so.load_sampler(folder).input_size
        32
    """
    from sosampler._util.devices import check_device
    from sosampler.baselines.folder import is_baseline_folder
    from sosampler.samplers.sosampler import SOSampler

    if is_baseline_folder(path):
        raise InvalidArgument(
            f"{path}: holds a system, which classifies videos itself and chooses no frames for another classifier; "
            "load it with so.load_system, compare it with `sosampler evaluate`, or give the folder of a sampler"
        )
    where = None if device is None else check_device(device)
    sampler = SOSampler.from_pretrained(path).freeze()
    return sampler if where is None else sampler.to(where)
