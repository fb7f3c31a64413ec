"""Runs of systems: killed, finished, started again with something changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sosampler as so
from sosampler.training import train_baseline as module
from tests.factories import (
    KEPT,
    QUICK,
    files_of,
    make_learnable_bank,
    make_networks,
)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_learnable_bank(tmp_path_factory.mktemp("data") / "few", train=40, dev=10)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_networks(tmp_path_factory.mktemp("networks"))


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
        (module, "measure_baseline"),
        (module, "save_baseline"),
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
        ({"classifier": "light"}, "heavy.fingerprint was 'b"),
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


def test_other_features_of_the_same_network_are_others(tmp_path: Path) -> None:
    bank = make_learnable_bank(tmp_path / "bank", train=20, dev=4)
    options: dict[str, Any] = {"out": tmp_path / "run", "sampler": "marl"} | QUICK["marl"] | {"epochs": 1}
    so.train(bank, classifier="heavy", **options)
    own = bank.folder.features("heavy")
    for name, key, value in (("copy", "batch", 2), ("rough", "computed_in", "bfloat16")):
        shutil.copytree(own.path, own.path.parent / name)
        head = bank.folder.features(name).header
        head.write_text(json.dumps(json.loads(head.read_text()) | {"name": name, key: value}))
    with pytest.raises(so.InvalidArgument, match=r"other settings: heavy.name was 'heavy', is 'copy'; give"):
        so.train(bank, classifier="copy", **options)
    with pytest.raises(so.InvalidArgument, match=r"heavy.computed_in was 'float32', is 'bfloat16'; heavy.name was"):
        so.train(bank, classifier="rough", **options)
    said: list[str] = []
    so.train(bank, classifier="heavy", say=said.append, **options)
    assert said == [f"{tmp_path / 'run'}: this run is finished"]


def test_other_folders_are_left_alone(few: so.Bank, networks: SimpleNamespace, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "marl"} | KEPT | QUICK["marl"] | {"epochs": 1}
    with pytest.raises(so.InvalidArgument, match="lie inside each other"):
        so.train(few, out=few.path / "run", **options)
    with pytest.raises(so.InvalidArgument, match="not of a training run and would be replaced"):
        so.train(few, out=networks.classifier, overwrite=True, **options)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"kind": "sampler"}')
    with pytest.raises(so.InvalidArgument, match="holds the run of a sampler, not of a baseline"):
        so.train(few, out=tmp_path / "run", overwrite=True, **options)
