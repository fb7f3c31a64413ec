"""Files that claim, repeat or name more than they hold: refused or bounded, with the limit named."""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.errors import errors_of
from sosampler.video import limits as video_limits
from sosampler.video import pyav_decode, pyav_index, source
from sosampler.video.synthetic import numbered_frame, numbered_video, read_number
from tests.clips import BY_NAME, boxes, index_first, piped, trimmed_by_edit_list
from tests.video.test_bad_files import refuse


@pytest.fixture(params=["pyav", "torchcodec"])
def reader(request: pytest.FixtureRequest) -> str:
    if request.param == "torchcodec":
        request.getfixturevalue("torchcodec")
    return str(request.param)


class TestLimits:
    def test_pixels(self, clip: Path) -> None:
        refuse(
            clip,
            r"a frame of 192x128 = 24576 pixels is over the limit max_pixels=10000; .* --max-pixels",
            limits=so.Limits(max_pixels=10_000),
        )
        assert len(so.select(clip, limits=so.Limits(max_pixels=24_576), policy="uniform")) == 8

    @pytest.mark.parametrize("name", ["h264", "mkv"])
    def test_frames(self, name: str) -> None:
        refuse(BY_NAME[name].data, "frames or more is over the limit max_frames=50", limits=so.Limits(max_frames=50))
        so.select(BY_NAME[name].data, limits=so.Limits(max_frames=75), policy="uniform")

    @pytest.mark.parametrize("name", ["h264", "mkv"])
    def test_duration(self, name: str) -> None:
        refuse(BY_NAME[name].data, r"a duration of 2\.5 s is over the limit", limits=so.Limits(max_duration=2.0))
        so.select(BY_NAME[name].data, limits=so.Limits(max_duration=2.6), policy="uniform")

    def test_folder(self, tmp_path: Path) -> None:
        for number in range(4):
            Image.fromarray(numbered_frame(number)).save(tmp_path / f"img_{number}.png")
        refuse(tmp_path, "max_frames=3", limits=so.Limits(max_frames=3))
        refuse(tmp_path, "max_duration=2", limits=so.Limits(max_duration=2), folder_fps=1)
        refuse(tmp_path, "max_pixels=100", limits=so.Limits(max_pixels=100))

    def test_torchcodec(self, clip: Path, torchcodec: None) -> None:
        for limits in (so.Limits(max_pixels=100), so.Limits(max_frames=10), so.Limits(max_duration=1)):
            refuse(clip, "is over the limit", limits=limits, decoder="torchcodec")

    def test_header_that_lies_about_the_size(self, clip_bytes: bytes) -> None:
        """The sample entry says 16000 x 16000; the stream itself is small, and what it says is believed."""
        data = bytearray(clip_bytes)
        (entry,) = boxes(clip_bytes, b"avc1")[-1:]
        data[entry + 24 : entry + 28] = struct.pack(">HH", 16_000, 16_000)
        sel = so.select(bytes(data), num_frames=2, limits=so.Limits(max_pixels=10_000_000), policy="uniform")
        assert sel.frames is not None
        assert sel.frames.shape == (2, 128, 192, 3)

    @pytest.mark.parametrize("field", ["max_pixels", "max_frames", "max_duration"])
    @pytest.mark.parametrize("value", [0, -5, "many"])
    def test_limits_must_make_sense(self, field: str, value: object) -> None:
        with pytest.raises(so.InvalidArgument, match=field):
            so.Limits(**{field: value})  # type: ignore[arg-type]


def test_limits_may_change_when_a_run_resumes() -> None:
    from sosampler.inference.options import SelectOptions

    few, many = (SelectOptions(limits=so.Limits(max_frames=number, timeout=number)) for number in (5, 50))
    assert few.identity() == many.identity()


# ---- memory


