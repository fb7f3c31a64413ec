"""Up to which frame rate do the frames of a video stand by themselves?

Two frames overlap as far as the kernel exp(-|x - y|^2 / (2 sigma^2)) of their features is large (Eq. 1 of the paper,
without its normaliser). sigma is the median distance between frames of different videos, so that two such frames have
a kernel of about exp(-1/2) = 0.61, and the same picture twice has 1. `independence_result` says which rates pass.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.checks import real_number, whole_number
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.evaluation.bootstrap import interval, resample_counts
from sosampler.evaluation.frame_features import (
    FrameFeatures,
    OpenFrames,
    feature_networks,
    features_at,
    find_sources,
)
from sosampler.evaluation.independence_result import (
    ALLOWED,
    FAR_SHARE,
    NEAR_DUPLICATE,
    UNUSUAL,
    FeatureFacts,
    Independence,
    RateRow,
    Spread,
    Values,
)
from sosampler.policies.redundancy import gaussian_kernel
from sosampler.progress import progress_bar
from sosampler.video.candidates import segment_centres
from sosampler.video.timeline import Indices, Seconds

RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0)

_TOLERANCE = 0.25  # of 1 / rate: a pair whose frames lie further off is not one of that rate
_ROUNDING = 1e-3  # of 1 / rate: containers round times
_LEAST_MOMENTS = 4
_CROSSED_VIDEOS = 512  # of which pairs of different videos are made: these grow with the square
_RESAMPLES = 1000


# ---- pairs: arithmetic on times


def choose_moments(num_frames: int, count: int) -> Indices:
    """At most `count` different frames, spread evenly."""
    return segment_centres(num_frames, min(count, num_frames))


def later_by(times: Seconds, moments: Indices, seconds: float) -> Indices:
    """Pairs [P, 2] of a moment and the frame nearest to `seconds` later; those further off than a quarter drop out.

    >>> later_by(np.arange(10) / 10, np.array([0, 4, 8]), 0.3).tolist()
    [[0, 3], [4, 7]]
    """
    wanted = times[moments] + seconds
    after = np.clip(np.searchsorted(times, wanted), 1, len(times) - 1)
    nearest = np.where(times[after] - wanted < wanted - times[after - 1], after, after - 1)
    good = np.abs(times[nearest] - wanted) <= _TOLERANCE * seconds
    good &= wanted <= times[-1] + _ROUNDING * seconds  # nothing is known of what comes after the last frame
    return np.stack([moments, nearest], axis=1)[good & (nearest > moments)]


def far_pairs(count: int) -> Indices:
    """Pairs [P, 2] of places among `count` evenly spread moments that lie at least a quarter of the video apart.

    >>> len(far_pairs(16)), far_pairs(4)[:2].tolist()
    (78, [[0, 1], [0, 2]])
    """
    first, second = np.triu_indices(count, k=int(np.ceil(FAR_SHARE * count)))
    return np.stack([first, second], axis=1)


# ---- kernels


def kernels(distances: Values, bandwidth: float) -> Values:
    """The kernel of pairs whose distance is known."""
    points = torch.from_numpy(np.stack([np.zeros_like(distances), distances], axis=1))[..., None]  # [P, 2, 1]
    found: Values = gaussian_kernel(points, bandwidth)[:, 0, 1].numpy()
    return found


def redundant_pairs(adjacent: Values, far: Values) -> NDArray[np.bool_]:
    """Which adjacent pairs of one video are redundant, by kernels of its adjacent and its far pairs."""
    return (adjacent > np.quantile(far, UNUSUAL)) | (adjacent > NEAR_DUPLICATE)


def _bootstrap(redundant: Sequence[float], pairs: Sequence[int], seed: int) -> tuple[float, float] | None:
    """Range in which the share of redundant pairs lies in 95 of 100 draws of as many videos; None for one video."""
    if len(pairs) < 2:
        return None
    counts = resample_counts(len(pairs), _RESAMPLES, seed)  # [V, draws]
    return interval(np.asarray(redundant) @ counts / (np.asarray(pairs) @ counts))


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
    """How alike adjacent frames are at several frame rates, and up to which rate they stand by themselves.

    Args:
        videos: paths of videos and folders of them, a manifest, or a `Bank` (whose stored frames limit the rates).
        classifiers: one or several: names or folders as `create_classifier` takes them, or classifiers.
        weights: a file for each classifier that is given by name, in their order; None where there is none.
        rates: frames a second.
        moments: frames of each video from which pairs start; a video gives at most so many pairs a rate.
        max_videos: more are not looked at; they are drawn by `seed`. None for all.
        device, precision: for classifiers by name; the GPU if there is one.
        say: told each note at once.
    """
    steps = _checked_rates(rates)
    moments = whole_number("moments", moments, at_least=_LEAST_MOMENTS)
    max_videos = None if max_videos is None else whole_number("max_videos", max_videos)
    sources = find_sources(videos, max_videos=max_videos, seed=whole_number("seed", seed, at_least=0))
    networks = feature_networks(classifiers, weights, device=device, precision=precision)
    notes = [
        f"WARNING: {network.name} has RANDOM weights, none were given: features of an untrained network mean little, "
        "and so does every figure of it; give weights"
        for network in networks
        if network.untrained
    ]
    if len(sources.videos) < sources.found:
        notes.append(f"{len(sources.videos)} of {sources.found} videos were drawn with seed {seed}")
    tell = say or (lambda note: None)
    for note in notes:
        tell(note)  # before the long work

    measured: list[list[_Measured]] = [[] for _ in networks]
    failures: list[dict[str, str]] = []
    with progress_bar("looking at frames", len(sources.videos)) as bar:
        for source in sources.videos:
            try:
                with source.open() as video:
                    crossed = len(measured[0]) < _CROSSED_VIDEOS
                    found = _measure(source.name, video, networks, steps, moments, crossed)
            except VideoError as error:
                failures.append({"video": source.name, "error": str(error)})
            else:
                for one, many in zip(found, measured, strict=True):
                    many.append(one)
            bar.advance(text=f"{len(failures)} failed" if failures else "")
    if not measured[0]:
        raise VideoError(f"none of {len(sources.videos)} videos could be measured; the first: {failures[0]['error']}")

    rows: list[RateRow] = []
    facts: list[FeatureFacts] = []
    for network, of_videos in zip(networks, measured, strict=True):
        fact, its_rows = _judge(network, of_videos, steps, seed)
        facts.append(fact)
        rows += its_rows
    later = _notes_about(rows, facts, len(measured[0]), sources.kind)
    for note in later:
        tell(note)
    settings = {
        "source": sources.kind,
        "rates": list(steps),
        "moments": moments,
        "max_videos": max_videos,
        "seed": seed,
        "videos": [source.name for source in sources.videos],
    }
    return Independence(tuple(rows), tuple(facts), len(measured[0]), tuple(failures), (*notes, *later), settings)


def _checked_rates(rates: Any) -> tuple[float, ...]:
    given = [rates] if isinstance(rates, numbers.Real) else rates
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument(f"rates={rates!r} is not allowed; give frame rates such as (0.5, 1, 2)")
    checked = {real_number("rate", rate, above=0) for rate in given}
    if not checked:
        raise InvalidArgument("rates is empty; give frame rates such as (0.5, 1, 2)")
    return tuple(sorted(checked))


def _measure(
    name: str, video: OpenFrames, networks: Sequence[FrameFeatures], rates: Sequence[float], moments: int, crossed: bool
) -> list[_Measured]:
    """Distances between far and between adjacent frames of one video, for each network."""
    times = video.times
    starts = choose_moments(len(times), moments)
    if len(starts) < _LEAST_MOMENTS:
        raise VideoError(f"{name}: {len(starts)} different frames are too few; {_LEAST_MOMENTS} are needed")
    pairs = {rate: later_by(times, starts, 1 / rate) for rate in rates}
    wanted = np.unique(np.concatenate([starts, *(found.ravel() for found in pairs.values())]))
    size = max(network.short_side for network in networks)
    far = far_pairs(len(starts))
    measured = []
    for features in features_at(video, wanted, networks, size):
        seen = dict(zip(wanted.tolist(), features, strict=True))
        of_moments = torch.stack([seen[start] for start in starts.tolist()])
        measured.append(
            _Measured(
                far=_lengths(of_moments[far[:, 0]] - of_moments[far[:, 1]]),
                adjacent={rate: _apart(seen, found) for rate, found in pairs.items()},
                seconds={rate: times[found[:, 1]] - times[found[:, 0]] for rate, found in pairs.items()},
                moments=of_moments if crossed else None,
                width=of_moments.shape[1],
                far_seconds=FAR_SHARE * float(times[-1] - times[0]),
            )
        )
    return measured


def _apart(features: dict[int, Tensor], pairs: Indices) -> Values:
    return _lengths(torch.stack([features[a] - features[b] for a, b in pairs.tolist()])) if len(pairs) else np.empty(0)


def _lengths(differences: Tensor) -> Values:
    """[P, D] -> [P]"""
    found: Values = torch.linalg.vector_norm(differences.double(), dim=-1).numpy()
    return found


def cross_distances(moments: Sequence[Tensor]) -> Values:
    """Distances between frames of different videos that stand at the same place of their video.

    `moments`: features [M, D] of each video; M may differ, fewer are repeated evenly.
    """
    most = max(len(features) for features in moments)
    spread = torch.stack([features[segment_centres(len(features), most)] for features in moments], 1)  # [M, V, D]
    # Row by row: all differences at once would be large.
    return np.concatenate([_lengths(row[a + 1 :] - row[a]) for row in spread for a in range(len(row))])


def _judge(
    network: FrameFeatures, measured: Sequence[_Measured], rates: Sequence[float], seed: int
) -> tuple[FeatureFacts, list[RateRow]]:
    """The bandwidth, the kernels and the verdict of one classifier."""
    name = network.name
    cross = cross_distances([one.moments for one in measured if one.moments is not None])
    far = np.concatenate([one.far for one in measured])
    bandwidth = float(np.median(cross if len(cross) else far))
    if not bandwidth:
        raise SosamplerError(
            f"{name}: its features of most frames are the same, so that no bandwidth can be told; check its weights, "
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
    having = [one for one in measured if len(one.adjacent[rate])]
    if not having:
        return RateRow(name, rate, 0, None, Spread(np.empty(0)), None, None, None)
    values = [kernels(one.adjacent[rate], bandwidth) for one in having]
    redundant = [
        int(redundant_pairs(kernel, kernels(one.far, bandwidth)).sum())
        for kernel, one in zip(values, having, strict=True)
    ]
    pairs = [len(kernel) for kernel in values]
    seconds = np.concatenate([one.seconds[rate] for one in having])
    nearer = np.concatenate([one.seconds[rate] < one.far_seconds for one in having])
    return RateRow(
        classifier=name,
        rate=rate,
        videos=len(having),
        seconds_apart=float(seconds.mean()),
        kernel=Spread(np.concatenate(values)),
        redundant=sum(redundant) / sum(pairs),
        redundant_ci95=_bootstrap(redundant, pairs, seed),
        nearer_than_far=float(nearer.mean()),
    )


def _notes_about(rows: Sequence[RateRow], facts: Sequence[FeatureFacts], videos: int, kind: str) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    lacking = {row.rate: row.videos for row in rows if row.videos < videos}
    if lacking:
        told = ", ".join(f"{rate:g} fps in {count}" for rate, count in lacking.items())
        where = "the bank stores no frames" if kind == "bank" else "there are no frames"
        notes.append(
            f"of {videos} videos, pairs were found at {told}: {where} at that distance, a quarter more or less"
        )
    if videos == 1:
        notes.append(
            "one video alone: the bandwidth is the median distance within it, and says nothing of other videos"
        )
    for fact in facts:
        if fact.far_duplicates > ALLOWED:
            notes.append(
                f"{fact.classifier}: {fact.far_duplicates:.0%} of the pairs that lie far apart are near-duplicates, "
                "as in films of still cameras: hardly any rate can pass on such videos"
            )
        chosen = [row for row in rows if row.classifier == fact.classifier and row.rate == fact.verdict]
        if any((row.nearer_than_far or 0) < 0.5 for row in chosen):
            notes.append(
                f"{fact.classifier}: at {fact.verdict:g} fps most neighbours lie a quarter of their video apart or "
                "more, as the pairs do that they are compared with; longer videos would tell more"
            )
    return notes
