"""Systems that decide one after another which frames to look at, with a classifier of their own.

They are what samplers are compared with. All work on features that were computed once; see `base.py` for the rules.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from sosampler._util.validation import one_of
from sosampler.samplers.registry import RECIPES

if TYPE_CHECKING:
    from sosampler.baselines.base import System


# Name of a system -> its module and class.
_SYSTEMS = {
    "frameexit": ("sosampler.baselines.frameexit", "FrameExit"),
    "liteeval": ("sosampler.baselines.liteeval", "LiteEval"),
    "adaframe": ("sosampler.baselines.adaframe", "AdaFrame"),
    "marl": ("sosampler.baselines.marl", "MARL"),
}


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


def list_samplers() -> list[str]:
    """Return the names that `train` takes: samplers first, then baselines, which bring their own classifier.

    Examples:
        >>> list_samplers()
        ['sosampler', 'ocsampler', 'scsampler', 'frameexit', 'liteeval', 'adaframe', 'marl']
    """
    return [*RECIPES, *list_systems()]
