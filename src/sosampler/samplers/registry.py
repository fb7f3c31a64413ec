"""Trained samplers by folder or hub id, and the settings in their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.files import load_json, saved_kind
from sosampler.errors import InvalidArgument, WeightsError, first_line

if TYPE_CHECKING:
    from sosampler.samplers.sosampler import SOSampler

MODEL, CONFIG, WEIGHTS = "model.onnx", "config.json", "model.safetensors"
KIND = "sosampler sampler"
# Sampler -> the recipe that trains it by default.
RECIPES = {"sosampler": "default", "ocsampler": "ocsampler", "scsampler": "scsampler-rank"}
# What tables, figures and reports call a sampler, by its recipe. SOSampler+ is this package's own recipe: figures that
# the paper prints stand beside the other two only.
TITLES = {
    "default": "SOSampler+",
    "paper": "SOSampler (paper)",
    "authors": "SOSampler (authors' code)",
    "ocsampler": "OCSampler",
    "scsampler-rank": "SCSampler",
    "scsampler-ac": "SCSampler (AC)",
}
OWN_RECIPE = f"{TITLES['default']} is this package's recipe"
# How the classifier's answers for the chosen frames become one (`samplers.answer`).
MEAN, WEIGHTED, FUSED, PROBED = "mean", "weighted", "fused", "probed"
ANSWERS = (MEAN, WEIGHTED, FUSED, PROBED)
BELIEFS = (FUSED, PROBED)  # answers that are a belief, which the classifier can renew frame by frame
_BASELINE_KIND = "sosampler system"  # of the config.json that `baselines.base` writes


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


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a sampler's config.json, or raise an error if it is not a sampler's."""
    path = folder / CONFIG
    if not path.is_file():
        raise WeightsError(
            f"{folder}: has no {CONFIG}, so it is not a saved sampler; give a folder written by training"
        )
    try:
        config = load_json(path)
    except (ValueError, OSError) as error:
        raise WeightsError(f"{path}: is not JSON ({first_line(error)}); save the sampler again") from error
    kind = config.pop("kind", None) if isinstance(config, dict) else None
    if kind != KIND:
        what = f"a {kind}" if isinstance(kind, str) else "something else"
        raise WeightsError(f"{folder}: holds {what} instead of a sampler; give the folder of a trained sampler")
    return dict(config)


def has_belief(settings: dict[str, Any]) -> bool:
    """Return whether scores with these settings use a belief about the video's class."""
    return set(settings) == {"belief", "relevance", "importance"}


def samplers_in_words(titles: Any) -> str:
    """Return which sampler each name of a policy stands for; `titles` are `samplers` of an evaluation, or nothing.

    >>> samplers_in_words({"learned": "SOSampler+", "printed": "SOSampler (paper)"})
    "learned is SOSampler+; printed is SOSampler (paper). SOSampler+ is this package's recipe."
    """
    if not isinstance(titles, dict) or not titles:
        return ""
    own = f" {OWN_RECIPE}." if any(str(title).startswith(TITLES["default"]) for title in titles.values()) else ""
    return f"{'; '.join(f'{policy} is {title}' for policy, title in titles.items())}.{own}"
