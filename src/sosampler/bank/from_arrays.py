"""Banks without video files: `write_frames` takes arrays or JPEGs, `subset` some videos of another bank."""

from __future__ import annotations

import io
import operator
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from sosampler._util.arrays import Frames
from sosampler._util.files import write_text
from sosampler._util.progress import OnProgress
from sosampler._util.validation import check_float, check_int, copy_json, one_of
from sosampler._util.workers import in_order
from sosampler.bank.bank import Bank
from sosampler.bank.decode import encode_jpeg
from sosampler.bank.format import (
    VIDEOS_PER_SHARD,
    BankFolder,
    BankHeader,
    Shown,
    StoredVideo,
    import_pyarrow,
    items_text,
    shown_text,
)
from sosampler.bank.outputs import FrameOutputs
from sosampler.bank.writer import Results, begin, make_shards, write_shown, writing_bank, writing_shard
from sosampler.datasets.manifest import SPLITS, Item, Manifest
from sosampler.errors import InvalidArgument

Images = Frames | Sequence[bytes]
"""uint8 [T, H, W, 3], or T JPEGs of one size."""

Storing = Callable[[list["FrameEntry"]], Generator["StoredVideo"]]
"""Encodes entries for the bank, in their order. Called once, with those that are not written yet."""

# What Arrow adds to the numbers themselves: to each row, and to each file.
_ROW_EXTRA, _SHARD_EXTRA = 2048, 4096


@dataclass(frozen=True, eq=False)
class FrameEntry:
    """One video for `write_frames`. Give `frames` as a function where all videos together do not fit into memory."""

    id: str
    labels: tuple[int, ...]
    frames: Images | Callable[[], Images]
    pts_seconds: ArrayLike | None = None  # [T], ascending; None: one frame a second
    split: str = ""
    group: str = ""
    frame_indices: ArrayLike | None = None  # [T]; None: 0 .. T - 1
    duration: float | None = None  # seconds; None: as long again after the last frame as between the last two
    total_num_frames: int | None = None  # None: up to the last frame
    shows_class: ArrayLike | None = None  # bool [T], which frames show the class, where that is known
    sources: Sequence[str] | None = None  # names of the pictures or videos that it is made of, where they are known


