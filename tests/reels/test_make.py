"""Reels: plans, frames and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

import sosampler as so
from sosampler.datasets.manifest import read_manifest
from sosampler.errors import InvalidArgument
from sosampler.reels.images import Pictures, ProceduralPictures
from sosampler.reels.recipe import DISTRACTOR, PRESETS, SPORTS22, Reel, ReelRecipe, plan_reels
from sosampler.reels.render import Renderer, candidate_frames, crop, frames_of, layers, plan_from, write_mp4, write_reel

SMALL = ReelRecipe(num_shots=5, num_candidates=5, size=48, picture_size=48, seconds_per_shot=1.0, fps=8)


def plan(recipe: ReelRecipe = SMALL, count: int = 20, seed: int = 0) -> list[Reel]:
    return plan_reels(recipe, pictures_per_class=[7, 3, 5], num_distractors=11, count=count, seed=seed)


@pytest.fixture(scope="module")
def pictures() -> ProceduralPictures:
    return ProceduralPictures(3, 6, num_distractors=8, size=48, seed=1)


def class_flags(reels: list[Reel]) -> list[list[bool]]:
    return [[shot.shows_class for shot in reel.shots] for reel in reels]


class TestPlan:
    @given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from(["numpy", "torch"]))
    @settings(max_examples=25, deadline=None)
    def test_a_reel_does_not_depend_on_how_many_are_planned(self, few: int, more: int, seed: int, draws: str) -> None:
        recipe = replace(SMALL, draws=draws)
        assert plan(recipe, few, seed) == plan(recipe, few + more, seed)[:few]

    def test_seeds_and_numbers_give_other_reels(self) -> None:
        assert plan(seed=1)[0].shots != plan(seed=2)[0].shots
        assert len({reel.shots for reel in plan(count=50)}) == 50

    def test_shots_follow_one_another_and_stay_within_what_is_there(self) -> None:
        recipe = replace(PRESETS["demo"], num_shots=(3, 9))
        counts = [7, 3, 5]
        for reel in plan(recipe, 200):
            assert 3 <= len(reel.shots) <= 9
            ends = [0] + [shot.first_frame + shot.num_frames for shot in reel.shots]
            assert [shot.first_frame for shot in reel.shots] == ends[:-1]
            assert reel.total_num_frames == ends[-1]
            for shot in reel.shots:
                assert shot.label in (reel.label, DISTRACTOR)
                assert 0 <= shot.picture < (counts[shot.label] if shot.shows_class else 11)
                assert 6 <= shot.num_frames <= 18  # 0.5 to 1.5 s at 12 fps
                for left, top, side in (shot.start, shot.end):
                    assert min(left, top) >= 0
                    assert max(left, top) + side <= 1 + 1e-12
        assert {len(reel.shots) for reel in plan(recipe, 200)} == set(range(3, 10))

    @pytest.mark.parametrize("draws", ["numpy", "torch"])
    def test_labels_and_shares_are_uniform(self, draws: str) -> None:
        recipe = ReelRecipe(num_shots=30, draws=draws)  # type: ignore[arg-type]
        reels = plan(recipe, 1500, seed=5)
        labels = np.bincount([reel.label for reel in reels])
        assert np.abs(labels - 500).max() < 4 * np.sqrt(1500 * 2 / 9)
        share = np.mean(class_flags(reels), axis=1)  # of each reel
        assert share.mean() == pytest.approx(0.45, abs=0.01)
        # A uniform share in 0.25..0.65 has variance 0.4**2 / 12; the coins of 30 shots add p (1 - p) / 30.
        coins = (0.45 - (0.45**2 + 0.16 / 12)) / 30
        assert share.var() == pytest.approx(0.16 / 12 + coins, rel=0.08)
        # Shots are independent of their place.
        assert np.abs(np.mean(class_flags(reels), axis=0) - 0.45).max() < 0.055

    def test_crops_have_uniform_area_and_place(self) -> None:
        shots = [shot for reel in plan(ReelRecipe(), 600) for shot in reel.shots]
        area = np.array([shot.start[2] ** 2 for shot in shots])
        assert area.min() >= 0.6
        assert area.max() <= 1
        assert np.histogram(area, 4, (0.6, 1.0))[0] / len(shots) == pytest.approx([0.25] * 4, abs=0.03)
        place = np.array([shot.start[0] / (1 - shot.start[2]) for shot in shots if shot.start[2] < 1])
        assert np.histogram(place, 4, (0, 1))[0] / len(place) == pytest.approx([0.25] * 4, abs=0.03)
        assert np.mean([shot.flip for shot in shots]) == pytest.approx(0.5, abs=0.03)

    def test_class_shots_can_be_demanded(self) -> None:
        rare = replace(SMALL, share=0.02)
        assert any(sum(flags) == 0 for flags in class_flags(plan(rare, 100)))
        assert min(sum(flags) for flags in class_flags(plan(replace(rare, min_class_shots=2), 100))) == 2
        never = class_flags(plan(replace(SMALL, share=0.0), 50))
        always = class_flags(plan(replace(SMALL, share=1.0), 50))
        assert not np.any(never)
        assert np.all(always)

    def test_moves_leave_the_pictures_as_they_are(self) -> None:
        moving = replace(SMALL, pan=0.3, zoom=0.2, blur=0.05, fade=0.5)
        for still, moved in zip(plan(SMALL), plan(moving), strict=True):
            assert [(s.label, s.picture, s.start, s.flip) for s in still.shots] == [
                (s.label, s.picture, s.start, s.flip) for s in moved.shots
            ]
            assert all(shot.is_still and not shot.fade for shot in still.shots)
            assert not any(shot.is_still for shot in moved.shots)

    def test_frames_know_their_shot(self) -> None:
        for reel in plan(PRESETS["demo"], 10):
            by_hand = [number for number, shot in enumerate(reel.shots) for _ in range(shot.num_frames)]
            assert reel.shot_numbers(np.arange(reel.total_num_frames)).tolist() == by_hand
            assert all(shot.shows_class == (shot.label == reel.label) for shot in reel.shots)
            with pytest.raises(InvalidArgument, match=r"has 0\.\."):
                reel.shot_numbers([0, reel.total_num_frames])

    def test_plans_are_plain_data(self) -> None:
        reel = plan(PRESETS["demo"], 1)[0]
        again = json.loads(json.dumps(reel.to_dict()))
        assert again["label"] == reel.label
        assert ReelRecipe(**again["recipe"]) == reel.recipe  # lists become tuples again
        assert again["id"] == reel.id == f"{reel.seed}-{reel.number:06d}"
        assert len(reel.digest()) == 8  # hexadecimal digits
        assert reel.digest() == plan(PRESETS["demo"], 2)[0].digest()
        assert len({reel.digest(), plan(PRESETS["demo"], 2)[1].digest(), reel.digest("x")}) == 3
        assert repr(reel) == "Reel(0-000000, class 2, shots ##.......#.#, 11.8333 s)"

    def test_plans_stay_what_they_are(self) -> None:
        """Files are named by these digests; another arithmetic would give the same name to other frames."""
        moving = replace(PRESETS["demo"], flip=0.3, crop_area=(0.3, 0.9))
        assert [reel.digest() for reel in plan(moving, 3, seed=9)] == ["fe9ffa6e", "037a0833", "027e594e"]
        assert [reel.digest() for reel in plan(PRESETS["sports22"], 2, seed=9)] == ["45cf85ec", "dfdf44bc"]

    def test_bounds_themselves_are_allowed(self) -> None:
        most = ReelRecipe(share=1, crop_area=1, flip=1, pan=1, zoom=0.9, blur=0.5, fade=1, picture_size=264)
        assert (most.share, most.crop_area, most.blur) == (1, 1, 0.5)  # one number stays one
        least = ReelRecipe(num_shots=1, share=0, crop_area=1e-4, seconds_per_shot=1e-3, fps=1, size=1, picture_size=1)
        assert all(shot.num_frames == 1 for reel in plan(least, 3) for shot in reel.shots)
        assert ReelRecipe(num_shots=(2, 2), min_class_shots=2, draws="numpy").num_shots == (2, 2)
        assert ReelRecipe(num_shots=(2, 2), draws="torch").num_shots == (2, 2)


class TestSports22:
    """The preset is that of the project's first measurement."""

    def test_reels_are_those_of_torchs_generator(self) -> None:
        torch = pytest.importorskip("torch")
        for side, distractors in (("train", 400), ("test", 200)):
            seed = SPORTS22[side].seed
            g = torch.Generator().manual_seed(seed)
            reels = plan_reels(
                PRESETS["sports22"], pictures_per_class=[50] * 22, num_distractors=distractors, count=100, seed=seed
            )
            for reel in reels:
                assert reel.label == int(torch.randint(22, (1,), generator=g))
                chance = torch.rand(10, generator=g)
                on = (chance < 0.25 + 0.4 * torch.rand(1, generator=g)).tolist()
                assert class_flags([reel])[0] == on
                for shot, is_on in zip(reel.shots, on, strict=True):
                    assert shot.picture == int(torch.randint(50 if is_on else distractors, (1,), generator=g))

    def test_reels_stay_what_they_are(self) -> None:
        """Written down from torch, for machines without it."""
        reels = plan_reels(PRESETS["sports22"], pictures_per_class=[50] * 22, num_distractors=400, count=3000, seed=1)
        assert [reel.label for reel in reels[:6]] == [11, 16, 19, 17, 8, 15]
        assert "".join("#" if shown else "." for shown in class_flags(reels)[0]) == "##.#.#..#."
        assert sum(not any(flags) for flags in class_flags(reels)) == 35
        assert np.mean(class_flags(reels)) == pytest.approx(0.4456, abs=1e-9)

    def test_its_numbers(self) -> None:
        recipe = PRESETS["sports22"]
        assert (recipe.num_shots, recipe.num_candidates, recipe.share) == (10, 10, (0.25, 0.65))
        assert (recipe.size, recipe.picture_size, recipe.crop_area, recipe.flip) == (176, 192, (0.6, 1.0), 0.5)
        assert recipe.pan == recipe.zoom == recipe.blur == recipe.fade == recipe.min_class_shots == 0
        reel = plan(recipe, 1)[0]
        assert reel.shot_numbers(reel.candidate_indices).tolist() == list(range(10))  # one frame a shot
        assert (SPORTS22["train"].count, SPORTS22["test"].count) == (3000, 3000)

    @pytest.mark.parametrize("flip", [False, True])
    def test_crops_are_those_of_grid_sample(self, flip: bool) -> None:
        torch = pytest.importorskip("torch")
        rng = np.random.default_rng(0)
        picture = rng.integers(0, 256, (192, 192, 3), dtype=np.uint8)
        for area in (0.6, 0.8, 1.0):
            side = np.sqrt(area)
            cx, cy = rng.uniform(-1, 1, 2) * (1 - side)
            if area == 0.6:
                cx, cy = 1 - side, side - 1  # in a corner, where half a pixel lies beyond the edge
            theta = torch.tensor([[[-side if flip else side, 0, cx], [0, side, cy]]], dtype=torch.float32)
            grid = torch.nn.functional.affine_grid(theta, [1, 3, 176, 176], align_corners=False)
            image = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
            expected = torch.nn.functional.grid_sample(
                image, grid, mode="bilinear", padding_mode="reflection", align_corners=False
            )[0]
            box = ((cx + 1 - side) / 2, (cy + 1 - side) / 2, side)
            got = crop(picture, box, 176, flip=flip).astype(np.float32)
            assert np.abs(got - expected.permute(1, 2, 0).numpy()).max() < 0.51  # rounding to 8 bits

    @pytest.mark.parametrize(("stored", "size"), [(192, 176), (120, 112), (64, 64), (90, 81), (41, 40), (7, 5), (1, 3)])
    def test_crops_are_computed_in_parts_without_a_difference(self, stored: int, size: int) -> None:
        """To the last bit what a formula for the whole frame gives, since banks are compared by their bytes."""
        rng = np.random.default_rng(stored)
        picture = rng.integers(0, 256, (stored, stored, 3), dtype=np.uint8)
        for flip in (False, True):
            side = rng.uniform(0.3, 1)
            left, top = rng.uniform(0, 1 - side, 2)
            centres = (np.arange(size) + 0.5) * (side * stored / size) - 0.5
            (row, down), (column, right) = (
                (np.floor(inside).astype(int), (inside - np.floor(inside)).astype(np.float32))
                for places in (centres + top * stored, (centres[::-1] if flip else centres) + left * stored)
                for inside in [np.clip(places, 0, stored - 1)]
            )
            exact = np.pad(picture, ((0, 1), (0, 1), (0, 0)), mode="edge").astype(np.float32)
            rows = exact[row] + down[:, None, None] * (exact[row + 1] - exact[row])
            expected = rows[:, column] + right[:, None] * (rows[:, column + 1] - rows[:, column])
            np.testing.assert_array_equal(crop(picture, (left, top, side), size, flip=flip), np.rint(expected))


