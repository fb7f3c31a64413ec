"""What processors of Video-LLMs must be told about chosen frames, so that the times in their prompts are true.

transformers and vLLM write times as frame number / fps. That is right for a video of constant rate. For another one,
and only then, the numbers told here count milliseconds instead of frames: the quotient is the true time again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sosampler._util.validation import true_or_false, whole_number
from sosampler.errors import SosamplerError
from sosampler.inference.selection import Selection
from sosampler.video.reader import Frames

_TICKS = 1000  # of the clock, a second
# Seconds that number / fps may be off before the clock is taken: half of the tenth that prompts are written with.
_TOLERATED = 0.05


def seconds_from_start(selection: Selection) -> list[float]:
    """[N] seconds since the video's first frame appeared; some files number their first frame's time 10 or 3600."""
    times: list[float] = (selection.pts_seconds - selection.metadata.start_seconds).tolist()
    return times


def video_metadata(selection: Selection) -> dict[str, Any]:
    """The fields of transformers' `VideoMetadata`, with frames_indices / fps the true times.

    Of a video of constant rate these are `selection.to_video_metadata()`: true frame numbers, true rate. Of a video of
    variable rate `fps` is 1000 and numbers are milliseconds; `selection.frame_indices` keeps the frame numbers.

    >>> import sosampler as so
    >>> from sosampler.video.synthetic import numbered_video
    >>> even = so.select(numbered_video(num_frames=90), 2, policy="uniform")
    >>> video_metadata(even)["frames_indices"], video_metadata(even)["fps"]
    ([22, 67], 30.0)
    >>> uneven = so.select(numbered_video(num_frames=3, pts=[0, 30, 300]), 3)
    >>> video_metadata(uneven)["frames_indices"], video_metadata(uneven)["fps"]
    ([0, 1000, 10000], 1000.0)
    """
    told = selection.to_video_metadata()
    seconds = np.array(seconds_from_start(selection))
    off = np.abs(selection.frame_indices / selection.metadata.fps - seconds).max()
    if off <= min(_TOLERATED, 0.5 / selection.metadata.fps):
        return told
    ticks = np.rint(seconds * _TICKS).astype(np.int64)
    whole = max(round(selection.metadata.duration * _TICKS), int(ticks[-1]) + 1)
    return {**told, "fps": float(_TICKS), "frames_indices": ticks.tolist(), "total_num_frames": whole}


def whole_patches(selection: Selection, size: int, *, one_moment_per_patch: bool = False) -> Selection:
    """The selection with frames repeated until networks can cut it into patches of `size` frames in time.

    By default the last frame is repeated, as Qwen-VL's processor does. `one_moment_per_patch` gives every frame `size`
    times instead: a patch then shows one moment and carries exactly its time, where otherwise frames that may lie far
    apart share a patch and the mean of their times. It costs `size` times as many patches.
    """
    whole_number("size", size)
    count = len(selection)
    if true_or_false("one_moment_per_patch", one_moment_per_patch):
        places = np.repeat(np.arange(count), size)
    else:
        places = np.minimum(np.arange(-(-count // size) * size), count - 1)
    if len(places) == count:
        return selection
    return replace(
        selection,
        frame_indices=selection.frame_indices[places],
        pts_seconds=selection.pts_seconds[places],
        scores=None if selection.scores is None else selection.scores[places],
        frames=None if selection.frames is None else selection.frames[places],
    )


def decoded(selection: Selection) -> Frames:
    """The frames [N, H, W, 3], which must have been kept."""
    if selection.frames is None:
        raise SosamplerError(f"{selection.video}: this selection holds no frames; select with decode=True")
    return selection.frames
