"""Readers of the official files of public data sets.

ActivityNet: one JSON, {"database": {id: {"subset", "annotations": [{"label", "segment"}], ...}}}. A video has the
classes of all its segments. COIN has the same form, with one class per video.

Kinetics: CSV with label, youtube_id, time_start, time_end, split and perhaps more; one clip per line. Files are named
<youtube_id>_<start>_<end> with six digits each, or <youtube_id>. Clips of one video are one group.

Sports-1M and its Mini subset: lines of `URL label[,label...]`; labels are line numbers of labels.txt from 0. The file's
name, or FILE=SPLIT, tells the split.

Frame lists, as public code bases share them: `dir n label [label ...]` separated by blanks (mmaction, OCSampler),
commas (AR-Net) or semicolons; `dir first last label [label ...]` (AdaMML); or `video label` (mmaction's lists of
files). Labels are line numbers of the class list from 0 and may repeat, once for each segment. A folder's name may
contain blanks if its last word is not a number.

Everywhere the official validation set is the test split, as papers evaluate on it; official test sets have no labels.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sosampler._util.files import at, csv_lines, filled_lines, parse_json, read_text
from sosampler._util.validation import one_of
from sosampler.datasets.manifest import SPLITS
from sosampler.datasets.manifest_io import is_whole
from sosampler.errors import InvalidArgument
from sosampler.video.source import VIDEO_SUFFIXES

LAYOUTS = ("auto", "count", "range", "video")
_NUMBERS_BEFORE_LABELS = {"count": 1, "range": 2, "video": 0}
_KINETICS_COLUMNS = ("youtube_id", "time_start", "time_end")
_YOUTUBE_ID = re.compile(r"(?:[?&]v=|youtu\.be/|/embed/|/v/|/shorts/)([A-Za-z0-9_-]+)")


def read_activitynet(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    unlabelled: list[str] = []
    for video, entry, where in _database_entries(files):
        annotations = entry.get("annotations")
        if not isinstance(annotations, list):
            raise InvalidArgument(f"{where}: 'annotations' is not a list; give ActivityNet's own JSON")
        labels = sorted({_text_of("label", annotation, where) for annotation in annotations})
        split = options.split_of(_text_of("subset", entry, where), where)
        if not labels:
            unlabelled.append(video)
            continue
        records.append(Record(video, (f"v_{video}", video), tuple(labels), split, where))
    # In alphabetical order, as AR-Net and FrameExit number them; other code bases need their own class list.
    classes = options.classes or tuple(sorted({label for record in records for label in record.labels}))
    # A few videos have two labels. Classifiers are trained with softmax all the same; the sets are for mAP alone.
    return Annotations(records, classes, multi_label=True, exclusive=True, unlabelled=unlabelled)


def _database_entries(files: Sequence[AnnotationFile]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (id, entry, where it is) of every video in JSON files of ActivityNet's form."""
    for file in files:
        if file.split:
            raise InvalidArgument(f"{file.path}={file.split}: the JSON names its subsets itself; give the file alone")
        content = parse_json(read_text(file.path), str(file.path))
        database = content.get("database") if isinstance(content, dict) else None
        if not isinstance(database, dict) or not database:
            raise InvalidArgument(f"{file.path}: has no videos under 'database'; give the official JSON")
        for video, entry in database.items():
            where = f"{file.path}, video {video}"
            if not isinstance(entry, dict):
                raise InvalidArgument(f"{where}: is not a JSON object; give the official JSON")
            yield video, entry, where


def _text_of(name: str, entry: Any, where: str) -> str:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(f"{where}: {name!r} is missing or no text; give the official JSON")
    return value.strip()


