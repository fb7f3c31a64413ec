"""The page without its web: the same frames as `select`, names and sizes of uploads, downloads, what is refused."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.errors import InvalidArgument, LimitExceeded, SosamplerError, VideoError
from sosampler.policies.registry import describe_policies
from sosampler.policies.score_rules import METHODS
from sosampler.policies.visual import change_scores
from sosampler.ui.server import Service
from sosampler.ui.videos import NotFound, TooLarge, Videos, clean_name, size_of
from sosampler.ui.view import (
    BEST,
    MAX_CANDIDATES,
    MAX_FRAMES,
    Controls,
    Picture,
    make_controls,
    uniform_strip,
    view_video,
)
from sosampler.video.limits import Limits
from sosampler.video.synthetic import numbered_video, read_number


def reading(data: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(data).read


def upload(service: Service, data: bytes, name: str = "clip.mp4") -> str:
    key = service.videos.add_upload(name, len(data), reading(data)).id
    assert isinstance(key, str)
    return key


def pixels(url: str) -> np.ndarray:
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.fixture
def service(tmp_path: Path) -> Service:
    folder = tmp_path / "uploads"
    folder.mkdir()
    return Service(Controls(), folder, max_upload=10_000_000, max_videos=5)


ASKED: list[dict[str, Any]] = [
    {"policy": "uniform", "diversity": BEST},
    {"policy": "frame-difference", "diversity": BEST, "num_frames": 5, "num_candidates": 20},
    {"policy": "frame-difference", "diversity": "aks", "num_frames": 3},
    {"policy": "farthest-first", "diversity": BEST, "candidates": "snap", "num_candidates": 12},
    {"policy": "dpp", "diversity": BEST, "num_frames": 2, "candidates": "keyframe", "num_candidates": 3},
    {"policy": "keyframe", "diversity": BEST, "num_frames": 2},
    {"policy": "all", "diversity": BEST, "num_frames": 4, "num_candidates": 6},
    {"policy": "all", "diversity": BEST, "num_frames": 4},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(str(value) for value in asked.values()))
def test_it_shows_what_select_chooses(service: Service, clip_bytes: bytes, asked: dict[str, Any]) -> None:
    """The oracle is `select` itself, and the numbers in the pictures' pixels."""
    shown = service.select(upload(service, clip_bytes), asked)
    arguments = {"num_frames": 8, **asked}
    method = arguments.pop("diversity")
    if arguments["policy"] == "all" and "num_candidates" in arguments:
        del arguments["num_frames"]  # it follows from the candidates
    if method != BEST:
        arguments["policy"] += f"+{method}"
    expected = so.select(clip_bytes, on_short="fewer", **arguments)
    assert [one["frame"] for one in shown["chosen"]["pictures"]] == expected.frame_indices.tolist()
    assert [one["seconds"] for one in shown["chosen"]["pictures"]] == expected.pts_seconds.tolist()
    assert shown["chosen"]["policy"] == arguments["policy"]
    assert shown["mode"] == expected.candidates.mode
    assert shown["candidate_seconds"] == pytest.approx(expected.candidates.pts_seconds.tolist())
    for kind in ("chosen", "uniform"):
        for one in shown[kind]["pictures"]:
            assert read_number(pixels(one["url"])) == one["frame"]
    count = arguments.get("num_frames", len(expected))
    uniform = so.select(clip_bytes, count, policy="uniform").frame_indices.tolist()
    assert [one["frame"] for one in shown["uniform"]["pictures"]] == uniform
    assert shown["shared"] == len(set(uniform) & set(expected.frame_indices.tolist()))


def test_the_curve_is_the_policys_scores(service: Service, clip_bytes: bytes) -> None:
    key = upload(service, clip_bytes)
    shown = service.select(key, {"num_frames": 3, "num_candidates": 16, "policy": "frame-difference"})
    frames = so.select(clip_bytes, policy="all", num_candidates=16).frames
    assert frames is not None
    assert shown["candidate_scores"] == pytest.approx(change_scores(frames).tolist())
    of_time = dict(zip(shown["candidate_seconds"], shown["candidate_scores"], strict=True))
    assert all(of_time[one["seconds"]] == one["score"] for one in shown["chosen"]["pictures"])
    assert (shown["begin"], shown["end"]) == (0.0, pytest.approx(3.0))
    assert shown["facts"] == ("192 \N{MULTIPLICATION SIGN} 128", "30 fps", "0:03.0", "90 frames", "h264")
    without = service.select(key, {"policy": "uniform", "diversity": BEST})
    assert without["candidate_scores"] is None
    json.dumps(shown, allow_nan=False)


