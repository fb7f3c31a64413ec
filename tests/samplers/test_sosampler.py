"""The sampler's network: temporal shift, backbones, heads, padding, export; each against something plainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.samplers import sosampler as module
from sosampler.samplers.backbones import ShiftedBlock, create_backbone, find_neighbours, shift_channels
from sosampler.samplers.sosampler import SOSampler, top_n
from tests.factories import BELIEF, noise, scattered

both = pytest.mark.parametrize("shift", [0, 10], ids=["plain", "shifted"])
# The importance alone, and a belief about the video: scores of frames then depend on each other in a second way.
scorings = pytest.mark.parametrize(
    "heads",
    [
        {"num_classes": 3},
        {"num_classes": 3, "scoring": BELIEF},
        {"num_classes": 3, "scoring": BELIEF, "multi_label": True},
    ],
    ids=["importance", "belief", "many beliefs"],
)


def temporal_shift(x: Tensor, num_frames: int, div: int, mask: Tensor | None = None) -> Tensor:
    return shift_channels(x, x.shape[1] // div, find_neighbours(x, num_frames, mask))


def pictures(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def shortened(**settings: Any) -> SOSampler:
    """The same with few blocks, one of which can be shifted, for what takes long on many."""
    sampler = scattered(**settings)
    sampler.backbone.features = nn.Sequential(*sampler.backbone.features[:4], nn.Conv2d(24, 1280, 1))
    return sampler


def plain_shift(x: Tensor, num_frames: int, div: int, mask: Tensor | None = None) -> Tensor:
    """The definition, frame by frame and channel by channel."""
    videos = x.unflatten(0, (-1, num_frames))
    out = torch.zeros_like(videos)
    fold = x.shape[1] // div
    for video in range(len(videos)):
        for t in range(num_frames):
            for channel in range(x.shape[1]):
                source = t + 1 if channel < fold else t - 1 if channel < 2 * fold else t
                inside = 0 <= source < num_frames
                if source == t or (inside and (mask is None or mask[video, source])):
                    out[video, t, channel] = videos[video, source, channel]
    return out.flatten(0, 1)


# ---- the shift


@given(
    batch=st.integers(1, 3),
    num_frames=st.integers(1, 6),
    channels=st.integers(1, 12),
    div=st.integers(2, 12),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_shift_is_the_plain_loop(batch: int, num_frames: int, channels: int, div: int, masked: bool, seed: int) -> None:
    x = noise(batch * num_frames, channels, 2, 3, seed=seed)
    mask = noise(batch, num_frames, seed=seed + 1) > 0 if masked else None
    actual = temporal_shift(x, num_frames, div, mask)
    assert torch.equal(actual, plain_shift(x, num_frames, div, mask))


def test_shift_by_hand() -> None:
    x = torch.arange(1.0, 13).view(3, 4, 1, 1)  # one video of 3 frames with 4 channels
    assert temporal_shift(x, 3, 4).flatten(1).tolist() == [[5, 0, 3, 4], [9, 2, 7, 8], [0, 6, 11, 12]]
    mask = torch.tensor([[True, True, False]])
    assert temporal_shift(x, 3, 4, mask).flatten(1)[:2].tolist() == [[5, 0, 3, 4], [0, 2, 7, 8]]


def test_nothing_of_padding_gets_through_the_shift_not_even_nan() -> None:
    x = noise(4, 8, 2, 2)
    x[3] = float("nan")
    mask = torch.tensor([[True, True, True, False]])
    assert temporal_shift(x, 4, 4, mask)[:3].isfinite().all()


def test_shift_keeps_channels_last() -> None:
    x = noise(6, 10, 4, 5).to(memory_format=torch.channels_last)
    shifted = temporal_shift(x, 3, 5)
    assert shifted.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(shifted, temporal_shift(x.contiguous(), 3, 5))


def test_gradients_go_back_to_the_frame_they_came_from() -> None:
    x = noise(8, 5, 1, 2).double().requires_grad_()
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    assert torch.autograd.gradcheck(lambda value: temporal_shift(value, 4, 5, mask), x)


# ---- backbones


def shifted_blocks(backbone: nn.Module) -> list[ShiftedBlock]:
    return [block for block in backbone.modules() if isinstance(block, ShiftedBlock)]


def test_ten_blocks_are_shifted_by_the_folds_of_the_papers() -> None:
    folds = [block.fold for block in shifted_blocks(create_backbone("mobilenet_v2", shift=10))]
    assert folds == [2, 3, 3, 6, 6, 6, 9, 9, 16, 16]
    folds = [block.fold for block in shifted_blocks(create_backbone("mobilenet_v2", shift=8))]
    assert folds == [3, 4, 4, 8, 8, 8, 12, 12, 20, 20]
    assert not shifted_blocks(create_backbone("mobilenet_v2"))


def test_the_plain_backbone_is_torchvisions() -> None:
    from torchvision.models import mobilenet_v2

    theirs, ours = mobilenet_v2().eval(), create_backbone("mobilenet_v2").eval()
    ours.load_state_dict({key: value for key, value in theirs.state_dict().items() if key.startswith("features.")})
    frames = noise(3, 3, 64, 64)
    with torch.no_grad():
        expected = theirs.features(frames).mean((2, 3))
        assert torch.allclose(ours(frames, 3), expected, atol=1e-6)
    assert ours.num_features == 1280


def test_the_shifted_backbone_is_hooks_on_torchvisions() -> None:
    """The same shift put before each expanding convolution of torchvision's own network, by hooks."""
    from torchvision.models import mobilenet_v2

    ours = scattered(shift=10).backbone
    theirs = mobilenet_v2().eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    for block in theirs.features:
        if getattr(block, "use_res_connect", False) and block.conv[0][0].kernel_size == (1, 1):
            block.conv.register_forward_pre_hook(lambda _, given: plain_shift(given[0], 4, 10))
    frames = noise(8, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(ours(frames, 4), theirs.features(frames).mean((2, 3)), atol=1e-5)


@pytest.mark.parametrize(("name", "width"), [("resnet10t", 512), ("mobilenetv3_small_050", 1024)])
def test_timm_backbones_by_name(name: str, width: int) -> None:
    sampler = scattered(backbone=f"timm:{name}", num_classes=3)
    assert sampler.backbone.num_features == width
    output = sampler.look(pictures(2, 3, 3, 40, 50))
    assert output.scores.shape == (2, 3)
    assert output.class_logits is not None
    assert output.class_logits.shape == (2, 3, 3)
    assert output.features.shape == (2, 3, width)
    assert output.scores.std() > 0


def test_a_transformer_is_brought_to_the_size_of_the_frames() -> None:
    sampler = SOSampler(backbone="timm:vit_tiny_patch16_224", input_size=64)
    assert sampler.score(pictures(1, 2, 3, 64, 64)).shape == (1, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet9000"}, "must be 'mobilenet_v2' or timm:NAME"),
        ({"backbone": "timm:"}, "timm:NAME"),
        ({"backbone": 7}, "timm:NAME"),
        ({"backbone": "timm:resnet9000"}, "timm has no network 'resnet9000'"),
        ({"backbone": "timm:resnet10t", "shift": 8}, "has no temporal shift; give shift=0"),
        ({"backbone": "timm:levit_128s", "input_size": 64}, "cannot take frames of 64x64 .*another input_size"),
        ({"shift": 1}, "from 2 to 24"),
        ({"shift": 25}, "from 2 to 24"),
        ({"shift": -1}, "shift=-1"),
        ({"input_size": 16}, "at least 32"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_classes": 0}, "num_classes"),
        ({"num_classes": 2, "class_names": ["a"]}, "the number of class_names, 1"),
        ({"class_names": ["a", "b"]}, "the number of class_names, 2"),
        ({"multi_label": "no"}, "True or False"),
        ({"calibration": (1.0,)}, "two numbers"),
        ({"calibration": (1.0, float("nan"))}, r"calibration\[1\]"),
        ({"about": {"when": object()}}, "JSON"),
        ({"about": {"dev": float("nan")}}, "JSON"),
        ({"about": ["a"]}, "must be a dict"),
    ],
)
def test_invalid_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SOSampler(**settings)


# ---- the whole network


def test_cost_is_that_of_the_papers() -> None:
    one = SOSampler().gmacs(1)
    assert one == pytest.approx(0.098, abs=5e-4)
    assert SOSampler(shift=10, num_classes=1000).gmacs(10) == pytest.approx(10 * (one + 1280 * 1000 / 1e9))


@both
@scorings
def test_cost_is_counted_without_arithmetic(shift: int, heads: dict[str, Any]) -> None:
    sampler = SOSampler(shift=shift, **heads)
    devices: set[str] = set()
    sampler.backbone.register_forward_pre_hook(lambda _, given: devices.add(given[0].device.type))
    assert sampler.gmacs(1000) == pytest.approx(1000 * sampler.gmacs(1))
    assert devices == {"meta"}


@both
@scorings
def test_frames_may_be_permuted_only_without_the_shift(shift: int, heads: dict[str, Any]) -> None:
    sampler = scattered(shift=shift, **heads)
    frames, order = pictures(2, 6, 3, 32, 32), torch.tensor([3, 0, 5, 1, 4, 2])
    straight, permuted = sampler.score(frames)[:, order], sampler.score(frames[:, order])
    assert torch.allclose(straight, permuted, atol=1e-4) == (shift == 0)


@both
@scorings
def test_padding_changes_nothing_for_real_frames(shift: int, heads: dict[str, Any]) -> None:
    sampler = scattered(shift=shift, **heads)
    frames = pictures(2, 7, 3, 32, 32)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    padded, long, short = sampler.look(frames, mask), sampler.look(frames[:1]), sampler.look(frames[1:, :4])
    for together, first, second in zip(padded, long, short, strict=True):
        assert torch.allclose(together[0], first[0], atol=1e-5, rtol=1e-5)
        assert torch.allclose(together[1, :4], second[0], atol=1e-5, rtol=1e-5)
    if shift or "scoring" in heads:  # and the mask is what does it
        assert not torch.allclose(sampler.score(frames)[1, :4], short.scores[0], atol=1e-3)


@both
def test_videos_of_a_batch_do_not_see_each_other(shift: int) -> None:
    sampler = scattered(shift=shift)
    frames = pictures(3, 4, 3, 32, 32)
    alone = torch.cat([sampler.score(video[None]) for video in frames])
    assert torch.allclose(sampler.score(frames), alone, atol=1e-5, rtol=1e-5)


@both
def test_any_number_of_frames(shift: int) -> None:
    sampler = scattered(shift=shift)
    for count in (1, 2, 9, 3):
        assert sampler.score(pictures(2, count, 3, 32, 32)).shape == (2, count)


@both
@scorings
def test_many_frames_are_split(shift: int, heads: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = scattered(shift=shift, **heads)
    frames = pictures(3, 30, 3, 32, 32)
    mask = torch.ones(3, 30, dtype=torch.bool)
    mask[1, 21:] = mask[2, 5:] = False
    whole, masked = sampler.score(frames), sampler.score(frames, mask)
    seen: list[int] = []
    sampler.backbone.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    for at_once in (8, 64):  # a video in stretches; two videos at a time
        monkeypatch.setattr(module, "_BATCH_FRAMES", at_once)
        assert torch.allclose(sampler.score(frames), whole, atol=1e-5, rtol=1e-5)
        assert torch.allclose(sampler.score(frames, mask)[mask], masked[mask], atol=1e-5, rtol=1e-5)
        assert max(seen) <= at_once + 2 * sampler.backbone.reach
        seen.clear()


def test_large_frames_are_resized_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = scattered(shift=10)
    frames = pictures(2, 9, 3, 50, 80)
    whole = sampler.score(frames)
    seen: list[int] = []
    resized = Preprocessing.resized

    def counting(self: Preprocessing, some: Tensor) -> Tensor:
        seen.append(some.shape[:-3].numel())
        return resized(self, some)

    monkeypatch.setattr(Preprocessing, "resized", counting)
    for at_once in (1, 4):
        monkeypatch.setattr(module, "_RESIZE_BYTES", at_once * 3 * 50 * 80 * 4 + 1)
        assert torch.equal(sampler.score(frames), whole)
        assert max(seen) == at_once
        assert sum(seen) == 18
        seen.clear()


def test_score_is_forward_on_prepared_frames_in_evaluation_mode() -> None:
    sampler = scattered(shift=8, num_classes=3, dropout=0.5).train()
    frames = pictures(2, 3, 3, 50, 40)
    before = copy.deepcopy(sampler.state_dict())
    scores = sampler.score(frames)
    assert not sampler.training
    assert not scores.requires_grad
    assert scores.dtype == torch.float32
    assert all(torch.equal(tensor, before[key]) for key, tensor in sampler.state_dict().items())
    prepared = sampler.preprocessing(frames)
    assert prepared.shape == (2, 3, 3, 32, 32)
    output = sampler(prepared)
    assert torch.allclose(output.scores, scores, atol=1e-5)
    assert output.class_logits.shape == (2, 3, 3)
    assert output.scores.requires_grad
    (output.scores.sum() + output.class_logits.sum()).backward()
    assert all(parameter.grad is not None for parameter in sampler.parameters())


def test_half_precision_keeps_full_scores_and_nearly_the_same_order() -> None:
    sampler = scattered(shift=10)
    frames = pictures(1, 12, 3, 32, 32)
    exact = sampler.score(frames)
    sampler.precision = "float16"
    rounded = sampler.score(frames)
    assert rounded.dtype == torch.float32
    assert len(set(rounded[0].tolist())) == 12
    assert torch.corrcoef(torch.stack([exact[0], rounded[0]]))[0, 1] > 0.99
    with torch.autocast("cpu", torch.float16):  # as in training
        output = sampler(sampler.preprocessing(frames))
    assert output.scores.dtype == output.features.dtype == torch.float32
    output.scores.sum().backward()
    assert sampler.backbone.features[0][0].weight.grad.abs().sum() > 0


def test_choose_takes_the_best_in_time_order() -> None:
    sampler = scattered()
    frames = pictures(2, 8, 3, 32, 32)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3])
    chosen = sampler.choose(frames, 3, mask)
    assert torch.equal(chosen, top_n(sampler.score(frames, mask), 3, mask))
    for row, scores, count in zip(chosen.tolist(), sampler.score(frames, mask).tolist(), (8, 5), strict=True):
        assert row == sorted(sorted(range(count), key=lambda place: -scores[place])[:3])
    assert torch.equal(sampler.choose(frames.numpy(), 3, mask), chosen)
    with pytest.raises(InvalidArgument, match="5 real candidates"):
        sampler.choose(frames, 6, mask)


