"""Decoding runs of packets with PyAV: from a keyframe to the last wanted frame, and not a packet further."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from sosampler.video.limits import Limits
from sosampler.video.reader import Frames
from sosampler.video.sizes import Size, target_size

# A context can be built beside the container's own, with its extradata alone, for these decoders.
_COPYABLE_CODECS = frozenset(
    {"h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video", "vp8", "vp9", "libdav1d", "av1", "mjpeg"}
)
# These decoders leave out frames that no other frame refers to when told so; pixels of the rest are the same.
_SKIPPING_CODECS = frozenset({"h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video"})
# Runs up to this length are handed to threads whole; a longer one would hold too many packets in memory.
_LONGEST_BUFFERED_RUN = 600
# Bilinear with the filter widened to the scale (anti-aliased), chroma at full width: PIL's pixels in one pass.
_RESIZING = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


@dataclass(frozen=True)
class Run:
    """Decode `packets` packets from packet number `start` on, and keep the frames with these pts."""

    start: int
    packets: int
    wanted: frozenset[int]


@dataclass
class RunResult:
    """What came of a run, by pts."""

    frames: dict[int, Frames] = field(default_factory=dict)  # [H, W, 3] each
    damaged: dict[int, Frames] = field(default_factory=dict)  # wanted, but the decoder reports errors in them
    suspect: set[int] = field(default_factory=set)  # intact themselves, decoded after a damaged packet
    errors: int = 0
    interlaced: bool = False
    rotation: int = 0


class FrameConverter:
    """An av.VideoFrame becomes an upright RGB array, resized in the same pass that converts its colours."""

    def __init__(self, width: int, height: int, size: Size, *, name: str, limits: Limits) -> None:
        self._stored = width, height
        self._size = size
        self._name, self._limits = name, limits
        self._reformatter = VideoReformatter()

    def __call__(self, frame: Any) -> Frames:
        self._limits.check_pixels(self._name, frame.width, frame.height)
        width, height = self._stored
        turns = quarter_turns(frame)
        upright = (width, height) if turns % 2 == 0 else (height, width)
        to_width, to_height = target_size(*upright, self._size)
        if turns % 2:
            to_width, to_height = to_height, to_width
        resized = (to_width, to_height) != (frame.width, frame.height)
        picture = self._reformatter.reformat(
            frame,
            width=to_width,
            height=to_height,
            format="rgb24",
            interpolation=_RESIZING if resized else None,
            threads=1,  # swscale would otherwise start a thread per core for every frame
        )
        array = np.asarray(picture.to_ndarray(), dtype=np.uint8)
        return np.ascontiguousarray(np.rot90(array, turns)) if turns else array


def quarter_turns(frame: Any) -> int:
    """Counter-clockwise quarter turns that make the frame upright."""
    return int(round(frame.rotation / 90) % 4)


class RunDecoder:
    """One codec context with its converter. Not to be shared between threads."""

    def __init__(self, context: Any, converter: FrameConverter, *, reorder_depth: int) -> None:
        self._context = context
        self._convert = converter
        self._reorder_depth = max(reorder_depth, context.reorder_depth)
        self._skips = context.codec.name in _SKIPPING_CODECS

    def __call__(self, packets: Iterable[Any], wanted: frozenset[int], *, skip_others: bool = True) -> RunResult:
        context, result, remaining = self._context, RunResult(), set(wanted)
        context.flush_buffers()
        # Flushing makes FFmpeg forget how far frames are reordered, and hierarchical B-frames would be dropped.
        context.reorder_depth = self._reorder_depth
        skipping = False
        for packet in packets:
            if self._skips and skip_others and skipping != (packet.pts not in wanted):
                skipping = not skipping
                context.skip_frame = "NONREF" if skipping else "DEFAULT"
            self._decode(packet, remaining, result)
            if not remaining:
                break
        if skipping:
            context.skip_frame = "DEFAULT"
        if remaining:
            self._decode(None, remaining, result)  # everything needed has been sent: draining brings it out
        return result

    def _decode(self, packet: Any, remaining: set[int], result: RunResult) -> None:
        try:
            frames = self._context.decode(packet)
        except av.error.EOFError:
            return
        except av.error.FFmpegError:
            result.errors += 1
            return
        for frame in frames:
            if frame.is_corrupt:
                result.errors += 1
            if frame.pts not in remaining:
                continue
            remaining.discard(frame.pts)
            array = self._convert(frame)
            (result.damaged if frame.is_corrupt else result.frames)[frame.pts] = array
            if result.errors:
                result.suspect.add(frame.pts)
            result.interlaced |= frame.interlaced_frame
            result.rotation = quarter_turns(frame) * 90


def new_context(stream: Any, *, threads: int, limits: Limits) -> Any:
    """A codec context for the stream: a fresh one where that is safe, else the container's own."""
    own = stream.codec_context
    if own.codec.name not in _COPYABLE_CODECS:
        own.options = {"max_pixels": str(limits.max_pixels)}
        own.thread_count = 1
        return own
    context = av.CodecContext.create(own.codec.name, "r")
    context.extradata = own.extradata
    context.options = {"max_pixels": str(limits.max_pixels)}
    context.width, context.height = own.width, own.height
    context.reorder_depth = own.reorder_depth
    context.thread_count = threads
    if threads > 1:
        context.thread_type = "AUTO"
    return context


def decode_runs(
    runs: list[Run],
    packets_of: Any,  # (Run) -> Iterator[av.Packet]
    make_decoder: Any,  # (threads) -> RunDecoder
    *,
    threads: int,
    copyable: bool,
) -> Iterator[RunResult]:
    """Results in the order of the runs.

    Runs start at keyframes, so they are independent: with several threads each decodes whole runs on a context of
    its own, which loses nothing at seeks as FFmpeg's frame threads do. Those serve a single long run.
    """
    longest = max((run.packets for run in runs), default=0)
    if threads == 1 or len(runs) < 2 or longest > _LONGEST_BUFFERED_RUN or not copyable:
        decoder = make_decoder(threads if longest > 1 else 1)
        for run in runs:
            yield decoder(packets_of(run), run.wanted)
        return
    idle: queue.SimpleQueue[RunDecoder] = queue.SimpleQueue()
    for _ in range(threads):
        idle.put(make_decoder(1))

    def work(packets: list[Any], wanted: frozenset[int]) -> RunResult:
        decoder = idle.get()
        try:
            return decoder(packets, wanted)
        finally:
            idle.put(decoder)

    pending: deque[Future[RunResult]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="sosampler-decode") as pool:
        for run in runs:
            # Demuxing stays in this thread: a container has one reading position, and it costs little.
            pending.append(pool.submit(work, list(packets_of(run)), run.wanted))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def is_copyable(stream: Any) -> bool:
    return stream.codec_context.codec.name in _COPYABLE_CODECS
