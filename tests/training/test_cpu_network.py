"""Training on a CPU: the precision that it picks, and depthwise convolutions that stay in float32."""

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
from sosampler.training import optim
from sosampler.training.checkpoints import SETTINGS
from sosampler.training.train_sampler import Float32Conv2d, _use_float32_for_strided_depthwise


def gradients(layer: nn.Module, x: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and gradients of input and weight, all in float32."""
    given = x.detach().to(precision, copy=True).requires_grad_()
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        output = layer(given)
    assert output.dtype == precision
    torch.manual_seed(1)
    output.float().mul(torch.randn(output.shape)).sum().backward()
    assert isinstance(layer.weight, Tensor)
    assert given.grad is not None
    assert layer.weight.grad is not None
    assert given.grad.dtype == precision
    return output.detach().float(), given.grad.float(), layer.weight.grad.clone()


@pytest.mark.parametrize(("stride", "kernel", "dilation"), [(2, 3, 1), (3, 5, 1), ((1, 2), 3, 2)])
def test_gradients_are_those_of_the_plain_layer(stride: int | tuple[int, int], kernel: int, dilation: int) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 8, kernel, stride, padding=1, dilation=dilation, groups=8, bias=False)
    changed = copy.deepcopy(plain)
    _use_float32_for_strided_depthwise(changed)
    assert type(changed) is Float32Conv2d
    x = torch.randn(3, 8, 13, 17).to(memory_format=torch.channels_last)
    exact = gradients(plain, x, torch.float32)
    for value, expected in zip(gradients(changed, x, torch.float32), exact, strict=True):
        assert torch.equal(value, expected)
    for value, expected in zip(gradients(changed, x, torch.bfloat16), exact, strict=True):
        assert (value - expected).abs().max() < 0.02 * expected.abs().max()  # bfloat16 has 8 bits


def test_a_sampler_keeps_its_names_and_outputs() -> None:
    sampler = SOSampler(shift=8, input_size=32, num_classes=3)
    changed = copy.deepcopy(sampler)
    _use_float32_for_strided_depthwise(changed)
    assert sum(isinstance(layer, Float32Conv2d) for layer in changed.modules()) == 4
    assert changed.fingerprint() == sampler.fingerprint()
    assert list(changed.state_dict()) == list(sampler.state_dict())
    frames = torch.randn(2, 5, 3, 32, 32)
    scores = [network.eval()(frames).scores.detach() for network in (changed, sampler)]
    assert torch.equal(*scores)
    again = copy.deepcopy(changed)  # as the moving average of the weights is made: no layer is shared
    assert not {id(weight) for weight in again.parameters()} & {id(weight) for weight in changed.parameters()}


def test_precision_is_by_trial_and_stays_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = so.make_reels(
        "procedural", tmp_path / "bank", counts={"train": 4, "dev": 2}, num_classes=2, recipe={"size": 48}
    )
    classifier = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
    bank = so.add_teacher(bank, classifier)
    options: dict[str, Any] = {"recipe": "paper", "device": "cpu", "input_size": 32, "epochs": 2, "batch_size": 2}
    seen: list[torch.dtype] = []
    real = Float32Conv2d.forward

    def watched(layer: Float32Conv2d, x: Tensor) -> Tensor:
        if layer.training:
            seen.append(x.dtype)
        return real(layer, x)

    monkeypatch.setattr(Float32Conv2d, "forward", watched)
    for good, name, precision in ((True, "fast", "bfloat16"), (False, "slow", "float32")):
        monkeypatch.setattr(optim, "cpu_is_fast_in_bfloat16", lambda good=good: good)
        so.train(bank, out=tmp_path / name, **options)
        assert json.loads((tmp_path / name / SETTINGS).read_text(encoding="utf-8"))["precision"] == precision
    assert seen == [torch.bfloat16] * 4 * 2 * 2  # layers, steps an epoch, epochs
    monkeypatch.setattr(optim, "cpu_is_fast_in_bfloat16", lambda: True)
    so.train(bank, out=tmp_path / "slow", **options)  # keeps the precision that it began with
    with pytest.raises(so.InvalidArgument, match="precision"):
        so.train(bank, out=tmp_path / "slow", precision="bfloat16", **options)
    small = {**options, "backbone": "timm:test_resnet", "shift": 0}
    so.train(bank, out=tmp_path / "small", **small)
    assert json.loads((tmp_path / "small" / SETTINGS).read_text(encoding="utf-8"))["precision"] == "float32"
