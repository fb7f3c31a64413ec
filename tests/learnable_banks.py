"""A bank with features on which every system can learn something within seconds, made by hand."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import FEATURES, VERSION, features_schema, tables_batch
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.bank.writer import writing_shard

CLASSES = ("run", "jump", "swim", "dance")
STORED, USEFUL = 12, 2  # frames of a video, and those among them that show the class
HEAVY_GMACS, LIGHT_GMACS = 4.0, 0.1
HEAVY_PRINT, LIGHT_PRINT = "b" * 16, "c" * 16

# Every setting that matters here, so that better recipes change no test.
_COMMON: dict[str, Any] = {
    "num_candidates": STORED,
    "batch_size": 64,
    "optimizer": "adamw",
    "weight_decay": 1e-4,
    "clip": 10.0,
    "device": "cpu",
}
QUICK: dict[str, dict[str, Any]] = {
    "frameexit": _COMMON
    | {"epochs": {"classifiers": 10, "gates": 8}, "lr": 2e-2, "max_frames": STORED, "neck_width": 16}
    | {"gate_widths": [8, 4], "beta": 1e-3, "first_exit": 0.95},
    "liteeval": _COMMON
    | {"epochs": 15, "lr": 2e-2, "coarse_width": 8, "fine_width": 16, "target": 0.17, "budget": 2.0},
    "adaframe": _COMMON
    | {"epochs": 20, "lr": 2e-2, "hidden": 32, "width": 16, "memory_frames": STORED, "max_steps": 3, "patience": 3},
    "marl": _COMMON
    | {"epochs": 20, "lr": 1e-2, "agents": 2, "stride": 2, "max_steps": 3, "hidden": 16, "width": 8, "rollouts": 2},
}


def random_frames_bound(frames: int) -> float:
    """The best accuracy that anyone can have who sees so many random frames: all others say nothing of the class."""
    hit = 1 - comb(STORED - USEFUL, frames) / comb(STORED, frames)
    return hit + (1 - hit) / len(CLASSES)


def make_learnable_bank(folder: Path, *, train: int, dev: int, multi_label: bool = False, seed: int = 0) -> Bank:
    """Videos in which two neighbouring frames show the class; features "heavy" and "light" stand beside the frames.

    Heavy features of the other frames tell on which side these two are. Light features tell which they are, and
    nothing of the class.
    """
    rng = np.random.default_rng(seed)
    entries, heavy, light = [], [], []
    picture = rng.integers(0, 255, (STORED, 8, 8, 3), dtype=np.uint8)
    for number, split in enumerate(["train"] * train + ["dev"] * dev):
        label = int(rng.integers(len(CLASSES)))
        several = {label, (label + 1) % len(CLASSES)} if multi_label and number % 3 == 0 else {label}
        labels = tuple(sorted(several))
        entries.append(FrameEntry(id=f"v{number:04d}", labels=labels, frames=picture, split=split))
        start = int(rng.integers(STORED - USEFUL + 1))
        time = np.arange(STORED)
        shown = (time >= start) & (time < start + USEFUL)
        first = rng.normal(0, 0.3, (STORED, 6))
        first[np.ix_(shown, labels)] += 3
        first[:, 4] += np.where(time < start, 1, np.where(shown, 0, -1))
        second = rng.normal(0, 0.3, (STORED, 3))
        second[:, 0] += 2 * shown
        heavy.append(first)
        light.append(second)
    bank = write_frames(folder, entries, classes=CLASSES, multi_label=multi_label, videos_per_shard=400, quality=50)
    write_features(bank, "heavy", heavy, kind="classifier", fingerprint=HEAVY_PRINT, gmacs=HEAVY_GMACS)
    write_features(bank, "light", light, kind="sampler", fingerprint=LIGHT_PRINT, gmacs=LIGHT_GMACS)
    return Bank(folder)


def write_features(
    bank: Bank,
    name: str,
    features: list[np.ndarray],
    *,
    kind: str,
    fingerprint: str,
    gmacs: float,
    precision: str = "float16",
) -> None:
    """Features [T, D] of each video, as `add_features` would have written them for some network."""
    answers, width = bank.folder.features(name), features[0].shape[1]
    about = {
        "kind": FEATURES.kind,
        "version": VERSION,
        "name": name,
        "network": kind,
        "network_name": f"by hand, {name}",
        "fingerprint": fingerprint,
        "width": width,
        "precision": precision,
        "computed_in": "float32",
        "batch": 1,
        "gmacs": gmacs,
        "preprocessing": {},
    }
    answers.path.mkdir(parents=True)
    write_text(answers.header, json.dumps(about))
    schema = features_schema(precision, width)
    for shard in range(bank.header.num_shards):
        with writing_shard(answers.shard(shard), schema) as write:
            for number, row in enumerate(bank.rows):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, features[number].astype(precision)))
