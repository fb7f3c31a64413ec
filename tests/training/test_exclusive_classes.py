"""ActivityNet's regime: labels are sets (the metric), classes exclude each other (activation and losses)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.classifiers.weights import read_state
from sosampler.datasets.importers.build import import_dataset
from sosampler.training.classifier_data import open_source
from sosampler.training.train_classifier import ClassifierRecipe
from sosampler.video.synthetic import numbered_video

CLASSES = tuple(f"action {number:03}" for number in range(200))
SPLITS = {"train": "training", "dev": "validation"}
QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 2, "device": "cpu", "precision": "float32"}


def classifier() -> so.Classifier:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return so.create_classifier("timm:test_resnet", num_classes=200, class_names=CLASSES, input_size=32)


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, so.Bank]:
    """The same videos: as ActivityNet's file names them, one with two labels, and as a manifest of single labels."""
    folder = tmp_path_factory.mktemp("activitynet")
    (folder / "videos").mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    database, lines = {}, ["path,label,split"]
    for number in range(6):
        numbered_video(folder / "videos" / f"v_{number}.mp4", num_frames=8 + number)
        labels = [CLASSES[33 * number]] + ([CLASSES[7]] if number == 5 else [])
        split = "dev" if number > 3 else "train"
        annotations = [{"segment": [0, 1], "label": label} for label in labels]
        database[str(number)] = {"subset": SPLITS[split], "annotations": annotations}
        lines.append(f"videos/v_{number}.mp4,{labels[0]},{split}")
    (folder / "activity_net.json").write_text(json.dumps({"database": database}))
    (folder / "single.csv").write_text("\n".join(lines) + "\n")
    imported = import_dataset(
        "activitynet",
        [folder / "activity_net.json"],
        videos=folder / "videos",
        classes=folder / "classes.txt",
        split_map={"validation": "dev"},
    )
    imported.write(folder / "sets.jsonl")
    manifests = {"sets": folder / "sets.jsonl", "single": folder / "single.csv"}
    return {
        name: so.prepare(path, classifier(), folder / name, num_candidates=4, size=48, workers=0)
        for name, path in manifests.items()
    }


def test_imported(banks: dict[str, so.Bank]) -> None:
    bank = banks["sets"]
    assert bank.multi_label
    assert bank.exclusive
    assert json.loads((bank.path / "bank.json").read_text())["exclusive"] is True
    assert [len(item.labels) for item in bank.items] == [1, 1, 1, 1, 1, 2]
    assert banks["single"].exclusive
    assert "exclusive" not in json.loads((banks["single"].path / "bank.json").read_text())


@pytest.mark.parametrize("recipe", ["paper", "default", "ocsampler"])
def test_a_sampler_learns_as_from_single_labels(recipe: str, banks: dict[str, so.Bank], tmp_path: Path) -> None:
    settings = {"class_head": True} if recipe == "paper" else {}
    if recipe == "ocsampler":
        settings = {"reinforce": {"num_frames": 2, "reward": "label"}}
    trained = {}
    for name, bank in banks.items():
        run = so.train(bank, out=tmp_path / name, recipe=recipe, input_size=32, **settings, **QUICK)
        assert not run.sampler.multi_label
        assert run.result["metric"] == {"sets": "mAP", "single": "top1"}[name]
        trained[name] = read_state(tmp_path / name / "model.safetensors")
    assert_same(trained["sets"], trained["single"])


@pytest.mark.parametrize("system", ["frameexit", "marl"])
def test_a_baseline_learns_as_from_single_labels(system: str, banks: dict[str, so.Bank], tmp_path: Path) -> None:
    trained = {}
    for name, bank in banks.items():
        run = so.train(bank, out=tmp_path / name, sampler=system, classifier=classifier(), epochs=1, device="cpu")
        assert not run.system.multi_label
        assert run.result["metric"] == {"sets": "mAP", "single": "top1"}[name]
        trained[name] = read_state(tmp_path / name / "model.safetensors")
    assert_same(trained["sets"], trained["single"])


def test_a_classifier_learns_as_from_single_labels(banks: dict[str, so.Bank], tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_frames": 2, "workers": 0, "epochs": 1, "device": "cpu", "input_size": 32}
    trained = {}
    for name, bank in banks.items():
        run = so.train_classifier(bank, "timm:test_resnet", out=tmp_path / name, **options)
        assert run.classifier.activation == "softmax"
        assert run.result["metric"] == {"sets": "mAP", "single": "top1"}[name]
        trained[name] = read_state(tmp_path / name / "model.safetensors")
    assert_same(trained["sets"], trained["single"])
    independent = so.train_classifier(
        banks["sets"], "timm:test_resnet", out=tmp_path / "independent", exclusive=False, **options
    )
    assert independent.classifier.activation == "sigmoid"


def test_videos_without_a_label_are_left_out(tmp_path: Path) -> None:
    """They are examples only where classes are independent; the others keep their own frames."""
    labels: list[tuple[int, ...]] = [(), (0,), (1,), (), (0, 1), (1,)]
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=own,
            frames=np.full((2, 32, 32, 3), 40 * number, np.uint8),
            split="dev" if number == 5 else "train",
        )
        for number, own in enumerate(labels)
    ]
    for exclusive, expected in ((True, [1, 2, 4]), (False, [0, 1, 2, 3, 4])):
        folder = tmp_path / str(exclusive)
        bank = so.write_frames(folder, entries, classes=["a", "b"], multi_label=True, exclusive=exclusive)
        recipe = ClassifierRecipe(num_frames=1)
        examples, _ = open_source(bank, recipe).open(
            classifier().preprocessing, recipe, frames_folder=tmp_path / "none", workers=0, check=False
        )
        clips = [examples["train"].clip(number, None)[0] for number in range(len(examples["train"]))]
        assert [round(float(clip.mean()) / 40) for clip in clips] == expected


def test_map_counts_both_labels(banks: dict[str, so.Bank]) -> None:
    bank = banks["sets"]
    row = so.evaluate(bank, "uniform", num_frames=2, num_candidates=4, split="dev", device="cpu").row("uniform")
    probs = []
    for index in (4, 5):
        logits = bank.teacher(None)[index].features[[1, 3]].mean(0).astype(np.float64)  # uniform: 2 of 4
        probs.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
    truth = [set(bank.items[index].labels) for index in (4, 5)]
    precisions = []
    for label in sorted(truth[0] | truth[1]):  # two videos: the right one is first (1) or second (1/2)
        right, wrong = (0, 1) if label in truth[0] else (1, 0)
        precisions.append(1.0 if probs[right][label] > probs[wrong][label] else 0.5)
    assert len(precisions) == 3
    assert row.mAP == pytest.approx(np.mean(precisions))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name
