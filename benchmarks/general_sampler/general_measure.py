"""On test: what the general sampler is worth beside rules and PySceneDetect, with intervals over videos."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sosampler as so
from benchmarks.general_sampler.general_films import FPS, Film
from benchmarks.general_sampler.general_sets import (
    FILM_CANDIDATES,
    FILM_NUMBERS,
    GOLF_CANDIDATES,
    GOLF_NUMBERS,
    REEL_NUMBERS,
    REEL_SHOTS,
    Places,
    Reels,
    candidates_of,
    films,
    judge,
    judge_spread,
    judge_stream,
    middles,
    scenes,
    single_shots,
    stills,
    streams,
    swings,
    talks,
)
from sosampler._util.environment import circumstances
from sosampler.evaluation.result import interval, resample_counts
from sosampler.policies.base import Batch
from sosampler.policies.registry import get_policy

POLICIES = ("uniform", "frame-difference", "farthest-first", "dpp", "thumbnail", "general")
GENERAL, UNIFORM, TEXT = "general", "uniform", "general-text"
DENSE, DENSE_CANDIDATES = "general, T = 64", 64
MODES = ("auto", "exact", "keyframe")
SIZES = (None, 64, 256, (224, 224), (90, 160))  # of the frames of the result, as `select` takes them
NUM_SIZED = 40
DETECTORS = {"content": "PySceneDetect content", "adaptive": "PySceneDetect adaptive"}
NUM_REELS, NUM_FILMS, NUM_STILLS, NUM_TALKS, DRAWS = 600, 60, 40, 40, 2000
INTERVALS = ("faulty", "repeated", "shots shown", "hit", "top1", "largest gap", "bunched", "actions shown")

Numbers = NDArray[np.float64]


def measure(places: Places, put: Callable[..., None], only: Sequence[str] = ()) -> None:
    """All sets, or some; each is told as soon as it is measured."""
    put(**circumstances(("onnxruntime", "numpy", "av", "torch")), policies_looked_at=list(POLICIES))
    parts: dict[str, Callable[[Places], dict[str, Any]]] = {
        "films": _films,
        "stills": _stills,
        "single": _single,
        "streams": _streams,
        "talks": _talks,
        "golf": _golf,
        "reels": _reels,
        "candidates": _candidates,
        "sizes": _sizes,
    }
    for name, one in parts.items():
        if only and name not in only:
            continue
        begin = time.perf_counter()
        found = one(places)
        put(**{name: {**found, "seconds": round(time.perf_counter() - begin, 1)}})


Judge = Callable[[Sequence[int], int], dict[str, float]]  # chosen frames, by number, and frames of the file
Found = dict[tuple[str, int], list[dict[str, float]]]  # by policy and N, a row a video


def _picked(name: str, frames: NDArray[np.uint8], numbers: Sequence[int]) -> dict[int, list[int]]:
    """Positions for each N. Policies compute what they need once for the batch."""
    policy, batch = get_policy(name), Batch(len(frames), np.array([len(frames)]), frames[None])
    return {count: policy.choose(batch, min(count, len(frames)))[0].tolist() for count in numbers}


def _films(places: Places) -> dict[str, Any]:
    """Shares of faulty frames among the chosen, and of the shots that are shown."""
    return _judged(places, films(places, "test", NUM_FILMS), ("faulty", "shots shown"))


def _stills(places: Places) -> dict[str, Any]:
    """Slide shows: how many of the chosen frames repeat another, and how many pictures are shown."""
    return _judged(places, stills(places, "test", NUM_STILLS), ("repeated", "shots shown"))


def _talks(places: Places) -> dict[str, Any]:
    """Written slides: how many of the chosen are whole slides, and how many slides are shown whole."""
    made = talks(places, "test", NUM_TALKS)
    return _judged(places, made, ("faulty", "shots shown"), (*POLICIES, TEXT), detect=False)


def _single(places: Places) -> dict[str, Any]:
    """Clips of one shot: how evenly the choice lies."""
    paths = single_shots(places, "test")
    judged = [(path, judge_spread) for path in paths]
    found = _over_files(places, judged, FILM_NUMBERS, POLICIES)
    return {"videos": len(paths), "num_candidates": FILM_CANDIDATES, **_rows(found, ("largest gap", "bunched"))}


def _streams(places: Places) -> dict[str, Any]:
    """Shots of real clips, some of an action: how many of its clips are shown."""
    made = streams(places, "test")
    judged = [(one.path, lambda chosen, total, one=one: judge_stream(one, chosen)) for one in made]
    found = _over_files(places, judged, FILM_NUMBERS, POLICIES)
    return {
        "videos": len(made),
        "num_candidates": FILM_CANDIDATES,
        "shots_a_video": round(float(np.mean([len(one.ends) for one in made])), 2),
        "actions_a_video": round(float(np.mean([one.shows.sum() for one in made])), 2),
        **_rows(found, ("actions shown",)),
    }


def _candidates(places: Places) -> dict[str, Any]:
    """Eight frames by `select` itself, with each kind of candidates; "auto" is its default."""
    found: dict[str, Any] = {}
    sets: dict[str, list[tuple[Path, Judge]]] = {
        "films": [
            (film.path, lambda chosen, total, film=film: judge(film, chosen))
            for film in films(places, "test", NUM_FILMS)
        ],
        "single": [(path, judge_spread) for path in single_shots(places, "test")],
        "streams": [
            (one.path, lambda chosen, total, one=one: judge_stream(one, chosen)) for one in streams(places, "test")
        ],
    }
    for name, judged in sets.items():
        rows = []
        for mode in MODES:
            judgements = []
            for path, judge_one in judged:
                selection = so.select(path, 8, candidates=mode, threads=1)
                judgements.append(judge_one(selection.frame_indices.tolist(), selection.metadata.total_num_frames))
            rows.append({"candidates": mode, **_row(GENERAL, 8, judgements)})
        found[name] = {"videos": len(judged), "rows": rows}
    return found


def _sizes(places: Places) -> dict[str, Any]:
    """Real clips of one shot: whether `select` chooses the same frames whatever size is asked for."""
    paths = single_shots(places, "test")[:NUM_SIZED]
    chosen = [[so.select(path, 8, size=size, threads=1).frame_indices.tolist() for size in SIZES] for path in paths]
    return {"videos": len(paths), "sizes": SIZES, "same": sum(all(one == rows[0] for one in rows) for rows in chosen)}


def _judged(
    places: Places,
    made: Sequence[Film],
    keys: Sequence[str],
    policies: Sequence[str] = POLICIES,
    *,
    detect: bool = True,
) -> dict[str, Any]:
    judged = [(film.path, lambda chosen, total, film=film: judge(film, chosen)) for film in made]
    found = _over_files(places, judged, FILM_NUMBERS, policies, detect=detect)
    kinds = [kind for film in made for kind in film.kinds]
    return {
        "videos": len(made),
        "num_candidates": FILM_CANDIDATES,
        "seconds_a_video": round(len(kinds) / FPS / len(made), 1),
        "shots_a_video": round(float(np.mean([max(film.shots) + 1 for film in made])), 2),
        "kinds": {kind: round(kinds.count(kind) / len(kinds), 4) for kind in dict.fromkeys(kinds)},
        **_rows(found, keys),
    }


def _over_files(
    places: Places,
    judged: Sequence[tuple[Path, Judge]],
    numbers: Sequence[int],
    policies: Sequence[str],
    *,
    detect: bool = True,
) -> Found:
    """Let all policies choose from the same candidates of each file; general from twice as many too."""
    found: Found = {}
    totals = []
    for path, judge_one in judged:
        sparse, dense = candidates_of(path), candidates_of(path, DENSE_CANDIDATES)
        totals.append(sparse.total)
        for name in (*policies, DENSE):
            seen = dense if name == DENSE else sparse
            picked = _picked(GENERAL if name == DENSE else name, seen.frames, numbers)
            for count in numbers:
                chosen = seen.indices[picked[count]].tolist()
                if name == UNIFORM:  # the middles of N stretches, as `select` has it without candidates
                    chosen = so.select(path, count, decode=False).frame_indices.tolist()
                found.setdefault((name, count), []).append(judge_one(chosen, sparse.total))
    for detector, title in _detectors(places).items() if detect else ():
        parted = scenes(places, detector, [path for path, _ in judged])
        for (_, judge_one), parts, total in zip(judged, parted, totals, strict=True):
            for count in numbers:
                found.setdefault((title, count), []).append(judge_one(middles(parts, total, count), total))
    return found


def _rows(found: Found, keys: Sequence[str]) -> dict[str, Any]:
    return {
        "rows": [_row(name, count, rows) for (name, count), rows in found.items()],
        "versus": {key: _versus({pair: [row[key] for row in rows] for pair, rows in found.items()}) for key in keys},
    }


def _golf(places: Places) -> dict[str, Any]:
    """Share of the eight moments of a swing that are shown; the same candidates for all."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    looked = list(swings(places, "test"))
    for swing in looked:
        for name in POLICIES:
            for count, chosen in _picked(name, swing.frames, GOLF_NUMBERS).items():
                found.setdefault((name, count), []).append({"hit": float(swing.near[:, chosen].any(1).mean())})
    for detector, title in _detectors(places).items():
        for swing, parts in zip(looked, scenes(places, detector, [swing.path for swing in looked]), strict=True):
            total = int(swing.indices[-1]) + 1
            for count in GOLF_NUMBERS:
                # The candidate next to each middle: what is shown is known of candidates.
                places_in = [int(np.abs(swing.indices - at).argmin()) for at in middles(parts, total, count)]
                found.setdefault((title, count), []).append({"hit": float(swing.near[:, places_in].any(1).mean())})
    return {
        "videos": len(looked),
        "num_candidates": GOLF_CANDIDATES,
        "rows": [_row(name, count, rows) for (name, count), rows in found.items()],
        "versus": {"hit": _versus({pair: [row["hit"] for row in rows] for pair, rows in found.items()})},
    }


