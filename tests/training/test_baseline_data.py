"""Where a system's features come from: the bank, or networks that are asked once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sosampler as so
from sosampler.baselines.base import light_network
from sosampler.cli.main import app
from tests.factories import (
    BRIEF,
    QUICK,
    RUN_TINY,
    files_of,
    make_learnable_bank,
    make_networks,
    make_plain_bank,
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "few", train=40, dev=10)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_networks(tmp_path_factory.mktemp("networks"))


@pytest.fixture
def plain(tmp_path: Path) -> so.Bank:
    return make_plain_bank(tmp_path / "bank")


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
    assert "features of 9 videos with timm:test_resnet" in done.stderr
    assert " and mobilenet_v2, once" in done.stderr  # in one pass over the frames
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

    monkeypatch.setattr("sosampler.training.baseline_data.add_features", never)
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
    monkeypatch.setattr("sosampler.training.baseline_data.create_classifier", never)
    monkeypatch.setattr("sosampler.training.baseline_data.light_network", never)
    named = so.train(
        plain, out=tmp_path / "named", sampler="adaframe", classifier=RUN_TINY, light="mobilenet_v2", **options
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


@pytest.mark.parametrize("name", ["liteeval", "adaframe"])
def test_a_trained_sampler_as_the_light_network(
    plain: so.Bank, networks: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    classifier = so.create_classifier(networks.classifier, device="cpu")
    classifier.class_names = plain.classes
    so.add_teacher(plain, classifier)
    small: dict[str, Any] = {"backbone": RUN_TINY, "input_size": 32, "epochs": 1, "batch_size": 2, "device": "cpu"}
    so.train(plain.path, out=tmp_path / "sampler", classifier=classifier.fingerprint(), **small)
    widths = {"fine_width": 16, "coarse_width": 4} if name == "liteeval" else {"hidden": 8, "width": 4}
    arguments = [
        *("train", str(plain.path), "--sampler", name, "--out", str(tmp_path / "run"), "--device", "cpu"),
        *("--classifier", str(networks.classifier), "--light", str(tmp_path / "sampler"), "--epochs", "1"),
        *("--set", "num_candidates=4"),
        *(part for key, value in widths.items() for part in ("--set", f"{key}={value}")),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    sampler, system, bank = so.load_sampler(tmp_path / "sampler"), so.load_system(tmp_path / "run"), so.Bank(plain.path)
    light = system.about["light"]
    assert (light["fingerprint"], light["network"]) == (sampler.fingerprint(), RUN_TINY)
    # The pooled output of its backbone, frame by frame, at its own cost.
    stored = bank.features(light["name"])
    assert stored.gmacs == pytest.approx(sampler.gmacs(1))
    frames = torch.from_numpy(bank[0].frames()).movedim(-1, 1)
    wanted = sampler.look(frames[:, None]).features[:, 0]
    assert torch.allclose(torch.from_numpy(stored[0].astype(np.float32)), wanted, rtol=2e-3, atol=2e-3)
    row = so.evaluate(
        bank,
        {"it": tmp_path / "run"},
        num_frames=2,
        num_candidates=4,
        classifier=networks.classifier,
        split="dev",
        bootstrap=0,
        device="cpu",
    ).row("it")
    assert row.sampler_gmacs is not None
    assert row.sampler_gmacs > 2 * sampler.gmacs(1)


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


def test_features_that_were_broken_off_go_on(
    plain: so.Bank, networks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = BRIEF | {"epochs": 1, "hidden": 8, "width": 4, "sampler": "marl"}

    @contextmanager
    def stopping(what: str, total: int, *, done: int = 0) -> Iterator[Any]:
        def reach(number: int) -> None:
            if number == 6:
                raise KeyboardInterrupt

        yield SimpleNamespace(reach=reach)

    classifier = so.create_classifier(networks.classifier)
    with monkeypatch.context() as patch:
        patch.setattr("sosampler.training.baseline_data.progress_bar", stopping)
        with pytest.raises(KeyboardInterrupt):
            so.train(plain, out=tmp_path / "run", classifier=classifier, **options)
    name = classifier.fingerprint()
    answers = plain.folder.features(name)
    assert answers.missing(3) == [1, 2]
    before = answers.shard(0).stat().st_mtime_ns
    with pytest.raises(so.SosamplerError, match=r"2 of 3 parts of these features are missing"):
        so.train(plain, out=tmp_path / "run", classifier=name, **options)  # nobody there to be asked
    trained = so.train(plain, out=tmp_path / "run", classifier=classifier, **options)
    assert answers.missing(3) == []
    assert answers.shard(0).stat().st_mtime_ns == before
    assert trained.result["heavy"] == name


def test_features_too_large_for_half_precision_are_kept_in_float32(tmp_path: Path) -> None:
    """Only the last video is so bright; what was written of the others is written again."""
    entries = [
        so.FrameEntry(
            id=f"v{number}",
            labels=(number % 2,),
            frames=np.full((3, 24, 24, 3), 255 if number == 5 else 120 + number, dtype=np.uint8),
            split="dev" if number > 3 else "train",
        )
        for number in range(6)
    ]
    plain = so.write_frames(tmp_path / "bank", entries, classes=("run", "jump"), videos_per_shard=2)
    layers = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    net = torch.nn.Sequential(*layers)
    with torch.no_grad():
        net[2].weight.copy_(5e4 * torch.eye(3))
    classifier = so.wrap_classifier(net, input_size=24, layout="BCHW", class_names=plain.classes, name="huge")
    options: dict[str, Any] = BRIEF | {"epochs": 1, "hidden": 8, "width": 4, "sampler": "marl", "out": tmp_path / "run"}
    with pytest.raises(so.SosamplerError, match="too large for half precision"):
        so.add_features(plain, classifier)
    assert plain.folder.features(classifier.fingerprint()).missing(3) == [2]
    said: list[str] = []
    trained = so.train(plain, classifier=classifier, say=said.append, **options)
    assert f"{plain.path}: features of huge are too large for half precision; they are stored in float32" in said
    kept = so.Bank(plain.path).features(classifier)
    assert kept.precision == "float32"
    assert np.isfinite(kept[5]).all()
    assert np.abs(kept[5]).max() > 65504
    assert json.loads((tmp_path / "run/run.json").read_text())["heavy"]["precision"] == "float32"
    assert np.isfinite(trained.result["dev"])
    # The run is found again, with the network and by the name of its features.
    for given in (classifier, classifier.fingerprint()):
        said.clear()
        so.train(plain, classifier=given, say=said.append, **options)
        assert said == [f"{tmp_path / 'run'}: this run is finished"]


def test_other_mistakes_of_a_network_are_its_own(plain: so.Bank, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2))
    classifier = so.wrap_classifier(net, input_size=24, layout="BCHW", class_names=plain.classes, name="broken")
    said: list[str] = []
    with torch.no_grad():
        net[2].weight.fill_(torch.nan)
    with pytest.raises(so.SosamplerError, match="finite"):
        so.train(plain, classifier=classifier, out=tmp_path / "run", sampler="marl", say=said.append, **BRIEF)
    assert not any("float32" in line for line in said)


def test_classifiers_that_are_not_clear(plain: so.Bank, networks: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = BRIEF | {"sampler": "marl", "out": tmp_path / "run"}
    with pytest.raises(
        so.InvalidArgument,
        match=r"or of several; give classifier.*the bank has no features yet",
    ):
        so.train(plain, **options)
    for name in ("one", "two"):
        so.add_features(plain, so.create_classifier(networks.classifier), name=name)
    with pytest.raises(so.InvalidArgument, match="has no features of a classifier, or of several"):
        so.train(plain, **options)
    with pytest.raises(so.InvalidArgument, match=f"'{RUN_TINY}' fits several features: one, two"):
        so.train(plain, classifier=RUN_TINY, **options)


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
