"""AdaFuse against the plain network and costs by hand, and on frames of which few channels suffice."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosampler as so
from sosampler.baselines.adafuse import KEEP, REUSE, SKIP, AdaFuse, BlockUse, Gate, previous, run_block
from sosampler.baselines.base import BaselineOutput, UniformFrames, Views, decoded_frames, load_system, video_gmacs
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import make_plain_bank

C, T, SIDE = 4, 3, 16
BACKBONE = "test_resnet"  # with blocks of both kinds


def problem(batch: int, seed: int) -> tuple[Views, Tensor]:
    """Stripes under noise; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    angles = (classes * torch.pi / C)[:, None, None]
    y, x = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    phases = 6.28 * torch.rand(batch, T, 1, 1, generator=generator)
    stripes = torch.sin(0.9 * (x * angles.cos() + y * angles.sin())[:, None] + phases)[:, :, None]
    pixels = 128 + 50 * stripes + 75 * torch.randn(batch, T, 3, SIDE, SIDE, generator=generator)
    return Views({"frames": pixels.clamp(0, 255).to(torch.uint8)}), F.one_hot(classes, C).bool()


def small(kind: type[AdaFuse] = AdaFuse, **given: Any) -> AdaFuse:
    """One in evaluation mode, with residual branches that do something and gates that differ."""
    torch.manual_seed(0)
    system = kind(C, **{"backbone": BACKBONE, "input_size": SIDE, "gate_quota": 1024, "flip": False, **given})
    for block in system.blocks():
        nn.init.ones_(block.bn3.weight if hasattr(block, "bn3") else block.bn2.weight)
    for gate in system.gates.values():
        nn.init.normal_(gate.second.weight, 0, 0.3)
    return system.eval()


def always(*kinds: int) -> Any:
    """Decisions of all channels by the frame's number in its video of T frames; the last one stays."""

    def choose(logits: Tensor) -> Tensor:
        of_frame = torch.tensor([kinds[min(number % T, len(kinds) - 1)] for number in range(len(logits))])
        return F.one_hot(of_frame, 3)[:, None].expand(*logits.shape[:2], 3).to(logits.dtype)

    return choose


def pixels_of(system: AdaFuse, views: Views) -> Tensor:
    return system.preprocessing.normalised(views["frames"].flatten(0, 1))


def first_frames(videos: int) -> Tensor:
    return torch.arange(videos * T) % T == 0


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return (output.probabilities.argmax(dim=1) == labels.long().argmax(dim=1)).float().mean().item()


# ---- the network


@torch.no_grad()
def test_all_kept_is_the_plain_network() -> None:
    system, (views, _) = small(), problem(3, seed=1)
    frames = pixels_of(system, views)
    logits, used = system(frames, first_frames(3), always(KEEP))
    assert torch.equal(logits, system.net(frames))
    assert len(used) == len(system.blocks())


@torch.no_grad()
def test_all_reused_is_the_network_with_the_first_convolutions_of_the_frame_before() -> None:
    system, (views, _) = small(), problem(2, seed=1)
    frames = pixels_of(system, views)
    logits, _ = system(frames, first_frames(2), always(KEEP, REUSE))
    # The second frame of each video, in the plain network, with the first frame's maps put in.
    recorded: list[Tensor] = []
    hooks = [
        block.act1.register_forward_hook(lambda *call: recorded.append(call[2].clone())) for block in system.blocks()
    ]
    system.net(frames[0::T])
    for hook in hooks:
        hook.remove()
    put_in = iter(recorded)
    hooks = [block.act1.register_forward_hook(lambda *call: next(put_in)) for block in system.blocks()]
    assert torch.allclose(system.net(frames[1::T]), logits[1::T], atol=1e-5)
    for hook in hooks:
        hook.remove()
    assert not torch.allclose(system.net(frames[1::T]), logits[1::T], atol=1e-2)


@torch.no_grad()
def test_the_first_frame_has_nothing_to_reuse() -> None:
    system, (views, _) = small(), problem(2, seed=1)
    frames = pixels_of(system, views)
    reused, skipped = (system(frames, first_frames(2), always(kind))[0] for kind in (REUSE, SKIP))
    assert torch.equal(reused[0::T], skipped[0::T])  # zero in both
    assert not torch.allclose(reused[1::T], skipped[1::T])


