"""How much room a bank still needs, and the word about it where a disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sosampler._util.files import checksum_path, checksum_text, replacing
from sosampler.bank.format import (
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
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError

# What the system says when nothing more can be written: no space, quota, largest file.
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# For the estimate before the first video is written: 64 frames with a short side of 256 at quality 90.
_GUESSED_BYTES_A_VIDEO = 2 << 20

ShardPath = Callable[[int], Path]
"""Where a shard of one kind lies, by its number."""


@dataclass
class Tally:
    """One kind of shard: frames, or the answers of a classifier. Tells how much of it is there and how much is not."""

    head: BankHead
    path_of: ShardPath
    guess: int = _GUESSED_BYTES_A_VIDEO  # bytes a video, while none is there
    open_videos: int = 0  # in the shard that is being written
    open_bytes: int = 0

    def finished(self) -> tuple[int, int]:
        """Videos and bytes of the shards that are there; a shard that was broken off counts for nothing."""
        videos = num_bytes = 0
        for shard in range(self.head.num_shards):
            if self.path_of(shard).exists():
                videos += len(self.head.shard_range(shard))
                num_bytes += self.path_of(shard).stat().st_size
        return videos, num_bytes

    def needed(self) -> int:
        """Bytes of the videos that are in no finished shard."""
        videos, num_bytes = self.finished()
        return bytes_needed(
            self.head.num_items - videos, videos + self.open_videos, num_bytes + self.open_bytes, self.guess
        )


def bytes_needed(videos_left: int, videos_seen: int, bytes_seen: int, guess: int) -> int:
    """For the videos that are left, as large as those that were seen are on average; `guess` if none was.

    >>> bytes_needed(8, 4, 4000, 7), bytes_needed(8, 0, 0, 7), bytes_needed(0, 4, 4000, 7)
    (8000, 56, 0)
    """
    each = bytes_seen / videos_seen if videos_seen and bytes_seen else guess
    return round(each * videos_left)


def mean_bytes(tally: Tally) -> int:
    """Bytes a video of the shards that are there, to guess those of a copy."""
    videos, num_bytes = tally.finished()
    return bytes_needed(1, videos, num_bytes, tally.guess)


@contextmanager
def explaining_full_disk(folder: BankFolder, *tallies: Tally) -> Iterator[None]:
    """Turn the system's word for a full disk into one that says how much is needed.

    What was broken off must be gone when it is asked how much is free, so this is the outermost of the contexts.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise SosamplerError(
            full_disk_text(folder.path, error.errno or 0, tallies, shutil.disk_usage(folder.path).free)
        ) from error


def full_disk_text(path: Path, code: int, tallies: Sequence[Tally], free: int) -> str:
    """How far it came, what is needed and what is free."""
    done = min(tally.finished()[0] for tally in tallies)
    return (
        f"{path}: cannot be written any further ({os.strerror(code)}) with {done} of {tallies[0].head.num_items} "
        f"videos finished; about {_megabytes(sum(tally.needed() for tally in tallies))} are needed for the rest, "
        f"{_megabytes(free)} are free. What is finished stays valid: make room and give the same command again, or "
        "prepare fewer, smaller frames in another folder"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


# What a killed run may leave, by folder; see `sosampler._util.files.replacing` for the names.
_LEFTOVERS = {
    "": r"\.(bank|items|failed|videos_root)\.\d+\.part\.(json|jsonl|txt)",
    "frames": r"\.\d+(\.failed|\.retry)?\.\d+\.part\.(arrow|jsonl|sha256)|\d+\.retry\.arrow",
    "teachers/*": r"\.(teacher|\d+)\.\d+\.part\.(json|arrow|sha256)",
    "features/*": r"\.(features|\d+)\.\d+\.part\.(json|arrow|sha256)",
}


@contextmanager
def locked(folder: BankFolder) -> Iterator[None]:
    """Hold the bank for writing; the system lets go of the lock even where the process is killed."""
    check_place(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    with open(folder.lock, "ab") as file:
        if not _try_lock(file.fileno(), folder.path):
            raise SosamplerError(
                f"{folder.path}: another process is writing this bank; wait until it ends, or give another folder"
            )
        for leftover in _leftovers(folder):
            leftover.unlink(missing_ok=True)
        yield


def check_place(folder: BankFolder) -> None:
    """Refuse a folder with files of somebody else, before anything is written there."""
    if not folder.path.exists():
        return
    if not folder.path.is_dir():
        raise InvalidArgument(f"{folder.path}: is a file; give a folder for the bank")
    if folder.bank_json.exists():
        read_head(folder)  # says so where it is not a bank's
        return
    # A bank that was killed at its very beginning has a lock and an empty folder for frames.
    own = {folder.items_jsonl, folder.frames_folder, folder.lock} if folder.lock.exists() else set()
    own |= set(_leftovers(folder)) if own else set()
    foreign = sorted(entry.name for entry in folder.path.iterdir() if entry not in own)
    if folder.frames_folder in own and folder.frames_folder.is_dir() and any(folder.frames_folder.iterdir()):
        foreign.append(folder.frames_folder.name)
    if foreign:
        raise InvalidArgument(
            f"{folder.path}: holds other files ({', '.join(foreign[:3])}); give a new folder, or one with a bank"
        )


def _leftovers(folder: BankFolder) -> Iterator[Path]:
    for place, pattern in _LEFTOVERS.items():
        for parent in folder.path.glob(place) if place else [folder.path]:
            if parent.is_dir():
                yield from [entry for entry in parent.iterdir() if re.fullmatch(pattern, entry.name)]


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
