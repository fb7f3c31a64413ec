"""Opening a file with PyAV and learning where its frames are: from the container's index, or by demuxing."""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices, Seconds
from sosampler.errors import SosamplerError, VideoError
from sosampler.video.limits import MAX_PACKET_SECONDS, Limits, TimeLimit, check_packet_bytes
from sosampler.video.pyav_versions import discard_others, file_size, index_entries, open_for_reading
from sosampler.video.reader import Timeline
from sosampler.video.remote import RemoteFile
from sosampler.video.source import refuse_text

# FFmpeg's marker for "no timestamp" (AV_NOPTS_VALUE).
NO_TIMESTAMP = -(2**63)
# Flags of index entries: AVINDEX_KEYFRAME, and AVINDEX_DISCARD_FRAME: decoded but not shown, because of an edit list.
KEYFRAME, DISCARDED = 1, 2
# A stream without any clock is played at this rate by FFmpeg's own tools.
NOMINAL_RATE = 25
# Demuxers that open other files or addresses, which a file or its name tells them to.
_OPENS_OTHERS = frozenset(
    {"concat", "concatf", "dash", "dvdvideo", "hls", "image2", "imf", "mlv", "rtp", "rtsp", "sap", "sdp", "vobsub"}
    | {"webm_dash_manifest", "lavfi", "avisynth", "vapoursynth"}
)
FORMATS = ",".join(sorted(av.formats_available - _OPENS_OTHERS))
# Times further apart than this overflow when they are subtracted.
_MAX_TICKS = 1 << 62


def open_container(source: Path | bytes | Any, *, name: str, limits: Limits, time: TimeLimit) -> Any:
    """Open for reading, or say in one sentence why the source is not a video."""
    if isinstance(source, Path):
        file: Any = os.path.abspath(source)
    else:
        file = _TimedFile(io.BytesIO(source) if isinstance(source, bytes) else source, time)
    # max_pixels reaches the decoder that FFmpeg starts to probe the stream. The lists keep a hostile playlist that is
    # named .mp4 from opening other files and addresses.
    options = {
        "max_pixels": str(limits.max_pixels),
        "protocol_whitelist": "file" if isinstance(source, Path) else "data",
        "format_whitelist": FORMATS,
    }
    try:
        time.begin_step(limits.timeout)
        # FFmpeg looks at the clock whenever it reads from a file that it opened itself.
        timeout = limits.timeout, min(limits.timeout, MAX_PACKET_SECONDS)  # to open it, and for each packet
        return open_for_reading(file, options, timeout)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        time.check()  # the file ends when the time is over
        if isinstance(error, av.error.InvalidDataError):
            raise VideoError(f"{name}: {_why_unreadable(source)}") from error
        raise VideoError(f"{name}: cannot be opened as a video ({_reason(error)}); give a video file") from error


class _TimedFile:
    """A file-like object that ends when the time is over or it fails: FFmpeg does not look at the clock here."""

    def __init__(self, file: Any, time: TimeLimit) -> None:
        self._file, self._time = file, time
        self._read = file.read_some if isinstance(file, RemoteFile) else file.read

    def read(self, size: int) -> Any:
        if self._time.is_step_over:
            return b""
        begin = monotonic()
        try:
            return self._read(size)
        except SosamplerError as error:  # of an address
            self._time.fail(error)
            return b""
        finally:
            self._time.extend_step(monotonic() - begin)  # a slow connection is no damaged file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _why_unreadable(source: Any) -> str:
    boxes = _top_level_boxes(source)
    if boxes and boxes[0] == b"ftyp" and b"moov" not in boxes:
        return (
            "an MP4 file without its index (no 'moov' box), as a recording or download that was cut off; "
            "record or download it again, or rebuild the index with a repair tool"
        )
    return "not a video that FFmpeg can read (no known container format); give a video file such as .mp4, .mkv or .webm"


def _top_level_boxes(source: Any) -> list[bytes]:
    """Names of the outermost MP4 boxes, at most 64; empty for what is not MP4."""
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return _boxes_of(file)
    return _boxes_of(io.BytesIO(source) if isinstance(source, bytes) else source)


def _boxes_of(file: Any) -> list[bytes]:
    names: list[bytes] = []
    file.seek(0)
    while len(names) < 64 and len(header := file.read(16)) >= 8:
        size, box = int.from_bytes(header[:4], "big"), header[4:8]
        names.append(box)
        if size == 1:
            size = int.from_bytes(header[8:16], "big")
        if not 8 <= size < 1 << 62:
            break
        file.seek(size - len(header), 1)
    return names


