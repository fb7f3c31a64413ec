"""The stage `pretrain`: the backbone learns the labels, then the sampler's own training starts from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import sosampler as so
from sosampler.training import loop as loop_module
from sosampler.training import pretrain as pretrain_module
from sosampler.training.pretrain import FrameLabels, PretrainLoop
from sosampler.training.train_sampler import SamplerLoop, train
from tests.factories import SAMPLER_QUICK, TINY, scattered
from tests.training.test_rewards import ColourMax, colour_bank

QUICK: dict[str, Any] = SAMPLER_QUICK | {"epochs": 1, "pretrain": 2, "pretrain_lr": 3e-3, "dropout": 0.3, "clip": 1.0}
STEPS = 4  # an epoch


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    """The labels are colours, and the class layer of the teacher has nothing to learn."""
    bank = colour_bank(tmp_path_factory.mktemp("data") / "bank", train=32, dev=6)
    so.add_teacher(bank, ColourMax())
    return so.Bank(bank.path)


@pytest.fixture(scope="module")
def whole(bank: so.Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(bank, out=folder, **QUICK)
    return folder


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same(found: Path, expected: Path) -> None:
    for name in ("model.safetensors", "result.json", "config.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert log(found) == log(expected)
    assert log(found / "pretrain") == log(expected / "pretrain")
    assert not list(found.rglob("*.pt"))


@pytest.mark.parametrize("recipe", ["paper", "authors"])
def test_it_learns_the_labels_and_the_sampler_starts_from_there(
    bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    states: list[dict[str, Tensor]] = []
    for home in (PretrainLoop, SamplerLoop):
        real = home.train

        def watching(loop: Any, real: Any = real) -> None:
            if isinstance(loop, SamplerLoop):
                states.append({key: value.clone() for key, value in loop.network.state_dict().items()})
            real(loop)
            states.append({key: value.clone() for key, value in loop.network.state_dict().items()})

        monkeypatch.setattr(home, "train", watching)
    said: list[str] = []
    told = {"backbone": TINY, "shift": 0, "input_size": 32, "batch_size": 8, "device": "cpu", "workers": 1}
    told |= {"num_candidates": 4, "pretrain": 6, "pretrain_lr": 0.05, "epochs": 1, "crop_scale": [0.5, 1.0]}
    trained = train(bank, out=tmp_path / "run", recipe=recipe, say=said.append, **told)
    lines = log(tmp_path / "run/pretrain")
    assert [line["epoch"] for line in lines] == list(range(6))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    assert lines[-1]["accuracy"] > 0.6
    assert trained.result["pretrain"] == {key: lines[-1][key] for key in ("loss", "accuracy")}
    assert len([line for line in said if line.startswith("pretraining on the labels: epoch")]) == 6
    assert len(log(tmp_path / "run")) == 1
    labels, start, _ = states
    shared = [key for key in labels if key in start]
    assert all(torch.equal(labels[key], start[key]) for key in shared)
    kept = "class_head.weight" in shared
    assert kept == (recipe == "paper")  # the class layer is dropped where the recipe has none
    assert trained.sampler.about["recipe"]["pretrain"] == 6


def test_the_loss_is_that_of_the_mean_logits(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = FrameLabels.forward
    monkeypatch.setattr(FrameLabels, "forward", lambda net, frames: seen.append(forward(net, frames)) or seen[-1])
    real = PretrainLoop.loss

    def watching(loop: PretrainLoop, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = real(loop, batch)
        expected = cross_entropy(seen[-1].mean(1), batch.labels.argmax(1))
        torch.testing.assert_close(found[0], expected)
        right = (seen[-1].mean(1).argmax(1) == batch.labels.argmax(1)).float().mean()
        assert found[1]["accuracy"] == right
        return found

    monkeypatch.setattr(PretrainLoop, "loss", watching)
    train(bank, out=tmp_path / "run", **QUICK | {"pretrain": 1})
    assert len(seen) == STEPS


def test_the_shift_takes_part() -> None:
    network = FrameLabels(scattered(shift=10), 3, 0).eval()
    frames = torch.rand(1, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    changed = frames.clone()
    changed[:, 2] += 1
    assert not torch.equal(network(frames)[:, 1], network(changed)[:, 1])


@pytest.mark.parametrize(
    ("stage", "stop_at"), [(PretrainLoop, 1), (PretrainLoop, 4), (PretrainLoop, 7), (SamplerLoop, 0)]
)
def test_killed_at_a_step_it_resumes_with_the_same_bytes(
    bank: so.Bank, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Any, stop_at: int
) -> None:
    """Within an epoch of the stage, at its end, and after it before the first checkpoint of the sampler."""
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)  # after every step
    with monkeypatch.context() as patch:
        patch.setattr(stage, "train_step", stopping(stage.train_step, stop_at))
        with pytest.raises(KeyboardInterrupt):
            train(bank, out=tmp_path / "run", **QUICK)
    with pytest.raises(so.InvalidArgument, match=r"recipe\.pretrain_lr was 0\.003, is 0\.1"):
        train(bank, out=tmp_path / "run", **QUICK | {"pretrain_lr": 0.1})
    said: list[str] = []
    train(bank, out=tmp_path / "run", say=said.append, **QUICK)
    at = stop_at if stage is PretrainLoop else 2 * STEPS
    assert f"pretraining on the labels: resuming at step {at} of {2 * STEPS}" in said
    assert_same(tmp_path / "run", whole)


def test_once_the_sampler_has_a_checkpoint_the_stage_is_over(
    bank: so.Bank, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(SamplerLoop, "train_step", stopping(SamplerLoop.train_step, 2))
        with pytest.raises(KeyboardInterrupt):
            train(bank, out=tmp_path / "run", **QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_module, "PretrainLoop", None)
        train(bank, out=tmp_path / "run", **QUICK)
    assert_same(tmp_path / "run", whole)
    train(bank, out=tmp_path / "run", overwrite=True, **QUICK)  # begins with the stage again
    assert_same(tmp_path / "run", whole)


def stopping(real: Any, stop_at: int) -> Any:
    def step(loop: Any, batch: Any) -> Tensor:
        if loop.step == stop_at:
            raise KeyboardInterrupt
        return real(loop, batch)

    return step


def test_without_the_stage_nothing_is_different(bank: so.Bank, whole: Path, tmp_path: Path) -> None:
    plain = {key: value for key, value in QUICK.items() if not key.startswith("pretrain")}
    one = train(bank, out=tmp_path / "one", **plain)
    other = train(bank, out=tmp_path / "other", **plain | {"pretrain": 0})
    assert one.result == other.result
    assert not (tmp_path / "other/pretrain").exists()
    assert "pretrain" not in json.loads((tmp_path / "other/run.json").read_text())["recipe"]
    assert one.result["fingerprint"] != json.loads((whole / "result.json").read_text())["fingerprint"]


def test_command_line(bank: so.Bank, tmp_path: Path) -> None:
    from typer import Typer
    from typer.testing import CliRunner

    from sosampler.cli.train import train_command

    app = Typer()
    app.command()(train_command)
    sets = [f"--set={key}={value}" for key, value in {"backbone": TINY, "input_size": 32, "shift": 0}.items()]
    given = [str(bank.path), "--out", str(tmp_path / "run"), "--recipe", "paper", "--epochs", "1", *sets]
    done = CliRunner().invoke(app, [*given, "--batch-size", "16", "--device", "cpu", "--set", "pretrain=1", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["pretrain"]["loss"] > 0
    assert "pretraining on the labels: epoch 1/1" in done.stderr
