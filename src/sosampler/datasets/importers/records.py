"""What every reader of official files gives: records with class names, before any video is looked for."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sosampler.datasets.manifest_io import is_folder
from sosampler.datasets.splits import SPLITS
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES

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


def stem_of(name: str) -> str:
    """The name without the ending of a video; other dots stay.

    >>> stem_of("v_a.b.mp4"), stem_of("v_a.b")
    ('v_a.b', 'v_a.b')
    """
    stem, suffix = posixpath.splitext(name)
    return stem if suffix.lower() in VIDEO_SUFFIXES else name


class VideoIndex:
    """Paths of the wanted videos, relative to the folder, by their name without suffix."""

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        if not folder.is_dir():
            raise InvalidArgument(f"{folder}: is no folder; give the one that holds the videos or the frame folders")
        self._by_name: dict[str, list[str]] = {}
        names = {posixpath.basename(name) for name in wanted}
        for path in _walk(folder, names):
            self._by_name.setdefault(stem_of(posixpath.basename(path)), []).append(path)
        for paths in self._by_name.values():
            paths.sort(key=lambda path: (path.count("/"), path))

    def find(self, names: Iterable[str]) -> tuple[str, str] | None:
        """(path, name it was found by) for the first name that is there; a name with folders must end the path."""
        for name in names:
            for path in self._by_name.get(posixpath.basename(name), []):
                if "/" not in name or f"/{stem_of(path)}".endswith(f"/{name}"):
                    return path, name
        return None


def _walk(folder: Path, names: Collection[str]) -> list[str]:
    """Files and frame folders with a wanted name. A frame folder is not read further than to its first image."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    open_folders = [""]
    while open_folders:
        below = open_folders.pop()
        here = os.path.join(folder, below)
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:
            for entry in entries:
                path = posixpath.join(below, entry.name)
                wanted = stem_of(entry.name) in names
                if is_folder(entry):
                    if wanted and _holds_frames(entry.path):
                        found.append(path)
                    else:
                        open_folders.append(path)
                elif (
                    wanted and os.path.splitext(entry.name)[1].lower() in VIDEO_SUFFIXES and os.path.isfile(entry.path)
                ):
                    found.append(path)
    return found


def _holds_frames(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES for entry in entries)