def video_stream(container: Any, *, name: str, limits: Limits) -> Any:
    """The first real video stream; cover images of music files do not count. Other streams are not demuxed."""
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        # A video stream that does not count is the cover of a piece of music.
        kinds = sorted({"cover" if s.type == "video" else s.type for s in container.streams}) or ["nothing"]
        raise VideoError(f"{name}: no video stream (it holds: {', '.join(kinds)}); give a file with a video track")
    stream = streams[0]
    context = stream.codec_context
    if context is None or not context.is_decoder:
        raise VideoError(f"{name}: its video codec is unknown to the bundled FFmpeg; convert it, for example to H.264")
    refuse_text(name, context.name)
    if not stream.time_base:
        raise VideoError(f"{name}: its clock is broken (no time base), so the file is damaged; copy it again")
    limits.check_pixels(name, context.width, context.height)
    if not context.width or not context.height:
        raise VideoError(f"{name}: the image size cannot be found, so the file is damaged or no video; copy it again")
    claimed, size = len(index_entries(stream)), file_size(container)
    if claimed > size > 0:
        raise VideoError(
            f"{name}: its index names {claimed} frames, which {size} bytes cannot hold; the file is damaged, "
            "copy it again"
        )
    discard_others(container, stream)
    return stream


@dataclass(frozen=True)
class Claims:
    """What the headers of a file say about its video."""

    stream: int  # number of the video stream
    file_bytes: int
    num_frames: int  # that its index shows; 0 without one, and too few where a file is fragmented
    is_complete: bool  # whether the index is whole, and the file holds all that it names


def check_for_others(source: Path | bytes | Any, *, name: str, limits: Limits, time: TimeLimit) -> Claims:
    """Check a source that another library will open."""
    if not isinstance(source, (Path, bytes)):
        source.seek(0)
    with open_container(source, name=name, limits=limits, time=time) as container:
        stream = video_stream(container, name=name, limits=limits)
        if stream.frames > container.size > 0:
            raise VideoError(
                f"{name}: its header announces {stream.frames} frames, which {container.size} bytes cannot hold; use "
                "decoder='pyav', which counts those that are there"
            )
        if len(index_entries(stream)) > stream.frames:  # an edit list shows some several times
            check_packet_bytes(name, sum(entry.size for entry in index_entries(stream)), container.size)
        shown = sum(not entry.flags & DISCARDED for entry in index_entries(stream))
        is_complete = container_index(container, stream, name=name, limits=limits) is not None
        return Claims(stream.index, container.size, shown, is_complete)


@dataclass(frozen=True, eq=False)
class PacketTable:
    """All packets of a video stream in decoding order, and what follows from them."""

    pts: Indices  # [P] ticks; made from dts or from the packet's number where the stream has no pts
    dts: Indices  # [P] ticks
    is_key: NDArray[np.bool_]  # [P]
    timeline: Timeline  # [F] frames that are shown, in presentation order
    packet_of_frame: Indices  # [F] -> position in decoding order
    has_pts: bool  # False: packets get their pts from this table before they are decoded
    seekable: bool  # False: packets cannot be told apart by time, so only a run from the start is exact
    notes: tuple[str, ...]

    @cached_property
    def reorder_depth(self) -> int:
        """How many frames the decoder must hold back to put them into presentation order."""
        rank = np.empty_like(self._packets_by_pts)
        rank[self._packets_by_pts] = np.arange(len(rank))
        return int(max(0, np.max(np.arange(len(rank)) - rank)))

    def start_of(self, packet: int) -> int:
        """Decoding must begin at this packet to get that one: the last keyframe sent and shown no later.

        A frame that is sent after a keyframe but shown before it (open group of pictures) needs the group before.
        """
        position = int(np.searchsorted(self.key_packets, packet, side="right")) - 1
        while position >= 0 and self.pts[self.key_packets[position]] > self.pts[packet]:
            position -= 1
        return int(self.key_packets[position]) if position >= 0 else 0

    @cached_property
    def key_packets(self) -> Indices:
        return np.flatnonzero(self.is_key)

    @cached_property
    def _packets_by_pts(self) -> Indices:
        return np.argsort(self.pts, kind="stable")

    def number_of(self, pts: int) -> int | None:
        """The packet with this pts."""
        order = self._packets_by_pts
        position = int(np.searchsorted(self.pts, pts, sorter=order))
        return int(order[position]) if position < len(order) and self.pts[order[position]] == pts else None


def scan_packets(
    packets: Iterable[Any], stream: Any, *, name: str, limits: Limits, file_bytes: int | None
) -> PacketTable:
    """Read the header of every packet from the start on. No image is decoded."""
    pts, dts = array("q"), array("q")
    is_key, is_discard = bytearray(), bytearray()
    notes: list[str] = []
    last_pts, last_duration, num_bytes = NO_TIMESTAMP, 0, 0
    try:
        for packet in packets:
            if not packet.size:
                continue  # the empty packet that ends the stream
            num_bytes += packet.size
            pts.append(NO_TIMESTAMP if packet.pts is None else packet.pts)
            dts.append(NO_TIMESTAMP if packet.dts is None else packet.dts)
            is_key.append(packet.is_keyframe)
            is_discard.append(packet.is_discard)
            if pts[-1] >= last_pts:
                last_pts, last_duration = pts[-1], packet.duration or 0
            limits.check_frames(name, len(pts))
            if num_bytes > (file_bytes or 0):  # an edit list shows some several times
                check_packet_bytes(name, num_bytes, file_bytes or 0)
    except av.error.FFmpegError as error:
        is_late = isinstance(error, av.error.ExitError)
        late = f"no other is found within MAX_PACKET_SECONDS={MAX_PACKET_SECONDS:g} of sosampler.video.limits"
        why = late if is_late else _reason(error)
        notes.append(f"reading stopped after {len(pts)} frames ({why}); what lies behind is not used")
    shown = ~np.frombuffer(bytes(is_discard), dtype=np.bool_)
    if not shown.any():
        raise VideoError(f"{name}: the video stream holds no frame; the file is damaged or was cut off, copy it again")
    if not notes and 0 < len(pts) < stream.frames:
        announced = f"the {stream.frames} frames that its header announces"
        is_claim = file_bytes is not None and stream.frames > file_bytes
        notes.append(
            f"the file's bytes cannot hold {announced}: {len(pts)} are there"
            if is_claim
            else f"the file is cut off: {len(pts)} of {announced} are there"
        )
    table = _to_table(
        np.frombuffer(pts, dtype=np.int64),
        np.frombuffer(dts, dtype=np.int64),
        np.frombuffer(bytes(is_key), dtype=np.bool_),
        shown,
        stream,
        last_duration,
        notes,
    )
    limits.check_duration(name, table.timeline.duration)
    return table


