"""`Bank`: decoded candidate frames of many videos, and what classifiers said about them, read from disk.

Needs NumPy, Pillow and pyarrow, neither torch nor a video decoder. Files are memory-mapped: opening a bank reads the
list of its videos and no frame.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler.checks import one_of
from sosampler.data.bank_format import (
    TEACHER_KIND,
    BankFolder,
    BankHead,
    StoredVideo,
    matrix_of,
    open_shard,
    positions_of,
    read_failures,
    read_head,
    read_items,
    read_json,
    stored_video,
)
from sosampler.data.manifest import Item
from sosampler.data.positions import stratified_positions, uniform_positions
from sosampler.data.splits import SPLITS
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.video.reader import Frames
from sosampler.video.sizes import Size, check_size, target_size
from sosampler.video.timeline import Indices, Seconds

# Shards kept open at a time; each takes a file descriptor.
_OPEN_SHARDS = 64


class _Shards:
    """Memory-mapped shards, the ones used last kept open. Shared between threads, opened anew in other processes."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def row(self, shard: int, row: int) -> Any:
        with self._lock:
            reader = self._open.pop(shard, None)
            if reader is None:
                reader = open_shard(self._path_of(shard))
            self._open[shard] = reader
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            if row >= reader.num_record_batches:
                raise SosamplerError(
                    f"{self._path_of(shard)}: has {reader.num_record_batches} videos, number {row} is missing; "
                    "`sosampler bank verify` tells what is wrong"
                )
            return reader.get_batch(row)


@dataclass(frozen=True, slots=True)
class _Row:
    """Where a video is to be found."""

    item: Item
    shard: int
    row: int


class BankItem:
    """One video of a bank. Its numbers and pictures are read when asked for."""

    def __init__(self, item: Item, batch: Any) -> None:
        self.id, self.labels, self.split, self.group = item.id, item.labels, item.split or "train", item.group_key
        self._batch = batch

    def __len__(self) -> int:
        """How many frames are stored."""
        return len(self.frame_indices)

    def __repr__(self) -> str:
        return f"BankItem({self.id!r}, labels={list(self.labels)}, {len(self)} frames of {self.width}x{self.height})"

    def _one(self, column: str) -> Any:
        return self._batch.column(column)[0].as_py()

    @cached_property
    def frame_indices(self) -> Indices:
        """[T] true frame numbers."""
        found: Indices = self._batch.column("frame_indices").values.to_numpy()
        return found

    @cached_property
    def pts_seconds(self) -> Seconds:
        """[T]"""
        found: Seconds = self._batch.column("pts_seconds").values.to_numpy()
        return found

    @property
    def positions(self) -> NDArray[np.float32]:
        """[T] in 0..1: the share of the video that is over when each frame is shown."""
        return positions_of(self.pts_seconds, self._one("start_seconds"), self.duration)

    @property
    def duration(self) -> float:
        """Seconds of the video, or of the part of it that the manifest names."""
        return float(self._one("duration"))

    @property
    def fps(self) -> float:
        return float(self._one("fps"))

    @property
    def total_num_frames(self) -> int:
        return int(self._one("total_num_frames"))

    @property
    def width(self) -> int:
        return int(self._one("width"))

    @property
    def height(self) -> int:
        return int(self._one("height"))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._one("notes"))

    @property
    def jpegs(self) -> list[bytes]:
        """The stored pictures as they are."""
        return self.stored().jpegs

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return int(self._batch.nbytes)

    def stored(self) -> StoredVideo:
        """All of the row, copied out of the file."""
        return stored_video(self._batch)

    def uniform(self, count: int) -> Indices:
        """Positions of `count` frames spread evenly, for testing."""
        return uniform_positions(len(self), count)

    def stratified(self, count: int, rng: np.random.Generator) -> Indices:
        """Positions of one random frame of each of `count` segments, for training."""
        return stratified_positions(len(self), count, rng)

    def frames(self, positions: ArrayLike | None = None, size: Size = None, *, fast: bool = False) -> Frames:
        """Pictures as uint8 [T, H, W, 3].

        Args:
            positions: which of the stored frames, 0 .. len - 1, repeats allowed; None for all.
            size: None as stored, the short side, or (height, width); resized without aliasing.
            fast: where `size` is half the stored one or less, let the JPEG decoder do most of the shrinking; the
                pixels then differ a little from those of the slow way.
        """
        wanted = np.arange(len(self)) if positions is None else np.asarray(positions, dtype=np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self)):
            raise InvalidArgument(
                f"positions={np.asarray(positions).tolist()} of {self.id!r} are not allowed; "
                f"give numbers from 0 to {len(self) - 1}, its stored frames"
            )
        width, height = target_size(self.width, self.height, check_size(size))
        stored = self._batch.column("jpegs").values
        frames = np.empty((len(wanted), height, width, 3), dtype=np.uint8)
        for row, position in enumerate(wanted.tolist()):
            frames[row] = _picture(stored[position].as_py(), width, height, fast)
        return frames