def test_previous() -> None:
    values = torch.arange(1.0, 6.0)[:, None]
    first = torch.tensor([True, False, True, False, False])
    assert previous(values, first)[:, 0].tolist() == [0, 1, 0, 3, 4]


@torch.no_grad()
def test_reuse_takes_the_map_before_its_gates() -> None:
    system = small()
    block = system.blocks()[0]
    x = torch.rand(T, 32, 4, 4)
    fresh = block.act1(block.bn1(block.conv1(x)))
    kinds = torch.tensor([[SKIP, KEEP, REUSE], [REUSE, SKIP, KEEP], [REUSE, REUSE, SKIP]]).repeat(1, 11)[:, :32]
    seen: list[Tensor] = []
    hook = block.conv2.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    run_block(block, x, F.one_hot(kinds, 3).float(), torch.tensor([True, False, False]))
    hook.remove()
    zero = torch.zeros(4, 4)
    for channel in range(32):
        expected = {
            0: [zero, fresh[0, channel], fresh[1, channel]],  # skip, reuse, reuse: of what was computed, gated or not
            1: [fresh[0, channel], zero, fresh[1, channel]],  # keep, skip, reuse
            2: [zero, fresh[1, channel], zero],  # reuse, keep, skip
        }[channel % 3]
        assert torch.equal(seen[0][:, channel], torch.stack(expected))


def test_gates_see_this_frame_and_the_one_before_it() -> None:
    torch.manual_seed(0)
    gate = Gate(5, 4, 6).eval()
    assert [tuple(layer.weight.shape) for layer in (gate.first, gate.second)] == [(6, 10), (12, 6)]
    assert gate.first.weight.abs().max() < 0.01
    assert not gate.first.bias.any()
    nn.init.normal_(gate.first.weight)
    nn.init.normal_(gate.second.weight)
    pooled, first = torch.rand(3, 5), torch.tensor([True, False, False])
    logits = gate(pooled, first)
    assert logits.shape == (3, 4, 3)
    changed = pooled.clone()
    changed[0] += 1
    assert [bool(torch.equal(*pair)) for pair in zip(logits, gate(changed, first), strict=True)] == [False, False, True]
    alone = gate(pooled[:1], first[:1])
    by_hand = gate.first(torch.cat([torch.zeros(1, 5), pooled[:1]], dim=1))
    assert torch.allclose(alone, gate.second(gate.norm(by_hand).relu()).view(1, 4, 3))


def test_blocks_of_equal_shape_share_a_gate() -> None:
    with torch.device("meta"):
        system = AdaFuse(2)
    gates = system.gates
    assert set(gates) == {"64_64", "256_64", "256_128", "512_128", "512_256", "1024_256", "1024_512", "2048_512"}
    assert {name: gate.first.out_features for name, gate in gates.items() if name.startswith("256")} == {
        "256_64": 3072,
        "256_128": 1536,
    }


# ---- costs


def test_the_costs_of_one_block_by_hand() -> None:
    system = small()
    kinds = torch.tensor([[KEEP, SKIP, REUSE, REUSE], [REUSE, SKIP, KEEP, SKIP], [REUSE, REUSE, SKIP, KEEP]])
    use = BlockUse(F.one_hot(kinds, 3).float(), 8.0, 100.0)
    fixed = system._fixed()
    # Two videos: frames 0 and 1, and frame 2 alone.
    costs = system.frame_gmacs([use], torch.tensor([False, True, True]))
    assert torch.allclose(fixed - costs["upper bound"], torch.tensor([25.0, 50.0, 25.0]))
    # Not kept and not reused next: channels 1, 2 and 3 of frame 0, though frame 1 reuses channel 0, which is kept;
    # 0, 1 and 3 of frame 1, which is the last of its video; 0, 1 and 2 of frame 2.
    saved = costs["upper bound"] - costs["real"]
    assert torch.allclose(saved, torch.tensor([6.0, 6.0, 6.0]))
    # One video of three frames: channels 0 and 1 of frame 1 are reused by frame 2.
    saved = system.frame_gmacs([use], torch.tensor([False, False, True]))
    assert torch.allclose(saved["upper bound"] - saved["real"], torch.tensor([6.0, 2.0, 6.0]))
    # A channel that the next frame reuses is computed.
    kinds[1, 2] = REUSE
    again = system.frame_gmacs([use._replace(gates=F.one_hot(kinds, 3).float())], torch.tensor([False, True, True]))
    assert torch.allclose(again["upper bound"] - again["real"], torch.tensor([4.0, 8.0, 6.0]))


