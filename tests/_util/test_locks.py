"""Locks: one process at a time writes into a folder or a file."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sosampler._util.locks import locked, locked_file, locked_folder
from sosampler.errors import SosamplerError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")

HOLD = """
import os, sys, time
from pathlib import Path
from sosampler._util.locks import locked_file, locked_folder
path = Path(sys.argv[2])
with (locked_folder if sys.argv[1] == "folder" else locked_file)(path):
    if len(sys.argv) > 3 and os.fork() == 0:  # as the workers of a data loader do
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holding(kind: str, path: Path, *, fork: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a "file" or a "folder", killed in the end."""
    arguments = [sys.executable, "-c", HOLD, kind, str(path), *(["fork"] if fork else [])]
    other = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        yield other
    finally:
        with suppress(ProcessLookupError):
            os.killpg(other.pid, signal.SIGKILL)
        other.wait()
        other.stdout.close()


def test_the_second_process_is_refused_and_told_which_is_the_first(tmp_path: Path) -> None:
    with holding("folder", tmp_path / "run") as other:
        message = f"run: process {other.pid} is writing here; wait until it ends, or give another folder"
        with pytest.raises(SosamplerError, match=message), locked_folder(tmp_path / "run"):
            pass
    with holding("file", tmp_path / "rows.csv") as other:
        message = rf"rows\.csv: process {other.pid} is writing this file; wait until it ends, or give another file"
        with pytest.raises(SosamplerError, match=message), locked_file(tmp_path / "rows.csv"):
            pass


def test_a_killed_process_releases_it_also_where_it_was_forked(tmp_path: Path) -> None:
    with holding("folder", tmp_path, fork=True) as other:
        other.kill()  # what it forked lives on
        other.wait()
        assert (tmp_path / ".lock").exists()
        with locked_folder(tmp_path):
            assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())
    assert not (tmp_path / ".lock").exists()


def test_threads_of_one_process_are_kept_apart_too(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "new" / ".lock", "this bank"),
        pytest.raises(SosamplerError, match=rf"new: process {os.getpid()}, this one, is writing this bank"),
        locked(tmp_path / "new" / ".lock", "this bank"),
    ):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written there
    with locked_folder(tmp_path / "new"):  # released
        (tmp_path / "new" / "mine").touch()
    assert (tmp_path / "new" / "mine").exists()


def test_many_in_turn_never_hold_it_together(tmp_path: Path) -> None:
    """Also while the file of the lock is removed and made again all the time."""
    code = (
        "import sys, time; from pathlib import Path; from sosampler.errors import SosamplerError\n"
        "from sosampler._util.locks import locked_folder\n"
        "folder, done = Path(sys.argv[1]), 0\n"
        "while done < 50:\n"
        "    try:\n"
        "        with locked_folder(folder):\n"
        "            number = int((folder / 'count').read_text()); (folder / 'count').write_text(str(number + 1))\n"
        "            done += 1\n"
        "    except SosamplerError: time.sleep(0.001)\n"
    )
    (tmp_path / "count").write_text("0")
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    try:
        assert [other.wait(120) for other in others] == [0, 0, 0]
    finally:
        for other in others:
            other.kill()
    assert (tmp_path / "count").read_text() == "150"


def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_here(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none_here)
    with locked_folder(tmp_path):
        (tmp_path / "mine").touch()
    assert f"{tmp_path}: the file system has no locks; do not start a second run here" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(SosamplerError, match=r"cannot be locked against other writers \(Read-only file system\)"),
        locked_folder(tmp_path),
    ):
        pass


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    own = [tmp_path / name for name in (".rows.12.part.csv", ".rows.999999.part.csv")]
    others = [
        tmp_path / name for name in (".rows.part.csv.bak", ".other.12.part.csv", ".rows.12.part.json", "rows.csv")
    ]
    for path in (*own, *others):
        path.touch()
    with locked_file(tmp_path / "rows.csv"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_little_free_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with (
        pytest.raises(SosamplerError, match=r"only 1\.0 MB of disk space are free; free at least 17 MB"),
        locked(tmp_path / ".lock", "this bank"),
    ):
        pass
