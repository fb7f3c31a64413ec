"""On dev: how frames are chosen by what the network says of them, and what every setting brings.

Everything that the network says of a frame is kept, so that trying a setting costs no network. How its two heads become
one importance (`SURE_SHARE`) was chosen in the same way when it was trained.
"""

from __future__ import annotations

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
    candidates_of,
    films,
    judge,
    judge_spread,
    judge_stream,
    single_shots,
    stills,
    streams,
    swings,
)
from benchmarks.general_sampler.general_training import HEADS, RETAINED, SURE
from sosampler.policies.learned import CHOICE, general_sampler
from sosampler.policies.visual import blends, typical_order
from sosampler.samplers.export import export_sampler
from sosampler.samplers.onnx_sampler import sigmoid
from sosampler.samplers.sosampler import SOSampler

SURE_SHARE = 1.0  # share of the second head in the importance
GRID: dict[str, tuple[float, ...]] = {
    "clearness": (0.1, 0.3, 0.6),
    "clear": (0.6, 0.65, 0.7, 1.0),
    "sharpness": (2.0, 4.0, 6.0),
    "movement": (0.0, 4.0, 8.0, 12.0),
    "most_movement": (0.06, 0.1, 0.15),
    "redundancy": (0.15, 0.3, 0.5),
    "alike": (0.6, 0.7, 0.8),
    "coverage": (0.0, 1.0, 2.0, 4.0),
    "reach": (0.04, 0.0625, 0.08),
    "still": (0.001, 0.003, 0.01),
}
NUM_REELS, NUM_FILMS, NUM_STILLS = 200, 40, 20
SPREAD_NUMBER = 8

Numbers = NDArray[np.float64]


class Said(NamedTuple):
    """What is known of some frames."""

    quality: Numbers  # [T]
    features: NDArray[np.float32]  # [T, D]


def look(frames: NDArray[np.uint8], *, in_time: bool = True) -> Said:
    """Run the network; frames that follow each other in time may be blends."""
    outputs = general_sampler().look(frames.transpose(0, 3, 1, 2)[None])
    quality = sigmoid(outputs.scores[0].astype(np.float64))
    return Said(quality * (1 - blends(frames)) if in_time else quality, outputs.features[0])


class Dev:
    """All dev sets as the network sees them."""

    def __init__(self, places: Places) -> None:
        self.reels = Reels(places, "dev", NUM_REELS, seed=1)
        self.pictures = look(self.reels.frames, in_time=False)
        self.swings = [(look(swing.frames), swing.near) for swing in swings(places, "dev")]

        def seen(paths: Sequence[Path]) -> list[tuple[NDArray[np.int64], int, Said]]:
            looked = (candidates_of(path) for path in paths)
            return [(one.indices, one.total, look(one.frames)) for one in looked]

        def of_films(made: Sequence[Film]) -> list[Any]:
            return list(zip(made, seen([film.path for film in made]), strict=True))

        self.films = of_films(films(places, "dev", NUM_FILMS))
        self.stills = of_films(stills(places, "dev", NUM_STILLS))
        self.single = seen(single_shots(places, "dev"))
        made = streams(places, "dev")
        self.streams = list(zip(made, seen([stream.path for stream in made]), strict=True))

    def measure(self, settings: dict[str, float]) -> dict[str, list[float]]:
        """By set: shares of shots of the class, hits, good frames, repeats, shots and actions shown, gaps, bunches."""

        def order(said: Said, numbers: Sequence[int]) -> NDArray[np.int64]:
            count = min(max(numbers), len(said.quality))
            return typical_order(said.quality, said.features, count, **settings)[0]

        found: dict[str, list[list[float]]] = {}
        for reel in self.reels.reels:
            some = Said(self.pictures.quality[reel.pictures], self.pictures.features[reel.pictures])
            shows = self.reels.labels[reel.pictures[order(some, REEL_NUMBERS)]] == reel.label
            found.setdefault("reels", []).append([float(shows[:count].mean()) for count in REEL_NUMBERS])
        for said, near in self.swings:
            chosen = order(said, GOLF_NUMBERS)
            found.setdefault("golf", []).append([near[:, chosen[:count]].any(1).mean() for count in GOLF_NUMBERS])
        for name, films_seen in (("films", self.films), ("stills", self.stills)):
            for film, (indices, _, said) in films_seen:
                chosen = indices[order(said, FILM_NUMBERS)]
                result = [judge(film, chosen[:count].tolist()) for count in FILM_NUMBERS]
                row = [one[key] for one in result for key in ("good", "repeated", "shots shown")]
                found.setdefault(name, []).append(row)
        for indices, total, said in self.single:
            spread = judge_spread(indices[order(said, [SPREAD_NUMBER])].tolist(), total)
            found.setdefault("single", []).append(list(spread.values()))
        for stream, (indices, _, said) in self.streams:
            chosen = indices[order(said, FILM_NUMBERS)]
            shown = [judge_stream(stream, chosen[:count].tolist())["actions shown"] for count in FILM_NUMBERS]
            found.setdefault("streams", []).append(shown)
        return {name: np.mean(rows, axis=0).tolist() for name, rows in found.items()}


def choose(places: Places) -> dict[str, Any]:
    """What dev says of the settings of the package, and of each other value of each while the others stand.

    The settings were set by trials of this kind: first what eight frames may miss in films and in clips of a single
    shot, then golf, actions and the class of reels.
    """
    dev, settings = Dev(places), dict(CHOICE)
    changes: list[dict[str, float]] = [{}]
    changes += [{name: one} for name, values in GRID.items() for one in values if one != settings[name]]
    rows = []
    for change in changes:
        rows.append({"change": change, **dev.measure(settings | change)})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "chosen": {"sure": SURE_SHARE, **settings},
        "dev": {name: value for name, value in rows[0].items() if name != "change"},
        "around": rows[1:],
    }


def export(run: Path, out: Path) -> dict[str, Any]:
    """The shipped folder without its card: config.json, and model.onnx with weights in half precision."""
    sampler = SOSampler.from_pretrained(run)
    heads = load_file(run / HEADS)
    with torch.no_grad():
        for name, tensor in heads.items():
            mixture = (tensor[RETAINED] + SURE_SHARE * tensor[SURE]) / (1 + SURE_SHARE)
            getattr(sampler.importance_head, name).copy_(mixture.view_as(getattr(sampler.importance_head, name)))
    sampler.calibration = (1.0, 0.0)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        sampler.save_pretrained(name)
        shutil.copy(Path(name) / "config.json", out / "config.json")
    result = export_sampler(sampler, out=out / "model.onnx", half=True).to_dict()
    return {**result, "file": Path(result["file"]).name, "files": [Path(file).name for file in result["files"]]}
