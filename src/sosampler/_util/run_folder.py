"""Folders whose work can be stopped and resumed: one writer at a time, and settings that are written once.

What a folder is made from is saved as JSON when the work begins. A later run compares its own settings with them, and
is refused with a sentence that names the differences.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sosampler._util.files import write_text
from sosampler.errors import InvalidArgument, SosamplerError

# With less free space than this nothing is started.
_MIN_FREE_BYTES = 16 << 20


@contextmanager
def locked(lock: Path, what: str) -> Iterator[None]:
    """Hold a folder for writing, by a lock file in it; the system releases it even where the process is killed.

    Args:
        lock: the lock file; its folder is made.
        what: for messages, such as "this bank".
    """
    from filelock import FileLock, Timeout

    folder = lock.parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout as error:
        raise SosamplerError(
            f"{folder}: another process is writing {what}; wait until it ends, or give another folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise SosamplerError(
            f"{folder}: cannot be locked against other writers ({error}); use a folder on another disk"
        ) from error
    with held:
        free = shutil.disk_usage(folder).free
        if free < _MIN_FREE_BYTES:
            raise SosamplerError(
                f"{folder}: only {free / 1e6:.1f} MB of disk space are free; free at least "
                f"{_MIN_FREE_BYTES / 1e6:.0f} MB and run the same command again, or give another folder"
            )
        yield


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return what differs between two settings, as "name=saved, now given".

    >>> differences({"size": 256, "fps": None}, {"size": 128})
    ['size=256, now 128']
    """
    names = sorted({*saved, *given})
    return [
        f"{name}={saved.get(name)!r}, now {given.get(name)!r}" for name in names if saved.get(name) != given.get(name)
    ]


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they will be read back from JSON: lists for tuples."""
    values: dict[str, Any] = json.loads(json.dumps(settings))
    return values


def read_settings(file: Path) -> Any:
    """Return the saved settings; None where the work has not begun."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{file}: is not JSON ({error}); give another folder") from error


def begin(file: Path, settings: Mapping[str, Any]) -> None:
    """Save the settings in a folder that must hold no files of something else; hidden files do not count."""
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder}: the folder cannot be made ({error.strerror}); give another") from error
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if foreign:
        raise InvalidArgument(f"{folder}: holds other files ({', '.join(foreign[:3])}); give a new folder")
    write_text(file, json.dumps(settings, indent=1) + "\n")
