"""Rows of many selections on their way to a file, kept in a journal meanwhile, so that the work can be resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler._util.run_folder import locked
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, first_line
from sosampler.inference.steps import Row, as_text

SUFFIXES = (".parquet", ".jsonl", ".csv")


def check_out(out: Path) -> Path:
    """The path, if a result file can be written there."""
    if out.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(
            f"--out {out}: the ending {out.suffix!r} is unknown; choose one of: {', '.join(SUFFIXES)}"
        )
    if out.is_dir():
        raise InvalidArgument(f"--out {out}: is a folder; give the name of a file")
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out {out}: the folder {out.parent} does not exist; make it first")
    if out.suffix.lower() == ".parquet":
        _import_pyarrow()
    return out


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(
            "Parquet needs pyarrow; install it with pip install 'sosampler[parquet]', or write .jsonl or .csv"
        ) from error
    return pyarrow


class Journal:
    """One JSON line per finished video, beside the output. A run with the same options goes on where it was killed."""

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.out = out
        self.path = out.with_name(f".{out.name}.journal")
        self._header = json.dumps({"options": options}, sort_keys=True)
        self._offsets: dict[str, int] = {}  # video -> where its last row begins
        self.num_rows = 0  # written, once finished
        keep = self._sound_length()
        try:
            self._file = open(self.path, "r+b" if keep else "wb")  # noqa: SIM115
        except OSError as error:
            raise InvalidArgument(
                f"--out {out}: cannot be written ({error.strerror}); give a folder that can be"
            ) from error
        if keep:
            self._file.truncate(keep)
            self._file.seek(0, 2)
        else:
            self._file.write(self._header.encode() + b"\n")
            self._file.flush()
        self.num_rows = len(self._offsets)

    @property
    def done(self) -> set[str]:
        return set(self._offsets)

    def _sound_length(self) -> int:
        """Bytes of the journal that are whole lines of a run with the same options; 0 if it is another run's."""
        if not self.path.exists():
            return 0
        length = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # the line during which the work was killed
                if number == 0 and line.decode("utf-8", "replace").rstrip("\n") != self._header:
                    return 0
                if number:
                    try:
                        self._offsets[json.loads(line)["video"]] = length
                    except (ValueError, KeyError, TypeError):
                        break  # what a power cut can leave
                length += len(line)
        return length

    def add(self, row: dict[str, Any]) -> None:
        self._offsets[row["video"]] = self._file.tell()
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self.num_rows = len(self._offsets)

    def rows(self, videos: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
        """One row a video, in this order; without it in the order in which they were added."""
        with open(self.path, "rb") as file:
            for video in self._offsets if videos is None else videos:
                if video in self._offsets:
                    file.seek(self._offsets[video])
                    yield json.loads(file.readline())

    def finish(self, failures: list[dict[str, str]], videos: list[str] | None = None) -> None:
        """Turn the journal into the output file, with these videos in this order, and list what failed beside it."""
        self._file.close()
        failed = {failure["video"] for failure in failures}
        wanted = [video for video in (self._offsets if videos is None else videos) if video not in failed]
        self.num_rows = sum(video in self._offsets for video in wanted)
        write_results(self.out, self.rows(wanted), failures)
        self.path.unlink()

    def close(self) -> None:
        self._file.close()


def write_results(out: Path, rows: Iterable[dict[str, Any]], failures: list[dict[str, str]]) -> None:
    """Write the rows to `out`, and list what failed beside it."""
    failed = out.with_name(out.name + ".failed.jsonl")
    try:
        with replacing(out) as temporary:
            _WRITERS[out.suffix.lower()](iter(rows), temporary)
        if failures:
            with replacing(failed) as temporary:
                temporary.write_text("".join(json.dumps(failure) + "\n" for failure in failures), encoding="utf-8")
        else:
            failed.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"--out {out}: cannot be written ({error.strerror}); make room, or give another"
        ) from error


