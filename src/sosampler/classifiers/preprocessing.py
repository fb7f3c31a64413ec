"""Preprocess uint8 frames for a network, on the device: antialiased resize, centre crop, normalisation."""

from __future__ import annotations

import numbers
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as pixels

from sosampler._util.limits import check_count
from sosampler._util.validation import check_float, one_of
from sosampler.errors import InvalidArgument

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bilinear", "bicubic")

_MIN_SIDE = 4  # torch cannot resize uint8 to a single pixel, and no network sees anything there

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """Size and normalisation of a classifier's input.

    `resize` is the short side (an int) or (height, width) before the centre crop to `size` (height, width).
    `mean` and `std` are those of RGB in 0..1.
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", height_and_width("size", self.size))
        short_side = isinstance(self.resize, numbers.Integral)
        resize = (
            check_count("resize", self.resize, "MAX_INPUT_SIDE")
            if short_side
            else height_and_width("resize", self.resize)
        )
        object.__setattr__(self, "resize", resize)
        object.__setattr__(self, "mean", _triple("mean", self.mean))
        object.__setattr__(self, "std", _triple("std", self.std, above=0.0))
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        smallest = (resize, resize) if isinstance(resize, int) else resize
        if any(before < after for before, after in zip(smallest, self.size, strict=True)):
            raise InvalidArgument(
                f"resize={self.resize} must be at least the crop's size={self.size}; give a larger resize"
            )

    def with_size(self, size: int | tuple[int, int]) -> Preprocessing:
        """Return the same for another input size; the crop removes the same fraction of the frame."""
        new = height_and_width("input_size", size)
        if isinstance(self.resize, int):
            return replace(self, size=new, resize=max(round(self.resize * max(new) / max(self.size)), *new))
        sides = zip(self.resize, new, self.size, strict=True)
        height, width = (max(round(side * after / before), after) for side, after, before in sides)
        return replace(self, size=new, resize=(height, width))

    def resized(self, frames: Tensor) -> Tensor:
        """Resize and crop uint8 [..., 3, H, W] -> uint8 [..., 3, h, w]."""
        # [resize] is the short side. On the CPU torchvision resizes uint8 directly, elsewhere in float.
        target = [self.resize] if isinstance(self.resize, int) else list(self.resize)
        mode = InterpolationMode(self.interpolation)
        small = pixels.resize(frames.flatten(0, -4), target, interpolation=mode, antialias=True)  # [F, 3, h, w]
        return pixels.center_crop(small, list(self.size)).unflatten(0, frames.shape[:-3])

    def normalised(self, frames: Tensor) -> Tensor:
        """Normalise uint8 [..., 3, h, w] -> float32."""
        mean, std = (torch.tensor(three, device=frames.device).view(3, 1, 1) for three in (self.mean, self.std))
        return (frames.float() / 255 - mean) / std

    def __call__(self, frames: Tensor) -> Tensor:
        """Resize, crop and normalise uint8 [..., 3, H, W] -> float32 [..., 3, h, w]."""
        return self.normalised(self.resized(frames))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_frames(frames: Any) -> Tensor:
    """Return frames as a tensor, which must be uint8 [B, N, 3, H, W]."""
    if isinstance(frames, np.ndarray):
        frames = torch.from_numpy(np.ascontiguousarray(frames))
    if not isinstance(frames, Tensor):
        raise InvalidArgument(f"frames are a {type(frames).__name__} but must be a uint8 tensor [B, N, 3, H, W]")
    shape = list(frames.shape)
    if len(shape) != 5:
        hint = "; give one video's frames as a batch of one: frames[None]" if len(shape) == 4 else ""
        raise InvalidArgument(f"frames have shape {shape} but must be [B, N, 3, H, W]{hint}")
    if shape[2] != 3:
        if shape[4] == 3:
            hint = "the channels are last: use Selection.to_torch() or frames.movedim(-1, -3)"
        elif shape[1] == 3:
            hint = "the channels come before the frames: use frames.transpose(1, 2)"
        else:
            hint = "repeat a grey channel three times, drop an alpha channel"
        raise InvalidArgument(f"frames have shape {shape} with {shape[2]} channels but must have 3 (RGB); {hint}")
    if frames.dtype != torch.uint8:
        raise InvalidArgument(
            f"frames are {str(frames.dtype).removeprefix('torch.')} but must be uint8 in 0..255; "
            "do not normalise them, the classifier does"
        )
    if 0 in shape:
        raise InvalidArgument(f"frames have shape {shape} and are empty; give at least one frame")
    return frames


def height_and_width(name: str, value: Any) -> tuple[int, int]:
    """Return (height, width) from one integer for both, or two."""
    if isinstance(value, numbers.Integral):
        value = (value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"{name}={value!r} must be one integer or (height, width)")
    height, width = (
        check_count(f"{name}[{index}]", side, "MAX_INPUT_SIDE", at_least=_MIN_SIDE) for index, side in enumerate(value)
    )
    return height, width


def _triple(name: str, value: Any, *, above: float = float("-inf")) -> Triple:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = (value, value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise InvalidArgument(f"{name}={value!r} must be one number, or one for each of R, G, B")
    red, green, blue = (check_float(f"{name}[{index}]", number, above=above) for index, number in enumerate(value))
    return red, green, blue
