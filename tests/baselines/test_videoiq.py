"""VideoIQ against its formulas by hand, and on videos whose light features tell which frames need how many bits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import sosampler as so
from sosampler.baselines.base import (
    BaselineOutput,
    UniformFrames,
    Views,
    decoded_frames,
    load_system,
    predict,
    save_baseline,
    video_gmacs,
)
from sosampler.baselines.videoiq import COSTS, SETS, SKIP, VideoIQ
from sosampler.errors import InvalidArgument
from sosampler.training.baseline_data import feature_sources
from sosampler.training.train_baseline import fit, measure_baseline
from tests.factories import make_plain_bank

C, T, D, LIGHT = 4, 8, 8, 6
PRICES = {"bits32": 4.0, "bits4": 4.0, "bits2": 4.0, "light": 0.1}


def problem(batch: int, seed: int) -> tuple[Views, Tensor, Tensor]:
    """Of eight frames one shows the class clearly at 32 bits alone, one at any width, the rest another class.

    The light features tell which is which. Returns views, labels, and the kind of each frame: 0, 1 or 2 (the rest).
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    order = torch.rand(batch, T, generator=generator).argsort(dim=1)
    kinds = order.clamp_max(2)
    others = torch.randint(C, (batch, T), generator=generator)
    shown = F.one_hot(torch.where(kinds < 2, classes[:, None], others), C).float()
    sets = {}
    for name in SETS:
        values = 0.3 * torch.randn(batch, T, D, generator=generator)
        hidden = (kinds == 0) & (name != "bits32")
        values[:, :, :C] += 3 * torch.where(hidden[:, :, None], F.one_hot(others, C).float(), shown)
        sets[name] = values
    light = 0.3 * torch.randn(batch, T, LIGHT, generator=generator)
    light[:, :, :3] += 2 * F.one_hot(kinds, 3)
    return Views({**sets, "light": light}), F.one_hot(classes, C).bool(), kinds


def small(kind: type[VideoIQ] = VideoIQ, **given: Any) -> VideoIQ:
    torch.manual_seed(0)
    prices = {"bits32_gmacs": PRICES["bits32"], "light_gmacs": PRICES["light"]}
    return kind(D, D, D, LIGHT, C, **{"policy_width": 16, "dropout": 0.0, **prices, **given})


def spread(**given: Any) -> VideoIQ:
    """One whose untrained decisions differ from frame to frame."""
    system = small(**given)
    with torch.no_grad():
        system.action.weight.mul_(40)
    return system


def sure(system: VideoIQ, action: int) -> VideoIQ:
    """The same with every frame's decision fixed, whatever the noise."""
    with torch.no_grad():
        system.action.weight.zero_()
        system.action.bias.copy_(200.0 * F.one_hot(torch.tensor(action), len(COSTS)))
    return system


def parts_of(system: VideoIQ, views: Views, labels: Tensor, phase: str = "policy") -> dict[str, float]:
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase=phase)
    return {"loss": loss.item(), **{name: part.item() for name, part in parts.items()}}


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return (output.probabilities.argmax(dim=1) == labels.long().argmax(dim=1)).float().mean().item()


def bits(output: BaselineOutput) -> float:
    return float(sum(cost * output.seen[name].float().mean() for name, cost in zip(SETS, COSTS, strict=False)))


# ---- by hand


def test_the_costs_of_actions() -> None:
    assert COSTS == (1.0, 0.25, 0.0625, 0.0)


def by_hand(system: VideoIQ, views: Views, number: int, penalty: float = 0.0) -> tuple[Tensor, list[int]]:
    """One video, frame after frame."""
    hidden = cell = torch.zeros(1, 16)
    actions, features = [], []
    for step in range(views.shape[1]):
        hidden, cell = system.policy(views.light[number, step][None], (hidden, cell))
        scores = (hidden @ system.action.weight.T + system.action.bias)[0] - penalty * torch.tensor(COSTS)
        actions.append(int(scores.argmax()))
        if actions[-1] != SKIP:
            features.append(views[SETS[actions[-1]]][number, step])
    mean = torch.stack(features).mean(dim=0) if features else torch.zeros(D)
    return system.classify(mean).softmax(dim=0), actions


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_decisions_and_predictions_by_hand(penalty: float) -> None:
    system, (views, _, _) = spread().with_threshold(penalty), problem(40, seed=2)
    output = system.run(views)
    taken = set()
    for number in range(40):
        probabilities, actions = by_hand(system, views, number, penalty)
        for action, name in enumerate(SETS):
            assert output.seen[name][number].tolist() == [one == action for one in actions]
        assert torch.allclose(output.probabilities[number], probabilities, atol=1e-5)
        taken |= set(actions)
    assert taken == {0, 1, 2, 3}
    assert output.seen["light"].all()


