"""Rows of many videos in a folder of Parquet files, added to until every video has one.

_run.json              what the rows are and how they were made; a run with other options is refused
part-000000.parquet    rows; a file has this name only once it is whole
_failed.jsonl          videos of the last run that gave no row, with the reason

Readers of Parquet folders leave out names that begin with _ or a dot.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sosampler.data.bank_lock import _try_lock
from sosampler.errors import InvalidArgument, SosamplerError, first_line
from sosampler.files import replacing
from sosampler.integrations.columns import Column, import_parquet, write_parquet
from sosampler.steps import Row, as_text

KIND, VERSION = "sosampler rows", 1
# Rows in a file, and seconds after which fewer are written too: what is lost at most when the run is killed.
ROWS_A_PART = 1000
_SECONDS_A_PART = 60.0
_LOCK = ".lock"
_PART = re.compile(r"part-(\d{6,})\.parquet")
_LEFTOVER = re.compile(r"\.(part-\d+|_run|_failed)\.\d+\.part\.\w+")


class Parts:
    """The folder, held for writing. Give each finished row to `add`; `done` knows the videos that have one."""

    def __init__(self, folder: Path, about: dict[str, Any], columns: dict[str, Column]) -> None:
        self.folder = folder
        self._columns = columns
        self._waiting: list[Row] = []
        self._since = time.monotonic()
        for entry in list(folder.iterdir()):
            if _LEFTOVER.fullmatch(entry.name):
                entry.unlink()  # what a killed run had not finished
        self._check(about)
        self._numbers = sorted(int(found[1]) for entry in folder.iterdir() if (found := _PART.fullmatch(entry.name)))
        self._videos: set[str] = set()
        self.damaged = [number for number in self._numbers if not self._read(number)]
        self.num_rows = len(self._videos)  # that are written

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def _check(self, about: dict[str, Any]) -> None:
        told = json.loads(json.dumps({"kind": KIND, "version": VERSION, **about}))
        path = self.folder / "_run.json"
        if not path.exists():
            with _explained(self.folder), replacing(path) as temporary:
                temporary.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SosamplerError(f"{path}: is not JSON ({error}); give another folder") from error
        differing = sorted(key for key in {*told, *found} if told.get(key) != found.get(key))
        if differing:
            options = [f"{key}={found.get(key)!r}, now {told.get(key)!r}" for key in differing if key != "options"] + [
                f"{key}={old!r}, now {new!r}"
                for key in sorted({*(found.get("options") or {}), *(told.get("options") or {})})
                if (old := (found.get("options") or {}).get(key)) != (new := (told.get("options") or {}).get(key))
            ]
            raise InvalidArgument(
                f"{self.folder}: holds rows made with {'; '.join(options)}; give the same again to go on with them, or "
                "another folder"
            )

    def _read(self, number: int) -> bool:
        """Learn which videos a part holds; a part that cannot be read counts for nothing, and goes."""
        pa, pq = import_parquet()
        try:
            column = pq.read_table(self._path(number), columns=["video"]).column("video")
        except (OSError, pa.ArrowException):
            self._path(number).unlink()
            return False
        self._videos.update(column.to_pylist())
        return True

    def done(self, video: str) -> bool:
        return as_text(video) in self._videos

    def add(self, row: Row) -> None:
        self._waiting.append(row)
        if len(self._waiting) >= ROWS_A_PART or time.monotonic() - self._since > _SECONDS_A_PART:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a part of its own."""
        self._since = time.monotonic()
        if not self._waiting:
            return
        number = self._numbers[-1] + 1 if self._numbers else 0
        with _explained(self.folder), replacing(self._path(number)) as temporary:
            write_parquet(temporary, self._waiting, self._columns)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a name must not outlive its contents when the power fails
        self._numbers.append(number)
        self._videos.update(as_text(row["video"]) for row in self._waiting)
        self.num_rows = len(self._videos)
        self._waiting = []

    def write_failures(self, failures: list[Row]) -> None:
        path = self.folder / "_failed.jsonl"
        with _explained(self.folder):
            if not failures:
                path.unlink(missing_ok=True)
                return
            with replacing(path) as temporary:
                temporary.write_text("".join(json.dumps(failure) + "\n" for failure in failures), encoding="utf-8")


@contextmanager
def writing_parts(folder: Path, about: dict[str, Any], columns: dict[str, Column]) -> Iterator[Parts]:
    """The folder, for one run at a time; what was added and not yet written is written when the block ends."""
    import_parquet()
    _check_place(folder)
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _held(folder):
        parts = Parts(folder, about, columns)
        try:
            yield parts
        finally:
            parts.flush()


def _check_place(folder: Path) -> None:
    """Refuse a folder with files of somebody else, before anything is written there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: is a file; give a folder, which will hold Parquet files")
    names = {entry.name for entry in folder.iterdir()}
    if "_run.json" not in names and (foreign := sorted(name for name in names if not _is_own(name))):
        raise InvalidArgument(
            f"{folder}: holds other files ({', '.join(foreign[:3])}); give a new folder, or one with rows to go on with"
        )


def _is_own(name: str) -> bool:
    """What a run that was killed at its very beginning may have left."""
    return name == _LOCK or bool(_LEFTOVER.fullmatch(name))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One run at a time; the system lets go of the lock even where the process is killed."""
    with _explained(folder):
        file = open(folder / _LOCK, "ab")  # noqa: SIM115 - an error of the work itself is not explained
    with file:
        if not _try_lock(file.fileno(), folder):
            raise SosamplerError(
                f"{folder}: another process is writing here; wait until it ends, or give another folder"
            )
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Arrow's errors have no number.
        told = error.strerror or first_line(error)
        raise InvalidArgument(f"{folder}: cannot be written ({told}); make room, or give another") from error
