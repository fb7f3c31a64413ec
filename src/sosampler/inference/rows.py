"""One row a video, for every command and engine: JSON lines, CSV, Parquet, or a folder of Parquet files.

A run that is killed and started again with the same options resumes: rows of a file wait in a journal beside it, and
rows of a folder are the Parquet files that are there.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import getitem
from pathlib import Path
from typing import Any

from sosampler._util.files import (
    FULL,
    check_replaceable,
    differences,
    import_parquet,
    parse_json,
    plain,
    read_settings,
    remove_leftovers,
    replacing,
    write_text,
)
from sosampler._util.locks import locked, locked_file
from sosampler._util.text import csv_cell
from sosampler.errors import InvalidArgument, first_line

Row = dict[str, Any]
"""A selection or a prediction as its `to_dict` returns it, or "video" and "error" of a video that failed."""

SUFFIXES = (".parquet", ".jsonl", ".csv")

# ---- columns


@dataclass(frozen=True)
class Column:
    """One column: "text", "int", "float", or a list of these ("texts", ...), and how its value is read from a row."""

    kind: str
    value: Callable[[Row], Any]


def as_text(video: str) -> str:
    """Return a file name as text; bytes that are not become \\xNN."""
    return os.fsencode(video).decode("utf-8", "backslashreplace")


# Column -> kind and keys inside a selection.
_OF_SELECTION: dict[str, tuple[str, tuple[str, ...]]] = {
    "policy": ("text", ("policy",)),
    "num_frames": ("int", ("num_frames",)),
    "num_candidates": ("int", ("num_candidates",)),
    "frame_indices": ("ints", ("frame_indices",)),
    "pts_seconds": ("floats", ("pts_seconds",)),
    "scores": ("floats", ("scores",)),
    "candidate_mode": ("text", ("candidates", "mode")),
    "candidate_frame_indices": ("ints", ("candidates", "frame_indices")),
    "candidate_pts_seconds": ("floats", ("candidates", "pts_seconds")),
    "candidate_moved_seconds": ("floats", ("candidates", "moved_seconds")),
    "total_num_frames": ("int", ("metadata", "total_num_frames")),
    "fps": ("float", ("metadata", "fps")),
    "duration": ("float", ("metadata", "duration")),
    "width": ("int", ("metadata", "width")),
    "height": ("int", ("metadata", "height")),
    "codec": ("text", ("metadata", "codec")),
    "notes": ("texts", ("notes",)),
}


def _at(*keys: str) -> Callable[[Row], Any]:
    return lambda row: reduce(getitem, keys, row)


_VIDEO = Column("text", lambda row: as_text(row["video"]))
SELECTION_COLUMNS = {
    "video": _VIDEO,
    **{name: Column(kind, _at(*keys)) for name, (kind, keys) in _OF_SELECTION.items()},
}
PREDICTION_COLUMNS = {
    "video": _VIDEO,
    "label": Column("text", _at("label")),
    "probability": Column("float", _at("probability")),
    "answer": Column("text", _at("answer")),
    "top_labels": Column("texts", lambda row: [each["label"] for each in row["top"]]),
    "top_probabilities": Column("floats", lambda row: [each["probability"] for each in row["top"]]),
    "seconds": Column("float", _at("timing", "total")),
    **{name: Column(kind, _at("selection", *keys)) for name, (kind, keys) in _OF_SELECTION.items()},
}
COLUMNS = {"selections": SELECTION_COLUMNS, "predictions": PREDICTION_COLUMNS}


def write_parquet(path: Path, rows: Iterable[Row], columns: dict[str, Column], *, batch: int = 1000) -> None:
    """Write the rows as one file, `batch` rows in memory at a time."""
    pa, pq = import_parquet()
    kinds = {"text": pa.string(), "int": pa.int64(), "float": pa.float64()}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()}
    schema = pa.schema({name: kinds[column.kind] for name, column in columns.items()})
    cells = ({name: column.value(row) for name, column in columns.items()} for row in rows)
    with pq.ParquetWriter(path, schema) as writer:
        while part := list(islice(cells, batch)):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))


def _write_csv(path: Path, rows: Iterable[Row], columns: dict[str, Column]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            cells = [column.value(row) for column in columns.values()]
            # Lists become JSON inside their cell.
            writer.writerow([json.dumps(cell) if isinstance(cell, list) else csv_cell(cell) for cell in cells])


def write_rows(path: Path, rows: Iterable[Row], columns: dict[str, Column]) -> None:
    """Write the rows in the format that the file's suffix names."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        write_parquet(path, rows, columns)
    elif suffix == ".csv":
        _write_csv(path, rows, columns)
    else:
        _write_json_lines(path, rows)


