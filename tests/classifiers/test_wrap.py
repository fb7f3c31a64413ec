"""One's own network as a classifier, and what is said about one that does not do what it should."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import sosampler as so


def frames(batch: int = 2, count: int = 4, size: int = 20, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch, count, 3, size, size), generator=generator, dtype=torch.uint8)


class Clips(nn.Module):
    """Logits [B, 5] from the time-weighted mean colours of clips in a layout."""

    def __init__(self, layout: str = "BTCHW") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 5)
        self.layout = layout
        self.seen: list[tuple[int, ...]] = []

    def forward(self, clips: Tensor) -> Tensor:
        self.seen.append(tuple(clips.shape))
        if self.layout == "BCTHW":
            clips = clips.transpose(1, 2)
        weights = torch.arange(1, clips.shape[1] + 1).float()
        return 10 * self.fc((clips.mean((3, 4)) * (weights / weights.sum())[:, None]).sum(1))


class Says(nn.Module):
    """Returns whatever it was told, for any input."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, clips: Tensor):
        return self.answer(len(clips))


@pytest.mark.parametrize("layout", ["BTCHW", "BCTHW"])
def test_layouts_agree(layout: str) -> None:
    clip = frames()
    wrapped = so.wrap_classifier(Clips(layout), input_size=16, layout=layout, class_names=["a", "b", "c", "d", "e"])
    expected = Clips()(wrapped.preprocessing(clip)).softmax(-1)
    assert torch.allclose(wrapped.clip_probs(clip), expected, atol=1e-6)
    assert wrapped.class_names == ("a", "b", "c", "d", "e")
    shape = (2, 4, 3, 16, 16) if layout == "BTCHW" else (2, 3, 4, 16, 16)
    assert wrapped.net.seen[-1] == shape


def test_each_frame_is_a_clip_of_one() -> None:
    clip = frames(count=3)
    wrapped = so.wrap_classifier(Clips(), input_size=16)
    actual = wrapped.frame_probs(clip)
    assert actual.shape == (2, 3, 5)
    for number in range(3):
        assert torch.allclose(actual[:, number], wrapped.clip_probs(clip[:, number : number + 1]), atol=1e-6)


def test_a_frame_network_is_pooled() -> None:
    torch.manual_seed(0)
    picture_net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    wrapped = so.wrap_classifier(picture_net, input_size=16, layout="BCHW")
    clip = frames()
    assert isinstance(wrapped, so.PooledClassifier)
    logits = torch.stack([picture_net(wrapped.preprocessing(clip)[:, t]) for t in range(4)], 1)
    assert torch.allclose(wrapped.clip_probs(clip), logits.mean(1).softmax(-1), atol=1e-6)
    subset = torch.tensor([0, 2])
    features = wrapped.frame_features(clip)
    assert torch.allclose(wrapped.pool(features[:, subset]), wrapped.clip_probs(clip[:, subset]), atol=1e-6)


def test_the_module_is_put_into_evaluation_mode() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(3 * 16 * 16, 5)).train()
    wrapped = so.wrap_classifier(net, input_size=16)
    clip = frames(count=1, size=16)
    assert torch.equal(wrapped.clip_probs(clip), wrapped.clip_probs(clip))
    assert not any(parameter.requires_grad for parameter in wrapped.parameters())


@pytest.mark.parametrize(
    "output",
    [
        lambda logits: logits,
        lambda logits: SimpleNamespace(logits=logits),
        lambda logits: {"logits": logits},
        lambda logits: (logits, None),
    ],
)
def test_supported_outputs(output) -> None:
    wrapped = so.wrap_classifier(Says(lambda n: output(torch.tensor([[1.0, 3.0]]).expand(n, 2))), input_size=8)
    expected = torch.tensor([1.0, 3.0]).softmax(0)
    assert torch.allclose(wrapped.clip_probs(frames(batch=1))[0], expected)


def test_multi_label() -> None:
    wrapped = so.wrap_classifier(Clips(), input_size=16, multi_label=True)
    clip = frames()
    assert torch.allclose(wrapped.clip_probs(clip), Clips()(wrapped.preprocessing(clip)).sigmoid(), atol=1e-6)


