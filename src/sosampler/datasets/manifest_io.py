"""Read manifest files (CSV or JSONL) and class folders as rows of plain values, and read and write class lists."""

from __future__ import annotations

import difflib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sosampler._util.files import at, csv_lines, filled_lines, parse_json, write_text
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES, frame_images

COLUMNS = ("id", "path", "label", "labels", "split", "group", "start", "end", "exclusive")
MANIFEST_SUFFIXES = (".csv", ".jsonl")
CLASSES_FILE = "classes.txt"

# Names of splits. An official "validation" set on which papers report is mapped by its importer instead.
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_WORDS |= dict.fromkeys(("dev", "val", "valid", "validation"), "dev")


def split_word(word: str) -> str | None:
    """Return train, dev or test for a name of one of them, else None.

    >>> split_word("Validation"), split_word("fold1")
    ('dev', None)
    """
    return _WORDS.get(word.strip().lower())


class Row(NamedTuple):
    """One line. `Table.where` returns its location: a string for each line would take more memory than the line."""

    line: int
    path: str
    labels: tuple[str, ...]
    id: str = ""
    split: str = ""
    group: str = ""
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Table:
    """All rows of one source, whether a row may have several labels, and whether classes exclude each other."""

    rows: list[Row]
    multi_label: bool
    where: Callable[[Row], str]
    exclusive: bool | None = None  # None: not stated


def read_rows(path: Path, *, multi_label: bool | None, needs_label: bool = True) -> Table:
    """Read a `.csv` or `.jsonl` manifest. `multi_label` None: decided by the columns, `labels` or `label`.

    With `needs_label` False these columns may be missing.
    """
    suffix = path.suffix.lower()
    if suffix not in MANIFEST_SUFFIXES:
        raise InvalidArgument(
            f"{path}: is not a manifest; give a file ending in {' or '.join(MANIFEST_SUFFIXES)}, or a folder with one "
            "folder per class"
        )
    rows: list[Row] = []
    several = False
    exclusive: dict[bool | None, int] = {}  # the first line of each value
    entries = _csv_entries if suffix == ".csv" else _json_entries
    for line, several, entry in entries(path, bool(multi_label), needs_label):
        where = (path, line)
        exclusive.setdefault(_exclusive(entry, where), line)
        rows.append(
            Row(
                line=line,
                path=_text("path", entry, where),
                labels=_labels(entry, where, split=several or bool(multi_label)),
                id=_text("id", entry, where),
                split=_split(_text("split", entry, where), where),
                group=_text("group", entry, where),
                start=_seconds("start", entry, where),
                end=_seconds("end", entry, where),
            )
        )
    if not rows:
        raise InvalidArgument(f"{path}: the manifest is empty; write one line per video")
    if len(exclusive) > 1:
        raise InvalidArgument(
            f"{at(path, max(exclusive.values()))}: 'exclusive' differs from {at(path, min(exclusive.values()))}; "
            "give the same in every line, because it is a property of the classes"
        )
    several = several if multi_label is None else multi_label
    return Table(rows, several, lambda row: at(path, row.line), *exclusive)


_Entry = tuple[int, bool, dict[str, Any]]
"""A line, whether it may have several labels, and its values by the names of `COLUMNS`."""


def _csv_entries(path: Path, multi_label: bool, needs_label: bool) -> Iterator[_Entry]:
    lines = csv_lines(path)
    line, names = next(lines, (1, []))
    header = [name.strip().lower() for name in names]
    several = _check_columns(header, at(path, line), needs_label)
    column = {name: header.index(name) for name in COLUMNS if name in header}
    for line, cells in lines:
        if len(cells) != len(header):
            few = "few" if len(cells) < len(header) else "many"
            raise InvalidArgument(
                f"{at(path, line)}: has too {few} fields, {len(cells)} instead of {len(header)}; put quotes around a "
                "field with a comma in it, and leave unknown fields empty"
            )
        entry: dict[str, Any] = {name: cells[index].strip() for name, index in column.items() if cells[index].strip()}
        entry["path"] = cells[column["path"]]
        for name in {"start", "end"} & entry.keys():
            with suppress(ValueError):  # left as text, it is refused as such
                seconds = float(entry[name])
                entry[name] = seconds if math.isfinite(seconds) else entry[name]
        name = "labels" if several else "label"
        if name in entry and (several or multi_label):
            entry[name] = entry[name].split(";" if ";" in entry[name] else "|")
        yield line, several, entry


def _json_entries(path: Path, _: bool, needs_label: bool) -> Iterator[_Entry]:
    before: bool | None = None
    for line, content in filled_lines(path):
        where = at(path, line)
        entry = parse_json(content, where)
        if not isinstance(entry, dict):
            raise InvalidArgument(f"{where}: is not a JSON object; write one {{...}} with path and label per line")
        entry = {key: value for key, value in entry.items() if value is not None}
        several = _check_columns(list(entry), where, needs_label)
        if before is not None and several != before:
            raise InvalidArgument(
                f"{where}: has {'labels' if several else 'label'!r} where the lines before have "
                f"{'labels' if before else 'label'!r}; use one of them throughout"
            )
        before = several
        yield line, several, entry