# Columns of the flat formats, and what each holds.
_COLUMNS = {
    **{"video": "text", "policy": "text", "num_frames": "whole", "num_candidates": "whole"},
    **{"frame_indices": "wholes", "pts_seconds": "reals", "scores": "reals"},
    **{"candidate_mode": "text", "candidate_frame_indices": "wholes", "candidate_pts_seconds": "reals"},
    **{"candidate_moved_seconds": "reals", "total_num_frames": "whole", "fps": "real", "duration": "real"},
    **{"width": "whole", "height": "whole", "codec": "text", "notes": "texts"},
}


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """One selection as columns: its own values, those of the candidates, and those of the video."""
    of_candidates = {f"candidate_{key}": value for key, value in row["candidates"].items()}
    known = {**row["metadata"], **of_candidates, **row}
    # A file name need not be text; what is not becomes \\xNN.
    known["video"] = os.fsencode(row["video"]).decode("utf-8", "backslashreplace")
    return {column: known[column] for column in _COLUMNS}


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_csv(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(_COLUMNS))
        writer.writeheader()
        for row in map(flat, rows):
            # Lists become JSON inside their cell: readable by people, and by json.loads.
            writer.writerow(
                {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
            )


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path, batch: int = 1000) -> None:
    pa = _import_pyarrow()
    kinds = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64()}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()}
    schema = pa.schema({column: kinds[kind] for column, kind in _COLUMNS.items()})
    with pa.parquet.ParquetWriter(path, schema) as writer:
        waiting: list[dict[str, Any]] = []
        for row in map(flat, rows):
            waiting.append(row)
            if len(waiting) == batch:
                writer.write_table(pa.Table.from_pylist(waiting, schema=schema))
                waiting = []
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, schema=schema))


_WRITERS = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}


def import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("Parquet needs pyarrow; install it with: pip install 'sosampler[parquet]'") from error
    return pyarrow, pyarrow.parquet


@dataclass(frozen=True)
class Column:
    """One column: "text", "whole", "real", or a list of these ("texts", ...), and where its value is in a row."""

    kind: str
    value: Callable[[Row], Any]


def _at(*keys: str) -> Callable[[Row], Any]:
    def value(row: Row) -> Any:
        found: Any = row
        for key in keys:
            found = found[key]
        return found

    return value


def _selection_columns(*under: str) -> dict[str, Column]:
    """Of a selection that lies under these keys of the row, but for the video."""
    own = {
        **{"policy": "text", "num_frames": "whole", "num_candidates": "whole"},
        **{"frame_indices": "wholes", "pts_seconds": "reals", "scores": "reals"},
    }
    offered = {"mode": "text", "frame_indices": "wholes", "pts_seconds": "reals", "moved_seconds": "reals"}
    video = {
        **{"total_num_frames": "whole", "fps": "real", "duration": "real"},
        **{"width": "whole", "height": "whole", "codec": "text"},
    }
    return {
        **{name: Column(kind, _at(*under, name)) for name, kind in own.items()},
        **{f"candidate_{name}": Column(kind, _at(*under, "candidates", name)) for name, kind in offered.items()},
        **{name: Column(kind, _at(*under, "metadata", name)) for name, kind in video.items()},
        "notes": Column("texts", _at(*under, "notes")),
    }


_VIDEO = Column("text", lambda row: as_text(row["video"]))
SELECTION_COLUMNS = {"video": _VIDEO, **_selection_columns()}
PREDICTION_COLUMNS = {
    "video": _VIDEO,
    "label": Column("text", _at("label")),
    "probability": Column("real", _at("probability")),
    "top_labels": Column("texts", lambda row: [each["label"] for each in row["top"]]),
    "top_probabilities": Column("reals", lambda row: [each["probability"] for each in row["top"]]),
    "seconds": Column("real", _at("timing", "total")),
    **_selection_columns("selection"),
}


def write_parquet(path: Path, rows: Sequence[Row], columns: dict[str, Column]) -> None:
    """The rows as one file."""
    pa, pq = import_parquet()
    kinds = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64()}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()}
    schema = pa.schema({name: kinds[column.kind] for name, column in columns.items()})
    flat = [{name: column.value(row) for name, column in columns.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(flat, schema=schema), path)


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
    with locked(folder / _LOCK, "here"):
        yield


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Arrow's errors have no number.
        told = error.strerror or first_line(error)
        raise InvalidArgument(f"{folder}: cannot be written ({told}); make room, or give another") from error