def test_invalid_frames_and_masks() -> None:
    sampler = scattered()
    frames = pictures(2, 3, 3, 32, 32)
    with pytest.raises(InvalidArgument, match=r"bool \[2, 3\]; give True for each real candidate"):
        sampler.score(frames, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="mask is float32"):
        sampler.score(frames, torch.ones(2, 3))
    with pytest.raises(InvalidArgument, match="uint8"):
        sampler.score(frames.float())
    with pytest.raises(InvalidArgument, match=r"frames\[None\]"):
        sampler.score(frames[0])


def test_nan_scores_raise_an_error() -> None:
    sampler = scattered()
    with torch.no_grad():
        sampler.importance_head.bias.fill_(float("nan"))
    with pytest.raises(WeightsError, match="4 of 4 frames"):
        sampler.score(pictures(2, 2, 3, 32, 32))


def test_precisions() -> None:
    sampler = scattered()
    with pytest.raises(InvalidArgument, match="precision='int8' is unknown; choose one of: float32, bfloat16, float16"):
        sampler.precision = "int8"
    assert sampler.precision == "float32"


def test_confidences_need_a_calibration() -> None:
    sampler = scattered()
    with pytest.raises(InvalidArgument, match="not calibrated"):
        sampler.confidences(torch.zeros(2))
    sampler.calibration = (2.0, -1.0)
    assert torch.allclose(sampler.confidences(torch.tensor([0.5, 0.0])), torch.tensor([0.5, 0.26894143]))


