"""Systems that decide one after another which frames to look at, with a classifier of their own.

They are what samplers are compared with. All work on features that were computed once; see `base.py` for the rules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sosampler.checks import one_of

if TYPE_CHECKING:
    from sosampler.systems.base import System, SystemOutput, Views, decoded_frames, fit, predict, video_gmacs
    from sosampler.systems.from_bank import bank_views

_BASE = ("System", "SystemOutput", "Views", "decoded_frames", "fit", "predict", "video_gmacs")

# Name of a system -> its module and class. Imported on first use, so that names can be listed without torch.
_SYSTEMS = {
    "adaframe": ("sosampler.systems.adaframe", "AdaFrame"),
    "frameexit": ("sosampler.systems.frameexit", "FrameExit"),
    "liteeval": ("sosampler.systems.liteeval", "LiteEval"),
    "marl": ("sosampler.systems.marl", "MARL"),
}

__all__ = [
    "System",
    "SystemOutput",
    "Views",
    "bank_views",
    "create_system",
    "decoded_frames",
    "fit",
    "list_systems",
    "predict",
    "video_gmacs",
]


def list_systems() -> list[str]:
    """Names that `create_system` knows."""
    return sorted(_SYSTEMS)


def create_system(name: str, **config: Any) -> System:
    """A new system with random weights; `config` are the arguments of its class."""
    module, kind = _SYSTEMS[one_of("system", name, list_systems())]
    system: System = getattr(import_module(module), kind)(**config)
    return system


def __getattr__(name: str) -> Any:
    if name == "bank_views":
        return import_module("sosampler.systems.from_bank").bank_views
    if name not in _BASE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sosampler.systems.base"), name)


def __dir__() -> list[str]:
    return __all__
