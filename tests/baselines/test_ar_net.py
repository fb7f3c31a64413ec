"""AR-Net: skips, the mean over what was processed, its three losses, what it costs, and that its policy is worth it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

import sosampler as so
from sosampler.baselines.ar_net import OWN, ARNet, imbalance, usage_shares
from sosampler.baselines.base import (
    BaselineOutput,
    Views,
    decoded_frames,
    light_network,
    matrix_gmacs,
    predict,
    video_gmacs,
)
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.cli.main import app
from sosampler.errors import InvalidArgument
from sosampler.training.baseline_data import bank_views
from sosampler.training.train_baseline import fit
from tests.factories import make_learnable_bank, make_networks, make_plain_bank

WIDTHS = {"heavy": 6, "r34": 5, "r18": 4, "light": 7}  # the light features begin with the action that they ask for
PRICES = {"heavy": 4.0, "r34": 2.0, "r18": 0.5, "light": 0.05}
C, ACTIONS = 3, 7
R50, R34, R18, SKIP1, SKIP2, SKIP4 = 0, 1, 2, 4, 5, 6


def small(**settings: Any) -> ARNet:
    torch.manual_seed(0)
    widths = {f"{name}_width": width for name, width in WIDTHS.items()}
    system = ARNet(**widths, num_classes=C, **{"hidden": 7, **settings})
    for weight in system.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return system.eval()


class Scripted(ARNet):
    """Does what the light features say: their largest is the action at this frame."""

    def __init__(self) -> None:
        widths = {f"{name}_width": width for name, width in WIDTHS.items()}
        super().__init__(**widths, num_classes=C, hidden=7)
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in self.parameters():
                torch.nn.init.normal_(weight, std=0.5)
            # The hidden state is a saturated copy of the light features: gates open, nothing remembered.
            for weight in self.cell.parameters():
                weight.zero_()
            self.cell.bias_ih[:7], self.cell.bias_ih[7:14], self.cell.bias_ih[21:] = 50.0, -50.0, 50.0
            self.cell.weight_ih[14:21] = torch.eye(7)
            self.act.weight.copy_(100 * torch.eye(7))
            self.act.bias.zero_()
        self.eval()


def views_of(actions: list[list[int]], mask: Tensor | None = None, seed: int = 0) -> Views:
    """Random features; light ones that ask for these actions where the policy looks."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.tensor(actions)
    sets = {name: torch.randn(*wanted.shape, width, generator=generator) for name, width in WIDTHS.items()}
    return Views({**sets, "light": 2.0 * F.one_hot(wanted, ACTIONS)}, mask)


def random_views(videos: int = 30, frames: int = 8, *, masked: bool = True) -> Views:
    generator = torch.Generator().manual_seed(3)
    sets = {name: torch.randn(videos, frames, width, generator=generator) for name, width in WIDTHS.items()}
    mask = torch.rand(videos, frames, generator=generator) < 0.8
    mask[:, 2] = True
    return Views(sets, mask if masked else None)


# ---- skips


def test_a_skip_leaves_frames_without_cost_and_prediction() -> None:
    """Skip 4 at frame 2 leaves out frames 2 to 5; what these ask for is not read."""
    system = Scripted()
    views = views_of([[R50, R18, SKIP4, R50, R50, R50, R34, SKIP1, OWN]])
    output = system.run(views)
    assert output.seen_heavy.tolist() == [[True] + [False] * 8]
    assert output.seen["r18"].nonzero()[:, 1].tolist() == [1]
    assert output.seen["r34"].nonzero()[:, 1].tolist() == [6]
    assert output.seen_light.nonzero()[:, 1].tolist() == [0, 1, 2, 6, 7, 8]
    assert decoded_frames(output).tolist() == [6]
    with torch.no_grad():
        own = system.answer(system._unroll(views, lambda logits: F.one_hot(logits.argmax(1), 7).float()).hidden[0, 8])
        parts = [system.classify[name](views[name][0, at]) for name, at in (("heavy", 0), ("r18", 1), ("r34", 6))]
        expected = torch.stack([*parts, own]).mean(dim=0).softmax(dim=0)
    assert torch.allclose(output.probabilities[0], expected, atol=1e-6)
    looks, classified = 6 * matrix_gmacs(system.cell, system.act), (6 + 4 + 5 + 7) * C / 1e9
    assert float(system.own_gmacs(output)[0]) == pytest.approx(looks + classified)
    assert float(video_gmacs(system, output, PRICES)[0]) == pytest.approx(4 + 2 + 0.5 + 6 * 0.05, rel=1e-5)


