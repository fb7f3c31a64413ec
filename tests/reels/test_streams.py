"""Streams: plans, and files whose pixels prove which clip is shown when."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.datasets.segments import SEGMENTS_FILE
from sosampler.errors import InvalidArgument, VideoError
from sosampler.reels import make_streams
from sosampler.reels.clips import open_clips
from sosampler.reels.recipe import DISTRACTOR
from sosampler.reels.streams import STREAM_PRESETS, Clip, ClipPool, Stream, StreamRecipe, plan_stream
from tests.reels.clip_world import CLASSES, HEIGHT, WIDTH, MadeClip, class_weight, make_clips, read_frame, write_clip

FPS = 10
SMALL: dict[str, Any] = {
    "num_shots": 5,
    "size": (HEIGHT, WIDTH),
    "fps": FPS,
    "fades": 0.5,
    "seconds_per_fade": (0.3, 0.8),
}
COUNTS = {"train": 3, "dev": 1, "test": 2}


# ---- plans


def pool(num_clips: int = 12, num_background: int = 20, seconds: tuple[float, float] = (1.0, 4.0)) -> ClipPool:
    rng = np.random.default_rng(num_clips)

    def clips(label: int, count: int, low: float, high: float) -> tuple[Clip, ...]:
        lengths = rng.uniform(low, high, count).tolist()
        return tuple(
            Clip(f"{label}/{n}.mp4", f"{label}/{n}", label, f"{label} {n // 3}", 0.0, length)
            for n, length in enumerate(lengths)
        )

    return ClipPool(
        (clips(0, num_clips, *seconds), (), clips(2, num_clips, *seconds)),
        clips(DISTRACTOR, num_background, 3.0, 8.0),
    )


def plan(recipe: StreamRecipe, clips: ClipPool, count: int = 200, seed: int = 3) -> list[Stream]:
    return [plan_stream(recipe, clips, seed=seed, number=number) for number in range(count)]


class TestPlan:
    @pytest.mark.parametrize("preset", STREAM_PRESETS)
    @pytest.mark.parametrize(
        "clips",
        [pool(), pool(1, 1), pool(3, 40, (1.0, 1.6)), pool(40, 9, (3.5, 3.5))],
        ids=["some", "one", "short", "many"],
    )
    def test_what_is_promised(self, preset: str, clips: ClipPool) -> None:
        recipe = STREAM_PRESETS[preset]
        low, high = recipe.share  # type: ignore[misc]
        for stream in plan(recipe, clips, 30):
            shots = stream.shots
            assert len(shots) == recipe.num_shots
            assert stream.label in (0, 2)  # class 1 has no clip
            assert {shot.clip.label for shot in shots} == {stream.label, DISTRACTOR}
            ends = [0] + [shot.first_frame + shot.num_frames for shot in shots]
            assert [shot.first_frame for shot in shots] == ends[:-1]
            of_class = sum(shot.num_frames for shot in shots if shot.shows_class)
            assert low - 1 / ends[-1] <= of_class / ends[-1] <= high + 1 / ends[-1]
            for shot in shots:
                assert recipe.fps <= shot.num_frames <= 6 * recipe.fps
                assert shot.clip_frame >= 0
                assert shot.clip_frame + shot.num_frames <= shot.clip.seconds * recipe.fps + 1e-6
            for before, shot in pairwise(shots):
                assert shot.fade <= min(before.num_frames, shot.num_frames)
                if min(len(clips.background), len(clips.of_class[0])) > 1:
                    assert shot.clip != before.clip
            for flag in (True, False):  # no clip comes again before all others were shown
                shown = [shot.clip for shot in shots if shot.shows_class == flag]
                there = len(clips.of_class[0]) if flag else len(clips.background)
                assert len(set(shown)) == min(len(shown), there)

    def test_long_streams_last_three_to_five_minutes(self) -> None:
        for clips in (pool(11, 60, (1.0, 1.6)), pool(30, 60, (2.0, 3.5)), pool(5, 5, (3.5, 3.5))):
            for stream in plan(STREAM_PRESETS["long-streams"], clips, 30):
                assert 180 <= stream.duration <= 300

    def test_shares_fades_and_places_are_spread(self) -> None:
        streams = plan(replace(STREAM_PRESETS["streams"], fades=0.3), pool(60), 800)
        shares = np.array([stream.class_share for stream in streams])
        assert np.histogram(shares, 5, (0.25, 0.6))[0] / len(shares) == pytest.approx([0.2] * 5, abs=0.05)
        flags = np.array([[shot.shows_class for shot in stream.shots] for stream in streams])
        assert np.ptp(flags.mean(0)) < 0.09
        fades = np.array([[shot.fade > 0 for shot in stream.shots] for stream in streams])
        assert not fades[:, 0].any()
        assert fades[:, 1:].mean() == pytest.approx(0.3, abs=0.02)
        assert np.mean([stream.label == 0 for stream in streams]) == pytest.approx(0.5, abs=0.05)

    def test_few_clips_lower_the_share_instead_of_coming_twice(self) -> None:
        for stream in plan(StreamRecipe(share=(0.2, 0.9)), pool(4, 20, (3.0, 3.0))):
            shown = [shot.clip for shot in stream.shots if shot.shows_class]
            assert len(set(shown)) == len(shown) <= 4

    def test_groups_alternate(self) -> None:
        for stream in plan(StreamRecipe(share=0.4), pool(12)):  # four groups of three
            shown = [shot.clip.group for shot in stream.shots if shot.shows_class]
            assert len(set(shown[:4])) == min(len(shown), 4)

    def test_a_stream_depends_on_seed_and_number_alone(self) -> None:
        recipe, clips = StreamRecipe(), pool()
        assert plan_stream(recipe, clips, seed=3, number=7) == plan(recipe, clips, 9)[7]
        assert plan(recipe, clips, 1, seed=4)[0].shots != plan(recipe, clips, 1, seed=5)[0].shots
        assert len({stream.shots for stream in plan(recipe, clips, 50)}) == 50

    def test_of_a_clip_with_time_to_spare_dissolves_show_motion(self) -> None:
        long = pool(12, 20, (6.0, 9.0))
        recipe = StreamRecipe(fades=1.0, seconds_per_shot=(1.0, 2.0))
        for stream in plan(recipe, long, 50):
            for shot, after in pairwise(stream.shots):
                if shot.clip.seconds > 3:
                    assert shot.clip_frame >= shot.fade / 2
                    end = shot.clip_frame + shot.num_frames + after.fade / 2
                    assert end <= shot.clip.seconds * recipe.fps + 1

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"num_shots": 0}, "num_shots=0"),
            ({"share": (0.6, 0.2)}, "low <= high"),
            ({"share": 1.5}, "low <= high <= 1"),
            ({"seconds_per_shot": (0.5, 2)}, "of at least 1"),
            ({"fades": 2}, "fades=2 must be a number from 0 to 1"),
            ({"size": 63}, "both an even number"),
            ({"size": (64, 65)}, r"size=\(64, 65\) cannot be written as mp4"),
            ({"size": (64, 64, 64)}, "height, width"),
            ({"fps": 12.5}, "fps=12.5"),
        ],
    )
    def test_bad_recipes(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            StreamRecipe(**wrong)

    def test_a_share_that_cannot_be_reached(self) -> None:
        with pytest.raises(InvalidArgument, match="cannot be reached by 2 shots of at least 1 s; give more shots"):
            plan(StreamRecipe(num_shots=2, share=0.05), pool(), 1)
        with pytest.raises(InvalidArgument, match="no background"):
            plan(StreamRecipe(), replace(pool(), background=()), 1)
        assert plan(StreamRecipe(share=1), replace(pool(), background=()), 1)[0].class_share == 1


# ---- files


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, MadeClip]]:
    folder = tmp_path_factory.mktemp("clips")
    return folder, make_clips(folder)


def make(clips: Any, out: Path, **changes: Any) -> Manifest:
    arguments: dict[str, Any] = {"to": "mp4", "preset": "streams", "recipe": SMALL, "counts": COUNTS, "workers": 1}
    made = so.make_reels(clips, out, **(arguments | changes))
    assert isinstance(made, Manifest)
    return made


@pytest.fixture(scope="module")
def streams(world: tuple[Path, dict[str, MadeClip]], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make(world[0] / "clips.csv", tmp_path_factory.mktemp("out") / "streams")


def segments_of(manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    lines = (manifest.root / SEGMENTS_FILE).read_text().splitlines()
    return {row["id"]: row["segments"] for row in map(json.loads, lines)}


def frames_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All frames and their times."""
    reader = so.open_video(path, threads=1)
    batch = reader.read(np.arange(reader.total_num_frames))
    reader.close()
    return batch.frames, batch.pts_seconds


