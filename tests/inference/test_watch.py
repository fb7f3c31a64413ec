"""Frames of a stream are chosen while it runs: the right ones, with bounded memory, whatever the stream does."""

from __future__ import annotations

import base64
import gc
import io
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import sosampler as so
from sosampler.video import streams
from sosampler.video.pyav_decode import FrameConverter
from sosampler.video.streams import LiveFrame, camera_arguments, stream_name
from sosampler.video.synthetic import encode_video, numbered_frame, numbered_video, read_number
from tests.stream_server import answering, rtsp, sending, serving

SIZE: dict[str, Any] = {"width": 96, "height": 64, "gop": 15}


def numbers(window: so.Window) -> list[int]:
    return [read_number(frame) for frame in window.frames]


def transport(num_frames: int = 60, **settings: Any) -> bytes:
    """Numbered frames at 30 fps as MPEG-TS, whose packets of 188 bytes can be joined and cut."""
    return numbered_video(num_frames=num_frames, container_format="mpegts", **{**SIZE, **settings})


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_FIRST_PAUSE", 0.01)


# ---- which frames


@pytest.mark.parametrize(("policy", "num_frames"), [("uniform", 5), ("frame-difference", 4), ("general", 4)])
def test_one_window_chooses_as_select_does(policy: str, num_frames: int) -> None:
    video = numbered_video(num_frames=90, container_format="matroska", **SIZE)
    (window,) = so.watch(io.BytesIO(video), num_frames, window=3.0, policy=policy)
    selection = so.select(video, num_frames, policy=policy, candidates="exact")
    assert numbers(window) == selection.frame_indices.tolist()
    assert window.num_candidates == selection.num_candidates
    np.testing.assert_allclose(window.pts_seconds, selection.pts_seconds, atol=1e-3)
    np.testing.assert_array_equal(window.frames, selection.frames)
    if selection.scores is not None:
        np.testing.assert_allclose(window.scores, selection.scores, rtol=1e-6)


