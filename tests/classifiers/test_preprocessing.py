"""Frames on their way into a network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import sosampler as so
from sosampler.classifiers.preprocessing import check_frames


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def smooth_frame(height: int = 240, width: int = 320) -> np.ndarray:
    """A picture with fine stripes, which alias if they are shrunk without care."""
    y, x = np.mgrid[:height, :width]
    return np.stack([(x * 7) % 256, (y * 5) % 256, ((x // 3 + y // 3) % 2) * 255], -1).astype(np.uint8)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_agrees_with_pil(interpolation: str) -> None:
    frame = smooth_frame()
    how = so.Preprocessing(size=(64, 85), resize=(64, 85), interpolation=interpolation)
    ours = how.resized(torch.from_numpy(frame).permute(2, 0, 1)[None])[0].permute(1, 2, 0).numpy()
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    pil = np.asarray(Image.fromarray(frame).resize((85, 64), filters[interpolation]))
    assert np.abs(ours.astype(int) - pil.astype(int)).max() <= 1
    nearest = np.asarray(Image.fromarray(frame).resize((85, 64), Image.Resampling.NEAREST))
    assert np.abs(nearest.astype(int) - pil.astype(int)).max() > 50  # the picture does tell them apart


@pytest.mark.parametrize("shape", [(240, 320), (320, 240), (50, 400), (224, 224)])
def test_agrees_with_torchvision(shape: tuple[int, int]) -> None:
    frames = noise(2, 3, 3, *shape)
    how = so.Preprocessing(size=(96, 80), resize=112, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    peer = v2.Compose(
        [
            v2.Resize(112, antialias=True),
            v2.CenterCrop((96, 80)),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
        ]
    )
    assert torch.allclose(how(frames), peer(frames), atol=1e-6)
    assert how(frames).shape == (2, 3, 3, 96, 80)


def test_with_size_keeps_the_crop_fraction() -> None:
    how = so.Preprocessing(size=(224, 224), resize=256)
    assert how.with_size(112) == so.Preprocessing(size=(112, 112), resize=128)
    assert so.Preprocessing(size=(112, 112), resize=(128, 171)).with_size(224).resize == (256, 342)
    assert so.Preprocessing(size=(224, 224), resize=224).with_size(176).resize == 176


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": (224, 224), "resize": 200}, "at least the crop"),
        ({"size": (0, 224), "resize": 256}, "size"),
        ({"size": (224, 224), "resize": 256, "std": (0.0, 1.0, 1.0)}, "std"),
        ({"size": (224, 224), "resize": 256, "mean": (0.0, 1.0)}, "one for each of R, G, B"),
        ({"size": (224, 224), "resize": 256, "interpolation": "nearest"}, "bilinear, bicubic"),
    ],
)
def test_invalid_preprocessing(given: dict, message: str) -> None:
    with pytest.raises(so.InvalidArgument, match=message):
        so.Preprocessing(**given)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (noise(1, 2, 1, 8, 8), "1 channels but must have 3"),
        (noise(1, 2, 4, 8, 8), "alpha"),
        (noise(1, 2, 8, 8, 3), "movedim"),
        (noise(1, 3, 2, 8, 8), "transpose"),
        (noise(2, 3, 8, 8), r"frames\[None\]"),
        (noise(1, 2, 3, 8, 8).float(), "float32"),
        (noise(1, 0, 3, 8, 8), "are empty"),
        ([1, 2], "list"),
    ],
)
def test_invalid_frames(frames: object, message: str) -> None:
    with pytest.raises(so.InvalidArgument, match=message):
        check_frames(frames)


def test_numpy_frames() -> None:
    frames = noise(1, 2, 3, 8, 8)
    assert torch.equal(check_frames(frames.numpy()), frames)
