"""A classifier with the outputs of a probe beside its own, by every way in which networks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.base import Penultimate
from sosampler.classifiers.probed import ProbedClassifier, probed_layer
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
    layer = probed_layer(found)
    assert layer is not None
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, layer.in_features, generator=generator), torch.randn(4, generator=generator)


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


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
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


def test_what_has_no_place_for_a_probe_is_refused() -> None:
    found = classifier()
    weight, bias = probe_of(found)
    with pytest.raises(InvalidArgument, match=f"linear layer of {weight.shape[1] - 1} features"):
        ProbedClassifier(found, weight[:, 1:], bias)
    exits = so.create_classifier("timm:test_resnet", class_names=CLASSES, input_size=32, head="frameexit")
    assert probed_layer(exits) is None
    assert probed_layer(so.create_classifier("x3d_s", num_classes=3)) is None
    scaled = so.wrap_classifier(Scaled(), class_names=CLASSES, input_size=16, layout="BCHW")
    with pytest.raises(InvalidArgument, match="changes the outputs of its class layer"):
        ProbedClassifier(scaled, torch.zeros(4, 12), torch.zeros(4))
