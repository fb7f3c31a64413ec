"""The run behind every way of making a bank: shards that are missing are filled, and classifiers asked meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sosampler.data.bank_disk import Tally
from sosampler.data.bank_format import BankFolder, BankHead, StoredVideo, read_failures, read_shard
from sosampler.data.bank_writer import Results, fill_shard, finish, restore_failures
from sosampler.data.manifest import Item

if TYPE_CHECKING:
    from sosampler.data.teaching import Teaching

Row = tuple[str, StoredVideo]


@dataclass
class Progress:
    """How far a run is; given to `on_progress` after each video."""

    total: int
    done: int = 0  # videos, failed ones and those of earlier runs included
    failed: int = 0  # seen in this run
    before: int = 0  # videos that an earlier run had done already


OnProgress = Callable[[Progress], None]


@dataclass
class _Ticker:
    """Counts videos and tells."""

    progress: Progress
    tell: OnProgress | None

    def done(self) -> None:
        self.progress.done += 1
        if self.tell is not None:
            self.tell(self.progress)

    def failed(self) -> None:
        self.progress.failed += 1
        self.done()


def make_shards(
    folder: BankFolder,
    head: BankHead,
    items: Sequence[Item],
    produce: Callable[[list[Item]], Results],
    tally: Tally,
    teaching: Teaching | None = None,
    on_progress: OnProgress | None = None,
) -> BankHead:
    """Make the shards that are missing, frames and answers side by side, and finish the bank. Call it locked.

    `produce` gives the frames of these items, in their order. A shard is asked about while it is being filled, or from
    the disk where it was filled before; it is the same either way. `tally` is that of the frames.
    """
    to_fill = [shard for shard in range(head.num_shards) if not folder.frames(shard).exists()]
    to_teach = teaching.missing if teaching is not None else set()
    to_do = {*to_fill, *to_teach}
    done_before = head.num_items - sum(len(head.shard_range(shard)) for shard in to_do)
    ticker = _Ticker(Progress(head.num_items, done=done_before, before=done_before), on_progress)
    new_items = [items[place] for shard in to_fill for place in head.shard_range(shard)]
    results: Results = produce(new_items) if to_fill else iter(())
    with teaching if to_teach and teaching else nullcontext():
        if teaching is not None:
            stored = sorted(to_teach.difference(to_fill))
            teaching.teach(((shard, _stored_rows(folder, shard, ticker)) for shard in stored), ticker.done)
        for shard in to_fill:
            of_shard = [items[place] for place in head.shard_range(shard)]
            with closing(fill_shard(folder, shard, of_shard, results, tally, ticker.failed)) as rows:
                if teaching is not None and shard in to_teach:
                    teaching.teach([(shard, rows)], ticker.done)
                for _ in rows:  # exhausted, a new shard takes its place; videos are left only where nobody is asked
                    ticker.done()
    if to_fill or not head.complete:
        return finish(folder, head)
    restore_failures(folder, head)
    return head


def _stored_rows(folder: BankFolder, shard: int, ticker: _Ticker) -> Generator[Row]:
    for _ in read_failures(folder.failed(shard)):
        ticker.failed()
    yield from read_shard(folder.frames(shard))
