"""Which frames of an open video are offered as candidates."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from sosampler.errors import InvalidArgument
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import Candidates
from sosampler.video.candidates import grid_indices, keyframe_positions, rate_times, segment_centres, snap
from sosampler.video.reader import VideoReader
from sosampler.video.timeline import Indices


def offer(reader: VideoReader, options: SelectOptions, notes: list[str]) -> Candidates:
    """Places on the grid, moved to keyframes where that was asked for. Adds to the notes what falls short."""
    first, last = _frame_range(reader, options)
    targets = _targets(reader, options, first, last, notes)
    if options.mode == "keyframe":
        return _keyframes(reader, options, targets, first, last, notes)
    frame_indices, timeline = targets, reader.timeline()
    if options.mode == "snap":
        keys = timeline.keyframe_indices
        keys = keys[(keys >= first) & (keys < last)]
        frame_indices = snap(
            targets, timeline.seconds(targets), keys, timeline.seconds(keys), tolerance=options.snap_tolerance
        )
    pts_seconds = timeline.seconds(frame_indices)
    moved_seconds = pts_seconds - timeline.seconds(targets)
    return Candidates(options.mode, options.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds)


def _frame_range(reader: VideoReader, options: SelectOptions) -> tuple[int, int]:
    if options.start is None and options.end is None:
        return 0, reader.total_num_frames
    timeline = reader.timeline()
    first, last = timeline.range_of(options.start, options.end)
    if first >= last:
        begins, ends = float(timeline.seconds(0)), float(timeline.to_seconds(timeline.end_pts))
        raise InvalidArgument(
            f"{reader.name}: no frame lies between start={options.start} and end={options.end}; "
            f"its frames run from {begins:.3f} to {ends:.3f} s"
        )
    return first, last


def _targets(reader: VideoReader, options: SelectOptions, first: int, last: int, notes: list[str]) -> Indices:
    if options.fps is not None:
        return _at_rate(reader, options, options.fps, first, last, notes)
    count, total = options.num_offered, last - first
    assert count is not None, "without a rate there is a number"
    if options.num_candidates is None:
        # The policy's own pool: a short video simply offers all it has, as long as that is enough.
        count = min(count, max(options.num_wanted or 1, total))
    if total < count and options.on_short != "error":
        notes.append(f"{total} frames for {count} candidates; {_told(options.on_short, 'frame')}")
    # The paper's test grid has a seed of its own, the same for every video.
    seed = None if options.grid == "jitter" else options.seed
    grid, on_short = cast(Any, options.grid), cast(Any, options.on_short)
    return first + grid_indices(total, count, grid=grid, on_short=on_short, seed=seed)


def _at_rate(
    reader: VideoReader, options: SelectOptions, fps: float, first: int, last: int, notes: list[str]
) -> Indices:
    timeline = reader.timeline()
    begins = max(float(timeline.seconds(first)), -np.inf if options.start is None else options.start)
    ends = timeline.end_pts if last == len(timeline) else timeline.pts[last]
    times = rate_times(
        begins, min(float(timeline.to_seconds(ends)), np.inf if options.end is None else options.end), fps
    )
    targets = np.clip(timeline.index_at(times), first, last - 1)
    distinct = np.unique(targets)
    if len(distinct) == len(targets):
        return targets
    if options.on_short == "error":
        raise InvalidArgument(
            f"{reader.name}: fps={fps:g} asks for {len(targets)} frames where {len(distinct)} are; "
            'lower fps, or allow on_short="repeat" or "fewer"'
        )
    told = _told(options.on_short, "frame")
    notes.append(f"{len(distinct)} frames for {len(targets)} moments at {fps:g} fps; {told}")
    return distinct if options.on_short == "fewer" else targets


def _keyframes(
    reader: VideoReader, options: SelectOptions, targets: Indices, first: int, last: int, notes: list[str]
) -> Candidates:
    keys = reader.keyframe_indices()
    inside = np.flatnonzero((keys >= first) & (keys < last))
    if not len(inside):
        raise InvalidArgument(
            f"{reader.name}: no keyframe lies in the range asked for; widen it, or take candidates='exact'"
        )
    if len(inside) < len(targets) and options.on_short != "error":
        told = _told(options.on_short, "keyframe")
        notes.append(f"{len(inside)} keyframes for {len(targets)} candidates; {told}")
    positions = keyframe_positions(targets, keys[inside], on_short=cast(Any, options.on_short))
    frame_indices, pts_seconds = reader.locate_keyframes(inside[positions])
    if not np.array_equal(frame_indices, keys[inside[positions]]):
        # The container's index did not know the true numbers (open groups of pictures): choose again among those.
        reader.timeline()
        keys = reader.keyframe_indices()
        inside = np.flatnonzero((keys >= first) & (keys < last))
        positions = keyframe_positions(targets, keys[inside], on_short=cast(Any, options.on_short))
        frame_indices, pts_seconds = reader.locate_keyframes(inside[positions])
    if len(targets) != len(frame_indices):  # fewer: measure how far they lie from a grid of their own
        targets = first + segment_centres(last - first, len(frame_indices))
    moved_seconds = reader.seconds_apart(targets, frame_indices)
    return Candidates(options.mode, options.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds)


def _told(on_short: str, what: str) -> str:
    return f"each {what} is offered once" if on_short == "fewer" else f"{what}s are repeated evenly"
