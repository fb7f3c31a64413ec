"""Listen to Look against a plain loop over one video, and on videos whose preview or sound hints at what matters."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosampler as so
from sosampler.baselines.base import AUDIO, SPECTRUM, UniformFrames, Views, decoded_frames, predict, video_gmacs
from sosampler.baselines.listen_to_look import SOUND_WIDTH, ListenToLook
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.training.train_baseline import fit
from sosampler.video import audio
from tests.clips import video_with_sound
from tests.factories import keep, teach, two_sets

C, T, D, LIGHT = 4, 10, 8, 5


def problem(batch: int, seed: int, *, hint: bool = True) -> tuple[Views, Tensor, Tensor]:
    """Two of ten frames show the class, the others another one less clearly; one light feature hints at which is which.

    Returns views, labels, and where the class is shown.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(C, (batch,), generator=generator)
    shown = torch.rand(batch, T, generator=generator).argsort(dim=1) < 2
    others = torch.randint(C, (batch, T), generator=generator)
    heavy = 0.5 * torch.randn(batch, T, D, generator=generator)
    heavy[:, :, :C] += F.one_hot(torch.where(shown, classes[:, None], others), C) * torch.where(shown, 3, 2)[:, :, None]
    light = 0.5 * torch.randn(batch, T, LIGHT, generator=generator)
    if hint:
        light[:, :, 0] += 4.0 * shown - 2
    return two_sets(heavy, light), F.one_hot(classes, C).bool(), shown


def small(kind: type[ListenToLook] = ListenToLook, **given: Any) -> ListenToLook:
    torch.manual_seed(0)
    return kind(D, LIGHT, C, **{"steps": 2, "hidden": 16, "width": 8, "audio_channels": 2, **given})


def with_sound(views: Views, spectra: Tensor | None = None, seed: int = 0) -> Views:
    if spectra is None:
        spectra = 10 * torch.rand(*views.shape, *SPECTRUM, generator=torch.Generator().manual_seed(seed))
    return replace(views, sets={**views.sets, AUDIO: spectra})


def lively(**given: Any) -> ListenToLook:
    """Random weights and statistics, so that attention differs from step to step."""
    system = small(**given)
    for name, weight in system.named_parameters():
        if "audio_net" not in name:
            torch.nn.init.normal_(weight, std=0.8)
    for name, value in system.named_buffers():
        if name.endswith("running_mean"):
            torch.nn.init.normal_(value, std=0.3)
    return system.eval()


class Bands(nn.Module):
    """In the place of the audio network: the mean of each band. What is tested with it comes after that network."""

    def forward(self, spectra: Tensor) -> Tensor:
        return F.pad(spectra.mean(2), (0, SOUND_WIDTH - SPECTRUM[0]))


def by_bands(**given: Any) -> ListenToLook:
    system = small(audio=True, **given)
    system.audio_net = Bands()  # type: ignore[assignment]
    return system


