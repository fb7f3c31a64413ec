"""What a measurement of the independence of frames found, and the criterion it is judged by.

The criterion. A pair of adjacent frames counts as redundant where it is more alike than 90 % of the pairs of the same
video that lie at least a quarter of the video apart, or where it is a near-duplicate at less than sigma / 4. If being
neighbours did not matter, 10 % of the pairs would be redundant by chance; a rate passes with at most twice that, 20 %.
(95 % and 10 % would sit too near to chance: of 16 frames of a video its 95th percentile is off by as much.)
Comparing each video with itself keeps still cameras from hiding what adjacency does in the other videos, and the second
half of the rule keeps a video in which nothing ever happens from passing because all of its frames are equally alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler.files import replacing

Values = NDArray[np.float64]

FAR_SHARE = 0.25  # of a video's length: pairs at least so far apart are what adjacent ones are compared with
UNUSUAL = 0.90  # more alike than this share of the far pairs
DUPLICATE = 0.25  # of the bandwidth: nearer pairs are redundant whatever the rest of the video looks like
NEAR_DUPLICATE = float(np.exp(-(DUPLICATE**2) / 2))  # the same as a kernel
ALLOWED = 0.20  # redundant pairs of a rate that passes

CRITERION = (
    f"a rate passes where at most {ALLOWED:.0%} of the adjacent pairs are more alike than {UNUSUAL:.0%} of the pairs "
    f"of the same video at least {FAR_SHARE:.0%} of it apart, or nearer than {DUPLICATE:g} of the bandwidth"
)

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, eq=False)
class Spread:
    """Kernels of some pairs of frames."""

    values: Values = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        if not len(self.values):
            return {"pairs": 0, "mean": None, "quantiles": None}
        quantiles = np.quantile(self.values, _QUANTILES)
        return {
            "pairs": len(self.values),
            "mean": float(self.values.mean()),
            "quantiles": {f"{share:g}": float(value) for share, value in zip(_QUANTILES, quantiles, strict=True)},
        }


@dataclass(frozen=True, eq=False)
class RateRow:
    """Adjacent frames at one rate, as one classifier sees them."""

    classifier: str
    rate: float  # frames a second
    videos: int  # that have frames at this distance
    seconds_apart: float | None  # mean true distance of the pairs
    kernel: Spread
    redundant: float | None  # share of the pairs
    redundant_ci95: tuple[float, float] | None  # over videos, by bootstrap
    nearer_than_far: float | None  # share of the pairs that lie nearer than those they are compared with

    @property
    def passes(self) -> bool | None:
        """None where there is no pair."""
        return None if self.redundant is None else self.redundant <= ALLOWED

    def to_dict(self) -> dict[str, Any]:
        return {
            "classifier": self.classifier,
            "rate": self.rate,
            "videos": self.videos,
            "seconds_apart": self.seconds_apart,
            **self.kernel.to_dict(),
            "redundant": self.redundant,
            "redundant_ci95": None if self.redundant_ci95 is None else list(self.redundant_ci95),
            "nearer_than_far": self.nearer_than_far,
            "passes": self.passes,
        }


@dataclass(frozen=True, eq=False)
class FeatureFacts:
    """One classifier's features, and what adjacent frames are held against."""

    classifier: str
    width: int  # D
    bandwidth: float  # sigma
    bandwidth_of: str  # which pairs it is the median distance of
    far: Spread  # same video, far apart
    cross: Spread  # different videos
    untrained: bool  # random weights, as far as is known
    verdict: float | None  # the highest rate that passes together with all lower ones; None where the lowest fails

    @property
    def far_duplicates(self) -> float:
        """Share of the far pairs that are near-duplicates: what no lower rate can take away."""
        return float((self.far.values > NEAR_DUPLICATE).mean())

    def to_dict(self) -> dict[str, Any]:
        return {
            "classifier": self.classifier,
            "width": self.width,
            "bandwidth": self.bandwidth,
            "bandwidth_of": self.bandwidth_of,
            "far": {**self.far.to_dict(), "near_duplicates": self.far_duplicates},
            "cross": self.cross.to_dict(),
            "untrained": self.untrained,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, eq=False)
class Independence:
    """What `independence` found."""

    rows: tuple[RateRow, ...]
    classifiers: tuple[FeatureFacts, ...]
    videos: int
    failures: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def of(self, classifier: str) -> tuple[RateRow, ...]:
        """The rows of one classifier, rates rising."""
        return tuple(row for row in self.rows if row.classifier == classifier)

    def to_dict(self) -> dict[str, Any]:
        return {
            "videos": self.videos,
            "criterion": CRITERION,
            "classifiers": [facts.to_dict() for facts in self.classifiers],
            "rows": [row.to_dict() for row in self.rows],
            "failures": list(self.failures),
            "notes": list(self.notes),
            "settings": self.settings,
        }

    def table(self) -> str:
        """For people."""
        lines = []
        for facts in self.classifiers:
            random = " with RANDOM weights" if facts.untrained else ""
            lines.append(f"{facts.classifier}{random}: bandwidth {facts.bandwidth:.4g} ({facts.bandwidth_of})")
            lines.append(f"{'fps':>8} {'videos':>6} {'pairs':>6} {'mean':>6} {'5 %':>6} {'95 %':>6} {'redundant':>10}")
            lines += [_line(f"{row.rate:g}", str(row.videos), row.kernel, row) for row in self.of(facts.classifier)]
            lines += [_line("far", "", facts.far), _line("cross", "", facts.cross)]
            passed = "no rate that was measured" if facts.verdict is None else f"up to {facts.verdict:g} fps"
            lines.append(f"  frames stand by themselves: {passed}")
        return "\n".join(lines)

    def write(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `independence.json` and the figure `independence.png`; gives their paths."""
        from sosampler.report.kde import independence_figure

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        told, drawn = folder / "independence.json", folder / "independence.png"
        with replacing(told) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        independence_figure(self, drawn)
        return told, drawn


def _line(name: str, videos: str, kernel: Spread, row: RateRow | None = None) -> str:
    told = kernel.to_dict()
    if not told["pairs"]:
        return f"{name:>8} {videos:>6} {0:>6}"
    low, high = told["quantiles"]["0.05"], told["quantiles"]["0.95"]
    text = f"{name:>8} {videos:>6} {told['pairs']:>6} {told['mean']:>6.3f} {low:>6.3f} {high:>6.3f}"
    return text if row is None else f"{text} {row.redundant:>9.1%}{' passes' if row.passes else ''}"
