"""Decode runs of packets with PyAV: from a keyframe to the last wanted frame and no further."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from sosampler._util.arrays import Frames
from sosampler.errors import VideoError
from sosampler.video.limits import MAX_PACKET_SECONDS, Limits, TimeLimit
from sosampler.video.pyav_index import DISCARDED, ContainerIndex, PacketTable
from sosampler.video.pyav_versions import (
    RESIZING,
    index_entries,
    reorder_depth_of,
    reordering_options,
    set_reorder_depth,
    to_rgb,
)

# A context can be built beside the container's own, with its extradata alone, for these decoders.
_COPYABLE_CODECS = frozenset(
    {"h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video", "vp8", "vp9", "libdav1d", "av1", "mjpeg"}
)
# These decoders can skip frames that no other frame refers to; pixels of the rest do not change.
_SKIPPING_CODECS = frozenset({"h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video"})
# Frames that H.264 and HEVC allow to be held back at most.
_DEEPEST_REORDERING = 16
# Pixels of the frames that all decoding threads work on: two threads for the largest frames that are allowed.
_MAX_PIXELS_IN_THREADS = 4 * 7680 * 4320
# Runs up to this length are handed to threads whole; a longer one would hold too many packets in memory.
_LONGEST_BUFFERED_RUN = 600


@dataclass(frozen=True, eq=False)
class Picture:
    """A decoded frame in the size asked for, and as FFmpeg holds it where that is kept for another size."""

    pixels: Frames  # [H, W, 3], not yet upright
    decoded: Any = None  # av.VideoFrame


class Room:
    """Bytes that decoded frames may still take. Shared by the threads of one reading."""

    def __init__(self, num_bytes: int) -> None:
        self._left, self._lock = num_bytes, threading.Lock()

    def takes(self, frame: Any) -> bool:
        """Return whether an av.VideoFrame fits, and count it then."""
        size: int = sum(plane.buffer_size for plane in frame.planes)
        with self._lock:
            fits = size <= self._left
            self._left -= size if fits else 0
        return fits


@dataclass(frozen=True)
class Run:
    """Decode `packets` packets from packet number `start` on, and keep the frames with these pts."""

    start: int
    packets: int
    wanted: frozenset[int]


@dataclass
class RunResult:
    """What came of a run, by pts."""

    frames: dict[int, Picture] = field(default_factory=dict)
    damaged: dict[int, Picture] = field(default_factory=dict)  # wanted, but the decoder reports errors in them
    number_of: dict[int | None, int] = field(default_factory=dict)  # number in the run of each packet that was sent
    failed: list[int] = field(default_factory=list)  # numbers of the packets that are damaged
    has_start: bool = False  # whether the first packet became a frame
    interlaced: bool = False
    rotation: int | None = None  # degrees counter-clockwise; None where the context does not know it

    def is_lost(self, pts: int) -> bool:
        """Return whether the frame is damaged, or was decoded after errors and without the keyframe it refers to."""
        return pts not in self.frames or (bool(self.failed) and not self.has_start)

    def is_suspect(self, pts: int) -> bool:
        """Return whether the frame, intact itself, was sent after a damaged packet, to which it may refer."""
        return bool(self.failed) and self.number_of[pts] > min(self.failed)

    def sound(self, pts: int) -> Picture | None:
        """Return the frame if nothing is wrong with it."""
        return self.frames[pts] if pts in self.frames and not self.is_suspect(pts) else None


class FrameConverter:
    """An av.VideoFrame becomes an RGB array, resized in the same pass that converts its colours. Not yet upright.

    The frame itself is kept beside it as long as there is `room`.
    """

    def __init__(self, width: int, height: int, *, name: str, limits: Limits, room: Room | None = None) -> None:
        self._to = width, height
        self._name, self._limits, self._room = name, limits, room
        self._reformatter = VideoReformatter()

    def __call__(self, frame: Any) -> Picture:
        pixels = self.pixels(frame)
        return Picture(pixels, frame if self._room is not None and self._room.takes(frame) else None)

    def pixels(self, frame: Any) -> Frames:
        """Return [H, W, 3] uint8 RGB."""
        self._limits.check_pixels(self._name, frame.width, frame.height)
        resized = self._to != (frame.width, frame.height)
        if resized and frame.interlaced_frame:
            # swscale shrinks the two fields apart, which tears the image; a plain RGB frame is shrunk whole.
            frame = av.VideoFrame.from_ndarray(self._rgb(frame, (frame.width, frame.height), None), format="rgb24")
        return self._rgb(frame, self._to, RESIZING if resized else None)

    def _rgb(self, frame: Any, size: tuple[int, int], interpolation: int | None) -> Frames:
        try:
            image = to_rgb(self._reformatter, frame, size[0], size[1], interpolation)
        except av.error.FFmpegError as error:  # of sizes between which swscale has no filter
            raise VideoError(
                f"{self._name}: FFmpeg cannot convert frames of {frame.width}x{frame.height} to {size[0]}x{size[1]} "
                "pixels; the file is probably damaged, otherwise ask for another size"
            ) from error
        return np.asarray(image.to_ndarray(), dtype=np.uint8)


def rotation_of(frame: Any) -> int:
    """Degrees, counter-clockwise in quarter turns, that make the frame upright."""
    return int(round(frame.rotation / 90) % 4 * 90)


class RunDecoder:
    """One codec context with its converter. Not to be shared between threads."""

    def __init__(
        self,
        context: Any,
        converter: FrameConverter,
        *,
        reorder_depth: int,
        unskipped: frozenset[int],  # pts of packets that are decoded in any case, so that damage shows
        knows_rotation: bool,
        time: TimeLimit,
    ) -> None:
        self._context, self._unskipped = context, unskipped
        self._convert = converter
        self._knows_rotation = knows_rotation
        self._time = time
        # Damaged timestamps can pretend any depth, and beyond its own limit FFmpeg aborts the process.
        self._reorder_depth = min(max(reorder_depth, reorder_depth_of(context)), _DEEPEST_REORDERING)
        self._skips = context.codec.name in _SKIPPING_CODECS

    def __call__(self, packets: Iterable[Any], wanted: frozenset[int], *, skip_others: bool = True) -> RunResult:
        context, result, remaining = self._context, RunResult(), set(wanted)
        context.flush_buffers()
        # Flushing makes FFmpeg forget how far frames are reordered, and hierarchical B-frames would be dropped.
        set_reorder_depth(context, self._reorder_depth)
        skipping = False
        for number, packet in enumerate(packets):
            self._time.check()
            result.number_of[packet.pts] = number
            is_needed = packet.pts in wanted or packet.pts in self._unskipped
            if self._skips and skip_others and skipping == is_needed:
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
            result.failed.append(len(result.number_of) if packet is None else result.number_of[packet.pts])
            return
        for frame in frames:
            result.has_start |= result.number_of.get(frame.pts) == 0
            if frame.is_corrupt:
                result.failed.append(result.number_of.get(frame.pts, 0))
            if frame.pts not in remaining:
                continue
            remaining.discard(frame.pts)
            (result.damaged if frame.is_corrupt else result.frames)[frame.pts] = self._convert(frame)
            result.interlaced |= frame.interlaced_frame
            if self._knows_rotation:
                result.rotation = rotation_of(frame)


def own_context(stream: Any, *, limits: Limits) -> Any:
    """The container's own codec context, in one thread. It alone knows how the image is rotated."""
    context = stream.codec_context
    if not context.is_open:
        context.options, context.thread_count = _options(context, limits), 1
    return context