def decode_jpeg(data: bytes) -> Frames:
    """uint8 [H, W, 3]"""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def _picture(data: bytes, width: int, height: int, fast: bool) -> Frames:
    with Image.open(io.BytesIO(data)) as image:
        if fast:
            image.draft("RGB", (width, height))
        picture = image.convert("RGB")
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(picture)


class Bank(Sequence[BankItem]):
    """A bank on disk, or one split of it; a sequence of `BankItem`. Pickles as its path, so that workers reopen it.

    Args:
        path: the folder that `prepare` wrote.
        split: "train", "dev" or "test" for that split alone.
        partial: also open a bank that is not finished, with the videos of its finished shards.
    """

    def __init__(self, path: str | os.PathLike[str], *, split: str | None = None, partial: bool = False) -> None:
        self.path = Path(path)
        self._split = None if split is None else one_of("split", split, SPLITS)
        self._partial = partial
        self.folder = BankFolder(self.path)
        self.head: BankHead = read_head(self.folder)
        if not self.head.complete and not partial:
            raise SosamplerError(
                f"{self.path}: this bank is not finished; run `sosampler prepare` again with the same arguments, "
                "or open it with partial=True"
            )
        rows = list(_rows(self.folder, self.head))
        self._rows = rows if split is None else [row for row in rows if (row.item.split or "train") == split]
        self._shards = _Shards(self.folder.frames)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, partial: bool = False) -> Bank:
        return cls(path, partial=partial)

    def split(self, name: str) -> Bank:
        """The videos of one split; without splits everything is train."""
        return Bank(self.path, split=name, partial=self._partial)

    def __reduce__(self) -> Any:
        return _reopen_bank, (self.path, self._split, self._partial)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[_checked_index(index, len(self), self.path)]
        batch = self._shards.row(row.shard, row.row)
        _check_id(batch, row, self.folder.frames(row.shard))
        return BankItem(row.item, batch)

    def __repr__(self) -> str:
        teachers = len(self.folder.teacher_names())
        part = f" of {self._split}" if self._split else ""
        return f"Bank({str(self.path)!r}, {len(self)} videos{part}, {len(self.classes)} classes, {teachers} teachers)"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.head.classes

    @property
    def multi_label(self) -> bool:
        return self.head.multi_label

    @property
    def settings(self) -> dict[str, Any]:
        return self.head.settings

    @property
    def items(self) -> list[Item]:
        """The videos as the manifest had them, in the bank's order; reads no frames."""
        return [row.item for row in self._rows]

    @property
    def ids(self) -> list[str]:
        return [row.item.id for row in self._rows]

    @property
    def failures(self) -> list[dict[str, str]]:
        """Videos that could not be read: id, path and error of each."""
        return read_failures(self.folder.failed_jsonl)

    @property
    def teachers(self) -> dict[str, dict[str, Any]]:
        """What each teacher's teacher.json says, by its name."""
        return {name: read_teacher(self.folder, name) for name in self.folder.teacher_names()}

    def teacher(self, classifier: Any = None, *, views: int | None = None) -> Teacher:
        """What a classifier said about each frame.

        Args:
            classifier: the classifier, its fingerprint, or the name of a teacher; None where the bank has only one.
            views: tells teachers of one classifier with different numbers of views apart.
        """
        known = self.teachers
        name = _teacher_name(classifier, views, known, self.path)
        missing = [
            shard
            for shard in range(self.head.num_shards)
            if not self.folder.teacher_shard(name, shard).exists() and not self._partial
        ]
        if missing:
            raise SosamplerError(
                f"{self.folder.teacher(name)}: {len(missing)} of {self.head.num_shards} parts of this teacher are "
                "missing; run `sosampler prepare` again with the same classifier"
            )
        return Teacher(self, name)


def _reopen_bank(path: Path, split: str | None, partial: bool) -> Bank:
    return Bank(path, split=split, partial=partial)


