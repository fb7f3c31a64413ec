"""Size and normalisation of transformers' video classifiers: from a checkpoint's processor file, or a table.

Where there is no processor file (a config alone, a bare folder) the table holds; the last column is what the model's
processor class in transformers 5.22 starts from.

    model         resize/crop  mean, std of RGB in 0..1          of the processor class
    TimeSformer   224/224      .45, .225 (the authors' code)     224/224, ImageNet
    VideoMAE      224/224      ImageNet (the authors' code)      224/224, .5, .5
    ViViT         256/224      .75, .25                          256/224, x / 127.5 - 1, then .5, .5: the same
    V-JEPA 2      292/256      ImageNet                          292/256, ImageNet
    others        size/size    ImageNet, with a warning

Another input size keeps the share of resize to crop.
"""

from __future__ import annotations

import logging
from typing import Any

from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple

log = logging.getLogger("sosampler")

# Model type -> short side before the crop over the crop, mean, std.
_INPUTS: dict[str, tuple[float, Triple, Triple]] = {
    "timesformer": (1.0, (0.45, 0.45, 0.45), (0.225, 0.225, 0.225)),
    "videomae": (1.0, IMAGENET_MEAN, IMAGENET_STD),
    "vivit": (256 / 224, (0.75, 0.75, 0.75), (0.25, 0.25, 0.25)),
    "vjepa2": (256 / 224, IMAGENET_MEAN, IMAGENET_STD),
}

# Pillow's numbers for filters, which processor files use, or their names.
_INTERPOLATIONS: dict[Any, str] = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}


def default_preprocessing(model_type: str, size: tuple[int, int]) -> Preprocessing:
    """The table at the head of this module, for a network that takes `size` (height, width)."""
    if model_type not in _INPUTS:
        log.warning(
            "%s: nothing says how its input is normalised; ImageNet's mean and std are taken, give preprocessing= if "
            "the network knows others",
            model_type,
        )
    share, mean, std = _INPUTS.get(model_type, (1.0, IMAGENET_MEAN, IMAGENET_STD))
    return Preprocessing(size=size, resize=int(max(size) * share), mean=mean, std=std)


def processor_preprocessing(told: dict[str, Any], size: tuple[int, int], *, where: str) -> Preprocessing:
    """What a processor says in its `to_dict()`, for a network that takes `size` (height, width)."""
    sides = told.get("size")
    resize: int | tuple[int, int] | None = _pair(sides)
    if isinstance(sides, dict) and sides.get("shortest_edge"):
        resize = int(sides["shortest_edge"])
    interpolation = _INTERPOLATIONS.get(told.get("resample"))
    if resize is None or interpolation is None or not told.get("do_resize", True):
        resize, interpolation = resize or max(size), interpolation or "bilinear"
        log.warning(
            "%s: its processor file asks for size %s, resample %s, do_resize %s; here frames are resized to %s, %s",
            *(where, sides, told.get("resample"), told.get("do_resize"), resize, interpolation),
        )
    crop = _pair(told.get("crop_size")) if told.get("do_center_crop") else None
    if crop is None:
        crop = resize if isinstance(resize, tuple) else size
    mean, std = _normalisation(told)
    found = Preprocessing(size=crop, resize=resize, mean=mean, std=std, interpolation=interpolation)
    if found.size != size:
        log.warning(
            "%s: its processor file gives frames of %s but the network takes %s; frames are brought to that",
            *(where, found.size, size),
        )
        found = found.with_size(size)
    return found


def _normalisation(told: dict[str, Any]) -> tuple[Triple, Triple]:
    """Mean and std for RGB in 0..1; the processor takes x in 0..255 to (x * factor - offset - mean) / std."""
    rescaled, normalised = told.get("do_rescale", True), told.get("do_normalize", True)
    scale = 255 * float(told.get("rescale_factor", 1 / 255)) if rescaled else 255.0
    # ViViT's brings x to -1..1 first, unless its file says otherwise.
    kind = str(told.get("video_processor_type") or told.get("image_processor_type") or "")
    offset = 1.0 if rescaled and told.get("offset", kind.startswith("Vivit")) else 0.0
    mean = _three(told.get("image_mean", 0.0) if normalised else 0.0)
    std = _three(told.get("image_std", 1.0) if normalised else 1.0)
    means, stds = [round((value + offset) / scale, 9) for value in mean], [round(value / scale, 9) for value in std]
    return (means[0], means[1], means[2]), (stds[0], stds[1], stds[2])


def _three(value: Any) -> Triple:
    red, green, blue = value if isinstance(value, (list, tuple)) else (value, value, value)
    return float(red), float(green), float(blue)


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    return None
