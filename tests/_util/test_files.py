"""Resumable folders: one writer at a time, and settings that are compared when work resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sosampler._util.files import begin, differences, locked, plain, read_settings
from sosampler.errors import InvalidArgument, SosamplerError


def test_one_writer_at_a_time_also_from_another_process(tmp_path: Path) -> None:
    lock = tmp_path / "new" / ".lock"
    code = (
        "import sys; from pathlib import Path; from sosampler._util.files import locked\n"
        "with locked(Path(sys.argv[1]), 'this bank'): pass\n"
    )
    with locked(lock, "this bank"):
        with (
            pytest.raises(SosamplerError, match=r"new: another process is writing this bank; wait until it ends"),
            locked(lock, "this bank"),
        ):
            pass
        done = subprocess.run([sys.executable, "-c", code, str(lock)], capture_output=True, text=True)
        assert "another process is writing this bank" in done.stderr
    with locked(lock, "this bank"):  # released
        pass


def test_little_free_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with (
        pytest.raises(SosamplerError, match=r"only 1\.0 MB of disk space are free; free at least 17 MB"),
        locked(tmp_path / ".lock", "this bank"),
    ):
        pass


def test_settings_are_saved_once_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "run" / "settings.json"
    assert read_settings(file) is None
    settings = plain({"size": (3, 4), "seed": 1})
    begin(file, settings)
    saved = read_settings(file)
    assert saved == settings == {"size": [3, 4], "seed": 1}
    assert differences(saved, {**settings, "seed": 2, "fps": 3}) == ["fps=None, now 3", "seed=1, now 2"]
    assert differences(saved, settings) == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InvalidArgument, match=r"holds other files \(mine\.txt\); give a new folder"):
        begin(tmp_path / "settings.json", {})
    with pytest.raises(InvalidArgument, match="the folder cannot be made"):
        begin(tmp_path / "mine.txt" / "run" / "settings.json", {})
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"settings\.json: is not JSON"):
        read_settings(tmp_path / "settings.json")
    (tmp_path / "settings.json").write_text(json.dumps({"a": 1}))
    assert read_settings(tmp_path / "settings.json") == {"a": 1}
