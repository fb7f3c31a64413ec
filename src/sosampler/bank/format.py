"""The format of a bank on disk: names of files, columns, and one video as a row.

bank.json             settings that decide the bytes, classes, counts; no dates
items.jsonl           the videos as listed in the manifest; shard k holds items k * S up to (k + 1) * S
failed.jsonl          videos that could not be read, with the reason: the frames/00000.failed.jsonl joined
shown.jsonl           where it is known: which stored frames of a video show its class, and of which sources it is made
frames/00000.arrow    Arrow IPC file: one record batch of one row for each video that could be read
teachers/NAME/        teacher.json, and 00000.arrow with a row for each row of frames/00000.arrow
features/NAME/        features.json, and shards like those of teachers
audio/log-mel/        audio.json, and shards with the sound around each frame, where the bank was prepared with it
*/00000.sha256        checksum of the shard beside it, as `sha256sum --check` reads it
videos_root.txt       where relative paths of the manifest start on the machine that decoded; local, need not be copied

With one record batch per video, a shard can be written while its videos arrive, and one video can be read alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices, Seconds
from sosampler._util.files import load_json, parse_line, write_text
from sosampler._util.validation import check_int
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.video.candidates import positions_of

KIND, VERSION = "sosampler bank", 1
VIDEOS_PER_SHARD = 32
PREPARE_AGAIN = "run `sosampler prepare` again with the same arguments"
"""How a missing shard is written again."""
COUNTS = ("videos", "failed", "frames")
PRECISIONS = ("float16", "float32")
"""In which features may be stored."""
# Shards that are open at a time; each takes a file descriptor.
_OPEN_SHARDS = 64

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class StoredVideo:
    """The frames of one video as a bank stores them."""

    jpegs: list[bytes]  # T images, all of one size
    frame_indices: Indices  # [T] indices in the video, ascending
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
        """[T] in 0..1: the share of the video that has passed when each frame is shown."""
        return positions_of(self.pts_seconds, self.start_seconds, self.duration)


@dataclass(frozen=True)
class Shown:
    """What is known about the contents of a video, as of reels and streams, which are made of known parts."""

    shows_class: tuple[bool, ...] | None = None  # [T] of the stored frames
    sources: tuple[str, ...] | None = None  # pictures or videos that it is made of, each once


@dataclass(frozen=True)
class Failure:
    """Why a video is missing from the bank."""

    reason: str


# ---- Arrow


def import_pyarrow() -> Any:
    """Return pyarrow, or raise an error that tells how to install it."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingDependency("a bank needs pyarrow; install it with: pip install 'sosampler[train]'") from error
    return pyarrow


@cache
def frames_schema() -> Any:
    pa = import_pyarrow()
    return pa.schema(
        {
            "id": pa.string(),
            "labels": pa.list_(pa.int32()),
            "split": pa.string(),
            "group": pa.string(),
            "pts_seconds": pa.list_(pa.float64()),
            "frame_indices": pa.list_(pa.int64()),
            "jpegs": pa.list_(pa.binary()),
            "width": pa.int32(),
            "height": pa.int32(),
            "start_seconds": pa.float64(),
            "duration": pa.float64(),
            "fps": pa.float64(),
            "total_num_frames": pa.int64(),
            "notes": pa.list_(pa.string()),
        }
    )


def frames_batch(item: Item, video: StoredVideo) -> Any:
    pa, schema = import_pyarrow(), frames_schema()
    row = {
        **{name: getattr(item, name) for name in ("id", "split", "group")},
        **{name: getattr(video, name) for name in schema.names if hasattr(video, name)},
        "labels": list(item.labels),
        "pts_seconds": np.asarray(video.pts_seconds, dtype=np.float64),
        "frame_indices": np.asarray(video.frame_indices, dtype=np.int64),
        "notes": list(video.notes),
    }
    return pa.record_batch([pa.array([row[field.name]], type=field.type) for field in schema], schema=schema)


def stored_video(batch: Any) -> StoredVideo:
    """Return the video of a row, its JPEGs copied out of the file."""
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
    """Return the columns of a teacher: probabilities in half precision, and features in `features` precision if any."""
    pa = import_pyarrow()
    columns = {"id": pa.string(), "frame_probs": pa.list_(pa.list_(pa.float16(), num_classes))}
    if features is not None and feature_width is not None:
        columns["features"] = features_schema(features, feature_width).field("features").type
    return pa.schema(columns)


def features_schema(precision: str, width: int) -> Any:
    pa = import_pyarrow()
    number = pa.float32() if precision == "float32" else pa.float16()
    return pa.schema({"id": pa.string(), "features": pa.list_(pa.list_(number, width))})


