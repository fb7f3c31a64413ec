"""Trainings beside other programs: threads of small networks, and threads that wait."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import sosampler as so
from sosampler.training import loop
from sosampler.training.loop import threads_for

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
class TestThreads:
    def test_small_networks_have_one(self) -> None:
        with threads_for(nn.Linear(10, 10), CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2

    def test_larger_networks_have_all(self) -> None:
        with torch.device("meta"):
            under, at = nn.Linear(loop.SMALL - 1, 1, bias=False), nn.Linear(loop.SMALL, 1, bias=False)
        with threads_for(under, CPU):
            assert torch.get_num_threads() == 1
        with threads_for(at, CPU):
            assert torch.get_num_threads() == 2

    def test_a_gpu_does_not_matter(self) -> None:
        with threads_for(nn.Linear(10, 10), torch.device("meta")):
            assert torch.get_num_threads() == 2

    def test_after_an_error(self) -> None:
        with pytest.raises(KeyError), threads_for(nn.Linear(10, 10), CPU):
            raise KeyError
        assert torch.get_num_threads() == 2

    def test_a_training_computes_in_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        step = loop.TrainingLoop.train_step

        def noted(self: loop.TrainingLoop, batch: object) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return step(self, batch)

        monkeypatch.setattr(loop.TrainingLoop, "train_step", noted)
        train_tiny(tmp_path, epochs=1, workers=0)
        assert set(seen) == {1}


@pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_commands_let_waiting_threads_sleep(own: str | None, expected: str) -> None:
    """Before torch is imported, which reads it; a user's own setting stays."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        "import os, sys; sys.argv = ['sosampler', '--version']\n"
        "import sosampler.cli.main as main\n"
        "assert 'torch' not in sys.modules\n"
        "try: main.main()\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'])"
    )
    given = environment | ({} if own is None else {"OMP_WAIT_POLICY": own})
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == expected


@pytest.mark.slow
def test_beside_a_process_that_keeps_a_core_busy(tmp_path: Path) -> None:
    """At most 2.5 times the quiet time; with threads that spin it was more than ten times."""
    train_tiny(tmp_path / "warm", epochs=1)
    quiet = train_tiny(tmp_path / "quiet", epochs=3)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other, closing(_Ended(other)):
        busy = train_tiny(tmp_path / "busy", epochs=3)
    assert busy <= 2.5 * quiet


class _Ended:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.close = process.kill


def train_tiny(folder: Path, *, epochs: int, workers: int = 1) -> float:
    """Train the demonstration's network in a few steps and return the seconds of its quickest epoch."""
    clips = so.make_reels(
        "procedural",
        folder / "clips",
        num_classes=3,
        recipe={"num_shots": 1, "share": 1.0, "num_candidates": 2, "size": 64, "fps": 4, "seconds_per_shot": 1.0},
        counts={"train": 192, "dev": 32},
    )
    lines: list[str] = []
    so.train_classifier(
        clips,
        "timm:test_resnet",
        out=folder / "classifier",
        input_size=64,
        epochs=epochs,
        batch_size=32,
        num_frames=1,
        workers=workers,
        say=lines.append,
    )
    seconds = [float(line.split()[-2]) for line in lines if line.startswith("epoch")]
    assert len(seconds) == epochs
    return min(seconds)
