"""How a bank lies on disk: names of files, columns, and one video as a row.

bank.json             settings that decide the bytes, classes, counts; no dates
items.jsonl           the videos as the manifest had them; shard k holds items k * S up to (k + 1) * S
failed.jsonl          videos that could not be read, with the reason: the frames/00000.failed.jsonl joined
frames/00000.arrow    Arrow IPC file: one record batch of one row for each video that could be read
teachers/NAME/        teacher.json, and 00000.arrow with a row for each row of frames/00000.arrow
features/NAME/        features.json, and shards as those of teachers
*/00000.sha256        checksum of the shard beside it, as `sha256sum --check` reads it
videos_root.txt       where relative paths of the manifest start on the machine that decoded; local, need not travel

A record batch for each video lets a shard be written while its videos arrive, and one video be read by itself.
"""

from __future__ import annotations

import json
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sosampler._util.files import replacing
from sosampler._util.validation import whole_number
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.video.candidates import positions_of
from sosampler.video.timeline import Indices, Seconds

KIND, VERSION = "sosampler bank", 1
TEACHER_KIND, FEATURES_KIND = "sosampler teacher", "sosampler features"
VIDEOS_PER_SHARD = 32
PREPARE_AGAIN = "run `sosampler prepare` again with the same arguments"
"""What makes a missing shard anew."""
ADD_AGAIN = "give the same network to so.add_features again"
"""The same for features."""
AGAIN = f"delete it and {PREPARE_AGAIN}"
"""What mends a damaged shard."""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class StoredVideo:
    """The frames of one video as a bank keeps them."""

    jpegs: list[bytes]  # T pictures, all of one size
    frame_indices: Indices  # [T] true frame numbers, ascending
    pts_seconds: Seconds  # [T]
    width: int  # pixels of the stored frames
    height: int
    start_seconds: float  # where the video, or the part of it that the manifest names, begins
    duration: float  # seconds of the video or of that part
    fps: float
    total_num_frames: int  # of the whole video
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.jpegs)

    @property
    def positions(self) -> NDArray[np.float32]:
        """[T] in 0..1: the share of the video that is over when each frame is shown."""
        return positions_of(self.pts_seconds, self.start_seconds, self.duration)


@dataclass(frozen=True)
class Failure:
    """Why a video is missing from the bank."""

    reason: str


# ---- Arrow


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependency("a bank needs pyarrow; install it with: pip install 'sosampler[train]'") from error
    return pyarrow


@cache
def frames_schema() -> Any:
    pa = import_pyarrow()
    text, whole, real = pa.string(), pa.int32(), pa.float64()
    return pa.schema(
        {
            "id": text,
            "labels": pa.list_(whole),
            "split": text,
            "group": text,
            "pts_seconds": pa.list_(real),
            "frame_indices": pa.list_(pa.int64()),
            "jpegs": pa.list_(pa.binary()),
            "width": whole,
            "height": whole,
            "start_seconds": real,
            "duration": real,
            "fps": real,
            "total_num_frames": pa.int64(),
            "notes": pa.list_(text),
        }
    )


def frames_batch(item: Item, video: StoredVideo) -> Any:
    """The row of one video."""
    pa = import_pyarrow()
    row = {
        "id": item.id,
        "labels": list(item.labels),
        "split": item.split,
        "group": item.group,
        "pts_seconds": np.asarray(video.pts_seconds, dtype=np.float64),
        "frame_indices": np.asarray(video.frame_indices, dtype=np.int64),
        "jpegs": video.jpegs,
        "width": video.width,
        "height": video.height,
        "start_seconds": video.start_seconds,
        "duration": video.duration,
        "fps": video.fps,
        "total_num_frames": video.total_num_frames,
        "notes": list(video.notes),
    }
    schema = frames_schema()
    return pa.record_batch([pa.array([row[field.name]], type=field.type) for field in schema], schema=schema)


def stored_video(batch: Any) -> StoredVideo:
    """The video of a row, its JPEGs copied out of the file."""
    return StoredVideo(
        jpegs=batch.column("jpegs")[0].as_py(),
        frame_indices=batch.column("frame_indices").values.to_numpy(),
        pts_seconds=batch.column("pts_seconds").values.to_numpy(),
        notes=tuple(batch.column("notes")[0].as_py()),
        **{
            name: batch.column(name)[0].as_py()
            for name in ("width", "height", "start_seconds", "duration", "fps", "total_num_frames")
        },
    )


