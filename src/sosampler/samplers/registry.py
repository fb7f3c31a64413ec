"""Trained samplers by folder or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sosampler._util.files import saved_kind
from sosampler.errors import InvalidArgument

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SOSampler

# Sampler -> the recipe that trains it by default.
RECIPES = {"sosampler": "default", "ocsampler": "ocsampler", "scsampler": "scsampler-rank"}
_BASELINE_KIND = "sosampler system"  # of the config.json that `baselines.folder` writes


def load_sampler(path: str | Path, *, device: str | None = None) -> SOSampler:
    """Load a trained sampler, frozen, from its folder or by its id on the Hugging Face hub.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     so.SOSampler(backbone="timm:test_resnet", input_size=32).save_pretrained(folder)
        ...     so.load_sampler(folder).input_size
        32
    """
    from sosampler._util.hardware import check_device
    from sosampler.samplers.sosampler import SOSampler

    if saved_kind(path) == _BASELINE_KIND:
        raise InvalidArgument(
            f"{path}: holds a trained baseline, which classifies videos itself and selects no frames for another "
            "classifier; give the folder of a sampler, load a baseline with so.load_system, or compare it with "
            "`sosampler evaluate`"
        )
    target = None if device is None else check_device(device)
    sampler = SOSampler.from_pretrained(path).freeze()
    return sampler if target is None else sampler.to(target)
