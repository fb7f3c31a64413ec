"""From decoded uint8 frames to a network's input, on the device where they lie, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop

from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.engine.kernels.blocks import Blocks
from sosampler.engine.kernels.triton_kernels import centred, normalise, normalise_blocks
from sosampler.errors import InvalidArgument

_MIDDLE = 128  # grey level
_ROW_UNIT = 8  # values in half precision: a GPU's fastest matrix products want rows that begin at 16 bytes


def channels_first(frames: Any) -> Tensor:
    """uint8 [B, T, H, W, 3] or [B, T, 3, H, W], numpy or torch -> a tensor [B, T, 3, H, W], without a copy."""
    if isinstance(frames, np.ndarray):
        frames = _readable(frames)
    if isinstance(frames, Tensor) and frames.ndim == 5 and frames.shape[4] == 3 and frames.shape[2] != 3:
        frames = frames.movedim(-1, -3)
    return check_frames(frames)


def _readable(frames: np.ndarray) -> Tensor:
    if frames.dtype != np.uint8:
        raise InvalidArgument(f"frames are {frames.dtype}; give uint8 in 0..255, they are normalised here")
    if not frames.flags.writeable or any(step < 0 for step in frames.strides):
        frames = frames.copy()  # torch cannot look at such memory as it is
    return torch.from_numpy(frames)


class InputMaker:
    """uint8 [F, 3, H, W] in any layout -> the network's input [F, 3, h, w] in channels-last memory.

    The CPU resizes uint8 as `Preprocessing` does, to the last bit. A GPU resizes by two matrix products (an antialiased
    resize is linear in rows and in columns), which is one to two orders faster than the general operator and, in half
    precision, differs from it by a fraction of a grey level before both round to whole levels. A network in float32,
    which is there to choose as the plain one does, is given what was resized in float32.

    `blocks`: for a network that begins with them, [F, 16, rows, columns].
    """

    def __init__(
        self, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype, blocks: Blocks | None = None
    ) -> None:
        self.preprocessing = preprocessing
        self.blocks = blocks
        self.device = device
        self.dtype = dtype
        self.resize_type = torch.float32 if dtype == torch.float32 else torch.float16  # on a GPU
        # Values in 0..255, one entry a channel of each pixel of a row: [3 * w].
        width = preprocessing.size[1]
        self._mean = (torch.tensor(preprocessing.mean) * 255).repeat(width).to(device)
        self._scale = (1 / (torch.tensor(preprocessing.std) * 255)).repeat(width).to(device)
        self._matrices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, frames: Tensor) -> Tensor:
        return self.normalised(self.resized(frames))

    def resized(self, frames: Tensor) -> Tensor:
        """uint8 [F, 3, H, W] -> grey levels [F, h, w * 3]: uint8 on the CPU; not yet whole on a GPU."""
        if frames.device.type == "cpu":
            rows = self.preprocessing.resized(frames).permute(0, 2, 3, 1)  # [F, h, w, 3]
            return rows.flatten(2)
        return self.resized_by_matrices(frames)

    def resized_by_matrices(self, frames: Tensor) -> Tensor:
        """The same around the middle grey, where float16 is finest; rounded by whoever reads it."""
        rows, columns, columns_of_pixels = self._resize_matrices(frames.shape[-2], frames.shape[-1])
        if frames.is_contiguous():  # planes: columns first, then the pixels' channels together
            planes = self._centred(frames.flatten(0, 1)) @ columns  # [F * 3, H, w]
            small = torch.bmm(rows.expand(len(planes), -1, -1), planes)  # [F * 3, h, w]
            small = small.unflatten(0, (-1, 3)).permute(0, 2, 3, 1).flatten(2)
        else:
            pixels = self._centred(frames.permute(0, 2, 3, 1).flatten(2))  # [F, H, W * 3 and a few zeros]
            small = torch.bmm(rows.expand(len(pixels), -1, -1), pixels) @ columns_of_pixels  # [F, h, w * 3]
        return small

    def normalised(self, levels: Tensor) -> Tensor:
        """Grey levels [F, h, w * 3] -> [F, 3, h, w] or blocks, rounded to whole levels, mean and std taken out."""
        if levels.dtype == torch.uint8:
            found = torch.sub(levels, self._mean).mul_(self._scale).to(self.dtype)
        elif self.blocks is not None:
            return normalise_blocks(levels, self._mean, self._scale, self.dtype, self.blocks, offset=_MIDDLE)
        else:
            found = normalise(levels, self._mean, self._scale, self.dtype, offset=_MIDDLE)
        return found.unflatten(2, (-1, 3)).permute(0, 3, 1, 2)

    def _resize_matrices(self, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """[h, H], [W, w], and the latter for rows of pixels [W * 3, w * 3]; with zeros where `_centred` adds some.

        They are what the operator itself gives for unit vectors, so that the filter is the same.
        """
        key = (height, width)
        if key not in self._matrices:
            rows, columns = resize_matrices(self.preprocessing, height, width)
            pixels = torch.kron(columns.T.contiguous(), torch.eye(3))
            wide = [F.pad(matrix, (0, 0, 0, _wide(len(matrix)) - len(matrix))) for matrix in (columns.T, pixels)]
            found = [matrix.to(self.device, self.resize_type) for matrix in (rows, *wide)]
            self._matrices[key] = (found[0], found[1], found[2])
        return self._matrices[key]

    def _centred(self, rows: Tensor) -> Tensor:
        """uint8 [F, H, W] -> from -128 to 127, with zeros behind each row to a whole unit."""
        return centred(rows, _MIDDLE, _wide(rows.shape[-1]), self.resize_type)


def _wide(width: int) -> int:
    """The next width in whole units."""
    return -(-width // _ROW_UNIT) * _ROW_UNIT


def resize_matrices(preprocessing: Preprocessing, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The resize and the centre crop of frames of this size as [h, H] and [w, W]: small = rows @ frame @ columns.T."""
    resize = preprocessing.resize
    if isinstance(resize, int):  # the short side; the other follows as torchvision counts it
        short, long = min(height, width), max(height, width)
        other = int(resize * long / short)
        target = (resize, other) if height <= width else (other, resize)
    else:
        target = resize
    mode = preprocessing.interpolation
    rows = _along_height(height, target[0], mode)
    columns = _along_height(width, target[1], mode)
    probe = torch.arange(target[0] * target[1]).view(1, *target)
    inside = center_crop(probe, list(preprocessing.size))[0]  # which rows and columns the crop keeps
    return rows[inside[:, 0] // target[1]], columns[inside[0] % target[1]]


def _along_height(before: int, after: int, mode: str) -> Tensor:
    if before == after:
        return torch.eye(before)
    unit = torch.eye(before)[None, None]  # columns are unit vectors
    found = F.interpolate(unit, size=(after, before), mode=mode, antialias=True, align_corners=False)
    return found[0, 0]
