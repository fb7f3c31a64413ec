"""Ada3D: its switches against the whole network, its rewards by hand, and clips with duplicated frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosampler as so
from sosampler.baselines.ada3d import Ada3D, SwitchedSlowOnly, keep_one, usage_rewards
from sosampler.baselines.base import (
    FRAMES,
    BaselineOutput,
    UniformFrames,
    Views,
    draw_uniform,
    predict,
    save_baseline,
    video_gmacs,
)
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.classifiers.base import count_gmacs
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.nets import resnet3d
from sosampler.classifiers.nets.resnet3d import SlowOnly
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.classifiers.spacetime import PYTORCHVIDEO, SpacetimeClassifier
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import make_plain_bank

C, T, K, SIDE = 3, 6, 3, 32
STAGES = ((1, 4, 8, 1), (1, 4, 16, 1), (2, 8, 24, 3), (1, 8, 32, 3))  # SlowOnly-50 has the same kinds of stages


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet3d, "STAGES", STAGES)


def slowonly(num_classes: int = C) -> SlowOnly:
    """Tiny, with random weights everywhere: its residual branches would start at zero."""
    torch.manual_seed(0)
    net = SlowOnly(num_classes).eval()
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


# ---- the system

LIGHT, FULL = 6, 40  # light features; stored frames are cropped from 40 to 32 pixels


def system_of(kind: type[Ada3D] = Ada3D, **given: Any) -> Ada3D:
    torch.manual_seed(0)
    sizes = {"width": 16, "hidden": 32, "size": SIDE, "resize": FULL}
    system = kind(LIGHT, C, T, **{**sizes, **given})
    system.network.net.load_state_dict(slowonly().state_dict())
    return system


def some_views(batch: int, seed: int = 0) -> Views:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(256, (batch, T, 3, FULL, FULL), generator=generator, dtype=torch.uint8)
    return Views({FRAMES: frames, "light": torch.randn(batch, T, LIGHT, generator=generator)})


def classifier_of(
    num_classes: int = C, *, size: int = SIDE, names: Sequence[str] = (), interpolation: str = "bilinear"
) -> SpacetimeClassifier:
    net = slowonly(num_classes=num_classes)
    pixels = Preprocessing(size=(size, size), resize=FULL, interpolation=interpolation, **PYTORCHVIDEO)
    names = names or [str(number) for number in range(num_classes)]
    return SpacetimeClassifier(net.eval(), name="slowonly_r50", preprocessing=pixels, class_names=names)


def test_at_threshold_0_it_is_the_classifier() -> None:
    classifier, views = classifier_of(), some_views(3)
    system = system_of().with_threshold(0)
    output = system.run(views)
    assert output.seen[FRAMES].all()
    assert torch.allclose(output.probabilities, classifier.clip_probs(views[FRAMES]), atol=1e-5)
    light = output.seen["light"].sum(dim=1) * 0.1
    selection = T * LIGHT * 16 + T * 16 * 32 + 32 * (T + K)
    expected = classifier.gmacs(T) + selection / 1e9
    assert video_gmacs(system, output, {"light": 0.1}).tolist() == pytest.approx((light + expected).tolist())


def test_costs_are_the_operations_that_run() -> None:
    system, views = system_of(), some_views(6)
    with torch.no_grad():
        for head in (system.frames_head, system.convs_head):
            head.weight.mul_(200)
            head.bias.zero_()
    output = system.run(views)
    assert output.own is not None
    assert len(set(output.own.tolist())) > 3
    assert 0.2 < output.seen[FRAMES].float().mean() < 0.8
    for video in range(6):
        with FlopCounterMode(display=False) as counter:
            system.run(views.some(torch.tensor([video])))
        assert float(output.own[video]) == pytest.approx(counter.get_total_flops() / 2e9)


def test_what_is_as_likely_as_not_is_dropped() -> None:
    system, views = system_of(), some_views(2)
    with torch.no_grad():
        for head in (system.frames_head, system.convs_head):
            head.weight.zero_()
            head.bias.zero_()
    output = system.run(views)
    assert output.seen[FRAMES].tolist() == [[True] + [False] * (T - 1)] * 2  # one is kept, of equal ones the first
    frame, _, head = system.network.gmacs((SIDE, SIDE))
    assert output.own is not None
    assert (output.own - system._own()).tolist() == pytest.approx([frame + head] * 2)
    assert system.with_threshold(0.49).run(views).seen[FRAMES].all()


def test_without_decisions_it_is_the_3d_network_on_uniform_frames() -> None:
    classifier, views = classifier_of(), some_views(3)
    uniform = UniformFrames(system_of(), 3)
    output = uniform.run(views)
    assert torch.allclose(output.probabilities, classifier.clip_probs(views[FRAMES][:, [1, 3, 5]]), atol=1e-5)
    assert video_gmacs(uniform, output, {"light": 0.1}).tolist() == pytest.approx([classifier.gmacs(3)] * 3)


def test_thresholds_share_weights_and_cost_more(tmp_path: Path) -> None:
    system, views = system_of(), some_views(8)
    with torch.no_grad():
        for head in (system.frames_head, system.convs_head):
            head.weight.mul_(100)
            head.bias.zero_()
    spent = []
    for value in system.threshold_values:
        other = system.with_threshold(value)
        assert next(other.parameters()) is next(system.parameters())
        spent.append(float(video_gmacs(other, other.run(views), {"light": 0.0}).mean()))
    assert spent == sorted(spent)
    assert spent[-1] > 1.3 * spent[0]
    save_baseline(tmp_path / "run", system, {})
    loaded = so.load_system(tmp_path / "run")
    assert loaded.config == system.config
    assert loaded.frame_size == FULL
    assert torch.equal(loaded.run(views).probabilities, system.run(views).probabilities)


def test_padding_is_never_used() -> None:
    system, views = system_of(), some_views(4)
    mask = torch.arange(T) < torch.tensor([[T], [3], [1], [4]])
    light = views.light.masked_fill(~mask[:, :, None], torch.nan)
    output = system.run(Views({FRAMES: views[FRAMES], "light": light}, mask))
    assert not (output.seen[FRAMES] & ~mask).any()
    assert torch.equal(output.seen["light"], mask)
    assert output.probabilities.isfinite().all()
    labels = F.one_hot(torch.arange(4) % C, C).bool()
    loss, _ = system.loss(Views({FRAMES: views[FRAMES], "light": light}, mask), labels)
    assert loss.isfinite()


class Scripted(Ada3D):
    """Answers what it was told for every clip: the first of those that were drawn, then of the likelier decisions."""

    drawn: Tensor
    likelier: Tensor
    asked: tuple[Tensor, Tensor]

    def clip_logits(self, views: Views, videos: Tensor, kept: Tensor, on: Tensor) -> Tensor:
        self.asked = kept, on
        assert videos.tolist() == [*range(len(views)), *range(len(views))]
        return F.one_hot(torch.cat([self.drawn, self.likelier]), C).float()


def test_the_policy_gradient_by_hand() -> None:
    system, views = system_of(Scripted, frames_penalty=0.5, convs_penalty=2.0, alpha=0.9), some_views(4)
    assert isinstance(system, Scripted)
    with torch.no_grad():
        system.frames_head.weight.mul_(100)
        system.convs_head.weight.mul_(100)
    labels = F.one_hot(torch.tensor([0, 1, 2, 0]), C).bool()
    system.drawn, system.likelier = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 2, 2])
    right = torch.tensor([[True, True, False, False], [True, False, True, False]])
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(3))
    kept, on = (used.unflatten(0, (2, 4)) for used in system.asked)
    probabilities = system.select(views)
    assert torch.equal(kept[1], probabilities[0] > 0.5)
    assert torch.equal(on[1], probabilities[1] > 0.5)
    expected = torch.zeros(())
    for used, of_head, penalty in zip((kept, on), probabilities, (0.5, 2.0), strict=True):
        share = used.float().mean(dim=2)
        rewards = torch.where(right, 1 - share**2, -penalty)
        bounded = 0.1 + 0.8 * of_head  # 0.1 to 0.9
        likelihood = torch.where(used[0], bounded, 1 - bounded).log().sum(dim=1)
        expected = expected - (likelihood * (rewards[0] - rewards[1])).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert parts["right"].item() == 0.5
    gradient = torch.autograd.grad(loss, system.frames_head.weight)[0]
    assert torch.allclose(gradient, torch.autograd.grad(expected, system.frames_head.weight)[0], atol=1e-5)


def test_draws_are_bounded() -> None:
    system = system_of(alpha=0.8)
    sure = torch.tensor([0.0, 1.0]).expand(2000, 2)
    drawn, likelihood = system._draw(sure, torch.ones_like(sure, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert drawn.float().mean(dim=0).tolist() == pytest.approx([0.2, 0.8], abs=0.03)
    assert likelihood.max().item() == pytest.approx(2 * math.log(0.8), abs=1e-4)


def test_phases_train_the_selection_and_then_also_the_network() -> None:
    views, labels = some_views(6), F.one_hot(torch.arange(6) % C, C).bool()
    for phase in ("policy", "joint"):
        system = system_of()
        before = {key: value.clone() for key, value in system.state_dict().items()}
        fit(system, views, labels, epochs={phase: 2}, batch_size=3, lr=0.01)
        changed = {key for key, value in system.state_dict().items() if not torch.equal(value, before[key])}
        assert "reduce.weight" in changed
        assert any(key.startswith("network.") for key in changed) == (phase == "joint")
        assert not any("running" in key for key in changed)
    assert set(system.lr_factors("joint").values()) == {0.01}


# ---- duplicated frames


class Painted(Ada3D):
    """With a clip network that is known: the mean colour of the kept frames. Convolutions mean nothing to it."""

    def clip_logits(self, views: Views, videos: Tensor, kept: Tensor, on: Tensor) -> Tensor:
        colours = views.light[videos, :, :C]
        return (colours * kept[:, :, None]).sum(dim=1) / kept.sum(dim=1, keepdim=True)


class AtRandom(Painted):
    """Keeps as many frames at random."""

    share = 0.5

    def select(self, views: Views) -> tuple[Tensor, Tensor]:
        of_convs = super().select(views)[1]
        return (draw_uniform(tuple(views.shape), None, self.device) < self.share).float(), of_convs


def clips(batch: int, seed: int) -> tuple[Views, Tensor, Tensor]:
    """Half of the clips show one frame again and again. In the others two frames show the class, strongly, and the
    others another one each, so that few frames at random mislead. Returns views, labels and which are duplicated."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    duplicated = torch.arange(batch) % 2 == 0
    shown = torch.rand(batch, T, generator=generator).argsort(dim=1) < 2
    others = (classes[:, None] + torch.randint(1, C, (batch, T), generator=generator)) % C
    colours = torch.where(shown, classes[:, None], others)
    light = F.one_hot(colours, LIGHT) * torch.where(shown, 3.0, 1.0)[:, :, None]
    light = torch.where(duplicated[:, None, None], 3.0 * F.one_hot(classes, LIGHT)[:, None], light)
    light = light + 0.1 * torch.randn(batch, 1, LIGHT, generator=generator)
    frames = torch.zeros(batch, T, 3, FULL, FULL, dtype=torch.uint8)
    return Views({FRAMES: frames, "light": light}), F.one_hot(classes, C).bool(), duplicated


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return float(labels.gather(1, output.probabilities.argmax(dim=1, keepdim=True)).float().mean())