@pytest.mark.parametrize(("skip", "length"), [(SKIP1, 1), (SKIP2, 2), (SKIP4, 4)])
def test_the_length_of_each_skip(skip: int, length: int) -> None:
    output = Scripted().run(views_of([[skip] + [R50] * 7]))
    assert output.seen_heavy[0].tolist() == [number >= length for number in range(8)]


def test_skips_count_real_frames_and_may_reach_over_the_end() -> None:
    mask = torch.tensor([[True, False, True, False, True, True], [True, True, True, False, False, False]])
    output = Scripted().run(views_of([[SKIP2, R50, R50, R50, R50, R50], [R50, SKIP4, R50, R50, R50, R50]], mask))
    assert output.seen_heavy.tolist() == [[False] * 4 + [True, True], [True] + [False] * 5]


def test_a_skip_follows_a_skip() -> None:
    output = Scripted().run(views_of([[SKIP2, R50, SKIP2, R50, R50]]))
    assert output.seen_heavy.nonzero()[:, 1].tolist() == [4]
    assert output.seen_light.nonzero()[:, 1].tolist() == [0, 2, 4]


def test_both_states_stand_still_inside_a_skip() -> None:
    system, views = small(), random_views(masked=False)
    actions = system._unroll(views, lambda logits: F.one_hot(torch.full((len(logits),), SKIP2), 7).float())
    assert actions.looked[0].tolist() == [True, False] * 4
    assert torch.equal(actions.hidden[:, 0], actions.hidden[:, 1])
    # As if the skipped frames were not there.
    short = Views({name: views[name][:, ::2] for name in views.sets})
    every = system._unroll(short, lambda logits: F.one_hot(torch.full((len(logits),), SKIP1), 7).float())
    assert torch.equal(every.hidden, actions.hidden[:, ::2])


def test_the_state_is_carried_from_look_to_look() -> None:
    system, views = small(), random_views()
    actions = system._unroll(views, lambda logits: F.one_hot(torch.full((len(logits),), SKIP2), 7).float())
    for video in range(10):
        state = (torch.zeros(1, 7), torch.zeros(1, 7))
        for rank, position in enumerate(views.real[video].nonzero()[:, 0].tolist()):
            if rank % 2 == 0:
                with torch.no_grad():
                    state = system.cell(views.light[video : video + 1, position], state)
            assert torch.allclose(actions.hidden[video, position], state[0][0], atol=1e-6)


def test_one_processed_frame_is_not_divided() -> None:
    system, views = Scripted(), views_of([[SKIP2, R50, R34, SKIP4, R50]])
    with torch.no_grad():
        expected = system.classify["r34"](views["r34"][0, 2]).softmax(dim=0)
    assert torch.allclose(system.run(views).probabilities[0], expected, atol=1e-6)


def test_everything_skipped_says_nothing() -> None:
    output = Scripted().run(views_of([[SKIP4] * 5]))
    assert torch.allclose(output.probabilities, torch.full((1, C), 1 / C))
    assert output.seen_light.nonzero()[:, 1].tolist() == [0, 4]


# ---- what it reads and says


@pytest.mark.parametrize(("action", "name"), [(R50, "heavy"), (R34, "r34"), (R18, "r18")])
def test_all_weight_on_one_action_is_that_networks_tsn(action: int, name: str) -> None:
    system, views = Scripted(), views_of([[action] * 6] * 4)
    output = system.run(views)
    with torch.no_grad():
        expected = system.classify[name](views[name]).mean(dim=1).softmax(dim=1)
    assert torch.allclose(output.probabilities, expected, atol=1e-6)
    assert {one: int(seen.sum()) for one, seen in output.seen.items() if one != "light"} == {
        **dict.fromkeys(("heavy", "r34", "r18"), 0),
        name: 24,
    }
    loss, _ = system.loss(views, torch.eye(C)[[0, 1, 2, 0]], phase="policy", generator=torch.Generator().manual_seed(0))
    label = -expected[range(4), [0, 1, 2, 0]].log().mean()
    usage = torch.zeros(7)
    usage[action] = 1
    cost = system.prices(torch.device("cpu"))[action] + 3 * imbalance(usage)
    assert loss.item() == pytest.approx(float(0.95 * label + 0.05 * cost), rel=1e-4)


