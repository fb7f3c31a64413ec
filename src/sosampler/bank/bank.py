"""`Bank`: decoded candidate frames of many videos, and outputs of networks for each frame, read from disk.

Needs NumPy, Pillow and pyarrow, neither torch nor a video decoder. Files are memory-mapped: opening a bank reads the
list of its videos and no frame.
"""

from __future__ import annotations

import io
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler._util.validation import one_of
from sosampler.bank.format import (
    AUDIO,
    FEATURES,
    TEACHER,
    BankFolder,
    BankRow,
    OpenShards,
    OutputKind,
    Shown,
    StoredVideo,
    read_failures,
    read_header,
    read_shown,
    rows_of,
    stored_video,
)
from sosampler.bank.outputs import Audio, Features, Teacher, find_output, read_output_header
from sosampler.datasets.manifest import SPLITS, Item
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.video.candidates import positions_of, stratified_positions, uniform_positions
from sosampler.video.limits import Size, check_size, target_size


class BankItem:
    """One video of a bank. Its frames are read when they are needed."""

    def __init__(self, item: Item, batch: Any, shown: Callable[[], Mapping[str, Shown]] = dict) -> None:
        self.id, self.labels, self.split, self.group = item.id, item.labels, item.split or "train", item.group_key
        self._batch, self._shown = batch, shown
        self.frame_indices: Indices = batch.column("frame_indices").values.to_numpy()  # [T] in the video
        self.pts_seconds: Seconds = batch.column("pts_seconds").values.to_numpy()  # [T]
        self.start_seconds: float = self._value("start_seconds")  # timestamp at which the video or that part begins
        self.duration: float = self._value("duration")  # seconds of the video, or of its part in the manifest
        self.fps: float = self._value("fps")
        self.total_num_frames: int = self._value("total_num_frames")
        self.width: int = self._value("width")  # pixels of the stored frames
        self.height: int = self._value("height")
        self.notes: tuple[str, ...] = tuple(self._value("notes"))

    def __len__(self) -> int:
        """Return how many frames are stored."""
        return len(self.frame_indices)

    def __repr__(self) -> str:
        return f"BankItem({self.id!r}, labels={list(self.labels)}, {len(self)} frames of {self.width}x{self.height})"

    def _value(self, column: str) -> Any:
        return self._batch.column(column)[0].as_py()

    @property
    def positions(self) -> NDArray[np.float32]:
        """[T] in 0..1: the share of the video that has passed when each frame is shown."""
        return positions_of(self.pts_seconds, self.start_seconds, self.duration)

    @property
    def shows_class(self) -> NDArray[np.bool_] | None:
        """Bool [T], which stored frames show the video's class; None where the bank does not know."""
        flags = self._shown().get(self.id, Shown()).shows_class
        if flags is not None and len(flags) != len(self):
            raise SosamplerError(
                f"{self.id!r}: shown.jsonl of the bank has {len(flags)} flags for {len(self)} stored frames; "
                "delete that file, or write the bank again"
            )
        return None if flags is None else np.array(flags, dtype=bool)

    @property
    def sources(self) -> tuple[str, ...] | None:
        """The pictures or videos that it is made of; None where the bank does not know."""
        return self._shown().get(self.id, Shown()).sources

    @property
    def jpegs(self) -> list[bytes]:
        """The stored images."""
        return self.stored().jpegs

    @property
    def nbytes(self) -> int:
        """Size of the row in bytes."""
        return int(self._batch.nbytes)

    def stored(self) -> StoredVideo:
        """Return the whole row, copied out of the file."""
        return stored_video(self._batch)

    def uniform(self, count: int) -> Indices:
        """Return positions of `count` frames spread evenly, for testing."""
        return uniform_positions(len(self), count)

    def stratified(self, count: int, rng: np.random.Generator) -> Indices:
        """Return positions of one random frame of each of `count` segments, for training."""
        return stratified_positions(len(self), count, rng)

    def frames(self, positions: ArrayLike | None = None, size: Size = None, *, fast: bool = False) -> Frames:
        """Return frames as uint8 [T, H, W, 3].

        Args:
            positions: which of the stored frames, 0 .. len - 1, repeats allowed; None for all.
            size: None as stored, the short side, or (height, width); resized without aliasing.
            fast: where `size` is half the stored one or less, let the JPEG decoder do most of the shrinking; the
                pixels then differ a little from those of `fast=False`.
        """
        wanted = np.arange(len(self)) if positions is None else np.asarray(positions, dtype=np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self)):
            raise InvalidArgument(
                f"positions={np.asarray(positions).tolist()} of {self.id!r} must be from 0 to {len(self) - 1}; "
                "these are its stored frames"
            )
        width, height = target_size(self.width, self.height, check_size(size))
        stored = self._batch.column("jpegs").values
        frames = np.empty((len(wanted), height, width, 3), dtype=np.uint8)
        for row, position in enumerate(wanted.tolist()):
            where = f"{self.id!r}, stored frame {position}"
            frames[row] = decode_jpeg(stored[position].as_py(), where, (width, height), fast=fast)
        return frames