def short(views: Views, seed: int = 1) -> Views:
    """Videos of one to ten candidates; what is padding is not a number."""
    counts = torch.randint(1, T + 1, (len(views), 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(T) < counts
    sets = {}
    for name in views.sets:
        values = views[name]
        sets[name] = values.masked_fill(~mask.view(*mask.shape, *[1] * (values.dim() - 2)), math.nan)
    return Views(sets, mask)


def by_hand(system: ListenToLook, sets: dict[str, Tensor], steps: int) -> tuple[Tensor, list[int]]:
    """One video, [L, ...] each: probabilities, and the candidates that are picked, in their order."""
    light, heavy = sets["light"], sets["heavy"]
    state = (torch.zeros(1, 16), torch.zeros(1, 16))
    picked: list[int] = []
    with torch.no_grad():
        previews = [light, system.audio_net(sets[AUDIO])] if AUDIO in sets else [light]
        inputs = torch.cat([values.mean(0) for values in previews])
        while len(picked) < min(steps, len(light)):
            state = system.lstm(system.fuse(inputs)[None], state)
            weights = system.mix(state[0]).softmax(1)[0] if AUDIO in sets else torch.ones(1)
            attention = torch.zeros(len(light))
            free = [t for t in range(len(light)) if t not in picked]
            for number, values in enumerate(previews):
                query = system.queries[number](state[0])[0]
                scores = torch.tensor([float(query @ system.keys[number](values[t : t + 1])[0]) for t in free])
                attention[free] += weights[number] * (scores / math.sqrt(8)).softmax(0)
            picked.append(max(free, key=lambda t: float(attention[t])))
            inputs = torch.cat([values[picked[-1]] for values in previews])
        features = [heavy[picked].mean(0), *(values[picked].mean(0) for values in previews[1:])]
        return system.classify(torch.cat(features)).softmax(-1), picked


@pytest.mark.parametrize("audio", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 10, 12])
def test_run_is_the_plain_loop(audio: bool, steps: int) -> None:
    system, (views, _, _) = lively(audio=audio, steps=steps), problem(8, seed=3)
    views = short(with_sound(views) if audio else views)
    output = system.run(views)
    for video, count in enumerate(views.real.sum(1).tolist()):
        sets = {name: views[name][video, :count] for name in views.sets}
        expected, picked = by_hand(system, sets, steps)
        assert output.seen_heavy[video].nonzero()[:, 0].tolist() == sorted(picked)
        assert torch.allclose(output.probabilities[video], expected, atol=1e-5)
    assert output.steps is not None
    assert output.steps.tolist() == output.seen_heavy.sum(1).tolist() == views.real.sum(1).clamp_max(steps).tolist()
    assert torch.equal(output.seen_light, views.real)
    assert torch.equal(output.seen_in(AUDIO), views.real if audio else torch.zeros_like(views.real))


@pytest.mark.parametrize("audio", [False, True])
def test_no_index_twice(audio: bool) -> None:
    """As many frames as steps: had one come twice there would be fewer."""
    system, views = lively(audio=audio), problem(40, seed=5)[0]
    if audio:
        system.audio_net, views = Bands(), with_sound(views)  # type: ignore[assignment]
    for steps in range(1, T + 1):
        assert (system.with_threshold(steps).run(views).seen_heavy.sum(1) == steps).all()


def test_frames_that_are_not_picked_are_not_seen() -> None:
    system, (views, _, _) = lively(steps=3), problem(20, seed=3)
    output = system.run(views)
    unseen = views.heavy.masked_fill(~output.seen_heavy[:, :, None], math.nan)
    assert torch.equal(system.run(two_sets(unseen, views.light)).probabilities, output.probabilities)
    seen = views.heavy.masked_fill(output.seen_heavy[:, :, None], math.nan)
    assert system.run(two_sets(seen, views.light)).probabilities.isnan().all()


@pytest.mark.parametrize("audio", [False, True])
def test_soft_and_hard_agree_where_attention_is_one_hot(audio: bool) -> None:
    system, (views, _, _) = lively(audio=audio, steps=3), problem(30, seed=3)
    views = short(with_sound(views) if audio else views).filled()
    soft, soft_picked = system._skim(views, soft=True)
    hard, hard_picked = system._skim(views, soft=False)
    assert not torch.allclose(soft, hard, atol=0.1)
    with torch.no_grad():
        for key in system.keys:  # above 0, so that no two are alike
            key[1].bias.fill_(20)  # type: ignore[index, operator, union-attr]
        for query in system.queries:  # steep scores
            query[1].weight.mul_(1e4), query[1].bias.mul_(1e4)  # type: ignore[index, operator, union-attr]
        if audio:  # and one kind of attention alone
            system.mix.weight.zero_(), system.mix.bias.copy_(torch.tensor([0.0, 200.0]))
    soft, soft_picked = system._skim(views, soft=True)
    hard, hard_picked = system._skim(views, soft=False)
    assert torch.allclose(soft, hard, atol=1e-4)
    assert torch.equal(soft_picked, hard_picked)


def test_attention_is_over_what_is_open_and_mixed_by_two_weights() -> None:
    system = lively(audio=True)
    hidden, keys = torch.randn(5, 16), [torch.randn(5, T, 8) for _ in range(2)]
    closed = torch.rand(5, T) < 0.4
    closed[:, 0] = False
    attention = system._attention(hidden, keys, closed)
    assert torch.allclose(attention.sum(1), torch.ones(5))
    assert not attention[closed].any()
    parts = []
    for number in range(2):
        scores = (system.queries[number](hidden)[:, None] * keys[number]).sum(-1) / 8**0.5
        parts.append(scores.masked_fill(closed, -math.inf).softmax(1))
    weights = system.mix(hidden).softmax(1)
    assert torch.allclose(attention, weights[:, :1] * parts[0] + weights[:, 1:] * parts[1], atol=1e-6)


def test_the_lstm_is_weight_normalised_and_starts_without_bias() -> None:
    system = small()
    names = {name for name, _ in system.lstm.named_parameters()}
    assert {f"parametrizations.weight_{part}.original{k}" for part in ("ih", "hh") for k in (0, 1)} <= names
    assert not system.lstm.bias_ih.any()
    assert not system.lstm.bias_hh.any()
    before = system.lstm.weight_ih.clone()
    with torch.no_grad():
        system.lstm.parametrizations.weight_ih.original1.mul_(3)  # type: ignore[union-attr, operator]
    assert torch.allclose(system.lstm.weight_ih, before)  # its length is the other one's


class AtRandom(ListenToLook):
    """The same with attention that knows nothing: every open candidate is as likely."""

    def _attention(self, hidden: Tensor, keys: Any, closed: Tensor) -> Tensor:
        drawn = torch.rand(closed.shape).masked_fill(closed, -1)
        return F.one_hot(drawn.argmax(1), closed.shape[1]).to(hidden.dtype)


@cache
def trained(kind: type[ListenToLook] = ListenToLook) -> ListenToLook:
    system = small(kind)
    views, labels, _ = problem(800, seed=1)
    fit(system, views, labels, epochs=15, lr=0.01, batch_size=100)
    return system


def accuracy(system: ListenToLook, views: Views, labels: Tensor) -> float:
    return float((predict(system, views).probabilities.argmax(1) == labels.int().argmax(1)).float().mean())


def test_picks_more_class_frames_than_chance_and_beats_random_frames() -> None:
    views, labels, shown = problem(500, seed=2)
    output = predict(trained(), views)
    hits = float((output.seen_heavy & shown).sum(1).float().mean())
    assert hits > 1.6  # of two; by chance 0.4
    assert accuracy(trained(), views, labels) > accuracy(trained(AtRandom), views, labels) + 0.2
    # Its own layers on evenly spread frames miss the class as well.
    uniform = predict(UniformFrames(trained(), 2), views).probabilities.argmax(1)
    assert accuracy(trained(), views, labels) > float((uniform == labels.int().argmax(1)).float().mean()) + 0.2


def test_training_is_the_same_for_the_same_seed() -> None:
    views, labels, _ = problem(60, seed=1)
    first, again, other = small(), small(), small()
    fit(first, views, labels, epochs=2, seed=1)
    fit(again, views, labels, epochs=2, seed=1)
    fit(other, views, labels, epochs=2, seed=2)
    states = [torch.cat([value.flatten().float() for value in each.state_dict().values()]) for each in (first, again)]
    assert torch.equal(*states)
    assert not torch.equal(first.classify.weight, other.classify.weight)


@pytest.mark.parametrize("audio", [False, True])
def test_costs_are_those_of_the_layers_that_run(audio: bool) -> None:
    system, (views, _, _) = lively(audio=audio, steps=3), problem(1, seed=0)
    views = with_sound(views) if audio else views
    with FlopCounterMode(display=False) as counter:
        output = system.run(views)
    own = float(system.own_gmacs(output)[0])
    assert own == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-6)
    assert float(video_gmacs(system, output, {"heavy": 4.0, "light": 0.1})[0]) == pytest.approx(own + 12 + 1, rel=1e-6)
    assert decoded_frames(output).tolist() == [T]
    # Its layers on given frames: the class layer, and the audio network for these frames.
    uniform = UniformFrames(system, 2)
    with FlopCounterMode(display=False) as counter:
        output = uniform.run(views)
    assert float(uniform.own_gmacs(output)[0]) == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-6)
    assert decoded_frames(output).tolist() == [2]


