"""COIN: JSON of ActivityNet's form, {"database": {id: {"class", "recipe_type", "subset", "start", "end", ...}}}.

`recipe_type` is the number of the class and gives the order of the classes. `start` and `end` bound the part that
shows the task; the whole video is taken unless segments are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from sosampler.data.importers.activitynet import database_entries, text_of
from sosampler.data.importers.records import AnnotationFile, Annotations, ReadOptions, Record
from sosampler.errors import InvalidArgument


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
