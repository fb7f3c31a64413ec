"""Batch norm with its activation, and the shift, by kernels of our own: the same numbers as torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.engine.kernels.triton_kernels import have_triton
from sosampler.samplers.backbones import find_neighbours, shift_channels
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.fused_norm import FusedNorm, fuse_norms
from sosampler.training.gpu_network import prepare_network
from sosampler.training.shift_kernel import fast_shift
from tests.interpreted import check_interpreted

# Channels that are few, that are no multiple of 16 and that leave a rest; rows of one program and of several.
INTERPRETED = """
from tests.training.test_fused_norm import check_same, check_same_shift
import torch
for channels, frames, side in ((24, 5, 7), (8, 3, 4), (144, 4, 5), (40, 3, 3), (1280, 6, 1), (16, 9, 12)):
    for relu6 in (True, False):
        check_same(channels, frames, side, relu6, "cpu", torch.float32)
from sosampler.training import norm_kernels
norm_kernels._PROGRAMS = 3  # then each takes several tiles
check_same(16, 9, 40, True, "cpu", torch.float32)
for dtype in (torch.bfloat16, torch.float16):
    check_same(24, 5, 8, True, "cpu", dtype)
for frames, candidates, mask in ((10, 5, None), (7, 7, None), (1, 1, None), (6, 3, [[1, 1, 0], [1, 0, 1]])):
    check_same_shift(frames, candidates, mask, "cpu")
print("same")
"""


def check_same(channels: int, frames: int, side: int, relu6: bool, device: str, dtype: torch.dtype) -> None:
    """Output, gradients and running statistics, of values far from zero; torch computes them in float64."""
    torch.manual_seed(channels)
    plain = nn.BatchNorm2d(channels, momentum=0.2).to(device)
    nn.init.uniform_(plain.weight, 0.5, 3)
    nn.init.uniform_(plain.bias, -1, 3)
    ours = FusedNorm(copy.deepcopy(plain), relu6=relu6)
    plain.double()
    x = (3 * torch.randn(frames, channels, side, side) + 70).to(device, dtype, memory_format=torch.channels_last)
    given = x.clone(memory_format=torch.preserve_format).requires_grad_()
    exact = x.double().requires_grad_()
    found, before = ours(given), plain(exact)
    expected = F.relu6(before) if relu6 else before
    assert type(found.grad_fn).__name__ == "_NormBackward"
    assert found.is_contiguous(memory_format=torch.channels_last)
    slopes = torch.randn_like(x)
    if relu6:  # at its corners rounding decides
        slopes[(before.abs() < 1e-3) | ((before - 6).abs() < 1e-3)] = 0
    found.backward(slopes)
    expected.backward(slopes.double())
    for name, one, other in (
        ("output", found, expected),
        ("gradient", given.grad, exact.grad),
        ("weight", ours.weight.grad, plain.weight.grad),
        ("bias", ours.bias.grad, plain.bias.grad),
        ("mean", ours.running_mean, plain.running_mean),
        ("variance", ours.running_var, plain.running_var),
    ):
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        gap = float((one.double() - other).abs().max() / other.abs().max())
        assert gap < (1e-4 if one.dtype == torch.float32 else 1e-2), f"{name}: {gap}"
    assert ours.num_batches_tracked == 1


def check_same_shift(frames: int, candidates: int, mask: Any, device: str) -> None:
    """Output and gradient of the temporal shift."""
    real = None if mask is None else torch.tensor(mask, dtype=torch.bool, device=device)
    x = torch.randn(frames, 10, 4, 3).to(device, memory_format=torch.channels_last)
    neighbours = find_neighbours(x, candidates, real)
    given, expected_given = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    found, expected = fast_shift(given, 3, neighbours), shift_channels(expected_given, 3, neighbours)
    assert type(found.grad_fn).__name__ == "_ShiftBackward"
    assert torch.equal(found, expected)
    slopes = torch.randn_like(expected)
    found.backward(slopes.contiguous())  # planes are taken too
    expected.backward(slopes)
    assert given.grad is not None
    assert expected_given.grad is not None
    assert torch.equal(given.grad, expected_given.grad)


@pytest.mark.skipif(not have_triton(), reason="needs triton")
def test_the_same_by_triton_s_interpreter() -> None:
    """Without a GPU: the same kernels, line by line in numpy."""
    check_interpreted(INTERPRETED)


def test_a_sampler_keeps_its_names_and_answers() -> None:
    sampler = SOSampler(shift=8, input_size=32, num_classes=3).to(memory_format=torch.channels_last)
    for layer in sampler.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 2)
            nn.init.normal_(layer.bias)
    fused = copy.deepcopy(sampler)
    prepare_network(fused)
    assert sum(isinstance(layer, FusedNorm) for layer in fused.modules()) == 52
    assert not any(isinstance(layer, nn.ReLU6) for layer in fused.modules())
    assert fused.fingerprint() == sampler.fingerprint()
    assert list(fused.state_dict()) == list(sampler.state_dict())
    frames = torch.randn(2, 5, 3, 32, 32)
    for network in (sampler.eval(), fused.eval()):
        network.requires_grad_(False)
    assert torch.allclose(fused(frames).scores, sampler(frames).scores, atol=1e-5)
    for network in (sampler.train(), fused.train()):
        network.requires_grad_(True)(frames).scores.sum().backward()
    for (name, one), other in zip(fused.named_parameters(), sampler.parameters(), strict=True):
        if one.grad is not None:
            assert other.grad is not None
            assert torch.allclose(one.grad, other.grad, atol=1e-4 * float(other.grad.abs().max())), name
    for one, other in zip(fused.buffers(), sampler.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


class Others(nn.Module):
    """Batch norms that cannot be replaced, or have no ReLU6 right behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.cumulative = nn.BatchNorm2d(4, momentum=None)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.forgetful = nn.BatchNorm2d(4, track_running_stats=False)
        self.norm, self.act = nn.BatchNorm2d(4), nn.ReLU6()  # in which order they are called is not known
        self.relu = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        x = self.forgetful(self.plain(self.cumulative(x)))
        return self.relu(self.norm(self.act(x)))


def test_one_value_a_channel_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="more than 1 value"):
        FusedNorm(nn.BatchNorm2d(4), relu6=True)(torch.zeros(1, 4, 1, 1))


def test_what_is_left_alone() -> None:
    net = Others()
    other = copy.deepcopy(net)
    assert fuse_norms(net) == 2
    assert isinstance(net.act, nn.ReLU6)
    assert isinstance(net.relu[1], nn.ReLU)
    x = 5 * torch.randn(3, 4, 6, 6)
    assert torch.equal(net(x), other(x))
