"""Rows of many selections on their way to a file, kept in a journal meanwhile, so that the work can be resumed."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
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
        self.done: set[str] = set()
        self.num_rows = 0
        keep = self._sound_length()
        try:
            self._file = open(self.path, "r+" if keep else "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise InvalidArgument(
                f"--out {out}: cannot be written ({error.strerror}); give a folder that can be"
            ) from error
        if keep:
            self._file.truncate(keep)
            self._file.seek(0, 2)
        else:
            self._file.write(self._header + "\n")
            self._file.flush()

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
                    self.done.add(json.loads(line)["video"])
                    self.num_rows += 1
                length += len(line)
        return length

    def add(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.num_rows += 1

    def rows(self) -> Iterator[dict[str, Any]]:
        with open(self.path, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def finish(self, failures: list[dict[str, str]]) -> None:
        """Turn the journal into the output file, and list what failed beside it."""
        self._file.close()
        with replacing(self.out) as temporary:
            _WRITERS[self.out.suffix.lower()](self.rows(), temporary)
        failed = self.out.with_name(self.out.name + ".failed.jsonl")
        if failures:
            with replacing(failed) as temporary:
                temporary.write_text("".join(json.dumps(failure) + "\n" for failure in failures), encoding="utf-8")
        else:
            failed.unlink(missing_ok=True)
        self.path.unlink()

    def close(self) -> None:
        self._file.close()


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """One selection as columns."""
    meta, offered = row["metadata"], row["candidates"]
    return {
        **{key: row[key] for key in ("video", "policy", "num_frames", "num_candidates")},
        **{key: row[key] for key in ("frame_indices", "pts_seconds", "scores")},
        "candidate_mode": offered["mode"],
        "candidate_frame_indices": offered["frame_indices"],
        "candidate_pts_seconds": offered["pts_seconds"],
        "candidate_moved_seconds": offered["moved_seconds"],
        **{key: meta[key] for key in ("total_num_frames", "fps", "duration", "width", "height", "codec")},
        "notes": row["notes"],
    }


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_csv(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter | None = None
        for row in map(flat, rows):
            if writer is None:
                writer = csv.DictWriter(file, fieldnames=list(row))
                writer.writeheader()
            # Lists become JSON inside their cell: readable by people, and by json.loads.
            cells = {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
            writer.writerow(cells)


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path, batch: int = 1000) -> None:
    pa = _import_pyarrow()
    whole, real, text = pa.int64(), pa.float64(), pa.string()
    schema = pa.schema(
        {
            **{"video": text, "policy": text, "num_frames": whole, "num_candidates": whole},
            **{"frame_indices": pa.list_(whole), "pts_seconds": pa.list_(real), "scores": pa.list_(real)},
            **{"candidate_mode": text, "candidate_frame_indices": pa.list_(whole)},
            **{"candidate_pts_seconds": pa.list_(real), "candidate_moved_seconds": pa.list_(real)},
            **{"total_num_frames": whole, "fps": real, "duration": real, "width": whole, "height": whole},
            **{"codec": text, "notes": pa.list_(text)},
        }
    )
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
