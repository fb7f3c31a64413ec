"""What happens to uint8 frames before a network sees them: resize without aliasing, crop, normalise, on the device."""

from __future__ import annotations

import numbers
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as pixels

from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.errors import InvalidArgument

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bilinear", "bicubic")

_LEAST_SIDE = 4  # torch cannot resize uint8 to a single pixel, and no network sees anything there

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
        resize = self.resize
        object.__setattr__(
            self,
            "resize",
            whole_number("resize", resize)
            if isinstance(resize, numbers.Integral)
            else height_and_width("resize", resize),
        )
        object.__setattr__(self, "mean", _triple("mean", self.mean))
        object.__setattr__(self, "std", _triple("std", self.std, above=0.0))
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        if any(before < after for before, after in zip(self._least_size(), self.size, strict=True)):
            raise InvalidArgument(
                f"resize={self.resize} leaves less than size={self.size} to crop; resize to at least the crop's size"
            )

    def _least_size(self) -> tuple[int, int]:
        """The smallest height and width that `resize` can leave."""
        return (self.resize, self.resize) if isinstance(self.resize, int) else self.resize

    def with_size(self, size: int | tuple[int, int]) -> Preprocessing:
        """The same for another input size; the border that the crop takes off keeps its share."""
        new = height_and_width("input_size", size)
        if isinstance(self.resize, int):
            resize: int | tuple[int, int] = max(round(self.resize * max(new) / max(self.size)), *new)
        else:
            resize = (
                max(round(self.resize[0] * new[0] / self.size[0]), new[0]),
                max(round(self.resize[1] * new[1] / self.size[1]), new[1]),
            )
        return replace(self, size=new, resize=resize)

    def resized(self, frames: Tensor) -> Tensor:
        """uint8 [..., 3, H, W] -> uint8 [..., 3, h, w]: resize and centre crop."""
        flat = frames.flatten(0, -4)  # [F, 3, H, W]
        target = [self.resize] if isinstance(self.resize, int) else list(self.resize)
        # A short side: [resize], the other follows. On the CPU torchvision resizes uint8 as it is, elsewhere in float.
        flat = pixels.resize(flat, target, interpolation=InterpolationMode(self.interpolation), antialias=True)
        return pixels.center_crop(flat, list(self.size)).unflatten(0, frames.shape[:-3])

    def normalised(self, frames: Tensor) -> Tensor:
        """uint8 [..., 3, h, w] -> float32, mean and std taken out."""
        mean = torch.tensor(self.mean, device=frames.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=frames.device).view(3, 1, 1)
        return (frames.float() / 255 - mean) / std

    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [..., 3, H, W] -> float32 [..., 3, h, w]."""
        return self.normalised(self.resized(frames))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_frames(frames: Any) -> Tensor:
    """Frames as a uint8 tensor [B, N, 3, H, W], or say what is wrong with them."""
    if isinstance(frames, np.ndarray):
        frames = torch.from_numpy(np.ascontiguousarray(frames))
    if not isinstance(frames, Tensor):
        raise InvalidArgument(f"frames are a {type(frames).__name__}; give a uint8 tensor [B, N, 3, H, W]")
    shape = list(frames.shape)
    if len(shape) != 5:
        hint = "; put one video's frames into a batch of one: frames[None]" if len(shape) == 4 else ""
        raise InvalidArgument(f"frames have shape {shape}; give [B, N, 3, H, W]{hint}")
    if shape[2] != 3:
        if shape[4] == 3:
            hint = "the channels stand last: Selection.to_torch() or frames.movedim(-1, -3) puts them in their place"
        elif shape[1] == 3:
            hint = "the channels stand before the frames: frames.transpose(1, 2) puts them in their place"
        else:
            hint = "the classifier takes RGB; repeat a grey channel three times, drop an alpha channel"
        raise InvalidArgument(f"frames have shape {shape} with {shape[2]} channels instead of 3; {hint}")
    if frames.dtype != torch.uint8:
        raise InvalidArgument(
            f"frames are {str(frames.dtype).removeprefix('torch.')}; give uint8 in 0..255, "
            "the classifier resizes and normalises them itself"
        )
    if 0 in shape:
        raise InvalidArgument(f"frames have shape {shape}; nothing is in them, give at least one frame")
    return frames


def height_and_width(name: str, value: Any) -> tuple[int, int]:
    """One whole number for both, or two."""
    if isinstance(value, numbers.Integral):
        value = (value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"{name}={value!r} is not allowed; give one whole number or (height, width)")
    height, width = (whole_number(f"{name}[{place}]", side, at_least=_LEAST_SIDE) for place, side in enumerate(value))
    return height, width


def _triple(name: str, value: Any, *, above: float = float("-inf")) -> Triple:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = (value, value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise InvalidArgument(f"{name}={value!r} is not allowed; give one number or one for each of R, G, B")
    red, green, blue = (real_number(f"{name}[{place}]", number, above=above) for place, number in enumerate(value))
    return red, green, blue