@torch.no_grad()
def test_costs_of_convolutions_and_gates_are_those_that_run() -> None:
    system, (views, _) = small(), problem(1, seed=3)
    frames = pixels_of(system, views)[:1]
    with FlopCounterMode(display=False) as counter:
        _, used = system(frames, torch.tensor([True]), always(KEEP))
    assert system._fixed() == pytest.approx(counter.get_total_flops() / 2e9)
    for use, block in zip(used, system.blocks(), strict=True):
        x = torch.rand(1, block.conv1.in_channels, *_size_before(system, block))
        with FlopCounterMode(display=False) as counter:
            block.conv1(x)
        assert use.conv1_gmacs == pytest.approx(counter.get_total_flops() / 2e9)
        with FlopCounterMode(display=False) as counter:
            block.conv2(block.conv1(x))
        assert use.conv1_gmacs + use.conv2_gmacs == pytest.approx(counter.get_total_flops() / 2e9)


def _size_before(system: AdaFuse, block: Any) -> tuple[int, int]:
    sizes: list[tuple[int, int]] = []
    hook = block.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[2:])))
    system.net(torch.zeros(1, 3, SIDE, SIDE))
    hook.remove()
    return sizes[0]


def test_the_cost_of_a_video_is_that_of_its_frames() -> None:
    system, (views, _) = small(), problem(5, seed=4)
    output = system.run(views)
    frames = pixels_of(system, views)
    with torch.no_grad():
        likeliest = lambda logits: F.one_hot(logits.argmax(dim=-1), 3).to(logits.dtype)  # noqa: E731
        logits, used = system(frames, first_frames(5), likeliest)
        costs = system.frame_gmacs(used, first_frames(5).roll(-1))
    assert torch.allclose(output.probabilities, logits.view(5, T, C).mean(dim=1).softmax(dim=1), atol=1e-5)
    assert torch.allclose(video_gmacs(system, output, {}), costs["real"].view(5, T).sum(dim=1), rtol=1e-4)
    assert torch.allclose(output.other_gmacs["upper bound"], costs["upper bound"].view(5, T).sum(dim=1), rtol=1e-4)
    assert (output.other_gmacs["upper bound"] > output.own).all()
    assert (output.other_gmacs["upper bound"] < T * system._fixed()).all()
    assert decoded_frames(output).tolist() == [T] * 5


def test_equal_logits_keep() -> None:
    system, (views, _) = small(), problem(2, seed=4)
    for gate in system.gates.values():
        nn.init.zeros_(gate.second.weight)
    output = system.run(views)
    with torch.no_grad():
        plain = system.net(pixels_of(system, views)).view(2, T, C).mean(dim=1).softmax(dim=1)
    assert torch.allclose(output.probabilities, plain, atol=1e-6)
    # Nothing is saved.
    assert torch.allclose(output.own, torch.full((2,), T * system._fixed()))


def test_padding_is_not_seen_and_frames_before_a_gap_are_reused() -> None:
    system, (views, _) = small(), problem(4, seed=5)
    mask = torch.tensor([[True, True, False], [True, False, True], [False, True, True], [True, True, True]])
    output = system.run(Views(dict(views.sets), mask))
    for number in range(4):
        alone = system.run(Views({"frames": views["frames"][number, mask[number]][None]}))
        assert torch.allclose(output.probabilities[number], alone.probabilities[0], atol=1e-5)
        assert float(output.own[number]) == pytest.approx(float(alone.own[0]), rel=1e-4)
    assert torch.equal(output.seen["frames"], mask)


