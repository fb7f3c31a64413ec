"""`wrap_classifier`: use your own network as a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sosampler._util.validation import check_int, one_of
from sosampler.classifiers.base import (
    Classifier,
    ClipLength,
    check_finite,
    check_shape,
    device_of,
    log,
    numbered_names,
    read_classes,
    unwrap_output,
)
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, height_and_width
from sosampler.errors import ClassifierError, InvalidArgument, first_line

LAYOUTS = ("BTCHW", "BCTHW", "BCHW")
OUTPUTS = ("logits", "probabilities")
_SUM_TOLERANCE = 1e-2  # error of a sum over a thousand classes in half precision
_TRIAL_CLIPS = 2  # clips of noise that a new module is tried on


class WrappedClassifier(Classifier):
    """A module of clips that returns logits or probabilities."""

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        return _scores(self.net, clips, self.options["layout"], self.name)

    def probabilities(self, scores: Tensor) -> Tensor:
        if self.options["outputs"] == "logits":
            return super().probabilities(scores)
        _check_probabilities(scores.reshape(-1, scores.shape[-1]), self.activation, self.name)
        return scores


def _scores(module: nn.Module, clips: Tensor, layout: str, name: str) -> Tensor:
    """Return a module's scores for clips [B, T, 3, H, W] in its layout, or single frames [F, 3, H, W]."""
    return unwrap_output(module(clips.transpose(1, 2) if layout == "BCTHW" else clips), name)


