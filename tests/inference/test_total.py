"""One budget over many videos: what is chosen, written and listed; and what a second run does not do again."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.inference import total as module
from sosampler.policies.base import Batch
from sosampler.policies.collection import choose_distinct, reduced
from sosampler.policies.registry import get_policy
from sosampler.video.synthetic import encode_video, numbered_video, read_number

NUM_CANDIDATES = 4


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A numbered video in two copies, and one of still scenes."""
    folder = tmp_path_factory.mktemp("collection")
    (folder / "a b.mp4").write_bytes(numbered_video(num_frames=60, fps=10))
    (folder / "deep").mkdir()
    shutil.copy(folder / "a b.mp4", folder / "deep" / "copy.mp4")
    rng = np.random.default_rng(0)
    scenes = [rng.integers(0, 255, (4, 6, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1) for _ in range(4)]
    encode_video((scene for scene in scenes for _ in range(8)), folder / "scenes.mp4", fps=8)
    return folder


@pytest.fixture(scope="module")
def chosen(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> so.CollectionSelection:
    out = tmp_path_factory.mktemp("chosen") / "picked frames"
    return so.select_total(collection, 7, out=out, num_candidates=NUM_CANDIDATES, image_format="png")


def per_video(chosen: so.CollectionSelection) -> Counter[str]:
    return Counter(Path(frame["video"]).name for frame in chosen.frames)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "frames.jsonl").read_text().splitlines()]


def test_the_choice_is_that_of_the_general_sampler_over_all_videos(
    collection: Path, chosen: so.CollectionSelection
) -> None:
    policy, quality, features, names = get_policy("general"), [], [], []
    for name in ("a b.mp4", "deep/copy.mp4", "scenes.mp4"):
        every = so.select(collection / name, num_candidates=NUM_CANDIDATES, policy="all", candidates="auto")
        assert every.frames is not None
        assert min(every.frames.shape[1:3]) <= 128, "no larger than what the sampler sees"
        batch = Batch(NUM_CANDIDATES, np.array([NUM_CANDIDATES]), every.frames[None])
        quality.append(policy.quality(batch)[0])  # type: ignore[attr-defined]
        features.append(reduced(policy.features(batch)[0]))
        names += [(name, index) for index in every.frame_indices.tolist()]
    expected = choose_distinct(np.concatenate(quality), np.concatenate(features), 7).positions
    listed = [(str(Path(frame["video"]).relative_to(collection)), frame["frame_index"]) for frame in chosen.frames]
    assert listed == [names[position] for position in sorted(expected)]
    order = sorted(range(7), key=lambda row: chosen.frames[row]["order"])
    assert [listed[row] for row in order] == [names[position] for position in expected]


def test_copies_of_a_video_are_chosen_last(chosen: so.CollectionSelection) -> None:
    indices = [frame["frame_index"] for frame in chosen.frames if Path(frame["video"]).name in ("a b.mp4", "copy.mp4")]
    assert len(indices) == len(set(indices)), "no frame is chosen in both copies"


def test_images_hold_the_frames_that_their_names_tell(chosen: so.CollectionSelection) -> None:
    numbered = [frame for frame in chosen.frames if Path(frame["video"]).name != "scenes.mp4"]
    assert numbered
    for frame in numbered:
        path = chosen.out / frame["file_name"]
        with Image.open(path) as image:
            assert read_number(np.asarray(image)) == frame["frame_index"]
            assert image.size == (frame["width"], frame["height"])
        seconds = frame["frame_index"] / 10
        assert path.name.endswith(f"_frame{frame['frame_index']:06d}_{seconds:.3f}s.png")
        assert frame["pts_seconds"] == pytest.approx(seconds)
    assert chosen.frames == rows_of(chosen.out)
    assert {path.name for path in (chosen.out / "images").glob("*.png")} == {
        Path(frame["file_name"]).name for frame in chosen.frames
    }
    assert any(path.name.startswith("a_b_frame") for path in (chosen.out / "images").iterdir())


