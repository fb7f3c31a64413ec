"""Turn decoded uint8 frames into a network's input, on the frames' own device, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop

from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.engine.kernels.blocks import SpaceToDepth
from sosampler.engine.kernels.triton_kernels import centre_pixels, normalise, normalise_to_blocks
from sosampler.errors import InvalidArgument

_MIDDLE = 128  # pixel value
_ROW_UNIT = 8  # values in half precision: a GPU's fastest matrix products need rows that begin at 16 bytes


def channels_first(frames: Any) -> Tensor:
    """Return uint8 [B, T, H, W, 3] or [B, T, 3, H, W], numpy or torch, as a tensor [B, T, 3, H, W] without a copy."""
    if isinstance(frames, np.ndarray):
        if frames.dtype != np.uint8:
            raise InvalidArgument(f"frames are {frames.dtype} but must be uint8 in 0..255; do not normalise them")
        if not frames.flags.writeable or any(step < 0 for step in frames.strides):
            frames = frames.copy()  # torch cannot use such memory
        frames = torch.from_numpy(frames)
    if isinstance(frames, Tensor) and frames.ndim == 5 and frames.shape[4] == 3 and frames.shape[2] != 3:
        frames = frames.movedim(-1, -3)
    return check_frames(frames)


class InputMaker:
    """uint8 [F, 3, H, W] in any layout -> the network's input [F, 3, h, w] in channels-last memory.

    The CPU resizes uint8 exactly as `Preprocessing` does. A GPU resizes by two matrix products (an antialiased resize
    is linear in rows and in columns), which is 10 to 100 times faster than the general operator. In half precision they
    differ from it by a fraction of a pixel value before both round to integers; a network in float32 gets pixels that
    were resized in float32.

    With `blocks` the input is [F, 16, rows, columns], see `SpaceToDepth`.
    """

    def __init__(
        self, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype, blocks: SpaceToDepth | None = None
    ) -> None:
        self.preprocessing = preprocessing
        self.blocks = blocks
        self.device = device
        self.dtype = dtype
        self.resize_type = torch.float32 if dtype == torch.float32 else torch.float16  # on a GPU
        # For values in 0..255, one entry for each channel of each pixel of a row: [w * 3].
        width = preprocessing.size[1]
        self._mean = (torch.tensor(preprocessing.mean) * 255).repeat(width).to(device)
        self._scale = (1 / (torch.tensor(preprocessing.std) * 255)).repeat(width).to(device)
        self._matrices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, frames: Tensor) -> Tensor:
        return self.normalised(self.resized(frames))

    def resized(self, frames: Tensor) -> Tensor:
        """Resize uint8 [F, 3, H, W] -> pixel values [F, h, w * 3]: uint8 on the CPU, not yet rounded on a GPU."""
        if frames.device.type == "cpu":
            return self.preprocessing.resized(frames).permute(0, 2, 3, 1).flatten(2)
        return self.resized_by_matrices(frames)

    def resized_by_matrices(self, frames: Tensor) -> Tensor:
        """Resize as a GPU does: values are around zero, where float16 is finest, and rounded by `normalised`."""
        rows, columns, columns_of_pixels = self._resize_matrices(frames.shape[-2], frames.shape[-1])
        if frames.is_contiguous():  # planes: columns first, then the channels of each pixel together
            planes = self._centred(frames.flatten(0, 1)) @ columns  # [F * 3, H, w]
            small = torch.bmm(rows.expand(len(planes), -1, -1), planes)  # [F * 3, h, w]
            return small.unflatten(0, (-1, 3)).permute(0, 2, 3, 1).flatten(2)
        pixels = self._centred(frames.permute(0, 2, 3, 1).flatten(2))  # [F, H, W * 3 and a few zeros]
        return torch.bmm(rows.expand(len(pixels), -1, -1), pixels) @ columns_of_pixels  # [F, h, w * 3]

    def normalised(self, pixels: Tensor) -> Tensor:
        """Round and normalise pixel values [F, h, w * 3] -> [F, 3, h, w], or blocks."""
        if pixels.dtype == torch.uint8:
            output = torch.sub(pixels, self._mean).mul_(self._scale).to(self.dtype)
        elif self.blocks is not None:
            return normalise_to_blocks(pixels, self._mean, self._scale, self.dtype, self.blocks, offset=_MIDDLE)
        else:
            output = normalise(pixels, self._mean, self._scale, self.dtype, offset=_MIDDLE)
        return output.unflatten(2, (-1, 3)).permute(0, 3, 1, 2)

    def _resize_matrices(self, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return [h, H], [W, w] and the latter for rows of pixels [W * 3, w * 3], padded with zeros as `_centred`."""
        key = (height, width)
        if key not in self._matrices:
            rows, columns = resize_matrices(self.preprocessing, height, width)
            pixels = torch.kron(columns.T.contiguous(), torch.eye(3))
            padded = [F.pad(matrix, (0, 0, 0, _padded(len(matrix)) - len(matrix))) for matrix in (columns.T, pixels)]
            matrices = [matrix.to(self.device, self.resize_type) for matrix in (rows, *padded)]
            self._matrices[key] = (matrices[0], matrices[1], matrices[2])
        return self._matrices[key]

    def _centred(self, rows: Tensor) -> Tensor:
        """Return uint8 [F, H, W] as values from -128 to 127, with zeros after each row up to a multiple of 8."""
        return centre_pixels(rows, _MIDDLE, _padded(rows.shape[-1]), self.resize_type)


def _padded(width: int) -> int:
    return -(-width // _ROW_UNIT) * _ROW_UNIT


def resize_matrices(preprocessing: Preprocessing, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return resize and centre crop of frames of this size as [h, H] and [w, W]: small = rows @ frame @ columns.T."""
    resize = preprocessing.resize
    if isinstance(resize, int):  # the short side; the other is rounded as torchvision does
        short, long = min(height, width), max(height, width)
        other = int(resize * long / short)
        target = (resize, other) if height <= width else (other, resize)
    else:
        target = resize
    rows, columns = (
        _resize_matrix(before, after, preprocessing.interpolation)
        for before, after in zip((height, width), target, strict=True)
    )
    probe = torch.arange(target[0] * target[1]).view(1, *target)
    inside = center_crop(probe, list(preprocessing.size))[0]  # which rows and columns the crop keeps
    return rows[inside[:, 0] // target[1]], columns[inside[0] % target[1]]


def _resize_matrix(before: int, after: int, mode: str) -> Tensor:
    """Return [after, before]: the output of torch's resize for unit vectors."""
    if before == after:
        return torch.eye(before)
    unit = torch.eye(before)[None, None]  # columns are unit vectors
    return F.interpolate(unit, size=(after, before), mode=mode, antialias=True, align_corners=False)[0, 0]
