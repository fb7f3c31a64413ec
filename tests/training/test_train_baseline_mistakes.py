"""What cannot be, when systems are trained."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sosampler as so
from sosampler.baselines.base import save_baseline
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.baselines.registry import create_baseline
from sosampler.cli.main import app
from sosampler.training import train_baseline as module
from tests.factories import (
    KEPT,
    QUICK,
    make_learnable_bank,
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "few", train=40, dev=10)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"sampler": "frameexits"},
            "sosampler, ocsampler, scsampler, frameexit, liteeval, adaframe, marl, ar-net, videoiq",
        ),
        ({"teacher": "online"}, "teacher='online' is for samplers; liteeval learns from labels"),
        ({"teacher": "web"}, "bank, online"),
        ({"precision": "bfloat16"}, "liteeval trains in float32"),
        ({"recipe": "paper"}, "'paper' is of a sampler, but liteeval is a baseline"),
        ({"recipe": so.read_recipe("default")}, "'default' is of a sampler"),
        ({"recipe": "marl"}, "'marl' is of marl, but liteeval is to be trained"),
        ({"recipe": "none.yaml"}, r"'none.yaml' cannot be read .*frameexit, liteeval"),
        ({"recipe": 3}, "recipe=3 must be one of: frameexit"),
        ({"colour": 1}, "colour: no such setting in a recipe of liteeval; choose from: name, .*, gate_open"),
        ({"heavy_width": 1}, "heavy_width: no such setting"),
        ({"target": 2}, "target=2 must be a share"),
        ({"temperature": 3}, "do not fit liteeval"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": {"gates": 1}}, "phase of epochs='gates'"),
        ({"optimizer": "adam"}, "adamw, sgd"),
        ({"clip": 0}, "clip=0"),
        ({"num_candidates": [4, 8]}, "num_candidates="),
        ({"device": "tpu"}, "device='tpu' cannot be used here"),
        ({"classifier": "resnet50"}, r"no features of a classifier 'resnet50'.*one of: heavy \(classifier by hand"),
        ({"classifier": 3}, "a int has no features"),
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


def test_one_split_is_no_more_than_that(few: so.Bank, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "marl"} | KEPT | QUICK["marl"] | {"epochs": 1}
    with pytest.raises(so.InvalidArgument, match="0 videos with a label in the train split"):
        so.train(few.split("dev"), out=tmp_path / "dev", **options)
    assert not (tmp_path / "dev").exists()
    alone = so.train(few.split("train"), out=tmp_path / "train", **options)
    assert alone.result["sizes"] == {"train": 40, "dev": 0, "unlabelled": 0}
    assert (alone.result["dev"], alone.result["dev_curve"]) == (None, [])
    with pytest.raises(so.InvalidArgument, match=r"other settings: bank.digest was"):
        so.train(few, out=tmp_path / "train", **options)


@pytest.mark.parametrize("system", ["frameexit", "marl"])
def test_a_light_network_that_would_change_nothing(few: so.Bank, tmp_path: Path, system: str) -> None:
    arguments = ["train", str(few.path), "--sampler", system, "--out", str(tmp_path / "run"), "-c", "heavy"]
    done = CliRunner().invoke(app, [*arguments, "--light", "nowhere"])
    assert isinstance(done.exception, so.InvalidArgument)
    assert f"--light would change nothing: {system} has no light features, only liteeval and" in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("system", "given", "says"),
    [
        ("marl", ["--weights", "nowhere"], "--weights would change nothing: marl has no"),
        ("marl", ["--weights", "x", "--light", "light"], "--light and --weights would change nothing: .*leave them"),
        ("frameexit", ["--weights", "nowhere"], "--weights of frameexit are its authors', which .* add --epochs 0"),
        ("frameexit", ["--weights", "nowhere", "--epochs", "0"], "nowhere: no such file"),
    ],
)
def test_weights_that_would_change_nothing(
    few: so.Bank, tmp_path: Path, system: str, given: list[str], says: str
) -> None:
    arguments = ["train", str(few.path), "--sampler", system, "--out", str(tmp_path / "run"), "-c", "heavy", *given]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, so.SosamplerError)
    assert re.match(says, str(done.exception))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argument", ["classifier", "light"])
def test_a_system_is_no_network_for_another(few: so.Bank, tmp_path: Path, argument: str) -> None:
    small = {"heavy_width": 6, "num_classes": 4, "hidden": 4, "width": 4}
    save_baseline(tmp_path / "marl", create_baseline("marl", **small), {})
    options: dict[str, Any] = {"sampler": "liteeval"} | KEPT | QUICK["liteeval"] | {argument: str(tmp_path / "marl")}
    with pytest.raises(so.InvalidArgument, match=rf"^{argument}='.*marl' holds a trained baseline, which has no"):
        so.train(few, out=tmp_path / "run", **options)
    if argument == "classifier":
        with pytest.raises(so.InvalidArgument, match=r"classifier='.*marl' holds a trained baseline"):
            so.train(few, out=tmp_path / "run", classifier=tmp_path / "marl")
    assert not (tmp_path / "run").exists()


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
        ({"light": "light"}, r"light is for baselines \(frameexit, .*, not for sosampler"),
        ({"recipe": "frameexit"}, r"of the baseline frameexit; give sampler='frameexit' \(--sampler frameexit\)"),
        ({"recipe": read_baseline_recipe("marl")}, "of the baseline marl"),
    ):
        with pytest.raises(so.InvalidArgument, match=says):
            so.train(few, out=tmp_path / "run", **given)
