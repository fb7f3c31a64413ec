"""Trained samplers for other runtimes: ONNX, torch.export and OpenVINO."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sosampler.export.export import Exported, export_sampler
    from sosampler.export.onnx_file import onnx_bytes

# Imported on first use, because torch comes with them.
_HOMES = {
    "Exported": "sosampler.export.export",
    "export_sampler": "sosampler.export.export",
    "onnx_bytes": "sosampler.export.onnx_file",
}

__all__ = ["Exported", "export_sampler", "onnx_bytes"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
