"""`independence`: up to which frame rate adjacent frames are independent, as a classifier sees them.

The criterion. A pair of adjacent frames counts as redundant where it is more alike than 90 % of the pairs of the same
video that are at least a quarter of the video apart, or where it is a near-duplicate at less than sigma / 4. If being
neighbours did not matter, 10 % of the pairs would be redundant by chance; a rate passes with at most twice that, 20 %.
(95 % and 10 % would be too near to chance: of 16 frames of a video its 95th percentile is off by as much.)
Comparing each video with itself keeps still cameras from hiding the effect in the other videos, and the second half of
the criterion keeps a video in which nothing ever happens from passing because all of its frames are equally alike.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sosampler._util.arrays import Indices, Seconds
from sosampler._util.files import replacing, write_text
from sosampler._util.progress import progress_bar
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.evaluation.frame_features import FrameFeatures, OpenFrames, feature_networks, features_at, find_sources
from sosampler.evaluation.result import interval, resample_counts
from sosampler.figures.curves import import_matplotlib
from sosampler.video.candidates import segment_centres

Values = NDArray[np.float64]

FAR_SHARE = 0.25  # of a video's length: pairs at least so far apart are what adjacent ones are compared with
UNUSUAL = 0.90  # more alike than this share of the far pairs
DUPLICATE = 0.25  # of the bandwidth: nearer pairs are redundant in any video
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
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            values |= value.to_dict() if isinstance(value, Spread) else {name: value}
        ci95 = None if self.redundant_ci95 is None else list(self.redundant_ci95)
        return {**values, "redundant_ci95": ci95, "passes": self.passes}


@dataclass(frozen=True, eq=False)
class FeatureFacts:
    """One classifier's features, and what adjacent frames are compared with."""

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
        """Share of the far pairs that are near-duplicates, which no lower rate avoids."""
        return float((self.far.values > NEAR_DUPLICATE).mean())

    def to_dict(self) -> dict[str, Any]:
        far = {**self.far.to_dict(), "near_duplicates": self.far_duplicates}
        return {**vars(self), "far": far, "cross": self.cross.to_dict()}


