"""`sosampler watch`: lines, JSON, JPEGs, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sosampler._util.locks import locked_folder
from sosampler.video.synthetic import numbered_video, read_number
from tests.cli.conftest import Ran

Command = Callable[..., Ran]
UNIFORM = ("--policy", "uniform", "-n", 2, "--window", 1, "--idle", 0.2)


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    path = tmp_path / "live.ts"
    path.write_bytes(numbered_video(num_frames=75, width=96, height=64, gop=15, container_format="mpegts"))
    return path


def test_lines_and_json(command: Command, stream: Path) -> None:
    ran = command("watch", stream, *UNIFORM)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert len(lines) == 3
    time_of_day = r"\(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\)"
    assert re.fullmatch(rf"window 0: 0\.067 to 1\.067 s: 0\.300 s {time_of_day}, 0\.800 s {time_of_day}", lines[0])
    assert lines[2].startswith("window 2: 2.067 to 2.533 s [end]: 2.300 s (")
    assert ran.err == "3 windows, 5 frames\n"
    ran = command("watch", stream, *UNIFORM, "--json")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [row["ended_by"] for row in rows] == ["full", "full", "end"]
    assert set(rows[0]) == {
        *("source", "number", "policy", "start_seconds", "end_seconds", "ended_by", "pts_seconds", "wall_times"),
        *("num_candidates", "scores", "notes", "width", "height"),
    }
    assert (rows[0]["width"], rows[0]["height"]) == (96, 64)


def test_frames_are_written_with_their_times(command: Command, stream: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "frames"
    assert command("watch", stream, *UNIFORM, "-o", out, "--size", 32, "--max-windows", 2).code == 0
    with open(out / "windows.jsonl", "a", encoding="utf-8") as file:
        file.write('{"source": "half a li')  # as a run that is killed leaves it
    ran = command("watch", stream, *UNIFORM, "-o", out, "--json")
    assert ran.err == f"3 windows, 5 frames, written to {out}\n"
    rows = [json.loads(line) for line in (out / "windows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 0, 1, 2]
    assert rows[2:] == [json.loads(line) for line in ran.out.splitlines()]
    files = [name for row in rows for name in row["files"]]
    assert sorted([*files, "windows.jsonl"]) == sorted(os.listdir(out))
    found = []
    for row in rows:
        for name, seconds, wall in zip(row["files"], row["pts_seconds"], row["wall_times"], strict=True):
            compact = re.sub("[-:]", "", wall)
            assert name == f"{compact}_window{row['number']:06d}_{seconds:.3f}s.jpg"
            found.append(read_number(np.asarray(Image.open(out / name))))
    assert found == [7, 22, 37, 52, 7, 22, 37, 52, 67]
    with Image.open(out / files[0]) as image:
        assert image.size == (48, 32)


@pytest.mark.parametrize("half", ["{", '{"source"', '{"source": "a", "num'])
def test_what_a_killed_run_left_is_removed(command: Command, stream: Path, tmp_path: Path, half: str) -> None:
    out = tmp_path / "out"
    assert command("watch", stream, *UNIFORM, "-o", out, "--max-windows", 1).code == 0
    before = sorted(os.listdir(out))
    whole = (out / "windows.jsonl").read_text(encoding="utf-8")
    (out / "windows.jsonl").write_text(whole + half, encoding="utf-8")
    image = next(name for name in before if name.endswith(".jpg"))
    (out / f".{image.removesuffix('.jpg')}.4000000.part.jpg").write_bytes(b"half")
    (out / ".other.part.jpg").write_bytes(b"")
    assert command("watch", stream, *UNIFORM, "-o", out, "--max-windows", 1).code == 0
    rows = (out / "windows.jsonl").read_text(encoding="utf-8")
    assert rows.startswith(whole)
    files = [name for line in rows.splitlines() for name in json.loads(line)["files"]]
    assert sorted(os.listdir(out)) == sorted(["windows.jsonl", ".other.part.jpg", *files])


def test_a_foreign_last_line_stays(command: Command, stream: Path, tmp_path: Path) -> None:
    for text in ('{"a": 1}', "note", '{"a": 1}\n {"source": '):
        (tmp_path / "windows.jsonl").write_text(text, encoding="utf-8")
        ran = command("watch", stream, *UNIFORM, "-o", tmp_path)
        assert ran.code == 2
        assert "windows.jsonl: its last line is no row of `watch` and has no end; give another folder" in ran.err
        assert ran.err.count("\n") == 1
        assert (tmp_path / "windows.jsonl").read_text(encoding="utf-8") == text


def test_one_run_at_a_time_writes_into_a_folder(command: Command, stream: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked_folder(out):
        ran = command("watch", stream, *UNIFORM, "-o", out)
        assert (ran.code, ran.out, os.listdir(out)) == (2, "", [".lock"])
        assert "is writing here; wait until it ends, or give another folder" in ran.err
    assert command("watch", "missing.ts", "-o", out).code == 2
    assert not out.exists(), "nothing was written"


def test_standard_input(command: Command, stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stream.read_bytes())))
    ran = command("watch", "-", *UNIFORM, "--json")
    assert [json.loads(line)["source"] for line in ran.out.splitlines()] == ["<stdin>"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tcp://127.0.0.1:9",), "add --allow-scheme tcp"),
        (("http://me:hidden@127.0.0.1:9/", "--allow-scheme", "http"), "http://127.0.0.1:9/: no answer ("),
        (("-", "--allow-scheme", "s3"), "the scheme 's3' is for `select` and `classify`"),
        (("missing.ts",), "missing.ts: cannot be read (No such file or directory)"),
        (("-", "--policy", "keyframe"), "take another policy"),
        (("-", "--camera-option", "framerate=30"), "camera options are for camera:NAME"),
        (("-", "--max-windows", 0), "--max-windows=0 must be an int of at least 1"),
        (("-", "--sampler", "missing"), "--sampler missing: no such folder"),
        (("-", "--window", "nan"), "window=nan must be a number above 0"),
    ],
)
def test_bad_input_is_one_sentence(command: Command, arguments: tuple[object, ...], message: str) -> None:
    ran = command("watch", *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert "hidden" not in ran.err


def test_out_must_be_a_folder(command: Command, stream: Path) -> None:
    ran = command("watch", stream, "-o", stream)
    assert ran.code == 2
    assert f"--out {stream}: is a file; give a folder" in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_with_what_was_found(stream: Path, tmp_path: Path) -> None:
    """While it waits for a file to grow: the open window is closed, and the exit code is that of success."""
    arguments = [*map(str, UNIFORM[:-1]), "60", "--json", "-o", str(tmp_path / "out")]
    command = [sys.executable, "-m", "sosampler", "watch", str(stream), *arguments]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process would ignore it
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with started:
        try:
            assert started.stdout is not None
            rows = [json.loads(started.stdout.readline()) for _ in range(2)]
            time.sleep(0.3)
            started.send_signal(signal.SIGINT)
            rest, errors = started.communicate(timeout=30)
        finally:
            started.kill()
    rows.append(json.loads(rest))
    assert started.returncode == 0
    assert [row["ended_by"] for row in rows] == ["full", "full", "stopped"]
    assert errors.splitlines() == ["stopped", f"3 windows, 5 frames, written to {tmp_path / 'out'}"]
    assert len(list((tmp_path / "out").glob("*.jpg"))) == 5
