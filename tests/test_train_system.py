"""Training systems through `train`: they learn, a run can be started again, and what is wrong is said."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import sosampler as so
from learnable_banks import (
    CLASSES,
    HEAVY_GMACS,
    HEAVY_PRINT,
    LIGHT_GMACS,
    LIGHT_PRINT,
    QUICK,
    STORED,
    make_learnable_bank,
    random_frames_bound,
)
from sosampler.cli.main import app
from sosampler.samplers.backbones import create_backbone
from sosampler.systems import bank_views, list_systems, predict, read_system_recipe, video_gmacs
from sosampler.systems.light import light_network
from sosampler.training import train_system as module

TINY = "timm:test_resnet.r160_in1k"
KEPT = {"classifier": "heavy", "light": "light"}
BRIEF = {"num_candidates": 4, "device": "cpu", "batch_size": 4}  # for networks and banks of no meaning


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "bank", train=640, dev=256)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "few", train=40, dev=10)


@pytest.fixture(scope="module")
def runs(bank: so.Bank, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], so.TrainedSystem]:
    """A trained system of each kind, trained when it is asked for."""
    folder, kept = tmp_path_factory.mktemp("runs"), {}

    def run(name: str) -> so.TrainedSystem:
        if name not in kept:
            kept[name] = so.train(bank, out=folder / name, sampler=name, **KEPT, **QUICK[name])
        return kept[name]

    return run


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A saved classifier, weights of MobileNetV2 and a saved sampler; all as they were drawn."""
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    so.save_classifier(so.create_classifier(TINY, num_classes=2, input_size=32), folder / "classifier")
    save_file(create_backbone("mobilenet_v2").weights_net().state_dict(), folder / "mobilenet.safetensors")
    so.SOSampler(backbone=TINY, input_size=32).save_pretrained(folder / "sampler")
    return SimpleNamespace(
        classifier=folder / "classifier", weights=folder / "mobilenet.safetensors", sampler=folder / "sampler"
    )


def make_plain_bank(folder: Path, *, multi_label: bool = False, dev: int = 3, unlabelled: int = 0) -> so.Bank:
    """A few short videos without any features."""
    rng = np.random.default_rng(0)
    lengths = [5, 4, 3, 5, 4, 6, 5, 4, 2][: 6 + dev]
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=() if number < unlabelled else (number % 2,),
            frames=rng.integers(0, 255, (length, 40, 40, 3), dtype=np.uint8),
            split="train" if number < 6 else "dev",
        )
        for number, length in enumerate(lengths)
    ]
    return so.write_frames(folder, entries, classes=("run", "jump"), multi_label=multi_label, videos_per_shard=4)


@pytest.fixture
def plain(tmp_path: Path) -> so.Bank:
    return make_plain_bank(tmp_path / "bank")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- the whole


