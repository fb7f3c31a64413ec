"""Frame dumps: a folder of numbered images, as the public benchmarks are handed on (img_00001.jpg, ...)."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.errors import VideoError
from sosampler.video.limits import Limits, Size, TimeLimit, check_size, target_size
from sosampler.video.reader import FrameBatch, FrameView, RgbView, Timeline, VideoMetadata, resized
from sosampler.video.source import IMAGE_SUFFIXES, frame_images

# FFmpeg's image2 demuxer plays a folder at this rate by default.
_DEFAULT_FPS = 25.0


class FolderReader:
    """Every image is a frame and, since it stands alone, a keyframe."""

    decoder = "images"
    file_bytes: int | None = None
    transfer: dict[str, Any] | None = None

    def __init__(self, folder: Path, *, fps: float | None, limits: Limits) -> None:
        self.name = str(folder)
        self.notes: list[str] = []
        self._limits, self._time = limits, TimeLimit(str(folder), limits)
        self._images = frame_images(folder)
        if not self._images:
            kinds = " ".join(sorted(IMAGE_SUFFIXES))
            raise VideoError(
                f"{folder}: a folder without numbered frame images ({kinds}); give a folder such as one that holds "
                "img_00001.jpg, img_00002.jpg, ..., or a video file"
            )
        limits.check_frames(self.name, len(self._images))
        if fps is None:
            fps = _DEFAULT_FPS
            self.notes.append(
                f"a folder of images holds no times; {fps:g} frames a second are assumed, folder_fps sets the true rate"
            )
        rate = max(Fraction(fps).limit_denominator(1_000_000), Fraction(1, 1_000_000))
        count = len(self._images)
        self._timeline = Timeline(np.arange(count, dtype=np.int64), 1 / rate, np.ones(count, dtype=np.bool_), count)
        limits.check_duration(self.name, self._timeline.duration)
        self._first_size: tuple[int, int] | None = None  # (width, height): all frames are given in the first one's size

    def close(self) -> None:
        pass  # images are opened one at a time

    def timeline(self) -> Timeline:
        return self._timeline

    @property
    def total_num_frames(self) -> int:
        return len(self._images)

    def keyframe_indices(self) -> Indices:
        return self._timeline.keyframe_indices

    def locate_keyframes(self, positions: Indices, behind: Seconds | None = None) -> tuple[Indices, Seconds]:
        return np.asarray(positions, dtype=np.int64), self._timeline.seconds(positions)

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        return self._timeline.seconds(others) - self._timeline.seconds(frame_indices)

    @property
    def metadata(self) -> VideoMetadata:
        width, height = self._stored_size()
        return VideoMetadata(
            total_num_frames=len(self._images),
            fps=len(self._images) / self._timeline.duration,
            duration=self._timeline.duration,
            start_seconds=0.0,
            width=width,
            height=height,
            rotation=0,
            codec=self._images[0].suffix.lower().lstrip("."),
            num_keyframes=len(self._images),
            decoder=self.decoder,
        )

    def _stored_size(self) -> tuple[int, int]:
        if self._first_size is None:
            height, width, _ = self._load_or_nearest(0, [])[1].shape
            self._first_size = width, height
        return self._first_size

    def _load(self, frame: int) -> Frames:
        path = self._images[frame]
        try:
            with Image.open(path) as image:
                self._limits.check_pixels(str(path), *image.size)  # before a pixel is decoded
                return np.asarray(upright_rgb(image))
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            raise VideoError(f"{path}: cannot be read as an image ({error}); remove it or write it again") from error

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        requested = np.asarray(frame_indices, dtype=np.int64)
        if len(requested) and (requested.min() < 0 or requested.max() >= len(self._images)):
            raise IndexError(
                f"{self.name}: frames {requested.tolist()} were requested, it has 0..{len(self._images) - 1}"
            )
        to_width, to_height = target_size(*self._stored_size(), check_size(size))
        self._limits.check_bytes(self.name, len(requested), to_width, to_height, None)
        got: dict[int, tuple[int, Frames]] = {}
        notes: list[str] = []
        with self._time:
            for frame in np.unique(requested).tolist():
                used, image = self._load_or_nearest(frame, notes)
                got[frame] = used, resized(image[None], to_width, to_height)[0]
                self._time.check()
        used_indices = np.array([got[frame][0] for frame in requested.tolist()], dtype=np.int64)
        return FrameBatch(
            frames=np.stack([got[frame][1] for frame in requested.tolist()]),
            frame_indices=used_indices,
            pts_seconds=self._timeline.seconds(used_indices),
            notes=tuple(notes),
        )

    def view(self, frame_indices: Indices, *, size: Size, max_bytes: int) -> FrameView:
        return RgbView(self, frame_indices, size=size, max_bytes=max_bytes)

    def _load_or_nearest(self, frame: int, notes: list[str]) -> tuple[int, Frames]:
        """The image, or the nearest readable one where it is damaged, as with damaged packets of a video."""
        distance = np.abs(np.arange(len(self._images)) - frame)
        first_error: VideoError | None = None
        for other in np.argsort(distance, kind="stable")[:64].tolist():
            try:
                image = self._load(other)
            except VideoError as error:
                first_error = first_error or error
                continue
            if other != frame:
                notes.append(
                    f"image {frame} ({self._images[frame].name}) is damaged; image {other} was used in its place"
                )
            return other, image
        assert first_error is not None
        raise first_error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Apply the EXIF rotation and convert to RGB; 16-bit grey is scaled, where Pillow alone would clip it at 255."""
    upright: Any = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        upright = Image.fromarray((np.asarray(upright, dtype=np.int64) // 257).clip(0, 255).astype(np.uint8))
    rgb: Image.Image = upright.convert("RGB")
    return rgb
