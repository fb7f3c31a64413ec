"""What `select` can be told. One table of defaults for Python and the command line; light, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass

# Frames chosen where nothing says how many.
DEFAULT_NUM_FRAMES = 8


@dataclass(frozen=True)
class SelectDefaults:
    policy: str = "uniform"
    grid: str = "uniform"
    on_short: str = "repeat"
    snap_tolerance: float = 0.5  # seconds
    seed: int = 0


SELECT = SelectDefaults()
