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


def test_what_labelled_frames_are_worth_is_measured_on_what_was_chosen(
    collection: Path, chosen: so.CollectionSelection, tmp_path: Path
) -> None:
    """The benchmark finds the chosen frames among its own, and names clips by the labels of these alone."""
    pytest.importorskip("torch")
    from benchmarks.accuracy import labelling

    paths = sorted(collection.rglob("*.mp4"))
    clips = labelling.Clips(paths, np.array(["a", "a", "b"]), np.array(["one", "one", "two"]))
    numbers, owners = [], []
    for owner, path in enumerate(paths):
        sel = so.select(path, labelling.CANDIDATES, policy="uniform", candidates="exact")
        numbers += sel.frame_indices.tolist()
        owners += [owner] * len(sel)
    features = np.eye(2)[[int(owner == 2) for owner in owners]]  # a copy looks as its original does
    frames = labelling.Frames(features, np.array(owners), np.array(numbers))
    positions = labelling.by_total(clips, frames, 6, tmp_path / "picked")
    listed = rows_of(tmp_path / "picked")
    assert [(str(paths[owners[at]]), numbers[at]) for at in positions] == [
        (row["video"], row["frame_index"]) for row in listed
    ]
    splits = dict.fromkeys(("train", "dev", "test"), clips), dict.fromkeys(("train", "dev", "test"), frames)
    right, fact = labelling.right_of_test(positions, *splits)
    assert (right.tolist(), fact["classes"], fact["groups"]) == ([True] * 3, 2, 2)
    copied, theirs = labelling.with_copies(clips, frames, tmp_path / "clips")
    assert len(copied.paths) == labelling.COPIES + 2
    assert all(copied.paths[at].samefile(paths[0]) for at in range(labelling.COPIES))
    assert np.bincount(theirs.clips).tolist() == [labelling.CANDIDATES] * len(copied.paths)
    for places in labelling.shuffled(frames, 3):
        assert sorted(frames.clips[places].tolist()) == [0, 1, 2]
    low, high = labelling.interval(np.array([1.0, 0, 0, 0]), np.array(["x", "x", "y", "z"]))
    assert (low, high) == (0.0, 0.5)


def test_the_page_tells_what_was_measured() -> None:
    pytest.importorskip("torch")
    from benchmarks.accuracy.labelling import in_short, table

    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks/results/labelling.json").read_text(encoding="utf-8"))
    page = (root / "docs/collections.md").read_text(encoding="utf-8")
    assert table(result) in page
    assert in_short(result) in page
    bounds = [row["total_minus_this"]["ci95"] for row in result["rows"] if row["way"] == "uniform"]
    assert ("Every one of these intervals contains 0." in page) == all(low < 0 < high for low, high in bounds)
    scenes = {(row["collection"], row["total"], row["way"]): row["groups"] for row in result["rows"]}
    assert all(
        count > scenes[name, total, other]
        for (name, total, way), count in scenes.items()
        for other in ("uniform", "random")
        if way == "total"
    ), "as many labels show more scenes"


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
    assert any(path.name.startswith("a_b-") for path in (chosen.out / "images").iterdir())


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
    (note,) = so.select_total([collection / "scenes.mp4"], 9, out=tmp_path / "keys", candidates="keyframe").notes
    assert note.endswith("raise num_candidates or fps, or take candidates other than keyframe")


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


# ---- images are of the videos that the lists name


