"""Files that are broken, hostile or empty: a clear sentence, or a stated policy and a note."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import sosampler as so
from sosampler.video import pyav_decode, pyav_reader
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME, audio_only, index_first, piped, with_damage


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
        refuse("https://example.org/x.mp4", "addresses are opened only where their scheme is allowed")

    def test_colon_in_a_name(self, tmp_path: Path, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "12:30 match.mp4").write_bytes(clip_bytes)
        monkeypatch.chdir(tmp_path)
        assert len(so.select("12:30 match.mp4", policy="uniform")) == 8

    def test_more_moments_than_a_video_may_have_frames(self, clip: Path) -> None:
        limits = so.Limits(max_frames=1000)
        refuse(clip, "asks for 3e.04 frames .* over the limit max_frames=1000; lower fps", fps=10_000, limits=limits)

    def test_audio_only(self) -> None:
        refuse(audio_only(), r"no video stream \(it holds: audio\)")

    def test_text_mode_file(self, clip: Path) -> None:
        with open(clip, encoding="latin-1") as file, pytest.raises(so.InvalidArgument, match="binary mode"):
            so.select(file, policy="uniform")

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
def faststart() -> bytes:
    return index_first(numbered_video(num_frames=90, gop=15))


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

    @pytest.mark.parametrize("share", [1.0, 0.995, 0.9, 0.5, 0.1])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_damaged_keyframe_is_replaced_by_the_frame_before(self, sound: bytes, threads: int, share: float) -> None:
        """The frames behind it refer to it, so they are no better, however intact they are themselves."""
        data = with_damage(sound, packets={20}, share=share)
        sel = so.select(data, policy="keyframe", num_frames=3, threads=threads)
        assert sel.frames is not None
        assert sel.frame_indices.tolist() == [0, 19, 40]
        assert [read_number(frame) for frame in sel.frames] == [0, 19, 40]
        assert sel.notes == ("frame 20 (0.667 s) is damaged; frame 19 was used in its place",)

    @pytest.mark.parametrize("share", [1.0, 0.995, 0.5])
    def test_frames_behind_a_damaged_keyframe_are_told(self, sound: bytes, share: float) -> None:
        data = with_damage(sound, packets={20}, share=share)
        with closing(so.open_video(data)) as reader:
            batch = reader.read(np.array([25, 45]))
        assert batch.frame_indices.tolist() == [25, 45]
        assert batch.notes == ("frame 25 follows damaged data and may look impaired",)

    @pytest.mark.parametrize(("shift", "used"), [(0, 24), (-3, 24), (3, 26)])
    def test_neighbours_are_weighed_by_their_distance_in_time(self, shift: int, used: int) -> None:
        """Of two at the same distance the earlier one; intra frames, so that both are sound."""
        ticks = np.arange(40) * 10
        ticks[25] += shift  # between 240 and 260
        data = numbered_video(num_frames=40, gop=1, pts=ticks.tolist(), fps=300)
        with closing(so.open_video(with_damage(data, packets={25}, share=0.5))) as reader:
            batch = reader.read(np.array([25]))
        assert batch.frame_indices.tolist() == [used]
        assert read_number(batch.frames[0]) == used

    @pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
    @pytest.mark.parametrize("gop", [15, 60])
    def test_the_result_does_not_depend_on_threads(self, codec: str, gop: int) -> None:
        """Also where FFmpeg's frame threads decode a single long run: their concealment varies from call to call."""
        data = numbered_video(num_frames=60, gop=gop, codec=codec)
        rng, is_told = np.random.default_rng(1), False
        for share in (0.1, 0.4, 0.95):
            damaged = with_damage(data, packets=set(rng.integers(0, 60, 2).tolist()), share=share)
            wanted = np.sort(rng.choice(60, 6, replace=False))
            batches = []
            for threads in (1, 2, 4, 4):
                with closing(so.open_video(damaged, threads=threads)) as reader:
                    batches.append(reader.read(wanted))
            is_told |= bool(batches[0].notes)
            for other in batches[1:]:
                assert other.frame_indices.tolist() == batches[0].frame_indices.tolist()
                assert other.notes == batches[0].notes
                assert np.array_equal(other.frames, batches[0].frames)
        assert is_told

    def test_what_stands_in_is_sound(self) -> None:
        rng, replaced = np.random.default_rng(0), 0
        data = numbered_video(num_frames=60, gop=12)
        for share in (0.3, 0.7, 1.0):
            damaged = with_damage(data, packets=set(rng.integers(0, 60, 6).tolist()), share=share)
            with closing(so.open_video(damaged)) as reader:
                batch = reader.read(np.arange(60))
            for wanted, used, frame in zip(range(60), batch.frame_indices.tolist(), batch.frames, strict=True):
                if used != wanted:
                    replaced += 1
                    assert read_number(frame) == used
                    assert any(
                        note.startswith(f"frame {wanted} ") and f"; frame {used} " in note for note in batch.notes
                    )
        assert replaced > 5

    def test_a_sound_frame_of_the_reading_is_nearer_than_a_keyframe(self) -> None:
        data = with_damage(numbered_video(num_frames=60, gop=12), packets=set(range(24, 60)), share=1.0)
        with closing(so.open_video(data)) as reader:
            batch = reader.read(np.arange(60))
        assert batch.frame_indices[24:].tolist() == [23] * 36
        assert {read_number(frame) for frame in batch.frames[24:]} == {23}

    def test_few_images_are_kept_beside_the_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 20 damaged frames, each among sound ones."""
        most, attempt = 0, pyav_reader._StandIns._attempt

        def counting(self: pyav_reader._StandIns, *rest: Any) -> None:
            nonlocal most
            attempt(self, *rest)
            most = max(most, len(self._spare))

        monkeypatch.setattr(pyav_reader._StandIns, "_attempt", counting)
        wanted = np.arange(5, 205, 10)
        data = with_damage(numbered_video(num_frames=210, gop=1), packets=set(wanted.tolist()), share=0.9)
        with closing(so.open_video(data)) as reader:
            batch = reader.read(wanted)
        assert batch.frame_indices.tolist() == (wanted - 1).tolist()
        assert [read_number(frame) for frame in batch.frames] == (wanted - 1).tolist()
        assert 0 < most < 20

    def test_the_search_for_stand_ins_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where nearly everything is damaged, the nearest sound frame of the reading serves."""
        decoded = 0
        decode = pyav_decode.RunDecoder._decode

        def counting(self: object, packet: object, *rest: object) -> None:
            nonlocal decoded
            decoded += packet is not None
            decode(self, packet, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(pyav_decode.RunDecoder, "_decode", counting)
        monkeypatch.setattr(pyav_reader, "_MIN_SUBSTITUTE_PACKETS", 40)
        data = with_damage(numbered_video(num_frames=300, gop=30), packets=set(range(1, 300)), share=0.9)
        with closing(so.open_video(data, threads=1)) as reader:
            batch = reader.read(np.array([0, 100, 150, 200, 250]))
        assert batch.frame_indices.tolist() == [0, 0, 0, 0, 0]
        assert {read_number(frame) for frame in batch.frames} == {0}
        assert decoded < 200

    def test_a_stream_without_times(self) -> None:
        """Elementary streams are decoded from the start; the nearest sound frame stands in there too."""
        raw = bytearray(piped(30, "h264"))
        starts = [place for place in range(len(raw) - 4) if raw[place : place + 4] == b"\0\0\0\x01"]
        begin, end = starts[-5], starts[-4]
        raw[begin + 20 : end] = np.random.default_rng(0).bytes(end - begin - 20)
        sel = so.select(bytes(raw), policy="all", num_candidates=30, threads=2)
        assert sel.frames is not None
        assert any("damaged" in note for note in sel.notes), sel.notes
        told = " ".join(sel.notes)
        for frame, index in zip(sel.frames, sel.frame_indices.tolist(), strict=True):
            assert f"frame {index} follows damaged data" in told or read_number(frame) == index

    @pytest.mark.parametrize("threads", [1, 3])
    def test_a_codec_tag_that_is_no_text(self, threads: int) -> None:
        """PyAV reads it as ASCII; the file says once more, elsewhere, what its codec is."""
        data = numbered_video(num_frames=40, gop=10, codec="mpeg4", container_format="mov").replace(
            b"mp4v", b"mp\xff\xfe"
        )
        sel = so.select(data, 4, policy="uniform", threads=threads)
        assert sel.frames is not None
        assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist() == [5, 15, 25, 35]

    def test_damage_elsewhere_does_not_matter(self, sound: bytes) -> None:
        data = with_damage(sound, packets={25}, share=1.0)
        sel = so.select(data, num_frames=3, num_candidates=3, start=0.0, end=0.6, policy="uniform")
        assert sel.notes == ()


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