@pytest.mark.parametrize("name", list_systems())
def test_a_system_learns_and_beats_random_frames(
    bank: so.Bank, runs: Callable[[str], so.TrainedSystem], name: str
) -> None:
    trained = runs(name)
    result = trained.result
    assert result["metric"] == "top1"
    # As many random frames, rounded up, tell any classifier less than what the system knows.
    frames = math.ceil(result["dev_frames"])
    assert result["dev"] > random_frames_bound(frames) + 0.1
    assert result["sizes"] == {"train": 640, "dev": 256, "unlabelled": 0}
    assert result["seed"] == 0
    assert result["epochs"] == QUICK[name]["epochs"]
    light = name in ("liteeval", "adaframe")
    assert (result["dev_frames_decoded"] == STORED) == light  # who glances, glances at all
    assert (result["heavy"], result["light"]) == (HEAVY_PRINT, LIGHT_PRINT if light else None)

    # The same figures by the functions for everybody, from the folder.
    loaded = so.load_system(trained.folder)
    views, labels = bank_views(
        bank.split("dev"), heavy="heavy", light="light" if light else None, num_candidates=STORED
    )
    output = predict(loaded, views)
    assert result["dev"] == pytest.approx(float((output.probabilities.argmax(1) == labels.argmax(1)).float().mean()))
    assert result["dev_frames"] == pytest.approx(float(output.seen_heavy.sum(1).float().mean()))
    spent = video_gmacs(loaded, output, heavy_gmacs=HEAVY_GMACS, light_gmacs=LIGHT_GMACS)
    assert result["dev_gmacs"] == pytest.approx(float(spent.mean()), rel=1e-5)
    assert result["dev_gmacs"] > HEAVY_GMACS * result["dev_frames"] + LIGHT_GMACS * STORED * light

    about = loaded.about
    assert about["classes"] == list(CLASSES)
    assert (about["classifier"], about["num_candidates"], about["seed"]) == ("by hand, heavy", STORED, 0)
    heavy = {"name": "heavy", "network": "by hand, heavy", "fingerprint": HEAVY_PRINT, "width": 6, "gmacs": HEAVY_GMACS}
    assert about["heavy"] == heavy
    assert (about["light"] or {}).get("fingerprint") == (LIGHT_PRINT if light else None)
    assert about["dev"] == result["dev"]
    assert about["sosampler"] == so.__version__
    assert read_system_recipe(name).changed(**about["recipe"]["settings"]).settings == about["recipe"]["settings"]
    assert loaded.config | about["recipe"]["settings"] == loaded.config
    assert repr(trained) == f"TrainedSystem({name}, {trained.folder}, top1, dev {result['dev']})"


@pytest.mark.parametrize("name", list_systems())
def test_the_dial_trades_accuracy_for_cost(runs: Callable[[str], so.TrainedSystem], name: str) -> None:
    trained = runs(name)
    system, curve = trained.system, trained.result["dev_curve"]
    assert [(row["dial"], row["value"]) for row in curve] == [(system.dial, value) for value in system.dial_values]
    spent = [row["gmacs"] for row in curve]
    assert spent == sorted(spent)
    assert spent[-1] > spent[0]
    assert curve[-1]["top1"] >= curve[0]["top1"]
    own = [row for row in curve if row["value"] == system.config[system.dial]]
    if own:
        (row,) = own
        shared = ("frames", "frames_decoded", "gmacs")
        assert {name: row[name] for name in shared} == {name: trained.result[f"dev_{name}"] for name in shared}
        assert row["top1"] == trained.result["dev"]


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


