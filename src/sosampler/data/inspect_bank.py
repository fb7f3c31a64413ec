"""What a bank holds, and whether it is sound."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler.data.bank import Bank, read_teacher
from sosampler.data.bank_format import (
    VERSION,
    BankFolder,
    BankHead,
    matrix_of,
    open_shard,
    read_failures,
    read_head,
    read_items,
    stored_video,
)
from sosampler.data.splits import SPLITS
from sosampler.errors import SosamplerError


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
    head = read_head(folder)
    items = read_items(folder)
    problems: list[str] = []
    if len(items) != head.num_items:
        return [f"{folder.items_jsonl}: lists {len(items)} videos, bank.json counts {head.num_items}"]
    if not head.complete:
        problems.append(f"{folder.path}: is not finished; give the same `sosampler prepare` again")
    num_videos = num_failed = 0
    for shard in range(head.num_shards):
        if not head.complete and not folder.frames(shard).exists():
            continue
        failed = {failure["id"] for failure in read_failures(folder.failed(shard))}
        expected = [items[place].id for place in head.shard_range(shard) if items[place].id not in failed]
        lengths: dict[str, int] = {}
        problems += _shard_problems(folder.frames(shard), expected, lambda row: _frames_problem(row, pictures), lengths)
        for name in folder.teacher_names():
            if folder.teacher_shard(name, shard).exists():
                check = _teacher_check(read_teacher(folder, name), lengths)
                problems += _shard_problems(folder.teacher_shard(name, shard), expected, check, {})
            else:
                problems.append(f"{folder.teacher_shard(name, shard)}: is missing; prepare with this classifier again")
        num_videos, num_failed = num_videos + len(expected), num_failed + len(failed)
        if on_shard is not None:
            on_shard(shard + 1, head.num_shards)
    counts = head.counts or {}
    if head.complete and (counts["videos"], counts["failed"]) != (num_videos, num_failed):
        problems.append(
            f"{folder.bank_json}: counts {counts['videos']} videos and {counts['failed']} failed, "
            f"the shards hold {num_videos} and {num_failed}"
        )
    return problems


def _shard_problems(
    path: Path, expected: list[str], check: Callable[[Any], str | None], lengths: dict[str, int]
) -> Iterator[str]:
    remedy = "delete it and give the same `sosampler prepare` again"
    try:
        reader = open_shard(path)
    except SosamplerError as error:
        yield str(error)
        return
    if reader.num_record_batches != len(expected):
        yield f"{path}: holds {reader.num_record_batches} videos instead of {len(expected)}; {remedy}"
        return
    for row, video_id in enumerate(expected):
        try:
            batch = reader.get_batch(row)
            batch.validate(full=True)
            told = batch.column("id")[0].as_py()
            problem = f"is of {told!r}" if told != video_id else check(batch)
            if "frame_indices" in batch.schema.names:
                lengths[video_id] = len(batch.column("frame_indices").values)
        except (OSError, ValueError) as error:  # Arrow's own word for damaged bytes is a ValueError
            problem = f"cannot be read ({error})"
        if problem:
            yield f"{path}: row {row}, {video_id!r}, {problem}; {remedy}"


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
        except (OSError, SyntaxError) as error:
            return f"picture {place} is damaged ({error})"
    return None


def _teacher_check(about: dict[str, Any], lengths: dict[str, int]) -> Callable[[Any], str | None]:
    def check(batch: Any) -> str | None:
        probs = matrix_of(batch, "frame_probs")
        expected = lengths.get(batch.column("id")[0].as_py(), len(probs))
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
