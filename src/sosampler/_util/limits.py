"""Limits on what strangers' files and extreme arguments may cost. Those of videos are in `video/limits.py`.

Each is generous: what it refuses is a mistake or an attack. Every refusal names the constant, which can be set before
the call (`sosampler._util.limits.MAX_CANDIDATES = ...`), or an option.
"""

from __future__ import annotations

from typing import Any

from sosampler._util.validation import check_int, short_repr
from sosampler.errors import InvalidArgument

# ---- arguments

MAX_CANDIDATES = 1_000_000
"""N and T."""
MAX_FPS = 10_000.0
"""Candidates a second."""
MAX_THREADS = 1024
"""Threads of one decoder or network, and worker processes."""
MAX_RESAMPLES = 100_000
"""Resamples of a bootstrap."""

# ---- files of strangers

MAX_TEXT_BYTES = 16 << 20
"""Bytes of a file that describes something: config.json, a bank's header, the settings of a run."""
MAX_RECIPE_BYTES = 256 << 10
"""Bytes of a recipe; reading YAML takes seconds a megabyte."""
MAX_LIST_BYTES = 1 << 30
"""Bytes of a list: a manifest, annotations of a data set, an evaluation; unpacked where it is a .gz."""
MAX_DEPTH = 100
"""Lists and objects inside each other, in JSON."""
MAX_CONFIG_NUMBER = 1_000_000
"""Any size in the config of a network: classes, widths, frames."""
MAX_LAYERS = 256
"""Layers of one kind in the config of a network."""
MAX_INPUT_SIDE = 4096
"""Pixels of each side of a network's input."""
MAX_ONNX_BYTES = 8 << 30
"""Memory for the activations of all ONNX networks of this process; read once, before the first is opened."""
ONNX_SECONDS = 300.0
"""For one run of an ONNX network, at most 64 frames."""

# ---- the page of `sosampler ui`

UPLOAD_SECONDS = 900.0
"""For one upload (`--max-upload-seconds`); it gives its place back then, however slowly it still arrives."""
STALL_SECONDS = 20.0
"""Without a byte of an upload, after which it is given up."""


def check_below(name: str, value: Any, limit: str) -> Any:
    """Return a number if it is at most the limit of this name."""
    if value > globals()[limit]:
        raise InvalidArgument(f"{name}={short_repr(value)} must be at most {globals()[limit]:.12g} (limits.{limit})")
    return value


def check_count(name: str, value: Any, limit: str, *, at_least: int = 1) -> int:
    """Return an int if it is within its bounds, of which the upper one is the limit of this name."""
    return int(check_below(name, check_int(name, value, at_least=at_least), limit))
