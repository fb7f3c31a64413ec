"""Frames and networks to measure sampler and classifier with, and eager code as a reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from sosampler.errors import InvalidArgument

# The scoring of the default recipe, which depends on all frames of a video.
DEFAULT_SCORING = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}
_CLASSES = 100
_PICTURES = (".jpg", ".jpeg", ".png", ".webp")


def smooth_frames(videos: int, count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Return uint8 [V, T, H, W, 3] as decoders give them: smooth images with some noise, each frame another."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(videos):
        coarse = torch.rand(count, 3, 9, 12, generator=generator)
        large = F.interpolate(coarse, size=size, mode="bicubic", align_corners=False)
        large += 0.05 * torch.randn(large.shape, generator=generator)
        parts.append((large.clamp(0, 1) * 255).to(torch.uint8).movedim(1, -1))
    return torch.stack(parts)


def picture_frames(folder: str | Path, videos: int, count: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Return the same of natural images below a folder, drawn at random; few are used again."""
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _PICTURES)
    if not files:
        raise InvalidArgument(f"{folder}: holds no pictures ({', '.join(_PICTURES)}); give a folder of pictures")
    order = np.random.default_rng(seed).permutation(max(len(files), videos * count)) % len(files)
    frames = np.empty((videos * count, *size, 3), np.uint8)
    for index, number in enumerate(order[: videos * count]):
        with Image.open(files[number]) as image:
            frames[index] = np.asarray(image.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR))
    return torch.from_numpy(frames).unflatten(0, (videos, count))


def lively_sampler(*, seed: int = 0, shift: int = 0, input_size: int = 128, scoring: Any = None) -> Any:
    """Return a sampler with random weights whose scores differ from frame to frame.

    After 52 random layers all frames are alike; batch norms with statistics of frames keep them apart.
    """
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(seed)
    scoring = DEFAULT_SCORING if scoring is None else scoring
    sampler = SOSampler(num_classes=_CLASSES, shift=shift, input_size=input_size, scoring=scoring)
    for layer in sampler.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the plain mean over all that was seen
    frames = smooth_frames(2, 8, (160, 212), seed=seed + 1).movedim(-1, -3)
    sampler.backbone.train()
    with torch.no_grad():
        sampler(sampler.preprocessing(frames))
    return sampler.freeze()


def random_classifier(name: str = "resnet50") -> Any:
    from sosampler.classifiers.factory import create_classifier

    torch.manual_seed(0)
    return create_classifier(name, num_classes=_CLASSES)


def eager_way(
    sampler: Any,
    classifier: Any,
    num_frames: int,
    *,
    one_at_a_time: bool = False,
    autocast: bool = False,
    compiled: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Return frames uint8 [B, T, 3, H, W] -> probabilities [B, C] as the method's authors wrote it, in float32.

    All candidates are brought to the classifier's size and normalised; the sampler sees them shrunk by nearest
    neighbour; a Python loop gathers what was chosen video by video. Nothing is fused, channels come first.

    Args:
        one_at_a_time: a loop over the videos of a batch.
        autocast: in bfloat16, weights and frames in channels-last memory.
        compiled: both networks under `torch.compile` in its default mode.
    """
    size = sampler.input_size
    height, width = classifier.preprocessing.size
    layout = torch.channels_last if autocast else torch.contiguous_format
    if autocast:
        sampler, classifier = (network.to(memory_format=torch.channels_last) for network in (sampler, classifier))
    if compiled:
        sampler, classifier = torch.compile(sampler), torch.compile(classifier)

    def run(frames: Tensor) -> Tensor:
        cast = torch.autocast(frames.device.type, torch.bfloat16) if autocast else nullcontext()
        with torch.no_grad(), cast:
            if one_at_a_time:
                return torch.cat([probabilities(video[None]) for video in frames])
            return probabilities(frames)

    def probabilities(frames: Tensor) -> Tensor:
        mean = torch.tensor(IMAGENET_MEAN, device=frames.device).view(3, 1, 1)
        std = torch.tensor(IMAGENET_STD, device=frames.device).view(3, 1, 1)
        planes = (frames.flatten(0, 1).float() / 255).contiguous(memory_format=layout)
        large = F.interpolate(planes, size=(height, width), mode="bilinear")
        large = ((large - mean) / std).unflatten(0, frames.shape[:2])  # [B, T, 3, h, w]
        small = F.interpolate(large.flatten(0, 1), size=(size, size), mode="nearest").unflatten(0, large.shape[:2])
        order = sampler(small).scores.argsort(dim=1, descending=True)[:, :num_frames].sort(dim=1).values
        chosen = torch.stack([large[video][order[video]] for video in range(len(frames))])
        probs: Tensor = classifier(chosen).float().softmax(-1)
        return probs

    return run


class Agreement(NamedTuple):
    """How often an engine chooses the same frames as the sampler itself."""

    videos: float  # share of them of which all frames are the same
    frames: float  # share of the sampler's frames that the engine chooses too


def agreement(engine: Any, sampler: Any, frames: Tensor, num_frames: int, *, batch: int = 8) -> Agreement:
    """Compare the choices for videos [V, T, H, W, 3] with those of the sampler in float32, without TF32."""
    same = []
    for part in frames.split(batch):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            plain = sampler.choose(part.movedim(-1, -3).contiguous(), num_frames)
        chosen = engine.run(part).chosen.to(plain.device)
        same.append((plain[:, :, None] == chosen[:, None, :]).any(2).double().cpu())  # [B, N]
    shared = torch.cat(same)
    return Agreement(float((shared == 1).all(1).double().mean()), float(shared.mean()))
