"""What choosing frames has in common, for one video at a time and for many in batches."""

from __future__ import annotations

from typing import Any, cast

from sosampler.errors import InvalidArgument
from sosampler.options import SelectOptions
from sosampler.video.candidates import segment_centres
from sosampler.video.metadata import VideoMetadata
from sosampler.video.reader import VideoReader
from sosampler.video.sizes import Size
from sosampler.video.source import open_video
from sosampler.video.timeline import Indices

# Policies that look at pixels decode all T candidates once and keep them up to this size; beyond it they look at small
# copies, and the N winners are decoded a second time.
MAX_KEPT_BYTES = 1 << 30


def open_with(source: Any, options: SelectOptions) -> VideoReader:
    """A video, as the options ask to read it."""
    return open_video(
        source,
        decoder=cast(Any, options.decoder),
        threads=options.threads,
        limits=options.limits,
        folder_fps=options.folder_fps,
    )


def no_larger(size: Size, metadata: VideoMetadata) -> Size:
    """A short side of at most that of the video; other sizes as they are."""
    return min(size, metadata.width, metadata.height) if isinstance(size, int) else size


def too_few(name: str, wanted: int, there: int) -> InvalidArgument:
    """The error for on_short="error"."""
    return InvalidArgument(
        f"{name}: {wanted} frames were asked for but only {there} are there; "
        'ask for fewer, or allow on_short="repeat" or "fewer"'
    )


def with_repeats(positions: Indices, candidate_of: Indices, wanted: int, on_short: str) -> Indices:
    """Chosen positions among the frames that differ, some of them again where there are fewer than wanted.

    `candidate_of` [T]: for each candidate the frame that it is.
    """
    if wanted <= len(positions) or on_short != "repeat":
        return positions
    # All candidates were asked for: as they are, repeats and all. Otherwise what was chosen is repeated evenly.
    return candidate_of if wanted == len(candidate_of) else positions[segment_centres(len(positions), wanted)]


def timing(begin: float, opened: float, listed: float, done: float) -> dict[str, float]:
    """Seconds of each part, by the names that a selection has, from the moments at which the parts ended."""
    return {
        "open": opened - begin,
        "candidates": listed - opened,
        "choose_and_decode": done - listed,
        "total": done - begin,
    }