def test_only_what_is_marked_is_read_and_all_of_it() -> None:
    system, views = small(), random_views()
    system.act.weight.data *= 4
    output = system.run(views)
    assert all(frames.any() for frames in output.seen.values())
    assert not any(bool((frames & ~views.real).any()) for frames in output.seen.values())
    used = torch.stack([output.seen[name] for name in ("heavy", "r34", "r18")])
    assert used.sum(dim=0).max() == 1  # at most one network a frame
    unseen = {name: ~output.seen[name][:, :, None] for name in views.sets}
    poisoned = Views({name: views[name].masked_fill(unseen[name], math.nan) for name in views.sets}, views.mask)
    again = system.run(poisoned)
    assert torch.equal(again.probabilities, output.probabilities)
    for name, frames in output.seen.items():
        video, position = frames.nonzero()[0].tolist()
        values = views[name].clone()
        values[video, position] = math.nan
        changed = system.run(Views({**views.sets, name: values}, views.mask))
        assert not torch.equal(changed.probabilities[video], output.probabilities[video]), name


def test_it_is_online_and_videos_do_not_touch() -> None:
    system, views = small(), random_views(masked=False)
    whole, start = system.run(views), system.run(Views({name: views[name][:, :5] for name in views.sets}))
    for name in views.sets:
        assert torch.equal(whole.seen[name][:, :5], start.seen[name])
    alone = system.run(views.some(torch.tensor([4])))
    assert torch.allclose(alone.probabilities[0], whole.probabilities[4], atol=1e-6)
    assert all(torch.equal(alone.seen[name][0], whole.seen[name][4]) for name in views.sets)


def test_at_run_time_nothing_is_drawn() -> None:
    system, views = small(dropout=0.5), random_views()
    outputs = [predict(system, views, seed=seed) for seed in (0, 1)]
    assert torch.equal(outputs[0].probabilities, outputs[1].probabilities)
    likeliest = system._unroll(views, lambda logits: F.one_hot(logits.argmax(1), 7).float())
    assert torch.equal(outputs[0].seen_heavy, likeliest.chosen == R50)


def test_the_penalty_is_for_each_gmac() -> None:
    """ResNet-34 leads by 1 and costs 1.76 GMACs more than ResNet-18, whatever else is possible."""
    system = small(r34_gmacs=2.245, r18_gmacs=0.485)
    with torch.no_grad():
        system.act.weight.zero_()
        system.act.bias.copy_(torch.tensor([-9.0, 1.0, 0.0, -9.0, -9.0, -9.0, -9.0]))
    views, change = random_views(masked=False), 1 / (2.245 - 0.485)
    assert system.with_threshold(change - 1e-3).run(views).seen["r34"].all()
    assert system.with_threshold(change + 1e-3).run(views).seen["r18"].all()
    assert system.config["cost_penalty"] == 0.0


# ---- the loss


def test_usage_shares_sum_to_one_and_equal_usage_costs_nothing() -> None:
    system, views = small().train(), random_views()
    actions = system._drawn(views, 1.0, torch.Generator().manual_seed(0))
    usage = usage_shares(actions.weights)
    assert float(usage.detach().sum()) == pytest.approx(1)
    counts = torch.bincount(actions.chosen[views.real], minlength=ACTIONS)
    assert torch.allclose(usage, counts / views.real.sum(), atol=1e-6)  # frames inside of a skip count for it
    assert (actions.chosen == -1).equal(~views.real)
    equal = torch.full((7,), 1 / 7, requires_grad=True)
    assert imbalance(equal).item() == 0
    imbalance(equal).backward()
    assert equal.grad is not None
    assert equal.grad.isfinite().all()
    assert float(imbalance(F.one_hot(torch.tensor(2), 7).float())) == pytest.approx(math.sqrt(6 / 7))


