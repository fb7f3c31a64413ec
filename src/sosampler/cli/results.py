"""Rows of many selections on their way to a file, kept in a journal meanwhile, so that the work can be resumed."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.files import replacing

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
