"""SlowOnly ResNet-50: a 3-D ResNet-50 with temporal convolutions in its two last stages only.

State-dict names are those of pytorchvideo's `slow_r50`, so that its published weights load directly; weights of a 2-D
ResNet-50 can be inflated. X3D uses the residual blocks too.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import check_float, check_int
from sosampler.classifiers.weights import some_of
from sosampler.errors import InvalidArgument

Size3 = tuple[int, int, int]  # frames, rows, columns

# Blocks per stage, channels inside a block, output channels, frames that the first convolution spans.
STAGES = ((3, 64, 256, 1), (4, 128, 512, 1), (6, 256, 1024, 3), (3, 512, 2048, 3))
HEAD_WINDOW = (8, 7, 7)  # of features: a clip of 8 frames at 224 pixels
COUNTER = "num_batches_tracked"  # of a batch norm: many files omit it, and inference does not need it


class ClipNet(nn.Module):
    """A network of float clips [B, 3, T, H, W]."""

    def __init__(self, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.num_classes = check_int("num_classes", num_classes)
        if check_float("dropout", dropout, at_least=0) > 1:
            raise InvalidArgument(f"dropout={dropout!r} must be from 0 to 1")

    def check(self, clips: Tensor) -> Tensor:
        if clips.ndim != 5 or clips.shape[1] != 3:
            raise InvalidArgument(f"clips have shape {tuple(clips.shape)} but must be [B, 3, T, H, W]")
        return clips


def window_means(features: Tensor, window: Size3) -> Tensor:
    """Average [B, C, T, H, W] over sliding windows of stride 1, which shrink to the size of smaller features."""
    kernel = [min(side, size) for side, size in zip(window, features.shape[2:], strict=True)]
    exact = features.to(torch.promote_types(features.dtype, torch.float32))  # the CPU cannot pool 16 bits
    return F.avg_pool3d(exact, kernel, stride=1).to(features.dtype)  # [B, C, T', H', W']


def conv3d(inputs: int, outputs: int, kernel: Size3, *, spatial_stride: int = 1, groups: int = 1) -> nn.Conv3d:
    """Return a convolution without bias whose padding keeps the size, apart from its spatial stride."""
    padding = tuple(taps // 2 for taps in kernel)
    return nn.Conv3d(inputs, outputs, kernel, (1, spatial_stride, spatial_stride), padding, groups=groups, bias=False)


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class Residual(nn.Module):
    """relu(shortcut + branch2); the shortcut may have a convolution, and that a norm."""

    def __init__(
        self, branch2: nn.Module, branch1_conv: nn.Module | None = None, branch1_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.branch1_conv, self.branch1_norm, self.branch2 = branch1_conv, branch1_norm, branch2

    def forward(self, features: Tensor) -> Tensor:
        shortcut = features
        for layer in (self.branch1_conv, self.branch1_norm):
            shortcut = shortcut if layer is None else layer(shortcut)
        return F.relu(shortcut + self.branch2(features))


def start_weights(net: nn.Module) -> None:
    """Apply He's initialisation; residual branches start at zero."""
    for module in net.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, (nn.Conv3d, nn.Linear)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Residual):
            nn.init.zeros_(module.branch2.norm_c.weight)


def _bottleneck(inputs: int, inner: int, outputs: int, frames: int, strides: tuple[int, int]) -> Residual:
    first, second = strides
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
        return Residual(branch2)
    return Residual(branch2, conv3d(inputs, outputs, (1, 1, 1), spatial_stride=first * second), nn.BatchNorm3d(outputs))


class _Head(nn.Module):
    def __init__(self, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.proj = nn.Linear(STAGES[-1][2], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        # The projection is linear: the mean of the windows' logits equals the logits of the windows' mean.
        return self.proj(self.dropout(window_means(features, HEAD_WINDOW).mean(dim=(2, 3, 4))))


class SlowOnly(ClipNet):
    """SlowOnly ResNet-50: normalised float clips [B, 3, T, H, W] -> logits [B, num_classes].

    Designed for 8 frames, takes any number; 32.45 million parameters with 400 classes. With `stride_on_1x1` each stage
    halves the size in the first convolution of its first block instead of the second, as in Keras and Caffe.
    """

    head_names = ("blocks.5.proj.",)  # state-dict prefix of the last layer

    def __init__(self, num_classes: int = 400, stride_on_1x1: bool = False, *, dropout: float = 0.5) -> None:
        super().__init__(num_classes, dropout)
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
                strides = (2 if number and not block else 1, 1)
                residuals.append(
                    _bottleneck(inputs, inner, outputs, frames, strides if stride_on_1x1 else strides[::-1])
                )
                inputs = outputs
            blocks.append(named(res_blocks=nn.Sequential(*residuals)))
        self.blocks = nn.Sequential(*blocks, _Head(num_classes, dropout))
        start_weights(self)

    def forward(self, clips: Tensor) -> Tensor:
        return self.blocks(self.check(clips))


# Regular expressions that turn the names of SlowOnly into those of the 2-D network.
_NAMES_2D = (
    *((r"blocks\.0\.conv\.", "conv1."), (r"blocks\.0\.norm\.", "bn1."), (r"blocks\.5\.proj\.", "fc.")),
    *((r"blocks\.(\d)\.res_blocks\.", r"layer\1."), ("branch1_conv", "downsample.0"), ("branch1_norm", "downsample.1")),
    *((f"branch2.conv_{letter}", f"conv{number}") for number, letter in enumerate("abc", start=1)),
    *((f"branch2.norm_{letter}", f"bn{number}") for number, letter in enumerate("abc", start=1)),
)


def inflate_resnet50(state_2d: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict for `SlowOnly` from a 2-D ResNet-50 with torchvision's or timm's names.

    `state_2d` holds conv1, bn1, layer1 .. layer4 and optionally fc; without fc the result has no head. Each kernel is
    put at the middle frame: the network then equals the 2-D one, averaged over frames.
    """
    with torch.device("meta"):
        target = SlowOnly(num_classes=len(state_2d["fc.weight"]) if "fc.weight" in state_2d else 1).state_dict()
    has_head = any(key.startswith("fc.") for key in state_2d)
    names = {}
    for name in target:
        key = name
        for pattern, replacement in _NAMES_2D:
            key = re.sub(pattern, replacement, key)
        if has_head or not key.startswith("fc."):
            names[key] = name
    missing = [key for key in names if key not in state_2d and not key.endswith(COUNTER)]
    unknown = [key for key in state_2d if key not in names]
    if missing or unknown:
        raise InvalidArgument(
            "the weights are not those of a ResNet-50 with torchvision's names: "
            f"missing {some_of(missing) or 'none'}; unknown {some_of(unknown) or 'none'}; "
            "give conv1, bn1, layer1 .. layer4 and, if there is a head, fc"
        )
    inflated, wrong = {}, []
    for key, name in names.items():
        weight = state_2d.get(key, torch.zeros((), dtype=torch.long))  # counters may be missing
        inflated[name] = weight.new_zeros(target[name].shape)
        # The middle frame of a kernel [C, c, frames, h, w].
        middle = inflated[name][:, :, target[name].shape[2] // 2] if target[name].ndim == 5 else inflated[name]
        if middle.shape == weight.shape:
            middle.copy_(weight)
        else:
            wrong.append(f"{key} {tuple(weight.shape)}, not {tuple(middle.shape)}")
    if wrong:
        raise InvalidArgument(f"weights have other shapes than a ResNet-50: {some_of(wrong)}; give a plain ResNet-50")
    return inflated
