"""Metadata of chosen frames for the processors of Video-LLMs, so that the times in their prompts are true.

transformers and vLLM compute times as frame number / fps. That is right for a constant frame rate. For a variable one,
and only then, the numbers here count milliseconds instead of frames, so that the quotient is the true time again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sosampler._util.arrays import Frames
from sosampler._util.validation import check_bool, check_int
from sosampler.errors import SosamplerError
from sosampler.inference.selection import Selection

_TICKS = 1000  # of the clock, a second
# Seconds that number / fps may be off before milliseconds are used: half of the 0.1 s that prompts are written with.
_TOLERATED = 0.05


def seconds_from_start(selection: Selection) -> list[float]:
    """Return seconds [N] since the first frame of the video; in some files that has the timestamp 10 or 3600."""
    times: list[float] = (selection.pts_seconds - selection.metadata.start_seconds).tolist()
    return times


def video_metadata(selection: Selection) -> dict[str, Any]:
    """Return the fields of transformers' `VideoMetadata`, with frames_indices / fps the true times.

    With a constant frame rate these are `selection.to_video_metadata()`: true frame numbers, true rate. With a variable
    one `fps` is 1000 and numbers are milliseconds; `selection.frame_indices` has the frame numbers.

    >>> import sosampler as so
    >>> from sosampler.video.synthetic import numbered_video
    >>> even = so.select(numbered_video(num_frames=90), 2, policy="uniform")
    >>> video_metadata(even)["frames_indices"], video_metadata(even)["fps"]
    ([22, 67], 30.0)
    >>> uneven = so.select(numbered_video(num_frames=3, pts=[0, 30, 300]), 3)
    >>> video_metadata(uneven)["frames_indices"], video_metadata(uneven)["fps"]
    ([0, 1000, 10000], 1000.0)
    """
    metadata = selection.to_video_metadata()
    seconds = np.array(seconds_from_start(selection))
    off = np.abs(selection.frame_indices / selection.metadata.fps - seconds).max()
    if off <= min(_TOLERATED, 0.5 / selection.metadata.fps):
        return metadata
    ticks = np.rint(seconds * _TICKS).astype(np.int64)
    total = max(round(selection.metadata.duration * _TICKS), int(ticks[-1]) + 1)
    return {**metadata, "fps": float(_TICKS), "frames_indices": ticks.tolist(), "total_num_frames": total}


def whole_patches(selection: Selection, size: int, *, one_moment_per_patch: bool = False) -> Selection:
    """Return the selection with frames repeated, so that their number is a multiple of `size`, a patch in time.

    By default the last frame is repeated, as Qwen-VL's processor does. `one_moment_per_patch` repeats every frame
    `size` times instead: a patch then shows one moment and has its exact time, where otherwise frames that may lie far
    apart share a patch and the mean of their times. It takes `size` times as many patches.
    """
    check_int("size", size)
    count = len(selection)
    if check_bool("one_moment_per_patch", one_moment_per_patch):
        positions = np.repeat(np.arange(count), size)
    else:
        positions = np.minimum(np.arange(-(-count // size) * size), count - 1)
    if len(positions) == count:
        return selection
    return replace(
        selection,
        frame_indices=selection.frame_indices[positions],
        pts_seconds=selection.pts_seconds[positions],
        scores=None if selection.scores is None else selection.scores[positions],
        frames=None if selection.frames is None else selection.frames[positions],
    )


def decoded(selection: Selection) -> Frames:
    """Return the frames [N, H, W, 3], which must have been decoded."""
    if selection.frames is None:
        raise SosamplerError(f"{selection.video}: this selection holds no frames; select with decode=True")
    return selection.frames
