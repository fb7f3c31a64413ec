"""The video networks against pytorchvideo, a plain I3D written out, 2-D networks and real videos."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sosampler.classifiers.nets.i3d import I3D, MIXED, _ShiftNorm, same_padding
from sosampler.classifiers.nets.resnet3d import SlowOnly, inflate_resnet50
from sosampler.classifiers.nets.x3d import X3D
from sosampler.errors import InvalidArgument
from tests.conftest import unavailable

NETS = {"slowonly_r50": SlowOnly, "x3d_s": X3D, "i3d": I3D}

every_net = pytest.mark.parametrize("build", NETS.values(), ids=NETS)


def shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def scatter(net: nn.Module, seed: int = 0) -> nn.Module:
    """Give every norm statistics and weights of its own, and let the last layer tell clips apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
                module.running_mean.normal_(0, 0.2, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.2, generator=generator)
                if module.weight is not None:
                    module.weight.uniform_(0.5, 1.0, generator=generator)
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.5, generator=generator)
                module.bias.normal_(0, 0.5, generator=generator)
    return net.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_meta(build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(**options)


def gigamacs(net: nn.Module, frames: int, side: int) -> float:
    with FlopCounterMode(display=False) as counter:
        net.eval()(torch.empty(1, 3, frames, side, side, device="meta"))
    return counter.get_total_flops() / 2e9


@pytest.fixture(autouse=True)
def same_weights_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def hub() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its torch.jit is deprecated
            import pytorchvideo.models.hub
    except ImportError as error:
        unavailable("pytorchvideo", f"pytorchvideo cannot be imported: {error}")
    return pytorchvideo.models.hub


class TestAgainstPytorchvideo:
    @pytest.mark.parametrize(("build", "peer"), [(SlowOnly, "slow_r50"), (X3D, "x3d_s")])
    def test_names_and_shapes_agree(self, hub: Any, build: Callable[..., nn.Module], peer: str) -> None:
        ours, theirs = on_meta(build), on_meta(getattr(hub, peer), pretrained=False)
        assert shapes(ours) == shapes(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())

    def test_slowonly_logits_agree(self, hub: Any) -> None:
        ours, theirs = SlowOnly(num_classes=11), scatter(hub.slow_r50(pretrained=False, model_num_class=11))
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.eval()
        # 193 to 224 pixels leave 7 places, one window; then two windows along time times two along the width.
        for shape in ((8, 193, 193), (9, 193, 240)):
            clips = noise(1, 3, *shape)
            with torch.no_grad():
                torch.testing.assert_close(ours(clips), theirs(clips), atol=1e-4, rtol=0)

    def test_x3d_probabilities_agree(self, hub: Any) -> None:
        ours, theirs = X3D(num_classes=11), scatter(hub.x3d_s(pretrained=False, model_num_class=11))
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.eval()
        # 129 to 160 pixels leave 5 places, one window; 182 is what the published figures are tested at.
        for shape in ((13, 129, 129), (13, 182, 182), (15, 129, 200)):
            clips = noise(1, 3, *shape)
            with torch.no_grad():
                expected = theirs(clips)  # the mean over windows of each one's probabilities
                torch.testing.assert_close(ours(clips).softmax(1), expected, atol=1e-4, rtol=0)
            assert expected.std(dim=1).min() > 0.05  # far from the same probability for every class

    def test_x3d_averages_probabilities(self, hub: Any) -> None:
        ours, theirs = X3D(num_classes=11), scatter(hub.x3d_s(pretrained=False, model_num_class=11))
        ours.load_state_dict(theirs.state_dict(), strict=True)
        # What enters the head: each column of its own, so that the windows disagree.
        features = noise(2, 192, 1, 1, 25).mul(3).expand(-1, -1, 14, 6, -1)
        logits = []
        with torch.no_grad():
            theirs.blocks[5].proj.register_forward_hook(lambda layer, given, result: logits.append(result))
            expected = theirs.blocks[5](features)
            torch.testing.assert_close(ours.eval().blocks[5](features).softmax(1), expected, atol=1e-5, rtol=0)
        assert (logits[0].mean(dim=(1, 2, 3)).softmax(1) - expected).abs().max() > 0.01

    def test_a_single_window_leaves_the_logits_unnormalised(self) -> None:
        net = scatter(X3D(num_classes=4))
        with torch.no_grad():
            before = net(noise(1, 3, 2, 32, 32))
            net.blocks[5].proj.bias += 3
            torch.testing.assert_close(net(noise(1, 3, 2, 32, 32)), before + 3)


class TestCost:
    @pytest.mark.parametrize(
        ("build", "frames", "side", "published"),
        [
            (SlowOnly, 8, 256, 54.52),  # pytorchvideo's model zoo
            (X3D, 13, 160, 1.96),  # the X3D paper
            (X3D, 4, 160, 0.60),  # its X3D-XS: the same network, fewer frames
        ],
    )
    def test_gmacs_are_as_published(
        self, build: Callable[..., nn.Module], frames: int, side: int, published: float
    ) -> None:
        assert gigamacs(on_meta(build), frames, side) == pytest.approx(published, abs=0.006)

    def test_parameters_are_as_published(self) -> None:
        millions = {name: sum(p.numel() for p in on_meta(build).parameters()) / 1e6 for name, build in NETS.items()}
        assert millions == pytest.approx({"slowonly_r50": 32.45, "x3d_s": 3.79, "i3d": 12.69}, abs=0.005)


class TestEveryNet:
    @every_net
    @pytest.mark.parametrize(("frames", "height", "width"), [(1, 32, 32), (2, 97, 33), (8, 256, 340), (17, 160, 161)])
    def test_takes_any_length_and_size(
        self, build: Callable[..., nn.Module], frames: int, height: int, width: int
    ) -> None:
        net = on_meta(build, num_classes=6)
        assert net(torch.empty(2, 3, frames, height, width, device="meta")).shape == (2, 6)

    @every_net
    def test_only_the_head_depends_on_the_number_of_classes(self, build: Callable[..., nn.Module]) -> None:
        few, many = on_meta(build, num_classes=3), on_meta(build, num_classes=5)
        assert (few.num_classes, many.num_classes) == (3, 5)
        narrow, wide = shapes(few), shapes(many)
        changed = {name for name in narrow if wide[name] != narrow[name]}
        assert changed == {name for name in narrow if name.startswith(few.head_names)}
        assert len(changed) == 2

    @every_net
    def test_trains_in_16_bits(self, build: Callable[..., nn.Module]) -> None:
        net = build(num_classes=3)
        # Without oneDNN: some virtual machines announce its matrix tiles and then forbid them.
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(noise(2, 3, 2, 24, 16))
            F.cross_entropy(logits.float(), torch.tensor([0, 2])).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name

    @pytest.mark.slow
    @every_net
    def test_compiles_into_one_graph(self, build: Callable[..., nn.Module]) -> None:
        net, clips = build(num_classes=3).eval(), noise(1, 3, 2, 32, 32)
        with torch.no_grad():
            compiled = torch.compile(net, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(clips), net(clips))

    @every_net
    def test_does_not_mix_the_clips_of_a_batch(self, build: Callable[..., nn.Module]) -> None:
        net, clips = scatter(build(num_classes=3)), noise(2, 3, 3, 40, 32)
        with torch.no_grad():
            together, alone = net(clips), torch.cat([net(clips[:1]), net(clips[1:])])
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
        assert (alone[0] - alone[1]).abs().max() > 1e-3

    @every_net
    def test_refuses_frames_before_channels(self, build: Callable[..., nn.Module]) -> None:
        net = on_meta(build, num_classes=3)
        for shape in ((1, 8, 3, 32, 32), (3, 8, 32, 32)):
            with pytest.raises(InvalidArgument, match=r"\[B, 3, T, H, W\]"):
                net(torch.empty(shape, device="meta"))

    @every_net
    @pytest.mark.parametrize("options", [{"num_classes": 0}, {"dropout": -0.1}, {"dropout": 1.5}])
    def test_refuses_invalid_heads(self, build: Callable[..., nn.Module], options: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            build(**options)


def plain_i3d(state: dict[str, Tensor], clips: Tensor) -> Tensor:
    """I3D written out from its description, without modules: each border padded by hand, the norm as a formula."""

    def padded(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], value: float) -> Tensor:
        for axis, (k, s) in enumerate(zip(kernel, stride, strict=True), start=2):
            size, total = x.shape[axis], 0
            while (size + total - k) // s + 1 < -(-size // s):
                total += 1
            ends = [0, 0] * (4 - axis) + [total // 2, total - total // 2]
            x = F.pad(x, ends, value=value)
        return x

    def unit(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.conv.weight"]
        x = F.conv3d(padded(x, tuple(weight.shape[2:]), (stride,) * 3, 0.0), weight, stride=stride)
        mean, var, bias = (
            state[f"{name}.bn.{part}"].view(-1, 1, 1, 1) for part in ("running_mean", "running_var", "bias")
        )
        return ((x - mean) / (var + 1e-3).sqrt() + bias).clamp(min=0)

    def pool(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        return F.max_pool3d(padded(x, kernel, stride, float("-inf")), kernel, stride)

    def mixed(name: str, x: Tensor) -> Tensor:
        towers = [unit(f"{name}.Branch_{i}.Conv3d_0b_3x3", unit(f"{name}.Branch_{i}.Conv3d_0a_1x1", x)) for i in (1, 2)]
        pooled = unit(f"{name}.Branch_3.Conv3d_0b_1x1", pool(x, (3, 3, 3), (1, 1, 1)))
        return torch.cat([unit(f"{name}.Branch_0.Conv3d_0a_1x1", x), *towers, pooled], dim=1)

    x = pool(unit("Conv3d_1a_7x7", clips, 2), (1, 3, 3), (1, 2, 2))
    x = pool(unit("Conv3d_2c_3x3", unit("Conv3d_2b_1x1", x)), (1, 3, 3), (1, 2, 2))
    for name in MIXED:
        if name == "Mixed_4b":
            x = pool(x, (3, 3, 3), (2, 2, 2))
        if name == "Mixed_5b":
            x = pool(x, (2, 2, 2), (2, 2, 2))
        x = mixed(name, x)
    x = F.avg_pool3d(x, (2, 7, 7), stride=1)
    last = "Logits.Conv3d_0c_1x1.conv"
    return F.conv3d(x, state[f"{last}.weight"], state[f"{last}.bias"]).mean(dim=(2, 3, 4))


class TestI3D:
    @given(st.integers(1, 400), st.integers(1, 7), st.integers(1, 3))
    def test_same_padding_is_minimal(self, size: int, kernel: int, stride: int) -> None:
        before, after = same_padding(size, kernel, stride)
        wanted = -(-size // stride)

        def outputs(padding: int) -> int:
            return (size + padding - kernel) // stride + 1

        assert outputs(before + after) >= wanted
        assert before + after == 0 or outputs(before + after - 1) < wanted
        assert after - before in (0, 1)

    def test_equals_the_plain_network(self) -> None:
        net = scatter(I3D(num_classes=5))
        with torch.no_grad():
            # Odd and even sizes, so that each stride meets both kinds of border; 8 x 7 and 2 frames at the end.
            clips = noise(1, 3, 11, 225, 198)
            torch.testing.assert_close(net(clips), plain_i3d(net.state_dict(), clips), atol=1e-4, rtol=1e-4)

    def test_has_no_scale(self) -> None:
        assert not [name for name in on_meta(I3D).state_dict() if name.endswith("bn.weight")]

    def test_its_norm_equals_batch_norm_with_scale_1(self) -> None:
        torch.manual_seed(0)
        norm = scatter(_ShiftNorm(5)).train()
        plain = copy.deepcopy(norm)
        features = torch.randn(2, 5, 3, 4, 4) * 3 + 1
        for training in (True, True, False):
            norm.train(training), plain.train(training)
            expected = nn.BatchNorm3d.forward(plain, features)  # which has no weight
            torch.testing.assert_close(norm(features), expected)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(norm.state_dict()[name], value)


@pytest.fixture(scope="module")
def flat() -> nn.Module:
    """A 2-D ResNet-50 with random weights."""
    import timm

    return scatter(timm.create_model("resnet50", pretrained=False, num_classes=7))


class TestInflation:
    @pytest.mark.parametrize("stride_on_1x1", [False, True])
    def test_centre_equals_the_2d_network_on_each_frame(self, flat: nn.Module, stride_on_1x1: bool) -> None:
        deep = SlowOnly(num_classes=7, stride_on_1x1=stride_on_1x1).eval()
        deep.load_state_dict(inflate_resnet50(flat.state_dict()), strict=True)
        clips = noise(1, 3, 4, 96, 80)
        for stage in (flat.layer2, flat.layer3, flat.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = ((2, 2), (1, 1)) if stride_on_1x1 else ((1, 1), (2, 2))
        with torch.no_grad():
            by_frame = flat(clips[0].transpose(0, 1))  # [4, 7]
            static = clips[:, :, 1:2].expand(-1, -1, 10, -1, -1)
            close = {"atol": 1e-4, "rtol": 0}
            torch.testing.assert_close(deep(clips)[0], by_frame.mean(dim=0), **close)
            torch.testing.assert_close(deep(clips[:, :, 2:3])[0], by_frame[2], **close)
            torch.testing.assert_close(deep(static)[0], by_frame[1], **close)
        assert by_frame.std(dim=0).max() > 0.01

    def test_does_not_change_the_input(self, flat: nn.Module) -> None:
        before = {name: tensor.clone() for name, tensor in flat.state_dict().items()}
        for tensor in inflate_resnet50(flat.state_dict()).values():
            tensor.zero_()
        assert all(torch.equal(tensor, before[name]) for name, tensor in flat.state_dict().items())

    def test_without_head_and_counters(self, flat: nn.Module) -> None:
        trunk = {
            name: tensor
            for name, tensor in flat.state_dict().items()
            if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
        }
        answer = SlowOnly(num_classes=9).load_state_dict(inflate_resnet50(trunk), strict=False)
        assert sorted(answer.missing_keys) == ["blocks.5.proj.bias", "blocks.5.proj.weight"]
        assert not answer.unexpected_keys

    def test_takes_torchvisions_names(self) -> None:
        from torchvision.models import resnet50

        inflated = inflate_resnet50(resnet50(weights=None).state_dict())
        assert {name: tuple(tensor.shape) for name, tensor in inflated.items()} == shapes(
            on_meta(SlowOnly, num_classes=1000)
        )

    def test_missing_unknown_and_misshapen_weights(self, flat: nn.Module) -> None:
        state = dict(flat.state_dict())
        with pytest.raises(InvalidArgument, match=r"missing layer3\.4\.bn2\.bias; unknown none"):
            inflate_resnet50({name: tensor for name, tensor in state.items() if name != "layer3.4.bn2.bias"})
        with pytest.raises(InvalidArgument, match=r"missing none; unknown layer5\.conv1\.weight"):
            inflate_resnet50({**state, "layer5.conv1.weight": torch.zeros(1)})
        with pytest.raises(InvalidArgument, match=r"missing fc\.bias"):
            inflate_resnet50({name: tensor for name, tensor in state.items() if name != "fc.bias"})
        with pytest.raises(InvalidArgument, match=r"conv1\.weight \(64, 1, 7, 7\), not \(64, 3, 7, 7\)"):
            inflate_resnet50({**state, "conv1.weight": torch.zeros(64, 1, 7, 7)})
        with pytest.raises(InvalidArgument, match=r"and \d+ more"):
            inflate_resnet50({})
