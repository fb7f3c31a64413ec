"""Sports-1M and its Mini subset: lines of `URL label[,label...]`, with labels counting the lines of labels.txt from 0.

The file's name, or FILE=SPLIT, says which split it is. Lists of frame dumps (`path n_frames label`) are read as frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sosampler._util.files import at, filled_lines
from sosampler.datasets.importers.records import (
    AnnotationFile,
    Annotations,
    ReadOptions,
    Record,
    named,
    numbered_classes,
)
from sosampler.errors import InvalidArgument

_ID = re.compile(r"(?:[?&]v=|youtu\.be/|/embed/|/v/|/shorts/)([A-Za-z0-9_-]+)")


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
            labels = sorted({named(number, options.classes, where) for number in numbers})
            if not labels:
                raise InvalidArgument(f"{where}: has no label; write numbers separated by commas after the address")
            video = video_id(fields[0], where)
            records.append(Record(video, (video,), tuple(labels), split, where))
    highest = (
        max((int(label) for record in records for label in record.labels), default=0) if not options.classes else 0
    )
    several = any(len(record.labels) > 1 for record in records)
    return Annotations(records, numbered_classes(highest, options.classes), several, numbered=True)


def video_id(address: str, where: str) -> str:
    """
    >>> video_id("https://www.youtube.com/watch?v=UDqivjS-lpI", "here"), video_id("UDqivjS-lpI", "here")
    ('UDqivjS-lpI', 'UDqivjS-lpI')
    """
    found = _ID.search(address)
    if found:
        return found.group(1)
    if "/" in address:
        raise InvalidArgument(f"{where}: {address!r} is not the address of a video; give https://…/watch?v=ID or an ID")
    return address
