"""Streams that are read while they are made: growing files, pipes, network streams and cameras.

Bytes of files, pipes, HTTP and TCP are read here and handed to FFmpeg, which opens nothing itself. RTSP and cameras are
opened by FFmpeg, with a list of what it may use.
"""

from __future__ import annotations

import http.client
import io
import math
import os
import re
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import av

from sosampler.errors import InvalidArgument, LimitExceeded, VideoError
from sosampler.video.http_ranges import login_header, request_path
from sosampler.video.limits import Limits
from sosampler.video.pyav_decode import own_context
from sosampler.video.pyav_index import FORMATS, NOMINAL_RATE, video_stream
from sosampler.video.pyav_versions import open_for_reading
from sosampler.video.remote import is_address, scheme_of, shown_address
from sosampler.video.source import is_manifest, source_name

SCHEMES = ("http", "https", "tcp", "rtsp", "rtsps")
# What FFmpeg may use where it opens an address itself. RTSP carries its media inside of its TCP connection.
_PROTOCOLS = {"rtsp": "rtsp,tcp", "rtsps": "rtsps,tls,tcp"}
_PORTS = {"http": 80, "https": 443}
CAMERA = "camera:"
# FFmpeg's format for cameras, and what comes before a camera's name or number there, by sys.platform.
_CAMERAS = {"linux": ("v4l2", "/dev/video"), "darwin": ("avfoundation", ""), "win32": ("dshow", "video=")}
_POLL = 0.05  # seconds between two looks at a file that grows
_CHUNK = 1 << 15
_PROBED = 256  # bytes by which a playlist is recognised
# Seconds before a stream is opened again: 0.5, 1, 2, ... up to the last.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0
# Packets in a row that do not decode, or give no frame, after which the stream is opened again: its codec has changed.
_MAX_FAILED, _MAX_SILENT = 16, 1000
# Seconds that FFmpeg may take to learn what an open stream holds, on top of `idle`.
_PROBE_SECONDS = 15.0


class LiveFrame(NamedTuple):
    """A decoded frame and its times."""

    frame: Any  # av.VideoFrame in the decoder's memory
    seconds: float  # stream time
    wall_seconds: float  # seconds since 1970 when it was decoded here
    connection: int  # how often the stream was opened before


# ---- names


def stream_name(source: Any) -> str:
    """Return how a stream is called in messages and results: of an address without what may be secret.

    >>> stream_name("rtsp://me:secret@cam.local:554/live?token=secret")
    'rtsp://cam.local:554/live'
    """
    if isinstance(source, str) and source == "-":
        return "<stdin>"
    if not is_address(source):
        return source_name(source)
    return shown_address(source)


def _check_address(address: str, schemes: tuple[str, ...]) -> SplitResult:
    name, scheme = shown_address(address), scheme_of(address, schemes, SCHEMES)
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # what is taken for the host or the port may be a part of the password
        raise VideoError(f"{scheme}://...: not an address; write {scheme}://HOST:PORT/PATH") from None
    if not host or (scheme == "tcp" and port is None) or re.search(r"[\x00-\x20\x7f]", address):
        raise VideoError(f"{name}: not an address; write {scheme}://HOST:PORT/PATH, without spaces")
    return parts


# ---- where bytes come from


class _Stalled(VideoError):
    """Nothing came for too long."""


