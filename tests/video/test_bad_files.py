"""Files that are broken, hostile or empty: a clear sentence, or a stated policy and a note."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.video.synthetic import numbered_frame, numbered_video, read_number
from tests.clips import BY_NAME, audio_only, boxes, piped, with_damage


def refuse(source: object, sentence: str, **options: object) -> None:
    with pytest.raises(so.VideoError, match=sentence) as caught:
        so.select(source, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


class TestUnreadable:
    def test_missing_file(self, tmp_path: Path) -> None:
        refuse(tmp_path / "nothing.mp4", "no such file or folder; check the path")

    def test_folder_without_frames(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("no pictures here")
        refuse(tmp_path, "a folder without numbered frame images")

    def test_zero_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "empty.mp4").touch()
        refuse(tmp_path / "empty.mp4", r"the file is empty \(zero bytes\)")
        refuse(b"", "zero bytes were given")

    def test_empty_file_object(self) -> None:
        refuse(io.BytesIO(b""), "not a video that FFmpeg can read|cannot be opened")

    def test_text_named_mp4(self, tmp_path: Path) -> None:
        path = tmp_path / "text.mp4"
        path.write_text("This is not a video.\n" * 50)
        refuse(path, "not a video that FFmpeg can read")

    @pytest.mark.parametrize("ending", ["txt", "nfo", "asc", "diz", "ans"])
    def test_text_that_ffmpeg_would_draw(self, ending: str, tmp_path: Path, torchcodec: None) -> None:
        """Its tty demuxer makes a film of letters of files with these endings."""
        path = tmp_path / f"notes.{ending}"
        path.write_text("Notes about the match, a line of usual length.\n" * 200)
        with av.open(str(path)) as container:
            assert container.streams.video[0].codec_context.name == "ansi"
        refuse(path, "a text file, not a video; give a video file")
        refuse(path, "a text file, not a video; give a video file", decoder="torchcodec")
        with open(path, "rb") as file:
            refuse(file, "a text file, not a video; give a video file")

    @pytest.mark.parametrize("name", ["h264", "mkv", "mpeg4_avi", "raw_h264"])
    @pytest.mark.parametrize("ending", ["txt", "nfo", "jpg"])
    def test_a_video_with_the_ending_of_something_else(self, name: str, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"match.{ending}"
        path.write_bytes(BY_NAME[name].data)
        sel = so.select(path, 3, policy="uniform")
        assert sel.frames is not None
        assert sel.frame_indices.tolist() == so.select(BY_NAME[name].data, 3, policy="uniform").frame_indices.tolist()
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()

    def test_random_bytes(self) -> None:
        refuse(np.random.default_rng(0).bytes(10_000), "no video stream|not a video|cannot be opened|no frame")

    def test_truncated_before_the_index(self, clip_bytes: bytes) -> None:
        assert clip_bytes.find(b"moov") > len(clip_bytes) // 2, "the index should stand at the end"
        refuse(clip_bytes[: len(clip_bytes) // 2], "an MP4 file without its index")

    def test_address(self) -> None:
        refuse("https://example.org/x.mp4", "addresses are not opened")

    def test_colon_in_a_name(self, tmp_path: Path, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "12:30 match.mp4").write_bytes(clip_bytes)
        monkeypatch.chdir(tmp_path)
        assert len(so.select("12:30 match.mp4", policy="uniform")) == 8

    @pytest.mark.parametrize("fps", [1e8, 1e14, 1e300])
    def test_more_moments_than_a_video_may_have_frames(self, clip: Path, fps: float) -> None:
        refuse(clip, "asks for .* over the limit max_frames=10000000; lower fps", fps=fps)

    def test_audio_only(self) -> None:
        refuse(audio_only(), r"no video stream \(it holds: audio\)")

    def test_text_mode_file(self, clip: Path) -> None:
        with open(clip, encoding="latin-1") as file, pytest.raises(so.InvalidArgument, match="binary mode"):
            so.select(file, policy="uniform")

    def test_playlist_that_names_a_network_address(self, tmp_path: Path) -> None:
        """A file that makes FFmpeg open other places must not get its way."""
        path = tmp_path / "innocent.mp4"
        path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n")
        refuse(path, "innocent.mp4")

    def test_packets_that_hold_only_noise(self) -> None:
        data = with_damage(numbered_video(num_frames=20, gop=5), packets=set(range(20)), share=1.0)
        refuse(data, "no frame could be decoded")

    def test_unreadable_image_folder(self, tmp_path: Path) -> None:
        for number in range(3):
            (tmp_path / f"img_{number:05d}.jpg").write_bytes(b"nonsense")
        refuse(tmp_path, "cannot be read as an image", folder_fps=1)


def test_a_title_that_is_not_utf8() -> None:
    """Old tools wrote titles in whatever encoding the machine had; the frames are as readable as ever."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(numbered_video(num_frames=12))) as source,
        av.open(file, "w", format="mp4") as container,
    ):
        container.metadata["title"] = "ABCDEFGHIJ"
        copy = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                container.mux(packet)
    data = file.getvalue().replace(b"ABCDEFGHIJ", b"AB\xff\xfe\xc3(GHIJ")
    assert b"\xff\xfe\xc3(" in data
    assert [read_number(frame) for frame in so.select(data, 3, policy="uniform").frames] == [2, 6, 10]


