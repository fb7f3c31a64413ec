"""The engine's torch networks: fusing, space-to-depth and in-place sums do not change outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import sosampler as so
from benchmarks.speed.frames import lively_sampler
from sosampler.engine import fuse
from sosampler.engine.fuse import fuse_network, replace_max_pools
from sosampler.engine.kernels.blocks import FusedConv, SpaceToDepth, set_conv_backend, use_space_to_depth
from sosampler.engine.networks import TorchFeatures


class Net(nn.Module):
    """Contains everything that is fused, and everything that must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.second_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.short = nn.Conv2d(8, 8, 1)
        self.twice = nn.Conv2d(8, 8, 1)  # used twice: its batch norm must not be folded
        self.twice_norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 1, 1)  # the addition broadcasts its output over channels
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)) + self.short(x))
        x = self.twice_norm(self.twice(x)) + self.twice(x)
        x = F.relu(self.narrow(x) + x)
        scores: Tensor = self.head(F.dropout(x, 0.5, self.training).mean((2, 3)))
        return scores


def random_statistics(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = torch.randn(layer.num_features)
            layer.running_var = torch.rand(layer.num_features) + 0.5
            nn.init.normal_(layer.weight, 1.0, 0.3)
            nn.init.normal_(layer.bias)
    return net.eval()


@pytest.mark.parametrize("backend", ["eager", "onednn"])
def test_fused_networks_agree(backend: str) -> None:
    net = random_statistics(Net())
    frames = torch.randn(5, 3, 12, 10)
    made = fuse_network(net, (torch.randn(2, 3, 12, 10),), name="net")
    set_conv_backend(made, backend)
    norms = [layer for layer in made.modules() if isinstance(layer, nn.BatchNorm2d)]
    convs = {name: layer for name, layer in made.named_modules() if isinstance(layer, FusedConv)}
    assert len(norms) == 1  # the one after a convolution that is used twice
    assert convs["first"].activation == "relu6"
    assert {convs["second"].activation, convs["short"].activation} == {"relu", None}
    assert "twice" not in convs
    assert convs["narrow"].activation is None
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            assert torch.allclose(made(frames.to(memory_format=layout)), net(frames), atol=1e-5)
            assert torch.allclose(made(frames[:1]), net(frames[:1]), atol=1e-5)


class TestGuard:
    """Fused and plain outputs are compared on the example; beyond a thousandth of the largest value it runs unfused."""

    @pytest.mark.parametrize(("wrong", "fused"), [(1.01, False), (1.0001, True)])
    def test_a_wrong_fusion_is_not_used(
        self, wrong: float, fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
            made = fuse_conv_bn_eval(conv, norm)
            made.weight.data *= wrong
            made.bias.data *= wrong
            return made

        monkeypatch.setattr(fuse, "fuse_conv_bn_eval", fold)
        net = random_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        made = fuse_network(net, (torch.randn(2, 3, 8, 8),), name="net")
        assert any(isinstance(layer, FusedConv) for layer in made.modules()) == fused
        assert ("net: fused convolutions give different values; it runs unfused" in caplog.text) != fused
        if not fused:
            frames = torch.randn(3, 3, 8, 8)
            assert torch.equal(made(frames), net(frames))

    @pytest.mark.parametrize("padding", [{"padding": 1, "padding_mode": "reflect"}, {"padding": "same"}])
    def test_padding_that_fused_convolutions_do_not_know(
        self, padding: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Such a convolution stays as it is, and the others are fused all the same."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, **padding), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
        made = fuse_network(net, (torch.randn(2, 3, 8, 8),), name="net")
        assert [type(made.get_submodule(name)) for name in ("0", "2")] == [nn.Conv2d, FusedConv]
        assert not caplog.text
        frames = torch.randn(3, 3, 9, 7)
        torch.testing.assert_close(made(frames), net(frames), atol=1e-5, rtol=1e-5)


class ValueDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        return x if x.sum() > 0 else -x


def test_networks_that_cannot_be_traced_stay_plain() -> None:
    net = ValueDependent().eval()
    made = fuse_network(net, (torch.randn(2, 3, 4, 4),), name="net")
    assert made is not net
    for sign in (1, -1):
        frames = sign * torch.ones(2, 3, 4, 4)
        assert torch.equal(made(frames), net(frames))


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_timm_networks(name: str) -> None:
    torch.manual_seed(0)
    classifier = so.create_classifier(f"timm:{name}", num_classes=4)
    net = random_statistics(classifier.net) if name == "resnet18" else classifier.net
    frames = torch.randn(2, 3, 224, 224)
    made = fuse_network(net, (frames,), name=name)
    set_conv_backend(made, "onednn")
    with torch.no_grad():
        expected = net(frames)
        assert torch.allclose(made(frames), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("kernel", "padding"), [(7, 3), (3, 1), (5, 2), (3, 0), (4, 1), (6, 2)])
def test_space_to_depth_gives_the_same_sums(kernel: int, padding: int) -> None:
    """A convolution of stride 2 over pixels is one of stride 1 over blocks of them."""
    conv = nn.Conv2d(3, 8, kernel, stride=2, padding=padding)
    blocks = SpaceToDepth(kernel, padding)
    for size in ((32, 32), (31, 40), (33, 29)):
        images = torch.randn(2, 3, *size)
        output = F.conv2d(blocks.rearrange(images), blocks.rearrange_weight(conv.weight), conv.bias)
        torch.testing.assert_close(output, conv(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [torchvision.models.resnet18, torchvision.models.mobilenet_v2])
def test_networks_that_start_with_space_to_depth(make: Any) -> None:
    torch.manual_seed(0)
    net = make(num_classes=5).eval()
    example = torch.randn(2, 3, 64, 64)
    fast = fuse_network(net, (example,), name="it")
    replace_max_pools(fast)
    blocks = use_space_to_depth(fast)
    assert blocks is not None
    assert not [module for module in fast.modules() if isinstance(module, nn.MaxPool2d)]
    images = torch.randn(3, 3, 75, 66)
    with torch.no_grad():
        torch.testing.assert_close(fast(blocks.rearrange(images)), net(images), atol=1e-3, rtol=1e-3)


def test_other_first_layers_do_not_change() -> None:
    for first in (
        nn.Conv2d(3, 4, 3, stride=1),
        nn.Conv2d(3, 4, 3, stride=2, dilation=2),
        nn.Conv2d(3, 3, 3, 2, groups=3),
    ):
        net = fuse_network(nn.Sequential(first, nn.ReLU()), (torch.randn(2, 3, 16, 16),), name="it")
        state = {name: value.clone() for name, value in net.state_dict().items()}
        assert use_space_to_depth(net) is None
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert use_space_to_depth(nn.Conv2d(3, 4, 7, stride=2, padding=3)) is None  # could not be traced


def test_one_of_two_added_convolutions_adds_both_biases() -> None:
    """The projection of a residual block needs no pass of its own."""
    net = torchvision.models.resnet18(num_classes=5).eval()
    fast = fuse_network(net, (torch.randn(2, 3, 64, 64),), name="it")
    without = [name for name, module in fast.named_modules() if isinstance(module, FusedConv) and module.bias is None]
    assert len(without) == 3  # one of the pair at the beginning of each of layers 2 to 4
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), net(images), atol=1e-3, rtol=1e-3)


class Residuals(nn.Module):
    """Sums with tensors that are not read again, and with tensors that are: later, as a view, or by the same layer."""

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


def test_sums_overwrite_only_tensors_that_are_not_read_again() -> None:
    torch.manual_seed(0)
    net = Residuals().eval()
    x = torch.randn(3, 4, 6, 5).to(memory_format=torch.channels_last)
    fast = fuse_network(net, (x,), name="it")
    marked = {name for name, module in fast.named_modules() if isinstance(module, FusedConv) and module.in_place}
    assert marked == {"convs.dead"}
    before = x.clone()
    with torch.no_grad():
        expected = net(x)
        set_conv_backend(fast, "onednn")
        for _ in range(2):
            torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(fast(x.contiguous()), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shift", [0, 8])
def test_sums_of_a_sampler_are_in_place(shift: int) -> None:
    """The shift is one call in the graph, which is known to return new memory."""
    net = TorchFeatures(lively_sampler(input_size=32, shift=shift), torch.device("cpu"), torch.float32, "onednn").net
    assert sum(isinstance(layer, FusedConv) and layer.in_place for layer in net.modules()) == 10


@pytest.mark.parametrize("activation", [None, "relu", "relu6"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_by_onednn(activation: str | None, in_place: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = FusedConv(nn.Conv2d(4, 8, 1), activation).to(dtype)
    x, other = (
        (5 * torch.randn(2, channels, 5, 6)).to(dtype, memory_format=torch.channels_last) for channels in (4, 8)
    )
    expected = conv(x, other).float()
    set_conv_backend(conv, "onednn")
    conv.in_place = in_place
    output = conv(x, other)
    assert (output.data_ptr() == other.data_ptr()) == in_place
    torch.testing.assert_close(output.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0.02)