def new_context(stream: Any, *, threads: int, limits: Limits) -> Any:
    """A second context for the stream, where `is_copyable`."""
    own = stream.codec_context
    context = av.CodecContext.create(own.codec.name, "r")
    context.extradata = own.extradata
    context.codec_tag = own.codec_tag  # distinguishes dialects of MPEG-4
    context.width, context.height = own.width, own.height
    # Often only the container knows the colour space.
    context.colorspace, context.color_range = own.colorspace, own.color_range
    context.color_primaries, context.color_trc = own.color_primaries, own.color_trc
    set_reorder_depth(context, reorder_depth_of(own))
    context.options, context.thread_count = _options(own, limits), threads
    if threads > 1:  # see `decode_runs`
        context.options, context.thread_type = {**_options(own, limits), "err_detect": "explode"}, "FRAME"
    return context


def _options(context: Any, limits: Limits) -> dict[str, str]:
    return {"max_pixels": str(limits.max_pixels), **reordering_options(context.codec.name)}


def most_threads(threads: int, width: int, height: int) -> int:
    """Return how many of the threads may decode frames of this size: each holds several in memory."""
    return max(1, min(threads, _MAX_PIXELS_IN_THREADS // (width * height)))


def suits_threads(runs: list[Run]) -> bool:
    """Several runs, none so long that its packets would fill the memory."""
    return len(runs) > 1 and max(run.packets for run in runs) <= _LONGEST_BUFFERED_RUN


def decode_runs(
    runs: list[Run],
    packets_of: Any,  # (Run) -> Iterator[av.Packet]
    make_decoder: Any,  # (threads) -> RunDecoder
    *,
    threads: int,
    pooled: bool,
) -> Iterator[RunResult]:
    """Results in the order of the runs.

    Runs start at keyframes, so they are independent: with several threads each decodes whole runs on a context of
    its own, which loses nothing at seeks as FFmpeg's frame threads do. Those serve a single long run. What they make of
    damaged data depends on which thread is faster, and they forget some errors, so they stop at the first one
    ("explode") and the run is decoded again by one thread: results do not depend on the number of threads.
    """
    if not pooled:
        threads = threads if any(run.packets > 1 for run in runs) else 1
        decoder = make_decoder(threads)
        alone = decoder if threads == 1 else None
        for run in runs:
            result = decoder(packets_of(run), run.wanted)
            if decoder is not alone and (result.failed or len(result.frames) < len(run.wanted)):
                alone = alone or make_decoder(1)
                result = alone(packets_of(run), run.wanted)
            yield result
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
    """Return whether `new_context` works for the stream."""
    try:
        stream.codec_context.codec_tag  # noqa: B018 - which PyAV only reads where it is ASCII
    except UnicodeDecodeError:
        return False
    return stream.codec_context.codec.name in _COPYABLE_CODECS


# Reading this many packets costs less than a seek.
_READ_ON = 16
# FFmpeg's search in an index takes the square of the number of neighbouring entries that an edit list hides: 0.1 s for
# this many.
_MAX_HIDDEN = 20_000


def can_seek(stream: Any) -> bool:
    """Return whether seeks take a sensible time; otherwise packets are read in their order."""
    entries, step = index_entries(stream), _MAX_HIDDEN // 2
    hidden = [bool(entries[number].flags & DISCARDED) for number in range(0, len(entries), step)]
    return not any(one and other for one, other in pairwise(hidden))


class PacketFeed:
    """An open container and the reading position in it."""

    def __init__(self, open_stream: Callable[[], tuple[Any, Any]], *, time: TimeLimit) -> None:
        self._open, self._time = open_stream, time
        self.container, self.stream = open_stream()
        self._seeks = can_seek(self.stream)
        self._packets: Iterator[Any] = self._demux()
        self._next: int | None = 0  # number, in decoding order, of the packet that comes next; None where unknown

    def close(self) -> None:
        """Let go of the generator, which holds this object: a cycle would keep frames in memory until collected."""
        self._packets = iter(())
        self.container.close()

    def rewind(self) -> None:
        """Begin at the beginning, which seeking does not reach in every format."""
        if self._next != 0:
            self.close()
            self.container, self.stream = self._open()
            self._packets = self._demux()
            self._next = 0

    def rest(self) -> Iterator[Any]:
        """What follows the present position; the last packet is empty. Raises where the rest cannot be read."""
        self._next = None
        return self._packets

    def readable_rest(self) -> Iterator[Any]:
        """What follows the present position, as far as it can be read."""
        self._next = None
        return iter(self._take, None)

    def _seek(self, ticks: int) -> bool:
        self._time.begin_step(MAX_PACKET_SECONDS)
        try:
            self.container.seek(ticks, backward=True, any_frame=False, stream=self.stream)
        except (av.error.FFmpegError, OverflowError):
            self._time.check()  # FFmpeg gives up when the time is over
            return False
        self._packets = self._demux()
        self._next = None
        return True

    def _demux(self) -> Iterator[Any]:
        while True:
            self._time.begin_step(MAX_PACKET_SECONDS)
            try:
                for packet in self.container.demux(self.stream):
                    if not packet.size and self._time.is_step_over:
                        # As FFmpeg does with files that it opened itself; others end when the time is over.
                        raise av.error.ExitError(1, "no packet is found")
                    yield packet
                    self._time.begin_step(MAX_PACKET_SECONDS)
                return
            except IndexError:
                # PyAV stumbles over packets of a stream that appears after the file was opened, as in broadcasts.
                # A new call continues after that packet.
                continue
            except av.error.ExitError:
                self._time.check()
                raise

    def _take(self) -> Any:
        """The next packet; None at the end, and where the rest cannot be read."""
        try:
            return next(self._packets, None)
        except av.error.FFmpegError:
            return None

    def keyframe(self, index: ContainerIndex, position: int) -> Any:
        """The packet of a keyframe of the container's index, or None if no seek lands on it."""
        start = int(index.keyframes[position])
        # FFmpeg compares the requested time with the keyframe's pts, which the index does not hold and which lies a
        # few frames behind its dts. A time a little later in the same group finds it; behind the last group, any.
        if position + 1 == len(index.keyframes):
            targets = [int(index.dts[-1]) + int(1 / index.time_base)]
        else:
            end = int(index.keyframes[position + 1])
            targets = [int(index.dts[min(start + 8, end - 1)]), int(index.dts[end]) - 1]
        for ticks in targets:
            if self._seek(ticks):
                packet = self._take()
                if packet is not None and packet.dts == index.dts[start]:
                    return packet
        return None

    def run(self, table: PacketTable, start: int, count: int) -> Iterator[Any]:
        """`count` packets from packet number `start` on, or as many as there are."""
        packet = self._goto(table, start)
        while packet is not None and count:
            if not table.has_pts:
                packet.pts = packet.dts
            yield packet
            count -= 1
            packet = self._read() if count else None

    def _goto(self, table: PacketTable, number: int) -> Any:
        if self._next is not None and 0 <= number - self._next <= _READ_ON:
            return self._read_until(number)
        if self._seeks and len(table.key_packets):
            pts, dts = int(table.pts[number]), int(table.dts[number])
            second = int(1 / self.stream.time_base)
            # Where a seek lands too late (streams without an index), step back, and at last begin at the beginning.
            for ticks in (pts, dts, pts - 2 * second, pts - 10 * second, int(table.dts[0]), int(table.pts[0])):
                if not self._seek(ticks):
                    continue
                packet = self._take()
                stamp = None if packet is None else packet.pts if table.has_pts else packet.dts
                landed = None if stamp is None else table.number_of(stamp)
                if landed is not None and landed <= number:
                    self._next = landed + 1
                    return packet if landed == number else self._read_until(number)
            self._seeks = False
        if self._next is None or number < self._next:
            self.rewind()
        return self._read_until(number)

    def _read_until(self, number: int) -> Any:
        packet = None
        while self._next is not None and self._next <= number:
            packet = self._read()
        return packet

    def _read(self) -> Any:
        packet = self._take()
        if packet is None or not packet.size:
            self._next = None
            return None
        if self._next is not None:
            self._next += 1
        return packet