def write_frames(
    out: str | os.PathLike[str],
    entries: Iterable[FrameEntry],
    *,
    classes: Sequence[str],
    multi_label: bool = False,
    exclusive: bool | None = None,
    quality: int = 90,
    made_by: dict[str, Any] | None = None,
    workers: int = 1,
    videos_per_shard: int = VIDEOS_PER_SHARD,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Write a bank from frames. Killed and called again with the same entries it resumes.

    Args:
        out: the bank's folder.
        entries: the videos; listed first, so a function as their `frames` is called only when its turn comes, and not
            at all for what is already written.
        classes: names; labels are their indices.
        multi_label: a video may have several labels, or none.
        exclusive: whether classes exclude each other; None: unless `multi_label`.
        quality: of the JPEGs that are made from arrays.
        made_by: plain values that decide the pixels (a recipe, a seed): a later call with others is refused.
        workers: threads that call the functions.
        videos_per_shard: how many videos a file of the bank holds.
        on_progress: called after each video.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_frame
        >>> frames = np.stack([numbered_frame(number) for number in range(4)])  # [T, H, W, 3]
        >>> entry = so.FrameEntry(id="a", labels=(0,), frames=frames, pts_seconds=np.arange(4.0))
        >>> with TemporaryDirectory() as folder:
        ...     so.write_frames(folder, [entry], classes=["ant"])[0].pts_seconds.tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    return write_entries(
        out,
        entries,
        partial(stored_by_threads, quality=quality, num_threads=check_int("workers", workers)),
        classes=classes,
        multi_label=multi_label,
        exclusive=exclusive,
        quality=quality,
        made_by=made_by,
        videos_per_shard=videos_per_shard,
        on_progress=on_progress,
    )


def write_entries(
    out: str | os.PathLike[str],
    entries: Iterable[FrameEntry],
    storing: Storing,
    *,
    classes: Sequence[str],
    multi_label: bool = False,
    exclusive: bool | None = None,
    quality: int = 90,
    made_by: dict[str, Any] | None = None,
    videos_per_shard: int = VIDEOS_PER_SHARD,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Write a bank as `write_frames` does; `storing` encodes the entries."""
    import_pyarrow()
    check_int("quality", quality, at_most=100)
    listed = list(entries)
    if not listed:
        raise InvalidArgument("no entry was given; a bank needs at least one video")
    items = tuple(Item(entry.id, entry.id, _labels_of(entry), entry.split, entry.group) for entry in listed)
    own: Any = {"exclusive": exclusive}
    manifest = Manifest(items, tuple(classes), multi_label, **own)  # checks ids, labels and splits
    settings = {"quality": quality, "made_by": None if made_by is None else copy_json("made_by", made_by)}
    per_shard = check_int("videos_per_shard", videos_per_shard)
    header = BankHeader("arrays", settings, manifest.classes, multi_label, len(items), per_shard, **own)
    by_id = {entry.id: entry for entry in listed}
    folder = BankFolder(Path(out))
    with writing_bank(folder), ExitStack() as stack:

        def produce(missing: list[Item]) -> Results:
            return stack.enter_context(closing(storing([by_id[item.id] for item in missing])))

        make_shards(folder, begin(folder, header, items), items, produce, on_progress=on_progress)
        write_shown(folder, {entry.id: _shown_of(entry) for entry in listed})
    return Bank(folder.path)


def _shown_of(entry: FrameEntry) -> Shown:
    flags = None if entry.shows_class is None else tuple(np.asarray(entry.shows_class, dtype=bool).tolist())
    return Shown(flags, None if entry.sources is None else tuple(dict.fromkeys(map(str, entry.sources))))


def _labels_of(entry: FrameEntry) -> tuple[int, ...]:
    """Return labels as int, also where they are NumPy numbers."""
    try:
        return tuple(operator.index(label) for label in entry.labels)
    except TypeError as error:
        raise InvalidArgument(
            f"{entry.id!r}: labels={entry.labels!r} are not indices of classes; they must be ints"
        ) from error


def stored_by_threads(entries: list[FrameEntry], *, quality: int, num_threads: int) -> Generator[StoredVideo]:
    with ThreadPoolExecutor(num_threads, thread_name_prefix="sosampler-frames") as threads:
        yield from in_order(
            lambda entry: threads.submit(stored_entry, entry, quality),
            entries,
            lambda pending: len(pending) <= 2 * num_threads,
        )


def stored_entry(entry: FrameEntry, quality: int) -> StoredVideo:
    images = entry.frames() if callable(entry.frames) else entry.frames
    jpegs, width, height = _as_jpegs(entry.id, images, quality)
    count = len(jpegs)
    pts = np.arange(count, dtype=np.float64) if entry.pts_seconds is None else np.asarray(entry.pts_seconds, np.float64)
    indices = np.arange(count) if entry.frame_indices is None else np.asarray(entry.frame_indices, np.int64)
    for name, values, step in (("pts_seconds", pts, 0.0), ("frame_indices", indices, 1)):
        if values.shape != (count,) or not np.isfinite(values).all() or (np.diff(values) < step).any():
            raise InvalidArgument(
                f"{entry.id!r}: {name} of shape {list(values.shape)} do not fit its {count} frames; "
                "give one for each frame, in time order"
            )
    if entry.shows_class is not None and np.shape(entry.shows_class) != (count,):
        raise InvalidArgument(
            f"{entry.id!r}: shows_class of shape {list(np.shape(entry.shows_class))} does not fit its {count} frames; "
            "give a bool for each frame"
        )
    between = float(pts[-1] - pts[-2]) if count > 1 else 1.0
    duration, total = float(pts[-1]) + between, int(indices[-1]) + 1
    if entry.duration is not None:
        duration = check_float(f"duration of {entry.id!r}", entry.duration, at_least=0)
    if entry.total_num_frames is not None:
        total = check_int(f"total_num_frames of {entry.id!r}", entry.total_num_frames)
    return StoredVideo(
        jpegs=jpegs,
        frame_indices=indices,
        pts_seconds=pts,
        width=width,
        height=height,
        start_seconds=0.0,
        duration=duration,
        fps=total / duration if duration > 0 else 0.0,
        total_num_frames=total,
    )


def _as_jpegs(name: str, images: Images, quality: int) -> tuple[list[bytes], int, int]:
    if isinstance(images, np.ndarray):
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or 0 in images.shape:
            raise InvalidArgument(
                f"{name!r}: frames are {images.dtype} {list(images.shape)}; must be uint8 [T, H, W, 3] with at "
                "least one frame"
            )
        return [encode_jpeg(frame, quality) for frame in images], images.shape[2], images.shape[1]
    jpegs = list(images)
    sizes = set()
    for data in jpegs:
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                sizes.add(image.size)
        except (OSError, TypeError) as error:
            raise InvalidArgument(
                f"{name!r}: one of its frames is not a JPEG ({error}); give JPEG bytes or an array"
            ) from error
    if len(sizes) != 1:
        raise InvalidArgument(
            f"{name!r}: {len(jpegs)} JPEGs of {len(sizes)} sizes; give at least one, all of the same size"
        )
    return jpegs, *sizes.pop()


# ---- out of another bank


def subset(
    bank: Bank | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    limit: int | None = None,
    classes: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    max_mb: float | None = None,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Copy some videos of a bank, with all their teachers, features and sound, into a new bank.

    Args:
        limit: at most so many videos, spread over splits and classes.
        classes: only videos with one of these labels. The class list does not change, so that teachers still fit.
        splits: only these of train, dev and test.
        max_mb: at most so many megabytes (10**6 bytes) on disk.

    Which videos stay depends on the bank and these arguments alone, and their order is kept.
    """
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    folder = BankFolder(Path(out))
    if folder.path.resolve() == bank.path.resolve():
        raise InvalidArgument(f"{folder.path}: is the bank itself; give another folder for the subset")
    outputs: list[FrameOutputs[Any]] = [
        *(bank.teacher(name) for name in bank.teachers),
        *(bank.features(name) for name in bank.feature_sets),
        *([bank.audio()] if bank.has_audio else []),
    ]
    known = bank.items
    rows = list(range(len(known)))
    if splits is not None:
        wanted_splits = {one_of("split", name, SPLITS) for name in splits}
        rows = [row for row in rows if (known[row].split or "train") in wanted_splits]
    if classes is not None:
        unknown = [name for name in classes if name not in bank.classes]
        if unknown:
            listed = f"it has {len(bank.classes)}, such as {', '.join(bank.classes[:5])}"
            raise InvalidArgument(f"{bank.path}: has no class {unknown[0]!r}; {listed}")
        wanted = {bank.classes.index(name) for name in classes}
        rows = [row for row in rows if wanted & set(known[row].labels)]
    rows = spread(rows, known)
    if limit is not None:
        rows = rows[: check_int("limit", limit)]
    if max_mb is not None:
        rows = list(_within(rows, bank, outputs, check_float("max_mb", max_mb, above=0) * 1e6))
    if not rows:
        raise InvalidArgument(
            f"{bank.path}: no video is left with limit={limit}, classes={classes}, splits={splits}, max_mb={max_mb}; "
            "allow more"
        )
    rows.sort()
    items = [known[row] for row in rows]
    row_of = {item.id: row for item, row in zip(items, rows, strict=True)}

    def produce(missing: list[Item]) -> Results:
        return (bank[row_of[item.id]].stored() for item in missing)

    with writing_bank(folder):
        header = begin(folder, replace(bank.header, num_items=len(items), complete=False, counts=None), items)
        for source in outputs:  # the frames last: they finish the bank
            target = folder.output(source.output_kind, source.name)
            target.path.mkdir(parents=True, exist_ok=True)
            write_text(target.header, source.folder.header.read_text(encoding="utf-8"))
            for shard in target.missing(header.num_shards):
                with writing_shard(target.shard(shard), source.schema) as write:
                    for index in header.shard_range(shard):
                        write(source.batch(rows[index]))
        make_shards(folder, header, items, produce, on_progress=on_progress)
        write_shown(folder, {item.id: bank.shown.get(item.id, Shown()) for item in items})
    return Bank(folder.path)


def spread(rows: list[int], items: Sequence[Item]) -> list[int]:
    """Order rows so that the first ones cover splits and classes evenly: the first of each, the second, ..."""
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    rank = {}
    for row in rows:
        kind = items[row].split, items[row].labels[:1]
        rank[row] = seen[kind]
        seen[kind] += 1
    return sorted(rows, key=lambda row: (rank[row], row))


def _within(rows: list[int], bank: Bank, outputs: list[FrameOutputs[Any]], max_bytes: float) -> Iterator[int]:
    """Yield as many of the first rows as fit."""
    headers = (bank.folder.bank_json, *(each.folder.header for each in outputs))
    used, kinds, items = float(sum(path.stat().st_size for path in headers)), 1 + len(outputs), bank.items
    for number, row in enumerate(rows):
        name = items[row].id
        texts = [*items_text([items[row]]), *shown_text({name: bank.shown[name]} if name in bank.shown else {})]
        used += bank[row].nbytes + len("".join(texts).encode()) + kinds * _ROW_EXTRA
        used += sum(each.batch(row).nbytes for each in outputs)
        if number % bank.header.videos_per_shard == 0:
            used += kinds * _SHARD_EXTRA
        if used > max_bytes:
            return
        yield row
