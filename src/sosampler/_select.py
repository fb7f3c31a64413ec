"""`select`: from a video to the chosen frames."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sosampler.checks import one_of, real_number, whole_number
from sosampler.errors import InvalidArgument
from sosampler.options import DEFAULT_NUM_FRAMES, SELECT
from sosampler.policies import Choice, Policy, get_policy
from sosampler.selection import Candidates, Selection
from sosampler.video.candidates import (
    GRIDS,
    MODES,
    ON_SHORT,
    grid_indices,
    keyframe_positions,
    rate_times,
    segment_centres,
    snap,
)
from sosampler.video.limits import Limits
from sosampler.video.reader import FrameBatch, VideoReader
from sosampler.video.sizes import Size, check_size, target_size
from sosampler.video.source import open_video, source_name
from sosampler.video.timeline import Indices, Seconds

# Policies that look at pixels decode all T candidates once and keep them up to this size; beyond it they look at small
# copies, and the N winners are decoded a second time.
_MAX_KEPT_BYTES = 1 << 30
_SCORING_SIZE = 256


def select(
    source: Any,
    num_frames: int | None = None,
    *,
    num_candidates: int | None = None,
    policy: str = SELECT.policy,
    candidates: str | None = None,
    grid: str = SELECT.grid,
    fps: float | None = None,
    start: float | None = None,
    end: float | None = None,
    on_short: str = SELECT.on_short,
    snap_tolerance: float = SELECT.snap_tolerance,
    seed: int = SELECT.seed,
    size: Size = None,
    decode: bool = True,
    decoder: str | None = None,
    threads: int | None = None,
    limits: Limits | None = None,
    folder_fps: float | None = None,
) -> Selection:
    """Choose `num_frames` of the `num_candidates` candidate frames of a video.

    Args:
        source: a path, bytes, a binary file-like object, a folder of frame images or a torchcodec `VideoDecoder`.
        num_frames: N, how many frames to choose; 8 if not given. With `fps` or policy "all", all candidates.
        num_candidates: T, how many frames to choose from; None leaves it to the policy (uniform: T = N).
        policy: who is chosen; `sosampler.list_policies()` names them.
        candidates: "exact" frames (the default), "keyframe" (many times faster to decode), or "snap": the keyframe
            where one lies within `snap_tolerance` seconds, else the exact frame.
        grid: where candidates lie: "uniform" (segment centres), "linspace" (ends included, as FrameExit),
            "stratified" (random in each segment, by `seed`), "jitter" (the paper's test grid).
        fps: candidates at this rate instead of a number of them.
        start, end: only frames whose timestamp lies in start <= t < end, in seconds as in `pts_seconds`.
        on_short: too few frames or keyframes: "repeat" some, give "fewer", or "error".
        snap_tolerance: seconds, for candidates="snap".
        seed: for the random policy and the stratified grid.
        size: None for the stored size, the short side, or (height, width).
        decode: False gives numbers and times only, for policies that need no pixels.
        decoder: "pyav" (the default) or "torchcodec".
        threads: for this video; None takes what the machine has. 1 where many videos are read side by side.
        limits: guards against hostile files.
        folder_fps: the rate of the images of a folder.

    Example:
        >>> from sosampler.synthetic import numbered_video
        >>> sel = select(numbered_video(num_frames=90), num_frames=3)
        >>> sel.frame_indices.tolist(), sel.pts_seconds.tolist()
        ([15, 45, 75], [0.5, 1.5, 2.5])
    """
    begin = time.perf_counter()
    rule = get_policy(policy)
    request = _Request.checked(
        rule, num_frames, num_candidates, candidates, grid, fps, start, end, on_short, snap_tolerance, seed
    )
    size = check_size(size)
    reader = open_video(source, decoder=decoder, threads=threads, limits=limits, folder_fps=folder_fps)  # type: ignore[arg-type]
    try:
        opened = time.perf_counter()
        notes: list[str] = []
        offered = _offer(reader, request, notes)
        listed = time.perf_counter()
        chosen, scores, batch = _choose(reader, rule, request, offered, size, decode, notes)
        metadata = reader.metadata
        notes[:0] = reader.notes
    finally:
        reader.close()
    done = time.perf_counter()
    if batch is not None:
        notes.extend(batch.notes)
        frame_indices, pts_seconds, frames = _in_time_order(batch)
    else:
        frame_indices, pts_seconds, frames = offered.frame_indices[chosen], offered.pts_seconds[chosen], None
    return Selection(
        video=source_name(source),
        policy=rule.name,
        frame_indices=frame_indices,
        pts_seconds=pts_seconds,
        candidates=Candidates(**{**offered.__dict__, "scores": scores}),
        metadata=metadata,
        scores=None if scores is None else scores[chosen],
        frames=frames,
        timing={
            "open": opened - begin,
            "candidates": listed - opened,
            "choose_and_decode": done - listed,
            "total": done - begin,
        },
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True)
class _Request:
    """The arguments of `select` that decide which frames, after their checks."""

    num_frames: int | None  # None: all candidates
    num_candidates: int | None  # None: by rate
    mode: str
    grid: str
    fps: float | None
    start: float | None
    end: float | None
    on_short: str
    snap_tolerance: float
    seed: int

    @classmethod
    def checked(
        cls,
        rule: Policy,
        num_frames: int | None,
        num_candidates: int | None,
        mode: str | None,
        grid: str,
        fps: float | None,
        start: float | None,
        end: float | None,
        on_short: str,
        snap_tolerance: float,
        seed: int,
    ) -> _Request:
        if num_frames is not None:
            num_frames = whole_number("num_frames", num_frames)
        if num_candidates is not None:
            num_candidates = whole_number("num_candidates", num_candidates)
        if fps is not None:
            fps = real_number("fps", fps, above=0)
            if num_candidates is not None:
                raise InvalidArgument(
                    f"num_candidates={num_candidates} and fps={fps:g} were both given; give one of them"
                )
        elif num_candidates is None:
            num_candidates = rule.default_candidates(num_frames or DEFAULT_NUM_FRAMES)
        if num_frames is None and fps is None:
            num_frames = num_candidates if rule.name == "all" else DEFAULT_NUM_FRAMES
        if num_frames is not None and num_candidates is not None and num_frames > num_candidates:
            raise InvalidArgument(
                f"num_frames={num_frames} is more than num_candidates={num_candidates}; "
                "choose at most as many frames as there are candidates, or raise num_candidates"
            )
        if rule.name == "all" and num_frames != num_candidates:
            raise InvalidArgument(
                f"policy 'all' takes every candidate, so num_frames={num_frames} and "
                f"num_candidates={num_candidates} contradict each other; give one of them, or another policy"
            )
        if start is not None:
            start = real_number("start", start)
        if end is not None:
            end = real_number("end", end)
        if start is not None and end is not None and end <= start:
            raise InvalidArgument(f"end={end:g} is not after start={start:g}; give an end that is later")
        if mode is not None:
            one_of("candidates", mode, MODES)
        if rule.candidate_mode and mode not in (None, rule.candidate_mode):
            raise InvalidArgument(
                f"policy {rule.name!r} chooses among {rule.candidate_mode} candidates, not candidates={mode!r}; "
                "leave candidates out, or take another policy"
            )
        return cls(
            num_frames=num_frames,
            num_candidates=num_candidates,
            mode=mode or rule.candidate_mode or "exact",
            grid=one_of("grid", grid, GRIDS),
            fps=fps,
            start=start,
            end=end,
            on_short=one_of("on_short", on_short, ON_SHORT),
            snap_tolerance=real_number("snap_tolerance", snap_tolerance, at_least=0),
            seed=whole_number("seed", seed, at_least=0),
        )


def _offer(reader: VideoReader, request: _Request, notes: list[str]) -> Candidates:
    """The candidates: places on the grid, moved to keyframes where that was asked for."""
    first, last = _frame_range(reader, request)
    targets = _grid_targets(reader, request, first, last, notes)
    if request.mode == "keyframe":
        keys = reader.keyframe_indices()
        inside = np.flatnonzero((keys >= first) & (keys < last))
        if not len(inside):
            raise InvalidArgument(
                f"{reader.name}: no keyframe lies in the range asked for; widen it, or take candidates='exact'"
            )
        if len(inside) < len(targets):
            told = _told(request.on_short, "keyframe")
            notes.append(f"{len(inside)} keyframes for {len(targets)} candidates; {told}")
        positions = keyframe_positions(targets, keys[inside], on_short=request.on_short)  # type: ignore[arg-type]
        frame_indices, pts_seconds = reader.locate_keyframes(inside[positions])
        if len(targets) != len(frame_indices):  # fewer: measure how far they lie from a grid of their own
            targets = first + segment_centres(last - first, len(frame_indices))
        moved_seconds = reader.seconds_apart(targets, frame_indices)
        return Candidates(
            request.mode, request.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds
        )
    frame_indices, timeline = targets, reader.timeline()
    if request.mode == "snap":
        keys = timeline.keyframe_indices
        keys = keys[(keys >= first) & (keys < last)]
        frame_indices = snap(
            targets, timeline.seconds(targets), keys, timeline.seconds(keys), tolerance=request.snap_tolerance
        )
    pts_seconds = timeline.seconds(frame_indices)
    moved_seconds = pts_seconds - timeline.seconds(targets)
    return Candidates(request.mode, request.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds)


def _frame_range(reader: VideoReader, request: _Request) -> tuple[int, int]:
    if request.start is None and request.end is None:
        return 0, reader.total_num_frames
    timeline = reader.timeline()
    first, last = timeline.range_of(request.start, request.end)
    if first >= last:
        begins, ends = float(timeline.seconds(0)), float(timeline.to_seconds(timeline.end_pts))
        raise InvalidArgument(
            f"{reader.name}: no frame lies between start={request.start} and end={request.end}; "
            f"its frames run from {begins:.3f} to {ends:.3f} s"
        )
    return first, last


def _told(on_short: str, what: str) -> str:
    return f"each {what} is offered once" if on_short == "fewer" else f"{what}s are repeated evenly"


def _grid_targets(reader: VideoReader, request: _Request, first: int, last: int, notes: list[str]) -> Indices:
    if request.fps is not None:
        timeline = reader.timeline()
        begins = (
            float(timeline.seconds(first))
            if request.start is None
            else max(request.start, float(timeline.seconds(first)))
        )
        ends = timeline.end_pts if last == len(timeline) else timeline.pts[last]
        times = rate_times(begins, float(timeline.to_seconds(ends)), request.fps)
        targets = np.clip(timeline.index_at(times), first, last - 1)
        distinct = np.unique(targets)
        if len(distinct) < len(targets):
            if request.on_short == "error":
                raise InvalidArgument(
                    f"{reader.name}: fps={request.fps:g} asks for {len(targets)} frames where {len(distinct)} are; "
                    'lower fps, or allow on_short="repeat" or "fewer"'
                )
            notes.append(
                f"{len(distinct)} frames for {len(targets)} moments at {request.fps:g} fps; "
                f"{_told(request.on_short, 'frame')}"
            )
            return distinct if request.on_short == "fewer" else targets
        return targets
    assert request.num_candidates is not None
    total = last - first
    if total < request.num_candidates and request.on_short != "error":
        notes.append(f"{total} frames for {request.num_candidates} candidates; {_told(request.on_short, 'frame')}")
    return first + grid_indices(
        total,
        request.num_candidates,
        grid=request.grid,  # type: ignore[arg-type]
        on_short=request.on_short,  # type: ignore[arg-type]
        seed=None if request.grid == "jitter" else request.seed,
    )


def _choose(
    reader: VideoReader,
    rule: Policy,
    request: _Request,
    offered: Candidates,
    size: Size,
    decode: bool,
    notes: list[str],
) -> tuple[Indices, np.ndarray | None, FrameBatch | None]:
    """Positions of the chosen among the candidates [N], scores of all candidates [T], and the chosen frames."""
    # A short video repeats frames among its candidates. The policy sees each once, so that none is chosen twice
    # while another is left.
    distinct, first_position, candidate_of = np.unique(offered.frame_indices, return_index=True, return_inverse=True)
    wanted = len(offered) if request.num_frames is None else request.num_frames
    if wanted > len(distinct) and request.on_short == "error":
        raise InvalidArgument(
            f"{reader.name}: {wanted} frames were asked for but only {len(distinct)} are there; "
            'ask for fewer, or allow on_short="repeat" or "fewer"'
        )
    count = min(wanted, len(distinct))
    batch: FrameBatch | None = None
    kept = False
    if rule.needs_frames:
        kept = _bytes_at(reader, size) * len(distinct) <= _MAX_KEPT_BYTES
        batch = reader.read(distinct, size=size if kept else _SCORING_SIZE)
        notes.extend(batch.notes)
    choice: Choice = rule.choose(len(distinct), count, None if batch is None else batch.frames, request.seed)
    positions = choice.positions
    if wanted > count and request.on_short == "repeat":
        positions = positions[segment_centres(count, wanted)]
    scores = None if choice.scores is None else choice.scores[candidate_of]
    chosen = first_position[positions]
    if not decode:
        return chosen, scores, None
    if batch is not None and kept:
        picked = FrameBatch(batch.frames[positions], batch.frame_indices[positions], batch.pts_seconds[positions])
        return chosen, scores, picked
    return chosen, scores, reader.read(distinct[positions], size=size)


def _bytes_at(reader: VideoReader, size: Size) -> int:
    width, height = target_size(reader.metadata.width, reader.metadata.height, size)
    return width * height * 3


def _in_time_order(batch: FrameBatch) -> tuple[Indices, Seconds, np.ndarray]:
    """A frame that stands in for a damaged one may lie behind its neighbour."""
    order = np.argsort(batch.frame_indices, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return batch.frame_indices, batch.pts_seconds, batch.frames
    return batch.frame_indices[order], batch.pts_seconds[order], batch.frames[order]