def decode_jpeg(
    data: bytes, where: str = "a stored frame", size: tuple[int, int] | None = None, *, fast: bool = False
) -> Frames:
    """Decode a JPEG to uint8 [H, W, 3] of `size` (width, height), `fast` as in `frames`; `where` is for messages."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if fast:
                image.draft("RGB", size)
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            if size is not None and rgb.size != size:
                rgb = rgb.resize(size, Image.Resampling.BILINEAR)
            return np.asarray(rgb)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise SosamplerError(
            f"{where}: a JPEG is damaged ({error}); `sosampler bank verify` reports in which file of the bank"
        ) from error


class Bank(Sequence[BankItem]):
    """A bank on disk, or one split of it; a sequence of `BankItem`. Pickled as its path, so that workers reopen it.

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
        self.header = read_header(self.folder)
        self.classes, self.multi_label = self.header.classes, self.header.multi_label
        self.exclusive = self.header.exclusive
        if not self.header.complete and not partial:
            raise SosamplerError(
                f"{self.path}: this bank is not finished; run `sosampler prepare` again with the same arguments, "
                "or open it with partial=True"
            )
        rows = list(rows_of(self.folder, self.header))
        self.rows = rows if split is None else [row for row in rows if (row.item.split or "train") == split]
        self._shards = OpenShards(self.folder.frames)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, partial: bool = False) -> Bank:
        return cls(path, partial=partial)

    def split(self, name: str) -> Bank:
        """Return the videos of one split; without splits everything is train."""
        return Bank(self.path, split=name, partial=self._partial)

    def __reduce__(self) -> Any:
        return partial(Bank, split=self._split, partial=self._partial), (self.path,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a `BankItem`; a list of them for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self.row(index)
        return BankItem(row.item, self._shards.batch(row), lambda: self.shown)

    def row(self, index: Any) -> BankRow:
        """Return where a video is stored; negative indices count from the end."""
        last = len(self) - 1
        try:
            number = operator.index(index)
        except TypeError as error:
            raise InvalidArgument(
                f"{self.path}: {index!r} is not the index of a video; it must be an int from 0 to {last}"
            ) from error
        if not -last - 1 <= number <= last:
            raise IndexError(f"{self.path}: index {number} is out of range, the bank holds 0..{last}")
        return self.rows[number]

    def __repr__(self) -> str:
        teachers = len(self.folder.output_names(TEACHER))
        part = f" of {self._split}" if self._split else ""
        return f"Bank({str(self.path)!r}, {len(self)} videos{part}, {len(self.classes)} classes, {teachers} teachers)"

    @property
    def settings(self) -> dict[str, Any]:
        return self.header.settings

    @property
    def items(self) -> list[Item]:
        """The videos as listed in the manifest, in the bank's order; reads no frames."""
        return [row.item for row in self.rows]

    @cached_property
    def shown(self) -> dict[str, Shown]:
        """What is known about the contents of videos, by their ids."""
        return read_shown(self.folder)

    @property
    def ids(self) -> list[str]:
        return [row.item.id for row in self.rows]

    @property
    def failures(self) -> list[dict[str, str]]:
        """Videos that could not be read: id, path and error of each."""
        return read_failures(self.folder.failed_jsonl)

    def _headers(self, kind: OutputKind) -> dict[str, dict[str, Any]]:
        return {name: read_output_header(self.folder, kind, name) for name in self.folder.output_names(kind)}

    @property
    def teachers(self) -> dict[str, dict[str, Any]]:
        """The teacher.json of each teacher, by its name."""
        return self._headers(TEACHER)

    def teacher(self, classifier: Any = None, *, views: int | None = None) -> Teacher:
        """Return the outputs of a classifier for each frame.

        Args:
            classifier: the classifier, its fingerprint, or the name of a teacher as in `teachers`, which takes
                precedence over a fingerprint; None where the bank has only one.
            views: tells teachers of one classifier apart, in banks of earlier versions.
        """
        return Teacher(self, self._output_name(TEACHER, classifier, views))

    @property
    def feature_sets(self) -> dict[str, dict[str, Any]]:
        """The features.json of each, by its name."""
        return self._headers(FEATURES)

    def has_all_features(self, name: str) -> bool:
        """Return whether the features of this name are there for every frame."""
        return not self.folder.features(name).missing(self.header.num_shards)

    def features(self, network: Any = None) -> Features:
        """Return the features of a network for each frame, which `add_features` wrote.

        Args:
            network: the classifier or sampler, its fingerprint, or a name as in `feature_sets`, which takes precedence
                over a fingerprint; None where the bank has only one.
        """
        return Features(self, self._output_name(FEATURES, network))

    def features_of_teacher(self, teacher: Teacher) -> Features | None:
        """Return the teacher's own features before its class layer; None where they are not all there."""
        for name, about in self.feature_sets.items():
            of_teacher = about["network"] == "classifier" and about["fingerprint"] == teacher.fingerprint
            if of_teacher and self.has_all_features(name):
                return self.features(name)
        return None

    @property
    def has_audio(self) -> bool:
        """Whether the bank was prepared with sound."""
        return bool(self.folder.output_names(AUDIO))

    def audio(self) -> Audio:
        """Return the sound around each frame, of a bank that was prepared with `audio=True`."""
        if not self.has_audio:
            raise InvalidArgument(f"{self.path}: this bank has no sound; {self._audio_remedy()}")
        (name,) = self.folder.output_names(AUDIO)
        self._check_all_there(AUDIO, name, "its sound", AUDIO.again)
        return Audio(self, name)

    def _audio_remedy(self) -> str:
        if self.header.source == "videos":
            return (
                "add it with the command that prepared the bank, and --audio: "
                f"sosampler prepare MANIFEST --audio --out {self.path}"
            )
        return "its frames do not come from video files; prepare a bank from those: sosampler prepare MANIFEST --audio"

    def _output_name(self, kind: OutputKind, network: Any, views: int | None = None) -> str:
        """Return the name of the outputs that are meant, all of which must be there unless this is a partial bank."""
        name = find_output(kind, network, self._headers(kind), self.path, views=views)
        if kind is TEACHER:
            remedy = "run `sosampler prepare` again with the same classifier"
            self._check_all_there(kind, name, "this teacher", remedy)
        else:
            self._check_all_there(kind, name, "these features", kind.again)
        return name

    def _check_all_there(self, kind: OutputKind, name: str, what: str, remedy: str) -> None:
        folder, num_shards = self.folder.output(kind, name), self.header.num_shards
        missing = [] if self._partial else folder.missing(num_shards)
        if missing:
            raise SosamplerError(f"{folder.path}: {len(missing)} of {num_shards} parts of {what} are missing; {remedy}")
