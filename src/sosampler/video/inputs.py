"""What the user means by the paths that are given: files, folders of videos, frame dumps, patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from sosampler.errors import InvalidArgument, VideoError
from sosampler.video.source import VIDEO_SUFFIXES, frame_images


def expand(paths: Sequence[str], *, leave_out: Path | None = None) -> list[Path]:
    """All videos that the paths name, in order, each once.

    A folder stands for the videos below it; a folder with numbered images and no videos is itself one video. A file or
    a plain name is taken as it is, so that a misspelt one is reported. `leave_out` is a folder below which nothing is
    looked for: the one that saved frames go to.
    """
    found: dict[Path, None] = {}
    for text in paths:
        path = Path(text)
        if not path.exists() and glob.has_magic(text):
            matches = sorted(glob.glob(text, recursive=True))
            if not matches:
                raise InvalidArgument(f"{text}: the pattern matches nothing; check it, and quote it against the shell")
            named = [
                video
                for match in map(Path, matches)
                for video in (_below(match, leave_out) if match.is_dir() else [match])
            ]
            if not named:
                raise VideoError(f"{text}: the pattern matches only folders without videos or numbered frame images")
            found.update(dict.fromkeys(named))
        elif path.is_dir():
            below = _below(path, leave_out)
            if not below:
                raise VideoError(
                    f"{path}: a folder without videos or numbered frame images; "
                    f"known video endings are {' '.join(sorted(VIDEO_SUFFIXES))}"
                )
            found.update(dict.fromkeys(below))
        else:
            found[path] = None
    return list({os.path.abspath(path): path for path in reversed(found)}.values())[::-1]


def _below(folder: Path, leave_out: Path | None) -> list[Path]:
    videos: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not leave_out or not _same(Path(root, name), leave_out))
        here = [Path(root, name) for name in sorted(files) if os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES]
        videos += here
        if not here and files and frame_images(Path(root)):
            videos.append(Path(root))
    return videos


def _same(one: Path, other: Path) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def labels(videos: Sequence[Path]) -> list[str]:
    """A name for each video that is unique and short: its path below the folder that all have in common."""
    if len(videos) == 1:
        return [videos[0].name]
    absolute = [os.path.abspath(video) for video in videos]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]