def test_the_loss_by_hand() -> None:
    system, views = small(alpha=0.7, balance=2.0), random_views()
    labels = torch.eye(C)[torch.arange(30) % C]
    loss, parts = system.loss(views, labels, phase="policy", generator=torch.Generator().manual_seed(5), progress=0.3)
    actions = system._drawn(views, system.temperature(0.3), torch.Generator().manual_seed(5))
    total = 0.0
    with torch.no_grad():
        for video in range(30):
            logits = []
            for position in range(8):
                action = int(actions.chosen[video, position])
                if 0 <= action < OWN:
                    name = ("heavy", "r34", "r18")[action]
                    logits.append(system.classify[name](views[name][video, position]))
                elif action == OWN:
                    logits.append(system.answer(actions.hidden[video, position]))
            mean = torch.stack(logits).mean(dim=0) if logits else torch.zeros(C)
            total += float(F.cross_entropy(mean, torch.tensor(video % C)))
    shares = torch.bincount(actions.chosen[views.real], minlength=7) / views.real.sum()
    cost = float(4.089 * shares[0] + 2.245 * shares[1] + 0.485 * shares[2])
    spread = float(((shares - 1 / 7) ** 2).sum().sqrt())
    assert parts["label"].item() == pytest.approx(total / 30, rel=1e-4)
    assert parts["cost"].item() == pytest.approx(cost, rel=1e-4)
    assert parts["balance"].item() == pytest.approx(spread, rel=1e-4)
    assert loss.item() == pytest.approx(0.7 * total / 30 + 0.3 * (cost + 2 * spread), rel=1e-4)


def test_the_gradient_of_the_cost_pushes_off_the_dear_actions() -> None:
    system, views = small(alpha=0.0, balance=0.0), random_views(200)
    with torch.no_grad():
        system.act.weight.zero_(), system.act.bias.zero_()
    loss, _ = system.loss(
        views, torch.eye(C)[torch.arange(200) % C], phase="policy", generator=torch.Generator().manual_seed(0)
    )
    loss.backward()
    assert system.act.bias.grad is not None
    step = -system.act.bias.grad
    assert step[R50] < step[R34] < 0 < step[OWN]
    assert step[R18] > step[R34]
    assert all(step[skip] > 0 for skip in (SKIP1, SKIP2, SKIP4))


def test_actions_are_drawn_with_their_probabilities() -> None:
    system = small()
    with torch.no_grad():
        system.act.weight.zero_()
        system.act.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5, -9.0, -9.0, -9.0]))
        wanted = system.act.bias.softmax(dim=0)
    views = random_views(2000, masked=False)
    for temperature in (0.5, 5.0):  # which changes gradients alone
        drawn = system._drawn(views, temperature, torch.Generator().manual_seed(2))
        shares = torch.bincount(drawn.chosen.flatten(), minlength=7) / drawn.chosen.numel()
        assert torch.allclose(shares, wanted, atol=0.012)


def test_gradients_reach_what_a_phase_trains_and_no_padding() -> None:
    views = random_views()
    labels = torch.eye(C)[torch.arange(30) % C]
    for phase in ARNet.phases:
        system = small()
        system.train_phase(phase)
        poisoned = {
            name: views[name].masked_fill(~views.real[:, :, None], math.nan).requires_grad_() for name in views.sets
        }
        loss, _ = system.loss(
            Views(poisoned, views.mask), labels, phase=phase, generator=torch.Generator().manual_seed(0)
        )
        loss.backward()
        for weight in system.phase_parameters(phase):
            assert weight.grad is not None
            assert weight.grad.isfinite().all()
            assert weight.grad.any()
        for features in poisoned.values():
            assert features.grad is None or not features.grad[~views.real].any()
        # The policy sees all of its features where it is fixed, as at run time.
        assert (system.drop_light.training, system.drop.training) == (phase == "policy", True)
    assert [name for name, _ in small().named_parameters() if name.startswith("classify")] == [
        name for name, weight in small().named_parameters() if weight.shape[0] == C and not name.startswith("answer")
    ]