def teacher_schema(num_classes: int, features: str | None, feature_width: int | None) -> Any:
    """Columns of a teacher: probabilities in half precision, features in `features` precision if it has them."""
    pa = import_pyarrow()
    columns = {"id": pa.string(), "frame_probs": pa.list_(pa.list_(pa.float16(), num_classes))}
    if features is not None and feature_width is not None:
        columns["features"] = _table_type(features, feature_width)
    return pa.schema(columns)


def features_schema(precision: str, width: int) -> Any:
    pa = import_pyarrow()
    return pa.schema({"id": pa.string(), "features": _table_type(precision, width)})


def _table_type(precision: str, width: int) -> Any:
    pa = import_pyarrow()
    return pa.list_(pa.list_(pa.float32() if precision == "float32" else pa.float16(), width))


def teacher_batch(schema: Any, item_id: str, frame_probs: np.ndarray, features: np.ndarray | None) -> Any:
    """The row of one video: frame_probs [T, C] and features [T, D] or None."""
    return tables_batch(schema, item_id, *(table for table in (frame_probs, features) if table is not None))


def tables_batch(schema: Any, item_id: str, *tables: np.ndarray) -> Any:
    """The row of one video: tables [T, any width], in the order of the schema's columns."""
    pa = import_pyarrow()
    columns = [pa.array([item_id])]
    for table in tables:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(table.reshape(-1)), table.shape[1])
        columns.append(pa.ListArray.from_arrays(pa.array([0, len(table)], type=pa.int32()), rows))
    return pa.record_batch(columns, schema=schema)


def matrix_of(batch: Any, column: str) -> np.ndarray:
    """[T, C] of a row, without a copy."""
    rows = batch.column(column).values
    return rows.values.to_numpy().reshape(-1, rows.type.list_size)  # type: ignore[no-any-return]


def open_shard(path: Path, again: str = PREPARE_AGAIN) -> Any:
    """A reader of a memory-mapped shard; `num_record_batches` videos, `read_row` for each.

    `again` is for messages: what makes the shard anew.
    """
    pa = import_pyarrow()
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError as error:
        raise SosamplerError(f"{path}: this part of the bank is missing; {again}") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise SosamplerError(f"{path}: is damaged ({error}); delete it and {again}") from error


def read_row(reader: Any, row: int, path: Path, again: str = PREPARE_AGAIN) -> Any:
    """The record batch of one video. Its offsets are checked, so that damaged bytes cannot lead out of the file."""
    pa = import_pyarrow()
    try:
        batch = reader.get_batch(row)
        batch.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise SosamplerError(f"{path}: is damaged in row {row} ({error}); delete it and {again}") from error
    if batch.num_rows != 1:
        told = f"it holds {batch.num_rows} videos"
        raise SosamplerError(f"{path}: is damaged in row {row} ({told}); delete it and {again}")
    return batch


def read_shard(path: Path) -> Iterator[tuple[str, StoredVideo]]:
    reader = open_shard(path)
    for row in range(reader.num_record_batches):
        batch = read_row(reader, row, path)
        yield batch.column("id")[0].as_py(), stored_video(batch)


# ---- names


@dataclass(frozen=True)
class AnswersFolder:
    """Where lies what one network said about the frames: a head, and a shard for each shard of frames."""

    path: Path
    head: Path
    again: str  # what makes its shards anew

    def shard(self, number: int) -> Path:
        return self.path / f"{number:05d}.arrow"

    def missing(self, num_shards: int) -> list[int]:
        return [number for number in range(num_shards) if not self.shard(number).exists()]