@dataclass(frozen=True, eq=False)
class Independence:
    """The result of `independence`."""

    rows: tuple[RateRow, ...]
    classifiers: tuple[FeatureFacts, ...]
    videos: int
    failures: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def of(self, classifier: str) -> tuple[RateRow, ...]:
        """Return the rows of one classifier, by rising rate."""
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
        """Return the result as text."""
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
        """Write `independence.json` and the figure `independence.png`; return their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        values, figure = folder / "independence.json", folder / "independence.png"
        write_text(values, json.dumps(self.to_dict(), indent=1) + "\n")
        independence_figure(self, figure)
        return values, figure


def _line(name: str, videos: str, kernel: Spread, row: RateRow | None = None) -> str:
    values = kernel.to_dict()
    if not values["pairs"]:
        return f"{name:>8} {videos:>6} {0:>6}"
    low, high = values["quantiles"]["0.05"], values["quantiles"]["0.95"]
    text = f"{name:>8} {videos:>6} {values['pairs']:>6} {values['mean']:>6.3f} {low:>6.3f} {high:>6.3f}"
    return text if row is None else f"{text} {row.redundant:>9.1%}{' passes' if row.passes else ''}"


RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0)

_TOLERANCE = 0.25  # of 1 / rate: pairs further off do not count for that rate
_ROUNDING = 1e-3  # of 1 / rate: containers round times
_MIN_MOMENTS = 4
_CROSSED_VIDEOS = 512  # for pairs of different videos, whose number grows with the square
_RESAMPLES = 1000


# ---- pairs: arithmetic on times


def later_by(times: Seconds, moments: Indices, seconds: float) -> Indices:
    """Return pairs [P, 2] of a moment and the frame nearest to `seconds` later, at most a quarter of it off.

    >>> later_by(np.arange(10) / 10, np.array([0, 4, 8]), 0.3).tolist()
    [[0, 3], [4, 7]]
    """
    wanted = times[moments] + seconds
    after = np.clip(np.searchsorted(times, wanted), 1, len(times) - 1)
    nearest = np.where(times[after] - wanted < wanted - times[after - 1], after, after - 1)
    good = np.abs(times[nearest] - wanted) <= _TOLERANCE * seconds
    good &= wanted <= times[-1] + _ROUNDING * seconds  # nothing is known after the last frame
    return np.stack([moments, nearest], axis=1)[good & (nearest > moments)]


def far_pairs(count: int) -> Indices:
    """Return pairs [P, 2] of indices among `count` evenly spread moments at least a quarter of the video apart.

    >>> len(far_pairs(16)), far_pairs(4)[:2].tolist()
    (78, [[0, 1], [0, 2]])
    """
    first, second = np.triu_indices(count, k=int(np.ceil(FAR_SHARE * count)))
    return np.stack([first, second], axis=1)


# ---- kernels


def kernels(distances: Values, bandwidth: float) -> Values:
    """Return the kernel of pairs of a known distance."""
    return np.asarray(np.exp(-np.square(distances) / (2 * bandwidth**2)))


def redundant_pairs(adjacent: Values, far: Values) -> NDArray[np.bool_]:
    """Return which adjacent pairs of one video are redundant, by the kernels of its adjacent and its far pairs."""
    return (adjacent > np.quantile(far, UNUSUAL)) | (adjacent > NEAR_DUPLICATE)


# ---- the measurement


@dataclass(frozen=True, eq=False)
class _Measured:
    """Distances in one video, as one classifier sees it."""

    far: Values
    adjacent: dict[float, Values]  # by rate
    seconds: dict[float, Values]  # true distances in time, by rate
    moments: Tensor | None  # features [M, D]; None of videos that take no part in pairs of different videos
    width: int  # D
    far_seconds: float


def independence(
    videos: Any,
    *,
    classifiers: Any,
    weights: Any = None,
    rates: Iterable[float] | float = RATES,
    moments: int = 16,
    max_videos: int | None = 100,
    seed: int = 0,
    device: str | None = None,
    precision: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Independence:
    """Measure how alike adjacent frames are at several frame rates, and up to which rate they stand by themselves.

    Args:
        videos: paths of videos and folders of them, a manifest, or a `Bank` (whose stored frames limit the rates).
        classifiers: one or several: names or folders as `create_classifier` takes them, or classifiers.
        weights: a file for each classifier that is given by name, in their order; None where there is none.
        rates: frames a second.
        moments: frames of each video from which pairs start; a video gives at most so many pairs a rate.
        max_videos: of more, so many are drawn by `seed`. None for all.
        device, precision: for classifiers by name; the GPU if there is one.
        say: called with each note.
    """
    given = [rates] if isinstance(rates, numbers.Real) else rates
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"rates={rates!r} must be frame rates such as (0.5, 1, 2)")
    steps = sorted({check_float("rate", rate, above=0) for rate in given})
    if not steps:
        raise InvalidArgument("rates is empty; give frame rates such as (0.5, 1, 2)")
    moments = check_int("moments", moments, at_least=_MIN_MOMENTS)
    max_videos = None if max_videos is None else check_int("max_videos", max_videos)
    sources = find_sources(videos, max_videos=max_videos, seed=check_int("seed", seed, at_least=0))
    networks = feature_networks(classifiers, weights, device=device, precision=precision)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if say is not None:
            say(text)

    for network in networks:
        if network.untrained:
            note(
                f"WARNING: {network.name} has RANDOM weights, none were given: features of an untrained network mean "
                "little, and so do their results; give weights"
            )
    if len(sources.videos) < sources.available:
        note(f"{len(sources.videos)} of {sources.available} videos were drawn with seed {seed}")

    measured: list[list[_Measured]] = [[] for _ in networks]
    failures: list[dict[str, str]] = []
    with progress_bar("reading frames", len(sources.videos)) as bar:
        for source in sources.videos:
            try:
                with source.open() as video:
                    crossed = len(measured[0]) < _CROSSED_VIDEOS
                    distances = _measure(source.name, video, networks, steps, moments, crossed)
            except VideoError as error:
                failures.append({"video": source.name, "error": str(error)})
            else:
                for distances_of_one, of_network in zip(distances, measured, strict=True):
                    of_network.append(distances_of_one)
            bar.advance(text=f"{len(failures)} failed" if failures else "")
    if not measured[0]:
        raise VideoError(f"none of {len(sources.videos)} videos could be measured; the first: {failures[0]['error']}")

    rows: list[RateRow] = []
    facts: list[FeatureFacts] = []
    for network, of_videos in zip(networks, measured, strict=True):
        fact, its_rows = _evaluate(network, of_videos, steps, seed)
        facts.append(fact)
        rows += its_rows
    _note_limits(rows, facts, len(measured[0]), sources.kind, note)
    settings = {
        "source": sources.kind,
        "rates": steps,
        "moments": moments,
        "max_videos": max_videos,
        "seed": seed,
        "videos": [source.name for source in sources.videos],
    }
    return Independence(tuple(rows), tuple(facts), len(measured[0]), tuple(failures), tuple(notes), settings)


def _measure(
    name: str, video: OpenFrames, networks: Sequence[FrameFeatures], rates: Sequence[float], moments: int, crossed: bool
) -> list[_Measured]:
    """Distances between far and between adjacent frames of one video, for each network."""
    times = video.times
    starts = segment_centres(len(times), min(moments, len(times)))
    if len(starts) < _MIN_MOMENTS:
        raise VideoError(f"{name}: {len(starts)} different frames are too few; {_MIN_MOMENTS} are needed")
    pairs = {rate: later_by(times, starts, 1 / rate) for rate in rates}
    wanted = np.unique(np.concatenate([starts, *(rate_pairs.ravel() for rate_pairs in pairs.values())]))
    size = max(network.short_side for network in networks)
    far = far_pairs(len(starts))
    measured = []
    for features in features_at(video, wanted, networks, size):  # [n, D]
        of_moments = features[np.searchsorted(wanted, starts)]
        adjacent = {rate: features[np.searchsorted(wanted, rate_pairs)] for rate, rate_pairs in pairs.items()}
        measured.append(
            _Measured(
                far=_lengths(of_moments[far[:, 0]] - of_moments[far[:, 1]]),
                adjacent={rate: _lengths(both[:, 0] - both[:, 1]) for rate, both in adjacent.items()},
                seconds={rate: np.diff(times[rate_pairs], axis=1)[:, 0] for rate, rate_pairs in pairs.items()},
                moments=of_moments if crossed else None,
                width=of_moments.shape[1],
                far_seconds=FAR_SHARE * float(times[-1] - times[0]),
            )
        )
    return measured


def _lengths(differences: Tensor) -> Values:
    """[P, D] -> [P]"""
    return np.asarray(torch.linalg.vector_norm(differences.double(), dim=-1))


def cross_distances(moments: Sequence[Tensor]) -> Values:
    """Return the distances between frames of different videos at the same relative position.

    `moments`: features [M, D] of each video; M may differ, fewer are repeated evenly.
    """
    largest = max(len(features) for features in moments)
    spread = torch.stack([features[segment_centres(len(features), largest)] for features in moments], 1)  # [M, V, D]
    # Row by row: all differences together would be large.
    return np.concatenate([_lengths(row[a + 1 :] - row[a]) for row in spread for a in range(len(row))])


def _evaluate(
    network: FrameFeatures, measured: Sequence[_Measured], rates: Sequence[float], seed: int
) -> tuple[FeatureFacts, list[RateRow]]:
    """Return the bandwidth, the kernels and the verdict of one classifier."""
    name = network.name
    cross = cross_distances([video.moments for video in measured if video.moments is not None])
    far = np.concatenate([video.far for video in measured])
    bandwidth = float(np.median(cross if len(cross) else far))
    if not bandwidth:
        raise SosamplerError(
            f"{name}: its features of most frames are the same, so that there is no bandwidth; check its weights, "
            "or give videos that differ"
        )
    rows = [_row(name, rate, measured, bandwidth, seed) for rate in rates]
    verdict = None
    for row in rows:
        if row.passes is False:
            break
        verdict = row.rate if row.passes else verdict
    facts = FeatureFacts(
        classifier=name,
        width=measured[0].width,
        bandwidth=bandwidth,
        bandwidth_of="median distance between frames of different videos"
        if len(cross)
        else "median distance between far frames of the only video",
        far=Spread(kernels(far, bandwidth)),
        cross=Spread(kernels(cross, bandwidth)),
        untrained=network.untrained,
        verdict=verdict,
    )
    return facts, rows


def _row(name: str, rate: float, measured: Sequence[_Measured], bandwidth: float, seed: int) -> RateRow:
    having = [video for video in measured if len(video.adjacent[rate])]
    if not having:
        return RateRow(name, rate, 0, None, Spread(np.empty(0)), None, None, None)
    values = [kernels(video.adjacent[rate], bandwidth) for video in having]
    far = [kernels(video.far, bandwidth) for video in having]
    redundant = np.array([redundant_pairs(*both).sum() for both in zip(values, far, strict=True)])
    pairs = np.array([len(kernel) for kernel in values])
    counts = resample_counts(len(pairs), _RESAMPLES, seed)  # [V, draws]
    seconds = np.concatenate([video.seconds[rate] for video in having])
    nearer = np.concatenate([video.seconds[rate] < video.far_seconds for video in having])
    return RateRow(
        classifier=name,
        rate=rate,
        videos=len(having),
        seconds_apart=float(seconds.mean()),
        kernel=Spread(np.concatenate(values)),
        redundant=float(redundant.sum() / pairs.sum()),
        redundant_ci95=interval(redundant @ counts / (pairs @ counts)) if len(pairs) > 1 else None,
        nearer_than_far=float(nearer.mean()),
    )


def _note_limits(
    rows: Sequence[RateRow], facts: Sequence[FeatureFacts], videos: int, kind: str, note: Callable[[str], None]
) -> None:
    """Note what limits the results."""
    lacking = {row.rate: row.videos for row in rows if row.videos < videos}
    if lacking:
        rates = ", ".join(f"{rate:g} fps in {count}" for rate, count in lacking.items())
        where = "the bank stores no frames" if kind == "bank" else "there are no frames"
        note(f"of {videos} videos, pairs were found at {rates}: {where} at that distance, a quarter more or less")
    if videos == 1:
        note("one video alone: the bandwidth is the median distance within it, and may differ for others")
    for fact in facts:
        if fact.far_duplicates > ALLOWED:
            note(
                f"{fact.classifier}: {fact.far_duplicates:.0%} of the pairs far apart are near-duplicates, as in "
                "films of still cameras: hardly any rate can pass on such videos"
            )
        chosen = [row for row in rows if row.classifier == fact.classifier and row.rate == fact.verdict]
        if any((row.nearer_than_far or 0) < 0.5 for row in chosen):
            note(
                f"{fact.classifier}: at {fact.verdict:g} fps most neighbours are a quarter of their video apart or "
                "more, as are the pairs that they are compared with; longer videos would show more"
            )


# ---- densities of kernels between frames: one curve for each frame rate

_MIN_WIDTH = 0.004  # equal values would make a curve without width
_MAX_VALUES = 5000  # of more, as many quantiles draw the same curve
_CLIP = 4.0  # times the tallest reference curve
_PANEL = (6.4, 4.2)  # inches


def density(values: ArrayLike, grid: ArrayLike) -> Values:
    """Return the Gaussian kernel density of values in 0..1 at the points of a grid, by Silverman's rule.

    What falls below 0 or above 1 is reflected, so that the density integrates to one over 0..1.
    """
    data, points = np.asarray(values, dtype=np.float64), np.asarray(grid, dtype=np.float64)
    if not len(data):
        raise InvalidArgument("a density needs at least one value; none were given")
    if data.min() < 0 or data.max() > 1:
        raise InvalidArgument(f"values run from {data.min():.3g} to {data.max():.3g}; kernels lie in 0..1")
    width = _MIN_WIDTH
    if len(data) > 1:  # 0.9 min(standard deviation, IQR / 1.34) n^(-1/5); the IQR is left out where it is zero
        deviation = data.std(ddof=1)
        middle = np.subtract(*np.quantile(data, (0.75, 0.25))) / 1.34
        width = max(0.9 * min(deviation, middle or deviation) * len(data) ** -0.2, _MIN_WIDTH)
    if len(data) > _MAX_VALUES:
        data = np.sort(data)[segment_centres(len(data), _MAX_VALUES)]
    reflected = np.concatenate([data, -data, 2 - data])
    total = np.array([np.exp(-(((point - reflected) / width) ** 2) / 2).sum() for point in points])
    return np.asarray(total / (len(data) * width * np.sqrt(2 * np.pi)))


def independence_figure(result: Any, path: str | Path) -> Path:
    """Draw an `Independence` in the format of the path's suffix: a panel for each classifier, a curve for each rate."""
    matplotlib, figure_class, _ = import_matplotlib()
    target, count = Path(path), len(result.classifiers)
    figure = figure_class(figsize=(_PANEL[0] * count, _PANEL[1]), layout="constrained", dpi=130)
    figure.suptitle(f"Adjacent frames of {result.videos} videos")
    for axes, facts in zip(figure.subplots(1, count, squeeze=False)[0], result.classifiers, strict=True):
        _draw_panel(axes, facts, result.of(facts.classifier), matplotlib.colormaps["viridis_r"])
    with replacing(target) as temporary:
        figure.savefig(temporary)
    return target