def tiny_gif(side: int, num_frames: int) -> bytes:
    """A GIF of some bytes a frame whose canvas has side x side pixels."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(3) + b"\xff\xff\xff"
    loop = b"!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0"
    frame = b"!\xf9\x04\0\x0a\0\0\0" + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return head + loop + frame * num_frames + b";"


class TestMemory:
    def test_a_small_file_does_not_unfold_to_gigabytes(self, reader: str) -> None:
        data = tiny_gif(8000, 40)
        assert len(data) < 2000
        began = time.process_time()
        refuse(
            data,
            r"8 frames of 8000x8000 take 1464 MiB from a file of \d+ bytes, over the limit max_bytes=268435456; "
            r"ask for fewer or smaller frames .*, or raise it with --max-bytes or Limits\(max_bytes=...\)",
            decoder=reader,
        )
        assert time.process_time() - began < 20

    def test_a_shape_that_cannot_be_resized(self) -> None:
        data = bytearray(tiny_gif(8, 5))
        data[6:10] = struct.pack("<HH", 1, 8000)
        refuse(bytes(data), "FFmpeg cannot convert frames of 1x8000 to 56x40 pixels", size=(40, 56), policy="uniform")

    @pytest.mark.parametrize("on_short", ["repeat", "fewer"])
    def test_a_rate_over_a_gap(self, reader: str, on_short: str) -> None:
        """30 frames with an hour before the last one are 108,000 moments."""
        data = numbered_video(num_frames=30, pts=[*range(29), 3600 * 30])
        options: dict[str, Any] = {"fps": 30, "on_short": on_short, "decoder": reader}
        if on_short == "fewer":
            assert len(so.select(data, **options)) == 30
        else:
            refuse(data, r"108\d\d\d frames of 192x128 take 759\d MiB", **options)
            assert len(so.select(data, **options, decode=False)) > 108_000

    def test_the_limit_grows_with_the_file(self) -> None:
        standard = so.Limits()
        assert standard.bytes_for(1000) == 256 << 20
        assert standard.bytes_for(10_000) == 10**9
        assert standard.bytes_for(10**9) == standard.bytes_for(None) == 4 << 30
        assert so.Limits(max_bytes=5).bytes_for(10**9) == 5

    def test_candidates_that_do_not_fit_are_scored_small(self) -> None:
        """8 candidates of 640x480 are over the limit, 4 chosen ones are not."""
        data = numbered_video(num_frames=16, width=640, height=480)
        limits = so.Limits(max_bytes=5 * 3 * 640 * 480)
        sel = so.select(data, 4, num_candidates=8, policy="frame-difference", limits=limits)
        assert sel.frames is not None
        assert sel.frames.shape == (4, 480, 640, 3)
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()
        refuse(data, "8 frames of 640x480 take 7 MiB", policy="all", num_candidates=8, limits=limits)

    def test_folder(self, tmp_path: Path) -> None:
        for number in range(4):
            Image.fromarray(numbered_frame(number)).save(tmp_path / f"img_{number}.png")
        refuse(
            tmp_path, "4 frames of 192x128 take", limits=so.Limits(max_bytes=200_000), policy="all", num_candidates=4
        )

    def test_large_frames_get_few_threads(self) -> None:
        assert pyav_decode.most_threads(8, 1920, 1080) == 8
        assert pyav_decode.most_threads(8, 7680, 4320) == 4
        assert pyav_decode.most_threads(8, 2 * 7680, 4320) == 2
        assert pyav_decode.most_threads(8, 10**6, 10**6) == 1

    def test_a_thin_line_is_not_enlarged_to_look_at_it(self) -> None:
        """The first look at a video has a short side of 16 pixels, which would be gigabytes for this one."""
        frames = [np.zeros((2, 8000, 3), dtype=np.uint8)] * 3
        from sosampler.video.synthetic import encode_video

        data = encode_video(frames, codec="ffv1", container_format="matroska")
        with closing(so.open_video(data, limits=so.Limits(max_bytes=100_000))) as reader:
            assert (reader.metadata.width, reader.metadata.height) == (8000, 2)


# ---- time


class TestTime:
    def test_the_limit_is_named(self, clip: Path) -> None:
        refuse(
            clip,
            r"is not read within the limit timeout=1e-09 seconds, .* raise it with --timeout or Limits\(timeout=...\)",
            limits=so.Limits(timeout=1e-9),
        )
        refuse(clip, "timeout=1e-09", limits=so.Limits(timeout=1e-9), candidates="keyframe", decode=False)

    def test_the_time_of_all_calls_counts_and_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(video_limits.time, "monotonic", lambda: now)
        limit = video_limits.TimeLimit("a.mp4", so.Limits(timeout=10))
        with limit:
            now += 6
            limit.check()
        now += 1000  # between two calls
        with limit, limit:
            now += 3
            limit.check()
            now += 2
            with pytest.raises(so.VideoError, match=r"a\.mp4: is not read within the limit timeout=10 seconds"):
                limit.check()

    def test_a_packet_that_is_not_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second half of this file is zeros without end; what lies before it is used."""
        data, now = piped(400, "matroska"), 100.0
        monkeypatch.setattr(video_limits.time, "monotonic", lambda: now)

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                nonlocal now
                if self.tell() < len(data) // 2:
                    return super().read(size)
                now += 1
                return bytes(size or 0)

        sel = so.select(Slow(data), 4, policy="uniform")
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()
        assert 100 < sel.metadata.total_num_frames < 400
        assert any(
            re.match(r"reading stopped after \d+ frames .no other is found within MAX_PACKET_SECONDS=15 ", note)
            for note in sel.notes
        )
        refuse(Slow(data), "not read within the limit timeout=10 seconds", limits=so.Limits(timeout=10))

    def test_ffmpeg_ends_with_the_time(self, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a file that it opened itself, where it looks at the clock: to open it, and for each packet."""
        given = []
        opened = av.open
        monkeypatch.setattr(av, "open", lambda *rest, **named: given.append(named["timeout"]) or opened(*rest, **named))
        for timeout in (100, 5):
            so.select(clip, policy="uniform", limits=so.Limits(timeout=timeout))
        assert set(given) == {(100, 15), (5, 5)}

    def test_a_file_whose_time_is_over_while_it_is_opened(self, clip_bytes: bytes) -> None:
        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                time.sleep(0.02)
                return super().read(size)

        refuse(Slow(clip_bytes), "not read within the limit timeout=0.01 seconds", limits=so.Limits(timeout=0.01))

    def test_every_loop_looks_at_the_clock(self, clip: Path) -> None:
        """A reader whose time is over while it scans, decodes or searches stand-ins."""
        for act in ("timeline", "read"):
            reader = so.open_video(clip, limits=so.Limits(timeout=1000))
            if act == "read":
                reader.timeline()
            reader._time._left = -1.0  # type: ignore[attr-defined]
            with closing(reader), pytest.raises(so.VideoError, match="timeout=1000"):
                reader.timeline() if act == "timeline" else reader.read(np.array([45]))


# ---- counts that are claims


def with_claim(data: bytes, num_samples: int, size: int = 1) -> bytes:
    """The same MP4 with an index of so many samples of `size` bytes."""
    claimed = bytearray(data)
    for box, offset, number in ((b"stsz", 4, size), (b"stsz", 8, num_samples), (b"stsc", 12, num_samples)):
        struct.pack_into(">I", claimed, boxes(data, box)[0] + offset, number)
    struct.pack_into(">III", claimed, boxes(data, b"stts")[0] + 4, 1, num_samples, 1)
    return bytes(claimed)


def with_edits(data: bytes, count: int) -> bytes:
    """The same MP4 with its one edit so many times."""
    (entry,) = boxes(data, b"elst")
    edit = data[entry + 8 : entry + 20]
    added = edit * (count - 1)
    edited = bytearray(data[: entry + 20] + added + data[entry + 20 :])
    struct.pack_into(">I", edited, entry + 4, count)
    for box in (b"elst", b"edts", b"trak", b"moov"):
        (start, *_) = boxes(data, box)
        (size,) = struct.unpack_from(">I", edited, start - 8)
        struct.pack_into(">I", edited, start - 8, size + len(added))
    return bytes(edited)


class TestClaims:
    def test_more_samples_than_bytes(self, clip_bytes: bytes, reader: str) -> None:
        began = time.process_time()
        refuse(
            with_claim(clip_bytes, 1_000_000),
            r"its index names \d+ frames, which \d+ bytes cannot hold",
            decoder=reader,
        )
        assert time.process_time() - began < 20

    def test_edits_that_repeat_the_same_frames(self, clip_bytes: bytes, reader: str) -> None:
        refuse(
            with_edits(clip_bytes, 200),
            "repeats the same frames until they are 64 times the file .MAX_PACKET_BYTES_PER_FILE_BYTE in",
            decoder=reader,
        )
        looped = so.select(with_edits(clip_bytes, 3), 4, policy="uniform", decoder=reader)
        assert looped.metadata.total_num_frames > 200, "a loop is no attack"

    def test_announced_frames_are_not_believed(self, clip_bytes: bytes, reader: str) -> None:
        data = bytearray(clip_bytes)
        struct.pack_into(">I", data, boxes(clip_bytes, b"stts")[0] + 8, 4_000_000_000)
        with av.open(io.BytesIO(bytes(data))) as container:
            assert container.streams.video[0].frames == 4_000_000_000
        if reader == "torchcodec":
            refuse(bytes(data), "its header announces 4000000000 frames, which .* use decoder='pyav'", decoder=reader)
            return
        sel = so.select(bytes(data), 3, policy="uniform")
        assert sel.metadata.total_num_frames == 90
        assert any("cannot hold the 4000000000 frames that its header announces: 90 are there" in n for n in sel.notes)

    @pytest.mark.parametrize("end", [89, 61, 45])
    @pytest.mark.parametrize(
        "options",
        [
            {"policy": "uniform"},
            {"policy": "keyframe"},
            {"policy": "uniform", "candidates": "keyframe", "fps": 30.0, "on_short": "fewer"},
            {"policy": "uniform", "candidates": "snap"},
            {"policy": "frame-difference", "candidates": "keyframe", "num_candidates": 3, "num_frames": 3},
        ],
    )
    def test_an_index_that_counts_more_frames_than_the_scan_finds(
        self, clip_bytes: bytes, end: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        demux = pyav_decode.PacketFeed._demux

        def shorter(self: Any) -> Any:
            for packet in demux(self):
                if packet.dts is not None and packet.dts >= self.stream.index_entries[end].timestamp:
                    raise av.error.InvalidDataError(1, "the rest cannot be read")
                yield packet

        monkeypatch.setattr(pyav_decode.PacketFeed, "_demux", shorter)
        sel = so.select(clip_bytes, **options)
        assert sel.frame_indices.max() < 90
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()
        if options["policy"] == "uniform":
            assert sel.metadata.total_num_frames <= end + 3, "the index claims 90"

    def test_frames_that_an_index_names_and_that_are_not_there(self, clip_bytes: bytes) -> None:
        """A keyframe that was located does not decode, and the scan finds fewer frames than its number."""
        with closing(so.open_video(clip_bytes)) as reader:
            reader._located[60] = (2, 10**9)  # type: ignore[attr-defined]
            scan = reader._packets  # type: ignore[attr-defined]
            table = pyav_index.PacketTable
            assert isinstance(scan(), table)
            reader._table = None  # type: ignore[attr-defined]
            short = BY_NAME["two_frames"].data
            with closing(so.open_video(short)) as other:
                found = other._packets()  # type: ignore[attr-defined]
                reader._read_located = lambda *rest: None  # type: ignore[attr-defined]
                reader._feed.close()  # type: ignore[attr-defined]
                reader._feed = other._feed  # type: ignore[attr-defined]
                reader._packets = lambda: setattr(reader, "_table", found) or found  # type: ignore[attr-defined]
                batch = reader.read(np.array([60]))
        assert batch.frame_indices.tolist() == [1]
        assert "frames behind 1 are not there; that one was used in their place" in reader.notes


# ---- seeking


@pytest.fixture
def seeks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    seek = pyav_decode.PacketFeed._seek

    def counting(self: Any, ticks: int) -> bool:
        made.append(ticks)
        return seek(self, ticks)

    monkeypatch.setattr(pyav_decode.PacketFeed, "_seek", counting)
    return made


def check_numbers(data: bytes, frames: list[int], **numbers: int) -> None:
    with closing(so.open_video(data)) as reader:
        batch = reader.read(np.array(frames))
    shift = numbers.get("shift", 0)
    assert [read_number(frame) for frame in batch.frames] == [frame + shift for frame in frames]


def test_no_seeking_in_an_index_with_a_long_hidden_part(monkeypatch: pytest.MonkeyPatch, seeks: list[int]) -> None:
    """FFmpeg's search takes the square of the length of that part: minutes for an hour that was trimmed off."""
    data = trimmed_by_edit_list(25)
    check_numbers(data, [30, 5, 20], shift=25)
    assert seeks
    seeks.clear()
    monkeypatch.setattr(pyav_decode, "_MAX_HIDDEN", 8)
    check_numbers(data, [30, 5, 20], shift=25)
    assert not seeks


def test_no_seeking_without_keyframes(monkeypatch: pytest.MonkeyPatch, seeks: list[int], clip_bytes: bytes) -> None:
    from sosampler.video import pyav_reader

    def without_keys(*rest: Any, **named: Any) -> Any:
        table = pyav_index.scan_packets(*rest, **named)
        return replace(table, is_key=np.zeros_like(table.is_key))

    monkeypatch.setattr(pyav_reader, "scan_packets", without_keys)
    check_numbers(clip_bytes, [5, 70, 40])
    assert not seeks


def test_where_no_seek_lands_packets_are_read_in_order(monkeypatch: pytest.MonkeyPatch, clip_bytes: bytes) -> None:
    monkeypatch.setattr(pyav_decode.PacketFeed, "_seek", lambda self, ticks: False)
    check_numbers(clip_bytes, [5, 70, 40])


# ---- files that name other files


def manifests(other: Path) -> dict[str, str]:
    url = other.as_uri()
    return {
        "dash": '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'profiles="urn:mpeg:dash:profile:isoff-on-demand:2011" mediaPresentationDuration="PT3S"><Period><AdaptationSet '
        'mimeType="video/mp4"><Representation id="1" bandwidth="1000" width="192" height="128" codecs="avc1.64000a">'
        f"<BaseURL>{url}</BaseURL></Representation></AdaptationSet></Period></MPD>",
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{other}\n#EXT-X-ENDLIST\n",
        "network": "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
        "ffconcat": f"ffconcat version 1.0\nfile {other.name}\n",
        "imf": f'<?xml version="1.0"?><CompositionPlaylist xmlns="x"><Id>{url}</Id></CompositionPlaylist>',
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
    }


class TestManifests:
    @pytest.mark.parametrize("name", ["innocent.mp4", "list.m3u8", "list.mpd", "list.ffconcat", "list"])
    def test_no_other_file_is_opened(self, tmp_path: Path, clip_bytes: bytes, reader: str, name: str) -> None:
        (tmp_path / "other.ts").write_bytes(BY_NAME["mpeg_ts"].data)
        for text in manifests(tmp_path / "other.ts").values():
            (tmp_path / name).write_text(text)
            refuse(tmp_path / name, "a playlist or manifest, which names other files, not a video", decoder=reader)
            refuse(text.encode(), "a playlist or manifest", decoder=reader)
            with open(tmp_path / name, "rb") as file:
                refuse(file, "a playlist or manifest", decoder=reader)
            (tmp_path / name).write_text("\n" * 100_000 + text)
            refuse(tmp_path / name, "a playlist or manifest|not a video", decoder=reader)

    @pytest.mark.parametrize("kind", ["dash", "hls", "ffconcat"])
    @pytest.mark.parametrize("name", ["innocent.mp4", "list.m3u8", "list.ffconcat"])
    def test_ffmpeg_itself_is_not_let(
        self, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the text was not recognised."""
        monkeypatch.setattr(source, "_refuse_manifest", lambda *given: None)
        (tmp_path / "other.ts").write_bytes(BY_NAME["mpeg_ts"].data)
        path = tmp_path / name
        path.write_text(manifests(tmp_path / "other.ts")[kind])
        if kind != "dash":  # which this FFmpeg does not know
            options = {"safe": "0"} if kind == "ffconcat" else {"allowed_extensions": "ALL", "extension_picky": "0"}
            with av.open(str(path), format="concat" if kind == "ffconcat" else "hls", options=options) as container:
                assert container.streams.video, "FFmpeg would open it"
        refuse(path, "cannot be opened as a video|not a video")

    def test_a_name_that_is_a_pattern(self, tmp_path: Path) -> None:
        """FFmpeg reads a series of images where a name has %d in it."""
        for number in range(3):
            Image.fromarray(numbered_frame(number)).save(tmp_path / f"img{number:03d}.png")
        Image.fromarray(numbered_frame(9)).save(tmp_path / "img%03d.png")
        with pytest.raises(so.VideoError, match=r"cannot be opened as a video|not a video"):
            so.select(tmp_path / "img%03d.png", 2, policy="uniform")

    def test_videos_are_no_manifests(self, tmp_path: Path) -> None:
        for clip in ("h264", "mkv", "mpeg_ts", "mpeg4_avi", "raw_h264"):
            source._refuse_manifest(BY_NAME[clip].data + b"#EXTM3U <MPD >")
        source._refuse_manifest(b"YUV4MPEG2 W192 H128 F30:1\nFRAME\n" + bytes(100) + b"<mpd>")


# ---- torchcodec's reader


def with_cover() -> bytes:
    """Music with a picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        sound: Any = container.add_stream("aac", rate=16000)
        cover: Any = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        picture = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), dtype=np.uint8), format="rgb24")
        picture.pts, picture.time_base = 0, Fraction(1, 1)
        for stream, content in ((cover, picture), (cover, None), (sound, frame), (sound, None)):
            container.mux(stream.encode(content))
    return buffer.getvalue()


