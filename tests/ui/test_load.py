"""The page under load and malformed requests: stalled uploads, many at a time, requests that are no HTTP, reloads."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sosampler._util import limits
from sosampler.ui import decoder
from sosampler.ui import server as server_module
from sosampler.ui.server import Server, Service
from sosampler.ui.view import Controls
from tests.ui.test_server import COMMAND, ask, error_of

SECONDS = 2.0  # for an upload


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "uploads"
    folder.mkdir()
    with Server(Service(Controls(), folder, max_upload=1_000_000, max_videos=2, max_seconds=SECONDS)) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def raw(server: Server, request: bytes, *, timeout: float = 30) -> bytes:
    """All that the server sends back for these bytes."""
    with socket.create_connection(server.server_address[:2], timeout=timeout) as sent:
        sent.sendall(request)
        sent.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sent.recv(1 << 16), b""))


def begin_upload(server: Server, size: int = 9000) -> socket.socket:
    """A connection that has sent the head of an upload and one byte of it."""
    host, port = server.server_address[:2]
    sent = socket.create_connection((host, port), timeout=30)
    sent.sendall(f"POST /videos HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {size}\r\n\r\n0".encode())
    return sent


def received(sent: socket.socket) -> bytes:
    with sent:
        return b"".join(iter(lambda: sent.recv(1 << 16), b""))


class TestPlaces:
    def test_a_stalled_upload_gives_its_place_back(
        self, server: Server, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "STALL_SECONDS", 0.3)
        stalled = [begin_upload(server) for _ in range(2)]
        wait_for(lambda: server.service.videos._arriving == 2)
        assert "2 videos are on the page" in error_of(ask(server, "POST", "/videos", clip_bytes, X_Name="a.mp4"), 413)
        for sent in stalled:
            answer = received(sent)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"nothing arrived for 0.3 s, 9 KB are missing; try again" in answer
        assert ask(server, "POST", "/videos", clip_bytes, X_Name="a.mp4")[0].status == 200
        assert len(list(server.service.videos.folder.iterdir())) == 1

    @pytest.mark.parametrize("size", [9000, 999_999])
    def test_an_upload_that_drips_is_given_up(self, server: Server, size: int) -> None:
        """One byte now and then is never a stall; also where the upload is refused and its rest is only skipped."""
        if size > 9000:
            server.service.videos.max_videos = 0
        sent, begin = begin_upload(server, size), time.monotonic()
        with sent:
            while time.monotonic() < begin + 10:
                try:
                    sent.sendall(b"0")
                except ConnectionError:
                    break
                time.sleep(0.05)
        assert time.monotonic() - begin < SECONDS + 2
        wait_for(lambda: server.service.videos._arriving == 0)
        assert list(server.service.videos.folder.iterdir()) == []

    def test_the_time_limit_is_named(self, server: Server) -> None:
        answer = received(begin_upload(server))
        assert b"9 KB did not arrive within 2 s" in answer
        assert b"--max-upload-seconds" in answer


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_fifty_connections_at_once_are_all_accepted(server: Server) -> None:
    """While the server is busy they wait in the queue; with a short one the rest would be reset or time out."""
    begun = threading.Event()
    accept = server.get_request

    def slowly() -> Any:
        begun.wait(20)
        return accept()

    server.get_request = slowly  # type: ignore[method-assign]
    host, port = server.server_address[:2]
    request = f"GET /icon.svg HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    waiting = []
    try:
        for _ in range(60):
            waiting.append(socket.create_connection((host, port), timeout=0.8))
            waiting[-1].sendall(request)
    finally:
        begun.set()
    for sent in waiting:
        sent.settimeout(30)
        assert received(sent).startswith(b"HTTP/1.1 200 ")


HOST = b"Host: localhost\r\n"
MALFORMED = {
    "length of thousands of digits": b"POST /videos HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 5000,
    "two lengths": b"POST /videos HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4",
    "length with a sign": b"POST /videos HTTP/1.1\r\n" + HOST + b"Content-Length: +3",
    "length that is no number": b"POST /videos HTTP/1.1\r\n" + HOST + b"Content-Length: \xb2",
    "length and chunks": b"POST /videos HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked",
    "length of a GET": b"GET /about HTTP/1.1\r\n" + HOST + b"Content-Length: x",
    "origin": b"DELETE /videos/a HTTP/1.1\r\n" + HOST + b"Origin: http://[",
    "origin of bytes": b"DELETE /videos/a HTTP/1.1\r\n" + HOST + b"Origin: \xff\xfe\x00",
    "address": b"GET http://[ HTTP/1.1\r\n" + HOST,
    "address with two slashes": b"DELETE //[/videos HTTP/1.1\r\n" + HOST,
    "address of bytes": b"GET /\xff\xfe\x00 HTTP/1.1\r\n" + HOST,
    "long address": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST,
    "no request line": b"\x16\x03\x01\x02\x00\x01\x00",
    "one word": b"GET",
    "another protocol": b"GET / SPDY/3",
    "another version": b"GET / HTTP/9.9\r\n" + HOST,
    "another method": b"BREW /coffee HTTP/1.1\r\n" + HOST,
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300,
    "long header": b"GET / HTTP/1.1\r\nA: " + b"b" * 70_000,
    "header without a name": b"GET /x HTTP/1.1\r\n" + HOST + b": b\r\n b",
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_get_a_sentence(server: Server, request_: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    answer = raw(server, request_ + b"\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1.1 (\d+) ", head)
    assert status, answer[:200]
    assert 400 <= int(status[1]) < 600
    assert int(status[1]) != 500
    assert set(json.loads(body)) == {"error"}
    assert b"Content-Security-Policy" in head
    assert ask(server, "GET", "/about")[0].status == 200  # it goes on
    assert "Traceback" not in capfd.readouterr().err


SETTINGS = {
    "nested": b"[" * 60_000,
    "nested and closed": b'{"num_frames":' + b"[" * 900 + b"]" * 900 + b"}",
    "nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "digits": b'{"num_frames":' + b"9" * 5000 + b"}",
    "infinity": b'{"num_frames": 1e999}',
    "not UTF-8": b'{"policy": "\xff"}',
    "UTF-16": '{"policy": "general"}'.encode("utf-16"),
    "twice": b'{"num_frames": 1, "num_frames": 2}',
    "no object": b"[]",
    "lists": b'{"candidates": [1], "policy": [], "diversity": {}}',
    "mode": b'{"candidates": {"a": 1}}',
    "surrogates": b'{"policy": "\\ud800"}',
    "nothing": b"",
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_malformed_settings_get_a_sentence(
    server: Server, clip: Path, settings: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    video = server.service.videos.add_file(clip)
    sentence = error_of(ask(server, "POST", f"/videos/{video.id}/select", settings), 422)
    assert len(sentence) < 1000
    assert "Traceback" not in capfd.readouterr().err


def test_finished_results_are_not_computed_again(
    server: Server, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    view_video = decoder.view_video

    def counting(video: Path, options: Any) -> Any:
        computed.append(options.num_frames)
        return view_video(video, options)

    monkeypatch.setattr(decoder, "view_video", counting)
    key = json.loads(ask(server, "POST", "/videos", clip_bytes, X_Name="a.mp4")[1])["id"]

    def select(frames: int) -> dict[str, Any]:
        settings = json.dumps({"num_frames": frames}).encode()
        shown: dict[str, Any] = json.loads(ask(server, "POST", f"/videos/{key}/select", settings)[1])
        return shown

    first = select(3)
    assert select(4) != first
    assert select(3) == first
    assert computed == [3, 4]
    with server.service._one_at_a_time:  # while another video is worked on
        assert select(3) == first
    assert ask(server, "GET", f"/selection.json?result={first['result']}")[0].status == 200
    with monkeypatch.context() as little:
        little.setattr(server_module, "_MAX_VIEW_BYTES", 0)  # the pictures of nothing are kept
        select(5)
        select(5)
    assert computed == [3, 4, 5, 5]
    assert ask(server, "DELETE", f"/videos/{key}")[0].status == 200
    assert not server.service._views
    assert not server.service._results


def test_a_download_holds_each_result_once(server: Server, clip: Path) -> None:
    """A long list of the same result must not be decoded again and again."""
    video = server.service.videos.add_file(clip)
    shown = server.service.select(video.id, {"num_frames": 1})
    query = "&".join([f"result={shown['result']}"] * 500)
    assert len(json.loads(ask(server, "GET", f"/selection.json?{query}")[1])["videos"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_soak(clip_bytes: bytes, tmp_path: Path, record_property: Any) -> None:
    """200 uploads, 50 at a time, with frames chosen of each: memory and disk stay flat."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--port", "0", "--json", "--max-videos", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert started.stdout is not None
    memory, disk = [], []
    try:
        address = urlsplit(json.loads(started.stdout.readline())["url"])

        def use(number: int) -> None:
            connection = HTTPConnection(address.hostname or "", address.port, timeout=300)

            def fetch(method: str, path: str, body: bytes | None = None) -> bytes:
                connection.request(method, path, body, {"X-Name": f"{number}.mp4"})
                answer = connection.getresponse()
                data = answer.read()
                assert answer.status == 200, data
                return data

            video = json.loads(fetch("POST", "/videos", clip_bytes))["id"]
            result = json.loads(fetch("POST", f"/videos/{video}/select", b'{"policy": "frame-difference"}'))["result"]
            assert fetch("GET", f"/frames.zip?result={result}").startswith(b"PK")
            fetch("DELETE", f"/videos/{video}")
            connection.close()

        with ThreadPoolExecutor(50) as users:
            for round_ in range(4):
                list(users.map(use, range(50 * round_, 50 * (round_ + 1))))
                status = Path(f"/proc/{started.pid}/status").read_text()
                memory.append(int(re.search(r"VmRSS:\s*(\d+)", status)[1]) / 1024)  # type: ignore[index]
                disk.append(sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file()))
    finally:
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=60)
    record_property("MB after each 50 uploads", [round(one) for one in memory])
    assert "Traceback" not in said
    assert disk == [0] * 4
    assert memory[-1] < memory[0] + 40, memory  # MB; the first round has filled caches
    assert list(scratch.iterdir()) == []
