"""Manifests: the videos of a data set, their labels and splits.

A manifest is a CSV or JSONL file with `path` and `label` (or `labels`) and optionally `id`, `split`, `group`, `start`
and `end`; or a folder with one folder per class. Labels are class names. Where a class list is given they may also be
indices in that list; a class whose name is that number takes precedence.
"""

from __future__ import annotations

import csv
import hashlib
import heapq
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from sosampler._util.files import replacing
from sosampler._util.validation import check_fraction, check_int, one_of
from sosampler.datasets.manifest_io import (
    CLASSES_FILE,
    MANIFEST_SUFFIXES,
    ClassIndex,
    Table,
    check_classes,
    classes_beside,
    derived_classes,
    is_text,
    read_class_folders,
    read_classes,
    read_rows,
    stem_classes_file,
    write_classes,
)
from sosampler.errors import InvalidArgument
from sosampler.video.source import VIDEO_SUFFIXES


@dataclass(frozen=True, slots=True)
class Item:
    """One video (or image), or a part of one."""

    id: str  # unique; by default the path, with "#start-end" for a part
    path: str  # as in the file; relative paths start at the manifest's root
    labels: tuple[int, ...]  # indices of classes, sorted, each once; exactly one unless multi-label
    split: str = ""  # "train", "dev", "test"; "" throughout a manifest without splits, which is all train
    group: str = ""  # scene, speaker, source: a group is never in two splits
    start: float | None = None  # seconds
    end: float | None = None  # seconds

    @property
    def group_key(self) -> str:
        """The group; without one the video itself, so that parts of a video stay together."""
        return self.group or self.path


