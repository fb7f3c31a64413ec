"""Ctrl-C ends a training within two seconds, wherever it is, and the next one goes on with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.factories import TINY, make_bank

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

SECONDS = 2.0
SMALL = (
    "--set",
    f"backbone={TINY}",
    "--set",
    "input_size=32",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--epochs",
    "8",
)
MAIN = "from sosampler.cli.main import main"
# A step that Python cannot interrupt, as a backward pass on a CPU.
LONG_STEP = """
import hashlib, os
from sosampler.training.loop import TrainingLoop
def step(self, batch):
    os.write(1, b"stepping\\n")
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000_000)
TrainingLoop.train_step = step
"""
# Frames that take long to decode, by threads; one write each, so that their lines do not mix.
LONG_DECODING = """
import hashlib, os
from sosampler.training.sampler_data import BankFrames
def into(*_, **__):
    os.write(1, b"decoding\\n")
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000_000)
BankFrames.read = into
"""
# torch takes seconds to import, on a busy machine many.
LONG_IMPORT = """
import hashlib, os
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.write(1, b"importing\\n")
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 200_000_000)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bank(tmp_path_factory.mktemp("data") / "bank", train=16, dev=4).path


@contextmanager
def training(bank: Path, out: Path, before: str = "") -> Iterator[subprocess.Popen[str]]:
    code = f"import sys\n{before}\n{MAIN}\nmain()"
    arguments = [sys.executable, "-c", code, "train", str(bank), "--out", str(out), *SMALL]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(
        arguments,
        **pipes,
        text=True,
        start_new_session=True,
        # A shell starts background jobs (`make test &`) with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def interrupt(started: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, which reaches all processes of the group; return what is printed then."""
    begin = time.monotonic()
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert time.monotonic() - begin < SECONDS
    assert started.returncode == 130
    assert "Traceback" not in said
    assert said.endswith("sosampler: stopped; run the same command again to resume\n")
    return said


@pytest.mark.slow
def test_in_the_middle_and_again(bank: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    with training(bank, out) as started:
        while not log.exists() or len(log.read_text().splitlines()) < 2:
            assert started.poll() is None
            time.sleep(0.005)
        interrupt(started)
    assert not (out / "result.json").exists()
    ended = len(log.read_text().splitlines())
    assert ended < 8
    for folder in (out, tmp_path / "whole"):
        with training(bank, folder) as started:
            _, said = started.communicate(timeout=120)
            assert started.returncode == 0
            assert ("resuming at step" in said) == (folder == out)
    for name in ("model.safetensors", "config.json", "result.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert losses(out) == losses(tmp_path / "whole")
    assert not list(out.glob(".*"))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("before", [LONG_STEP, LONG_DECODING, LONG_IMPORT], ids=["step", "decoding", "import"])
def test_where_python_cannot_interrupt(bank: Path, tmp_path: Path, before: str) -> None:
    with training(bank, tmp_path / "run", before) as started:
        assert started.stdout is not None
        assert started.stdout.readline() in ("stepping\n", "decoding\n", "importing\n")
        time.sleep(0.1)
        interrupt(started)
