"""Parts of the frame engine: fused convolutions, inputs, kernels, trials of the chip, benchmarks."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn

import sosampler as so
from engine_ways import bad_way, dying_way, good_way
from interpreted import check_interpreted
from sosampler.bench.frames import agreement, eager_way, lively_sampler, picture_frames, smooth_frames
from sosampler.bench.in_processes import in_turns_of_processes
from sosampler.bench.sampler import REFERENCE, bench_sampler, table
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine import allocator, cpu_bfloat16, triton_kernels
from sosampler.engine.blocks import Blocks, see_blocks
from sosampler.engine.frame_engine import FrameEngine
from sosampler.engine.fuse import fused, pool_fast
from sosampler.engine.fused_conv import FusedConv, set_way
from sosampler.engine.inputs import InputMaker, channels_first, resize_matrices
from sosampler.engine.networks import TorchFeatures
from sosampler.engine.triton_kernels import finish, have_triton
from sosampler.errors import InvalidArgument


class Net(nn.Module):
    """Everything that is fused, and everything that must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.short = nn.Conv2d(8, 8, 1)
        self.twice = nn.Conv2d(8, 8, 1)  # used twice: its batch norm must not go into it
        self.twice_norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 1, 1)  # its output is spread over channels by the addition
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)) + self.short(x))
        x = self.twice_norm(self.twice(x)) + self.twice(x)
        x = F.relu(self.narrow(x) + x)
        found: Tensor = self.head(F.dropout(x, 0.5, self.training).mean((2, 3)))
        return found


