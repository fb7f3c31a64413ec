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
    has C + 1 more rows, so that every engine runs both in one pass. All other weights are shared with the classifier,
    for which `probe_refusal` has no objection.
    """

    def __init__(self, classifier: PooledClassifier, weight: Tensor, bias: Tensor) -> None:
        """`weight` [C + 1, D] and `bias` [C + 1] are the probe's; the classifier itself does not change."""
        layer = class_layer(classifier)
        assert isinstance(layer, nn.Linear), "checked by `probe_refusal`"
        if layer.in_features != weight.shape[1]:
            raise InvalidArgument(
                f"{classifier.name} has {layer.in_features} features, but the probe of this sampler reads "
                f"{weight.shape[1]}; give the classifier that it was trained with"
            )
        wide = nn.utils.skip_init(nn.Linear, layer.in_features, layer.out_features + len(weight))
        own_bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        with torch.no_grad():
            wide.weight.copy_(torch.cat([layer.weight.float().cpu(), weight.float().cpu()]))
            wide.bias.copy_(torch.cat([own_bias.float().cpu(), bias.float().cpu()]))
        shared = {id(tensor): tensor for tensor in (*classifier.net.parameters(), *classifier.net.buffers())}
        net = copy.deepcopy(classifier.net, shared)
        (name,) = [name for name, module in classifier.net.named_modules() if module is layer]
        net.set_submodule(name, wide.to(layer.weight.device, layer.weight.dtype))
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

    @property
    def num_classes(self) -> int:
        """The number of outputs, which is more than there are names of classes."""
        return 2 * len(self.class_names) + 1

    def activate(self, scores: Tensor) -> Tensor:
        own, probe, relevance = scores.split((len(self.class_names), len(self.class_names), 1), -1)
        return torch.cat([activate(own, self.activation), activate(probe, self.activation), relevance.sigmoid()], -1)


def probe_refusal(classifier: object) -> str | None:
    """Return why a probe cannot stand beside a classifier's class layer, or None where it can.

    Its outputs must be those of one linear layer, averaged over frames. Whether anything changes them is found by
    trying.
    """
    name = getattr(classifier, "name", type(classifier).__name__)
    reason = f"the classifier {name} does not average what one linear layer gives for each frame"
    if not isinstance(classifier, PooledClassifier) or classifier.pooling != "mean":
        return reason
    try:
        layer = class_layer(classifier)
    except InvalidArgument:  # no layer with one output per class
        return reason
    if not isinstance(layer, nn.Linear) or layer.out_features != classifier.num_classes or layer is classifier.net:
        return reason
    if len(classifier.head_names()) > 1 or not _gives_what_its_layer_gives(classifier, layer):
        return f"{reason}: its class layer's outputs are changed or joined with others"
    return None


@torch.no_grad()
def _gives_what_its_layer_gives(classifier: PooledClassifier, layer: nn.Linear) -> bool:
    """Whether the outputs of a network with more rows in its class layer are those of that layer, for one frame."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(classifier.num_classes + 1, layer.in_features, generator=rng)
    probed = ProbedClassifier(classifier, weight, torch.zeros(len(weight)))
    frame = torch.randint(256, (1, 3, 64, 64), generator=rng).byte()
    features = Penultimate(classifier)
    with features.watching():
        values = features(frame).to(layer.weight.device)  # where products are rounded in the same way (TF32)
    own = F.linear(values, layer.weight.float(), None if layer.bias is None else layer.bias.float())
    expected = torch.cat([own, F.linear(values, weight.to(values.device))], -1)
    given = probed.frame_features(frame[None])[0].to(values.device)
    return float((given - expected).abs().max()) <= _TOLERANCE[classifier.precision] * (1 + float(expected.abs().max()))
