"""Training systems through `train`: they learn, and the dial trades accuracy for cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sosampler as so
from sosampler.baselines.base import predict, video_gmacs
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.training.baseline_data import bank_views
from tests.factories import (
    BRIEF,
    HEAVY_GMACS,
    HEAVY_PRINT,
    KEPT,
    LEARNABLE_CLASSES,
    LIGHT_GMACS,
    LIGHT_PRINT,
    PRICES,
    QUICK,
    STORED,
    files_of,
    make_learnable_bank,
    make_networks,
    make_plain_bank,
    on_heavy_features,
    random_frames_bound,
)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "bank", train=640, dev=256)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "few", train=40, dev=10)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_networks(tmp_path_factory.mktemp("networks"))


@pytest.fixture(scope="module")
def runs(bank: so.Bank, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], so.TrainedSystem]:
    """A trained system of each kind, trained when it is asked for."""
    folder, kept = tmp_path_factory.mktemp("runs"), {}

    def run(name: str) -> so.TrainedSystem:
        if name not in kept:
            kept[name] = so.train(bank, out=folder / name, sampler=name, **KEPT, **QUICK[name])
        return kept[name]

    return run


@pytest.mark.parametrize("name", on_heavy_features())
def test_a_system_learns_and_beats_random_frames(
    bank: so.Bank, runs: Callable[[str], so.TrainedSystem], name: str
) -> None:
    trained = runs(name)
    result = trained.result
    assert result["metric"] == "top1"
    # As many random frames, rounded up, tell any classifier less than what the system knows.
    further = {"r34": "34" * 8, "r18": "18" * 8} if name == "ar-net" else {}
    sets = {"heavy": "heavy", "light": "light" if "light" in trained.system.feature_sets else None}
    views, labels = bank_views(
        bank.split("dev"), **sets, **dict(zip(further, further, strict=True)), num_candidates=STORED
    )
    output = predict(trained.system, views)
    by_any = torch.stack([frames for one, frames in output.seen.items() if one != "light"]).any(0)
    frames = math.ceil(by_any.sum(1).double().mean())
    assert result["dev"] > random_frames_bound(frames) + 0.1
    assert result["sizes"] == {"train": 640, "dev": 256, "unlabelled": 0}
    assert result["seed"] == 0
    assert result["epochs"] == QUICK[name]["epochs"]
    light = name in ("liteeval", "adaframe", "ar-net", "listen-to-look")
    if name != "ar-net":  # which may skip frames
        assert (result["dev_frames_decoded"] == STORED) == light  # who glances, glances at all
    assert (result["heavy"], result["light"]) == (HEAVY_PRINT, LIGHT_PRINT if light else None)
    assert result.get("sets", {}) == further

    # The same figures by the functions for everybody, from the folder.
    loaded = so.load_system(trained.folder)
    output = predict(loaded, views)
    assert result["dev"] == pytest.approx(float((output.probabilities.argmax(1) == labels.argmax(1)).float().mean()))
    classified = by_any if name == "ar-net" else output.seen_heavy  # AR-Net has three networks that classify
    assert result["dev_frames"] == pytest.approx(float(classified.sum(1).float().mean()))
    spent = video_gmacs(loaded, output, PRICES)
    assert result["dev_gmacs"] == pytest.approx(float(spent.mean()), rel=1e-5)
    heavy_frames, light_frames = (float(seen.sum(1).double().mean()) for seen in (output.seen_heavy, output.seen_light))
    assert result["dev_gmacs"] > HEAVY_GMACS * heavy_frames + LIGHT_GMACS * light_frames

    about = loaded.about
    assert about["classes"] == list(LEARNABLE_CLASSES)
    assert (about["classifier"], about["num_candidates"], about["seed"]) == ("by hand, heavy", STORED, 0)
    heavy = {"name": "heavy", "network": "by hand, heavy", "fingerprint": HEAVY_PRINT, "width": 6, "gmacs": HEAVY_GMACS}
    assert about["heavy"] == heavy
    assert (about["light"] or {}).get("fingerprint") == (LIGHT_PRINT if light else None)
    assert about["dev"] == result["dev"]
    assert about["sosampler"] == so.__version__
    assert read_baseline_recipe(name).changed(**about["recipe"]["settings"]).settings == about["recipe"]["settings"]
    assert loaded.config | about["recipe"]["settings"] == loaded.config
    assert repr(trained) == f"TrainedSystem({name}, {trained.folder}, top1, dev {result['dev']})"


@pytest.mark.parametrize("name", on_heavy_features())
def test_the_dial_trades_accuracy_for_cost(runs: Callable[[str], so.TrainedSystem], name: str) -> None:
    trained = runs(name)
    system, curve = trained.system, trained.result["dev_curve"]
    assert [(row["dial"], row["value"]) for row in curve] == [
        (system.threshold, value) for value in system.threshold_values
    ]
    spent = [row["gmacs"] for row in curve]
    assert spent == sorted(spent)
    assert spent[-1] > spent[0]
    assert max(row["top1"] for row in curve[1:]) >= curve[0]["top1"]
    own = [row for row in curve if row["value"] == system.config[system.threshold]]
    if own:
        (row,) = own
        shared = ("frames", "frames_decoded", "gmacs")
        assert {name: row[name] for name in shared} == {name: trained.result[f"dev_{name}"] for name in shared}
        assert row["top1"] == trained.result["dev"]
    # Distinct frames against steps, where a step sees a frame.
    each_step = trained.result.get("dev_steps", [])
    if name == "adaframe":
        assert [(row["steps"], row["frames"]) for row in each_step] == [(2, 2), (3, 3)]
        assert each_step[1]["top1"] > each_step[0]["top1"]
        assert {key: each_step[1][key] for key in ("top1", "gmacs")} == {
            key: curve[-1][key] for key in ("top1", "gmacs")
        }
    else:
        assert not each_step


def test_the_log_has_a_line_for_each_epoch(runs: Callable[[str], so.TrainedSystem]) -> None:
    lines = [json.loads(line) for line in (runs("frameexit").folder / "log.jsonl").read_text().splitlines()]
    counts = QUICK["frameexit"]["epochs"]
    expected = [(phase, epoch) for phase, count in counts.items() for epoch in range(count)]
    assert [(line["phase"], line["epoch"]) for line in lines] == expected
    assert lines[counts["classifiers"] - 1]["loss"] < lines[0]["loss"]
    assert sorted(files_of(runs("frameexit").folder)) == [
        "config.json",
        "log.jsonl",
        "model.safetensors",
        "result.json",
        "run.json",
    ]


def test_several_labels_a_video(tmp_path: Path) -> None:
    bank = make_learnable_bank(tmp_path / "bank", train=120, dev=60, multi_label=True)
    trained = so.train(
        bank, out=tmp_path / "run", sampler="marl", **KEPT, **QUICK["marl"] | {"batch_size": 16, "lr": 3e-2}
    )
    assert trained.result["metric"] == "mAP"
    assert trained.system.multi_label
    assert {"mAP", "frames"} <= set(trained.result["dev_curve"][0])
    assert 0.7 < trained.result["dev"] <= 1  # a third of the videos have each class


def test_without_dev_and_with_videos_without_labels(networks: SimpleNamespace, tmp_path: Path) -> None:
    bank = make_plain_bank(tmp_path / "bank", multi_label=True, dev=0, unlabelled=1)
    said: list[str] = []
    trained = so.train(
        bank,
        out=tmp_path / "run",
        sampler="marl",
        classifier=networks.classifier,
        say=said.append,
        **BRIEF | {"epochs": 1, "hidden": 8, "width": 4},
    )
    assert trained.result["sizes"] == {"train": 5, "dev": 0, "unlabelled": 1}
    on_dev = ("dev", "dev_frames", "dev_frames_decoded", "dev_gmacs")
    assert all(trained.result[name] is None for name in on_dev)
    assert trained.result["dev_curve"] == []
    assert any("no dev split (1 without a label are left out)" in line for line in said)
    assert said[-1] == f"written to {tmp_path / 'run'}"


def test_the_seed_decides(few: so.Bank, tmp_path: Path) -> None:
    options = QUICK["marl"] | {"epochs": 1}
    for name, seed in (("one", 0), ("same", 0), ("other", 5)):
        torch.manual_seed(hash(name) % 1000)  # of no account
        so.train(few, out=tmp_path / name, sampler="marl", seed=seed, **KEPT, **options)
    one, same, other = (files_of(tmp_path / name)["model.safetensors"] for name in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_who_needs_no_light_network_is_not_asked_for_one(runs: Callable[[str], so.TrainedSystem]) -> None:
    assert runs("frameexit").system.about["light"] is None
    assert not read_baseline_recipe("marl").needs_light
