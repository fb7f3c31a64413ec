"""`watch`: choose a few frames of each window of a stream, while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from sosampler._util.arrays import Frames, Seconds
from sosampler._util.limits import check_count
from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument, LimitExceeded, VideoError, errors_of
from sosampler.inference.options import (
    WATCH_IDLE,
    WATCH_NUM_FRAMES,
    WATCH_RECONNECTS,
    WATCH_WINDOW,
    SelectOptions,
)
from sosampler.inference.select import view_size
from sosampler.policies.auto import Auto
from sosampler.policies.base import choose_one
from sosampler.video.limits import Limits, Size, target_size
from sosampler.video.pyav_decode import FrameConverter, rotation_of
from sosampler.video.streams import LiveFrame, LiveStream, check_schemes

_SAME = 1e-3  # seconds; moments nearer than this are one, because the clocks of some containers count milliseconds


@dataclass(frozen=True, eq=False)
class Window:
    """The frames chosen of one window of a stream, in time order."""

    source: str
    number: int  # of this window, from 0
    policy: str
    start_seconds: float  # stream time
    end_seconds: float  # of a full window its length later; else the time of its last frame
    ended_by: str  # full; or why it is shorter: jump, size, lost, end, stopped
    pts_seconds: Seconds  # [N] stream time
    wall_seconds: Seconds  # [N] seconds since 1970 at which each was decoded here
    frames: Frames  # [N, H, W, 3] uint8 RGB
    num_candidates: int
    scores: np.ndarray | None = None  # [N], where the policy has scores
    notes: tuple[str, ...] = ()
    query: dict[str, Any] | None = None  # as in `Selection`

    def __len__(self) -> int:
        return len(self.pts_seconds)

    def __repr__(self) -> str:
        return (
            f"Window({self.source!r}, number={self.number}, policy={self.policy!r}, "
            f"start_seconds={self.start_seconds:.3f}, end_seconds={self.end_seconds:.3f}, ended_by={self.ended_by!r}, "
            f"pts_seconds={np.round(self.pts_seconds, 3).tolist()}, frames=uint8{list(self.frames.shape)})"
        )

    @property
    def wall_times(self) -> list[str]:
        """The wall times in UTC, as ISO 8601 writes them."""
        times = (datetime.fromtimestamp(seconds, UTC) for seconds in self.wall_seconds.tolist())
        return [time.isoformat(timespec="milliseconds").replace("+00:00", "Z") for time in times]

    def to_dict(self) -> dict[str, Any]:
        """Return all but the pixels, ready for JSON."""
        values = {name: value for name, value in vars(self).items() if name not in ("frames", "wall_seconds")}
        values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
        if self.query is None:
            del values["query"]
        height, width = self.frames.shape[1:3]
        return {**values, "notes": list(self.notes), "wall_times": self.wall_times, "width": width, "height": height}


def watch(
    source: Any,
    num_frames: int | str | Auto = WATCH_NUM_FRAMES,
    *,
    window: float = WATCH_WINDOW,
    num_candidates: int | None = None,
    fps: float | None = None,
    policy: Any = None,
    seed: int = SelectOptions.seed,
    size: Size = None,
    idle: float = WATCH_IDLE,
    reconnects: int = WATCH_RECONNECTS,
    schemes: Iterable[str] = (),
    camera_options: Mapping[str, str] | None = None,
    query: str | None = None,
    query_model: Any = None,
    limits: Limits | None = None,
) -> Iterator[Window]:
    """Choose `num_frames` of each window of a stream; yields a `Window` as soon as it closes.

    In memory are the candidates of one window: each as the decoder gave it, and a small copy for the policy.

    Args:
        source: a file that grows, "-" for standard input, a pipe or another binary file-like object, an address
            (http, https, tcp, rtsp, rtsps), or "camera:NAME".
        num_frames: N of each window; "auto" or `so.Auto` as in `select`. A window that is cut short gives what it has.
        window: its length, in seconds of the stream.
        num_candidates: T, how many frames of a window the policy chooses from; None leaves it to the policy.
        fps: candidates at this rate instead of a number of them.
        policy: as in `select`; "general" if not given. Policies that choose among keyframes are refused.
        seed: for the random policy.
        size: None for the stream's size, the short side, or (height, width).
        idle: seconds without a byte, after which a growing file has ended, and another stream is lost.
        reconnects: how often in a row a lost address or camera is opened again, after 0.5, 1, 2, ... 30 seconds.
        schemes: of the addresses that may be opened; none unless given.
        camera_options: FFmpeg's options of a camera, such as {"video_size": "1280x720", "framerate": "30"}.
        query, query_model: as in `select`.
        limits: `max_pixels` of a frame and `max_bytes` of a window; the others are for files.

    Raises:
        VideoError: if the stream cannot be opened, or is lost for good. The last window comes before that.
        KeyboardInterrupt: on Ctrl-C, also behind the last window.

    Examples:
        >>> import io
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_video
        >>> stream = io.BytesIO(numbered_video(num_frames=90, container_format="matroska"))
        >>> for window in so.watch(stream, 2, window=2.0, policy="uniform"):
        ...     print(window.pts_seconds.tolist(), window.ended_by)
        [0.5, 1.5] full
        [2.5] end
    """
    limits = limits or Limits()
    chosen: dict[str, Any] = {"num_frames": num_frames, "num_candidates": num_candidates, "fps": fps, "policy": policy}
    options = SelectOptions(**chosen, seed=seed, size=size, limits=limits, query=query, query_model=query_model)
    stream = LiveStream(
        source,
        idle=check_float("idle", idle, above=0),
        reconnects=check_int("reconnects", reconnects, at_least=0),
        schemes=check_schemes(schemes),
        camera_options=dict(camera_options or {}),
        limits=limits,
    )
    return _Watcher(stream, options, check_float("window", window, above=0)).windows()


class _Candidate(NamedTuple):
    live: LiveFrame
    view: Frames | None  # [h, w, 3], where the policy needs frames


class _OpenWindow:
    """The candidates of a window so far: the frames that are shown in the middle of T equal parts, as in `select`."""

    def __init__(self, first: LiveFrame, start: float, length: float, num_candidates: int) -> None:
        self.start, self.end = start, start + length
        self._part, self._total = length / num_candidates, num_candidates
        self.last = first
        self._next = self._before(first.seconds)  # the first moment whose frame is not known yet
        self.candidates: list[_Candidate] = []

    def _before(self, seconds: float) -> int:
        """Return how many moments lie before this one: moment i is in the middle of part i."""
        passed = math.ceil((seconds - _SAME - self.start) / self._part - 0.5)
        return min(max(passed, 0), self._total)

    def due(self, before: float) -> LiveFrame | None:
        """Return the last frame if it is shown at a moment before this one that has no candidate yet."""
        passed = self._before(before)
        is_due, self._next = passed > self._next, max(passed, self._next)
        return self.last if is_due else None


class _Watcher:
    """One call of `watch`."""

    def __init__(self, stream: LiveStream, options: SelectOptions, length: float) -> None:
        self._stream, self._options, self._length = stream, options, length
        self._limits = options.limits or Limits()
        self._policy = options.resolved_policy
        if self._policy.candidate_mode:
            raise InvalidArgument(
                f"policy {self._policy.name!r} chooses among {self._policy.candidate_mode} candidates, which are for "
                "files; take another policy"
            )
        if options.fps is not None:
            self._num_candidates = check_count("fps * window", max(1, round(options.fps * length)), "MAX_CANDIDATES")
        else:
            assert options.resolved_candidates is not None, "without fps there is a number"
            self._num_candidates = options.resolved_candidates
        self._num_frames = options.resolved_frames or self._num_candidates
        if self._num_frames > self._num_candidates and options.auto is None:
            raise InvalidArgument(
                f"fps={options.fps:g} gives {self._num_candidates} candidates in a window of {length:g} s, fewer than "
                f"num_frames={self._num_frames}; raise fps, or choose fewer frames"
            )
        self._window: _OpenWindow | None = None
        self._origin: float | None = None  # stream time from which windows are counted; None: the next frame's
        self._number = self._damaged = 0

    def windows(self) -> Iterator[Window]:
        with closing(self._stream.frames()) as frames:
            try:
                for live in frames:
                    if (ended_by := self._ends(live)) and (closed := self._close(ended_by)):
                        yield closed
                    if isinstance(live, LiveFrame):
                        self._add(live)
            except (KeyboardInterrupt, VideoError) as error:
                if closed := self._close("stopped" if isinstance(error, KeyboardInterrupt) else "lost"):
                    yield closed
                raise

    def _ends(self, live: LiveFrame | str) -> str | None:
        """Return why the open window ends before this frame; None where it does not, or none is open."""
        if self._window is None:
            return None
        if isinstance(live, str):
            return live
        last = self._window.last
        if (live.frame.width, live.frame.height) != (last.frame.width, last.frame.height):
            return "size"
        if live.seconds < last.seconds - _SAME:
            return "jump"
        return "full" if live.seconds >= self._window.end - _SAME else None

    def _add(self, live: LiveFrame) -> None:
        if self._window is None:
            self._check_memory(live.frame)
            if self._origin is None:
                self._origin = live.seconds
            passed = math.floor((live.seconds - self._origin + _SAME) / self._length)
            self._window = _OpenWindow(live, self._origin + passed * self._length, self._length, self._num_candidates)
            return
        if shown := self._window.due(live.seconds):
            self._window.candidates.append(self._candidate(shown))
        self._window.last = live

    def _candidate(self, live: LiveFrame) -> _Candidate:
        return _Candidate(live, self._image(live.frame, self._view_size(live.frame)) if self._sees_frames else None)

    def _close(self, ended_by: str) -> Window | None:
        """Choose the frames of the open window; None where there is none."""
        if (window := self._window) is None:
            return None
        end = window.end if ended_by == "full" else window.last.seconds
        if shown := window.due(end if ended_by == "full" else end + 2 * _SAME):
            window.candidates.append(self._candidate(shown))
        if not window.candidates:  # it ended before its first moment
            window.candidates.append(self._candidate(window.last))
        candidates, options = window.candidates, self._options
        with errors_of(self._stream.name):
            choice = choose_one(
                self._policy,
                len(candidates),
                min(self._num_frames, len(candidates)),
                np.stack([each.view for each in candidates if each.view is not None]) if self._sees_frames else None,
                seed=options.seed + self._number,
                pts_seconds=np.array([each.live.seconds for each in candidates]),
                auto=options.auto,
            )
            lives = [candidates[position].live for position in choice.positions]
            frames = np.stack([self._image(live.frame, options.size) for live in lives])
        damaged, self._damaged = self._stream.num_damaged - self._damaged, self._stream.num_damaged
        closed = Window(
            source=self._stream.name,
            number=self._number,
            policy=self._policy.name,
            start_seconds=window.start,
            end_seconds=end,
            ended_by=ended_by,
            pts_seconds=np.array([live.seconds for live in lives]),
            wall_seconds=np.array([live.wall_seconds for live in lives]),
            frames=frames,
            num_candidates=len(candidates),
            scores=None if choice.scores is None else choice.scores[choice.positions],
            notes=(f"{damaged} damaged packets or frames were left out",) if damaged else (),
            query=choice.query,
        )
        self._window, self._number = None, self._number + 1
        if ended_by != "full":
            self._origin = None
        return closed

    # ---- pixels

    @property
    def _sees_frames(self) -> bool:
        return self._policy.needs_frames

    def _view_size(self, frame: Any) -> int:
        return min(view_size(self._policy), int(frame.width), int(frame.height))

    def _image(self, frame: Any, size: Size) -> Frames:
        """Return a frame upright, as RGB [H, W, 3] of this size."""
        turns = rotation_of(frame) // 90
        if isinstance(size, tuple) and turns % 2:
            size = size[1], size[0]
        width, height = target_size(frame.width, frame.height, size)
        image = FrameConverter(width, height, name=self._stream.name, limits=self._limits).pixels(frame)
        return np.ascontiguousarray(np.rot90(image, turns)) if turns else image

    def _check_memory(self, frame: Any) -> None:
        """Refuse a window whose candidates and chosen frames take more than `max_bytes`."""
        view = target_size(frame.width, frame.height, self._view_size(frame)) if self._sees_frames else (0, 0)
        shown = target_size(frame.width, frame.height, self._options.size)
        candidate = sum(plane.buffer_size for plane in frame.planes) + 3 * view[0] * view[1]
        # The views are stacked for the policy.
        needed = self._num_candidates * (candidate + 3 * view[0] * view[1]) + self._num_frames * 3 * shown[0] * shown[1]
        if needed > (allowed := self._limits.bytes_for(None)):
            raise LimitExceeded(
                f"{self._stream.name}: a window of {self._num_candidates} candidates of {frame.width}x{frame.height} "
                f"takes {needed >> 20} MiB, over the limit max_bytes={allowed}; lower num_candidates, fps or window, "
                "or raise it with --max-bytes or Limits(max_bytes=...)"
            )
