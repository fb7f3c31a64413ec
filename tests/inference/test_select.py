"""`so.select` from a file to frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME
from tests.conftest import torchcodec_problem, unavailable


def numbers(selection: so.Selection) -> list[int]:
    assert selection.frames is not None
    return [read_number(frame) for frame in selection.frames]


@pytest.fixture(params=["pyav", "torchcodec"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == "torchcodec" and (problem := torchcodec_problem()):
        unavailable("torchcodec", problem)
    return request.param


class TestPolicies:
    @pytest.mark.parametrize("policy", so.list_policies())
    @pytest.mark.parametrize("candidates", [None, "exact", "keyframe", "snap", "auto"])
    def test_the_frames_are_those_that_the_numbers_say(self, policy: str, candidates: str | None, decoder: str) -> None:
        if policy == "keyframe" and candidates not in (None, "keyframe"):
            pytest.skip("policy keyframe has one candidate mode")
        data = numbered_video(num_frames=240, gop=12)
        count = {"num_candidates": 7} if policy == "all" else {"num_frames": 5, "num_candidates": 12}
        sel = so.select(data, policy=policy, candidates=candidates, decoder=decoder, **count)  # type: ignore[arg-type]
        assert numbers(sel) == sel.frame_indices.tolist()
        np.testing.assert_allclose(sel.pts_seconds, sel.frame_indices / 30, atol=1e-12)
        assert len(sel) == (7 if policy == "all" else 5)
        assert set(sel.frame_indices) <= set(sel.candidates.frame_indices)
        np.testing.assert_allclose(sel.candidates.pts_seconds, sel.candidates.frame_indices / 30, atol=1e-12)
        if sel.candidates.mode == "keyframe":
            assert (sel.candidates.frame_indices % 12 == 0).all()
        if sel.scores is not None:
            assert sel.scores.shape == (5,)
            assert sel.candidates.scores is not None
            assert sel.candidates.scores.shape == (12,)

    def test_uniform_is_segment_centres_of_the_video(self, clip: Path) -> None:
        assert so.select(clip, num_frames=3, policy="uniform").frame_indices.tolist() == [15, 45, 75]

    def test_eight_frames_unless_told(self, clip: Path) -> None:
        assert len(so.select(clip, policy="uniform")) == 8

    def test_how_far_keyframes_moved(self, clip: Path) -> None:
        sel = so.select(clip, num_frames=3, candidates="keyframe", policy="uniform")
        assert sel.frame_indices.tolist() == [0, 30, 60]
        assert sel.candidates.moved_frames.tolist() == [-15, -15, -15]
        np.testing.assert_allclose(sel.candidates.moved_seconds, -0.5, atol=1e-12)

    def test_snap_moves_only_what_is_near(self, clip: Path) -> None:
        sel = so.select(clip, num_frames=9, candidates="snap", snap_tolerance=0.2, policy="uniform")
        assert sel.frame_indices.tolist() == [0, 15, 30, 35, 45, 60, 65, 75, 85]
        assert sel.candidates.moved_frames.tolist() == [-5, 0, 5, 0, 0, 5, 0, 0, 0]
        assert numbers(sel) == sel.frame_indices.tolist()

    def test_frame_difference_finds_the_cut(self) -> None:
        from sosampler.video.synthetic import draw_number, encode_video

        frames = [draw_number(np.full((128, 192, 3), 40 if i < 50 else 200, np.uint8), i) for i in range(90)]
        sel = so.select(encode_video(frames), num_frames=1, num_candidates=90, policy="frame-difference")
        assert sel.frame_indices.tolist() == [50]
        assert sel.candidates.scores is not None
        assert sel.candidates.scores.argmax() == 50

    def test_too_much_memory_is_avoided_by_a_second_pass(self, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        once = so.select(clip, num_frames=4, policy="frame-difference")
        monkeypatch.setattr("sosampler.inference.select.MAX_KEPT_BYTES", 1000)
        twice = so.select(clip, num_frames=4, policy="frame-difference")
        assert twice.frames is not None
        assert twice.frames.shape == (4, 128, 192, 3)
        assert numbers(twice) == twice.frame_indices.tolist() == once.frame_indices.tolist()

    def test_seed(self, clip: Path) -> None:
        one, same, other = (so.select(clip, 5, policy="random", seed=s).frame_indices.tolist() for s in (1, 1, 2))
        assert one == same != other
        one, same, other = (
            so.select(clip, 5, grid="stratified", seed=s, policy="uniform").frame_indices.tolist() for s in (1, 1, 2)
        )
        assert one == same != other


class TestRatesAndRanges:
    def test_rate(self, clip: Path) -> None:
        sel = so.select(clip, fps=2)
        assert numbers(sel) == [0, 15, 30, 45, 60, 75]

    def test_rate_of_a_variable_rate_video_follows_the_clock(self) -> None:
        video = BY_NAME["variable_rate"]
        sel = so.select(video.data, fps=3)
        times = np.array(video.ticks) / 30
        moments = np.arange(len(sel)) / 3 + times[0]
        on_screen = [np.flatnonzero(times <= moment + 1e-9)[-1] for moment in moments]
        assert numbers(sel) == [int(i) for i in on_screen]

    def test_range(self, clip: Path) -> None:
        sel = so.select(clip, num_frames=3, start=1.0, end=2.0, policy="uniform")
        assert sel.frame_indices.tolist() == [35, 45, 55]

    def test_range_is_half_open_and_in_pts(self) -> None:
        sel = so.select(BY_NAME["late_start"].data, start=10.5, end=11.0, policy="all", num_candidates=15)
        assert numbers(sel) == list(range(15, 30))
        assert sel.pts_seconds[0] == pytest.approx(10.5)

    @pytest.mark.parametrize("mode", ["keyframe", "snap"])
    def test_range_with_keyframes(self, clip: Path, mode: str) -> None:
        sel = so.select(clip, num_frames=2, start=0.9, end=2.5, candidates=mode, snap_tolerance=9, policy="uniform")
        assert sel.frame_indices.tolist() == [30, 60]

    def test_rate_inside_a_range(self, clip: Path) -> None:
        assert so.select(clip, fps=5, start=1.0, end=2.0).frame_indices.tolist() == [30, 36, 42, 48, 54]

    def test_rate_above_the_videos_own(self) -> None:
        data = numbered_video(num_frames=6)
        assert so.select(data, fps=60).frame_indices.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert so.select(data, fps=60, on_short="fewer").frame_indices.tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(so.InvalidArgument, match="lower fps"):
            so.select(data, fps=60, on_short="error")

    def test_rate_repeats_the_frame_that_stays_on_screen(self) -> None:
        data = numbered_video(num_frames=3, fps=1, pts=[0, 10, 11])
        assert so.select(data, fps=1).frame_indices.tolist() == [0] * 10 + [1, 2]

    @pytest.mark.parametrize(("fps", "step"), [(30, 1), (15, 2), (10, 3)])
    @pytest.mark.parametrize("name", ["mkv", "late_start", "h264"])
    def test_rounding_loses_no_frame(self, name: str, fps: int, step: int) -> None:
        """Milliseconds of a container, and 0.1 * 3, mean the tick that they are next to."""
        assert so.select(BY_NAME[name].data, fps=fps).frame_indices.tolist() == list(range(0, 75, step))

    def test_range_with_a_rounding_error(self, clip: Path) -> None:
        assert so.select(clip, 1, start=0.1 * 3, end=0.32, policy="uniform").frame_indices.tolist() == [9]

    def test_rate_stops_at_the_end(self) -> None:
        data = numbered_video(num_frames=3, fps=1, pts=[0, 10, 11])
        assert so.select(data, fps=1, end=5).frame_indices.tolist() == [0] * 5

    def test_keyframes_of_open_groups_do_not_depend_on_a_scan(self) -> None:
        data = BY_NAME["open_gop"].data
        for count in (1, 2, 3, 4):
            by_index = so.select(data, count, candidates="keyframe", policy="uniform")
            by_scan = so.select(
                data, count, candidates="keyframe", start=0.0, policy="uniform"
            )  # a range needs the scan
            assert by_index.frame_indices.tolist() == by_scan.frame_indices.tolist()
            assert by_index.candidates.moved_frames.tolist() == by_scan.candidates.moved_frames.tolist()


class TestShortVideos:
    def test_a_policys_own_pool_is_no_demand(self) -> None:
        sel = so.select(numbered_video(num_frames=20), 4, policy="random", on_short="error")
        assert sel.num_candidates == 20
        assert sel.notes == ()

    @pytest.mark.parametrize("policy", [p for p in so.list_policies() if p != "all"])
    def test_repeat_keeps_the_number(self, policy: str) -> None:
        sel = so.select(BY_NAME["two_frames"].data, num_frames=6, policy=policy)
        assert len(sel) == 6
        assert numbers(sel) == sel.frame_indices.tolist()
        assert sel.notes

    def test_no_frame_twice_while_another_is_left(self) -> None:
        data = numbered_video(num_frames=6)
        for seed in range(10):
            sel = so.select(data, num_frames=5, num_candidates=30, policy="random", seed=seed)
            assert len(set(sel.frame_indices.tolist())) == 5
            assert sel.num_candidates == 30

    def test_fewer(self) -> None:
        sel = so.select(BY_NAME["two_frames"].data, num_frames=6, on_short="fewer", policy="uniform")
        assert sel.frame_indices.tolist() == [0, 1]
        assert "2 frames for 6 candidates" in sel.notes[0]

    def test_error(self) -> None:
        with pytest.raises(so.InvalidArgument, match="6 candidates were requested but only 2 frames"):
            so.select(BY_NAME["two_frames"].data, num_frames=6, on_short="error", policy="uniform")

    def test_one_frame(self) -> None:
        assert numbers(so.select(BY_NAME["one_frame"].data, num_frames=1, policy="uniform")) == [0]

    def test_too_few_keyframes(self, clip: Path) -> None:
        filled = so.select(clip, num_frames=6, candidates="keyframe", policy="uniform")
        assert filled.frame_indices.tolist() == [0, 22, 30, 52, 60, 82]
        fewer = so.select(clip, num_frames=6, candidates="keyframe", on_short="fewer", policy="uniform")
        assert fewer.frame_indices.tolist() == [0, 30, 60]
        assert "3 keyframes for 6 candidates" in fewer.notes[0]
        with pytest.raises(so.InvalidArgument, match="only 3 keyframes"):
            so.select(clip, num_frames=6, candidates="keyframe", on_short="error", policy="uniform")


class TestResult:
    def test_json_round_trip(self, clip: Path) -> None:
        sel = so.select(clip, num_frames=3, num_candidates=9, policy="frame-difference")
        told = json.loads(json.dumps(sel.to_dict()))
        assert told["frame_indices"] == sel.frame_indices.tolist()
        assert told["candidates"]["mode"] == "exact"
        assert len(told["candidates"]["scores"]) == 9
        assert told["num_frames"] == 3
        assert told["num_candidates"] == 9
        assert set(told["timing"]) == {"open", "candidates", "choose_and_decode", "total"}
        assert all(seconds >= 0 for seconds in told["timing"].values())

    def test_repr_is_short(self, clip: Path) -> None:
        text = repr(so.select(clip, num_frames=3, policy="uniform"))
        assert len(text) < 400
        assert "[15, 45, 75]" in text

    def test_video_metadata_fits_transformers(self, clip: Path) -> None:
        video_utils = pytest.importorskip("transformers.video_utils")
        sel = so.select(clip, num_frames=3, policy="uniform")
        meta = video_utils.VideoMetadata(**sel.to_video_metadata())
        assert meta.frames_indices == [15, 45, 75]
        assert meta.total_num_frames == 90
        assert (meta.width, meta.height) == (192, 128)
        assert meta.timestamps == pytest.approx(sel.pts_seconds.tolist())

    def test_processor_takes_frames_and_metadata(self, clip: Path) -> None:
        """A real video processor passes our frames through unsampled."""
        transformers = pytest.importorskip("transformers")
        sel = so.select(clip, num_frames=4, policy="keyframe", size=(64, 64))
        processor = transformers.VideoMAEVideoProcessor(
            size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}
        )
        out = processor(
            videos=[sel.frames],
            video_metadata=[sel.to_video_metadata()],
            do_sample_frames=False,
            return_metadata=True,
            return_tensors="pt",
        )
        assert tuple(out["pixel_values"].shape)[:2] == (1, 4) or tuple(out["pixel_values_videos"].shape)[:2] == (1, 4)
        assert out["video_metadata"][0].frames_indices == sel.frame_indices.tolist()

    def test_to_torch(self, clip: Path) -> None:
        torch = pytest.importorskip("torch")
        sel = so.select(clip, num_frames=3, policy="uniform")
        tensor = sel.to_torch()
        assert tensor.dtype == torch.uint8
        assert tuple(tensor.shape) == (3, 3, 128, 192)
        assert (tensor.permute(0, 2, 3, 1).numpy() == sel.frames).all()

    def test_without_decoding(self, clip: Path) -> None:
        light, full = so.select(clip, 4, decode=False), so.select(clip, 4, policy="uniform")
        assert light.frames is None
        assert light.frame_indices.tolist() == full.frame_indices.tolist()
        assert light.pts_seconds.tolist() == full.pts_seconds.tolist()
        with pytest.raises(so.SosamplerError, match="decode=True"):
            light.to_torch()

    def test_a_given_torchcodec_decoder(self, clip: Path, torchcodec: None) -> None:
        from torchcodec.decoders import VideoDecoder

        sel = so.select(VideoDecoder(str(clip)), num_frames=3, policy="uniform")
        assert numbers(sel) == [15, 45, 75]
        sel = so.select(VideoDecoder(str(clip)), num_frames=3, candidates="keyframe", policy="uniform")
        assert numbers(sel) == [0, 30, 60]

    def test_threads_do_not_change_the_result(self, clip: Path) -> None:
        for mode in ("exact", "keyframe"):
            one, many = (so.select(clip, 8, candidates=mode, threads=threads, policy="uniform") for threads in (1, 4))
            assert one.frames is not None
            assert (one.frames == many.frames).all()
            assert one.to_dict()["pts_seconds"] == many.to_dict()["pts_seconds"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_frames": 12, "num_candidates": 10}, "num_frames=12 is more than num_candidates=10"),
    ({"num_frames": 0}, "num_frames=0 must be an int of at least 1"),
    ({"num_frames": -2}, "num_frames=-2"),
    ({"num_frames": 2.5}, r"num_frames=2\.5"),
    ({"num_frames": "8"}, "num_frames='8'"),
    ({"num_frames": True}, "num_frames=True"),
    ({"num_candidates": 0}, "num_candidates=0"),
    ({"num_candidates": 7.0}, r"num_candidates=7\.0"),
    ({"policy": "best"}, "policy='best' is unknown; choose one of: uniform"),
    ({"candidates": "iframes"}, "candidates='iframes' is unknown; choose one of: exact, keyframe, snap"),
    ({"grid": "square"}, "grid='square' is unknown"),
    ({"on_short": "wrap"}, "on_short='wrap' is unknown; choose one of: repeat, fewer, error"),
    ({"decoder": "decord"}, "decoder='decord' is unknown; choose one of: pyav, torchcodec"),
    ({"fps": 0}, "fps=0"),
    ({"fps": 1, "num_candidates": 5}, "both given"),
    ({"policy": "all", "num_frames": 3, "num_candidates": 5}, "contradict"),
    ({"policy": "keyframe", "candidates": "exact"}, "chooses among keyframe candidates"),
    ({"start": 2.0, "end": 1.0}, "end=1 is not after start=2"),
    ({"start": 50.0}, r"its frames run from 0\.000 to 3\.000 s"),
    ({"start": "soon"}, "start='soon'"),
    ({"size": 0}, "size=0"),
    ({"size": (3,)}, r"size=\(3,\)"),
    ({"seed": -1}, "seed=-1"),
    ({"threads": 0}, "threads=0"),
    ({"snap_tolerance": -0.1, "candidates": "snap"}, r"snap_tolerance=-0\.1"),
    ({"candidates": "keyframe", "start": 0.1, "end": 0.5, "on_short": "fewer"}, "has no keyframe among the frames"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[str(arguments) for arguments, _ in BAD])
def test_bad_arguments(clip: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(so.InvalidArgument, match=sentence):
        so.select(clip, **arguments)


@pytest.mark.parametrize("source", [3, None, ["a.mp4"], object()])
def test_what_is_no_source(source: object) -> None:
    with pytest.raises(so.InvalidArgument, match="is not a video source; give a path, bytes"):
        so.select(source, policy="uniform")


def test_frames_of_16_bits_are_scaled_not_cut_off(tmp_path: Path) -> None:
    from PIL import Image

    grey = (np.arange(48 * 64, dtype=np.uint16) * 20).reshape(48, 64)
    for number in range(3):
        Image.fromarray(grey).save(tmp_path / f"img_{number:03d}.png")
    frames = so.select(tmp_path, 2, policy="uniform").frames
    assert frames is not None
    assert np.array_equal(frames[1, ..., 0], grey // 257)
