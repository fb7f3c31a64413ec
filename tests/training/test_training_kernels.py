"""Depthwise convolutions, the first convolution and crops by kernels of our own: the same numbers as torch's."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.kernels.blocks import blocks_for
from sosampler.engine.kernels.triton_kernels import have_triton
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import depthwise
from sosampler.training.crop_kernel import normalised_crops
from sosampler.training.depthwise import FastDepthwise
from sosampler.training.gpu_network import prepare_network
from sosampler.training.sampler_augment import Normaliser, cut, draw_cuts
from sosampler.training.stem import FastStem
from tests.interpreted import check_interpreted

# Channels and pixels that leave a rest, sides that are odd or one; programs of one tile and of several.
INTERPRETED = """
from tests.training.test_training_kernels import *
shapes = ((3, 24, 7, 5), (2, 40, 8, 8), (2, 8, 1, 1), (5, 33, 4, 4), (3, 16, 6, 9), (2, 16, 1, 6), (2, 16, 6, 1))
for programs in (528, 2):
    depthwise._PROGRAMS = programs
    for shape in shapes:
        for stride in (1, 2):
            check_same_depthwise(shape, stride, "cpu", torch.float32)
for dtype in (torch.bfloat16, torch.float16):
    for stride in (1, 2):
        check_same_depthwise((3, 24, 7, 5), stride, "cpu", dtype)
for kernel, padding, side in ((3, 1, 32), (7, 3, 30), (3, 1, 31), (4, 0, 32)):
    check_same_stem(kernel, padding, side, "cpu")
check_autocast("cpu")
for times in (1, 2, 3):
    check_same_crops(times, "cpu")
print("same")
"""


def gap(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, as a share of the largest value."""
    assert one is not None
    assert other is not None
    assert one.shape == other.shape
    return float((one.detach().double() - other.detach()).abs().max() / other.detach().abs().max())


def check_same_depthwise(shape: tuple[int, ...], stride: int, device: str, dtype: torch.dtype) -> None:
    """Output and gradients; torch computes them in float64."""
    torch.manual_seed(stride)
    channels = shape[1]
    plain = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False, device=device)
    assert depthwise.is_known(plain)
    ours = FastDepthwise(copy.deepcopy(plain))
    plain.weight.data = plain.weight.data.to(dtype).double()  # as the convolution takes them
    x = torch.randn(shape).to(device, dtype, memory_format=torch.channels_last)
    given, exact = x.clone(memory_format=torch.preserve_format).requires_grad_(), x.double().requires_grad_()
    found, expected = ours(given), plain(exact)
    assert type(found.grad_fn).__name__ == "_DepthwiseBackward"
    slopes = torch.randn_like(found)
    found.backward(slopes.contiguous())  # planes are taken too
    expected.backward(slopes.double())
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    assert gap(found, expected) < allowed
    assert gap(given.grad, exact.grad) < allowed
    assert gap(ours.weight.grad, plain.weight.grad) < allowed
    assert ours.weight.grad is not None
    assert ours.weight.grad.dtype == torch.float32


