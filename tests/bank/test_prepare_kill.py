"""`prepare` killed at random moments, ten times, ends with the bytes of an unbroken run."""

from __future__ import annotations

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

import psutil
import pytest
import torch
from torch import nn

from sosampler.bank.inspect import verify_bank
from sosampler.video.synthetic import numbered_video

KILLS = 10
OPTIONS: dict[str, Any] = {"num_candidates": 10, "videos_per_shard": 2}


def small_classifier() -> Any:
    from sosampler import wrap_classifier

    torch.manual_seed(5)
    layers = (nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 2))
    return wrap_classifier(nn.Sequential(*layers), input_size=96, layout="BCHW")


def work(manifest: Path, out: Path, workers: int) -> None:
    """What the process that is killed does."""
    from sosampler.bank.prepare import prepare

    prepare(manifest, small_classifier(), out, workers=workers, **OPTIONS)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    numbered_video(folder / "long.mp4", num_frames=60, width=128, height=96)
    numbered_video(folder / "short.mp4", num_frames=8, width=96, height=96)
    (folder / "broken.mp4").write_bytes(b"broken")
    names = ["long", "short", "long", "broken", "long", "long"] * 4
    rows = [f"{name}.mp4,v{number},{('x', 'y')[number % 2]}" for number, name in enumerate(names)]
    (folder / "m.csv").write_text("path,id,label\n" + "\n".join(rows) + "\n")
    return folder / "m.csv"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_working(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # what is dead may wait for the system to clear it away
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int, seconds: float) -> None:
    """Wait so long, or until the process has ended if that is earlier."""
    end, process = time.monotonic() + seconds, psutil.Process(pid)
    while time.monotonic() < end and is_working(process):
        time.sleep(0.002)


# A process that has torch loaded, from which the victims are forked: they begin their work at once.
_FORKS = """
import os, sys
from contextlib import suppress
sys.path.insert(0, sys.argv[1])
import PIL.Image, pyarrow.ipc
PIL.Image.init()
with suppress(ImportError):
    import pandas  # where it is, pyarrow imports it before it makes the first array
import sosampler.bank.prepare, sosampler.bank.annotate, sosampler.video.pyav_reader
from pathlib import Path
from tests.bank.test_prepare_kill import small_classifier, work
small_classifier()
for line in sys.stdin:
    manifest, out, workers = line.rstrip("\\n").split("\\t")
    victim = os.fork()
    if not victim:
        code = 1
        try:
            work(Path(manifest), Path(out), int(workers))
            code = 0
        finally:
            os._exit(code)
    print(victim, flush=True)
    sys.stdin.readline()  # until then its number is not given to another
    print(os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]), flush=True)
"""


class Victims:
    """Runs of `work`, one at a time."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self._server = subprocess.Popen(
            [sys.executable, "-c", _FORKS, str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, out: Path, workers: int) -> int:
        """Begin a run; returns its process id."""
        self._tell(f"{self._manifest}\t{out}\t{workers}")
        return int(self._line())

    def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        self._tell("wait")
        return int(self._line())

    def _tell(self, line: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{line}\n")
        self._server.stdin.flush()

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def close(self) -> None:
        self._server.communicate(timeout=60)


@pytest.fixture
def victims(manifest: Path) -> Iterator[Victims]:
    found = Victims(manifest)
    yield found
    found.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("wanted", [3, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_ends_as_unbroken(wanted: int, victims: Victims, tmp_path: Path) -> None:
    victims.start(tmp_path / "unbroken", 0)
    began = time.monotonic()
    assert victims.ended() == 0
    takes = time.monotonic() - began
    expected = contents(tmp_path / "unbroken")
    # Heads, failures and root; frames; failures by shard; answers; checksums. The lock is removed.
    assert len(expected) == 4 + 12 + 4 + 13 + 24

    rng = random.Random(11)
    out, kills, at_kill = tmp_path / "killed", 0, set()
    for _ in range(10 * wanted):
        victim = victims.start(out, rng.choice((0, 0, 0, 2)))
        wait_for_end(victim, rng.uniform(0, takes))
        decoders = descendants(victim)
        os.kill(victim, signal.SIGKILL)
        code = victims.ended()
        if code == -signal.SIGKILL:
            kills += 1
            at_kill.add(len(list(out.rglob("0*.arrow"))))
            if at_kill == {0}:
                takes *= 1.3  # the machine has become slower since the unbroken run
            wait_until(lambda: not any(is_working(decoder) for decoder in decoders))  # noqa: B023
        else:
            assert (code, contents(out)) == (0, expected)
            shutil.rmtree(out)  # finished before its time had come: from the start
        if kills == wanted:
            break
    assert kills == wanted
    assert wanted < KILLS or len(at_kill) > 2, f"all kills came at the same stages: {at_kill}"
    victims.start(out, 2)
    assert victims.ended() == 0
    assert contents(out) == expected
    assert verify_bank(out) == []
