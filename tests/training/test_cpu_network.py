"""Training on a CPU in bfloat16: gradients of depthwise convolutions with a stride go another way, not elsewhere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import preparation
from sosampler.training.checkpoints import SETTINGS
from sosampler.training.cpu_network import StridedDepthwise, _BackInFloat32, prepare_network


def gradients(layer: nn.Module, x: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and gradients of input and weight, all in float32."""
    given = x.detach().to(precision, copy=True).requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        found = layer(given)
    torch.manual_seed(1)
    found.float().mul(torch.randn(found.shape)).sum().backward()
    assert isinstance(layer.weight, Tensor)
    assert given.grad is not None
    assert layer.weight.grad is not None
    assert given.grad.dtype == precision
    return found.detach().float(), given.grad.float(), layer.weight.grad.clone()


@pytest.mark.parametrize(("stride", "kernel", "dilation"), [(2, 3, 1), (3, 5, 1), ((1, 2), 3, 2)])
def test_gradients_are_those_of_the_plain_layer(stride: int | tuple[int, int], kernel: int, dilation: int) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 8, kernel, stride, padding=1, dilation=dilation, groups=8, bias=False)
    ours = StridedDepthwise(copy.deepcopy(plain))
    x = torch.randn(3, 8, 13, 17).to(memory_format=torch.channels_last)
    exact = gradients(plain, x, torch.float32)
    for one, other in zip(gradients(ours, x, torch.float32), exact, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(ours, x, torch.bfloat16), exact, strict=True):
        assert (one - other).abs().max() < 0.02 * other.abs().max()  # bfloat16 has 8 bits
    ours.weight.requires_grad_(False).grad = None
    given = x.bfloat16().requires_grad_()
    ours(given).sum().backward()
    assert given.grad is not None
    assert ours.weight.grad is None
    assert torch.equal(ours.eval()(x), plain(x))


def test_a_sampler_keeps_its_names_and_answers() -> None:
    sampler = SOSampler(shift=8, input_size=32, num_classes=3)
    ready = copy.deepcopy(sampler)
    prepare_network(ready)
    assert sum(isinstance(layer, StridedDepthwise) for layer in ready.modules()) == 4
    assert ready.fingerprint() == sampler.fingerprint()
    assert list(ready.state_dict()) == list(sampler.state_dict())
    frames = torch.randn(2, 5, 3, 32, 32)
    scores = [network.eval()(frames).scores.detach() for network in (ready, sampler)]
    assert torch.allclose(*scores, atol=1e-5)


def test_what_is_left_alone() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, stride=2, groups=4, bias=True),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False, padding_mode="reflect"),
        nn.Conv2d(1, 1, 3, stride=2, bias=False),
    )
    prepare_network(net)  # type: ignore[arg-type]
    assert not any(isinstance(layer, StridedDepthwise) for layer in net)


def test_precision_is_by_trial_and_stays_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = so.make_reels(
        "procedural", tmp_path / "bank", counts={"train": 4, "dev": 2}, num_classes=2, recipe={"size": 48}
    )
    classifier = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
    bank = so.add_teacher(bank, classifier)
    told: dict[str, Any] = {"recipe": "paper", "device": "cpu", "input_size": 32, "epochs": 2, "batch_size": 2}
    seen: list[torch.dtype] = []
    plain = _BackInFloat32.backward

    def watched(ctx: Any, given: Tensor) -> Any:
        seen.append(given.dtype)
        return plain(ctx, given)

    monkeypatch.setattr(_BackInFloat32, "backward", staticmethod(watched))
    for good, name, precision in ((True, "fast", "bfloat16"), (False, "slow", "float32")):
        monkeypatch.setattr(preparation, "cpu_is_good_at_bfloat16", lambda good=good: good)
        so.train(bank, out=tmp_path / name, **told)
        assert json.loads((tmp_path / name / SETTINGS).read_text(encoding="utf-8"))["precision"] == precision
    assert seen == [torch.bfloat16] * 4 * 2 * 2  # layers, steps an epoch, epochs
    monkeypatch.setattr(preparation, "cpu_is_good_at_bfloat16", lambda: True)
    so.train(bank, out=tmp_path / "slow", **told)  # goes on with what it began with
    with pytest.raises(so.InvalidArgument, match="precision"):
        so.train(bank, out=tmp_path / "slow", precision="bfloat16", **told)
    small = {**told, "backbone": "timm:test_resnet", "shift": 0}
    so.train(bank, out=tmp_path / "small", **small)
    assert json.loads((tmp_path / "small" / SETTINGS).read_text(encoding="utf-8"))["precision"] == "float32"
