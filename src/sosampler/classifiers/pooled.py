"""Pooled classifiers: a 2-D network sees each frame alone; scores of any subset are a pool over its features."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from sosampler._util.hardware import autocast
from sosampler._util.validation import check_bool, check_float, check_int, one_of
from sosampler.classifiers.base import BATCH_FRAMES, Classifier, check_finite, check_shape, names_for, unwrap_output
from sosampler.classifiers.preprocessing import Preprocessing, check_frames
from sosampler.errors import InvalidArgument, MissingDependency, first_line

HEADS = ("mean", "frameexit")


class PooledClassifier(Classifier):
    """A classifier with per-frame features and a pool: "mean" (of logits, TSN) or "max" (of features, FrameExit)."""

    pooling = "mean"

    def features(self, clips: Tensor) -> Tensor:
        """Compute features [B, N, D] of each frame of normalised clips [B, N, 3, h, w]; for mean pooling its logits."""
        frames = clips.flatten(0, 1)
        scores = unwrap_output(self.net(frames), self.name)
        return check_shape(scores, len(frames), self.num_classes, self.name).unflatten(0, clips.shape[:2])

    def pool_logits(self, features: Tensor) -> Tensor:
        """Pool features [..., N, D] -> logits [..., C]."""
        return features.mean(-2)

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.pool_logits(self.features(clips))

    @torch.no_grad()
    def frame_features(self, frames: Tensor) -> Tensor:
        """Return float32 features [B, T, D] of uint8 frames [B, T, 3, H, W]; `pool` of them equals `clip_probs`."""
        self.eval()
        frames = check_frames(frames)
        parts = []
        for part in frames.flatten(0, 1)[:, None].split(BATCH_FRAMES):  # [b, 1, 3, H, W]
            with autocast(self.device, self.precision):
                parts.append(check_finite(self.features(self._preprocess(part)).float(), self.name))
        return torch.cat(parts).squeeze(1).unflatten(0, frames.shape[:2])

    @torch.no_grad()
    def pool(self, features: Tensor) -> Tensor:
        """Return probabilities [..., C] of clips, from the features [..., N, D] of their frames."""
        return self.probabilities(self.pool_logits(features.to(self.device).float()))


class TimmClassifier(PooledClassifier):
    """Any timm network; logits are averaged over frames (TSN)."""

    def head_names(self) -> tuple[str, ...]:
        return timm_head_names(self.net)


class FrameExitNet(nn.Module):
    """Backbone, then Linear + BatchNorm + ReLU for each frame; the class layer `fc` comes after the maximum."""

    def __init__(self, backbone: nn.Module, num_classes: int, width: int = 4096) -> None:
        super().__init__()
        self.backbone = backbone
        inner = num_timm_features(backbone)
        self.neck = nn.Sequential(nn.Linear(inner, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, frames: Tensor) -> Tensor:
        """[F, 3, h, w] -> [F, width]"""
        return self.neck(self.backbone(frames))


class FrameExitClassifier(PooledClassifier):
    """FrameExit's head: the element-wise maximum over frames of per-frame features, then one Linear."""

    pooling = "max"
    net: FrameExitNet

    def features(self, clips: Tensor) -> Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])

    def pool_logits(self, features: Tensor) -> Tensor:
        return self.net.fc(features.amax(-2))

    def head_names(self) -> tuple[str, ...]:
        return ("fc", "neck", *(f"backbone.{name}" for name in timm_head_names(self.net.backbone)))


