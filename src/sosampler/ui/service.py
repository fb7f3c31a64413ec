"""The page's questions and their answers, without HTTP: videos come and go, frames are chosen, files are asked for."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from sosampler._util.validation import whole_number
from sosampler.errors import SosamplerError
from sosampler.ui.choices import Offer
from sosampler.ui.look import Kept, full_picture, json_of, look_at, write_zip
from sosampler.ui.videos import NotThere, Video, Videos, told_size

_KEPT_RESULTS = 512


class Service:
    """All of one page. Safe to use from several threads; frames are chosen for one question at a time."""

    def __init__(self, offer: Offer, folder: Path, *, max_upload: int, max_videos: int) -> None:
        self.offer = offer
        self.videos = Videos(folder, max_upload=max_upload, max_videos=max_videos, limits=offer.limits)
        self._results: OrderedDict[str, Kept] = OrderedDict()
        self._results_lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # one video takes all cores already

    def about(self) -> dict[str, Any]:
        """What a fresh page needs to know."""
        most = self.videos.max_upload
        return {
            **self.offer.to_dict(),
            "max_upload": most,
            "max_upload_told": told_size(most),
            "videos": [video.to_dict() for video in self.videos.all()],
        }

    def upload(self, name: str, size: int, read: Callable[[int], bytes]) -> dict[str, Any]:
        return self.videos.add_upload(name, size, read).to_dict()

    def remove(self, key: str) -> dict[str, Any]:
        self.videos.remove(key)
        with self._results_lock:
            for result in [result for result, kept in self._results.items() if kept.video == key]:
                del self._results[result]
        return {"removed": key}

    def select(self, key: str, given: Any) -> dict[str, Any]:
        """Chosen and uniform frames of a video, and under which name they can be downloaded."""
        video = self.videos.get(key)
        settings = self.offer.settings(given)
        with self._one_at_a_time:
            try:
                view, selection = look_at(video.path, self.offer.options(settings))
            except SosamplerError as error:
                raise type(error)(video.named(error)) from error
        kept = Kept(video.id, video.name, video.path, selection, view.uniform, settings.to_dict())
        return {**view.to_dict(), "notes": [video.named(note) for note in view.notes], "result": self._keep(kept)}

    def picture(self, key: str, frame: str) -> bytes:
        """A frame in its full size, as a JPEG."""
        video = self.videos.get(key)
        number = whole_number("frame", int(frame) if frame.isdecimal() else frame, at_least=0)
        with self._one_at_a_time:
            try:
                return full_picture(video.path, number, self.offer.limits)
            except SosamplerError as error:
                raise type(error)(video.named(error)) from error

    def selections(self, results: Sequence[str]) -> dict[str, Any]:
        """The JSON of these results."""
        return json_of(self._asked(results))

    def frames(self, results: Sequence[str], file: IO[bytes]) -> None:
        """The zip file of these results."""
        with self._one_at_a_time:
            write_zip(file, self._asked(results), self.offer.limits)

    def add_own(self, paths: Iterable[Path]) -> list[Video]:
        """The user's own files, named on the command line."""
        return [self.videos.add_own(path) for path in paths]

    def _keep(self, kept: Kept) -> str:
        result = secrets.token_hex(8)
        with self._results_lock:
            self._results[result] = kept
            while len(self._results) > _KEPT_RESULTS:
                self._results.popitem(last=False)
        return result

    def _asked(self, results: Sequence[str]) -> list[Kept]:
        with self._results_lock:
            found = [self._results[result] for result in results if result in self._results]
        if not results or len(found) < len(results):
            raise NotThere("these frames are not on the page any more; choose them again, then download")
        return found