def test_at_least_one_of_each_video(collection: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_candidates": NUM_CANDIDATES, "out": tmp_path / "out"}
    free = so.select_total(collection, 3, **options)
    assert len(per_video(free)) < 3, "the copy of a video adds nothing"
    forced = so.select_total(collection, 3, at_least=1, **options)
    assert per_video(forced) == {"a b.mp4": 1, "copy.mp4": 1, "scenes.mp4": 1}
    assert forced.num_before == 3, "another choice needs no scores"
    with pytest.raises(so.InvalidArgument, match="at_least=2 of 3 videos are 6 frames, more than total=5"):
        so.select_total(collection, 5, at_least=2, **options)


def test_more_than_there_is_gives_what_there_is(collection: Path, tmp_path: Path) -> None:
    chosen = so.select_total([collection / "scenes.mp4"], 500, out=tmp_path / "out", num_candidates=NUM_CANDIDATES)
    assert len(chosen) == NUM_CANDIDATES
    assert chosen.notes == ("4 candidates for a total of 500; all are taken; for more raise num_candidates or fps",)


# ---- lists for annotation tools, by their documented formats


def test_coco(chosen: so.CollectionSelection) -> None:
    data = json.loads((chosen.out / "coco.json").read_text())
    assert data["annotations"] == data["categories"] == []
    assert [image["id"] for image in data["images"]] == list(range(1, 8))
    videos = {video["id"]: video["name"] for video in data["videos"]}
    for image, frame in zip(data["images"], chosen.frames, strict=True):
        with Image.open(chosen.out / "images" / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"])
        assert videos[image["video_id"]] == frame["video"]
        assert (image["seconds"], image["frame_index"]) == (frame["pts_seconds"], frame["frame_index"])


def test_cvat(chosen: so.CollectionSelection) -> None:
    root = ElementTree.parse(chosen.out / "annotations.xml").getroot()
    assert (root.tag, root.findtext("version"), root.findtext("meta/task/size")) == ("annotations", "1.1", "7")
    lines = [json.loads(line) for line in (chosen.out / "images" / "manifest.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"version": "1.1"}, {"type": "images"}]
    for number, (image, line) in enumerate(zip(root.iter("image"), lines[2:], strict=True)):
        assert int(image.attrib["id"]) == number
        assert image.attrib["name"] == line["name"] + line["extension"]
        with Image.open(chosen.out / "images" / image.attrib["name"]) as file:
            assert file.size == (int(image.attrib["width"]), int(image.attrib["height"]))
            assert file.size == (line["width"], line["height"])


def test_label_studio(chosen: so.CollectionSelection) -> None:
    tasks = json.loads((chosen.out / "label_studio.json").read_text())
    assert len(tasks) == 7
    for task, frame in zip(tasks, chosen.frames, strict=True):
        url = urlparse(task["data"]["image"])
        assert url.path == "/data/local-files/"
        # Label Studio joins it to its document root, the parent of the folder.
        assert (chosen.out.parent / parse_qs(url.query)["d"][0]).samefile(chosen.out / frame["file_name"])
        assert (task["data"]["video"], task["data"]["pts_seconds"]) == (frame["video"], frame["pts_seconds"])


def test_fiftyone(chosen: so.CollectionSelection) -> None:
    data = json.loads((chosen.out / "fiftyone.json").read_text())
    assert (data["name"], data["media_type"], data["num_samples"]) == ("picked frames", "image", 7)
    for sample in data["samples"]:
        assert (chosen.out / sample["filepath"]).is_file()
        # Every field is declared: FiftyOne does not expand the schema of this file.
        assert set(sample) == {*data["sample_fields"], "tags", "metadata"}
    assert data["sample_fields"]["pts_seconds"] == "fiftyone.core.fields.FloatField"


def test_datumaro(chosen: so.CollectionSelection) -> None:
    data = json.loads((chosen.out / "annotations" / "default.json").read_text())
    assert {"dm_format_version", "media_type", "infos", "categories", "items"} == set(data)
    for item, frame in zip(data["items"], chosen.frames, strict=True):
        assert item["image"]["size"] == [frame["height"], frame["width"]]
        assert (chosen.out / "images" / item["image"]["path"]).stem == item["id"]
        assert item["attr"]["frame_index"] == frame["frame_index"]


# ---- resuming, and bad input


def test_a_second_run_scores_only_what_is_new(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos, out = tmp_path / "videos", tmp_path / "out"
    shutil.copytree(collection, videos)
    first = so.select_total(videos, 4, out=out, num_candidates=NUM_CANDIDATES)
    before = {path.name: path.stat().st_mtime_ns for path in (out / "images").glob("*.jpg")}
    scored: list[str] = []
    score = module.ScoreStep.__call__

    def counted(self: module.ScoreStep, video: str) -> Any:
        scored.append(Path(video).name)
        return score(self, video)

    monkeypatch.setattr(module.ScoreStep, "__call__", counted)
    again = so.select_total(videos, 4, out=out)  # as many candidates as before
    assert (scored, again.frames, again.num_before) == ([], first.frames, 3)
    assert {path.name: path.stat().st_mtime_ns for path in (out / "images").glob("*.jpg")} == before
    # What a kill or a full disk leaves: half a file of scores, an image that is missing, one under its temporary name.
    damaged = sorted((out / "_features").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    (out / first.frames[0]["file_name"]).unlink()
    (out / "images" / ".x.123.part.jpg").write_bytes(b"")
    assert so.select_total(videos, 4, out=out).frames == first.frames
    assert len(scored) == 1
    assert {path.name for path in (out / "images").glob("*.jpg")} == set(before)
    assert not list((out / "images").glob(".*"))
    os.utime(videos / "scenes.mp4")  # changed: its frames may be others
    so.select_total(videos, 2, out=out)
    assert scored[1:] == ["scenes.mp4"]
    assert len(list((out / "images").glob("*.jpg"))) == 2, "images of the earlier choice are gone"


def test_other_options_are_refused_or_begin_anew(collection: Path, tmp_path: Path) -> None:
    out, video = tmp_path / "out", collection / "scenes.mp4"
    so.select_total(video, 2, out=out, num_candidates=NUM_CANDIDATES)
    with pytest.raises(so.InvalidArgument, match=r"image_format='jpg', now 'png'.*overwrite"):
        so.select_total(video, 2, out=out, image_format="png")
    again = so.select_total(video, 2, out=out, image_format="png", overwrite=True)
    assert {path.suffix for path in (out / "images").iterdir()} == {".png", ".jsonl"}
    assert again.num_before == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(so.InvalidArgument, match=r"holds other files \(notes.txt\)"):
        so.select_total(video, 2, out=tmp_path / "mine", overwrite=True)


def test_a_bad_file_never_ends_the_run(collection: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    out = tmp_path / "out"
    chosen = so.select_total([collection, bad], 3, out=out, num_candidates=NUM_CANDIDATES)
    assert len(chosen) == 3
    assert [failure["video"] for failure in chosen.failures] == [str(bad)]
    assert json.loads((out / "_failed.jsonl").read_text())["video"] == str(bad)
    with pytest.raises(so.VideoError, match="none of 1 videos could be read"):
        so.select_total(bad, 3, out=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": 0}, "total=0"),
        ({"at_least": -1}, "at_least=-1"),
        ({"image_format": "gif"}, "image_format"),
        ({"policy": "uniform"}, "not for 'uniform'"),
        ({"num_frames": 3}, "no option 'num_frames'"),
        ({"typo": 3}, "no option 'typo'"),
        ({"workers": 0}, "workers"),
    ],
)
def test_bad_arguments(collection: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    arguments = {"total": 2, **options}
    with pytest.raises(so.InvalidArgument, match=message):
        so.select_total(collection, out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
