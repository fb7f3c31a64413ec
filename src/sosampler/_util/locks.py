"""Locks: one process at a time writes into a folder or a file."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from sosampler._util.files import remove_leftovers
from sosampler._util.text import log
from sosampler.errors import InvalidArgument, SosamplerError

# With less free space than this nothing is started.
_MIN_FREE_BYTES = 16 << 20
# Lock files that this process holds: POSIX locks keep processes apart, but not the threads of one.
_held: set[str] = set()
_held_guard = threading.Lock()
# Errors of file systems without locks, such as some network file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def locked(lock: Path, what: str, *, file: Path | None = None) -> Iterator[None]:
    """Hold a folder for writing, or a `file` in it, by a lock file; the second process is refused.

    The lock file names the process that holds it, and is removed in the end. The system releases the lock where a
    process is killed; then the file stays and means nothing. Without locks in the file system this only warns.
    """
    folder = lock.parent
    where, kind = (folder, "folder") if file is None else (file, "file")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    key = os.path.realpath(lock)
    with _held_guard:
        holder = f"process {os.getpid()}, this one," if key in _held else ""
        handle = None
        if not holder:
            try:
                handle = _open_locked(lock)
            except BlockingIOError:
                holder = _holder(lock)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    text = f"cannot be locked against other writers ({error.strerror}); use a {kind} on another disk"
                    raise SosamplerError(f"{where}: {text}") from error
                log.warning("%s: the file system has no locks; do not start a second run here", where)
        if holder:
            text = f"{holder} is writing {what}; wait until it ends, or give another {kind}"
            raise SosamplerError(f"{where}: {text}")
        _held.add(key)
    try:
        free = shutil.disk_usage(folder).free
        if free < _MIN_FREE_BYTES:
            raise SosamplerError(
                f"{folder}: only {free / 1e6:.1f} MB of disk space are free; free at least "
                f"{_MIN_FREE_BYTES / 1e6:.0f} MB and run the same command again, or give another folder"
            )
        yield
    finally:
        with _held_guard:
            _held.discard(key)
            with suppress(OSError):  # the folder may be gone
                lock.unlink()
            if handle is not None:
                os.close(handle)
            if is_new:
                with suppress(OSError):  # not empty: something was written
                    folder.rmdir()


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold a file for writing, by a hidden lock file beside it, and remove what a killed process left of it."""
    with locked(path.with_name(f".{path.name}.lock"), "this file", file=path):
        remove_leftovers(path)
        yield


def locked_folder(folder: Path) -> AbstractContextManager[None]:
    """Hold a folder for writing, by a hidden lock file in it."""
    return locked(folder / ".lock", "here")


def _open_locked(lock: Path) -> int:
    """Open and lock a file, and write this process into it; raise BlockingIOError where another one has it."""
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock_handle(handle)
            # Its last holder may have removed it between the two calls: then the lock is of a file without a name.
            if lock.exists() and os.path.samestat(os.fstat(handle), lock.stat()):
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()} {platform.node()}\n".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock_handle(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, 1 << 20, os.SEEK_SET)  # behind the text, which others may then read
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        try:
            # Not flock: processes that are forked, such as those of a data loader, would hold it after a kill.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError as error:  # POSIX allows EACCES for "another process has it"
            raise BlockingIOError(error.errno, error.strerror) from error


def _holder(lock: Path) -> str:
    """Return which process holds a lock, for a message."""
    try:
        number, _, machine = lock.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    except OSError:
        number = machine = ""
    if not number.isdecimal():
        return "another process"
    return f"process {number}" + ("" if machine == platform.node() else f" on {machine}")


Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def one_run_at_a_time(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Let a function hold the folder of its argument `out`, so that a second run in it is refused.

    Of several processes that a launcher started for one run, the first holds it for all.
    """

    @wraps(function)
    def with_lock(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        if os.environ.get("RANK", "0") != "0":
            return function(*args, **kwargs)
        folder = Path(kwargs["out"])  # type: ignore[arg-type]
        if folder.exists() and not folder.is_dir():
            raise InvalidArgument(f"{folder}: is a file; give a folder")
        with locked_folder(folder):
            return function(*args, **kwargs)

    return with_lock
