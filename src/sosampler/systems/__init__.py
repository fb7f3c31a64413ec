"""Systems that decide one after another which frames to look at, with a classifier of their own.

They are what samplers are compared with. All work on features that were computed once; see `base.py` for the rules.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from sosampler.checks import one_of

if TYPE_CHECKING:
    from sosampler.systems.base import System, SystemOutput, Views, decoded_frames, predict, video_gmacs
    from sosampler.systems.fitting import fit
    from sosampler.systems.folder import is_system_folder, load_system, save_system
    from sosampler.systems.from_bank import bank_views
    from sosampler.systems.recipe import SystemRecipe, read_system_recipe

_BASE = ("System", "SystemOutput", "Views", "decoded_frames", "predict", "video_gmacs")
# Where each public name lives. Imported on first use, so that names can be listed without torch.
_HOMES = {
    **dict.fromkeys(_BASE, "sosampler.systems.base"),
    "bank_views": "sosampler.systems.from_bank",
    "fit": "sosampler.systems.fitting",
    "is_system_folder": "sosampler.systems.folder",
    "load_system": "sosampler.systems.folder",
    "save_system": "sosampler.systems.folder",
    "SystemRecipe": "sosampler.systems.recipe",
    "read_system_recipe": "sosampler.systems.recipe",
}

# Name of a system -> its module and class.
_SYSTEMS = {
    "frameexit": ("sosampler.systems.frameexit", "FrameExit"),
    "liteeval": ("sosampler.systems.liteeval", "LiteEval"),
    "adaframe": ("sosampler.systems.adaframe", "AdaFrame"),
    "marl": ("sosampler.systems.marl", "MARL"),
}

__all__ = [
    "System",
    "SystemOutput",
    "SystemRecipe",
    "Views",
    "bank_views",
    "create_system",
    "decoded_frames",
    "fit",
    "is_system_folder",
    "list_systems",
    "load_system",
    "predict",
    "read_system_recipe",
    "save_system",
    "video_gmacs",
]


def list_systems() -> list[str]:
    """Names that `create_system` knows."""
    return list(_SYSTEMS)


def create_system(name: str, **config: Any) -> System:
    """A new system with random weights; `config` are the arguments of its class."""
    system: System = _class_of(name)(**config)
    return system


def system_arguments(name: str) -> list[str]:
    """What `create_system` takes for a system, in the order of its class."""
    return [argument for argument in signature(_class_of(name).__init__).parameters if argument != "self"]


def _class_of(name: str) -> Any:
    module, kind = _SYSTEMS[one_of("system", name, list_systems())]
    return getattr(import_module(module), kind)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
