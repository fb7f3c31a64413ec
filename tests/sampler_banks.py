"""A bank on which a sampler can learn something within seconds, and its teacher, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import tables_batch, teacher_schema
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.bank.writer import writing_shard

CLASSES = ("run", "jump", "swim")
TEACHER = "a" * 16

# A network so small that an epoch takes a blink; without and with batch normalisation.
TINY, TINY_WITHOUT_BATCH_NORM = "timm:test_resnet.r160_in1k", "timm:test_convnext.r160_in1k"
SMALL: dict[str, Any] = {
    "backbone": TINY,
    "input_size": 32,
    "epochs": 3,
    "batch_size": 8,
    "num_candidates": [4, 8],
    "device": "cpu",
    "workers": 1,
}
# Every setting that matters here, so that a better default recipe changes no test.
QUICK: dict[str, Any] = SMALL | {
    "loss": "logistic",
    "prediction": "raw",
    "tau": None,
    "target": "label",
    "target_space": "probability",
    "weighted": True,
    "lam": 1.0,
    "distill": 1.0,
    "calibrate": 0.0,
    "class_head": True,
    "scoring": {},
    "dropout": 0.0,
    "optimizer": "adamw",
    "lr": 3e-3,
    "warmup": 0.05,
    "clip": None,
    "ema": 0.0,
    "crop_scale": [0.5, 1.0],
    "crop_per": "video",
}


def bright_video(rng: np.random.Generator, useful: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [T, H, W, 3]: bright where a frame is useful, dark where not."""
    level = np.where(useful, 190, 60)[:, None, None, None]
    return (level + rng.normal(0, 25, (len(useful), *size, 3))).clip(0, 255).astype(np.uint8)


def make_bank(
    folder: Path,
    *,
    train: int = 32,
    dev: int = 16,
    stored: int = 8,
    sizes: tuple[tuple[int, int], ...] = ((40, 52),),
    multi_label: bool = False,
    pooling: str | None = "mean",
    unlabelled: int = 0,
    seed: int = 0,
) -> Bank:
    """Videos of which some frames are bright, and a teacher that is right about those and wrong about dark ones.

    A video of the mean of uniform frames is often wrong; that of its bright frames never.
    """
    rng = np.random.default_rng(seed)
    entries, logits = [], []
    for number in range(train + dev):
        count = stored - number % 2 * (stored // 4)  # lengths differ
        useful = np.zeros(count, dtype=bool)
        useful[rng.permutation(count)[: max(2, count // 3)]] = True
        label = number % 3
        labels = tuple(sorted({label, (label + 1) % 3})) if multi_label and number % 4 == 0 else (label,)
        entries.append(
            FrameEntry(
                id=f"v{number:03d}",
                labels=labels if number >= unlabelled else (),
                frames=bright_video(rng, useful, sizes[number % len(sizes)]),
                split="train" if number < train else "dev",
            )
        )
        answer = rng.normal(-2 if multi_label else 0, 0.2, (count, 3))
        for frame in range(count):
            if useful[frame]:
                answer[frame, list(labels)] += 4
            else:
                answer[frame, (label + 2) % 3] += 3.5
        logits.append(answer.astype(np.float32))
    bank = write_frames(folder, entries, classes=CLASSES, multi_label=multi_label, videos_per_shard=20, quality=95)
    write_teacher(bank, logits, multi_label=multi_label, pooling=pooling)
    return bank


def write_teacher(bank: Bank, logits: list[np.ndarray], *, multi_label: bool, pooling: str | None) -> None:
    folder = bank.folder
    features = {"precision": "float32", "width": 3} if pooling else None
    about = {
        "kind": "sosampler teacher",
        "version": 1,
        "fingerprint": TEACHER,
        "name": "by hand",
        "num_classes": 3,
        "class_names": list(CLASSES),
        "multi_label": multi_label,
        "pooling": pooling,
        "views": 1,
        "precision": "float32",
        "features": features,
    }
    folder.teacher(TEACHER).path.mkdir(parents=True)
    write_text(folder.teacher(TEACHER).header, json.dumps(about))
    schema = teacher_schema(3, "float32" if features else None, 3 if features else None)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(TEACHER).shard(shard), schema) as write:
            for number, row in enumerate(bank.rows):
                if row.shard == shard:
                    probs = probabilities(logits[number], multi_label=multi_label)
                    kept = [logits[number]] if features else []
                    write(tables_batch(schema, row.item.id, probs.astype(np.float16), *kept))


def probabilities(logits: np.ndarray, *, multi_label: bool) -> np.ndarray:
    found = np.exp(logits)
    return found / (1 + found) if multi_label else found / found.sum(-1, keepdims=True)