class _Bytes:
    """What FFmpeg reads from. It takes an error for the end, so the error is kept here and raised behind that."""

    def __init__(self, read: Callable[[int], bytes], close: Callable[[], None], *, ends: bool = True) -> None:
        self._read, self._stop, self._ends = read, close, ends
        self._head = b""
        self.error: BaseException | None = None
        self.is_over = False  # it came to its end, and opening it again would bring nothing

    def peek(self, size: int) -> bytes:
        """Return the first bytes, at least so many unless it ends, and leave them to be read."""
        while len(self._head) < size and (data := self._more(_CHUNK)):
            self._head += data
        return self._head

    def read(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        if self.error is not None:
            return b""
        try:
            return self._more(size)
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too, which PyAV would lose
            self.error = error
            return b""

    def _more(self, size: int) -> bytes:
        data = b"" if self.is_over else self._read(size)
        self.is_over = self.is_over or (not data and self._ends)
        return data

    def stop(self) -> None:
        self._stop()


def _open_file(path: str, idle: float) -> _Bytes:
    try:
        status = os.stat(path)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise VideoError(f"{path}: is neither a file nor a pipe; give one, or a camera as {CAMERA}NAME")
        is_pipe = stat.S_ISFIFO(status.st_mode)
        # A pipe that nobody writes to yet would hold `open` for ever; `_open_pipe` waits as long as allowed.
        file = open(path, "rb", buffering=0, opener=_open_at_once if is_pipe else None)  # noqa: SIM115 - see `stop`
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise VideoError(f"{path}: cannot be read ({_reason(error)}); check the name and its permissions") from error
    if is_pipe:
        return _open_pipe(file, idle, path, file.close)

    def read(size: int) -> bytes:
        began = time.monotonic()
        while not (data := file.read(size)) and time.monotonic() - began < idle:
            time.sleep(_POLL)
        return data

    return _Bytes(read, file.close)


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _open_pipe(file: Any, idle: float, name: str, close: Callable[[], None] = lambda: None) -> _Bytes:
    """Read from an object with a file descriptor, past its buffer, or from any other as far as it gives bytes.

    `close` is for files that were opened here; it also keeps them, because the descriptor ends with its file.
    """
    try:
        descriptor = file.fileno()
    except (AttributeError, OSError, ValueError):
        return _Bytes(getattr(file, "read1", file.read), close)

    def read(size: int) -> bytes:
        # Windows can wait for sockets alone.
        if os.name != "nt" and not select.select([descriptor], [], [], idle)[0]:
            raise _stalled(name, idle)
        return os.read(descriptor, size)

    return _Bytes(read, close)


def _stalled(name: str, idle: float) -> _Stalled:
    return _Stalled(f"{name}: gave nothing for {idle:g} seconds; check its source, or raise --idle (idle=...)")


def _from_socket(read: Callable[[int], bytes], name: str, idle: float) -> Callable[[int], bytes]:
    """Turn errors of the network into those of a stream."""

    def checked(size: int) -> bytes:
        try:
            return read(size)
        except TimeoutError as error:
            raise _stalled(name, idle) from error
        except (OSError, http.client.HTTPException) as error:
            raise VideoError(f"{name}: the connection was lost ({_reason(error)})") from None

    return checked


def _open_tcp(parts: SplitResult, idle: float, name: str) -> _Bytes:
    try:
        connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=idle)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
        raise VideoError(f"{name}: no connection ({_reason(error)}); check host and port") from None
    return _Bytes(_from_socket(connection.recv, name, idle), connection.close, ends=False)


