"""Import a data set: its official files become a manifest of the videos that are there, and a list of the others."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sosampler._util.files import at, filled_lines, remove_leftovers, write_text
from sosampler._util.validation import one_of
from sosampler.datasets.importers.readers import (
    OFFICIAL_SPLITS,
    READERS,
    AnnotationFile,
    Annotations,
    ReadOptions,
    Record,
    stem_of,
    video_id,
)
from sosampler.datasets.manifest import SPLITS, Item, Manifest, make_splits
from sosampler.datasets.manifest_io import MANIFEST_SUFFIXES, ClassIndex, has_suffix, read_classes, walk_once
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES


@dataclass(frozen=True)
class Imported:
    """A manifest, and the videos of the data set that are not in it."""

    manifest: Manifest
    missing: tuple[str, ...]  # ids without a file
    unlabelled: tuple[str, ...] = ()  # ids without a label, as in official test sets
    overlapping: tuple[str, ...] = ()  # ids removed from train (or dev), since their video is also in test (or dev)
    repeated: int = 0  # further lines about the same video
    unknown_in_subset: tuple[str, ...] = ()  # lines of the subset that name no video of the data set

    def to_dict(self) -> dict[str, Any]:
        counts = self.manifest.counts()
        counts |= {name: len(getattr(self, name)) for name in ("missing", "unlabelled", "overlapping")}
        return counts | {"repeated": self.repeated, "unknown_in_subset": len(self.unknown_in_subset)}

    def write(self, out: Path) -> tuple[Path, Path]:
        """Write the manifest, its class list and `<out>.missing.txt`; return the paths of the last two."""
        missing_file = missing_list(out)  # first: a manifest without it is not taken for an import's after a kill
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(missing_file, (f"{name}\n" for name in self.missing))
        classes_file = self.manifest.write(out)
        remove_leftovers(classes_file, missing_file, only_of_dead=True)
        return classes_file, missing_file


def missing_list(out: Path) -> Path:
    """Return the file beside a manifest that lists the videos that are missing; an import always writes it."""
    return out.with_name(f"{out.name}.missing.txt")


def check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse to overwrite a file that is read, such as Kinetics' own train.csv."""
    one_of("suffix of --out", out.suffix.lower(), MANIFEST_SUFFIXES)
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise InvalidArgument(f"{out}: is one of the files to import; give --out another name")


def import_dataset(
    name: str,
    annotations: Sequence[str | Path],
    *,
    videos: Path,
    classes: Path | None = None,
    subset: Sequence[Path] = (),
    segments: bool = False,
    split_map: Mapping[str, str] | None = None,
    layout: str = "auto",
    dev_share: float = 0.0,
    seed: int = 0,
    exclusive: bool | None = None,
) -> Imported:
    """Read official files and find their videos.

    Args:
        annotations: files, each as FILE or, where neither it nor its name contains the split, FILE=SPLIT.
        videos: the folder with the video files or frame folders, at any depth.
        classes: one name per line: the classes of numbers in the files, or the order of the classes.
        subset: files that name classes or videos to keep.
        segments: write start and end: for Kinetics where a file holds the whole video and not the clip, for COIN to
            use only the annotated part.
        split_map: splits of official subsets, as {"validation": "dev"}; by default validation is test.
        layout: of frame lists: "count", "range", "video", or "auto".
        exclusive: whether classes exclude each other (softmax); None: ActivityNet's do, as all papers train on it,
            others unless a video may have several labels.
    """
    reader = READERS[one_of("data set", name, READERS)]
    given = {word.lower(): one_of(f"split for {word}", split, SPLITS) for word, split in (split_map or {}).items()}
    files = [AnnotationFile.parse(str(file)) for file in annotations]
    if not files:
        raise InvalidArgument("no annotation file was given; give the official files of the data set")
    known = read_classes(classes) if classes is not None else None
    read = reader(files, ReadOptions(known, OFFICIAL_SPLITS | given, layout))
    if not read.records:
        raise InvalidArgument(f"{files[0].path}: holds no video with a label; check the file")
    unknown: list[str] = []
    if subset:
        read, unknown = take_subset(read, subset)
        if known is not None and not read.numbered:
            read = replace(read, classes=known)
    if exclusive is not None:
        read = replace(read, exclusive=exclusive)
    merged = _merge_repeats(read)
    # A video in test is removed from dev and train, one in dev from train.
    last_split: dict[str, str] = {}
    for record in merged:
        last_split[record.source] = max(last_split.get(record.source, "train"), record.split, key=SPLITS.index)
    kept = [record for record in merged if record.split == last_split[record.source]]
    manifest, missing = _manifest_of(kept, read, videos, segments, source=str(classes or "the annotations"))
    if dev_share:
        manifest = make_splits(manifest, dev_share=dev_share, seed=seed)
    return Imported(
        manifest,
        tuple(missing),
        tuple(read.unlabelled),
        tuple(record.id for record in merged if record.split != last_split[record.source]),
        len(read.records) - len(merged),
        tuple(unknown),
    )


def _merge_repeats(annotations: Annotations) -> list[Record]:
    """Return one record per video of a split: labels of further lines are added, or must agree if there is only one."""
    merged: dict[tuple[str, str], Record] = {}
    for record in annotations.records:
        key = (record.split, record.id)
        first = merged.setdefault(key, record)
        if first.labels == record.labels:
            continue
        if not annotations.multi_label:
            raise InvalidArgument(
                f"{record.where}: {record.id} has the label {', '.join(record.labels)}, but {', '.join(first.labels)} "
                f"in {first.where}; correct one of them"
            )
        merged[key] = replace(first, labels=tuple(sorted({*first.labels, *record.labels})))
    return list(merged.values())


