"""Ranges of bytes by HTTP, with the standard library: every connection, redirect and header is seen and checked."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import IO, Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from sosampler.errors import VideoError
from sosampler.video.limits import MAX_STALL_SECONDS, Limits, TimeLimit
from sosampler.video.remote import BLOCK, check_read, pause, shown_address

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
# Of a server that is busy or broken for a moment.
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_CONNECT_SECONDS = 10.0
_PIECE = 1 << 16
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MAX_SIZE = 1 << 60  # bytes
_SAFE = "/%:@!$&'()*+,;=~?"  # what stays as it is in a path and a query


class _Failed(Exception):
    """An attempt that failed: why, as the middle of a sentence, and whether another one may succeed."""

    def __init__(self, why: str, advice: str = "try again later", *, is_final: bool = False) -> None:
        super().__init__(f"{why}; {advice}")
        self.is_final = is_final


class HttpRanges:
    """A file on a web server. The first request gets its beginning and its length.

    Where the server knows no ranges, the whole file is read at once, into a temporary file.
    """

    def __init__(self, address: str, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        self.requests = self.bytes_read = 0
        self.notes: list[str] = []
        self.size = -1  # until the first answer
        self._time = TimeLimit(name, limits)
        self._is_public: bool | None = None  # whether the first server has a public address
        self._connection: http.client.HTTPConnection | None = None
        self._watch: _Watch | None = None
        self._whole: IO[bytes] | None = None
        try:
            self._given = self._target = _split(address)
        except ValueError:  # a port that is no number, a host that is no name
            raise VideoError(f"{name}: is no valid address; check its host and port") from None
        try:
            self._first = self._fetch(0, BLOCK)
        except BaseException:
            self.close()
            raise

    def fetch(self, start: int, stop: int) -> bytes:
        if self._whole is not None:
            self._whole.seek(start)
            return self._whole.read(stop - start)
        known = len(self._first)
        rest = self._fetch(max(start, known), stop) if stop > known else b""
        return self._first[start:stop] + rest

    def close(self) -> None:
        self._disconnect()
        if self._whole is not None:
            self._whole.close()

    def _fetch(self, start: int, stop: int) -> bytes:
        check_read(self._name, self.bytes_read + stop - start, self._limits)
        with self._time:
            for attempt in count():
                try:
                    return self._once(start, stop)
                except _Failed as error:
                    self._disconnect()
                    if error.is_final or attempt >= self._limits.retries:
                        raise VideoError(f"{self._name}: {error}") from None
                time.sleep(min(pause(attempt), self._time.seconds_left))
        raise AssertionError("the last attempt returns or raises")

    def _once(self, start: int, stop: int) -> bytes:
        """Request a range, and follow redirects."""
        may_restart, redirects = self._target != self._given, 0
        while redirects <= _MAX_REDIRECTS:
            self._time.check()
            with self._answer(start, stop) as response:
                if response.status in _REDIRECTS:
                    redirects += 1
                    self._redirect(response.getheader("Location") or "")
                elif may_restart and response.status in (401, 403, 404, 410):
                    # Where an earlier redirect led to has expired, as signed addresses do.
                    may_restart, self._target = False, self._given
                    self._disconnect()
                else:
                    return self._data(response, start, stop)
        raise _Failed(f"it redirects more than {_MAX_REDIRECTS} times", "give the address it leads to", is_final=True)

    # ---- one answer

    @contextmanager
    def _answer(self, start: int, stop: int) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and give the answer. It is cut off when the time for so many bytes is over."""
        seconds = min(MAX_STALL_SECONDS * -(-(stop - start) // BLOCK), self._time.seconds_left)
        self.requests += 1
        watch = None
        try:
            for is_second in (False, True):
                is_new = self._connection is None
                connection = self._connection = self._connection or self._connect(self._target)
                watch = self._watch = _Watch(connection.sock, seconds)
                try:
                    response = self._request(connection, start, stop)
                    break
                except (http.client.RemoteDisconnected, ConnectionError):
                    watch.cancel()
                    if is_new or is_second or watch.has_cut:
                        raise
                    self._disconnect()  # the server had closed it since the request before: that is no failure
            if connection.sock is None:  # the server closes it behind this answer
                self._connection = None
            yield response
        except ssl.SSLCertVerificationError:
            raise _Failed("its certificate is not trusted", "check the address", is_final=True) from None
        except socket.gaierror:
            raise _Failed("its host is not known", "check the address and the connection") from None
        except (OSError, http.client.HTTPException, _Failed) as error:
            if isinstance(error, TimeoutError) or (watch is not None and watch.has_cut):
                self._time.check()
                raise _Failed(f"the server stalls: it sends too little within {seconds:g} seconds") from None
            if isinstance(error, _Failed):
                raise
            # Its text may hold the address.
            raise _Failed(
                f"the connection failed ({type(error).__name__})", "check the address, or try again"
            ) from None
        finally:
            if watch is not None:
                watch.cancel()

    def _request(self, connection: http.client.HTTPConnection, start: int, stop: int) -> http.client.HTTPResponse:
        target, given = self._target, self._given
        headers = {
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",  # ranges are of the file itself
            "User-Agent": "sosampler",
        }
        if (target.hostname, target.port) == (given.hostname, given.port):
            headers.update(login_header(given))
        connection.request("GET", request_path(target), headers=headers)
        return connection.getresponse()

    def _data(self, response: http.client.HTTPResponse, start: int, stop: int) -> bytes:
        if response.status == 416 and self.size < 0 and (response.getheader("Content-Range") or "").endswith("/0"):
            self.size = 0
            return b""
        if response.status in (200, 206) and (response.getheader("Content-Encoding") or "identity") != "identity":
            raise _Failed("the server sends it compressed, not as it is", "download it", is_final=True)
        if response.status == 200:
            whole = self._take_whole(response)
            whole.seek(start)
            return whole.read(stop - start)
        if response.status != 206:
            raise _refusal(response)
        match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range") or "")
        if match is None:
            raise _Failed("the server does not say how long the file is", "download it", is_final=True)
        first, last, size = map(int, match.groups())
        if size > _MAX_SIZE:
            raise _Failed(f"the server announces {size} bytes", "check the address", is_final=True)
        self._note_size(size)
        if (first, last) != (start, min(stop, size) - 1):
            raise _Failed(
                f"the server sent bytes {first} to {last} where {start} to {min(stop, size) - 1} were requested",
                "download it",
                is_final=True,
            )
        data = b"".join(self._pieces(response, last + 1 - first))
        if response.length == 0:
            response.close()  # the connection stays open for the next request
        else:  # more is announced, or follows without a length
            self._disconnect()
        return data

    def _note_size(self, size: int) -> None:
        if self.size not in (-1, size):
            why = f"its length was {self.size} bytes and is {size} now, so it changed or the server is wrong"
            raise _Failed(why, "try again", is_final=True)
        self.size = size

    def _pieces(self, response: http.client.HTTPResponse, number: int) -> Iterator[bytes]:
        """Read exactly so many bytes."""
        left = number
        while left:
            piece = response.read1(min(left, _PIECE))
            if not piece:
                raise _Failed(f"{number - left} of the {number} bytes came that the server had announced")
            self.bytes_read += len(piece)
            left -= len(piece)
            yield piece

    def _take_whole(self, response: http.client.HTTPResponse) -> IO[bytes]:
        """Read the whole file, because the server knows no ranges, or does not want to give them any more."""
        announced, size = response.length, 0  # None where it does not say
        check_read(self._name, self.bytes_read + (announced or 0), self._limits)
        if self._watch is not None:
            self._watch.cancel()  # it takes as long as it takes, but not without a byte
        with self._temporary():
            whole = tempfile.TemporaryFile(prefix="sosampler-")  # noqa: SIM115
        try:
            while piece := response.read1(_PIECE):
                with self._temporary():
                    whole.write(piece)
                size += len(piece)
                self.bytes_read += len(piece)
                check_read(self._name, self.bytes_read, self._limits)
                self._time.check()
            if announced is not None and size != announced:
                raise _Failed(f"{size} of the {announced} bytes came that the server had announced")
            self._note_size(size)
        except BaseException:
            whole.close()
            raise
        self.notes.append(f"the server knows no ranges of bytes, so the whole file was read: {size / 1e6:.1f} MB")
        self._disconnect()
        self._whole = whole
        return whole

    @contextmanager
    def _temporary(self) -> Iterator[None]:
        """Errors of the temporary file, which are not those of the connection."""
        try:
            yield
        except OSError as error:
            raise VideoError(
                f"{self._name}: the server knows no ranges of bytes, and the temporary file for the whole cannot be "
                f"written ({error.strerror}); make room in {tempfile.gettempdir()}, or set TMPDIR"
            ) from error

    def _redirect(self, location: str) -> None:
        try:
            there = _split(urljoin(self._target.geturl(), location))
        except ValueError:
            raise _Failed("it redirects to what is no address", "check the address", is_final=True) from None
        if there.scheme != self._given.scheme:
            where = shown_address(there.geturl()) if there.netloc else f"the scheme {there.scheme!r}"
            raise _Failed(
                f"it redirects to another scheme, {where}", "give that address if you trust it", is_final=True
            )
        self._disconnect()
        self._target = there

    # ---- connections

    def _connect(self, target: SplitResult) -> http.client.HTTPConnection:
        """Connect to an address that was looked up and checked here, so that no second look-up leads elsewhere."""
        host, is_tls = target.hostname or "", target.scheme == "https"
        port = target.port or (443 if is_tls else 80)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        public = [entry for entry in found if _is_public(entry[4][0])]
        if self._is_public is None:
            self._is_public = bool(public)
        if self._is_public and not public:
            raise _Failed(
                f"it leads to {host}, which is in a local network", "give that address if you trust it", is_final=True
            )
        failure: OSError = OSError("no address")
        for family, kind, protocol, _, where in public or found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(1e-3, min(_CONNECT_SECONDS, self._time.seconds_left)))
                sock.connect(where)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if is_tls:
                    sock = _tls().wrap_socket(sock, server_hostname=host)
                sock.settimeout(max(1e-3, min(MAX_STALL_SECONDS, self._time.seconds_left)))
            except OSError as error:
                sock.close()
                failure = error
                continue
            connection = http.client.HTTPConnection(host, port)
            connection.default_port = 443 if is_tls else 80  # which the header Host leaves out
            connection.sock = sock
            connection.auto_open = 0  # it would look the host up again
            return connection
        raise failure

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def request_path(parts: SplitResult) -> str:
    """Return path and query of an address as a request has them: letters beyond ASCII are quoted.

    >>> request_path(urlsplit("http://h/ä b%20c.ts?t=ü"))
    '/%C3%A4%20b%20c.ts?t=%C3%BC'
    """
    return quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")


def login_header(parts: SplitResult) -> dict[str, str]:
    """Return the header for user and password of an address; none where it has neither."""
    if not (parts.username or parts.password):
        return {}
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def _split(address: str) -> SplitResult:
    parts = urlsplit(address)
    _ = parts.port  # raises where it is no number
    if parts.scheme in ("http", "https"):
        (parts.hostname or "").encode("idna")
        if not parts.hostname or re.search(r"[\x00-\x20\x7f]", parts.hostname):
            raise ValueError("no host")
    return parts


def _is_public(text: Any) -> bool:
    address = ipaddress.ip_address(str(text).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):  # some stand for an IPv4 address
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or inner or address
    return address.is_global


# Status -> why, and what to do.
_REFUSALS = {
    401: ("a login is needed", "give https://USER:PASSWORD@HOST/..., or a signed address"),
    403: ("access is denied", "check that you may read it, and that a signed address is still valid"),
    404: ("not found", "check the address"),
    410: ("it is gone", "check the address"),
    416: ("the server does not have the bytes that it announced", "try again, or download it"),
    429: ("the server has had too many requests", "try again later, or with fewer --workers"),
}


def _refusal(response: http.client.HTTPResponse) -> _Failed:
    """Return why the server refuses: by its status and not by its text, which may hold secrets."""
    status = response.status
    why, advice = _REFUSALS.get(status, ("the server refuses the request", "check the address"))
    if status >= 500:
        why, advice = "the server is in trouble", "try again later"
    if status in (400, 401, 403) and b"expired" in response.read(4096).lower():  # as S3 and others write it
        why, advice = "the signature or credential of the address has expired", "get a new one"
    return _Failed(f"{why} (HTTP {status})", advice, is_final=status not in _TRANSIENT)


class _Watch:
    """Shuts a socket when the time is over: its own timeout begins anew with each byte."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self.has_cut = False
        self._sock = sock
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        self.has_cut = True
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of TLS is not for other threads

    def cancel(self) -> None:
        self._timer.cancel()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