def test_diversity_is_offered_wherever_there_are_scores() -> None:
    offered = {one["name"]: one["diversity"] for one in Controls().to_dict()["policies"]}
    assert {name: offered[name] for name in ("general", "general-text", "uniform", "kts")} == {
        "general": True,
        "general-text": True,
        "uniform": False,
        "kts": False,
    }


def test_large_frames_are_shown_small_and_downloaded_as_they_are(service: Service) -> None:
    data = numbered_video(num_frames=12, width=720, height=480)
    key = upload(service, data)
    shown = service.select(key, {"num_frames": 2})
    assert pixels(shown["chosen"]["pictures"][0]["url"]).shape == (213, 320, 3)
    full = np.asarray(Image.open(io.BytesIO(service.picture(key, "7"))))
    assert full.shape == (480, 720, 3)
    assert read_number(full) == 7


def test_a_short_video_gives_what_it_has(service: Service) -> None:
    shown = service.select(upload(service, numbered_video(num_frames=3)), {"num_frames": 8})
    assert [one["frame"] for one in shown["chosen"]["pictures"]] == [0, 1, 2]
    assert [one["frame"] for one in shown["uniform"]["pictures"]] == [0, 1, 2]
    assert any("3 frames" in note for note in shown["notes"])


def test_downloads(service: Service, clip_bytes: bytes) -> None:
    first = service.select(upload(service, clip_bytes), {"num_frames": 3})
    second = service.select(
        upload(service, numbered_video(num_frames=40)), {"num_frames": 2, "policy": "uniform", "diversity": BEST}
    )
    results = [first["result"], second["result"]]
    told = service.selections(results)
    assert [row["video"] for row in told["videos"]] == ["clip.mp4", "clip (2).mp4"]
    assert told["videos"][0]["settings"]["num_frames"] == 3
    assert told["videos"][1]["uniform"]["frame_indices"] == [10, 30]
    file = io.BytesIO()
    service.frames(results, file)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.read("selection.json")) == json.loads(json.dumps(told))
        for row, shown in zip(told["videos"], (first, second), strict=True):
            expected = [one["frame"] for one in shown["chosen"]["pictures"]]
            assert row["frame_indices"] == expected
            names = sorted(name for name in archive.namelist() if name.startswith(row["video"] + "/"))
            found = [read_number(np.asarray(Image.open(io.BytesIO(archive.read(name))))) for name in names]
            assert found == expected
            assert all(f"frame{number:06d}" in name for number, name in zip(expected, names, strict=True))
    for wrong in ([], ["no-such"], [*results, "no-such"]):
        with pytest.raises(NotFound, match="choose them again"):
            service.selections(wrong)


def test_what_is_removed_is_gone(service: Service, clip_bytes: bytes, clip: Path) -> None:
    key = upload(service, clip_bytes)
    result = service.select(key, {})["result"]
    assert len(list(service.videos.folder.iterdir())) == 1
    service.remove(key)
    assert list(service.videos.folder.iterdir()) == []
    for ask in (lambda: service.select(key, {}), lambda: service.remove(key), lambda: service.selections([result])):
        with pytest.raises(NotFound):
            ask()
    own = service.videos.add_file(clip)
    assert service.about()["videos"] == [own.to_dict()]
    service.remove(own.id)
    assert clip.exists()  # the user's own file


@pytest.mark.parametrize("name", ["notes.txt", "notes.mp4", "pic.png"])
def test_what_is_no_video_is_refused_by_name(service: Service, name: str) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    data = picture.getvalue() if name.endswith("png") else b"This is no video, whatever FFmpeg makes of it.\n" * 200
    if name.endswith("png"):
        data = data[:-20]  # a whole picture is a video of one frame to FFmpeg
    with pytest.raises(VideoError, match=name) as told:
        upload(service, data, name)
    assert str(service.videos.folder) not in str(told.value)
    assert "\n" not in str(told.value)
    assert list(service.videos.folder.iterdir()) == []
    assert service.about()["videos"] == []


def test_an_empty_file_is_refused(service: Service) -> None:
    with pytest.raises(VideoError, match=r"^empty\.mp4: the file is empty"):
        upload(service, b"", "empty.mp4")