@dataclass(frozen=True)
class BankFolder:
    """Where everything lies."""

    path: Path

    @property
    def bank_json(self) -> Path:
        return self.path / "bank.json"

    @property
    def items_jsonl(self) -> Path:
        return self.path / "items.jsonl"

    @property
    def failed_jsonl(self) -> Path:
        return self.path / "failed.jsonl"

    @property
    def videos_root(self) -> Path:
        return self.path / "videos_root.txt"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def frames_folder(self) -> Path:
        return self.path / "frames"

    @property
    def teachers_folder(self) -> Path:
        return self.path / "teachers"

    def frames(self, shard: int) -> Path:
        return self.frames_folder / f"{shard:05d}.arrow"

    def failed(self, shard: int) -> Path:
        return self.frames_folder / f"{shard:05d}.failed.jsonl"

    def retried(self, shard: int) -> Path:
        """The shard with videos that failed at first, whole, before it takes the place of the other."""
        return self.frames_folder / f"{shard:05d}.retried.arrow"

    def teacher(self, name: str) -> Path:
        return self.teachers_folder / name

    def teacher_json(self, name: str) -> Path:
        return self.teacher(name) / "teacher.json"

    def teacher_shard(self, name: str, shard: int) -> Path:
        return self.teacher_answers(name).shard(shard)

    def teacher_answers(self, name: str) -> AnswersFolder:
        return AnswersFolder(self.teacher(name), self.teacher_json(name), PREPARE_AGAIN)

    def teacher_names(self) -> list[str]:
        return sorted(found.parent.name for found in self.teachers_folder.glob("*/teacher.json"))

    def feature_answers(self, name: str) -> AnswersFolder:
        path = self.path / "features" / name
        return AnswersFolder(path, path / "features.json", ADD_AGAIN)

    def feature_names(self) -> list[str]:
        return sorted(found.parent.name for found in self.path.glob("features/*/features.json"))

    def answers(self) -> list[AnswersFolder]:
        """Of all teachers and features."""
        teachers = [self.teacher_answers(name) for name in self.teacher_names()]
        return teachers + [self.feature_answers(name) for name in self.feature_names()]


# ---- bank.json


COUNTS = ("videos", "failed", "frames")


