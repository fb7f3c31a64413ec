"""Reels as a bank or as files: which pictures they show, what is kept of them, and going on after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler._util.progress import Progress
from sosampler.bank.bank import Bank
from sosampler.bank.decode import encode_jpeg
from sosampler.bank.inspect import verify_bank
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.errors import InvalidArgument
from sosampler.reels import render as reel_frames
from sosampler.reels.images import Pictures, ProceduralPictures, open_sources
from sosampler.reels.make import ReelSplit, default_counts, make_reels, plan_splits, reel_recipe, write_reel_bank
from sosampler.reels.recipe import DISTRACTOR, PRESETS, Reel, ReelRecipe, plan_reels
from sosampler.reels.render import candidate_frames, frames_of

SMALL = ReelRecipe(
    num_shots=(3, 5), num_candidates=6, size=64, picture_size=64, seconds_per_shot=(0.5, 1.0), fps=8, pan=0.2, fade=0.4
)
COUNTS = {"train": 40, "dev": 5, "test": 6}  # two shards


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2)))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def small_reels(out: Path, **changes: Any) -> Any:
    given = {"preset": None, "recipe": SMALL, "counts": COUNTS, "num_classes": 3, "workers": 1}
    return make_reels("procedural", out, **(given | changes))


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    made = small_reels(tmp_path_factory.mktemp("reels") / "bank")
    assert isinstance(made, Bank)
    return made


def small_plan() -> list[ReelSplit]:
    return plan_splits("procedural", None, SMALL, counts=COUNTS, num_classes=3)


class TestBank:
    def test_it_holds_the_candidates_of_every_reel(self, bank: Bank) -> None:
        planned = [(part, reel) for part in small_plan() for reel in part.reels]
        assert len(bank) == len(planned) == 51
        for item, (part, reel) in zip(bank, planned, strict=True):
            assert item.id == f"{part.split}-{reel.id}"
            assert (item.split, item.labels) == (part.split, (reel.label,))
            assert item.frame_indices.tolist() == reel.candidate_indices.tolist()
            assert item.pts_seconds.tolist() == reel.candidate_seconds.tolist()
            assert (item.duration, item.total_num_frames) == (reel.duration, reel.total_num_frames)
            rendered = candidate_frames(reel, part.pictures)
            stored = item.frames()
            assert stored.shape == rendered.shape == (6, 64, 64, 3)
            assert psnr(stored, rendered) > 24
            assert item.jpegs == [encode_jpeg(frame, 90) for frame in rendered]
        assert verify_bank(bank.path) == []

    def test_splits_have_what_was_asked_and_differ(self, bank: Bank) -> None:
        assert {split: len(bank.split(split)) for split in COUNTS} == COUNTS
        assert bank.classes == ProceduralPictures(3, 1).class_names
        train, _, test = small_plan()
        pairs = list(zip(train.reels, test.reels, strict=False))
        assert any(a.label != b.label for a, b in pairs)  # splits draw on their own
        assert all([s.start for s in a.shots] != [s.start for s in b.shots] for a, b in pairs)

    def test_no_picture_is_in_two_splits(self) -> None:
        seen: dict[str, set[Any]] = {}
        for part in small_plan():
            listing = part.pictures.listing()
            keys = {part.pictures._name(key) for _, key in listing}
            assert len(keys) == len(listing)
            seen[part.split] = keys
        assert not seen["train"] & seen["dev"]
        assert not seen["train"] & seen["test"]
        assert not seen["dev"] & seen["test"]

    def test_it_knows_which_frames_show_the_class_and_of_which_pictures(self, bank: Bank) -> None:
        names: dict[tuple[str, int, int], set[str]] = {}
        planned = [(part.split, reel) for part in small_plan() for reel in part.reels]
        for item, (split, reel) in zip(bank, planned, strict=True):
            shots = [reel.shots[number] for number in reel.shot_numbers(item.frame_indices)]
            assert item.shows_class is not None
            assert item.shows_class.tolist() == [shot.label == reel.label for shot in shots]
            assert item.sources is not None
            assert len(item.sources) == len({(shot.label, shot.picture) for shot in shots})
            for shot in shots:
                key = (split, shot.label, shot.picture)
                names[key] = names.get(key, set(item.sources)) & set(item.sources)
        assert all(names.values())  # a picture has one name in all reels

    def test_a_bank_from_before_gets_it_without_rendering(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bank = small_reels(tmp_path / "bank", counts={"train": 2})
        before = contents(bank.path)
        bank.folder.shown_jsonl.unlink()
        assert Bank(bank.path)[0].shows_class is None
        monkeypatch.setattr(reel_frames, "candidate_frames", None)
        assert contents(small_reels(tmp_path / "bank", counts={"train": 2}).path) == before

    def test_short_reels_keep_each_frame_once(self, tmp_path: Path) -> None:
        recipe = replace(SMALL, num_shots=2, seconds_per_shot=0.25)  # four frames for six candidates
        made = small_reels(tmp_path / "bank", recipe=recipe, counts={"train": 2})
        (part,) = plan_splits("procedural", None, recipe, counts={"train": 2}, num_classes=3)
        for item, reel in zip(made, part.reels, strict=True):
            assert item.frame_indices.tolist() == [0, 1, 2, 3]
            assert psnr(item.frames(), np.stack(list(frames_of(reel, part.pictures)))) > 24

    def test_killed_and_called_again_it_is_the_same(
        self, tmp_path: Path, bank: Bank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rendered: list[str] = []
        real = reel_frames.candidate_frames

        def dying(reel: Reel, pictures: Pictures) -> np.ndarray:
            rendered.append(reel.id)
            if len(rendered) == 35:
                raise KeyboardInterrupt
            return real(reel, pictures)

        monkeypatch.setattr(reel_frames, "candidate_frames", dying)
        with pytest.raises(KeyboardInterrupt):
            small_reels(tmp_path / "bank")
        assert len(Bank(tmp_path / "bank", partial=True)) == 32
        rendered.clear()
        told: list[tuple[int, int]] = []
        with pytest.raises(InvalidArgument, match=r"made with share=\[0\.25, 0\.65\], now 0\.5; give the same again"):
            small_reels(tmp_path / "bank", recipe=replace(SMALL, share=0.5))
        small_reels(tmp_path / "bank", on_progress=lambda progress: told.append((progress.before, progress.done)))
        assert len(rendered) == 51 - 32
        assert told == [(32, done) for done in range(33, 52)]
        assert contents(tmp_path / "bank") == contents(bank.path)

    def test_threads_change_nothing(self, tmp_path: Path, bank: Bank) -> None:
        assert contents(small_reels(tmp_path / "bank", workers=3).path) == contents(bank.path)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"seed": 1}, r"made with other pictures; seeds=\{'train': 1, 'dev': 0, 'test': 2\}, now"),
            ({"counts": {"train": 40, "dev": 5}}, "counts="),
            ({"recipe": replace(SMALL, zoom=0.1)}, r"zoom=0\.0, now 0\.1; give the same"),
            ({"quality": 80}, "quality=90, now 80"),
            ({"to": "mp4"}, "holds other files"),
        ],
    )
    def test_other_reels_are_refused(self, bank: Bank, change: dict[str, Any], said: str) -> None:
        before = contents(bank.path)
        with pytest.raises(InvalidArgument, match=said):
            small_reels(bank.path, **change)
        assert contents(bank.path) == before

    def test_other_folders_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        for to in ("bank", "mp4"):
            with pytest.raises(InvalidArgument, match="holds other files"):
                small_reels(tmp_path, to=to)
        so.write_frames(tmp_path / "bank", [so.FrameEntry("a", (0,), np.zeros((1, 8, 8, 3), np.uint8))], classes=["a"])
        with pytest.raises(InvalidArgument, match="holds something else than reels"):
            small_reels(tmp_path / "bank")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bank", "notes.txt"]


FILES = {"train": 3, "dev": 1, "test": 2}


class TestFiles:
    def test_files_hold_the_reels_and_go_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = small_reels(tmp_path / "whole", to="mp4", counts=FILES)
        assert isinstance(whole, Manifest)
        assert (whole.counts()["splits"], whole.counts()["groups"]) == (FILES, 6)
        real = reel_frames.write_reel

        def dying(path: Path, reel: Reel, *args: Any, **named: Any) -> None:
            if path.name.startswith("dev"):
                raise KeyboardInterrupt
            real(path, reel, *args, **named)

        monkeypatch.setattr(reel_frames, "write_reel", dying)
        with pytest.raises(KeyboardInterrupt):
            small_reels(tmp_path / "broken", to="mp4", counts=FILES)
        monkeypatch.undo()
        kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "broken" / "videos").iterdir()}
        assert len(kept) == 3
        told: list[Progress] = []
        small_reels(
            tmp_path / "broken", to="mp4", counts=FILES, on_progress=lambda progress: told.append(replace(progress))
        )
        assert [(progress.before, progress.done, progress.total) for progress in told] == [(3, n, 6) for n in (4, 5, 6)]
        assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
        resumed, unbroken = contents(tmp_path / "broken"), contents(tmp_path / "whole")
        assert resumed == unbroken
        with pytest.raises(InvalidArgument, match="made with crf=18, now 30;"):
            small_reels(tmp_path / "whole", to="mp4", counts=FILES, crf=30)
        with pytest.raises(InvalidArgument, match="holds other files"):
            small_reels(tmp_path / "whole", counts=FILES)

        # Files can be chosen from and prepared, and lead to the frames that a bank would hold.
        read = read_manifest(tmp_path / "whole" / "manifest.csv")
        planned = [
            (part, reel)
            for part in plan_splits("procedural", None, SMALL, counts=FILES, num_classes=3)
            for reel in part.reels
        ]
        prepared = so.prepare(tmp_path / "whole" / "manifest.csv", None, tmp_path / "p", num_candidates=6, workers=1)
        assert not prepared.failures
        for item, entry, (part, reel) in zip(prepared, read.items, planned, strict=True):
            assert (item.id, item.split, item.labels) == (entry.id, part.split, (reel.label,))
            assert item.frame_indices.tolist() == reel.candidate_indices.tolist()
            rendered = candidate_frames(reel, part.pictures)
            assert psnr(item.frames(), rendered) > 22
            chosen = so.select(read.path_of(entry), 6, num_candidates=6, policy="uniform")
            assert chosen.frame_indices.tolist() == reel.candidate_indices.tolist()
            assert chosen.frames is not None
            assert psnr(chosen.frames, rendered) > 24

    def test_nothing_is_written_for_what_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="size=63 cannot be written as mp4"):
            small_reels(tmp_path / "out", to="mp4", recipe=replace(SMALL, size=63))
        with pytest.raises(InvalidArgument, match="crf=60"):
            small_reels(tmp_path / "out", to="mp4", crf=60)
        assert not (tmp_path / "out").exists()
        (tmp_path / "file").touch()
        with pytest.raises(InvalidArgument, match="cannot be made"):
            small_reels(tmp_path / "file", to="mp4", counts={"train": 1})


def draw(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        Image.new("RGB", (8, 8), (number * 5 % 256, len(folder.name) * 9, 40)).save(folder / f"{number:03d}.png")


def names(source: Pictures, label: int) -> list[str]:
    return [f"{key.parent.parent.name}/{key.name[:3]}" for found, key in source.listing() if found == label]  # type: ignore[attr-defined]


ALL = ("train", "dev", "test")


class TestFolders:
    def test_one_folder_is_divided_by_position(self, tmp_path: Path) -> None:
        draw(tmp_path / "p" / "a", 10)
        draw(tmp_path / "p" / "b", 3)
        draw(tmp_path / "p" / "distractors", 5)
        found = open_sources(tmp_path / "p", ALL, size=8)
        assert [source.class_names for source in found.values()] == [("a", "b")] * 3
        assert [len(names(source, 0)) for source in found.values()] == [6, 2, 2]
        assert [names(source, 1) for source in found.values()] == [["p/000"], ["p/001"], ["p/002"]]
        assert [name for source in found.values() for name in names(source, 0)] == [f"p/{n:03d}" for n in range(10)]
        assert [source.num_distractors for source in found.values()] == [3, 1, 1]
        # Which pictures a split gets does not depend on the others.
        assert open_sources(tmp_path / "p", ["test"], size=8)["test"].listing() == found["test"].listing()

    def test_split_folders_are_taken_at_their_word(self, tmp_path: Path) -> None:
        for split, count in (("train", 8), ("test", 2)):
            draw(tmp_path / split / "a", count)
            draw(tmp_path / "distractors" / split, 4)
        found = open_sources(tmp_path, ALL, size=8)
        assert [names(source, 0) for source in found.values()] == [
            [f"train/{number:03d}" for number in range(6)],
            ["train/006", "train/007"],
            ["test/000", "test/001"],
        ]
        assert [names(source, DISTRACTOR)[0] for source in found.values()] == [
            f"distractors/{number}" for number in ("000", "003", "000")
        ]
        draw(tmp_path / "val" / "a", 3)
        found = open_sources(tmp_path, ALL, size=8)
        assert [len(names(source, 0)) for source in found.values()] == [8, 3, 2]
        draw(tmp_path / "dev" / "a", 3)
        with pytest.raises(InvalidArgument, match="dev and val both mean dev"):
            open_sources(tmp_path, ALL, size=8)

    def test_train_and_dev_without_test(self, tmp_path: Path) -> None:
        for split, count in (("train", 8), ("dev", 2)):
            draw(tmp_path / split / "a", count)
        found = open_sources(tmp_path, ["train", "dev"], size=8)
        assert [len(names(source, 0)) for source in found.values()] == [8, 2]
        with pytest.raises(InvalidArgument, match="has dev, train but no test"):
            open_sources(tmp_path, ALL, size=8)

    def test_a_bank_from_a_folder(self, tmp_path: Path) -> None:
        for name in ("a", "b", "distractors"):
            draw(tmp_path / "p" / name, 5)
        recipe = replace(SMALL, num_shots=3, num_candidates=3)
        made = make_reels(tmp_path / "p", tmp_path / "out", preset=None, recipe=recipe, counts={"train": 4, "test": 4})
        assert isinstance(made, Bank)
        assert made.classes == ("a", "b")
        assert len(made) == 8

    def test_bad_folders(self, tmp_path: Path) -> None:
        draw(tmp_path / "p" / "a", 2)
        with pytest.raises(InvalidArgument, match="class a has 2 pictures, too few"):
            open_sources(tmp_path / "p", ALL, size=8)
        draw(tmp_path / "q" / "a", 5)
        with pytest.raises(InvalidArgument, match="no distractors for train; put pictures"):
            make_reels(tmp_path / "q", tmp_path / "out")
        make_reels(tmp_path / "q", tmp_path / "out", recipe={"share": 1}, counts={"train": 1})
        draw(tmp_path / "r" / "train" / "a", 5)
        draw(tmp_path / "r" / "test" / "a", 5)
        draw(tmp_path / "r" / "test" / "b", 5)
        with pytest.raises(InvalidArgument, match="the class 'b' is in test only"):
            open_sources(tmp_path / "r", ALL, size=8)
        with pytest.raises(InvalidArgument, match="cannot be listed"):
            make_reels(tmp_path / "nowhere", tmp_path / "out2")
        (tmp_path / "s" / "distractors").mkdir(parents=True)
        with pytest.raises(InvalidArgument, match="holds no folders"):
            open_sources(tmp_path / "s", ALL, size=8)


class TestArguments:
    def test_changes_to_a_preset(self) -> None:
        demo = PRESETS["demo"]
        assert reel_recipe("demo", None) == demo
        assert reel_recipe("demo", {"pan": 0.0}) == replace(demo, pan=0.0)
        assert reel_recipe("demo", {"size": 56}) == replace(demo, size=56, picture_size=60)
        assert reel_recipe("demo", {"size": 56, "picture_size": 50}) == replace(demo, size=56, picture_size=50)
        assert reel_recipe("sports22", SMALL) is SMALL
        assert reel_recipe(None, {}) == ReelRecipe()

    def test_an_open_source_is_divided(self, tmp_path: Path) -> None:
        source = ProceduralPictures(2, 10, num_distractors=10, size=64, seed=9)
        parts = plan_splits(source, None, SMALL, counts={"dev": 1, "test": 1})
        first = [[key for _, key in part.pictures.listing()][:2] for part in parts]
        assert first == [[(0, 6), (0, 7)], [(0, 8), (0, 9)]]
        made = write_reel_bank(tmp_path / "bank", parts)
        assert made.ids == ["dev-0-000000", "test-2-000000"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"to": "avi"}, "choose one of: bank, mp4"),
            ({"preset": "film"}, "choose one of: sports22, demo"),
            ({"recipe": {"shots": 3}}, "a name in recipe='shots' is unknown"),
            ({"recipe": {"size": 0}}, "size=0"),
            ({"counts": {}}, "contains no reel"),
            ({"counts": {"train": 0}}, "contains no reel"),
            ({"counts": {"val": 3}}, "a split in counts='val' is unknown"),
            ({"counts": {"train": -1}}, "the count of train=-1"),
            ({"seed": 2**30}, "must be an int from 0 to"),
            ({"workers": 0}, "workers=0"),
            ({"num_classes": 1000}, "the number of shapes"),
            ({"preset": "sports22"}, "with 'procedural'; give the folder"),
        ],
    )
    def test_bad_arguments(self, tmp_path: Path, change: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidArgument, match=said):
            small_reels(tmp_path / "out", **change)
        assert not (tmp_path / "out").exists()

    def test_classes_are_for_procedural_pictures_alone(self, tmp_path: Path) -> None:
        draw(tmp_path / "p" / "a", 5)
        with pytest.raises(InvalidArgument, match="num_classes=3 must not be given with these pictures"):
            make_reels(tmp_path / "p", tmp_path / "out", num_classes=3)
        with pytest.raises(InvalidArgument, match="num_classes=3 must not be given with these pictures"):
            make_reels(tmp_path / "p", tmp_path / "out", preset="sports22", num_classes=3)


class TestSports22:
    """The preset makes the reels of the first measurement."""

    def test_counts(self) -> None:
        assert default_counts("sports22") == {"train": 2700, "dev": 300, "test": 3000}
        assert sum(default_counts("demo").values()) == 500

    def test_train_and_dev_are_its_reels_in_their_order(self, tmp_path: Path) -> None:
        for split, count in (("train", 52), ("test", 3)):
            for name in ("a", "b"):
                draw(tmp_path / split / name, count)
            draw(tmp_path / "distractors" / split, 4)
        recipe = PRESETS["sports22"]
        counts = {"train": 6, "dev": 2, "test": 4}
        train, dev, test = plan_splits(tmp_path, "sports22", recipe, counts=counts)
        # Pictures 50 and 51 of each class: the classifier has learned from the others.
        assert [names(part.pictures, 1) for part in (train, dev)] == [["train/050", "train/051"]] * 2
        planned = plan_reels(recipe, pictures_per_class=[2, 2], num_distractors=4, count=8, seed=1)
        assert [*train.reels, *dev.reels] == planned
        assert test.reels == plan_reels(recipe, pictures_per_class=[3, 3], num_distractors=4, count=4, seed=2)
        made = make_reels(tmp_path, tmp_path / "out", preset="sports22", recipe={"size": 32}, counts=counts)
        assert isinstance(made, Bank)  # reels that share pictures may stand in train and dev
        assert made.ids[5:9] == ["train-1-000005", "dev-1-000006", "dev-1-000007", "test-2-000000"]
        (other, _, _) = plan_splits(tmp_path, "sports22", recipe, counts=counts, seed=1)
        assert other.reels[0].seed == 4
