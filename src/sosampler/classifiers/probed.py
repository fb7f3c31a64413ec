"""A classifier whose class layer also gives the outputs of a probe: further linear outputs of the same input."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.classifiers.base import Penultimate, activate, class_layer
from sosampler.classifiers.pooled import PooledClassifier
from sosampler.errors import InvalidArgument

# Of outputs, relative to the largest, by the precision that they are computed in
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


class ProbedClassifier(PooledClassifier):
    """A pooled classifier that answers for each frame with 2 C + 1 probabilities instead of C.

    First those of its own classes, then those of the probe's, then the probe's relevance of the frame. The class layer
    has C + 1 more rows, so that every engine runs both in one pass.
    """

    def __init__(self, classifier: PooledClassifier, weight: Tensor, bias: Tensor) -> None:
        """`weight` [C + 1, D] and `bias` [C + 1] are the probe's; the classifier itself does not change."""
        layer = probed_layer(classifier)
        if layer is None or layer.in_features != weight.shape[1]:
            raise InvalidArgument(
                f"{classifier.name} does not end in one linear layer of {weight.shape[1]} features, which the probe of "
                "this sampler reads; give the classifier that it was trained with"
            )
        net = copy.deepcopy(classifier.net)
        wide = nn.Linear(layer.in_features, layer.out_features + len(weight), device=layer.weight.device)
        own_bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        with torch.no_grad():
            wide.weight.copy_(torch.cat([layer.weight.cpu(), weight.cpu()]))
            wide.bias.copy_(torch.cat([own_bias.cpu(), bias.cpu()]))
        (name,) = [name for name, module in classifier.net.named_modules() if module is layer]
        net.set_submodule(name, wide.to(layer.weight.dtype))
        super().__init__(
            net,
            name=classifier.name,
            preprocessing=classifier.preprocessing,
            class_names=classifier.class_names,
            length=classifier.length,
            multi_label=classifier.multi_label,
            options=classifier.options,
        )
        self.precision, self.fresh_head = classifier.precision, classifier.fresh_head
        self._check(classifier, wide)

    @property
    def num_classes(self) -> int:
        """The number of outputs, which is more than there are names of classes."""
        return 2 * len(self.class_names) + 1

    def activate(self, scores: Tensor) -> Tensor:
        own, probe, relevance = scores.split((len(self.class_names), len(self.class_names), 1), -1)
        return torch.cat([activate(own, self.activation), activate(probe, self.activation), relevance.sigmoid()], -1)

    @torch.no_grad()
    def _check(self, classifier: PooledClassifier, wide: nn.Linear) -> None:
        """Raise an error where the outputs of the network are not those of its class layer."""
        frame = torch.randint(256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(0)).byte()
        features = Penultimate(classifier)
        with features.watching():
            expected = F.linear(features(frame).to(wide.weight.device), wide.weight.float(), wide.bias.float())
        given = self.frame_features(frame[None])[0]
        if float((given - expected).abs().max()) > _TOLERANCE[self.precision] * (1 + float(expected.abs().max())):
            raise InvalidArgument(
                f"{classifier.name} changes the outputs of its class layer, so no probe can stand beside it; give "
                "another answer"
            )


def probed_layer(classifier: object) -> nn.Linear | None:
    """Return the class layer that a probe can stand beside; None where the classifier has no such layer."""
    if not isinstance(classifier, PooledClassifier) or classifier.pooling != "mean":
        return None
    layer = class_layer(classifier)
    fits = isinstance(layer, nn.Linear) and layer.out_features == classifier.num_classes and layer is not classifier.net
    return layer if fits else None
