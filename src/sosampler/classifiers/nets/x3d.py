"""X3D-S: a small network of depthwise 3-D convolutions, with the state-dict names of pytorchvideo's `x3d_s`."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.classifiers.nets.resnet3d import ClipNet, Residual, conv3d, named, start_weights, window_means

STEM = 24  # channels
# Blocks per stage, channels inside a block, output channels, channels of squeeze-and-excitation.
STAGES = ((3, 54, 24, 8), (5, 108, 48, 8), (11, 216, 96, 16), (7, 432, 192, 32))
HEAD_WINDOW = (13, 5, 5)  # of features: a clip of 13 frames at 160 pixels
HEAD_FEATURES = 2048


class _SqueezeExcite(nn.Module):
    """Scale each channel by a gate in 0..1, computed from the channels' means over the clip."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv3d(channels, squeezed, 1), nn.ReLU(), nn.Conv3d(squeezed, channels, 1), nn.Sigmoid()
        )

    def forward(self, features: Tensor) -> Tensor:
        return features * self.block(features.mean(dim=(2, 3, 4), keepdim=True))


def _block(inputs: int, inner: int, outputs: int, *, stride: int, squeezed: int | None) -> Residual:
    branch2 = named(
        conv_a=conv3d(inputs, inner, (1, 1, 1)),
        norm_a=nn.BatchNorm3d(inner),
        act_a=nn.ReLU(inplace=True),
        conv_b=conv3d(inner, inner, (3, 3, 3), spatial_stride=stride, groups=inner),
        norm_b=nn.Sequential(
            nn.BatchNorm3d(inner), nn.Identity() if squeezed is None else _SqueezeExcite(inner, squeezed)
        ),
        act_b=nn.SiLU(),
        conv_c=conv3d(inner, outputs, (1, 1, 1)),
        norm_c=nn.BatchNorm3d(outputs),
    )
    if stride == 1:
        return Residual(branch2)
    # The first stage keeps its number of channels; there the published weights have no norm.
    norm = None if inputs == outputs else nn.BatchNorm3d(outputs)
    return Residual(branch2, conv3d(inputs, outputs, (1, 1, 1), spatial_stride=stride), norm)


class _Head(nn.Module):
    def __init__(self, num_classes: int, dropout: float) -> None:
        super().__init__()
        _, inner, outputs, _ = STAGES[-1]
        self.pool = named(
            pre_conv=conv3d(outputs, inner, (1, 1, 1)),
            pre_norm=nn.BatchNorm3d(inner),
            post_conv=conv3d(inner, HEAD_FEATURES, (1, 1, 1)),
        )
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(HEAD_FEATURES, num_classes)

    def forward(self, features: Tensor, *, mean_logits: bool = False) -> Tensor:
        features = F.relu(self.pool.pre_norm(self.pool.pre_conv(features)))
        features = F.relu(self.pool.post_conv(window_means(features, HEAD_WINDOW)))
        windows = self.proj(self.dropout(features.flatten(2).transpose(1, 2)))  # [B, windows, classes]
        count = windows.shape[1]
        if count == 1 or mean_logits:
            return windows.mean(1)
        # Published X3D averages the windows' probabilities, not their logits; this is the logarithm of that mean.
        return windows.log_softmax(dim=2).logsumexp(dim=1) - math.log(count)


class X3D(ClipNet):
    """X3D-S: normalised float clips [B, 3, T, H, W] -> logits [B, num_classes]; for 13 frames at 160, takes any number.

    A larger clip gives several windows; its logits are the logarithm of the windows' mean probability, or with
    `mean_logits` (for independent classes) their mean logits.
    """

    head_names = ("blocks.5.proj.",)  # state-dict prefix of the last layer

    def __init__(self, num_classes: int = 400, *, dropout: float = 0.5) -> None:
        super().__init__(num_classes, dropout)
        # In the published names the spatial convolution of the stem is conv_t and the temporal one conv_xy.
        stem_conv = named(
            conv_t=conv3d(3, STEM, (1, 3, 3), spatial_stride=2), conv_xy=conv3d(STEM, STEM, (5, 1, 1), groups=STEM)
        )
        blocks: list[nn.Module] = [named(conv=stem_conv, norm=nn.BatchNorm3d(STEM), activation=nn.ReLU(inplace=True))]
        inputs = STEM
        for depth, inner, outputs, squeezed in STAGES:
            residuals = []
            for block in range(depth):
                gate = None if block % 2 else squeezed  # every other block has one
                residuals.append(_block(inputs, inner, outputs, stride=1 if block else 2, squeezed=gate))
                inputs = outputs
            blocks.append(named(res_blocks=nn.Sequential(*residuals)))
        self.blocks = nn.Sequential(*blocks, _Head(num_classes, dropout))
        start_weights(self)

    def forward(self, clips: Tensor, *, mean_logits: bool = False) -> Tensor:
        return self.blocks[-1](self.blocks[:-1](self.check(clips)), mean_logits=mean_logits)
