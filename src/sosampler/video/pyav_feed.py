"""Packets of an open file from wherever they are wanted: seek where that is shorter, read on where not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av

from sosampler.errors import VideoError
from sosampler.video.pyav_index import ContainerIndex, PacketTable

# Reading this many packets costs less than a seek.
_READ_ON = 16


class PacketFeed:
    """The reading position of one container."""

    def __init__(self, container: Any, stream: Any, *, name: str) -> None:
        self._container, self._stream, self._name = container, stream, name
        self._packets: Iterator[Any] = self._demux()
        self._next: int | None = 0  # number, in decoding order, of the packet that comes next; None where unknown

    def close(self) -> None:
        """Let go of the generator, which holds this object: a cycle would keep frames in memory until collected."""
        self._packets = iter(())

    @property
    def at_start(self) -> bool:
        return self._next == 0

    def rest(self) -> Iterator[Any]:
        """What follows the present position; the last packet is empty."""
        self._next = None
        return self._packets

    def _seek(self, ticks: int) -> bool:
        try:
            self._container.seek(ticks, backward=True, any_frame=False, stream=self._stream)
        except av.error.FFmpegError:
            return False
        self._packets = self._demux()
        self._next = None
        return True

    def _demux(self) -> Iterator[Any]:
        while True:
            try:
                yield from self._container.demux(self._stream)
                return
            except IndexError:
                # PyAV stumbles over packets of a stream that appears after the file was opened, as in broadcasts.
                # Asked anew, it goes on behind that packet.
                continue

    def keyframe(self, index: ContainerIndex, position: int) -> Any:
        """The packet of a keyframe of the container's index, or None if no seek lands on it."""
        start = int(index.keyframes[position])
        # FFmpeg compares the time asked for with the keyframe's pts, which the index does not hold and which lies a
        # few frames behind its dts. A time a little later in the same group finds it; behind the last group, any.
        if position + 1 == len(index.keyframes):
            places = [int(index.dts[-1]) + int(1 / index.time_base)]
        else:
            end = int(index.keyframes[position + 1])
            places = [int(index.dts[min(start + 8, end - 1)]), int(index.dts[end]) - 1]
        for place in places:
            if self._seek(place):
                packet = next(self._packets, None)
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
        pts, dts = int(table.pts[number]), int(table.dts[number])
        second = int(1 / self._stream.time_base)
        # Where a seek lands too late (streams without an index), step back, and at last begin at the beginning.
        for place in (pts, dts, pts - 2 * second, pts - 10 * second, int(table.dts[0]), int(table.pts[0])):
            if not self._seek(place):
                continue
            packet = next(self._packets, None)
            stamp = None if packet is None else packet.pts if table.has_pts else packet.dts
            landed = None if stamp is None else table.number_of(stamp)
            if landed is not None and landed <= number:
                self._next = landed + 1
                return packet if landed == number else self._read_until(number)
        seconds = float(pts * self._stream.time_base)
        raise VideoError(f"{self._name}: cannot be positioned at {seconds:.3f} s; convert it, for example to MP4")

    def _read_until(self, number: int) -> Any:
        packet = None
        while self._next is not None and self._next <= number:
            packet = self._read()
        return packet

    def _read(self) -> Any:
        packet = next(self._packets, None)
        if packet is None or not packet.size:
            self._next = None
            return None
        if self._next is not None:
            self._next += 1
        return packet
