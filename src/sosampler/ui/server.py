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
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import IO, Any
from urllib.parse import parse_qs, unquote, urlsplit

from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.ui.decoder import Decoder
from sosampler.ui.videos import (
    NotFound,
    StoredResult,
    TooLarge,
    Videos,
    json_of,
    naming,
    size_text,
    with_name,
    write_zip,
)
from sosampler.ui.view import Controls

DEFAULT_PORT = 7860
_PORTS_TRIED = 20  # from the default one on
_MAX_JSON = 1 << 16  # bytes of a JSON body
_CHUNK = 1 << 20  # bytes
_IDLE_SECONDS = 60.0  # after which a connection is given up
_MAX_IN_MEMORY = 64 << 20  # bytes of a download, before it goes to a temporary file

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
_STATUS = {TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE, NotFound: HTTPStatus.NOT_FOUND}


class Server(ThreadingHTTPServer):
    """Serves one `Service` until it is shut down."""

    daemon_threads = True
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

    def do_GET(self) -> None:
        self._respond(self._get)

    def do_POST(self) -> None:
        self._respond(self._post)

    def do_DELETE(self) -> None:
        self._respond(self._delete)

    def _get(self) -> None:
        address = urlsplit(self.path)
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
            self._not_found()

    def _post(self) -> None:
        path, length = urlsplit(self.path).path, self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise InvalidArgument("the request has no Content-Length; send one")
        self._unread = size = int(length)
        if path == "/videos":
            name = unquote(self.headers.get("X-Name", ""))
            self._send_json(self.server.service.videos.add_upload(name, size, self._read).to_dict())
        elif match := re.fullmatch(r"/videos/(\w+)/select", path):
            self._send_json(self.server.service.select(match[1], self._read_json(size)))
        else:
            self._not_found()

    def _delete(self) -> None:
        if match := re.fullmatch(r"/videos/(\w+)", urlsplit(self.path).path):
            self._send_json(self.server.service.remove(match[1]))
        else:
            self._not_found()

    def _respond(self, act: Callable[[], None]) -> None:
        """Answer bad requests with a sentence; other errors also go to the server's log."""
        self._unread = 0
        try:
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
        if self.command != "GET" and origin is not None and urlsplit(origin).netloc != host:
            raise InvalidArgument(f"another page ({origin}) may change nothing here; open {self.server.url}")

    def _read_json(self, size: int) -> Any:
        if size > _MAX_JSON:
            raise TooLarge(f"a request of {size} bytes is too long; send the settings alone")
        try:
            return json.loads(b"".join(iter(lambda: self._read(self._unread), b"")))
        except ValueError as error:
            raise InvalidArgument("the settings must be JSON, as the page sends it") from error

    def _read(self, limit: int) -> bytes:
        """Read some bytes of the body; none where it ends."""
        data = self.rfile.read1(min(limit, self._unread)) if self._unread else b""
        self._unread -= len(data)
        return data

    def _not_found(self) -> None:
        raise NotFound(f"there is nothing at {self.path[:200]!r}; open {self.server.url}")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        # A browser that is still sending does not read the response. A body that is too large is not read.
        while self._unread <= self.server.service.videos.max_upload and self._read(_CHUNK):
            pass
        self.close_connection = True
        self._send_json({"error": sentence}, status)

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


class Service:
    """The state of one page. Safe to use from several threads; one request chooses frames at a time."""

    def __init__(
        self, controls: Controls, folder: Path, *, max_upload: int, max_videos: int, num_processes: int = 0
    ) -> None:
        self.controls = controls
        self.decoder = Decoder(controls, num_processes)
        self.videos = Videos(folder, max_upload=max_upload, max_videos=max_videos, facts=self.decoder.facts)
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
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
        return {"removed": key}

    def select(self, key: str, given: Any) -> dict[str, Any]:
        """Return chosen and uniform frames of a video, and the id of the result for downloads."""
        video = self.videos.get(key)
        settings = self.controls.settings(given)
        with self._one_at_a_time, naming(video.path, video.name):
            view, selection = self.decoder.view(video.path, settings)
        result = secrets.token_hex(8)
        with self._results_lock:
            self._results[result] = StoredResult(video, selection, view["uniform"], asdict(settings))
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
        notes = [with_name(note, video.path, video.name) for note in view["notes"]]
        return {**view, "notes": notes, "result": result}

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
        with self._results_lock:
            stored = [self._results[result] for result in results if result in self._results]
        if not results or len(stored) < len(results):
            raise NotFound("these frames are not on the page any more; choose them again, then download")
        return stored
