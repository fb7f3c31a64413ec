"""The settings with which a folder of reels was made, which are compared when it is written to again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sosampler._util.files import begin, differences, read_settings, remove_leftovers
from sosampler.errors import InvalidArgument

REELS_FILE = "reels.json"
"""Beside the mp4 files: the settings they were made with."""

_FINGERPRINTS = ("pictures", "clips")  # which mean nothing to people


def begin_files(folder: Path, settings: dict[str, Any]) -> None:
    """Save the settings in a new folder, or refuse one that holds other reels or other files."""
    file = folder / REELS_FILE
    saved = read_settings(file)
    if saved is None:
        begin(file, settings)
    else:
        check_same_reels(folder, saved, settings)
    # What a killed run left of its lists, as .manifest.123.part.csv
    parts = [part.name[1:].rsplit(".", 3) for part in folder.glob(".*.part.*")]
    remove_leftovers(*(folder / f"{name}.{ending}" for name, *_, ending in parts), only_of_dead=True)


def check_same_reels(path: Path, saved: Any, given: dict[str, Any]) -> None:
    """Refuse to resume in a folder of other reels, and name what differs."""
    if not isinstance(saved, dict) or saved.get("kind") != "reels":
        raise InvalidArgument(f"{path}: holds something else than reels; give another folder")
    different = differences(_flat(saved), _flat(given))
    for what in _FINGERPRINTS:
        if saved.get(what) != given.get(what):
            different.insert(0, f"other {what}")
    if different:
        raise InvalidArgument(
            f"{path}: holds reels made with {'; '.join(different)}; give the same again to resume, "
            "or another folder for new ones"
        )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of the recipe beside the others, and without fingerprints."""
    recipe = settings.get("recipe")
    others = {name: value for name, value in settings.items() if name not in ("recipe", *_FINGERPRINTS)}
    return {**(recipe if isinstance(recipe, dict) else {}), **others}
