"""A smaller bank out of a bank, for carrying elsewhere: frames, teachers and features, without decoding anything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler._util.progress import OnProgress
from sosampler._util.validation import one_of, real_number, whole_number
from sosampler.bank.bank import Bank
from sosampler.bank.format import AnswersFolder, BankFolder, BankHead, items_text, write_text
from sosampler.bank.outputs import BankAnswers
from sosampler.bank.prepare import make_shards
from sosampler.bank.writer import Results, ShardPath, Tally, begin, mean_bytes, writing_bank, writing_shard
from sosampler.datasets.manifest import Item
from sosampler.datasets.splits import SPLITS
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
    # What networks said, and where it goes.
    copies: list[tuple[BankAnswers[Any], AnswersFolder]] = [
        *((bank.teacher(name), folder.teacher_answers(name)) for name in bank.teachers),
        *((bank.features(name), folder.feature_answers(name)) for name in bank.feature_sets),
    ]
    chosen = _chosen(bank, [answers for answers, _ in copies], limit, classes, splits, max_mb)
    known = bank.items
    items = [known[row] for row in chosen]
    head = replace(bank.head, num_items=len(items), complete=False, counts=None)
    rows = {item.id: row for item, row in zip(items, chosen, strict=True)}

    def produce(missing: list[Item]) -> Results:
        return (bank[rows[item.id]].stored() for item in missing)

    frames = _tally(bank.head, bank.folder.frames, head, folder.frames)
    tallies = [_tally(bank.head, answers.folder.shard, head, target.shard) for answers, target in copies]
    with writing_bank(folder, frames, *tallies):
        head = begin(folder, head, items)
        # The frames last: they finish the bank.
        for (answers, target), tally in zip(copies, tallies, strict=True):
            _copy_answers(target, head, answers, chosen, tally)
        make_shards(folder, head, items, produce, frames, on_progress=on_progress)
    return Bank(folder.path)


def _tally(source: BankHead, source_path: ShardPath, head: BankHead, path: ShardPath) -> Tally:
    """Of a copy, whose videos are as large as those of the source."""
    return Tally(head, path, guess=mean_bytes(Tally(source, source_path)))


def _chosen(
    bank: Bank,
    answers: list[BankAnswers[Any]],
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
        rows = list(_within(rows, bank, answers, real_number("max_mb", max_mb, above=0) * 1e6))
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


def _within(rows: list[int], bank: Bank, answers: list[BankAnswers[Any]], max_bytes: float) -> Iterator[int]:
    """As many of the first rows as fit."""
    heads = sum(path.stat().st_size for path in (bank.folder.bank_json, *(each.folder.head for each in answers)))
    used, kinds, items = float(heads), 1 + len(answers), bank.items
    for number, row in enumerate(rows):
        used += bank[row].nbytes + len("".join(items_text([items[row]])).encode()) + kinds * _ROW_EXTRA
        used += sum(each.batch(row).nbytes for each in answers)
        if number % bank.head.videos_per_shard == 0:
            used += kinds * _SHARD_EXTRA
        if used > max_bytes:
            return
        yield row


def _copy_answers(
    target: AnswersFolder, head: BankHead, answers: BankAnswers[Any], chosen: list[int], tally: Tally
) -> None:
    target.path.mkdir(parents=True, exist_ok=True)
    write_text(target.head, answers.folder.head.read_text(encoding="utf-8"))
    for shard in target.missing(head.num_shards):
        with writing_shard(target.shard(shard), answers.schema, tally) as write:
            for place in head.shard_range(shard):
                write(answers.batch(chosen[place]))
                tally.open_videos += 1