def _to_table(
    pts: Indices,
    dts: Indices,
    is_key: NDArray[np.bool_],
    shown: NDArray[np.bool_],
    stream: Any,
    last_duration: int,
    notes: list[str],
) -> PacketTable:
    time_base = stream.time_base or Fraction(1, NOMINAL_RATE)
    has_pts, seekable = _usable(pts[shown]), True
    if not has_pts and _usable(dts[shown]) and not stream.codec_context.has_b_frames:
        pts = dts  # without reordering the two are the same
    elif not has_pts:
        rate = Fraction(stream.average_rate or stream.guessed_rate or NOMINAL_RATE)
        time_base, last_duration, seekable = 1 / rate, 1, False
        pts = np.arange(len(pts), dtype=np.int64)
        notes.append(
            f"the stream has no usable timestamps; times are frame number / nominal rate ({float(rate):g} fps)"
        )
    packets = np.flatnonzero(shown)
    packet_of_frame = packets[np.argsort(pts[packets], kind="stable")]
    ordered = pts[packet_of_frame]
    if not last_duration:
        # Some containers (webm, raw streams) give packets no duration: the last frame lasts as long as a typical one.
        last_duration = int(np.median(np.diff(ordered))) if len(ordered) > 1 else _one_frame(stream, time_base)
    timeline = Timeline(ordered, time_base, is_key[packet_of_frame], int(ordered[-1]) + last_duration)
    return PacketTable(pts, dts, is_key, timeline, packet_of_frame, has_pts, seekable, tuple(notes))


def _usable(times: Indices) -> bool:
    # Not np.unique, which imports numpy.ma: 30 ms of a new process.
    if (times == NO_TIMESTAMP).any() or (np.diff(np.sort(times)) == 0).any():
        return False
    return int(times.max()) - int(times.min()) < _MAX_TICKS


def _one_frame(stream: Any, time_base: Fraction) -> int:
    rate = stream.average_rate or stream.guessed_rate or NOMINAL_RATE
    return max(1, round(1 / (rate * time_base)))


@dataclass(frozen=True, eq=False)
class ContainerIndex:
    """Keyframes as an MP4 index lists them, without reading the file's packets.

    Its times are decoding times; a keyframe's pts is known when its packet is read.
    """

    total_num_frames: int
    dts: Indices  # [F] ticks of the shown frames, in decoding order
    keyframes: Indices  # [K] positions among the shown frames, in decoding order
    time_base: Fraction

    @property
    def duration(self) -> float:
        last = int(self.dts[-1] - self.dts[-2]) if len(self.dts) > 1 else 0
        return float((int(self.dts[-1] - self.dts[0]) + last) * self.time_base)

    def seconds(self, positions: Indices) -> Seconds:
        return self.dts[positions].astype(np.float64) * self.time_base.numerator / self.time_base.denominator


def container_index(container: Any, stream: Any, *, name: str, limits: Limits) -> ContainerIndex | None:
    """The index of an MP4 or MOV file if it is complete, else None, and a scan is needed."""
    entries = index_entries(stream)
    count = len(entries)
    # A fragmented file announces no frames up front and indexes only the fragments seen so far.
    if "mp4" not in container.format.name.split(",") or count < 2 or stream.frames != count:
        return None
    limits.check_frames(name, count)
    last = entries[count - 1]
    if last.pos + last.size > container.size:
        return None  # cut off
    flags, dts = np.array([(entry.flags, entry.timestamp) for entry in entries], dtype=np.int64).T
    shown, keys = (flags & DISCARDED) == 0, (flags & KEYFRAME) != 0
    if not (keys & shown).any() or int(dts.max()) - int(dts.min()) >= _MAX_TICKS or (np.diff(dts) <= 0).any():
        return None
    shown_position = np.cumsum(shown) - 1
    index = ContainerIndex(int(shown.sum()), dts[shown], shown_position[keys & shown], stream.time_base)
    limits.check_duration(name, index.duration)
    return index
