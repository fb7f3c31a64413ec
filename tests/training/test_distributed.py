"""Several processes train the sampler that one would, and stop together."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sosampler as so
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.distributed import OtherProcessFailed, Processes, synchronised
from sosampler.training.train_sampler import train
from tests.factories import SAMPLER_QUICK, TINY_WITHOUT_BATCH_NORM, make_bank

pytest.importorskip("accelerate")

# Listwise is a mean over videos, so that shares of a batch add up; the pairwise logistic loss divides by the weight of
# the pairs at hand, which differs a little between shares. 15 videos a step: one process has seven, the other eight.
OPTIONS = SAMPLER_QUICK | {
    "backbone": TINY_WITHOUT_BATCH_NORM,
    "loss": "listwise",
    "temperature": 0.3,
    "optimizer": "sgd",
    "lr": 0.05,
    "clip": 5.0,
    "batch_size": 15,
    "epochs": 3,
}
# Stopped at the fourth of six steps, the same processes go on.
CODE = """
import json, os, pathlib, sys
from sosampler.training import loop as loop_module
from sosampler.training.train_sampler import SamplerLoop, train
real = SamplerLoop.train_step
def stopping(loop, batch):
    if loop.step == 3:
        raise KeyboardInterrupt
    return real(loop, batch)
def run():
    return train(sys.argv[1], out=sys.argv[3], say=lambda text: print(text, flush=True), **json.loads(sys.argv[2]))
loop_module._SAVE_EVERY = -1.0
SamplerLoop.train_step = stopping
try:
    run()
except KeyboardInterrupt:
    SamplerLoop.train_step = real
pathlib.Path(sys.argv[3] + os.environ["RANK"]).write_text(run().sampler.fingerprint())
"""
# What goes wrong in one process or in all; each tells what it met.
FAILING = """
import json, os, pathlib, sys
from sosampler.errors import SosamplerError
from sosampler.training import dev, loop as loop_module
from sosampler.training.train_sampler import train
from sosampler.training.checkpoints import RunFolder
bank, options, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
met = {}
def attempt(name, **settings):
    try:
        train(bank, **{"out": f"{folder}/{name}", **options, **settings})
        met[name] = None
    except (SosamplerError, OSError) as error:
        met[name] = [type(error).__name__, str(error)]
attempt("other settings", out=f"{folder}/one", lr=0.01)
attempt("few videos", batch_size=1)
attempt("exploding", lr=1e30, clip=None)
opened = []
real_init, real_save = dev.DevSet.__init__, RunFolder.save
def counting(self, *rest, **named):
    opened.append(1)
    real_init(self, *rest, **named)
dev.DevSet.__init__ = counting
def full(self, state):
    raise OSError(28, "No space left on device", "checkpoint.pt")