def read_coin(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    """Read COIN's JSON; classes are ordered by their recipe_type."""
    records: list[Record] = []
    numbers: dict[str, int] = {}  # class -> recipe_type
    for video, entry, where in _database_entries(files):
        label = _text_of("class", entry, where)
        number = entry.get("recipe_type")
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgument(f"{where}: recipe_type={number!r} is not an int; give the official JSON")
        if numbers.setdefault(label, number) != number:
            raise InvalidArgument(
                f"{where}: the class {label!r} has recipe_type {number}, but {numbers[label]} before; correct one"
            )
        times = [entry.get(name) for name in ("start", "end")]
        for time in times:
            if time is not None and (isinstance(time, bool) or not isinstance(time, (int, float))):
                raise InvalidArgument(f"{where}: {time!r} is not a time in seconds; give the official JSON")
        start, end = (None if time is None else float(time) for time in times)
        split = options.split_of(_text_of("subset", entry, where), where)
        records.append(Record(video, (video,), (label,), split, where, start=start, end=end))
    if len(set(numbers.values())) < len(numbers):
        raise InvalidArgument(f"{files[0].path}: two classes share a recipe_type; give the official JSON")
    classes = options.classes or tuple(sorted(numbers, key=numbers.__getitem__))
    return Annotations(records, classes, multi_label=False)


def read_kinetics(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    unlabelled: list[str] = []
    for file in files:
        lines = csv_lines(file.path)
        _, names = next(lines, (1, []))
        header = [name.strip().lower() for name in names]
        missing = [name for name in _KINETICS_COLUMNS if name not in header]
        if missing:
            raise InvalidArgument(
                f"{at(file.path, 1)}: the column {missing[0]!r} is missing, found: {', '.join(header) or 'nothing'}; "
                "give Kinetics' own CSV"
            )
        split_in_file = "split" in header and not file.split
        split = "" if split_in_file else options.split_of_file(file)
        for line, cells in lines:
            where = at(file.path, line)
            if len(cells) != len(header):
                raise InvalidArgument(f"{where}: has {len(cells)} fields instead of {len(header)}; check its commas")
            row = dict(zip(header, map(str.strip, cells), strict=True))
            video, start, end = row["youtube_id"], *(_seconds(name, row[name], where) for name in _KINETICS_COLUMNS[1:])
            if end <= start:
                raise InvalidArgument(f"{where}: time_end={end:g} is not after time_start={start:g}; correct the line")
            if not video:
                raise InvalidArgument(f"{where}: youtube_id is empty; correct the line")
            clip = f"{video}_{int(start):06d}_{int(end):06d}"
            if not row.get("label"):
                unlabelled.append(clip)  # the test set was published without labels
                continue
            split = options.split_of(row["split"], where) if split_in_file else split
            records.append(Record(clip, (clip, video), (row["label"],), split, where, video, start, end))
    classes = options.classes or tuple(sorted({record.labels[0] for record in records}))
    return Annotations(records, classes, multi_label=False, unlabelled=unlabelled)


def _seconds(name: str, cell: str, where: str) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e6:
        raise InvalidArgument(f"{where}: {name}={cell!r} is not a time; give seconds of at least 0")
    return seconds


def read_sports1m(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    for file in files:
        split = options.split_of_file(file)
        for line, text in filled_lines(file.path):
            where = at(file.path, line)
            fields = text.split()
            if len(fields) != 2:
                raise InvalidArgument(
                    f"{where}: has {len(fields)} fields instead of an address and its labels separated by commas; "
                    "lists of frame folders (path, frames, label) are read with: import frames"
                )
            numbers = [number for number in fields[1].split(",") if number]
            labels = sorted({class_of(number, options.classes, where) for number in numbers})
            if not labels:
                raise InvalidArgument(f"{where}: has no label; write numbers separated by commas after the address")
            video = video_id(fields[0], where)
            records.append(Record(video, (video,), tuple(labels), split, where))
    return numbered_annotations(records, options)


def video_id(address: str, where: str) -> str:
    """Return the id of a YouTube address.

    >>> video_id("https://www.youtube.com/watch?v=UDqivjS-lpI", "here"), video_id("UDqivjS-lpI", "here")
    ('UDqivjS-lpI', 'UDqivjS-lpI')
    """
    match = _YOUTUBE_ID.search(address)
    if match:
        return match.group(1)
    if "/" in address:
        raise InvalidArgument(
            f"{where}: {address!r} is not the address of a video; it must be https://…/watch?v=ID or an ID"
        )
    return address


class _Line(NamedTuple):
    where: str
    folder: str
    numbers: list[str]


def read_frame_lists(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    one_of("--layout", options.layout, LAYOUTS)
    records: list[Record] = []
    for file in files:
        split = options.split_of_file(file)
        lines = [_parse(text, at(file.path, line)) for line, text in filled_lines(file.path)]
        before = _NUMBERS_BEFORE_LABELS[_layout_of(lines) if options.layout == "auto" else options.layout]
        for line in lines:
            if len(line.numbers) <= before:
                numbers = ("", "its number of frames, ", "its first and last frame, ")[before]
                raise InvalidArgument(f"{line.where}: needs a folder, {numbers}and at least one label; complete it")
            labels = {class_of(number, options.classes, line.where) for number in line.numbers[before:]}
            records.append(Record(line.folder, _names(line.folder), tuple(sorted(labels)), split, line.where))
    return numbered_annotations(records, options)


def _parse(text: str, where: str) -> _Line:
    separator = ";" if ";" in text else "," if "," in text else None
    fields = [field.strip() for field in text.split(separator)]
    count = 0  # of numbers at the end of the line
    while count < len(fields) - 1 and fields[-1 - count].isascii() and fields[-1 - count].isdigit():
        count += 1
    folder = text.rsplit(separator, count)[0].strip()
    if not count or not folder:
        raise InvalidArgument(f"{where}: {text[:80]!r} does not end in numbers; write a folder, its frames, its labels")
    return _Line(where, folder.replace("\\", "/").rstrip("/"), fields[-count:])


def _layout_of(lines: Sequence[_Line]) -> str:
    """Return the layout of most lines: a single number is a label, and 0 or 1 starts a range."""
    if 2 * sum(len(line.numbers) == 1 for line in lines) > len(lines):
        return "video"
    if 2 * sum(len(line.numbers) >= 3 and int(line.numbers[0][:9]) <= 1 for line in lines) > len(lines):
        return "range"
    return "count"


def _names(folder: str) -> tuple[str, ...]:
    path = stem_of(folder.lstrip("/"))
    base = posixpath.basename(path)
    # ActivityNet's files begin with v_; some lists have it and some do not.
    other = base.removeprefix("v_") if base.startswith("v_") else f"v_{base}"
    return tuple(dict.fromkeys((path, base, other)))


READERS: dict[str, Callable[[Sequence[AnnotationFile], ReadOptions], Annotations]] = {
    "activitynet": read_activitynet,
    "kinetics": read_kinetics,
    "sports1m": read_sports1m,
    "coin": read_coin,
    "frames": read_frame_lists,
}


# ---- records of official files: videos with class names, before any video file is searched

# Papers report on the official validation sets, since test labels were never published.
OFFICIAL_SPLITS = {"train": "train", "training": "train", "dev": "dev"} | dict.fromkeys(
    ("val", "valid", "validate", "validation", "test", "testing"), "test"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One video or clip as the official files describe it."""

    id: str
    names: tuple[str, ...]  # possible names of its file or frame folder, without suffix, the best first
    labels: tuple[str, ...]  # class names
    split: str
    where: str  # file and line, for messages
    group: str = ""  # the video a clip was cut from
    start: float | None = None  # seconds in that video
    end: float | None = None

    @property
    def source(self) -> str:
        """The video that the record shows."""
        return self.group or self.id


@dataclass(frozen=True)
class Annotations:
    """All records of a data set, in the order of its files, and its classes in their order."""

    records: list[Record]
    classes: tuple[str, ...]
    multi_label: bool
    unlabelled: list[str] = field(default_factory=list)  # ids without a label, as in official test sets
    numbered: bool = False  # labels are indices in the class list
    exclusive: bool | None = None  # classes exclude each other; None: unless multi_label


@dataclass(frozen=True)
class AnnotationFile:
    """A file, and its split where the file does not contain it."""

    path: Path
    split: str = ""

    @classmethod
    def parse(cls, text: str) -> AnnotationFile:
        """Parse FILE, or FILE=SPLIT.

        >>> AnnotationFile.parse("lists/first.txt=test").split
        'test'
        """
        path, equals, split = text.rpartition("=")
        if not equals or Path(text).exists():
            return cls(Path(text))
        if split not in SPLITS:
            raise InvalidArgument(f"{text}: {split!r} is not a split; write FILE={'|'.join(SPLITS)}, or FILE alone")
        return cls(Path(path), split)


@dataclass(frozen=True)
class ReadOptions:
    """Options of readers."""

    classes: tuple[str, ...] | None = None  # the class list, where labels are numbers or the order matters
    split_map: Mapping[str, str] = field(default_factory=OFFICIAL_SPLITS.copy)  # official word -> split
    layout: str = "auto"  # of frame lists

    def split_of(self, word: str, where: str) -> str:
        split = self.split_map.get(word.strip().lower())
        if split is None:
            raise InvalidArgument(
                f"{where}: the subset {word!r} is unknown, known are {', '.join(sorted(self.split_map))}; "
                f"map it with --map {word}=train, dev or test"
            )
        return split

    def split_of_file(self, file: AnnotationFile) -> str:
        """Return the split of a file: as given, or by the only word in its name that is one."""
        if file.split:
            return file.split
        words = re.findall(r"[a-z]+", file.path.name.lower())
        splits = {self.split_map[word] for word in words if word in self.split_map}
        if len(splits) != 1:
            raise InvalidArgument(
                f"{file.path}: its name does not contain its split; write {file.path.name}=train, dev or test"
            )
        return splits.pop()


def numbered_annotations(records: list[Record], options: ReadOptions) -> Annotations:
    """Return annotations whose labels are indices; without a class list, the numbers from 0 are the names."""
    classes = options.classes
    if not classes:
        highest = max((int(label) for record in records for label in record.labels), default=0)
        classes = tuple(str(number) for number in range(highest + 1))
    multi_label = any(len(record.labels) > 1 for record in records)
    return Annotations(records, classes, multi_label, numbered=True)


def class_of(number: str, classes: Sequence[str] | None, where: str) -> str:
    if not is_whole(number):
        raise InvalidArgument(
            f"{where}: the label {number!r} is not an int; it must be a line number of the class list"
        )
    index = int(number)
    if classes is None:
        return str(index)
    if index >= len(classes):
        raise InvalidArgument(
            f"{where}: the label {index} is outside of the class list, whose indices run from 0 to {len(classes) - 1}; "
            "give the list that belongs to this file"
        )
    return classes[index]


def stem_of(name: str) -> str:
    """Return a name without the suffix of a video; other dots stay.

    >>> stem_of("v_a.b.mp4"), stem_of("v_a.b")
    ('v_a.b', 'v_a.b')
    """
    stem, suffix = posixpath.splitext(name)
    return stem if suffix.lower() in VIDEO_SUFFIXES else name
