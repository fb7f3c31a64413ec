"""Damaged files end in a selection or in a sentence, in bounded time and memory; no other exception, no crash."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import run as fuzz
from tests.fuzz.mutate import FORMATS, edit_tree, to_bytes, walk
from tests.fuzz.run import Settings, make_case, run
from tests.fuzz.seeds import read_seeds, write_seeds

_BAD = ("crashes", "foreign", "over_time", "over_memory")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits of processes are POSIX")


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="session")
def seeds(settings: Settings) -> dict[str, bytes]:
    settings.seeds.mkdir(exist_ok=True)
    write_seeds(settings.seeds)
    return read_seeds(settings.seeds)


def test_three_hundred_damaged_files(settings: Settings) -> None:
    """make fuzz runs 20,000."""
    summary = run(range(300), settings)
    assert summary["files"] == 300
    assert 60 < summary["selections"] < 250, "some files are damaged too little, or all too much"
    assert not any(summary[kind] for kind in _BAD), summary


def test_a_run_goes_on_where_it_stopped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(range(300), settings)
    monkeypatch.setattr(sys, "executable", "/nothing")  # no process is started
    assert run(range(300), settings) == before


@pytest.mark.parametrize("name", ["h264.mp4", "mpeg4.mov", "h264.mkv", "vp9.webm", "mjpeg.avi"])
def test_a_tree_writes_what_it_read(name: str, seeds: dict[str, bytes]) -> None:
    fmt = FORMATS[Path(name).suffix]
    nodes = fmt.parse(seeds[name])
    assert len(list(walk(nodes))) > 20
    written = to_bytes(nodes, fmt)
    # EBML sizes may be written in fewer bytes; what was written once stays the same.
    assert written == seeds[name] if fmt is not FORMATS[".mkv"] else to_bytes(fmt.parse(written), fmt) == written
    assert edit_tree(seeds[name], fmt, np.random.default_rng(0)) != seeds[name]


def test_files_depend_on_their_number_alone(seeds: dict[str, bytes]) -> None:
    assert make_case(7, seeds, "pyav") == make_case(7, seeds, "pyav")
    assert len({make_case(number, seeds, "pyav")[1] for number in range(40)}) == 40


# In the place of the child process: file 1 crashes it, 2 never ends, 3 raises, 4 takes 40 MB.
_ODD = """
import os, time
import numpy as np
import sosampler as so
from tests.fuzz import run

def odd_select(source, *rest, seed=0, **options):
    if seed == 1: os.kill(os.getpid(), 11)
    if seed == 2: time.sleep(60)
    if seed == 3: raise ZeroDivisionError("odd")
    if seed == 4: np.ones(40 << 20, dtype=np.uint8)
    return select(source, *rest, **options)

select, so.select = so.select, odd_select
run.make_case = lambda number, seeds, reader: ("h264.mp4", seeds["h264.mp4"], {"policy": "uniform", "seed": number})
"""


def test_crashes_hangs_errors_and_memory_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = f"{_ODD}\nrun.serve({str(tmp_path)!r}, 'pyav')"
    popen = fuzz.subprocess.Popen
    monkeypatch.setattr(fuzz.subprocess, "Popen", lambda command, **how: popen([*command[:2], child], **how))
    monkeypatch.setattr(fuzz, "KILL_SECONDS", 5.0)
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 4.0)
    monkeypatch.setattr(fuzz, "MAX_BYTES", 20 << 20)
    summary = run(range(6), Settings(tmp_path))
    assert (summary["files"], summary["selections"]) == (6, 3)
    bad = {kind: [each["number"] for each in summary[kind]] for kind in _BAD}
    assert bad == {"crashes": [1], "foreign": [3], "over_time": [2], "over_memory": [4]}
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "failing").glob("*.json"))]
    assert [each["outcome"] for each in kept] == ["crash", "hang", "foreign", "selection"]
