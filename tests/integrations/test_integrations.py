"""Chosen frames for other tools: true times, Pillow images, FiftyOne's fields, messages, and vLLM's loader."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.integrations import fiftyone, pil, qwen_vl, vllm
from sosampler.integrations import frame_times as true_times
from sosampler.video.synthetic import encode_video, numbered_frame, numbered_video, read_number
from tests.clips import BY_NAME, FPS
from tests.conftest import unavailable

EVEN = ["h264", "open_gop", "late_start", "mkv", "vp9_webm", "edit_list", "one_frame", "two_frames"]


def shown(frames: Any) -> list[int]:
    """The numbers that the pictures carry."""
    return [read_number(np.asarray(frame)) for frame in frames]


def true_seconds(name: str, numbers: list[int]) -> np.ndarray:
    """When a clip shows the pictures with these numbers, from its first frame on."""
    clip = BY_NAME[name]
    when = dict(zip(clip.numbers, clip.ticks, strict=True))
    return np.array([when[number] - clip.ticks[0] for number in numbers]) / FPS


# --- true times ---


@pytest.mark.parametrize("name", EVEN)
def test_metadata_of_an_even_video_hold_its_frame_numbers(name: str) -> None:
    selection = so.select(BY_NAME[name].data, 5, on_short="fewer", policy="uniform")
    told = true_times.video_metadata(selection)
    assert told["frames_indices"] == selection.frame_indices.tolist()
    assert told["total_num_frames"] == len(BY_NAME[name].numbers)
    times = np.array(told["frames_indices"]) / told["fps"]
    assert times == pytest.approx(true_seconds(name, shown(selection.frames)), abs=0.05)
    assert told["duration"] == pytest.approx(len(BY_NAME[name].numbers) / FPS, abs=0.05)


def test_metadata_of_an_uneven_video_give_true_times_and_say_the_same_rate() -> None:
    selection = so.select(BY_NAME["variable_rate"].data, 7, policy="uniform")
    told, plain = true_times.video_metadata(selection), selection.to_video_metadata()
    truth = true_seconds("variable_rate", shown(selection.frames))
    assert np.array(told["frames_indices"]) / told["fps"] == pytest.approx(truth, abs=0.0006)
    # What frame number / fps would have said: off by more than the prompt is precise to.
    assert np.abs(np.array(plain["frames_indices"]) / plain["fps"] - truth).max() > 0.1
    # Processors work out the chosen rate as N / total * fps.
    assert told["fps"] / told["total_num_frames"] == pytest.approx(plain["fps"] / plain["total_num_frames"], rel=1e-3)
    assert max(told["frames_indices"]) < told["total_num_frames"]


def test_a_choice_in_the_even_part_of_an_uneven_video_still_has_true_times() -> None:
    data = numbered_video(num_frames=40, pts=[*range(30), *range(60, 360, 30)])
    selection = so.select(data, 3, end=1.0, policy="uniform")
    told = true_times.video_metadata(selection)
    assert np.array(told["frames_indices"]) / told["fps"] == pytest.approx(selection.pts_seconds, abs=0.001)


@pytest.mark.parametrize(
    ("count", "size", "alone", "expected"),
    [
        (3, 2, False, [0, 1, 2, 2]),
        (4, 2, False, [0, 1, 2, 3]),
        (1, 4, False, [0, 0, 0, 0]),
        (3, 1, False, [0, 1, 2]),
        (3, 2, True, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_frames_are_repeated_into_whole_patches(count: int, size: int, alone: bool, expected: list[int]) -> None:
    selection = so.select(numbered_video(num_frames=40), count, policy="frame-difference")
    whole = true_times.whole_patches(selection, size, one_moment_per_patch=alone)
    for name in ("frame_indices", "pts_seconds", "scores", "frames"):
        assert np.array_equal(getattr(whole, name), getattr(selection, name)[expected])


# --- Pillow ---


def test_pillow_images_know_their_frame_and_time(clip_bytes: bytes) -> None:
    images = pil.select_pil(clip_bytes, 4, policy="random", seed=3, size=64)
    numbers = [image.info["frame_index"] for image in images]
    assert shown(images) == numbers == sorted(numbers)
    assert [image.info["pts_seconds"] for image in images] == pytest.approx(np.array(numbers) / 30)
    assert {(image.mode, image.size) for image in images} == {("RGB", (96, 64))}


def test_a_choice_among_pillow_images_returns_these_very_images() -> None:
    images = [Image.fromarray(numbered_frame(number)) for number in range(12)]
    assert pil.select_pil(images, 3, policy="uniform") == [images[2], images[6], images[10]]
    usual = pil.select_pil(images, 3)
    assert usual == pil.select_pil(images, 3, policy="general") == pil.select_pil(images, 3, policy=None)
    assert all(any(one is image for image in images) for one in usual)
    assert pil.select_pil(images, 12) == pil.select_pil(images, 40) == images
    same = [Image.new("RGB", (64, 48), "black") for _ in range(6)]
    same[4] = Image.new("L", (30, 20), 255)  # the only one that differs, in size and mode too
    chosen = pil.select_pil(same, 1, policy="frame-difference")
    assert chosen[0] in (same[4], same[5])
    assert any(image is same[4] for image in pil.select_pil(same, 2, policy="farthest-first"))


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        ([], {}, "empty list"),
        ([1, 2], {}, "item 0 is a int"),
        ([Image.new("RGB", (8, 8))], {"policy": "keyframe"}, "needs a video"),
        ([Image.new("RGB", (8, 8))], {"size": 3}, "size: does not apply"),
        ([Image.new("RGB", (8, 8))], {"num_frames": 0}, "num_frames=0"),
    ],
)
def test_lists_that_cannot_be_chosen_from_are_refused(images: list, options: dict, words: str) -> None:
    with pytest.raises(so.InvalidArgument, match=words):
        pil.select_pil(images, **options)


def test_a_selection_without_pixels_says_so(clip_bytes: bytes) -> None:
    with pytest.raises(so.SosamplerError, match="holds no frames"):
        pil.to_pil(so.select(clip_bytes, 2, decode=False))


# --- FiftyOne ---


def test_frame_fields_count_from_one_and_are_json(clip_bytes: bytes) -> None:
    selection = so.select(clip_bytes, 3, num_candidates=9, policy="frame-difference")
    fields = json.loads(json.dumps(fiftyone.frame_fields(selection, candidates=True)))
    assert len(fields["frames"]) == 9
    chosen = {int(key) for key, one in fields["frames"].items() if one["sosampler_selected"]}
    assert chosen == {number + 1 for number in shown(selection.frames)}
    for key, one in fields["frames"].items():
        assert one["frame_number"] == int(key)
        assert one["sosampler_seconds"] == pytest.approx((int(key) - 1) / 30)
        place = selection.candidates.frame_indices.tolist().index(int(key) - 1)
        assert one["sosampler_score"] == pytest.approx(float(selection.candidates.scores[place]))
    assert len(fiftyone.frame_fields(selection)["frames"]) == 3


def test_repeated_frames_are_one_field_and_samples_are_filled() -> None:
    selection = so.select(numbered_video(num_frames=2), 4, policy="uniform")
    sample = SimpleNamespace(frames=defaultdict(dict))  # FiftyOne's makes frames as they are asked for, too
    fiftyone.add_frame_fields(sample, selection, prefix="picked")
    assert dict(sample.frames) == {
        1: {"picked_selected": True, "picked_seconds": 0.0},
        2: {"picked_selected": True, "picked_seconds": pytest.approx(1 / 30)},
    }
    with pytest.raises(so.InvalidArgument, match="prefix='a b'"):
        fiftyone.frame_fields(selection, prefix="a b")
    with pytest.raises(so.InvalidArgument, match="has no frames"):
        fiftyone.add_frame_fields(object(), selection)


def test_fields_on_a_sample_of_fiftyone(clip_bytes: bytes) -> None:
    fo = pytest.importorskip("fiftyone", reason="fiftyone is not installed")
    sample = fo.Sample(filepath="clip.mp4")
    fiftyone.add_frame_fields(sample, so.select(clip_bytes, 3, policy="uniform"))
    assert sorted(sample.frames) == [16, 46, 76]
    assert sample.frames[46]["sosampler_seconds"] == pytest.approx(1.5)


# --- messages as JSON ---


def pictures(url: str) -> list[np.ndarray]:
    _, _, data = url.partition(";base64,")
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(part)))) for part in data.split(",")]


def test_messages_for_a_server_show_each_frame_behind_its_time() -> None:
    selection = so.select(BY_NAME["variable_rate"].data, 3, policy="uniform")
    (system, user) = qwen_vl.openai_messages(selection, "What happens?", system="Be brief.")
    json.dumps([system, user])
    assert system == {"role": "system", "content": "Be brief."}
    *parts, last = user["content"]
    assert last == {"type": "text", "text": "What happens?"}
    numbers = [shown(pictures(part["image_url"]["url"]))[0] for part in parts[1::2]]
    assert numbers == shown(selection.frames)
    truth = true_seconds("variable_rate", numbers)
    assert [part["text"] for part in parts[::2]] == [f"<{seconds:.1f} seconds>" for seconds in truth]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_frames_and_metadata_of_a_video_message_belong_together(count: int) -> None:
    selection = so.select(BY_NAME["variable_rate"].data, count, policy="uniform")
    (user,) = qwen_vl.openai_messages(selection, "?", show="video")
    numbers = shown(pictures(user["content"][0]["video_url"]["url"]))
    told = qwen_vl.media_io_kwargs(selection)["video"]
    json.dumps(told)
    assert len(numbers) == told["num_frames"] == len(told["frames_indices"]) == max(2, count)
    truth = true_seconds("variable_rate", numbers)
    assert np.array(told["frames_indices"]) / told["fps"] == pytest.approx(truth, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"show": "gif"}, "show='gif'"),
        ({"quality": 101}, "quality=101"),
        ({"prompt": 3}, "prompt is a int"),
        ({"selections": []}, "no selection"),
        ({"selections": ["v.mp4"]}, "a str is not a selection"),
    ],
)
def test_messages_that_cannot_be_built_are_refused(clip_bytes: bytes, arguments: dict, words: str) -> None:
    given: dict[str, Any] = {"selections": so.select(clip_bytes, 2, policy="uniform"), "prompt": "?", **arguments}
    with pytest.raises(so.InvalidArgument, match=words):
        qwen_vl.openai_messages(**given)


# --- vLLM ---


class Registry:
    """What vLLM 0.32 documents of its VIDEO_LOADER_REGISTRY: `register` is a decorator, `load` makes an instance."""

    def __init__(self) -> None:
        self.name2class: dict[str, type] = {}

    def register(self, name: str, *, video_processor: Any = None, requires_gpu: bool = False) -> Any:
        def keep(loader: type) -> type:
            self.name2class[name] = loader
            return loader

        return keep

    def load(self, name: str) -> Any:
        assert name in self.name2class
        return self.name2class[name]()


class Loader:
    @classmethod
    def load_bytes(cls, data: bytes, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A stand-in for vLLM, which is too large to install for tests."""
    module: Any = ModuleType("vllm.multimodal.video")
    module.VIDEO_LOADER_REGISTRY, module.VideoLoader = Registry(), Loader
    for name in ("vllm", "vllm.multimodal"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.multimodal.video", module)
    found: Registry = module.VIDEO_LOADER_REGISTRY
    return found


@pytest.fixture(autouse=True)
def no_configured_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(vllm.POLICY_VARIABLE, raising=False)
    yield
    vllm._loaded.cache_clear()


def test_the_loader_is_registered_once(registry: Registry) -> None:
    vllm.plugin()
    (first,) = registry.name2class.values()
    vllm.register()
    assert registry.name2class == {"sosampler": first}
    assert issubclass(first, Loader)


def test_the_loader_gives_frames_and_their_metadata(registry: Registry, clip_bytes: bytes) -> None:
    vllm.register()
    frames, told = registry.load("sosampler").load_bytes(clip_bytes, num_frames=4, policy="random", seed=5)
    assert frames.shape == (4, 128, 192, 3)
    assert frames.dtype == np.uint8
    assert told == {
        "total_num_frames": 90,
        "fps": 30.0,
        "duration": 3.0,
        "frames_indices": shown(frames),
        "video_backend": "sosampler_pyav",
        "do_sample_frames": False,
    }


def test_without_vllm_registering_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("vllm", "vllm.multimodal", "vllm.multimodal.video"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(so.MissingDependency, match="install vllm"):
        vllm.register()
    vllm.plugin()  # vLLM lets errors of plugins end the server
    assert "install vllm" in caplog.text


def test_a_vllm_of_another_make_is_left_alone(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.multimodal.video"], "VideoLoader")
    with pytest.raises(so.MissingDependency, match="VideoLoader"):
        vllm.register()
    vllm.plugin()
    assert not registry.name2class


def test_numbers_of_frames_follow_the_request(clip_bytes: bytes) -> None:
    def numbers(*given: Any, **options: Any) -> list[int]:
        frames, told = vllm.load_bytes(*given, **options)
        assert shown(frames) == told["frames_indices"]
        return list(told["frames_indices"])

    # vLLM's own default number where the video is shorter; every frame once, and not to be sampled again.
    assert numbers(BY_NAME["two_frames"].data, 32) == [0, 1]
    assert numbers(BY_NAME["one_frame"].data, 32) == [0, 0]
    assert len(numbers(clip_bytes, 32, num_candidates=6)) == 6
    assert numbers(clip_bytes, -1, fps=1) == so.select(clip_bytes, fps=1).frame_indices.tolist()
    assert len(numbers(clip_bytes, 4, fps=5)) == 4
    assert len(numbers(clip_bytes, 32, fps=2)) == 6
    assert numbers(clip_bytes, 3, candidates="keyframe") == [0, 30, 60]
    frames, _ = vllm.load_bytes(clip_bytes, 2, size=32)
    assert frames.shape[1:3] == (32, 48)
    assert vllm.load_bytes(clip_bytes, 2, size=10**6)[0].shape[1:3] == (128, 192)  # never enlarged


def test_the_loader_tells_true_times_of_an_uneven_video() -> None:
    frames, told = vllm.load_bytes(BY_NAME["variable_rate"].data, 6)
    times = np.array(told["frames_indices"]) / told["fps"]
    assert times == pytest.approx(true_seconds("variable_rate", shown(frames)), abs=0.001)


@pytest.mark.parametrize(
    ("num_frames", "options", "words"),
    [
        (8, {"frame_recovery": True}, "'frame_recovery' is unknown"),
        (8, {"policy": "runs/sampler"}, "must not be set by a request"),
        (8, {"policy": "runs/sampler+nms"}, "must not be set by a request"),
        (8, {"backend": "opencv"}, "backend='opencv'"),
        (8, {"size": [9, 9]}, "size="),
        (-1, {}, "every frame"),
        (0, {}, "num_frames=0"),
        (10**6, {}, "at most 768"),
        (8, {"num_candidates": 10**7}, "at most 4096"),
        (8, {"fps": 0}, "fps=0"),
        (-1, {"num_candidates": 1000}, "at most 768"),
    ],
)
def test_requests_out_of_bounds_are_value_errors(clip_bytes: bytes, num_frames: int, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vllm.load_bytes(clip_bytes, num_frames, **options)


def test_a_rate_is_bounded_by_the_frames_it_gives(monkeypatch: pytest.MonkeyPatch, clip_bytes: bytes) -> None:
    monkeypatch.setattr(vllm, "_MAX_CANDIDATES", 50)
    assert len(vllm.load_bytes(clip_bytes, 4, fps=16)[0]) == 4
    with pytest.raises(ValueError, match="at most 50"):
        vllm.load_bytes(clip_bytes, 4, fps=20)


@pytest.mark.parametrize("data", [b"", b"not a video at all"])
def test_bytes_that_are_no_video_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="<bytes>"):
        vllm.load_bytes(data, 4)


def test_the_server_sets_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = [np.full((32, 48, 3), 255 if number == 20 else 0, np.uint8) for number in range(40)]
    data = encode_video(flash)
    assert 20 not in vllm.load_bytes(data, 4)[1]["frames_indices"]
    monkeypatch.setenv(vllm.POLICY_VARIABLE, "frame-difference")
    assert 20 in vllm.load_bytes(data, 4, num_candidates=40)[1]["frames_indices"]
    # A request may still ask for another rule, or for the server's by its name.
    assert 20 not in vllm.load_bytes(data, 4, policy="uniform")[1]["frames_indices"]
    monkeypatch.setenv(vllm.POLICY_VARIABLE, "no/such/folder")
    with pytest.raises(ValueError, match="no/such/folder"):
        vllm.load_bytes(data, 4)


@pytest.fixture
def real_vllm() -> Any:
    try:
        from vllm.multimodal import media, video
    except ImportError as error:
        unavailable("vllm", f"vllm is not installed: {error}")
    return SimpleNamespace(media=media, video=video)


def test_vllm_itself_loads_through_the_loader(real_vllm: Any, clip_bytes: bytes) -> None:
    vllm.register()
    media = real_vllm.media.VideoMediaIO(real_vllm.media.ImageMediaIO(), video_backend="sosampler", num_frames=4)
    loaded = media.load_bytes(clip_bytes)
    frames, told = getattr(loaded, "media", loaded)
    assert shown(frames) == told["frames_indices"]
    assert len(frames) == 4
    assert set(told) == set(real_vllm.video.VideoLoader.create_hf_metadata(SimpleNamespace(
        total_frames_num=1, original_fps=1, duration=1), [0], "x"))  # fmt: skip
    assert not real_vllm.video.VIDEO_LOADER_REGISTRY.backend_requires_gpu("sosampler")


def test_vllm_itself_reads_a_video_message(real_vllm: Any) -> None:
    selection = so.select(BY_NAME["variable_rate"].data, 40, policy="uniform")  # more than vLLM takes by itself
    (user,) = qwen_vl.openai_messages(selection, "?", show="video")
    told = qwen_vl.media_io_kwargs(selection)["video"]
    kind, _, data = user["content"][0]["video_url"]["url"].removeprefix("data:").partition(";base64,")
    loaded = real_vllm.media.VideoMediaIO(real_vllm.media.ImageMediaIO(), **told).load_base64(kind, data)
    frames, metadata = getattr(loaded, "media", loaded)
    assert shown(frames) == shown(selection.frames)
    times = np.array(metadata["frames_indices"]) / metadata["fps"]
    assert times == pytest.approx(true_seconds("variable_rate", shown(frames)), abs=0.001)
    assert metadata["do_sample_frames"] is False