def test_the_first_phase_is_the_tsn_of_each_network() -> None:
    system, views = small(dropout=0.0), random_views()
    labels = torch.eye(C)[torch.arange(30) % C]
    loss, parts = system.loss(views, labels, phase="class_layers")
    expected = []
    for name in ("heavy", "r34", "r18"):
        filled = views[name].masked_fill(~views.real[:, :, None], 0)
        means = filled.sum(dim=1) / views.real.sum(dim=1, keepdim=True)
        expected.append(F.cross_entropy(system.classify[name](means), torch.arange(30) % C))
        assert parts[name].item() == pytest.approx(expected[-1].item(), rel=1e-4)
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


def test_the_temperature_falls_as_published() -> None:
    system = ARNet(1, 1, 1, 1, 2)
    for epoch in (0, 10, 25, 50):
        assert system.temperature(epoch / 50) == pytest.approx(5 * math.exp(-0.045 * epoch), rel=0.01)


def test_the_policy_is_fixed_in_the_last_phase() -> None:
    system, views = small(), random_views()
    labels = torch.eye(C)[torch.arange(30) % C]
    before = {name: weight.clone() for name, weight in system.state_dict().items()}
    seen = system.run(views).seen
    fit(system, views, labels, epochs={"refit": 2}, batch_size=10)
    for name, weight in system.state_dict().items():
        assert torch.equal(weight, before[name]) != name.startswith("classify"), name
    assert all(torch.equal(frames, seen[name]) for name, frames in system.run(views).seen.items())


# ---- it learns


class Random(ARNet):
    """Takes actions at random, with given probabilities, in place of the policy."""

    shares: Tensor

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        kept = self._unroll
        drawn = lambda logits: F.one_hot(  # noqa: E731
            torch.multinomial(self.shares, len(logits), replacement=True, generator=generator), 7
        ).float()
        self._unroll = lambda views, choose: kept(views, drawn)  # type: ignore[method-assign]
        try:
            return super().decide(views, generator)
        finally:
            self._unroll = kept  # type: ignore[method-assign]


def test_the_policy_beats_random_actions_of_the_same_cost(tmp_path: Path) -> None:
    """Two of twelve frames show the class; the light features say which, and nothing of the class."""
    bank = make_learnable_bank(tmp_path / "bank", train=320, dev=200)
    sets = {name: name for name in ARNet.feature_sets}
    views, labels = bank_views(bank.split("train"), **sets, num_candidates=12)
    torch.manual_seed(0)
    system = ARNet(6, 6, 6, 3, 4, hidden=16, dropout=0.1, alpha=0.9)
    fit(system, views, labels, epochs={"class_layers": 4, "policy": 20, "refit": 2}, lr=2e-2)
    views, labels = bank_views(bank.split("dev"), **sets, num_candidates=12)
    truth = labels.argmax(dim=1)

    def measured(system: ARNet) -> tuple[float, float]:
        output = predict(system, views)
        right = (output.probabilities.argmax(dim=1) == truth).double().mean()
        return float(right), float(video_gmacs(system, output, PRICES).mean())

    accuracy, spent = measured(system)
    assert accuracy > 0.95
    usage = system._unroll(views.to(system.device), lambda logits: F.one_hot(logits.argmax(1), 7).float()).weights
    other = Random(**system.config)
    other.load_state_dict(system.state_dict())
    other.eval()
    # The same usage of the actions; skips stand for several frames.
    shares = usage_shares(usage).detach() / torch.tensor([1, 1, 1, 1, 1, 2, 4])
    other.shares = shares
    random_accuracy, random_spent = measured(other)
    assert random_spent == pytest.approx(spent, rel=0.1)
    assert accuracy > random_accuracy + 0.15
    # The dial goes on from there.
    cheap_accuracy, cheap = measured(system.with_threshold(1.0))  # type: ignore[arg-type]
    assert cheap < spent
    assert cheap_accuracy > random_accuracy + 0.1


def test_the_same_seed_gives_the_same_weights() -> None:
    views, labels = random_views(), torch.eye(C)[torch.arange(30) % C]
    systems = []
    for _ in range(2):
        systems.append(small(dropout=0.5))
        fit(systems[-1], views, labels, epochs=2, batch_size=8, seed=4)
    assert all(torch.equal(one, two) for one, two in zip(*(s.state_dict().values() for s in systems), strict=True))


# ---- by the command, and mistakes