def _check_columns(header: list[str], where: str, needs_label: bool) -> bool:
    """Return whether there may be several labels; raise an error where the columns do not fit."""
    known = [name for name in header if name in COLUMNS]
    for name in known:
        if known.count(name) > 1:
            raise InvalidArgument(f"{where}: the column {name!r} occurs twice; remove one of them")
    if "label" in known and "labels" in known:
        raise InvalidArgument(
            f"{where}: both columns 'label' and 'labels' exist; use 'label' for one class per video, "
            "'labels' for any number of them"
        )
    missing = ["path"] if "path" not in known else []
    missing += ["label' or 'labels"] if needs_label and not {"label", "labels"} & set(known) else []
    if missing:
        names = ", ".join(header) or "nothing"
        raise InvalidArgument(
            f"{where}: the column '{missing[0]}' is missing, found: {names}; the first line names the columns, "
            "separated by commas"
        )
    return "labels" in known


def _split(word: str, where: tuple[Path, int]) -> str:
    if not word.strip():
        return ""
    split = split_word(word)
    if split is None:
        raise InvalidArgument(
            f"{at(*where)}: the split {word!r} is unknown; write train, dev (or val) or test, or leave it empty"
        )
    return split


def _text(name: str, entry: dict[str, Any], where: tuple[Path, int]) -> str:
    value = entry.get(name, "")
    if isinstance(value, int) and not isinstance(value, bool) and name in ("id", "group"):
        return str(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"{at(*where)}: {name}={value!r} is not a string; put it between quotes")
    return value


def _labels(entry: dict[str, Any], where: tuple[Path, int], *, split: bool) -> tuple[str, ...]:
    value = entry.get("labels", entry.get("label", ""))
    if "labels" in entry and not isinstance(value, list):
        raise InvalidArgument(f'{at(*where)}: labels={value!r} is not a list; write ["one", "two"]')
    values = value if isinstance(value, list) and split else [value]
    for label in values:
        if isinstance(label, bool) or not isinstance(label, (str, int)):
            raise InvalidArgument(f"{at(*where)}: the label {label!r} is neither a name nor an int")
    return tuple(text for text in (str(label).strip() for label in values) if text)


def _exclusive(entry: dict[str, Any], where: tuple[Path, int]) -> bool | None:
    value = entry.get("exclusive")
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value is None or isinstance(value, bool):
        return value
    raise InvalidArgument(f"{at(*where)}: exclusive={value!r} must be true or false; leave the column out if unsure")


def _seconds(name: str, entry: dict[str, Any], where: tuple[Path, int]) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:
        value = "a number of hundreds of digits"
    remedy = "give a number of seconds from the start of the video"
    raise InvalidArgument(f"{at(*where)}: {name}={value!r} is not a time; {remedy}")


def read_class_folders(root: Path, *, suffixes: Collection[str], multi_label: bool | None) -> Table:
    """Read every file with one of the `suffixes` below a class folder, at any depth, in the order of its path.

    Where videos are read, a folder of numbered frame images below a class folder is a video too.
    """
    wanted = {suffix.lower() for suffix in suffixes}
    rows: list[Row] = []
    for layer, split in _split_layers(root, wanted):
        _refuse_loose_files(layer, wanted)
        for folder in _folders(layer):
            paths = _media_below(folder, wanted)
            if not paths:
                raise InvalidArgument(
                    f"{folder}: the class folder holds none of {' '.join(sorted(wanted))}; fill it or remove it"
                )
            rows += [Row(0, path.relative_to(root).as_posix(), (folder.name,), split=split) for path in paths]
    if not rows:
        raise InvalidArgument(f"{root}: holds no class folders; make one folder per class, or give a CSV or JSONL")
    return Table(rows, bool(multi_label), lambda row: str(root / row.path))


def _split_layers(root: Path, wanted: Collection[str]) -> list[tuple[Path, str]]:
    """Return the folders that hold class folders, each with its split: `root` itself if there are no split folders."""
    folders = _folders(root)
    named = {folder: split_word(folder.name) for folder in folders}
    splits = {folder: split for folder, split in named.items() if split}
    if splits and len(splits) == len(folders):
        _refuse_loose_files(root, wanted)
        return list(splits.items())
    # "train" may be a class (next to "bus"); with folders inside, it is a split beside another folder.
    layers = [folder.name for folder in splits if _folders(folder)]
    if layers:
        others = [folder.name for folder, split in named.items() if not split]
        raise InvalidArgument(
            f"{root}: {', '.join(layers)} look like splits, {', '.join(others)} do not; move the latter elsewhere, "
            "or give a CSV or JSONL"
        )
    return [(root, "")]