@pytest.mark.parametrize("action", range(4))
def test_one_action_alone(action: int) -> None:
    system, (views, _, _) = sure(small(), action), problem(10, seed=3)
    output = system.run(views)
    expected = torch.zeros(10, D) if action == SKIP else views[SETS[action]].mean(dim=1)
    assert torch.allclose(output.probabilities, system.classify(expected).softmax(dim=1), atol=1e-6)
    assert [bool(output.seen[name].all()) for name in SETS] == [number == action for number in range(3)]


@pytest.mark.parametrize("action", range(4))
def test_the_cost_term_of_one_action(action: int) -> None:
    views, labels, _ = problem(10, seed=3)
    parts = parts_of(sure(small(), action), views, labels)
    assert parts["cost"] == pytest.approx(COSTS[action])  # 0 where all is skipped
    assert parts["balance"] == pytest.approx((1 - 0.25) ** 2 + 3 * 0.25**2)
    assert parts["entropy"] == pytest.approx(0, abs=1e-5)


def test_equal_logits_take_the_first_action() -> None:
    system, (views, _, _) = small(), problem(4, seed=3)
    with torch.no_grad():
        system.action.weight.zero_()
        system.action.bias.zero_()
    assert system.run(views).seen["bits32"].all()
    cheapest = system.with_threshold(0.5).run(views)
    assert not any(cheapest.seen[name].any() for name in SETS)


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_policy_loss_by_hand(multi_label: bool) -> None:
    weights = {"efficiency": 0.3, "balance": 0.7, "entropy": 0.2}
    system, (views, labels, _) = spread(multi_label=multi_label, **weights), problem(20, seed=4)
    with torch.no_grad():
        system.action.weight.mul_(1e4)  # so sure that no noise turns a decision
    mask = torch.arange(T) < (torch.arange(20) % T + 1)[:, None]
    views = Views({name: views[name].masked_fill(~mask[:, :, None], torch.nan) for name in views.sets}, mask)
    parts, output = parts_of(system, views, labels), system.run(views)
    frames = mask.sum()
    usage = torch.stack([*(output.seen[name].sum() for name in SETS), torch.tensor(0)]) / frames
    usage[SKIP] = 1 - usage.sum()
    assert usage.min() > 0
    assert parts["cost"] == pytest.approx(float(usage @ torch.tensor(COSTS)), rel=1e-4)
    assert parts["balance"] == pytest.approx(float(((usage - 0.25) ** 2).sum()), rel=1e-4)
    activate = torch.sigmoid if multi_label else lambda logits: logits.softmax(dim=-1)
    clean = {name: views[name].nan_to_num(0) for name in SETS}
    chosen = sum(clean[name] * output.seen[name][:, :, None] for name in SETS).sum(dim=1)
    counts = sum(output.seen[name].sum(dim=1) for name in SETS)
    logits = system.classify(chosen / counts.clamp_min(1)[:, None])
    assert torch.allclose(activate(logits), output.probabilities, atol=1e-5)
    taught = activate(system.classify(clean["bits32"].sum(dim=1) / mask.sum(dim=1, keepdim=True)))
    if multi_label:
        imitation = F.binary_cross_entropy_with_logits(logits, taught, reduction="none").sum(dim=1).mean()
    else:
        imitation = F.cross_entropy(logits, taught)
    assert parts["imitation"] == pytest.approx(imitation.item(), rel=1e-4)
    assert parts["label"] == pytest.approx(system.label_loss(logits, labels).mean().item(), rel=1e-4)
    expected = parts["label"] + parts["imitation"] + parts["policy_label"]
    expected += 0.3 * parts["cost"] + 0.7 * parts["balance"] + 0.2 * parts["entropy"]
    assert parts["loss"] == pytest.approx(expected, rel=1e-5)


