"""Candidates "auto", keyframes that do not suffice, and one view of the candidates for every size."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import sosampler as so
from sosampler.inference.decode import DecodeStep
from sosampler.inference.many import SelectJob
from sosampler.inference.options import SelectOptions
from sosampler.inference.select import select_with
from sosampler.integrations.vllm import load_bytes
from sosampler.video.candidates import BEHIND_CUT
from sosampler.video.pyav_reader import PyavReader
from sosampler.video.reader import Timeline
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME, CLIPS, Clip
from tests.conftest import torchcodec_problem, unavailable

ONE_GROUP = {"x264-params": "keyint=infinite:scenecut=0:log-level=error", "preset": "veryfast"}


def numbers(selection: so.Selection) -> list[int]:
    assert selection.frames is not None
    return [read_number(frame) for frame in selection.frames]


CUTS = (33, 37, 90, 151)
KEYFRAMES = [0, 33, 37, 87, 90, 140, 151]


@cache
def film(container_format: str = "mp4") -> bytes:
    """200 frames with keyframes as x264 puts them: at cuts, and 50 frames after the last one."""
    return numbered_video(num_frames=200, gop=50, keyframes=CUTS, container_format=container_format)


def timeline_of(data: bytes) -> Timeline:
    reader = so.open_video(data)
    try:
        return reader.timeline()
    finally:
        reader.close()


def by_brute_force(timeline: Timeline, targets: list[int]) -> list[int]:
    """What "auto" must list for targets on the grid."""
    keys, seconds = timeline.keyframe_indices.tolist(), timeline.seconds(np.arange(len(timeline))).tolist()
    gaps = [later - key for key, later in zip(seconds_at(seconds, keys), seconds_at(seconds, keys[1:]), strict=False)]
    segments: dict[int, list[int]] = {target: [] for target in targets}
    for frame in range(len(timeline)):
        segments[min(targets, key=lambda other: (abs(other - frame), other))].append(frame)
    with_key = [target for target, segment in segments.items() if set(segment) & set(keys)]
    if 4 * len(with_key) < 3 * len(segments):
        return targets
    frames = []
    for target, segment in segments.items():
        inside = [key for key in keys if key in segment]
        if not inside:
            frames.append(target)
            continue
        key = min(inside, key=lambda key: (abs(key - target), key))
        place = keys.index(key)
        is_due = place > 0 and gaps[place - 1] >= 0.9 * max(gaps)
        group = range(key, keys[place + 1] if place + 1 < len(keys) else len(timeline))
        latest = seconds[key] + (0 if is_due else BEHIND_CUT)
        half_tick = float(timeline.time_base) / 2
        frames.append(max(frame for frame in group if frame in segment and seconds[frame] <= latest + half_tick))
    return frames


def seconds_at(seconds: list[float], frames: list[int]) -> list[float]:
    return [seconds[frame] for frame in frames]


@pytest.mark.parametrize("count", [1, 4, 5, 7, 8, 23])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_auto_by_brute_force(count: int, container: str) -> None:
    data = film(container)
    timeline = timeline_of(data)
    assert timeline.keyframe_indices.tolist() == KEYFRAMES
    sel = so.select(data, policy="all", num_candidates=count, candidates="auto", grid="uniform")
    targets = [(2 * place + 1) * 200 // (2 * count) for place in range(count)]
    assert sel.frame_indices.tolist() == by_brute_force(timeline, targets) == numbers(sel)
    np.testing.assert_array_equal(sel.candidates.moved_frames, sel.frame_indices - targets)
    np.testing.assert_allclose(sel.candidates.moved_seconds, (sel.frame_indices - targets) / 30, atol=2e-3)
    assert sel.candidates.mode == "auto"
    assert not sel.notes


@pytest.mark.parametrize(
    ("total", "gop", "count", "expected"),
    [
        (200, 50, 5, [9, 50, 100, 150, 180]),  # four of five segments have a keyframe
        (180, 60, 4, [9, 60, 120, 157]),  # three of four
        (180, 60, 5, [18, 54, 90, 126, 162]),  # three of five
    ],
)
def test_exact_frames_where_few_segments_have_a_keyframe(total: int, gop: int, count: int, expected: list[int]) -> None:
    sel = so.select(numbered_video(num_frames=total, gop=gop), policy="all", num_candidates=count, candidates="auto")
    assert sel.frame_indices.tolist() == numbers(sel) == expected


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_auto_on_every_kind_of_file(clip: Clip, threads: int) -> None:
    sel = so.select(clip.data, policy="all", num_candidates=3, candidates="auto", threads=threads)
    total = len(clip.numbers)
    targets = [(2 * place + 1) * total // 6 for place in range(3)]
    if total >= 3:
        assert sel.frame_indices.tolist() == by_brute_force(timeline_of(clip.data), targets)
    assert numbers(sel) == [clip.numbers[index] for index in sel.frame_indices]
    np.testing.assert_array_equal(sel.pts_seconds, timeline_of(clip.data).seconds(sel.frame_indices))


def test_auto_within_a_range_and_at_a_rate() -> None:
    data = film()
    sel = so.select(data, policy="all", num_candidates=2, candidates="auto", start=1.0, end=3.0)
    assert sel.frame_indices.tolist() == [37 + 9, 87]  # of these one sits at a cut, the other was due
    rate = so.select(data, policy="all", fps=30, candidates="auto", start=0, end=2)
    assert rate.frame_indices.tolist() == list(range(60))


@pytest.mark.parametrize("seek_mode", ["exact", "approximate"])
def test_a_decoder_that_is_open(seek_mode: str, tmp_path: Path) -> None:
    if problem := torchcodec_problem():
        unavailable("torchcodec", problem)
    from torchcodec.decoders import VideoDecoder

    (tmp_path / "v.mp4").write_bytes(film())
    sel = so.select(VideoDecoder(tmp_path / "v.mp4", seek_mode=seek_mode), 2, num_candidates=4)
    assert numbers(sel) == sel.frame_indices.tolist()
    assert sel.candidates.mode == "auto"
    moved = sel.candidates.moved_frames
    assert moved.any() == (seek_mode == "exact")  # the other one lists no keyframes


def test_a_decoder_keeps_its_own_size(tmp_path: Path) -> None:
    if problem := torchcodec_problem():
        unavailable("torchcodec", problem)
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    (tmp_path / "v.mp4").write_bytes(film())
    for policy in ("uniform", "general"):
        decoder = VideoDecoder(tmp_path / "v.mp4", transforms=[Resize((40, 60))])
        frames = so.select(decoder, 2, policy=policy).frames
        assert frames is not None
        assert frames.shape == (2, 40, 60, 3)


@pytest.mark.parametrize(("options", "kept"), [({}, True), ({"decode": False}, False)])
def test_frames_that_nothing_reads_are_not_kept(
    options: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    view = PyavReader.view

    def noted(self: PyavReader, frame_indices: Any, *, size: Any, max_bytes: int) -> Any:
        limits.append(max_bytes)
        return view(self, frame_indices, size=size, max_bytes=max_bytes)

    monkeypatch.setattr(PyavReader, "view", noted)
    so.select(film(), 2, policy="general", **options)
    assert [limit > 0 for limit in limits] == [kept]


@pytest.mark.parametrize("policy", ["general", "frame-difference", "uniform", "general+nms"])
def test_the_mode_where_none_is_given(policy: str) -> None:
    mode = SelectOptions(policy=policy).mode
    assert mode == ("auto" if policy.startswith("general") else "exact")
    assert SelectOptions(policy=policy, candidates="keyframe").mode == "keyframe"


class TestTooFewKeyframes:
    def test_exact_frames_fill_up(self) -> None:
        sel = so.select(film(), policy="all", num_candidates=10, candidates="keyframe")
        assert set(KEYFRAMES) < set(sel.frame_indices.tolist())
        assert len(set(sel.frame_indices.tolist())) == 10
        assert numbers(sel) == sel.frame_indices.tolist()
        assert "7 keyframes for 10 candidates; the others are exact frames" in sel.notes[0]

    def test_the_policy_keyframe_takes_no_other_frame_while_it_has_enough(self) -> None:
        sel = so.select(film(), 3, num_candidates=12, policy="keyframe")
        assert sel.candidates.frame_indices.tolist() == KEYFRAMES
        assert "each keyframe is listed once" in sel.notes[0]
        filled = so.select(film(), 9, policy="keyframe")
        assert set(KEYFRAMES) < set(filled.frame_indices.tolist())
        assert len(set(filled.frame_indices.tolist())) == 9

    def test_a_range_without_keyframes(self) -> None:
        data = numbered_video(num_frames=60, gop=30)
        sel = so.select(data, 2, policy="uniform", candidates="keyframe", start=0.1, end=0.9)
        assert sel.frame_indices.tolist() == numbers(sel) == [9, 21]
        assert sel.notes == ("no keyframes for 2 candidates; all are exact frames, which take longer",)
        with pytest.raises(so.InvalidArgument, match="no keyframe among the frames to choose from"):
            so.select(data, 2, policy="uniform", candidates="keyframe", start=0.1, end=0.9, on_short="fewer")

    @pytest.mark.parametrize("mode", ["keyframe", "auto", "snap", None])
    def test_a_file_that_marks_no_keyframe(self, mode: str | None) -> None:
        # Some cameras write a table of keyframes that names none.
        data = numbered_video(num_frames=40, codec_options=ONE_GROUP)
        place = data.index(b"stss")
        data = data[: place + 8] + bytes(4) + data[place + 12 :]
        sel = so.select(data, 4, num_candidates=8, candidates=mode)
        assert numbers(sel) == sel.frame_indices.tolist()
        assert len(set(sel.frame_indices.tolist())) == 4

    def test_a_video_with_fewer_frames_than_candidates_repeats_them(self) -> None:
        sel = so.select(BY_NAME["two_frames"].data, 5, policy="uniform", candidates="keyframe")
        assert sel.frame_indices.tolist() == [0, 0, 1, 1, 1]
        assert sel.notes == ("2 frames for 5 candidates; frames are repeated evenly",)


# ---- one view


SIZES: list[Any] = [None, 16, 64, 100, 300, (40, 90)]


@pytest.mark.parametrize("decoder", ["pyav", "images"])
@pytest.mark.parametrize("policy", ["general", "farthest-first", "kts"])
def test_the_choice_does_not_depend_on_the_size(policy: str, decoder: str, tmp_path: Path) -> None:
    source: Any = numbered_video(num_frames=60, width=384, height=256, gop=12)
    if decoder == "images":
        whole = so.select(source, policy="all", num_candidates=30)
        assert whole.frames is not None
        source = tmp_path
        for number, frame in enumerate(whole.frames):
            av.VideoFrame.from_ndarray(frame, format="rgb24").to_image().save(tmp_path / f"{number:04}.png")
    chosen = [so.select(source, 5, policy=policy, size=size, num_candidates=20, folder_fps=30) for size in SIZES]
    for sel in chosen:
        assert sel.frame_indices.tolist() == chosen[0].frame_indices.tolist()
        if sel.scores is not None:
            np.testing.assert_array_equal(sel.scores, chosen[0].scores)
    unseen = so.select(source, 5, policy=policy, num_candidates=20, decode=False, folder_fps=30)
    assert unseen.frame_indices.tolist() == chosen[0].frame_indices.tolist()


def test_kept_frames_have_the_pixels_of_frames_that_are_decoded_for_it() -> None:
    for name in ("h264", "rotated_90", "ten_bit", "interlaced", "hevc", "raw_h264", "edit_list"):
        data = BY_NAME[name].data
        for size in (None, 48, (30, 50)):
            sel = so.select(data, 3, policy="farthest-first", num_candidates=6, size=size)
            plain = so.select(data, policy="all", num_candidates=6, size=size)
            assert sel.frames is not None
            assert plain.frames is not None
            rows = [plain.frame_indices.tolist().index(index) for index in sel.frame_indices]
            np.testing.assert_array_equal(sel.frames, plain.frames[rows])
            np.testing.assert_array_equal(sel.pts_seconds, plain.pts_seconds[rows])


def test_each_candidate_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sosampler.video.pyav_decode import RunDecoder

    packets: list[int] = []
    original = RunDecoder.__call__

    def counted(self: RunDecoder, given: Any, wanted: frozenset[int], **more: Any) -> Any:
        given = list(given)
        packets.append(len(given))
        return original(self, given, wanted, **more)

    monkeypatch.setattr(RunDecoder, "__call__", counted)
    so.select(numbered_video(num_frames=60, gop=15), 2, num_candidates=4, threads=1)
    # One for the rotation, up to 0.3 s behind the first keyframe, and the other keyframes themselves.
    assert packets[0] == 1
    assert 1 < packets[1] <= 12
    assert packets[2:] == [1, 1, 1]
    packets.clear()
    monkeypatch.setattr("sosampler.inference.select.MAX_KEPT_BYTES", 1000)
    so.select(numbered_video(num_frames=60, gop=15), 2, num_candidates=4, candidates="keyframe", threads=1)
    assert packets == [1] * (1 + 4 + 2)  # too little memory: the chosen ones twice


def test_frames_that_nobody_keeps_are_chosen_as_others() -> None:
    data = numbered_video(num_frames=60, gop=15)
    options = SelectOptions(num_frames=4)
    kept, dropped = select_with(data, options), select_with(data, options, keep_frames=False)
    assert dropped.frames is None
    assert dropped.frame_indices.tolist() == kept.frame_indices.tolist()


def test_every_door_chooses_the_same(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    data = numbered_video(path, num_frames=60, width=384, height=256, gop=12)
    expected = so.select(path, 5, num_candidates=20).frame_indices.tolist()
    _, fields = load_bytes(data, 5, num_candidates=20, policy="general", size=100)
    assert fields["frames_indices"] == expected
    options = SelectOptions(num_frames=5, num_candidates=20, size=64)
    shown = select_with(path, options, shown_size=50)  # as the page does
    decoded: Any = DecodeStep(options)(str(path))  # as Ray and a pipeline do
    (row,) = SelectJob(options).rows([str(path)])  # as the command line does
    assert shown.frame_indices.tolist() == decoded.frame_indices.tolist() == row["frame_indices"] == expected


def test_weights_are_read_while_frames_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, only rows of a file need their fingerprint."""
    (tmp_path / "v.mp4").write_bytes(numbered_video(num_frames=40, gop=10))
    waits: list[str] = []
    monkeypatch.setattr(SelectOptions, "identity", lambda self: waits.append("waits") or {})
    for out, expected in ((None, []), (tmp_path / "rows.jsonl", ["waits"])):
        SelectJob(SelectOptions(num_frames=3), out=out).run([tmp_path / "v.mp4"])
        assert waits == expected


