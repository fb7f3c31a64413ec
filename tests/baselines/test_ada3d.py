"""Ada3D: its switches against the whole network, its rewards by hand, and clips with duplicated frames."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sosampler.baselines.ada3d import SwitchedSlowOnly, keep_one, usage_rewards
from sosampler.classifiers.base import count_gmacs
from sosampler.classifiers.nets import resnet3d
from sosampler.classifiers.nets.resnet3d import SlowOnly

C, T, K, SIDE = 3, 6, 3, 32
STAGES = ((1, 4, 8, 1), (1, 4, 16, 1), (2, 8, 24, 3), (1, 8, 32, 3))  # SlowOnly-50 has the same kinds of stages


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet3d, "STAGES", STAGES)


def slowonly(seed: int = 0) -> SlowOnly:
    """Tiny, with random weights everywhere: its residual branches would start at zero."""
    torch.manual_seed(seed)
    net = SlowOnly(num_classes=C).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm3d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    nn.init.normal_(net.blocks[-1].proj.weight)
    return net.requires_grad_(False)


def some_frames(batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, T, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def everything(batch: int, on: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """All frames of each video."""
    return torch.arange(batch), torch.ones(batch, T, dtype=torch.bool), torch.full((batch, K), on)


def test_all_on_is_the_3d_network() -> None:
    net, frames = slowonly(), some_frames()
    expected = net(frames.transpose(1, 2))
    switched = SwitchedSlowOnly(net)
    assert len(switched.convs) == K
    assert torch.allclose(switched(frames, *everything(2)), expected, atol=1e-5)
    assert torch.allclose(net(frames.transpose(1, 2)), expected, atol=1e-6)  # outside of the context it is as before


def test_all_off_is_the_2d_network_frame_by_frame() -> None:
    net, frames = slowonly(), some_frames()
    switched = SwitchedSlowOnly(net)
    with switched.switched(torch.zeros(2, K, dtype=torch.bool)):
        clips = net.blocks[:-1](frames.transpose(1, 2))  # [B, C, T, h, w], before the pool
    with switched.switched(torch.zeros(2 * T, K, dtype=torch.bool)):
        alone = net.blocks[:-1](frames.flatten(0, 1)[:, :, None])
    assert torch.allclose(clips, alone[:, :, 0].unflatten(0, (2, T)).transpose(1, 2), atol=1e-5)
    # A clip of one frame has zeros on both sides, so that only the middle taps act, on or off.
    one = net(frames.flatten(0, 1)[:, :, None]).unflatten(0, (2, T)).mean(dim=1)
    assert torch.allclose(switched(frames, *everything(2, on=False)), one, atol=1e-5)
    assert not torch.allclose(switched(frames, *everything(2)), one, atol=1e-2)


def test_each_clip_has_its_own_frames_and_convolutions() -> None:
    switched, frames = SwitchedSlowOnly(slowonly()), some_frames(3)
    generator = torch.Generator().manual_seed(2)
    videos = torch.tensor([2, 0, 1, 0, 2, 2, 1])
    kept = torch.rand(7, T, generator=generator) < 0.5
    kept[:, 3] = True
    on = torch.rand(7, K, generator=generator) < 0.5
    assert len(set(kept.sum(dim=1).tolist())) > 2
    together = switched(frames, videos, kept, on)
    for clip in range(7):
        alone = frames[videos[clip], kept[clip]][None]  # [1, N, 3, h, w]
        with switched.switched(on[clip : clip + 1]):
            expected = switched.net(alone.transpose(1, 2))
        assert torch.allclose(together[clip], expected[0], atol=1e-5)


def test_one_switch_changes_one_convolution() -> None:
    switched, frames = SwitchedSlowOnly(slowonly()), some_frames(1)
    answers = [
        switched(frames, torch.zeros(1, dtype=torch.int64), torch.ones(1, T, dtype=torch.bool), on[None])
        for on in torch.cat([torch.zeros(1, K), torch.eye(K)]).bool()
    ]
    for number, one in enumerate(answers):
        for other in answers[:number]:
            assert not torch.allclose(one, other, atol=1e-4)


def test_costs_add_up_to_those_of_the_network() -> None:
    net = slowonly()
    expected = [count_gmacs(net, torch.empty(1, 3, frames, SIDE, SIDE)) for frames in (1, 5)]
    frame, convs, head = SwitchedSlowOnly(net).gmacs((SIDE, SIDE))
    assert [frames * (frame + sum(convs)) + head for frames in (1, 5)] == pytest.approx(expected)
    # A kernel of three frames adds two taps of 1x1: first block of res4, its second, res5.
    assert convs == pytest.approx([2 * 16 * 8 * 16 / 1e9, 2 * 24 * 8 * 4 / 1e9, 2 * 24 * 8 * 4 / 1e9])


def test_rewards_by_hand() -> None:
    used, available = torch.tensor([10, 5, 1, 3, 0]), torch.tensor([10, 10, 10, 3, 9])
    right = torch.tensor([True, True, True, True, True])
    assert usage_rewards(used, available, right, 0.5).tolist() == pytest.approx([0, 0.75, 0.99, 0, 1])
    assert usage_rewards(used, available, ~right, 0.5).tolist() == [-0.5] * 5


def test_one_real_frame_is_kept_at_least() -> None:
    real = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
    probabilities = torch.tensor([[0.1, 0.2, 0.9], [0.4, 0.3, 0.9], [0.1, 0.1, 0.1]])
    kept = torch.tensor([[False, False, True], [False, True, True], [False, False, False]])
    assert keep_one(kept, probabilities, real).tolist() == [
        [False, True, False],
        [False, True, False],
        [True, False, False],
    ]