def test_entropy_and_the_policy_head_by_hand() -> None:
    system, (views, labels, _) = spread(), problem(6, seed=5)
    parts = parts_of(system, views, labels)
    states, hidden, cell = [], torch.zeros(6, 16), torch.zeros(6, 16)
    for step in range(T):
        hidden, cell = system.policy(views.light[:, step], (hidden, cell))
        states.append(hidden)
    probabilities = system.action(torch.stack(states)).softmax(dim=-1)
    entropy = -(probabilities * probabilities.log()).sum(dim=-1).mean()
    assert parts["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    logits = system.policy_classify(torch.stack(states).mean(dim=0))
    assert parts["policy_label"] == pytest.approx(F.cross_entropy(logits, labels.long().argmax(dim=1)).item(), rel=1e-4)


def test_the_classifier_loss_by_hand() -> None:
    system, (views, labels, _) = small(), problem(12, seed=6)
    parts = parts_of(system, views, labels, phase="classifier")
    logits = [system.classify(views[name].mean(dim=1)) for name in SETS]
    target = labels.long().argmax(dim=1)
    assert parts["label"] == pytest.approx(F.cross_entropy(logits[0], target).item(), rel=1e-5)
    low = sum(F.cross_entropy(one, target) for one in logits[1:])
    assert parts["label_low"] == pytest.approx(low.item(), rel=1e-5)
    imitation = sum(F.cross_entropy(one, logits[0].softmax(dim=1)) for one in logits[1:])
    assert parts["imitation"] == pytest.approx(imitation.item(), rel=1e-5)
    assert parts["loss"] == pytest.approx(parts["label"] + parts["label_low"] + parts["imitation"], rel=1e-5)


def test_drawn_actions_have_the_probabilities_of_the_policy() -> None:
    system, (views, labels, _) = small(efficiency=1.0), problem(400, seed=7)
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with torch.no_grad():
        system.action.weight.zero_()
        system.action.bias.copy_(shares.log())
    parts = parts_of(system, views, labels)
    assert parts["cost"] == pytest.approx(float(shares @ torch.tensor(COSTS)), abs=0.01)
    assert parts["balance"] == pytest.approx(float(((shares - 0.25) ** 2).sum()), abs=0.01)


def test_the_cost_term_pushes_off_dear_actions() -> None:
    (views, labels, _), gradients = problem(50, seed=8), []
    for efficiency in (0.0, 1.0):  # the gradient of the term is the difference
        system = small(efficiency=efficiency)
        loss, _ = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase="policy")
        loss.backward()
        gradients.append(system.action.bias.grad)
    gradient = gradients[1] - gradients[0]
    assert gradient[0] > 0  # less probable
    assert gradient[0] > gradient[1] > gradient[2] > gradient[SKIP]
    assert gradient.sum().abs() < 1e-6


def test_what_each_phase_trains() -> None:
    views, labels, _ = problem(20, seed=9)
    for phase, trained in (("classifier", {"classify"}), ("policy", {"policy", "action", "policy_classify"})):
        system = small()
        before = {name: weight.clone() for name, weight in system.named_parameters()}
        epochs = {"classifier": 0, "policy": 0, phase: 1}
        fit(system, views, labels, epochs=epochs, batch_size=10, lr=0.01)
        changed = {name for name, weight in system.named_parameters() if not torch.equal(weight, before[name])}
        assert {name.split(".")[0] for name in changed} == trained


def test_the_temperature_falls_as_published() -> None:
    assert [small().temperature(progress) for progress in (0, 1)] == pytest.approx([5, 5 * 0.956**50], abs=0.005)


# ---- what is read and what it costs


def test_frames_are_read_only_where_they_are_seen() -> None:
    system, (views, _, _) = spread(), problem(30, seed=10)
    output = system.run(views)
    hidden = {name: views[name].masked_fill(~output.seen[name][:, :, None], torch.nan) for name in SETS}
    again = system.run(Views({**hidden, "light": views.light}))
    assert torch.equal(again.probabilities, output.probabilities)


def test_masked_frames_are_never_seen() -> None:
    system, (views, _, _) = spread(), problem(20, seed=11)
    mask = torch.rand(20, T, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 4] = True
    output = system.run(
        Views({name: views[name].masked_fill(~mask[:, :, None], torch.nan) for name in views.sets}, mask)
    )
    for number in range(20):
        alone = Views({name: views[name][number, mask[number]][None] for name in views.sets})
        expected = system.run(alone)
        assert torch.allclose(output.probabilities[number], expected.probabilities[0], atol=1e-5)
        for name in (*SETS, "light"):
            assert torch.equal(output.seen[name][number, mask[number]], expected.seen[name][0])
            assert not output.seen[name][number, ~mask[number]].any()


