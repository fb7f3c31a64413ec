"""One class of tests over every decoder and every clip: the same frames, the same times, the same pixels."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from sosampler.errors import VideoError
from sosampler.video.reader import VideoReader
from sosampler.video.source import open_video
from sosampler.video.synthetic import numbered_frame, read_number
from tests.clips import BY_NAME, CLIPS, Clip, late_b_frames
from tests.conftest import torchcodec_problem, unavailable

DECODERS = ["pyav", "pyav-2-threads", "torchcodec"]


@cache
def decoded_from_start(name: str) -> list[np.ndarray]:
    """The oracle: every frame of a clip, decoded one after the other by PyAV without any seek, upright."""
    with av.open(io.BytesIO(BY_NAME[name].data)) as container:
        return [
            np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            for frame in container.decode(video=0)
        ]


@pytest.fixture(params=CLIPS, ids=str)
def any_clip(request: pytest.FixtureRequest) -> Clip:
    return request.param


@pytest.fixture(params=DECODERS)
def reader(request: pytest.FixtureRequest, any_clip: Clip) -> VideoReader:
    if request.param == "torchcodec":
        if problem := torchcodec_problem():
            unavailable("torchcodec", problem)
        if any_clip.torchcodec:
            pytest.skip(any_clip.torchcodec)
        return open_video(any_clip.data, decoder="torchcodec", threads=1)
    return open_video(any_clip.data, decoder="pyav", threads=2 if "2" in request.param else 1)


class TestEveryDecoderAndClip:
    def test_metadata(self, reader: VideoReader, any_clip: Clip) -> None:
        meta = reader.metadata
        assert meta.total_num_frames == len(any_clip.numbers)
        assert (meta.width, meta.height) == any_clip.size
        assert meta.num_keyframes == len(reader.keyframe_indices())
        if any_clip.name != "raw_h264":  # which is played at a nominal 25 fps
            length = any_clip.ticks[-1] - any_clip.ticks[0]
            shown_for = meta.duration * 30 - length  # the last frame's own time, in ticks
            assert 0.9 <= shown_for <= 5.1
            assert meta.fps == pytest.approx(len(any_clip.numbers) / meta.duration)

    def test_every_frame_shows_its_number(self, reader: VideoReader, any_clip: Clip) -> None:
        batch = reader.read(np.arange(len(any_clip.numbers)))
        assert [read_number(frame) for frame in batch.frames] == any_clip.numbers
        assert batch.frame_indices.tolist() == list(range(len(any_clip.numbers)))
        assert batch.notes == ()

    def test_times_are_presentation_times(self, reader: VideoReader, any_clip: Clip) -> None:
        times = reader.timeline().seconds(np.arange(len(any_clip.numbers)))
        if any_clip.name == "raw_h264":
            np.testing.assert_allclose(times, np.arange(len(times)) / 25, atol=1e-12)
            return
        tolerance = 1e-9 if any_clip.exact_times else 6e-4  # containers that count in milliseconds
        np.testing.assert_allclose(times - times[0], any_clip.seconds - any_clip.seconds[0], atol=tolerance)
        if any_clip.name.startswith("late_start"):
            assert times[0] == pytest.approx(10.0, abs=1e-9)
        batch = reader.read(np.arange(min(3, len(times))))
        np.testing.assert_array_equal(batch.pts_seconds, times[:3])

    def test_requests_in_any_order_with_repeats(self, reader: VideoReader, any_clip: Clip) -> None:
        count = len(any_clip.numbers)
        asked = np.array([count - 1, 0, count // 2, count // 2, count // 3, count - 1])
        batch = reader.read(asked)
        assert [read_number(frame) for frame in batch.frames] == [any_clip.numbers[i] for i in asked]
        again = reader.read(asked[::-1])  # the same reader, a second time
        np.testing.assert_array_equal(again.frames, batch.frames[::-1])

    def test_pixels_are_those_of_a_decode_from_the_start(self, reader: VideoReader, any_clip: Clip) -> None:
        wanted = np.linspace(0, len(any_clip.numbers) - 1, 7).astype(int)
        batch = reader.read(wanted)
        truth = np.stack([decoded_from_start(any_clip.name)[i] for i in wanted])
        if reader.decoder == "pyav":
            np.testing.assert_array_equal(batch.frames, truth)
        else:  # another FFmpeg: its arithmetic differs in the last bits, and by more for 10-bit and 4:4:4 pictures
            difference = np.abs(batch.frames.astype(int) - truth)
            assert difference.mean() < 1.5
            assert np.percentile(difference, 99) <= 12

    def test_keyframes_are_found_and_decode_alone(self, reader: VideoReader, any_clip: Clip) -> None:
        positions = np.arange(len(reader.keyframe_indices()))
        frames, times = reader.locate_keyframes(positions)
        assert frames.tolist() == _true_keyframes(any_clip)
        if not len(frames):
            return
        batch = reader.read(frames)
        assert [read_number(frame) for frame in batch.frames] == [any_clip.numbers[i] for i in frames]
        np.testing.assert_array_equal(batch.pts_seconds, times)
        np.testing.assert_array_equal(reader.timeline().seconds(frames), times)

    @pytest.mark.parametrize(("size", "shape"), [(64, None), ((50, 70), (50, 70))])
    def test_resized(self, reader: VideoReader, any_clip: Clip, size: object, shape: tuple[int, int] | None) -> None:
        width, height = any_clip.size
        if shape is None:
            shape = (64, int(64 * width / height)) if width > height else (int(64 * height / width), 64)
        batch = reader.read(np.array([0, len(any_clip.numbers) - 1]), size=size)  # type: ignore[arg-type]
        assert batch.frames.shape == (2, *shape, 3)
        assert [read_number(frame) for frame in batch.frames] == [any_clip.numbers[0], any_clip.numbers[-1]]
        reference = Image.fromarray(decoded_from_start(any_clip.name)[0])
        expected = np.asarray(reference.resize(shape[::-1], Image.Resampling.BILINEAR), dtype=int)
        # Anti-aliased as PIL's: nearest-neighbour resizing differs by 5 and more on these pictures.
        assert np.abs(batch.frames[0].astype(int) - expected).mean() < 2.5


def _true_keyframes(clip: Clip) -> list[int]:
    """Presentation numbers of the packets that are marked as keyframes, by sorting all packets."""
    with av.open(io.BytesIO(clip.data)) as container:
        packets = [p for p in container.demux(video=0) if p.size and not p.is_discard]
    if clip.name == "raw_h264":
        return [i for i, packet in enumerate(packets) if packet.is_keyframe]
    packets.sort(key=lambda packet: packet.pts if packet.pts is not None else packet.dts)
    return [i for i, packet in enumerate(packets) if packet.is_keyframe]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_clip_notes(clip: Clip) -> None:
    reader = open_video(clip.data)
    reader.timeline()
    reader.read(np.array([0]))
    if clip.notes:
        assert any(clip.notes in note for note in reader.notes), reader.notes
    else:
        assert reader.notes == []


def test_both_decoders_give_the_same_times_to_the_last_bit(torchcodec: None) -> None:
    for clip in CLIPS:
        if clip.torchcodec:
            continue
        ours, theirs = open_video(clip.data).timeline(), open_video(clip.data, decoder="torchcodec").timeline()
        everything = np.arange(len(ours))
        np.testing.assert_array_equal(ours.seconds(everything), theirs.seconds(everything), err_msg=clip.name)
        np.testing.assert_array_equal(ours.is_keyframe, theirs.is_keyframe, err_msg=clip.name)


INDEXED = [
    "h264",
    "all_intra",
    "tiny_groups",
    "open_gop",
    "variable_rate",
    "late_start",
    "edit_list",
    "hevc",
    "av1",
    "rotated_90",
]


@pytest.mark.parametrize("name", INDEXED)
def test_container_index_and_scan_agree(name: str) -> None:
    by_index, by_scan = open_video(BY_NAME[name].data), open_video(BY_NAME[name].data)
    by_scan.timeline()
    fast, slow = by_index.metadata, by_scan.metadata
    assert by_index._table is None, "the index should have spared the scan"  # type: ignore[attr-defined]
    assert fast.total_num_frames == slow.total_num_frames
    assert fast.num_keyframes == slow.num_keyframes
    assert fast.start_seconds == pytest.approx(slow.start_seconds, abs=1e-9)
    # Without reading packets the last frame's duration is taken from the one before it.
    assert fast.duration == pytest.approx(slow.duration, abs=0.2 if name == "variable_rate" else 1e-6)
    positions = np.arange(fast.num_keyframes)
    for ours, theirs in zip(by_index.locate_keyframes(positions), by_scan.locate_keyframes(positions), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_keyframes_of_an_mp4_are_read_without_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_video(BY_NAME["h264"].data)
    monkeypatch.setattr(reader, "_packets", lambda: pytest.fail("the file was scanned"))
    frames, _ = reader.locate_keyframes(np.array([0, 2]))
    assert [read_number(frame) for frame in reader.read(frames).frames] == [0, 60]


def test_frames_that_nothing_refers_to_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels are the same and fewer frames leave the decoder."""
    from sosampler.video import pyav_decode

    leaving: dict[bool, int] = {}
    for skips in (True, False):
        monkeypatch.setattr(pyav_decode, "_SKIPPING_CODECS", frozenset({"h264"}) if skips else frozenset())
        out = 0
        original = pyav_decode.RunDecoder._decode

        def counting(self, packet, remaining, result, original=original):  # type: ignore[no-untyped-def]
            nonlocal out
            context = self._context

            class Spy:
                def decode(self, packet):  # type: ignore[no-untyped-def]
                    nonlocal out
                    frames = context.decode(packet)
                    out += len(frames)
                    return frames

            self._context = Spy()
            try:
                original(self, packet, remaining, result)
            finally:
                self._context = context

        monkeypatch.setattr(pyav_decode.RunDecoder, "_decode", counting)
        batch = open_video(BY_NAME["deep_b_pyramid"].data, threads=1).read(np.array([29, 59]))
        monkeypatch.setattr(pyav_decode.RunDecoder, "_decode", original)
        assert [read_number(frame) for frame in batch.frames] == [29, 59]
        leaving[skips] = out
    assert leaving[True] <= 0.7 * leaving[False]


