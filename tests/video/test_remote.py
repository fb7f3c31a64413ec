"""Videos at addresses: the same frames as from the file, few bytes, and a sentence for whatever a server does."""

from __future__ import annotations

import datetime
import errno
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import sosampler as so
from sosampler.video import http_ranges, limits, pyav_index, remote
from sosampler.video.remote import BLOCK, RemoteFile, is_address, open_address, shown_address
from sosampler.video.source import source_name
from sosampler.video.synthetic import draw_number, encode_video, read_number
from tests import web_server as web

SECRET = "s3cret"


@pytest.fixture
def server() -> Iterator[web.WebServer]:
    with web.serving() as server:
        yield server


@pytest.fixture(scope="module")
def long_clip() -> bytes:
    """60 numbered frames of noise with a keyframe every 10, more than ten blocks."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 128, 192, 3), dtype=np.uint8)
    frames = [draw_number(frame, number) for number, frame in enumerate(noise)]
    data = encode_video(frames, codec_options={"g": "10", "keyint_min": "10", "sc_threshold": "0", "crf": "8"})
    assert len(data) > 10 * BLOCK
    return data


def quick(**values: Any) -> so.Limits:
    return so.Limits(**{"retries": 0, **values})


def refusal(address: str, **limits: Any) -> str:
    """Return the sentence that refuses an address, whose login and query must not be in it."""
    secret = address.replace("http://", f"http://me:{SECRET}@") + f"?X-Amz-Signature={SECRET}&token={SECRET}"
    with pytest.raises(so.VideoError) as caught:
        so.select(secret, 2, schemes=("http",), limits=quick(**limits))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error)
        error = None if error.__suppress_context__ and error.__cause__ is None else error.__cause__ or error.__context__
    text = str(caught.value)
    assert text.startswith(f"{address}: ")
    assert "\n" not in text
    return text


# ---- reading


def _index_in_front(clip: Path, out: Path) -> bytes:
    with av.open(clip) as source, av.open(out, "w", options={"movflags": "faststart"}) as copy:
        stream = copy.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                copy.mux(packet)
    return out.read_bytes()


@pytest.mark.parametrize("mode", ["exact", "keyframe", "snap"])
@pytest.mark.parametrize("index", ["front", "end"])
def test_frames_equal_those_of_the_file(
    mode: str, index: str, server: web.WebServer, clip: Path, tmp_path: Path
) -> None:
    data = _index_in_front(clip, tmp_path / "front.mp4") if index == "front" else clip.read_bytes()
    assert (data.index(b"moov") < data.index(b"mdat")) == (index == "front")
    here = so.select(data, 3, policy="uniform", candidates=mode)
    there = so.select(server.add("/a.mp4", data), 3, policy="uniform", candidates=mode, schemes=("http",))
    assert np.array_equal(there.frames, here.frames)
    assert [read_number(frame) for frame in there.frames] == there.frame_indices.tolist()
    assert there.frame_indices.tolist() == here.frame_indices.tolist()
    assert there.pts_seconds.tolist() == here.pts_seconds.tolist()
    assert there.metadata == here.metadata
    assert there.notes == here.notes


def test_keyframes_need_few_bytes_and_these_are_counted(server: web.WebServer, long_clip: bytes) -> None:
    data = long_clip
    sel = so.select(server.add("/a.mp4", data), 2, policy="uniform", candidates="keyframe", schemes=("http",))
    assert sel.transfer == {"bytes_read": server.sent, "file_bytes": len(data), "requests": len(server.requests)}
    assert server.sent < len(data) / 2
    assert sel.to_dict()["transfer"] == sel.transfer
    assert "transfer" not in so.select(data, 2, policy="uniform").to_dict()


def test_every_byte_is_that_of_the_file(server: web.WebServer) -> None:
    """Any reads and seeks give what a file in memory gives, and nothing is fetched twice."""
    generator = np.random.default_rng(0)
    data = generator.bytes(10 * BLOCK + 17)
    with closing(open_address(server.add("/a", data), schemes=("http",), limits=quick())) as file:
        for _ in range(300):
            start, size = int(generator.integers(0, len(data) + 9)), int(generator.integers(0, 2 * BLOCK))
            assert file.seek(start) == start
            assert file.read(size) == data[start : start + size]
            assert file.tell() == max(start, min(start + size, len(data)))
        assert file.seek(-5, 2) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.seek(-2, 1) == len(data) - 2
        assert server.sent == len(data) == file.transfer["bytes_read"]


class Memory:
    """A file elsewhere that remembers what was fetched, in blocks."""

    def __init__(self, blocks: int) -> None:
        self.size, self.requests, self.bytes_read, self.notes = blocks * BLOCK, 0, 0, []
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, start: int, stop: int) -> bytes:
        self.fetched.append((start // BLOCK, -(-stop // BLOCK)))
        return bytes(stop - start)

    def close(self) -> None: ...


def test_reading_straight_on_fetches_more_at_a_time_and_a_seek_begins_small() -> None:
    far = Memory(200)
    file = RemoteFile("x", far)
    while file.tell() < 60 * BLOCK:
        file.read(BLOCK // 2)
    assert far.fetched[:7] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 48)]
    far.fetched.clear()
    file.seek(150 * BLOCK + 5)
    file.read(10)
    file.seek(100 * BLOCK)
    file.read(3 * BLOCK)
    file.seek(149 * BLOCK)
    file.read(BLOCK + 1)
    assert far.fetched == [(150, 151), (100, 103), (149, 150)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MAX_CACHED", 20)
    far = Memory(100)
    file = RemoteFile("x", far)
    while file.read(BLOCK):
        assert len(file._blocks) <= 20
    file.seek(99 * BLOCK)
    file.read(1)
    far.fetched.clear()
    file.seek(0)
    file.read(1)
    assert far.fetched == [(0, 1)]


def test_one_connection_serves_many_requests_and_may_be_closed_between(
    server: web.WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = []
    connect = http_ranges.HttpRanges._connect
    monkeypatch.setattr(
        http_ranges.HttpRanges, "_connect", lambda self, target: connected.append(1) or connect(self, target)
    )
    data = bytes(20 * BLOCK)
    with closing(open_address(server.add("/a", data), schemes=("http",), limits=quick())) as file:
        file.read()
        assert (len(connected), len(server.requests)) == (1, 3)
    server.add("/a", data, web.closing_ranges)
    with closing(open_address(server.url + "/a", schemes=("http",), limits=quick())) as file:
        assert file.read() == data
    assert len(connected) == 4


def test_a_server_without_ranges_works_and_says_what_it_costs(server: web.WebServer, long_clip: bytes) -> None:
    address = server.add("/a.mp4", long_clip, web.no_ranges)
    sel = so.select(address, 2, policy="uniform", candidates="keyframe", schemes=("http",))
    here = so.select(long_clip, 2, policy="uniform", candidates="keyframe")
    assert np.array_equal(sel.frames, here.frames)
    assert sel.transfer == {"bytes_read": len(long_clip), "file_bytes": len(long_clip), "requests": 1}
    assert f"the whole file was read: {len(long_clip) / 1e6:.1f} MB" in sel.notes[0]
    assert f"max_read={len(long_clip) - 1} bytes" in refusal(address, max_read=len(long_clip) - 1)
    server.add("/a.mp4", long_clip, lambda handler, data: _chunked(handler, data))
    assert f"max_read={len(long_clip) - 1} bytes" in refusal(address, max_read=len(long_clip) - 1)
    assert so.select(address, 2, schemes=("http",)).transfer["bytes_read"] == len(long_clip)


def test_no_room_for_a_whole_file(server: web.WebServer, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    address = server.add("/a.mp4", clip_bytes, web.no_ranges)
    assert "cannot be written (No space left on device); make room in " in refusal(address)
    assert len(server.requests) == 1


def test_a_server_may_cease_to_give_ranges(server: web.WebServer, long_clip: bytes) -> None:
    """As some do for a file that another server of theirs has."""
    address = server.add("/a.mp4", long_clip, web.after(3, web.no_ranges))
    sel = so.select(address, 3, policy="uniform", schemes=("http",), limits=quick())
    assert [read_number(frame) for frame in sel.frames] == [10, 30, 50]
    assert sel.transfer is not None
    assert sel.transfer["bytes_read"] == server.sent > len(long_clip)
    assert len(server.requests) == 4
    assert "the whole file was read" in sel.notes[0]
    server.add("/a.mp4", long_clip, web.after(3, lambda handler, data: web.no_ranges(handler, data[:-1])))
    assert re.search(r"its length was \d+ bytes and is \d+ now", refusal(address))


def _chunked(handler: web.Handler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for start in range(0, len(data), 50_000):
        part = data[start : start + 50_000]
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")


def test_a_note_says_how_to_read_less(server: web.WebServer, long_clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from sosampler.inference import select

    address = server.add("/a.mp4", long_clip)
    monkeypatch.setattr(select, "_NOTED_BYTES", 100_000)
    note = "1 MB were read; of an MP4 file, keyframe candidates need far less, no more than it has keyframes"
    for mode, notes in (("exact", (note,)), ("keyframe", ())):
        assert so.select(address, 2, policy="uniform", candidates=mode, schemes=("http",)).notes == notes
    assert not so.select(long_clip, 2, policy="uniform").notes


# ---- which addresses are opened


@pytest.mark.parametrize("scheme", ["https", "http", "s3", "gs", "hf"])
def test_a_scheme_is_opened_only_where_it_is_allowed(scheme: str) -> None:
    others = tuple({"https", "http", "s3", "gs", "hf"} - {scheme})
    for schemes in ((), others):
        with pytest.raises(so.VideoError, match=f"--allow-scheme {scheme} or"):
            so.select(f"{scheme}://example.org/a.mp4", schemes=schemes)


@pytest.mark.parametrize("address", ["ftp://h/a.mp4", "file:///etc/passwd", "data://x", "HTTPX://h/a", "rtsp://h/a"])
def test_unknown_schemes_are_refused(address: str) -> None:
    what = "for `watch`" if address.startswith("rtsp") else "unknown"
    with pytest.raises(so.VideoError, match=f"is {what}; addresses begin with https, http, s3, gs, hf"):
        so.select(address, schemes=("https", "http"))
    with pytest.raises(so.InvalidArgument, match="the scheme 'ftp' is unknown; choose of: https"):
        so.select("a.mp4", schemes=("ftp",))
    with pytest.raises(so.InvalidArgument, match=r"schemes='https' must be a tuple"):
        so.select("a.mp4", schemes="https")


def test_a_path_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(so.VideoError, match="`select` and `classify` open addresses, given as text"):
        so.select(Path("https://example.org/a.mp4"), schemes=("https",))
    assert not is_address(Path("https://example.org"))
    with pytest.raises(so.VideoError, match="torchcodec opens no addresses"):
        so.select("https://example.org/a.mp4", decoder="torchcodec", schemes=("https",))


def test_names_hold_no_secrets() -> None:
    assert shown_address(f"https://u:{SECRET}@h:1/a/b.mp4?k={SECRET}#{SECRET}") == "https://h:1/a/b.mp4"
    assert shown_address(f"s3://u:{SECRET}@bucket/a?b#c.mp4") == "s3://bucket/a?b#c.mp4"
    assert SECRET not in shown_address(f"https://[{SECRET}/a.mp4")
    assert SECRET not in shown_address(f"https://u:{SECRET}@{SECRET}@h/a.mp4")
    assert source_name(f"https://u:{SECRET}@h/a?{SECRET}") == "https://h/a"
    file = io.BytesIO(b"no video")
    file.name = f"https://h/a.mp4?{SECRET}"
    with pytest.raises(so.VideoError, match=r"^https://h/a\.mp4: ") as caught:
        so.select(file)
    assert SECRET not in str(caught.value)


# ---- what servers do


def test_a_login_is_sent_to_its_server_alone(server: web.WebServer, clip_bytes: bytes) -> None:
    with web.serving() as other:
        there = other.add("/b.mp4", clip_bytes)
        address = server.add("/a.mp4", answer=web.redirect(there)).replace("//", f"//me:{SECRET}@")
        assert so.select(f"{address}?q={SECRET}", 2, schemes=("http",)).video == f"{server.url}/a.mp4"
        assert server.requests[0][0] == f"/a.mp4?q={SECRET}"
        assert server.requests[0][1]["Authorization"] == "Basic bWU6czNjcmV0"
        assert len(server.requests) == 1  # later ranges come from where the redirect led
        assert not any("Authorization" in headers or SECRET in path for path, headers in other.requests)


def test_five_redirects_are_followed(server: web.WebServer, clip_bytes: bytes) -> None:
    for number in range(6):
        server.add(f"/{number}.mp4", answer=web.redirect(f"/{number + 1}.mp4"))
    server.add("/6.mp4", clip_bytes)
    assert len(so.select(f"{server.url}/1.mp4", 2, schemes=("http",))) == 2
    assert "redirects more than 5 times" in refusal(f"{server.url}/0.mp4")


def test_where_a_redirect_led_may_expire(server: web.WebServer, long_clip: bytes) -> None:
    address = server.add("/a.mp4", long_clip, web.redirect("/b.mp4"))
    server.add("/b.mp4", long_clip, web.after(1, web.failing(1, web.status(403))))
    sel = so.select(address, 2, schemes=("http",), limits=quick())
    assert [path for path, _ in server.requests[:5]] == ["/a.mp4", "/b.mp4", "/b.mp4", "/a.mp4", "/b.mp4"]
    assert len(sel) == 2


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (web.status(404), r"not found \(HTTP 404\); check the address"),
        (web.status(403), r"access is denied \(HTTP 403\); check that you may read it"),
        (web.status(401), r"a login is needed \(HTTP 401\)"),
        (web.status(403, b"<Message>Request has expired</Message>"), r"has expired \(HTTP 403\); get a new one"),
        (web.status(503), r"the server is in trouble \(HTTP 503\); try again later"),
        (web.status(418), r"the server refuses the request \(HTTP 418\)"),
        (web.status(206, b"x" * 10, Content_Encoding="gzip"), "sends it compressed"),
        (web.lying(announce=False), "does not say how long the file is"),
        (web.lying(size=1 << 70), "the server announces 1180591620717411303424 bytes"),
        (web.lying(first=1), "sent bytes 1 to 65536 where 0 to 65535 were requested"),
        (web.lying(short=5), "65531 of the 65536 bytes came that the server had announced"),
        (web.lying(size=2 * 10**6), r"\d+ of the \d+ bytes came that the server had announced"),
        (web.after(1, web.lying(size=5)), r"its length was \d+ bytes and is 5 now"),
        (web.after(1, web.status(416)), "does not have the bytes that it announced"),
        (web.after(2, web.hang_up), r"the connection failed \(RemoteDisconnected\)"),
        (web.redirect("https://example.org/a"), "redirects to another scheme, https://example.org/a; give that"),
        (web.redirect("file:///etc/passwd"), "redirects to another scheme"),
        (web.redirect("http://[bad"), "redirects to what is no address"),
        (web.redirect("/a.mp4"), "redirects more than 5 times"),
        (web.status(416, Content_Range="bytes */0"), r"the file is empty \(zero bytes\)"),
    ],
)
def test_each_refusal_is_one_sentence(
    answer: web.Answer, sentence: str, server: web.WebServer, long_clip: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert re.search(sentence, refusal(server.add("/a.mp4", long_clip, answer)))
    assert capfd.readouterr().err == ""  # PyAV prints what it drops


def test_hosts_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "the connection failed (ConnectionRefusedError)" in refusal(f"http://127.0.0.1:{port}/a.mp4")

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert "its host is not known" in refusal("http://nowhere.example/a.mp4")
    for address in ("http://h:port/a", "http:///a", "http://[::1/a"):
        with pytest.raises(so.VideoError, match="is no valid address"):
            so.select(address, schemes=("http",))


def _certificate(folder: Path) -> Path:
    """Return a certificate of this machine, with its key, that nobody has signed but itself."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *private) + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


