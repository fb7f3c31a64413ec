"""The probe of a sampler: its loss against loops, a problem whose truth is known, and the training of a sampler."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import sosampler as so
from sosampler.bank.writer import writing_bank
from sosampler.training import probe as probe_module
from sosampler.training.probe import (
    Probe,
    ProbeVideos,
    beliefs,
    choose_probe,
    class_prior,
    fit_probe,
    loss_of,
    probe_dev,
    probe_videos,
)
from sosampler.training.train_sampler import train
from sosampler.video.candidates import uniform_positions
from tests.factories import SAMPLER_QUICK, make_bank


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_belief_and_its_loss_by_loops(multi_label: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    outputs, own = torch.randn(3, 4, 6, generator=rng), torch.randn(3, 4, 5, generator=rng)
    real = torch.tensor([[True] * 4, [True, True, False, True], [True, False, False, False]])
    labels = torch.eye(5)[[0, 3, 4]]
    labels[1, 0] = 1
    videos = ProbeVideos(torch.zeros(3, 4, 2), own, real, labels)
    prior = class_prior(labels, multi_label=multi_label)
    assert prior == pytest.approx(4 / 15 if multi_label else 1 / 5)
    total = 0.0
    for video in range(3):
        belief = [math.log(prior / (1 - prior)) if multi_label else 0.0] * 5
        for frame in range(4):
            if not real[video, frame]:
                continue
            *corrections, shown = outputs[video, frame].tolist()
            logits = [0.7 * value + more for value, more in zip(own[video, frame].tolist(), corrections, strict=True)]
            r = logistic(shown)
            odds = sum(math.exp(value) for value in logits)
            for c, value in enumerate(logits):
                p = logistic(value) if multi_label else math.exp(value) / odds
                belief[c] += math.log(1 - r + r * p / prior)
                if multi_label:
                    belief[c] -= math.log(1 - r + r * (1 - p) / (1 - prior))
        true = [c for c in range(5) if labels[video, c]]
        if multi_label:
            probs = [logistic(value) for value in belief]
            total -= sum(math.log(p if c in true else 1 - p) for c, p in enumerate(probs)) / 5
        else:
            whole = math.log(sum(math.exp(value) for value in belief))
            total -= sum(belief[c] - whole for c in true) / len(true)
    found = beliefs(outputs, torch.tensor(0.7), videos, prior, multi_label=multi_label)
    assert float(loss_of(found, labels, multi_label=multi_label)) == pytest.approx(total / 3, rel=1e-5)


def problem(videos: int, seed: int, *, wide: int = 24) -> tuple[ProbeVideos, torch.Tensor]:
    """A third of the frames point into the direction of the class, the others into one of their own; and noise."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(99).normal(0, 1, (7, wide))
    label = rng.integers(5, size=videos)
    shows = rng.random((videos, 6)) < 0.34
    shows[np.arange(videos), rng.integers(6, size=videos)] = True
    what = np.where(shows, label[:, None], 5 + rng.integers(2, size=shows.shape))
    features = directions[what] + rng.normal(0, 0.8, (videos, 6, wide))
    logits = 0.5 * np.eye(5)[np.where(shows, label[:, None], 0)] + rng.normal(0, 1, (videos, 6, 5))
    tensors = (torch.from_numpy(each).float() for each in (7 * features + 3, logits))
    return ProbeVideos(*tensors, torch.ones(shows.shape, dtype=torch.bool), torch.eye(5)[label]), torch.from_numpy(
        shows
    )


def test_it_learns_classes_and_relevance_from_labels_of_videos() -> None:
    (train_videos, _), (dev, _), (test, shows) = problem(300, 0), problem(80, 1), problem(400, 2)
    found = choose_probe(train_videos, dev, multi_label=False)
    assert found is not None
    probe, facts = found
    outputs = torch.nn.functional.linear(test.features, probe.weight, probe.bias)
    assert roc_auc_score(shows.flatten(), outputs[..., -1].flatten()) > 0.95
    right = (outputs[..., :-1] + probe.scale * test.logits).argmax(-1) == test.labels.argmax(1)[:, None]
    assert float(right[shows].float().mean()) > 0.9
    answers = probe.belief(test, multi_label=False).argmax(1) == test.labels.argmax(1)
    assert float(answers.float().mean()) > 0.95
    losses = facts["log_loss"]
    assert losses[str(facts["ridge"])] == min(losses.values())
    assert facts["videos"] == 300


