"""Rows at an address of a store: written here first, and uploaded whole when the run is done.

A store has no file that grows, so rows wait in a folder of the user's cache, where a killed run is resumed as anywhere.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sosampler.errors import InvalidArgument, VideoError
from sosampler.inference.many import RunSummary
from sosampler.inference.rows import SUFFIXES
from sosampler.video.limits import Limits
from sosampler.video.remote import STORES, Transient, call_store, path_in_store, pause, shown_address, store_of

UPLOAD_SECONDS = 3600.0
_QUESTION_SECONDS = 60.0


@dataclass(frozen=True)
class Upload:
    """A file of rows at an address."""

    address: str
    file: Path  # where the rows are until they are uploaded

    @classmethod
    def to(cls, address: str, *, overwrite: bool = False) -> Upload:
        """Check the address before the first video, and make the folder for its rows."""
        scheme, name = address.split("://", 1)[0].lower(), shown_address(address)
        if scheme not in STORES:
            raise InvalidArgument(
                f"--out {name}: nothing can be written there; give a file, or an address that begins with "
                f"{', '.join(f'{each}://' for each in STORES)}"
            )
        last = PurePosixPath(address).name
        if not last.lower().endswith(SUFFIXES):
            raise InvalidArgument(f"--out {name}: the name must end in one of: {', '.join(SUFFIXES)}")
        store = store_of(address)
        there = _tried(name, lambda: store.exists(path_in_store(store, address)), _QUESTION_SECONDS)
        if there and not overwrite:
            raise InvalidArgument(f"--out {name}: is there already; give another name, or add --overwrite")
        folder = _cache() / hashlib.sha256(address.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return cls(address, folder / last)

    def after(self, work: Callable[..., RunSummary]) -> Callable[..., RunSummary]:
        """Return the same work, which uploads its rows at its end."""

        def run(*arguments: Any, **callbacks: Any) -> RunSummary:
            return self.send(work(*arguments, **callbacks))

        return run

    def send(self, summary: RunSummary) -> RunSummary:
        """Upload the rows, and the list of failures beside them, and remove what is here."""
        store, failed = store_of(self.address), summary.failed_path
        files = {self.address: self.file}
        if summary.failures and failed is not None:
            files[f"{self.address}.failed.jsonl"] = failed
        for address, file in files.items():
            try:
                _tried(shown_address(address), lambda: store.put_file(str(file), path_in_store(store, address)))  # noqa: B023
            except VideoError as error:
                raise InvalidArgument(f"--out {error}; the rows are in {self.file}: upload them from there") from None
        shutil.rmtree(self.file.parent)
        return replace(summary, uploaded=shown_address(self.address))


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "sosampler" / "uploads"


def _tried(name: str, work: Callable[[], Any], seconds: float = UPLOAD_SECONDS) -> Any:
    for attempt in range(Limits().retries + 1):
        try:
            return call_store(name, work, seconds, verb="written")
        except Transient as error:
            if attempt == Limits().retries:
                raise VideoError(str(error)) from None
            time.sleep(pause(attempt))
    raise AssertionError("the last attempt returns or raises")