def wrap_classifier(
    module: nn.Module,
    *,
    input_size: int | tuple[int, int],
    num_classes: int | None = None,
    class_names: Sequence[str] | str | Path | None = None,
    layout: str = "BTCHW",
    outputs: str = "logits",
    multi_label: bool = False,
    resize: int | tuple[int, int] | None = None,
    mean: float | Sequence[float] = IMAGENET_MEAN,
    std: float | Sequence[float] = IMAGENET_STD,
    interpolation: str = "bilinear",
    num_frames: int | None = None,
    min_frames: int = 1,
    max_frames: int | None = None,
    name: str | None = None,
) -> Classifier:
    """Make a classifier from a torch module.

    The module is put into evaluation mode and tried once on noise, so that a wrong layout, logits instead of
    probabilities or a wrong number of classes raise an error here.

    Args:
        module: takes normalised float clips and returns scores [B, classes] (or an object with `logits`).
        input_size: height and width that it takes.
        num_classes, class_names: one of the two, or neither to use the module's number of outputs.
        layout: of its input: "BTCHW", "BCTHW", or "BCHW" for a network of single frames, whose logits are averaged.
        outputs: "logits" or "probabilities".
        multi_label: classes are independent (sigmoid) instead of one class per video (softmax).
        resize: short side, or (height, width), before the centre crop to input_size; default: input_size.
        mean, std: normalisation, for RGB in 0..1.
        interpolation: "bilinear" or "bicubic", antialiased.
        num_frames: if the module takes exactly this many: fewer are repeated evenly, more are refused.
        min_frames, max_frames: the same as bounds.
        name: for messages.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import sosampler as so
        >>> net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))  # of single frames
        >>> clf = so.wrap_classifier(net, input_size=32, layout="BCHW", class_names=["ant", "bee"])
        >>> clf.frame_probs(torch.zeros(1, 5, 3, 48, 64, dtype=torch.uint8)).shape
        torch.Size([1, 5, 2])
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module is a {type(module).__name__} but must be a torch.nn.Module")
    one_of("layout", layout, LAYOUTS)
    one_of("outputs", outputs, OUTPUTS)
    if layout == "BCHW" and outputs == "probabilities":
        raise InvalidArgument(
            "layout='BCHW' averages logits over frames, but outputs='probabilities'; return logits from the module"
        )
    if layout == "BCHW" and (num_frames, min_frames, max_frames) != (None, 1, None):
        raise InvalidArgument("layout='BCHW' is for single frames, which have no length; leave num_frames out")
    if num_frames is not None:
        min_frames = max_frames = check_int("num_frames", num_frames)
    length = ClipLength(check_int("min_frames", min_frames), max_frames)
    if max_frames is not None and check_int("max_frames", max_frames) < min_frames:
        raise InvalidArgument(f"max_frames={max_frames} must be at least min_frames={min_frames}")
    name = name or type(module).__name__
    size = height_and_width("input_size", input_size)
    preprocessing = Preprocessing(
        size=size,
        resize=resize if resize is not None else size[0] if size[0] == size[1] else size,
        mean=mean if isinstance(mean, (int, float)) else tuple(mean),  # type: ignore[arg-type]  # checked inside
        std=std if isinstance(std, (int, float)) else tuple(std),  # type: ignore[arg-type]
        interpolation=interpolation,
    )
    module = module.eval()
    scores = _try_once(module, layout, preprocessing, length, name)
    num_classes, names = read_classes(num_classes, class_names)
    if names is None:
        names = numbered_names(scores.shape[1] if num_classes is None else num_classes)
    check_shape(scores, _TRIAL_CLIPS, len(names), name)
    if outputs == "probabilities":
        _check_probabilities(scores, "sigmoid" if multi_label else "softmax", name)
    elif _looks_like_probabilities(scores):  # a second softmax would flatten them
        raise ClassifierError(
            f"{name} returned rows in 0..1 with a sum of 1 but must return logits: softmax was applied already; "
            "wrap it with outputs='probabilities'"
        )
    elif multi_label and bool(((scores >= 0) & (scores <= 1)).all()):
        log.warning("%s returned values in 0..1 only; if it applies sigmoid itself, give outputs='probabilities'", name)
    return (PooledClassifier if layout == "BCHW" else WrappedClassifier)(
        module,
        name=name,
        preprocessing=preprocessing,
        class_names=names,
        length=length,
        multi_label=multi_label,
        options={"layout": layout, "outputs": outputs},
    )


def _looks_like_probabilities(scores: Tensor) -> bool:
    """Return whether rows [B, C] are distributions: in 0..1, with a sum of one."""
    scores = scores.float()
    inside = scores.shape[-1] > 1 and bool(((scores >= 0) & (scores <= 1)).all())
    return inside and bool(((scores.sum(-1) - 1).abs() < _SUM_TOLERANCE).all())


def _check_probabilities(scores: Tensor, activation: str, name: str) -> None:
    """Raise an error if rows [B, C] are not probabilities."""
    check_finite(scores, name)
    low, high = float(scores.min()), float(scores.max())
    if low < -1e-6 or high > 1 + 1e-6:
        raise ClassifierError(
            f"{name} returned values from {low:.3g} to {high:.3g} but must return probabilities; "
            "these are logits: wrap it with outputs='logits', or apply softmax (sigmoid for several labels) yourself"
        )
    if activation == "softmax" and not _looks_like_probabilities(scores):
        total = float(scores.float().sum(-1)[0])
        raise ClassifierError(
            f"{name} returned rows with a sum of {total:.3g} but must return probabilities with a sum of 1; "
            "wrap it with outputs='logits' if these are logits, with multi_label=True if classes are independent"
        )


@torch.no_grad()
def _try_once(module: nn.Module, layout: str, preprocessing: Preprocessing, length: ClipLength, name: str) -> Tensor:
    """Return scores [2, C] of clips of noise, or raise an error with the module's own message."""
    shape = (_TRIAL_CLIPS, length.at_least, 3, *preprocessing.size)
    noise = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    clips = preprocessing.normalised(noise.to(device_of(module), torch.uint8))
    clips = clips[:, 0] if layout == "BCHW" else clips
    try:
        output = _scores(module, clips, layout, name)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError) as error:
        given = list(clips.transpose(1, 2).shape if layout == "BCTHW" else clips.shape)
        raise ClassifierError(
            f"{name} cannot take a batch {given} (layout={layout!r}): {first_line(error)}; "
            "check layout, input_size and num_frames"
        ) from error
    return check_finite(output.float(), name) if output.ndim == 2 else output
