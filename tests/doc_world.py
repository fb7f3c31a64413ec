"""Make a folder with the small videos, banks and networks that the code blocks of the documentation use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import sosampler as so
from benchmarks.accuracy.query import train_model
from sosampler.video.synthetic import encode_video, numbered_frame, numbered_video
from tests.doc_blocks import TINY

CLASSES = ("ant", "bee")
_COUNTS = {"train": 6, "dev": 2, "test": 4}
_SMALL: dict[str, Any] = {"num_shots": (2, 3), "seconds_per_shot": (0.5, 1.0), "fps": 4, "size": 48}
# Weight files that the documentation names. They hold the weights of the tiny network used in place of all others.
_WEIGHTS = ("resnet50.safetensors", "resnet34.safetensors", "resnet18.safetensors", "mobilenet_v2.safetensors")


def make_world(folder: Path) -> None:
    """Write videos, images, frame folders, manifests, a classifier, a bank, a sampler and one evaluation."""
    _write_videos(folder)
    _write_clips(folder)
    _write_images(folder)
    _write_official_files(folder)
    _write_weights(folder)
    train_model(folder / "models/clip", steps=20)
    trained = so.train_classifier(
        folder / "videos.csv", TINY, out=folder / "runs/mine", input_size=32, epochs=1, num_frames=2, workers=0
    )
    for name in ("classifier", "sports"):
        shutil.copytree(folder / "runs/mine", folder / "runs" / name)
    bank = so.prepare(
        folder / "videos.csv", classifier=trained.classifier, out=folder / "bank", num_candidates=10, workers=1
    )
    settings: dict[str, Any] = {"backbone": TINY, "input_size": 32, "epochs": 1, "batch_size": 4}
    sampler = so.train(bank, out=folder / "runs/sampler", **settings).sampler
    # Two dev videos are too few to fit answers on.
    sampler.answer = {
        "default": "mean",
        "weighted": {"power": 1.0, "scale": 1.0},
        "fused": {"power": 1.0, "strength": 1.0, "classifier": 1.0, "sampler": 1.0},
        "sure": [[0.0, 0.99], [0.01, 0.9]],
    }
    sampler.save_pretrained(folder / "runs/sampler")
    shutil.copytree(folder / "runs/sampler", folder / "runs/first")
    evaluation = so.evaluate(bank, {"uniform": "uniform", "learned": sampler}, num_frames=[2], num_candidates=8)
    evaluation.write_run(folder / "runs/evaluation")


def _write_videos(folder: Path) -> None:
    video = numbered_video(num_frames=300, gop=6, fps=2)  # 150 s
    for name in ("match.mp4", "videos/a.mp4"):
        _at(folder, name).write_bytes(video)
    numbered_video(folder / "recording.mkv", num_frames=50, gop=6, fps=2, container_format="matroska")
    encode_video((255 - numbered_frame(number) for number in range(60)), _at(folder, "videos/deeper/b.mp4"), fps=2)
    manifest = so.make_reels(
        "procedural", folder / "reels", to="mp4", recipe=_SMALL, counts=_COUNTS, num_classes=len(CLASSES)
    )
    assert isinstance(manifest, so.Manifest)
    lines = ["path,label,split"]
    for item in manifest.items:
        path = manifest.path_of(item).relative_to(folder).as_posix().replace("reels/", "labelled/", 1)
        lines.append(f"{path},{CLASSES[item.labels[0]]},{item.split}")
    (folder / "reels").rename(folder / "labelled")  # the pages make their own reels
    (folder / "videos.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_clips(folder: Path) -> None:
    """Write clips.csv, a manifest of trimmed clips, and background in others/."""
    clip = numbered_video(num_frames=12, width=96, height=64, fps=10)
    lines = ["path,label,group,split"]
    for number, split in enumerate(["train"] * 4 + ["dev"] * 2 + ["test"] * 2):
        for name in CLASSES:
            path = f"clips/{name}{number}.mp4"
            _at(folder, path).write_bytes(clip)
            lines.append(f"{path},{name},{name} {number},{split}")
    for number in range(10):
        _at(folder, f"others/{number}.mp4").write_bytes(clip)
    (folder / "clips.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_images(folder: Path) -> None:
    from PIL import Image

    for number in range(20):
        Image.fromarray(numbered_frame(number)).save(_at(folder, f"dump/img_{number + 1:05d}.jpg"))
    rng = np.random.default_rng(0)
    for name in (*CLASSES, "distractors"):
        for number in range(10):
            noise = Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
            noise.save(_at(folder, f"stills/{name}/{number}.png"))
    shutil.copytree(folder / "stills", folder / "pictures", ignore=shutil.ignore_patterns("distractors"))


def _write_official_files(folder: Path) -> None:
    """Write annotation files of public data sets, in their published format, for the videos above."""
    entry = {"subset": "training", "duration": 150.0, "annotations": [{"label": "Long jump", "segment": [1, 9]}]}
    other = {"subset": "validation", "duration": 150.0, "annotations": [{"label": "Ballet", "segment": [0, 5]}]}
    annotations = {"database": {"a": entry, "deeper/b": other}}
    (folder / "activity_net.v1-3.min.json").write_text(json.dumps(annotations), encoding="utf-8")
    header = "label,youtube_id,time_start,time_end,split\n"
    (folder / "train.csv").write_text(f"{header}abseiling,aaaaaaaaaaa,0,10,train\n", encoding="utf-8")
    (folder / "val.csv").write_text(f"{header}archery,bbbbbbbbbbb,0,10,val\n", encoding="utf-8")
    (folder / "mini_kinetics_ids.txt").write_text("aaaaaaaaaaa\nbbbbbbbbbbb\n", encoding="utf-8")
    for name in ("k400/aaaaaaaaaaa_000000_000010.mp4", "k400/bbbbbbbbbbb_000000_000010.mp4"):
        shutil.copy(folder / "match.mp4", _at(folder, name))
    shutil.copytree(folder / "dump", folder / "frames/first")
    (folder / "train_list.txt").write_text("first 20 0\n", encoding="utf-8")
    (folder / "test_list.txt").write_text("first 20 1\n", encoding="utf-8")
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state: Mapping[str, Any] = so.create_classifier(TINY).net.state_dict()
    for name in _WEIGHTS:
        save_file(dict(state), folder / name)
    torch.save(so.create_classifier(TINY, num_classes=len(CLASSES)).net.state_dict(), folder / "x3d.pyth")


def _at(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