def test_uploads_are_bounded(service: Service, clip_bytes: bytes, tmp_path: Path) -> None:
    def never(at_most: int) -> bytes:
        raise AssertionError("not a byte of it is read")

    with pytest.raises(TooLarge, match=r"big\.mp4 has 20 MB; uploads must be at most 10 MB.*--max-upload"):
        service.videos.add_upload("big.mp4", 20_000_000, never)
    for _ in range(5):
        upload(service, clip_bytes)
    with pytest.raises(TooLarge, match="5 videos are on the page"):
        service.videos.add_upload("sixth.mp4", len(clip_bytes), never)
    with pytest.raises(InvalidArgument, match=r"cut\.mp4: 1 KB of 2 KB did not arrive"):
        Videos(tmp_path, max_upload=5000, max_videos=2).add_upload("cut.mp4", 2000, reading(b"x" * 1000))
    nowhere = Videos(tmp_path / "gone", max_upload=5000, max_videos=2)
    with pytest.raises(InvalidArgument, match="cannot be stored"):
        nowhere.add_upload("a.mp4", 10, reading(b"x" * 10))
    assert nowhere._arriving == 0


def test_limits_hold_for_uploads(tmp_path: Path, clip_bytes: bytes) -> None:
    service = Service(Controls(limits=Limits(max_pixels=1000)), tmp_path, max_upload=10_000_000, max_videos=2)
    with pytest.raises(LimitExceeded, match=r"^clip\.mp4: .*--max-pixels"):
        service.videos.add_upload("clip.mp4", len(clip_bytes), reading(clip_bytes))


def test_many_at_once(service: Service, clip_bytes: bytes) -> None:
    """Threads that upload and choose side by side get each their own answer, and no more videos than allowed."""
    shown: list[int] = []
    refused: list[str] = []

    def visit(count: int) -> None:
        try:
            answer = service.select(upload(service, clip_bytes), {"num_frames": count})
        except TooLarge as error:
            refused.append(str(error))
        else:
            shown.append(count)
            assert len(answer["chosen"]["pictures"]) == count

    visitors = [threading.Thread(target=visit, args=(count,)) for count in range(1, 8)]
    for one in visitors:
        one.start()
    for one in visitors:
        one.join()
    assert (len(shown), len(refused)) == (5, 2)
    assert len({video.name for video in service.videos.all()}) == 5


