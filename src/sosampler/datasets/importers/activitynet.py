"""ActivityNet: one JSON, {"database": {id: {"subset", "annotations": [{"label", "segment"}], ...}}}.

A video has the classes of all its segments. The official validation set is the test split, as papers evaluate on it;
the official test set has no labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sosampler._util.files import parse_json, read_text
from sosampler.datasets.importers.records import AnnotationFile, Annotations, ReadOptions, Record
from sosampler.errors import InvalidArgument


def read_activitynet(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    unlabelled: list[str] = []
    for video, entry, where in database_entries(files):
        annotations = entry.get("annotations")
        if not isinstance(annotations, list):
            raise InvalidArgument(f"{where}: 'annotations' is not a list; give ActivityNet's own JSON")
        labels = sorted({text_of("label", annotation, where) for annotation in annotations})
        split = options.split_of(text_of("subset", entry, where), where)
        if not labels:
            unlabelled.append(video)
            continue
        records.append(Record(video, (f"v_{video}", video), tuple(labels), split, where))
    # In alphabetical order, as AR-Net and FrameExit number them; other code bases need their own class list.
    classes = options.classes or tuple(sorted({label for record in records for label in record.labels}))
    return Annotations(records, classes, multi_label=True, unlabelled=unlabelled)


def database_entries(files: Sequence[AnnotationFile]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(id, entry, place) of every video in JSON files of ActivityNet's form."""
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


def text_of(name: str, entry: Any, where: str) -> str:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(f"{where}: {name!r} is missing or no text; give the official JSON")
    return value.strip()


def read_coin(files: Sequence[AnnotationFile], options: ReadOptions) -> Annotations:
    records: list[Record] = []
    numbers: dict[str, int] = {}  # class -> recipe_type
    for video, entry, where in database_entries(files):
        label = text_of("class", entry, where)
        number = entry.get("recipe_type")
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidArgument(f"{where}: recipe_type={number!r} is not a whole number; give the official JSON")
        if numbers.setdefault(label, number) != number:
            raise InvalidArgument(
                f"{where}: the class {label!r} has recipe_type {number}, but {numbers[label]} before; correct one"
            )
        times = [entry.get(name) for name in ("start", "end")]
        for time in times:
            if time is not None and (isinstance(time, bool) or not isinstance(time, (int, float))):
                raise InvalidArgument(f"{where}: {time!r} is not a time in seconds; give the official JSON")
        start, end = (None if time is None else float(time) for time in times)
        split = options.split_of(text_of("subset", entry, where), where)
        records.append(Record(video, (video,), (label,), split, where, start=start, end=end))
    if len(set(numbers.values())) < len(numbers):
        raise InvalidArgument(f"{files[0].path}: two classes share a recipe_type; give the official JSON")
    classes = options.classes or tuple(sorted(numbers, key=numbers.__getitem__))
    return Annotations(records, classes, multi_label=False)