def check_autocast(device: str) -> None:
    """Inputs in float32 too come out in half precision, and the weights' gradients in float32; no second derivative."""
    plain = nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False, device=device).to(memory_format=torch.channels_last)
    stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False, device=device)
    blocks = blocks_for(stem)
    assert blocks is not None
    for conv, fast in ((plain, FastDepthwise(plain)), (stem, FastStem(stem, blocks))):
        x = torch.randn(2, conv.in_channels, 7, 7, device=device).to(memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16):
            found, expected = fast(x), conv(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert gap(found, expected.double()) < 2e-2
        found.sum().backward()
        assert fast.weight.grad is not None
        assert fast.weight.grad.dtype == torch.float32
        assert fast.weight.grad.stride() == fast.weight.stride()  # else torch copies it for several processes
    x = torch.randn(2, 8, 7, 7, device=device).to(memory_format=torch.channels_last).requires_grad_()
    (slope,) = torch.autograd.grad(FastDepthwise(plain)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def check_same_stem(kernel: int, padding: int, side: int, device: str) -> None:
    """Output and gradient of the weights."""
    torch.manual_seed(kernel)
    plain = nn.Conv2d(3, 8, kernel, 2, padding, bias=False, device=device)
    blocks = blocks_for(plain)
    assert blocks is not None
    ours = FastStem(copy.deepcopy(plain), blocks)
    plain.double()
    x = torch.randn(3, 3, side, side + 4).to(device, memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found, expected = ours(x), plain(x.double())
        slopes = torch.randn_like(found)
        found.backward(slopes)
        expected.backward(slopes.double())
    assert gap(found, expected) < 1e-5
    assert gap(ours.weight.grad, plain.weight.grad) < 1e-5


def check_same_crops(times: int, device: str) -> None:
    """Of pictures of several sizes on one canvas, some mirrored."""
    rng = np.random.default_rng(times)
    sizes = np.repeat(np.array([[40, 50], [44, 37], [20, 60], [44, 60], [1, 1]]), 2, axis=0)
    frames = torch.from_numpy(rng.integers(0, 256, (10, 44, 60, 3), dtype=np.uint8)).to(device)
    cuts = draw_cuts(rng, sizes, scale=(0.2, 1.0), ratio=(0.75, 1.33), flip=True)
    assert 0 < cuts.flips.sum() < len(cuts.flips)
    normaliser = Normaliser(Preprocessing(size=(32, 28), resize=32), frames.device)
    expected = normaliser(cut(frames, cuts, sizes, (32, 28), times))
    found = normalised_crops(frames, cuts, sizes, (32, 28), times, normaliser, torch.float32)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, check_stride=False)
    half = normalised_crops(frames, cuts, sizes, (32, 28), times, normaliser, torch.bfloat16)
    torch.testing.assert_close(half.float(), found, atol=0, rtol=2**-7)  # the interpreter cuts off instead of rounding


@pytest.mark.skipif(not have_triton(), reason="needs triton")
def test_the_same_by_triton_s_interpreter() -> None:
    """Without a GPU: the same kernels, line by line in numpy."""
    check_interpreted(INTERPRETED)


def test_training_without_triton() -> None:
    """Builds of torch for CPUs have none: torch's operators do it all."""
    code = """
import sys
sys.modules["triton"] = None
import torch
import sosampler.training.train_sampler
from sosampler.samplers import SOSampler
from sosampler.training.gpu_network import prepare_network
sampler = SOSampler(shift=8, input_size=32).train()
prepare_network(sampler)
sampler(torch.randn(2, 4, 3, 32, 32)).scores.sum().backward()
print("trained")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "trained", done.stderr[-2000:]


def test_a_prepared_network_has_them_and_nothing_is_drawn() -> None:
    sampler = SOSampler(shift=8, input_size=32)
    state = torch.get_rng_state()
    prepare_network(sampler)
    assert torch.equal(torch.get_rng_state(), state)
    kinds = [type(layer) for layer in sampler.modules()]
    assert kinds.count(FastDepthwise) == 17
    assert kinds.count(FastStem) == 1


class Convolutions(nn.Module):
    """Depthwise and first convolutions of kinds that are not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(
            [
                nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),
                nn.Conv2d(8, 8, 3, padding=1, groups=8),
                nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False),
                nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
                nn.Conv2d(8, 8, 3, stride=3, padding=1, groups=8, bias=False),
                nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False),
                nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, padding_mode="reflect"),
                nn.Conv2d(3, 8, 3, padding=1, bias=False),
                nn.Conv2d(3, 8, 3, stride=2, padding="valid", bias=False),
                nn.Conv2d(3, 8, 3, stride=2, padding=1),
                nn.Conv2d(3, 3, 3, stride=2, padding=1, groups=3, bias=False, padding_mode="circular"),
            ]
        )


def test_what_is_left_alone() -> None:
    net = Convolutions()
    before = list(net.others)
    prepare_network(net)  # type: ignore[arg-type]
    assert all(one is other for one, other in zip(net.others, before, strict=True))


def test_evaluation_and_the_cpu_are_torch_s_own() -> None:
    plain = nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False)
    stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
    blocks = blocks_for(stem)
    assert blocks is not None
    for conv, fast in ((plain, FastDepthwise(plain)), (stem, FastStem(stem, blocks))):
        x = torch.randn(2, conv.in_channels, 7, 7)
        for mode in (True, False):
            assert torch.equal(fast.train(mode)(x), conv(x))
        assert fast.weight is conv.weight