def audio_schema(bands: int, columns: int) -> Any:
    """Return the columns of sound: a spectrum for each frame, row after row, and whether the file has any sound."""
    pa = import_pyarrow()
    spectra = pa.list_(pa.list_(pa.float16(), bands * columns))
    return pa.schema({"id": pa.string(), "spectra": spectra, "has_audio": pa.bool_(), "notes": pa.list_(pa.string())})


def audio_batch(schema: Any, item_id: str, spectra: np.ndarray, has_audio: bool, notes: Sequence[str]) -> Any:
    """Return the row of one video: spectra [T, bands, columns]."""
    pa = import_pyarrow()
    table = tables_batch(
        pa.schema([schema.field("id"), schema.field("spectra")]), item_id, spectra.reshape(len(spectra), -1)
    )
    others = [pa.array([has_audio]), pa.array([list(notes)], type=schema.field("notes").type)]
    return pa.record_batch([*table.columns, *others], schema=schema)


def tables_batch(schema: Any, item_id: str, *tables: np.ndarray) -> Any:
    """Return the row of one video: tables [T, any width], in the order of the schema's columns."""
    pa = import_pyarrow()
    columns = [pa.array([item_id])]
    for table in tables:
        rows = pa.FixedSizeListArray.from_arrays(pa.array(table.reshape(-1)), table.shape[1])
        columns.append(pa.ListArray.from_arrays(pa.array([0, len(table)], type=pa.int32()), rows))
    return pa.record_batch(columns, schema=schema)


def matrix_of(batch: Any, column: str) -> np.ndarray:
    """Return [T, C] of a row, without a copy."""
    rows = batch.column(column).values
    return rows.values.to_numpy().reshape(-1, rows.type.list_size)  # type: ignore[no-any-return]


def open_shard(path: Path, again: str = PREPARE_AGAIN) -> Any:
    """Open a memory-mapped shard; messages say `again` how it is written again."""
    pa = import_pyarrow()
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError as error:
        raise SosamplerError(f"{path}: this part of the bank is missing; {again}") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise SosamplerError(f"{path}: is damaged ({error}); delete it and {again}") from error


def read_row(reader: Any, row: int, path: Path, again: str = PREPARE_AGAIN) -> Any:
    """Return the record batch of one video. Its offsets are checked, so damaged bytes cannot lead out of the file."""
    pa = import_pyarrow()
    try:
        batch = reader.get_batch(row)
        batch.validate(full=True)
        if batch.num_rows != 1:
            raise pa.ArrowInvalid(f"it holds {batch.num_rows} videos")
    except (OSError, pa.ArrowException) as error:
        raise SosamplerError(f"{path}: is damaged in row {row} ({error}); delete it and {again}") from error
    return batch


def read_shard(path: Path) -> Iterator[tuple[str, StoredVideo]]:
    reader = open_shard(path)
    for row in range(reader.num_record_batches):
        batch = read_row(reader, row, path)
        yield batch.column("id")[0].as_py(), stored_video(batch)


@dataclass(frozen=True)
class OutputKind:
    """What is stored for each frame: a teacher's probabilities, features of a network, or the sound around it."""

    name: str  # in messages
    folder: str  # in the bank
    header: str  # the file that describes it
    kind: str  # in that file
    keys: tuple[str, ...]  # that the file must have
    again: str  # how messages say that a shard is written again


_TEACHER_KEYS = ("name", "fingerprint", "num_classes", "pooling", "views", "precision", "features")
TEACHER = OutputKind("teacher", "teachers", "teacher.json", "sosampler teacher", _TEACHER_KEYS, PREPARE_AGAIN)
_FEATURES_KEYS = ("name", "network", "network_name", "fingerprint", "width", "precision", "gmacs")
_ADD_AGAIN = "give the same network to so.add_features again"
FEATURES = OutputKind("features", "features", "features.json", "sosampler features", _FEATURES_KEYS, _ADD_AGAIN)
_AUDIO_KEYS = ("name", "fingerprint", "sample_rate", "seconds", "bands", "columns")
_AUDIO_AGAIN = "run the same `sosampler prepare` with --audio"
AUDIO = OutputKind("audio", "audio", "audio.json", "sosampler audio", _AUDIO_KEYS, _AUDIO_AGAIN)


@dataclass(frozen=True)
class OutputFolder:
    """The folder of one network's outputs, or of sound: a header, and a shard for each shard of frames."""

    path: Path
    kind: OutputKind

    @property
    def header(self) -> Path:
        return self.path / self.kind.header

    def shard(self, number: int) -> Path:
        return self.path / f"{number:05d}.arrow"

    def missing(self, num_shards: int) -> list[int]:
        """Return the shards that are not there yet."""
        return [number for number in range(num_shards) if not self.shard(number).exists()]


