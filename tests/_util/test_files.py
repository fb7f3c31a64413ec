"""Files that are written whole or not at all, and settings that are compared when work resumes."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path

import pytest

from sosampler._util.files import (
    begin,
    check_replaceable,
    differences,
    is_json_with,
    plain,
    read_settings,
    replacing,
    starts_with,
)
from sosampler.errors import InvalidArgument


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "rows.csv"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "rows.csv")
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    check = partial(check_replaceable, file, "an evaluation", is_json_with("rows"))
    check()  # not there
    file.touch()
    check()  # empty
    for text in ("mine", "[1]", '{"columns": 1}', "[" * 5000, "\x00"):
        file.write_text(text)
        message = r"a\.json: exists and does not hold an evaluation; give another name, or add --overwrite"
        with pytest.raises(InvalidArgument, match=message):
            check()
        check(overwrite=True)
    file.write_text('{"rows": []}')
    check()
    check_replaceable(file, "rows", starts_with('{"rows'))
    with pytest.raises(InvalidArgument):
        check_replaceable(file, "rows", starts_with("rows"))


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