def test_uniform_frames_keep_all_channels_without_gates() -> None:
    system, (views, _) = small(), problem(3, seed=6)
    uniform = UniformFrames(system, 2)
    output = uniform.run(views)
    assert output.seen["frames"].sum(dim=1).tolist() == [2, 2, 2]
    chosen = views["frames"][output.seen["frames"]]
    with torch.no_grad():
        logits = system.net(system.preprocessing.normalised(chosen)).view(3, 2, C).mean(dim=1)
    assert torch.allclose(output.probabilities, logits.softmax(dim=1), atol=1e-5)
    with FlopCounterMode(display=False) as counter:
        system.net(torch.zeros(1, 3, SIDE, SIDE))
    assert video_gmacs(uniform, output, {}).tolist() == pytest.approx([counter.get_total_flops() / 1e9] * 3)


# ---- training


@pytest.mark.parametrize("count", ["real", "upper bound"])
def test_the_loss_by_hand(count: str) -> None:
    system, (views, labels) = small(efficiency=7.0, count=count), problem(4, seed=7)
    for gate in system.gates.values():
        gate.second.weight.data.mul_(1e9)  # so sure that no noise turns a decision
    output = system.run(views)
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    cost = output.own if count == "real" else output.other_gmacs["upper bound"]
    label = F.nll_loss(output.probabilities.log(), labels.long().argmax(dim=1))
    assert parts["label"].item() == pytest.approx(label.item(), rel=1e-3)
    assert parts["gmacs"].item() == pytest.approx(cost.mean().item() / T, rel=1e-4)
    assert loss.item() == pytest.approx((label + 7 * cost.mean() / T).item(), rel=1e-3)
    assert sum(parts[name].item() for name in ("kept", "reused", "skipped")) == pytest.approx(1, rel=1e-5)


def test_decisions_are_drawn_with_their_probabilities() -> None:
    system, (views, labels) = small(), problem(6, seed=8)
    for gate in system.gates.values():
        nn.init.zeros_(gate.second.weight)
        gate.second.bias.data.copy_(torch.tensor([0.6, 0.3, 0.1]).log().repeat(len(gate.second.bias) // 3))
    _, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    shares = [parts[name].item() for name in ("kept", "reused", "skipped")]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02)
    _, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase="likeliest")
    assert parts["kept"].item() == pytest.approx(1)


@pytest.mark.parametrize("phase", ["drawn", "likeliest"])
def test_gradients_reach_all_gates_and_push_off_kept_channels(phase: str) -> None:
    system, (views, labels) = small(efficiency=1e6), problem(6, seed=9)
    system.train_phase(phase)
    loss, _ = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase=phase)
    loss.backward()
    for name, weight in system.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
    for name, gate in system.gates.items():  # the cost outweighs the labels here
        kept, _, skipped = gate.second.bias.grad.view(-1, 3).sum(dim=0)
        assert kept > 0 > skipped, name


def test_a_frozen_backbone_stays_as_it_is() -> None:
    views, labels = problem(8, seed=10)
    for train_backbone in (False, True):
        system = small(train_backbone=train_backbone)
        before = {key: tensor.clone() for key, tensor in system.state_dict().items()}
        fit(system, views, labels, epochs=1, batch_size=4, lr=0.01, optimizer="sgd")
        changed = {key for key, tensor in system.state_dict().items() if not torch.equal(tensor, before[key])}
        assert any(key.startswith("gates.") for key in changed)
        assert any(key.startswith("net.") for key in changed) == train_backbone


def test_videos_are_mirrored_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    system, (views, labels) = small(flip=True), problem(40, seed=11)
    shown: list[Tensor] = []
    real_run = system._run
    monkeypatch.setattr(system, "_run", lambda frames, *rest: shown.append(frames) or real_run(frames, *rest))
    system.loss(views, labels, generator=torch.Generator().manual_seed(0))
    frames = views["frames"]
    mirrored = [bool(torch.equal(one, other.flip(-1))) for one, other in zip(shown[0], frames, strict=True)]
    unchanged = [bool(torch.equal(one, other)) for one, other in zip(shown[0], frames, strict=True)]
    assert all(one != other for one, other in zip(mirrored, unchanged, strict=True))
    assert 10 < sum(mirrored) < 30


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels = problem(6, seed=12)
    results = []
    for seed in (0, 0, 1):
        system = small()
        fit(system, views, labels, epochs=1, seed=seed, batch_size=3, lr=0.01)
        results.append(system.run(views).probabilities)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