def build_timm(
    backbone: str,
    *,
    name: str | None = None,
    num_classes: int | None = None,
    head: str = "mean",
    stride_on_1x1: bool = False,
    drop_rate: float = 0.0,
    exit_frames: int | None = None,
    pretrained: bool = False,
    preprocessing: Preprocessing | None = None,
) -> PooledClassifier:
    """Build a pooled classifier from a timm network; head "mean" (TSN) or "frameexit".

    `exit_frames`: of FrameExit's released classifiers, the one that is loaded; kept among the options.
    """
    timm = check_timm_name(backbone)
    one_of("head", head, HEADS)
    check_bool("stride_on_1x1", stride_on_1x1)
    if check_float("drop_rate", drop_rate, at_least=0.0) >= 1:
        raise InvalidArgument(f"drop_rate={drop_rate!r} must be at least 0 and below 1")
    if exit_frames is not None:
        check_int("exit_frames", exit_frames)
    classes = check_int("num_classes", 1000 if num_classes is None else num_classes)
    try:
        net = timm.create_model(
            backbone, pretrained=pretrained, num_classes=0 if head == "frameexit" else classes, drop_rate=drop_rate
        )
    except (OSError, RuntimeError) as error:
        raise InvalidArgument(
            f"timm cannot build {backbone!r} ({error}); for pretrained weights check the name and the connection, "
            "or give a file with weights="
        ) from error
    if stride_on_1x1:
        move_stride_to_first_conv(net, backbone)
    options: dict[str, Any] = {"head": head, "stride_on_1x1": stride_on_1x1, "drop_rate": drop_rate}
    options["exit_frames"] = exit_frames
    facts: dict[str, Any] = {
        "name": name or f"timm:{backbone}",
        "preprocessing": preprocessing or _data_config(timm, net),
        "class_names": names_for(classes, "imagenet"),
        "options": {key: value for key, value in options.items() if value not in (False, 0.0, "mean", None)},
    }
    if head == "frameexit":
        return FrameExitClassifier(FrameExitNet(net, classes), **facts)
    classifier = TimmClassifier(net, **facts)
    classifier.fresh_head = not pretrained or net.pretrained_cfg.get("num_classes") != classes
    return classifier


def import_timm() -> Any:
    """Import timm, or raise MissingDependency."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise MissingDependency("2-D classifiers need timm; install it with: pip install 'sosampler[train]'") from error


def check_timm_name(name: str) -> Any:
    """Return the module timm, which must have a network of this name."""
    timm = import_timm()
    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        similar = ", ".join(timm.list_models(f"*{architecture[:8]}*")[:6]) or "see timm.list_models()"
        raise InvalidArgument(f"timm has no network {name!r}; similar names: {similar}")
    return timm


def fit_size(net: nn.Module, size: tuple[int, int], trial: Callable[[], Any], name: str) -> None:
    """Resize the position embeddings of a timm transformer; raise an error if a trial on shapes then fails."""
    try:
        if hasattr(net, "set_input_size"):
            net.set_input_size(img_size=size)
        trial()
    except (AssertionError, RuntimeError, ValueError) as error:
        raise InvalidArgument(
            f"{name} cannot take frames of {size[0]}x{size[1]} ({first_line(error)}); give another input_size"
        ) from error


def timm_head_names(net: nn.Module) -> tuple[str, ...]:
    """Return the names of a timm network's class layers."""
    names = getattr(net, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def num_timm_features(net: nn.Module) -> int:
    """Return the number of a timm network's features; some (mobilenetv3, ...) widen them after the pool."""
    return int(getattr(net, "head_hidden_size", None) or net.num_features)


def move_stride_to_first_conv(net: nn.Module, name: str) -> None:
    """Move the stride of bottlenecks to their first 1x1 convolution, as in the original paper, Caffe and Keras."""
    moved = False
    for block in net.modules():
        first, second = (getattr(block, name, None) for name in ("conv1", "conv2"))
        if not hasattr(block, "conv3") or not isinstance(first, nn.Conv2d) or not isinstance(second, nn.Conv2d):
            continue
        if second.stride != (1, 1):
            first.stride, second.stride = second.stride, (1, 1)
            moved = True
    if not moved:
        raise InvalidArgument(f"stride_on_1x1=True has no effect on {name!r}; give it for bottleneck ResNets only")


def _data_config(timm: Any, net: nn.Module) -> Preprocessing:
    config = timm.data.resolve_model_data_config(net)
    height, width = config["input_size"][1:]
    return Preprocessing(
        size=(height, width),
        resize=max(round(max(height, width) / config["crop_pct"]), height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"] if config["interpolation"] in ("bilinear", "bicubic") else "bicubic",
    )
