"""Every command that writes, killed at random moments: run again, it gives what an unbroken run gives, and no more."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import sosampler as so
from sosampler.video.synthetic import numbered_video
from tests.bank.test_prepare_kill import descendants, is_working, wait_for_end, wait_until
from tests.factories import TINY, contents, make_bank, make_learnable_bank

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]

KILLS = 10
POLICIES = "-n 2 -t 4 --device cpu"
SMALL = f"--set backbone={TINY} --set input_size=32 --batch-size 8 --device cpu"
REELS = "procedural --count-train 6 --count-dev 2 --count-test 2 --classes 2 --size 48 --num-shots 3 3 --fps 6 -t 4"
# {world} is what the fixture made, {out} a new folder for each run.
COMMANDS = {
    "select to a file": "select {world}/videos -n 3 --workers 2 --policy frame-difference --out {out}/rows.jsonl",
    "select to a table": "select {world}/videos -n 3 --workers 2 --policy uniform --out {out}/rows.csv",
    "select to a folder": "select {world}/videos -n 3 --workers 2 --out {out}/rows",
    "select a total": "select {world}/videos --total 9 -t 4 --workers 2 --out {out}/picked",
    "select frames": "select {world}/videos/0.mp4 -n 8 --save-frames {out} --contact-sheet {out}/sheet.png",
    "classify": "classify {world}/videos -c {world}/classifier --device cpu --out {out}/rows.parquet",
    "prepare": "prepare {world}/videos.csv -c {world}/classifier --device cpu -t 8 --workers 2 --videos-per-shard 2 "
    "--out {out}/bank",
    "add-features": "bank add-features {out}/bank --features light={world}/classifier --features other={world}/other "
    "--device cpu --batch 4",
    "subset": "bank subset {world}/bank --out {out}/bank --limit 8",
    "train": f"train {{world}}/bank --out {{out}}/run --epochs 3 {SMALL}",
    "train a baseline": "train {world}/features --sampler adaframe -c heavy --light light --out {out}/run --epochs 6 "
    "--batch-size 8 --device cpu",
    "train-classifier": f"train-classifier {{world}}/bank -c {TINY} --input-size 32 --out {{out}}/run --epochs 3 "
    "--batch-size 8 -n 2 --workers 1 --device cpu",
    "evaluate": f"evaluate {{world}}/bank {POLICIES} --bootstrap 50 --out {{out}}/e.json --csv {{out}}/e.csv "
    "--curve {out}/e.svg --run {out}/run",
    "independence": "independence {world}/videos -c {world}/classifier --device cpu --rates 1,2,4 --out {out}/all",
    "reproduce": "reproduce table1 table3 --bank mini_kinetics={world}/bank --out {out}/all --seeds 0 --epochs 1 "
    f"--set backbone={TINY} --set input_size=32 --set shift=0 --set batch_size=8 --bootstrap 20 --device cpu",
    "report": "report {world}/evaluated --bank {world}/bank --out {out}/report.html",
    "export": "export {world}/sampler --out {out}/model.onnx",
    "quantize": "quantize {world}/classifier --bank {world}/bank -n 8 --out {out}/int8",
    "reels": f"reels {REELS} --workers 2 --out {{out}}/bank",
    "reels as files": f"reels {REELS} --to mp4 --out {{out}}/files",
    "import": "datasets import kinetics {world}/train.csv=train --videos {world}/videos --out {out}/m.csv",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "videos").mkdir()
    names = [f"{number}.mp4" for number in range(16)]
    for number, name in enumerate(names):
        numbered_video(folder / "videos" / name, num_frames=30 + number % 3, width=96, height=64)
    rows = [f"videos/{name},{'xy'[number % 2]}\n" for number, name in enumerate(names)]
    (folder / "videos.csv").write_text("path,label\n" + "".join(rows))
    listed = [f"{'xy'[number % 2]},{number},0,3,train\n" for number in range(len(names))]
    (folder / "train.csv").write_text("label,youtube_id,time_start,time_end,split\n" + "".join(listed))
    for seed, name in enumerate(("classifier", "other")):
        torch.manual_seed(seed)
        so.save_classifier(so.create_classifier(TINY, num_classes=2, input_size=32), folder / name)
    so.SOSampler(backbone=TINY, input_size=32).save_pretrained(folder / "sampler")
    make_learnable_bank(folder / "features", train=24, dev=12)
    bank = make_bank(folder / "bank", train=16, dev=8, stored=12)
    evaluated = so.evaluate(bank, num_frames=2, num_candidates=4, bootstrap=20, device="cpu")
    evaluated.write_run(folder / "evaluated")
    return folder


# A process that has torch loaded, from which the victims are forked: they begin their work at once.
SERVER = """
import os, pkgutil, sys
from contextlib import suppress
from importlib import import_module
import matplotlib.pyplot, onnxruntime, onnxscript, timm, torch._dynamo, torch.onnx, torch.ao.quantization
import sosampler
from sosampler.cli.main import main
for module in pkgutil.walk_packages(sosampler.__path__, "sosampler."):
    if not module.name.endswith("__main__"):
        with suppress(ImportError):  # of what is not installed here
            import_module(module.name)
