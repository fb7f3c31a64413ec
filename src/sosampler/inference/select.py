"""`select`: choose the frames of one video."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.inference.candidates import open_candidates
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import CandidateFrames, Selection, build_selection
from sosampler.policies.auto import Auto
from sosampler.policies.base import Choice, choose_one
from sosampler.video.limits import Limits, Size
from sosampler.video.reader import Frames


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
        num_frames: N, how many frames to choose; 8 if not given. With `fps` or policy "all", all candidates. "auto" or
            `so.Auto(min, max, tolerance)`: a trained sampler decides, the fewest frames that cost little accuracy.
        num_candidates: T, how many frames to choose from; None leaves it to the policy (general: 32, or 4 N where N is
            above 8; uniform: T = N).
        policy: one of `sosampler.list_policies()`, a `Policy`, a sampler, or the folder of a saved one. "+aks",
            "+its" or "+nms" behind a folder or "frame-difference" spreads the choice in time. None takes "general", the
            sampler that ships with the package; "uniform" where nothing is decoded or all candidates are taken.
        candidates: "exact" frames (the default), "keyframe" (many times faster to decode), or "snap": the keyframe
            where one lies within `snap_tolerance` seconds, else the exact frame.
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
        limits: guards against hostile files.
        folder_fps: frame rate of a folder of images.
        auto_min, auto_max: for num_frames="auto", the minimum and maximum number of frames; 1 and 16 if not given. A
            video with fewer frames returns all it has.
        auto_tolerance: for num_frames="auto", how much lower the expected accuracy may be for the sake of fewer
            frames; 0.005 if not given.

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


def select_with(source: Any, options: SelectOptions, *, enlarge: bool = True) -> Selection:
    """Run `select` with its arguments in one object. Without `enlarge`, `size` never exceeds the video's own."""
    with open_candidates(source, options, enlarge=enlarge) as opened:
        policy, video = options.resolved_policy, opened.video
        frames: Frames | None = None
        if policy.needs_frames and opened.can_score(policy.min_size):
            decoded = opened.decode()
            frames = decoded.frames
            video = decoded if options.decode else video
        elif policy.needs_frames:
            frames = opened.read(video.frame_indices, opened.scoring_size(policy.min_size)).frames
        choice = choose_frames(video, options, frames)
        read = opened.read if options.decode and video.frames is None else None
        selection = build_selection(video, options, choice, read)
        return replace(selection, **opened.summary())


def choose_frames(video: CandidateFrames, options: SelectOptions, frames: Frames | None) -> Choice:
    """Let the policy choose among the D distinct frames of a video; `frames` [D, H, W, 3] where it needs them."""
    count, auto = len(video.frame_indices), options.auto
    wanted = options.resolved_frames or len(video.candidates)
    needed = wanted if auto is None else auto.min
    if needed > count and options.on_short == "error":
        raise InvalidArgument(
            f"{video.video}: {needed} frames were asked for but only {count} are there; "
            'ask for fewer, or allow on_short="repeat" or "fewer"'
        )
    return choose_one(
        options.resolved_policy,
        count,
        min(wanted, count),
        frames,
        seed=options.seed,
        pts_seconds=video.pts_seconds,
        auto=auto,
    )
