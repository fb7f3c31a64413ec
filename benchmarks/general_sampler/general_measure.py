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
    SHOT_FRAMES,
    Places,
    Reels,
    film_candidates,
    films,
    judge,
    middles,
    scenes,
    stills,
    swings,
)
from sosampler._util.environment import circumstances
from sosampler.evaluation.result import interval, resample_counts
from sosampler.policies.base import Batch
from sosampler.policies.registry import get_policy

POLICIES = ("uniform", "frame-difference", "farthest-first", "dpp", "general")
GENERAL, UNIFORM = "general", "uniform"
DETECTORS = {"content": "PySceneDetect content", "adaptive": "PySceneDetect adaptive"}
NUM_REELS, NUM_FILMS, NUM_STILLS, DRAWS = 600, 60, 40, 2000
REELS_FOR_SCENES = 200  # as files

Numbers = NDArray[np.float64]


def measure(places: Places, put: Callable[..., None], only: Sequence[str] = ()) -> None:
    """All sets, or some; each is told as soon as it is measured."""
    put(**circumstances(("onnxruntime", "numpy", "av", "torch")), policies_looked_at=list(POLICIES))
    for name, one in (("films", _films), ("stills", _stills), ("golf", _golf), ("reels", _reels)):
        if only and name not in only:
            continue
        begin = time.perf_counter()
        found = one(places)
        put(**{name: {**found, "seconds": round(time.perf_counter() - begin, 1)}})


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


def _judged(places: Places, made: Sequence[Film], keys: Sequence[str]) -> dict[str, Any]:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for film in made:
        indices, frames = film_candidates(film)
        for name in POLICIES:
            picked = _picked(name, frames, FILM_NUMBERS)
            for count in FILM_NUMBERS:
                chosen = indices[picked[count]].tolist()
                if name == UNIFORM:  # the middles of N stretches, as `select` has it without candidates
                    chosen = so.select(film.path, count, decode=False).frame_indices.tolist()
                found.setdefault((name, count), []).append(judge(film, chosen))
    for detector, title in _detectors(places).items():
        for film, parts in zip(made, scenes(places, detector, [film.path for film in made]), strict=True):
            for count in FILM_NUMBERS:
                found.setdefault((title, count), []).append(judge(film, middles(parts, len(film.kinds), count)))
    kinds = [kind for film in made for kind in film.kinds]
    return {
        "videos": len(made),
        "num_candidates": FILM_CANDIDATES,
        "seconds_a_video": round(len(kinds) / FPS / len(made), 1),
        "shots_a_video": round(float(np.mean([max(film.shots) + 1 for film in made])), 2),
        "kinds": {kind: round(kinds.count(kind) / len(kinds), 4) for kind in dict.fromkeys(kinds)},
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
    cut: dict[tuple[str, int], list[dict[str, float]]] = {}
    for detector, title in _detectors(places).items():
        parted = scenes(places, detector, reels.videos(REELS_FOR_SCENES))
        for reel, parts in zip(reels.reels, parted, strict=False):
            for count in REEL_NUMBERS:
                numbers = middles(parts, REEL_SHOTS * SHOT_FRAMES, count)
                right = reels.right(reel, [number // SHOT_FRAMES for number in numbers])
                cut.setdefault((title, count), []).append({"top1": float(right)})
    everything = [{"top1": float(reels.right(reel, range(REEL_SHOTS)))} for reel in reels.reels]
    return {
        "videos": len(reels.reels),
        "videos_for_scenes": min(REELS_FOR_SCENES, len(reels.reels)),
        "num_candidates": REEL_SHOTS,
        "rows": [
            *(_row(name, count, rows) for (name, count), rows in {**found, **cut}.items()),
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
        if key in ("faulty", "repeated", "shots shown", "hit", "top1"):
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
        given.pictures, given.clips, given.films, given.fonts, given.classifier, Path(given.work), given.scenedetect
    )
