"""Networks of whole clips [B, 3, T, H, W]: SlowOnly, X3D, I3D and torchvision's video models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchvision import models

from sosampler._util.validation import check_bool, check_int, one_of
from sosampler.classifiers.base import Classifier, ClipLength, names_for
from sosampler.classifiers.nets.i3d import I3D
from sosampler.classifiers.nets.resnet3d import SlowOnly
from sosampler.classifiers.nets.x3d import X3D
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.weights import load_weights
from sosampler.errors import InvalidArgument

# PyTorchVideo's published Slow and X3D checkpoints were trained with these.
PYTORCHVIDEO: dict[str, Any] = {"mean": (0.45, 0.45, 0.45), "std": (0.225, 0.225, 0.225)}

# Minimum number of frames where torchvision's weights do not give it, and exact numbers where positions are learned.
_TORCHVISION_LENGTHS = {
    "s3d": ClipLength(at_least=14),
    "mvit_v1_b": ClipLength(at_least=16, at_most=16),
    "mvit_v2_s": ClipLength(at_least=16, at_most=16),
}
_TORCHVISION_HEADS = {
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18"), "fc"),
    **dict.fromkeys(("mvit_v1_b", "mvit_v2_s"), "head.1"),
    **dict.fromkeys(("swin3d_t", "swin3d_s", "swin3d_b"), "head"),
    "s3d": "classifier.1",
}


class SpacetimeClassifier(Classifier):
    """A network of clips [B, 3, T, H, W]."""

    def __init__(self, net: nn.Module, *, head: tuple[str, ...] = (), **facts: Any) -> None:
        super().__init__(net, **facts)
        self._head = tuple(name.rstrip(".") for name in head)

    def clip_logits(self, clips: Tensor, positions: Tensor | None = None) -> Tensor:
        # X3D averages the windows of a large clip according to its activation.
        options = {"mean_logits": self.multi_label} if isinstance(self.net, X3D) else {}
        return self.net(clips.transpose(1, 2), **options)

    def head_names(self) -> tuple[str, ...]:
        return self._head


def build_slowonly(*, num_classes: int | None = None, stride_on_1x1: bool = False) -> SpacetimeClassifier:
    """Build SlowOnly-50 8x8; takes PyTorchVideo's `slow_r50` checkpoint, or an inflated 2-D ResNet-50."""
    make = partial(SlowOnly, stride_on_1x1=check_bool("stride_on_1x1", stride_on_1x1))
    preprocessing = Preprocessing(size=(224, 224), resize=256, **PYTORCHVIDEO)
    options = {"stride_on_1x1": True} if stride_on_1x1 else {}
    return _build(make, num_classes, name="slowonly_r50", preprocessing=preprocessing, options=options)


def build_x3d(*, num_classes: int | None = None) -> SpacetimeClassifier:
    """Build X3D-S; takes PyTorchVideo's `x3d_s` checkpoint."""
    preprocessing = Preprocessing(size=(182, 182), resize=182, **PYTORCHVIDEO)
    return _build(X3D, num_classes, name="x3d_s", preprocessing=preprocessing)


def build_i3d(*, num_classes: int | None = None) -> SpacetimeClassifier:
    """Build I3D (inflated Inception-v1), RGB in -1..1. The network needs 32 frames; fewer are repeated."""
    preprocessing = Preprocessing(size=(224, 224), resize=256, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    return _build(I3D, num_classes, name="i3d", preprocessing=preprocessing, length=ClipLength(at_least=32))


def _build(make: Callable[..., Any], num_classes: int | None, **facts: Any) -> SpacetimeClassifier:
    """Build a classifier for the 400 classes of Kinetics, or another number."""
    classes = check_int("num_classes", 400 if num_classes is None else num_classes)
    net = make(num_classes=classes)
    return SpacetimeClassifier(net, class_names=names_for(classes, "kinetics"), head=net.head_names, **facts)


def torchvision_names() -> list[str]:
    """Return the names of torchvision's video classifiers."""
    return list(models.list_models(module=models.video))


def build_torchvision(model: str, *, num_classes: int | None = None, pretrained: bool = False) -> SpacetimeClassifier:
    """Build one of torchvision's video models, with the preprocessing of its published weights."""
    one_of("torchvision model", model, torchvision_names())
    classes = check_int("num_classes", 400 if num_classes is None else num_classes)
    published = models.get_model_weights(model).DEFAULT
    head = (_TORCHVISION_HEADS[model],) if model in _TORCHVISION_HEADS else ()
    net = models.get_model(model, num_classes=classes)
    if pretrained:
        try:
            state = models.get_model(model, weights=published).state_dict()
        except OSError as error:
            raise InvalidArgument(
                f"the weights of {model} cannot be downloaded ({error}); give a file with weights="
            ) from error
        load_weights(net, state, where=f"torchvision's {model}", head=head, new_head=classes != 400)
    transform = published.transforms()
    resize = tuple(transform.resize_size)
    classifier = SpacetimeClassifier(
        net,
        name=f"torchvision:{model}",
        preprocessing=Preprocessing(
            size=tuple(transform.crop_size),
            resize=resize[0] if len(resize) == 1 else resize,
            mean=tuple(transform.mean),
            std=tuple(transform.std),
            interpolation=transform.interpolation.value,
        ),
        class_names=names_for(classes, "kinetics"),
        length=_TORCHVISION_LENGTHS.get(model),
        head=head,
    )
    classifier.fresh_head = not pretrained or classes != 400
    return classifier