for line in sys.stdin:
    log, *arguments = line.rstrip("\\n").split("\\t")
    victim = os.fork()
    if not victim:
        code = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.argv = ["sosampler", *arguments]
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(victim, flush=True)
    sys.stdin.readline()  # until then its number is not given to another
    print(os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]), flush=True)
"""


class Victims:
    """Runs of the command line, one at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        )

    def start(self, *arguments: str) -> int:
        """Begin a run; return its process id."""
        return int(self._ask("\t".join([str(self.log), *arguments])))

    def ended(self) -> int:
        """Wait for its end; return the exit code."""
        return int(self._ask("wait"))

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def close(self) -> None:
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    made = Victims(tmp_path_factory.mktemp("victims") / "log.txt")
    yield made
    made.close()


def kill(victims: Victims, pid: int) -> int:
    """Kill a run, not its workers, which must see to their own end; return the exit code."""
    workers = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    code = victims.ended()
    wait_until(lambda: not any(map(is_working, workers)))
    return code


@pytest.mark.parametrize("name", COMMANDS)
def test_killed(name: str, world: Path, victims: Victims, tmp_path: Path, record_property: Any) -> None:
    out = tmp_path / "out"
    arguments = COMMANDS[name].format(world=world, out=out).split()

    def fresh() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if name == "add-features":
            shutil.copytree(world / "bank", out / "bank")

    fresh()
    victims.start(*arguments)
    begun = time.monotonic()  # the first has also waited for the server
    assert victims.ended() == 0, victims.log.read_text()
    takes = time.monotonic() - begun
    expected = comparable(out)
    fresh()
    rng = random.Random(name)
    kills, finished, is_resumed = 0, 0, False
    files_at_kill: list[int] = []
    while kills < KILLS:
        assert finished < 5 * KILLS, f"too fast to be killed: {takes:.2f} s"
        pid = victims.start(*arguments)
        begun = time.monotonic()
        wait_for_end(pid, rng.uniform(0, takes))
        if (code := kill(victims, pid)) == -signal.SIGKILL:
            kills, is_resumed = kills + 1, True
            files_at_kill.append(len(contents(out)))
            continue
        assert code == 0, victims.log.read_text()
        assert comparable(out) == expected
        finished += 1
        if not is_resumed:
            takes = min(takes, time.monotonic() - begun)  # the machine may have been busier before
        fresh()
        is_resumed = False
    victims.start(*arguments)
    assert victims.ended() == 0, victims.log.read_text()
    assert comparable(out) == expected
    record_property("seconds unbroken", round(takes, 2))
    record_property("files at the kills", sorted(files_at_kill))


# What a clock says, or a hash of it, and the state of the checkout, in which somebody may work meanwhile.
MEASURED = {"seconds", "timing", "begun", "ended", "evaluation", "git"}


def comparable(folder: Path) -> dict[str, Any]:
    """Return the contents of all files below a folder, without measured times."""
    return {name: _without_times(folder / name, data) for name, data in contents(folder).items()}


def _without_times(path: Path, data: bytes) -> Any:
    if path.suffix == ".json":
        return _filtered(json.loads(data))
    if path.suffix == ".jsonl":
        return [_filtered(json.loads(line)) for line in data.splitlines()]
    if path.suffix == ".csv":
        return [_filtered(row) for row in csv.DictReader(data.decode().splitlines())]
    if path.suffix == ".parquet":
        return _filtered(pyarrow.parquet.read_table(path).to_pylist())
    return data


def _filtered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filtered(inner) for name, inner in value.items() if name not in MEASURED}
    return [_filtered(inner) for inner in value] if isinstance(value, list) else value