def test_fingerprint_changes_with_everything_that_affects_scores() -> None:
    sampler = scattered(num_classes=2)
    first = sampler.fingerprint()
    sampler.about, sampler.class_names = {"dev": 0.5}, ("a", "b")
    assert sampler.fingerprint() == first
    assert len(first) == 16
    other = copy.deepcopy(sampler)
    with torch.no_grad():
        other.importance_head.bias.add_(1e-6)
    assert other.fingerprint() != first == sampler.fingerprint()
    scoring = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}
    for change in ({"scoring": scoring}, {"scoring": scoring | {"importance": 0.3}}, {"calibration": (1.0, 0.5)}):
        other = scattered(num_classes=2, **change)
        other.load_state_dict(sampler.state_dict())
        assert other.fingerprint() != first
        first = other.fingerprint()
    assert SOSampler(shift=8).fingerprint() != SOSampler(shift=10).fingerprint()


def test_repr_and_freeze() -> None:
    sampler = SOSampler(shift=10, num_classes=22)
    assert repr(sampler) == "SOSampler(mobilenet_v2, shift 10, 128x128, 22 classes, 2.25 M parameters)"
    assert sampler.freeze() is sampler
    assert not sampler.training
    assert not any(parameter.requires_grad for parameter in sampler.parameters())