def _draw_panel(axes: Any, facts: Any, rows: Any, colours: Any) -> None:
    rows = [row for row in rows if len(row.kernel.values)]
    curves = [
        (f"{row.rate:g} fps", row.kernel.values, {"color": colours(number / max(len(rows) - 1, 1))})
        for number, row in enumerate(rows)
    ]
    curves.append(("same video, far apart", facts.far.values, {"color": "0.45", "linestyle": "--"}))
    if len(facts.cross.values):
        curves.append(("different videos", facts.cross.values, {"color": "0.45", "linestyle": ":"}))
    lowest = min(float(values.min()) for _, values, _ in curves)
    grid = np.linspace(max(0.0, np.floor(lowest * 20 - 1) / 20), 1, 1001)
    heights = [density(values, grid) for _, values, _ in curves]
    for (label, _, style), height in zip(curves, heights, strict=True):
        axes.plot(grid, height, label=label, linewidth=1.6, **style)
    tallest = max(height.max() for height in heights)
    # Near-duplicates at high rates make peaks beside which nothing else would be visible.
    top = min(tallest, _CLIP * max(height.max() for height in heights[len(rows) :]))
    passed = "no measured rate" if facts.verdict is None else f"up to {facts.verdict:g} fps"
    warning = "; RANDOM WEIGHTS" if facts.untrained else ""
    axes.set_title(f"{facts.classifier}, bandwidth {facts.bandwidth:.3g}{warning}", fontsize="medium", parse_math=False)
    axes.set_xlabel(f"kernel of two frames\nframes stand by themselves: {passed}")
    axes.set_ylabel("density" if top == tallest else "density (higher peaks are clipped)")
    axes.set_xlim(grid[0], 1)
    axes.set_ylim(0, 1.05 * top)
    axes.legend(fontsize="small", frameon=False, loc="upper left")