def test_a_trained_sampler_and_auto_choose_as_in_select(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.factories import TINY

    so.SOSampler(backbone=TINY, input_size=32, num_classes=3).save_pretrained(tmp_path / "sampler")
    video = numbered_video(num_frames=90, container_format="matroska", **SIZE)
    for policy, num_frames in ((tmp_path / "sampler", 3), ("general", so.Auto(min=2, max=5))):
        (window,) = so.watch(io.BytesIO(video), num_frames, window=3.0, num_candidates=10, policy=policy)
        selection = so.select(video, num_frames, num_candidates=10, policy=policy, candidates="exact")
        assert numbers(window) == selection.frame_indices.tolist()
        assert window.policy == selection.policy


def test_candidates_are_the_frames_shown_in_the_middle_of_each_part() -> None:
    """At a variable rate, with a gap longer than a window, against a search through all times."""
    ticks = [0, 1, 2, 3, 9, 10, 11, 20, 21, 22, 26, 27, 28, 29, 100, 101, 118, 119, 120, 130]  # of 1/10 s
    frames = [numbered_frame(number, 96, 64) for number in range(len(ticks))]
    video = encode_video(frames, fps=10, pts=ticks, container_format="matroska", codec_options={"bf": "0"})
    length, parts = 2.0, 4
    windows = list(so.watch(io.BytesIO(video), parts, window=length, policy="uniform"))
    expected: dict[float, list[int]] = {}
    for start in np.arange(0, 13.0, length).tolist():
        inside = [number for number, tick in enumerate(ticks) if start <= tick / 10 < start + length]
        shown = set()
        for part in range(parts):
            moment = start + (part + 0.5) * length / parts
            before = [number for number in inside if ticks[number] / 10 <= moment]
            if before and moment <= ticks[-1] / 10:
                shown.add(before[-1])
        if inside:
            expected[start] = sorted(shown)
    assert {round(window.start_seconds, 3): numbers(window) for window in windows} == expected
    assert [window.ended_by for window in windows] == ["full"] * (len(windows) - 1) + ["end"]
    assert [window.number for window in windows] == list(range(len(windows)))
    assert 4.0 not in expected, "the gap holds empty windows, which are not given"
    for window in windows:
        assert window.pts_seconds.tolist() == [ticks[number] / 10 for number in numbers(window)]


def test_rate_of_candidates_and_a_last_window_without_a_moment() -> None:
    video = transport(62)
    windows = list(so.watch(io.BytesIO(video), 2, window=1.0, fps=10, policy="random", seed=3))
    assert [window.num_candidates for window in windows] == [10, 10, 1]
    assert numbers(windows[-1]) == [61]  # ended before the middle of its first part: its last frame
    again = list(so.watch(io.BytesIO(video), 2, window=1.0, fps=10, policy="random", seed=3))
    assert [numbers(window) for window in again] == [numbers(window) for window in windows]
    shift = [[number - 30 * window.number for number in numbers(window)] for window in windows[:2]]
    assert shift[0] != shift[1], "each window has a seed of its own"


def test_sizes_and_rotation() -> None:
    turned = numbered_video(num_frames=30, container_format="matroska", rotation=90, **SIZE)
    for size, shape in ((None, (64, 96)), (32, (32, 48)), ((40, 80), (40, 80))):
        (window,) = so.watch(io.BytesIO(turned), 1, window=1.0, policy="uniform", size=size)
        assert window.frames.shape == (1, *shape, 3)
        if size is None:
            np.testing.assert_array_equal(window.frames, so.select(turned, 1, policy="uniform").frames)


def test_a_policy_of_ones_own_sees_small_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosampler.inference.select._VIEW_SIZE", 32)
    seen = []

    class Last(so.Policy):
        needs = frozenset({"frames"})

        def scores(self, batch: so.Batch) -> Any:
            seen.append(batch.frames.shape)
            return np.arange(batch.num_candidates)[None]

    converted = _count_conversions(monkeypatch)
    windows = list(so.watch(io.BytesIO(transport(60)), 2, window=1.0, num_candidates=6, policy=Last()))
    assert seen == [(1, 6, 32, 48, 3)] * 2
    assert [numbers(window) for window in windows] == [[22, 27], [52, 57]]
    assert [window.scores.tolist() for window in windows if window.scores is not None] == [[4, 5]] * 2
    assert converted == ([(32, 48)] * 6 + [(64, 96)] * 2) * 2  # candidates and chosen frames alone


def _count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    converted: list[tuple[int, ...]] = []
    convert = FrameConverter.pixels

    def counted(self: FrameConverter, frame: Any) -> Any:
        image = convert(self, frame)
        converted.append(image.shape[:2])
        return image

    monkeypatch.setattr(FrameConverter, "pixels", counted)
    return converted


# ---- memory


def test_memory_is_that_of_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of the stream: the candidates of a window, and the frame that came last."""
    most, count = 0, 0
    frames_of = streams.LiveStream.frames

    def counting(self: streams.LiveStream) -> Any:
        nonlocal most, count
        for live in frames_of(self):
            yield live
            count += 1
            if count % 15 == 0:
                most = max(most, sum(type(each) is LiveFrame for each in gc.get_objects()))

    monkeypatch.setattr(streams.LiveStream, "frames", counting)
    num = sum(len(window) for window in so.watch(io.BytesIO(transport(300)), 2, window=2.0, policy="frame-difference"))
    assert (num, count) == (10, 301)
    assert 20 <= most <= 32 + 4  # T, the last frame, and those that this test holds


def test_a_window_that_takes_too_much_memory_is_refused() -> None:
    pixels = 96 * 64
    needed = 32 * (pixels * 3 // 2 + 2 * 3 * pixels) + 2 * 3 * pixels
    data = transport(30)
    limits = so.Limits(max_bytes=needed + 32 * 64 * 64)  # rows of frames are padded
    assert list(so.watch(io.BytesIO(data), 2, policy="frame-difference", limits=limits))
    with pytest.raises(so.LimitExceeded, match=r"a window of 32 candidates of 96x64 takes .* max_bytes=.*lower"):
        list(so.watch(io.BytesIO(data), 2, policy="frame-difference", limits=so.Limits(max_bytes=needed - 1)))
    with pytest.raises(so.LimitExceeded, match="max_pixels"):
        list(so.watch(io.BytesIO(data), 2, limits=so.Limits(max_pixels=pixels - 1)))
    with pytest.raises(so.VideoError, match="none of its frames can be decoded"):  # FFmpeg pads what it decodes
        list(so.watch(io.BytesIO(data), 2, limits=so.Limits(max_pixels=pixels)))
    grows = io.BytesIO(data + transport(240, width=128, height=96))
    windows = so.watch(grows, 2, window=10.0, policy="uniform", limits=so.Limits(max_pixels=9000))
    assert next(windows).ended_by == "lost"  # what came before is not lost with it
    with pytest.raises(so.LimitExceeded, match="128x96 = 12288 pixels is over the limit max_pixels=9000"):
        next(windows)


# ---- files and pipes


def test_a_growing_file(tmp_path: Path) -> None:
    """Windows come while it grows, and it ends when it has not grown for a while."""
    data, path = transport(120), tmp_path / "live.ts"
    path.write_bytes(data[: len(data) // 2])
    windows = so.watch(path, 2, window=1.0, policy="uniform", idle=0.4)
    first = next(windows)
    assert numbers(first) == [7, 22]
    with open(path, "ab") as file:
        for start in range(len(data) // 2, len(data), 5000):
            file.write(data[start : start + 5000])
            file.flush()
    rest = list(windows)
    assert [numbers(window) for window in rest] == [[37, 52], [67, 82], [97, 112]]
    assert [window.ended_by for window in (first, *rest)] == ["full", "full", "full", "end"]
    walls = np.concatenate([window.wall_seconds for window in (first, *rest)])
    assert (np.diff(walls) >= 0).all()
    assert abs(walls[-1] - time.time()) < 60
    assert first.wall_times[0].startswith(time.strftime("%Y-%m", time.gmtime(walls[0])))


@contextmanager
def pipe(*parts: bytes, close: bool = True) -> Iterator[Any]:
    """A pipe into which a thread writes; it stays open without `close`."""
    reading, writing = os.pipe()

    def write() -> None:
        for part in parts:
            os.write(writing, part)
        if close:
            os.close(writing)

    with open(reading, "rb") as file:
        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        yield file
        thread.join(10)
    if not close:
        os.close(writing)


def test_a_pipe_ends_with_its_last_window() -> None:
    with pipe(*(transport(60)[i : i + 1000] for i in range(0, len(transport(60)), 1000))) as file:
        windows = list(so.watch(file, 2, window=1.5, policy="uniform"))
    assert [numbers(window) for window in windows] == [[11, 33], [56]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe(tmp_path: Path) -> None:
    """Opened here, so it must be held open here until its end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_bytes, args=(transport(60),), daemon=True)
    thread.start()
    windows = list(so.watch(path, 2, window=1.5, policy="uniform", idle=5))
    thread.join(10)
    assert [numbers(window) for window in windows] == [[11, 33], [56]]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_that_nobody_writes_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(so.VideoError, match=r"pipe: gave nothing for 0\.2 seconds"):
        list(so.watch(path, idle=0.2))
    # A writer that comes later, but in time, is read.
    thread = threading.Timer(0.5, path.write_bytes, args=(transport(60),))
    thread.start()
    windows = list(so.watch(path, 2, window=1.5, policy="uniform", idle=10))
    thread.join(10)
    assert [numbers(window) for window in windows] == [[11, 33], [56]]


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot wait for pipes")
def test_a_pipe_that_stalls() -> None:
    with pipe(transport(60), close=False) as file:
        windows = so.watch(file, 2, window=1.5, policy="uniform", idle=0.3)
        assert numbers(next(windows)) == [11, 33]
        short = next(windows)
        assert short.ended_by == "lost"
        assert numbers(short) == [56]
        with pytest.raises(so.VideoError, match=r"gave nothing for 0\.3 seconds; check its source, or raise --idle"):
            next(windows)
    with pipe(close=False) as file, pytest.raises(so.VideoError, match=r"gave nothing for 0\.1 seconds"):
        list(so.watch(file, idle=0.1))