@pytest.fixture(scope="module")
def faststart(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An MP4 with its index in front, as for the web."""
    path = tmp_path_factory.mktemp("faststart") / "clip.mp4"
    with (
        av.open(io.BytesIO(numbered_video(num_frames=90, gop=15))) as source,
        av.open(str(path), "w", options={"movflags": "faststart"}) as container,
    ):
        copy = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                container.mux(packet)
    data = path.read_bytes()
    assert data.find(b"moov") < data.find(b"mdat")
    return data


class TestCutOff:
    @pytest.mark.parametrize("mode", ["exact", "keyframe", "snap"])
    def test_truncated_behind_the_index(self, faststart: bytes, mode: str) -> None:
        """What is there is used, and a note says how much that is."""
        start = faststart.find(b"mdat")
        sel = so.select(
            faststart[: start + (len(faststart) - start) * 6 // 10], num_frames=3, candidates=mode, policy="uniform"
        )
        assert any("cut off" in note for note in sel.notes), sel.notes
        assert 30 < sel.metadata.total_num_frames < 75
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()

    def test_truncated_recording_without_index_or_duration(self) -> None:
        data = piped(60, "matroska")
        sel = so.select(data[: len(data) // 2], num_frames=3, policy="uniform")
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()

    def test_no_duration_in_the_header(self) -> None:
        sel = so.select(BY_NAME["mkv_without_cues"].data, num_frames=3, policy="uniform")
        assert sel.metadata.duration == pytest.approx(2.5, abs=1e-3)
        assert sel.metadata.fps == pytest.approx(30, abs=0.01)


@pytest.fixture(scope="module")
def sound() -> bytes:
    """60 frames, keyframes at 0, 20 and 40; without B-frames, packets have the numbers of their frames."""
    return numbered_video(num_frames=60, gop=20, codec_options={"bf": "0"})


class TestDamage:
    def test_a_damaged_frame_is_replaced_by_its_nearest_neighbour(self, sound: bytes) -> None:
        data = with_damage(sound, packets={30}, share=1.0)
        sel = so.select(data, policy="all", num_candidates=60)
        assert sel.frames is not None
        assert len(sel) == 60
        assert 30 not in sel.frame_indices
        assert any(note.startswith("frame 30 ") and "is damaged; frame" in note for note in sel.notes), sel.notes
        # The frames behind it in its group are predicted from it, and each is named; all others are sound.
        impaired = {frame for frame in range(60) if f"frame {frame} follows damaged data" in " ".join(sel.notes)}
        assert impaired == set(range(31, 40))
        for frame, index in zip(sel.frames, sel.frame_indices.tolist(), strict=True):
            if index not in impaired:
                assert read_number(frame) == index

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_damaged_keyframe(self, sound: bytes, threads: int) -> None:
        data = with_damage(sound, packets={20}, share=1.0)
        sel = so.select(data, policy="keyframe", num_frames=3, threads=threads)
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist()
        assert sel.frame_indices[0] == 0
        assert sel.frame_indices[-1] == 40
        assert any(note.startswith("frame 20 ") for note in sel.notes), sel.notes

    def test_half_a_damaged_keyframe_is_not_passed_off_as_sound(self, sound: bytes) -> None:
        data = with_damage(sound, packets={20}, share=0.5)
        sel = so.select(data, policy="keyframe", num_frames=3)
        assert 20 not in sel.frame_indices or any("20" in note for note in sel.notes)

    def test_damage_elsewhere_does_not_matter(self, sound: bytes) -> None:
        data = with_damage(sound, packets={25}, share=1.0)
        sel = so.select(data, num_frames=3, num_candidates=3, start=0.0, end=0.6, policy="uniform")
        assert sel.notes == ()


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


def test_an_index_that_names_more_keyframes_than_there_are(clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest ones that are there, instead of a place behind the end of their table."""
    from dataclasses import replace

    reader = so.open_video(clip_bytes)
    index = reader._index
    assert index.keyframes.tolist() == [0, 30, 60]
    monkeypatch.setattr(reader, "_index", replace(index, keyframes=np.array([0, 30, 60, 85])))
    monkeypatch.setattr(reader, "_locate", lambda *rest: None)
    frame_indices, seconds = reader.locate_keyframes(np.array([0, 1, 3]))
    assert frame_indices.tolist() == [0, 30, 60]
    assert seconds.tolist() == [0.0, 1.0, 2.0]