# ---- many


class TestSelectMany:
    def test_as_one_by_one_in_order(self) -> None:
        videos = [numbered_video(num_frames=30 + 5 * number, gop=10) for number in range(4)]
        for workers in (0, 2):
            for sel, video in zip(so.select_many(videos, 3, workers=workers), videos, strict=True):
                one = so.select(video, 3)
                assert isinstance(sel, so.Selection)
                assert sel.frame_indices.tolist() == one.frame_indices.tolist()
                np.testing.assert_array_equal(sel.frames, one.frames)

    def test_a_bad_file_is_an_error_in_its_place(self) -> None:
        good = numbered_video(num_frames=20)
        results = list(so.select_many([good, b"no video", good], 2, workers=0, policy="uniform"))
        assert isinstance(results[1], so.VideoError)
        assert [sel.frame_indices.tolist() for sel in results[::2]] == [[5, 15]] * 2  # type: ignore[union-attr]
        with pytest.raises(so.VideoError):
            list(so.select_many([good, b"no video"], 2, on_error="raise", workers=0))

    def test_one_video_is_no_list(self) -> None:
        with pytest.raises(so.InvalidArgument, match=r"'a\.mp4' is one video; give a list"):
            so.select_many("a.mp4")

    def test_it_takes_videos_as_they_are_needed(self) -> None:
        taken: list[int] = []

        def endless() -> Any:
            for number in range(10_000):
                taken.append(number)
                yield numbered_video(num_frames=8)

        results = so.select_many(endless(), 2, policy="uniform", workers=0)
        for _ in range(3):
            next(results)
        results.close()  # type: ignore[attr-defined]
        assert len(taken) < 10

    def test_without_pixels(self) -> None:
        (sel,) = so.select_many([numbered_video(num_frames=20)], 2, decode=False)
        assert isinstance(sel, so.Selection)
        assert sel.frames is None

    @pytest.mark.parametrize("wrong", [{"polcy": "uniform"}, {"on_error": "skip"}, {"workers": -1}, {"grid": "round"}])
    def test_wrong_arguments_are_refused_at_once(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(so.InvalidArgument, match=next(iter(wrong))):
            so.select_many([], 2, **wrong)
