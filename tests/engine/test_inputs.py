"""A network's input from decoded frames, and the kernels around convolutions: the same numbers as torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.speed.frames import lively_sampler, smooth_frames
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.kernels import triton_kernels
from sosampler.engine.kernels.triton_kernels import finish_conv
from sosampler.engine.networks import InputMaker, TorchFeatures, channels_first, resize_matrices
from sosampler.errors import InvalidArgument
from tests.interpreted import check_interpreted

SIZES = [(72, 100), (100, 72), (64, 64), (33, 47), (50, 64)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_matrices_resize_as_torchvision_does(size: tuple[int, int], interpolation: str) -> None:
    for resize in (40, 64, (48, 56)):
        wanted = Preprocessing(size=(40, 40), resize=resize, interpolation=interpolation)
        frame = smooth_frames(1, 1, size)[0, 0].movedim(-1, 0)  # [3, H, W]
        rows, columns = resize_matrices(wanted, *size)
        output = (rows @ frame.float() @ columns.T).round().clamp(0, 255)
        # In float, as torchvision resizes uint8 on a GPU; on the CPU integer weights differ a little.
        expected = wanted.resized(frame[None].float())[0].round().clamp(0, 255)
        assert output.shape == expected.shape
        assert (output - expected).abs().max() <= 1  # a half may be rounded either way
        assert (output != expected).float().mean() < 1e-2


@pytest.mark.parametrize("size", SIZES[:2])
def test_inputs_agree_with_the_preprocessing(size: tuple[int, int]) -> None:
    wanted = Preprocessing(size=(32, 40), resize=48, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    frames = smooth_frames(1, 3, size)[0]
    maker = InputMaker(wanted, torch.device("cpu"), torch.float32)
    expected = wanted(frames.movedim(-1, -3).contiguous())
    for given in (frames.movedim(-1, -3), frames.movedim(-1, -3).contiguous()):
        output = maker(given)
        assert torch.allclose(output, expected, atol=1e-6)
        assert output.is_contiguous(memory_format=torch.channels_last)


def test_layouts() -> None:
    pixels = np.arange(2 * 3 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 3, 4, 5, 3)
    expected = torch.from_numpy(pixels).permute(0, 1, 4, 2, 3)
    for given in (pixels, torch.from_numpy(pixels), expected, expected.contiguous(), pixels[:, ::-1][:, ::-1].copy()):
        assert torch.equal(channels_first(given), expected)
    assert channels_first(pixels).data_ptr() == pixels.ctypes.data  # not copied
    assert torch.equal(channels_first(pixels[::-1]), expected.flip(0))
    for wrong in (pixels[0], pixels.astype(np.int64), torch.from_numpy(pixels).float(), [1, 2]):
        with pytest.raises(InvalidArgument):
            channels_first(wrong)


KERNEL = """
import torch
from sosampler.engine.kernels import triton_kernels as kernels
torch.manual_seed(0)
for activation in (None, "relu", "relu6"):
    for bias in (None, torch.randn(7)):
        for other in (None, torch.randn(3, 7, 5, 6)):
            x = (4 * torch.randn(3, 7, 5, 6)).to(memory_format=torch.channels_last)
            expected = kernels.finish_conv_eager(x.clone(), bias, other, activation)
            output = kernels.finish_conv(x, bias, other, activation)
            assert output.data_ptr() == x.data_ptr()
            assert torch.allclose(output, expected, atol=1e-6), (activation, bias is None, other is None)
for before, after in ((12, 16), (13, 16), (32, 32), (1, 8)):
    pixels = torch.randint(0, 256, (3, 5, before), dtype=torch.uint8)
    for dtype in (torch.float16, torch.float32):
        output = kernels.centre_pixels(pixels, 128, after, dtype)
        assert torch.equal(output[..., :before], pixels.to(dtype) - 128) and not output[..., before:].any(), before
pixels = (300 * torch.rand(3, 5, 12) - 20).half()
pixels[0, :, :6] = torch.arange(30).view(5, 6) + 0.5  # halves go to the even neighbour
mean, scale = torch.rand(12), torch.rand(12)
for dtype in (torch.float32, torch.float16):
    output = kernels.normalise(pixels - 100, mean, scale, dtype, offset=100)
    rounded = ((pixels - 100).float() + 100).round().clamp(0, 255)
    assert output.dtype == dtype and torch.allclose(output.float(), (rounded - mean) * scale, rtol=2e-3), dtype
