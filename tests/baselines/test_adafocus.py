"""AdaFocus: its patches and rewards by hand, against a plain loop, and on pictures whose object sits in one place."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosampler as so
from sosampler import wrap_classifier
from sosampler.baselines.adafocus import AdaFocus, Look, discounted_returns, normalised, ppo_losses
from sosampler.baselines.base import (
    FRAMES,
    Baseline,
    BaselineOutput,
    UniformFrames,
    Views,
    predict,
    save_baseline,
    video_gmacs,
)
from sosampler.baselines.patches import (
    GlanceMaps,
    PatchGrid,
    cut_patches,
    grid_corners,
    sample_patches,
)
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import create_backbone
from sosampler.training.train_baseline import fit
from tests.factories import make_plain_bank, small_net

C, T, GRID, SIDE, PATCH = 3, 3, 3, 28, 10  # pictures of 28 pixels; patches of the grid overlap by one
POSITIONS = 49  # of the glance's map
WIDTHS = {"patches_width": GRID**2 * 12, "glance_width": POSITIONS}
TINY = "timm:test_resnet"  # its map has 1/32 of the side


def pictures(batch: int, seed: int, patch: int = PATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Grey noise with a coloured square in one of the nine places; its colour is the class, its brightness is not.

    Returns pictures [B, T, 3, SIDE, SIDE], classes [B] and places [B], the action that sees the whole square.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, places = (torch.randint(count, (batch,), generator=generator) for count in (C, GRID**2))
    frames = 0.3 * torch.rand(batch, T, 1, SIDE, SIDE, generator=generator).expand(-1, -1, 3, -1, -1).clone()
    corners = grid_corners(places, grid=GRID, patch=patch, size=SIDE) + patch // 2 - 2  # the middle of the patch
    for video, (y, x) in enumerate(corners.tolist()):
        frames[video, :, :, y : y + 4, x : x + 4] = 0.4
        frames[video, :, classes[video], y : y + 4, x : x + 4] = 2.2
    return frames, classes, places


def views_of(frames: Tensor) -> Views:
    """Simple networks: the glance sees 7 x 7 grey cells, the local one the colours of 2 x 2 cells of a patch."""
    flat = frames.flatten(0, 1)
    actions = torch.arange(GRID**2)
    corners = grid_corners(actions, grid=GRID, patch=PATCH, size=SIDE).tolist()
    patches = torch.stack([F.adaptive_max_pool2d(flat[:, :, y : y + PATCH, x : x + PATCH], 2) for y, x in corners], 1)
    # Mean of the colours of a cell minus its grey: noise shows no class.
    features = patches - patches.mean(dim=2, keepdim=True)
    glance = F.adaptive_avg_pool2d(flat.mean(dim=1, keepdim=True), 7)
    sets = {"patches": features.flatten(1), "glance": glance.flatten(1)}
    return Views({name: values.unflatten(0, frames.shape[:2]) for name, values in sets.items()})


def problem(batch: int, seed: int) -> tuple[Views, Tensor, Tensor]:
    frames, classes, places = pictures(batch, seed)
    return views_of(frames), F.one_hot(classes, C).bool(), places


SMALL = {"grid": GRID, "hidden": 12, "policy_width": 24, "policy_channels": 4, "dropout": 0.0}


def small(kind: type[AdaFocus] = AdaFocus, **given: Any) -> AdaFocus:
    torch.manual_seed(0)
    return kind(C, **{**WIDTHS, **SMALL, **given})


def untrained(**given: Any) -> AdaFocus:
    """Random weights that are large enough to choose different patches and to be sure of some classes."""
    system = small(**given)
    with torch.no_grad():
        for layer in (system.policy.reduce, system.policy.embed, system.policy.actor, system.classify):
            layer.weight.mul_(8)
    return system


class AtRandom(AdaFocus):
    """The same with patches at random."""

    def best_places(self, states: Tensor) -> Tensor:
        return torch.randint(self.grid**2, states.shape[:-1])


def trained(kind: type[AdaFocus] = AdaFocus, **epochs: int) -> AdaFocus:
    system = small(kind)
    views, labels, _ = problem(400, seed=1)
    fit(system, views, labels, epochs={"classifier": 10, "finetune": 5, **epochs}, lr=0.01, batch_size=40)
    return system


def by_hand(system: AdaFocus, views: Views, video: int, action: int | None = None) -> tuple[Tensor, list[int]]:
    """Probabilities after each frame [T, C] of one video, and its patches; an `action` replaces the policy."""
    state, of_policy = torch.zeros(1, system.config["hidden"]), torch.zeros(1, system.config["policy_width"])
    answers, actions = [], []
    with torch.no_grad():
        for step in range(views.shape[1]):
            cells = views["glance"][video, step].view(1, -1, 7, 7)
            seen = system.policy.embed(system.policy.reduce(cells).clamp_min(0).reshape(1, -1)).clamp_min(0)
            of_policy = system.policy.cell(seen, of_policy)
            actions.append(int(system.policy.actor(of_policy).argmax()) if action is None else action)
            patch = views["patches"][video, step].view(GRID**2, -1)[actions[-1]]
            state = system.cell(torch.cat([cells.mean(dim=(2, 3))[0], patch])[None], state)
            answers.append(system.classify(state).softmax(dim=1)[0])
    return torch.stack(answers), actions


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def accuracy(output: BaselineOutput, labels: Tensor) -> float:
    return float(labels.gather(1, output.probabilities.argmax(dim=1, keepdim=True)).float().mean())


# ---- patches


@pytest.mark.parametrize("patch", [96, 128, 160, 192])
def test_corners_span_the_frame(patch: int) -> None:
    corners = grid_corners(torch.arange(49), grid=7, patch=patch, size=224)
    along = [int(place / 6 * (224 - patch)) for place in range(7)]
    assert corners.tolist() == [[y, x] for y in along for x in along]
    assert corners[0].tolist() == [0, 0]
    assert corners[48].tolist() == [224 - patch] * 2
    assert grid_corners(torch.tensor([[4], [20]]), grid=5, patch=patch, size=224).tolist() == [
        [[0, 224 - patch]],
        [[224 - patch, 0]],
    ]


def test_patches_are_cut_where_they_should() -> None:
    frames = torch.rand(4, 3, 20, 24)
    corners = torch.tensor([[0, 0], [3, 8], [8, 12], [5, 1]])
    for cut in (cut_patches(frames, corners, 12), sample_patches(frames, corners.float(), 12)):
        for number, (y, x) in enumerate(corners.tolist()):
            assert torch.allclose(cut[number], frames[number, :, y : y + 12, x : x + 12], atol=1e-5)
    between = sample_patches(frames[:1], corners[:1] + torch.tensor([[0.25, 0.5]]), 12)[0]
    rows = [frames[0, :, y : y + 12] for y in (0, 1)]
    halves = [(row[:, :, :12] + row[:, :, 1:13]) / 2 for row in rows]
    assert torch.allclose(between, 0.75 * halves[0] + 0.25 * halves[1], atol=1e-5)


@pytest.mark.parametrize("start", [(0.0, 0.0), (20.0, 3.0), (2.0, 22.0)])
def test_the_gradient_of_a_crop_moves_it_towards_the_object(start: tuple[float, float]) -> None:
    """An object that fades slowly, at (30, 24); more of it in the middle of a patch of 16 is better."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    frame = torch.exp(-((y - 30) ** 2 + (x - 24) ** 2) / 200)[None, None]
    corner = torch.tensor([start], requires_grad=True)
    distance = (corner.detach() + 7.5 - torch.tensor([30.0, 24.0])).norm()
    for _ in range(60):
        seen = sample_patches(frame, corner, 16).mean()
        (gradient,) = torch.autograd.grad(seen, corner)
        corner = (corner + 40 * gradient).detach().clamp(0, 32).requires_grad_()
        closer = (corner.detach() + 7.5 - torch.tensor([30.0, 24.0])).norm()
        assert closer <= distance + 0.1
        distance = closer
    assert corner.detach()[0].tolist() == pytest.approx([22.5, 16.5], abs=1)


