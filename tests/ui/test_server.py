"""The page over HTTP: who may ask, what is refused before it is read, and the command that starts it."""

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
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.ui.server import Server, Service, serve
from sosampler.ui.view import Controls

ROOT = Path(__file__).parents[2]
# As `sosampler ui` runs it.
COMMAND = "import sys, typer\nfrom sosampler.cli.ui import ui_command\ntyper.run(ui_command)"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "uploads"
    folder.mkdir()
    service = Service(Controls(), folder, max_upload=1_000_000, max_videos=3)
    with Server(service) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: Server, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


def head_alone(server: Server, line: str, body: bytes = b"") -> tuple[HTTPResponse, bytes]:
    """An upload of which only the head is sent, or the beginning of the body too."""
    with socket.create_connection(server.server_address[:2], timeout=30) as sent:
        host = f"127.0.0.1:{server.server_address[1]}"
        sent.sendall(f"POST /videos HTTP/1.1\r\nHost: {host}\r\nX-Name: a.mp4\r\n{line}\r\n\r\n".encode() + body)
        if body:
            sent.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(sent)
        answer.begin()
        return answer, answer.read()


def error_of(answer: tuple[HTTPResponse, bytes], status: int) -> str:
    assert answer[0].status == status, answer[1]
    told = json.loads(answer[1])
    assert set(told) == {"error"}
    assert "Traceback" not in told["error"]
    sentence: str = told["error"]
    return sentence


def test_from_upload_to_download(server: Server, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Any] = []
    connect = socket.socket.connect

    def spy(one: socket.socket, address: Any) -> None:
        reached.append(address)
        connect(one, address)

    monkeypatch.setattr(socket.socket, "connect", spy)
    answer, data = ask(server, "POST", "/videos", clip_bytes, X_Name="my%20film%C3%BC.mp4")
    assert answer.status == 200
    video = json.loads(data)
    assert video["name"] == "my filmü.mp4"
    answer, data = ask(server, "POST", f"/videos/{video['id']}/select", json.dumps({"num_frames": 3}).encode())
    shown = json.loads(data)
    assert len(shown["chosen"]["pictures"]) == 3
    answer, data = ask(server, "GET", f"/selection.json?result={shown['result']}")
    assert answer.headers["Content-Disposition"] == 'attachment; filename="selection.json"'
    assert json.loads(data)["videos"][0]["frame_indices"] == [one["frame"] for one in shown["chosen"]["pictures"]]
    answer, data = ask(server, "GET", f"/frames.zip?result={shown['result']}")
    assert answer.headers["Content-Type"] == "application/zip"
    assert data.startswith(b"PK")
    assert int(answer.headers["Content-Length"]) == len(data)
    answer, data = ask(server, "GET", f"/videos/{video['id']}/frames/5.jpg")
    assert data.startswith(b"\xff\xd8")
    assert ask(server, "DELETE", f"/videos/{video['id']}")[0].status == 200
    error_of(ask(server, "POST", f"/videos/{video['id']}/select", b"{}"), 404)
    assert set(reached) == {server.server_address}  # by this test alone


def test_the_page_may_load_nothing_from_elsewhere(server: Server) -> None:
    for path in ("/", "/page.css", "/page.js", "/timeline.js", "/icon.svg", "/about"):
        answer, data = ask(server, "GET", path)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        named = {url for url in re.findall(rb"https?://[\w./]+", data) if b"www.w3.org" not in url}
        assert named == set(), path


def test_an_upload_that_is_too_large_is_refused_unread(server: Server) -> None:
    told = error_of(head_alone(server, "Content-Length: 2000000"), 413)
    assert "a.mp4 has 2 MB; uploads must be at most 1 MB" in told
    assert list(server.service.videos.folder.iterdir()) == []


def test_one_video_too_many_is_told_to_a_browser_that_is_sending(server: Server, clip: Path) -> None:
    for _ in range(3):
        server.service.videos.add_file(clip)
    told = error_of(ask(server, "POST", "/videos", bytes(900_000), X_Name="a.mp4"), 413)
    assert "3 videos are on the page" in told


def test_an_upload_that_breaks_off_leaves_nothing(server: Server, clip_bytes: bytes) -> None:
    told = error_of(head_alone(server, "Content-Length: 9000", clip_bytes[:5000]), 422)
    assert "a.mp4: 4 KB of 9 KB did not arrive" in told
    assert list(server.service.videos.folder.iterdir()) == []


def test_what_is_no_video_gets_a_sentence(server: Server) -> None:
    sentence = error_of(ask(server, "POST", "/videos", b"hello " * 100, X_Name="notes.mp4"), 422)
    assert sentence.startswith("notes.mp4: not a video")


