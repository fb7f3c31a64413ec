"""Several processes train the sampler that one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sosampler as so
from sampler_banks import QUICK, TINY_WITHOUT_BATCH_NORM, make_bank
from sosampler.training import train

pytest.importorskip("accelerate")

# Listwise is a mean over videos, so that shares of a batch add up; the pairwise logistic loss divides by the weight of
# the pairs at hand, which differs a little between shares. 15 videos a step: one process has seven, the other eight.
OPTIONS = QUICK | {
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
from sosampler.training import sampler_loop, train
real = sampler_loop.SamplerLoop._train_step
def stopping(loop, batch):
    if loop.step == 3:
        raise KeyboardInterrupt
    return real(loop, batch)
def run():
    return train(sys.argv[1], out=sys.argv[3], say=lambda text: print(text, flush=True), **json.loads(sys.argv[2]))
sampler_loop._SAVE_EVERY = -1.0
sampler_loop.SamplerLoop._train_step = stopping
try:
    run()
except KeyboardInterrupt:
    sampler_loop.SamplerLoop._train_step = real
pathlib.Path(sys.argv[3] + os.environ["RANK"]).write_text(run().sampler.fingerprint())
"""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank", train=32, dev=8)


def test_two_processes_train_what_one_does_and_go_on_after_a_stop(bank: so.Bank, tmp_path: Path) -> None:
    one = train(bank, out=tmp_path / "one", **OPTIONS)
    (tmp_path / "script.py").write_text(CODE)
    # `accelerate launch --cpu` starts a single process; on GPUs it does what torchrun does here.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "script.py"), str(bank.path), json.dumps(OPTIONS), str(tmp_path / "two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "in 2 processes" in done.stdout
    assert "going on at step 3 of 6" in done.stdout
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
