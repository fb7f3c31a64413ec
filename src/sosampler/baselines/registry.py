"""Baselines that samplers are compared with: they see frames one after another and classify the video themselves.

All work on features that were computed once; see `base.py`.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from sosampler._util.validation import one_of
from sosampler.samplers.registry import RECIPES

if TYPE_CHECKING:
    from sosampler.baselines.base import Baseline


# Name, also of the module (with _ for -) -> class.
_BASELINES = {
    "frameexit": "FrameExit",
    "liteeval": "LiteEval",
    "adaframe": "AdaFrame",
    "marl": "MARL",
    "ar-net": "ARNet",
    "videoiq": "VideoIQ",
    "adafocus": "AdaFocus",
    "adafuse": "AdaFuse",
    "ada3d": "Ada3D",
    "listen-to-look": "ListenToLook",
}


def list_systems() -> list[str]:
    """Return the names of all baselines."""
    return list(_BASELINES)


def create_baseline(name: str, **config: Any) -> Baseline:
    """Create a baseline with random weights; `config` are the arguments of its class."""
    return baseline_class(name)(**config)


def baseline_arguments(name: str) -> list[str]:
    """Return the arguments of `create_baseline` for a baseline, in the order of its class."""
    return [argument for argument in signature(baseline_class(name).__init__).parameters if argument != "self"]


def baseline_class(name: str) -> type[Baseline]:
    """Return the class of a baseline."""
    one_of("baseline", name, list_systems())
    module = import_module(f"sosampler.baselines.{name.replace('-', '_')}")
    found: type[Baseline] = getattr(module, _BASELINES[name])
    return found


def list_samplers() -> list[str]:
    """Return the names that `train` takes: samplers first, then baselines, which bring their own classifier.

    Examples:
        >>> list_samplers()[:5]
        ['sosampler', 'ocsampler', 'scsampler', 'frameexit', 'liteeval']
    """
    return [*RECIPES, *list_systems()]