from sosampler.engine.kernels.blocks import SpaceToDepth
for kernel, padding in ((7, 3), (3, 1), (5, 2), (4, 1)):
    for height, width in ((12, 10), (11, 13)):
        pixels = (300 * torch.rand(2, height, 3 * width) - 150).half()
        mean, scale = torch.rand(3).repeat(width), torch.rand(3).repeat(width)
        blocks = SpaceToDepth(kernel, padding)
        output = kernels.normalise_to_blocks(pixels, mean, scale, torch.float32, blocks, offset=128)
        rounded = kernels.normalise(pixels, mean, scale, torch.float32, offset=128)
        expected = blocks.rearrange(rounded.unflatten(2, (-1, 3)).permute(0, 3, 1, 2))
        assert output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-5), (kernel, height)
x = torch.randn(2, 5, 9, 12).to(memory_format=torch.channels_last)
for numbers in ((3, 2, 1), (2, 2, 0), (3, 1, 1)):
    assert torch.equal(kernels.max_pool(x, *numbers), torch.nn.functional.max_pool2d(x, *numbers)), numbers
x[0, 3, 4, 4] = float("nan")
assert kernels.max_pool(x, 3, 2, 1).isnan().sum() == torch.nn.functional.max_pool2d(x, 3, 2, 1).isnan().sum() > 0
print("same")
"""


@pytest.mark.skipif(triton_kernels.triton is None, reason="needs triton")
def test_kernels_in_triton_s_interpreter() -> None:
    """Without a GPU: the same program, line by line in numpy."""
    check_interpreted(KERNEL)


class NoCompiler:
    """A kernel on a machine without gcc."""

    def __getitem__(self, grid: Any) -> Any:
        def launched(*arguments: Any, **more: Any) -> None:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

        return launched


def test_a_missing_compiler_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton_kernels, "_finish", NoCompiler(), raising=False)
    triton_kernels._can_compile.cache_clear()
    try:
        assert not triton_kernels._can_compile(torch.device("cpu"))
        assert not triton_kernels._can_compile(torch.device("cpu"))
    finally:
        triton_kernels._can_compile.cache_clear()
    assert caplog.text.count("Install gcc") == 1  # once, not for every layer


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize(("precision", "share"), [(torch.float16, 0.05), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("height", "width"), [(72, 100), (96, 128)])
def test_inputs_by_matrices(planes: bool, precision: torch.dtype, share: float, height: int, width: int) -> None:
    """The GPU's resize, computed on the CPU: in float32 hardly a pixel value differs.

    Where sizes are halved many values lie halfway between two integers.
    """
    wanted = Preprocessing(size=(32, 40), resize=48, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    frames = smooth_frames(1, 3, (height, width))[0].movedim(-1, -3)
    maker = InputMaker(wanted, torch.device("cpu"), precision)
    small = maker.resized_by_matrices(frames.contiguous() if planes else frames)
    output = maker.normalised(small)
    assert output.dtype == precision
    expected = wanted.normalised(wanted.resized(frames.float()).round().clamp(0, 255))
    level = 1 / (255 * torch.tensor(wanted.std)).view(3, 1, 1)
    assert ((output - expected).abs() / level).max() < 1.5  # one pixel value, where a half is rounded the other way
    assert ((output - expected).abs() / level > 0.5).float().mean() < share
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_planes_use_torch_operators() -> None:
    x, bias, other = torch.randn(2, 3, 4, 5), torch.randn(3), torch.randn(2, 3, 4, 5)
    expected = F.relu(x + bias.view(1, 3, 1, 1) + other)
    assert torch.allclose(finish_conv(x, bias, other, "relu"), expected)


@pytest.mark.parametrize("shift", [0, 8])
def test_long_videos_are_split(shift: int) -> None:
    """More candidates than one forward pass takes: the same features."""
    sampler = lively_sampler(input_size=32, shift=shift)
    frames = smooth_frames(2, 21, (32, 32)).movedim(-1, -3)
    features = TorchFeatures(sampler, torch.device("cpu"), torch.float32, "onednn")(frames.flatten(0, 1), 21)
    expected = sampler.look(frames).features.flatten(0, 1)
    assert torch.allclose(features, expected, atol=1e-4 * float(expected.abs().max()))