# ---- reinforcement


def test_ppo_by_hand() -> None:
    old = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    new = torch.tensor([0.9, 0.1, 0.9, 0.1]).log().requires_grad_()  # ratios 1.8 and 0.2
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    losses = ppo_losses(new, old, advantages, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, -0.2, 1.8, 0.8])
    losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, -0.2, 1.8, 0])  # clipped ones have none


def test_the_ratio_is_one_on_the_first_pass() -> None:
    log = torch.randn(5).requires_grad_()
    advantages = torch.randn(5)
    losses = ppo_losses(log, log.detach(), advantages, 0.2)
    assert torch.equal(losses.detach(), -advantages)
    losses.sum().backward()
    assert log.grad is not None
    assert torch.allclose(log.grad, -advantages)  # that of log p times the advantage
    # In the loss: returns have mean 0, so that the mean advantage is that of the values, times -1.
    system, (views, labels, _) = small(), problem(20, seed=2)
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase="policy")
    expected = parts["policy"] + 0.5 * parts["value"] - 0.01 * parts["entropy"]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert 0 < parts["entropy"].item() <= math.log(GRID**2)
    rows, steps = views.real.nonzero(as_tuple=True)
    values = system.policy.value(system._states(system.look(views, rows, steps), views.real))
    assert parts["policy"].item() == pytest.approx(values.mean().item(), abs=1e-5)
    assert parts["value"].item() == pytest.approx(1 + (values**2).mean().item(), abs=0.2)


