"""Videos, small classifiers and short cuts that the tests of banks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosampler import wrap_classifier
from sosampler.classifiers.base import Classifier
from sosampler.data.bank import Bank
from sosampler.data.prepare import prepare
from sosampler.synthetic import numbered_video

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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(videos: Path, out: Path, classifier: Any = None, **options: Any) -> Bank:
    options = {"num_candidates": 12, "videos_per_shard": 2, "workers": 0} | options
    return prepare(videos / "m.csv", classifier, out, **options)