def test_both_costs_by_hand() -> None:
    system, (views, _, _) = spread(), problem(15, seed=12)
    output = system.run(views)
    own = system.own_gmacs(output)
    for number in range(3):
        with FlopCounterMode(display=False) as counter:
            system.run(views.some(torch.tensor([number])))
        sums = 3 * 2 * T * D  # the sums over frames by actions, which are not counted
        assert float(own[number]) == pytest.approx((counter.get_total_flops() - sums) / 2e9)
    counts = [output.seen[name].sum(dim=1) for name in SETS]
    total = video_gmacs(system, output, PRICES)
    assert torch.allclose(total, 4.0 * sum(counts) + 0.1 * T + own)
    weighted = 1.0 * counts[0] + 0.25 * counts[1] + 0.0625 * counts[2]
    assert torch.allclose(output.other_gmacs["bits"], 4.0 * weighted + 0.1 * T + own)
    assert decoded_frames(output).tolist() == [T] * 15
    measured = measure_baseline(system, views, torch.eye(C)[torch.zeros(15, dtype=torch.int64)], PRICES)
    assert measured["frames"] == pytest.approx(float(sum(counts).float().mean()))
    assert measured["other_gmacs"]["bits"] < measured["gmacs"]


def test_all_skipped_costs_the_policy_alone() -> None:
    system, (views, _, _) = sure(small(), SKIP), problem(3, seed=12)
    output = system.run(views)
    own = system.own_gmacs(output)
    assert torch.allclose(video_gmacs(system, output, PRICES), 0.1 * T + own)
    assert torch.allclose(output.other_gmacs["bits"], video_gmacs(system, output, PRICES))


def test_a_larger_penalty_is_never_dearer() -> None:
    system, (views, _, _) = spread(), problem(60, seed=13)
    costs = [bits(system.with_threshold(value).run(views)) for value in system.threshold_values]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_uniform_frames_are_seen_at_32_bits_without_the_policy() -> None:
    system, (views, _, _) = spread(), problem(5, seed=14)
    uniform = UniformFrames(system, 2)
    output = uniform.run(views)
    assert output.seen["bits32"].sum(dim=1).tolist() == [2] * 5
    assert not output.seen["light"].any()
    chosen = views["bits32"][output.seen["bits32"]].view(5, 2, D)
    assert torch.allclose(output.probabilities, system.classify(chosen.mean(dim=1)).softmax(dim=1), atol=1e-6)
    assert torch.allclose(video_gmacs(uniform, output, PRICES), torch.full((5,), 8.0 + C * D / 1e9))
    assert torch.allclose(output.other_gmacs["bits"], video_gmacs(uniform, output, PRICES))


# ---- it learns


class AtRandom(VideoIQ):
    """The same with decisions by chance, in the shares that the trained policy has."""

    shares: Tensor

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        drawn = torch.multinomial(self.shares, views.real.numel(), replacement=True, generator=generator)
        return self._classified(views, drawn.view(views.shape), views.real)


@cache
def trained() -> VideoIQ:
    system = small(efficiency=0.5, balance=0.1)
    views, labels, _ = problem(800, seed=1)
    fit(system, views, labels, epochs={"classifier": 10, "policy": 40}, batch_size=100, lr=0.02, weight_decay=0.0)
    return system


def test_it_gives_frames_the_bits_that_they_need_and_beats_random_actions() -> None:
    views, labels, kinds = problem(600, seed=15)
    system = trained()
    output = predict(system, views)
    shares = torch.stack([output.seen[name].float().mean() for name in SETS])
    random = small(AtRandom)
    random.load_state_dict(system.state_dict())
    random.shares = torch.cat([shares, 1 - shares.sum()[None]])
    guessed = predict(random, views)
    assert bits(guessed) == pytest.approx(bits(output), abs=0.02)
    assert accuracy(output, labels) > 0.95
    assert accuracy(output, labels) > accuracy(guessed, labels) + 0.2
    # Frames that are of no use are skipped, and 32 bits are for those that need them.
    assert sum(output.seen[name][kinds == 2].float().mean() for name in SETS) < 0.2
    assert output.seen["bits32"][kinds == 0].float().mean() > 0.5
    assert bits(output) < 0.3


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels, _ = problem(40, seed=16)
    results = []
    for seed in (0, 0, 1):
        system = small(dropout=0.5)
        fit(system, views, labels, epochs=2, seed=seed, batch_size=16, lr=0.03)
        results.append(system.run(views).probabilities)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    classifier = so.create_classifier("any_precision:test_resnet", class_names=["run", "jump"], input_size=32)
    return so.save_classifier(classifier, tmp_path_factory.mktemp("networks") / "any")


