"""Where the videos of a data set lie: one walk through a folder finds files and frame folders by their names."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterable
from pathlib import Path

from sosampler.data.class_folders import is_folder
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES


def stem_of(name: str) -> str:
    """The name without the ending of a video; other dots stay.

    >>> stem_of("v_a.b.mp4"), stem_of("v_a.b")
    ('v_a.b', 'v_a.b')
    """
    stem, suffix = posixpath.splitext(name)
    return stem if suffix.lower() in VIDEO_SUFFIXES else name


class VideoIndex:
    """Paths of the wanted videos, relative to the folder, by their name without suffix."""

    def __init__(self, folder: Path, wanted: Collection[str]) -> None:
        if not folder.is_dir():
            raise InvalidArgument(f"{folder}: is no folder; give the one that holds the videos or the frame folders")
        self._by_name: dict[str, list[str]] = {}
        names = {posixpath.basename(name) for name in wanted}
        for path in _walk(folder, names):
            self._by_name.setdefault(stem_of(posixpath.basename(path)), []).append(path)
        for paths in self._by_name.values():
            paths.sort(key=lambda path: (path.count("/"), path))

    def find(self, names: Iterable[str]) -> tuple[str, str] | None:
        """(path, name it was found by) for the first name that is there; a name with folders must end the path."""
        for name in names:
            for path in self._by_name.get(posixpath.basename(name), []):
                if "/" not in name or f"/{stem_of(path)}".endswith(f"/{name}"):
                    return path, name
        return None


def _walk(folder: Path, names: Collection[str]) -> list[str]:
    """Files and frame folders with a wanted name. A frame folder is not read further than to its first image."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    open_folders = [""]
    while open_folders:
        below = open_folders.pop()
        here = os.path.join(folder, below)
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:
            for entry in entries:
                path = posixpath.join(below, entry.name)
                wanted = stem_of(entry.name) in names
                if is_folder(entry):
                    if wanted and _holds_frames(entry.path):
                        found.append(path)
                    else:
                        open_folders.append(path)
                elif (
                    wanted and os.path.splitext(entry.name)[1].lower() in VIDEO_SUFFIXES and os.path.isfile(entry.path)
                ):
                    found.append(path)
    return found


def _holds_frames(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES for entry in entries)