class TestTorchcodec:
    def test_a_cover_is_no_video(self, reader: str) -> None:
        refuse(with_cover(), r"no video stream \(it holds: audio, cover\)", decoder=reader)

    def test_all_frames_before_time_zero(self, reader: str) -> None:
        """An edit list that begins behind the last frame shows none of them."""
        data = bytearray(numbered_video(num_frames=20))
        (entry,) = boxes(data, b"elst")
        struct.pack_into(">I", data, entry + 12, 10**8)
        refuse(bytes(data), "holds no frame", decoder=reader)

    def test_frames_that_come_out_of_order_have_their_own_numbers(
        self, clip: Path, torchcodec: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = so.open_video(clip, decoder="torchcodec")
        decoder = reader._full  # type: ignore[attr-defined]
        at = decoder.get_frames_at
        monkeypatch.setattr(decoder, "get_frames_at", lambda indices: at([(index + 5) % 90 for index in indices]))
        batch = reader.read(np.array([10, 87]))
        assert batch.frame_indices.tolist() == [15, 2]
        assert [read_number(frame) for frame in batch.frames] == [15, 2]
        assert batch.pts_seconds.tolist() == reader.timeline().seconds([15, 2]).tolist()
        assert batch.notes == (
            "torchcodec gave frame 15 in the place of frame 10",
            "torchcodec gave frame 2 in the place of frame 87",
            "the file may be damaged, and torchcodec does not tell which frames are: decoder='pyav' does",
        )

    def test_times_that_torchcodec_reads_otherwise(self, torchcodec: None) -> None:
        """Some versions of FFmpeg ignore the order of frames that are hours apart, and drop the first ones."""
        data = numbered_video(num_frames=10, gop=10, fps=1, pts=[5000 * number for number in range(10)])
        sel = so.select(data, 10, policy="uniform")
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == list(range(10))
        with closing(so.open_video(numbered_video(num_frames=10), decoder="torchcodec")) as plain:
            assert not plain.notes
        try:
            sel = so.select(data, 10, policy="uniform", decoder="torchcodec")
        except so.VideoError as error:
            assert "frames, and the file's index has 10; use decoder='pyav'" in str(error)  # noqa: PT017 - or none
        else:
            assert [read_number(frame) for frame in sel.frames] == list(range(10))

    def test_frames_that_are_not_there_are_told(self, clip_bytes: bytes, torchcodec: None) -> None:
        data = index_first(clip_bytes)
        start = data.find(b"mdat")
        with closing(so.open_video(data[: (start + len(data)) // 2], decoder="torchcodec")) as reader:
            (note,) = reader.notes
        assert re.match(r"\d\d of the 90 frames in its index are there; the file may be damaged", note)

    @pytest.mark.parametrize("error", [RuntimeError("std::bad_alloc"), IndexError("no frame 7"), MemoryError()])
    def test_what_torchcodec_raises_is_a_sentence(
        self, clip: Path, torchcodec: None, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        from torchcodec import decoders

        def fail(*rest: Any, **named: Any) -> Any:
            raise error

        monkeypatch.setattr(decoders.VideoDecoder, "get_frames_at", fail)
        refuse(clip, "torchcodec could not decode 8 frames", decoder="torchcodec", policy="uniform")
        monkeypatch.setattr(decoders, "Demuxer", fail)
        refuse(clip, "not a video that torchcodec can read", decoder="torchcodec", policy="uniform")

    def test_unsorted_times_are_sorted(self, clip: Path, torchcodec: None, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchcodec import decoders

        scan = decoders.Demuxer
        plain = so.open_video(clip, decoder="torchcodec").timeline()

        class Shuffled:
            def __init__(self, *rest: Any, **named: Any) -> None:
                self._index = scan(*rest, **named).streams[0].scan()
                order = np.r_[1, 0, 2:90]
                for name in ("_pts", "_duration", "is_key_frame"):
                    setattr(self._index, name, getattr(self._index, name)[order])
                self.streams = [self]

            def scan(self) -> Any:
                return self._index

        monkeypatch.setattr(decoders, "Demuxer", Shuffled)
        reader = so.open_video(clip, decoder="torchcodec")
        assert reader.timeline().pts.tolist() == plain.pts.tolist()
        assert reader.timeline().is_keyframe.tolist() == plain.is_keyframe.tolist()
        assert any("times of the frames are not in order" in note for note in reader.notes)


# ---- errors that nobody expected


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            IndexError("7 is out of bounds"),
            so.VideoError,
            "a.mp4: an unexpected error (IndexError: 7 is out of bounds)",
        ),
        (so.VideoError("a.mp4: is empty"), so.VideoError, "a.mp4: is empty"),
        (so.InvalidArgument("too short"), so.InvalidArgument, "a.mp4: too short"),
        (OSError(5, "Input/output error"), so.VideoError, "a.mp4: cannot be read (Input/output error)"),
        (MemoryError(), so.InvalidArgument, "a.mp4: the frames do not fit into memory"),
    ],
)
def test_every_error_is_one_of_its_video(error: Exception, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught, errors_of("a.mp4"):
        raise error
    assert str(caught.value).startswith(text)
    assert ("please report it with the file" in str(caught.value)) == isinstance(error, IndexError)


def test_errors_that_every_video_would_meet_stay_as_they_are() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's, of a full GPU."""

    for error in (so.MissingDependency("torch is not installed"), OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(type(error)) as caught, errors_of("a.mp4"):
            raise error
        assert caught.value is error


def test_select_raises_what_it_does_not_expect_as_an_error_of_the_video(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sosampler.video.pyav_reader import PyavReader

    def fail(*rest: Any) -> Any:
        raise IndexError("7 is out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(PyavReader, "timeline", fail)
        refuse(clip, "clip.mp4: an unexpected error .IndexError: 7 is out of bounds.*please report")
    with monkeypatch.context() as patched:
        patched.setattr(PyavReader, "_read_runs", fail)
        refuse(clip, "clip.mp4: an unexpected error .IndexError", policy="uniform")

    class Own(so.Policy):
        name, description = "own", "fails"

        def choose(self, batch: Any, num_frames: int) -> Any:
            raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):  # a user's own mistake shows as it is
        so.select(clip, policy=Own())


_LITTLE_MEMORY = """
import resource, sys
import sosampler as so, av
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    so.select(sys.argv[1], policy="uniform")
except so.VideoError as error:
    print(error)
"""


def test_the_bomb_fits_into_a_gigabyte(tmp_path: Path) -> None:
    """Of address space, which is more than what is used."""
    path = tmp_path / "bomb.gif"
    path.write_bytes(tiny_gif(6000, 50))
    run = subprocess.run(
        [sys.executable, "-c", _LITTLE_MEMORY, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "over the limit max_bytes" in run.stdout
