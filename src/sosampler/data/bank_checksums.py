"""Checksums of shards, each in a file beside its shard, as `sha256sum --check` reads it."""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum_path(shard: Path) -> Path:
    return shard.with_suffix(".sha256")


def checksum_text(shard: Path, called: str) -> str:
    """The line of `sha256sum`, under the name that the shard has or will have."""
    with open(shard, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {called}\n"
