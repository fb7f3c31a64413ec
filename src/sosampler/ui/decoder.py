"""Everything that the page decodes, in processes of its own.

A file that kills its decoder, or over which it never returns, costs its own request: the process is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.arrays import jpeg
from sosampler._util.workers import ProcessPool, Work, WorkerDied
from sosampler.errors import VideoError, errors_of
from sosampler.inference.selection import Selection
from sosampler.ui.view import Controls, Settings, full_image, read_facts, view_video
from sosampler.video.source import open_video

_DOWNLOAD_QUALITY = 95


class Decoder:
    """Answers requests about videos by `controls`, in `num_processes` processes; 0: in a thread of this one."""

    def __init__(self, controls: Controls, num_processes: int = 0) -> None:
        self._timeout = controls.limits.timeout
        self._pool = ProcessPool(num_processes, f"{__name__}:serve", controls, work="decoding for the page")

    def close(self) -> None:
        self._pool.__exit__()

    def facts(self, video: Path) -> tuple[str, ...]:
        """Return the video in a few words; raise for a file that is not one."""
        facts: tuple[str, ...] = self._ask("facts", video)
        return facts

    def view(self, video: Path, settings: Settings) -> tuple[dict[str, Any], Selection]:
        """Return what the page shows of a video, and the selection without pixels."""
        shown: tuple[dict[str, Any], Selection] = self._ask("view", video, settings)
        return shown

    def image(self, video: Path, frame: int) -> bytes:
        """Return a frame in its full size, as a JPEG."""
        image: bytes = self._ask("image", video, frame)
        return image

    def images(self, video: Path, frames: Sequence[int]) -> list[tuple[int, float, bytes]]:
        """Return frames for a download: number, seconds and JPEG."""
        images: list[tuple[int, float, bytes]] = self._ask("images", video, frames)
        return images

    def _ask(self, what: str, video: Path, *arguments: Any) -> Any:
        try:
            return self._pool.submit((what, video, arguments), self._timeout).result()
        except WorkerDied as died:
            raise VideoError(died.over(str(video))) from died


# ---- in the decoding process


def serve(controls: Controls) -> Work:
    """Return the function of the process."""
    limits = controls.limits

    def images(video: Path, frames: Sequence[int]) -> list[tuple[int, float, bytes]]:
        with closing(open_video(video, limits=limits)) as reader:
            batch = reader.read(np.asarray(frames, dtype=np.int64))
        jpegs = [jpeg(Image.fromarray(frame), _DOWNLOAD_QUALITY) for frame in batch.frames]
        return list(zip(batch.frame_indices.tolist(), batch.pts_seconds.tolist(), jpegs, strict=True))

    answers: dict[str, Callable[..., Any]] = {
        "facts": lambda video: read_facts(video, limits),
        "view": lambda video, settings: view_video(video, controls.options(settings)),
        "image": lambda video, frame: full_image(video, frame, limits),
        "images": images,
    }

    def work(task: tuple[str, Path, tuple[Any, ...]]) -> Any:
        what, video, arguments = task
        with errors_of(str(video)):
            return answers[what](video, *arguments)

    return work
