"""The default reader: PyAV, which brings its own FFmpeg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np

from sosampler.errors import VideoError
from sosampler.video.limits import Limits
from sosampler.video.metadata import VideoMetadata
from sosampler.video.pyav_decode import (
    FrameConverter,
    Run,
    RunDecoder,
    RunResult,
    decode_runs,
    is_copyable,
    new_context,
    own_context,
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
from sosampler.video.reader import FrameBatch, Frames
from sosampler.video.sizes import Size, check_size, target_size
from sosampler.video.timeline import Indices, Seconds, Timeline

# Reading this many packets costs less than a seek.
_READ_ON = 16


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
        self._index: ContainerIndex | None = container_index(self._container, self._stream, name=name, limits=limits)
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
        self._demuxer: Iterator[Any] = self._container.demux(self._stream)
        self._next_packet: int | None = 0  # number of the packet that the demuxer gives next, where known

    def _reopen(self) -> None:
        self._container.close()
        self._open()

    def close(self) -> None:
        self._container.close()

    # --- what is there ---------------------------------------------------------------------------------------------

    def _packets(self) -> PacketTable:
        if self._table is None:
            if self._next_packet != 0:
                self._reopen()  # seeking to the start is not exact in every format
            self._table = scan_packets(self._container, self._stream, name=self.name, limits=self._limits)
            self.notes.extend(self._table.notes)
            self._next_packet = None
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
        frame_indices = self.timeline().keyframe_indices[positions]
        return frame_indices, self.timeline().seconds(frame_indices)

    def _locate(self, index: ContainerIndex, position: int) -> tuple[int, int] | None:
        """True frame number and pts of a keyframe, from its packet and those shown before it but sent after it."""
        packet = self._seek_to_keyframe(index, position)
        if packet is None or packet.pts is None:
            return None
        frame, pts = int(index.keyframes[position]), int(packet.pts)
        for later in self._demuxer:
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
        asked = np.asarray(frame_indices, dtype=np.int64)
        size = check_size(size)
        wanted = np.unique(asked)
        notes: list[str] = []
        found: dict[int, tuple[int, float, Frames]] = {}  # frame asked for -> frame got, its time, its picture
        if self._table is None and all(int(frame) in self._located for frame in wanted):
            self._read_located(wanted, size, found)
        missing = wanted[[int(frame) not in found for frame in wanted]]
        if len(missing):
            self._check_range(missing)
            if self._packets().seekable:
                self._read_runs(missing, size, found, notes)
            else:
                self._read_from_start(missing, size, found, notes)
        got = [found[int(frame)] for frame in asked]
        return FrameBatch(
            frames=self._upright(np.stack([picture for _, _, picture in got])),
            frame_indices=np.array([frame for frame, _, _ in got], dtype=np.int64),
            pts_seconds=np.array([seconds for _, seconds, _ in got], dtype=np.float64),
            notes=tuple(notes),
        )

    def _upright(self, frames: Frames) -> Frames:
        turns = (self._rotation or 0) // 90
        return np.ascontiguousarray(np.rot90(frames, turns, axes=(1, 2))) if turns else frames

    def _check_range(self, frames: Indices) -> None:
        total = self.total_num_frames
        if frames[0] < 0 or frames[-1] >= total:
            raise IndexError(f"{self.name}: frames {frames[0]}..{frames[-1]} were asked for, it has 0..{total - 1}")

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

    def _read_located(self, wanted: Indices, size: Size, found: dict[int, tuple[int, float, Frames]]) -> None:
        """Keyframes known from the container's index: no scan, one packet each."""
        assert self._index is not None
        index, base = self._index, self._index.time_base
        places = {int(frame): self._located[int(frame)] for frame in wanted}
        runs = [Run(start=position, packets=1, wanted=frozenset({pts})) for position, pts in places.values()]

        def packets_of(run: Run) -> Iterator[Any]:
            packet = self._seek_to_keyframe(index, run.start)
            if packet is not None:
                yield packet

        make = self._make_decoder(size, 0)
        for (frame, (_, pts)), result in zip(places.items(), self._decode(runs, packets_of, make), strict=True):
            if pts in result.frames and not result.errors:
                found[frame] = frame, pts * base.numerator / base.denominator, result.frames[pts]

    def _read_runs(
        self, wanted: Indices, size: Size, found: dict[int, tuple[int, float, Frames]], notes: list[str]
    ) -> None:
        table, timeline = self._packets(), self.timeline()
        groups: dict[int, list[int]] = {}  # first packet -> frames, both ascending
        for frame in wanted.tolist():
            groups.setdefault(table.start_of(int(table.packet_of_frame[frame])), []).append(frame)
        starts = sorted(groups)
        runs = [self._run(start, groups[start]) for start in starts]
        make = self._make_decoder(size, table.reorder_depth)
        lost: list[tuple[int, Frames | None]] = []
        for start, result in zip(starts, self._decode(runs, self._packets_of, make), strict=True):
            for frame in groups[start]:
                pts = int(timeline.pts[frame])
                if pts in result.frames:
                    found[frame] = frame, float(timeline.seconds(frame)), result.frames[pts]
                    if pts in result.suspect:
                        notes.append(f"frame {frame} follows damaged data and may look impaired")
                else:
                    lost.append((frame, result.damaged.get(pts)))
        for frame, damaged in lost:
            found[frame] = self._substitute(frame, damaged, make(1, pooled=False), notes)

    def _run(self, start: int, frames: list[int]) -> Run:
        table = self._packets()
        last = int(table.packet_of_frame[frames].max())
        wanted = frozenset(int(pts) for pts in table.timeline.pts[frames])
        return Run(start=start, packets=last - start + 1, wanted=wanted)

    def _substitute(
        self, frame: int, damaged: Frames | None, decode: RunDecoder, notes: list[str]
    ) -> tuple[int, float, Frames]:
        """A frame that does not decode is replaced by the nearest one that does, and the notes say so."""
        table, timeline = self._packets(), self.timeline()
        key = int(np.searchsorted(table.key_packets, table.start_of(int(table.packet_of_frame[frame]))))
        # Some streams need more than one keyframe's run-up before a picture comes out: begin one group earlier.
        earlier = int(table.key_packets[key - 1]) if 0 < key <= len(table.key_packets) and len(table.key_packets) else 0
        again = decode(
            self._packets_of(self._run(earlier, [frame])), self._run(earlier, [frame]).wanted, skip_others=False
        )
        self._note_stream(again)
        pts = int(timeline.pts[frame])
        if pts in again.frames and damaged is None:
            return frame, float(timeline.seconds(frame)), again.frames[pts]
        for other in self._neighbours(frame):
            run = self._run(table.start_of(int(table.packet_of_frame[other])), [other])
            result = decode(self._packets_of(run), run.wanted)
            self._note_stream(result)
            picture = result.frames.get(int(timeline.pts[other]))
            if picture is not None:
                notes.append(
                    f"frame {frame} ({timeline.seconds(frame):.3f} s) is damaged; frame {other} was used in its place"
                )
                return other, float(timeline.seconds(other)), picture
        if damaged is not None:
            notes.append(f"frame {frame} is damaged and nothing near it is better; it is given as it decodes")
            return frame, float(timeline.seconds(frame)), damaged
        raise VideoError(f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again")

    def _neighbours(self, frame: int) -> Iterator[int]:
        """Frames to try in the place of a damaged one: the eight next to it, then the keyframes by distance."""
        total = self.total_num_frames
        near = [frame + step * side for step in range(1, 5) for side in (1, -1)]
        yield from (other for other in near if 0 <= other < total)
        keys = self.timeline().keyframe_indices
        yield from (int(key) for key in keys[np.argsort(np.abs(keys - frame), kind="stable")] if abs(key - frame) > 4)

    def _read_from_start(
        self, wanted: Indices, size: Size, found: dict[int, tuple[int, float, Frames]], notes: list[str]
    ) -> None:
        """Streams without usable timestamps: decode from the start and count the frames that come out."""
        timeline = self.timeline()
        width, height = self._decoded_size(size)
        self._reopen()
        context = own_context(self._stream, threads=self._threads, limits=self._limits)
        convert = FrameConverter(width, height, name=self.name, limits=self._limits)
        remaining, last, count = set(wanted.tolist()), None, 0
        result = RunResult()
        for packet in self._demuxer:
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
                    found[count] = count, float(timeline.seconds(count)), convert(frame)
                    result.interlaced |= frame.interlaced_frame
                    self._rotation = round(frame.rotation / 90) % 4 * 90
                count += 1
            if not remaining:
                break
        self._next_packet = None
        self._note_stream(result)
        if last is None:
            raise VideoError(f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again")
        if result.errors:
            notes.append(f"{result.errors} packets could not be decoded; frame numbers count the frames that could")
        for frame in sorted(remaining):
            notes.append(f"frame {frame} could not be decoded; frame {count - 1}, the last one, was used in its place")
            found[frame] = count - 1, float(timeline.seconds(min(count - 1, len(timeline) - 1))), convert(last)

    # --- positioning -----------------------------------------------------------------------------------------------

    def _seek(self, ticks: int) -> bool:
        try:
            self._container.seek(ticks, backward=True, any_frame=False, stream=self._stream)
        except av.error.FFmpegError:
            return False
        self._demuxer = self._container.demux(self._stream)
        self._next_packet = None
        return True

    def _seek_to_keyframe(self, index: ContainerIndex, position: int) -> Any:
        """The packet of a keyframe of the container's index, or None if no seek lands on it."""
        start = int(index.keyframes[position])
        last = position + 1 == len(index.keyframes)
        end = index.total_num_frames if last else int(index.keyframes[position + 1])
        # FFmpeg compares the time asked for with the keyframe's pts, which the index does not hold and which lies a
        # few frames behind its dts. A time a little later in the same group finds it.
        for later in (min(start + 8, end - 1), end - 1):
            if self._seek(int(index.dts[later])):
                packet = next(self._demuxer, None)
                if packet is not None and packet.dts == index.dts[start]:
                    return packet
        return None

    def _packets_of(self, run: Run) -> Iterator[Any]:
        """The packets of a run. Seeks only where reading on would take longer."""
        table = self._packets()
        first = self._goto(run.start)
        remaining = run.packets
        while first is not None and remaining:
            if not table.has_pts:
                first.pts = first.dts
            yield first
            remaining -= 1
            first = self._read_packet() if remaining else None

    def _read_packet(self) -> Any:
        packet = next(self._demuxer, None)
        if packet is None or not packet.size:
            self._next_packet = None
            return None
        if self._next_packet is not None:
            self._next_packet += 1
        return packet

    def _goto(self, number: int) -> Any:
        """The packet with this number in decoding order."""
        if self._next_packet is not None and 0 <= number - self._next_packet <= _READ_ON:
            return self._read_until(number)
        table = self._packets()
        pts, dts = int(table.pts[number]), int(table.dts[number])
        second = int(1 / self._stream.time_base)
        # Where a seek lands too late (streams without an index), step back, and at last begin at the beginning.
        for place in (pts, dts, pts - 2 * second, pts - 10 * second, int(table.dts[0]), int(table.pts[0])):
            if not self._seek(place):
                continue
            packet = next(self._demuxer, None)
            stamp = None if packet is None else packet.pts if table.has_pts else packet.dts
            landed = None if stamp is None else table.number_of(stamp)
            if landed is not None and landed <= number:
                self._next_packet = landed + 1
                return packet if landed == number else self._read_until(number)
        raise VideoError(f"{self.name}: cannot be positioned at {pts * self._stream.time_base} s; convert it to MP4")

    def _read_until(self, number: int) -> Any:
        packet = None
        while self._next_packet is not None and self._next_packet <= number:
            packet = self._read_packet()
        return packet