# ---- sound


def sounds(classes: Tensor, seed: int, *, loud: Tensor | None = None) -> Tensor:
    """Spectra [B, T, 64, 100]: noise, and where it is loud (else everywhere) a tone whose band is the class."""
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.rand(len(classes), T, *SPECTRUM, generator=generator)
    band = F.one_hot(8 + 12 * classes, SPECTRUM[0])[:, None, :, None].float()
    where = torch.ones(len(classes), T) if loud is None else loud.float()
    return spectra + 8 * band * where[:, :, None, None]


def test_sound_that_carries_the_class_helps() -> None:
    """Images do not say which frames show the class and, in half of the videos, show no class at all."""

    def case(batch: int, seed: int) -> tuple[Views, Tensor]:
        views, labels, _ = problem(batch, seed=seed, hint=False)
        noise = torch.randn(views.heavy.shape, generator=torch.Generator().manual_seed(seed))
        heavy = torch.where((torch.arange(batch) % 2 == 0)[:, None, None], noise, views.heavy)
        return with_sound(two_sets(heavy, views.light), sounds(labels.int().argmax(1), seed)), labels

    views, labels = case(100, seed=1)
    system, deaf = by_bands(), small()
    fit(system, views, labels, epochs={"skim": 15}, lr=0.01, batch_size=25)
    fit(deaf, views, labels, epochs=15, lr=0.01, batch_size=25)
    test, truth = case(100, seed=2)
    assert accuracy(system, test, truth) > 0.9
    assert accuracy(deaf, test, truth) < 0.65