def test_returns_and_their_normalisation() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, torch.nan, 3.0]])
    real = torch.tensor([[True, True, True], [True, False, True]])
    returns = discounted_returns(rewards, real, 0.7)
    assert returns[0].tolist() == pytest.approx([1 + 0.7 * (2 + 0.7 * 4), 2 + 0.7 * 4, 4])
    assert returns[1].tolist() == pytest.approx([1 + 0.7 * 3, 0, 3])
    even = normalised(returns, real)
    assert even[real].mean().item() == pytest.approx(0, abs=1e-6)
    assert even[real].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert not even[~real].any()
    assert not normalised(torch.ones(2, 3), real).any()


def test_rewards() -> None:
    system, (views, labels, _) = untrained(), problem(6, seed=3)
    real = views.real
    rows, steps = real.nonzero(as_tuple=True)
    look = system.look(views, rows, steps)
    generator = torch.Generator().manual_seed(0)
    first, second = (system.random_places(len(rows), generator) for _ in range(2))
    assert set(first.tolist()) <= set(range(GRID**2))
    assert not system.rewards(look, first, first, real, labels).any()
    rewards = system.rewards(look, first, second, real, labels)
    assert rewards.abs().max() > 0.01
    with torch.no_grad():  # one video by hand: the other patch follows the same state
        video, state = 2, torch.zeros(1, 12)
        for step in range(T):
            frame = video * T + step
            inputs = [torch.cat([look.glance[frame], look.detail[frame, p[frame]]])[None] for p in (first, second)]
            after = [system.classify(system.cell(seen, state)).softmax(dim=1)[0] for seen in inputs]
            label = int(labels[video].long().argmax())
            assert rewards[video, step].item() == pytest.approx((after[0] - after[1])[label].item(), abs=1e-6)
            state = system.cell(inputs[0], state)


# ---- running


def test_run_is_the_loop_by_hand() -> None:
    system, (views, _, _) = untrained(), problem(30, seed=4)
    output, patches = system.run(views), set()
    for video in range(30):
        answers, actions = by_hand(system, views, video)
        patches.update(actions)
        assert torch.allclose(output.probabilities[video], answers[-1], atol=1e-5)
    assert len(patches) > 2
    assert all(seen.all() for seen in output.seen.values())
    assert set(output.seen) == {"patches", "glance"}


@pytest.mark.parametrize("action", [0, 4, 8])
def test_a_forced_action_is_the_classifier_on_that_patch(action: int) -> None:
    system, (views, _, _) = untrained(), problem(10, seed=4)
    with torch.no_grad():
        system.policy.actor.bias.copy_(1e4 * F.one_hot(torch.tensor(action), GRID**2))
    output = system.run(views)
    for video in range(10):
        answers, _ = by_hand(system, views, video, action)
        assert torch.allclose(output.probabilities[video], answers[-1], atol=1e-5)
    # The patch in the middle is what it sees without its policy.
    uniform = UniformFrames(system, T).run(views)
    assert torch.allclose(uniform.probabilities, output.probabilities, atol=1e-5) == (action == 4)
    # Phase "finetune" trains on the same patches.
    labels = F.one_hot(torch.arange(10) % C, C).bool()
    answers = torch.stack([by_hand(system, views, video, action)[0] for video in range(10)])
    losses = -(answers.log() * labels[:, None]).sum(dim=2)
    assert system.loss(views, labels, phase="finetune")[0].item() == pytest.approx(losses.mean().item(), rel=1e-4)