def test_certificates_are_checked(tmp_path: Path, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with web.serving() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.add("/a.mp4", clip_bytes)
        port = server.server_address[1]
        with pytest.raises(so.VideoError, match="its certificate is not trusted; check the address"):
            so.select(f"https://localhost:{port}/a.mp4", 2, schemes=("https",))
        monkeypatch.setattr(http_ranges, "_tls", lambda: ssl.create_default_context(cafile=pem))
        assert len(so.select(f"https://localhost:{port}/a.mp4", 2, schemes=("https",))) == 2
        assert server.requests[0][1]["Host"] == f"localhost:{port}"
        with pytest.raises(so.VideoError, match="its certificate is not trusted"):  # it is of another name
            so.select(f"https://127.0.0.1:{port}/a.mp4", 2, schemes=("https",))


@pytest.mark.parametrize("answer", [web.stall, web.drip, web.after(1, web.stall)])
def test_a_server_that_stalls_is_given_up(
    answer: web.Answer, server: web.WebServer, long_clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_ranges, "MAX_STALL_SECONDS", 0.2)
    address = server.add("/a.mp4", long_clip, answer)
    begin = time.monotonic()
    assert "the server stalls" in refusal(address)
    assert time.monotonic() - begin < 2


def test_the_time_of_a_video_includes_waiting(server: web.WebServer, long_clip: bytes) -> None:
    address = server.add("/a.mp4", long_clip, web.stall)
    assert "within the limit timeout=0.3 seconds" in refusal(address, timeout=0.3, retries=9)


def test_slow_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for bytes is not FFmpeg's search for a packet, after which a file counts as cut off."""
    now = [0.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pyav_index, "monotonic", lambda: now[0])

    class Slow:
        def read(self, size: int) -> bytes:
            now[0] += 10.0
            return bytes(size)

    with limits.TimeLimit("x", so.Limits(timeout=100)) as time_limit:
        file = pyav_index._TimedFile(Slow(), time_limit)
        time_limit.begin_step(limits.MAX_PACKET_SECONDS)
        assert [len(file.read(1)) for _ in range(5)] == [1] * 5
        now[0] += limits.MAX_PACKET_SECONDS + 1  # of FFmpeg itself
        assert file.read(1) == b""
        time_limit.begin_step(limits.MAX_PACKET_SECONDS)
        assert [len(file.read(1)) for _ in range(5)] == [1, 1, 1, 1, 0]  # the video has its 100 seconds, and no more


@pytest.mark.parametrize("bad", [web.status(503), web.hang_up, web.lying(short=9)])
def test_requests_are_repeated(
    bad: web.Answer, server: web.WebServer, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(http_ranges.time, "sleep", waited.append)
    address = server.add("/a.mp4", clip_bytes, web.failing(2, bad))
    assert len(so.select(address, 2, schemes=("http",), limits=so.Limits(retries=2))) == 2
    assert waited == [0.5, 1.0]
    server.add("/a.mp4", clip_bytes, web.failing(2, bad))
    refusal(address, retries=1)


def test_bytes_are_limited(server: web.WebServer, long_clip: bytes) -> None:
    address = server.add("/a.mp4", long_clip)
    text = refusal(address, max_read=3 * BLOCK)
    assert f"more than max_read={3 * BLOCK} bytes of it are needed; keyframe candidates of an MP4 file need" in text
    assert server.sent <= 3 * BLOCK


# ---- which machines are reached


def _world(monkeypatch: pytest.MonkeyPatch, **hosts: str) -> list[str]:
    """Let names stand for IP addresses, all of which are the test's own server; return those that were reached."""
    reached: list[str] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        name = host.replace(".example", "")
        if name not in hosts:
            return look_up(host, port, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in hosts[name].split()]

    def connected(self: socket.socket, where: Any) -> None:
        reached.append(where[0])
        connect(self, ("127.0.0.1", where[1]))

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket.socket, "connect", connected)
    return reached


@pytest.mark.parametrize(
    "ip", ["127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0"]
)
def test_a_public_server_cannot_lead_into_the_local_network(
    ip: str, server: web.WebServer, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = _world(monkeypatch, public="8.8.8.8", other="1.1.1.1", local=ip)
    port = server.server_address[1]
    address = f"http://public.example:{port}/a.mp4"
    server.add("/b.mp4", clip_bytes)
    server.add("/a.mp4", answer=web.redirect(f"http://local.example:{port}/b.mp4"))
    assert "it leads to local.example, which is in a local network" in refusal(address)
    assert reached == ["8.8.8.8"]
    host = f"[{ip}]" if ":" in ip else ip
    server.add("/a.mp4", answer=web.redirect(f"http://{host}:{port}/b.mp4"))
    assert "which is in a local network" in refusal(address)
    server.add("/a.mp4", answer=web.redirect(f"http://other.example:{port}/b.mp4"))
    assert len(so.select(address, 2, schemes=("http",))) == 2
    assert set(reached) == {"8.8.8.8", "1.1.1.1"}
    # Given directly, it is reached.
    assert len(so.select(f"http://local.example:{port}/b.mp4", 2, schemes=("http",))) == 2


def test_a_second_look_up_cannot_lead_elsewhere(
    server: web.WebServer, long_clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"public": "10.0.0.1 8.8.8.8"}
    reached = _world(monkeypatch, **hosts)
    address = f"http://public.example:{server.server_address[1]}/a.mp4"
    server.add("/a.mp4", long_clip, web.closing_ranges)
    assert len(so.select(address, 2, schemes=("http",))) == 2
    assert set(reached) == {"8.8.8.8"}
    assert len(reached) > 1
    answers = iter(["8.8.8.8"])
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _, port, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "10.0.0.1"), port))],
    )
    assert "which is in a local network" in refusal(address)


