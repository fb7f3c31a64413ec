"""Kinetics: CSV with label, youtube_id, time_start, time_end, split and perhaps more; one clip a line.

Files are called <youtube_id>_<start>_<end> with six digits each, or <youtube_id>. Clips of one video are one group.
The official validation set ("val" or "validate") is the test split, as papers evaluate on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sosampler._util.files import at, csv_lines
from sosampler.datasets.importers.records import AnnotationFile, Annotations, ReadOptions, Record
from sosampler.errors import InvalidArgument

_NEEDED = ("youtube_id", "time_start", "time_end")


def read_kinetics(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    unlabelled: list[str] = []
    for file in files:
        _read_file(file, options, records, unlabelled)
    classes = options.classes or tuple(sorted({record.labels[0] for record in records}))
    return Annotations(records, classes, multi_label=False, unlabelled=unlabelled)


def _read_file(file: AnnotationFile, options: ReadOptions, records: list[Record], unlabelled: list[str]) -> None:
    lines = csv_lines(file.path)
    _, names = next(lines, (1, []))
    header = [name.strip().lower() for name in names]
    missing = [name for name in _NEEDED if name not in header]
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
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        start, end = (_seconds(name, row[name], where) for name in ("time_start", "time_end"))
        if end <= start:
            raise InvalidArgument(f"{where}: time_end={end:g} is not after time_start={start:g}; correct the line")
        if not row["youtube_id"]:
            raise InvalidArgument(f"{where}: youtube_id is empty; correct the line")
        clip = f"{row['youtube_id']}_{int(start):06d}_{int(end):06d}"
        if not row.get("label"):
            unlabelled.append(clip)  # the test set was published without labels
            continue
        records.append(
            Record(
                id=clip,
                names=(clip, row["youtube_id"]),
                labels=(row["label"],),
                split=options.split_of(row["split"], where) if split_in_file else split,
                where=where,
                group=row["youtube_id"],
                start=start,
                end=end,
            )
        )


def _seconds(name: str, cell: str, where: str) -> float:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e6:
        raise InvalidArgument(f"{where}: {name}={cell!r} is not a time; give seconds of at least 0")
    return seconds