def _reels(places: Places) -> dict[str, Any]:
    """Whether the classifier names the class from the chosen shots."""
    reels = Reels(places, "test", NUM_REELS, seed=2)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for reel in reels.reels:
        frames = reels.frames[reel.pictures]
        for name in POLICIES:
            for count, chosen in _picked(name, frames, REEL_NUMBERS).items():
                right = reels.right(reel, chosen)
                found.setdefault((name, count), []).append({"top1": float(right)})
    everything = [{"top1": float(reels.right(reel, range(REEL_SHOTS)))} for reel in reels.reels]
    return {
        "videos": len(reels.reels),
        "num_candidates": REEL_SHOTS,
        "rows": [
            *(_row(name, count, rows) for (name, count), rows in found.items()),
            _row("all ten", REEL_SHOTS, everything),
        ],
        "versus": {"top1": _versus({pair: [row["top1"] for row in rows] for pair, rows in found.items()})},
    }


def _detectors(places: Places) -> dict[str, str]:
    return DETECTORS if places.scenedetect is not None else {}


def _row(name: str, count: int, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means over videos, with 95 % intervals of those that matter."""
    result: dict[str, Any] = {"policy": name, "num_frames": count}
    for key in rows[0]:
        values = np.array([row[key] for row in rows])
        result[key] = round(float(values.mean()), 4)
        if key in INTERVALS:
            result[f"{key} ci95"] = _interval(values)
    return result


def _versus(values: dict[tuple[str, int], list[float]]) -> list[dict[str, Any]]:
    """The general sampler less each other, on the same videos."""
    rows = []
    for (name, count), others in values.items():
        if name != GENERAL:
            gain = np.array(values[GENERAL, count][: len(others)]) - np.array(others)
            rows.append(
                {"than": name, "num_frames": count, "more": round(float(gain.mean()), 4), "ci95": _interval(gain)}
            )
    return rows


def _interval(values: Numbers) -> list[float]:
    bounds = interval(values @ resample_counts(len(values), DRAWS, 0) / len(values))
    assert bounds is not None
    return [round(bound, 4) for bound in bounds]


def wins(result: dict[str, Any]) -> dict[str, bool]:
    """Whether it beats uniform everywhere, and with certainty; what makes it fit to be the default."""
    of = {
        "fewer faulty frames": [
            -row["ci95"][1] for row in result["films"]["versus"]["faulty"] if row["than"] == UNIFORM
        ],
        "more shots shown": [
            row["ci95"][0] for row in result["films"]["versus"]["shots shown"] if row["than"] == UNIFORM
        ],
        "fewer repeats": [-row["ci95"][1] for row in result["stills"]["versus"]["repeated"] if row["than"] == UNIFORM],
        "more moments": [row["ci95"][0] for row in result["golf"]["versus"]["hit"] if row["than"] == UNIFORM],
        "more classes right": [row["ci95"][0] for row in result["reels"]["versus"]["top1"] if row["than"] == UNIFORM],
    }
    return {name: all(bound > 0 for bound in bounds) for name, bounds in of.items()}


def default_places(given: Any) -> Places:
    given.work.mkdir(parents=True, exist_ok=True)
    return Places(
        *(given.pictures, given.clips, given.films, given.fonts, given.classifier, given.actions, given.streams),
        *(given.work, given.scenedetect),
    )
