"""The sampler that ships with the package: clear, typical and different frames, without torch and without training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter, ImageFont

import sosampler as so
from sosampler.errors import InvalidArgument
from sosampler.policies.base import Batch, Choice, choose_one
from sosampler.policies.learned import CHOICE, FOLDER, GENERAL_SIZE, general_sampler
from sosampler.policies.registry import METHOD_NAMES, get_policy
from sosampler.policies.visual import blends, typical_order, typicality, unrest
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.video.synthetic import numbered_video

ROOT = Path(__file__).parents[2]
MOST_BYTES = 6 * 10**6


@cache
def photographs() -> list[np.ndarray]:
    """Six parts of three photographs that come with scikit-learn and matplotlib: uint8 [160, 160, 3]."""
    from matplotlib.cbook import get_sample_data
    from sklearn.datasets import load_sample_images

    temple, flower = load_sample_images().images
    with Image.open(get_sample_data("grace_hopper.jpg")) as opened:
        portrait = np.asarray(opened.convert("RGB"))
    parts = [(temple, 0, 0, 427), (flower, 100, 0, 427), (portrait, 40, 0, 450)]
    parts += [(temple, 213, 0, 427), (flower, 0, 50, 300), (temple, 100, 100, 300)]
    return [np.asarray(Image.fromarray(of[y : y + s, x : x + s]).resize((160, 160))) for of, x, y, s in parts]


def blurred(frame: np.ndarray, radius: float = 9) -> np.ndarray:
    return np.asarray(Image.fromarray(frame).filter(ImageFilter.GaussianBlur(radius)))


def title(size: int = 160) -> np.ndarray:
    canvas = Image.new("RGB", (size, size), (12, 12, 30))
    ImageDraw.Draw(canvas).multiline_text(
        (15, 45), "CHAPTER\nTWO", fill=(240, 240, 240), font=ImageFont.load_default(28)
    )
    return np.asarray(canvas)


def choose_general(frames: np.ndarray, num_frames: int) -> Choice:
    return choose_one(get_policy("general"), len(frames), num_frames, frames)


def quality(*frames: np.ndarray) -> list[float]:
    scores: list[float] = general_sampler().score(np.stack(frames).transpose(0, 3, 1, 2)[None])[0].tolist()
    return scores


class TestTheFile:
    def test_is_small_and_complete(self) -> None:
        assert {file.name for file in FOLDER.iterdir()} == {"config.json", "model.onnx", "README.md"}
        assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES

    def test_loads_and_says_what_it_is(self) -> None:
        sampler = OnnxSampler.from_pretrained(FOLDER)
        assert sampler.config["input_size"] == GENERAL_SIZE
        assert sampler.config["shift"] == 0  # so that a frame's score does not depend on how densely candidates lie
        assert sampler.metadata["class_names"] is None

    def test_names_no_place_of_the_machine_that_made_it(self) -> None:
        data = (FOLDER / "model.onnx").read_bytes()
        assert not [word for word in (b"/home", b"/tmp", b"/work", b"site-packages") if word in data]

    def test_the_choice_is_that_of_the_benchmark(self) -> None:
        told = json.loads((ROOT / "benchmarks" / "results" / "general_sampler.json").read_text(encoding="utf-8"))
        assert {name: value for name, value in told["choice"]["chosen"].items() if name != "sure"} == CHOICE
        assert (
            json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["about"]["steps"]
            == told["training"]["steps"]
        )

    def test_the_page_tells_what_was_measured(self) -> None:
        card = import_module("benchmarks.general_sampler.general_card")
        told, select = (
            json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("general_sampler", "select")
        )
        tables = card.tables(told) | {"sizes": card.same_choice(told["sizes"]), "times": card.times(select)}
        page = (ROOT / "docs" / "general.md").read_text(encoding="utf-8")
        assert {name: table in page for name, table in tables.items()} == dict.fromkeys(tables, True)
        sets = {"overview", "films", "stills", "single", "streams", "talks", "reels", "golf", "candidates"}
        assert set(tables) == sets | {"sizes", "times"}


class TestWhatItSays:
    @pytest.mark.parametrize("seed", range(6))
    def test_faulty_frames_score_below_the_clear_one(self, seed: int) -> None:
        clear, other = photographs()[seed], photographs()[(seed + 1) % 6]
        faults = {
            "black": np.zeros_like(clear),
            "white": np.full_like(clear, 255),
            "plain": np.full_like(clear, 90),
            "blurred": blurred(clear),
            "title": title(),
        }
        best, *rest = quality(clear, *faults.values())
        assert {name: score < best for name, score in zip(faults, rest, strict=True)} == dict.fromkeys(faults, True)
        half_way = ((clear.astype(int) + other) // 2).astype(np.uint8)
        mixed, first, second = quality(half_way, clear, other)
        assert mixed < max(first, second)

    def test_a_frame_is_judged_by_itself(self) -> None:
        frames = photographs()
        together = quality(*frames)
        alone = [quality(frame)[0] for frame in frames]
        np.testing.assert_allclose(together, alone, atol=1e-4)


def test_weights_go_a_share_of_the_way_back(tmp_path: Path) -> None:
    """To the start's, heads not at all; what was trained stays where it is."""
    import torch
    from safetensors.torch import load_file, save_file

    training = import_module("benchmarks.general_sampler.general_training")
    size = training.Settings().input_size
    start = {name: tensor.clone() for name, tensor in training.SOSampler(input_size=size).backbone.state_dict().items()}
    save_file(start, tmp_path / "start.safetensors")
    student = training.Student(tmp_path / "start.safetensors", size)
    with torch.no_grad():
        for weights in student.parameters():
            weights.add_(1.0)
    training.write(student, tmp_path / "run", {})
    (tmp_path / "run" / training.TRAINED).write_text("{}")
    trained = load_file(tmp_path / "run" / "model.safetensors")
    training.mix_with_start(tmp_path / "run", tmp_path / "start.safetensors", 0.25, tmp_path / "mixed")
    mixed = load_file(tmp_path / "mixed" / "model.safetensors")
    name = "backbone.features.1.conv.0.0.weight"
    torch.testing.assert_close(mixed[name], start[name.removeprefix("backbone.")] + 0.75)
    torch.testing.assert_close(load_file(tmp_path / "run" / "model.safetensors")[name], trained[name])
    heads = [load_file(tmp_path / folder / training.HEADS)["weight"] for folder in ("run", "mixed")]
    torch.testing.assert_close(*heads)
    assert json.loads((tmp_path / "mixed" / training.TRAINED).read_text())["share_of_start"] == 0.25


