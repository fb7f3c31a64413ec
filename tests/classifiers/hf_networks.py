"""Tiny random networks of transformers, and its own forward pass to compare with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sosampler.classifiers.huggingface import HuggingFaceClassifier, build_huggingface

transformers = pytest.importorskip("transformers")

SIZE, CLASSES = 32, 5
TABLE = 4  # frames of TimeSformer's table of times
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIZE, "num_labels": CLASSES}
CONFIGS: dict[str, Any] = {
    "timesformer": lambda **c: transformers.TimesformerConfig(
        **{**SMALL, "intermediate_size": 64, "patch_size": 16, "num_frames": TABLE, **c}
    ),
    "videomae": lambda **c: transformers.VideoMAEConfig(
        **{**SMALL, "intermediate_size": 64, "patch_size": 16, "num_frames": 8, **c}
    ),
    "vivit": lambda **c: transformers.VivitConfig(
        **{**SMALL, "intermediate_size": 64, "tubelet_size": [2, 16, 16], "num_frames": 8, **c}
    ),
    "vjepa2": lambda **c: transformers.VJEPA2Config(
        **{
            **{key: value for key, value in SMALL.items() if key != "image_size"},
            **{"hidden_size": 48, "crop_size": SIZE, "patch_size": 16, "frames_per_clip": 8, "num_pooler_layers": 1},
            **{"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1},
            **c,
        }
    ),
}


def build(kind: str = "timesformer", *, temporal: str = "linear", **changes: Any) -> HuggingFaceClassifier:
    """A tiny network, random in every tensor; transformers starts its tables of places and times at zero."""
    classifier = build_huggingface(CONFIGS[kind](**changes), temporal=temporal)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in classifier.named_parameters():
        table = parameter.ndim < 2 or name.endswith(("embeddings", "cls_token"))
        scale = 0.5 if table else parameter[0].numel() ** -0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return classifier


def frames(batch: int, count: int, size: int = SIZE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, count, 3, size, size), generator=generator, dtype=torch.uint8)


def plain(classifier: HuggingFaceClassifier, video: Tensor) -> Tensor:
    """transformers' own forward pass, told how many frames come: probabilities [B, C]."""
    net = copy.deepcopy(classifier.net)
    if classifier.net.config.model_type == "timesformer":
        net.config.num_frames = video.shape[1]
    with torch.no_grad():
        return net(classifier.preprocessing(video)).logits.softmax(-1)


def save(folder: Path, kind: str = "timesformer", **changes: Any) -> HuggingFaceClassifier:
    classifier = build(kind, **changes)
    classifier.net.save_pretrained(folder)
    return classifier