def _write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ---- where rows go


def check_out(out: Path, what: str, *, overwrite: bool = False) -> Path:
    """Return the path if rows can be written there: a file, or a folder where the name has no suffix.

    A file that does not hold `what`, "selections" or "predictions", is replaced only with `overwrite`.
    """
    suffix = out.suffix.lower()
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(out)):
        scheme = str(out).partition(":")[0]
        raise InvalidArgument(f"out={scheme}:...: is an address; give a file or a folder here, and upload it later")
    if out.is_dir() and suffix in (".jsonl", ".csv"):
        raise InvalidArgument(f"--out {out}: is a folder; give the name of a file")
    if suffix and not out.is_dir():
        if suffix not in SUFFIXES:
            raise InvalidArgument(
                f"--out {out}: the ending {out.suffix!r} is unknown; choose one of: {', '.join(SUFFIXES)}, or give a "
                "folder for Parquet files"
            )
        if not out.parent.is_dir():
            raise InvalidArgument(f"--out {out}: the folder {out.parent} does not exist; make it first")
    if suffix not in (".jsonl", ".csv"):
        import_parquet()
    check_replaceable(out, what, lambda file: _columns_of(file) == set(COLUMNS[what]), overwrite=overwrite)
    return out


_MAX_ROW = 64 << 20  # characters of a line of JSON that are read to recognise it
# What only rows of each kind have, as JSON.
_KEYS = {"selections": {"video", "frame_indices", "candidates"}, "predictions": {"video", "label", "selection"}}


def _columns_of(file: Path) -> set[str]:
    """Return the columns of a file of rows; of JSON lines those of the kind whose keys they have."""
    if file.suffix.lower() == ".parquet":
        return set(import_parquet()[1].read_schema(file).names)
    with open(file, encoding="utf-8", newline="") as lines:
        line = lines.readline(_MAX_ROW)
    if file.suffix.lower() == ".csv":
        return set(next(csv.reader([line])))
    keys = set(parse_json(line, str(file)))
    return next((set(COLUMNS[what]) for what in _KEYS if keys >= _KEYS[what]), keys)


