"""On dev: how the two heads become one importance, and how frames are chosen by it. Every setting is tried.

Everything that the network says of a frame is kept, so that trying a setting costs no network.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.general_sampler.general_films import Film
from benchmarks.general_sampler.general_sets import (
    FILM_NUMBERS,
    GOLF_NUMBERS,
    REEL_NUMBERS,
    Places,
    Reels,
    film_candidates,
    films,
    judge,
    stills,
    swings,
)
from benchmarks.general_sampler.general_training import HEADS, RETAINED, SURE
from sosampler.policies.learned import CHOICE
from sosampler.policies.visual import typical_order
from sosampler.samplers.export import export_sampler, onnx_bytes
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.sosampler import SOSampler

GRID: dict[str, tuple[float, ...]] = {
    "sure": (0.0, 0.25, 0.5, 1.0),  # share of the second head in the importance
    "clearness": (0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
    "sharpness": (1.0, 2.0, 4.0, 8.0),
    "movement": (0.0, 0.5, 1.0, 2.0, 4.0, 8.0),
    "most_movement": (0.05, 0.1, 0.15, 0.2, 0.3),
    "redundancy": (0.25, 0.5, 1.0, 2.0),
    "alike": (0.5, 0.6, 0.7, 0.8, 0.9),
}
NUM_REELS, NUM_FILMS, NUM_STILLS = 400, 40, 20

Numbers = NDArray[np.float64]


class Said(NamedTuple):
    """What the network says of some frames."""

    heads: Numbers  # [T, 2]
    features: NDArray[np.float32]  # [T, D]


class Dev:
    """All dev sets as the network sees them."""

    def __init__(self, run: Path, places: Places) -> None:
        sampler = OnnxSampler(onnx_bytes(SOSampler.from_pretrained(run)))
        heads = {name: tensor.double().numpy() for name, tensor in load_file(run / HEADS).items()}

        def look(frames: NDArray[np.uint8]) -> Said:
            features = sampler.look(frames.transpose(0, 3, 1, 2)[None]).features[0]
            return Said(features @ heads["weight"].T + heads["bias"], features)

        self.reels = Reels(places, "dev", NUM_REELS, seed=1)
        self.pictures = look(self.reels.frames)
        self.swings = [(look(swing.frames), swing.near) for swing in swings(places, "dev")]

        def seen(made: Sequence[Film]) -> list[tuple[Film, NDArray[np.int64], Said]]:
            looked = [(film, *film_candidates(film)) for film in made]
            return [(film, indices, look(frames)) for film, indices, frames in looked]

        self.films = seen(films(places, "dev", NUM_FILMS))
        self.stills = seen(stills(places, "dev", NUM_STILLS))

    def measure(self, settings: dict[str, float]) -> dict[str, list[float]]:
        """By set, what is to be high: accuracies, hits, and good frames and shots shown less repeats."""
        most = {"reels": max(REEL_NUMBERS), "golf": max(GOLF_NUMBERS), "films": max(FILM_NUMBERS)}
        right: list[list[bool]] = []
        for reel in self.reels.reels:
            order = self._order(_some(self.pictures, reel.pictures), most["reels"], settings)
            right.append([self.reels.right(reel, order[:count]) for count in REEL_NUMBERS])
        hits = []
        for said, near in self.swings:
            order = self._order(said, most["golf"], settings)
            hits.append([near[:, order[:count]].any(1).mean() for count in GOLF_NUMBERS])
        shown: dict[str, list[list[float]]] = {"films": [], "stills": []}
        for name, seen in (("films", self.films), ("stills", self.stills)):
            for film, indices, said in seen:
                order = self._order(said, most["films"], settings)
                result = [judge(film, indices[order[:count]].tolist()) for count in FILM_NUMBERS]
                shown[name].append([one[key] for one in result for key in ("good", "repeated", "shots shown")])
        return {
            "reels": np.mean(right, axis=0).tolist(),
            "golf": np.mean(hits, axis=0).tolist(),
            **{name: np.mean(rows, axis=0).tolist() for name, rows in shown.items()},
        }

    def _order(self, said: Said, num_frames: int, settings: dict[str, float]) -> NDArray[np.int64]:
        rest = {name: value for name, value in settings.items() if name != "sure"}
        quality = 1 / (1 + np.exp(-mixed(said.heads, settings["sure"])))
        order, _ = typical_order(quality, said.features, min(num_frames, len(quality)), **rest)
        return order


def mixed(heads: Numbers, sure: float) -> Numbers:
    """The importance [T]; as the network's own head will have it."""
    return np.asarray((heads[:, RETAINED] + sure * heads[:, SURE]) / (1 + sure))


def _some(said: Said, places: NDArray[np.int64]) -> Said:
    return Said(said.heads[places], said.features[places])


def total(found: dict[str, list[float]]) -> float:
    """One number: the means of reels and golf, and of films good frames + shots shown - twice the repeats there.

    And less the repeats in slide shows: in films, whose shots move, hardly any rule takes a frame twice.
    """
    good, repeated, shown = np.array(found["films"]).reshape(-1, 3).mean(0)
    still = float(np.array(found["stills"]).reshape(-1, 3)[:, 1].mean())
    return float(np.mean(found["reels"]) + np.mean(found["golf"]) + good + shown - 2 * repeated - still)


def choose(run: Path, places: Places) -> dict[str, Any]:
    """The best setting, found one after another: all values of each while the others stand, until nothing changes."""
    dev = Dev(run, places)
    tried: dict[tuple[float, ...], dict[str, list[float]]] = {}

    def value(settings: dict[str, float]) -> float:
        key = tuple(settings.values())
        if key not in tried:
            tried[key] = dev.measure(settings)
        return total(tried[key])

    best = {"sure": 0.0, **CHOICE}
    before = None
    while best != before:
        before = dict(best)
        for names in (("redundancy", "alike"), ("sure", "clearness"), ("movement", "most_movement"), ("sharpness",)):
            trials = [
                best | dict(zip(names, values, strict=True)) for values in itertools.product(*(GRID[n] for n in names))
            ]
            best = max([best, *trials], key=value)
        print(best, round(value(best), 4), tried[tuple(best.values())], flush=True)
    rows = [
        {"settings": dict(zip(best, key, strict=True)), "total": total(found), **found} for key, found in tried.items()
    ]
    rows.sort(key=lambda row: -row["total"])
    return {"chosen": best, "dev": tried[tuple(best.values())], "tried": len(rows), "best": rows[:10]}


def export(run: Path, sure: float, about: dict[str, Any], card: str, out: Path) -> dict[str, Any]:
    """The shipped folder: config.json, the card and model.onnx with weights in half precision."""
    sampler = SOSampler.from_pretrained(run)
    heads = load_file(run / HEADS)
    with torch.no_grad():
        for name, tensor in heads.items():
            mixture = (tensor[RETAINED] + sure * tensor[SURE]) / (1 + sure)
            getattr(sampler.importance_head, name).copy_(mixture.view_as(getattr(sampler.importance_head, name)))
    sampler.calibration = (1.0, 0.0)
    sampler.about = about
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        sampler.save_pretrained(name)
        shutil.copy(Path(name) / "config.json", out / "config.json")
    result = export_sampler(sampler, out=out / "model.onnx", half=True).to_dict()
    (out / "README.md").write_text(card, encoding="utf-8")
    return {**result, "file": Path(result["file"]).name, "files": [Path(file).name for file in result["files"]]}


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