@pytest.mark.parametrize("confidence", [0.4, 0.5, 0.7, 1.0])
def test_it_stops_once_it_is_sure(confidence: float) -> None:
    system, (views, _, _) = untrained().with_threshold(confidence), problem(40, seed=5)
    assert isinstance(system, AdaFocus)
    output = system.run(views)
    counts = output.seen_in("patches").sum(dim=1)
    for video in range(40):
        answers, _ = by_hand(system, views, video)
        sure = (answers.amax(dim=1) > confidence).nonzero()[:, 0].tolist()
        last = sure[0] if sure else T - 1
        assert counts[video] == last + 1
        assert torch.allclose(output.probabilities[video], answers[last], atol=1e-5)
    assert output.seen_in("patches")[:, 0].all()
    assert (counts == T).all() == (confidence == 1.0)
    if confidence in (0.5, 0.7):
        assert len(set(counts.tolist())) > 1
    # What it has not seen, it has not read.
    unread = {
        name: values.masked_fill(~output.seen[name][:, :, None], torch.nan) for name, values in views.sets.items()
    }
    assert torch.equal(system.run(Views(unread)).probabilities, output.probabilities)


def test_at_1_it_sees_all_frames_even_where_it_is_quite_sure() -> None:
    system, (views, _, _) = untrained(), problem(5, seed=5)
    with torch.no_grad():
        system.classify.bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    output = system.run(views)
    assert (output.probabilities[:, 0] == 1).all()
    assert output.seen_in("patches").all()
    assert system.with_threshold(0.999).run(views).seen_in("patches").sum(dim=1).tolist() == [1] * 5


def test_padding_is_never_read() -> None:
    system, (views, labels, _) = untrained(), problem(12, seed=6)
    mask = torch.rand(12, T, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, 1] = True
    poisoned = Views(
        {name: values.masked_fill(~mask[:, :, None], torch.nan) for name, values in views.sets.items()}, mask
    )
    output = system.run(poisoned)
    assert torch.equal(output.seen_in("glance"), mask)
    for video in range(12):
        short = Views({name: values[video : video + 1, mask[video]] for name, values in views.sets.items()})
        assert torch.allclose(output.probabilities[video], system.run(short).probabilities[0], atol=1e-5)
    for phase in ("classifier", "policy", "finetune"):
        loss, _ = system.loss(poisoned, labels, generator=torch.Generator().manual_seed(0), phase=phase)
        assert loss.isfinite()


def test_costs_are_the_operations_that_run() -> None:
    system, (views, _, _) = untrained().with_threshold(0.5), problem(10, seed=7)
    output = system.run(views)
    own = system.own_gmacs(output)
    for video in range(10):
        with FlopCounterMode(display=False) as counter:
            system.run(views.some(torch.tensor([video])))
        assert float(own[video]) == pytest.approx(counter.get_total_flops() / 2e9)
    assert len(set(own.tolist())) > 1
    frames = output.seen_in("patches").sum(dim=1)
    prices = {"patches": 1.337, "glance": 0.301}
    assert torch.allclose(video_gmacs(system, output, prices), 1.638 * frames + own)
    # Without its policy.
    uniform = UniformFrames(system, 2)
    with FlopCounterMode(display=False) as counter:
        output = uniform.run(views.some(torch.tensor([0])))
    assert float(uniform.own_gmacs(output)) == pytest.approx(counter.get_total_flops() / 2e9)


@pytest.mark.parametrize(("price", "published"), [(1.337, 26.6), (2.087, 38.6)])
def test_costs_are_the_published_ones(price: float, published: float) -> None:
    """Of 16 frames with patches of 128 and 160 pixels."""
    with torch.device("meta"):
        system = AdaFocus(200, 49 * 2048, 49 * 1280)
    seen = torch.ones(1, 16, dtype=torch.bool)
    output = BaselineOutput(torch.zeros(1, 200), {"patches": seen, "glance": seen})
    assert system.policy.gmacs() == pytest.approx(0.010, abs=1e-4)
    cost = video_gmacs(system, output, {"patches": price, "glance": 0.301})
    assert cost.item() == pytest.approx(published, abs=0.1)