@contextmanager
def open_rows(out: Path, what: str, options: dict[str, Any], *, overwrite: bool = False) -> Iterator[Journal | Parts]:
    """Open a file or a folder for rows; `what`: "selections" or "predictions".

    `options` must be equal for a run to resume. With other ones a file begins anew; so does a folder with `overwrite`,
    which is refused without.
    """
    if check_out(out, what, overwrite=overwrite).suffix and not out.is_dir():
        with locked_file(out), closing(Journal(out, options, COLUMNS[what])) as journal:
            yield journal
    else:
        about = {"what": what, "options": options}
        with writing_parts(out, about, COLUMNS[what], overwrite=overwrite) as parts:
            yield parts


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn errors of the disk into a sentence."""
    try:
        yield
    except BrokenPipeError:
        raise  # of standard output
    except OSError as error:
        reason = error.strerror or first_line(error)  # some of Arrow's errors have no number
        resume = "make room and run the same command again, or" if error.errno in FULL else "make room, or"
        raise InvalidArgument(f"--out {out}: cannot be written ({reason}); {resume} give another") from error


def _write_failures(path: Path, failures: Sequence[Row]) -> None:
    if failures:
        write_text(path, (json.dumps(row) + "\n" for row in failures))
    else:
        path.unlink(missing_ok=True)


class Journal:
    """Rows on their way to one file: a JSON line per finished video in a hidden file beside it."""

    damaged: Sequence[int] = ()

    def __init__(self, out: Path, options: dict[str, Any], columns: dict[str, Column]) -> None:
        self.out, self._columns = out, columns
        self.path = out.with_name(f".{out.name}.journal")
        self._failed = out.with_name(f"{out.name}.failed.jsonl")
        remove_leftovers(self._failed)
        self._header = json.dumps({"options": options}, sort_keys=True)
        self._offsets: dict[str, int] = {}  # video -> where its last row begins
        valid = self._valid_length()
        with _writing(out):
            self._file = open(self.path, "r+b" if valid else "wb")  # noqa: SIM115
            if valid:
                self._file.truncate(valid)
                self._file.seek(0, 2)
            else:
                self._file.write(self._header.encode() + b"\n")
                self._file.flush()
        self.num_rows = len(self._offsets)

    def done(self, video: str) -> bool:
        """Return whether there is a row for the video."""
        return video in self._offsets

    def _valid_length(self) -> int:
        """Return the bytes that are complete lines of a run with the same options; 0 if it is another run's."""
        if not self.path.exists():
            return 0
        length = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # the line during which the run was killed
                if number == 0 and line.decode("utf-8", "replace").rstrip("\n") != self._header:
                    return 0
                if number:
                    try:
                        self._offsets[json.loads(line)["video"]] = length
                    except (ValueError, KeyError, TypeError):
                        break  # what a power cut can leave
                length += len(line)
        return length

    def add(self, row: Row) -> None:
        with _writing(self.out):
            offset = self._file.tell()
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        self._offsets[row["video"]] = offset
        self.num_rows = len(self._offsets)

    def rows(self, videos: Iterable[str] | None = None) -> Iterator[Row]:
        """Yield a row for each of these videos that has one; without `videos` all, as they were added."""
        with open(self.path, "rb") as file:
            for video in self._offsets if videos is None else videos:
                if video in self._offsets:
                    file.seek(self._offsets[video])
                    yield json.loads(file.readline())

    def finish(self, failures: Sequence[Row], videos: Sequence[str] | None = None) -> None:
        """Write the file, with these videos in this order, and list beside it what failed."""
        self._file.close()
        failed = {failure["video"] for failure in failures}
        wanted = [video for video in (self._offsets if videos is None else videos) if video not in failed]
        self.num_rows = sum(video in self._offsets for video in wanted)
        with _writing(self.out):
            with replacing(self.out) as temporary:
                write_rows(temporary, self.rows(wanted), self._columns)
            _write_failures(self._failed, failures)
        self.path.unlink()

    def close(self) -> None:
        """Close the journal; without a row there is nothing to resume, so it is removed."""
        with suppress(OSError):  # of a row that `add` could not write and has reported
            self._file.close()
        if not self._offsets:
            self.path.unlink(missing_ok=True)


# ---- a folder of Parquet files

KIND, VERSION = "sosampler rows", 1
# Rows in a file, and seconds after which fewer are written too: what is lost at most when the run is killed.
ROWS_A_PART = 1000
_SECONDS_A_PART = 60.0
_LOCK = ".lock"
_PART = re.compile(r"part-(\d{6,})\.parquet")
_LEFTOVER = re.compile(r"\.(part-\d+|_run|_failed)\.\d+\.part\.\w+")


