"""A web server in a thread, with the manners and bad manners that tests need."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", bytes], None]
"""Answers a request for a file with these bytes."""


class WebServer(ThreadingHTTPServer):
    """Serves `files`, by their paths; a file with an entry in `answers` is answered by that function."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []  # path with query, headers
        self.sent = 0  # bytes of bodies

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, path: str, data: bytes = b"", answer: Answer | None = None) -> str:
        """Serve the bytes, and return their address."""
        self.files[path] = data
        if answer is not None:
            self.answers[path] = answer
        return self.url + path

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        if path not in self.server.files:
            self.reply(404, b"no such file")
            return
        self.server.answers.get(path, ranges)(self, self.server.files[path])

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.server.sent += len(body)
        self.wfile.write(body)

    def byte_range(self, size: int) -> tuple[int, int]:
        """Return the range of the request: first and last byte."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert match, self.headers.get("Range")
        return int(match[1]), min(int(match[2]), size - 1)


def ranges(handler: Handler, data: bytes) -> None:
    first, last = handler.byte_range(len(data))
    if first >= len(data):
        handler.reply(416, Content_Range=f"bytes */{len(data)}")
    else:
        handler.reply(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")


def closing_ranges(handler: Handler, data: bytes) -> None:
    """Answer well, and close the connection without a word."""
    ranges(handler, data)
    handler.close_connection = True


def no_ranges(handler: Handler, data: bytes) -> None:
    handler.reply(200, data)


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    return lambda handler, _: handler.reply(code, body, **headers)


def redirect(location: str) -> Answer:
    return status(302, Location=location)


def after(good: int, bad: Answer) -> Answer:
    """Answer so many requests well."""
    left = [good]

    def answer(handler: Handler, data: bytes) -> None:
        left[0] -= 1
        (ranges if left[0] >= 0 else bad)(handler, data)

    return answer


def failing(times: int, bad: Answer) -> Answer:
    """Answer so many requests badly, and then well."""
    left = [times]

    def answer(handler: Handler, data: bytes) -> None:
        left[0] -= 1
        (bad if left[0] >= 0 else ranges)(handler, data)

    return answer


def hang_up(handler: Handler, _: bytes) -> None:
    handler.close_connection = True
    handler.connection.close()


def stall(handler: Handler, data: bytes) -> None:
    """Begin to answer, and send nothing more."""
    first, last = handler.byte_range(len(data))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
    handler.send_header("Content-Length", str(last + 1 - first))
    handler.end_headers()
    handler.wfile.write(data[:10])
    handler.wfile.flush()
    time.sleep(3)
    handler.close_connection = True


def drip(handler: Handler, _: bytes) -> None:
    """Send a header without end, a byte at a time."""
    handler.close_connection = True
    for _ in range(300):
        try:
            handler.wfile.write(b"H")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.02)


def lying(*, size: int | None = None, first: int = 0, short: int = 0, announce: bool = True) -> Answer:
    """Answer with another length, another beginning, fewer bytes, or without saying which bytes these are."""

    def answer(handler: Handler, data: bytes) -> None:
        begin, last = handler.byte_range(size or len(data))
        body = data[begin : last + 1]
        headers = {"Content_Range": f"bytes {begin + first}-{last + first}/{size or len(data)}"} if announce else {}
        if short:
            headers["Content_Length"] = str(len(body))
            handler.close_connection = True
            body = body[:-short]
        handler.reply(206, body, **headers)

    return answer


@contextmanager
def serving() -> Iterator[WebServer]:
    server = WebServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
