"""Small samplers and what was exported of them, made once a process: exporting takes seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from sosampler.samplers.export import Exported, export_sampler
from sosampler.samplers.sosampler import SOSampler
from tests.samplers.test_sampler_network import BELIEF, scattered

NAMES = ["run", "jump", "swim"]
_folders: list[TemporaryDirectory] = []  # removed when the process ends
TINY = "timm:test_resnet.r160_in1k"


def _folder() -> Path:
    _folders.append(TemporaryDirectory(prefix="sosampler-test-"))
    return Path(_folders[-1].name)


@cache
def believing() -> SOSampler:
    """Frames are scored by what the whole video is about; weights as they are saved in half precision."""
    sampler = scattered(backbone=TINY, num_classes=3, class_names=NAMES, scoring=BELIEF, calibration=(1.5, -0.25))
    with torch.no_grad():
        for parameter in sampler.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)  # heads that tell frames apart
            if parameter.ndim > 1:
                parameter.copy_(parameter.half().float())
    return sampler.freeze()


@cache
def shifted() -> SOSampler:
    """Frames look at their neighbours, there is no class head, and weights are of full precision."""
    sampler = scattered(shift=10)
    sampler.backbone.features = nn.Sequential(*sampler.backbone.features[:4], nn.Conv2d(24, 1280, 1))
    sampler.backbone.reach = 1
    return sampler.freeze()


@cache
def believing_folder() -> tuple[Path, Exported]:
    """The folder of `believing` with its model.onnx; to be copied by whoever changes it."""
    folder = _folder() / "run"
    believing().save_pretrained(folder)
    return folder, export_sampler(folder)


@cache
def shifted_onnx() -> tuple[bytes, Exported]:
    file = _folder() / "x.onnx"
    done = export_sampler(shifted(), out=file)
    return file.read_bytes(), done


def scenes(videos: int, candidates: int, height: int = 48, width: int = 64, *, seed: int = 0) -> Tensor:
    """uint8 [B, T, 3, H, W]: coarse shapes under fine grain, so that scores and the way of resizing both matter."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(videos * candidates, 3, 5, 5, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(height, width), mode="bilinear") * 255
    grain = torch.randn(smooth.shape, generator=generator) * 12
    return (smooth + grain).clamp(0, 255).round().byte().unflatten(0, (videos, candidates))
