"""What can be taken along: the chosen frames as they are stored, in a zip file, and all but the pixels as JSON."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sosampler.selection import Selection
from sosampler.ui.look import Strip, jpeg
from sosampler.video.limits import Limits
from sosampler.video.source import open_video

_QUALITY = 95


@dataclass(frozen=True, eq=False)
class Kept:
    """A selection that the page shows, as long as it may be asked for."""

    video: str  # id
    name: str
    path: Path
    selection: Selection  # without pixels
    uniform: Strip
    settings: dict[str, Any]


def json_of(kept: Sequence[Kept]) -> dict[str, Any]:
    """One object: the settings and, for each video, what `sosampler select --json` prints, with uniform's frames."""
    return {"videos": [_row(one) for one in kept]}


def write_zip(file: IO[bytes], kept: Sequence[Kept], limits: Limits | None = None) -> None:
    """Folders named after the videos with their frames, which are decoded anew, and selection.json beside them."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # JPEG does not get smaller
        for one in kept:
            reader = open_video(one.path, limits=limits)
            try:
                batch = reader.read(one.selection.frame_indices)
            finally:
                reader.close()
            for place, (frame, index, seconds) in enumerate(
                zip(batch.frames, batch.frame_indices, batch.pts_seconds, strict=True)
            ):
                name = f"{place:03d}_frame{index:06d}_{seconds:.3f}s.jpg"
                archive.writestr(f"{one.name}/{name}", jpeg(frame, quality=_QUALITY))
        archive.writestr("selection.json", json.dumps(json_of(kept), indent=1), zipfile.ZIP_DEFLATED)


def _row(one: Kept) -> dict[str, Any]:
    uniform = one.uniform.pictures
    return {
        **one.selection.to_dict(),
        "video": one.name,
        "settings": one.settings,
        "uniform": {
            "frame_indices": [picture.frame for picture in uniform],
            "pts_seconds": [picture.seconds for picture in uniform],
        },
    }
