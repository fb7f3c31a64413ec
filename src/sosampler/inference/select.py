"""`select`: list the candidates of a video, decode them, and let a policy choose."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from sosampler._util.arrays import Frames, Indices
from sosampler.errors import InvalidArgument, VideoError, errors_of
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import CandidateFrames, Candidates, Selection, build_selection
from sosampler.policies.auto import Auto
from sosampler.policies.base import Choice, Policy, choose_one
from sosampler.video.candidates import (
    BEHIND_CUT,
    KEYFRAME_SHARE,
    at_cuts,
    grid_indices,
    keyframe_in_segments,
    keyframe_positions,
    keyframes_and_exact,
    rate_times,
    segment_centres,
    segment_ends,
    snap,
)
from sosampler.video.limits import Limits, Size, target_size
from sosampler.video.reader import FrameBatch, FrameView, VideoMetadata, VideoReader
from sosampler.video.source import open_video, source_name

# A policy sees small copies of the candidates, the same whatever size is asked for. The decoded frames are kept beside
# them up to this many bytes, so that the chosen ones need not be decoded again.
MAX_KEPT_BYTES = 256 << 20
_VIEW_SIZE = 256  # short side of these copies, in pixels, where a policy has none of its own
_NOTED_BYTES = 20 << 20  # read from an address, from which on a note says how to read less


def select(
    source: Any,
    num_frames: int | str | Auto | None = None,
    *,
    num_candidates: int | None = None,
    prefer: str | None = None,
    policy: Any = None,
    candidates: str | None = None,
    grid: str = SelectOptions.grid,
    fps: float | None = None,
    start: float | None = None,
    end: float | None = None,
    on_short: str = SelectOptions.on_short,
    snap_tolerance: float = SelectOptions.snap_tolerance,
    seed: int = SelectOptions.seed,
    size: Size = None,
    decode: bool = SelectOptions.decode,
    decoder: str | None = None,
    threads: int | None = None,
    limits: Limits | None = None,
    folder_fps: float | None = None,
    auto_min: int | None = None,
    auto_max: int | None = None,
    auto_tolerance: float | None = None,
    query: str | None = None,
    query_model: Any = None,
    schemes: Sequence[str] = (),
) -> Selection:
    """Choose `num_frames` of the `num_candidates` candidate frames of a video.

    Args:
        source: a path, bytes, a binary file-like object, a folder of frame images, an address or a torchcodec
            `VideoDecoder`.
        num_frames: N, how many frames to choose; 8 if not given. With `fps` or policy "all", all candidates. "auto" or
            `so.Auto(min, max, tolerance)`: as many as the video needs, by a trained sampler, "general" or a query.
        num_candidates: T, how many frames to choose from; None leaves it to the policy (general: 32, or 4 N where N is
            above 8; uniform: T = N).
        prefer: "text" where text is the content, as in slides and screen recordings: the policy is "general-text",
            which does not avoid frames of text. None avoids them as titles.
        policy: one of `sosampler.list_policies()`, a `Policy`, a sampler, or the folder of a saved one. "+aks",
            "+its" or "+nms" behind a folder or "frame-difference" spreads the choice in time. None takes "general", the
            sampler that ships with the package; "uniform" where nothing is decoded or all candidates are taken.
        candidates: "exact" frames; "keyframe" (many times faster to decode; exact frames for the rest where there are
            too few); "snap": the keyframe where one lies within `snap_tolerance` seconds, else the exact frame; or
            "auto": in each segment of the grid a keyframe, a moment behind it where it sits at a cut, else the exact
            frame. None takes "auto" for general and query, and "exact" for others.
        grid: where candidates lie: "uniform" (segment centres), "linspace" (ends included, as FrameExit),
            "stratified" (random in each segment, by `seed`), "jitter" (the paper's test grid).
        fps: candidates at this rate instead of a number of them.
        start, end: only frames whose timestamp lies in start <= t < end, in seconds as in `pts_seconds`.
        on_short: for videos with too few frames or keyframes: "repeat" some, return "fewer", or raise an "error".
        snap_tolerance: seconds, for candidates="snap".
        seed: for the random policy and the stratified grid.
        size: None for the stored size, the short side, or (height, width).
        decode: False returns frame numbers and times without pixels.
        decoder: "pyav" (the default) or "torchcodec".
        threads: decoding threads; None takes those of the machine. Give 1 where many videos are read in parallel.
        limits: guards against hostile files: size, length, memory and time.
        folder_fps: frame rate of a folder of images.
        auto_min, auto_max: for num_frames="auto", the minimum and maximum number of frames; 1 and 16 if not given. A
            video with fewer frames returns all it has.
        auto_tolerance: for num_frames="auto", how much lower the expected accuracy may be for the sake of fewer
            frames; 0.005 if not given.
        query: a question or a concept; the frames that fit it are chosen, or, where no part of the video fits it better
            than the rest, frames that cover the video. `policy` is then "query+mmr", or "query" with another method.
        query_model: the image-text model that reads the query: a folder or a hub name; the environment variable
            SOSAMPLER_QUERY_MODEL if not given.
        schemes: of the addresses that may be opened: "https", "http", "s3", "gs", "hf"; none unless given.

    Examples:
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_video
        >>> video = numbered_video(num_frames=90)
        >>> sel = so.select(video, num_frames=3)
        >>> sel.policy, len(sel.frames)
        ('general', 3)
        >>> sel = so.select(video, num_frames=3, policy="uniform")
        >>> sel.frame_indices.tolist(), sel.pts_seconds.tolist()
        ([15, 45, 75], [0.5, 1.5, 2.5])
    """
    options = {name: value for name, value in locals().items() if name != "source"}
    return select_with(source, SelectOptions(**options))


def select_with(
    source: Any,
    options: SelectOptions,
    *,
    enlarge: bool = True,
    shown_size: int | None = None,
    keep_frames: bool = True,
) -> Selection:
    """Run `select` with its arguments in one object. Without `enlarge`, `size` never exceeds the video's own.

    `shown_size`: short side of the chosen frames in place of `size`, never enlarged. Without `keep_frames` they are
    decoded, so that damage shows, and dropped.
    """
    policy = options.resolved_policy
    policy.prepare()
    with open_candidates(source, options, enlarge=enlarge) as opened:
        video = opened.video
        shown = opened.size if shown_size is None else fit_size(shown_size, video.metadata)
        if options.decode:
            opened.check_output(options, shown)
        if policy.needs_frames:
            view = opened.view(view_size(policy), keep=options.decode and keep_frames)
            batch = view.batch
            video = replace(video, frame_indices=batch.frame_indices, pts_seconds=batch.pts_seconds)
            choice = choose_frames(video, options, batch.frames)
            read = partial(view.read, size=shown) if options.decode and keep_frames else None
        else:
            choice = choose_frames(video, options, None)
            read = partial(opened.read, size=shown) if options.decode else None
        with errors_of(video.video):
            selection = build_selection(video, options, choice, read)
        selection = selection if keep_frames else replace(selection, frames=None)
        summary = opened.summary()
        return replace(selection, **{**summary, "notes": (*summary["notes"], *selection.notes)})


def view_size(policy: Policy) -> int:
    """Return the short side, in pixels, of the frames that a policy sees, where the video has it."""
    return policy.view_size or max(_VIEW_SIZE, policy.min_size or 0)


def choose_frames(video: CandidateFrames, options: SelectOptions, frames: Frames | None) -> Choice:
    """Let the policy choose among the D distinct frames of a video; `frames` [D, H, W, 3] where it needs them."""
    count, auto = len(video.frame_indices), options.auto
    wanted = options.resolved_frames or len(video.candidates)
    needed = wanted if auto is None else auto.min
    if needed > count and options.on_short == "error":
        raise InvalidArgument(
            f"{video.video}: {needed} frames were requested but only {count} are there; "
            'ask for fewer, or allow on_short="repeat" or "fewer"'
        )
    policy, number = options.resolved_policy, min(wanted, count)
    return choose_one(policy, count, number, frames, seed=options.seed, pts_seconds=video.pts_seconds, auto=auto)


# ---- an open video


@dataclass(frozen=True, eq=False)
class OpenCandidates:
    """An open video whose candidates are listed and not yet decoded."""

    reader: VideoReader
    video: CandidateFrames  # without pixels
    size: Size  # of the frames of the result
    limits: Limits
    began: float  # time.perf_counter()
    notes: list[str]

    def can_score(self, min_size: int | None) -> bool:
        """Return whether a policy can score the frames in the size of the result.

        They must fit into memory and, where `min_size` is given, keep their aspect ratio and a short side of at least
        that, as far as the video has it.
        """
        width, height = self.video.metadata.width, self.video.metadata.height
        shown = target_size(width, height, self.size)
        max_bytes = min(MAX_KEPT_BYTES, self.limits.bytes_for(self.reader.file_bytes))
        if 3 * shown[0] * shown[1] * len(self.video.frame_indices) > max_bytes:
            return False
        return min_size is None or (not isinstance(self.size, tuple) and min(shown) >= min(min_size, width, height))

    def check_output(self, options: SelectOptions, size: Size) -> None:
        """Refuse a result that takes more memory than allowed, before anything is decoded."""
        metadata, count = self.video.metadata, options.resolved_frames or len(self.video.candidates)
        if options.on_short != "repeat":
            count = min(count, len(self.video.frame_indices))
        width, height = target_size(metadata.width, metadata.height, size)
        self.limits.check_bytes(self.reader.name, count, width, height, self.reader.file_bytes)

    def decode(self) -> CandidateFrames:
        """Decode every distinct candidate once."""
        batch = self.read(self.video.frame_indices)
        return replace(
            self.video, frame_indices=batch.frame_indices, pts_seconds=batch.pts_seconds, frames=batch.frames
        )

    def view(self, short_side: int, *, keep: bool) -> FrameView:
        """Decode every distinct candidate once, for a policy to look at; never larger than stored.

        With `keep` decoded frames stay in memory, up to a limit, because some will be read in another size.
        """
        max_bytes = min(MAX_KEPT_BYTES, self.limits.bytes_for(self.reader.file_bytes)) if keep else 0
        with errors_of(self.video.video):
            view = self.reader.view(
                self.video.frame_indices,
                size=fit_size(short_side, self.video.metadata),
                max_bytes=max_bytes,
            )
        self.notes.extend(view.batch.notes)
        return view

    def read(self, indices: Indices, size: Size = None) -> FrameBatch:
        """Decode some frames, in the size of the result unless another is given."""
        with errors_of(self.video.video):
            batch = self.reader.read(indices, size=size or self.size)
        self.notes.extend(batch.notes)
        return batch

    def summary(self) -> dict[str, Any]:
        """Return notes and seconds spent so far, as a selection names them."""
        total = time.perf_counter() - self.began
        spent = self.video.timing
        timing = {**spent, "choose_and_decode": total - sum(spent.values()), "total": total}
        notes, transfer = dict.fromkeys((*self.reader.notes, *self.notes)), self.reader.transfer
        if transfer is not None and self.video.candidates.mode != "keyframe" and transfer["bytes_read"] > _NOTED_BYTES:
            read = f"{transfer['bytes_read'] / 1e6:.0f} MB were read"
            notes[f"{read}; of an MP4 file, keyframe candidates need far less, no more than it has keyframes"] = None
        return {"timing": timing, "notes": tuple(notes), "transfer": transfer}


@contextmanager
def open_candidates(source: Any, options: SelectOptions, *, enlarge: bool = True) -> Iterator[OpenCandidates]:
    """Open a video and list its candidates. Without `enlarge`, a short side above the video's stays as stored."""
    began = time.perf_counter()
    name = source_name(source)
    with errors_of(name):
        reader = open_video(source, **options.opening)
    try:
        with errors_of(name):
            size = options.size if enlarge else fit_size(options.size, reader.metadata)
            opened = time.perf_counter()
            notes: list[str] = []
            candidates = list_candidates(reader, options, notes)
            distinct, first = np.unique(candidates.frame_indices, return_index=True)
            video = CandidateFrames(
                video=name,
                candidates=candidates,
                frame_indices=distinct,
                pts_seconds=candidates.pts_seconds[first],
                metadata=reader.metadata,
                timing={"open": opened - began, "candidates": time.perf_counter() - opened},
            )
        yield OpenCandidates(reader, video, size, options.limits or Limits(), began, notes)
    finally:
        reader.close()


def fit_size(size: Size, metadata: VideoMetadata) -> Size:
    """Limit a short side to that of the video; other sizes stay as they are."""
    return min(size, metadata.width, metadata.height) if isinstance(size, int) else size


# ---- which frames are candidates


def list_candidates(reader: VideoReader, options: SelectOptions, notes: list[str]) -> Candidates:
    """Place candidates on the grid, moved to keyframes in these modes. Add to the notes what is short."""
    if options.mode == "keyframe":
        return _keyframes(reader, options, notes)
    if options.mode == "auto":
        return _auto(reader, options, notes)
    timeline = reader.timeline()  # first: until then the number of frames may be what the container's index claims
    first, last = _frame_range(reader, options)
    targets = frame_indices = _targets(reader, options, first, last, notes)
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
        return _targets_at_rate(reader, options, options.fps, first, last, notes)
    count, total = options.resolved_candidates, last - first
    assert count is not None, "without fps there is a number"
    minimum = options.resolved_frames or 1 if options.num_candidates is None else options.min_candidates
    if minimum is not None:
        count = min(count, max(minimum, total))
    if total < count:
        notes += _short(options, total, f"{count} candidates")
    # The paper's test grid has its own seed, the same for every video.
    seed = None if options.grid == "jitter" else options.seed
    grid, on_short = cast(Any, options.grid), cast(Any, options.on_short)
    return first + grid_indices(total, count, grid=grid, on_short=on_short, seed=seed)


def _targets_at_rate(
    reader: VideoReader, options: SelectOptions, fps: float, first: int, last: int, notes: list[str]
) -> Indices:
    timeline = reader.timeline()
    begins = max(float(timeline.seconds(first)), -np.inf if options.start is None else options.start)
    ends = timeline.end_pts if last == len(timeline) else timeline.pts[last]
    end = min(float(timeline.to_seconds(ends)), np.inf if options.end is None else options.end)
    (options.limits or Limits()).check_moments(reader.name, fps, end - begins)
    times = rate_times(begins, end, fps)
    targets = np.clip(timeline.index_at(times), first, last - 1)
    distinct = np.unique(targets)
    if len(distinct) == len(targets):
        return targets
    if options.on_short == "error":
        raise InvalidArgument(
            f"{reader.name}: fps={fps:g} asks for {len(targets)} frames where {len(distinct)} are; "
            'lower fps, or allow on_short="repeat" or "fewer"'
        )
    notes += _short(options, len(distinct), f"{len(targets)} moments at {fps:g} fps")
    return distinct if options.on_short == "fewer" else targets


def _keyframes(reader: VideoReader, options: SelectOptions, notes: list[str]) -> Candidates:
    if options.fps is not None:
        reader.timeline()  # which the moments are counted on
    for _ in range(2):
        short: list[str] = []
        total = reader.total_num_frames
        first, last = _frame_range(reader, options)
        targets = _targets(reader, options, first, last, short)
        keys = reader.keyframe_indices()
        inside = np.flatnonzero((keys >= first) & (keys < last))
        on_short = cast(Any, options.on_short)
        if len(inside) < len(targets) and on_short == "repeat":
            # A policy for keyframes is content with as many as it chooses.
            if not options.resolved_policy.candidate_mode or len(inside) < (options.resolved_frames or len(targets)):
                return _keyframes_and_exact(reader, options, notes)
            on_short = "fewer"
        if not len(inside):
            raise InvalidArgument(
                f"{reader.name}: has no keyframe among the frames to choose from; allow on_short='repeat', which takes "
                "exact frames then, or take candidates='exact'"
            )
        positions = inside[keyframe_positions(targets, keys[inside], on_short=on_short)]
        frame_indices, pts_seconds = reader.locate_keyframes(positions)
        if np.array_equal(frame_indices, keys[positions]) and reader.total_num_frames == total:
            break
        # The container's index had other numbers (open groups of pictures, or frames that are not there): count again.
        reader.timeline()
    notes += short
    if len(inside) < len(targets):
        notes.append(f"{len(inside)} keyframes for {len(targets)} candidates; each keyframe is listed once")
    if len(targets) != len(frame_indices):  # fewer: measure how far they lie from a grid of as many
        targets = first + segment_centres(last - first, len(frame_indices))
    moved_seconds = reader.seconds_apart(targets, frame_indices)
    return Candidates(options.mode, options.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds)


def _keyframes_and_exact(reader: VideoReader, options: SelectOptions, notes: list[str]) -> Candidates:
    """Fill up with exact frames where there are too few keyframes."""
    timeline = reader.timeline()
    first, last = _frame_range(reader, options)
    targets = frame_indices = _targets(reader, options, first, last, notes)
    keys = timeline.keyframe_indices
    keys = keys[(keys >= first) & (keys < last)]
    if len(np.unique(targets)) == len(targets):
        enough = len(keys) >= len(targets)  # which the container's index did not name
        frame_indices = keys[keyframe_positions(targets, keys)] if enough else keyframes_and_exact(targets, keys)
        if not enough:
            number = "1 keyframe" if len(keys) == 1 else f"{len(keys) or 'no'} keyframes"
            rest = "the others" if len(keys) else "all"
            notes.append(f"{number} for {len(targets)} candidates; {rest} are exact frames, which take longer")
    pts_seconds = timeline.seconds(frame_indices)
    moved_seconds = pts_seconds - timeline.seconds(targets)
    return Candidates(options.mode, options.grid, frame_indices, pts_seconds, frame_indices - targets, moved_seconds)


def _auto(reader: VideoReader, options: SelectOptions, notes: list[str]) -> Candidates:
    """In each segment of the grid a keyframe, a moment behind it where it sits at a cut, else the exact frame.

    Where few segments have one, exact frames in all: these decode most groups of pictures anyway.
    """
    if options.fps is not None:
        reader.timeline()  # which the moments are counted on
    for is_counted in (False, True):
        short: list[str] = []
        total = reader.total_num_frames
        first, last = _frame_range(reader, options)
        targets, twin = np.unique(_targets(reader, options, first, last, short), return_inverse=True)
        frame_indices, ends = targets.copy(), segment_ends(targets, last)
        keys = _listed_keyframes(reader)
        inside = np.flatnonzero((keys >= first) & (keys < last))
        positions = keyframe_in_segments(targets, keys[inside])
        near = positions >= 0
        if near.mean() < KEYFRAME_SHARE:
            near[:] = False
        if not near.all() and not is_counted:
            reader.timeline()  # exact frames are counted, not taken from the container's index
            continue
        positions, starts, ends = inside[positions[near]], keys[inside][positions[near]], ends[near]
        cut = at_cuts(reader.seconds_apart(np.zeros_like(keys), keys))[positions]
        behind = np.where(cut, np.minimum(BEHIND_CUT, reader.seconds_apart(starts, ends - 1)), 0.0)
        frame_indices[near], seconds = reader.locate_keyframes(positions, behind)
        in_segment = (frame_indices[near] >= starts) & (frame_indices[near] < ends)
        fits = in_segment & (cut | (frame_indices[near] == starts))
        if fits.all() and reader.total_num_frames == total and np.array_equal(_listed_keyframes(reader), keys):
            break
        # The container's index had other numbers (open groups of pictures, or frames that are not there): count again.
        reader.timeline()
    notes += short
    pts_seconds = np.empty(len(targets))
    pts_seconds[near] = seconds
    if not near.all():
        pts_seconds[~near] = reader.timeline().seconds(targets[~near])
    moved_seconds = reader.seconds_apart(targets, frame_indices)
    return Candidates(
        mode=options.mode,
        grid=options.grid,
        frame_indices=frame_indices[twin],
        pts_seconds=pts_seconds[twin],
        moved_frames=(frame_indices - targets)[twin],
        moved_seconds=moved_seconds[twin],
    )


def _listed_keyframes(reader: VideoReader) -> Indices:
    try:
        return reader.keyframe_indices()
    except VideoError:  # of a VideoDecoder with approximate seeking, which lists none; exact frames serve
        return np.empty(0, dtype=np.int64)


def _short(options: SelectOptions, number: int, wanted: str) -> list[str]:
    """Return the note on a video that has too few frames; none where that is an error anyway."""
    handling = "each frame is listed once" if options.on_short == "fewer" else "frames are repeated evenly"
    return [] if options.on_short == "error" else [f"{number} frames for {wanted}; {handling}"]