class TestBadRecipes:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"num_shots": 0}, "num_shots=0 must be an int of at least 1"),
            ({"num_shots": (3, 2)}, "num_shots=(3, 2) must be (low, high) with low <= high$"),
            ({"num_shots": (1, 2, 3)}, "one number, or"),
            ({"num_shots": 2.5}, "num_shots=2.5"),
            ({"share": (0.5, 1.2)}, "low <= high <= 1"),
            ({"share": -0.1}, "share=-0.1"),
            ({"share": "half"}, "share='half'"),
            ({"min_class_shots": 11}, "more than the 10 shots"),
            ({"num_candidates": 0}, "num_candidates=0"),
            ({"crop_area": 0}, "crop_area=0"),
            ({"crop_area": 1.01}, "low <= high <= 1$"),
            ({"num_shots": (0, 3)}, "num_shots=0 must be an int of at least 1"),
            ({"seconds_per_shot": float("nan")}, "seconds_per_shot=nan"),
            ({"fps": 12.5}, "fps=12.5"),
            ({"flip": 2}, "flip=2 must be a number from 0 to 1"),
            ({"pan": -1}, "pan=-1"),
            ({"pan": 1.01}, "from 0 to 1$"),
            ({"blur": 0.51}, "from 0 to 0.5$"),
            ({"zoom": 1.0}, "from 0 to 0.9"),
            ({"fade": 1.5}, "fade=1.5"),
            ({"blur": True}, "blur=True"),
            ({"picture_size": 400}, "at most 264"),
            ({"draws": "dice"}, "choose one of: numpy, torch"),
            ({"draws": "torch", "num_shots": (3, 4)}, "give one number of shots"),
            ({"draws": "torch", "min_class_shots": 1}, "min_class_shots=0"),
        ],
    )
    def test_recipes(self, wrong: dict, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message.replace("(", r"\(").replace(")", r"\)")):
            ReelRecipe(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"pictures_per_class": []}, "is empty"),
            ({"pictures_per_class": [3, 0]}, "pictures_per_class=0"),
            ({"num_distractors": 0}, "give distractors"),
            ({"count": -1}, "count=-1"),
            ({"seed": -1}, "seed=-1"),
            ({"seed": 2**32}, "must be an int from 0 to"),
        ],
    )
    def test_plans(self, wrong: dict, message: str) -> None:
        good = {"pictures_per_class": [2, 2], "num_distractors": 2, "count": 1, "seed": 0}
        with pytest.raises(InvalidArgument, match=message):
            plan_reels(SMALL, **(good | wrong))

    def test_without_distractors_every_shot_must_show_the_class(self) -> None:
        reels = plan_reels(replace(SMALL, share=1), pictures_per_class=[2], num_distractors=0, count=5, seed=0)
        assert np.all(class_flags(reels))
        with pytest.raises(InvalidArgument, match="num_distractors=0 cannot be used with share"):
            plan_reels(replace(SMALL, share=(0.5, 1)), pictures_per_class=[2], num_distractors=0, count=5, seed=0)