def test_thresholds_share_weights_and_cost_more() -> None:
    system, (views, _, _) = untrained(), problem(40, seed=7)
    prices, spent = {"patches": 1.0, "glance": 0.3}, []
    for value in system.threshold_values:
        other = system.with_threshold(value)
        assert next(other.parameters()) is next(system.parameters())
        spent.append(float(video_gmacs(other, other.run(views), prices).mean()))
    assert spent == sorted(spent)
    assert spent[-1] > 1.05 * spent[0]
    with pytest.raises(InvalidArgument, match="confidence=-1"):
        system.with_threshold(-1)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_loaded_one_is_the_saved_one(tmp_path: Path, multi_label: bool) -> None:
    for name, system, views in (
        ("features", untrained(multi_label=multi_label), problem(6, seed=7)[0]),
        ("frames", on_frames(version=2, multi_label=multi_label), pixels(3)),
    ):
        save_baseline(tmp_path / name, system, {})
        loaded = so.load_system(tmp_path / name)
        assert loaded.config == system.config
        assert loaded.feature_sets == system.feature_sets
        assert torch.equal(loaded.run(views).probabilities, system.run(views).probabilities)


# ---- training


def test_several_labels_have_a_loss_in_every_phase() -> None:
    views, labels, _ = problem(6, seed=8)
    labels = labels | labels.roll(1, dims=0)
    for multi_label in (False, True):
        for phase in ("classifier", "policy", "finetune"):
            loss, _ = small(multi_label=multi_label).loss(views, labels, phase=phase)
            assert loss.isfinite()
        assert on_frames(version=2, multi_label=multi_label).loss(pixels(6), labels)[0].isfinite()


def test_each_phase_trains_its_own_layers() -> None:
    views, labels, _ = problem(20, seed=8)
    expected = {"classifier": {"cell", "classify"}, "policy": {"policy"}, "finetune": {"cell", "classify"}}
    for phase, names in expected.items():
        system = small()
        before = {key: value.clone() for key, value in system.state_dict().items()}
        fit(system, views, labels, epochs={phase: 1}, batch_size=10)
        changed = {
            key.partition(".")[0] for key, value in system.state_dict().items() if not torch.equal(value, before[key])
        }
        assert changed == names
    # The phase of version 2 has nothing to train here.
    assert fit(small(), views, labels, epochs={"joint": 1}) == []


def test_the_policy_finds_the_object_and_beats_random_patches() -> None:
    views, labels, places = problem(300, seed=9)
    system = trained(policy=18)
    output = predict(system, views)
    torch.manual_seed(0)  # its patches are drawn by themselves
    random = predict(trained(AtRandom), views)
    focused, guessed = accuracy(output, labels), accuracy(random, labels)
    assert focused > 0.9
    assert focused > guessed + 0.25
    rows, steps = views.real.nonzero(as_tuple=True)
    with torch.no_grad():
        chosen = system.best_places(system._states(system.look(views, rows, steps), views.real))
    near = (
        grid_corners(chosen, grid=GRID, patch=PATCH, size=SIDE)
        - grid_corners(places, grid=GRID, patch=PATCH, size=SIDE)[:, None]
    )
    assert (near == 0).all(dim=2).float().mean() > 0.8  # by chance 0.11
    # Rewards of the trained policy are above those of random patches.
    look = system.look(views, rows, steps)
    drawn = system.random_places(len(rows), torch.Generator().manual_seed(0))
    assert system.rewards(look, chosen.flatten(), drawn, views.real, labels).mean() > 0.02


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels, _ = problem(30, seed=10)
    results = []
    for seed in (0, 0, 1):
        system = small(dropout=0.5)
        fit(system, views, labels, epochs=2, seed=seed, batch_size=10, lr=0.01)
        results.append(system.run(views).probabilities)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


# ---- from pixels


def pixels(batch: int, seed: int = 0) -> Views:
    generator = torch.Generator().manual_seed(seed)
    return Views({FRAMES: torch.randint(256, (batch, T, 3, 64, 64), generator=generator, dtype=torch.uint8)})


def on_frames(**given: Any) -> AdaFocus:
    networks = {"inputs": FRAMES, "local_net": TINY, "glance_net": TINY, "size": 64, "patch": 32}
    return small(**{"patches_width": None, "glance_width": None, **networks, **given})


