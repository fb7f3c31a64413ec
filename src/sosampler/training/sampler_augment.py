"""Random crops and mirrors of many frames at once. Drawn with NumPy by seed, cut on the device.

What is drawn depends on the seed and the pictures' sizes alone, so that a GPU, a CPU and several processes cut the
same boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.training.distributed import sent

_TRIES = 10  # as torchvision: then the largest central box of an allowed shape is taken


class Cuts(NamedTuple):
    """What is cut out of each of F pictures, in pixels, and which are mirrored."""

    boxes: np.ndarray  # [F, 4] float32: left, top, width, height
    flips: np.ndarray  # [F] bool

    def part(self, rows: slice) -> Cuts:
        return Cuts(self.boxes[rows], self.flips[rows])


def draw_cuts(
    rng: np.random.Generator,
    sizes: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: bool,
) -> Cuts:
    """Boxes as of torchvision's RandomResizedCrop, but not rounded to whole pixels.

    Args:
        sizes: [F, 2] height and width of each picture.
        scale: least and most share of the area.
        ratio: least and most width over height, drawn evenly in its logarithm.
        flip: mirror every second picture, on average.
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
    # Too wide or too high for every try: all of one side, and as much of the other as the shape allows.
    whole_width, whole_height = width[:, 0], height[:, 0]
    box_width = np.where(none, np.minimum(whole_width, whole_height * ratio[1]), box_width)
    box_height = np.where(none, np.minimum(whole_height, whole_width / ratio[0]), box_height)
    corners[none] = 0.5
    left = corners[:, 0] * (whole_width - box_width)
    top = corners[:, 1] * (whole_height - box_height)
    return Cuts(np.stack([left, top, box_width, box_height], 1).astype(np.float32), flips)


def points_a_pixel(sizes: np.ndarray, size: tuple[int, int]) -> int:
    """How many points `cut` takes for a pixel and side, by the largest of the pictures [F, 2]."""
    shrink = min(sizes[:, side].max() / size[side] for side in (0, 1))
    return max(1, int(np.ceil(shrink - 0.5)))


def cut(frames: Tensor, cuts: Cuts, sizes: np.ndarray, size: tuple[int, int], times: int | None = None) -> Tensor:
    """uint8 [F, H, W, 3] -> float32 [F, 3, h, w] in 0..255.

    Bilinear. Where pictures are much larger than `size` a multiple of the points is taken and averaged, so that fine
    patterns do not turn into coarse ones.

    Args:
        sizes: [F, 2] height and width of each picture, at the top left of its frame.
        size: height and width that come out.
        times: points a pixel and side; default: by the largest of these pictures.
    """
    times = points_a_pixel(sizes, size) if times is None else times
    # In -1..1 of the canvas.
    across, down = (
        sent(torch.from_numpy(2 * found / max(1, canvas - 1) - 1), frames.device)
        for found, canvas in zip(points_to_look_at(cuts, sizes, size, times), frames.shape[2:0:-1], strict=True)
    )
    grid = torch.stack(
        [
            across[:, None, :].expand(-1, down.shape[1], -1),
            down[:, :, None].expand(-1, -1, across.shape[1]),
        ],
        -1,
    )
    pixels = frames.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.preserve_format)
    found = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=True)
    if times > 1:
        found = F.avg_pool2d(found, times)
    return found


def points_to_look_at(
    cuts: Cuts, sizes: np.ndarray, size: tuple[int, int], times: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where `cut` looks, in pixels from the centre of the first: float32 across [F, w * times] and down [F, h * times].

    Never outside of a picture.
    """
    across, down = (_points(cuts, side, times * size[1 - side], sizes[:, 1 - side]) for side in (0, 1))
    return across, down


def _points(cuts: Cuts, side: int, count: int, limits: np.ndarray) -> np.ndarray:
    """Along one side (0: across, which may be mirrored; 1: down)."""
    begin, length = cuts.boxes[:, side, None], cuts.boxes[:, side + 2, None]
    steps = np.broadcast_to((np.arange(count, dtype=np.float32) + 0.5) / count, (len(limits), count))
    if side == 0:
        steps = np.where(cuts.flips[:, None], steps[:, ::-1], steps)
    # Pixel k covers k .. k + 1, its centre is where its value stands.
    found: np.ndarray = np.clip(begin + steps * length - 0.5, 0, limits[:, None] - 1).astype(np.float32)
    return found


class Normaliser:
    """`Preprocessing.normalised` with its numbers kept on the device, so that nothing waits for their copies."""

    def __init__(self, preprocessing: Preprocessing, device: torch.device) -> None:
        std = torch.tensor(preprocessing.std)
        self.scale = (1 / (255 * std)).view(3, 1, 1).to(device)
        self.offset = (-torch.tensor(preprocessing.mean) / std).view(3, 1, 1).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """[..., 3, h, w] in 0..255 -> float32, mean and std taken out, in one pass."""
        return torch.addcmul(self.offset, pixels.float(), self.scale)