def constant(*values: float):
    return Says(lambda n: torch.tensor([values]).expand(n, len(values)))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            constant(2.0, -3.0),
            {"outputs": "probabilities"},
            "from -3 to 2 but must return probabilities.*these are logits",
        ),
        (constant(0.9, 0.3), {"outputs": "probabilities"}, "with a sum of 1.2"),
        (constant(0.9, 0.1), {}, "softmax was applied already"),
        (constant(1.0, float("nan")), {}, "NaN"),
        (constant(1.0, float("inf")), {}, "NaN or infinite"),
        (constant(1.0, 2.0, 3.0), {"num_classes": 4}, "3 scores per clip but 4 classes"),
        (constant(1.0, 2.0), {"class_names": ["a", "b", "c"]}, "2 scores per clip but 3 classes"),
        (Says(lambda n: torch.zeros(n, 4, 2)), {}, r"returned shape \[2, 4, 2\]"),
        (Says(lambda n: torch.zeros(1, 2)), {}, "for 2 clips"),
        (Says(lambda n: "text"), {}, "returned a str"),
        (nn.Conv3d(4, 2, 1), {}, "cannot take a batch"),
    ],
)
def test_invalid_outputs(module: nn.Module, options: dict, message: str) -> None:
    with pytest.raises(so.ClassifierError, match=message):
        so.wrap_classifier(module, input_size=8, **options)


def test_probabilities_are_not_changed() -> None:
    wrapped = so.wrap_classifier(constant(0.25, 0.75), input_size=8, outputs="probabilities")
    assert torch.equal(wrapped.clip_probs(frames(batch=1))[0], torch.tensor([0.25, 0.75]))
    several = so.wrap_classifier(constant(0.9, 0.8), input_size=8, outputs="probabilities", multi_label=True)
    assert torch.equal(several.clip_probs(frames(batch=1))[0], torch.tensor([0.9, 0.8]))


def test_nan_after_wrapping() -> None:
    class Later(nn.Module):
        calls = 0

        def forward(self, clips: Tensor) -> Tensor:
            self.calls += 1
            answer = torch.tensor([[1.0, 2.0]]).repeat(len(clips), 1)
            if self.calls > 1:
                answer[1] = float("nan")
            return answer

    wrapped = so.wrap_classifier(Later(), input_size=8)
    with pytest.raises(so.ClassifierError, match=r"1 of 3 clips \(the first is number 1"):
        wrapped.clip_probs(frames(batch=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "BHWC"}, "BTCHW, BCTHW, BCHW"),
        ({"outputs": "scores"}, "logits, probabilities"),
        ({"layout": "BCHW", "outputs": "probabilities"}, "return logits from the module"),
        ({"num_classes": 3, "class_names": ["a", "b"]}, "give one of the two"),
        ({"class_names": ["a", "a"]}, "more than once"),
        ({"min_frames": 5, "max_frames": 3}, "at least min_frames=5"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"layout": "BCHW", "num_frames": 3}, "single frames"),
        ({"input_size": (8, 8, 8)}, "input_size"),
        ({"input_size": None}, "input_size"),
    ],
)
def test_contradicting_arguments(options: dict, message: str) -> None:
    with pytest.raises(so.InvalidArgument, match=message):
        so.wrap_classifier(constant(1.0, 3.0), **{"input_size": 8} | options)


def test_only_modules_are_wrapped() -> None:
    with pytest.raises(so.InvalidArgument, match=r"torch\.nn\.Module"):
        so.wrap_classifier(lambda clips: clips, input_size=8)


def test_a_fixed_length_repeats_evenly_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    net = Clips()
    wrapped = so.wrap_classifier(net, input_size=16, num_frames=8)
    assert wrapped.notes == ("Clips takes exactly 8 frames: fewer are repeated evenly, more are refused",)
    clip = frames(count=3)
    with caplog.at_level(logging.WARNING, logger="sosampler"):
        actual = wrapped.clip_probs(clip)
        wrapped.clip_probs(clip)
    assert caplog.text.count("clips of 3 frames are repeated evenly to the 8") == 1
    repeated = clip[:, [0, 0, 0, 1, 1, 2, 2, 2]]
    assert torch.equal(actual, wrapped.clip_probs(repeated))
    assert net.seen[-1][1] == 8
    with pytest.raises(so.InvalidArgument, match="at most 8 frames per clip but 9 were given"):
        wrapped.clip_probs(frames(count=9))


def test_large_batches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = so.wrap_classifier(Clips(), input_size=16)
    clip = frames(batch=7, count=3)
    whole = wrapped.clip_probs(clip)
    monkeypatch.setattr("sosampler.classifiers.base.BATCH_FRAMES", 6)
    assert torch.allclose(wrapped.clip_probs(clip), whole)
    assert wrapped.net.seen[-1][0] == 1  # 2 + 2 + 2 + 1 clips
    assert wrapped.frame_probs(clip).shape == (7, 3, 5)


def test_positions_are_checked() -> None:
    wrapped = so.wrap_classifier(Clips(), input_size=16)
    with pytest.raises(so.InvalidArgument, match="give one per frame"):
        wrapped.clip_probs(frames(), torch.zeros(2, 3))
    with pytest.raises(so.InvalidArgument, match=r"0\.\.1"):
        wrapped.clip_probs(frames(), torch.full((2, 4), 1.5))