# ---- compiled and exported


def same_scores(actual: Any, sampler: SOSampler, frames: Tensor, mask: Tensor | None = None) -> bool:
    expected = sampler(frames, mask)
    real = torch.ones(frames.shape[:2], dtype=torch.bool) if mask is None else mask
    close = torch.allclose(actual[0][real], expected.scores[real], rtol=1e-5, atol=1e-5)
    return close and torch.allclose(actual[2][real], expected.class_logits[real], rtol=1e-5, atol=1e-5)


small_and_whole = pytest.mark.parametrize("build", [shortened, pytest.param(scattered, marks=pytest.mark.slow)])


@both
@scorings
@small_and_whole
def test_export_with_any_number_of_frames_gives_the_same_scores(build: Any, shift: int, heads: dict[str, Any]) -> None:
    sampler = build(shift=shift, **heads)
    count = torch.export.Dim("count", min=1, max=512)
    exported = torch.export.export(sampler, (noise(1, 5, 3, 32, 32),), dynamic_shapes=({1: count},)).module()
    for frames in (noise(1, 5, 3, 32, 32), noise(1, 11, 3, 32, 32), noise(1, 2, 3, 32, 32), noise(1, 1, 3, 32, 32)):
        assert same_scores(exported(frames), sampler, frames)


@scorings
@small_and_whole
def test_export_with_a_mask_and_any_batch(build: Any, heads: dict[str, Any]) -> None:
    sampler = build(shift=10, **heads)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("count", min=1, max=512)}
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    exported = torch.export.export(sampler, (noise(2, 5, 3, 32, 32), mask), dynamic_shapes=(sizes, sizes)).module()
    frames, mask = noise(3, 7, 3, 32, 32), torch.arange(7) < torch.tensor([[7], [4], [1]])
    assert same_scores(exported(frames, mask), sampler, frames, mask)


@pytest.mark.parametrize("shift", [10, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("backend", "build"),
    [
        ("eager", shortened),
        pytest.param("aot_eager", shortened, marks=pytest.mark.slow),
        pytest.param("eager", scattered, marks=pytest.mark.slow),
    ],
)
def test_compiled_as_one_graph_gives_the_same_scores(backend: str, build: Any, shift: int) -> None:
    sampler = build(shift=shift, num_classes=3, scoring=BELIEF)
    compiled = torch.compile(sampler, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (4, 6):
            frames = noise(2, count, 3, 32, 32)
            assert same_scores(compiled(frames), sampler, frames)
