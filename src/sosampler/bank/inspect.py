"""What a bank holds, and whether it is sound."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.files import checksum_path, checksum_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import (
    PREPARE_AGAIN,
    VERSION,
    AnswersFolder,
    BankFolder,
    BankHead,
    matrix_of,
    open_shard,
    read_failures,
    read_head,
    read_items,
    read_row,
    stored_video,
)
from sosampler.bank.outputs import read_features, read_teacher
from sosampler.datasets.manifest import Item
from sosampler.datasets.splits import SPLITS
from sosampler.errors import InvalidArgument, SosamplerError

_RowCheck = Callable[[Any, Item], str | None]
"""What is wrong with the row of a video, None if nothing is."""


def bank_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Figures of a bank, also of one that is not finished; reads no pictures."""
    bank = Bank(Path(path), partial=True)
    folder, head = BankFolder(bank.path), bank.head
    splits = Counter(item.split or "train" for item in bank.items)
    filled = sum(folder.frames(shard).exists() for shard in range(head.num_shards))
    return {
        "path": str(bank.path),
        "version": VERSION,
        "complete": head.complete,
        "source": head.source,
        "num_items": head.num_items,
        "num_videos": len(bank),
        "num_failed": (head.counts or {}).get("failed", _failed_so_far(folder, head)),
        "num_frames": (head.counts or {}).get("frames"),
        "splits": {name: splits[name] for name in SPLITS if name in splits},
        "num_classes": len(head.classes),
        "classes": list(head.classes),
        "multi_label": head.multi_label,
        "settings": head.settings,
        "shards": {"finished": filled, "total": head.num_shards, "videos_each": head.videos_per_shard},
        "bytes": sum(file.stat().st_size for file in bank.path.rglob("*") if file.is_file()),
        "teachers": [_teacher_info(folder, head, name) for name in folder.teacher_names()],
        "features": [_features_info(folder, head, name) for name in folder.feature_names()],
    }


def _failed_so_far(folder: BankFolder, head: BankHead) -> int:
    return sum(len(read_failures(folder.failed(shard))) for shard in range(head.num_shards))


def _teacher_info(folder: BankFolder, head: BankHead, name: str) -> dict[str, Any]:
    about = read_teacher(folder, name)
    keys = ("name", "fingerprint", "num_classes", "pooling", "views", "features", "precision")
    return {**{key: about[key] for key in keys}, "folder": name, **_extent(folder.teacher_answers(name), head)}


def _features_info(folder: BankFolder, head: BankHead, name: str) -> dict[str, Any]:
    about = read_features(folder, name)
    keys = ("network", "network_name", "fingerprint", "width", "precision", "gmacs")
    return {"name": name, **{key: about[key] for key in keys}, **_extent(folder.feature_answers(name), head)}


def _extent(answers: AnswersFolder, head: BankHead) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in answers.path.iterdir())
    return {"complete": not answers.missing(head.num_shards), "bytes": size}


def verify_bank(
    path: str | os.PathLike[str], *, pictures: bool = True, on_shard: Callable[[int, int], None] | None = None
) -> list[str]:
    """Everything that is wrong with a bank, one sentence each; empty if it is sound.

    Args:
        pictures: also decode every JPEG.
        on_shard: called with the number of shards done and of all.
    """
    folder = BankFolder(Path(path))
    lengths: dict[str, int] = {}  # frames of each video of a shard
    try:
        head = read_head(folder)
        items = read_items(folder)
        failed = [read_failures(folder.failed(shard)) for shard in range(head.num_shards)]
        answers = [*_teacher_checks(folder, lengths), *_feature_checks(folder, lengths)]
        listed = read_failures(folder.failed_jsonl)
    except InvalidArgument:
        raise  # no bank at all
    except SosamplerError as error:
        return [str(error)]
    if len(items) != head.num_items:
        return [f"{folder.items_jsonl}: lists {len(items)} videos, bank.json counts {head.num_items}"]
    problems: list[str] = []
    if not head.complete:
        problems.append(f"{folder.path}: is not finished; give the same `sosampler prepare` again")
    elif not folder.failed_jsonl.exists() or listed != list(chain.from_iterable(failed)):
        problems.append(
            f"{folder.failed_jsonl}: is missing, or is not what the lists in {folder.frames_folder.name} are together; "
            "give the same `sosampler prepare` again"
        )
    num_videos = 0
    for shard in range(head.num_shards):
        if not head.complete and not folder.frames(shard).exists():
            continue
        unread = {failure["id"] for failure in failed[shard]}
        expected = [items[place] for place in head.shard_range(shard) if items[place].id not in unread]
        lengths.clear()
        problems += _shard_problems(folder.frames(shard), expected, _frames_check(pictures, lengths), PREPARE_AGAIN)
        for place, check in answers:
            if place.shard(shard).exists():
                problems += _shard_problems(place.shard(shard), expected, check, place.again)
            else:
                problems.append(f"{place.shard(shard)}: is missing; {place.again}")
        num_videos += len(expected)
        if on_shard is not None:
            on_shard(shard + 1, head.num_shards)
    counts = head.counts or {}
    num_failed = sum(map(len, failed))
    if head.complete and (counts["videos"], counts["failed"]) != (num_videos, num_failed):
        problems.append(
            f"{folder.bank_json}: counts {counts['videos']} videos and {counts['failed']} failed, "
            f"the shards hold {num_videos} and {num_failed}"
        )
    return problems