@dataclass(frozen=True)
class Manifest:
    """Videos with their classes. Checked when created: ids, labels, times, and that no group is in two splits."""

    items: tuple[Item, ...]
    classes: tuple[str, ...]
    multi_label: bool = False  # labels are a set, which decides the metric
    root: Path = Path()
    where: InitVar[Callable[[int], str] | None] = None  # how messages call the item at an index
    exclusive: bool = None  # type: ignore[assignment]  # classes exclude each other: softmax; None: unless multi_label

    def __post_init__(self, where: Callable[[int], str] | None) -> None:
        if self.exclusive is None:
            object.__setattr__(self, "exclusive", not self.multi_label)
        check_classes(self.classes)
        _check_items(self, where or (lambda index: f"item {index} ({self.items[index].path})"))

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        kind = "multi-label " if self.multi_label else ""
        splits = ", ".join(f"{count} {name}" for name, count in self.counts()["splits"].items())
        return f"Manifest({len(self.items)} videos, {len(self.classes)} {kind}classes: {splits or 'empty'})"

    def split(self, name: str) -> Manifest:
        """Return the videos of one split, with all classes. Without splits everything is train."""
        one_of("split", name, SPLITS)
        return replace(self, items=tuple(item for item in self.items if (item.split or "train") == name))

    def counts(self) -> dict[str, Any]:
        """Return the numbers of videos, classes and groups, and of videos in each split."""
        splits = Counter(item.split or "train" for item in self.items)
        return {
            "videos": len(self.items),
            "classes": len(self.classes),
            "groups": len({item.group_key for item in self.items}),
            "multi_label": self.multi_label,
            "exclusive": self.exclusive,
            "splits": {name: splits[name] for name in SPLITS if name in splits},
        }

    def path_of(self, item: Item) -> Path:
        return self.root / item.path

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a `.csv` or `.jsonl` and, beside it, the class list, whose path is returned.

        The list is `classes.txt`; where another one exists, `<manifest>.classes.txt`. In another folder than `root`,
        paths are written so that they lead to the same files from there.
        """
        target = Path(path)
        one_of("suffix of the manifest", target.suffix.lower(), MANIFEST_SUFFIXES)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self.items:
            raise InvalidArgument(f"{target}: there is no video to write; a manifest cannot be empty")
        here, there = os.path.abspath(target.parent), os.path.abspath(self.root)
        rows = [_row_of(item, self, here, there) for item in self.items]
        with replacing(target) as temporary, open(temporary, "w", encoding="utf-8", newline="") as out:
            if target.suffix.lower() == ".csv":
                _write_csv(out, rows, target)
            else:
                for row in rows:
                    filled = {name: value for name, value in row.items() if value not in ("", None)}
                    out.write(json.dumps(filled, ensure_ascii=False) + "\n")
        classes_file = _classes_file_for(target, self.classes)
        write_classes(classes_file, self.classes)
        return classes_file


def read_manifest(
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | Path | None = None,
    root: Path | None = None,
    multi_label: bool | None = None,
    exclusive: bool | None = None,
    suffixes: Collection[str] = VIDEO_SUFFIXES,
) -> Manifest:
    """Read a CSV, a JSONL or a folder with one folder per class.

    Args:
        classes: names in their order, or a file with one name per line; None takes the list saved beside the manifest
            (`<manifest>.classes.txt`, `classes.txt`) and, without one, the names that occur, sorted.
        root: where relative paths start; None takes the manifest's folder.
        multi_label: None decides by the columns, `labels` or `label`. True also splits a `label` column at ; or |.
        exclusive: whether classes exclude each other (softmax) although a video may have several labels, as in
            ActivityNet. None takes the column `exclusive`; without one they do unless the manifest is multi-label.
        suffixes: which files count in a folder of classes; `IMAGE_SUFFIXES` reads images.
    """
    source = Path(path)
    if source.is_dir():
        table = read_class_folders(source, suffixes=suffixes, multi_label=multi_label)
    else:
        table = read_rows(source, multi_label=multi_label)
    names, origin = _classes_for(source, classes, table)
    index = ClassIndex(names, origin)
    items = tuple(
        Item(
            id=row.id or default_id(row.path, row.start, row.end),
            path=row.path,
            labels=index.find(row.labels, partial(table.where, row)),
            split=row.split,
            group=row.group,
            start=row.start,
            end=row.end,
        )
        for row in table.rows
    )
    folder = source if source.is_dir() else source.parent
    return Manifest(
        items,
        names,
        table.multi_label,
        root or folder,
        lambda index: table.where(table.rows[index]),
        exclusive=table.exclusive if exclusive is None else exclusive,  # type: ignore[arg-type]
    )


def _classes_for(source: Path, classes: Sequence[str] | Path | None, table: Table) -> tuple[tuple[str, ...], str]:
    """Return the classes, and how messages call their source."""
    if classes is None:
        classes = classes_beside(source)
    if isinstance(classes, (str, os.PathLike)):
        return read_classes(Path(classes)), str(classes)
    if classes is not None:
        names = check_classes(classes)
        if not names:
            raise InvalidArgument("the class list is empty; give at least one name")
        return names, "the class list"
    return derived_classes(label for row in table.rows for label in row.labels), "the manifest"


def default_id(path: str, start: float | None, end: float | None) -> str:
    """
    >>> default_id("a.mp4", None, None), default_id("a.mp4", 1.5, 3.0)
    ('a.mp4', 'a.mp4#1.5-3')
    """
    return path if start is None and end is None else f"{path}#{_short(start)}-{_short(end)}"


def _short(seconds: float | None) -> str:
    return "" if seconds is None else repr(float(seconds)).removesuffix(".0")


def _check_items(manifest: Manifest, where: Callable[[int], str]) -> None:
    ids: dict[str, int] = {}
    groups: dict[str, int] = {}  # index of the first item of each
    paths: dict[str, int] = {}
    files: dict[str, int] = {}  # with the links of folders followed
    num_classes = len(manifest.classes)
    root = os.path.abspath(manifest.root)  # one path may be absolute, another relative to a relative root
    real_folder = cache(os.path.realpath)
    for index, item in enumerate(manifest.items):
        problem = _problem_of(item, num_classes, manifest.multi_label)
        if problem:
            raise InvalidArgument(f"{where(index)}: {problem}")
        first = ids.setdefault(item.id, index)
        if first != index:
            raise InvalidArgument(
                f"{where(index)}: the id {item.id!r} is already used by {where(first)}; ids must be unique"
            )
        other = manifest.items[0]
        if bool(item.split) != bool(other.split):
            raise InvalidArgument(
                f"{where(index)}: has {'a' if item.split else 'no'} split, {where(0)} has "
                f"{'one' if other.split else 'none'}; give all videos a split, or none"
            )
        path = os.path.normpath(os.path.join(root, item.path))
        folder, file = os.path.split(path)
        for kind, seen, key, name in (
            ("video", paths, path, item.path),
            ("video", files, os.path.join(real_folder(folder) if item.split else folder, file), item.path),
            ("group", groups, item.group_key, item.group_key),
        ):
            first = seen.setdefault(key, index)
            if first == index:
                continue
            other = manifest.items[first]
            if other.split != item.split:
                raise InvalidArgument(
                    f"{where(index)}: the {kind} {name!r} is in {item.split}, but in {other.split} at {where(first)}; "
                    f"a {kind} belongs to one split"
                )
            if seen is not files and other.group_key != item.group_key:
                raise InvalidArgument(
                    f"{where(index)}: the video {item.path} is in group {item.group_key!r}, but in group "
                    f"{other.group_key!r} at {where(first)}; write its path and its group alike"
                )


def _problem_of(item: Item, num_classes: int, multi_label: bool) -> str | None:
    """Return what is wrong with an item by itself."""
    labels = item.labels
    if not item.path.strip() or "\0" in item.path:
        return f"the path {item.path!r} is empty or not a path; name the video's file"
    if len(labels) != 1:
        if not multi_label:
            return f"has {len(labels)} labels where exactly one is required; give one, or use a 'labels' column"
        if any(a >= b for a, b in pairwise(labels)):
            return f"the labels {labels} must be sorted and unique"
    if labels and not 0 <= labels[0] <= labels[-1] < num_classes:
        return f"the labels {labels} must lie between 0 and {num_classes - 1}"
    if item.split and item.split not in SPLITS:
        return f"the split {item.split!r} is unknown; choose one of: {', '.join(SPLITS)}"
    if item.start is not None and not 0 <= item.start < math.inf:
        return f"start={item.start!r} is not a time in the video; it must be at least 0 seconds"
    if item.end is not None and not (item.start or 0) < item.end < math.inf:
        return f"end={item.end!r} must be after start={item.start or 0!r}; give a later end"
    if not is_text(f"{item.id}{item.path}{item.group}"):
        return f"{item.path!r} holds a character that is not UTF-8; rename it"
    return None


def _row_of(item: Item, manifest: Manifest, here: str, there: str) -> dict[str, Any]:
    """Return an item for a file in `here`: its path unchanged if the root, `there`, is that, relative if below."""
    names = [manifest.classes[label] for label in item.labels]
    path = item.path
    if here != there and not os.path.isabs(path):
        path = os.path.normpath(os.path.join(there, path))
        below = here.rstrip(os.sep) + os.sep
        path = Path(path.removeprefix(below)).as_posix() if path.startswith(below) else path
    return {
        "id": item.id,
        "path": path,
        **({"labels": names} if manifest.multi_label else {"label": names[0]}),
        "split": item.split,
        "group": item.group,
        "start": item.start,
        "end": item.end,
        "exclusive": None if manifest.exclusive != manifest.multi_label else manifest.exclusive,  # None: the default
    }


def _write_csv(out: IO[str], rows: list[dict[str, Any]], target: Path) -> None:
    always = ("id", "path", "label", "labels")
    columns = [name for name in rows[0] if name in always or any(row[name] not in ("", None) for row in rows)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[name], target) for name in columns])


def _cell(value: Any, target: Path) -> str:
    if isinstance(value, list):
        for name in value:
            if ";" in name or "|" in name:
                raise InvalidArgument(
                    f"{target}: the class {name!r} contains a separator of labels in a CSV; write a .jsonl"
                )
        return ";".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return _short(value) if value is None or isinstance(value, float) else str(value)


def _classes_file_for(manifest: Path, classes: tuple[str, ...]) -> Path:
    own, shared = stem_classes_file(manifest), manifest.with_name(CLASSES_FILE)
    is_other = shared.exists() and shared.read_bytes() != "".join(f"{name}\n" for name in classes).encode()
    return own if own.exists() or is_other else shared


# ---- train, dev and test splits: `make_splits` takes dev out of train and keeps groups together

SPLITS = ("train", "dev", "test")


def make_splits(manifest: Manifest, *, dev_share: float = 0.1, test_share: float = 0.0, seed: int = 0) -> Manifest:
    """Move part of train to dev, and optionally to test: whole groups, with about the same share of each class.

    Shares are of the videos in train. A manifest without splits is all train. A dev split that exists stays.
    The result depends on ids, groups, labels and `seed`, not on the order of the lines.
    """
    shares = {"dev": check_fraction("dev_share", dev_share), "test": check_fraction("test_share", test_share)}
    check_int("seed", seed, at_least=0)
    if sum(shares.values()) >= 1:
        raise InvalidArgument(
            f"dev_share={dev_share!r} and test_share={test_share!r} leave nothing for train; their sum must be below 1"
        )
    existing = {item.split or "train" for item in manifest.items}
    if test_share and "test" in existing:
        raise InvalidArgument(f"test_share={test_share!r} must be 0, since the manifest has a test split; leave it out")
    if "dev" in existing:
        shares["dev"] = 0.0

    groups = _groups_of([item for item in manifest.items if (item.split or "train") == "train"], seed)
    total = sum(group.size for group in groups)
    new_split: dict[str, str] = {}
    targets = {name: max(1.0, share * total) for name, share in shares.items() if share}
    class_sizes = _sum_of(groups)
    for name, target in targets.items():
        taken = _take_groups(groups, target, shares[name], class_sizes)
        if not taken:
            raise InvalidArgument(
                f"{name}_share={shares[name]!r} takes no group out of the {len(groups)} in train "
                f"({total} videos) without losing a class there; give smaller groups, more videos or a share of 0"
            )
        new_split |= dict.fromkeys((group.key for group in taken), name)
        groups = [group for group in groups if group.key not in new_split]
    items = tuple(
        replace(item, split=new_split.get(item.group_key, "train")) if (item.split or "train") == "train" else item
        for item in manifest.items
    )
    return replace(manifest, items=items)


@dataclass(frozen=True)
class _Group:
    key: str
    size: int  # videos
    classes: tuple[tuple[int, int], ...]  # (class, videos of it), sorted; -1 stands for "no label"


def _groups_of(items: Sequence[Item], seed: int) -> list[_Group]:
    sizes = Counter(item.group_key for item in items)
    classes: dict[str, Counter[int]] = {}
    for item in items:
        classes.setdefault(item.group_key, Counter()).update(item.labels or (-1,))
    groups = [_Group(key, size, tuple(sorted(classes[key].items()))) for key, size in sizes.items()]

    def rank(group: _Group) -> tuple[bytes, str]:  # pseudo-random, from the seed and the key alone
        return hashlib.blake2b(f"{seed}\n{group.key}".encode(), digest_size=8).digest(), group.key

    return sorted(groups, key=rank)


def _sum_of(groups: Sequence[_Group]) -> Counter[int]:
    total: Counter[int] = Counter()
    for group in groups:
        for label, count in group.classes:
            total[label] += count
    return total


def _take_groups(groups: Sequence[_Group], target: float, share: float, class_sizes: Counter[int]) -> list[_Group]:
    """Return groups of about `target` videos, with each class near `share` of its size. `groups` are in random order.

    First every group that brings each of its classes nearer to its share, then every one that does so on average. If
    they are still too few (many classes of few videos), the groups that overshoot least: their cost only grows as
    others are taken, so a heap whose entries are updated when they surface finds them.
    """
    taken: dict[str, _Group] = {}
    got: Counter[int] = Counter()
    left = _sum_of(groups)
    size = 0

    def change(group: _Group) -> float:
        """Return how the squared distance to the shares would change, each class in units of its size."""
        return sum(n * (2 * (got[c] - share * class_sizes[c]) + n) / class_sizes[c] for c, n in group.classes)

    def helps_all(group: _Group) -> bool:
        return all(2 * (got[c] - share * class_sizes[c]) + n < 0 for c, n in group.classes)

    def fits(group: _Group) -> bool:
        # Nearer to the target than without it, and no class is lost to what remains.
        return group.size < 2 * (target - size) and all(left[c] > n for c, n in group.classes)

    def take(group: _Group) -> int:
        taken[group.key] = group
        for c, n in group.classes:
            got[c] += n
            left[c] -= n
        return group.size

    for criterion in (helps_all, lambda group: change(group) < 0):
        for group in groups:
            if group.key not in taken and fits(group) and criterion(group):
                size += take(group)
    if size < target:
        heap = [(change(g) / g.size, index, g) for index, g in enumerate(groups) if g.key not in taken and fits(g)]
        heapq.heapify(heap)
        while heap and size < target:
            cost, index, group = heapq.heappop(heap)
            if not fits(group):
                continue  # nor will it later
            now = change(group) / group.size
            if now > cost:
                heapq.heappush(heap, (now, index, group))
            else:
                size += take(group)
    if not taken:
        # Every group is larger than the target: the smallest is better than none, unless it is most of train.
        whole = sum(group.size for group in groups)
        small = [g for g in groups if 2 * g.size <= whole and all(left[c] > n for c, n in g.classes)]
        return [min(small, key=lambda group: group.size)] if small else []
    return list(taken.values())
