"""Backbones of a sampler: MobileNetV2, optionally with a temporal shift, or any timm network."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sosampler._util.validation import check_int
from sosampler.classifiers.base import count_gmacs
from sosampler.classifiers.factory import PRETRAINED, WEIGHTS
from sosampler.classifiers.pooled import check_timm_name, fit_size, num_timm_features, timm_head_names
from sosampler.classifiers.weights import load_weights, read_state, without_head
from sosampler.errors import InvalidArgument, WeightsError, first_line

MOBILENET = "mobilenet_v2"
_TIMM = "timm:"
_MAX_SHIFT = 24  # the narrowest shifted block has 24 channels: larger divisors would shift none
_NO_PADDING = (0, 0, 0, 0, 0, 0)  # of W, H and C


# Which of F = B * T frames have a next and a previous one in the same video; bool [F, 1, 1, 1] each.
Neighbours = tuple[Tensor, Tensor]


def find_neighbours(frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Neighbours:
    """Find the neighbours among frames [B * T, ...] of videos with T = `num_frames`, which may be symbolic in a graph.

    Frames that `mask` (bool [B, T]) marks as padding are no neighbours, so that nothing leaks out of them.
    """
    index = torch.arange(frames.shape[0], device=frames.device) % num_frames
    has_next, has_previous = index < num_frames - 1, index > 0
    if mask is not None:
        real = mask.reshape(-1)
        has_next = has_next & pad(real, (0, 1))[1:]
        has_previous = has_previous & pad(real, (1, 0))[:-1]
    return has_next.view(-1, 1, 1, 1), has_previous.view(-1, 1, 1, 1)


def shift_channels(x: Tensor, fold: int, neighbours: Neighbours) -> Tensor:
    """Take channels [0, fold) of [F, C, H, W] from the next frame, [fold, 2 * fold) from the previous one; else zeros.

    Costs no multiply-adds and lets a 2-D network compare neighbouring frames. Keeps channels-last memory.
    """
    has_next, has_previous = neighbours
    later, earlier, rest = x.split([fold, fold, x.shape[1] - 2 * fold], dim=1)
    # Padded before it is sliced, so that no length becomes zero or one, which graphs would specialise on. Selected, not
    # multiplied: zero times NaN is NaN.
    later = torch.where(has_next, pad(later, (*_NO_PADDING, 0, 1))[1:], 0.0)
    earlier = torch.where(has_previous, pad(earlier, (*_NO_PADDING, 1, 0))[:-1], 0.0)
    return torch.cat([later, earlier, rest], dim=1)


class Backbone(nn.Module):
    """Frames [F, 3, h, w] -> features [F, D], where F = B * T holds the T frames of each of B videos in turn.

    In training mode batch norm also sees padded frames; batches of videos of one length have none.
    """

    name: str
    num_features: int
    shift = 0
    input_size: int | None = None  # the height and width it was built for; None for any
    reach = 0  # how many frames to each side can change a frame's features

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def weights_net(self) -> nn.Module:
        """Return the module whose parameter names weights files use."""
        return self

    def head_names(self) -> tuple[str, ...]:
        """Return the names of class layers, which are left out of a weights file."""
        return ()


class ShiftedBlock(nn.Module):
    """An inverted residual block whose branch begins with a temporal shift; names and weights do not change."""

    def __init__(self, block: nn.Module, div: int) -> None:
        super().__init__()
        self.conv = block.conv
        self.fold = block.out_channels // div  # channels from each neighbour

    def forward(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        return x + self.conv(shift_channels(x, self.fold, neighbours))


class MobileNetV2(Backbone):
    """torchvision's MobileNetV2 up to the pool, with a temporal shift in blocks that have expansion and residual."""

    name = MOBILENET

    def __init__(self, shift: int = 0, *, pretrained: bool = False) -> None:
        super().__init__()
        from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

        weights = MobileNet_V2_Weights.DEFAULT if pretrained else None
        self.features: nn.Sequential = mobilenet_v2(weights=weights).features
        self.num_features: int = self.features[-1].out_channels
        self.shift = shift
        if shift:
            for index, block in enumerate(self.features):
                # With an expansion a block has three convolutions and a norm.
                if getattr(block, "use_res_connect", False) and len(block.conv) == 4:
                    self.features[index] = ShiftedBlock(block, shift)
                    self.reach += 1

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        neighbours = find_neighbours(frames, num_frames, mask) if self.shift else None
        for block in self.features:
            frames = block(frames, neighbours) if isinstance(block, ShiftedBlock) else block(frames)
        return frames.mean((2, 3))

    def head_names(self) -> tuple[str, ...]:
        return ("classifier",)


class TimmBackbone(Backbone):
    """A timm network without its class layer; sees each frame alone."""

    def __init__(self, name: str, *, input_size: int | None = None, pretrained: bool = False) -> None:
        super().__init__()
        self.name = _TIMM + name
        self.net = check_timm_name(name).create_model(name, pretrained=pretrained, num_classes=0)
        self.num_features = num_timm_features(self.net)
        self.input_size = input_size
        if input_size is not None:
            shape = (1, 3, input_size, input_size)
            trial = partial(count_gmacs, self.net, torch.empty(shape, device="meta"))
            fit_size(self.net, (input_size, input_size), trial, self.name)

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        return self.net(frames)

    def weights_net(self) -> nn.Module:
        return self.net

    def head_names(self) -> tuple[str, ...]:
        return timm_head_names(self.net)


def create_backbone(name: str, *, shift: int = 0, input_size: int | None = None, pretrained: bool = False) -> Backbone:
    """Create "mobilenet_v2" or "timm:NAME"; `pretrained` downloads the ImageNet weights of torchvision or timm.

    `shift` is the divisor of the temporal shift, 0 for none; only mobilenet_v2 has one. The papers use 8 and 10.
    `input_size` is the height and width of the frames, for networks that are built for one size.
    """
    shift = check_int("shift", shift, at_least=0)
    if shift == 1 or shift > _MAX_SHIFT:
        raise InvalidArgument(f"shift={shift} must be 0 for none, or a divisor from 2 to {_MAX_SHIFT}")
    if not isinstance(name, str) or (name != MOBILENET and not (name.startswith(_TIMM) and name != _TIMM)):
        raise InvalidArgument(f"backbone={name!r} must be {MOBILENET!r} or timm:NAME; choose one of them")
    if shift and name != MOBILENET:
        raise InvalidArgument(f"backbone={name!r} has no temporal shift; give shift=0, or backbone={MOBILENET!r}")
    try:
        if name == MOBILENET:
            return MobileNetV2(shift, pretrained=pretrained)
        return TimmBackbone(name.removeprefix(_TIMM), input_size=input_size, pretrained=pretrained)
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"{name}: the network or its pretrained weights cannot be loaded ({first_line(error)}); "
            "check the name and the connection, or load a file of weights"
        ) from error


def load_backbone_weights(backbone: Backbone, path: str | Path) -> None:
    """Load weights without class layers: a file, the folder of a saved sampler or classifier, or "pretrained"."""
    net = backbone.weights_net()
    if path == PRETRAINED:
        source = create_backbone(backbone.name, input_size=backbone.input_size, pretrained=True)
        state, where = source.weights_net().state_dict(), f"pretrained {backbone.name}"
    else:
        file = Path(path)
        file = file / WEIGHTS if file.is_dir() else file
        state, where = read_state(file), str(file)
        for prefix in ("backbone.net.", "backbone."):  # of a saved sampler
            part = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
            if part:
                state = part
                break
    load_weights(net, without_head(state, backbone.head_names()), where=where)