@pytest.mark.parametrize("name", ["h264", "deep_b_pyramid", "hevc"])
def test_timestamps_that_pretend_a_deep_reordering(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would abort the whole process at more than sixteen frames."""
    from sosampler.video.pyav_index import PacketTable

    monkeypatch.setattr(PacketTable, "reorder_depth", 1000)
    batch = open_video(BY_NAME[name].data).read(np.array([5, 44]))
    assert [read_number(frame) for frame in batch.frames] == [5, 44]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_reordering_that_is_not_announced(threads: int) -> None:
    """Each decoder is told, again behind each seek, by how much frames are late; else the earliest of them are lost."""
    wanted = np.array([5, 61, 62, 63, 66, 70, 89])
    batch = open_video(late_b_frames(), threads=threads).read(wanted)
    assert batch.notes == ()
    assert batch.frame_indices.tolist() == wanted.tolist()
    assert [read_number(frame) for frame in batch.frames] == wanted.tolist()


def test_threads_decode_a_dialect_of_mpeg4_as_one_does() -> None:
    """The tag of the container says that it is Xvid's, whose rounding differs: without it pictures drift."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=25, options={"flags": "+bitexact", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 50, 38, "yuv420p"
        stream.codec_context.codec_tag = "XVID"
        small = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        large = np.asarray(Image.fromarray(small).resize((200, 200), Image.Resampling.BICUBIC))
        for number in range(40):
            moved = np.roll(large, (3 * number, 5 * number), (0, 1))[:38, :50]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(moved), "rgb24")))
        container.mux(stream.encode(None))
    with av.open(io.BytesIO(file.getvalue())) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    batch = open_video(file.getvalue(), threads=3).read(np.arange(40))
    np.testing.assert_array_equal(batch.frames, expected)