class Parts:
    """A folder, locked for writing: part-000000.parquet, ..., with the options in _run.json."""

    def __init__(
        self, folder: Path, about: dict[str, Any], columns: dict[str, Column], *, overwrite: bool = False
    ) -> None:
        self.folder = folder
        self._columns = columns
        self._waiting: list[Row] = []
        self._since = time.monotonic()
        for entry in list(folder.iterdir()):
            if _LEFTOVER.fullmatch(entry.name):
                entry.unlink()  # what a killed run had not finished
        self._check(about, overwrite)
        self._numbers = sorted(int(match[1]) for entry in folder.iterdir() if (match := _PART.fullmatch(entry.name)))
        self._videos: set[str] = set()
        self.damaged = [number for number in self._numbers if not self._read(number)]
        self.num_rows = len(self._videos)  # that are written

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def _check(self, about: dict[str, Any], overwrite: bool) -> None:
        now = plain({"kind": KIND, "version": VERSION, **about})
        before = read_settings(self.folder / "_run.json")
        if before is None:
            with _writing(self.folder):
                write_text(self.folder / "_run.json", json.dumps(now, indent=1) + "\n")
            return
        different = differences(*({**each, "options": None, **(each.get("options") or {})} for each in (before, now)))
        if different and overwrite:
            for entry in list(self.folder.iterdir()):
                if _PART.fullmatch(entry.name):
                    entry.unlink()
            # Last: without the settings the rest would be foreign files.
            for name in ("_failed.jsonl", "_run.json"):
                (self.folder / name).unlink(missing_ok=True)
            self._check(about, overwrite)
        elif different:
            raise InvalidArgument(
                f"{self.folder}: holds rows made with {'; '.join(different)}; give the same again to resume, "
                "another folder, or add --overwrite"
            )

    def _read(self, number: int) -> bool:
        """Read which videos a part holds; a part that cannot be read is removed."""
        pa, pq = import_parquet()
        try:
            column = pq.read_table(self._path(number), columns=["video"]).column("video")
        except (OSError, pa.ArrowException):
            self._path(number).unlink()
            return False
        self._videos.update(column.to_pylist())
        return True

    def done(self, video: str) -> bool:
        """Return whether there is a row for the video."""
        return as_text(video) in self._videos

    def add(self, row: Row) -> None:
        if self.done(row["video"]):
            return  # made again for its pixels
        self._waiting.append(row)
        if len(self._waiting) >= ROWS_A_PART or time.monotonic() - self._since > _SECONDS_A_PART:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows as a part."""
        self._since = time.monotonic()
        if not self._waiting:
            return
        number = self._numbers[-1] + 1 if self._numbers else 0
        with _writing(self.folder), replacing(self._path(number)) as temporary:
            write_parquet(temporary, self._waiting, self._columns)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a name must not outlive its contents when the power fails
        self._numbers.append(number)
        self._videos.update(as_text(row["video"]) for row in self._waiting)
        self.num_rows = len(self._videos)
        self._waiting = []

    def finish(self, failures: Sequence[Row], _: Sequence[str] | None = None) -> None:
        """Write what waits, and list what failed."""
        self.flush()
        with _writing(self.folder):
            _write_failures(self.folder / "_failed.jsonl", failures)


@contextmanager
def writing_parts(
    folder: Path, about: dict[str, Any], columns: dict[str, Column], *, overwrite: bool = False
) -> Iterator[Parts]:
    """Lock the folder for one run at a time; rows that still wait are written when the block ends.

    `overwrite`: rows of another run are removed.
    """
    import_parquet()
    _check_folder(folder)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK, "here"):
        parts = Parts(folder, about, columns, overwrite=overwrite)
        try:
            yield parts
        finally:
            parts.flush()


def _check_folder(folder: Path) -> None:
    """Refuse a folder with other files, before anything is written there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: is a file; give a folder, which will hold Parquet files")
    names = {entry.name for entry in folder.iterdir()}
    if "_run.json" in names:
        return
    # A run that was killed at its very beginning may have left a lock and temporary files.
    foreign = sorted(name for name in names if name != _LOCK and not _LEFTOVER.fullmatch(name))
    if foreign:
        raise InvalidArgument(
            f"{folder}: holds other files ({', '.join(foreign[:3])}); give a new folder, or one with rows to resume"
        )
