"""num_frames="auto": the settings by which a policy decides on N. Light at import; `expected` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sosampler._util.limits import check_count
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument

AUTO = "auto"  # as num_frames: the policy decides
# The tolerance was chosen on the dev reels of benchmarks/adaptive.py.
DEFAULT_MIN, DEFAULT_MAX, DEFAULT_TOLERANCE = 1, 16, 0.005


@dataclass(frozen=True)
class Auto:
    """Let a trained sampler decide how many frames a video needs; given as `num_frames`.

    Args:
        min, max: bounds of the number of frames; a video with fewer frames gives all it has.
        tolerance: how much lower the expected accuracy may be for the sake of fewer frames.

    Examples:
        >>> Auto(max=8)
        Auto(min=1, max=8, tolerance=0.005)
    """

    min: int = DEFAULT_MIN
    max: int = DEFAULT_MAX
    tolerance: float = DEFAULT_TOLERANCE

    def __post_init__(self) -> None:
        check_int("auto_min", self.min)
        check_count("auto_max", self.max, "MAX_CANDIDATES")
        check_float("auto_tolerance", self.tolerance, at_least=0)
        if self.min > self.max:
            raise InvalidArgument(f"auto_min={self.min} is more than auto_max={self.max}; it must be no larger")

    def to_dict(self, expected: Any = None) -> dict[str, Any]:
        """Return the settings, ready for JSON, with the expected accuracy of each allowed number if `expected` [T]."""
        settings: dict[str, Any] = {"num_frames": AUTO, "min": self.min, "max": self.max, "tolerance": self.tolerance}
        if expected is not None:
            settings["expected"] = [round(float(value), 6) for value in expected[: self.max]]
        return settings
