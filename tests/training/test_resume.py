"""A training that was stopped or killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import loop as loop_module
from sosampler.training.checkpoints import RunFolder
from sosampler.training.train_sampler import SamplerLoop, train
from tests.factories import SAMPLER_QUICK, make_bank

# Everything that keeps a state: dropout, a running mean, momenta, random T, crops.
OPTIONS: dict[str, Any] = SAMPLER_QUICK | {"dropout": 0.3, "ema": 0.8, "clip": 1.0, "epochs": 2}
STEPS = 4  # an epoch


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank", train=32, dev=8)


@pytest.fixture(scope="module")
def whole(bank: so.Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(bank, out=folder, **OPTIONS)
    return folder


def assert_same(found: Path, expected: Path) -> None:
    for name in ("model.safetensors", "result.json", "config.json", "README.md"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert _log(found) == _log(expected)
    assert not (found / "checkpoint.pt").exists()
    assert not list(found.glob(".*"))


def _log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("stop_at", [2, 4, 7])
def test_stopped_at_a_step(
    bank: so.Bank, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Within an epoch, at the first step of one, at the last step of all."""
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)  # after every step
    real = SamplerLoop.train_step

    def stopping(loop, batch):
        if loop.step == stop_at:
            raise KeyboardInterrupt
        return real(loop, batch)

    monkeypatch.setattr(SamplerLoop, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(bank, out=tmp_path / "run", **OPTIONS)
    monkeypatch.setattr(SamplerLoop, "train_step", real)
    (tmp_path / "run/.checkpoint.123.part.pt").write_bytes(b"half")  # as a kill leaves it
    said: list[str] = []
    train(bank, out=tmp_path / "run", say=said.append, **OPTIONS)
    assert f"resuming at step {stop_at} of {2 * STEPS}" in said
    assert_same(tmp_path / "run", whole)


def test_stopped_between_steps_and_evaluation_and_while_writing(
    bank: so.Bank, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)

    def stop(*rest: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    homes = (
        (SamplerLoop, "evaluate"),
        (SamplerLoop, "save"),
        (RunFolder, "log"),
        (SOSampler, "save_pretrained"),
        (RunFolder, "finish"),
    )
    for home, name in homes:
        with monkeypatch.context() as patch:
            patch.setattr(home, name, stop)
            with pytest.raises(KeyboardInterrupt):
                train(bank, out=tmp_path / "run", **OPTIONS)
    train(bank, out=tmp_path / "run", **OPTIONS)
    assert_same(tmp_path / "run", whole)


def _train_and_save_often(bank: Path, out: Path, threads: int, dies_after: int | None = None) -> None:
    torch.set_num_threads(threads)
    loop_module._SAVE_EVERY = 0.05
    if dies_after is not None:
        save, saved = SamplerLoop.save, []

        def dying(self: SamplerLoop) -> None:
            save(self)
            saved.append(None)
            if len(saved) == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)

        SamplerLoop.save = dying  # type: ignore[method-assign]
    train(bank, out=out, **OPTIONS)


def test_killed_for_good_and_started_again(bank: so.Bank, whole: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # imports torch once for all of them
    context.set_forkserver_preload(["sosampler.training.train_sampler"])
    arguments = (bank.path, tmp_path / "run", torch.get_num_threads())
    rng = np.random.default_rng(0)
    # One kills itself, which no busy machine can delay; the others are hit from outside at any moment.
    first = context.Process(target=_train_and_save_often, args=(*arguments, 2))
    first.start()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    for _ in range(2):
        process = context.Process(target=_train_and_save_often, args=arguments)
        before = _checkpoint_time(tmp_path / "run")
        process.start()
        while _checkpoint_time(tmp_path / "run") == before and process.is_alive():
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
    last = context.Process(target=_train_and_save_often, args=arguments)
    last.start()
    last.join()
    assert last.exitcode == 0
    assert_same(tmp_path / "run", whole)


def _checkpoint_time(folder: Path) -> int:
    path = folder / "checkpoint.pt"
    return path.stat().st_mtime_ns if path.exists() else 0


def test_a_finished_run_is_not_run_again_and_another_is_refused(bank: so.Bank, tmp_path: Path) -> None:
    once = SAMPLER_QUICK | {"epochs": 1}
    first = train(bank, out=tmp_path / "run", **once)
    said: list[str] = []
    second = train(bank, out=tmp_path / "run", say=said.append, **once)
    assert said == [f"{tmp_path / 'run'}: this run is finished"]
    assert second.result == first.result
    assert second.sampler.fingerprint() == first.sampler.fingerprint()
    with pytest.raises(so.InvalidArgument, match=r"recipe.lr was 0.003, is 0.01"):
        train(bank, out=tmp_path / "run", **once | {"lr": 0.01})
    third = train(bank, out=tmp_path / "run", overwrite=True, **once | {"seed": 1})
    assert third.result["fingerprint"] != first.result["fingerprint"]
    other = make_bank(tmp_path / "other", train=32, dev=8, seed=1)
    with pytest.raises(so.InvalidArgument, match=r"bank.path was"):
        train(other, out=tmp_path / "run", **once | {"seed": 1})


def test_damaged_run_folders_are_told(bank: so.Bank, tmp_path: Path) -> None:
    once = SAMPLER_QUICK | {"epochs": 1}
    train(bank, out=tmp_path / "run", **once)
    (tmp_path / "run/result.json").write_text("{")
    with pytest.raises(so.WeightsError, match=r"result.json: is damaged"):
        train(bank, out=tmp_path / "run", **once)
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "run/checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(so.WeightsError, match=r"checkpoint.pt: cannot be read"):
        train(bank, out=tmp_path / "run", **once)
    RunFolder(tmp_path / "run", "sampler").save({"sampler": {}, "step": 1})  # without the state of a scheduler
    with pytest.raises(so.WeightsError, match=r"checkpoint of an earlier version; finish the run with that version"):
        train(bank, out=tmp_path / "run", **once)
    (tmp_path / "run/run.json").write_text("{")
    train(bank, out=tmp_path / "run", overwrite=True, **once)


def test_checkpoints_are_read_to_the_cpu(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of steps stay there: on a GPU, reading them would wait for it in every step."""
    run = RunFolder(tmp_path, "sampler")
    run.save({"step": torch.tensor(3.0)})
    places = []
    real = torch.load

    def watching(path, map_location, weights_only):
        places.append((map_location, weights_only))
        return real(path, map_location=map_location, weights_only=weights_only)

    monkeypatch.setattr(torch, "load", watching)
    assert run.load() == {"step": torch.tensor(3.0)}
    assert places == [("cpu", True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_counts_of_steps_stay_on_the_cpu(
    bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)
    real = SamplerLoop.train_step
    places: list[set[str]] = []

    def stopping(loop, batch):
        if loop.step == 2 and not places:
            places.append(set())
            raise KeyboardInterrupt
        found = real(loop, batch)
        places[-1:] = [{state["step"].device.type for state in loop.optimizer.state.values()}] if places else []
        return found

    monkeypatch.setattr(SamplerLoop, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(bank, out=tmp_path / "run", **OPTIONS | {"device": "cuda"})
    train(bank, out=tmp_path / "run", **OPTIONS | {"device": "cuda"})
    assert places == [{"cpu"}]
