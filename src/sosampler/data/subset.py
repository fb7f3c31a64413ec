"""A smaller bank out of a bank, for carrying elsewhere: frames and teachers, without decoding anything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sosampler.checks import one_of, real_number, whole_number
from sosampler.data.bank import Bank
from sosampler.data.bank_disk import ShardPath, Tally, mean_bytes
from sosampler.data.bank_format import (
    BankFolder,
    BankHead,
    items_text,
    teacher_batch,
    teacher_schema,
    write_text,
)
from sosampler.data.bank_teachers import Teacher
from sosampler.data.bank_writer import Results, begin, writing_bank, writing_shard
from sosampler.data.manifest import Item
from sosampler.data.shards import OnProgress, make_shards
from sosampler.data.splits import SPLITS
from sosampler.errors import InvalidArgument

# What Arrow adds to the numbers themselves: to each row, and to each file.
_ROW_EXTRA, _SHARD_EXTRA = 2048, 4096


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
    """Copy some videos of a bank, with everything that is known about them, into a new bank.

    Args:
        limit: at most so many videos, spread over splits and classes.
        classes: only videos with one of these labels. The class list stays whole, so that teachers still fit.
        splits: only these of train, dev and test.
        max_mb: at most so many megabytes (10**6 bytes) on disk.

    Which videos stay depends on the bank and these arguments alone, and their order is kept.
    """
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    folder = BankFolder(Path(out))
    if folder.path.resolve() == bank.path.resolve():
        raise InvalidArgument(f"{folder.path}: is the bank itself; give another folder for the subset")
    teachers = [bank.teacher(name) for name in bank.teachers]
    chosen = _chosen(bank, teachers, limit, classes, splits, max_mb)
    known = bank.items
    items = [known[row] for row in chosen]
    head = replace(bank.head, num_items=len(items), complete=False, counts=None)
    rows = {item.id: row for item, row in zip(items, chosen, strict=True)}

    def produce(missing: list[Item]) -> Results:
        return (bank[rows[item.id]].stored() for item in missing)

    frames = _tally(bank.head, bank.folder.frames, head, folder.frames)
    answers = [
        _tally(bank.head, partial(bank.folder.teacher_shard, name), head, partial(folder.teacher_shard, name))
        for name in bank.teachers
    ]
    with writing_bank(folder, frames, *answers):
        head = begin(folder, head, items)
        # Teachers first: the frames finish the bank.
        for teacher, tally in zip(teachers, answers, strict=True):
            _copy_teacher(folder, head, teacher, chosen, tally)
        make_shards(folder, head, items, produce, frames, on_progress=on_progress)
    return Bank(folder.path)


def _tally(source: BankHead, source_path: ShardPath, head: BankHead, path: ShardPath) -> Tally:
    """Of a copy, whose videos are as large as those of the source."""
    return Tally(head, path, guess=mean_bytes(Tally(source, source_path)))


def _chosen(
    bank: Bank,
    teachers: list[Teacher],
    limit: int | None,
    classes: Sequence[str] | None,
    splits: Sequence[str] | None,
    max_mb: float | None,
) -> list[int]:
    """Rows that stay, in order."""
    items = bank.items
    rows = list(range(len(items)))
    if splits is not None:
        wanted_splits = {one_of("split", name, SPLITS) for name in splits}
        rows = [row for row in rows if (items[row].split or "train") in wanted_splits]
    if classes is not None:
        known = {name: place for place, name in enumerate(bank.classes)}
        unknown = [name for name in classes if name not in known]
        if unknown:
            raise InvalidArgument(
                f"{bank.path}: has no class {unknown[0]!r}; it has {len(known)}, such as {', '.join(bank.classes[:5])}"
            )
        wanted = {known[name] for name in classes}
        rows = [row for row in rows if wanted & set(items[row].labels)]
    rows = spread(rows, items)
    if limit is not None:
        rows = rows[: whole_number("limit", limit)]
    if max_mb is not None:
        rows = list(_within(rows, bank, teachers, real_number("max_mb", max_mb, above=0) * 1e6))
    if not rows:
        raise InvalidArgument(
            f"{bank.path}: no video is left with limit={limit}, classes={classes}, splits={splits}, max_mb={max_mb}; "
            "ask for more"
        )
    return sorted(rows)


def spread(rows: list[int], items: Sequence[Item]) -> list[int]:
    """The rows in an order whose beginnings hold splits and classes evenly: the first of each, the second, ..."""
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    rank = {}
    for row in rows:
        kind = items[row].split, items[row].labels[:1]
        rank[row] = seen[kind]
        seen[kind] += 1
    return sorted(rows, key=lambda row: (rank[row], row))


def _within(rows: list[int], bank: Bank, teachers: list[Teacher], max_bytes: float) -> Iterator[int]:
    """As many of the first rows as fit."""
    heads = bank.folder.bank_json.stat().st_size + sum(
        bank.folder.teacher_json(teacher.name).stat().st_size for teacher in teachers
    )
    used, kinds, items = float(heads), 1 + len(teachers), bank.items
    for number, row in enumerate(rows):
        used += bank[row].nbytes + len("".join(items_text([items[row]])).encode()) + kinds * _ROW_EXTRA
        used += sum(
            answers.frame_probs.nbytes + (0 if answers.features is None else answers.features.nbytes)
            for answers in (teacher[row] for teacher in teachers)
        )
        if number % bank.head.videos_per_shard == 0:
            used += kinds * _SHARD_EXTRA
        if used > max_bytes:
            return
        yield row


def _copy_teacher(folder: BankFolder, head: BankHead, teacher: Teacher, chosen: list[int], tally: Tally) -> None:
    source = teacher.bank.folder.teacher_json(teacher.name)
    folder.teacher(teacher.name).mkdir(parents=True, exist_ok=True)
    write_text(folder.teacher_json(teacher.name), source.read_text(encoding="utf-8"))
    kept = teacher.about["features"]
    schema = teacher_schema(teacher.num_classes, kept and kept["precision"], kept and kept["width"])
    ids = teacher.bank.ids
    for shard in range(head.num_shards):
        path = folder.teacher_shard(teacher.name, shard)
        if path.exists():
            continue
        with writing_shard(path, schema, tally) as write:
            for place in head.shard_range(shard):
                answers = teacher[chosen[place]]
                write(teacher_batch(schema, ids[chosen[place]], answers.frame_probs, answers.features))
                tally.open_videos += 1