def test_it_learns_to_drop_duplicated_frames_and_beats_random_ones() -> None:
    system, (views, labels, _) = system_of(Painted), clips(600, seed=1)
    fit(system, views, labels, epochs={"policy": 60}, batch_size=100, lr=0.01)
    views, labels, duplicated = clips(300, seed=2)
    output = predict(system, views)
    kept = output.seen[FRAMES].sum(dim=1).float()
    assert kept[duplicated].mean() < 1.5
    assert accuracy(output, labels) > 0.9
    random = system_of(AtRandom)
    random.load_state_dict(system.state_dict())
    AtRandom.share = float(kept.mean()) / T
    torch.manual_seed(0)
    guessed = predict(random, views)
    assert guessed.seen[FRAMES].float().sum(dim=1).mean() >= kept.mean() - 0.2
    assert accuracy(output, labels) > accuracy(guessed, labels) + 0.08
    # Convolutions that change no answer are dropped.
    with torch.no_grad():
        assert (system.select(views)[1] > 0.5).float().mean() < 0.1


# ---- on a bank


def test_training_and_evaluation_on_a_bank(tmp_path: Path) -> None:
    bank = make_plain_bank(tmp_path / "bank")
    classifier = classifier_of(2, names=bank.classes)
    torch.manual_seed(0)
    so.SOSampler(backbone="timm:test_resnet", input_size=32).save_pretrained(tmp_path / "light")
    short = {"epochs": {"policy": 1, "joint": 1}, "num_candidates": 4, "batch_size": 3, "size": SIDE, "resize": FULL}
    options: dict[str, Any] = {"sampler": "ada3d", "light": tmp_path / "light", **short}
    trained = so.train(bank, out=tmp_path / "run", classifier=classifier, **options)
    again = so.train(bank, out=tmp_path / "again", classifier=classifier, **options)
    for key, weight in trained.system.state_dict().items():
        assert torch.equal(weight, again.system.state_dict()[key])
    assert trained.system.config["num_candidates"] == 4
    assert trained.result["dev_curve"][-1]["frames"] > 3  # all of them, but for a short video
    so.add_teacher(bank, classifier)
    policies = {"ada3d": f"{tmp_path / 'run'}@0", "plain": f"{tmp_path / 'run'}@uniform@2"}
    result = so.evaluate(bank, policies, num_frames=1, num_candidates=4, classifier=classifier, bootstrap=0)
    row = result.row("ada3d@0")
    assert row.frames_classified == row.frames_decoded > 3
    assert row.sampler_gmacs > classifier.gmacs(3)
    assert result.row("plain@uniform@2").frames_decoded == 2.0
    with pytest.raises(InvalidArgument, match="trained for 4 candidates a video and cannot run with 3"):
        so.evaluate(bank, policies, num_frames=1, num_candidates=3, classifier=classifier, bootstrap=0)
    swapped = classifier_of(2, names=("jump", "run"))
    with pytest.raises(InvalidArgument, match="class 0 is 'run' here and 'jump' there"):
        so.train(bank, out=tmp_path / "swapped", classifier=swapped, **options)
    resnet = create_classifier("timm:test_resnet", num_classes=2, class_names=bank.classes)
    with pytest.raises(InvalidArgument, match="but the classifier is timm:test_resnet"):
        so.train(bank, out=tmp_path / "other", classifier=resnet, **options)
    with pytest.raises(InvalidArgument, match="has a light network, whose weights are not given"):
        so.train(bank, out=tmp_path / "none", classifier=classifier, sampler="ada3d", **short)