def test_what_is_public() -> None:
    for text in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert http_ranges._is_public(text)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "169.254.0.0/16", "100.64.0.0/10"):
        assert not http_ranges._is_public(ipaddress.ip_network(network)[5])
        assert not http_ranges._is_public(f"::ffff:{ipaddress.ip_network(network)[5]}")
        assert not http_ranges._is_public(f"64:ff9b::{ipaddress.ip_network(network)[5]}")
    assert not http_ranges._is_public("2002:0a00:0001::1")  # 10.0.0.1
    assert http_ranges._is_public("2002:0808:0808::1")
    assert not http_ranges._is_public("fe80::1%eth0")


def test_candidates_for_networks_elsewhere_say_what_they_cost(server: web.WebServer, clip_bytes: bytes) -> None:
    """As `Pipeline` and Ray decode them."""
    from sosampler.inference.decode import DecodeStep
    from sosampler.inference.options import SelectOptions
    from sosampler.inference.selection import CandidateFrames

    options = SelectOptions(num_frames=2, num_candidates=5, policy="uniform", schemes=("http",))
    decoded = DecodeStep.of_candidates(options)(server.add("/a.mp4", clip_bytes))
    assert isinstance(decoded, CandidateFrames)
    assert decoded.transfer == {"bytes_read": len(clip_bytes), "file_bytes": len(clip_bytes), "requests": 1}
    assert "schemes" not in options.to_dict()
    assert options.identity() == SelectOptions(num_frames=2, num_candidates=5, policy="uniform").identity()