def contents(folder: Path) -> dict[str, bytes]:
    """All files but hidden ones, which a killed process may leave."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


def test_pixels_are_those_of_the_clip_at_that_time(streams: Manifest, world: tuple[Path, dict[str, MadeClip]]) -> None:
    num_dissolves = 0
    for item in streams.items:
        segments = segments_of(streams)[item.id]
        frames, times = frames_of(streams.path_of(item))
        assert frames.shape[1:] == (HEIGHT, WIDTH, 3)
        assert times == pytest.approx(np.arange(len(frames)) / FPS)
        assert [each["end"] for each in segments[:-1]] == [each["start"] for each in segments[1:]]
        assert (segments[0]["start"], segments[-1]["end"]) == (0, len(frames) / FPS)
        weights = np.array([class_weight(frame) for frame in frames])
        for segment in segments:
            clip = world[1][segment["clip"]]
            assert segment["source"] == clip.group
            assert segment["shows_class"] == (clip.label == streams.classes[item.labels[0]])
            inside = range(round(segment["start"] * FPS), round(segment["end"] * FPS))
            assert len(inside) >= FPS
            for index in inside:
                assert (weights[index] > 0.5) == segment["shows_class"]  # in a dissolve, too
                try:
                    shown = read_frame(frames[index])
                except ValueError:
                    shown = None  # two numbers at once
                middle = segment["start"] + 0.45 < index / FPS < segment["end"] - 0.55  # no dissolve reaches it
                moment = segment["clip_start"] + index / FPS - segment["start"]
                expected = (clip.number, int(moment * clip.fps + 1e-6))
                assert shown in (expected, None)
                assert shown == expected or not middle
                num_dissolves += shown is None
    assert num_dissolves > 5


def test_a_dissolve_is_linear_and_centred_on_its_cut(world: tuple[Path, dict[str, MadeClip]], tmp_path: Path) -> None:
    recipe = SMALL | {"fades": 1.0, "seconds_per_fade": 0.8}
    made = make(world[0] / "clips.csv", tmp_path / "s", recipe=recipe, counts={"test": 2})
    checked = 0
    for item in made.items:
        frames, _ = frames_of(made.path_of(item))
        segments = segments_of(made)[item.id]
        for before, after in pairwise(segments):
            cut = round(after["start"] * FPS)
            weight = np.array([class_weight(frames[index]) for index in range(cut - 5, cut + 5)])
            rising = np.clip((np.arange(-5, 5) + 0.5) / 8 + 0.5, 0, 1)  # 8 frames, of the incoming shot
            expected = {(False, True): rising, (True, False): 1 - rising, (True, True): np.ones(10)}
            flags = before["shows_class"], after["shows_class"]
            assert weight == pytest.approx(expected.get(flags, np.zeros(10)), abs=0.04)
            checked += flags[0] != flags[1]
    assert checked


def test_without_fades_all_cuts_are_hard(world: tuple[Path, dict[str, MadeClip]], tmp_path: Path) -> None:
    made = make(world[0] / "clips.csv", tmp_path / "s", recipe=SMALL | {"fades": 0}, counts={"test": 1})
    for frame in frames_of(made.path_of(made.items[0]))[0]:
        read_frame(frame)  # raises where two are mixed
        assert class_weight(frame) == pytest.approx(round(class_weight(frame)), abs=0.04)


def test_the_files(streams: Manifest, world: tuple[Path, dict[str, MadeClip]]) -> None:
    again = read_manifest(streams.root / "manifest.csv")
    assert again == streams
    assert (streams.root / "manifest.csv").read_text().splitlines()[0] == "id,path,label,split,group"
    assert streams.classes == CLASSES
    assert streams.counts()["splits"] == COUNTS
    assert len({item.group_key for item in streams.items}) == 6
    # What the classifier is trained on, no stream of train or dev shows; test is only tested on.
    classifier = read_manifest(streams.root / "classifier.csv")
    assert classifier.classes == CLASSES
    assert all(classifier.path_of(item).is_file() for item in classifier.items)
    background = read_manifest(streams.root / "classifier_background.csv", multi_label=True)
    assert {item.labels for item in background.items} == {()}
    apart = {split: {i.group for m in (classifier, background) for i in m.split(split).items} for split in COUNTS}
    shown: dict[str, set[str]] = {split: set() for split in COUNTS}
    for item in streams.items:
        for segment in segments_of(streams)[item.id]:
            assert world[1][segment["clip"]].split == item.split
            shown[item.split].add(segment["source"])
    assert not apart["train"] & shown["train"]
    assert not apart["dev"] & shown["dev"]
    for split, per_class in (("train", 2), ("dev", 1)):
        for label in CLASSES:
            groups = {item.group for item in classifier.split(split).items if item.group.startswith(label)}
            assert len(groups) == per_class  # half of them
    assert {item.path for item in classifier.split("test").items} == {
        str(world[0] / path) for path, clip in world[1].items() if clip.label and clip.split == "test"
    }


def test_what_is_set_apart_depends_on_the_clips_alone(
    streams: Manifest, world: tuple[Path, dict[str, MadeClip]], tmp_path: Path
) -> None:
    other = make(world[0] / "clips.csv", tmp_path / "s", seed=5, counts={"test": 1}, preset="long-streams")
    for name in ("classifier.csv", "classifier_background.csv"):
        assert (other.root / name).read_bytes() == (streams.root / name).read_bytes()


def test_processes_and_kills_do_not_change_a_byte(
    streams: Manifest, world: tuple[Path, dict[str, MadeClip]], tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    arguments = {"to": "mp4", "preset": "streams", "recipe": SMALL, "counts": COUNTS, "workers": 2}
    code = f"import sosampler as so; so.make_reels({str(world[0] / 'clips.csv')!r}, {str(out)!r}, **{arguments!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(list((out / "videos").glob("[!.]*.mp4"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (out / "manifest.csv").exists()
    before = {path: path.stat().st_mtime_ns for path in (out / "videos").glob("[!.]*.mp4")}
    assert 2 <= len(before) < 6
    seen = []
    make(world[0] / "clips.csv", out, workers=2, on_progress=lambda progress: seen.append(progress.before))
    assert seen[-1] >= len(before)  # its processes may have ended what they had begun
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert contents(out) == contents(streams.root)


def test_another_recipe_is_refused(streams: Manifest, world: tuple[Path, dict[str, MadeClip]]) -> None:
    with pytest.raises(InvalidArgument, match=r"holds reels made with fades=0\.5, now 0\.0; give the same"):
        make(world[0] / "clips.csv", streams.root, recipe=SMALL | {"fades": 0.0})
    some = read_manifest(world[0] / "clips.csv", multi_label=True)
    some = replace(some, items=tuple(item for item in some.items if not item.path.endswith("ant7.mp4")))
    with pytest.raises(InvalidArgument, match="holds reels made with other clips"):
        make(some, streams.root)


def test_bad_clips_are_left_out_and_named(world: tuple[Path, dict[str, MadeClip]], tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    rows = [f"{world[0] / path},{clip.label},{clip.group},{clip.split}" for path, clip in world[1].items()]
    rows += [f"{name},ant,{name},test" for name in ("broken.mp4", "missing.mp4")]
    rows.append(f"{world[0] / 'short.mp4'},ant,short,train")
    write_clip(world[0] / "short.mp4", MadeClip(99, "ant", "short", "train", 10, 9))
    (tmp_path / "clips.csv").write_text("\n".join(["path,label,group,split", *rows]))
    said: list[str] = []
    out = tmp_path / "out"
    made = make(tmp_path / "clips.csv", out, say=said.append, counts={"test": 1})
    assert len(made) == 1
    assert said[0].startswith("3 of 39 clips are not shown, skipped.jsonl says why: ")
    assert "broken.mp4" in said[0]
    skipped = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [Path(each["path"]).name for each in skipped] == ["broken.mp4", "missing.mp4", "short.mp4"]
    assert skipped[2]["error"].endswith("lasts 0.90 s; a shot must last at least 1 s")
    named = {Path(item.path).name for item in read_manifest(out / "classifier.csv").items}
    assert "short.mp4" in named  # long enough for a classifier
    assert not named & {"broken.mp4", "missing.mp4"}


def test_a_clip_that_fails_later_costs_its_streams_alone(
    world: tuple[Path, dict[str, MadeClip]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = make_streams._decoded

    def fail(clip: Clip, *arguments: Any) -> Any:
        if clip.group == "test0":
            raise VideoError(f"{clip.path}: is damaged")
        return decoded(clip, *arguments)

    monkeypatch.setattr(make_streams, "_decoded", fail)
    said: list[str] = []
    clips, counts = world[0] / "clips.csv", {"train": 1, "test": 4}
    made = make(clips, tmp_path / "s", counts=counts, recipe=SMALL | {"num_shots": 3}, say=said.append)
    shown = {segment["source"] for listed in segments_of(made).values() for segment in listed}
    assert 1 <= len(made) < 5
    assert "test0" not in shown
    assert len(said) == 5 - len(made)
    assert all("is damaged" in text for text in said)
    monkeypatch.undo()
    assert len(make(clips, tmp_path / "s", counts=counts, recipe=SMALL | {"num_shots": 3})) == 5  # tried again


def test_long_videos_are_read_in_parts(
    streams: Manifest, world: tuple[Path, dict[str, MadeClip]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_streams, "_MAX_WHOLE_SECONDS", 0.5)
    made = make(world[0] / "clips.csv", tmp_path / "s")
    for item in made.items:
        assert made.path_of(item).read_bytes() == streams.path_of(item).read_bytes()


def test_parts_of_videos_and_separate_background(world: tuple[Path, dict[str, MadeClip]], tmp_path: Path) -> None:
    """Clips may be parts of files; background may be a folder or a manifest without labels and splits."""
    lines = [f"{world[0] / path},{c.label},{c.split},0.1,1.2" for path, c in world[1].items() if c.label]
    (tmp_path / "clips.csv").write_text("\n".join(["path,label,split,start,end", *lines]))
    others = [path for path, clip in world[1].items() if not clip.label]
    (tmp_path / "background.csv").write_text("\n".join(["path", *(str(world[0] / path) for path in others)]))
    folder = tmp_path / "more"
    folder.mkdir()
    for number, path in enumerate(others[:10]):
        (folder / f"{number}.mp4").write_bytes((world[0] / path).read_bytes())
    sets = open_clips(tmp_path / "clips.csv", [tmp_path / "background.csv", folder], classifier_share=0)
    assert sets.classifier == ()
    assert {(clip.start, round(clip.seconds, 6)) for clip in sets.pools["train"].of_class[0]} == {(0.1, 1.1)}
    num_background = {split: len(pool.background) for split, pool in sets.pools.items()}
    assert sum(num_background.values()) == len(others) + 10
    assert min(num_background.values()) >= 4  # a fifth of each source
    made = make(tmp_path / "clips.csv", tmp_path / "s", background=folder, counts={"test": 1}, classifier_share=0)
    assert not (made.root / "classifier.csv").exists()
    for segment in segments_of(made)[made.items[0].id]:
        if segment["shows_class"]:
            assert 0.1 <= segment["clip_start"] <= 0.2


# ---- through `prepare`


@pytest.mark.parametrize("candidates", ["exact", "keyframe"])
def test_a_bank_knows_what_its_frames_show(streams: Manifest, tmp_path: Path, candidates: str) -> None:
    bank = so.prepare(
        streams.root / "manifest.csv", out=tmp_path / "bank", num_candidates=12, candidates=candidates, workers=0
    )
    for number, item in enumerate(bank.items):
        video, segments = bank[number], segments_of(streams)[item.id]
        seen = [class_weight(frame) > 0.5 for frame in video.frames()]
        assert video.shows_class is not None
        assert video.shows_class.tolist() == seen
        assert video.sources == tuple(dict.fromkeys(each["source"] for each in segments))
    assert any(bank[0].shows_class)  # type: ignore[arg-type]
    text = bank.folder.shown_jsonl.read_bytes()
    bank.folder.shown_jsonl.unlink()  # as of a bank from before
    so.prepare(streams, out=bank.path, num_candidates=12, candidates=candidates, workers=0)
    assert bank.folder.shown_jsonl.read_bytes() == text


def test_oracle_and_intervals(streams: Manifest, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.factories import pooled

    torch.set_num_threads(1)
    bank = so.prepare(streams, pooled(), tmp_path / "bank", num_candidates=8, workers=0)
    found = so.evaluate(bank, ["uniform", "class-frames"], num_frames=2, num_candidates=8, bootstrap=20)
    assert found.row("class-frames", None, 8).frames_classified == pytest.approx(
        np.mean([Bank(bank.path).split("test")[number].shows_class.sum() for number in range(2)])  # type: ignore[union-attr]
    )
    assert found.to_dict()["ci_units"] == "videos and pictures"


def test_mp4_reels_of_pictures_keep_what_they_show(tmp_path: Path) -> None:
    """The bank that `prepare` makes from the files knows the same as the one that is rendered directly."""
    settings: dict[str, Any] = {
        "recipe": {"size": 48, "fps": 6, "num_candidates": 7, "num_shots": (3, 5)},
        "counts": {"train": 3, "test": 2},
        "num_classes": 2,
        "seed": 1,
    }
    films = so.make_reels("procedural", tmp_path / "films", to="mp4", **settings)
    rendered = so.make_reels("procedural", tmp_path / "rendered", **settings)
    assert isinstance(films, Manifest)
    assert isinstance(rendered, Bank)
    prepared = so.prepare(films, out=tmp_path / "prepared", num_candidates=7, workers=0)
    for film, direct in zip(prepared, rendered, strict=True):
        assert film.frame_indices.tolist() == direct.frame_indices.tolist()
        assert film.shows_class.tolist() == direct.shows_class.tolist()
        assert film.sources is not None
        assert set(direct.sources) <= set(film.sources)  # all shots, also those between candidates
