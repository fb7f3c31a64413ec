"""SlowOnly ResNet-50: a ResNet-50 over all frames at once that looks along time only in its two last stages.

The names in the state dict are those of pytorchvideo's `slow_r50`, so that its published weights load as they are.
The residual parts here also serve X3D, whose names have the same outline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import real_number, whole_number
from sosampler.errors import InvalidArgument

Size3 = tuple[int, int, int]  # frames, rows, columns

# Blocks of a stage, channels inside its blocks, channels that leave it, frames that its first convolution spans.
STAGES = ((3, 64, 256, 1), (4, 128, 512, 1), (6, 256, 1024, 3), (3, 512, 2048, 3))
HEAD_WINDOW = (8, 7, 7)  # what a clip of 8 frames at 224 pixels leaves at the end


def check_clips(clips: Tensor) -> Tensor:
    """Return `clips` if its shape is [B, 3, T, H, W]."""
    if clips.ndim != 5 or clips.shape[1] != 3:
        raise InvalidArgument(f"a tensor of shape {tuple(clips.shape)} is not a batch of clips; give [B, 3, T, H, W]")
    return clips


def check_head(num_classes: int, dropout: float) -> None:
    """Refuse a head that cannot be built."""
    whole_number("num_classes", num_classes)
    if real_number("dropout", dropout, at_least=0) > 1:
        raise InvalidArgument(f"dropout={dropout!r} is not allowed; give a number from 0 to 1")


def window_means(features: Tensor, window: Size3) -> Tensor:
    """Means over all places of a window, one step apart; where there is less than a window, over all there is."""
    kernel = [min(wanted, there) for wanted, there in zip(window, features.shape[2:], strict=True)]
    exact = features.to(torch.promote_types(features.dtype, torch.float32))  # the CPU cannot pool 16 bits
    return F.avg_pool3d(exact, kernel, stride=1).to(features.dtype)  # [B, C, T', H', W']


def conv3d(inputs: int, outputs: int, kernel: Size3, *, spatial_stride: int = 1, groups: int = 1) -> nn.Conv3d:
    """A convolution without bias that keeps the size, apart from its stride in space."""
    padding = tuple(taps // 2 for taps in kernel)
    return nn.Conv3d(inputs, outputs, kernel, (1, spatial_stride, spatial_stride), padding, groups=groups, bias=False)


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers one after another, each under its own name in the state dict."""
    return nn.Sequential(OrderedDict(layers))


class Residual(nn.Module):
    """relu(shortcut + branch2); the shortcut may have a convolution, and that a norm."""

    def __init__(self, branch2: nn.Module, branch1_conv: nn.Module | None, branch1_norm: nn.Module | None) -> None:
        super().__init__()
        self.branch1_conv = branch1_conv
        self.branch1_norm = branch1_norm
        self.branch2 = branch2

    def forward(self, features: Tensor) -> Tensor:
        shortcut = features
        if self.branch1_conv is not None:
            shortcut = self.branch1_conv(shortcut)
        if self.branch1_norm is not None:
            shortcut = self.branch1_norm(shortcut)
        return F.relu(shortcut + self.branch2(features))


def stage(blocks: Iterable[Residual]) -> nn.Module:
    """Residual blocks one after another."""
    return named(res_blocks=nn.Sequential(*blocks))


def start_weights(net: nn.Module) -> None:
    """He's initialisation; each residual branch starts at zero, so that the net starts as its shortcuts."""
    for module in net.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, (nn.Conv3d, nn.Linear)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Residual):
            nn.init.zeros_(module.branch2.norm_c.weight)


def _bottleneck(inputs: int, inner: int, outputs: int, *, frames: int, stride: int, stride_on_1x1: bool) -> Residual:
    first, second = (stride, 1) if stride_on_1x1 else (1, stride)
    branch2 = named(
        conv_a=conv3d(inputs, inner, (frames, 1, 1), spatial_stride=first),
        norm_a=nn.BatchNorm3d(inner),
        act_a=nn.ReLU(inplace=True),
        conv_b=conv3d(inner, inner, (1, 3, 3), spatial_stride=second),
        norm_b=nn.BatchNorm3d(inner),
        act_b=nn.ReLU(inplace=True),
        conv_c=conv3d(inner, outputs, (1, 1, 1)),
        norm_c=nn.BatchNorm3d(outputs),
    )
    if inputs == outputs:
        return Residual(branch2, None, None)
    return Residual(branch2, conv3d(inputs, outputs, (1, 1, 1), spatial_stride=stride), nn.BatchNorm3d(outputs))


class _Head(nn.Module):
    def __init__(self, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(STAGES[-1][2], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        # The projection is linear: the mean of the windows' logits is the logits of the windows' mean.
        return self.proj(self.dropout(window_means(features, HEAD_WINDOW).mean(dim=(2, 3, 4))))


class SlowOnly(nn.Module):
    """Float clips [B, 3, T, H, W], normalised, to logits [B, num_classes]; any number of frames."""

    head_names = ("blocks.5.proj.",)  # what the state-dict keys of the last layer start with

    def __init__(self, num_classes: int, *, stride_on_1x1: bool, dropout: float) -> None:
        super().__init__()
        check_head(num_classes, dropout)
        self.num_classes = num_classes
        blocks: list[nn.Module] = [
            named(
                conv=conv3d(3, 64, (1, 7, 7), spatial_stride=2),
                norm=nn.BatchNorm3d(64),
                activation=nn.ReLU(inplace=True),
                pool=nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
            )
        ]
        inputs = 64
        for number, (depth, inner, outputs, frames) in enumerate(STAGES):
            residuals = []
            for block in range(depth):
                stride = 2 if number and not block else 1
                residuals.append(
                    _bottleneck(inputs, inner, outputs, frames=frames, stride=stride, stride_on_1x1=stride_on_1x1)
                )
                inputs = outputs
            blocks.append(stage(residuals))
        self.blocks = nn.Sequential(*blocks, _Head(num_classes, dropout))
        start_weights(self)

    def forward(self, clips: Tensor) -> Tensor:
        return self.blocks(check_clips(clips))


def slowonly_r50(num_classes: int = 400, stride_on_1x1: bool = False, *, dropout: float = 0.5) -> SlowOnly:
    """SlowOnly ResNet-50, made for 8 frames; 32.45 million parameters with 400 classes.

    Args:
        stride_on_1x1: each stage halves the size in the first convolution of its first block instead of the second,
            as in Keras and Caffe. The state dict has the same names and shapes either way.
        dropout: before the last layer, while training.
    """
    return SlowOnly(num_classes, stride_on_1x1=stride_on_1x1, dropout=dropout)
