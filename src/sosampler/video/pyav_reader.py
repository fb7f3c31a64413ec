"""The default reader: PyAV, which brings its own FFmpeg."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.errors import VideoError
from sosampler.video.limits import Limits, Size, TimeLimit, check_size, target_size
from sosampler.video.pyav_decode import (
    FrameConverter,
    PacketFeed,
    Picture,
    Room,
    Run,
    RunDecoder,
    RunResult,
    decode_runs,
    is_copyable,
    most_threads,
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
from sosampler.video.pyav_versions import file_size
from sosampler.video.reader import FrameBatch, FrameView, Timeline, VideoMetadata
from sosampler.video.remote import RemoteFile

# Packets that may be decoded to find frames in the place of damaged ones: twice what the reading itself takes, and at
# least this many. Beyond it the nearest sound frame of the reading serves.
_MIN_SUBSTITUTE_PACKETS = 1000
# Frames before and behind a damaged one that are tried before keyframes.
_NEAR = 4


class PyavReader:
    """Frames of one file, bytes or file-like object.

    A frame is reached by sending the packets from its keyframe up to itself and draining the decoder. For a keyframe
    that is one packet. Frames on the way that no other frame refers to are not decoded at all.
    """

    decoder = "pyav"

    def __init__(self, source: Path | bytes | Any, *, name: str, threads: int, limits: Limits) -> None:
        self.name = name
        self.notes: list[str] = []
        self._source, self._limits = source, limits
        self._time = TimeLimit(name, limits)
        with self._time:
            self._feed = PacketFeed(self._open, time=self._time)
            try:
                self._index = container_index(self._feed.container, self._stream, name=name, limits=limits)
            except VideoError:
                self.close()
                raise
        self.file_bytes: int | None = file_size(self._feed.container) or None
        context = self._stream.codec_context
        self._threads = most_threads(threads, context.width, context.height)
        self._table: PacketTable | None = None
        self._located: dict[int, _Located] = {}  # by frame number
        self._rotation: int | None = None  # degrees counter-clockwise; known when a frame has been decoded

    def _open(self) -> tuple[Any, Any]:
        if not isinstance(self._source, (Path, bytes)):
            self._source.seek(0)
        container = open_container(self._source, name=self.name, limits=self._limits, time=self._time)
        try:
            return container, video_stream(container, name=self.name, limits=self._limits)
        except VideoError:
            container.close()
            raise

    @property
    def _stream(self) -> Any:
        return self._feed.stream

    def close(self) -> None:
        self._feed.close()
        if isinstance(self._source, RemoteFile):
            self._source.close()

    @property
    def transfer(self) -> dict[str, Any] | None:
        return self._source.transfer if isinstance(self._source, RemoteFile) else None

    # --- what is there ---------------------------------------------------------------------------------------------

    def _packets(self) -> PacketTable:
        if self._table is None:
            self._feed.rewind()
            self._table = scan_packets(
                self._feed.rest(), self._stream, name=self.name, limits=self._limits, file_bytes=self.file_bytes
            )
            self.notes.extend(self._table.notes)
        return self._table

    def timeline(self) -> Timeline:
        with self._time:
            return self._packets().timeline

    @property
    def _unseen(self) -> ContainerIndex | None:
        """The container's index, whose numbers count until the packets have been seen."""
        return self._index if self._table is None else None

    @property
    def total_num_frames(self) -> int:
        return self._unseen.total_num_frames if self._unseen else len(self.timeline())

    def keyframe_indices(self) -> Indices:
        return self._unseen.keyframes if self._unseen else self.timeline().keyframe_indices

    def seconds_apart(self, frame_indices: Indices, others: Indices) -> Seconds:
        seconds = self._unseen.seconds if self._unseen else self.timeline().seconds
        return seconds(np.asarray(others)) - seconds(np.asarray(frame_indices))

    def locate_keyframes(self, positions: Indices, behind: Seconds | None = None) -> tuple[Indices, Seconds]:
        behind = np.zeros(len(positions)) if behind is None else behind
        if index := self._unseen:
            with self._time:
                pairs = zip(positions.tolist(), behind.tolist(), strict=True)
                located = [self._locate(index, position, seconds) for position, seconds in pairs]
            if all(item is not None for item in located):
                frame_indices = np.array([item[0] for item in located if item], dtype=np.int64)
                pts = np.array([item[1] for item in located if item], dtype=np.float64)
                base = index.time_base
                return frame_indices, pts * base.numerator / base.denominator
            # The index does not fit the packets: the keyframes nearest to those it names.
            there = self.timeline().keyframe_indices
            if not len(there):
                raise VideoError(f"{self.name}: none of the keyframes in its index can be read; make the file again")
            named = index.keyframes[positions]
            positions = np.abs(there[None, :] - named[:, None]).argmin(1)
        frame_indices = self.timeline().behind_keyframes(positions, behind)
        return frame_indices, self.timeline().seconds(frame_indices)

    def _locate(self, index: ContainerIndex, position: int, behind: float) -> tuple[int, int] | None:
        """True frame number and pts of the frame so many seconds behind a keyframe, in its group, from its packets."""
        packet = self._feed.keyframe(index, position)
        if packet is None or packet.pts is None:
            return None
        frame, key_pts = int(index.keyframes[position]), int(packet.pts)
        latest = key_pts + int(behind / index.time_base + 0.5)
        sent: list[int] = [key_pts]  # pts of the group, in decoding order
        for later in self._feed.readable_rest():
            if later.pts is None:
                break
            if later.pts <= key_pts:
                if behind:
                    return None  # the index numbers frames as they are sent, which is not as they are shown
                frame += not later.is_discard  # a leading frame of an open group of pictures
                continue
            # Behind this packet nothing comes that is shown in time.
            if later.is_keyframe or later.is_discard or later.dts is None or later.dts > latest or latest == key_pts:
                break
            sent.append(int(later.pts))
        pts = max(each for each in sent if each <= latest)
        frame += sum(key_pts < each <= pts for each in sent)
        sent = sent[: sent.index(pts) + 1]
        depth = int((np.arange(len(sent)) - np.argsort(np.argsort(sent))).max())
        self._located[frame] = _Located(position, pts, len(sent), depth)
        return frame, pts

    @property
    def metadata(self) -> VideoMetadata:
        rotation = self._known_rotation()
        context, total = self._stream.codec_context, self.total_num_frames
        if self._unseen:
            duration, start = self._unseen.duration, float((self._stream.start_time or 0) * self._unseen.time_base)
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
        return self._read(frame_indices, check_size(size))[0]

    def view(self, frame_indices: Indices, *, size: Size, max_bytes: int) -> FrameView:
        batch, decoded = self._read(frame_indices, check_size(size), Room(max_bytes))
        return _PyavView(self, batch, np.asarray(frame_indices, dtype=np.int64), decoded)

    def _read(self, frame_indices: Indices, size: Size, room: Room | None = None) -> tuple[FrameBatch, list[Any]]:
        """Decode frames; also return each as an av.VideoFrame where there was room, else None."""
        requested = np.asarray(frame_indices, dtype=np.int64)
        with self._time:
            width, height = self._decoded_size(size)
            self._limits.check_bytes(self.name, len(requested), width, height, self.file_bytes)
            wanted, row_of_request = np.unique(requested, return_inverse=True)
            self._check_range(wanted)
            got = _Gathered(wanted, width, height)
            if self._table is None and all(frame in self._located for frame in got.missing):
                self._read_located(got, size, room)
            if got.missing:
                seekable, last = self._packets().seekable, len(self.timeline()) - 1
                if wanted[-1] > last:  # which the index claims, and which are not there
                    self.notes.append(f"frames behind {last} are not there; that one was used in their place")
                    return self._read(np.minimum(requested, last), size, room)
                if seekable:
                    self._read_runs(got, size, room)
                else:
                    self._read_from_start(got, size, room)
        frames = self._upright(got.images)
        if not np.array_equal(row_of_request, np.arange(len(wanted))):
            frames = frames[row_of_request]
        batch = FrameBatch(frames, got.frames[row_of_request], got.seconds[row_of_request], tuple(got.notes))
        return batch, [got.decoded[row] for row in row_of_request]

    def convert(self, decoded: list[Any], size: Size) -> Frames:
        """Return [N, H, W, 3] RGB of frames that were decoded before (av.VideoFrame)."""
        with self._time:
            width, height = self._decoded_size(size)
            self._limits.check_bytes(self.name, len(decoded), width, height, self.file_bytes)
            converter = self._converter(size)
            images: Frames = np.empty((len(decoded), height, width, 3), dtype=np.uint8)
            for row, frame in enumerate(decoded):
                images[row] = converter.pixels(frame)
                self._time.check()
        return self._upright(images)

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

    def _claimed_keys(self, table: PacketTable) -> frozenset[int]:
        """Times of the keyframes in the container's index. A damaged packet may not look like the one that it was."""
        if self._index is None or self._index.total_num_frames != len(table.timeline):
            return frozenset()
        shown = np.sort(table.packet_of_frame)  # in decoding order
        return frozenset(table.pts[shown[self._index.keyframes]].tolist())

    def _converter(self, size: Size, room: Room | None = None) -> FrameConverter:
        width, height = self._decoded_size(size)
        return FrameConverter(width, height, name=self.name, limits=self._limits, room=room)

    def _make_decoder(
        self, size: Size, room: Room | None, reorder_depth: int, unskipped: frozenset[int] = frozenset()
    ) -> Any:
        """A maker of decoders for one reading."""

        def make(threads: int) -> RunDecoder:
            # Only the container's own context knows the rotation. But a seek flushes that context, and the main thread
            # seeks while others decode, so it never leaves this thread.
            is_own = self._rotation is None or not is_copyable(self._stream)
            return RunDecoder(
                own_context(self._stream, limits=self._limits)
                if is_own
                else new_context(self._stream, threads=threads, limits=self._limits),
                self._converter(size, room),
                reorder_depth=reorder_depth,
                unskipped=unskipped,
                knows_rotation=is_own,
                time=self._time,
            )

        return make

    def _decode(self, runs: list[Run], packets_of: Any, make: Any) -> Iterator[RunResult]:
        """Results in the order of the runs; in threads where there are several runs and the codec allows it."""
        threads = self._threads if is_copyable(self._stream) else 1
        if threads > 1 and (len(runs) > 1 or runs[0].packets > 1):
            self._known_rotation()  # so that contexts for threads can be made
        pooled = threads > 1 and suits_threads(runs)
        for result in decode_runs(runs, packets_of, make, threads=threads, pooled=pooled):
            self._note_stream(result)
            yield result

    def _known_rotation(self) -> int:
        if self._rotation is None:
            positions = np.zeros(1, dtype=np.int64)
            context = self._stream.codec_context
            threads, self._threads = self._threads, 1  # the context that knows it decodes in this thread
            try:
                frames = self.locate_keyframes(positions)[0] if len(self.keyframe_indices()) else positions
                self.read(frames, size=min(16, context.width, context.height))
            finally:
                self._threads = threads
        return self._rotation or 0

    def _note_stream(self, result: RunResult) -> None:
        if result.rotation is not None:
            self._rotation = result.rotation
        text = "the video is interlaced; both fields are shown woven into one frame, as stored"
        if result.interlaced and text not in self.notes:
            self.notes.append(text)

    def _read_located(self, got: _Gathered, size: Size, room: Room | None) -> None:
        """Keyframes known from the container's index, and frames a little behind them: no scan, few packets each."""
        assert self._index is not None
        index, base = self._index, self._index.time_base
        located = {frame: self._located[frame] for frame in got.missing}
        runs = [Run(start=it.position, packets=it.packets, wanted=frozenset({it.pts})) for it in located.values()]

        def packets_of(run: Run) -> Iterator[Any]:
            key = self._feed.keyframe(index, run.start)
            if key is None:
                return
            yield key
            yield from islice(self._feed.readable_rest(), run.packets - 1)

        make = self._make_decoder(size, room, max(it.reorder_depth for it in located.values()))
        for (frame, it), result in zip(located.items(), self._decode(runs, packets_of, make), strict=True):
            if it.pts in result.frames and not result.failed:
                got.put(frame, result.frames.pop(it.pts), it.pts * base.numerator / base.denominator)

    def _read_runs(self, got: _Gathered, size: Size, room: Room | None) -> None:
        table, timeline = self._packets(), self.timeline()
        groups: dict[int, list[int]] = {}  # first packet -> frames, both ascending
        for frame in got.missing:
            groups.setdefault(self._start_of(frame), []).append(frame)
        starts = sorted(groups)
        runs = [self._run(start, groups[start]) for start in starts]
        make = self._make_decoder(size, room, table.reorder_depth, self._claimed_keys(table))
        damaged: dict[int, Picture | None] = {}  # lost frames -> what came out of the decoder, in the result's memory
        sound: dict[int, Picture] = {}
        for start, result in zip(starts, self._decode(runs, self._packets_of, make), strict=True):
            for frame in groups[start]:
                pts = int(timeline.pts[frame])
                if result.is_lost(pts):
                    image = (result.damaged | result.frames).get(pts)
                    damaged[frame] = None if image is None else got.hold(frame, image)
                    continue
                image = got.put(frame, result.frames.pop(pts), float(timeline.seconds(frame)))
                if result.is_suspect(pts):
                    got.notes.append(f"frame {frame} follows damaged data and may look impaired")
                else:
                    sound[frame] = image
        if damaged:
            budget = max(2 * sum(run.packets for run in runs), _MIN_SUBSTITUTE_PACKETS)
            stand_ins = _StandIns(self, make(1), sound, budget)
            for frame, as_decoded in damaged.items():
                self._substitute(frame, as_decoded, stand_ins, got)

    def _packets_of(self, run: Run) -> Iterator[Any]:
        return self._feed.run(self._packets(), run.start, run.packets)

    def _start_of(self, frame: int) -> int:
        table = self._packets()
        return table.start_of(int(table.packet_of_frame[frame]))

    def _run(self, start: int, frames: list[int]) -> Run:
        table = self._packets()
        last = int(table.packet_of_frame[frames].max())
        wanted = frozenset(int(pts) for pts in table.timeline.pts[frames])
        return Run(start=start, packets=last - start + 1, wanted=wanted)

    def _substitute(self, frame: int, damaged: Picture | None, stand_ins: _StandIns, got: _Gathered) -> None:
        """A frame that does not decode is replaced by the nearest one that does, and the notes say so."""
        at = float(self.timeline().seconds(frame))
        if frame in stand_ins or (damaged is None and stand_ins.decodes_from_earlier(frame)):
            stand_ins.put(got, frame, frame)
            return
        other = stand_ins.nearest(frame)
        if other is not None:
            got.notes.append(f"frame {frame} ({at:.3f} s) is damaged; frame {other} was used in its place")
            stand_ins.put(got, frame, other)
            return
        if damaged is None:
            raise VideoError(f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again")
        got.notes.append(f"frame {frame} is damaged and nothing near it is better; it is given as it decodes")
        got.put(frame, damaged, at)

    def _read_from_start(self, got: _Gathered, size: Size, room: Room | None) -> None:
        """Streams without usable timestamps: decode from the start and count the frames that come out."""
        timeline, convert = self.timeline(), self._converter(size, room)
        self._feed.rewind()
        context = own_context(self._stream, limits=self._limits)
        result, count, errors, is_impaired = RunResult(), 0, 0, False
        waiting: dict[int, Picture] = {}  # damaged frames, for which the next sound one may stand in
        sound: tuple[int, Any] | None = None  # the last one: number, av.VideoFrame

        def put_waiting(after: tuple[int, Any] | None) -> None:
            for number, image in waiting.items():
                options = [option for option in (sound, after) if option is not None]
                if options:
                    used, frame = min(options, key=lambda option: abs(option[0] - number))
                    got.notes.append(f"frame {number} is damaged; frame {used} was used in its place")
                    got.put(number, convert(frame), float(timeline.seconds(used)), used=used)
                else:
                    got.notes.append(f"frame {number} is damaged and no frame is better; it is given as it decodes")
                    got.put(number, image, float(timeline.seconds(number)))
            waiting.clear()

        for packet in self._feed.readable_rest():
            try:
                frames = context.decode(packet if packet.size else None)
            except av.error.EOFError:
                break
            except av.error.FFmpegError:
                errors, is_impaired = errors + 1, True
                continue
            for frame in frames:
                is_impaired = frame.is_corrupt or (is_impaired and not frame.key_frame)
                if not is_impaired:
                    put_waiting((count, frame))
                    sound = count, frame
                if count in got.missing and count not in waiting:
                    image = convert(frame)
                    if frame.is_corrupt:
                        waiting[count] = image
                    else:
                        got.put(count, image, float(timeline.seconds(count)))
                        if is_impaired:
                            got.notes.append(f"frame {count} follows damaged data and may look impaired")
                    result.interlaced |= frame.interlaced_frame
                    result.rotation = rotation_of(frame)
                count += 1
                if count == len(timeline):
                    break  # more come out than were counted
            if not got.missing or count == len(timeline):
                break
        put_waiting(None)
        self._note_stream(result)
        if errors:
            got.notes.append(f"{errors} packets could not be decoded; frame numbers count the frames that could")
        for number in list(got.missing):
            if sound is None:
                raise VideoError(
                    f"{self.name}: no frame could be decoded; the file is damaged or encrypted, copy it again"
                )
            used, frame = sound
            got.notes.append(f"frame {number} could not be decoded; frame {used}, the last one, was used in its place")
            got.put(number, convert(frame), float(timeline.seconds(used)), used=used)


@dataclass(frozen=True)
class _Located:
    """A frame that was found through the container's index."""

    position: int  # of its keyframe in the index
    pts: int
    packets: int  # of its group, up to its own
    reorder_depth: int  # within these


class _PyavView:
    """Frames in a small size, and what they were made from."""

    def __init__(self, reader: PyavReader, batch: FrameBatch, requested: Indices, decoded: list[Any]) -> None:
        self.batch = batch
        self._reader, self._row_of = reader, {frame: row for row, frame in enumerate(requested.tolist())}
        self._decoded = decoded

    def read(self, frame_indices: Indices, *, size: Size = None) -> FrameBatch:
        rows = [self._row_of[frame] for frame in frame_indices.tolist()]
        if any(self._decoded[row] is None for row in rows):
            return self._reader.read(frame_indices, size=size)
        return FrameBatch(
            self._reader.convert([self._decoded[row] for row in rows], size),
            self.batch.frame_indices[rows],
            self.batch.pts_seconds[rows],
        )


class _StandIns:
    """Sound frames in the place of those that do not decode, found within a number of packets."""

    def __init__(self, reader: PyavReader, decode: RunDecoder, sound: dict[int, Picture], budget: int) -> None:
        self._reader, self._decode, self._budget = reader, decode, budget
        self._timeline, self._table = reader.timeline(), reader._packets()
        self._keyframes = self._timeline.keyframe_indices
        self._images = sound  # frame -> image
        self._sound = sorted(sound)
        self._tried = set(sound)
        self._spare: list[int] = []  # frames that were found and are not in the result, in memory of their own

    def __contains__(self, frame: int) -> bool:
        return frame in self._images

    def put(self, got: _Gathered, frame: int, other: int) -> None:
        """Give the image of a sound frame for a wanted one."""
        used = None if other == frame else other
        self._images[other] = got.put(frame, self._images[other], float(self._timeline.seconds(other)), used=used)
        if other in self._spare:
            self._spare.remove(other)

    def decodes_from_earlier(self, frame: int) -> bool:
        """Some streams need more than one keyframe's run-up before an image comes out: begin one group earlier."""
        start, keys = self._reader._start_of(frame), self._table.key_packets
        before = keys[keys < start]
        if start and self._budget > 0:
            self._attempt(int(before[-1]) if len(before) else 0, [frame])
        return frame in self

    def nearest(self, frame: int) -> int | None:
        """The nearest sound frame in time, before or behind; None where there is none."""
        if len(self._spare) > 2 * _NEAR:
            self._forget_spare()
        for other in self._neighbours(frame):
            known = self._nearest_known(frame)
            is_nearer = known is not None and self._distance(frame, known) <= self._distance(frame, other)
            if is_nearer or self._budget <= 0:
                break
            if other not in self._tried:
                near = [each for each in range(frame - _NEAR, frame + _NEAR + 1) if 0 <= each < len(self._timeline)]
                start = self._reader._start_of(other)
                together = [each for each in near if each != frame and self._reader._start_of(each) == start]
                self._attempt(start, together if other in together else [other])
        return self._nearest_known(frame)

    def _attempt(self, start: int, frames: list[int]) -> None:
        """Decode these frames from packet `start` on, and keep the sound ones."""
        run = self._reader._run(start, frames)
        self._budget -= run.packets
        self._tried.update(frames)
        result = self._decode(self._reader._packets_of(run), run.wanted, skip_others=False)
        self._reader._note_stream(result)
        for frame in frames:
            image = result.sound(int(self._timeline.pts[frame]))
            if image is not None and frame not in self._images:
                self._images[frame] = image
                self._spare.append(frame)
                insort(self._sound, frame)

    def _forget_spare(self) -> None:
        for frame in self._spare:
            del self._images[frame]
            self._sound.remove(frame)
        self._tried.difference_update(self._spare)
        self._spare.clear()

    def _neighbours(self, frame: int) -> Iterator[int]:
        """Frames to try, by distance: some on either side, the last one of the group before, and the keyframes."""
        near = [frame + step for step in range(-_NEAR, _NEAR + 1) if step and 0 <= frame + step < len(self._timeline)]
        place = int(np.searchsorted(self._keyframes, frame, side="right"))
        before, behind = self._keyframes[:place][::-1], self._keyframes[place:]
        if place and before[0]:
            near.append(int(before[0]) - 1)
        distance = partial(self._distance, frame)
        others = merge(sorted(near, key=distance), map(int, before), map(int, behind), key=distance)
        return (other for other in others if other != frame)

    def _nearest_known(self, frame: int) -> int | None:
        place = bisect(self._sound, frame)
        return min(self._sound[max(place - 1, 0) : place + 1], key=partial(self._distance, frame), default=None)

    def _distance(self, frame: int, other: int) -> tuple[int, int]:
        """Ticks between them; of two at the same distance the earlier one comes first."""
        return abs(int(self._timeline.pts[other]) - int(self._timeline.pts[frame])), other


class _Gathered:
    """Frames on their way to the caller, each written once into the array that is returned."""

    def __init__(self, wanted: Indices, width: int, height: int) -> None:
        self._row = {frame: row for row, frame in enumerate(wanted.tolist())}
        self.missing: dict[int, None] = dict.fromkeys(self._row)  # ascending, as `wanted`
        self.images: Frames = np.empty((len(wanted), height, width, 3), dtype=np.uint8)  # not yet upright
        self.decoded: list[Any] = [None] * len(wanted)  # av.VideoFrame, where they are kept
        self.frames = wanted.copy()
        self.seconds: Seconds = np.zeros(len(wanted))
        self.notes: list[str] = []

    def put(self, frame: int, image: Picture, seconds: float, *, used: int | None = None) -> Picture:
        """The image for a wanted frame; `used` is the number of another frame that stands in for it. Returns it."""
        row = self._row[frame]
        self.seconds[row], self.frames[row] = seconds, frame if used is None else used
        del self.missing[frame]
        return self.hold(frame, image)

    def hold(self, frame: int, image: Picture) -> Picture:
        """Keep the image of a frame that is still missing. Returns it."""
        row = self._row[frame]
        self.images[row], self.decoded[row] = image.pixels, image.decoded
        return Picture(self.images[row], image.decoded)
