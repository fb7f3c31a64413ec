"""Small servers that send a stream: bytes over TCP or HTTP, and H.264 over RTSP."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction

import av

from sosampler.video.synthetic import numbered_frame

Serve = Callable[[socket.socket], None]


@contextmanager
def serving(*serve: Serve) -> Iterator[int]:
    """Yield the port of a server whose first connection is served by the first function, and so on; then it is closed.

    A connection is closed when its function returns.
    """
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            for each in serve:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                if stopped.is_set():
                    return
                with connection:
                    connection.settimeout(10)
                    try:
                        each(connection)
                    except OSError:  # the client has gone
                        continue
            server.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        try:
            yield port
        finally:
            stopped.set()
            with suppress(OSError):  # wakes `accept`
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            thread.join(10)


def sending(data: bytes, *, stall: threading.Event | None = None) -> Serve:
    """Send bytes; with `stall` keep the connection open, silent, until it is set."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(data)
        if stall is not None:
            stall.wait(10)

    return serve


def answering(
    body: bytes, *headers: str, status: str = "200 OK", length: int | None = None, requests: list[str] | None = None
) -> Serve:
    """Answer an HTTP request; `length` is the one that is claimed, `requests` collects what was asked."""

    def serve(connection: socket.socket) -> None:
        request = _request(connection)
        if requests is not None:
            requests.append(request)
        claimed = [] if length is None else [f"Content-Length: {length}"]
        head = "\r\n".join([f"HTTP/1.1 {status}", *headers, *claimed, "Connection: close", "", ""])
        connection.sendall(head.encode() + body)

    return serve


def _request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(4096)
        if not part:
            raise ConnectionError
        data += part
    return data.decode()


def rtsp(num_frames: int, *, fps: int = 30, requests: list[str] | None = None) -> Serve:
    """Send numbered frames as H.264 over RTSP, inside of its TCP connection."""
    sdp = (
        "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=-\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\n"
        "a=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\na=control:track1\r\n"
    )

    def serve(connection: socket.socket) -> None:
        while True:
            request = _request(connection)
            if requests is not None:
                requests.append(request)
            method, number = request.split(" ", 1)[0], re.search(r"CSeq: (\d+)", request)
            assert number is not None
            headers, body = [f"CSeq: {number[1]}"], ""
            if method == "OPTIONS":
                headers.append("Public: DESCRIBE, SETUP, PLAY, TEARDOWN")
            elif method == "DESCRIBE":
                headers += ["Content-Type: application/sdp", f"Content-Length: {len(sdp)}"]
                body = sdp
            else:
                headers += ["Session: 1", "Transport: RTP/AVP/TCP;unicast;interleaved=0-1"]
            connection.sendall("\r\n".join(["RTSP/1.0 200 OK", *headers, "", ""]).encode() + body.encode())
            if method == "PLAY":
                break
        sequence = 0
        for tick, units in _h264(num_frames, fps):
            for unit in units:
                marker = 0x80 if unit is units[-1] else 0
                packet = struct.pack(">BBHII", 0x80, marker | 96, sequence, tick * 90000 // fps, 1) + unit
                connection.sendall(b"$" + struct.pack(">BH", 0, len(packet)) + packet)
                sequence += 1

    return serve


def _h264(num_frames: int, fps: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number of each frame and its NAL units."""
    context = av.CodecContext.create("libx264", "w")
    context.width, context.height, context.pix_fmt = 96, 64, "yuv420p"
    context.framerate, context.time_base = Fraction(fps), Fraction(1, fps)
    context.options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "keyint=10:log-level=error"}
    images: list[av.VideoFrame | None] = []
    for number in range(num_frames):
        image = av.VideoFrame.from_ndarray(numbered_frame(number, 96, 64), format="rgb24")
        image.pts = number
        images.append(image)
    for image in [*images, None]:
        for packet in context.encode(image):
            units = [unit for unit in re.split(rb"\x00?\x00\x00\x01", bytes(packet)) if unit]
            yield int(packet.pts or 0), units
