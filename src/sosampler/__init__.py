"""sosampler: pick the few frames of a video that matter, for any frozen video classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sosampler._select import select
    from sosampler.errors import InvalidArgument, LimitExceeded, MissingDependency, SosamplerError, VideoError
    from sosampler.policies import list_policies
    from sosampler.selection import Candidates, Selection
    from sosampler.video import Limits, VideoMetadata, open_video

# Where each public name lives. Importing them on first use keeps `import sosampler` and `--help` fast.
_HOMES = {
    "select": "sosampler._select",
    "Selection": "sosampler.selection",
    "Candidates": "sosampler.selection",
    "open_video": "sosampler.video",
    "VideoMetadata": "sosampler.video",
    "Limits": "sosampler.video",
    "list_policies": "sosampler.policies",
    "SosamplerError": "sosampler.errors",
    "InvalidArgument": "sosampler.errors",
    "VideoError": "sosampler.errors",
    "LimitExceeded": "sosampler.errors",
    "MissingDependency": "sosampler.errors",
}

__all__ = [
    "Candidates",
    "InvalidArgument",
    "LimitExceeded",
    "Limits",
    "MissingDependency",
    "Selection",
    "SosamplerError",
    "VideoError",
    "VideoMetadata",
    "__version__",
    "list_policies",
    "open_video",
    "select",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sosampler' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