def one_shot(pictures: Pictures, **moves: float) -> Reel:
    """A reel of long shots in which only the named moves are on."""
    recipe = replace(SMALL, num_shots=2, share=1.0, crop_area=0.5, **moves)
    return plan_from(pictures, recipe, count=1, seed=4)[0]


def sharpness(frame: np.ndarray) -> float:
    return float(np.abs(np.diff(frame.astype(np.float64), axis=1)).mean())


class TestFrames:
    def test_the_whole_picture_comes_back_as_it_is(self, pictures: ProceduralPictures) -> None:
        picture = pictures.get(0, 0)
        assert (crop(picture, (0.0, 0.0, 1.0), 48) == picture).all()
        assert (crop(picture, (0.0, 0.0, 1.0), 48, flip=True) == picture[:, ::-1]).all()
        half = crop(picture, (0.25, 0.5, 0.5), 24)
        assert (half == picture[24:, 12:36]).all()

    @pytest.mark.parametrize("flip", [0.0, 1.0])
    def test_without_moves_a_shot_is_one_picture(self, pictures: ProceduralPictures, flip: float) -> None:
        reel = one_shot(pictures, flip=flip)
        frames = list(frames_of(reel, pictures))
        assert len(frames) == reel.total_num_frames == 16
        for number, shot in enumerate(reel.shots):
            expected = crop(pictures.get(shot.label, shot.picture), shot.start, 48, flip=flip == 1)
            assert all((frame == expected).all() for frame in frames[number * 8 : number * 8 + 8])
        assert (frames[7] != frames[8]).any()

    @pytest.mark.parametrize("move", [{"pan": 0.5}, {"zoom": 0.5}, {"blur": 0.1}])
    def test_each_move_moves(self, pictures: ProceduralPictures, move: dict[str, float]) -> None:
        reel = one_shot(pictures, **move)
        frames = list(frames_of(reel, pictures))
        for first, second in pairwise(frames[:8]):
            assert (first != second).any()
        step = np.abs(frames[0].astype(int) - frames[1]).mean()
        assert step < np.abs(frames[0].astype(int) - frames[7]).mean()  # gently, not by leaps
        shot = reel.shots[0]
        if "pan" in move:
            assert shot.end[2] == shot.start[2]
            assert shot.end[:2] != shot.start[:2]
        if "zoom" in move:
            assert shot.end[2] != shot.start[2]
            centres = np.array(shot.start[:2]) + shot.start[2] / 2, np.array(shot.end[:2]) + shot.end[2] / 2
            assert np.abs(centres[0] - centres[1]).max() <= abs(shot.end[2] - shot.start[2])
        if "blur" in move:
            first_is_sharper = shot.blur[0] < shot.blur[1]
            assert (sharpness(frames[0]) > sharpness(frames[7])) == first_is_sharper

    def test_a_zoom_keeps_its_centre_unless_the_picture_ends(self) -> None:
        kept = 0
        for shot in (shot for reel in plan(replace(SMALL, zoom=0.5), 50) for shot in reel.shots):
            (left, top, side), (new_left, new_top, new_side) = shot.start, shot.end
            shift = (side - new_side) / 2
            if min(left + shift, top + shift) >= 0 and max(left, top) + shift + new_side <= 1:
                assert (new_left, new_top) == pytest.approx((left + shift, top + shift))
                kept += new_side != side
            assert min(new_left, new_top) >= 0
            assert max(new_left, new_top) + new_side <= 1 + 1e-12
        assert kept > 100

    def test_shots_are_mirrored_as_often_as_asked(self) -> None:
        for flip in (0.0, 0.2, 0.8, 1.0):
            mirrored = [shot.flip for reel in plan(replace(SMALL, flip=flip), 200) for shot in reel.shots]
            assert np.mean(mirrored) == pytest.approx(flip, abs=0.05)

    def test_a_fade_takes_at_most_its_share_of_the_shorter_shot(self) -> None:
        recipe = replace(SMALL, fade=0.5, seconds_per_shot=(1.0, 4.0))
        shares = []
        for before, shot in (pair for reel in plan(recipe, 100) for pair in pairwise(reel.shots)):
            shares.append(shot.fade / min(before.num_frames, shot.num_frames))
        assert max(shares) <= 0.5
        assert max(shares) > 0.45

    def test_pan_shows_what_lies_at_the_side(self, pictures: ProceduralPictures) -> None:
        reel = one_shot(pictures, pan=0.5)
        shot = reel.shots[0]
        for index in (0, 5):
            progress = (index + 0.5) / 8
            left, top, side = (a + (b - a) * progress for a, b in zip(shot.start, shot.end, strict=True))
            expected = crop(pictures.get(shot.label, shot.picture), (left, top, side), 48, flip=shot.flip)
            assert (Renderer(reel, pictures).frame(index) == expected).all()

    def test_moving_shots_frame_by_frame(self, pictures: ProceduralPictures) -> None:
        """Every move at once, also where a fade shows a shot before it begins or after it has ended."""
        recipe = replace(SMALL, num_shots=3, share=1.0, crop_area=0.5, pan=0.5, zoom=0.4, blur=0.1, fade=1.0)
        reel = plan_from(pictures, recipe, count=1, seed=4)[0]
        blurred = outside = 0

        def view(number: int, index: int) -> np.ndarray:
            nonlocal blurred, outside
            shot = reel.shots[number]
            passed = (index + 0.5 - shot.first_frame) / shot.num_frames
            outside += not 0 <= passed <= 1
            passed = min(max(passed, 0), 1)
            box = tuple((1 - passed) * a + passed * b for a, b in zip(shot.start, shot.end, strict=True))
            frame = crop(pictures.get(shot.label, shot.picture), box, 48, flip=shot.flip)
            radius = 48 * ((1 - passed) * shot.blur[0] + passed * shot.blur[1])
            blurred += radius >= 0.1
            return np.asarray(Image.fromarray(frame).filter(ImageFilter.GaussianBlur(radius))).astype(np.float64)

        for index, frame in enumerate(frames_of(reel, pictures)):
            expected = sum(weight * view(number, index) for number, weight in layers(reel, index))
            assert np.abs(frame - expected).max() <= 1.01  # positions are summed up in another order
        assert blurred > 20
        assert outside > 4

    def test_fades_blend_the_two_shots(self, pictures: ProceduralPictures) -> None:
        still, faded = one_shot(pictures), one_shot(pictures, fade=1.0)
        before, after = (Renderer(still, pictures).frame(index).astype(np.float64) for index in (0, 15))
        length = faded.shots[1].fade
        assert 1 < length <= 8
        weights = []
        for index, frame in enumerate(frames_of(faded, pictures)):
            weight = np.clip((index + 0.5 - 8) / length + 0.5, 0, 1)
            weights.append(weight)
            assert np.abs(frame - (before * (1 - weight) + after * weight)).max() <= 0.501
        assert any(0 < weight < 1 for weight in weights)

    def test_in_a_fade_the_frames_own_shot_is_seen_better(self) -> None:
        mixed = 0
        for reel in plan(replace(PRESETS["demo"], fade=1.0), 20):
            for index in range(reel.total_num_frames):
                seen = dict(layers(reel, index))
                own = int(reel.shot_numbers(index))
                assert sum(seen.values()) == pytest.approx(1)
                assert all(weight > 0 for weight in seen.values())
                assert seen[own] == max(seen.values()) >= 0.5
                assert set(seen) <= {own - 1, own, own + 1}
                mixed += len(seen) == 2
        assert mixed > 500

    def test_candidates_are_the_middles_of_equal_parts(self, pictures: ProceduralPictures) -> None:
        recipe = replace(SMALL, num_shots=3, num_candidates=6, pan=0.3, zoom=0.2, blur=0.05, fade=0.5)
        reel = plan_from(pictures, recipe, count=1, seed=0)[0]
        assert reel.candidate_indices.tolist() == [2, 6, 10, 14, 18, 22]
        every = list(frames_of(reel, pictures))
        offered = candidate_frames(reel, pictures)
        assert offered.shape == (6, 48, 48, 3)
        assert offered.dtype == np.uint8
        for frame, index in zip(offered, reel.candidate_indices.tolist(), strict=True):
            assert (frame == every[index]).all()
            assert (frame == Renderer(reel, pictures).frame(index)).all()

    def test_more_candidates_than_frames_repeat(self, pictures: ProceduralPictures) -> None:
        recipe = replace(SMALL, num_shots=2, seconds_per_shot=0.25, num_candidates=8)
        reel = plan_from(pictures, recipe, count=1, seed=0)[0]
        assert reel.candidate_indices.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

    def test_pictures_must_have_the_recipes_size(self, pictures: ProceduralPictures) -> None:
        with pytest.raises(InvalidArgument, match="48 px wide, the recipe has picture_size=120"):
            plan_from(pictures, PRESETS["demo"], count=1, seed=0)


