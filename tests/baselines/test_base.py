"""The rules that all systems keep, with a system so small that everything can be checked by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler.baselines.base import (
    Baseline,
    BaselineOutput,
    Views,
    decoded_frames,
    draw_gumbel,
    draw_uniform,
    matrix_gmacs,
    predict,
    video_gmacs,
)
from sosampler.baselines.registry import create_baseline, list_systems
from sosampler.classifiers.base import count_gmacs
from sosampler.errors import InvalidArgument
from sosampler.training.train_baseline import fit
from tests.factories import on_heavy_features, two_sets, with_sets_of

SMALL: dict[str, dict[str, Any]] = {
    "frameexit": {"heavy_width": 5, "num_classes": 3, "max_frames": 4, "neck_width": 6, "gate_widths": [4, 3]},
    "liteeval": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "coarse_width": 3, "fine_width": 5},
}
ALL: dict[str, dict[str, Any]] = SMALL | {
    "adaframe": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "hidden": 8, "width": 6},
    "marl": {"heavy_width": 5, "num_classes": 3, "hidden": 8, "width": 6, "max_steps": 2},
    "ar-net": {"heavy_width": 5, "light_width": 4, "r34_width": 3, "r18_width": 3, "num_classes": 3, "hidden": 8},
    "listen-to-look": {"heavy_width": 5, "light_width": 4, "num_classes": 3, "hidden": 8, "width": 6},
}


class EveryOther(Baseline):
    """Looks heavily at the even frames and lightly at the first; in two phases it learns its scale, then its layer."""

    name = "every-other"
    feature_sets = ("heavy", "light")
    phases = ("layer", "scale")

    def __init__(self, heavy_width: int = 5, light_width: int = 4, num_classes: int = 3, dropout: float = 0.0) -> None:
        super().__init__({"heavy_width": heavy_width, "light_width": light_width, "num_classes": num_classes})
        self.layer = nn.Linear(heavy_width, num_classes)
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(dropout)
        self.progress: list[tuple[str | None, float]] = []
        self.draws: list[float] = []

    def logits(self, views: Views) -> Tensor:
        weight = views.real.float() * self.looked(views)
        mean = (views.filled().heavy * weight[:, :, None]).sum(dim=1) / weight.sum(dim=1, keepdim=True)
        logits: Tensor = self.scale * self.layer(self.dropout(mean))
        return logits

    @staticmethod
    def looked(views: Views) -> Tensor:
        return (torch.arange(views.heavy.shape[1]) % 2 == 0).expand(views.heavy.shape[:2])

    def loss(
        self,
        views: Views,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
        progress: float = 1.0,
        phase: str | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.progress.append((phase, progress))
        self.draws.append(float(draw_uniform((1,), generator, views.heavy.device)))
        loss = self.label_loss(self.logits(views), labels).mean()
        return loss, {"half": loss.detach() / 2}

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        first = torch.zeros_like(views.real)
        first[:, 0] = True
        return BaselineOutput(
            self.activate(self.logits(views)), {"heavy": self.looked(views) & views.real, "light": first}
        )

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        return matrix_gmacs(self.layer) * torch.ones(len(seen.seen_heavy))

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        yield from self.layer.parameters() if phase == "layer" else [self.scale]


def some_views(batch: int = 20, frames: int = 4, seed: int = 0) -> tuple[Views, Tensor]:
    """Heavy features that point to their class."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(batch) % 3
    heavy = torch.randn(batch, frames, 5, generator=generator) + 2 * F.one_hot(classes, 5)[:, None]
    light = torch.randn(batch, frames, 4, generator=generator)
    return two_sets(heavy, light), F.one_hot(classes, 3).bool()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_config_is_json_and_builds_the_system_again(name: str) -> None:
    torch.manual_seed(0)
    system = create_baseline(name, **SMALL[name])
    again = create_baseline(name, **json.loads(json.dumps(system.config)))
    again.load_state_dict(system.state_dict())
    views, _ = some_views()
    assert again.config == system.config
    assert torch.equal(again.run(views).probabilities, system.run(views).probabilities)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_run_leaves_mode_gradients_and_weights_alone(name: str) -> None:
    system = create_baseline(name, **SMALL[name]).train()
    before = {key: value.clone() for key, value in system.state_dict().items()}
    output = system.run(some_views()[0])
    assert system.training
    assert not output.probabilities.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in system.state_dict().items())
    assert output.probabilities.sum(dim=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_system_trains_by_fit_and_takes_multi_label(name: str) -> None:
    torch.manual_seed(0)
    system = create_baseline(name, **SMALL[name], multi_label=True)
    views, labels = some_views()
    labels[:, 0] = True  # two labels in most videos
    history = fit(system, views, labels, epochs=8, lr=0.02, batch_size=8)
    first_phase = [row for row in history if row["phase"] == system.phases[0]]
    assert first_phase[-1]["loss"] < 0.8 * first_phase[0]["loss"]
    assert predict(system, views).probabilities[:, 0].min() > 0.5


def lively(name: str) -> Baseline:
    """Random weights, large enough that videos differ in what is done for them."""
    torch.manual_seed(1)
    system = create_baseline(name, **ALL[name] | ({"max_frames": 10} if name == "frameexit" else {}))
    for weight in system.parameters():
        nn.init.normal_(weight, std=0.8)
    return system.eval()


@pytest.mark.parametrize("name", on_heavy_features())
def test_a_turned_system_shares_its_weights_and_costs_more(name: str) -> None:
    system, views = lively(name), with_sets_of(name, some_views(60, frames=10)[0])
    prices = {**dict.fromkeys(system.feature_sets, 1.0), "heavy": 4.0, "light": 0.1}
    system.about = {"dev": 0.5}
    before, drawn, memory = dict(system.config), torch.get_rng_state(), {id(part) for part in system.parameters()}
    spent = []
    for value in system.threshold_values:
        turned = system.with_threshold(value)
        assert type(turned) is type(system)
        assert turned.config == before | {system.threshold: value}
        assert {id(part) for part in turned.parameters()} == memory
        assert not turned.training
        assert turned.about == system.about
        # Exactly what the class makes of these settings with these weights.
        fresh = create_baseline(name, **turned.config)
        fresh.load_state_dict(system.state_dict())
        output, expected = turned.run(views), fresh.run(views)
        assert torch.equal(output.probabilities, expected.probabilities)
        assert torch.equal(output.seen_heavy, expected.seen_heavy)
        spent.append(float(video_gmacs(turned, output, prices).mean()))
    assert system.config == before
    torch.set_rng_state(drawn)
    system.with_threshold(system.threshold_values[0])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert spent == sorted(spent)
    assert spent[-1] > 1.05 * spent[0]
    assert system.threshold in before
    assert len(set(system.threshold_values)) == len(system.threshold_values) >= 5


def test_a_turned_system_moves_and_learns_with_its_own() -> None:
    system, (views, labels) = lively("marl"), some_views()
    turned = system.with_threshold(7)
    fit(system, views, labels, epochs=1)
    assert torch.equal(turned.run(views).probabilities, system.with_threshold(7).run(views).probabilities)
    turned.double()
    assert next(system.parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frameexit", -0.1),
        ("frameexit", "much"),
        ("liteeval", 1.1),
        ("liteeval", -0.1),
        ("adaframe", -0.1),
        ("marl", 2.5),
        ("ar-net", -0.1),
        ("listen-to-look", 0),
    ],
)
def test_a_dial_is_checked_as_the_setting_it_is(name: str, value: Any) -> None:
    system = create_baseline(name, **ALL[name])
    with pytest.raises(InvalidArgument, match=f"{system.threshold}="):
        system.with_threshold(value)