def walk_once(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk in order, through links as well, into each folder once: links may form cycles."""
    seen: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:  # os.walk would leave the folder out without a word
        raise InvalidArgument(f"{error.filename}: cannot be read ({error.strerror}); make it readable, or move it away")

    for here, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        yield here, folders, files


def has_suffix(name: str, suffixes: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def _is_media(name: str, wanted: Collection[str]) -> bool:
    return not name.startswith(".") and has_suffix(name, wanted)


def _refuse_loose_files(folder: Path, wanted: Collection[str]) -> None:
    loose = sorted(entry for entry in folder.iterdir() if _is_media(entry.name, wanted) and entry.is_file())
    if loose:
        raise InvalidArgument(f"{loose[0]}: is beside the class folders and has no class; move it into one")


def _media_below(folder: Path, wanted: Collection[str]) -> list[Path]:
    frames_count = IMAGE_SUFFIXES.isdisjoint(wanted)
    paths: list[Path] = []
    for here, folders, files in walk_once(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        media = [Path(here, name) for name in files if _is_media(name, wanted)]
        paths += media
        if frames_count and not media and Path(here) != folder and files and frame_images(Path(here)):
            paths.append(Path(here))
    return sorted(paths)


# ---- class lists


def read_classes(path: Path) -> tuple[str, ...]:
    """Read one name per line; blank lines are skipped."""
    seen: dict[str, int] = {}
    for line, name in filled_lines(path):
        if name in seen:
            raise InvalidArgument(
                f"{at(path, line)}: the class {name!r} is already on line {seen[name]}; remove one of them"
            )
        seen[name] = line
    if not seen:
        raise InvalidArgument(f"{path}: holds no class; write one class name per line")
    return tuple(seen)


def write_classes(path: Path, classes: Sequence[str]) -> None:
    write_text(path, (f"{name}\n" for name in classes))


def check_classes(classes: Iterable[str]) -> tuple[str, ...]:
    """Return the names, if they can be written and read again."""
    names = tuple(classes)
    for name in names:
        if not isinstance(name, str) or not name or name != name.strip() or "\n" in name or not is_text(name):
            raise InvalidArgument(
                f"the class list: {name!r} cannot be the name of a class; it must be one line without blanks around it"
            )
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidArgument(f"the class list: the class {twice!r} occurs twice; remove one of them")
    return names


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8."""
    return name == name.encode(errors="ignore").decode()


def stem_classes_file(manifest: Path) -> Path:
    """Return the class list of one manifest: videos.csv -> videos.classes.txt."""
    return manifest.with_name(f"{manifest.stem}.{CLASSES_FILE}")


def classes_beside(manifest: Path) -> Path | None:
    """Return the class list that was saved with a manifest: its own, or that of its folder."""
    if manifest.is_dir():
        candidates = [manifest / CLASSES_FILE]
    else:
        candidates = [stem_classes_file(manifest), manifest.with_name(CLASSES_FILE)]
    return next((path for path in candidates if path.is_file()), None)


def derived_classes(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the names that occur, sorted; ints by value.

    >>> derived_classes(["10", "9", "9"])
    ('9', '10')
    """
    names = sorted(set(labels))
    if all(is_whole(name) for name in names):
        names.sort(key=lambda name: (int(name), name))
    return tuple(names)


class ClassIndex:
    """Finds the indices of labels. Where a name looks like a number, the name takes precedence."""

    def __init__(self, classes: Sequence[str], source: str) -> None:
        self._classes, self._source = classes, source
        self._positions = {name: position for position, name in enumerate(classes)}

    def find(self, labels: Iterable[str], where: Callable[[], str]) -> tuple[int, ...]:
        """Return the indices of labels, sorted, each once; `where` is for messages."""
        indices = set()
        for label in labels:
            index = self._positions.get(label)
            if index is None and is_whole(label):
                index = int(label)
            if index is None or index >= len(self._classes):
                raise InvalidArgument(f"{where()}: {self._complaint(label)}")
            indices.add(index)
        return tuple(sorted(indices))

    def _complaint(self, label: str) -> str:
        count = len(self._classes)
        if is_whole(label):
            return (
                f"the label {label} is outside of {self._source}, whose indices run from 0 to {count - 1}; "
                "correct the label or the class list"
            )
        near = difflib.get_close_matches(label, self._classes, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return (
            f"the label {label!r} is not among the {count} names of {self._source}{meant}; "
            "correct the label or add it to the class list"
        )


def is_whole(label: str) -> bool:
    # No class list has a billion names; longer digits would only be slow to convert.
    return label.isascii() and label.isdigit() and len(label) <= 9