MOVIE = replace(SMALL, num_shots=4, size=64, picture_size=48, pan=0.2, zoom=0.2, blur=0.02, fade=0.3)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2)))


class TestFiles:
    def test_a_video_holds_the_frames_of_its_plan(self, tmp_path: Path, pictures: ProceduralPictures) -> None:
        recipe = replace(MOVIE, seconds_per_shot=(0.5, 1.5))
        for reel in plan_from(pictures, recipe, count=2, seed=6):
            path = tmp_path / f"{reel.id}.mp4"
            write_reel(path, reel, pictures)
            assert b"crf=18.0" in path.read_bytes()
            chosen = so.select(path, policy="all", num_candidates=reel.total_num_frames)
            assert chosen.metadata.total_num_frames == reel.total_num_frames
            assert chosen.metadata.duration == pytest.approx(reel.duration, abs=1e-3)
            assert chosen.metadata.fps == pytest.approx(8)
            assert chosen.frames is not None
            rendered = list(frames_of(reel, pictures))
            for frame, index, time in zip(chosen.frames, chosen.frame_indices, chosen.pts_seconds, strict=True):
                assert round(float(time) * reel.recipe.fps) == index
                assert psnr(frame, rendered[index]) > 27
                # The frame is nearer to its own picture than to that of any other shot.
                others = [rendered[shot.first_frame + shot.num_frames // 2] for shot in reel.shots]
                nearest = int(np.argmax([psnr(frame, other) for other in others]))
                if len(layers(reel, int(index))) == 1:
                    found, planned = reel.shots[nearest], reel.shots[int(reel.shot_numbers(index))]
                    assert (found.label, found.picture) == (planned.label, planned.picture)

    def test_candidates_of_the_file_are_those_of_the_plan(self, tmp_path: Path, pictures: ProceduralPictures) -> None:
        reel = plan_from(pictures, MOVIE, count=1, seed=2)[0]
        write_reel(tmp_path / "reel.mp4", reel, pictures)
        chosen = so.select(tmp_path / "reel.mp4", num_frames=5, num_candidates=5, policy="uniform")
        assert chosen.frame_indices.tolist() == reel.candidate_indices.tolist()
        assert chosen.pts_seconds.tolist() == pytest.approx(reel.candidate_seconds.tolist(), abs=1e-6)
        assert chosen.frames is not None
        assert psnr(chosen.frames, candidate_frames(reel, pictures)) > 27

    def test_another_plan_or_other_pictures_never_reuse_a_file(
        self, tmp_path: Path, pictures: ProceduralPictures
    ) -> None:
        others = ProceduralPictures(3, 6, num_distractors=8, size=48, seed=2)
        names = set()
        for number, (recipe, source, seed) in enumerate(
            (
                (MOVIE, pictures, 0),
                (MOVIE, pictures, 1),
                (replace(MOVIE, blur=0.0), pictures, 0),
                (MOVIE, others, 0),
            )
        ):
            out = tmp_path / str(number)
            so.make_reels(source, out, to="mp4", preset=None, recipe=recipe, counts={"train": 1}, seed=seed)
            (item,) = read_manifest(out / "manifest.csv").items
            names.add(item.path)
        assert len(names) == 4

    def test_half_written_lists_of_dead_runs_are_removed(self, tmp_path: Path, pictures: ProceduralPictures) -> None:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        options = {"to": "mp4", "preset": None, "recipe": MOVIE, "counts": {"train": 1}}
        so.make_reels(pictures, tmp_path, **options)
        made = sorted(path.name for path in tmp_path.iterdir())
        for name in ("reels.{}.part.json", "manifest.{}.part.csv", "segments.{}.part.jsonl"):
            (tmp_path / f".{name.format(dead.pid)}").touch()
        of_another = tmp_path / f".manifest.{os.getppid()}.part.csv"
        of_another.touch()
        so.make_reels(pictures, tmp_path, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*made, of_another.name])

    def test_what_cannot_be_written(self, tmp_path: Path, pictures: ProceduralPictures) -> None:
        reels = plan_from(pictures, MOVIE, count=1, seed=0)
        odd = plan_from(pictures, replace(MOVIE, size=63), count=1, seed=0)
        with pytest.raises(InvalidArgument, match="even number"):
            write_reel(tmp_path / "odd.mp4", odd[0], pictures)
        with pytest.raises(InvalidArgument, match="crf=99"):
            write_reel(tmp_path / "odd.mp4", reels[0], pictures, crf=99)
        assert not list(tmp_path.iterdir())


def test_keyframes_every_four_seconds_and_less_detail_with_a_higher_crf(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    for crf in (10, 40):
        write_mp4(tmp_path / f"{crf}.mp4", [noise] * 50, fps=5, crf=crf)
    timeline = so.open_video(tmp_path / "10.mp4").timeline()
    assert timeline.keyframe_indices.tolist() == [0, 20, 40]
    told = (tmp_path / "10.mp4").read_bytes()  # x264 writes its settings into the file
    assert b"crf=10.0" in told
    assert b"subme=2 " in told, "veryfast"
    assert 1.5 * (tmp_path / "40.mp4").stat().st_size < (tmp_path / "10.mp4").stat().st_size