def _shard_problems(path: Path, expected: list[Item], check: _RowCheck, again: str) -> list[str]:
    """Of a shard that must hold these videos. Its checksum is looked at last: it says least about what is wrong."""
    remedy = f"delete it and {again}"
    try:
        reader = open_shard(path, again)
    except SosamplerError as error:
        return [str(error)]
    if reader.num_record_batches != len(expected):
        return [f"{path}: holds {reader.num_record_batches} videos instead of {len(expected)}; {remedy}"]
    problems = []
    for row, item in enumerate(expected):
        try:
            batch = read_row(reader, row, path, again)
        except SosamplerError as error:
            problems.append(str(error))
            continue
        told = batch.column("id")[0].as_py()
        problem = f"is of {told!r}" if told != item.id else check(batch, item)
        if problem:
            problems.append(f"{path}: row {row}, {item.id!r}, {problem}; {remedy}")
    if problems:
        return problems
    checksum = checksum_path(path)
    if not checksum.exists():
        return [f"{path}: its checksum {checksum.name} is missing; copy the bank again, or {remedy}"]
    if checksum.read_bytes() != checksum_text(path, path.name).encode():
        return [f"{path}: is not what was written, {checksum.name} has another checksum; {remedy}"]
    return []


def _frames_check(pictures: bool, lengths: dict[str, int]) -> _RowCheck:
    """Checks of a row of frames; notes in `lengths` how many each video has."""

    def check(batch: Any, item: Item) -> str | None:
        lengths[item.id] = len(batch.column("frame_indices").values)
        told = {name: batch.column(name)[0].as_py() for name in ("labels", "split", "group")}
        if told != {"labels": list(item.labels), "split": item.split, "group": item.group}:
            return f"has {told}, unlike items.jsonl"
        return _frames_problem(batch, pictures)

    return check


def _frames_problem(batch: Any, pictures: bool) -> str | None:
    video = stored_video(batch)
    count = len(video)
    if not count or len(video.frame_indices) != count or len(video.pts_seconds) != count:
        return f"has {count} pictures, {len(video.frame_indices)} frame numbers and {len(video.pts_seconds)} times"
    if (np.diff(video.frame_indices) <= 0).any() or (np.diff(video.pts_seconds) < 0).any():
        return "has frames that are not in time order"
    for place, data in enumerate(video.jpegs if pictures else []):
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                image.load()
                if image.size != (video.width, video.height):
                    return f"picture {place} is {image.size[0]}x{image.size[1]}, not {video.width}x{video.height}"
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            return f"picture {place} is damaged ({error})"
    return None


def _teacher_checks(folder: BankFolder, lengths: dict[str, int]) -> Iterator[tuple[AnswersFolder, _RowCheck]]:
    """Where teachers lie, and the check of a row of each."""
    for name in folder.teacher_names():
        yield folder.teacher_answers(name), _teacher_check(read_teacher(folder, name), lengths)


def _feature_checks(folder: BankFolder, lengths: dict[str, int]) -> Iterator[tuple[AnswersFolder, _RowCheck]]:
    """Where features lie, and the check of a row of each."""
    for name in folder.feature_names():
        yield folder.feature_answers(name), _features_check(read_features(folder, name), lengths)


def _teacher_check(about: dict[str, Any], lengths: dict[str, int]) -> _RowCheck:
    def check(batch: Any, item: Item) -> str | None:
        probs = matrix_of(batch, "frame_probs")
        expected = lengths.get(item.id, len(probs))
        if probs.shape != (expected, about["num_classes"]):
            return f"has probabilities of shape {list(probs.shape)} instead of [{expected}, {about['num_classes']}]"
        if not ((probs >= 0) & (probs <= 1)).all():
            return "has probabilities outside of 0..1"
        if about["features"]:
            features = matrix_of(batch, "features")
            if len(features) != expected or not np.isfinite(features).all():
                return f"has {len(features)} rows of features for {expected} frames, or some are not finite"
        return None

    return check


def _features_check(about: dict[str, Any], lengths: dict[str, int]) -> _RowCheck:
    def check(batch: Any, item: Item) -> str | None:
        features = matrix_of(batch, "features")
        wanted = f"{about['precision']} [{lengths.get(item.id, len(features))}, {about['width']}]"
        found = f"{features.dtype} {list(features.shape)}"
        if found != wanted:
            return f"has features of {found} instead of {wanted}"
        if not np.isfinite(features).all():
            return "has features that are not finite"
        return None

    return check