class AtRandom(AdaFuse):
    """The same with decisions by chance, in the shares of each block that the trained gates have."""

    shares: list[Tensor]

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        of_block = iter(self.shares)

        def choose(logits: Tensor) -> Tensor:
            kinds = torch.multinomial(next(of_block), logits[..., 0].numel(), replacement=True, generator=generator)
            return F.one_hot(kinds.view(logits.shape[:2]), 3).to(logits.dtype)

        return self._classified(views, views.real, choose)


@cache
def plain_network() -> dict[str, Tensor]:
    """The network, trained without gates."""
    system, (views, labels) = small(), problem(112, seed=20)
    optimizer = torch.optim.AdamW(system.net.parameters(), lr=3e-3)
    system.net.train()
    targets = labels.long().argmax(dim=1).repeat_interleave(T).view(-1, T)
    for _ in range(10):
        for rows in torch.arange(112).split(28):
            logits = system.net(pixels_of(system, views.some(rows)))
            optimizer.zero_grad()
            F.cross_entropy(logits, targets[rows].flatten()).backward()
            optimizer.step()
    return system.net.state_dict()


def test_it_learns_which_channels_suffice_and_beats_random_decisions() -> None:
    views, labels = problem(80, seed=21)
    training, training_labels = problem(64, seed=22)
    system = small(efficiency=2000.0, train_backbone=False)
    system.net.load_state_dict(plain_network())
    fit(system, training, training_labels, epochs={"drawn": 8, "likeliest": 0}, batch_size=16, lr=0.1)
    output = system.run(views)
    with torch.no_grad():
        _, _, used = system._run(views["frames"], views.real, lambda logits: F.one_hot(logits.argmax(-1), 3).float())
    random = small(AtRandom, train_backbone=False)
    random.load_state_dict(system.state_dict())
    random.shares = [use.gates.mean(dim=(0, 1)) for use in used]
    guessed = random.run(views, generator=torch.Generator().manual_seed(0))
    assert output.own.mean() < 0.7 * T * system._fixed()
    assert guessed.own.mean().item() == pytest.approx(output.own.mean().item(), rel=0.05)
    assert accuracy(output, labels) > 0.9
    assert accuracy(output, labels) > accuracy(guessed, labels) + 0.2