def test_the_fit_is_a_minimum() -> None:
    """In units of the features' spread, with a weaker penalty of the relevance; other units change nothing."""
    videos, _ = problem(60, 3)
    probe = fit_probe(videos, 1e-2, multi_label=False)
    spread = videos.features.flatten(0, 1).std(0)
    penalty = torch.tensor([1e-2] * 5 + [1e-3])[:, None]

    def objective(found: Probe) -> float:
        loss = loss_of(found.belief(videos, multi_label=False), videos.labels, multi_label=False)
        return float(loss + (penalty * (found.weight * spread).square()).sum())

    least = objective(probe)
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        step = 0.02 * torch.randn(probe.weight.shape, generator=rng) / spread
        assert objective(probe._replace(weight=probe.weight + step)) > least
        assert objective(probe._replace(bias=probe.bias + 0.1 * torch.randn(6, generator=rng))) > least
    for factor in (0.8, 1.2):
        assert objective(probe._replace(scale=factor * probe.scale)) > least
    moved = videos._replace(features=videos.features * torch.linspace(0.1, 5, 24) - 4)
    again = fit_probe(moved, 1e-2, multi_label=False)
    found, expected = (
        each.belief(given, multi_label=False).softmax(-1) for each, given in ((again, moved), (probe, videos))
    )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)