def test_only_its_own_name_and_its_own_page(server: Server, clip_bytes: bytes) -> None:
    """Another site can neither reach it through a name of its own nor send it anything."""
    port = server.server_address[1]
    assert "not called 'evil.example'" in error_of(ask(server, "GET", "/about", Host="evil.example"), 422)
    assert "not called" in error_of(ask(server, "GET", "/about", Host="["), 422)
    for good in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(server, "GET", "/about", Host=good)[0].status == 200
    told = error_of(ask(server, "POST", "/videos", clip_bytes, Origin="http://evil.example", X_Name="a.mp4"), 422)
    assert "another page (http://evil.example) may change nothing here" in told
    assert "another page" in error_of(ask(server, "DELETE", "/videos/1", Origin="null"), 422)
    own = f"http://127.0.0.1:{port}"
    assert ask(server, "POST", "/videos", clip_bytes, Origin=own, X_Name="a.mp4")[0].status == 200
    answer, _ = ask(server, "GET", "/about", Origin="http://evil.example")
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_questions_that_make_no_sense(server: Server, clip_bytes: bytes) -> None:
    for path in ("/nothing", "/../../etc/passwd", "/static/page.js", "/videos/x/frames/-1.jpg"):
        assert "there is nothing at" in error_of(ask(server, "GET", path), 404)
    error_of(ask(server, "DELETE", "/"), 404)
    error_of(ask(server, "POST", "/nothing", b""), 404)
    key = json.loads(ask(server, "POST", "/videos", clip_bytes, X_Name="a.mp4")[1])["id"]
    assert "is not JSON" in error_of(ask(server, "POST", f"/videos/{key}/select", b"{"), 422)
    assert "too long" in error_of(ask(server, "POST", f"/videos/{key}/select", b" " * 100_000), 413)
    assert "frame='x'" in error_of(ask(server, "GET", f"/videos/{key}/frames/x.jpg"), 422)
    assert ask(server, "GET", f"/videos/{key}/frames/{10**19}.jpg")[0].status == 200  # the last one
    assert "Content-Length" in error_of(head_alone(server, "Transfer-Encoding: chunked"), 422)
    assert "Content-Length" in error_of(head_alone(server, "Content-Length: -5"), 422)


def test_a_mistake_of_ours_is_told_and_logged(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("of our own")

    monkeypatch.setattr(server.service, "about", broken)
    assert "see the log of sosampler ui" in error_of(ask(server, "GET", "/about"), 500)
    monkeypatch.undo()
    assert ask(server, "GET", "/about")[0].status == 200  # and it goes on
    said, deadline = "", time.monotonic() + 30
    while "RuntimeError: of our own" not in said and time.monotonic() < deadline:  # the log comes after the answer
        time.sleep(0.02)
        said += capfd.readouterr().err
    assert "RuntimeError: of our own" in said


def test_ports(server: Server) -> None:
    taken = server.server_address[1]
    with pytest.raises(InvalidArgument, match=rf"port {taken} \(.*give another --port"):
        serve(server.service, "127.0.0.1", taken)
    for host, port in (("127.0.0.1", 70000), ("203.0.113.7", 0)):
        with pytest.raises(InvalidArgument, match="cannot listen on"):
            serve(server.service, host, port)
    with serve(server.service, "127.0.0.1", None) as first, serve(server.service, "127.0.0.1", None) as second:
        assert first.server_address[1] != second.server_address[1]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_the_command(clip: Path, tmp_path: Path) -> None:
    """It listens on this machine alone, opens the videos it is given, and leaves nothing behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(clip), "--port", "0", "--json", "--max-upload", "2MB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert started.stdout is not None
    try:
        url = json.loads(started.stdout.readline())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        with urlopen(f"{url}about", timeout=30) as answer:
            about = json.load(answer)
        assert [video["name"] for video in about["videos"]] == ["clip.mp4"]
        assert about["max_upload"] == 2_000_000
        assert len(list(scratch.iterdir())) == 1
    finally:
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=60)
    assert started.returncode == 0
    assert f"the page is at {url}" in said
    assert "Traceback" not in said
    assert list(scratch.iterdir()) == []
    assert clip.exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_upload": "lots"}, "'lots' is not a size"),
        ({"max_videos": 0}, "--max-videos=0"),
        ({"max_upload_seconds": 0.0}, "--max-upload-seconds=0.0"),
        ({"videos": ["nothing.mp4"]}, "nothing.mp4: no such file"),
        ({"sampler": [Path("no-such-folder")]}, "no-such-folder"),
        ({"host": "203.0.113.7"}, "cannot listen on 203.0.113.7"),
    ],
)
def test_the_command_refuses(given: dict[str, Any], sentence: str) -> None:
    from sosampler.cli.ui import ui_command

    arguments = {"host": "127.0.0.1", "port": 0, "max_upload": "1GB", "max_videos": 5, **given}
    with pytest.raises(SosamplerError, match=re.escape(sentence)):
        ui_command(**arguments)


def test_the_document_names_the_options_there_are() -> None:
    from typer import Typer
    from typer.main import get_command

    from sosampler.cli.ui import ui_command

    app = Typer()
    app.command()(ui_command)
    options = {name for one in get_command(app).params for name in one.opts if name.startswith("--")}
    text = (ROOT / "docs/ui.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named - {"--share"} == options - {"--install-completion", "--show-completion"}
    assert "--share" not in options
