"""Temporal shift: a share of the channels comes from the next frame, as large a share from the one before.

Costs no multiply-adds, and lets a 2-D network compare neighbouring frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sosampler._util.validation import whole_number
from sosampler.classifiers.cost import count_gmacs
from sosampler.classifiers.factory import PRETRAINED, WEIGHTS
from sosampler.classifiers.pooled import import_timm
from sosampler.classifiers.weights import State, load_weights, read_state, without_head
from sosampler.errors import InvalidArgument, WeightsError, first_line

_OTHER_SIDES = (0, 0, 0, 0, 0, 0)  # nothing at the sides of W, H and C


class Neighbours(NamedTuple):
    """Which of F = B * T frames lie beside another one of the same video; bool [F, 1, 1, 1] each."""

    has_next: Tensor
    has_previous: Tensor


def find_neighbours(frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Neighbours:
    """The neighbours among frames [B * T, ...] of videos of T = `num_frames`.

    `mask` bool [B, T]: a masked frame is nobody's neighbour, so that nothing leaks out of padding. T may differ from
    call to call, and may be symbolic in a traced graph.
    """
    place = torch.arange(frames.shape[0], device=frames.device) % num_frames
    has_next, has_previous = place < num_frames - 1, place > 0
    if mask is not None:
        real = mask.reshape(-1)
        has_next = has_next & pad(real, (0, 1))[1:]
        has_previous = has_previous & pad(real, (1, 0))[:-1]
    return Neighbours(has_next.view(-1, 1, 1, 1), has_previous.view(-1, 1, 1, 1))


def shift_channels(x: Tensor, fold: int, neighbours: Neighbours) -> Tensor:
    """[F, C, H, W]: channels [0, fold) from the next frame, [fold, 2 * fold) from the one before, zeros at the ends.

    Works along the first dimension of the flat batch, with operators that keep channels-last memory as it is.
    """
    later, earlier, rest = x.split([fold, fold, x.shape[1] - 2 * fold], dim=1)
    # Padded before it is cut, so that no length can become zero or one, for which graphs would be special.
    later = pad(later, (*_OTHER_SIDES, 0, 1))[1:]
    earlier = pad(earlier, (*_OTHER_SIDES, 1, 0))[:-1]
    # Chosen, not multiplied: zero times NaN is NaN.
    later = torch.where(neighbours.has_next, later, 0.0)
    earlier = torch.where(neighbours.has_previous, earlier, 0.0)
    return torch.cat([later, earlier, rest], dim=1)


def temporal_shift(x: Tensor, num_frames: int, div: int, mask: Tensor | None = None) -> Tensor:
    """[B * T, C, H, W] -> the same shape; the first C // div channels take frame t + 1, the next C // div frame t - 1.

    What would come from beyond an end, or from a frame that `mask` [B, T] calls padding, is zero.
    """
    return shift_channels(x, x.shape[1] // div, find_neighbours(x, num_frames, mask))


MOBILENET = "mobilenet_v2"
_TIMM = "timm:"
_LARGEST_DIV = 24  # the narrowest shifted block has 24 channels; beyond that nothing would be shifted there


class Backbone(nn.Module):
    """frames [F, 3, h, w] -> features [F, D], where F = B * T lists the T frames of each of B videos in turn.

    In training mode batch norm sees padded frames too; batches of videos of one length have none.
    """

    name: str
    num_features: int
    shift = 0
    input_size: int | None = None  # the one height and width it was built for; None for any
    reach = 0  # how many frames to each side can change a frame's features

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def weights_net(self) -> nn.Module:
        """The module whose names weights files use."""
        return self

    def head_names(self) -> tuple[str, ...]:
        """What a weights file holds besides, and is left out: the class layers."""
        return ()


class ShiftedBlock(nn.Module):
    """An inverted residual whose branch begins with a temporal shift; names and weights are those of the plain one."""

    def __init__(self, block: nn.Module, div: int) -> None:
        super().__init__()
        self.conv = block.conv
        self.fold = block.out_channels // div  # channels that come from each side

    def forward(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        return x + self.conv(shift_channels(x, self.fold, neighbours))


class MobileNetV2(Backbone):
    """torchvision's MobileNetV2 up to the global average pool: 1280 features.

    `shift` > 0 puts a temporal shift with that divisor into the 10 blocks that have an expansion and a residual.
    """

    name = MOBILENET

    def __init__(self, shift: int = 0, *, pretrained: bool = False) -> None:
        super().__init__()
        from torchvision.models import MobileNet_V2_Weights, mobilenet_v2

        weights = MobileNet_V2_Weights.DEFAULT if pretrained else None
        self.features: nn.Sequential = mobilenet_v2(weights=weights).features
        self.num_features: int = self.features[-1].out_channels
        self.shift = shift
        if shift:
            for place, block in enumerate(self.features):
                # An expansion is a convolution before the depthwise and the projecting one.
                if getattr(block, "use_res_connect", False) and len(block.conv) == 4:
                    self.features[place] = ShiftedBlock(block, shift)
                    self.reach += 1

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        neighbours = find_neighbours(frames, num_frames, mask) if self.shift else None
        x = frames
        for block in self.features:
            x = block(x, neighbours) if isinstance(block, ShiftedBlock) else block(x)
        return x.mean((2, 3))

    def head_names(self) -> tuple[str, ...]:
        return ("classifier",)


class TimmBackbone(Backbone):
    """A timm network without its class layer; looks at each frame by itself."""

    def __init__(self, name: str, *, input_size: int | None = None, pretrained: bool = False) -> None:
        super().__init__()
        self.name = _TIMM + name
        self.net = _timm_net(name, pretrained)
        # A few networks (mobilenetv3, ...) widen their features behind the pool.
        self.num_features = int(getattr(self.net, "head_hidden_size", None) or self.net.num_features)
        self.input_size = input_size
        if input_size is not None:
            self._fit(input_size)

    def _fit(self, input_size: int) -> None:
        """Bring the network to this height and width, and try it on shapes alone."""
        try:
            if hasattr(self.net, "set_input_size"):  # transformers have position embeddings of one size
                self.net.set_input_size(img_size=(input_size, input_size))
            count_gmacs(self.net, torch.empty(1, 3, input_size, input_size, device="meta"))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InvalidArgument(
                f"{self.name} cannot take frames of {input_size}x{input_size} ({first_line(error)}); "
                "give another input_size"
            ) from error

    def forward(self, frames: Tensor, num_frames: int, mask: Tensor | None = None) -> Tensor:
        features: Tensor = self.net(frames)
        return features

    def weights_net(self) -> nn.Module:
        return self.net

    def head_names(self) -> tuple[str, ...]:
        found = self.net.pretrained_cfg.get("classifier") or ()
        return (found,) if isinstance(found, str) else tuple(found)


def _timm_net(name: str, pretrained: bool) -> Any:
    timm = import_timm()
    if not timm.is_model(name.split(".")[0]):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0][:8]}*")[:6]) or "see timm.list_models()"
        raise InvalidArgument(f"timm has no network {name!r}; near by: {near}")
    return timm.create_model(name, pretrained=pretrained, num_classes=0)


def _is_timm(name: str) -> bool:
    return name.startswith(_TIMM) and name != _TIMM


def create_backbone(name: str, *, shift: int = 0, input_size: int | None = None, pretrained: bool = False) -> Backbone:
    """A backbone by name.

    Args:
        name: "mobilenet_v2" or "timm:NAME".
        shift: divisor of the temporal shift, 0 for none; only mobilenet_v2 has one. The papers use 8 and 10.
        input_size: height and width of the frames, for networks that are built for one size.
        pretrained: download the ImageNet weights that torchvision or timm offer.
    """
    shift = whole_number("shift", shift, at_least=0)
    if shift == 1 or shift > _LARGEST_DIV:
        raise InvalidArgument(f"shift={shift} is not allowed; give 0 for none, or a divisor from 2 to {_LARGEST_DIV}")
    if not isinstance(name, str) or (name != MOBILENET and not _is_timm(name)):
        raise InvalidArgument(f"backbone={name!r} is unknown; choose {MOBILENET} or timm:NAME")
    if shift and name != MOBILENET:
        raise InvalidArgument(f"backbone={name!r} has no temporal shift; give shift=0, or backbone={MOBILENET!r}")
    try:
        if name == MOBILENET:
            return MobileNetV2(shift, pretrained=pretrained)
        return TimmBackbone(name.removeprefix(_TIMM), input_size=input_size, pretrained=pretrained)
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"{name}: the network or its pretrained weights cannot be had ({first_line(error)}); "
            "check the name and the connection, or load a file of weights"
        ) from error


def load_backbone_weights(backbone: Backbone, path: str | Path) -> None:
    """Start weights for a backbone: a file, the folder of a saved sampler or classifier, or "pretrained".

    Files are safetensors, or torch files without pickled code, with torchvision's or timm's own names; class layers
    in them are left out. "pretrained" downloads what torchvision or timm offer.
    """
    net = backbone.weights_net()
    if path == PRETRAINED:
        source = create_backbone(backbone.name, input_size=backbone.input_size, pretrained=True)
        state, where = source.weights_net().state_dict(), f"pretrained {backbone.name}"
    else:
        file = Path(path)
        file = file / WEIGHTS if file.is_dir() else file
        state, where = _own_names(read_state(file), net), str(file)
    load_weights(net, without_head(state, backbone.head_names()), where=where)


def _own_names(state: State, net: nn.Module) -> State:
    """A state in the names of `net`; where `net` is a part of what was saved, that part."""
    for prefix in ("backbone.net.", "backbone."):
        part = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        if part:
            return part
    return state
