"""Records of official files: videos with class names, before any video file is searched."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sosampler.datasets.splits import SPLITS
from sosampler.errors import InvalidArgument
from sosampler.video.source import VIDEO_SUFFIXES

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
    split_map: Mapping[str, str] = field(default_factory=dict)  # official word -> split, over OFFICIAL_SPLITS
    layout: str = "auto"  # of frame lists

    def split_of(self, word: str, where: str) -> str:
        """Return the split of an official name."""
        known = OFFICIAL_SPLITS | dict(self.split_map)
        split = known.get(word.strip().lower())
        if split is None:
            raise InvalidArgument(
                f"{where}: the subset {word!r} is unknown, known are {', '.join(sorted(known))}; "
                f"map it with --map {word}=train, dev or test"
            )
        return split

    def split_of_file(self, file: AnnotationFile) -> str:
        """Return the split of a file: as given, or by the only word in its name that is one."""
        if file.split:
            return file.split
        words = re.findall(r"[a-z]+", file.path.name.lower())
        known = OFFICIAL_SPLITS | dict(self.split_map)
        splits = {known[word] for word in words if word in known}
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
    """Return the class of an index written as text."""
    if not (number.isascii() and number.isdigit() and len(number) <= 9):
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
