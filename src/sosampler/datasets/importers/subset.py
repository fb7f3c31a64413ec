"""A part of a data set, named by a list of classes or of videos, as Mini-Kinetics and Mini-Sports1M are published."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sosampler._util.files import at, filled_lines
from sosampler.datasets.importers.records import Annotations, stem_of
from sosampler.datasets.importers.sports1m import video_id
from sosampler.errors import InvalidArgument


def take_subset(annotations: Annotations, files: Sequence[Path]) -> tuple[Annotations, list[str]]:
    """The records that the files name, and the lines that name nothing known.

    A file whose lines are all names of classes keeps those classes; any other holds videos, one a line: an id, a
    clip's name, a file name or an address. Several files of videos (train and val) add up; classes and videos both
    given must both hold. The classes that remain keep their order.
    """
    known = {label for record in annotations.records for label in record.labels}
    classes: set[str] | None = None
    videos: dict[str, str] | None = None  # as written in the file, by the name it stands for
    for path in files:
        lines = list(filled_lines(path))
        if not lines:
            raise InvalidArgument(f"{path}: names nothing; write one class or one video a line")
        names = [_class_name(text, known) for _, text in lines]
        if all(names):
            classes = (classes or set()) | {name for name in names if name}
            continue
        if any(names) and not annotations.numbered:
            line, text = next(entry for entry, name in zip(lines, names, strict=True) if not name)
            raise InvalidArgument(
                f"{at(path, line)}: {text!r} is no class of the data set, but other lines are; correct it"
            )
        videos = (videos or {}) | {_video_name(text, at(path, line)): text for line, text in lines}

    kept, used = [], set()
    for record in annotations.records:
        own = {record.id, record.source, *record.names}
        hits = own & videos.keys() if videos is not None else own
        used |= hits
        if hits and (classes is None or classes & set(record.labels)):
            labels = record.labels if classes is None else tuple(x for x in record.labels if x in classes)
            kept.append(replace(record, labels=labels))
    if not kept:
        raise InvalidArgument(f"{files[0]}: names no video of the data set; check that it belongs to these annotations")
    unknown = [text for name, text in (videos or {}).items() if name not in used]
    left = {label for record in kept for label in record.labels}
    remaining = annotations.classes
    if not annotations.numbered:  # where labels are positions, the class list is the data set's whole list
        remaining = tuple(name for name in annotations.classes if name in left)
    return replace(annotations, records=kept, classes=remaining), unknown


def _class_name(text: str, known: set[str]) -> str | None:
    # Folders of classes are often written with _ for blanks.
    return next((name for name in (text, text.replace("_", " ")) if name in known), None)


def _video_name(text: str, where: str) -> str:
    if "://" in text:
        return video_id(text.split()[0], where)
    return stem_of(posixpath.basename(text.split(",")[0]))
