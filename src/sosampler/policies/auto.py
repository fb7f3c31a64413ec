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
        sure: with answer="fused" or "probed", where frames go to the classifier one after another: the probability of
            the most probable class at which it stops. None: what loses at most `tolerance` of accuracy on dev.

    Examples:
        >>> Auto(max=8)
        Auto(min=1, max=8, tolerance=0.005, sure=None)
    """

    min: int = DEFAULT_MIN
    max: int = DEFAULT_MAX
    tolerance: float = DEFAULT_TOLERANCE
    sure: float | None = None

    def __post_init__(self) -> None:
        check_int("auto_min", self.min)
        check_count("auto_max", self.max, "MAX_CANDIDATES")
        check_float("auto_tolerance", self.tolerance, at_least=0)
        if self.sure is not None and check_float("auto_sure", self.sure, above=0) > 1:
            raise InvalidArgument(f"auto_sure={self.sure!r} must be above 0 and at most 1")
        if self.min > self.max:
            raise InvalidArgument(f"auto_min={self.min} is more than auto_max={self.max}; it must be no larger")

    def to_dict(self, expected: Any = None) -> dict[str, Any]:
        """Return the settings, ready for JSON, with the expected accuracy of each allowed number if `expected` [T]."""
        settings: dict[str, Any] = {"num_frames": AUTO, "min": self.min, "max": self.max, "tolerance": self.tolerance}
        if self.sure is not None:
            settings["sure"] = self.sure
        if expected is not None:
            settings["expected"] = [round(float(value), 6) for value in expected[: self.max]]
        return settings
