"""What every reader of official files gives: records with class names, before any video is looked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sosampler.data.splits import SPLITS
from sosampler.errors import InvalidArgument

# Papers report on the official validation sets, since test labels were never published; so they are the test split.
OFFICIAL_SPLITS = {"train": "train", "training": "train", "dev": "dev"} | dict.fromkeys(
    ("val", "valid", "validate", "validation", "test", "testing"), "test"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One video or clip as the official files describe it."""

    id: str
    names: tuple[str, ...]  # what its file or frame folder may be called, without suffix, the best first
    labels: tuple[str, ...]  # class names
    split: str
    where: str  # file and line, for messages
    group: str = ""  # the video a clip was cut from
    start: float | None = None  # seconds in that video
    end: float | None = None

    @property
    def source(self) -> str:
        return self.group or self.id


@dataclass(frozen=True)
class Annotations:
    """All records of a data set, in the order of its files, and its classes in their order."""

    records: list[Record]
    classes: tuple[str, ...]
    multi_label: bool
    unlabelled: list[str] = field(default_factory=list)  # ids without a label, as in official test sets
    numbered: bool = False  # labels are written as positions in the class list


@dataclass(frozen=True)
class AnnotationFile:
    """A file, and the split that all of it belongs to where the file does not say so itself."""

    path: Path
    split: str = ""

    @classmethod
    def parse(cls, text: str) -> AnnotationFile:
        """FILE, or FILE=SPLIT.

        >>> AnnotationFile.parse("lists/first.txt=test").split
        'test'
        """
        path, equals, split = text.rpartition("=")
        if not equals or Path(text).exists():
            return cls(Path(text))
        if split not in SPLITS:
            raise InvalidArgument(f"{text}: {split!r} is no split; write FILE={'|'.join(SPLITS)}, or FILE alone")
        return cls(Path(path), split)


@dataclass(frozen=True)
class ReadOptions:
    """What readers must know beyond their files."""

    classes: tuple[str, ...] | None = None  # the class list, where labels are numbers or an order is wanted
    split_map: Mapping[str, str] = field(default_factory=dict)  # official word -> split, over OFFICIAL_SPLITS
    layout: str = "auto"  # of frame lists

    def split_of(self, word: str, where: str) -> str:
        """The split that an official word means."""
        known = OFFICIAL_SPLITS | dict(self.split_map)
        split = known.get(word.strip().lower())
        if split is None:
            raise InvalidArgument(
                f"{where}: the subset {word!r} is unknown, known are {', '.join(sorted(known))}; "
                f"say what it is with --map {word}=train, dev or test"
            )
        return split

    def split_of_file(self, file: AnnotationFile) -> str:
        """The split of a file that holds one: as given, or the only word in its name that is one."""
        if file.split:
            return file.split
        words = re.findall(r"[a-z]+", file.path.name.lower())
        known = OFFICIAL_SPLITS | dict(self.split_map)
        found = {known[word] for word in words if word in known}
        if len(found) != 1:
            raise InvalidArgument(
                f"{file.path}: its name does not say which split it holds; write {file.path.name}=train, dev or test"
            )
        return found.pop()


def numbered_classes(highest: int, classes: Sequence[str] | None) -> tuple[str, ...]:
    """The class list; where none was given, the numbers from 0 stand for the names."""
    return tuple(classes) if classes else tuple(str(number) for number in range(highest + 1))


def named(number: str, classes: Sequence[str] | None, where: str) -> str:
    """The class of a position written as text."""
    if not (number.isascii() and number.isdigit() and len(number) <= 9):
        raise InvalidArgument(f"{where}: the label {number!r} is not a whole number; it counts lines of the class list")
    position = int(number)
    if classes is None:
        return str(position)
    if position >= len(classes):
        raise InvalidArgument(
            f"{where}: the label {position} is outside of the class list, whose positions run from 0 to "
            f"{len(classes) - 1}; give the list that belongs to this file"
        )
    return classes[position]
