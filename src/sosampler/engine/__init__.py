"""Sampler and classifier on batches of frames, as fast as the device goes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sosampler.engine.frame_engine import EngineResult, FrameEngine

# Imported on first use: they need torch.
_HOMES = {
    "EngineResult": "sosampler.engine.frame_engine",
    "FrameEngine": "sosampler.engine.frame_engine",
}

__all__ = ["EngineResult", "FrameEngine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