def test_what_is_read_of_a_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spread frames, of which those that a short video repeats count once; as many videos as fit."""
    bank, _ = bank_of_a_classifier(tmp_path, probe_features=True)
    teacher = bank.teacher(next(name for name in bank.teachers if name in bank.feature_sets))
    features = bank.features_of_teacher(teacher)
    assert features is not None
    labels = torch.eye(3)[[row % 3 for row in range(48)]]
    videos = probe_videos(features, teacher, range(48), labels, 8, device=torch.device("cpu"))
    lengths = [len(features[row]) for row in range(48)]
    assert set(lengths) == {6, 8}
    assert videos.real.sum(1).tolist() == lengths
    positions = uniform_positions(6, 8)
    assert videos.real[1].tolist() == [place == 0 or positions[place] > positions[place - 1] for place in range(8)]
    np.testing.assert_array_equal(videos.features[1].numpy(), features[1][positions].astype(np.float32))
    np.testing.assert_array_equal(videos.logits[1].numpy(), teacher[1].features[positions])
    probe = torch.nn.Linear(features.width, 4)
    found = probe_dev(probe, features, range(48), 8)
    expected = probe(videos.features).detach().double().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    monkeypatch.setattr(probe_module, "_MAX_BYTES", 4 * 8 * (features.width + 8 * 3) * 5)
    few = probe_videos(features, teacher, range(48), labels, 8, device=torch.device("cpu"))
    assert len(few.labels) == 5
    kept = [0, 12, 24, 35, 47]
    assert torch.equal(few.labels, labels[kept])
    assert torch.equal(few.features, videos.features[kept])


def test_repeated_frames_do_not_count() -> None:
    """A video with fewer frames gives the same probe however they are repeated."""
    videos, _ = problem(60, 3)
    real = torch.ones(60, 6, dtype=torch.bool)
    real[::2, 4:] = False
    changed = videos._replace(real=real)
    other = changed._replace(features=torch.where(real[..., None], videos.features, 1e3))
    for one, two in zip(*(fit_probe(each, 3e-2, multi_label=False)[:3] for each in (changed, other)), strict=True):
        torch.testing.assert_close(one, two)


def test_a_feature_that_hardly_differs_stays_bounded() -> None:
    videos, _ = problem(60, 3)
    rare = torch.zeros(60, 6, 1)
    rare[0, 0] = 1e-4
    wide = videos._replace(features=torch.cat([videos.features, rare], 2))
    probe = fit_probe(wide, 1e-2, multi_label=False)
    usual = videos.features.flatten(0, 1).std(0).median()
    assert float(probe.weight[:, -1].abs().max() * usual) < 10 * float((probe.weight[:, :-1] * usual).abs().max())


def test_losses_that_are_not_finite_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (train_videos, _), (dev, _) = problem(40, 0), problem(20, 1)
    real = probe_module.fit_probe

    def diverging(bad: tuple[float, ...]) -> Any:
        def fit(videos: ProbeVideos, ridge: float, **options: Any) -> Probe:
            found = real(videos, ridge, **options)
            return found._replace(bias=found.bias * float("nan")) if ridge in bad else found

        return fit

    monkeypatch.setattr(probe_module, "fit_probe", diverging((0.01, 0.03)))
    found = choose_probe(train_videos, dev, multi_label=False)
    assert found is not None
    assert found[1]["ridge"] == 0.1
    assert list(found[1]["log_loss"]) == ["0.1"]
    monkeypatch.setattr(probe_module, "fit_probe", diverging((0.01, 0.03, 0.1)))
    assert choose_probe(train_videos, dev, multi_label=False) is None


# ---- training


def bank_of_a_classifier(
    folder: Path, *, probe_features: bool, dev: int = 24, multi_label: bool = False
) -> tuple[so.Bank, Path]:
    bank = make_bank(folder / "bank", train=24, dev=dev, multi_label=multi_label)
    options: dict[str, Any] = {"class_names": bank.classes, "input_size": 32, "multi_label": multi_label}
    classifier = so.create_classifier("timm:test_resnet", **options)
    classifier.fresh_head = False
    so.save_classifier(classifier, folder / "classifier")
    return so.add_teacher(bank, classifier, probe_features=probe_features), folder / "classifier"


OPTIONS = SAMPLER_QUICK | {"epochs": 1, "answer": "best"}


def test_training_gives_the_sampler_a_probe(tmp_path: Path) -> None:
    bank, folder = bank_of_a_classifier(tmp_path, probe_features=True)
    said: list[str] = []
    trained = train(bank, out=tmp_path / "run", classifier=folder, say=said.append, **OPTIONS)
    fingerprint = so.create_classifier(folder).fingerprint()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    features = bank.features(fingerprint)
    assert config["probe"] == {"classifier": fingerprint, "width": features.width}
    assert set(config["answer"]) == {"default", "weighted", "fused", "probed", "sure", "sure_probed"}
    assert trained.result["probe"]["videos"] == 24
    assert "probed" in trained.result["answers"]
    (line,) = [text for text in said if text.startswith("probe: ")]
    assert "learned from 24 videos" in line
    loaded = so.load_sampler(tmp_path / "run")
    assert torch.equal(loaded.probe.weight, trained.sampler.probe.weight)
    assert loaded.fingerprint() == trained.sampler.fingerprint()
    # What was measured on dev is what `evaluate` finds, with the settings that were fitted to all of dev.
    options = {"num_frames": 2, "num_candidates": 8, "split": "dev", "bootstrap": 0, "device": "cpu"}
    (row,) = so.evaluate(bank, loaded, classifier=folder, answer="probed", **options).rows
    assert row.answer == "probed"
    (plain,) = so.evaluate(bank, loaded, classifier=folder, answer="fused", **options).rows
    assert row.gmacs == pytest.approx(plain.gmacs + 8 * 4 * features.width / 1e9, rel=1e-9)
    pipe = so.Pipeline(loaded, folder, num_candidates=8, num_frames=2, answer="probed")
    assert pipe.answer == "probed"


def test_features_are_computed_once_where_the_classifier_is_given(tmp_path: Path) -> None:
    bank, folder = bank_of_a_classifier(tmp_path, probe_features=False)
    fingerprint = so.create_classifier(folder).fingerprint()
    said: list[str] = []
    without = train(bank, out=tmp_path / "without", classifier=fingerprint, say=said.append, **OPTIONS)
    assert without.sampler.probe is None
    assert any(text.startswith("no probe: ") and "--classifier FOLDER" in text for text in said)
    assert "probed" not in without.sampler.config["answer"]
    assert not bank.feature_sets
    with writing_bank(bank.folder):
        locked = train(bank, out=tmp_path / "locked", classifier=folder, say=said.append, **OPTIONS)
        assert locked.sampler.probe is None
        assert any(text.startswith("no probe: ") and "is writing" in text for text in said)
        with pytest.raises(so.SosamplerError, match="is writing"):
            train(bank, out=tmp_path / "insists", classifier=folder, **{**OPTIONS, "answer": "probed"})
    assert not bank.feature_sets
    mean = train(bank, out=tmp_path / "mean", classifier=folder, **{**OPTIONS, "answer": "mean"})
    assert mean.sampler.probe is None
    assert not bank.feature_sets
    probed = train(bank, out=tmp_path / "probed", classifier=folder, **{**OPTIONS, "answer": "probed"})
    assert probed.sampler.config["answer"]["default"] == "probed"
    assert list(bank.feature_sets) == [fingerprint]
    again = train(bank, out=tmp_path / "again", classifier=fingerprint, **{**OPTIONS, "answer": "probed"})
    assert again.sampler.fingerprint() == probed.sampler.fingerprint()


def test_without_enough_dev_videos_nothing_is_computed(tmp_path: Path) -> None:
    bank, folder = bank_of_a_classifier(tmp_path, probe_features=False, dev=19)
    trained = train(bank, out=tmp_path / "run", classifier=folder, **OPTIONS)
    assert trained.sampler.probe is None
    assert not bank.feature_sets


def test_classes_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    """From the bank to the label, with a sigmoid for each class."""
    bank, folder = bank_of_a_classifier(tmp_path, probe_features=True, multi_label=True)
    options = {**OPTIONS, "answer": "probed"}
    trained = train(bank, out=tmp_path / "run", classifier=folder, **options)
    assert set(trained.sampler.config["answer"]["probed"]) >= {"probe", "relevance", "prior"}
    given: dict[str, Any] = {"num_frames": 2, "num_candidates": 8, "device": "cpu"}
    (row,) = so.evaluate(bank, trained.sampler, classifier=folder, split="dev", bootstrap=0, **given).rows
    assert row.answer == "probed"
    assert 0 < row.mAP <= 1
