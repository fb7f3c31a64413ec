"""Writing a bank: shards under a temporary name until they are whole, one writer at a time, full disks explained."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sosampler.data.bank_format import (
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
    write_text,
)
from sosampler.data.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.files import replacing

# What the system says when nothing more can be written: no space, quota, largest file.
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# For the estimate before the first video is written: 64 frames with a short side of 256 at quality 90.
_GUESSED_BYTES_A_VIDEO = 2 << 20


@dataclass
class Tally:
    """Videos of one kind of shard so far and their bytes, for telling how much a full disk lacks."""

    videos: int = 0
    num_bytes: int = 0
    guess: int = _GUESSED_BYTES_A_VIDEO  # bytes a video, while none is there

    def bytes_for(self, videos: int) -> int:
        each = self.num_bytes / self.videos if self.num_bytes else self.guess
        return round(each * videos)


# ---- one writer at a time


@contextmanager
def locked(folder: BankFolder) -> Iterator[None]:
    """Hold the bank for writing; the system lets go of the lock even where the process is killed."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InvalidArgument(f"{folder.path}: is a file; give a folder for the bank") from error
    with open(folder.lock, "ab") as file:
        if not _try_lock(file.fileno(), folder.path):
            raise SosamplerError(
                f"{folder.path}: another process is writing this bank; wait until it ends, or give another folder"
            )
        for leftover in _temporary_files(folder):  # of a run that was killed
            leftover.unlink(missing_ok=True)
        yield


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise SosamplerError(
            f"{path}: cannot be locked against other writers ({error.strerror}); put the bank on another disk"
        ) from error
    return True


def _temporary_files(folder: BankFolder) -> Iterator[Path]:
    for pattern in (".*.part.*", "frames/.*.part.*", "teachers/*/.*.part.*"):
        yield from folder.path.glob(pattern)


@contextmanager
def writing_bank(folder: BankFolder, num_items: int) -> Iterator[None]:
    """Locked, and with a word about full disks."""
    with locked(folder), explaining_full_disk(folder, num_items, Tally()):
        yield


# ---- the head


def begin(folder: BankFolder, head: BankHead, items: Sequence[Item]) -> BankHead:
    """Fix what the bank will hold, or check that the bank that is there is the same one. Call it locked."""
    if folder.bank_json.exists():
        found = read_head(folder)
        _check_same(folder, found, head, items)
        return found
    known = {folder.lock, folder.items_jsonl, folder.frames_folder, folder.teachers_folder}
    foreign = sorted(entry.name for entry in folder.path.iterdir() if entry not in known)
    if foreign:
        raise InvalidArgument(
            f"{folder.path}: holds other files ({', '.join(foreign[:3])}); give a new folder, or one with a bank"
        )
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


def finish(folder: BankFolder, head: BankHead) -> BankHead:
    """All shards are there: join their failures and count."""
    failures = [line for shard in range(head.num_shards) for line in _lines(folder.failed(shard))]
    rows = frames = 0
    for shard in range(head.num_shards):
        reader = open_shard(folder.frames(shard))
        rows += reader.num_record_batches
        frames += sum(
            len(reader.get_batch(row).column("frame_indices").values) for row in range(reader.num_record_batches)
        )
    done = replace(head, complete=True, counts={"videos": rows, "failed": len(failures), "frames": frames})
    if head != done:
        write_text(folder.failed_jsonl, failures)
        done.write(folder)
    return done


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def forget_failures(folder: BankFolder, head: BankHead) -> BankHead:
    """Take away the shards in which videos failed, so that they are made again."""
    again = [shard for shard in range(head.num_shards) if read_failures(folder.failed(shard))]
    if not again:
        return head
    reopened = replace(head, complete=False, counts=None)
    reopened.write(folder)
    folder.failed_jsonl.unlink(missing_ok=True)
    for shard in again:
        # Rows of these shards will shift, so what teachers said about them goes too.
        for name in folder.teacher_names():
            folder.teacher_shard(name, shard).unlink(missing_ok=True)
        folder.frames(shard).unlink(missing_ok=True)
        folder.failed(shard).unlink(missing_ok=True)
    return reopened


# ---- shards


@contextmanager
def writing_shard(path: Path, schema: Any, tally: Tally | None = None) -> Iterator[Callable[[Any], None]]:
    """Give a function that appends a record batch; the file takes its name when the block ends well."""
    pa = import_pyarrow()

    def write(batch: Any) -> None:
        writer.write_batch(batch)
        if tally is not None:
            tally.num_bytes += batch.nbytes

    with replacing(path) as temporary, open(temporary, "wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            yield write
        file.flush()
        os.fsync(file.fileno())  # a name must not outlive its contents when the power fails


def fill_shard(
    folder: BankFolder,
    shard: int,
    items: Sequence[Item],
    results: Iterator[StoredVideo | Failure],
    tally: Tally,
    on_failure: Callable[[], None],
) -> Generator[tuple[str, StoredVideo]]:
    """Write the next results as this shard and hand each video on; the shard is in its place once this is exhausted."""
    failures: list[tuple[Item, Failure]] = []
    with writing_shard(folder.frames(shard), frames_schema(), tally) as write:
        for item in items:
            result = next(results)
            tally.videos += 1
            if isinstance(result, Failure):
                failures.append((item, result))
                on_failure()
                continue
            write(frames_batch(item, result))
            yield item.id, result
        # Before the shard itself, whose name says that all is there.
        if failures:
            write_text(folder.failed(shard), failures_text(failures))
        else:
            folder.failed(shard).unlink(missing_ok=True)


def tally_of(head: BankHead, path_of: Callable[[int], Path], guess: int = _GUESSED_BYTES_A_VIDEO) -> Tally:
    """What the shards of one kind that are there hold."""
    tally = Tally(guess=guess)
    for shard in range(head.num_shards):
        if path_of(shard).exists():
            tally.videos += len(head.shard_range(shard))
            tally.num_bytes += path_of(shard).stat().st_size
    return tally


@contextmanager
def explaining_full_disk(folder: BankFolder, num_items: int, *tallies: Tally) -> Iterator[None]:
    """Turn the system's word for a full disk into one that says how much is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        needed = sum(tally.bytes_for(num_items - tally.videos) for tally in tallies)
        done = min(tally.videos for tally in tallies)
        raise SosamplerError(
            f"{folder.path}: cannot be written any further ({os.strerror(error.errno or 0)}) with {done} of "
            f"{num_items} videos done; about {_megabytes(needed)} more are needed, "
            f"{_megabytes(shutil.disk_usage(folder.path).free)} are free. What is finished stays valid: make room and "
            "give the same command again, or prepare fewer, smaller frames in another folder"
        ) from error


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"
