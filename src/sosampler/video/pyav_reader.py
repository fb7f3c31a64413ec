"""The default reader: PyAV, which brings its own FFmpeg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.errors import VideoError
from sosampler.video.limits import Limits, Size, check_size, target_size
from sosampler.video.pyav_decode import (
    FrameConverter,
    PacketFeed,
    Run,
    RunDecoder,
    RunResult,
    decode_runs,
    is_copyable,
    new_context,
    own_context,
    rotation_of,
    suits_threads,
)
from sosampler.video.pyav_index import (
    ContainerIndex,
    PacketTable,
    container_index,
    open_container,
    scan_packets,
    video_stream,
)
from sosampler.video.reader import FrameBatch, Timeline, VideoMetadata


class PyavReader:
    """Frames of one file, bytes or file-like object.

    A frame is reached by sending the packets from its keyframe up to itself and draining the decoder. For a keyframe
    that is one packet. Frames on the way that no other frame refers to are not decoded at all.
    """

    decoder = "pyav"

    def __init__(self, source: Path | bytes | Any, *, name: str, threads: int, limits: Limits) -> None:
        self.name = name
        self.notes: list[str] = []
        self._source, self._threads, self._limits = source, threads, limits
        self._open()
        try:
            self._index = container_index(self._container, self._stream, name=name, limits=limits)
        except VideoError:
            self.close()
            raise
        self._table: PacketTable | None = None
        self._located: dict[int, tuple[int, int]] = {}  # frame number -> (position in the index, pts)
        self._rotation: int | None = None  # degrees counter-clockwise; known when a frame has been decoded

    def _open(self) -> None:
        if not isinstance(self._source, (Path, bytes)):
            self._source.seek(0)
        self._container = open_container(self._source, name=self.name, limits=self._limits)
        try:
            self._stream = video_stream(self._container, name=self.name, limits=self._limits)
        except VideoError:
            self._container.close()
            raise
        self._feed = PacketFeed(self._container, self._stream, name=self.name)

    def _reopen(self) -> None:
        self._container.close()
        self._open()

    def close(self) -> None:
        self._feed.close()
        self._container.close()

    # --- what is there ---------------------------------------------------------------------------------------------

    def _packets(self) -> PacketTable:
        if self._table is None:
            if not self._feed.at_start:
                self._reopen()  # seeking to the start is not exact in every format
            self._table = scan_packets(self._feed.rest(), self._stream, name=self.name, limits=self._limits)
            self.notes.extend(self._table.notes)
        return self._table

    def timeline(self) -> Timeline:
        return self._packets().timeline

    @property
    def total_num_frames(self) -> int:
        return self._index.total_num_frames if self._index and self._table is None else len(self.timeline())

    def keyframe_indices(self) -> Indices:
        if self._index and self._table is None:
            return self._index.keyframes
        return self.timeline().keyframe_indices

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        seconds = self._index.seconds if self._index and self._table is None else self.timeline().seconds
        return seconds(np.asarray(others)) - seconds(np.asarray(frame_indices))

    def locate_keyframes(self, positions: Indices) -> tuple[Indices, Seconds]:
        if self._index and self._table is None:
            located = [self._locate(self._index, int(position)) for position in positions]
            if all(item is not None for item in located):
                frame_indices = np.array([item[0] for item in located if item], dtype=np.int64)
                pts = np.array([item[1] for item in located if item], dtype=np.float64)
                base = self._index.time_base
                return frame_indices, pts * base.numerator / base.denominator
            # The index does not fit the packets: the keyframes nearest to those it names.
            there = self.timeline().keyframe_indices
            if not len(there):
                raise VideoError(f"{self.name}: none of the keyframes in its index can be read; make the file again")
            named = self._index.keyframes[positions]
            frame_indices = there[np.abs(there[None, :] - named[:, None]).argmin(1)]
        else:
            frame_indices = self.timeline().keyframe_indices[positions]
        return frame_indices, self.timeline().seconds(frame_indices)

    def _locate(self, index: ContainerIndex, position: int) -> tuple[int, int] | None:
        """True frame number and pts of a keyframe, from its packet and those shown before it but sent after it."""
        packet = self._feed.keyframe(index, position)
        if packet is None or packet.pts is None:
            return None
        frame, pts = int(index.keyframes[position]), int(packet.pts)
        for later in self._feed.rest():
            if later.pts is None or later.pts > pts:
                break
            frame += not later.is_discard  # a leading frame of an open group of pictures
        self._located[frame] = (position, pts)
        return frame, pts

    @property
    def metadata(self) -> VideoMetadata:
        rotation = self._known_rotation()
        context, total = self._stream.codec_context, self.total_num_frames
        if self._index and self._table is None:
            duration, first_pts = self._index.duration, (self._stream.start_time or 0) * self._index.time_base
            start = float(first_pts)
        else:
            duration, start = self.timeline().duration, float(self.timeline().seconds(0))
        width, height = context.width, context.height
        if rotation in (90, 270):
            width, height = height, width
        return VideoMetadata(
            total_num_frames=total,
            fps=total / duration if duration > 0 else float(self._stream.average_rate or 0),
            duration=duration,
            start_seconds=start,
            width=width,
            height=height,
            rotation=rotation,
            codec=context.codec.canonical_name,
            num_keyframes=len(self.keyframe_indices()),
            decoder=self.decoder,
        )

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        requested = np.asarray(frame_indices, dtype=np.int64)
        size = check_size(size)
        wanted, row_of_request = np.unique(requested, return_inverse=True)
        self._check_range(wanted)
        got = _Gathered(wanted, *self._decoded_size(size))
        if self._table is None and all(frame in self._located for frame in got.missing):
            self._read_located(got, size)
        if got.missing:
            if self._packets().seekable:
                self._read_runs(got, size)
            else:
                self._read_from_start(got, size)
        frames = self._upright(got.images)
        if not np.array_equal(row_of_request, np.arange(len(wanted))):
            frames = frames[row_of_request]
        return FrameBatch(frames, got.frames[row_of_request], got.seconds[row_of_request], tuple(got.notes))

    def _upright(self, frames: Frames) -> Frames:
        turns = (self._rotation or 0) // 90
        return np.ascontiguousarray(np.rot90(frames, turns, axes=(1, 2))) if turns else frames

    def _check_range(self, frames: Indices) -> None:
        total = self.total_num_frames
        if frames[0] < 0 or frames[-1] >= total:
            raise IndexError(f"{self.name}: frames {frames[0]}..{frames[-1]} were requested, it has 0..{total - 1}")

    def _decoded_size(self, size: Size) -> tuple[int, int]:
        """(width, height) in which frames leave the decoder: as they shall be once turned upright."""
        context = self._stream.codec_context
        if not isinstance(size, tuple):
            return target_size(context.width, context.height, size)  # the short side stays short when turned
        height, width = size
        return (height, width) if self._known_rotation() in (90, 270) else (width, height)

    def _make_decoder(self, size: Size, reorder_depth: int) -> Any:
        """A maker of decoders for one reading."""
        width, height = self._decoded_size(size)

        def make(threads: int, *, pooled: bool) -> RunDecoder:
            # Only the container's own context knows the rotation. But a seek flushes that context, and the main thread
            # seeks while others decode, so it never leaves this thread.
            is_own = not pooled and (self._rotation is None or not is_copyable(self._stream))
            new = own_context if is_own else new_context
            return RunDecoder(
                new(self._stream, threads=threads, limits=self._limits),
                FrameConverter(width, height, name=self.name, limits=self._limits),
                reorder_depth=reorder_depth,
                knows_rotation=is_own,
            )

        return make

    def _decode(self, runs: list[Run], packets_of: Any, make: Any) -> Iterator[RunResult]:
        """Results in the order of the runs; in threads where there are several runs and the codec allows it."""
        pooled = self._threads > 1 and is_copyable(self._stream) and suits_threads(runs)
        if pooled:
            self._known_rotation()
        for result in decode_runs(runs, packets_of, make, threads=self._threads, pooled=pooled):
            self._note_stream(result)
            yield result

    def _known_rotation(self) -> int:
        if self._rotation is None:
            positions = np.zeros(1, dtype=np.int64)
            self.read(self.locate_keyframes(positions)[0] if len(self.keyframe_indices()) else positions, size=16)
        return self._rotation or 0

    def _note_stream(self, result: RunResult) -> None:
        if result.rotation is not None:
            self._rotation = result.rotation
        text = "the video is interlaced; both fields are shown woven into one frame, as stored"
        if result.interlaced and text not in self.notes:
            self.notes.append(text)

    def _read_located(self, got: _Gathered, size: Size) -> None:
        """Keyframes known from the container's index: no scan, one packet each."""
        assert self._index is not None
        index, base = self._index, self._index.time_base
        located = {frame: self._located[frame] for frame in got.missing}
        runs = [Run(start=position, packets=1, wanted=frozenset({pts})) for position, pts in located.values()]

        def packets_of(run: Run) -> Iterator[Any]:
            packet = self._feed.keyframe(index, run.start)
            if packet is not None:
                yield packet

        make = self._make_decoder(size, 0)
        for (frame, (_, pts)), result in zip(located.items(), self._decode(runs, packets_of, make), strict=True):
            if pts in result.frames and not result.errors:
                got.put(frame, result.frames[pts], pts * base.numerator / base.denominator)

    def _read_runs(self, got: _Gathered, size: Size) -> None:
        table, timeline = self._packets(), self.timeline()
        groups: dict[int, list[int]] = {}  # first packet -> frames, both ascending
        for frame in got.missing:
            groups.setdefault(table.start_of(int(table.packet_of_frame[frame])), []).append(frame)
        starts = sorted(groups)
        runs = [self._run(start, groups[start]) for start in starts]
        make = self._make_decoder(size, table.reorder_depth)
        lost: list[tuple[int, Frames | None]] = []
        for start, result in zip(starts, self._decode(runs, self._packets_of, make), strict=True):
            for frame in groups[start]:
                pts = int(timeline.pts[frame])
                if pts in result.frames:
                    got.put(frame, result.frames[pts], float(timeline.seconds(frame)))
                    if pts in result.suspect:
                        got.notes.append(f"frame {frame} follows damaged data and may look impaired")
                else:
                    lost.append((frame, result.damaged.get(pts)))
        for frame, damaged in lost:
            self._substitute(frame, damaged, make(1, pooled=False), got)

    def _packets_of(self, run: Run) -> Iterator[Any]:
        return self._feed.run(self._packets(), run.start, run.packets)

    def _run(self, start: int, frames: list[int]) -> Run:
        table = self._packets()
        last = int(table.packet_of_frame[frames].max())
        wanted = frozenset(int(pts) for pts in table.timeline.pts[frames])
        return Run(start=start, packets=last - start + 1, wanted=wanted)

    def _substitute(self, frame: int, damaged: Frames | None, decode: RunDecoder, got: _Gathered) -> None:
        """A frame that does not decode is replaced by the nearest one that does, and the notes say so."""
        table, timeline = self._packets(), self.timeline()

        def attempt(start: int, other: int) -> Frames | None:
            run = self._run(start, [other])
            result = decode(self._packets_of(run), run.wanted, skip_others=False)
            self._note_stream(result)
            return result.frames.get(int(timeline.pts[other]))

        start = table.start_of(int(table.packet_of_frame[frame]))
        if damaged is None:
            # Some streams need more than one keyframe's run-up before an image comes out: begin one group earlier.
            before = table.key_packets[table.key_packets < start]
            image = attempt(int(before[-1]) if len(before) else 0, frame)
            if image is not None:
                got.put(frame, image, float(timeline.seconds(frame)))
                return
        for other in self._neighbours(frame):
            image = attempt(table.start_of(int(table.packet_of_frame[other])), other)
            if image is not None:
                at = f"{timeline.seconds(frame):.3f} s"
                got.notes.append(f"frame {frame} ({at}) is damaged; frame {other} was used in its place")
                got.put(frame, image, float(timeline.seconds(other)), used=other)
                return
        if damaged is None:
            raise VideoError(f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again")
        got.notes.append(f"frame {frame} is damaged and nothing near it is better; it is given as it decodes")
        got.put(frame, damaged, float(timeline.seconds(frame)))

    def _neighbours(self, frame: int) -> Iterator[int]:
        """Frames to try in the place of a damaged one: the eight next to it, then the keyframes by distance."""
        total = self.total_num_frames
        near = [frame + step * side for step in range(1, 5) for side in (1, -1)]
        yield from (other for other in near if 0 <= other < total)
        keys = self.timeline().keyframe_indices
        yield from (int(key) for key in keys[np.argsort(np.abs(keys - frame), kind="stable")] if abs(key - frame) > 4)

    def _read_from_start(self, got: _Gathered, size: Size) -> None:
        """Streams without usable timestamps: decode from the start and count the frames that come out."""
        timeline = self.timeline()
        width, height = self._decoded_size(size)
        self._reopen()
        context = own_context(self._stream, threads=self._threads, limits=self._limits)
        convert = FrameConverter(width, height, name=self.name, limits=self._limits)
        remaining, last, count, result = set(got.missing), None, 0, RunResult()
        for packet in self._feed.rest():
            try:
                frames = context.decode(packet if packet.size else None)
            except av.error.EOFError:
                break
            except av.error.FFmpegError:
                result.errors += 1
                continue
            for frame in frames:
                last = frame
                if count in remaining:
                    remaining.discard(count)
                    got.put(count, convert(frame), float(timeline.seconds(count)))
                    result.interlaced |= frame.interlaced_frame
                    result.rotation = rotation_of(frame)
                count += 1
            if not remaining:
                break
        self._note_stream(result)
        if last is None:
            raise VideoError(f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again")
        if result.errors:
            got.notes.append(f"{result.errors} packets could not be decoded; frame numbers count the frames that could")
        for frame in sorted(remaining):
            used = min(count, len(timeline)) - 1
            got.notes.append(f"frame {frame} could not be decoded; frame {used}, the last one, was used in its place")
            got.put(frame, convert(last), float(timeline.seconds(used)), used=used)


class _Gathered:
    """Frames on their way to the caller, each written once into the array that is returned."""

    def __init__(self, wanted: Indices, width: int, height: int) -> None:
        self._row = {frame: row for row, frame in enumerate(wanted.tolist())}
        self.missing: dict[int, None] = dict.fromkeys(self._row)  # ascending, as `wanted`
        self.images: Frames = np.empty((len(wanted), height, width, 3), dtype=np.uint8)  # not yet upright
        self.frames = wanted.copy()
        self.seconds: Seconds = np.zeros(len(wanted))
        self.notes: list[str] = []

    def put(self, frame: int, image: Frames, seconds: float, *, used: int | None = None) -> None:
        """The image for a wanted frame; `used` is the number of another frame that stands in for it."""
        row = self._row[frame]
        self.images[row], self.seconds[row] = image, seconds
        self.frames[row] = frame if used is None else used
        del self.missing[frame]
