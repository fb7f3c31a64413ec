"""What tests of training systems share: banks without meaning, networks as they were drawn, and the files of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import sosampler as so
from sosampler.samplers.backbones import create_backbone
from tests.learnable_banks import HEAVY_GMACS, HEAVY_PRINT, LIGHT_GMACS, LIGHT_PRINT, write_features

TINY = "timm:test_resnet.r160_in1k"
KEPT = {"classifier": "heavy", "light": "light"}
BRIEF: dict[str, Any] = {"num_candidates": 4, "device": "cpu", "batch_size": 4}  # for networks and banks of no meaning


def make_networks(folder: Path) -> SimpleNamespace:
    """A saved classifier, weights of MobileNetV2 and a saved sampler; all as they were drawn."""
    torch.manual_seed(0)
    so.save_classifier(so.create_classifier(TINY, num_classes=2, input_size=32), folder / "classifier")
    save_file(create_backbone("mobilenet_v2").weights_net().state_dict(), folder / "mobilenet.safetensors")
    so.SOSampler(backbone=TINY, input_size=32).save_pretrained(folder / "sampler")
    return SimpleNamespace(
        classifier=folder / "classifier", weights=folder / "mobilenet.safetensors", sampler=folder / "sampler"
    )


def make_plain_bank(folder: Path, *, multi_label: bool = False, dev: int = 3, unlabelled: int = 0) -> so.Bank:
    """A few short videos without any features."""
    rng = np.random.default_rng(0)
    lengths = [5, 4, 3, 5, 4, 6, 5, 4, 2][: 6 + dev]
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=() if number < unlabelled else (number % 2,),
            frames=rng.integers(0, 255, (length, 40, 40, 3), dtype=np.uint8),
            split="train" if number < 6 else "dev",
        )
        for number, length in enumerate(lengths)
    ]
    return so.write_frames(folder, entries, classes=("run", "jump"), multi_label=multi_label, videos_per_shard=4)


def make_random_bank(folder: Path, lengths: list[int], *, precision: str = "float16", scale: float = 1.0) -> so.Bank:
    """Videos of given lengths to train on, with features "heavy" and "light" that say nothing."""
    rng = np.random.default_rng(0)
    entries = [
        so.FrameEntry(
            id=f"v{number}", labels=(number % 4,), frames=rng.integers(0, 255, (length, 8, 8, 3), dtype=np.uint8)
        )
        for number, length in enumerate(lengths)
    ]
    bank = so.write_frames(folder, entries, classes=("run", "jump", "swim", "dance"), quality=50)
    heavy = [scale * rng.normal(size=(length, 6)) for length in lengths]
    light = [rng.normal(size=(length, 3)) for length in lengths]
    write_features(
        bank, "heavy", heavy, kind="classifier", fingerprint=HEAVY_PRINT, gmacs=HEAVY_GMACS, precision=precision
    )
    write_features(bank, "light", light, kind="sampler", fingerprint=LIGHT_PRINT, gmacs=LIGHT_GMACS)
    return so.Bank(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