@dataclass(frozen=True)
class BankHead:
    """What bank.json says."""

    source: str  # "videos" or "arrays"
    settings: dict[str, Any]  # all that decides the bytes besides the videos
    classes: tuple[str, ...]
    multi_label: bool
    num_items: int
    videos_per_shard: int
    complete: bool = False
    counts: dict[str, int] | None = None  # of `COUNTS`, once complete

    @property
    def num_shards(self) -> int:
        return -(-self.num_items // self.videos_per_shard)

    def shard_range(self, shard: int) -> range:
        """Positions of a shard's items."""
        first = shard * self.videos_per_shard
        return range(first, min(first + self.videos_per_shard, self.num_items))

    def write(self, folder: BankFolder) -> None:
        head = {"kind": KIND, "version": VERSION, **asdict(self), "num_shards": self.num_shards}
        write_text(folder.bank_json, json.dumps(head, indent=1, ensure_ascii=False) + "\n")


def read_head(folder: BankFolder) -> BankHead:
    """bank.json, or say why this is no bank."""
    if not folder.bank_json.is_file():
        raise InvalidArgument(f"{folder.path}: holds no bank (no bank.json); give a folder that `prepare` wrote")
    told = read_json(folder.bank_json, KIND, "prepare the bank again")
    try:
        complete, counts = bool(told["complete"]), told["counts"]
        return BankHead(
            source=str(told["source"]),
            settings=dict(told["settings"]),
            classes=tuple(told["classes"]),
            multi_label=bool(told["multi_label"]),
            num_items=whole_number("num_items", told["num_items"]),
            videos_per_shard=whole_number("videos_per_shard", told["videos_per_shard"]),
            complete=complete,
            counts={name: whole_number(name, counts[name], at_least=0) for name in COUNTS} if complete else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SosamplerError(f"{folder.bank_json}: lacks or misspells {error}; prepare the bank again") from error


def read_json(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    """A head of the right kind and version."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SosamplerError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise SosamplerError(f"{path}: is not JSON ({error}); {remedy}") from error
    if not isinstance(told, dict) or told.get("kind") != kind:
        raise SosamplerError(f"{path}: is not the head of a {kind}; {remedy}")
    if told.get("version") != VERSION:
        raise SosamplerError(
            f"{path}: has version {told.get('version')}, this sosampler reads version {VERSION}; "
            f"{remedy}, or install the sosampler that wrote it"
        )
    return told


# ---- items.jsonl and failures


def items_text(items: Iterable[Item]) -> Iterator[str]:
    return (json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)


def read_items(folder: BankFolder) -> list[Item]:
    return _read_lines(folder.items_jsonl, _item_of)


def _item_of(told: dict[str, Any]) -> Item:
    return Item(**{**told, "labels": tuple(map(int, told["labels"])), "id": str(told["id"])})


def _failure_of(told: dict[str, Any]) -> dict[str, str]:
    return {name: str(told[name]) for name in ("id", "path", "error")}


def _read_lines(path: Path, read: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """What `read` makes of every line, or say which one is damaged."""
    found, line = [], 0
    try:
        with open(path, encoding="utf-8", newline="\n") as lines:
            for line, text in enumerate(lines, start=1):  # noqa: B007
                found.append(read(json.loads(text)))
    except OSError as error:
        raise SosamplerError(f"{path}: cannot be read ({error.strerror}); copy or prepare the bank again") from error
    except (ValueError, TypeError, KeyError) as error:
        raise SosamplerError(
            f"{path}, line {max(line, 1)}: is damaged ({error}); copy or prepare the bank again"
        ) from error
    return found


def failures_text(failures: Iterable[tuple[Item, Failure]]) -> str:
    rows = ({"id": item.id, "path": item.path, "error": failure.reason} for item, failure in failures)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_failures(path: Path) -> list[dict[str, str]]:
    """The lines of a failed.jsonl; none if there is no such file."""
    return _read_lines(path, _failure_of) if path.exists() else []


def write_text(path: Path, text: str | Iterable[str]) -> None:
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())  # a name must not outlive its contents when the power fails


# Shards kept open at a time; each takes a file descriptor.
_OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class BankRow:
    """Where a video is to be found."""

    item: Item
    shard: int
    row: int


class OpenShards:
    """Memory-mapped shards, the ones used last kept open. Shared between threads, opened anew in other processes.

    `again` is for messages: what makes a shard anew.
    """

    def __init__(self, path_of: Callable[[int], Path], again: str = PREPARE_AGAIN) -> None:
        self._path_of, self._again = path_of, again
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, row: BankRow) -> Any:
        """The record batch of a video."""
        path = self._path_of(row.shard)
        with self._lock:
            reader = self._open.pop(row.shard, None)
            if reader is None:
                reader = open_shard(path, self._again)
            self._open[row.shard] = reader
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            if row.row >= reader.num_record_batches:
                raise SosamplerError(
                    f"{path}: has {reader.num_record_batches} videos, number {row.row} is missing; "
                    "`sosampler bank verify` tells what is wrong"
                )
            batch = read_row(reader, row.row, path, self._again)
        told = batch.column("id")[0].as_py()
        if told != row.item.id:
            raise SosamplerError(
                f"{path}: row {row.row} is of {told!r} where the bank has {row.item.id!r}; delete it and {self._again}"
            )
        return batch


def rows_of(folder: BankFolder, head: BankHead) -> Iterator[BankRow]:
    """The videos that could be read; of a bank that is not finished those of its finished shards."""
    items = read_items(folder)
    if len(items) != head.num_items:
        raise SosamplerError(
            f"{folder.items_jsonl}: lists {len(items)} videos where {folder.bank_json.name} counts {head.num_items}; "
            "copy the bank again"
        )
    if head.complete and not folder.failed_jsonl.exists():
        raise SosamplerError(
            f"{folder.failed_jsonl}: is missing; copy the bank again, or give the same `sosampler prepare` again"
        )
    failed = {failure["id"] for failure in read_failures(folder.failed_jsonl)} if head.complete else set()
    for shard in range(head.num_shards):
        if not head.complete:
            if not folder.frames(shard).exists():
                continue
            failed = {failure["id"] for failure in read_failures(folder.failed(shard))}
        readable = (items[place] for place in head.shard_range(shard) if items[place].id not in failed)
        for row, item in enumerate(readable):
            yield BankRow(item, shard, row)


def checked_index(index: Any, length: int, path: Path) -> int:
    """A whole number inside the bank, or say what there is; numbers below 0 count from the end."""
    try:
        place = operator.index(index)
    except TypeError as error:
        raise InvalidArgument(
            f"{path}: {index!r} is not the number of a video; give a whole number from 0 to {length - 1}"
        ) from error
    if not -length <= place < length:
        raise IndexError(f"{path}: number {place} was asked for, the bank holds 0..{length - 1}")
    return place