def test_the_recipe() -> None:
    recipe = read_baseline_recipe("ada3d")
    assert recipe.feature_sets == (FRAMES, "light")
    assert recipe.needs_light
    assert recipe.epochs == {"policy": 12, "joint": 0}


# ---- bad input


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"alpha": 0.5}, "above 0.5 and at most 1"),
        ({"keep": 1.1}, "probability from 0 to 1"),
        ({"frames_penalty": -1}, "frames_penalty"),
        ({"resize": 30}, "resize=30 must be an int of at least 32"),
        ({"hidden": 0}, "hidden"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        system_of(**given)


def test_it_refuses_other_classifiers_and_clips() -> None:
    system = system_of()
    resnet = create_classifier("timm:test_resnet", num_classes=C)
    for classifier, text in (
        (None, "of slowonly_r50, but the classifier is none"),
        (resnet, "of slowonly_r50, but the classifier is timm:test_resnet"),
        (classifier_of(num_classes=5), "has 5 classes, but the bank has 3"),
        (classifier_of(interpolation="bicubic"), "crops squares from bilinear frames"),
        (classifier_of(size=24), "size=.* of ada3d is not that of the classifier slowonly_r50, 24; leave size out"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            system.take_networks({"heavy": classifier}, None)
    views = some_views(2)
    with pytest.raises(InvalidArgument, match=f"trained for {T} candidates a video and cannot run with 4"):
        system.run(Views({name: views[name][:, :4] for name in views.sets}))


def test_it_takes_the_weights_of_its_classifier() -> None:
    system, views = system_of(), some_views(2)
    for weight in system.network.parameters():
        nn.init.zeros_(weight)
    classifier = classifier_of()
    system.take_networks({"heavy": classifier}, None)
    output = system.with_threshold(0).run(views)
    assert torch.allclose(output.probabilities, classifier.clip_probs(views[FRAMES]), atol=1e-5)


def test_it_sees_frames_as_its_classifier() -> None:
    views, pixels = some_views(2), Preprocessing(size=(24, 24), resize=FULL)  # with the mean and std of ImageNet
    names = [str(number) for number in range(C)]
    classifier = SpacetimeClassifier(
        SlowOnly(C, True).eval(),
        name="slowonly_r50",
        preprocessing=pixels,
        class_names=names,
        options={"stride_on_1x1": True},
    )
    assert system_of(size=None, resize=160).frame_size == 160  # smaller than the default's crop
    system = system_of(size=None, resize=None)
    system.take_networks({"heavy": classifier}, None)
    assert (system.config["size"], system.config["stride_on_1x1"], system.frame_size) == (24, True, FULL)
    output = system.with_threshold(0).run(views)
    assert torch.allclose(output.probabilities, classifier.clip_probs(views[FRAMES]), atol=1e-5)
