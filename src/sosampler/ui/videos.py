"""The videos on the page: uploads, in a folder of their own, files of this machine, and downloads of their frames."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from sosampler._util.files import replacing
from sosampler._util.limits import UPLOAD_SECONDS
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.selection import Selection
from sosampler.ui.view import read_facts, unique_name
from sosampler.video.source import VIDEO_SUFFIXES

_CHUNK = 1 << 20  # bytes
_MAX_NAME = 120
_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}


class TooLarge(InvalidArgument):
    """An upload is larger than allowed, or one too many."""


class TooSlow(InvalidArgument):
    """An upload stalls, or takes longer than allowed."""


class NotFound(SosamplerError):
    """The request names something that is not on the page any more."""


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


class Videos:
    """Stores uploads in `folder`, which the caller removes. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        max_upload: int,  # bytes
        max_videos: int,
        max_seconds: float = UPLOAD_SECONDS,  # of one upload, which the caller's `read` observes
        facts: Callable[[Path], tuple[str, ...]] = read_facts,
    ) -> None:
        self.folder, self.max_upload, self.max_videos, self.max_seconds = folder, max_upload, max_videos, max_seconds
        self._facts = facts
        self._videos: dict[str, Video] = {}
        self._lock = threading.Lock()
        self._arriving = 0

    def all(self) -> list[Video]:
        with self._lock:
            return list(self._videos.values())

    def get(self, key: str) -> Video:
        with self._lock:
            video = self._videos.get(key)
        if video is None:
            raise NotFound("this video is not on the page any more; drop it there again")
        return video

    def add_file(self, path: Path) -> Video:
        """Add a file of this machine, which stays where it is."""
        facts = self._facts(path)
        return self._add(Video(_new_id(), path.name, path, path.stat().st_size, facts, is_upload=False))

    def add_upload(self, name: str, size: int, read: Callable[[int], bytes]) -> Video:
        """Store `size` bytes from `read(limit)`, if they are a video; too many are refused before the first is read."""
        name = clean_name(name)
        if size > self.max_upload:
            raise TooLarge(
                f"{name} has {size_text(size)}; uploads must be at most {size_text(self.max_upload)}. "
                "Cut it, or start the page with a larger --max-upload, or give it as sosampler ui FILE"
            )
        with self._lock:
            if len(self._videos) + self._arriving >= self.max_videos:
                raise TooLarge(f"{self.max_videos} videos are on the page, which is the limit; remove some first")
            self._arriving += 1
        try:
            key, suffix = _new_id(), os.path.splitext(name)[1].lower()
            # Some demuxers need the suffix of a video; with .txt FFmpeg would render the letters.
            path = self.folder / (key + (suffix if suffix in VIDEO_SUFFIXES else ""))
            with replacing(path) as temporary:
                _store(temporary, name, size, read)
            try:
                with naming(path, name):
                    facts = self._facts(path)
            except SosamplerError:
                path.unlink()
                raise
            return self._add(Video(key, name, path, size, facts, is_upload=True))
        finally:
            with self._lock:
                self._arriving -= 1

    def remove(self, key: str) -> None:
        video = self.get(key)
        with self._lock:
            self._videos.pop(key, None)
        if video.is_upload:
            video.path.unlink(missing_ok=True)

    def _add(self, video: Video) -> Video:
        with self._lock:
            taken = {other.name for other in self._videos.values()}
            video = self._videos[video.id] = replace(video, name=unique_name(video.name, taken))
        return video


def clean_name(name: str) -> str:
    """Return the last part of a name that a browser sent, without characters that cannot be shown.

    >>> clean_name("C:\\\\films\\\\a b.mp4"), clean_name("../../etc/x.mp4"), clean_name(" ..")
    ('a b.mp4', 'x.mp4', 'video')
    """
    last = re.split(r"[/\\]", name)[-1]
    shown = "".join(letter for letter in last if letter.isprintable()).strip()
    if len(shown) > _MAX_NAME:
        stem, suffix = os.path.splitext(shown)
        shown = stem[: _MAX_NAME - len(suffix[:10])] + suffix[:10]
    return shown if shown.strip(". ") else "video"


def size_of(text: str) -> int:
    """Parse a size such as 500MB into bytes.

    >>> size_of("500MB"), size_of("1.5 GB"), size_of("2048")
    (500000000, 1500000000, 2048)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text.upper())
    size = int(float(match[1]) * _UNITS[f"{match[2]}B"]) if match else 0
    if size < 1:
        raise InvalidArgument(f"{text!r} is not a size; it must be one such as 500MB or 2GB")
    return size


def size_text(size: int) -> str:
    """
    >>> size_text(999), size_text(1_500_000), size_text(2_000_000_000)
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
                    raise InvalidArgument(f"{name}: {size_text(left)} of {size_text(size)} did not arrive; try again")
                file.write(data)
                left -= len(data)
    except TooSlow as error:
        raise TooSlow(f"{name}: {error}") from error
    except ConnectionError as error:
        raise InvalidArgument(f"{name}: the upload broke off; try again") from error
    except OSError as error:
        raise InvalidArgument(
            f"{name}: cannot be stored ({error.strerror or error}); free some space, or set TMPDIR to a larger disk"
        ) from error


def with_name(text: str, path: Path, name: str) -> str:
    """Return a text with the name that the user knows instead of a path of this machine."""
    return text.replace(str(path), name).replace(path.name, name)


@contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Raise errors with the name that the user knows instead of a path of this machine."""
    try:
        yield
    except SosamplerError as error:
        raise type(error)(with_name(str(error), path, name)) from error


def _new_id() -> str:
    return secrets.token_hex(8)


# ---- downloads


@dataclass(frozen=True, eq=False)
class StoredResult:
    """A selection that the page shows and may download."""

    video: Video
    selection: Selection  # without pixels
    uniform: dict[str, list[Any]]  # frame_indices and pts_seconds
    settings: dict[str, Any]

    @classmethod
    def of(cls, video: Video, selection: Selection, strip: dict[str, Any], settings: dict[str, Any]) -> StoredResult:
        """`strip`: uniform's, whose pictures are left out, so that many results can be stored."""
        frames, seconds = ([picture[key] for picture in strip["pictures"]] for key in ("frame", "seconds"))
        return cls(video, selection, {"frame_indices": frames, "pts_seconds": seconds}, settings)


def json_of(results: Sequence[StoredResult]) -> dict[str, Any]:
    """Return for each video what `sosampler select --json` prints, with the settings and uniform's frames."""
    rows = []
    for result in results:
        values = {"video": result.video.name, "settings": result.settings, "uniform": result.uniform}
        rows.append({**result.selection.to_dict(), **values})
    return {"videos": rows}


Images = Callable[[Path, list[int]], list[tuple[int, float, bytes]]]
"""A video and numbers of frames -> number, seconds and JPEG of each."""


def write_zip(file: IO[bytes], results: Sequence[StoredResult], images: Images) -> None:
    """Write a folder of frames for each video, which `images` decodes again, and selection.json."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # JPEG does not compress further
        for result in results:
            decoded = images(result.video.path, result.selection.frame_indices.tolist())
            for position, (index, seconds, data) in enumerate(decoded):
                name = f"{position:03d}_frame{index:06d}_{seconds:.3f}s.jpg"
                archive.writestr(f"{result.video.name}/{name}", data)
        archive.writestr("selection.json", json.dumps(json_of(results), indent=1), zipfile.ZIP_DEFLATED)
