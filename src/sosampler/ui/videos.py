"""The videos on the page: uploaded ones, which live in a folder of their own, and the user's own files."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.ui.choices import unique_name
from sosampler.ui.look import read_facts
from sosampler.video.limits import Limits
from sosampler.video.source import VIDEO_SUFFIXES

_CHUNK = 1 << 20  # bytes
_LONGEST_NAME = 120
_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}


class TooLarge(InvalidArgument):
    """An upload is larger than allowed, or one too many."""


class NotThere(SosamplerError):
    """What was asked for is not on the page any more."""


@dataclass(frozen=True)
class Video:
    """One video on the page."""

    id: str
    name: str  # as the user knows it, unique on the page
    path: Path
    size: int  # bytes
    facts: tuple[str, ...]
    is_upload: bool

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "size": self.size, "facts": list(self.facts)}

    def named(self, said: Exception | str) -> str:
        """A sentence with the name that the user knows instead of a place on this machine."""
        return _with_name(str(said), self.path, self.name)


class Videos:
    """Keeps uploads in `folder`, which is the caller's to remove. Safe to use from several threads."""

    def __init__(self, folder: Path, *, max_upload: int, max_videos: int, limits: Limits | None = None) -> None:
        self.folder = folder
        self.max_upload = max_upload
        self.max_videos = max_videos
        self._limits = limits or Limits()
        self._videos: dict[str, Video] = {}
        self._lock = threading.Lock()
        self._arriving = 0

    def all(self) -> list[Video]:
        with self._lock:
            return list(self._videos.values())

    def get(self, key: str) -> Video:
        with self._lock:
            found = self._videos.get(key)
        if found is None:
            raise NotThere("this video is not on the page any more; drop it there again")
        return found

    def add_own(self, path: Path) -> Video:
        """A file of the user's, which stays where it is."""
        facts = read_facts(path, self._limits)
        size = path.stat().st_size
        return self._keep(path.name, lambda name: Video(_new_id(), name, path, size, facts, is_upload=False))

    def check_size(self, name: str, size: int) -> None:
        """Refuse an upload before its first byte is read."""
        if size > self.max_upload:
            raise TooLarge(
                f"{clean_name(name)} has {told_size(size)}; at most {told_size(self.max_upload)} are taken. "
                "Cut it, or start the page with a larger --max-upload, or give it as sosampler ui FILE"
            )

    def add_upload(self, name: str, size: int, read: Callable[[int], bytes]) -> Video:
        """Store `size` bytes that `read(at_most)` gives, if they are a video."""
        name = clean_name(name)
        self.check_size(name, size)
        with self._lock:
            if len(self._videos) + self._arriving >= self.max_videos:
                raise TooLarge(f"{self.max_videos} videos are on the page, and no more are taken; remove some first")
            self._arriving += 1
        try:
            key = _new_id()
            path = self.folder / (key + _suffix(name))
            with replacing(path) as temporary:
                _store(temporary, name, size, read)
            try:
                facts = read_facts(path, self._limits)
            except SosamplerError as error:
                path.unlink()
                raise type(error)(_with_name(str(error), path, name)) from error
            return self._keep(name, lambda name: Video(key, name, path, size, facts, is_upload=True))
        finally:
            with self._lock:
                self._arriving -= 1

    def remove(self, key: str) -> None:
        video = self.get(key)
        with self._lock:
            self._videos.pop(key, None)
        if video.is_upload:
            video.path.unlink(missing_ok=True)

    def _keep(self, name: str, make: Callable[[str], Video]) -> Video:
        with self._lock:
            video = make(unique_name(name, {one.name for one in self._videos.values()}))
            self._videos[video.id] = video
        return video


def clean_name(name: str) -> str:
    """The last part of a name as a browser sends it, without what cannot be shown.

    >>> clean_name("C:\\\\films\\\\a b.mp4"), clean_name("../../etc/x.mp4"), clean_name(" ..")
    ('a b.mp4', 'x.mp4', 'video')
    """
    last = re.split(r"[/\\]", name)[-1]
    shown = "".join(letter for letter in last if letter.isprintable()).strip()
    if len(shown) > _LONGEST_NAME:
        stem, suffix = os.path.splitext(shown)
        shown = stem[: _LONGEST_NAME - len(suffix[:10])] + suffix[:10]
    return shown if shown.strip(". ") else "video"


def size_of(text: str) -> int:
    """Bytes of a size as people write it.

    >>> size_of("500MB"), size_of("1.5 GB"), size_of("2048")
    (500000000, 1500000000, 2048)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", text.upper())
    size = 0
    if found:
        unit = found[2] if found[2] in _UNITS else f"{found[2]}B"
        size = int(float(found[1]) * _UNITS[unit])
    if size < 1:
        raise InvalidArgument(f"{text!r} is no size; give one such as 500MB or 2GB")
    return size


def told_size(size: int) -> str:
    """
    >>> told_size(999), told_size(1_500_000), told_size(2_000_000_000)
    ('999 bytes', '1.5 MB', '2 GB')
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.3g} {unit}"
    return f"{size} bytes"


def _store(path: Path, name: str, size: int, read: Callable[[int], bytes]) -> None:
    left = size
    try:
        with open(path, "wb") as file:
            while left:
                data = read(min(_CHUNK, left))
                if not data:
                    raise InvalidArgument(f"{name}: {told_size(left)} of {told_size(size)} did not arrive; try again")
                file.write(data)
                left -= len(data)
    except (ConnectionError, TimeoutError) as error:
        raise InvalidArgument(f"{name}: the upload broke off; try again") from error
    except OSError as error:
        raise InvalidArgument(
            f"{name}: cannot be stored ({error.strerror or error}); free some space, or set TMPDIR to a larger disk"
        ) from error


def _suffix(name: str) -> str:
    """The ending, which some demuxers go by, of videos alone: FFmpeg takes a .txt for a film of its letters."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix if suffix in VIDEO_SUFFIXES else ""


def _with_name(text: str, path: Path, name: str) -> str:
    return text.replace(str(path), name).replace(path.name, name)


def _new_id() -> str:
    return secrets.token_hex(8)
