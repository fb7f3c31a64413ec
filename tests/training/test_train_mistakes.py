"""What cannot be, when a sampler is trained, and numbers that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.training import train_sampler
from sosampler.training.train_sampler import train
from tests.factories import SAMPLER_QUICK, SMALL, make_bank


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"no_such": 1}, "no_such"),
        ({"precision": "int8"}, "float32"),
        ({"teacher": "web"}, "bank, online"),
        ({"workers": -1}, "workers=-1"),
        ({"device": "tpu"}, "device='tpu' cannot be used here"),
        ({"classifier": "b" * 16}, "is not in this bank"),
        ({"teacher": "online"}, "runs the classifier itself"),
        ({"weights": "none.safetensors"}, "no such file"),
        ({"recipe": "best"}, "best"),
        ({"backbone": "resnet50"}, "backbone"),
        ({"cache_bytes": -5}, "cache_bytes=-5"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(bank: so.Bank, tmp_path: Path, settings: dict, says: str) -> None:
    with pytest.raises(so.SosamplerError, match=says):
        train(bank, out=tmp_path / "run", **SAMPLER_QUICK | settings)
    assert not (tmp_path / "run").exists()


def test_other_folders_are_left_alone(bank: so.Bank, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="lie inside each other"):
        train(bank, out=bank.path / "run", **SAMPLER_QUICK)
    so.save_classifier(so.create_classifier(SAMPLER_QUICK["backbone"], num_classes=4), tmp_path / "mine")
    for overwrite in (False, True):
        with pytest.raises(so.InvalidArgument, match="not of a training run and would be replaced"):
            train(bank, out=tmp_path / "mine", overwrite=overwrite, **SAMPLER_QUICK)
    quick = {"epochs": 1, "batch_size": 8, "input_size": 32, "workers": 0, "device": "cpu", "num_frames": 2}
    so.train_classifier(bank, SAMPLER_QUICK["backbone"], out=tmp_path / "classifier", **quick)
    for overwrite in (False, True):
        with pytest.raises(so.InvalidArgument, match="holds the run of a classifier, not of a sampler"):
            train(bank, out=tmp_path / "classifier", overwrite=overwrite, **SAMPLER_QUICK)
    assert so.create_classifier(tmp_path / "classifier").num_classes == 3


def test_a_bank_of_too_few_videos_or_without_a_teacher(bank: so.Bank, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="0 videos with a label in the train split"):
        train(bank.split("dev"), out=tmp_path / "run", **SAMPLER_QUICK)
    bare = so.write_frames(
        tmp_path / "bare",
        [replace(entry) for entry in _entries(4)],
        classes=bank.classes,
    )
    with pytest.raises(so.InvalidArgument, match="a teacher is not in this bank"):
        train(bare, out=tmp_path / "run", **SAMPLER_QUICK)
    with pytest.raises(so.SosamplerError, match="nowhere"):
        train(tmp_path / "nowhere", out=tmp_path / "run", **SAMPLER_QUICK)


def _entries(count: int) -> list[so.FrameEntry]:
    black = np.zeros((3, 40, 40, 3), dtype=np.uint8)
    return [so.FrameEntry(id=f"v{number}", labels=(0,), frames=black) for number in range(count)]


def test_a_loss_that_explodes_is_told(bank: so.Bank, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match=r"lower the learning rate \(lr=1e\+30\)$"):
        train(bank, out=tmp_path / "run", **SAMPLER_QUICK | {"lr": 1e30, "optimizer": "sgd"})


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    """For float16, in which CPUs are slow."""
    return make_bank(tmp_path_factory.mktemp("data") / "few", train=8, dev=4)


HALF = SAMPLER_QUICK | {"precision": "float16", "batch_size": 4, "num_candidates": 4, "epochs": 2}


def test_float16_trains(few: so.Bank, tmp_path: Path) -> None:
    trained = train(few, out=tmp_path / "run", **HALF)
    assert np.isfinite(trained.result["calibration"]).all()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


def test_float16_that_explodes_is_told_and_never_best(few: so.Bank, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(so.InvalidArgument, match=r"the loss is nan .*lr=1e\+30\) or train with precision='float32'"):
        train(few, out=tmp_path / "run", say=said.append, **HALF | {"lr": 1e30, "optimizer": "sgd", "epochs": 4})
    assert "nan" not in "".join(said)
    assert not (tmp_path / "run/model.safetensors").exists()


def test_one_overflow_in_float16_is_no_end(few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is none, once, while weights stay numbers: the log has no such word in JSON, training goes on."""
    real = train_sampler.SamplerLoop.train_step

    def overflowing(loop, batch):
        loss = real(loop, batch)
        if loop.step == 1:
            loop._sums["loss"] = loop._sums["loss"] + float("inf")
        return loss

    monkeypatch.setattr(train_sampler.SamplerLoop, "train_step", overflowing)
    train(few, out=tmp_path / "run", **HALF)

    def none(word: str) -> None:
        raise AssertionError(word)

    log = [json.loads(line, parse_constant=none) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[0]["loss"] is None
    assert log[1]["loss"] > 0


def test_scores_that_are_none_are_never_best(
    bank: so.Bank, few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = train_sampler.DevSet.outputs, []

    def broken(*rest):
        outputs = real(*rest)
        return outputs._replace(scores=outputs.scores * float("nan"))

    def broken_at_last(*rest):
        calls.append(1)
        return (broken if len(calls) == 3 else real)(*rest)

    monkeypatch.setattr(train_sampler.DevSet, "outputs", broken_at_last)
    said: list[str] = []
    trained = train(bank, out=tmp_path / "run", say=said.append, **SAMPLER_QUICK)
    assert trained.result["best_epoch"] < 2
    assert any("epoch 3/3" in line and "dev scores are not finite" in line for line in said)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[2]["dev_top1"] is None

    monkeypatch.setattr(train_sampler.DevSet, "outputs", broken)
    with pytest.raises(so.InvalidArgument, match="scores on dev are not finite; lower the learning rate"):
        train(few, out=tmp_path / "dev", **SAMPLER_QUICK | {"epochs": 1})
    without = make_bank(tmp_path / "bank", train=8, dev=0)
    with pytest.raises(so.InvalidArgument, match="scores are not finite; lower the learning rate"):
        train(without, out=tmp_path / "none", **SAMPLER_QUICK | {"epochs": 1})


def test_infinite_statistics_are_not_saved(few: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch norm with an infinite variance gives finite scores, but its folder could not be loaded."""
    real = train_sampler.SamplerLoop.load_best

    def broken(loop: train_sampler.SamplerLoop) -> None:
        real(loop)
        norm = next(layer for layer in loop.evaluated.modules() if isinstance(layer, torch.nn.BatchNorm2d))
        norm.running_var.fill_(torch.inf)

    monkeypatch.setattr(train_sampler.SamplerLoop, "load_best", broken)
    with pytest.raises(so.InvalidArgument, match="statistics of the sampler are not finite; lower the learning rate"):
        train(few, out=tmp_path / "run", **SAMPLER_QUICK | {"epochs": 1})
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_rewards_need_enough_candidates(bank: so.Bank, tmp_path: Path) -> None:
    options = SMALL | {"sampler": "ocsampler", "shift": 0}
    with pytest.raises(so.InvalidArgument, match="draws 9 frames, but the bank has 8"):
        so.train(bank, out=tmp_path / "run", **options | {"num_candidates": [9, 50], "reinforce": {"num_frames": 9}})
    with pytest.raises(so.InvalidArgument, match="choose one of: sosampler, ocsampler, scsampler"):
        so.train(bank, out=tmp_path / "run", sampler="glimpse")
    with pytest.raises(so.InvalidArgument, match="must be at least num_frames=6 of reinforce"):
        so.train(bank, out=tmp_path / "run", **options | {"num_candidates": [4, 8], "reinforce": {"num_frames": 6}})