def random_statistics(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = torch.randn(layer.num_features)
            layer.running_var = torch.rand(layer.num_features) + 0.5
            nn.init.normal_(layer.weight, 1.0, 0.3)
            nn.init.normal_(layer.bias)
    return net.eval()


@pytest.mark.parametrize("way", ["steps", "onednn"])
def test_fused_networks_say_the_same(way: str) -> None:
    net = random_statistics(Net())
    frames = torch.randn(5, 3, 12, 10)
    made = fused(net, (torch.randn(2, 3, 12, 10),), name="net")
    set_way(made, way)
    norms = [layer for layer in made.modules() if isinstance(layer, nn.BatchNorm2d)]
    convs = {name: layer for name, layer in made.named_modules() if isinstance(layer, FusedConv)}
    assert len(norms) == 1  # the one behind a convolution that is used twice
    assert convs["first"].activation == "relu6"
    assert {convs["second"].activation, convs["short"].activation} == {"relu", None}
    assert "twice" not in convs
    assert convs["narrow"].activation is None
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            assert torch.allclose(made(frames.to(memory_format=layout)), net(frames), atol=1e-5)
            assert torch.allclose(made(frames[:1]), net(frames[:1]), atol=1e-5)


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_runs_as_it_is() -> None:
    net = LooksAtValues().eval()
    made = fused(net, (torch.randn(2, 3, 4, 4),), name="net")
    assert made is not net
    for sign in (1, -1):
        frames = sign * torch.ones(2, 3, 4, 4)
        assert torch.equal(made(frames), net(frames))


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_networks_of_timm(name: str) -> None:
    torch.manual_seed(0)
    classifier = so.create_classifier(f"timm:{name}", num_classes=4)
    net = random_statistics(classifier.net) if name == "resnet18" else classifier.net
    frames = torch.randn(2, 3, 224, 224)
    made = fused(net, (frames,), name=name)
    set_way(made, "onednn")
    with torch.no_grad():
        expected = net(frames)
        assert torch.allclose(made(frames), expected, atol=1e-4 * float(expected.abs().max()))


SIZES = [(72, 100), (100, 72), (64, 64), (33, 47), (50, 64)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_matrices_resize_as_torchvision_does(size: tuple[int, int], interpolation: str) -> None:
    for resize in (40, 64, (48, 56)):
        wanted = Preprocessing(size=(40, 40), resize=resize, interpolation=interpolation)
        frame = smooth_frames(1, 1, size)[0, 0].movedim(-1, 0)  # [3, H, W]
        rows, columns = resize_matrices(wanted, *size)
        found = (rows @ frame.float() @ columns.T).round().clamp(0, 255)
        # In float, as torchvision resizes uint8 on a GPU; on the CPU whole-number weights are a little off.
        expected = wanted.resized(frame[None].float())[0].round().clamp(0, 255)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1  # a half may be rounded either way
        assert (found != expected).float().mean() < 1e-2


@pytest.mark.parametrize("size", SIZES[:2])
def test_inputs_are_those_of_the_preprocessing(size: tuple[int, int]) -> None:
    wanted = Preprocessing(size=(32, 40), resize=48, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    frames = smooth_frames(1, 3, size)[0]
    maker = InputMaker(wanted, torch.device("cpu"), torch.float32)
    expected = wanted(frames.movedim(-1, -3).contiguous())
    for given in (frames.movedim(-1, -3), frames.movedim(-1, -3).contiguous()):
        found = maker(given)
        assert torch.allclose(found, expected, atol=1e-6)
        assert found.is_contiguous(memory_format=torch.channels_last)


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


@pytest.mark.parametrize(("kernel", "padding"), [(7, 3), (3, 1), (5, 2), (3, 0), (4, 1), (6, 2)])
def test_blocks_give_the_same_sums(kernel: int, padding: int) -> None:
    """A convolution of stride 2 over pixels is one of stride 1 over blocks of them."""
    conv = nn.Conv2d(3, 8, kernel, stride=2, padding=padding)
    blocks = Blocks(kernel, padding)
    for size in ((32, 32), (31, 40), (33, 29)):
        pictures = torch.randn(2, 3, *size)
        found = F.conv2d(blocks.of(pictures), blocks.weights(conv.weight), conv.bias)
        torch.testing.assert_close(found, conv(pictures), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [torchvision.models.resnet18, torchvision.models.mobilenet_v2])
def test_networks_that_begin_with_blocks(make: Any) -> None:
    torch.manual_seed(0)
    net = make(num_classes=5).eval()
    example = torch.randn(2, 3, 64, 64)
    fast = fused(net, (example,), name="it")
    pool_fast(fast)
    blocks = see_blocks(fast)
    assert blocks is not None
    assert not [module for module in fast.modules() if isinstance(module, nn.MaxPool2d)]
    pictures = torch.randn(3, 3, 75, 66)
    with torch.no_grad():
        torch.testing.assert_close(fast(blocks.of(pictures)), net(pictures), atol=1e-3, rtol=1e-3)


def test_networks_that_begin_otherwise_stay_as_they_are() -> None:
    for first in (
        nn.Conv2d(3, 4, 3, stride=1),
        nn.Conv2d(3, 4, 3, stride=2, dilation=2),
        nn.Conv2d(3, 3, 3, 2, groups=3),
    ):
        net = fused(nn.Sequential(first, nn.ReLU()), (torch.randn(2, 3, 16, 16),), name="it")
        state = {name: value.clone() for name, value in net.state_dict().items()}
        assert see_blocks(net) is None
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert see_blocks(nn.Conv2d(3, 4, 7, stride=2, padding=3)) is None  # could not be traced


def test_one_of_two_added_convolutions_adds_both_biases() -> None:
    """The projection beside a residual block has no pass of its own."""
    net = torchvision.models.resnet18(num_classes=5).eval()
    fast = fused(net, (torch.randn(2, 3, 64, 64),), name="it")
    without = [name for name, module in fast.named_modules() if isinstance(module, FusedConv) and module.bias is None]
    assert len(without) == 3  # one of the pair at the beginning of each of layers 2 to 4
    pictures = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(pictures), net(pictures), atol=1e-3, rtol=1e-3)


class Residuals(nn.Module):
    """Sums with what is read no more, and with what is: later, through a view, or by the convolution itself."""

    def __init__(self) -> None:
        super().__init__()
        names = ("first", "dead", "alive", "viewed", "itself", "pooled")
        self.convs = nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in names})
        self.inner = nn.ModuleDict({name: nn.Conv2d(4, 4, 1) for name in names})

    def added(self, name: str, x: Tensor) -> Tensor:
        return F.relu(self.convs[name](F.relu(self.inner[name](x))) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs["first"](x)
        kept = self.added("dead", x)
        x = self.added("alive", kept)  # kept is read at the end
        view = x.flatten(1)  # the same memory, read at the end
        x = self.added("viewed", x)
        x = F.relu(self.convs["itself"](x) + x)
        x = self.added("pooled", F.max_pool2d(x, 1))  # not of a convolution
        return x.mean((2, 3)) + view.mean(1, keepdim=True) + kept.mean((2, 3))


def test_sums_take_the_memory_of_what_nobody_reads_again() -> None:
    torch.manual_seed(0)
    net = Residuals().eval()
    x = torch.randn(3, 4, 6, 5).to(memory_format=torch.channels_last)
    fast = fused(net, (x,), name="it")
    marked = {name for name, module in fast.named_modules() if isinstance(module, FusedConv) and module.reuses}
    assert marked == {"convs.dead"}
    before = x.clone()
    with torch.no_grad():
        expected = net(x)
        set_way(fast, "onednn")
        for _ in range(2):
            torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(fast(x.contiguous()), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shift", [0, 8])
def test_sums_of_a_sampler_take_the_memory_of_their_block(shift: int) -> None:
    """The shift is called as a whole, so that it is known to give new memory."""
    net = TorchFeatures(lively_sampler(input_size=32, shift=shift), torch.device("cpu"), torch.float32, "onednn").net
    assert sum(isinstance(layer, FusedConv) and layer.reuses for layer in net.modules()) == 10


@pytest.mark.parametrize("activation", [None, "relu", "relu6"])
@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_by_onednn(activation: str | None, reuses: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = FusedConv(nn.Conv2d(4, 8, 1), activation).to(dtype)
    x, other = (
        (5 * torch.randn(2, channels, 5, 6)).to(dtype, memory_format=torch.channels_last) for channels in (4, 8)
    )
    expected = conv(x, other).float()
    set_way(conv, "onednn")
    conv.reuses = reuses
    found = conv(x, other)
    assert (found.data_ptr() == other.data_ptr()) == reuses
    torch.testing.assert_close(found.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0.02)


KERNEL = """
import torch
from sosampler.engine import triton_kernels as kernels
torch.manual_seed(0)
for activation in (None, "relu", "relu6"):
    for bias in (None, torch.randn(7)):
        for other in (None, torch.randn(3, 7, 5, 6)):
            x = (4 * torch.randn(3, 7, 5, 6)).to(memory_format=torch.channels_last)
            expected = kernels._by_steps(x.clone(), bias, other, activation)
            found = kernels.finish(x, bias, other, activation)
            assert found.data_ptr() == x.data_ptr()
            assert torch.allclose(found, expected, atol=1e-6), (activation, bias is None, other is None)
for before, after in ((12, 16), (13, 16), (32, 32), (1, 8)):
    levels = torch.randint(0, 256, (3, 5, before), dtype=torch.uint8)
    for dtype in (torch.float16, torch.float32):
        found = kernels.centred(levels, 128, after, dtype)
        assert torch.equal(found[..., :before], levels.to(dtype) - 128) and not found[..., before:].any(), before
levels = (300 * torch.rand(3, 5, 12) - 20).half()
levels[0, :, :6] = torch.arange(30).view(5, 6) + 0.5  # halves go to the even neighbour
mean, scale = torch.rand(12), torch.rand(12)
for dtype in (torch.float32, torch.float16):
    found = kernels.normalise(levels - 100, mean, scale, dtype, offset=100)
    whole = ((levels - 100).float() + 100).round().clamp(0, 255)
    assert found.dtype == dtype and torch.allclose(found.float(), (whole - mean) * scale, rtol=2e-3), dtype
from sosampler.engine.blocks import Blocks
for kernel, padding in ((7, 3), (3, 1), (5, 2), (4, 1)):
    for height, width in ((12, 10), (11, 13)):
        levels = (300 * torch.rand(2, height, 3 * width) - 150).half()
        mean, scale = torch.rand(3).repeat(width), torch.rand(3).repeat(width)
        blocks = Blocks(kernel, padding)
        found = kernels.normalise_blocks(levels, mean, scale, torch.float32, blocks, offset=128)
        whole = kernels.normalise(levels, mean, scale, torch.float32, offset=128)
        expected = blocks.of(whole.unflatten(2, (-1, 3)).permute(0, 3, 1, 2))
        assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5), (kernel, height)
x = torch.randn(2, 5, 9, 12).to(memory_format=torch.channels_last)
for numbers in ((3, 2, 1), (2, 2, 0), (3, 1, 1)):
    assert torch.equal(kernels.max_pool(x, *numbers), torch.nn.functional.max_pool2d(x, *numbers)), numbers
x[0, 3, 4, 4] = float("nan")
assert kernels.max_pool(x, 3, 2, 1).isnan().sum() == torch.nn.functional.max_pool2d(x, 3, 2, 1).isnan().sum() > 0
print("same")
"""


@pytest.mark.skipif(not have_triton(), reason="needs triton")
def test_the_kernel_by_triton_s_interpreter() -> None:
    """Without a GPU: the same program, line by line in numpy."""
    check_interpreted(KERNEL)


class NoCompiler:
    """A kernel on a machine without gcc."""

    def __getitem__(self, grid: Any) -> Any:
        def launched(*arguments: Any, **more: Any) -> None:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

        return launched


def test_a_machine_without_a_compiler_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_kernels, "_finish", NoCompiler())
    triton_kernels._can_be_compiled.cache_clear()
    try:
        assert not triton_kernels._can_be_compiled(torch.device("cpu"))
        assert not triton_kernels._can_be_compiled(torch.device("cpu"))
    finally:
        triton_kernels._can_be_compiled.cache_clear()
    assert caplog.text.count("Install gcc") == 1  # once, not for every layer


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize(("precision", "share"), [(torch.float16, 0.05), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("height", "width"), [(72, 100), (96, 128)])
def test_inputs_by_matrices(planes: bool, precision: torch.dtype, share: float, height: int, width: int) -> None:
    """What a GPU computes, computed on the CPU: a network in float32 sees hardly a grey level that differs.

    Where sizes are halved many values lie in the middle between two levels.
    """
    wanted = Preprocessing(size=(32, 40), resize=48, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.4))
    frames = smooth_frames(1, 3, (height, width))[0].movedim(-1, -3)
    maker = InputMaker(wanted, torch.device("cpu"), precision)
    small = maker.resized_by_matrices(frames.contiguous() if planes else frames)
    found = maker.normalised(small)
    assert found.dtype == precision
    expected = wanted.normalised(wanted.resized(frames.float()).round().clamp(0, 255))
    level = 1 / (255 * torch.tensor(wanted.std)).view(3, 1, 1)
    assert ((found - expected).abs() / level).max() < 1.5  # one grey level, of two ways to round
    assert ((found - expected).abs() / level > 0.5).float().mean() < share
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_planes_are_finished_step_by_step() -> None:
    x, bias, other = torch.randn(2, 3, 4, 5), torch.randn(3), torch.randn(2, 3, 4, 5)
    expected = F.relu(x + bias.view(1, 3, 1, 1) + other)
    assert torch.allclose(finish(x, bias, other, "relu"), expected)


@pytest.mark.parametrize("shift", [0, 8])
def test_long_videos_go_in_parts(shift: int) -> None:
    """More candidates than go at once: the same features."""
    sampler = lively_sampler(input_size=32, shift=shift)
    frames = smooth_frames(2, 21, (32, 32)).movedim(-1, -3)
    features = TorchFeatures(sampler, torch.device("cpu"), torch.float32, "onednn")(frames.flatten(0, 1), 21)
    expected = sampler.look(frames).features.flatten(0, 1)
    assert torch.allclose(features, expected, atol=1e-4 * float(expected.abs().max()))


def test_memory_is_kept_where_glibc_is(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator.keep_memory.cache_clear()
    monkeypatch.setenv(allocator.KEEP, "0")
    assert allocator.keep_memory() is False
    allocator.keep_memory.cache_clear()
    monkeypatch.delenv(allocator.KEEP)
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert allocator.keep_memory() is False
    allocator.keep_memory.cache_clear()


class Trial:
    """Stands in for a child process that tries bfloat16."""

    def __init__(self, returncode: int, stdout: str = "") -> None:
        self.returncode, self.stdout = returncode, stdout


def forget_trials() -> None:
    for asked in (cpu_bfloat16.claimed_gain, cpu_bfloat16.cpu_is_good_at_bfloat16):
        asked.cache_clear()
    cpu_bfloat16.bfloat16_ends_the_process.cache_clear()


TRIALS = [
    (Trial(-4), False),
    (Trial(0, "1.1\n"), False),
    (Trial(0, "2.9\n"), True),
    (Trial(0, "onednn_verbose,v1,primitive,exec,cpu,reorder,0.05\n2.9\n"), True),
]


@pytest.mark.parametrize(("trial", "good"), TRIALS)
def test_bfloat16_on_the_cpu_is_tried(monkeypatch: pytest.MonkeyPatch, trial: Trial, good: bool, tmp_path: Any) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags: avx512f amx_bf16\n")
    monkeypatch.delenv(cpu_bfloat16.ASKED, raising=False)
    monkeypatch.setattr(cpu_bfloat16, "Path", lambda _: flags)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: trial)
    try:
        forget_trials()
        assert cpu_bfloat16.cpu_is_good_at_bfloat16() is good
        assert cpu_bfloat16.bfloat16_ends_the_process() is (trial.returncode != 0)
        if trial.returncode:
            with pytest.raises(InvalidArgument, match="ends the process"):
                FrameEngine(lively_sampler(input_size=32), num_frames=2, precision="bfloat16")
        flags.write_text("flags: avx2\n")
        forget_trials()
        assert cpu_bfloat16.cpu_is_good_at_bfloat16() is False
        assert cpu_bfloat16.bfloat16_ends_the_process() is False
        monkeypatch.setenv(cpu_bfloat16.ASKED, "1")
        forget_trials()
        assert cpu_bfloat16.cpu_is_good_at_bfloat16() is True
    finally:
        forget_trials()


# ---- benchmarks


def test_ways_in_processes() -> None:
    ways = {"good": (good_way, 3), "bad": (bad_way, 0), "dying": (dying_way, 0)}
    seconds, facts, failed = in_turns_of_processes(ways, rounds=2, repeats=2)
    assert list(seconds) == ["good"]
    assert len(seconds["good"]) == 2
    assert facts == {"good": {"number": 3}}
    assert failed == {"bad": "ValueError: cannot be built", "dying": "its process ended with code 7"}


def test_the_reference_is_sampler_and_classifier() -> None:
    """At sizes where no resize is left to do, the usual code and the plain objects say the same."""
    sampler = lively_sampler(input_size=64)
    torch.manual_seed(0)
    classifier = so.create_classifier("timm:resnet18", num_classes=3, input_size=64)
    classifier.preprocessing = replace(classifier.preprocessing, resize=64)
    frames = smooth_frames(2, 5, (64, 64)).movedim(-1, -3).contiguous()
    chosen = sampler.choose(frames, 2)
    expected = classifier.clip_probs(torch.stack([frames[video, chosen[video]] for video in range(2)]))
    assert torch.allclose(eager_way(sampler, classifier, 2)(frames), expected, atol=1e-5)


def test_pictures_as_frames(tmp_path: Any) -> None:
    for number in range(3):
        Image.fromarray(np.full((9, 7, 3), 50 * number, np.uint8)).save(tmp_path / f"{number}.png")
    frames = picture_frames(tmp_path, 2, 4, (16, 20))
    assert frames.shape == (2, 4, 16, 20, 3)
    assert sorted(frames.flatten().unique().tolist()) == [0, 50, 100]
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidArgument, match="no pictures"):
        picture_frames(tmp_path / "none", 1, 1, (4, 4))


def test_agreement_counts_videos_and_frames() -> None:
    sampler = lively_sampler(input_size=32)
    frames = smooth_frames(4, 6, (32, 32))

    class Engine:
        def run(self, given: Tensor) -> Any:
            chosen = sampler.choose(given.movedim(-1, -3), 2)
            chosen[0] = torch.tensor([5, 5])  # one of each batch is wrong
            return type("Result", (), {"chosen": chosen})

    chosen = sampler.choose(frames.movedim(-1, -3), 2)
    shared = [1.0, 1.0] + [float((chosen[wrong] == 5).any()) / 2 for wrong in (0, 2)]
    assert agreement(Engine(), sampler, frames, 2, batch=2) == (0.5, sum(shared) / 4)
    assert agreement(FrameEngine(sampler, num_frames=2, precision="float32"), sampler, frames, 2) == (1.0, 1.0)


@pytest.mark.slow
def test_bench_sampler() -> None:
    ways = ["engine", "engine, int8"]
    result = bench_sampler(classifier="timm:test_resnet", batches=(1,), size=(64, 80), rounds=1, videos=2, ways=ways)
    (row,) = result["batches"]
    assert set(row["videos_per_second"]) == {REFERENCE, *ways}
    assert row["failed"] == {}
    assert [row["facts"][way]["same_frames_chosen"] for way in ways] == [1.0, 1.0]
    assert [row["facts"][way]["frames_in_common"] for way in ways] == [1.0, 1.0]
    assert "int8" in row["facts"]["engine, int8"]["engine"]
    assert "videos/s" in table(result)