def test_pixels_and_stored_features_give_the_same() -> None:
    classifier = create_classifier(TINY, num_classes=C, preprocessing=Preprocessing(size=(64, 64), resize=64))
    system = on_frames()
    system.local.net.load_state_dict({k: v for k, v in classifier.net.state_dict().items() if not k.startswith("fc.")})
    views = pixels(5)
    flat = views[FRAMES].flatten(0, 1)
    grid, maps = PatchGrid(classifier, patch=32, grid=GRID), GlanceMaps(system.glance, 64)
    features = {"patches": grid.compute(flat), "glance": maps.compute(flat)}
    assert {name: values.shape[1] for name, values in features.items()} == {"patches": grid.width, "glance": maps.width}
    stored = small(patches_width=grid.width, glance_width=maps.width, size=64, patch=32)
    stored.load_state_dict({k: v for k, v in system.state_dict().items() if not k.startswith(("local.", "glance."))})
    output, other = (
        system.run(views),
        stored.run(Views({name: values.unflatten(0, (5, T)) for name, values in features.items()})),
    )
    assert torch.allclose(output.probabilities, other.probabilities, atol=1e-4)
    costs = video_gmacs(stored, other, {"patches": grid.gmacs(), "glance": maps.gmacs()})
    # The price of a patch includes the classifier's class layer.
    head = T * classifier.net.fc.weight.numel() / 1e9
    assert torch.allclose(video_gmacs(system, output, {}), costs - head, rtol=1e-5)
    with FlopCounterMode(display=False) as counter:
        system.run(views.some(torch.tensor([0])))
    assert float(system.own_gmacs(output)[0]) == pytest.approx(counter.get_total_flops() / 2e9)


def test_frozen_networks_stay_and_tuned_ones_do_not() -> None:
    views, labels = pixels(6), F.one_hot(torch.arange(6) % C, C).bool()
    for tuned in (False, True):
        system = on_frames(tune_local=tuned)
        before = {key: value.clone() for key, value in system.state_dict().items()}
        fit(system, views, labels, epochs={"classifier": 1, "policy": 1, "finetune": 1}, batch_size=6)
        same = {key: torch.equal(value, before[key]) for key, value in system.state_dict().items()}
        assert all(same[key] for key in same if key.startswith("glance."))
        assert any(not same[key] for key in same if key.startswith("local.")) == tuned


