"""What a bank holds, and whether it is sound."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler.data.bank import Bank
from sosampler.data.bank_format import (
    VERSION,
    BankFolder,
    BankHead,
    checksum_path,
    checksum_text,
    matrix_of,
    open_shard,
    read_failures,
    read_head,
    read_items,
    read_row,
    stored_video,
)
from sosampler.data.bank_teachers import read_teacher
from sosampler.data.manifest import Item
from sosampler.data.splits import SPLITS
from sosampler.errors import InvalidArgument, SosamplerError


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
    }


def _failed_so_far(folder: BankFolder, head: BankHead) -> int:
    return sum(len(read_failures(folder.failed(shard))) for shard in range(head.num_shards))


def _teacher_info(folder: BankFolder, head: BankHead, name: str) -> dict[str, Any]:
    about = read_teacher(folder, name)
    finished = sum(folder.teacher_shard(name, shard).exists() for shard in range(head.num_shards))
    told = {
        key: about[key] for key in ("name", "fingerprint", "num_classes", "pooling", "views", "features", "precision")
    }
    size = sum(file.stat().st_size for file in folder.teacher(name).iterdir())
    return {**told, "folder": name, "complete": finished == head.num_shards, "bytes": size}


def verify_bank(
    path: str | os.PathLike[str], *, pictures: bool = True, on_shard: Callable[[int, int], None] | None = None
) -> list[str]:
    """Everything that is wrong with a bank, one sentence each; empty if it is sound.

    Args:
        pictures: also decode every JPEG.
        on_shard: called with the number of shards done and of all.
    """
    folder = BankFolder(Path(path))
    try:
        head = read_head(folder)
        items = read_items(folder)
        failed = [read_failures(folder.failed(shard)) for shard in range(head.num_shards)]
        teachers = {name: read_teacher(folder, name) for name in folder.teacher_names()}
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
        lengths: dict[str, int] = {}
        problems += _shard_problems(folder.frames(shard), expected, _frames_check(pictures, lengths))
        for name, about in teachers.items():
            if folder.teacher_shard(name, shard).exists():
                problems += _shard_problems(folder.teacher_shard(name, shard), expected, _teacher_check(about, lengths))
            else:
                problems.append(f"{folder.teacher_shard(name, shard)}: is missing; prepare with this classifier again")
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


def _shard_problems(path: Path, expected: list[Item], check: Callable[[Any, Item], str | None]) -> list[str]:
    """Of a shard that must hold these videos. Its checksum is looked at last: it says least about what is wrong."""
    remedy = "delete it and give the same `sosampler prepare` again"
    try:
        reader = open_shard(path)
    except SosamplerError as error:
        return [str(error)]
    if reader.num_record_batches != len(expected):
        return [f"{path}: holds {reader.num_record_batches} videos instead of {len(expected)}; {remedy}"]
    problems = []
    for row, item in enumerate(expected):
        try:
            batch = read_row(reader, row, path)
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


def _frames_check(pictures: bool, lengths: dict[str, int]) -> Callable[[Any, Item], str | None]:
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


def _teacher_check(about: dict[str, Any], lengths: dict[str, int]) -> Callable[[Any, Item], str | None]:
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