RunFolder.save = full
loop_module._SAVE_EVERY = -1.0  # within the epoch, where only rank 0 writes
attempt("full disk")
met["dev sets"] = len(opened)
pathlib.Path(f"{folder}/met{rank}.json").write_text(json.dumps(met))
"""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank", train=32, dev=8)


def two_processes(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # `accelerate launch --cpu` starts a single process; on GPUs it does what torchrun does here.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_two_processes_train_what_one_does_and_go_on_after_a_stop(bank: so.Bank, tmp_path: Path) -> None:
    one = train(bank, out=tmp_path / "one", **OPTIONS)
    (tmp_path / "script.py").write_text(CODE)
    done = two_processes([str(tmp_path / "script.py"), str(bank.path), json.dumps(OPTIONS), str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr
    assert "in 2 processes" in done.stdout
    assert "resuming at step 3 of 6" in done.stdout
    ends = [(tmp_path / f"two{rank}").read_text() for rank in (0, 1)]  # both return the same sampler, one speaks
    assert ends[0] == ends[1]
    assert done.stdout.count("epoch 3/3") == 1

    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    start = train(bank, out=tmp_path / "start", **OPTIONS | {"epochs": 1, "lr": 1e-12}).sampler.state_dict()
    for key, tensor in ours.items():
        moved = float((tensor - start[key]).abs().max())
        assert torch.allclose(tensor, theirs[key], rtol=1e-4, atol=1e-5 + 1e-3 * moved), key
    assert max(float((ours[key] - start[key]).abs().max()) for key in ours) > 0.01  # something was learnt
    assert json.loads((tmp_path / "two/result.json").read_text())["dev"] == one.result["dev"]
    logs = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    # Of the epoch that was stopped, the checkpoint has the losses of one process alone.
    assert logs[1][1] == pytest.approx(logs[0][1], rel=0.3)
    assert logs[1][::2] == pytest.approx(logs[0][::2], rel=1e-4)


@pytest.mark.slow
def test_what_one_process_finds_ends_all(bank: so.Bank, tmp_path: Path) -> None:
    quick = OPTIONS | {"epochs": 1, "num_candidates": 4}
    train(bank, out=tmp_path / "one", **quick)
    (tmp_path / "script.py").write_text(FAILING)
    done = two_processes([str(tmp_path / "script.py"), str(bank.path), json.dumps(quick), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"met{rank}.json").read_text()) for rank in (0, 1))
    for name, kind, text in (
        ("other settings", "InvalidArgument", "recipe.lr was 0.05, is 0.01"),
        ("few videos", "InvalidArgument", "batch_size=1 is less than the 2 processes"),
        ("exploding", "Diverged", "lower the learning rate (lr=1e+30)"),
        ("full disk", "OSError", "No space left on device"),
    ):
        assert first[name][0] == kind, name
        assert text in first[name][1]
        assert second[name] == ["OtherProcessFailed", f"process 0 of 2: {first[name][1]}"]
    assert not (tmp_path / "few videos").exists()
    assert (first["dev sets"], second["dev sets"]) == (1, 0)  # who does not evaluate decodes nothing for it


@pytest.mark.slow
def test_the_command_speaks_with_one_voice(bank: so.Bank, tmp_path: Path) -> None:
    options = ["--batch-size", "1", "--device", "cpu", "--set", f"backbone={OPTIONS['backbone']}"]
    done = two_processes(["-m", "sosampler", "train", str(bank.path), "--out", str(tmp_path / "run"), *options])
    assert done.returncode != 0
    assert done.stderr.count("sosampler: batch_size=1 is less than the 2 processes") == 1
    assert "OtherProcessFailed" not in done.stderr


def test_one_process_raises_its_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes("cpu")
    with pytest.raises(so.InvalidArgument, match="wrong"), processes.together():
        raise so.InvalidArgument("wrong")
    with processes.together():
        pass
    # As the second of three, of which the second and the third fail, and of which only the third does.
    processes.count, processes.rank = 3, 1
    monkeypatch.setattr(processes, "_gathered", lambda text: [None, text, "late"])
    with pytest.raises(so.InvalidArgument, match="mine"), processes.together():
        raise so.InvalidArgument("mine")
    with pytest.raises(OtherProcessFailed, match="process 2 of 3: late"), processes.together():
        pass


@pytest.mark.parametrize("backbone", ["timm:test_efficientnet.r160_in1k", "timm:test_resnet.r160_in1k", "mobilenet_v2"])
def test_synchronised_batch_norm_is_the_same_network(backbone: str) -> None:
    torch.manual_seed(0)
    sampler = SOSampler(backbone=backbone, input_size=64).eval()
    for name, buffer in sampler.named_buffers():  # statistics that are not those of a fresh network
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5) if name.endswith("var") else buffer.normal_(0, 0.1)
    frames = torch.randn(1, 3, 3, 64, 64)
    expected = copy.deepcopy(sampler)(frames).importance
    before = dict(sampler.named_parameters())
    found = synchronised(sampler)
    assert any(isinstance(module, torch.nn.SyncBatchNorm) for module in found.modules())
    assert torch.equal(found(frames).importance, expected)
    after = dict(found.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(found.state_dict()) == list(sampler.state_dict())
