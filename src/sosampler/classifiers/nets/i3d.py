"""I3D on RGB: Inception-v1 with kernels inflated along time, with the names and the padding of TF-slim.

Its published batch norms have a bias but no scale, and an epsilon of 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.classifiers.nets.resnet3d import ClipNet, Size3, named, window_means

# Channels of an Inception module: branch 0 (1x1x1), branch 1 (1x1x1, then 3x3x3), branch 2 (the same, narrower) and
# branch 3 (max pooling, then 1x1x1).
MIXED: dict[str, tuple[int, tuple[int, int], tuple[int, int], int]] = {
    "Mixed_3b": (64, (96, 128), (16, 32), 32),
    "Mixed_3c": (128, (128, 192), (32, 96), 64),
    "Mixed_4b": (192, (96, 208), (16, 48), 64),
    "Mixed_4c": (160, (112, 224), (24, 64), 64),
    "Mixed_4d": (128, (128, 256), (24, 64), 64),
    "Mixed_4e": (112, (144, 288), (32, 64), 64),
    "Mixed_4f": (256, (160, 320), (32, 128), 128),
    "Mixed_5b": (256, (160, 320), (32, 128), 128),
    "Mixed_5c": (384, (192, 384), (48, 128), 128),
}
FEATURES = 1024
HEAD_WINDOW = (2, 7, 7)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return TF's "SAME" padding before and after an axis, which gives outputs of ceil(size / stride).

    >>> same_padding(224, 7, 2), same_padding(225, 7, 2), same_padding(28, 3, 1), same_padding(1, 2, 2)
    ((2, 3), (3, 3), (1, 1), (0, 1))
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(features: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Pad [B, C, T, H, W] with zeros for "SAME"."""
    pads: list[int] = []
    for size, taps, step in zip(features.shape[2:], kernel, stride, strict=True):
        pads = [*same_padding(size, taps, step), *pads]  # torch needs the last axis first
    return F.pad(features, pads)


class _SameConv3d(nn.Conv3d):
    """A convolution without bias and with "SAME" padding."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        # At stride 1 an odd kernel needs equal padding on both sides: then the convolution pads without a copy.
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        if self.stride != (1, 1, 1):
            features = pad_same(features, self.kernel_size, self.stride)
        return super().forward(features)


class _SameMaxPool3d(nn.Module):
    """Max pooling with "SAME" padding; features are never negative, so zeros at the border have no effect."""

    def __init__(self, kernel: Size3, stride: Size3) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, features: Tensor) -> Tensor:
        return F.max_pool3d(pad_same(features, self.kernel, self.stride), self.kernel, self.stride)


class _ShiftNorm(nn.BatchNorm3d):
    """Batch norm with a bias but no scale."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=1e-3)  # TF's decay of 0.999
        self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        # A constant scale: on a GPU torch has no gradient for a norm with a bias but no scale.
        statistics = (self.running_mean, self.running_var, torch.ones_like(self.bias), self.bias)
        return F.batch_norm(features, *statistics, self.training, self.momentum or 0.0, self.eps)


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return named(
        conv=_SameConv3d(inputs, outputs, kernel, stride), bn=_ShiftNorm(outputs), activation=nn.ReLU(inplace=True)
    )


class _Mixed(nn.Module):
    """Four parallel branches, whose channels are concatenated."""

    def __init__(self, inputs: int, name: str) -> None:
        super().__init__()
        only, (squeezed1, wide), (squeezed2, narrow), pooled = MIXED[name]
        self.outputs = only + wide + narrow + pooled
        self.Branch_0 = named(Conv3d_0a_1x1=_unit(inputs, only, 1))
        self.Branch_1 = named(Conv3d_0a_1x1=_unit(inputs, squeezed1, 1), Conv3d_0b_3x3=_unit(squeezed1, wide, 3))
        self.Branch_2 = named(Conv3d_0a_1x1=_unit(inputs, squeezed2, 1), Conv3d_0b_3x3=_unit(squeezed2, narrow, 3))
        self.Branch_3 = named(
            MaxPool3d_0a_3x3=nn.MaxPool3d(3, stride=1, padding=1), Conv3d_0b_1x1=_unit(inputs, pooled, 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([branch(features) for branch in self.children()], dim=1)


class I3D(ClipNet):
    """Float clips [B, 3, T, H, W] in -1..1 -> logits [B, num_classes]; trained on 64 frames, takes any number."""

    head_names = ("Logits.Conv3d_0c_1x1.conv.",)  # state-dict prefix of the last layer
    layers = (
        *("Conv3d_1a_7x7", "MaxPool3d_2a_3x3", "Conv3d_2b_1x1", "Conv3d_2c_3x3", "MaxPool3d_3a_3x3"),
        *("Mixed_3b", "Mixed_3c", "MaxPool3d_4a_3x3"),
        *("Mixed_4b", "Mixed_4c", "Mixed_4d", "Mixed_4e", "Mixed_4f", "MaxPool3d_5a_2x2"),
        *("Mixed_5b", "Mixed_5c"),
    )

    def __init__(self, num_classes: int = 400, *, dropout: float = 0.5) -> None:
        super().__init__(num_classes, dropout)
        self.Conv3d_1a_7x7 = _unit(3, 64, 7, stride=2)
        self.MaxPool3d_2a_3x3 = _SameMaxPool3d((1, 3, 3), (1, 2, 2))
        self.Conv3d_2b_1x1 = _unit(64, 64, 1)
        self.Conv3d_2c_3x3 = _unit(64, 192, 3)
        self.MaxPool3d_3a_3x3 = _SameMaxPool3d((1, 3, 3), (1, 2, 2))
        self.MaxPool3d_4a_3x3 = _SameMaxPool3d((3, 3, 3), (2, 2, 2))
        self.MaxPool3d_5a_2x2 = _SameMaxPool3d((2, 2, 2), (2, 2, 2))
        inputs = 192
        for name in MIXED:
            mixed = _Mixed(inputs, name)
            self.add_module(name, mixed)
            inputs = mixed.outputs
        self.dropout = nn.Dropout(dropout)
        self.Logits = named(Conv3d_0c_1x1=named(conv=nn.Conv3d(FEATURES, num_classes, 1)))
        for module in self.modules():
            if isinstance(module, _SameConv3d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, clips: Tensor) -> Tensor:
        features = self.check(clips)
        for name in self.layers:
            features = getattr(self, name)(features)
        # The last layer is linear: the mean of the windows' logits equals the logits of the windows' mean.
        pooled = window_means(features, HEAD_WINDOW).mean(dim=(2, 3, 4), keepdim=True)
        return self.Logits(self.dropout(pooled)).flatten(1)
