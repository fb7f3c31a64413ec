"""The probe of a sampler: its loss against loops, a problem whose truth is known, and the training of a sampler."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import sosampler as so
from sosampler.training.probe import Probe, ProbeVideos, beliefs, choose_probe, class_prior, fit_probe, loss_of
from sosampler.training.train_sampler import train
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


# ---- training


def bank_of_a_classifier(folder: Path, *, probe_features: bool) -> tuple[so.Bank, Path]:
    bank = make_bank(folder / "bank", train=24, dev=24)
    classifier = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
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
    mean = train(bank, out=tmp_path / "mean", classifier=folder, **{**OPTIONS, "answer": "mean"})
    assert mean.sampler.probe is None
    assert not bank.feature_sets
    probed = train(bank, out=tmp_path / "probed", classifier=folder, **{**OPTIONS, "answer": "probed"})
    assert probed.sampler.config["answer"]["default"] == "probed"
    assert list(bank.feature_sets) == [fingerprint]
    again = train(bank, out=tmp_path / "again", classifier=fingerprint, **{**OPTIONS, "answer": "probed"})
    assert again.sampler.fingerprint() == probed.sampler.fingerprint()
