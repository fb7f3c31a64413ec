"""From the official files of a data set to a manifest of the videos that are there, and a report of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler._util.validation import one_of
from sosampler.datasets.classes import ClassIndex, read_classes
from sosampler.datasets.importers.activitynet import read_activitynet, read_coin
from sosampler.datasets.importers.frame_lists import read_frame_lists
from sosampler.datasets.importers.kinetics import read_kinetics
from sosampler.datasets.importers.records import AnnotationFile, Annotations, ReadOptions, Record, VideoIndex
from sosampler.datasets.importers.sports1m import read_sports1m
from sosampler.datasets.importers.subset import take_subset
from sosampler.datasets.manifest import Item, Manifest
from sosampler.datasets.manifest_io import MANIFEST_SUFFIXES
from sosampler.datasets.splits import SPLITS, make_splits
from sosampler.errors import InvalidArgument

READERS: dict[str, Callable[[Sequence[AnnotationFile], ReadOptions], Annotations]] = {
    "activitynet": read_activitynet,
    "kinetics": read_kinetics,
    "sports1m": read_sports1m,
    "coin": read_coin,
    "frames": read_frame_lists,
}


@dataclass(frozen=True)
class Imported:
    """A manifest, and what of the data set is not in it."""

    manifest: Manifest
    missing: tuple[str, ...]  # ids without a file
    unlabelled: tuple[str, ...] = ()  # ids without a label, as in official test sets
    overlapping: tuple[str, ...] = ()  # ids taken out of train (or dev), since their video is also in test (or dev)
    repeated: int = 0  # further lines about the same video
    unknown_in_subset: tuple[str, ...] = ()  # lines of the subset that name no video of the data set

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.manifest.counts(),
            "missing": len(self.missing),
            "unlabelled": len(self.unlabelled),
            "overlapping": len(self.overlapping),
            "repeated": self.repeated,
            "unknown_in_subset": len(self.unknown_in_subset),
        }

    def write(self, out: Path) -> tuple[Path, Path]:
        """Write the manifest, its class list and `<out>.missing.txt`; the paths of the last two are returned."""
        classes_file = self.manifest.write(out)
        missing_file = out.with_name(f"{out.name}.missing.txt")
        with replacing(missing_file) as temporary:
            temporary.write_text("".join(f"{name}\n" for name in self.missing), encoding="utf-8", newline="\n")
        return classes_file, missing_file


def check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write over the files that are read, such as Kinetics' own train.csv."""
    one_of("ending of --out", out.suffix.lower(), MANIFEST_SUFFIXES)
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
) -> Imported:
    """Read official files and find their videos.

    Args:
        name: which files they are, one of `READERS`.
        annotations: files, each as FILE or, where neither it nor its name says which split it holds, FILE=SPLIT.
        videos: the folder with the video files or frame folders, at any depth.
        classes: one name a line: what numbers in the files count, or the order of the classes.
        subset: files that name classes or videos to keep.
        segments: write start and end: for Kinetics where a file holds the whole video and not the clip, for COIN to
            keep to the annotated part.
        split_map: what an official subset is, as {"validation": "dev"}; by default validation is test.
        layout: of frame lists: "count", "range", "video", or "auto".
        dev_share: carve dev out of train, see `make_splits`.
    """
    reader = READERS[one_of("data set", name, READERS)]
    mapping = {word.lower(): one_of(f"split for {word}", split, SPLITS) for word, split in (split_map or {}).items()}
    files = [AnnotationFile.parse(str(file)) for file in annotations]
    if not files:
        raise InvalidArgument("no annotation file was given; give the official files of the data set")
    known = read_classes(classes) if classes is not None else None
    read = reader(files, ReadOptions(known, mapping, layout))
    if not read.records:
        raise InvalidArgument(f"{files[0].path}: holds no video with a label; check the file")
    unknown: list[str] = []
    if subset:
        read, unknown = take_subset(read, subset)
        if known is not None and not read.numbered:
            read = replace(read, classes=known)
    merged = _merge_repeats(read)
    kept, overlapping = _without_overlap(merged)
    manifest, missing = _manifest_of(kept, read, videos, segments, source=str(classes or "the annotations"))
    if dev_share:
        manifest = make_splits(manifest, dev_share=dev_share, seed=seed)
    return Imported(
        manifest,
        tuple(missing),
        tuple(read.unlabelled),
        tuple(record.id for record in overlapping),
        len(read.records) - len(merged),
        tuple(unknown),
    )


def _merge_repeats(annotations: Annotations) -> list[Record]:
    """One record for each video of a split: labels of further lines are added, or must agree if only one is allowed."""
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


def _without_overlap(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """(what stays, what goes): a video in test is taken out of dev and train, one in dev out of train."""
    highest: dict[str, int] = {}
    for record in records:
        highest[record.source] = max(highest.get(record.source, 0), SPLITS.index(record.split))
    stay: list[Record] = []
    go: list[Record] = []
    for record in records:
        (stay if SPLITS.index(record.split) == highest[record.source] else go).append(record)
    return stay, go


def _manifest_of(
    records: Sequence[Record], annotations: Annotations, videos: Path, segments: bool, source: str
) -> tuple[Manifest, list[str]]:
    index = VideoIndex(videos, {name for record in records for name in record.names})
    positions = ClassIndex(annotations.classes, source)
    items: list[Item] = []
    places: list[str] = []
    missing: list[str] = []
    users: dict[str, Record] = {}  # who has a path, and where its part is not bounded
    for record in records:
        labels = _positions_of(record, positions)
        found = index.find(record.names)
        if found is None:
            missing.append(record.id)
            continue
        path, name = found
        # A file called after a clip holds nothing else.
        whole = not segments or (record.group and name == record.id)
        start, end = (None, None) if whole else (record.start, record.end)
        other = users.setdefault(path, record)
        if other is not record and (start, end) == (None, None):
            raise InvalidArgument(
                f"{videos / path}: is the video of both {other.id} and {record.id}; name files after clips, or ask for "
                "segments if it holds the whole video"
            )
        items.append(Item(record.id, path, labels, record.split, record.group, start, end))
        places.append(record.where)
    if not items:
        wanted = " or ".join(f"{name}.mp4" for name in records[0].names)
        raise InvalidArgument(
            f"{videos}: holds none of the {len(records)} videos; the first would be called {wanted}, or be a folder "
            "of frame images of that name"
        )
    return Manifest(tuple(items), annotations.classes, annotations.multi_label, videos, places.__getitem__), missing


def _positions_of(record: Record, index: ClassIndex) -> tuple[int, ...]:
    found = {label: index.find(label) for label in record.labels}
    for label, position in found.items():
        if position is None:
            raise InvalidArgument(f"{record.where}: {index.complaint(label)}")
    return tuple(sorted({position for position in found.values() if position is not None}))