def test_trained_from_a_bank_and_evaluated(network: Path, tmp_path: Path) -> None:
    bank = make_plain_bank(tmp_path / "bank")
    so.add_features(bank, so.create_classifier("timm:test_resnet", num_classes=2, input_size=32), name="light")
    few = {"epochs": 1, "num_candidates": 3, "policy_width": 4}
    result = so.train(bank, sampler="videoiq", out=tmp_path / "run", classifier=network, light="light", **few)
    assert isinstance(result.system, VideoIQ)
    classifier = so.create_classifier(network)
    fingerprints = {f"bits{width}": classifier.with_bits(width).fingerprint() for width in (32, 4, 2)}
    assert result.result["sets"] == fingerprints
    assert set(result.result["dev_other_gmacs"]) == {"bits"}
    so.add_teacher(bank, classifier)
    found = so.evaluate(
        bank, ["uniform", f"iq={tmp_path / 'run'}@all", f"iq={tmp_path / 'run'}@uniform@2"], num_frames=1,
        num_candidates=3, classifier=classifier, bootstrap=0, split="dev",
    )  # fmt: skip
    row = found.row("iq@0.0")
    assert set(row.other_gmacs) == {"bits"}
    assert result.system.config["bits32_gmacs"] == classifier.gmacs(1)
    assert row.classifier_gmacs == pytest.approx(row.frames_classified * classifier.gmacs(1))
    assert found.row("iq@uniform@2").frames_classified == 2


def test_what_it_says_about_other_networks(network: Path, tmp_path: Path) -> None:
    bank, system = make_plain_bank(tmp_path / "bank"), small()
    plain = so.create_classifier("timm:test_resnet", num_classes=2, input_size=32)
    for classifier in (plain, None):
        with pytest.raises(InvalidArgument, match=r"no features 'bits32', .*; give an any-precision network as class"):
            feature_sources(bank, system, classifier=classifier, light=plain)
    sources = feature_sources(bank, system, classifier=network, light=plain)
    assert [sources[name].network.bits for name in SETS] == [32, 4, 2]
    # By their names in the bank.
    bank = so.add_features(bank, {name: sources[name].network for name in SETS})
    found = feature_sources(bank, system, classifier=plain, light=plain)
    assert [found[name].name for name in SETS] == list(SETS)
    # A folder is the network at 32 bits, which is not that of the set.
    few = {"light": plain, "epochs": 1, "num_candidates": 3}
    for folder, text in ((network, "32 bits"), (plain, "its one width of 32 bits")):
        with pytest.raises(InvalidArgument, match=f"bits4 is given .*:test_resnet at {text}"):
            so.train(bank, sampler="videoiq", out=tmp_path / "run", features={"bits4": folder}, **few)


def test_a_loaded_system_is_the_saved_one(tmp_path: Path) -> None:
    system, (views, _, _) = spread(penalty=0.5), problem(5, seed=17)
    save_baseline(tmp_path / "saved", system, {"dev": 0.5})
    loaded = load_system(tmp_path / "saved")
    assert isinstance(loaded, VideoIQ)
    assert (loaded.config, loaded.about) == (system.config, {"dev": 0.5})
    assert torch.equal(loaded.run(views).probabilities, system.run(views).probabilities)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dropout": 1.0}, "dropout"),
        ({"efficiency": -1.0}, "efficiency"),
        ({"balance": -1.0}, "balance"),
        ({"entropy": -1.0}, "entropy"),
        ({"penalty": -1.0}, "penalty"),
        ({"temperature": (5.0,)}, "at the start and at the end"),
        ({"temperature": (5.0, 0.0)}, "temperature"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        small(**given)


def test_it_refuses_features_of_different_networks() -> None:
    with pytest.raises(InvalidArgument, match="8, 8 and 9 numbers a frame"):
        VideoIQ(8, 8, 9, LIGHT, C)
