"""Patches of frames: where they lie, how they are cut, and networks whose features of a frame are more than one vector.

A bank stores what `FrameFeatures` compute as it does the features of classifiers and samplers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler._util.validation import check_int
from sosampler.classifiers.base import Classifier, Penultimate, check_finite, class_layer, count_gmacs, digest_of
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument, first_line
from sosampler.samplers.backbones import Backbone, MobileNetV2, create_backbone


def grid_corners(actions: Tensor, *, grid: int, patch: int, size: int) -> Tensor:
    """Return the top-left corners (y, x) in pixels, int64 [..., 2], of actions [...] in 0..grid² − 1, row by row.

    The corners span the frame exactly: floor(a / (grid − 1) · (size − patch)) for a = 0..grid − 1 along each side.

    >>> grid_corners(torch.tensor([0, 10, 48]), grid=7, patch=128, size=224).tolist()
    [[0, 0], [16, 48], [96, 96]]
    """
    return torch.stack([actions // grid, actions % grid], dim=-1) * (size - patch) // (grid - 1)


def cut_patches(frames: Tensor, corners: Tensor, patch: int) -> Tensor:
    """Cut frames [F, C, H, W] at top-left corners (y, x), int64 [F, 2]: [F, C, patch, patch]."""
    offsets = torch.arange(patch, device=frames.device)
    rows, columns = (corners[:, axis, None] + offsets for axis in (0, 1))  # [F, patch] each
    numbers = torch.arange(len(frames), device=frames.device)[:, None, None]
    # A slice between indices puts the channels last, which is also how convolutions are fast.
    return frames[numbers, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def sample_patches(frames: Tensor, corners: Tensor, patch: int) -> Tensor:
    """Cut at real corners (y, x), float [F, 2], by bilinear interpolation; a gradient reaches the corners.

    At whole pixels it equals `cut_patches`.
    """
    offsets = torch.arange(patch, device=frames.device, dtype=corners.dtype)
    height, width = frames.shape[-2:]
    y, x = corners[:, 0, None] + offsets, corners[:, 1, None] + offsets  # [F, patch] in pixels
    x, y = 2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1  # -1 is the middle of the first pixel, 1 of the last
    places = torch.stack([x[:, None, :].expand(-1, patch, -1), y[:, :, None].expand(-1, -1, patch)], dim=-1)
    return F.grid_sample(frames, places, mode="bilinear", align_corners=True)  # places [F, patch, patch, 2]


def map_side(size: int) -> int:
    """Return the side of the last map for frames of `size` pixels: one position for 32 pixels, as in all usual nets."""
    return -(-size // 32)


def last_map(backbone: Backbone, frames: Tensor) -> Tensor:
    """Return the map before the pool of a backbone without shift: normalised [F, 3, h, w] -> [F, C, s, s]."""
    if isinstance(backbone, MobileNetV2):
        return backbone.features(frames)
    return backbone.weights_net().forward_features(frames)


@cache
def backbone_gmacs(name: str, size: int) -> float:
    """Return giga multiply-adds of a backbone by its name, for a frame of `size` pixels a side."""
    with torch.device("meta"):
        backbone = create_backbone(name)
    net = backbone.features if isinstance(backbone, MobileNetV2) else backbone.weights_net()
    return float(count_gmacs(net, torch.empty(1, 3, size, size, device="meta")))


# ---- features that a bank stores


class FrameFeatures(nn.Module):
    """A frozen network whose outputs for a frame are stored, flat, as its features."""

    kind: str  # in the bank, beside "classifier" and "sampler"
    name: str
    width: int  # numbers a frame
    net: nn.Module
    preprocessing: Preprocessing
    precision = "float32"

    def compute(self, frames: Tensor) -> Tensor:
        """uint8 [F, 3, H, W] -> float32 [F, width] on the CPU."""
        raise NotImplementedError

    def gmacs(self) -> float:
        """Return giga multiply-adds of what a baseline uses of one frame."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with everything that decides the features."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class GlanceMaps(FrameFeatures):
    """The last map of a light network, [C, s, s] of each frame."""

    kind = "map"

    def __init__(self, backbone: Backbone, size: int) -> None:
        super().__init__()
        self.net = self.backbone = backbone.requires_grad_(False).eval()
        self.name, self.preprocessing = f"map of {backbone.name}", Preprocessing(size=(size, size), resize=size)
        self.width = backbone.num_features * map_side(size) ** 2

    @torch.no_grad()
    def compute(self, frames: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            maps = last_map(self.backbone.eval(), self.preprocessing(frames.to(self.device)))
        return check_finite(maps.float().flatten(1).cpu(), self.name)

    def gmacs(self) -> float:
        return backbone_gmacs(self.backbone.name, self.preprocessing.size[0])

    def fingerprint(self) -> str:
        settings = {"kind": self.kind, "name": self.name, "preprocessing": self.preprocessing.to_dict()}
        return digest_of(settings, self.backbone.state_dict())


class PatchGrid(FrameFeatures):
    """The input of a classifier's class layer for every patch of a grid, [grid², D] of each frame.

    `gmacs` are those of one patch, since one a frame is used.
    """

    kind = "patches"

    def __init__(self, classifier: Classifier, *, patch: int, grid: int) -> None:
        super().__init__()
        height, width = classifier.preprocessing.size
        if height != width or check_int("patch", patch) >= height:
            raise InvalidArgument(
                f"patches of {patch} pixels cannot be cut from frames of {height}x{width}, the input of "
                f"{classifier.name}; give a smaller patch, or a classifier with a square input"
            )
        self.classifier, self.net, self.preprocessing = classifier, classifier.net, classifier.preprocessing
        self.name, self.precision = f"{classifier.name} on {grid}x{grid} patches of {patch}", classifier.precision
        self.patch, self.grid = patch, grid
        self.corners = grid_corners(torch.arange(grid**2), grid=grid, patch=patch, size=height).tolist()
        self._features = Penultimate(classifier)
        self.width = int(class_layer(classifier).weight.shape[1]) * grid**2
        self._gmacs = self._count()

    def compute(self, frames: Tensor) -> Tensor:
        clips = self.preprocessing(frames[:, None].to(self.device))  # [F, 1, 3, h, w]
        with self._features.watching():
            parts = [
                self._features.of_clips(clips[..., y : y + self.patch, x : x + self.patch]) for y, x in self.corners
            ]
        return torch.stack(parts, dim=1).flatten(1)

    def gmacs(self) -> float:
        return self._gmacs

    def fingerprint(self) -> str:
        settings = {"kind": self.kind, "of": self.classifier.fingerprint(), "patch": self.patch, "grid": self.grid}
        return digest_of(settings, {})

    def _count(self) -> float:
        blank: Any = torch.empty(1, 1, 3, self.patch, self.patch, device="meta")
        try:
            return float(count_gmacs(self.classifier, blank))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InvalidArgument(
                f"{self.classifier.name} cannot see patches of {self.patch} pixels ({first_line(error)}); give a "
                "convolutional classifier, such as resnet50"
            ) from error
