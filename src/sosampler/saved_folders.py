"""What a folder of a saved network holds, told by the kind in its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument

_CONFIG = "config.json"


def saved_kind(path: Any) -> str | None:
    """The kind that a folder's config.json tells: "" where it tells none, None where there is no such file."""
    if not isinstance(path, (str, Path)) or not (Path(path) / _CONFIG).is_file():
        return None
    try:
        told = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return ""
    kind = told.get("kind") if isinstance(told, dict) else None
    return kind if isinstance(kind, str) else ""


def check_place(folder: Path, kind: str, what: str) -> None:
    """Something of a kind may be written into a folder, but not over what something else saved there.

    `what`: how it is called in a sentence, "sampler".
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; give a folder to save the {what} in")
    there = saved_kind(folder)
    if there in (None, kind):
        return
    held = f"a saved {there}" if there else f"a {_CONFIG} that is not a {what}'s"
    raise InvalidArgument(
        f"{folder} holds {held}, which would be lost; "
        f"give another folder to save the {what} in, or remove that one first"
    )