def test_by_the_command_with_features_that_are_computed_once(
    plain: so.Bank, networks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        *("train", str(plain.path), "--sampler", "liteeval", "--out", str(tmp_path / "run"), "--json"),
        *("--classifier", str(networks.classifier), "--weights", str(networks.weights), "--device", "cpu"),
        *("--epochs", "2", "--batch-size", "4", "--set", "num_candidates=4", "--set", "fine_width=80"),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["folder"] == str(tmp_path / "run")
    assert len(told["dev_curve"]) == 6
    assert told["epochs"] == 2
    assert "asking timm:test_resnet" in done.stderr
    assert "asking mobilenet_v2" in done.stderr
    assert "liteeval all 2/2: loss" in done.stderr
    kept = so.Bank(plain.path).feature_sets
    heavy, light = (
        so.create_classifier(networks.classifier).fingerprint(),
        light_network(networks.weights).fingerprint(),
    )
    assert set(kept) == {heavy, light}
    assert all(len(so.Bank(plain.path).features(name)) == 9 for name in kept)  # of all splits, for `evaluate`
    system = so.load_system(tmp_path / "run")
    assert (system.config["fine_width"], system.config["heavy_width"]) == (80, kept[heavy]["width"])
    assert system.about["light"] == {
        "name": light,
        "network": "mobilenet_v2",
        "fingerprint": light,
        "width": 1280,
        "gmacs": kept[light]["gmacs"],
    }

    def never(*rest: Any, **named: Any) -> None:
        raise AssertionError("features are there already")

    monkeypatch.setattr("sosampler.training.system_features.add_features", never)
    again = CliRunner().invoke(app, arguments)
    assert "this run is finished" in again.stderr
    assert json.loads(again.stdout) == told
    # Another system on the same features; then by name, where no network is loaded.
    options: dict[str, Any] = BRIEF | {"epochs": 1, "hidden": 8, "width": 4}
    so.train(
        plain,
        out=tmp_path / "other",
        sampler="adaframe",
        classifier=networks.classifier,
        weights=networks.weights,
        **options,
    )
    monkeypatch.setattr("sosampler.training.system_features.create_classifier", never)
    monkeypatch.setattr("sosampler.training.system_features.light_network", never)
    named = so.train(
        plain, out=tmp_path / "named", sampler="adaframe", classifier=TINY, light="mobilenet_v2", **options
    )
    assert files_of(named.folder)["model.safetensors"] == files_of(tmp_path / "other")["model.safetensors"]
    sole = so.train(plain, out=tmp_path / "sole", sampler="adaframe", light=light, **options)  # one classifier only
    assert sole.result == named.result

    wrong = CliRunner().invoke(app, [*arguments, "--set", "loss=hinge"])
    assert wrong.exit_code != 0
    assert "loss: no such setting in a recipe; choose from: name, num_candidates" in str(wrong.exception)


def test_networks_may_be_given_themselves(plain: so.Bank, networks: SimpleNamespace, tmp_path: Path) -> None:
    classifier, light = so.create_classifier(networks.classifier), so.load_sampler(networks.sampler)
    options: dict[str, Any] = BRIEF | {"epochs": 1, "fine_width": 16, "coarse_width": 4, "sampler": "liteeval"}
    so.add_features(plain, light, name="small")  # under a name of the user's own
    trained = so.train(plain, out=tmp_path / "run", classifier=classifier, light=light, **options)
    assert trained.system.about["light"]["name"] == "small"
    assert set(so.Bank(plain.path).feature_sets) == {"small", classifier.fingerprint()}
    folder = so.train(plain, out=tmp_path / "2", classifier=networks.classifier, light=networks.sampler, **options)
    assert folder.result == trained.result
    # A classifier will do as a light network.
    twice = so.train(plain, out=tmp_path / "3", classifier=classifier, light=str(networks.classifier), **options)
    assert twice.system.about["light"] == twice.system.about["heavy"]


def test_the_light_network_depends_on_its_weights_alone(networks: SimpleNamespace) -> None:
    prints = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        network = light_network(networks.weights)
        assert torch.equal(torch.get_rng_state(), before)
        prints.append(network.fingerprint())
    assert prints[0] == prints[1]
    assert (network.input_size, network.backbone.reach) == (128, 0)
    assert not any(weight.requires_grad for weight in network.parameters())


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


# ---- killed, finished, changed

SHORT = QUICK["frameexit"] | {"epochs": {"classifiers": 2, "gates": 1}}


def test_a_killed_run_started_again_gives_the_same(
    few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    so.train(few, out=tmp_path / "whole", sampler="frameexit", **KEPT, **SHORT)

    def stop(*rest: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    def stop_in_the_second_epoch(line: str) -> None:
        if "classifiers 2/2" in line:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        so.train(few, out=run, sampler="frameexit", say=stop_in_the_second_epoch, **KEPT, **SHORT)
    homes = (
        (module, "measure_system"),
        (module, "save_system"),
        (module.RunFolder, "log"),
        (module.RunFolder, "finish"),
    )
    for home, name in homes:
        with monkeypatch.context() as patch:
            patch.setattr(home, name, stop)
            with pytest.raises(KeyboardInterrupt):
                so.train(few, out=run, sampler="frameexit", **KEPT, **SHORT)
    (run / ".model.123.part.safetensors").write_bytes(b"half")  # as a kill leaves it
    so.train(few, out=run, sampler="frameexit", **KEPT, **SHORT)
    assert files_of(run) == files_of(tmp_path / "whole")


def test_features_that_were_broken_off_go_on(
    plain: so.Bank, networks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = BRIEF | {"epochs": 1, "hidden": 8, "width": 4, "sampler": "marl"}

    def stop(*rest: Any, **named: Any) -> Callable[[Any], None]:
        def tell(progress: Any) -> None:
            if progress.done == 6:
                raise KeyboardInterrupt

        return tell

    classifier = so.create_classifier(networks.classifier)
    with monkeypatch.context() as patch:
        patch.setattr("sosampler.training.system_features._shown", stop)
        with pytest.raises(KeyboardInterrupt):
            so.train(plain, out=tmp_path / "run", classifier=classifier, **options)
    name = classifier.fingerprint()
    answers = plain.folder.feature_answers(name)
    assert answers.missing(3) == [1, 2]
    before = answers.shard(0).stat().st_mtime_ns
    with pytest.raises(so.SosamplerError, match=r"2 of 3 parts of these features are missing"):
        so.train(plain, out=tmp_path / "run", classifier=name, **options)  # nobody there to be asked
    trained = so.train(plain, out=tmp_path / "run", classifier=classifier, **options)
    assert answers.missing(3) == []
    assert answers.shard(0).stat().st_mtime_ns == before
    assert trained.result["heavy"] == name


def test_a_finished_run_returns_at_once_and_another_is_refused(
    few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "sampler": "marl"} | KEPT | QUICK["marl"] | {"epochs": 1}
    first = so.train(few, **options)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", None)
        again = so.train(few.path, say=said.append, **options)
    assert said == [f"{tmp_path / 'run'}: this run is finished"]
    assert again.result == first.result
    assert all(torch.equal(a, b) for a, b in zip(again.system.parameters(), first.system.parameters(), strict=True))
    for change, says in (
        ({"lr": 0.5}, r"recipe.lr was 0.01, is 0.5"),
        ({"agents": 4}, r"recipe.settings.agents was 2, is 4"),
        ({"classifier": "light"}, "heavy was 'b"),
        ({"sampler": "frameexit"} | QUICK["frameexit"], "recipe"),
    ):
        changed = {key: value for key, value in options.items() if "sampler" not in change or key in ("out", *KEPT)}
        with pytest.raises(so.InvalidArgument, match=f"other settings: .*{says}"):
            so.train(few, **changed | change)
    third = so.train(few, overwrite=True, **options | {"seed": 1})
    assert third.result["seed"] == 1
    (tmp_path / "run/result.json").write_text("{")
    with pytest.raises(so.WeightsError, match=r"result.json: is damaged"):
        so.train(few, **options | {"seed": 1})


def test_other_folders_are_left_alone(few: so.Bank, networks: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "marl"} | KEPT | QUICK["marl"] | {"epochs": 1}
    with pytest.raises(so.InvalidArgument, match="lie inside each other"):
        so.train(few, out=few.path / "run", **options)
    with pytest.raises(so.InvalidArgument, match="not of a training run and would be replaced"):
        so.train(few, out=networks.classifier, overwrite=True, **options)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"kind": "sampler"}')
    with pytest.raises(so.InvalidArgument, match="holds the run of a sampler, not of a system"):
        so.train(few, out=tmp_path / "run", overwrite=True, **options)


# ---- what cannot be


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampler": "frameexits"}, "sosampler, ocsampler, scsampler, frameexit, liteeval, adaframe, marl"),
        ({"teacher": "online"}, "teacher='online' is for samplers; liteeval learns from labels"),
        ({"teacher": "web"}, "bank, online"),
        ({"precision": "bfloat16"}, "liteeval trains in float32"),
        ({"recipe": "paper"}, "'paper' is of a sampler, but liteeval is a system"),
        ({"recipe": so.read_recipe("default")}, "'default' is of a sampler"),
        ({"recipe": "marl"}, "'marl' is of marl, but liteeval is to be trained"),
        ({"recipe": "none.yaml"}, r"'none.yaml' cannot be read .*frameexit, liteeval"),
        ({"recipe": 3}, "recipe=3 is not allowed for a system"),
        ({"colour": 1}, "colour: no such setting in a recipe of liteeval; choose from: name, .*, gate_open"),
        ({"heavy_width": 1}, "heavy_width: no such setting"),
        ({"target": 2}, "target=2 is not allowed"),
        ({"temperature": 3}, "do not fit liteeval"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": {"gates": 1}}, "phase of epochs='gates'"),
        ({"optimizer": "adam"}, "adamw, sgd"),
        ({"clip": 0}, "clip=0"),
        ({"num_candidates": [4, 8]}, "num_candidates="),
        ({"device": "tpu"}, "device='tpu' cannot be used here"),
        ({"classifier": "resnet50"}, r"no features of a classifier 'resnet50'.*one of: heavy \(classifier by hand"),
        ({"classifier": 3}, "a int shows no features"),
        ({"light": "nothing"}, "no features called 'nothing', and no saved sampler"),
        ({"light": None}, r"give weights \(--weights\).*light \(--light\).*light \(sampler by hand, light\)"),
        ({"light": None, "weights": "none.safetensors"}, "no such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    few: so.Bank, tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(so.SosamplerError, match=says):
        so.train(few, out=tmp_path / "run", **{"sampler": "liteeval"} | KEPT | QUICK["liteeval"] | given)
    assert not (tmp_path / "run").exists()


def test_who_needs_no_light_network_is_not_asked_for_one(runs: Callable[[str], so.TrainedSystem]) -> None:
    assert runs("frameexit").system.about["light"] is None
    assert not read_system_recipe("marl").needs_light


def test_a_light_network_with_a_shift_is_refused(few: so.Bank, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="has a temporal shift"):
        so.train(
            few,
            out=tmp_path / "run",
            sampler="liteeval",
            classifier="heavy",
            light=so.SOSampler(shift=10),
            **QUICK["liteeval"],
        )
    assert not (tmp_path / "run").exists()


def test_classifiers_that_are_not_clear(plain: so.Bank, networks: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = BRIEF | {"sampler": "marl", "out": tmp_path / "run"}
    with pytest.raises(so.InvalidArgument, match=r"is not clear; give classifier.*the bank has no features yet"):
        so.train(plain, **options)
    for name in ("one", "two"):
        so.add_features(plain, so.create_classifier(networks.classifier), name=name)
    with pytest.raises(so.InvalidArgument, match="is not clear"):
        so.train(plain, **options)
    with pytest.raises(so.InvalidArgument, match=f"'{TINY}' fits several features: one, two"):
        so.train(plain, classifier=TINY, **options)


def test_too_few_videos(tmp_path: Path) -> None:
    bank = make_learnable_bank(tmp_path / "bank", train=1, dev=3)
    with pytest.raises(so.InvalidArgument, match="1 videos with a label in the train split; give at least 2"):
        so.train(bank, out=tmp_path / "run", sampler="marl", **KEPT)


def test_features_that_are_no_numbers(few: so.Bank, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match=r"loss of marl is .* lower lr"):
        so.train(few, out=tmp_path / "run", sampler="marl", **KEPT, **QUICK["marl"] | {"lr": 1e30, "clip": None})


def test_several_processes_are_refused(few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = SimpleNamespace(count=2, together=nullcontext, device=torch.device("cpu"))
    monkeypatch.setattr(module, "Processes", lambda device: two)
    with pytest.raises(so.InvalidArgument, match="trained in one process, not in 2"):
        so.train(few, out=tmp_path / "run", sampler="marl", **KEPT)


def test_samplers_take_nothing_of_systems(few: so.Bank, tmp_path: Path) -> None:
    for given, says in (
        ({"light": "light"}, r"light is for systems \(frameexit, .*, not for sosampler"),
        ({"recipe": "frameexit"}, r"of the system frameexit; give sampler='frameexit' \(--sampler frameexit\)"),
        ({"recipe": read_system_recipe("marl")}, "of the system marl"),
    ):
        with pytest.raises(so.InvalidArgument, match=says):
            so.train(few, out=tmp_path / "run", **given)
