"""A ResNet that runs at 32, 4 or 2 bits with one set of weights: the network of VideoIQ.

After Sun, Panda, Chen, Oliva, Feris and Saenko, "Dynamic Network Quantization for Efficient Video Inference",
ICCV 2021, and what it builds on: weights as in DoReFa-Net, activations as in PACT, one batch norm for each width. As
there: the first convolution and the class layer stay in float, as do residual additions and pools; every other
convolution has its weights and its input quantised, those of the shortcuts too; lower widths drop bits of the highest
one; 32 bits are the plain network. Quantisation is simulated in floating point, so all widths cost the same
multiply-adds here.
Different: the weights' scale, max |tanh w|, gets no gradient, and the lower widths learn from the answers of the same
network at 32 bits instead of those of a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.validation import check_float
from sosampler.classifiers.pooled import TimmClassifier, build_timm
from sosampler.classifiers.weights import State
from sosampler.errors import InvalidArgument

FLOAT = 32
WIDTHS = (FLOAT, 4, 2)  # bits
_QUANTISED = WIDTHS[1:]  # from the highest
_MIN_CLIP = 1e-2  # of activations; a learned clip could cross 0, by which inputs are divided

# Rate relative to the recipe's, and weight decay, of learned clips; there .1 and .01 beside a rate of .01.
_CLIP_OPTIMISATION = {4: (10.0, 5e-4), 2: (1.0, 6e-2)}


def weight_codes(weight: Tensor, bits: int) -> Tensor:
    """Return codes of weights as integers 0 .. 2^bits - 1 in float.

    Those of the highest quantised width are round(w' (2^b - 1)), w' = tanh(w) / (2 max |tanh w|) + 1/2. Lower widths
    have its leading bits.
    """
    highest = _QUANTISED[0]
    codes = (_unit_weight(weight) * (2**highest - 1)).round()
    return (codes / 2 ** (highest - bits)).floor()


def quantised_weight(weight: Tensor, bits: int) -> Tensor:
    """Return 2q - 1 for weights as codes q in 0..1, with a straight-through gradient of the rounding.

    The codes of a lower width are multiplied so that their mean is that of the highest one: dropping bits rounds down.
    """
    highest = _QUANTISED[0]
    unit = _unit_weight(weight)
    codes = weight_codes(weight.detach(), highest) / (2**highest - 1)
    if bits < highest:
        kept = weight_codes(weight.detach(), bits) * 2 ** (highest - bits) / (2**highest - 1)
        codes = kept * (codes.mean() / kept.mean().clamp_min(torch.finfo(kept.dtype).tiny))
    return 2 * (unit + (codes - unit).detach()) - 1


def _unit_weight(weight: Tensor) -> Tensor:
    """Return w' in 0..1."""
    bounded = weight.tanh()
    largest = bounded.detach().abs().amax().clamp_min(torch.finfo(weight.dtype).tiny)
    return bounded / (2 * largest) + 0.5


class QuantisedActivation(torch.autograd.Function):
    """PACT: clip to 0 .. clip, then round to 2^bits - 1 equal steps.

    The gradient reaches the input where 0 < x < clip, and the clip, summed, where x >= clip.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip: Tensor, bits: int) -> Tensor:
        clip = clip.clamp_min(_MIN_CLIP)
        ctx.save_for_backward(x, clip)
        step = clip / (2**bits - 1)
        # A clip of no dimension leaves half precision as it is.
        return (x.clamp_min(0).minimum(clip.to(x.dtype)) / step).round() * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, clip = ctx.saved_tensors
        above = x >= clip
        return gradient * ((x > 0) & ~above), (gradient * above).sum(dtype=clip.dtype), None


class AnyPrecisionConv(nn.Module):
    """A convolution with quantised weights and input at low widths, with the parameter names of the plain one."""

    def __init__(self, conv: nn.Conv2d, clip: float) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)
        self.clips = nn.ParameterDict({str(bits): nn.Parameter(torch.tensor(clip)) for bits in _QUANTISED})
        self.bits = FLOAT

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.bits != FLOAT:
            x = QuantisedActivation.apply(x, self.clips[str(self.bits)], self.bits)
            weight = quantised_weight(weight, self.bits)
        return F.conv2d(x, weight, self.bias, *self._geometry)


class SwitchableNorm(nn.ModuleDict):
    """A batch norm with parameters and statistics for each width; all begin as the one that is given."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__({str(bits): copy.deepcopy(norm) for bits in WIDTHS})
        self.bits = FLOAT

    def forward(self, x: Tensor) -> Tensor:
        return self[str(self.bits)](x)


class AnyPrecisionClassifier(TimmClassifier):
    """A pooled classifier that answers at one of `WIDTHS`, 32 bits by default; see the module."""

    @property
    def bits(self) -> int:
        return int(self.options.get("bits", FLOAT))

    def set_bits(self, bits: int) -> None:
        """Answer at another width from now on; not while another thread runs it."""
        if bits not in WIDTHS:
            raise InvalidArgument(f"bits={bits!r} must be one of: {', '.join(map(str, WIDTHS))}")
        self.options = {key: value for key, value in self.options.items() if key != "bits"}
        if bits != FLOAT:
            self.options["bits"] = bits
        for module in self.net.modules():
            if isinstance(module, (AnyPrecisionConv, SwitchableNorm)):
                module.bits = bits

    def with_bits(self, bits: int) -> AnyPrecisionClassifier:
        """Return a classifier at another width, with the same weights in the same memory until either is moved."""
        shared: dict[int, Any] = {id(weight): nn.Parameter(weight.detach(), False) for weight in self.parameters()}
        shared |= {id(buffer): buffer.detach() for buffer in self.buffers()}
        other = copy.deepcopy(self, shared)
        other.set_bits(bits)
        return other

    def modes(self) -> Iterator[str]:
        own = self.bits
        try:
            for bits in WIDTHS:
                self.set_bits(bits)
                yield f"{bits}bit"
        finally:
            self.set_bits(own)

    def own_groups(self, lr: float) -> list[dict[str, Any]]:
        convs = [module for module in self.net.modules() if isinstance(module, AnyPrecisionConv)]
        return [
            {"params": [conv.clips[str(bits)] for conv in convs], "lr": rate * lr, "weight_decay": decay}
            for bits, (rate, decay) in _CLIP_OPTIMISATION.items()
        ]


def build_any_precision(
    backbone: str, *, name: str | None = None, bits: int = FLOAT, clip: float = 2.0, **options: Any
) -> AnyPrecisionClassifier:
    """Build one from a ResNet of timm; `options` are those of `build_timm`.

    `bits`: the width at which it answers. `clip`: what activations are clipped to before that is learned.
    """
    plain = build_timm(backbone, **options)
    net: Any = plain.net
    if not all(hasattr(net, part) for part in ("conv1", "layer1", "layer4", "fc")):
        raise InvalidArgument(f"any_precision:{backbone} must be a ResNet of timm, such as resnet50 or resnet18")
    clip = check_float("clip", clip, above=0)
    for module in [*net.modules()]:
        for child, layer in [*module.named_children()]:
            if isinstance(layer, nn.BatchNorm2d):
                setattr(module, child, SwitchableNorm(layer))
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        for module in [*stage.modules()]:
            for child, layer in [*module.named_children()]:
                if isinstance(layer, nn.Conv2d):
                    setattr(module, child, AnyPrecisionConv(layer, clip))
    classifier = AnyPrecisionClassifier(
        net,
        name=name or f"any_precision:{backbone}",
        preprocessing=plain.preprocessing,
        class_names=plain.class_names,
        options=plain.options | ({} if clip == 2.0 else {"clip": clip}),
    )
    classifier.fresh_head = plain.fresh_head
    classifier.set_bits(bits)
    return classifier


def from_plain(classifier: AnyPrecisionClassifier, state: State) -> State:
    """Return a state of the plain network with its batch norms for every width and the clips of `classifier`.

    A state that has clips already is returned as it is.
    """
    if any(".clips." in key for key in state):
        return state
    state = dict(state)
    for name, module in classifier.net.named_modules():
        if isinstance(module, SwitchableNorm):
            for key in [key for key in state if key.rpartition(".")[0] == name]:
                tensor, leaf = state.pop(key), key.rpartition(".")[2]
                state |= {f"{name}.{bits}.{leaf}": tensor for bits in WIDTHS}
        elif isinstance(module, AnyPrecisionConv):
            state |= {f"{name}.clips.{bits}": clip.detach() for bits, clip in module.clips.items()}
    return state