class BankFolder:
    """The files of a bank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bank_json = path / "bank.json"
        self.items_jsonl = path / "items.jsonl"
        self.failed_jsonl = path / "failed.jsonl"
        self.shown_jsonl = path / "shown.jsonl"
        self.videos_root = path / "videos_root.txt"
        self.lock = path / ".lock"
        self.frames_folder = path / "frames"

    def frames(self, shard: int) -> Path:
        return self.frames_folder / f"{shard:05d}.arrow"

    def failed(self, shard: int) -> Path:
        return self.frames_folder / f"{shard:05d}.failed.jsonl"

    def output(self, kind: OutputKind, name: str) -> OutputFolder:
        return OutputFolder(self.path / kind.folder / name, kind)

    def teacher(self, name: str) -> OutputFolder:
        return self.output(TEACHER, name)

    def features(self, name: str) -> OutputFolder:
        return self.output(FEATURES, name)

    def output_names(self, kind: OutputKind) -> list[str]:
        return sorted(file.parent.name for file in self.path.glob(f"{kind.folder}/*/{kind.header}"))

    def outputs(self) -> list[OutputFolder]:
        return [self.output(kind, name) for kind in (TEACHER, FEATURES, AUDIO) for name in self.output_names(kind)]


# ---- bank.json


@dataclass(frozen=True)
class BankHeader:
    """The contents of bank.json."""

    source: str  # "videos" or "arrays"
    settings: dict[str, Any]  # all that decides the bytes besides the videos
    classes: tuple[str, ...]
    multi_label: bool
    num_items: int
    videos_per_shard: int
    complete: bool = False
    counts: dict[str, int] | None = None  # of `COUNTS`, once complete
    exclusive: bool = None  # type: ignore[assignment]  # classes exclude each other; None: unless multi_label

    def __post_init__(self) -> None:
        if self.exclusive is None:
            object.__setattr__(self, "exclusive", not self.multi_label)

    @property
    def num_shards(self) -> int:
        return -(-self.num_items // self.videos_per_shard)

    def shard_range(self, shard: int) -> range:
        """Return the indices of a shard's items."""
        first = shard * self.videos_per_shard
        return range(first, min(first + self.videos_per_shard, self.num_items))

    def shard_items(self, items: Sequence[Item], shard: int) -> Sequence[Item]:
        return items[shard * self.videos_per_shard : (shard + 1) * self.videos_per_shard]

    def write(self, folder: BankFolder) -> None:
        header = {"kind": KIND, "version": VERSION, **asdict(self), "num_shards": self.num_shards}
        if self.exclusive != self.multi_label:
            del header["exclusive"]  # the default, which headers of earlier versions have
        write_text(folder.bank_json, json.dumps(header, indent=1, ensure_ascii=False) + "\n")


