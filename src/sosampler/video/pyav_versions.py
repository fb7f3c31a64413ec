"""What differs between PyAV 15 and 19, in one place. The rest of `video/` is written for the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import av
from av.video.reformatter import VideoReformatter

_VERSION = tuple(int(part) for part in av.__version__.split(".")[:2])
# Bilinear with the filter widened to the scale (anti-aliased), chroma at full width: PIL's pixels in one
# pass. These are SWS_BILINEAR, SWS_ACCURATE_RND and SWS_FULL_CHR_H_INT; PyAV has names for the last two from 18 on.
RESIZING = 0x2 | 0x40000 | 0x2000
# From PyAV 17 on swscale reads the colours of the frame, and takes a number of threads.
_READS_COLOURS = _VERSION >= (17, 0)
_SWS_DEFAULT_COLOURS = 5


def open_for_reading(
    file: Any, options: dict[str, str], timeout: tuple[float, float] | None, container_format: str | None = None
) -> Any:
    """Open with options for the container and, from PyAV 17.1 on, for the decoders that FFmpeg starts to probe streams.

    Before, PyAV writes those beyond its memory where streams appear only while they are probed, as in MPEG.
    """
    how: dict[str, Any] = {"options" if _VERSION >= (17, 1) else "container_options": options}
    # Titles and comments may hold any bytes. Up to PyAV 18 those that are not UTF-8 raise without this argument, which
    # PyAV 19 no longer takes.
    if _VERSION < (19, 0):
        how["metadata_errors"] = "ignore"
    return av.open(file, mode="r", format=container_format, timeout=timeout, **how)


def file_size(container: Any) -> int:
    """Return the bytes of the file; 0 where they are not known, as of a pipe: None in PyAV 19, below 0 before."""
    return max(container.size or 0, 0)


def index_entries(stream: Any) -> Sequence[Any]:
    """Return the entries of the container's index; none before PyAV 17, and the packets are scanned instead."""
    return getattr(stream, "index_entries", ())


def discard_others(container: Any, stream: Any) -> None:
    """Let the demuxer skip all streams but this one. Before PyAV 17.1 it reads them, and PyAV drops their packets."""
    if hasattr(stream, "discard"):
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all


def to_rgb(reformatter: VideoReformatter, frame: Any, width: int, height: int, interpolation: int | None) -> Any:
    """Return the frame as rgb24 of this size, in one thread."""
    if _READS_COLOURS:
        how: dict[str, Any] = {"threads": 1}  # swscale would otherwise start a thread per core for every frame
    else:
        # Without a difference between the two colour spaces PyAV sets none, and swscale takes BT.601 for everything.
        how = {
            "src_colorspace": int(frame.colorspace),
            "dst_colorspace": _SWS_DEFAULT_COLOURS,  # has no effect on RGB
            "src_color_range": int(frame.color_range),
        }
    return reformatter.reformat(frame, width=width, height=height, format="rgb24", interpolation=interpolation, **how)


def reorder_depth_of(context: Any) -> int:
    """Return how many frames the decoder holds back to put them into presentation order; 0 where PyAV does not say."""
    return int(getattr(context, "reorder_depth", 0))


def set_reorder_depth(context: Any, depth: int) -> None:
    """Let the decoder hold back so many frames. Before PyAV 17 `reordering_options` serve instead."""
    if hasattr(context, "reorder_depth"):
        context.reorder_depth = depth


def reordering_options(codec: str) -> dict[str, str]:
    """Return options of a decoder whose depth cannot be set: H.264 then holds back as many frames as its level allows.

    Without that, frames of a stream that does not state its depth are dropped behind a seek.
    """
    return {"strict": "1"} if _VERSION < (17, 0) and codec == "h264" else {}
