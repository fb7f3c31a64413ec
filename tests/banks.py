"""Videos, small classifiers and short cuts that the tests of banks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler import wrap_classifier
from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import tables_batch, teacher_schema
from sosampler.bank.from_arrays import FrameEntry
from sosampler.bank.prepare import prepare
from sosampler.bank.writer import writing_shard
from sosampler.classifiers.base import Classifier
from sosampler.video.synthetic import numbered_video

# Frames of each video; the third is broken, the fourth has another shape, the fifth is short.
LENGTHS = {"a.mp4": 90, "b.mp4": 64, "broken.mp4": 0, "wide.mp4": 50, "short.mp4": 7, "c.mp4": 100}


def make_videos(folder: Path) -> Path:
    """Write the videos and `m.csv`; returns the folder."""
    for name, frames in LENGTHS.items():
        if frames:
            numbered_video(folder / name, num_frames=frames, width=256 if name == "wide.mp4" else 192, height=128)
    (folder / "broken.mp4").write_bytes(b"this is not a video")
    lines = [f"{name},{('x', 'y')[place % 2]},{'dev' if place > 3 else 'train'}" for place, name in enumerate(LENGTHS)]
    (folder / "m.csv").write_text("path,label,split\n" + "\n".join(lines) + "\n")
    return folder


def small_net(seed: int = 0, classes: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 8, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, classes))
    return nn.Sequential(*layers)


def pooled(seed: int = 0, **options: Any) -> Classifier:
    return wrap_classifier(small_net(seed), input_size=64, resize=72, layout="BCHW", **options)


class Told:
    """Not of this package: gives back where each frame lies as its first probability."""

    name, class_names, preprocessing = "told", ("x", "y"), None

    def frame_probs(self, frames: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        return torch.stack([positions, 1 - positions], -1)

    def fingerprint(self) -> str:
        return "feedfeedfeedfeed"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(videos: Path, out: Path, classifier: Any = None, **options: Any) -> Bank:
    options = {"num_candidates": 12, "videos_per_shard": 2, "workers": 0} | options
    return prepare(videos / "m.csv", classifier, out, **options)


# ---- banks from arrays

CLASSES = ("run", "jump", "swim")


def picture(number: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Smooth, so that JPEG keeps it."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([127 + 100 * np.sin((x + number * 7 * (c + 1)) / 17 + y / 23) for c in range(3)], -1).astype(
        np.uint8
    )


def frames(number: int, count: int, **size: int) -> np.ndarray:
    return np.stack([picture(100 * number + frame, **size) for frame in range(count)])


def entries(count: int = 10) -> list[FrameEntry]:
    return [
        FrameEntry(
            id=f"v{number}",
            labels=(number % 3,),
            frames=frames(number, 3 + number),
            pts_seconds=np.arange(3 + number) / 2,
            split=("train", "train", "dev", "test")[number % 4],
            group=f"g{number}",
        )
        for number in range(count)
    ]


def teacher_by_hand(bank: Bank, name: str = "f" * 16, views: int = 1, seed: int = 0) -> list[np.ndarray]:
    """A teacher made by hand, without torch: probabilities [T, 3] of each video; features are ten times them."""
    rng = np.random.default_rng(seed)
    folder, answers = bank.folder, []
    about = {"kind": "sosampler teacher", "version": 1, "fingerprint": name[:16], "name": "by hand", "num_classes": 3}
    about |= {
        "pooling": "mean",
        "views": views,
        "precision": "float32",
        "features": {"precision": "float32", "width": 3},
    }
    folder.teacher(name).path.mkdir(parents=True)
    write_text(folder.teacher(name).header, json.dumps(about))
    schema = teacher_schema(3, "float32", 3)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.teacher(name).shard(shard), schema) as write:
            for row in bank.rows:
                if row.shard == shard:
                    probs = rng.dirichlet(np.ones(3), size=len(bank[len(answers)])).astype(np.float16)
                    answers.append(probs)
                    write(tables_batch(schema, row.item.id, probs, 10 * probs.astype(np.float32)))
    return answers