def test_by_the_command_from_saved_networks(tmp_path: Path) -> None:
    """Features of four networks are made in one pass; the light one sees 84 pixels; the folder is evaluated."""
    networks, bank = make_networks(tmp_path / "networks"), make_plain_bank(tmp_path / "bank")
    for number, name in enumerate(("r34", "r18")):
        torch.manual_seed(number)
        classes = bank.classes
        network = so.create_classifier("timm:test_resnet", class_names=classes, input_size=48 - 16 * number)
        so.save_classifier(network, tmp_path / name)
    arguments = [
        *("train", str(bank.path), "--sampler", "ar-net", "--out", str(tmp_path / "run"), "--json", "--device", "cpu"),
        *("--classifier", str(networks.classifier), "--weights", str(networks.weights)),
        *("--epochs", "1", "--batch-size", "4", "--set", "num_candidates=4", "--set", "hidden=8"),
    ]
    missing = CliRunner().invoke(app, arguments)
    assert "has no features 'r34', which ar-net needs" in str(missing.exception)
    done = CliRunner().invoke(
        app, [*arguments, "--features", f"r34={tmp_path / 'r34'}", "--features", f"r18={tmp_path / 'r18'}"]
    )
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("computing features") == 1
    system, kept = so.load_system(tmp_path / "run"), so.Bank(bank.path).feature_sets
    light = light_network(networks.weights, 84).fingerprint()
    assert system.about["light"]["fingerprint"] == light != light_network(networks.weights).fingerprint()
    assert kept[light]["gmacs"] == pytest.approx(0.052, abs=0.002)
    sets = system.about["sets"]
    assert list(sets) == ["r34", "r18"]
    for name, facts in sets.items():
        assert facts["fingerprint"] == so.create_classifier(tmp_path / name).fingerprint()
        assert system.config[f"{name}_gmacs"] == facts["gmacs"] == kept[facts["name"]]["gmacs"]
        assert system.config[f"{name}_width"] == facts["width"]
    assert json.loads(done.stdout)["sets"] == {name: facts["fingerprint"] for name, facts in sets.items()}
    other = CliRunner().invoke(
        app, [*arguments, "--features", f"r34={tmp_path / 'r18'}", "--features", f"r18={tmp_path / 'r18'}"]
    )
    assert "sets.r34.fingerprint was" in str(other.exception)
    so.add_teacher(bank, so.create_classifier(networks.classifier))
    found = so.evaluate(bank, f"ar={tmp_path / 'run'}@all", num_frames=1, num_candidates=4, split="dev", bootstrap=0)
    assert [row.policy for row in found.rows] == [f"ar@{value}" for value in ARNet.threshold_values]
    uniform = so.evaluate(
        bank, f"ar={tmp_path / 'run'}@uniform@2", num_frames=1, num_candidates=4, split="dev", bootstrap=0
    )
    assert [(row.policy, row.frames_decoded <= 2) for row in uniform.rows] == [("ar@uniform@2", True)]
    assert all(row.gmacs == pytest.approx((row.sampler_gmacs or 0) + (row.classifier_gmacs or 0)) for row in found.rows)


def test_the_recipe_and_wrong_settings() -> None:
    recipe = read_baseline_recipe("ar-net")
    assert recipe.settings["skips"] == [1, 2, 4]
    assert not {"heavy_gmacs", "r34_width"} & set(recipe.settings)  # these follow from the bank
    for wrong in (
        {"alpha": 1.1},
        {"dropout": 1.0},
        {"temperature": [1.0]},
        {"temperature": [0.0, 1.0]},
        {"skips": [0]},
        {"cost_penalty": -1},
        {"balance": -1},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            recipe.changed(**wrong)
    with pytest.raises(InvalidArgument, match="ar-net needs r34 and r18 features, but these views have heavy, light"):
        small().run(Views({"heavy": torch.zeros(1, 2, 6), "light": torch.zeros(1, 2, 7)}))


def test_several_labels() -> None:
    system, views = small(multi_label=True), random_views()
    output = system.run(views)
    assert not np.allclose(output.probabilities.sum(dim=1), 1)
    loss, _ = system.loss(views, torch.ones(30, C), phase="policy", generator=torch.Generator().manual_seed(0))
    assert loss.isfinite()
