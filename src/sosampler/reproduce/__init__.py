"""Every table and figure of the paper from a bank, by one command, with the paper's own figures beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sosampler.reproduce.experiments import Experiment, list_experiments
    from sosampler.reproduce.runner import Reproduction, reproduce

# Imported on first use: the names of the experiments are known without torch.
_HOMES = {
    "Experiment": "sosampler.reproduce.experiments",
    "Reproduction": "sosampler.reproduce.runner",
    "list_experiments": "sosampler.reproduce.experiments",
    "reproduce": "sosampler.reproduce.runner",
}

__all__ = ["Experiment", "Reproduction", "list_experiments", "reproduce"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
