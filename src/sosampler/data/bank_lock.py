"""A folder that may hold a bank, one writer at a time, and nothing of anybody else touched."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sosampler.data.bank_format import BankFolder, read_head
from sosampler.errors import InvalidArgument, SosamplerError

# What a killed run may leave, by folder; see `sosampler.files.replacing` for the names.
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