def test_sound_says_where_to_look() -> None:
    """A tone sounds at the two frames that show the class, whatever it is, and the light features say nothing."""

    def case(batch: int, seed: int) -> tuple[Views, Tensor, Tensor]:
        views, labels, shown = problem(batch, seed=seed, hint=False)
        return with_sound(views, sounds(torch.full((batch,), 2), seed, loud=shown)), labels, shown

    views, labels, _ = case(100, seed=1)
    system = by_bands()
    fit(system, views, labels, epochs={"skim": 25}, lr=0.01, batch_size=25)
    test, _, shown = case(100, seed=2)
    assert float((predict(system, test).seen_heavy & shown).sum(1).float().mean()) > 1.2  # by chance 0.4


def test_phases_train_their_own_layers_and_silence_teaches_nothing() -> None:
    system, (views, labels, _) = small(audio=True), problem(8, seed=0)
    views = with_sound(views)
    groups = {phase: {id(weight) for weight in system.phase_parameters(phase)} for phase in system.phases}
    assert groups["audio"].isdisjoint(groups["skim"])
    assert groups["audio"] | groups["skim"] == {id(weight) for weight in system.parameters()}
    parts = (system.audio_net, system.audio_head)
    assert groups["audio"] == {id(weight) for part in parts for weight in part.parameters()}
    system.train_phase("skim")
    assert not system.audio_net.training
    assert system.lstm.training
    system.loss(views, labels, phase="skim")[0].backward()
    assert all(weight.grad is None for weight in system.audio_net.parameters())
    assert all(weight.grad is not None for weight in system.mix.parameters())
    system.train_phase("audio")
    assert system.audio_net.training
    silent = with_sound(views, torch.zeros(8, T, *SPECTRUM))
    assert float(system.loss(silent, labels, phase="audio")[0].detach()) == 0
    half = views[AUDIO].clone()
    half[:, 5:] = 0
    system.eval()
    with torch.no_grad():
        loss = system.loss(with_sound(views, half), labels, phase="audio")[0]
        logits = system.audio_head(system.audio_net(half[:, :5].flatten(0, 1)))
    expected = F.cross_entropy(logits, labels.int().argmax(1).repeat_interleave(5))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert not list(small().phase_parameters("audio"))


def test_spectra_are_those_of_banks() -> None:
    assert SPECTRUM == (audio.BANDS, audio.COLUMNS)


