"""num_frames="auto": between which numbers a policy may decide. Light at import; `policies.adaptive` decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sosampler.checks import real_number, whole_number
from sosampler.errors import InvalidArgument

AUTO = "auto"  # in the place of a number of frames
# The tolerance was chosen on the dev reels of benchmarks/adaptive.py.
DEFAULT_LEAST, DEFAULT_MOST, DEFAULT_TOLERANCE = 1, 16, 0.005


@dataclass(frozen=True, kw_only=True)
class AutoFrames:
    """The least and the most frames to take, and how much expectation a smaller number may cost."""

    least: int = DEFAULT_LEAST
    most: int = DEFAULT_MOST
    tolerance: float = DEFAULT_TOLERANCE

    def __post_init__(self) -> None:
        whole_number("auto_min", self.least)
        whole_number("auto_max", self.most)
        real_number("auto_tolerance", self.tolerance, at_least=0)
        if self.least > self.most:
            raise InvalidArgument(
                f"auto_min={self.least} is more than auto_max={self.most}; give a minimum that is no larger"
            )

    def told(self, expected: Any = None) -> dict[str, Any]:
        """What was asked for, ready for JSON; `expected` [T] are expectations, of which those of allowed numbers."""
        told: dict[str, Any] = {"num_frames": AUTO, "min": self.least, "max": self.most, "tolerance": self.tolerance}
        if expected is not None:
            told["expected"] = [round(float(value), 6) for value in expected[: self.most]]
        return told


def auto_of(num_frames: Any, least: int | None, most: int | None, tolerance: float | None) -> AutoFrames | None:
    """How to decide, where `num_frames` is "auto"; defaults for what is None.

    >>> auto_of("auto", None, 8, None)
    AutoFrames(least=1, most=8, tolerance=0.005)
    """
    given = {"least": least, "most": most, "tolerance": tolerance}
    given = {name: value for name, value in given.items() if value is not None}
    if num_frames == AUTO:
        return AutoFrames(**given)  # type: ignore[arg-type]
    if given:
        names = {"least": "auto_min", "most": "auto_max", "tolerance": "auto_tolerance"}
        told = ", ".join(f"{names[name]}={value!r}" for name, value in given.items())
        raise InvalidArgument(f"{told} is for num_frames={AUTO!r}, not for num_frames={num_frames!r}; leave one out")
    return None
