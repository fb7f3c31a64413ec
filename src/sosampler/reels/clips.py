"""Clips of streams: which there are, how long they are, and which of them a split and the classifier may use.

A group of clips (those cut from one video) is in one split, and within train and dev either for the classifier or for
streams. Neither depends on the seed or the recipe, so that one classifier serves all streams of the same clips.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sosampler._util.progress import OnProgress, Progress
from sosampler._util.validation import check_fraction
from sosampler._util.workers import ProcessPool, Work, WorkerDied
from sosampler.datasets.manifest import SPLITS, Item, Manifest, default_id, make_splits, read_manifest
from sosampler.datasets.manifest_io import read_rows
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.inference.decode import PROCESSES_FROM, attempt
from sosampler.reels.recipe import DISTRACTOR
from sosampler.reels.streams import MIN_SECONDS, Clip, ClipPool
from sosampler.video.discover import expand
from sosampler.video.limits import Limits
from sosampler.video.source import open_video

Source = str | os.PathLike[str] | Manifest
Background = Source | Sequence[Source] | None

# Where rows have no split.
_DEV_SHARE, _TEST_SHARE = 0.2, 0.2
_MAX_NAMED = 5


@dataclass(frozen=True)
class ClipSets:
    """All clips of streams."""

    class_names: tuple[str, ...]
    pools: dict[str, ClipPool]  # of each split
    classifier: tuple[Manifest, ...]  # trimmed clips for a classifier, and the background beside them; may be empty
    skipped: list[dict[str, str]]  # path and error of each that cannot be shown
    notes: list[str]

    def fingerprint(self, split: str) -> str:
        """Return eight hex digits that change with the choice of clips and their lengths."""
        pool = self.pools[split]
        clips = [clip for listed in (*pool.of_class, pool.background) for clip in listed]
        text = repr((self.class_names, [(c.name, c.label, c.group, c.start, c.seconds) for c in clips]))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


class _Entry(NamedTuple):
    item: Item
    path: str
    label: int  # or DISTRACTOR


def open_clips(
    clips: Source,
    background: Background = None,
    *,
    classifier_share: float = 0.5,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> ClipSets:
    """Read manifests, open every clip once, and divide the clips among splits, classifier and streams.

    Args:
        clips: a manifest, in which rows without a label are background.
        background: manifests, whose labels do not matter, or folders of videos.
        classifier_share: share of the groups of each class in train and dev, and of the background there, that streams
            do not show. All of train stay on both sides with at least one group a class.
        workers: processes that open clips.
    """
    check_fraction("classifier_share", classifier_share)
    manifest = _manifest_of(clips)
    entries = _labelled(manifest)
    for source in [background] if isinstance(background, (str, os.PathLike, Manifest)) else background or ():
        entries += _background(source, manifest.classes)
    _check_groups(((entry.item.group_key, entry.item.split) for entry in entries), "clips and background")
    # Checks the files too: one that is listed twice under different names.
    items = (replace(item, id=str(number), path=path) for number, (item, path, _) in enumerate(entries))
    Manifest(tuple(items), manifest.classes, multi_label=True, where=lambda index: entries[index].path)
    probed, skipped = _probe(entries, workers, on_progress)
    notes = []
    if skipped:
        named = ", ".join(each["path"] for each in skipped[:_MAX_NAMED]) + _more(len(skipped))
        notes.append(f"{len(skipped)} of {len(entries)} clips are not shown, skipped.jsonl says why: {named}")
    pools: dict[str, ClipPool] = {}
    apart: list[Item] = []  # with the classifier's clips
    apart_background: list[Item] = []
    for split in SPLITS:
        own = [(entry, clip) for entry, clip in probed if entry.item.split == split]
        usable = [clip for _, clip in own if clip.seconds >= MIN_SECONDS]
        for_classifier: set[str] = set()
        if classifier_share and split != "test":
            for_classifier = _groups_apart(usable, classifier_share, manifest.classes, split)
        shown = [clip for clip in usable if clip.group not in for_classifier]
        of_streams = set() if split == "test" else {clip.group for clip in shown}
        for entry, clip in own:
            if clip.group not in of_streams:  # those too short for a shot too; of test all, on which nothing is trained
                (apart_background if clip.label == DISTRACTOR else apart).append(entry.item)
        of_class = tuple(tuple(clip for clip in shown if clip.label == label) for label in range(len(manifest.classes)))
        pools[split] = ClipPool(of_class, tuple(clip for clip in shown if clip.label == DISTRACTOR))
        missing = [name for name, listed in zip(manifest.classes, of_class, strict=True) if not listed]
        if shown and missing:
            named = ", ".join(missing[:_MAX_NAMED]) + _more(len(missing))
            notes.append(
                f"{len(missing)} of {len(manifest.classes)} classes have no clip for streams in {split}: {named}"
            )
    classifier: tuple[Manifest, ...] = ()
    if classifier_share:
        trimmed = Manifest(tuple(apart), manifest.classes, root=manifest.root)
        beside = Manifest(tuple(apart_background), manifest.classes, multi_label=True, root=manifest.root)
        classifier = (trimmed, beside)
    return ClipSets(manifest.classes, pools, classifier, skipped, notes)


def _more(count: int) -> str:
    return ", ..." if count > _MAX_NAMED else ""


# ---- manifests


def _manifest_of(clips: Source) -> Manifest:
    if isinstance(clips, Manifest):
        manifest = clips
    else:
        if not Path(clips).is_dir():  # all such groups are named, where `read_manifest` names the first
            rows = read_rows(Path(clips), multi_label=True).rows
            _check_groups(((row.group or row.path, row.split) for row in rows), str(clips))
        manifest = read_manifest(clips, multi_label=True)
    for item in manifest.items:
        if len(item.labels) > 1:
            names = ", ".join(manifest.classes[label] for label in item.labels)
            raise InvalidArgument(f"{item.path}: shows {names}; a clip must have one label, or none for background")
    if not any(item.labels for item in manifest.items):
        raise InvalidArgument(f"{clips}: has no clip with a label; give a manifest of clips with path and label")
    return manifest


def _labelled(manifest: Manifest) -> list[_Entry]:
    items = _with_splits(manifest, str(manifest.root)).items
    return [
        _Entry(item, os.path.abspath(manifest.path_of(item)), item.labels[0] if item.labels else DISTRACTOR)
        for item in items
    ]


def _background(source: Source, classes: Sequence[str]) -> list[_Entry]:
    """Read videos without a class: rows of a manifest, or all videos of a folder."""
    rows: list[tuple[Item, Path, Sequence[str]]]
    if isinstance(source, Manifest):
        rows = [(item, source.path_of(item), [source.classes[label] for label in item.labels]) for item in source.items]
    elif Path(source).is_dir():
        rows = [(Item("", os.fspath(path), ()), path, []) for path in expand([os.fspath(source)])]
    else:
        table = read_rows(Path(source), multi_label=True, needs_label=False)
        rows = [
            (
                Item("", row.path, (), row.split, row.group, row.start, row.end),
                Path(source).parent / row.path,
                row.labels,
            )
            for row in table.rows
        ]
    items = []
    for item, path, labels in rows:
        own = next((name for name in labels if name in classes), None)
        if own is not None:
            raise InvalidArgument(
                f"{path}: is background of class {own!r}, which the clips have too; remove it from the background"
            )
        absolute = os.path.abspath(path)
        group = item.group or absolute
        name = default_id(absolute, item.start, item.end)
        items.append(replace(item, id=name, path=absolute, labels=(), group=group))
    manifest = _with_splits(Manifest(tuple(items), tuple(classes), multi_label=True), str(source))
    return [_Entry(item, item.path, DISTRACTOR) for item in manifest.items]


def _with_splits(manifest: Manifest, name: str) -> Manifest:
    """Return the manifest with splits; without any, its groups are divided."""
    if not manifest.items or manifest.items[0].split:
        return manifest
    try:
        return make_splits(manifest, dev_share=_DEV_SHARE, test_share=_TEST_SHARE)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{name}: has no splits and cannot be divided ({error}); write train, dev or test in a column split"
        ) from error


def _check_groups(rows: Iterable[tuple[str, str]], where: str) -> None:
    """Refuse groups, given as (group, split) of every clip, that are in two splits, and name them."""
    splits: dict[str, dict[str, None]] = {}
    for group, split in rows:
        splits.setdefault(group, {})[split] = None
    crossing = [f"{group!r} ({', '.join(found)})" for group, found in splits.items() if len(found) > 1]
    if crossing:
        named = ", ".join(crossing[:_MAX_NAMED])
        if len(crossing) > _MAX_NAMED:
            named += f" and {len(crossing) - _MAX_NAMED} more"
        raise InvalidArgument(f"{where}: groups are in two splits: {named}; put all clips of a group into one split")


def _groups_apart(clips: Sequence[Clip], share: float, classes: Sequence[str], split: str) -> set[str]:
    """Return the groups of one split that the classifier gets: that share of the groups of each class.

    Where a class has few, train leaves both sides at least one; in dev, streams come first.
    """
    groups: dict[int, set[str]] = {}
    for clip in clips:
        groups.setdefault(clip.label, set()).add(clip.group)
    decided: dict[str, bool] = {}  # a group may show several classes
    fewest = 1 if split == "train" else 0
    for label in sorted(groups, key=lambda label: (len(groups[label]), label)):
        own = sorted(groups[label], key=_rank)
        if len(own) == 1 and fewest:
            name = "the background" if label == DISTRACTOR else f"class {classes[label]!r}"
            raise InvalidArgument(
                f"{name} has one group only ({own[0]}) in {split}, which cannot be divided between classifier and "
                "streams; give more groups, or classifier_share=0 with a classifier of other clips"
            )
        wanted = min(max(round(share * len(own)), fewest), len(own) - 1)
        for group in own:
            if group not in decided:
                decided[group] = wanted > sum(decided.get(other, False) for other in own)
    apart = {group for group, is_apart in decided.items() if is_apart}
    for label, every in groups.items():
        if fewest and (every <= apart or not every & apart):
            raise InvalidArgument(
                f"class {classes[label]!r} shares its {len(every)} groups in {split} with other classes, so that they "
                "cannot be divided between classifier and streams; give more groups, or classifier_share=0"
            )
    return apart


def _rank(group: str) -> tuple[bytes, str]:
    """Return a pseudo-random rank that depends on the name alone."""
    return hashlib.blake2b(group.encode(errors="surrogateescape"), digest_size=8).digest(), group


# ---- lengths


def _probe(
    entries: Sequence[_Entry], workers: int, on_progress: OnProgress | None
) -> tuple[list[tuple[_Entry, Clip]], list[dict[str, str]]]:
    """Open every clip; return those that can be read, and why clips cannot be shown."""
    probed: list[tuple[_Entry, Clip]] = []
    skipped: list[dict[str, str]] = []
    progress = Progress(len(entries), stage="(clips)")
    tasks = [(entry.path, entry.item.start, entry.item.end) for entry in entries]
    num_processes = min(workers, len(tasks) // PROCESSES_FROM)
    with ClipProcesses(num_processes, "sosampler.reels.clips:prober", work="reading clips") as pool:
        for entry, result in zip(entries, pool.results(tasks), strict=True):
            progress.done += 1
            if isinstance(result, SosamplerError):
                skipped.append({"path": entry.path, "error": str(result)})
                progress.failed += 1
            else:
                start, seconds = result
                group = entry.item.group_key
                probed.append((entry, Clip(entry.path, entry.item.path, entry.label, group, start, seconds)))
                if seconds < MIN_SECONDS:
                    text = f"{entry.path}: lasts {seconds:.2f} s; a shot must last at least {MIN_SECONDS:g} s"
                    skipped.append({"path": entry.path, "error": text})
            if on_progress is not None:
                on_progress(progress)
    return probed, skipped


class ClipProcesses(ProcessPool):
    """Processes for tasks that begin with a path; a file that kills its process is an error of that task alone."""

    def call(self, task: tuple[Any, ...], timeout: float | None = None) -> Any:
        try:
            return super().call(task, timeout or Limits().timeout)
        except WorkerDied as died:
            return VideoError(died.over(task[0]))


def prober(_: None) -> Work:
    """Return the function that finds out when a clip (path, start, end) begins and how many seconds it lasts."""

    def span(path: str, start: float | None, end: float | None) -> tuple[float, float]:
        with closing(open_video(path, threads=1)) as reader:
            reader.read(np.zeros(1, dtype=np.int64))  # raises where nothing can be decoded
            return reader.metadata.span(start, end)

    probe: Callable[[Any], Any] = lambda task: attempt(task[0], lambda: span(*task))  # noqa: E731
    return probe