def test_who_has_no_dial_says_so() -> None:
    with pytest.raises(InvalidArgument, match=r"every-other has no threshold that could be set to 0.5"):
        EveryOther().with_threshold(0.5)


def test_run_in_the_middle_of_a_phase_keeps_fixed_layers_fixed() -> None:
    system = create_baseline("frameexit", **SMALL["frameexit"])
    system.train_phase("gates")
    modes = {name: module.training for name, module in system.named_modules()}
    system.run(some_views()[0])
    assert {name: module.training for name, module in system.named_modules()} == modes
    assert modes["gates.0"]
    assert not modes["neck"]


def test_names_are_listed_without_torch() -> None:
    code = "import sys, sosampler.baselines.registry as s; print(*s.list_systems()); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list_systems()
    assert {"frameexit", "liteeval"} <= set(list_systems())


def test_every_listed_system_is_there() -> None:
    for name in list_systems():
        with pytest.raises(TypeError, match=r"heavy_width|num_classes"):
            create_baseline(name)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="frameexit"):
        create_baseline("frameexits")


def test_views_in_half_precision_are_raised_and_unreal_places_filled() -> None:
    views, _ = some_views(3)
    mask = torch.tensor([[True, True, False, False]] * 3)
    half = two_sets(views.heavy.half(), views.light.double(), mask)
    raised = half.to(torch.device("cpu"))
    assert raised.heavy.dtype == torch.float32
    assert raised.light.dtype == torch.float64
    poisoned = two_sets(views.heavy.masked_fill(~mask[:, :, None], torch.nan), views.light, mask).filled()
    assert torch.equal(poisoned.heavy[:, :2], views.heavy[:, :2])
    assert not poisoned.heavy[:, 2:].any()


