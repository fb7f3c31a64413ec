"""The classes of a data set: names in a fixed order. A label is a name, or an index in that order."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from sosampler._util.files import at, filled_lines, replacing
from sosampler.errors import InvalidArgument

CLASSES_FILE = "classes.txt"


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
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8", newline="\n")


def check_classes(classes: Iterable[str], source: str = "the class list") -> tuple[str, ...]:
    """Return the names, if they can be written and read again."""
    names = tuple(classes)
    for name in names:
        if not isinstance(name, str) or not name or name != name.strip() or "\n" in name or not _is_text(name):
            raise InvalidArgument(
                f"{source}: {name!r} cannot be the name of a class; it must be one line without blanks around it"
            )
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidArgument(f"{source}: the class {twice!r} occurs twice; remove one of them")
    return names


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
    if all(_is_whole(name) for name in names):
        names.sort(key=lambda name: (int(name), name))
    return tuple(names)


class ClassIndex:
    """Finds the index of a label. Where a name looks like a number, the name takes precedence."""

    def __init__(self, classes: Sequence[str], source: str) -> None:
        self._classes = classes
        self._source = source
        self._positions = {name: position for position, name in enumerate(classes)}

    def find(self, label: str) -> int | None:
        index = self._positions.get(label)
        if index is None and _is_whole(label) and int(label) < len(self._classes):
            return int(label)
        return index

    def complaint(self, label: str) -> str:
        """Return what is wrong with a label that was not found."""
        count = len(self._classes)
        if _is_whole(label):
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


def _is_whole(label: str) -> bool:
    # No class list has a billion names; longer digits would only be slow to convert.
    return label.isascii() and label.isdigit() and len(label) <= 9