def test_version_2_trains_everything_end_to_end() -> None:
    system = on_frames(version=2)
    views, labels = pixels(4), F.one_hot(torch.arange(4) % C, C).bool()
    system.train_phase("joint")
    loss, parts = system.loss(views, labels, generator=torch.Generator().manual_seed(0), phase="joint")
    assert loss.item() == pytest.approx(
        ((parts["focused"] + parts["random"]) / 2 + parts["local"] + parts["glance"]).item(), rel=1e-5
    )
    loss.backward()
    silent = [
        name
        for name, weight in system.named_parameters()
        if weight.grad is None or not bool(weight.grad.abs().sum() > 0)
    ]
    # Residual branches of the two networks start at zero, so that not all of their weights have a gradient yet.
    assert [name for name in silent if not name.startswith(("local.net.layer", "glance.net.layer"))] == []
    # The place of a patch does not teach the glance.
    rows, steps = views.real.nonzero(as_tuple=True)
    places = system.best_places(system._states(system.look(views, rows, steps), views.real))
    found = torch.autograd.grad(places.sum(), list(system.glance.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in found)
    assert system.run(views).probabilities.shape == (4, C)
    # The networks learn at their own rate.
    factors = system.lr_factors("joint")
    assert {factors.get(weight, 1.0) for weight in system.local.parameters()} == {0.1}
    assert {factors.get(weight, 1.0) for weight in system.policy.parameters()} == {1.0}


LARGE = 16  # a patch that shows a part of the object from almost everywhere


class Seen(AdaFocus):
    """Version 2 with networks that need no training: cells of grey, and the colours in the middle of a patch."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.map_side = 7
        self.policy = type(self.policy)(1, 7, 2, reduced=4, width=24, critic=False)
        self.cell = nn.GRUCell(1 + 3, self.config["hidden"])
        self.classify_glance, self.classify_local = nn.Linear(1, C), nn.Linear(3, C)
        self.glance, self.local = nn.Identity(), nn.Identity()

    def look(self, views: Views, rows: Tensor, steps: Tensor) -> Look:
        frames = views[FRAMES][rows, steps] / 100
        return Look(F.adaptive_avg_pool2d(frames.mean(dim=1, keepdim=True), 7), frames)

    def see(self, look: Look, places: Tensor) -> Tensor:
        patches = sample_patches(look.detail, places * (SIDE - LARGE), LARGE)
        y, x = torch.meshgrid(*2 * [torch.arange(LARGE) - (LARGE - 1) / 2], indexing="ij")
        weights = torch.exp(-(y**2 + x**2) / 30)
        colours = (patches * weights).sum(dim=(2, 3)) / weights.sum()
        return 20 * (colours - colours.mean(dim=1, keepdim=True))


def test_version_2_learns_where_the_object_is() -> None:
    frames, classes, places = pictures(160, seed=11, patch=LARGE)
    views, labels = Views({FRAMES: (100 * frames).to(torch.uint8)}), F.one_hot(classes, C).bool()
    torch.manual_seed(0)
    system = Seen(
        C, version=2, inputs=FRAMES, local_net=TINY, glance_net=TINY, **{**SMALL, "size": SIDE, "patch": LARGE}
    )
    fit(system, views, labels, epochs={"joint": 20}, lr=0.02, batch_size=40)
    rows, steps = views.real.nonzero(as_tuple=True)
    with torch.no_grad():
        chosen = system.best_places(system._states(system.look(views, rows, steps), views.real)) * (SIDE - LARGE)
    wanted = grid_corners(places, grid=GRID, patch=LARGE, size=SIDE)[:, None]
    distance = (chosen - wanted).norm(dim=2).mean()
    random = (12 * torch.rand(160, T, 2, generator=torch.Generator().manual_seed(0)) - wanted).norm(dim=2).mean()
    assert distance < 0.4 * random


# ---- on a bank


def few_videos(folder: Path) -> tuple[so.Bank, so.Classifier, Path]:
    """A bank, a classifier of its classes and weights of a glance."""
    bank = make_plain_bank(folder / "bank")
    torch.manual_seed(0)
    classifier = create_classifier(TINY, num_classes=2, preprocessing=Preprocessing(size=(64, 64), resize=64))
    so.save_classifier(classifier, folder / "classifier")
    save_file(create_backbone(TINY).weights_net().state_dict(), folder / "glance.safetensors")
    return bank, classifier, folder / "glance.safetensors"


QUICK = {"hidden": 8, "policy_width": 8, "policy_channels": 2, "grid": 2, "size": 64, "patch": 32, "batch_size": 4}
SHORT = {"epochs": {"classifier": 1, "policy": 1, "finetune": 1, "joint": 1}, "num_candidates": 4, **QUICK}


def test_training_stores_maps_and_patches_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosampler.baselines.adafocus.MOBILENET", TINY)  # a smaller glance
    bank, classifier, weights = few_videos(tmp_path)
    said: list[str] = []
    options: dict[str, Any] = {"sampler": "adafocus", "classifier": tmp_path / "classifier", "weights": weights}
    trained = so.train(bank, out=tmp_path / "run", say=said.append, **options, **SHORT)
    stored = so.Bank(bank.path).feature_sets
    assert sorted(about["network"] for about in stored.values()) == ["map", "patches"]
    kinds = {about["network"]: about for about in stored.values()}
    assert kinds["patches"]["gmacs"] == pytest.approx(PatchGrid(classifier, patch=32, grid=2).gmacs())
    assert any("maps and patches take 0.0 GB on disk" in text for text in said)
    again = so.train(bank, out=tmp_path / "again", say=said.append, **options, **SHORT)
    assert sum("computing features" in text for text in said) == 1
    for key, weight in trained.system.state_dict().items():
        assert torch.equal(weight, again.system.state_dict()[key])
    so.add_teacher(bank, classifier)
    policies = {"adafocus": tmp_path / "run", "plain": f"{tmp_path / 'run'}@uniform@2"}
    result = so.evaluate(bank, policies, num_frames=1, num_candidates=4, classifier=classifier, bootstrap=0)
    row = result.row("adafocus")
    assert row.frames_classified == row.frames_decoded > 2
    assert row.classifier_gmacs == pytest.approx(row.frames_classified * kinds["patches"]["gmacs"])
    glance = row.frames_decoded * kinds["map"]["gmacs"]
    assert row.sampler_gmacs > glance
    assert (
        so.evaluate(  # its name has the threshold
            bank,
            {"early": f"{tmp_path / 'run'}@0.3"},
            num_frames=1,
            num_candidates=4,
            classifier=classifier,
            bootstrap=0,
        )
        .row("early@0.3")
        .frames_decoded
        == 1.0
    )
    # Named in the bank, they need no network.
    named = {set_name: about["name"] for set_name, about in (("patches", kinds["patches"]), ("glance", kinds["map"]))}
    so.train(bank, out=tmp_path / "named", sampler="adafocus", features=named, **SHORT)
    with pytest.raises(InvalidArgument, match=r"no features 'patches'.* give classifier \(--classifier\)"):
        so.train(bank, out=tmp_path / "none", sampler="adafocus", weights=weights, **SHORT)
    with pytest.raises(InvalidArgument, match=r"sees frames of \(64, 64\), but adafocus of 96 pixels"):
        so.train(bank, out=tmp_path / "other", **options, **SHORT | {"size": 96})
    monkeypatch.setattr("sosampler.training.baseline_data._MAX_BYTES", 100)
    with pytest.raises(InvalidArgument, match=r"at most .* set inputs=frames"):
        so.train(bank, out=tmp_path / "large", **options, **SHORT | {"grid": 3})


@pytest.mark.parametrize("version", [1, 2])
def test_training_on_pixels_of_a_bank(tmp_path: Path, version: int) -> None:
    bank, classifier, weights = few_videos(tmp_path)
    networks = {"local_net": TINY, "glance_net": TINY, "inputs": FRAMES, "version": version}
    options: dict[str, Any] = {"sampler": "adafocus", "classifier": tmp_path / "classifier", "weights": weights}
    trained = so.train(bank, out=tmp_path / "run", **options, **SHORT, **networks)
    assert so.Bank(bank.path).feature_sets == {}
    assert [line["phase"] for line in read_log(tmp_path / "run")] == (
        ["joint"] if version == 2 else ["classifier", "policy", "finetune"]
    )
    so.add_teacher(bank, classifier)
    result = so.evaluate(bank, {"a": tmp_path / "run"}, num_frames=1, num_candidates=4, bootstrap=0)
    row = result.row("a")
    assert row.frames_decoded == row.frames_classified > 2
    own = trained.system._networks_gmacs() * row.frames_decoded
    assert row.sampler_gmacs > own > 0
    with pytest.raises(InvalidArgument, match="but the classifier is none"):
        so.train(bank, out=tmp_path / "none", sampler="adafocus", weights=weights, **SHORT, **networks)


# ---- bad input


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"version": 3}, "version=3 must be an int from 1 to 2"),
        ({"version": 2}, "no features can be stored; give inputs='frames'"),
        ({"tune_local": True}, "no features can be stored; give inputs='frames'"),
        ({"inputs": "video"}, "features, frames"),
        ({"patch": 224}, "from 1 to 223"),
        ({"grid": 1}, "grid"),
        ({"discount": 1.5}, "discount"),
        ({"ppo_clip": 0.0}, "ppo_clip"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_it_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        small(**given)


def test_it_refuses_other_features_and_networks() -> None:
    views, _, _ = problem(2, seed=0)
    with pytest.raises(InvalidArgument, match="100 numbers a frame are not those of 9 positions"):
        small(patches_width=100).run(Views({**views.sets, "patches": torch.zeros(2, T, 100)}))
    with pytest.raises(InvalidArgument, match="needs glance features"):
        small().run(Views({"patches": views["patches"]}))
    system = on_frames()
    slow = create_classifier("slowonly_r50", num_classes=C)
    for classifier, text in ((None, "is none"), (slow, "is slowonly_r50")):
        with pytest.raises(InvalidArgument, match=f"a 2-D classifier, but the classifier {text}"):
            system.take_networks({"heavy": classifier}, "pretrained")
    tiny = create_classifier(TINY, num_classes=C)
    with pytest.raises(InvalidArgument, match="normalises pixels or strides otherwise"):
        system.take_networks({"heavy": tiny}, "pretrained")
    tiny.preprocessing = Preprocessing(size=(64, 64), resize=64)
    with pytest.raises(InvalidArgument, match="has no weights; give weights"):
        system.take_networks({"heavy": tiny}, None)
    with pytest.raises(InvalidArgument, match="patches of 64 pixels cannot be cut from frames of 64x64"):
        PatchGrid(wrap_classifier(small_net(), input_size=64, layout="BCHW"), patch=64, grid=3)


def test_the_recipe() -> None:
    recipe = read_baseline_recipe("adafocus")
    assert recipe.feature_sets == ("patches", "glance")
    later = read_baseline_recipe("adafocus", version=2, inputs=FRAMES)
    assert later.feature_sets == (FRAMES,)
    assert isinstance(later.without_weights(), Baseline)
