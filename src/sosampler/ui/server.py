"""HTTP for the page, by the standard library's server.

Security: it listens on this machine alone unless `--host` is given, accepts only its own host name there (against DNS
rebinding), accepts changes only from its own page, and a content security policy keeps the page on this server.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import IO, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from sosampler._util import limits
from sosampler._util.files import parse_json
from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.ui.decoder import Decoder
from sosampler.ui.videos import (
    NotFound,
    StoredResult,
    TooLarge,
    TooSlow,
    Videos,
    json_of,
    naming,
    size_text,
    with_name,
    write_zip,
)
from sosampler.ui.view import Controls, Settings

DEFAULT_PORT = 7860
_PORTS_TRIED = 20  # from the default one on
_MAX_JSON = 1 << 16  # bytes of a JSON body
_CHUNK = 1 << 20  # bytes
_IDLE_SECONDS = 60.0  # after which a connection is given up
_MAX_IN_MEMORY = 64 << 20  # bytes of a download, before it goes to a temporary file
_BACKLOG = 128  # connections that wait to be accepted; with the usual 5, some of 50 uploads at once are reset

_STATIC = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/timeline.js": ("timeline.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STATUS = {
    TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    TooSlow: HTTPStatus.REQUEST_TIMEOUT,
    NotFound: HTTPStatus.NOT_FOUND,
}


class Server(ThreadingHTTPServer):
    """Serves one `Service` until it is shut down."""

    daemon_threads = True
    request_queue_size = _BACKLOG
    allow_reuse_port = False  # a port that another program has is taken

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self.service = service
        self.host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Skip the host name look-up of the base class, which may use the network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except for browsers that closed the connection."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            traceback.print_exc()


def serve(service: Service, host: str, port: int | None) -> Server:
    """Return a listening server; without a port on the first free one from the default on."""
    ports = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED) if port is None else [port]
    problem: OSError | OverflowError | None = None
    for number in ports:
        try:
            return Server(service, host, number)
        except (OSError, OverflowError) as error:
            problem = error
    which = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
    reason = getattr(problem, "strerror", None) or str(problem)
    raise InvalidArgument(
        f"the page cannot listen on {host}, port {which} ({reason}); give another --port, or an address of this "
        "machine as --host"
    )


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "sosampler"
    sys_version = ""
    timeout = _IDLE_SECONDS
    _unread = 0  # bytes of the body
    _deadline = 0.0  # until when it may arrive

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def do_DELETE(self) -> None:
        self._respond(self._delete)

    def _get(self) -> None:
        address = self._address()
        results = parse_qs(address.query).get("result", [])
        if address.path in _STATIC:
            name, kind = _STATIC[address.path]
            self._send(files("sosampler.ui").joinpath("static", name).read_bytes(), kind)
        elif address.path == "/about":
            self._send_json(self.server.service.about())
        elif address.path == "/selection.json":
            data = json.dumps(self.server.service.selections(results), indent=1).encode()
            self._send(data, "application/json", save_as="selection.json")
        elif address.path == "/frames.zip":
            with tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY) as file:
                self.server.service.frames(results, file)
                self._send(file, "application/zip", save_as="frames.zip")
        elif match := re.fullmatch(r"/videos/(\w+)/frames/(\w{1,20})\.jpg", address.path):
            self._send(self.server.service.picture(match[1], match[2]), "image/jpeg")
        else:
            raise self._not_found()

    def _post(self) -> None:
        path, size = self._address().path, self._unread
        if path == "/videos":
            name = unquote(self.headers.get("X-Name", ""))
            self._send_json(self.server.service.videos.add_upload(name, size, self._read).to_dict())
        elif match := re.fullmatch(r"/videos/(\w+)/select", path):
            self._send_json(self.server.service.select(match[1], self._read_json(size)))
        else:
            raise self._not_found()

    def _delete(self) -> None:
        if match := re.fullmatch(r"/videos/(\w+)", self._address().path):
            self._send_json(self.server.service.remove(match[1]))
        else:
            raise self._not_found()

    def _respond(self, act: Callable[[], None]) -> None:
        """Answer bad requests with a sentence; other errors also go to the server's log."""
        self._unread = 0
        try:
            self._deadline = time.monotonic() + self.server.service.videos.max_seconds
            self._unread = self._body_size()
            self._check_caller()
            act()
        except SosamplerError as error:
            self._refuse(_STATUS.get(type(error), HTTPStatus.UNPROCESSABLE_ENTITY), str(error))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "an internal error occurred; see the log of sosampler ui")
            raise

    def _check_caller(self) -> None:
        """Accept requests to this host name only, and changes from this page only."""
        host = self.headers.get("Host", "")
        if is_local(self.server.host) and not is_local(_without_port(host)):
            raise InvalidArgument(f"this page is not called {host!r}; open {self.server.url}")
        origin = self.headers.get("Origin")
        if self.command != "GET" and origin is not None and _authority(origin) != host:
            raise InvalidArgument(f"another page ({origin[:200]}) may change nothing here; open {self.server.url}")

    def _address(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError:  # such as http://[
            raise self._not_found() from None

    def _body_size(self) -> int:
        """Return the bytes of the request's body; a size that a server in front could read otherwise is refused."""
        sizes = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or (self.command == "POST" and not sizes):
            raise InvalidArgument("the request has no Content-Length; send one, and the body in one piece")
        # Latin digits alone; 18 of them are more than any disk, and Python refuses to read thousands.
        if not all(re.fullmatch(r"[0-9]{1,18}", size) for size in sizes) or len(set(sizes)) > 1:
            raise InvalidArgument(f"Content-Length: {', '.join(sizes)[:60]!r} must be the number of bytes that follow")
        return int(sizes[0]) if sizes else 0

    def _read_json(self, size: int) -> Any:
        if size > _MAX_JSON:
            raise TooLarge(f"a request of {size} bytes is too long; send the settings alone")
        try:
            text = b"".join(iter(lambda: self._read(self._unread), b"")).decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument("the settings must be JSON in UTF-8, as the page sends it") from error
        return parse_json(text, "the settings")

    def _read(self, limit: int) -> bytes:
        """Read some bytes of the body, none where it ends; raise `TooSlow` where they do not arrive in time."""
        if not self._unread:
            return b""
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(min(left, limits.STALL_SECONDS))
            data = self.rfile.read1(min(limit, self._unread))
        except TimeoutError:
            missing, self._unread = self._unread, 0  # a connection that timed out cannot be read any more
            raise TooSlow(_too_slow(missing, left, self.server.service.videos.max_seconds)) from None
        finally:
            self.connection.settimeout(_IDLE_SECONDS)
        self._unread -= len(data)
        return data

    def _not_found(self) -> NotFound:
        return NotFound(f"there is nothing at {self.path[:200]!r}; open {self.server.url}")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        # A browser that is still sending does not read the response. A body that is too large is not read.
        with suppress(TooSlow):
            while self._unread <= self.server.service.videos.max_upload and self._read(_CHUNK):
                pass
        self.close_connection = True
        self._send_json({"error": sentence}, status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer requests that are no HTTP, or of another method, as everything else: with a sentence as JSON."""
        self.close_connection = True
        self.request_version = self.protocol_version  # what could not be read counts as HTTP/0.9, without headers
        sentence = f"{message or HTTPStatus(code).phrase}; open {self.server.url} in a browser"
        self._send_json({"error": sentence}, HTTPStatus(code))

    def _send_json(self, content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(content).encode(), "application/json", status=status)

    def _send(
        self, data: bytes | IO[bytes], kind: str, *, status: HTTPStatus = HTTPStatus.OK, save_as: str | None = None
    ) -> None:
        """Send bytes, or a file up to where it was written."""
        size = len(data) if isinstance(data, bytes) else data.tell()
        headers = {"Content-Type": kind, "Content-Length": str(size), **_HEADERS}
        if save_as is not None:
            headers["Content-Disposition"] = f'attachment; filename="{save_as}"'
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if isinstance(data, bytes):
            self.wfile.write(data)
        else:
            data.seek(0)
            shutil.copyfileobj(data, self.wfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""


def _too_slow(missing: int, left: float, allowed: float) -> str:
    """Return why a body was given up: `left` seconds were left for its `missing` bytes when it last arrived."""
    if left > limits.STALL_SECONDS:
        return f"nothing arrived for {limits.STALL_SECONDS:g} s, {size_text(missing)} are missing; try again"
    return (
        f"{size_text(missing)} did not arrive within {allowed:g} s; try again, start the page with a larger "
        "--max-upload-seconds, or give the video as sosampler ui FILE"
    )


def _authority(origin: str) -> str:
    """
    >>> _authority("http://localhost:7860"), _authority("null"), _authority("http://[")
    ('localhost:7860', '', '')
    """
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _without_port(host: str) -> str:
    """
    >>> _without_port("localhost:7860"), _without_port("[::1]:80"), _without_port("[")
    ('localhost', '::1', '')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """
    >>> [is_local(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "evil.example")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- requests, without HTTP

_MAX_RESULTS = 512
_MAX_VIEW_BYTES = 128 << 20  # of what the page shows of its videos, mostly small pictures


class Service:
    """The state of one page. Safe to use from several threads; one request chooses frames at a time."""

    def __init__(
        self,
        controls: Controls,
        folder: Path,
        *,
        max_upload: int,
        max_videos: int,
        max_seconds: float = limits.UPLOAD_SECONDS,
        num_processes: int = 0,
    ) -> None:
        self.controls = controls
        self.decoder = Decoder(controls, num_processes)
        self.videos = Videos(
            folder, max_upload=max_upload, max_videos=max_videos, max_seconds=max_seconds, facts=self.decoder.facts
        )
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
        # What was answered for a video and settings, so that a page that is loaded again need not wait.
        self._views: OrderedDict[tuple[str, Settings], dict[str, Any]] = OrderedDict()
        self._results_lock = threading.Lock()
        self._one_at_a_time = threading.Lock()  # one video takes all cores already

    def about(self) -> dict[str, Any]:
        """Return what a fresh page needs."""
        return {
            **self.controls.to_dict(),
            "max_upload": self.videos.max_upload,
            "max_upload_text": size_text(self.videos.max_upload),
            "videos": [video.to_dict() for video in self.videos.all()],
        }

    def remove(self, key: str) -> dict[str, Any]:
        self.videos.remove(key)
        with self._results_lock:
            for result in [result for result, stored in self._results.items() if stored.video.id == key]:
                del self._results[result]
            for shown in [shown for shown in self._views if shown[0] == key]:
                del self._views[shown]
        return {"removed": key}

    def select(self, key: str, given: Any) -> dict[str, Any]:
        """Return chosen and uniform frames of a video, and the id of the result for downloads.

        What was chosen before by the same settings is returned at once.
        """
        video = self.videos.get(key)
        settings = self.controls.settings(given)
        if view := self._view(key, settings):
            return view
        with self._one_at_a_time, naming(video.path, video.name):
            if view := self._view(key, settings):  # another request, before the page was loaded again
                return view
            view, selection = self.decoder.view(video.path, settings)
        view["notes"] = [with_name(note, video.path, video.name) for note in view["notes"]]
        view["result"] = result = secrets.token_hex(8)
        stored = StoredResult.of(video, selection, view["uniform"], asdict(settings))
        with self._results_lock:
            if video not in self.videos.all():
                return view  # removed meanwhile: nothing of it is kept
            self._results[result] = stored
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
            self._views[key, settings] = view
            while sum(map(_view_bytes, self._views.values())) > _MAX_VIEW_BYTES:
                self._views.popitem(last=False)
        return view

    def _view(self, key: str, settings: Settings) -> dict[str, Any] | None:
        """Return what was answered before, if its frames can still be downloaded."""
        with self._results_lock:
            view = self._views.get((key, settings))
            return view if view is not None and view["result"] in self._results else None

    def picture(self, key: str, frame: str) -> bytes:
        """Return a frame in its full size, as a JPEG."""
        video = self.videos.get(key)
        number = check_int("frame", int(frame) if frame.isdecimal() else frame, at_least=0)
        with self._one_at_a_time, naming(video.path, video.name):
            return self.decoder.image(video.path, number)

    def selections(self, results: Sequence[str]) -> dict[str, Any]:
        """Return the JSON of these results."""
        return json_of(self._stored(results))

    def frames(self, results: Sequence[str], file: IO[bytes]) -> None:
        """Write the zip file of these results."""
        with self._one_at_a_time:
            write_zip(file, self._stored(results), self.decoder.images)

    def _stored(self, results: Sequence[str]) -> list[StoredResult]:
        results = list(dict.fromkeys(results))
        with self._results_lock:
            stored = [self._results[result] for result in results if result in self._results]
        if not results or len(stored) < len(results):
            raise NotFound("these frames are not on the page any more; choose them again, then download")
        return stored


def _view_bytes(view: dict[str, Any]) -> int:
    """Return about how much memory the pictures of a view take."""
    return sum(len(picture["url"]) for kind in ("chosen", "uniform") for picture in view[kind]["pictures"])