def test_a_bare_stream_without_times() -> None:
    """H.264 without a container has no clock; frames count at its rate."""
    video = numbered_video(num_frames=50, container_format="h264", fps=25, **SIZE)
    windows = list(so.watch(io.BytesIO(video), 2, window=1.0, policy="uniform"))
    assert [numbers(window) for window in windows] == [[6, 18], [31, 43]]
    np.testing.assert_allclose(windows[1].pts_seconds, [31 / 25, 43 / 25])


# ---- streams that change


def test_size_changes_and_times_that_jump_back() -> None:
    data = transport(40) + transport(45, width=128, height=96) + transport(50, width=128, height=96)
    windows = list(so.watch(io.BytesIO(data), 2, window=1.0, policy="uniform"))
    ends = [(window.ended_by, window.frames.shape[1:3], numbers(window)) for window in windows]
    small, large = (64, 96), (96, 128)
    assert ends[0] == ("full", small, [7, 22])
    assert ends[1] == ("size", small, [37])
    assert ends[2] == ("full", large, [7, 22])
    assert ends[3] == ("jump", large, [37])
    assert ends[4] == ("full", large, [7, 22])
    assert ends[5] == ("end", large, [37])
    begins = [round(window.start_seconds * 30) for window in windows]
    assert begins == [begins[0], begins[0] + 30] * 3


