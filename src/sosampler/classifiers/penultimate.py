"""What stands before the class layer of a classifier."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sosampler._util.devices import autocast
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.outputs import check_finite
from sosampler.errors import ClassifierError, InvalidArgument


class Penultimate:
    """What stands before the class layer of a classifier when it sees one frame as a clip of one.

    For 2-D networks that is the pooled map, for TimeSformer the normalised class token. Frames are always shown at the
    same place of the video, so that two differ by what they show alone. The layer is watched inside `watching`; each of
    several threads that ask finds its own.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self._layer = class_layer(classifier)
        self._own = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        hook = self._layer.register_forward_pre_hook(lambda _, inputs: setattr(self._own, "seen", inputs[0]))
        try:
            yield
        finally:
            hook.remove()

    @torch.no_grad()
    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [F, 3, H, W] -> float32 [F, D] on the CPU."""
        classifier = self.classifier.eval()
        self._own.seen = None
        clips = classifier.preprocessing(frames[:, None].to(classifier.device))  # [F, 1, 3, h, w]
        with autocast(classifier.device, classifier.precision):
            classifier(clips)
        seen, self._own.seen = self._own.seen, None
        if seen is None:
            raise ClassifierError(f"{classifier.name} does not use its class layer; give a network that does")
        return check_finite(_one_row_a_frame(seen.float(), len(frames), self._layer, classifier.name), classifier.name)


def class_layer(classifier: Any) -> nn.Module:
    """The last layer: the one that the classifier names, else the last one used that gives one number a class."""
    if not isinstance(classifier, Classifier):
        raise InvalidArgument(
            f"a {type(classifier).__name__} shows no features; give a classifier of create_classifier, or wrap your "
            "network with so.wrap_classifier"
        )
    names = classifier.head_names()
    if names:
        named: nn.Module = classifier.net.get_submodule(names[0])
        return named
    used: list[nn.Module] = []
    hooks = [
        layer.register_forward_hook(lambda module, *_: used.append(module))
        for layer in classifier.net.modules()
        if classifier.num_classes in (getattr(layer, "out_features", None), getattr(layer, "out_channels", None))
    ]
    try:
        classifier.clip_probs(torch.zeros(1, 1, 3, *classifier.preprocessing.size, dtype=torch.uint8))
    finally:
        for hook in hooks:
            hook.remove()
    if not used:
        raise InvalidArgument(
            f"{classifier.name} has no layer with {classifier.num_classes} outputs, so that the features before it "
            "cannot be told; give a network that ends in a Linear or a convolution over the classes"
        )
    return used[-1]


def _one_row_a_frame(values: Tensor, num_frames: int, layer: nn.Module, name: str) -> Tensor:
    """The input of a class layer, averaged over whatever moments and places it still has: [F, D]."""
    if values.ndim < 2 or values.shape[0] != num_frames:
        raise ClassifierError(
            f"{name}: its class layer saw {list(values.shape)} for {num_frames} frames; one row a frame is needed"
        )
    channels_last = hasattr(layer, "out_features")  # Linear: [F, ..., D]; convolutions: [F, D, ...]
    values = values if channels_last else values.movedim(1, -1)
    return values.reshape(num_frames, -1, values.shape[-1]).mean(1).cpu()