class TestTheDefault:
    def test_is_what_select_takes(self) -> None:
        video = numbered_video(num_frames=40)
        sel, named = so.select(video, 4), so.select(video, 4, policy="general")
        assert (sel.policy, len(sel.candidates)) == ("general", 32)
        assert sel.frame_indices.tolist() == named.frame_indices.tolist()

    @pytest.mark.parametrize(
        "arguments",
        [{"num_frames": 4, "decode": False}, {"fps": 2}, {"num_frames": 6, "num_candidates": 6}, {"num_candidates": 8}],
    )
    def test_uniform_where_there_is_nothing_to_look_for(self, arguments: dict[str, Any]) -> None:
        sel = so.select(numbered_video(num_frames=40), **arguments)
        assert sel.policy == "uniform"
        assert len(sel) == len(sel.candidates)

    @pytest.mark.parametrize("arguments", [{"fps": 10, "num_frames": 3}, {"num_candidates": 9}, {"start": 0.5}])
    def test_general_where_some_are_left_out(self, arguments: dict[str, Any]) -> None:
        assert so.select(numbered_video(num_frames=40), **arguments).policy == "general"

    def test_on_the_command_line(self, tmp_path: Path) -> None:
        (tmp_path / "v.mp4").write_bytes(numbered_video(num_frames=40))
        command = [sys.executable, "-m", "sosampler", "select", str(tmp_path / "v.mp4"), "-n", "3", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["policy"] == "general"


class TestTheChoice:
    def test_near_duplicates_are_not_both_taken(self) -> None:
        """Four scenes, each three times with a little noise: four frames are one of each."""
        draw = np.random.default_rng(0)
        scenes = photographs()[:4]
        of = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        frames = np.stack([np.clip(scenes[one] + draw.normal(0, 2, scenes[one].shape), 0, 255) for one in of])
        chosen = choose_general(frames.astype(np.uint8), 4).positions
        assert [of[place] for place in chosen] == [0, 1, 2, 3]

    def test_a_still_shot_is_shown_again_rather_than_a_black_frame(self) -> None:
        """Where nothing else is left."""
        still = photographs()[2]
        frames = np.stack([*[still] * 5, np.zeros_like(still), title(), *[still] * 5])
        assert not {5, 6} & set(choose_general(frames, 10).positions.tolist())

    def test_faulty_frames_are_left_out(self) -> None:
        good = photographs()[:4]
        frames = [
            good[0],
            np.zeros_like(good[0]),
            good[1],
            blurred(good[1]),
            title(),
            good[2],
            np.full_like(good[0], 255),
            good[3],
        ]
        choice = choose_one(get_policy("general"), len(frames), 4, np.stack(frames), seed=0)
        assert choice.positions.tolist() == [0, 2, 5, 7]
        assert choice.scores is not None
        assert choice.scores.shape == (8,)

    def test_the_first_n_are_the_choice_of_n(self) -> None:
        frames = np.stack([*photographs(), title()])
        first = choose_general(frames, 1)
        assert first.scores is not None
        assert first.positions.tolist() == [first.scores.argmax()]
        choices = [set(choose_general(frames, count).positions.tolist()) for count in range(1, 8)]
        assert choices[-1] == set(range(7))
        assert all(fewer < more for fewer, more in pairwise(choices))


class TestSelect:
    @pytest.mark.parametrize("num_candidates", [None, 3, 11, 90])
    def test_by_name(self, clip: Path, num_candidates: int | None) -> None:
        sel = so.select(clip, 3, policy="general", num_candidates=num_candidates)
        assert len(sel) == 3
        assert sel.policy == "general"
        assert sel.num_candidates == num_candidates or num_candidates is None
        assert sel.candidates.scores is not None

    def test_pool_size_and_identity(self) -> None:
        policy = get_policy("general", device="cpu")
        assert policy.default_candidates(20) == 80
        assert policy.fingerprint() == general_sampler().fingerprint()
        with pytest.raises(InvalidArgument, match="onnxruntime"):
            get_policy("general", device="cuda")

    def test_frames_that_are_asked_for_in_small_are_still_looked_at(self) -> None:
        """The network sees 128 pixels, whatever is given back."""
        small = so.select(numbered_video(num_frames=40), 4, policy="general", size=32)
        assert small.frames is not None
        assert min(small.frames.shape[1:3]) == 32
        large = so.select(numbered_video(num_frames=40), 4, policy="general")
        assert small.candidates.scores is not None
        assert large.candidates.scores is not None
        assert np.corrcoef(small.candidates.scores, large.candidates.scores)[0, 1] > 0.7

    def test_without_torch(self, clip: Path) -> None:
        """Neither imported nor needed: a process in which torch cannot be imported chooses the same."""
        code = (
            "import sys\nfor name in ('torch', 'torchvision', 'safetensors', 'timm'): sys.modules[name] = None\n"
            f"import sosampler\nprint(sosampler.select({str(clip)!r}, 4, policy='general').frame_indices.tolist())"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == so.select(clip, 4, policy="general").frame_indices.tolist()

    def test_command(self, clip: Path) -> None:
        command = [sys.executable, "-m", "sosampler", "select", str(clip), "-n", "3", "--policy", "general", "--json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["policy"] == "general"


# ---- the rule by itself


@given(
    count=st.integers(1, 12),
    dimensions=st.integers(1, 5),
    seed=st.integers(0, 999),
    weights=st.tuples(*(st.sampled_from([0.0, 0.5, 2.0]) for _ in range(4))),
    uneven=st.booleans(),
)
def test_greedy_by_hand(
    count: int, dimensions: int, seed: int, weights: tuple[float, float, float, float], uneven: bool
) -> None:
    draw = np.random.default_rng(seed)
    marks, features = draw.random(count), draw.normal(size=(count, dimensions))
    times = np.cumsum(draw.random(count)) if uneven else None
    clearness, movement, redundancy, coverage = weights
    order, value = typical_order(
        marks,
        features,
        count,
        times=times,
        clearness=clearness,
        clear=0.8,
        movement=movement,
        redundancy=redundancy,
        alike=0.6,
        sharpness=2,
        coverage=coverage,
        reach=0.2,
        still=0.01,
    )
    unit = [row / np.sqrt((row**2).sum()) for row in features]
    like = [[min(1.0, max(0.0, float(a @ b))) for b in unit] for a in unit]
    at = list(range(count)) if times is None else times.tolist()
    span = (at[-1] - at[0]) * count / (count - 1) if count > 1 else 1.0
    for t in range(count):
        others = [s for s in range(count) if s != t]
        mass = sum(marks[s] for s in others)
        typical = sum(marks[s] * like[t][s] ** 2 for s in others) / mass if mass > 1e-3 else 0.0
        near = [1 - like[t][s] for s in (t - 1, t + 1) if 0 <= s < count]
        moved = min(0.75 * max(near) + 0.25 * min(near), 0.1) if near else 0.0
        moved *= min(1.0, 2 * marks[t])
        expected = clearness * np.log(min(1, max(marks[t] / 0.8, 1e-3))) + typical + movement * moved
        assert value[t] == pytest.approx(expected, abs=1e-9)
    assert sorted(order.tolist()) == list(range(count))

    def covers(s: int, t: int) -> float:
        in_time = max(0.0, 1 - abs(at[s] - at[t]) / span / 0.2) if like[s][t] >= 0.6 else 0.0
        return max(in_time, 1 - (1 - like[s][t]) / 0.01)

    def covered(chosen: list[int]) -> float:
        shown = [max([covers(s, t) for s in chosen], default=0.0) for t in range(count)]
        return sum(min(1, marks[t] / 0.8) * max(0.0, shown[t]) for t in range(count)) / (count * 0.2)

    chosen: list[int] = []
    for step, pick in enumerate(order.tolist()):
        worth = {
            t: value[t]
            - redundancy * max([np.clip((like[t][s] - 0.6) / 0.4, 0, 1) ** 2 for s in chosen], default=0.0)
            + coverage * min(1, step / 8) * (covered([*chosen, t]) - covered(chosen))
            for t in range(count)
            if t not in chosen
        }
        assert worth[pick] == pytest.approx(max(worth.values()), abs=1e-9)
        chosen.append(pick)


class TestInTime:
    @pytest.mark.parametrize("num_candidates", [32, 64, 128])
    def test_a_steady_shot_is_spread_whatever_t_is(self, num_candidates: int) -> None:
        """A slow turn of the features: eight choices lie apart, and no part of the video is left out."""
        turn = np.linspace(0, 1.2, num_candidates)
        features = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        order, _ = typical_order(np.full(num_candidates, 0.9), features, 8, **CHOICE)
        places = (np.sort(order) + 0.5) / num_candidates
        assert np.diff(places).min() > 1 / 17
        assert np.diff(np.concatenate([[0], places, [1]])).max() < 0.21

    def test_seconds_count_where_candidates_lie_unevenly(self) -> None:
        """Half of the candidates lie in the first tenth of the video: most choices lie behind it."""
        turn = np.linspace(0, 1.2, 32)
        features = np.stack([np.cos(turn), np.sin(turn)], axis=1)
        times = np.concatenate([np.linspace(0, 1, 16), np.linspace(1.5, 10, 16)])
        settings = CHOICE | {"movement": 0.0}
        uneven, even = (
            np.sort(typical_order(np.ones(32), features, 8, times=at, **settings)[0]) for at in (times, None)
        )
        assert (uneven < 16).sum() < (even < 16).sum()

    def test_movement_is_compared_over_the_same_share_of_the_video(self) -> None:
        turn = np.linspace(0, 1, 33)[:32]
        similarity = [np.cos(at - at[:, None]) for at in (turn, np.repeat(turn, 2))]
        sparse, dense = (unrest(np.ones(len(table)), table, 1.0) for table in similarity)
        np.testing.assert_allclose(dense[2:-2], np.repeat(sparse, 2)[2:-2])


class TestBlends:
    def test_mixtures_are_found_and_movement_is_not(self) -> None:
        first, second = (frame.astype(float) for frame in photographs()[:2])
        half = (first + second) / 2
        moved = [np.roll(first, shift, axis=1) for shift in (0, 12, 24)]
        assert blends(np.stack([first, half, second]).astype(np.uint8))[1] > 0.9
        assert blends(np.stack(moved).astype(np.uint8))[1] == 0
        assert blends(np.stack([first, first, second, second]).astype(np.uint8))[1:3].tolist() == [0, 0]

    def test_half_faded_frames(self) -> None:
        """From black at the beginning, to black at the end, and through black between two shots."""
        first, second = (frame.astype(float) for frame in photographs()[:2])
        fading = [0.5 * first, first, first, 0.4 * first, 0 * first, 0.5 * second, second, second, 0.3 * second]
        found = blends(np.stack(fading).astype(np.uint8))
        assert (found[[0, 3, 5, 8]] > 0.9).all()
        assert found[[1, 2, 6, 7]].tolist() == [0, 0, 0, 0]

    def test_they_are_found_among_more_candidates_too(self) -> None:
        first, second = (frame.astype(float) for frame in photographs()[:2])
        slow = [first] * 30 + [first + share * (second - first) for share in (0.2, 0.4, 0.6, 0.8)] + [second] * 30
        assert (blends(np.stack(slow).astype(np.uint8))[31:33] > 0.9).all()

    def test_the_policy_leaves_them_out(self) -> None:
        good = photographs()[:4]
        half = [((one.astype(int) + other) // 2).astype(np.uint8) for one, other in pairwise(good)]
        frames = [good[0], good[0], half[0], good[1], good[1], half[1], good[2], good[2], half[2], good[3], good[3]]
        for num_frames in (4, 8):
            assert not {2, 5, 8} & set(choose_general(np.stack(frames), num_frames).positions.tolist())


def page(*lines: str) -> np.ndarray:
    canvas = Image.new("RGB", (240, 180), (250, 250, 245))
    ImageDraw.Draw(canvas).multiline_text(
        (12, 12), "\n".join(lines), fill=(20, 20, 60), font=ImageFont.load_default(18)
    )
    return np.asarray(canvas)


class TestPreferText:
    """Four slides, of which the last lines come later, among a blank page and a photograph shown for long."""

    slides = (
        ("Seals", "live in", "cold seas"),
        ("Rivers", "carry sand", "to the coast"),
        ("Iron", "rusts", "in wet air"),
        ("Bees", "dance", "to tell the way"),
    )

    def frames(self) -> np.ndarray:
        built = [page(*lines[:count]) for lines in self.slides for count in (1, 2, 3)]
        return np.stack([page(), *built, page()])

    def test_the_full_slides_are_chosen(self) -> None:
        choice = choose_one(get_policy("general-text"), 14, 4, self.frames())
        assert choice.positions.tolist() == [3, 6, 9, 12]

    def test_select_and_the_command_line(self, tmp_path: Path) -> None:
        for place, frame in enumerate(self.frames()):
            Image.fromarray(frame).save(tmp_path / f"{place:02d}.png")
        sel = so.select(tmp_path, 4, num_candidates=14, prefer="text")
        assert (sel.policy, sel.frame_indices.tolist()) == ("general-text", [3, 6, 9, 12])
        named = so.select(tmp_path, 4, num_candidates=14, policy="general-text")
        assert named.frame_indices.tolist() == sel.frame_indices.tolist()
        command = [
            sys.executable,
            "-m",
            "sosampler",
            "select",
            str(tmp_path),
            "-n",
            "4",
            "-t",
            "14",
            "--prefer",
            "text",
        ]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        result = json.loads(done.stdout)
        assert (result["policy"], result["frame_indices"]) == ("general-text", [3, 6, 9, 12])

    @pytest.mark.parametrize("others", [{"policy": "uniform"}, {"decode": False}, {"query": "a slide"}])
    def test_it_is_for_the_general_policy(self, others: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument, match="prefer='text' is for the policy 'general'"):
            so.select("video.mp4", prefer="text", **others)
        with pytest.raises(InvalidArgument, match="prefer='sound' is unknown; choose one of: text"):
            so.select("video.mp4", prefer="sound")


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("name", ["general", "general-text"])
def test_every_method_chooses_from_its_scores(name: str, method: str) -> None:
    frames = np.stack([*photographs(), *photographs()])
    assert len(set(choose_one(get_policy(f"{name}+{method}"), 12, 5, frames).positions.tolist())) == 5


def test_auto_takes_more_frames_of_a_video_that_shows_more() -> None:
    first, *others = photographs()
    still, scenes = np.stack([first] * 12), np.repeat([first, *others[:3]], 3, axis=0)
    policy = get_policy("general")
    numbers = []
    for frames in (still, scenes):
        choice = choose_one(policy, 12, 12, frames, auto=so.Auto(max=12))
        assert choice.expected is not None
        assert (np.diff(choice.expected) >= -1e-12).all()
        assert choice.expected[-1] == pytest.approx(1)
        numbers.append(len(choice.positions))
    assert numbers == [1, 4]
    padded = Batch(12, np.array([12, 5]), np.stack([scenes, scenes]))
    assert np.isneginf(policy.expected(padded)[1, 5:]).all()  # type: ignore[index]


def test_the_theme_comes_before_the_stray() -> None:
    theme = np.array([[1.0, 0.2 * k, 0] for k in range(4)])
    features = np.concatenate([theme, [[0, 0, 1.0]]])
    order, _ = typical_order(np.ones(5), features, 5, movement=0)
    assert order[0] != 4
    assert typicality(np.ones(5), np.clip(features @ features.T, 0, 1))[4] == 0


def test_a_single_frame_has_no_movement() -> None:
    assert unrest(np.ones(1), np.ones((1, 1)), 0.1).tolist() == [0.0]