def _open_http(parts: SplitResult, idle: float, name: str) -> tuple[_Bytes, bool]:
    """Return the bytes of a response, and whether they are images one behind the other, which have no times."""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port or _PORTS[parts.scheme], timeout=idle)
    headers = {"User-Agent": "sosampler", "Accept": "*/*", **login_header(parts)}
    try:
        connection.request("GET", request_path(parts), headers=headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        connection.close()
        raise VideoError(f"{name}: no answer ({_reason(error)}); check the address") from None

    def close() -> None:
        response.close()  # which holds the socket where the server closes the connection
        connection.close()

    if response.status != http.client.OK:
        close()
        # FFmpeg or urllib would follow a redirect, also into a local network.
        hint = "give the address that it redirects to" if 300 <= response.status < 400 else "check address and login"
        raise VideoError(f"{name}: the server answered with HTTP {response.status}, not with a stream; {hint}")

    def read(size: int) -> bytes:
        data = response.read1(size)
        if not data and response.length:  # that many bytes are missing
            raise http.client.IncompleteRead(b"", response.length)
        return data

    # A response of known length, or with a mark at its end, is over then; others end where the connection is lost.
    ends = response.length is not None or response.chunked
    images = response.headers.get_content_maintype() == "multipart"  # as web cameras send them
    return _Bytes(_from_socket(read, name, idle), close, ends=ends), images


def _reason(error: BaseException) -> str:
    """Return what the system says of an error, or its kind: other texts may hold an address, or a server's answer."""
    return getattr(error, "strerror", None) or type(error).__name__


# ---- a stream


@dataclass
class LiveStream:
    """A stream that is read frame by frame, and opened again when it is lost.

    Args:
        source: a path, "-" for standard input, a pipe, an address, or "camera:NAME".
        idle: seconds without a byte, after which a growing file has ended, and another stream is lost.
        reconnects: attempts in a row to open a lost stream again.
        schemes: of the addresses that may be opened.
        camera_options: FFmpeg's options of a camera, such as video_size and framerate.
    """

    source: Any
    idle: float
    reconnects: int
    schemes: tuple[str, ...] = ()
    camera_options: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        source = self.source
        self.name = stream_name(source)
        self.num_frames = self.num_damaged = 0  # that were decoded; packets and frames that were left out
        self._bytes: _Bytes | None = None  # of the connection, or of a file or pipe
        self._parts = _check_address(source, self.schemes) if is_address(source) else None
        self._is_camera = isinstance(source, str) and source.startswith(CAMERA)
        if self.camera_options and not self._is_camera:
            raise InvalidArgument(f"camera options are for {CAMERA}NAME, not for {self.name}; leave them out")
        if isinstance(source, io.TextIOBase):
            raise InvalidArgument(f"{source!r} is opened as text; open it in binary mode, or give its .buffer")
        if not (isinstance(source, (str, os.PathLike)) or hasattr(source, "read")):
            raise InvalidArgument(
                f"a {type(source).__name__} is not a stream; give a path, '-' for standard input, a pipe, an address, "
                f"or {CAMERA}NAME"
            )

    @property
    def _can_reopen(self) -> bool:
        return self._parts is not None or self._is_camera

    @property
    def _is_over(self) -> bool:
        return self._bytes is not None and self._bytes.is_over

    def frames(self) -> Generator[LiveFrame | str, None, None]:
        """Yield the frames in the order in which they are shown, and "lost" or "end" where the stream is.

        Raises VideoError where it cannot be opened, and where it is lost for good.
        """
        self._attempts = connection = 0
        try:
            while True:
                try:
                    container, stream = self._open()
                except VideoError as error:
                    if not connection or isinstance(error, LimitExceeded):
                        raise
                    lost: VideoError | None = error
                else:
                    with container:
                        lost = yield from self._decode(container, stream, connection)
                    connection += 1
                    if self._is_over or (lost is None and not self.reconnects):
                        self._check_has_frames(lost)
                        yield "end"
                        return
                    yield "lost"
                if self._is_over and not self._can_reopen:  # a file that was opened again behind its last frame
                    self._check_has_frames(lost)
                    return
                self._check_attempts(lost)
                if self._can_reopen:
                    self._stop()
                    time.sleep(min(_FIRST_PAUSE * 2 ** min(self._attempts - 1, 16), _LAST_PAUSE))
        finally:
            self._stop()

    def _check_has_frames(self, lost: VideoError | None) -> None:
        if not self.num_frames:
            raise VideoError(
                f"{self.name}: none of its frames can be decoded; it may be damaged, or its frames larger than "
                "--max-pixels (max_pixels); a plain MP4 file is for `select`, when it is finished"
            ) from lost

    def _check_attempts(self, lost: VideoError | None) -> None:
        """Count an attempt to open the stream again, or raise why it was lost."""
        if lost is not None and (not self.reconnects or (isinstance(lost, _Stalled) and not self._can_reopen)):
            raise lost
        if self._attempts == self.reconnects:
            why = f"{self.name}: the connection was closed" if lost is None else str(lost)
            raise VideoError(
                f"{why}; {self._attempts} attempts in a row to open it again failed (--reconnects, reconnects=...)"
            ) from lost
        self._attempts += 1

    def _stop(self) -> None:
        if self._bytes is not None:
            self._bytes.stop()
            self._bytes = None

    def _open(self) -> tuple[Any, Any]:
        """Return the open container and its video stream."""
        file, options, container_format = self._target()
        is_own = self._bytes is None  # opened by FFmpeg, which then looks at the clock; probing takes some seconds
        timeout = (self.idle + _PROBE_SECONDS, self.idle) if is_own else None
        options = {"max_pixels": str(self.limits.max_pixels), **options}
        try:
            container = open_for_reading(file, options, timeout, container_format)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            if (kept := self._kept_error()) is not None:
                raise kept from error
            hint = "check its name"
            if not is_own:
                hint = "give MPEG-TS, Matroska or fragmented MP4; a plain MP4 file is for `select`, when it is finished"
            raise VideoError(f"{self.name}: cannot be opened as a stream ({_reason(error)}); {hint}") from error
        try:
            return container, video_stream(container, name=self.name, limits=self.limits)
        except VideoError:
            container.close()
            raise

    def _target(self) -> tuple[Any, dict[str, str], str | None]:
        """Return what FFmpeg opens, with which options and in which format."""
        if self._is_camera:
            file, container_format = camera_arguments(self.source.removeprefix(CAMERA))
            return file, dict(self.camera_options), container_format
        options = {"protocol_whitelist": "data", "format_whitelist": FORMATS}
        if self._parts is not None:
            scheme = self._parts.scheme
            if scheme in _PROTOCOLS:
                allowed = {"protocol_whitelist": _PROTOCOLS[scheme], "format_whitelist": "rtsp"}
                return self.source, {**allowed, "rtsp_transport": "tcp"}, "rtsp"
            if scheme == "tcp":
                self._bytes = _open_tcp(self._parts, self.idle, self.name)
            else:
                self._bytes, without_times = _open_http(self._parts, self.idle, self.name)
                if without_times:
                    options["use_wallclock_as_timestamps"] = "1"
        elif self._bytes is None:
            self._bytes = self._open_local()
        head = self._bytes.peek(_PROBED)
        if not head:
            raise VideoError(f"{self.name}: ended before its first byte; start its source first, or raise --idle")
        if is_manifest(head.partition(b"\0")[0]):
            raise VideoError(
                f"{self.name}: a playlist or manifest, which names other files, not a stream; give the stream itself"
            )
        return self._bytes, options, None

    def _open_local(self) -> _Bytes:
        if isinstance(self.source, str) and self.source == "-":
            return _open_pipe(sys.stdin.buffer, self.idle, self.name)
        if isinstance(self.source, (str, os.PathLike)):
            return _open_file(os.fspath(self.source), self.idle)
        return _open_pipe(self.source, self.idle, self.name)

    def _kept_error(self) -> VideoError | None:
        """Return the error of a connection that FFmpeg took for the end; raise what is none, such as Ctrl-C."""
        error = None if self._bytes is None else self._bytes.error
        if error is not None and not isinstance(error, VideoError):
            raise error
        return error

    def _decode(self, container: Any, stream: Any, connection: int) -> Generator[LiveFrame, None, VideoError | None]:
        """Yield the frames of one connection; return why it was lost, or None where it was closed."""
        context, base = own_context(stream, limits=self.limits), stream.time_base
        seconds, step = -math.inf, float(1 / (stream.average_rate or NOMINAL_RATE))
        failed = silent = 0
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except IndexError:  # a packet of a stream that appeared after the start; a new call continues behind it
                packets = container.demux(stream)
                continue
            except av.error.ExitError:
                return _stalled(self.name, self.idle)
            except (av.error.FFmpegError, OSError) as error:
                return self._kept_error() or VideoError(f"{self.name}: cannot be read any further ({_reason(error)})")
            at_end = packet is None or not packet.size
            silent += 1
            try:
                frames = context.decode(None if at_end else packet)
            except av.error.EOFError:
                frames = []
            except av.error.FFmpegError:
                frames = []
                failed += 1
                self.num_damaged += 1
            for frame in frames:
                if frame.is_corrupt:
                    self.num_damaged += 1
                    continue
                self.limits.check_pixels(self.name, frame.width, frame.height)
                if frame.pts is not None:
                    seconds = float(frame.pts * base)
                else:  # as in a bare H.264 stream
                    seconds = seconds + step if math.isfinite(seconds) else 0.0
                self._attempts = failed = silent = 0
                self.num_frames += 1
                yield LiveFrame(frame, seconds, time.time(), connection)
            if at_end:
                return self._kept_error()
            # Before its first frame a stream that was joined between two keyframes cannot be decoded.
            if (failed >= _MAX_FAILED and math.isfinite(seconds)) or silent >= _MAX_SILENT:
                return VideoError(f"{self.name}: its packets do not decode any more")


def camera_arguments(name: str, platform: str = sys.platform) -> tuple[str, str]:
    """Return what FFmpeg opens for a camera, and in which format.

    >>> camera_arguments("0", "linux"), camera_arguments("Integrated Camera", "win32")
    (('/dev/video0', 'v4l2'), ('video=Integrated Camera', 'dshow'))
    """
    if not name or platform not in _CAMERAS:
        raise InvalidArgument(
            f"{CAMERA}{name}: write {CAMERA}0, {CAMERA}/dev/video0 (Linux) or {CAMERA}NAME (macOS, Windows); cameras "
            f"of {platform} {'can' if platform in _CAMERAS else 'cannot'} be opened"
        )
    container_format, prefix = _CAMERAS[platform]
    return (name if name.startswith("/") else prefix + name), container_format