def test_the_codec_changes() -> None:
    """The decoder is opened anew behind packets that it does not know; what lies between is lost."""
    other = transport(240, codec="mpeg2video")
    windows = list(so.watch(io.BytesIO(transport(45) + other), 2, window=1.0, policy="uniform"))
    assert numbers(windows[0]) == [7, 22]
    change = next(number for number, window in enumerate(windows) if window.ended_by == "lost")
    assert 0 < change < len(windows) - 2
    assert any("damaged" in note for window in windows for note in window.notes)
    last = numbers(windows[-2])
    assert windows[-1].ended_by == "end"
    assert len(last) == 2
    assert last[1] - last[0] == 15
    with pytest.raises(so.VideoError, match="packets do not decode any more"):
        list(so.watch(io.BytesIO(transport(45) + other), 2, policy="uniform", reconnects=0))


def test_it_ends_in_the_middle_of_a_packet() -> None:
    data = transport(60)
    whole = list(so.watch(io.BytesIO(data), 3, window=1.0, policy="uniform"))
    cut = list(so.watch(io.BytesIO(data[: len(data) * 3 // 4 + 77]), 3, window=1.0, policy="uniform"))
    assert numbers(cut[0]) == numbers(whole[0])
    assert cut[1].ended_by == "end"
    assert numbers(cut[1]) == numbers(whole[1])[: len(cut[1])]
    with pytest.raises(so.VideoError, match="cannot be opened as a stream"):
        list(so.watch(io.BytesIO(data[:50])))


def test_a_broken_middle() -> None:
    """What comes before and behind damaged packets is as ever."""
    data = bytearray(transport(90, codec_options={"bf": "0"}))
    generator = np.random.default_rng(0)
    for start in range(188 * (len(data) // 188 // 3), 188 * (len(data) // 188 // 2), 188):
        data[start + 8 : start + 188] = generator.bytes(180)
    windows = list(so.watch(io.BytesIO(bytes(data)), 3, window=1.0, policy="uniform"))
    assert [numbers(windows[0]), numbers(windows[-1])] == [[5, 15, 25], [65, 75, 85]]


# ---- the network


def test_tcp_reconnects_and_gives_up() -> None:
    data, notes = transport(60), []
    stall = threading.Event()
    parts = (sending(data[: len(data) * 3 // 4 + 50]), sending(b""), sending(data, stall=stall))
    with serving(*parts) as port:
        windows = so.watch(f"tcp://127.0.0.1:{port}", 2, window=1.0, policy="uniform", schemes=("tcp",), idle=0.4)
        try:
            for window in windows:
                notes.append((window.ended_by, numbers(window)))
        except so.VideoError as error:
            message = str(error)
        stall.set()
    assert notes[0] == ("full", [7, 22])
    lost = next(number for number, (ended_by, _) in enumerate(notes) if ended_by == "lost")
    assert notes[lost + 1 :] == [("full", [7, 22]), ("lost", [37, 52])]  # times begin again, and so do windows
    assert "5 attempts in a row to open it again failed" in message


def test_a_network_stream_that_ends() -> None:
    """Without reconnects the end of the connection is the end."""
    with serving(sending(transport(60))) as port:
        windows = list(so.watch(f"tcp://127.0.0.1:{port}", 2, policy="uniform", schemes=("tcp",), reconnects=0))
    assert [window.ended_by for window in windows] == ["end"]
    stall = threading.Event()
    with serving(sending(transport(60)[:20000], stall=stall)) as port:
        windows = so.watch(f"tcp://127.0.0.1:{port}", 2, schemes=("tcp",), reconnects=0, policy="uniform", idle=0.3)
        assert next(windows).ended_by == "lost"
        with pytest.raises(so.VideoError, match=r"gave nothing for 0\.3 seconds"):
            next(windows)
        stall.set()


def test_http() -> None:
    data, requests = transport(60), []
    answers = (
        answering(data[:15000], length=len(data), requests=requests),  # the server breaks off
        answering(data, length=len(data), requests=requests),
    )
    with serving(*answers) as port:
        address = f"http://me:sec%20ret@127.0.0.1:{port}/live.ts?token=hidden"
        windows = list(so.watch(address, 2, window=1.0, policy="uniform", schemes=("http",)))
    assert [window.ended_by for window in windows][-2:] == ["full", "end"]
    assert "lost" in [window.ended_by for window in windows]
    assert [numbers(window) for window in windows[-2:]] == [[7, 22], [37, 52]]
    assert windows[0].source == f"http://127.0.0.1:{port}/live.ts"
    assert requests[0].startswith("GET /live.ts?token=hidden HTTP/1.1")
    assert "Authorization: Basic bWU6c2VjIHJldA==" in requests[0]  # base64 of me:sec ret
    page = answering(b"<html>back soon", "Content-Type: text/html", length=15)
    with serving(answering(data[:15000], length=len(data)), page) as port:
        windows = so.watch(f"http://127.0.0.1:{port}/", 2, policy="uniform", schemes=("http",), reconnects=1)
        assert next(windows).ended_by == "lost"
        with pytest.raises(so.VideoError, match=r"cannot be opened as a stream.* 1 attempts in a row to open it again"):
            next(windows)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:9000], data[9000:])) + b"0\r\n\r\n"
    with serving(answering(chunks, "Transfer-Encoding: chunked")) as port:
        (window,) = so.watch(f"http://127.0.0.1:{port}/", 2, policy="uniform", schemes=("http",))
    assert window.ended_by == "end"


@pytest.mark.parametrize(
    ("status", "header", "body", "message"),
    [
        ("404 Not Found", "X: 1", b"", "HTTP 404, not with a stream; check address and login"),
        ("403 Forbidden", "X: 1", b"", "HTTP 403"),
        ("302 Found", "Location: http://127.0.0.1:1/?secret", b"", "HTTP 302.*give the address that it redirects to"),
        ("200 OK", "Content-Type: video/mp4", b"#EXTM3U\n#EXTINF:1,\nhttp://other/a.ts\n", "a playlist or manifest"),
        ("200 OK", "Content-Type: text/html", b"<html>" + b"no stream " * 50, "cannot be opened as a stream"),
        ("200 OK", "X: 1", b"", "ended before its first byte"),
    ],
)
def test_http_answers_that_are_no_stream(status: str, header: str, body: bytes, message: str) -> None:
    serve = answering(body, header, status=status, length=len(body))
    with serving(serve) as port, pytest.raises(so.VideoError, match=message) as raised:
        list(so.watch(f"http://me:hidden@127.0.0.1:{port}/?token=hidden", schemes=("http",)))
    assert "hidden" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_what_a_server_writes_is_not_shown() -> None:
    """It may repeat the request, with the query, in place of a status line or of the length of a chunk."""

    secret = "hidden"

    def echo(connection: Any) -> None:
        connection.sendall(b"echo " + connection.recv(10_000))

    def bad_chunk(connection: Any) -> None:
        request = connection.recv(10_000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + request)

    for serve, message in ((echo, r"no answer \(BadStatusLine\)"), (bad_chunk, r"connection was lost \(\w+\)")):
        with serving(serve) as port, pytest.raises(so.VideoError, match=message) as raised:
            list(so.watch(f"http://127.0.0.1:{port}/live?token={secret}", schemes=("http",), reconnects=0))
        assert secret not in "".join(traceback.format_exception(raised.value))


def test_letters_beyond_ascii_are_quoted() -> None:
    requests: list[str] = []
    data = transport(30)
    with serving(answering(data, length=len(data), requests=requests)) as port:
        address = f"http://mé:ü@127.0.0.1:{port}/ä%20b.ts?t=ö"
        (window,) = so.watch(address, 2, window=1.0, policy="uniform", schemes=("http",))
    assert numbers(window) == [7, 22]
    assert requests[0].startswith("GET /%C3%A4%20b.ts?t=%C3%B6 HTTP/1.1")
    login = base64.b64encode("mé:ü".encode()).decode()
    assert f"Authorization: Basic {login}\r\n" in requests[0]
    with pytest.raises(so.VideoError, match=r"no connection \(UnicodeError\); check host and port"):
        list(so.watch(f"tcp://{'a' * 70}ä:1", schemes=("tcp",)))


def test_images_of_a_web_camera_get_the_time_at_which_they_come() -> None:
    """Motion JPEG over HTTP, which has no clock."""
    images = []
    for number in range(8):
        stream = av.CodecContext.create("mjpeg", "w")
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        stream.time_base = Fraction(1, 25)
        frame = av.VideoFrame.from_ndarray(numbered_frame(number, 96, 64), format="rgb24").reformat(format="yuvj420p")
        data = b"".join(bytes(packet) for packet in stream.encode(frame))
        images.append(b"--edge\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(data), data))

    def serve(connection: Any) -> None:
        answering(b"", "Content-Type: multipart/x-mixed-replace; boundary=edge")(connection)
        for image in images:
            connection.sendall(image)
            time.sleep(0.05)

    with serving(serve) as port:
        began = time.time()
        address = f"http://127.0.0.1:{port}/"
        (window,) = so.watch(
            address, 4, num_candidates=400, window=60.0, policy="random", schemes=("http",), reconnects=0
        )
    assert (np.diff(numbers(window)) > 0).all()
    assert (np.abs(window.pts_seconds - began) < 60).all()
    assert (np.diff(window.pts_seconds) > 0.02).all()


def test_rtsp_inside_of_its_own_connection() -> None:
    requests: list[str] = []
    with serving(rtsp(60, requests=requests)) as port:
        address = f"rtsp://me:hidden@127.0.0.1:{port}/live"
        windows = list(so.watch(address, 3, window=1.0, policy="uniform", schemes=("rtsp",), reconnects=0))
    assert [window.source for window in windows] == [f"rtsp://127.0.0.1:{port}/live"] * 2
    for window in windows:
        # FFmpeg gives times from the second packet on.
        np.testing.assert_allclose(window.pts_seconds, (np.array(numbers(window)) - 1) / 30, atol=2e-3)
    assert [number for window in windows for number in numbers(window)] == [6, 16, 26, 36, 46, 56]
    assert "RTP/AVP/TCP" in next(request for request in requests if request.startswith("SETUP"))


def test_an_rtsp_server_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_PROBE_SECONDS", 0.2)
    stall = threading.Event()
    with serving(sending(b"", stall=stall)) as port:
        began = time.monotonic()
        with pytest.raises(so.VideoError, match="cannot be opened as a stream"):
            list(so.watch(f"rtsp://127.0.0.1:{port}/", schemes=("rtsp",), idle=0.3))
        assert time.monotonic() - began < 5
        stall.set()


# ---- what is refused


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("tcp://127.0.0.1:1", {}, r'--allow-scheme tcp or schemes=\("tcp",\)'),
        ("rtsp://me:hidden@host/live", {"schemes": ("http",)}, r"rtsp://host/live: .*--allow-scheme rtsp"),
        (
            "udp://127.0.0.1:1",
            {"schemes": ("tcp",)},
            "the scheme 'udp' is unknown; addresses begin with http, https, tcp",
        ),
        ("file:///etc/passwd", {}, "the scheme 'file' is unknown"),
        ("tcp://127.0.0.1", {"schemes": ("tcp",)}, "write tcp://HOST:PORT/PATH"),
        ("http://host:port/", {"schemes": ("http",)}, "not an address"),
        ("http://ho st/", {"schemes": ("http",)}, "not an address.*without spaces"),
        ("http://[::1/", {"schemes": ("http",)}, "not an address"),
        (
            "-",
            {"schemes": ("s3",)},
            "the scheme 's3' is for `select` and `classify`; choose of: http, https, tcp, rtsp",
        ),
        ("-", {"schemes": ("udp",)}, "the scheme 'udp' is unknown; choose of: http, https, tcp, rtsp, rtsps"),
        ("http://me:hid/den@host/", {"schemes": ("http",)}, r"^http://\.\.\.: not an address; write http://HOST:PORT"),
        ("-", {"schemes": "tcp"}, "must be a tuple of schemes"),
        ("-", {"window": 0}, "window=0 must be a number above 0"),
        ("-", {"idle": -1}, "idle=-1 must be a number above 0"),
        ("-", {"reconnects": -1}, "reconnects=-1 must be an int of at least 0"),
        ("-", {"policy": "keyframe"}, "'keyframe' chooses among keyframe candidates, which are for files"),
        ("-", {"fps": 0.1}, "fps=0.1 gives 1 candidates in a window of 10 s, fewer than num_frames=4; raise fps"),
        ("-", {"fps": 10_000, "window": 1e6}, "MAX_CANDIDATES"),
        ("-", {"num_candidates": 2}, "num_frames=4 is more than num_candidates=2"),
        ("-", {"camera_options": {"framerate": "30"}}, "camera options are for camera:NAME"),
        (7, {}, "a int is not a stream; give a path"),
        (io.StringIO(), {}, "opened as text"),
    ],
)
def test_arguments_are_refused_before_anything_is_opened(source: Any, options: Any, message: str) -> None:
    with pytest.raises(so.SosamplerError, match=message) as raised:
        so.watch(source, **options)
    assert "hid" not in str(raised.value)


def test_schemes_of_streams_are_not_for_select() -> None:
    with pytest.raises(
        so.InvalidArgument, match="the scheme 'rtsp' is for `watch`; choose of: https, http, s3, gs, hf"
    ):
        so.select("rtsp://host/live", schemes=("rtsp",))
    with pytest.raises(so.InvalidArgument, match="the scheme 'udp' is unknown; choose of: https, http, s3, gs, hf"):
        so.select("udp://host/live", schemes=("udp",))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.ts").write_bytes(b"ffconcat version 1.0\nfile /etc/passwd\n")
    (tmp_path / "empty.ts").write_bytes(b"")
    for source, message in (
        (tmp_path / "missing.ts", "cannot be read"),
        (tmp_path, "is neither a file nor a pipe"),
        (tmp_path / "list.ts", "a playlist or manifest, which names other files"),
        (tmp_path / "empty.ts", "ended before its first byte"),
    ):
        with pytest.raises(so.VideoError, match=message):
            list(so.watch(source, idle=0.1))


def test_a_file_without_a_frame_is_an_error(tmp_path: Path) -> None:
    """A plain MP4 file has its index at its end, so it is over before its first frame is found."""
    plain = numbered_video(num_frames=30, width=320, height=240, gop=1)
    assert plain.find(b"moov") > 1 << 15, "it is not in what is read at once"
    (tmp_path / "plain.mp4").write_bytes(plain)
    for source in (tmp_path / "plain.mp4", io.BytesIO(plain)):
        with pytest.raises(so.VideoError, match=r"none of its frames can be decoded.* MP4 file is for `select`"):
            list(so.watch(source, 1, policy="uniform", idle=0.1))


def test_secrets_of_addresses_are_not_shown() -> None:
    assert stream_name("https://u:p@[::1]:8443/a/b.ts?key=1#x") == "https://[::1]:8443/a/b.ts"
    assert stream_name("http://[u:p@") == "http://..."
    assert stream_name("-") == "<stdin>"


# ---- cameras, of which there are none where this is tested


def test_what_ffmpeg_opens_for_a_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    assert camera_arguments("2", "linux") == ("/dev/video2", "v4l2")
    assert camera_arguments("/dev/video9", "linux") == ("/dev/video9", "v4l2")
    assert camera_arguments("0", "darwin") == ("0", "avfoundation")
    assert camera_arguments("USB Camera", "win32") == ("video=USB Camera", "dshow")
    for name, platform in (("", "linux"), ("0", "aix")):
        with pytest.raises(so.InvalidArgument, match="write camera:0"):
            camera_arguments(name, platform)
    opened = []

    def open_instead(file: Any, options: Any, timeout: Any, container_format: Any) -> Any:
        opened.append((file, options, timeout, container_format))
        if len(opened) == 1:
            raise so.VideoError("no camera")
        return av.open(io.BytesIO(transport(30)))

    monkeypatch.setattr(streams, "open_for_reading", open_instead)
    monkeypatch.setattr(streams, "_CAMERAS", {streams.sys.platform: ("v4l2", "/dev/video")})
    options = {"video_size": "640x480"}
    with pytest.raises(so.VideoError, match="no camera"):
        list(so.watch("camera:0", camera_options=options))
    (window,) = so.watch("camera:0", 2, window=1.0, policy="uniform", reconnects=0, idle=7)
    assert numbers(window) == [7, 22]
    pixels = {"max_pixels": str(so.Limits().max_pixels)}
    assert opened[0] == ("/dev/video0", {**pixels, **options}, (25.0, 10.0), "v4l2")
    assert opened[1] == ("/dev/video0", pixels, (22.0, 7), "v4l2")


# ---- Ctrl-C


class Interrupted(io.BytesIO):
    """Ctrl-C while it is read for the last time."""

    def read1(self, size: int | None = -1) -> bytes:
        data = super().read1(size)
        if not data:
            raise KeyboardInterrupt
        return data


def test_ctrl_c_gives_what_was_found() -> None:
    windows = so.watch(Interrupted(transport(50)), 2, window=1.0, policy="uniform")
    assert numbers(next(windows)) == [7, 22]
    last = next(windows)
    assert (last.ended_by, numbers(last)) == ("stopped", [37])
    with pytest.raises(KeyboardInterrupt):
        next(windows)


def test_a_loop_that_is_left_closes_the_connection() -> None:
    closed = threading.Event()

    def serve(connection: Any) -> None:
        connection.sendall(transport(90))
        while connection.recv(100):
            pass
        closed.set()

    with serving(serve) as port:
        windows = so.watch(f"tcp://127.0.0.1:{port}", 2, window=1.0, policy="uniform", schemes=("tcp",))
        next(windows)
        windows.close()
        assert closed.wait(5)
