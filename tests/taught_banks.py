"""Small banks with teachers whose answers are given, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import tables_batch, teacher_schema
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.bank.writer import writing_shard
from sosampler.video.candidates import segment_centres, uniform_positions
from tests.banks import CLASSES, picture

FINGERPRINT = "ab" * 8
# The third is shorter than T and the last is shorter than N.
LENGTHS = [12, 9, 5, 16, 8, 8, 11, 3]
LABELS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0,), (1,), (2,), (1,), (0,)]
NUM_CANDIDATES = 8


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return found


def sigmoid(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-logits))
    return found


def write_bank(
    out: Path,
    lengths: Sequence[int],
    labels: Sequence[tuple[int, ...]],
    *,
    splits: Sequence[str] | None = None,
    multi_label: bool = False,
    wide: Sequence[int] = (),
) -> Bank:
    """Videos with so many stored frames; those numbered in `wide` have other proportions."""
    entries = [
        FrameEntry(
            id=f"v{number}",
            labels=labels[number],
            frames=np.stack(
                [picture(100 * number + 13 * frame, width=64 if number in wide else 48) for frame in range(length)]
            ),
            split=splits[number] if splits else "test",
        )
        for number, length in enumerate(lengths)
    ]
    return write_frames(out, entries, classes=CLASSES, multi_label=multi_label, videos_per_shard=4)


def random_logits(lengths: Sequence[int], labels: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """[T, 3] of each video: noise, with its labels a little higher."""
    rng = np.random.default_rng(seed)
    found = []
    for length, positives in zip(lengths, labels, strict=True):
        logits = 2 * rng.standard_normal((length, 3))
        logits[:, list(positives)] += 0.8
        found.append(logits.astype(np.float32))
    return found


def teach(bank: Bank, logits: Sequence[np.ndarray], *, multi_label: bool = False, name: str = FINGERPRINT) -> None:
    """A mean-pooled teacher with these logits, as `prepare` would write it."""
    activate = sigmoid if multi_label else softmax
    about = {
        "kind": "sosampler teacher",
        "version": 1,
        "fingerprint": name,
        "name": "given",
        "num_classes": 3,
        "multi_label": multi_label,
        "pooling": "mean",
        "views": 1,
        "precision": "float32",
        "features": {"precision": "float32", "width": 3},
    }
    folder = bank.folder
    folder.teacher(name).path.mkdir(parents=True)
    write_text(folder.teacher(name).header, json.dumps(about))
    schema = teacher_schema(3, "float32", 3)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(name).shard(shard), schema) as write:
            for row, answer in zip(bank.rows, logits, strict=True):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, activate(answer).astype(np.float16), answer))


def distinct(length: int, count: int = NUM_CANDIDATES) -> list[int]:
    """Stored frames that are offered."""
    return sorted(set(uniform_positions(length, count).tolist()))


def clip(chosen: list[int], wanted: int) -> list[int]:
    """What is shown of chosen stored frames: repeated evenly where they are too few."""
    return chosen if len(chosen) >= wanted else [chosen[place] for place in segment_centres(len(chosen), wanted)]


def confidence(probs: np.ndarray, labels: tuple[int, ...]) -> float:
    return float(np.exp(np.mean(np.log(probs[list(labels)]))))