# ---- from a bank


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = so.create_classifier(f"timm:{BACKBONE}", class_names=["run", "jump"], input_size=32)
    network.preprocessing = so.Preprocessing(size=(32, 32), resize=40, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return so.save_classifier(network, tmp_path_factory.mktemp("networks") / "plain")


FEW = {"epochs": 1, "num_candidates": 3, "batch_size": 2, "gate_quota": 512}


def test_trained_from_a_bank_saved_and_evaluated(classifier: Path, tmp_path: Path) -> None:
    bank = make_plain_bank(tmp_path / "bank")
    so.add_teacher(bank, classifier)
    out = tmp_path / "run"
    trained = so.train(bank, sampler="adafuse", out=out, classifier=classifier, **FEW)
    system = load_system(out)
    assert isinstance(system, AdaFuse)
    assert (system.frame_size, system.config["backbone"]) == (32, BACKBONE)
    assert (system.preprocessing.mean, system.preprocessing.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    frames = trained.result["dev_frames"]  # a video has two
    assert frames == trained.result["dev_frames_decoded"] == pytest.approx(8 / 3)
    assert 0 < trained.result["dev_gmacs"] < trained.result["dev_other_gmacs"]["upper bound"] < frames * system._fixed()
    named = [f"fuse={out}", f"fuse-uniform={out}@uniform@2"]
    found = so.evaluate(
        bank, ["uniform", *named], num_frames=1, num_candidates=3, classifier=classifier, bootstrap=0, split="dev"
    )
    row = found.row("fuse")
    assert (row.frames_classified, row.frames_decoded) == (frames, frames)
    assert row.sampler_gmacs == pytest.approx(trained.result["dev_gmacs"], rel=1e-5)
    assert row.other_gmacs == pytest.approx(trained.result["dev_other_gmacs"], rel=1e-5)
    assert found.row("fuse-uniform@uniform@2").frames_classified == 2


def test_it_starts_from_the_classifier(classifier: Path) -> None:
    network = so.create_classifier(classifier)
    torch.manual_seed(1)
    system = AdaFuse(2, gate_quota=512)
    system.take_networks({"heavy": network}, None)
    for key, tensor in system.net.state_dict().items():
        assert torch.equal(tensor, network.net.state_dict()[key])
    assert system.config["input_size"] == 32
    torch.manual_seed(1)
    same = AdaFuse(2, gate_quota=512)
    torch.manual_seed(2)
    same.take_networks({"heavy": network}, None)
    gates = [tuple(one.gates[name].first.weight for name in one.gates) for one in (system, same)]
    assert all(torch.equal(*pair) for pair in zip(*gates, strict=True))  # drawn by the seed at its creation
    other = AdaFuse(5, backbone=BACKBONE, gate_quota=512, input_size=48)  # other classes, another size
    other.take_networks({"heavy": network}, None)
    assert torch.equal(other.net.layer1[0].conv1.weight, network.net.layer1[0].conv1.weight)
    assert (other.frame_size, other.net.fc.out_features) == (48, 5)


def test_it_starts_from_the_backbone_under_the_head_of_frameexit() -> None:
    network = so.create_classifier(f"timm:{BACKBONE}", num_classes=2, head="frameexit", input_size=32)
    system = AdaFuse(2, gate_quota=512)
    system.take_networks({"heavy": network}, None)
    assert torch.equal(system.net.layer1[0].conv1.weight, network.net.backbone.layer1[0].conv1.weight)
    assert system.net.fc.out_features == 2


def test_it_takes_over_the_stride_of_the_classifier() -> None:
    network = so.create_classifier(f"timm:{BACKBONE}", num_classes=2, input_size=32, stride_on_1x1=True)
    system = AdaFuse(2, backbone=BACKBONE, gate_quota=512)
    system.take_networks({"heavy": network}, None)
    assert system.config["stride_on_1x1"]
    again = AdaFuse(**system.config)
    assert again.net.layer3[0].conv1.stride == system.net.layer3[0].conv1.stride == (2, 2)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("timm:test_vit", {}, "timm:test_vit is none; give a classifier on one"),
        ("x3d_s", {"input_size": 32}, "x3d_s is none"),
        (f"any_precision:{BACKBONE}", {}, "any_precision:test_resnet is none"),
        ("timm:resnet18", {"input_size": 32}, "timm:resnet18 has the network resnet18, but backbone='test_resnet'"),
        (f"timm:{BACKBONE}", {"input_size": (32, 64)}, "sees 32x64 pixels"),
    ],
)
def test_it_refuses_classifiers_of_another_kind(name: str, options: dict[str, Any], text: str) -> None:
    system = AdaFuse(2, backbone=BACKBONE, gate_quota=512)
    with pytest.raises(InvalidArgument, match=text):
        system.take_networks({"heavy": so.create_classifier(name, num_classes=2, **options)}, None)


def test_it_needs_a_classifier(tmp_path: Path) -> None:
    bank = make_plain_bank(tmp_path / "bank")
    with pytest.raises(InvalidArgument, match="none is given; give classifier"):
        so.train(bank, sampler="adafuse", out=tmp_path / "run", **FEW)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"backbone": "test_vit"}, "must be a plain ResNet"),
        ({"backbone": "seresnet50"}, "must be a plain ResNet"),
        ({"temperature": 0.0}, "temperature"),
        ({"efficiency": -1.0}, "efficiency"),
        ({"count": "both"}, "real, upper bound"),
        ({"gate_quota": 0}, "gate_quota"),
        ({"input_size": 0}, "input_size"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        AdaFuse(2, **{"backbone": BACKBONE, **given})


def test_it_refuses_batches_of_one_frame() -> None:
    views, labels = problem(2, seed=13)
    one = Views({"frames": views["frames"][:, :1]})
    with pytest.raises(InvalidArgument, match="larger batch_size"):
        fit(small(), one, labels, batch_size=1)