def _rows(folder: BankFolder, head: BankHead) -> Iterator[_Row]:
    items = read_items(folder)
    if len(items) != head.num_items:
        raise SosamplerError(
            f"{folder.items_jsonl}: lists {len(items)} videos where {folder.bank_json.name} counts {head.num_items}; "
            "copy the bank again"
        )
    failed = {failure["id"] for failure in read_failures(folder.failed_jsonl)} if head.complete else set()
    for shard in range(head.num_shards):
        if not head.complete:
            if not folder.frames(shard).exists():
                continue
            failed = {failure["id"] for failure in read_failures(folder.failed(shard))}
        readable = (items[place] for place in head.shard_range(shard) if items[place].id not in failed)
        for row, item in enumerate(readable):
            yield _Row(item, shard, row)


def _checked_index(index: Any, length: int, path: Path) -> int:
    place = int(index)
    if not -length <= place < length:
        raise IndexError(f"{path}: number {place} was asked for, the bank holds 0..{length - 1}")
    return place


def _check_id(batch: Any, row: _Row, path: Path) -> None:
    told = batch.column("id")[0].as_py()
    if told != row.item.id:
        raise SosamplerError(
            f"{path}: row {row.row} is of {told!r} where the bank has {row.item.id!r}; "
            "delete this file and run `sosampler prepare` again"
        )


# ---- teachers


@dataclass(frozen=True, eq=False)
class TeacherItem:
    """What a classifier said about the frames of one video."""

    frame_probs: np.ndarray  # [T, C] float16, each frame as a clip of one
    features: np.ndarray | None  # [T, D]; pooled classifiers only: `classifier.pool` of any of them is their clip


class Teacher(Sequence[TeacherItem]):
    """One classifier's answers, in the order of the bank's videos."""

    def __init__(self, bank: Bank, name: str) -> None:
        self.bank, self.name = bank, name
        folder = bank.folder
        self.about = read_teacher(folder, name)
        self._shards = _Shards(lambda shard: folder.teacher_shard(name, shard))

    def __reduce__(self) -> Any:
        return Teacher, (self.bank, self.name)

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, index: Any) -> Any:
        row = self.bank._rows[_checked_index(index, len(self), self.bank.path)]
        batch = self._shards.row(row.shard, row.row)
        _check_id(batch, row, self.bank.folder.teacher_shard(self.name, row.shard))
        features = matrix_of(batch, "features") if self.about["features"] else None
        return TeacherItem(matrix_of(batch, "frame_probs"), features)

    def __repr__(self) -> str:
        return f"Teacher({self.about['name']!r}, fingerprint={self.fingerprint!r}, {len(self)} videos)"

    @property
    def fingerprint(self) -> str:
        return str(self.about["fingerprint"])

    @property
    def pooling(self) -> str | None:
        """How the classifier joins frames: "mean" of logits, "max" of features, or None where it is no pooled one."""
        pooling: str | None = self.about["pooling"]
        return pooling

    @property
    def num_classes(self) -> int:
        return int(self.about["num_classes"])


def teacher_folder_name(fingerprint: str, views: int) -> str:
    return fingerprint if views == 1 else f"{fingerprint}-{views}views"


def read_teacher(folder: BankFolder, name: str) -> dict[str, Any]:
    return read_json(folder.teacher_json(name), TEACHER_KIND, "delete its folder and prepare it again")


def _teacher_name(classifier: Any, views: int | None, known: dict[str, dict[str, Any]], path: Path) -> str:
    """The one teacher that is meant, or say which there are."""
    there = "; ".join(f"{name} ({about['name']}, views={about['views']})" for name, about in known.items()) or "none"
    if classifier is None:
        matching, wanted = list(known), "a teacher"
    else:
        fingerprint = classifier if isinstance(classifier, str) else classifier.fingerprint()
        called = "" if isinstance(classifier, str) else f" of {classifier.name!r}"
        wanted = f"the teacher{called} with fingerprint {fingerprint}"
        matching = [name for name, about in known.items() if fingerprint in (name, about["fingerprint"])]
    if views is not None:
        wanted += f" and views={views}"
        matching = [name for name in matching if known[name]["views"] == views]
    if not matching:
        raise InvalidArgument(
            f"{path}: {wanted} is not in this bank; it has: {there}. "
            "Run `sosampler prepare` with this classifier to add it"
        )
    if len(matching) > 1:
        raise InvalidArgument(
            f"{path}: {wanted} was asked for, but several fit: {there}. Name one of them, or its views"
        )
    return matching[0]