# ---- mistakes


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"steps": 0}, "steps=0 must be"),
        ({"steps": 1.5}, "steps=1.5 must be"),
        ({"hidden": 0}, "hidden=0"),
        ({"width": -1}, "width=-1"),
        ({"audio": "yes"}, "audio='yes'"),
        ({"audio_channels": 0}, "audio_channels=0"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        small(**given)


def test_views_without_sound_and_batches_of_one_are_refused() -> None:
    views, labels, _ = problem(3, seed=0)
    with pytest.raises(InvalidArgument, match="listen-to-look needs audio features, but these views have heavy, light"):
        small(audio=True).run(views)
    with pytest.raises(InvalidArgument, match=r"audio features of shape \[3, 10, 64, 99\] .*candidates, 64, 100\]"):
        small(audio=True).run(with_sound(views, torch.zeros(3, T, 64, 99)))
    with pytest.raises(InvalidArgument, match="batch_size of at least 2"):
        fit(small(), views, labels, epochs=1, batch_size=1)


# ---- from banks


OPTIONS: dict[str, Any] = {"num_candidates": 4, "batch_size": 8, "device": "cpu", "hidden": 8, "width": 4, "steps": 2}


def make_bank(folder: Path, count: int = 15) -> so.Bank:
    """Videos of two seconds, each class with a pitch of its own. Features "heavy" and "light" are noise."""
    rng = np.random.default_rng(0)
    lines = ["path,label,split"]
    moments = np.arange(2 * 16_000) / 16_000
    for number in range(count):
        hertz = (300, 1000, 3000)[number % 3] * rng.uniform(0.95, 1.05)
        samples = 0.5 * np.sin(2 * np.pi * hertz * moments)
        video_with_sound(folder / f"{number}.mkv", samples, rate=16_000, codec="flac", fps=4)
        split = "train" if number < count - 6 else "dev" if number < count - 3 else "test"
        lines.append(f"{number}.mkv,{'abc'[number % 3]},{split}")
    (folder / "m.csv").write_text("\n".join(lines) + "\n")
    bank = so.prepare(folder / "m.csv", out=folder / "bank", num_candidates=4, workers=0)
    teach(bank, [rng.normal(size=(len(video), 3)).astype(np.float32) for video in bank])
    for name, width in (("heavy", D), ("light", LIGHT)):
        values = [rng.normal(size=(len(video), width)).astype(np.float16) for video in bank]
        keep(bank, name, values, 1.0, name[0] * 16)
    return so.Bank(bank.path)


def test_from_a_bank_with_sound_and_refused_without(tmp_path: Path) -> None:
    bank, run = make_bank(tmp_path), tmp_path / "run"
    options = OPTIONS | {"sampler": "listen-to-look", "classifier": "heavy", "light": "light", "audio": True}
    no_sound = rf"this bank has no sound; .*sosampler prepare MANIFEST --audio --out {bank.path}$"
    with pytest.raises(InvalidArgument, match=no_sound):
        so.train(bank, out=run, **options)
    assert not run.exists()
    so.prepare(tmp_path / "m.csv", out=bank.path, num_candidates=4, workers=0, audio=True)
    options |= {"audio_channels": 2, "lr": 0.02, "epochs": {"audio": 8, "skim": 8}}
    result = so.train(bank, out=run, **options).result
    assert result["dev"] == 1.0  # by its pitch alone
    log = [json.loads(line)["phase"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert log == ["audio"] * 8 + ["skim"] * 8
    loaded = so.load_system(run)
    assert loaded.feature_sets == ("heavy", "light", AUDIO)
    assert loaded.about[AUDIO] == bank.audio().fingerprint

    found = evaluate(bank, ["uniform", f"a={run}@2", f"b={run}@uniform@2"], num_frames=2, num_candidates=4, bootstrap=0)
    assert found.row("a@2").top1 == found.row("b@uniform@2").top1 == 1.0
    assert (found.row("a@2").frames_classified, found.row("a@2").frames_decoded) == (2, 4)
    assert (found.row("b@uniform@2").frames_classified, found.row("b@uniform@2").frames_decoded) == (2, 2)
    shutil.rmtree(bank.path / "audio")
    with pytest.raises(InvalidArgument, match=no_sound):
        evaluate(so.Bank(bank.path), f"a={run}", num_frames=2, num_candidates=4, bootstrap=0)