def _manifest_of(
    records: Sequence[Record], annotations: Annotations, videos: Path, segments: bool, source: str
) -> tuple[Manifest, list[str]]:
    index = VideoIndex(videos, {name for record in records for name in record.names})
    positions = ClassIndex(annotations.classes, source)
    items: list[Item] = []
    locations: list[str] = []
    missing: list[str] = []
    users: dict[str, Record] = {}  # the record of each path
    for record in records:
        labels = positions.find(record.labels, partial(str, record.where))
        match = index.find(record.names)
        if match is None:
            missing.append(record.id)
            continue
        path, name = match
        # A file named after a clip holds nothing else.
        whole = not segments or (record.group and name == record.id)
        start, end = (None, None) if whole else (record.start, record.end)
        other = users.setdefault(path, record)
        if other is not record and (start, end) == (None, None):
            raise InvalidArgument(
                f"{videos / path}: is the video of both {other.id} and {record.id}; name files after clips, or import "
                "segments if it holds the whole video"
            )
        items.append(Item(record.id, path, labels, record.split, record.group, start, end))
        locations.append(record.where)
    if not items:
        wanted = " or ".join(f"{name}.mp4" for name in records[0].names)
        raise InvalidArgument(
            f"{videos}: holds none of the {len(records)} videos; the first would be named {wanted}, or be a folder "
            "of frame images of that name"
        )
    options: dict[str, Any] = {"exclusive": annotations.exclusive}
    where = locations.__getitem__
    return Manifest(tuple(items), annotations.classes, annotations.multi_label, videos, where, **options), missing


def take_subset(annotations: Annotations, files: Sequence[Path]) -> tuple[Annotations, list[str]]:
    """Return the records that the files name, and the lines that name nothing known.

    A file whose lines are all names of classes selects those classes; any other selects videos, one per line: an id, a
    clip's name, a file name or an address. Several files of videos (train and val) are joined; where classes and videos
    are given, both must match. The classes that remain keep their order.
    """
    known = {label for record in annotations.records for label in record.labels}
    classes: set[str] | None = None
    videos: dict[str, str] | None = None  # as written in the file, by the name it stands for
    for path in files:
        lines = list(filled_lines(path))
        if not lines:
            raise InvalidArgument(f"{path}: names nothing; write one class or one video per line")
        names = [_class_name(text, known) for _, text in lines]
        if all(names):
            classes = (classes or set()) | {name for name in names if name}
            continue
        if any(names) and not annotations.numbered:
            line, text = next(entry for entry, name in zip(lines, names, strict=True) if not name)
            raise InvalidArgument(
                f"{at(path, line)}: {text!r} is not a class of the data set, but other lines are; correct it"
            )
        videos = (videos or {}) | {_video_name(text, at(path, line)): text for line, text in lines}

    kept, used = [], set()
    for record in annotations.records:
        record_names = {record.id, record.source, *record.names}
        hits = record_names & videos.keys() if videos is not None else record_names
        used |= hits
        if hits and (classes is None or classes & set(record.labels)):
            labels = record.labels if classes is None else tuple(x for x in record.labels if x in classes)
            kept.append(replace(record, labels=labels))
    if not kept:
        raise InvalidArgument(f"{files[0]}: names no video of the data set; check that it belongs to these annotations")
    unknown = [text for name, text in (videos or {}).items() if name not in used]
    left = {label for record in kept for label in record.labels}
    remaining = annotations.classes
    if not annotations.numbered:  # where labels are indices, the class list is the data set's complete list
        remaining = tuple(name for name in annotations.classes if name in left)
    return replace(annotations, records=kept, classes=remaining), unknown


def _class_name(text: str, known: set[str]) -> str | None:
    # Class folders often have _ for blanks.
    return next((name for name in (text, text.replace("_", " ")) if name in known), None)


def _video_name(text: str, where: str) -> str:
    if "://" in text:
        return video_id(text.split()[0], where)
    return stem_of(posixpath.basename(text.split(",")[0]))


class VideoIndex:
    """Paths of videos below a folder, relative to it, by their name without suffix."""

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        if not folder.is_dir():
            raise InvalidArgument(f"{folder}: is not a folder; give the one that holds the videos or the frame folders")
        self._by_name: dict[str, list[str]] = {posixpath.basename(name): [] for name in wanted}
        for here, folders, files in walk_once(folder):
            below = Path(here).relative_to(folder)
            # Of a folder of frames no more than the first image is read.
            frames = {name for name in folders if stem_of(name) in self._by_name and _holds_frames(Path(here, name))}
            folders[:] = [name for name in folders if name not in frames]
            named = [name for name in files if stem_of(name) in self._by_name and has_suffix(name, VIDEO_SUFFIXES)]
            for name in (*frames, *(name for name in named if os.path.isfile(os.path.join(here, name)))):
                self._by_name[stem_of(name)].append((below / name).as_posix())
        for paths in self._by_name.values():
            paths.sort(key=lambda path: (path.count("/"), path))

    def find(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return (path, name) for the first name that exists; a name with folders must end the path."""
        for name in names:
            for path in self._by_name.get(posixpath.basename(name), []):
                if "/" not in name or f"/{stem_of(path)}".endswith(f"/{name}"):
                    return path, name
        return None


def _holds_frames(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(has_suffix(entry.name, IMAGE_SUFFIXES) for entry in entries)
