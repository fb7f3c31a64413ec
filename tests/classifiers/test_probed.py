"""A classifier with the outputs of a probe beside its own, by every way in which networks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.base import Penultimate, class_layer
from sosampler.classifiers.probed import ProbedClassifier, probe_refusal
from sosampler.engine.frame_engine import FrameEngine
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import SOSampler

CLASSES = ["ant", "bee", "cat"]
FRAMES = torch.randint(256, (2, 4, 3, 40, 48), generator=torch.Generator().manual_seed(0)).byte()


def classifier(*, multi_label: bool = False) -> Any:
    torch.manual_seed(0)
    found = so.create_classifier("timm:test_resnet", class_names=CLASSES, input_size=32, multi_label=multi_label)
    with torch.no_grad():  # fresh layers are small, and all answers would be nearly the same
        found.net.get_classifier().weight.mul_(40)
    return found


def probe_of(found: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, class_layer(found).in_features, generator=generator), torch.randn(4, generator=generator)


def by_hand(found: Any, weight: Tensor, bias: Tensor) -> Tensor:
    """The classifier's own answers, and two layers on the features that its class layer reads."""
    features = Penultimate(found)
    with features.watching():
        outputs = torch.stack([features(video) for video in FRAMES]) @ weight.T + bias
    activate = torch.sigmoid if found.multi_label else lambda values: values.softmax(-1)
    return torch.cat([found.frame_probs(FRAMES), activate(outputs[..., :3]), outputs[..., 3:].sigmoid()], -1)


@pytest.mark.parametrize("multi_label", [False, True])
def test_both_answer_in_one_pass(multi_label: bool) -> None:
    found = classifier(multi_label=multi_label)
    before, fingerprint = found.frame_probs(FRAMES), found.fingerprint()
    probed = ProbedClassifier(found, *probe_of(found))
    expected = by_hand(found, *probe_of(found))
    assert expected[..., 3:].std() > 0.1
    torch.testing.assert_close(probed.frame_probs(FRAMES), expected, atol=1e-4, rtol=0)
    assert probed.class_names == found.class_names
    torch.testing.assert_close(found.frame_probs(FRAMES), before, atol=0, rtol=0)
    assert found.fingerprint() == fingerprint


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_the_engine_gives_the_same(backend: str) -> None:
    found = classifier()
    probed = ProbedClassifier(found, *probe_of(found))
    sampler = SOSampler(backbone="timm:test_resnet", input_size=32).freeze()
    options: dict[str, Any] = {"precision": "float32", "by_frames": True, "device": "cpu", "backend": backend}
    result = FrameEngine(sampler, probed, num_frames=2, **options).run(FRAMES)
    expected = by_hand(found, *probe_of(found)).gather(1, result.chosen[..., None].expand(-1, -1, 7))
    torch.testing.assert_close(result.frame_probabilities, expected, atol=2e-3, rtol=0)


class Scaled(nn.Module):
    """Changes what its class layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(12, 3)

    def forward(self, frames: Tensor) -> Tensor:
        out: Tensor = 3 * self.fc(self.features(frames))
        return out


class TextHead(nn.Module):
    """Has no layer over the classes: they are the rows of a table, as of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.register_buffer("texts", torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, frames: Tensor) -> Tensor:
        out: Tensor = self.features(frames) @ self.texts
        return out


def wrapped(module: nn.Module) -> Any:
    return so.wrap_classifier(module, class_names=CLASSES, input_size=16, layout="BCHW")


def test_what_has_no_place_for_a_probe() -> None:
    assert probe_refusal(classifier()) is None
    assert probe_refusal(classifier(multi_label=True)) is None
    for found in (
        wrapped(Scaled()),
        wrapped(TextHead()),
        so.create_classifier("timm:test_resnet", class_names=CLASSES, input_size=32, head="frameexit"),
        so.create_classifier("timm:deit_tiny_distilled_patch16_224", num_classes=3, input_size=32),  # two heads
        so.create_classifier("x3d_s", num_classes=3),
    ):
        assert "does not average what one linear layer gives" in str(probe_refusal(found)), found.name
    weight, bias = probe_of(classifier())
    with pytest.raises(InvalidArgument, match=f"the probe of this sampler reads {weight.shape[1] - 1}"):
        ProbedClassifier(classifier(), weight[:, 1:], bias)


def test_all_other_weights_are_shared() -> None:
    found = classifier()
    state = torch.get_rng_state()
    probed = ProbedClassifier(found, *probe_of(found))
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    own = {id(parameter) for parameter in found.parameters()}
    new = [name for name, parameter in probed.named_parameters() if id(parameter) not in own]
    assert new == ["net.fc.weight", "net.fc.bias"]