def read_header(folder: BankFolder) -> BankHeader:
    """Read bank.json, or raise an error that tells why this is no bank."""
    if not folder.bank_json.is_file():
        raise InvalidArgument(f"{folder.path}: holds no bank (no bank.json); give a folder that `prepare` wrote")
    values = read_json(folder.bank_json, KIND, "prepare the bank again")
    try:
        complete, counts = bool(values["complete"]), values["counts"]
        return BankHeader(
            source=str(values["source"]),
            settings=dict(values["settings"]),
            classes=tuple(values["classes"]),
            multi_label=bool(values["multi_label"]),
            num_items=check_int("num_items", values["num_items"]),
            videos_per_shard=check_int("videos_per_shard", values["videos_per_shard"]),
            complete=complete,
            counts={name: check_int(name, counts[name], at_least=0) for name in COUNTS} if complete else None,
            exclusive=bool(values.get("exclusive", not values["multi_label"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SosamplerError(f"{folder.bank_json}: lacks or misspells {error}; prepare the bank again") from error


def read_json(path: Path, kind: str, remedy: str) -> dict[str, Any]:
    try:
        values = load_json(path)
    except OSError as error:
        raise SosamplerError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise SosamplerError(f"{path}: is not JSON ({error}); {remedy}") from error
    if not isinstance(values, dict) or values.get("kind") != kind:
        raise SosamplerError(f"{path}: is not the header of a {kind}; {remedy}")
    if values.get("version") != VERSION:
        raise SosamplerError(
            f"{path}: has version {values.get('version')}, this sosampler reads version {VERSION}; "
            f"{remedy}, or install the sosampler that wrote it"
        )
    return values


# ---- items.jsonl and failures


def items_text(items: Iterable[Item]) -> Iterator[str]:
    return (json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)


def read_items(folder: BankFolder) -> list[Item]:
    return _read_lines(
        folder.items_jsonl,
        lambda values: Item(**{**values, "labels": tuple(map(int, values["labels"])), "id": str(values["id"])}),
    )


def shown_text(shown: Mapping[str, Shown]) -> Iterator[str]:
    # ASCII, because names of files may hold lone surrogates, which UTF-8 cannot encode.
    return (json.dumps({"id": name, **asdict(each)}) + "\n" for name, each in shown.items())


def read_shown(folder: BankFolder) -> dict[str, Shown]:
    """Read shown.jsonl, by the ids of the videos; empty if there is no such file."""

    def parse(values: dict[str, Any]) -> tuple[str, Shown]:
        flags, sources = values.get("shows_class"), values.get("sources")
        return str(values["id"]), Shown(
            None if flags is None else tuple(map(bool, flags)), None if sources is None else tuple(map(str, sources))
        )

    return dict(_read_lines(folder.shown_jsonl, parse)) if folder.shown_jsonl.exists() else {}


def read_failures(path: Path) -> list[dict[str, str]]:
    """Read a failed.jsonl; empty if there is no such file."""
    if not path.exists():
        return []
    return _read_lines(path, lambda values: {name: str(values[name]) for name in ("id", "path", "error")})


def failed_ids(path: Path) -> set[str]:
    return {failure["id"] for failure in read_failures(path)}


def _read_lines(path: Path, parse: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Return `parse` of every line, or raise an error that names the damaged one."""
    parsed, line = [], 0
    try:
        with open(path, encoding="utf-8", newline="\n") as lines:
            for line, text in enumerate(lines, start=1):  # noqa: B007
                parsed.append(parse(parse_line(text)))
    except OSError as error:
        raise SosamplerError(f"{path}: cannot be read ({error.strerror}); copy or prepare the bank again") from error
    except (ValueError, TypeError, KeyError) as error:
        where = f"{path}, line {max(line, 1)}"
        raise SosamplerError(f"{where}: is damaged ({error}); copy or prepare the bank again") from error
    return parsed


def first_difference(names: tuple[str, ...], others: tuple[str, ...]) -> int | None:
    """Return the first class that has different names in two lists of one length; the numbers from 0 are no names.

    >>> first_difference(("run", "jump"), ("run", "fly")), first_difference(("run", "jump"), ("0", "1"))
    (1, None)
    """
    numbers = tuple(map(str, range(len(names))))
    if numbers in (names, others):
        return None
    return next((index for index, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]), None)


@dataclass(frozen=True, slots=True)
class BankRow:
    """Where a video is stored."""

    item: Item
    shard: int
    row: int


class OpenShards:
    """Memory-mapped shards, of which those used last stay open. Shared by threads, opened anew in other processes."""

    def __init__(self, path_of: Callable[[int], Path], again: str = PREPARE_AGAIN) -> None:
        self._path_of, self._again = path_of, again
        self._open = lru_cache(_OPEN_SHARDS)(open_shard)
        self._lock = threading.Lock()

    def batch(self, row: BankRow) -> Any:
        path = self._path_of(row.shard)
        with self._lock:
            reader = self._open(path, self._again)
            if row.row >= reader.num_record_batches:
                raise SosamplerError(
                    f"{path}: has {reader.num_record_batches} videos, number {row.row} is missing; "
                    "`sosampler bank verify` reports what is wrong"
                )
            batch = read_row(reader, row.row, path, self._again)
        stored_id = batch.column("id")[0].as_py()
        if stored_id != row.item.id:
            problem = f"row {row.row} is {stored_id!r} where the bank has {row.item.id!r}"
            raise SosamplerError(f"{path}: {problem}; delete it and {self._again}")
        return batch


def rows_of(folder: BankFolder, header: BankHeader) -> Iterator[BankRow]:
    """Yield the videos that could be read; of a bank that is not finished those of its finished shards."""
    items = read_items(folder)
    if len(items) != header.num_items:
        raise SosamplerError(
            f"{folder.items_jsonl}: lists {len(items)} videos where {folder.bank_json.name} counts {header.num_items}; "
            "copy the bank again"
        )
    if header.complete and not folder.failed_jsonl.exists():
        raise SosamplerError(
            f"{folder.failed_jsonl}: is missing; copy the bank again, or run the same `sosampler prepare` again"
        )
    failed = failed_ids(folder.failed_jsonl) if header.complete else set()
    for shard in range(header.num_shards):
        if not header.complete:
            if not folder.frames(shard).exists():
                continue
            failed = failed_ids(folder.failed(shard))
        readable = (item for item in header.shard_items(items, shard) if item.id not in failed)
        for row, item in enumerate(readable):
            yield BankRow(item, shard, row)
