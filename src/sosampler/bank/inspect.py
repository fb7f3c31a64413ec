"""Information about a bank, and checks of all its files."""

from __future__ import annotations

import io
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.arrays import Frames
from sosampler._util.files import checksum_path, checksum_text
from sosampler._util.validation import check_int
from sosampler.bank.bank import Bank
from sosampler.bank.format import (
    AUDIO,
    FEATURES,
    PREPARE_AGAIN,
    TEACHER,
    VERSION,
    BankFolder,
    OutputKind,
    Shown,
    matrix_of,
    open_shard,
    read_failures,
    read_header,
    read_items,
    read_row,
    read_shown,
    stored_video,
)
from sosampler.bank.outputs import read_output_header
from sosampler.datasets.manifest import SPLITS, Item
from sosampler.errors import InvalidArgument, SosamplerError, VideoError


def bank_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return counts, classes, settings and sizes of a bank, also of one that is not finished; reads no frames."""
    bank = Bank(Path(path), partial=True)
    folder, header, counts = bank.folder, bank.header, bank.header.counts or {}
    failed_so_far = sum(len(read_failures(folder.failed(shard))) for shard in range(header.num_shards))
    splits = Counter(item.split or "train" for item in bank.items)
    filled = sum(folder.frames(shard).exists() for shard in range(header.num_shards))
    return {
        "path": str(bank.path),
        "version": VERSION,
        "complete": header.complete,
        "source": header.source,
        "num_items": header.num_items,
        "num_videos": len(bank),
        "num_failed": counts.get("failed", failed_so_far),
        "num_frames": counts.get("frames"),
        "splits": {name: splits[name] for name in SPLITS if name in splits},
        "num_classes": len(header.classes),
        "classes": list(header.classes),
        "multi_label": header.multi_label,
        "exclusive": header.exclusive,
        "settings": header.settings,
        "shards": {"finished": filled, "total": header.num_shards, "videos_each": header.videos_per_shard},
        "bytes": sum(file.stat().st_size for file in bank.path.rglob("*") if file.is_file()),
        "teachers": [_output_info(bank, TEACHER, name, about) for name, about in bank.teachers.items()],
        "features": [_output_info(bank, FEATURES, name, about) for name, about in bank.feature_sets.items()],
        "audio": _audio_info(bank) if bank.has_audio else None,
    }


def _audio_info(bank: Bank) -> dict[str, Any]:
    (name,) = bank.folder.output_names(AUDIO)
    info = _output_info(bank, AUDIO, name, read_output_header(bank.folder, AUDIO, name))
    return {**info, "num_silent": count_silent(bank) if info["complete"] else None}


def count_silent(bank: Bank) -> int:
    """Return how many videos have no sound, of a bank that was prepared with sound."""
    audio = bank.audio()
    return sum(not audio.has_audio(index) for index in range(len(bank)))


def _output_info(bank: Bank, kind: OutputKind, name: str, about: dict[str, Any]) -> dict[str, Any]:
    output = bank.folder.output(kind, name)
    described = {key: about[key] for key in kind.keys} | {"folder" if kind is TEACHER else "name": name}
    size = sum(file.stat().st_size for file in output.path.iterdir())
    return {**described, "complete": not output.missing(bank.header.num_shards), "bytes": size}


def verify_bank(path: str | os.PathLike[str]) -> list[str]:
    """Read every file of a bank, and return one sentence for each problem; empty if there is none."""
    folder = BankFolder(Path(path))
    lengths: dict[str, int] = {}  # frames of each video of a shard
    try:
        header = read_header(folder)
        items = read_items(folder)
        failed = [read_failures(folder.failed(shard)) for shard in range(header.num_shards)]
        outputs = []
        for output in folder.outputs():
            about = read_output_header(folder, output.kind, output.path.name)
            check = {TEACHER: _teacher_problem, FEATURES: _features_problem, AUDIO: _audio_problem}[output.kind]
            outputs.append((output, partial(check, about, lengths)))
        listed = read_failures(folder.failed_jsonl)
        shown = read_shown(folder)
    except InvalidArgument:
        raise  # no bank at all
    except SosamplerError as error:
        return [str(error)]
    if len(items) != header.num_items:
        return [f"{folder.items_jsonl}: lists {len(items)} videos, bank.json counts {header.num_items}"]
    problems: list[str] = []
    if not header.complete:
        problems.append(f"{folder.path}: is not finished; run the same `sosampler prepare` again")
    elif not folder.failed_jsonl.exists() or listed != list(chain.from_iterable(failed)):
        problems.append(
            f"{folder.failed_jsonl}: is missing, or differs from the lists in {folder.frames_folder.name}; "
            "run the same `sosampler prepare` again"
        )
    num_videos = 0
    for shard in range(header.num_shards):
        if not header.complete and not folder.frames(shard).exists():
            continue
        unread = {failure["id"] for failure in failed[shard]}
        expected = [item for item in header.shard_items(items, shard) if item.id not in unread]
        lengths.clear()
        problems += _shard_problems(folder.frames(shard), expected, partial(_frames_problem, lengths), PREPARE_AGAIN)
        for output, problem_of in outputs:
            if output.shard(shard).exists():
                problems += _shard_problems(output.shard(shard), expected, problem_of, output.kind.again)
            else:
                problems.append(f"{output.shard(shard)}: is missing; {output.kind.again}")
        for name, count in lengths.items():
            flags = shown.get(name, Shown()).shows_class
            if flags is not None and len(flags) != count:
                problems.append(f"{folder.shown_jsonl}: has {len(flags)} flags for the {count} frames of {name!r}")
        num_videos += len(expected)
    counts = header.counts or {}
    num_failed = sum(map(len, failed))
    if header.complete and (counts["videos"], counts["failed"]) != (num_videos, num_failed):
        problems.append(
            f"{folder.bank_json}: counts {counts['videos']} videos and {counts['failed']} failed, "
            f"the shards hold {num_videos} and {num_failed}"
        )
    return problems


def _shard_problems(
    path: Path, expected: list[Item], problem_of: Callable[[Any, Item], str | None], again: str
) -> list[str]:
    """Check a shard that must hold these videos. Its checksum comes last: it tells least about what is wrong."""
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
        stored_id = batch.column("id")[0].as_py()
        problem = f"is {stored_id!r}" if stored_id != item.id else problem_of(batch, item)
        if problem:
            problems.append(f"{path}: row {row}, {item.id!r}, {problem}; {remedy}")
    if problems:
        return problems
    checksum = checksum_path(path)
    if not checksum.exists():
        return [f"{path}: its checksum {checksum.name} is missing; copy the bank again, or {remedy}"]
    if checksum.read_bytes() != checksum_text(path, path.name).encode():
        return [f"{path}: differs from what was written, {checksum.name} has another checksum; {remedy}"]
    return []


def _frames_problem(lengths: dict[str, int], batch: Any, item: Item) -> str | None:
    """Check a row of frames, and note in `lengths` how many the video has."""
    lengths[item.id] = len(batch.column("frame_indices").values)
    stored = {name: batch.column(name)[0].as_py() for name in ("labels", "split", "group")}
    if stored != {"labels": list(item.labels), "split": item.split, "group": item.group}:
        return f"has {stored}, unlike items.jsonl"
    video = stored_video(batch)
    count = len(video)
    if not count or len(video.frame_indices) != count or len(video.pts_seconds) != count:
        return f"has {count} images, {len(video.frame_indices)} frame indices and {len(video.pts_seconds)} times"
    if (np.diff(video.frame_indices) <= 0).any() or (np.diff(video.pts_seconds) < 0).any():
        return "has frames that are not in time order"
    for index, data in enumerate(video.jpegs):
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                image.load()
                if image.size != (video.width, video.height):
                    return f"image {index} is {image.size[0]}x{image.size[1]}, not {video.width}x{video.height}"
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            return f"image {index} is damaged ({error})"
    return None


def _teacher_problem(about: dict[str, Any], lengths: dict[str, int], batch: Any, item: Item) -> str | None:
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


def _features_problem(about: dict[str, Any], lengths: dict[str, int], batch: Any, item: Item) -> str | None:
    features = matrix_of(batch, "features")
    expected = f"{about['precision']} [{lengths.get(item.id, len(features))}, {about['width']}]"
    stored = f"{features.dtype} {list(features.shape)}"
    if stored != expected:
        return f"has features of {stored} instead of {expected}"
    return None if np.isfinite(features).all() else "has features that are not finite"


def _audio_problem(about: dict[str, Any], lengths: dict[str, int], batch: Any, item: Item) -> str | None:
    spectra, has_audio = matrix_of(batch, "spectra"), batch.column("has_audio")[0].as_py()
    expected = f"[{lengths.get(item.id, len(spectra))}, {about['bands'] * about['columns']}]"
    if str(list(spectra.shape)) != expected:
        return f"has spectra of shape {list(spectra.shape)} instead of {expected}"
    if not np.isfinite(spectra).all() or (spectra < 0).any():
        return "has spectra that are negative or not finite"
    return "has sound although it is marked as silent" if spectra.any() and not has_audio else None


# ---- frames from which an int8 network is calibrated: spread over videos, or over the training split of a bank

log = logging.getLogger("sosampler")


def bank_frames(bank: str | Path | Bank, count: int) -> Iterator[Frames]:
    """Yield about `count` stored frames of the training videos, evenly; uint8 [1, k, H, W, 3], one video at a time."""
    train = (bank if isinstance(bank, Bank) else Bank.open(bank)).split("train")
    if not len(train):
        raise InvalidArgument(f"{train.path}: has no training videos; give a bank with a train split")
    indices, each = _shares(len(train), count)
    for index in indices:
        item = train[index]
        yield item.frames(item.uniform(min(each, len(item))))[None]


def video_frames(videos: Sequence[Any], count: int, size: int) -> Iterator[Frames]:
    """Yield about `count` frames of videos, evenly, with at most this short side; uint8 [1, k, H, W, 3], one at a time.

    Videos that cannot be read are named in the log; there must be one that can.
    """
    from sosampler.inference.select import select

    indices, each = _shares(len(videos), count)
    failed: VideoError | None = None
    seen = 0
    for index in indices:
        try:
            chosen = select(videos[index], each, policy="uniform", num_candidates=each, size=size, on_short="fewer")
        except VideoError as error:
            failed = error
            log.warning("left out: %s", error)
            continue
        assert chosen.frames is not None
        seen += 1
        yield chosen.frames[None]
    if failed is not None and not seen:
        raise failed


def _shares(num_videos: int, count: int) -> tuple[list[int], int]:
    """Return which videos are read, and how many frames of each."""
    count = check_int("num_frames", count)
    indices = np.linspace(0, num_videos - 1, min(num_videos, count)).round().astype(int).tolist()
    return indices, math.ceil(count / len(indices))
