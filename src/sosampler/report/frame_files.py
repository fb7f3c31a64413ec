"""Chosen frames as image files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from sosampler.errors import InvalidArgument
from sosampler.files import replacing
from sosampler.selection import Selection

IMAGE_FORMATS = ("jpg", "png")


def save_frames(selection: Selection, folder: Path, *, image_format: str = "jpg") -> list[Path]:
    """Write each frame as NNN_frameINDEX_TIMEs.jpg; the name says its place, true number and time."""
    if selection.frames is None:
        raise InvalidArgument("there are no frames to save; select with decode=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for place, (frame, index, seconds) in enumerate(
            zip(selection.frames, selection.frame_indices, selection.pts_seconds, strict=True)
        ):
            path = folder / f"{place:03d}_frame{index:06d}_{seconds:.3f}s.{image_format}"
            with replacing(path) as temporary:
                Image.fromarray(frame).save(temporary, quality=95)
            paths.append(path)
    except OSError as error:
        raise InvalidArgument(
            f"{folder}: frames cannot be written there ({error}); give a folder that can be"
        ) from error
    return paths
