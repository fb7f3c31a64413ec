"""Networks that learn to choose frames."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sosampler.samplers.registry import list_samplers, load_sampler
    from sosampler.samplers.sosampler import SamplerOutput, SOSampler

# Imported on first use: recipes and names of samplers can be read without torch.
_HOMES = {
    "SOSampler": "sosampler.samplers.sosampler",
    "SamplerOutput": "sosampler.samplers.sosampler",
    "list_samplers": "sosampler.samplers.registry",
    "load_sampler": "sosampler.samplers.registry",
}

__all__ = ["SOSampler", "SamplerOutput", "list_samplers", "load_sampler"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
