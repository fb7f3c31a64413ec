"""Where the videos of a bank are to be found, and shards that stay open while they are read from."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.data.bank_format import (
    PREPARE_AGAIN,
    BankFolder,
    BankHead,
    open_shard,
    read_failures,
    read_items,
    read_row,
)
from sosampler.data.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError

# Shards kept open at a time; each takes a file descriptor.
_OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class BankRow:
    """Where a video is to be found."""

    item: Item
    shard: int
    row: int


class OpenShards:
    """Memory-mapped shards, the ones used last kept open. Shared between threads, opened anew in other processes.

    `again` is for messages: what makes a shard anew.
    """

    def __init__(self, path_of: Callable[[int], Path], again: str = PREPARE_AGAIN) -> None:
        self._path_of, self._again = path_of, again
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, row: BankRow) -> Any:
        """The record batch of a video."""
        path = self._path_of(row.shard)
        with self._lock:
            reader = self._open.pop(row.shard, None)
            if reader is None:
                reader = open_shard(path, self._again)
            self._open[row.shard] = reader
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            if row.row >= reader.num_record_batches:
                raise SosamplerError(
                    f"{path}: has {reader.num_record_batches} videos, number {row.row} is missing; "
                    "`sosampler bank verify` tells what is wrong"
                )
            batch = read_row(reader, row.row, path, self._again)
        told = batch.column("id")[0].as_py()
        if told != row.item.id:
            raise SosamplerError(
                f"{path}: row {row.row} is of {told!r} where the bank has {row.item.id!r}; delete it and {self._again}"
            )
        return batch


def rows_of(folder: BankFolder, head: BankHead) -> Iterator[BankRow]:
    """The videos that could be read; of a bank that is not finished those of its finished shards."""
    items = read_items(folder)
    if len(items) != head.num_items:
        raise SosamplerError(
            f"{folder.items_jsonl}: lists {len(items)} videos where {folder.bank_json.name} counts {head.num_items}; "
            "copy the bank again"
        )
    if head.complete and not folder.failed_jsonl.exists():
        raise SosamplerError(
            f"{folder.failed_jsonl}: is missing; copy the bank again, or give the same `sosampler prepare` again"
        )
    failed = {failure["id"] for failure in read_failures(folder.failed_jsonl)} if head.complete else set()
    for shard in range(head.num_shards):
        if not head.complete:
            if not folder.frames(shard).exists():
                continue
            failed = {failure["id"] for failure in read_failures(folder.failed(shard))}
        readable = (items[place] for place in head.shard_range(shard) if items[place].id not in failed)
        for row, item in enumerate(readable):
            yield BankRow(item, shard, row)


def checked_index(index: Any, length: int, path: Path) -> int:
    """A whole number inside the bank, or say what there is; numbers below 0 count from the end."""
    try:
        place = operator.index(index)
    except TypeError as error:
        raise InvalidArgument(
            f"{path}: {index!r} is not the number of a video; give a whole number from 0 to {length - 1}"
        ) from error
    if not -length <= place < length:
        raise IndexError(f"{path}: number {place} was asked for, the bank holds 0..{length - 1}")
    return place