@pytest.mark.parametrize(
    ("views", "text"),
    [
        (two_sets(torch.zeros(2, 4, 6), torch.zeros(2, 4, 4)), r"heavy features .* \[videos, candidates, 5\]"),
        (two_sets(torch.zeros(2, 4, 5), torch.zeros(2, 4)), "light features"),
        (two_sets(torch.zeros(2, 4, 5), torch.zeros(2, 3, 4)), "same candidates"),
        (two_sets(torch.zeros(2, 0, 5), torch.zeros(2, 0, 4)), "at least one"),
        (two_sets(torch.zeros(2, 4, 5), torch.zeros(2, 4, 4), torch.ones(2, 4)), "give bool"),
        (two_sets(torch.zeros(2, 4, 5), torch.zeros(2, 4, 4), torch.eye(2, 4) > 1), "no real candidate"),
    ],
)
def test_views_that_do_not_fit_are_refused(views: Views, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        EveryOther().run(views)


def test_label_loss_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, classes = torch.randn(6, 3, generator=generator), torch.arange(6) % 3
    system = EveryOther()
    expected = F.cross_entropy(logits, classes, reduction="none")
    assert torch.allclose(system.label_loss(logits, F.one_hot(classes, 3).bool()), expected)
    two = torch.tensor([[1.0, 1.0, 0.0]])
    assert torch.allclose(system.label_loss(logits[:1], two), F.cross_entropy(logits[:1], two / 2))
    system.multi_label = True
    # For each of the two true labels: what torch means over the three classes is a sum.
    expected = F.binary_cross_entropy_with_logits(logits[:1], two) * 3 / 2
    assert torch.allclose(system.label_loss(logits[:1], two)[0], expected)
    # Steps of a video share its labels.
    assert system.label_loss(logits.view(2, 3, 3), two[:, None]).shape == (2, 3)


@pytest.mark.parametrize("classes", [20, 200, 2000])
def test_several_labels_are_weighed_as_one_is(classes: int) -> None:
    """Who knows nothing but how frequent labels are has about the same loss, however it is told."""
    system, labels = EveryOther(), F.one_hot(torch.tensor([3]), classes)
    known = float(system.label_loss(torch.zeros(1, classes), labels))
    system.multi_label = True
    rare = torch.full((1, classes), 1 / classes).logit()
    assert float(system.label_loss(rare, labels)) == pytest.approx(known + 1, rel=0.02)
    # A class that is sure and wrong costs as much among many as among few.
    wrong = rare.clone()
    wrong[0, 5] = 4.0
    assert float(system.label_loss(wrong, labels)) == pytest.approx(known + 1 + 4, rel=0.03)


def test_costs_add_up() -> None:
    system, (views, _) = EveryOther(), some_views(3, frames=5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    output = system.run(two_sets(views.heavy, views.light, mask))
    own = 5 * 3 / 1e9
    assert decoded_frames(output).tolist() == [3, 2, 3]
    assert video_gmacs(system, output, {"heavy": 4.0, "light": 0.25}).tolist() == pytest.approx(
        [4 * 3 + 0.25 + own, 4 * 2 + 0.25 + own, 4 * 3 + 0.25 + own]
    )
    seen = BaselineOutput(
        torch.zeros(1, 2), {"heavy": torch.tensor([[True, False]]), "light": torch.tensor([[True, True]])}
    )
    assert decoded_frames(seen).tolist() == [2]


def test_matrix_gmacs_agree_with_the_counter() -> None:
    layers = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    assert matrix_gmacs(layers) == pytest.approx(count_gmacs(layers, torch.zeros(1, 7)))
    assert matrix_gmacs(nn.LSTMCell(4, 3)) == pytest.approx(4 * 3 * (4 + 3) / 1e9)


def test_draws_follow_the_generator() -> None:
    def draws(seed: int) -> Tensor:
        return draw_uniform((50,), torch.Generator().manual_seed(seed), torch.device("cpu"))

    assert torch.equal(draws(1), draws(1))
    assert not torch.equal(draws(1), draws(2))
    gumbel = draw_gumbel((40_000,), torch.Generator().manual_seed(0), torch.device("cpu"))
    assert gumbel.mean() == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    assert gumbel.var() == pytest.approx(torch.pi**2 / 6, abs=0.06)


def test_predict_in_parts_is_run_at_once() -> None:
    system, (views, _) = EveryOther(), some_views(7)
    whole, parts = system.run(views), predict(system, views, batch_size=3)
    assert torch.allclose(whole.probabilities, parts.probabilities)
    assert torch.equal(whole.seen_heavy, parts.seen_heavy)
    assert parts.steps is None


def test_fit_learns_phase_after_phase() -> None:
    torch.manual_seed(0)
    system, (views, labels) = EveryOther(), some_views(21)
    lines: list[str] = []
    layer = system.layer.weight.detach().clone()
    first = fit(system, views, labels, epochs={"layer": 3}, batch_size=10, lr=0.05, say=lines.append)
    assert system.scale == 1
    assert not torch.equal(system.layer.weight, layer)
    assert [(row["phase"], row["epoch"]) for row in first] == [("layer", 0), ("layer", 1), ("layer", 2)]
    assert first[-1]["loss"] < first[0]["loss"]
    assert first[0]["half"] == pytest.approx(first[0]["loss"] / 2, rel=1e-5)
    assert first[0]["lr"] == 0.05
    assert first[2]["lr"] < first[1]["lr"] < 0.05
    assert lines[0].startswith("every-other layer 1/3: loss")
    # 21 videos in batches of at most 10 are 3 steps an epoch; the share that is done counts them.
    assert [progress for _, progress in system.progress] == pytest.approx([step / 9 for step in range(9)])
    layer = system.layer.weight.detach().clone()
    fit(system, views, labels, epochs={"scale": 2}, lr=0.05)
    assert system.scale != 1
    assert torch.equal(system.layer.weight, layer)
    assert not system.training


def test_fit_goes_by_its_seed_alone() -> None:
    def trained(seed: int, drawn_before: int, **given: Any) -> tuple[Tensor, list[float]]:
        torch.manual_seed(5)
        system, (views, labels) = EveryOther(dropout=0.5), some_views()
        torch.rand(drawn_before)
        fit(system, views, labels, epochs=2, seed=seed, batch_size=8, **given)
        return system.layer.weight.detach(), system.draws

    weight, draws = trained(0, 0)
    again, draws_again = trained(0, 3)
    assert torch.equal(weight, again)
    assert draws == draws_again
    assert len(set(draws)) == len(draws)  # every step draws anew
    assert not torch.equal(weight, trained(1, 0)[0])
    assert not torch.equal(weight, trained(0, 0, optimizer="sgd")[0])


def test_fit_leaves_the_global_generator_alone() -> None:
    system, (views, labels) = EveryOther(dropout=0.5), some_views()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fit(system, views, labels, epochs=1)
    assert torch.equal(torch.rand(4), expected)


def test_fit_stops_where_the_features_are_not_finite() -> None:
    views, labels = some_views()
    views.heavy[3, 0] = torch.nan
    with pytest.raises(InvalidArgument, match=r"is nan in phase 'layer', 0% of it done; .* lower lr"):
        fit(EveryOther(), views, labels)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"epochs": {"layers": 1}}, "layer, scale"),
        ({"epochs": -1}, "epochs"),
        ({"lr": 0.0}, "lr"),
        ({"batch_size": 0}, "batch_size"),
        ({"optimizer": "adam"}, "adamw"),
        ({"labels": torch.zeros(20, 3)}, "no label"),
        ({"labels": torch.ones(19, 3)}, "20 videos"),
    ],
)
def test_fit_refuses(given: dict[str, Any], text: str) -> None:
    views, labels = some_views()
    with pytest.raises(InvalidArgument, match=text):
        fit(EveryOther(), views, given.pop("labels", labels), **given)