# --- what a source may be --------------------------------------------------------------------------------------------


def _dump(folder: Path, count: int, name: str = "img_{:05d}.jpg") -> Path:
    folder.mkdir()
    for number in range(count):
        Image.fromarray(numbered_frame(number)).save(folder / name.format(number + 1), quality=95)
    return folder


class TestSources:
    @pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
    @pytest.mark.parametrize("kind", ["path", "string", "bytes", "bytearray", "memoryview", "file", "BytesIO"])
    def test_path_bytes_and_file_like(self, kind: str, decoder: str, clip: Path) -> None:
        if decoder == "torchcodec" and (problem := torchcodec_problem()):
            unavailable("torchcodec", problem)
        data = clip.read_bytes()
        with open(clip, "rb") as file:
            source = {
                "path": clip,
                "string": str(clip),
                "bytes": data,
                "bytearray": bytearray(data),
                "memoryview": memoryview(data),
                "file": file,
                "BytesIO": io.BytesIO(data),
            }[kind]
            reader = open_video(source, decoder=decoder)  # type: ignore[arg-type]
            assert [read_number(f) for f in reader.read(np.array([7, 31, 89])).frames] == [7, 31, 89]
            frames, _ = reader.locate_keyframes(np.array([1]))
            assert read_number(reader.read(frames).frames[0]) == 30

    def test_file_like_that_was_read_before(self, clip_bytes: bytes) -> None:
        file = io.BytesIO(clip_bytes)
        file.read(1000)
        assert read_number(open_video(file).read(np.array([45])).frames[0]) == 45

    @pytest.mark.parametrize("name", ["img_{:05d}.jpg", "{}.png", "clip2_frame{:d}.JPG"])
    def test_folder_of_images_in_numeric_order(self, tmp_path: Path, name: str) -> None:
        reader = open_video(_dump(tmp_path / "dump", 12, name), folder_fps=2)
        assert reader.metadata.total_num_frames == 12
        batch = reader.read(np.array([0, 1, 9, 10, 11]))
        assert [read_number(frame) for frame in batch.frames] == [0, 1, 9, 10, 11]
        assert batch.pts_seconds.tolist() == [0.0, 0.5, 4.5, 5.0, 5.5]
        assert reader.keyframe_indices().tolist() == list(range(12))
        assert reader.notes == []

    def test_damaged_first_image(self, tmp_path: Path) -> None:
        folder = _dump(tmp_path / "dump", 4)
        (folder / "img_00001.jpg").write_bytes(b"not a picture")
        assert open_video(folder, folder_fps=1).read(np.array([0])).frame_indices.tolist() == [1]

    def test_folder_without_a_rate_says_what_it_assumed(self, tmp_path: Path) -> None:
        reader = open_video(_dump(tmp_path / "dump", 3))
        assert reader.metadata.fps == 25
        assert "folder_fps" in reader.notes[0]

    def test_damaged_image_is_replaced_by_its_neighbour(self, tmp_path: Path) -> None:
        folder = _dump(tmp_path / "dump", 5)
        (folder / "img_00003.jpg").write_bytes(b"not a picture")
        batch = open_video(folder, folder_fps=1).read(np.array([1, 2, 3]))
        assert batch.frame_indices.tolist() == [1, 1, 3]
        assert [read_number(frame) for frame in batch.frames] == [1, 1, 3]
        assert "img_00003.jpg" in batch.notes[0]

    @pytest.mark.parametrize("order", ["NCHW", "NHWC"])
    def test_open_torchcodec_decoder(self, order: str, clip_bytes: bytes, torchcodec: None) -> None:
        from torchcodec.decoders import VideoDecoder

        reader = open_video(VideoDecoder(clip_bytes, dimension_order=order))  # type: ignore[arg-type]
        assert reader.total_num_frames == 90
        assert reader.keyframe_indices().tolist() == [0, 30, 60]
        batch = reader.read(np.array([3, 60]))
        assert [read_number(frame) for frame in batch.frames] == [3, 60]
        assert batch.pts_seconds.tolist() == [0.1, 2.0]
        assert reader.read(np.array([3]), size=64).frames.shape == (1, 64, 96, 3)

    def test_approximate_decoder_cannot_tell_its_keyframes(self, clip_bytes: bytes, torchcodec: None) -> None:
        from torchcodec.decoders import VideoDecoder

        reader = open_video(VideoDecoder(clip_bytes, seek_mode="approximate"))
        with pytest.raises(VideoError, match="seek_mode='exact'"):
            reader.keyframe_indices()
        assert len(reader.timeline()) == 90  # all else works

    def test_frames_out_of_range(self, clip: Path) -> None:
        with pytest.raises(IndexError, match=r"0\.\.89"):
            open_video(clip).read(np.array([90]))
