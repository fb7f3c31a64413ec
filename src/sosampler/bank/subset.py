"""`subset`: a smaller bank out of a bank, with its frames, teachers and features; nothing is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler._util.files import write_text
from sosampler._util.progress import OnProgress
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder, BankHeader, OutputFolder, items_text
from sosampler.bank.outputs import FrameOutputs
from sosampler.bank.writer import Results, begin, make_shards, writing_bank, writing_shard
from sosampler.datasets.manifest import SPLITS, Item
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
    """Copy some videos of a bank, with all their teachers and features, into a new bank.

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
    ]
    chosen = _chosen(bank, outputs, limit, classes, splits, max_mb)
    known = bank.items
    items = [known[row] for row in chosen]
    header = replace(bank.header, num_items=len(items), complete=False, counts=None)
    rows = {item.id: row for item, row in zip(items, chosen, strict=True)}

    def produce(missing: list[Item]) -> Results:
        return (bank[rows[item.id]].stored() for item in missing)

    with writing_bank(folder):
        header = begin(folder, header, items)
        for source in outputs:  # the frames last: they finish the bank
            _copy_outputs(folder.output(source.output_kind, source.name), header, source, chosen)
        make_shards(folder, header, items, produce, on_progress=on_progress)
    return Bank(folder.path)


def _chosen(
    bank: Bank,
    outputs: list[FrameOutputs[Any]],
    limit: int | None,
    classes: Sequence[str] | None,
    splits: Sequence[str] | None,
    max_mb: float | None,
) -> list[int]:
    """Return the rows that stay, in order."""
    items = bank.items
    rows = list(range(len(items)))
    if splits is not None:
        wanted_splits = {one_of("split", name, SPLITS) for name in splits}
        rows = [row for row in rows if (items[row].split or "train") in wanted_splits]
    if classes is not None:
        known = {name: index for index, name in enumerate(bank.classes)}
        unknown = [name for name in classes if name not in known]
        if unknown:
            raise InvalidArgument(
                f"{bank.path}: has no class {unknown[0]!r}; it has {len(known)}, such as {', '.join(bank.classes[:5])}"
            )
        wanted = {known[name] for name in classes}
        rows = [row for row in rows if wanted & set(items[row].labels)]
    rows = spread(rows, items)
    if limit is not None:
        rows = rows[: check_int("limit", limit)]
    if max_mb is not None:
        rows = list(_within(rows, bank, outputs, check_float("max_mb", max_mb, above=0) * 1e6))
    if not rows:
        raise InvalidArgument(
            f"{bank.path}: no video is left with limit={limit}, classes={classes}, splits={splits}, max_mb={max_mb}; "
            "allow more"
        )
    return sorted(rows)


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
        used += bank[row].nbytes + len("".join(items_text([items[row]])).encode()) + kinds * _ROW_EXTRA
        used += sum(each.batch(row).nbytes for each in outputs)
        if number % bank.header.videos_per_shard == 0:
            used += kinds * _SHARD_EXTRA
        if used > max_bytes:
            return
        yield row


def _copy_outputs(target: OutputFolder, header: BankHeader, source: FrameOutputs[Any], chosen: list[int]) -> None:
    target.path.mkdir(parents=True, exist_ok=True)
    write_text(target.header, source.folder.header.read_text(encoding="utf-8"))
    for shard in target.missing(header.num_shards):
        with writing_shard(target.shard(shard), source.schema) as write:
            for index in header.shard_range(shard):
                write(source.batch(chosen[index]))
