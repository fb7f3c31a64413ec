"""The requests of the page without HTTP: add and remove videos, choose frames, download."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from sosampler._util.validation import check_int
from sosampler.errors import SosamplerError
from sosampler.ui.settings import Controls
from sosampler.ui.videos import NotFound, Video, Videos, size_text
from sosampler.ui.view import StoredResult, full_image, json_of, view_video, write_zip

_MAX_RESULTS = 512


class Service:
    """The state of one page. Safe to use from several threads; one request chooses frames at a time."""

    def __init__(self, controls: Controls, folder: Path, *, max_upload: int, max_videos: int) -> None:
        self.controls = controls
        self.videos = Videos(folder, max_upload=max_upload, max_videos=max_videos, limits=controls.limits)
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
        self._results_lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # one video takes all cores already

    def about(self) -> dict[str, Any]:
        """Return what a fresh page needs."""
        limit = self.videos.max_upload
        return {
            **self.controls.to_dict(),
            "max_upload": limit,
            "max_upload_told": size_text(limit),
            "videos": [video.to_dict() for video in self.videos.all()],
        }

    def upload(self, name: str, size: int, read: Callable[[int], bytes]) -> dict[str, Any]:
        return self.videos.add_upload(name, size, read).to_dict()

    def remove(self, key: str) -> dict[str, Any]:
        self.videos.remove(key)
        with self._results_lock:
            for result in [result for result, stored in self._results.items() if stored.video == key]:
                del self._results[result]
        return {"removed": key}

    def select(self, key: str, given: Any) -> dict[str, Any]:
        """Return chosen and uniform frames of a video, and the id of the result for downloads."""
        video = self.videos.get(key)
        settings = self.controls.settings(given)
        with self._one_at_a_time:
            try:
                view, selection = view_video(video.path, self.controls.options(settings))
            except SosamplerError as error:
                raise type(error)(video.named(error)) from error
        result = StoredResult(video.id, video.name, video.path, selection, view.uniform, settings.to_dict())
        return {**view.to_dict(), "notes": [video.named(note) for note in view.notes], "result": self._store(result)}

    def picture(self, key: str, frame: str) -> bytes:
        """Return a frame in its full size, as a JPEG."""
        video = self.videos.get(key)
        number = check_int("frame", int(frame) if frame.isdecimal() else frame, at_least=0)
        with self._one_at_a_time:
            try:
                return full_image(video.path, number, self.controls.limits)
            except SosamplerError as error:
                raise type(error)(video.named(error)) from error

    def selections(self, results: Sequence[str]) -> dict[str, Any]:
        """Return the JSON of these results."""
        return json_of(self._stored(results))

    def frames(self, results: Sequence[str], file: IO[bytes]) -> None:
        """Write the zip file of these results."""
        with self._one_at_a_time:
            write_zip(file, self._stored(results), self.controls.limits)

    def add_file(self, paths: Iterable[Path]) -> list[Video]:
        """Add files of this machine, named on the command line."""
        return [self.videos.add_file(path) for path in paths]

    def _store(self, result: StoredResult) -> str:
        key = secrets.token_hex(8)
        with self._results_lock:
            self._results[key] = result
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
        return key

    def _stored(self, results: Sequence[str]) -> list[StoredResult]:
        with self._results_lock:
            stored = [self._results[result] for result in results if result in self._results]
        if not results or len(stored) < len(results):
            raise NotFound("these frames are not on the page any more; choose them again, then download")
        return stored
