"""What choosing frames has in common, for one video at a time and for many in batches."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import numpy as np

from sosampler.errors import InvalidArgument
from sosampler.inference.candidates import offer
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import Candidates, Selection
from sosampler.policies.auto import Auto
from sosampler.policies.base import Choice, Policy, choose_one
from sosampler.video.candidates import segment_centres
from sosampler.video.limits import Limits, Size, target_size
from sosampler.video.reader import FrameBatch, VideoMetadata, VideoReader
from sosampler.video.source import open_video, source_name
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


def capped_size(size: Size, metadata: VideoMetadata) -> Size:
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


_SCORING_SIZE = 256


def select(
    source: Any,
    num_frames: int | str | Auto | None = None,
    *,
    num_candidates: int | None = None,
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
) -> Selection:
    """Choose `num_frames` of the `num_candidates` candidate frames of a video.

    Args:
        source: a path, bytes, a binary file-like object, a folder of frame images or a torchcodec `VideoDecoder`.
        num_frames: N, how many frames to choose; 8 if not given. With `fps` or policy "all", all candidates. "auto"
            leaves it to a trained sampler: the fewest of which it expects little less than of any other number.
        num_candidates: T, how many frames to choose from; None leaves it to the policy (general: 32, or 4 N where N is
            above 8; uniform: T = N).
        policy: who chooses: one of `sosampler.list_policies()`, a sampler, or the folder of a saved one. "+aks",
            "+its" or "+nms" behind a folder or "frame-difference" spreads the choice in time. None takes "general", the
            sampler that ships with the package; "uniform" where nothing is decoded or all candidates are taken.
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
        auto_min, auto_max: for num_frames="auto", the least and the most frames; 1 and 16 if not given. A video with
            fewer gives all it has.
        auto_tolerance: for num_frames="auto", how much lower the expected share of right answers may be for the sake of
            fewer frames; 0.005 if not given.

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
    options = SelectOptions(
        num_frames=num_frames,
        num_candidates=num_candidates,
        policy=policy,
        candidates=candidates,
        grid=grid,
        fps=fps,
        start=start,
        end=end,
        on_short=on_short,
        snap_tolerance=snap_tolerance,
        seed=seed,
        size=size,
        decode=decode,
        decoder=decoder,
        threads=threads,
        limits=limits,
        folder_fps=folder_fps,
        auto_min=auto_min,
        auto_max=auto_max,
        auto_tolerance=auto_tolerance,
    )
    return select_with(source, options)


def select_with(source: Any, options: SelectOptions, *, no_larger: bool = False) -> Selection:
    """`select` with its arguments in one object, for callers that keep them.

    `no_larger`: frames of a video whose short side is below `size` stay as they are stored.
    """
    begin = time.perf_counter()
    reader = open_with(source, options)
    try:
        size = capped_size(options.size, reader.metadata) if no_larger else options.size
        if size != options.size:
            options = replace(options, size=size)
        opened = time.perf_counter()
        notes: list[str] = []
        offered = offer(reader, options, notes)
        listed = time.perf_counter()
        chosen, choice, batch = _choose(reader, options, offered, notes)
        metadata = reader.metadata
        notes[:0] = reader.notes
    except MemoryError as error:
        raise InvalidArgument(
            f"{reader.name}: what was asked for does not fit into memory; "
            "ask for fewer frames or candidates, a smaller size, or decode=False"
        ) from error
    finally:
        reader.close()
    done = time.perf_counter()
    scores = choice.scores
    if batch is not None:
        notes.extend(batch.notes)
        # A frame that stands in for a damaged one may lie behind its neighbour.
        order = np.argsort(batch.frame_indices, kind="stable")
        chosen = chosen[order]
        frame_indices, pts_seconds = batch.frame_indices[order], batch.pts_seconds[order]
        frames = batch.frames if (order == np.arange(len(order))).all() else batch.frames[order]
    else:
        frame_indices, pts_seconds, frames = offered.frame_indices[chosen], offered.pts_seconds[chosen], None
    return Selection(
        video=source_name(source),
        policy=options.rule.name,
        frame_indices=frame_indices,
        pts_seconds=pts_seconds,
        candidates=replace(offered, scores=scores),
        metadata=metadata,
        scores=None if scores is None else scores[chosen],
        frames=frames,
        timing=timing(begin, opened, listed, done),
        notes=tuple(dict.fromkeys(notes)),
        asked=None if options.auto is None else options.auto.to_dict(choice.expected),
    )


def _choose(
    reader: VideoReader, options: SelectOptions, offered: Candidates, notes: list[str]
) -> tuple[Indices, Choice, FrameBatch | None]:
    """Positions of the chosen among the candidates [N], the choice with scores of all [T], and the chosen frames."""
    # A short video repeats frames among its candidates. The policy sees each once, so that none is chosen twice
    # while another is left.
    distinct, first_position, candidate_of = np.unique(offered.frame_indices, return_index=True, return_inverse=True)
    wanted = options.num_wanted or len(offered)
    least = wanted if options.auto is None else options.auto.min
    if least > len(distinct) and options.on_short == "error":
        raise too_few(reader.name, least, len(distinct))
    count = min(wanted, len(distinct))
    rule, size = options.rule, options.size
    batch: FrameBatch | None = None
    kept = False
    if rule.needs_frames:
        few_bytes = _bytes_at(reader, size) * len(distinct) <= MAX_KEPT_BYTES
        kept = few_bytes and _shows_enough(reader, size, rule)
        batch = reader.read(distinct, size=size if kept else _size_for_scoring(reader, rule))
        notes.extend(batch.notes)
    frames = None if batch is None else batch.frames
    times = offered.pts_seconds[first_position]
    choice = choose_one(rule, len(distinct), count, frames, seed=options.seed, pts_seconds=times, auto=options.auto)
    positions = choice.positions
    if options.auto is None:
        positions = with_repeats(positions, candidate_of, wanted, options.on_short)
    choice = choice._replace(scores=None if choice.scores is None else choice.scores[candidate_of])
    chosen = first_position[positions]
    if not options.decode:
        return chosen, choice, None
    if batch is not None and kept:
        picked = FrameBatch(batch.frames[positions], batch.frame_indices[positions], batch.pts_seconds[positions])
        return chosen, choice, picked
    return chosen, choice, reader.read(distinct[positions], size=size)


def _shows_enough(reader: VideoReader, size: Size, rule: Policy) -> bool:
    """Whether frames of this size are as large as the policy must see them, and not squeezed."""
    if rule.min_size is None:
        return True
    width, height = reader.metadata.width, reader.metadata.height
    return not isinstance(size, tuple) and min(target_size(width, height, size)) >= min(rule.min_size, width, height)


def _size_for_scoring(reader: VideoReader, rule: Policy) -> int:
    """A short side to look at where the frames themselves do not serve; never larger than stored."""
    return min(max(_SCORING_SIZE, rule.min_size or 0), reader.metadata.width, reader.metadata.height)


def _bytes_at(reader: VideoReader, size: Size) -> int:
    width, height = target_size(reader.metadata.width, reader.metadata.height, size)
    return width * height * 3
