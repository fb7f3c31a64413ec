"""Writing a bank: its head, and shards under a temporary name until they are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sosampler.data.bank_checksums import checksum_path, checksum_text
from sosampler.data.bank_disk import Tally, explaining_full_disk
from sosampler.data.bank_format import (
    AGAIN,
    BankFolder,
    BankHead,
    Failure,
    StoredVideo,
    failures_text,
    frames_batch,
    frames_schema,
    import_pyarrow,
    items_text,
    open_shard,
    read_failures,
    read_head,
    read_row,
    read_shard,
    write_text,
)
from sosampler.data.bank_lock import locked
from sosampler.data.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.files import replacing

Results = Iterator[StoredVideo | Failure]
"""Of items that were asked for, in their order."""


@contextmanager
def writing_bank(folder: BankFolder, *tallies: Tally) -> Iterator[None]:
    """Locked, and with a word about full disks."""
    with locked(folder), explaining_full_disk(folder, *tallies):
        apply_retried(folder)
        yield


# ---- the head


def begin(folder: BankFolder, head: BankHead, items: Sequence[Item]) -> BankHead:
    """Fix what the bank will hold, or check that the bank that is there is the same one. Call it locked."""
    if folder.bank_json.exists():
        found = read_head(folder)
        _check_same(folder, found, head, items)
        return found
    folder.frames_folder.mkdir(exist_ok=True)
    write_text(folder.items_jsonl, items_text(items))
    head.write(folder)  # last: where it is, the rest is
    return head


def _check_same(folder: BankFolder, found: BankHead, asked: BankHead, items: Sequence[Item]) -> None:
    remedy = "give the same again to go on with it, or another folder for a new one"
    if found.source != asked.source:
        raise InvalidArgument(f"{folder.path}: holds a bank made from {found.source}, not {asked.source}; {remedy}")
    differing = [
        f"{name}={found.settings.get(name)!r}, now {asked.settings.get(name)!r}"
        for name in sorted({*found.settings, *asked.settings})
        if found.settings.get(name) != asked.settings.get(name)
    ]
    if differing:
        raise InvalidArgument(f"{folder.path}: holds a bank prepared with {'; '.join(differing)}; {remedy}")
    if found.classes != asked.classes or found.multi_label != asked.multi_label:
        raise InvalidArgument(
            f"{folder.path}: holds a bank of {classes_in_words(found.classes)}, now {classes_in_words(asked.classes)}; "
            f"{remedy}"
        )
    if found.videos_per_shard != asked.videos_per_shard:
        raise InvalidArgument(
            f"{folder.path}: holds a bank with {found.videos_per_shard} videos a shard, now {asked.videos_per_shard}; "
            f"{remedy}"
        )
    with open(folder.items_jsonl, encoding="utf-8", newline="\n") as lines:
        same = all(told == wanted for told, wanted in zip(lines, items_text(items), strict=False))
    if not same or found.num_items != len(items):
        raise InvalidArgument(
            f"{folder.path}: holds a bank of another manifest ({found.num_items} videos, now {len(items)}); {remedy}"
        )


def classes_in_words(names: Sequence[str]) -> str:
    """
    >>> classes_in_words(["a", "b", "c", "d"])
    '4 classes (a, b, c, ...)'
    """
    return f"{len(names)} classes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def check_root(folder: BankFolder, root: Path, items: Sequence[Item]) -> None:
    """Refuse to go on with videos of another folder under the same names. Call it locked, after `begin`."""
    if all(os.path.isabs(item.path) for item in items):
        return
    asked = os.path.abspath(root)
    if not folder.videos_root.exists():
        write_text(folder.videos_root, asked + "\n")
        return
    found = folder.videos_root.read_text(encoding="utf-8").rstrip("\n")
    if found != asked and os.path.realpath(found) != os.path.realpath(asked):
        raise InvalidArgument(
            f"{folder.path}: holds frames of the videos in {found}, now {asked}; give that folder (root), or another "
            f"one for a new bank; if the same videos were only moved, delete {folder.videos_root}"
        )


def finish(folder: BankFolder, head: BankHead) -> BankHead:
    """All shards are there: join their failures and count."""
    failures = failed_lines(folder, head)
    rows = frames = 0
    for shard in range(head.num_shards):
        path = folder.frames(shard)
        reader = open_shard(path)
        rows += reader.num_record_batches
        listed, expected = len(_lines(folder.failed(shard))), len(head.shard_range(shard))
        if reader.num_record_batches + listed != expected:
            raise SosamplerError(
                f"{path}: holds {reader.num_record_batches} videos and {listed} are listed as failed, of {expected}; "
                f"{AGAIN}"
            )
        frames += sum(
            len(read_row(reader, row, path).column("frame_indices").values) for row in range(reader.num_record_batches)
        )
    done = replace(head, complete=True, counts={"videos": rows, "failed": len(failures), "frames": frames})
    restore_failures(folder, done)
    if head != done:
        done.write(folder)
    return done


def failed_lines(folder: BankFolder, head: BankHead) -> list[str]:
    """The failures of all shards, in order: what failed.jsonl must say."""
    return [line for shard in range(head.num_shards) for line in _lines(folder.failed(shard))]


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    read_failures(path)  # says what is damaged
    with open(path, encoding="utf-8", newline="\n") as lines:  # names may hold other signs that end a line
        return list(lines)


def restore_failures(folder: BankFolder, head: BankHead) -> None:
    """Write the list of a finished bank again where it got lost."""
    lines = failed_lines(folder, head)
    if not folder.failed_jsonl.exists() or folder.failed_jsonl.read_bytes() != "".join(lines).encode():
        if len(lines) != (head.counts or {}).get("failed"):
            raise SosamplerError(
                f"{folder.path}: {len(lines)} failed videos are listed, {folder.bank_json.name} counts "
                f"{(head.counts or {}).get('failed')}; `sosampler bank verify` tells which shard is to be deleted"
            )
        write_text(folder.failed_jsonl, lines)


# ---- shards


@contextmanager
def writing_shard(
    path: Path, schema: Any, tally: Tally | None = None, *, checksum: bool = True
) -> Iterator[Callable[[Any], None]]:
    """Give a function that appends a record batch; the file takes its name when the block ends well."""
    pa = import_pyarrow()

    def write(batch: Any) -> None:
        writer.write_batch(batch)
        if tally is not None:
            tally.open_bytes += batch.nbytes

    if tally is not None:
        tally.open_videos = tally.open_bytes = 0
    with replacing(path) as temporary:
        with open(temporary, "wb") as file:
            with pa.ipc.new_file(file, schema) as writer:
                yield write
            file.flush()
            os.fsync(file.fileno())  # a name must not outlive its contents when the power fails
        if checksum:  # before the shard itself, whose name says that all is there
            write_text(checksum_path(path), checksum_text(temporary, path.name))
    if tally is not None:
        tally.open_videos = tally.open_bytes = 0


def fill_shard(
    folder: BankFolder,
    shard: int,
    items: Sequence[Item],
    results: Results,
    tally: Tally,
    on_failure: Callable[[], None],
) -> Generator[tuple[str, StoredVideo]]:
    """Write the next results as this shard and hand each video on; the shard is in its place once this is exhausted."""
    failures: list[tuple[Item, Failure]] = []
    with writing_shard(folder.frames(shard), frames_schema(), tally) as write:
        for item in items:
            result = next(results)
            if isinstance(result, Failure):
                failures.append((item, result))
                on_failure()
            else:
                write(frames_batch(item, result))
            tally.open_videos += 1
            if isinstance(result, StoredVideo):
                yield item.id, result
        # Before the shard itself, whose name says that all is there.
        write_failures(folder.failed(shard), failures_text(failures))


def write_failures(path: Path, text: str) -> None:
    """The failures of a shard; no file where there are none."""
    if text:
        write_text(path, text)
    else:
        path.unlink(missing_ok=True)


# ---- videos that failed at first


def retry_failures(
    folder: BankFolder, head: BankHead, items: Sequence[Item], produce: Callable[[list[Item]], Results]
) -> BankHead:
    """Try the videos again that failed. Call it locked.

    A shard is touched only where one of them can be read now; what was there before stays until the new one is whole.
    """
    failed = {
        shard: {failure["id"]: failure["error"] for failure in read_failures(folder.failed(shard))}
        for shard in range(head.num_shards)
        if folder.frames(shard).exists()
    }
    of_shard = {shard: [items[place] for place in head.shard_range(shard)] for shard, ids in failed.items() if ids}
    again = [item for shard, own in of_shard.items() for item in own if item.id in failed[shard]]
    if not again:
        return head
    results = produce(again)
    for shard, own in of_shard.items():
        if _retried_shard(folder, shard, own, failed[shard], results):
            apply_retried(folder)
    return read_head(folder)


def _retried_shard(
    folder: BankFolder, shard: int, items: Sequence[Item], failed: dict[str, str], results: Results
) -> bool:
    """Write the shard anew, beside the old one, and say whether it has gained a video."""
    draft = folder.frames(shard).with_suffix(".retry.arrow")
    stored = read_shard(folder.frames(shard))
    reasons: list[tuple[Item, Failure]] = []
    gained = 0
    with writing_shard(draft, frames_schema(), checksum=False) as write:
        for item in items:
            if item.id not in failed:
                write(frames_batch(item, _next_of(stored, item, folder.frames(shard))))
                continue
            result = next(results)
            if isinstance(result, StoredVideo):
                write(frames_batch(item, result))
                gained += 1
            reasons.append((item, result if isinstance(result, Failure) else Failure(failed[item.id])))
    write_failures(folder.failed(shard), failures_text(reasons))  # the same videos still, with the reasons of today
    if gained:
        os.replace(draft, folder.retried(shard))  # from here on it will be taken, also after a kill
    else:
        draft.unlink()
    return bool(gained)


def _next_of(stored: Iterator[tuple[str, StoredVideo]], item: Item, path: Path) -> StoredVideo:
    found = next(stored, None)
    if found is None or found[0] != item.id:
        told = "nothing more" if found is None else repr(found[0])
        raise SosamplerError(f"{path}: holds {told} where {item.id!r} is expected; {AGAIN}")
    return found[1]


def apply_retried(folder: BankFolder) -> None:
    """Put new shards in the place of the old ones. Killed at any point it does the rest when called again."""
    for staged in sorted(folder.frames_folder.glob("*.retried.arrow")):
        shard = int(staged.name.partition(".")[0])
        head = read_head(folder)
        if head.complete:
            replace(head, complete=False, counts=None).write(folder)
        folder.failed_jsonl.unlink(missing_ok=True)
        # Rows will shift, so what networks said about this shard goes; each is asked again when it is given again.
        for answers in folder.answers():
            answers.shard(shard).unlink(missing_ok=True)
            checksum_path(answers.shard(shard)).unlink(missing_ok=True)
        readable = {video_id for video_id, _ in read_shard(staged)}
        lines = [line for line in _lines(folder.failed(shard)) if json.loads(line)["id"] not in readable]
        write_failures(folder.failed(shard), "".join(lines))
        write_text(checksum_path(folder.frames(shard)), checksum_text(staged, folder.frames(shard).name))
        os.replace(staged, folder.frames(shard))