WRONG: list[tuple[Any, str]] = [
    ([], "must be a JSON object"),
    ({"num_frames": 0}, "num_frames=0"),
    ({"num_frames": None}, "num_frames=None"),
    ({"num_frames": 2.5}, "num_frames=2.5"),
    ({"num_frames": MAX_FRAMES + 1}, f"at most {MAX_FRAMES}"),
    ({"num_candidates": MAX_CANDIDATES + 1}, f"at most {MAX_CANDIDATES}"),
    ({"num_frames": 9, "num_candidates": 4}, "num_frames=9 is more than num_candidates=4"),
    ({"policy": "best"}, "policy='best' is unknown"),
    ({"policy": "/etc"}, "policy='/etc' is unknown"),
    ({"policy": ["uniform"]}, "is unknown"),
    ({"policy": "uniform", "diversity": "nms"}, "which the policy 'uniform' does not give"),
    ({"diversity": "most"}, "diversity='most' is unknown"),
    ({"candidates": "some"}, "candidates='some' is unknown"),
    ({"query": "a dog"}, "query='a dog' must be a text, on a page that was started with --query-model"),
    ({"query": 3}, "query=3 must be a text"),
    ({"policy": "keyframe", "diversity": BEST, "candidates": "exact"}, "leave candidates out"),
    ({"limits": None}, "a setting='limits' is unknown"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_wrong_settings_are_told(service: Service, clip_bytes: bytes, given: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as told:
        service.select(upload(service, clip_bytes), given)
    assert sentence in str(told.value)


def test_the_controls_offer_all_there_is(service: Service) -> None:
    offered = service.controls.to_dict()
    assert [one["name"] for one in offered["policies"]] == so.list_policies()
    assert [one["description"] for one in offered["policies"]] == list(describe_policies().values())
    assert [one["name"] for one in offered["diversities"]] == [BEST, *METHODS]
    assert all(one["description"] for one in offered["diversities"] + offered["modes"])
    service.controls.options(service.controls.settings({}))  # a fresh page is in order
    for one in offered["policies"]:
        for method in METHODS if one["diversity"] else (BEST,):
            service.controls.options(service.controls.settings({"policy": one["name"], "diversity": method}))


def test_a_trained_sampler_is_offered_first(tmp_path: Path, clip_bytes: bytes) -> None:
    pytest.importorskip("timm")
    for place in ("a", "b"):
        sampler = so.SOSampler(backbone="timm:test_resnet.r160_in1k", input_size=32)
        sampler.save_pretrained(tmp_path / place / "first")
    controls = make_controls([tmp_path / "a/first", tmp_path / "b/first"], device="cpu")
    assert controls.policies[:2] == ["first", "first (2)"]
    assert controls.first.policy == "first"
    assert str(tmp_path) not in json.dumps(controls.to_dict())
    (tmp_path / "uploads").mkdir()
    service = Service(controls, tmp_path / "uploads", max_upload=10_000_000, max_videos=5)
    shown = service.select(upload(service, clip_bytes), {"num_frames": 3, "diversity": "nms"})
    expected = so.select(clip_bytes, 3, policy=f"{tmp_path / 'a/first'}+nms")
    assert [one["frame"] for one in shown["chosen"]["pictures"]] == expected.frame_indices.tolist()
    assert shown["chosen"]["policy"] == "first+nms"
    assert str(tmp_path) not in json.dumps(service.selections([shown["result"]]))
    with pytest.raises(SosamplerError, match="holds no sampler"):
        make_controls([tmp_path])


def test_a_query_takes_the_place_of_the_policy(shapes_model: Path, tmp_path: Path, clip_bytes: bytes) -> None:
    controls = make_controls(query_model=str(shapes_model))
    assert controls.to_dict()["queries"]
    (tmp_path / "uploads").mkdir()
    service = Service(controls, tmp_path / "uploads", max_upload=10_000_000, max_videos=5)
    given = {"num_frames": 3, "policy": "uniform", "diversity": "aks", "query": "a red circle"}
    shown = service.select(upload(service, clip_bytes), given)
    expected = so.select(clip_bytes, 3, query="a red circle", query_model=shapes_model, policy="query+aks")
    assert [one["frame"] for one in shown["chosen"]["pictures"]] == expected.frame_indices.tolist()
    assert shown["chosen"]["policy"] == "query+aks"
    assert str(shapes_model.parent) not in json.dumps(service.selections([shown["result"]]))


def test_uniform_is_decoded_once_while_policies_are_tried(
    clip: Path, clip_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sosampler.ui import view as view_module

    first = uniform_strip(clip, 4)
    asked: list[str] = []
    select_with = view_module.select_with

    def spy(video: Any, options: Any, **shown: Any) -> Any:
        asked.append(options.resolved_policy.name)
        return select_with(video, options, **shown)

    monkeypatch.setattr(view_module, "select_with", spy)
    controls = Controls()
    view, _ = view_video(clip, controls.options(controls.settings({"num_frames": 4})))
    assert asked == ["general"]
    assert view["uniform"] == asdict(first)
    clip.write_bytes(numbered_video(num_frames=40))  # another film under the same name
    assert [one.frame for one in uniform_strip(clip, 4).pictures] == [5, 15, 25, 35]


def test_scores_that_are_no_numbers_do_not_break_the_page() -> None:
    from sosampler.ui.view import _plain

    assert _plain(np.array([0.5, np.nan, np.inf], dtype=np.float32)) == (0.5, None, None)
    assert Picture(1, 0.5, "0:00.5", None, "").score is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [("a/b\\c.mp4", "c.mp4"), ("", "video"), ("..", "video"), ("a\x00\nb.mp4", "ab.mp4"), ("ü 1.mp4", "ü 1.mp4")],
)
def test_names_are_names_and_no_paths(given: str, kept: str) -> None:
    assert clean_name(given) == kept
    assert len(clean_name("x" * 500 + ".mp4")) <= 120
    assert clean_name("x" * 500 + ".mp4").endswith(".mp4")


def test_sizes() -> None:
    assert [size_of(text) for text in ("2g", "1.5 MB", "10", "10b", "3 kb")] == [2 * 10**9, 1_500_000, 10, 10, 3000]
    for wrong in ("", "much", "-1MB", "0", "1 PB", "1e9", "MB"):
        with pytest.raises(InvalidArgument, match="is not a size; it must be one such as 500MB"):
            size_of(wrong)


def test_the_page_needs_no_extra() -> None:
    """Nothing but the light core: no torch, and no web framework."""
    code = "import sys, sosampler.cli.ui, sosampler.ui.server; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & {"torch", "gradio", "fastapi", "pyarrow"}
    code = "import sys, sosampler.cli.ui; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & {"numpy", "av", "PIL"}  # for a fast --help
