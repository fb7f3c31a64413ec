"""Lists of frame dumps, as the public code bases hand them on: a folder, its number of frames, its labels.

`dir n label [label ...]` separated by blanks (mmaction, OCSampler), commas (AR-Net) or semicolons; `dir first last
label [label ...]` (AdaMML); or `video label` (mmaction's lists of files). Labels count the lines of the class list from
0 and may repeat, once for each segment. Blanks may stand in a folder's name if its last word is not a number.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import NamedTuple

from sosampler._util.files import at, filled_lines
from sosampler._util.validation import one_of
from sosampler.datasets.importers.records import (
    AnnotationFile,
    Annotations,
    ReadOptions,
    Record,
    named,
    numbered_classes,
    stem_of,
)
from sosampler.errors import InvalidArgument

LAYOUTS = ("auto", "count", "range", "video")
_BEFORE = {"count": 1, "range": 2, "video": 0}  # numbers that come before the labels


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
        before = _BEFORE[_layout_of(lines) if options.layout == "auto" else options.layout]
        for line in lines:
            if len(line.numbers) <= before:
                numbers = ("", "its number of frames, ", "its first and last frame, ")[before]
                raise InvalidArgument(f"{line.where}: needs a folder, {numbers}and at least one label; complete it")
            labels = {named(number, options.classes, line.where) for number in line.numbers[before:]}
            records.append(Record(line.folder, _names(line.folder), tuple(sorted(labels)), split, line.where))
    highest = (
        max((int(label) for record in records for label in record.labels), default=0) if not options.classes else 0
    )
    several = any(len(record.labels) > 1 for record in records)
    return Annotations(records, numbered_classes(highest, options.classes), several, numbered=True)


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
    """The layout of most lines, so that a bad one is found: one number is a label; one frame is rather a range."""
    if 2 * sum(len(line.numbers) == 1 for line in lines) > len(lines):
        return "video"
    if 2 * sum(len(line.numbers) >= 3 and int(line.numbers[0][:9]) <= 1 for line in lines) > len(lines):
        return "range"
    return "count"


def _names(folder: str) -> tuple[str, ...]:
    path = stem_of(folder.lstrip("/"))
    base = posixpath.basename(path)
    # ActivityNet's files begin with v_, some lists leave it out and some have it.
    other = base.removeprefix("v_") if base.startswith("v_") else f"v_{base}"
    return tuple(dict.fromkeys((path, base, other)))