def patterns(seed: int) -> np.ndarray:
    """Frames [8, 64, 96, 3] that coding hardly changes, each another."""
    return np.random.default_rng(seed).integers(0, 255, (8, 4, 6, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)


def write_frames(frames: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_video(frames, fps=8))
    return path


def assert_images_of(chosen: so.CollectionSelection, contents: dict[Path, np.ndarray]) -> None:
    """Compare each image with the frame that its row names; no other images are there."""
    assert {Path(frame["video"]) for frame in chosen.frames} == set(contents)
    assert not chosen.failures
    for frame in chosen.frames:
        with Image.open(chosen.out / frame["file_name"]) as image:
            error = np.asarray(image).astype(int) - contents[Path(frame["video"])][frame["frame_index"]]
        assert np.abs(error).mean() < 20, frame
    names = {path.name for path in (chosen.out / "images").iterdir()} - {"manifest.jsonl"}
    assert names == {Path(frame["file_name"]).name for frame in chosen.frames}


def test_videos_of_one_name_in_one_folder(tmp_path: Path) -> None:
    frames, out = patterns(0), tmp_path / "out"
    first, second = (tmp_path / name / "clip.mp4" for name in "AB")
    contents = {write_frames(frames, first): frames, write_frames(255 - frames, second): 255 - frames}
    for video in (first, second):
        chosen = so.select_total(video, 4, out=out, num_candidates=NUM_CANDIDATES)
        assert_images_of(chosen, {video: contents[video]})
    write_frames(frames, second)  # in place
    assert_images_of(so.select_total(second, 4, out=out), {second: frames})


def test_the_order_of_videos_does_not_change_images(tmp_path: Path) -> None:
    frames, out = patterns(0), tmp_path / "out"
    paths = [tmp_path / "x" / name for name in ("y/c.mp4", "y_c.mp4")]  # both are y_c as the name of a file
    contents = {write_frames(frames, paths[0]): frames, write_frames(255 - frames, paths[1]): 255 - frames}
    options: dict[str, Any] = {"out": out, "at_least": 2, "num_candidates": NUM_CANDIDATES}
    for order in (paths, paths[::-1]):
        assert_images_of(so.select_total(order, 4, **options), contents)


def test_a_long_name_leaves_room_for_the_frame_number(tmp_path: Path) -> None:
    frames = patterns(0)
    video = write_frames(frames, tmp_path / ("\u8996" * 80 + ".mp4"))  # 244 bytes, of 255 that a name may have
    assert_images_of(so.select_total(video, 2, out=tmp_path / "out", num_candidates=2), {video: frames})


def test_a_frame_that_is_replaced_in_a_dump(tmp_path: Path) -> None:
    frames, folder, out = patterns(0), tmp_path / "dump", tmp_path / "out"
    folder.mkdir()
    for contents in (frames, 255 - frames):
        for number, frame in enumerate(contents):
            Image.fromarray(frame).save(folder / f"{number}.png")
        chosen = so.select_total(folder, 4, out=out, num_candidates=NUM_CANDIDATES)
        assert_images_of(chosen, {folder: contents})


# ---- videos that change during the run


def test_a_video_that_changes_while_it_is_scored_fails(
    collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos, out = tmp_path / "videos", tmp_path / "out"
    shutil.copytree(collection, videos)
    opened = module.open_candidates

    def touching(video: str, options: Any) -> Any:
        if video.endswith("scenes.mp4"):
            os.utime(video)
        return opened(video, options)

    options: dict[str, Any] = {"num_candidates": NUM_CANDIDATES}
    message = "scenes.mp4: changed while it was read; run it again"
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_candidates", touching)
        chosen = so.select_total(videos, 3, out=out, **options)
        with pytest.raises(so.VideoError, match=f"none of 1 videos could be read, such as .*{message}"):
            so.select_total(videos / "scenes.mp4", 3, out=tmp_path / "one", **options)
    (failure,) = chosen.failures
    assert failure["error"].endswith(message)
    assert len(chosen) == 3, "the others get its share"
    again = so.select_total(videos, 3, out=out)
    assert (again.failures, again.num_before) == ([], 2)
    assert "scenes.mp4" in per_video(again)


def test_a_video_that_changes_before_it_is_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, out = patterns(0), tmp_path / "out"
    video, other = write_frames(frames, tmp_path / "a.mp4"), write_frames(patterns(1), tmp_path / "b.mp4")
    opened = module.open_video

    def replacing(source: str, **how: Any) -> Any:
        if Path(source) == video:
            write_frames(255 - frames, video)
        return opened(source, **how)

    options: dict[str, Any] = {"out": out, "at_least": 2, "num_candidates": NUM_CANDIDATES}
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_video", replacing)
        chosen = so.select_total([video, other], 4, **options)
    assert [failure["video"] for failure in chosen.failures] == [str(video)]
    assert per_video(chosen) == {"b.mp4": 2}
    assert len(list((out / "images").glob("*.jpg"))) == 2
    assert_images_of(so.select_total([video, other], 4, **options), {video: 255 - frames, other: patterns(1)})


def test_scores_that_are_lost_are_a_failure(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Scored, "save", lambda *_: None)
    with pytest.raises(so.VideoError, match=r"scenes.mp4: its scores cannot be read from .*; run it again"):
        so.select_total(collection / "scenes.mp4", 2, out=tmp_path / "out", num_candidates=NUM_CANDIDATES)


# ---- notes on single videos


def test_notes_on_videos_are_kept(collection: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, out = write_frames(patterns(0)[:3], tmp_path / "short.mp4"), tmp_path / "out"
    opened = module.open_video

    def noting(source: str, **how: Any) -> Any:
        reader = opened(source, **how)
        reader.notes.append("of the second pass")
        return reader

    videos = [collection / "scenes.mp4", short]
    note = "3 frames for 4 candidates; each frame is listed once"
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_video", noting)
        first = so.select_total(videos, 4, out=out, at_least=1, num_candidates=NUM_CANDIDATES)
    assert first.video_notes == [
        {"video": str(videos[0]), "notes": ["of the second pass"]},
        {"video": str(short), "notes": [note, "of the second pass"]},
    ]
    second = so.select_total(videos, 4, out=out, at_least=1)
    assert second.num_before == 2
    assert second.video_notes == [{"video": str(short), "notes": [note]}], "stored with the scores"
    data = second.to_dict()
    assert (data["num_with_notes"], data["video_notes"], data["notes"]) == (1, second.video_notes, [])


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


def test_addresses_are_refused(tmp_path: Path) -> None:
    address = "https://me:secret@example.org/a.mp4"
    listed = tmp_path / "list.csv"
    listed.write_text(f"path\n{address}\n")
    for videos in (address, [listed]):
        with pytest.raises(so.InvalidArgument, match="takes files of this machine: download it") as raised:
            so.select_total(videos, 2, out=tmp_path / "out")
        assert str(raised.value).startswith("https://example.org/a.mp4: ")
    with pytest.raises(so.InvalidArgument, match="videos is empty"):
        so.select_total([], 2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
