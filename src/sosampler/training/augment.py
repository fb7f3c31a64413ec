"""Random crops and flips of many frames at a time: drawn with NumPy by seed, cropped on the device.

What is drawn depends on the seed and the sizes of the images alone, so that a GPU, a CPU and several processes crop the
same boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.training.distributed import send

_TRIES = 10  # as torchvision: then the largest central box of an allowed shape is taken


class Crops(NamedTuple):
    """Boxes of F images in pixels, and which are flipped."""

    boxes: np.ndarray  # [F, 4] float32: left, top, width, height
    flips: np.ndarray  # [F] bool

    def part(self, rows: slice) -> Crops:
        return Crops(self.boxes[rows], self.flips[rows])


def draw_crops(
    rng: np.random.Generator,
    sizes: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: bool,
) -> Crops:
    """Draw boxes as torchvision's RandomResizedCrop, but not rounded to whole pixels.

    Args:
        rng: source of the draw.
        sizes: [F, 2] height and width of each image.
        scale: min and max share of the area.
        ratio: min and max width over height, uniform in its logarithm.
        flip: flip every second image, on average.
    """
    draws = rng.random((len(sizes), _TRIES, 2))
    corners = rng.random((len(sizes), 2))
    flips = rng.random(len(sizes)) < (0.5 if flip else 0.0)
    height, width = (sizes[:, side, None].astype(np.float64) for side in (0, 1))  # [F, 1]
    area = (scale[0] + (scale[1] - scale[0]) * draws[..., 0]) * height * width  # [F, tries]
    low, high = np.log(ratio)
    shape = np.exp(low + (high - low) * draws[..., 1])
    widths, heights = np.sqrt(area * shape), np.sqrt(area / shape)
    fits = (widths <= width) & (heights <= height)
    first = fits.argmax(1)
    rows = np.arange(len(sizes))
    box_width, box_height = widths[rows, first], heights[rows, first]
    none = ~fits.any(1)
    # Too wide or too high in every try: all of one side, and as much of the other as the shape allows.
    full_width, full_height = width[:, 0], height[:, 0]
    box_width = np.where(none, np.minimum(full_width, full_height * ratio[1]), box_width)
    box_height = np.where(none, np.minimum(full_height, full_width / ratio[0]), box_height)
    corners[none] = 0.5
    left = corners[:, 0] * (full_width - box_width)
    top = corners[:, 1] * (full_height - box_height)
    return Crops(np.stack([left, top, box_width, box_height], 1).astype(np.float32), flips)


def points_per_pixel(sizes: np.ndarray, size: tuple[int, int]) -> int:
    """Return how many points `crop` samples per pixel and side, by the largest of the images [F, 2]."""
    shrink = min(sizes[:, side].max() / size[side] for side in (0, 1))
    return max(1, int(np.ceil(shrink - 0.5)))


def crop(frames: Tensor, crops: Crops, sizes: np.ndarray, size: tuple[int, int], points: int | None = None) -> Tensor:
    """Crop uint8 [F, H, W, 3] -> float32 [F, 3, h, w] in 0..255, bilinear.

    Images much larger than `size` are sampled at several points a pixel and averaged, so that fine patterns do not
    alias.

    Args:
        frames: images at the top left of their frames.
        crops: boxes and flips.
        sizes: [F, 2] height and width of each image.
        size: height and width of the output.
        points: per pixel and side; default: by the largest of these images.
    """
    points = points_per_pixel(sizes, size) if points is None else points
    axes = []
    for side, length in ((0, frames.shape[2]), (1, frames.shape[1])):  # across, down
        pixels = _sample_points(crops, side, points * size[1 - side], sizes[:, 1 - side])
        axes.append(send(torch.from_numpy(2 * pixels / max(1, length - 1) - 1), frames.device))  # in -1..1
    across, down = axes
    grid = torch.stack(
        [across[:, None, :].expand(-1, down.shape[1], -1), down[:, :, None].expand(-1, -1, across.shape[1])], -1
    )
    values = frames.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.preserve_format)
    cropped = F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)
    return F.avg_pool2d(cropped, points) if points > 1 else cropped


def _sample_points(crops: Crops, side: int, count: int, limits: np.ndarray) -> np.ndarray:
    """Return float32 [F, count] along one side (0: across, which may be flipped; 1: down), never outside of an image.

    In pixels from the centre of the first one.
    """
    begin, length = crops.boxes[:, side, None], crops.boxes[:, side + 2, None]
    steps = np.broadcast_to((np.arange(count, dtype=np.float32) + 0.5) / count, (len(limits), count))
    if side == 0:
        steps = np.where(crops.flips[:, None], steps[:, ::-1], steps)
    # Pixel k covers k .. k + 1, and its value is that of its centre.
    points: np.ndarray = np.clip(begin + steps * length - 0.5, 0, limits[:, None] - 1).astype(np.float32)
    return points


class Normaliser:
    """`Preprocessing.normalised` with its constants on the device, so that no step waits for their copies."""

    def __init__(self, preprocessing: Preprocessing, device: torch.device) -> None:
        std = torch.tensor(preprocessing.std)
        self._scale = (1 / (255 * std)).view(3, 1, 1).to(device)
        self._offset = (-torch.tensor(preprocessing.mean) / std).view(3, 1, 1).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise [..., 3, h, w] in 0..255 to float32 by mean and std, in one pass."""
        return torch.addcmul(self._offset, pixels.float(), self._scale)
