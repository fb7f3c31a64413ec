"""The parts of a reproduction: means over seeds, the clock, speed, single videos; and what needs the classifier."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sosampler as so
from banks import small_net
from sampler_banks import CLASSES, TINY, make_bank
from sosampler.data.bank import Bank
from sosampler.evaluation.evaluate import evaluate
from sosampler.reproduce import Reproduction, reproduce, throughput
from sosampler.reproduce.cases import Judged, choose_cases, judge, narrowed
from sosampler.reproduce.clock import Clock, Part, in_words
from sosampler.reproduce.experiments import EXPERIMENTS
from sosampler.reproduce.measuring import mean_rows, result_rows
from sosampler.reproduce.paper import column_for
from sosampler.reproduce.places import find_places
from sosampler.reproduce.plan import make_plan
from sosampler.reproduce.records import git_state
from taught_banks import teach

SMALL: dict[str, Any] = {"backbone": TINY, "shift": 0, "input_size": 32, "batch_size": 8}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """With a teacher that was made by hand."""
    return make_bank(tmp_path_factory.mktemp("taught") / "bank", stored=12, train=8, dev=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank whose teacher is a classifier that is at hand, that classifier, and a light network."""
    place = tmp_path_factory.mktemp("real")
    bank = make_bank(place / "bank", stored=12, train=8, dev=6)
    shutil.rmtree(bank.path / "teachers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        classifier = so.create_classifier("timm:test_resnet", class_names=list(CLASSES), input_size=32)
        so.SOSampler(backbone=TINY, shift=0, input_size=32).save_pretrained(place / "light")
    so.save_classifier(classifier, place / "classifier")
    so.add_teacher(bank, classifier)
    return place


# ---- means over seeds


def row(policy: str, score: float, difference: float, **more: Any) -> dict[str, Any]:
    """As an evaluation has it."""
    told = dict.fromkeys(("gmacs", "sampler_gmacs", "classifier_gmacs", "fidelity", "recovered"))
    return {
        **told,
        "policy": policy,
        "num_frames": 6,
        "num_candidates": 10,
        "top1": score,
        "mAP": score / 2,
        "frames_classified": 6,
        "frames_decoded": 10,
        "ci95": {"top1": (score - 0.1, score + 0.2)},
        "versus_uniform": {"metric": "top1", "difference": difference, "ci95": (difference - 0.1, difference + 0.1)},
        **more,
    }


def test_means_and_deviations_over_seeds(taught: Bank) -> None:
    (place,) = find_places({"own": taught})
    plan = make_plan(EXPERIMENTS["table6"], place, changes=SMALL)
    scores, differences = [0.5, 0.6, 0.8], [0.1, 0.25, 0.4]
    names = {cell.training.name for cell in plan.cells if cell.training}
    rows = [
        row(f"{name}#{seed}", score, difference, gmacs=2.0)
        for name in names
        for seed, (score, difference) in enumerate(zip(scores, differences, strict=True))
    ]
    rows.append(row("uniform", 0.4, 0.0))
    column = column_for(("table6",), "activitynet", "timesformer")
    found = result_rows(plan, {"T=10": {"rows": rows}}, (0, 1, 2), "top1", column)
    assert [one["row"] for one in found] == [cell.recipe.row for cell in plan.cells]
    uniform, trained = found[0], found[1]
    assert (uniform["score"], uniform["score_sd"], uniform["seeds"]) == (40.0, None, 0)
    assert uniform["versus_uniform"] is None
    assert uniform["score_ci95"] == pytest.approx([30, 60])
    assert trained["seeds"] == 3
    assert trained["score"] == pytest.approx(100 * np.mean(scores))
    assert trained["score_sd"] == pytest.approx(100 * np.std(scores, ddof=1))
    assert trained["versus_uniform"] == pytest.approx(100 * np.mean(differences))
    assert trained["versus_uniform_sd"] == pytest.approx(100 * np.std(differences, ddof=1))
    assert trained["score_ci95"] == pytest.approx([100 * np.mean(scores) - 10, 100 * np.mean(scores) + 20])
    assert trained["gmacs"] == 2.0
    assert trained["paper"]["score"] == 87.38
    drawn = mean_rows(found, "top1")
    assert drawn[1]["top1"] == pytest.approx(np.mean(scores))
    assert drawn[1]["policy"] == "MSE, label"
    # With another metric than the one compared by, nothing is made up.
    assert result_rows(plan, {"T=10": {"rows": rows}}, (0, 1, 2), "mAP", column)[1]["versus_uniform"] is None


def test_values_of_a_dial_are_rows_of_their_own(taught: Bank) -> None:
    (place,) = find_places({"own": taught})
    plan = make_plan(EXPERIMENTS["figureI"], place, changes=SMALL, light="x")
    recipe = next(one.recipe for one in plan.left_out if one.recipe.row == "frameexit")
    assert "features" in next(one.why for one in plan.left_out if one.recipe.row == "frameexit")
    from sosampler.reproduce.measuring import rows_of_cell
    from sosampler.reproduce.plan import PlannedCell
    from sosampler.reproduce.trainings import Training

    cell = PlannedCell(recipe, 6, 10, Training.of("frameexit", None, {}, {}))
    rows = [row(f"frameexit#{seed}@{value}", 0.5, 0.0, num_frames=None) for seed in (0, 1) for value in (0.9, 0.5)]
    found = rows_of_cell(cell, (0, 1), [*rows, row("frameexit#10@0.9", 0.1, 0.0)])
    assert [[one["policy"] for one in group] for group in found] == [
        ["frameexit#0@0.9", "frameexit#1@0.9"],
        ["frameexit#0@0.5", "frameexit#1@0.5"],
    ]


# ---- the clock


def test_the_clock_knows_what_it_has_timed(tmp_path: Path) -> None:
    said: list[str] = []
    parts = [Part("train", f"training {number}", tmp_path) for number in range(3)]
    parts.append(Part("evaluate", "evaluating", tmp_path, weight=4.0))
    clock = Clock(said.append)
    clock.plan(parts)
    assert clock.rest() == "4 parts are left, for an unknown time"
    with clock.running(parts[0]):
        pass
    assert said == ["training 0 ...", "    done in 0 s; 3 parts are left, for about 0 s and 1 of unknown length"]
    clock.skip(parts[1])
    (tmp_path / "durations.json").write_text(json.dumps({"train": [100, 40, 60], "evaluate": [30]}))
    later = Clock(said.append)
    later.plan(parts[2:])
    assert later.rest() == "2 parts are left, for about 3 min 0 s"  # 60 + 4 x 30
    (tmp_path / "durations.json").write_text("{")
    broken = Clock(said.append)
    broken.plan(parts[2:])
    assert broken.rest() == "2 parts are left, for an unknown time"
    assert in_words(59.6) == "1 min 0 s"


def test_a_part_that_fails_is_not_timed(tmp_path: Path) -> None:
    clock = Clock(lambda text: None)
    part = Part("train", "training", tmp_path)
    clock.plan([part])
    with pytest.raises(RuntimeError), clock.running(part):
        raise RuntimeError
    assert clock.left == [part]
    assert not (tmp_path / "durations.json").exists()


def test_the_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "nowhere") is None


# ---- speed


def test_speed_is_told_as_a_ratio_to_uniform() -> None:
    ways = {"uniform": lambda: time.sleep(0.01), "slow": lambda: time.sleep(0.04)}
    found = throughput.measure(ways, 8, rounds=3)
    assert found["uniform"]["times_uniform"] == 1.0
    assert 0.1 < found["slow"]["times_uniform"] < 0.5
    assert found["slow"]["videos_per_second"] < 8 / 0.04


class Counting:
    """A classifier, sampler and light network that write down what they are shown."""

    def __init__(self) -> None:
        self.clips: list[torch.Tensor] = []
        self.glances: list[int] = []

    def clip_probs(self, frames: torch.Tensor) -> None:
        self.clips.append(frames[:, :, 0, 0, 0])

    def choose(self, frames: torch.Tensor, num_frames: int) -> torch.Tensor:
        return torch.arange(frames.shape[1] - num_frames, frames.shape[1]).expand(len(frames), -1)

    def look(self, frames: torch.Tensor) -> None:
        self.glances.append(frames.shape[1])


def test_ways_show_the_classifier_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.arange(3 * 8, dtype=torch.uint8).reshape(3, 8, 1, 1, 1).expand(-1, -1, 3, 2, 2)
    seen = Counting()
    throughput.uniform_way(seen, frames, 2, batch=2)()
    assert torch.cat(seen.clips).tolist() == [[2, 6], [10, 14], [18, 22]]
    assert [len(clip) for clip in seen.clips] == [2, 1]
    seen = Counting()
    throughput.sampler_way(seen, seen, frames, 2, batch=2)()
    assert torch.cat(seen.clips).tolist() == [[6, 7], [14, 15], [22, 23]]

    from sosampler.systems import base

    heavy = torch.zeros(3, 8, dtype=torch.bool)
    heavy[0, [1, 5]] = heavy[2, 7] = True
    light = torch.zeros_like(heavy)
    light[:, :4] = True
    monkeypatch.setattr(base, "predict", lambda system, views: base.SystemOutput(torch.zeros(3, 2), heavy, light))
    seen = Counting()
    throughput.system_way(None, None, seen, seen, frames)()
    assert [clip.tolist() for clip in seen.clips] == [[[1]], [[5]], [[23]]], "one frame after the other"
    assert seen.glances == [4, 4, 4]


# ---- single videos


def test_cases_are_chosen_by_the_difference_of_confidence() -> None:
    rng = np.random.default_rng(0)
    sampler, uniform = (Judged(rng.random(50).round(2), rng.random(50) < 0.5) for _ in range(2))
    for success, (better, worse) in ((True, (sampler, uniform)), (False, (uniform, sampler))):
        slow = sorted(
            (video for video in range(50) if better.right[video] and not worse.right[video]),
            key=lambda video: (worse.confidence[video] - better.confidence[video], video),
        )
        assert choose_cases(sampler, uniform, success=success, count=5) == slow[:5]
    assert choose_cases(sampler, sampler, success=True, count=5) == []


def test_clips_are_judged_as_the_evaluation_does(taught: Bank) -> None:
    found = evaluate(taught, ["uniform", "semi-optimal"], num_frames=3, num_candidates=8, split="dev", bootstrap=0)
    for policy in ("uniform", "semi-optimal"):
        told = judge(taught.split("dev"), "a" * 16, None, found, policy, 3, 8)
        measured = found.row(policy)
        assert told.right.mean() == pytest.approx(measured.top1)
        assert told.confidence.mean() == pytest.approx(measured.confidence, abs=1e-5)
    few = narrowed(found, [4, 1], {"semi-optimal": "best"})
    assert few.ids == (found.ids[4], found.ids[1])
    assert few.chosen("best", 3, 8).tolist() == found.chosen("semi-optimal", 3, 8)[[4, 1]].tolist()


# ---- with the classifier at hand


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Reproduction]:
    results = reproduce(
        ["tableII", "figure1", "figure2", "table5"],
        {"own": folder / "bank"},
        classifiers=f"resnet50={folder / 'classifier'}",
        out=folder / "out",
        light=str(folder / "light"),
        seeds=0,
        epochs=1,
        settings=SMALL,
        device="cpu",
        workers=1,
        bootstrap=10,
        num_cases=2,
    )
    return {one.experiment.name: one for one in results}


def test_speed_and_cost_of_samplers_and_systems(found: dict[str, Reproduction]) -> None:
    rows = {one["row"]: one for one in found["tableII"].result["rows"]}
    assert list(rows) == ["uniform", "adaframe", "frameexit", "ocsampler", "sosampler", "sosampler-6"]
    assert rows["uniform"]["times_uniform"] == 1.0
    assert all(one["videos_per_second"] > 0 for one in rows.values())
    assert rows["sosampler"]["times_uniform"] < 1, "choosing costs time"
    assert (rows["sosampler"]["num_frames"], rows["sosampler-6"]["num_frames"]) == (5, 6)
    assert rows["sosampler"]["gmacs"] < rows["sosampler-6"]["gmacs"]
    assert rows["uniform"]["gmacs"] == pytest.approx(rows["sosampler-6"]["classifier_gmacs"])
    assert rows["frameexit"]["num_frames"] is None
    assert 1 <= rows["frameexit"]["frames_classified"] <= 10
    assert rows["sosampler"]["paper"]["videos_per_second"] == 123.9
    assert rows["sosampler-6"]["paper"] is None
    assert [one["row"] for one in found["tableII"].result["elsewhere"]] == ["ar-net", "adafocus"]
    text = found["tableII"].table()
    line = next(line for line in text.splitlines() if line.startswith("AR-Net"))
    assert line.split()[-4:] == ["package", "73.8", "33.4", "23.1"]
    assert "for orientation only" in text


def test_how_alike_frames_are(found: dict[str, Reproduction]) -> None:
    told = found["figure1"].result
    assert [one["rate"] for one in told["rows"]] == [0.1, 0.2, 0.5, 1, 2, 5, 10, 25]
    assert {"independence.json", "independence.png"} <= set(told["files"])
    assert "frames stand by themselves" in found["figure1"].table()
    assert told["paper"] is None


def test_pages_of_single_videos(found: dict[str, Reproduction]) -> None:
    one = found["figure2"]
    assert len(one.result["videos"]) == 2
    page = (one.folder / "report" / "index.html").read_text(encoding="utf-8")
    assert all(video in page for video in one.result["videos"])
    assert one.result["seeds"] == [0]


def test_what_nothing_can_be_had_of_is_told_and_leaves_no_folder(found: dict[str, Reproduction]) -> None:
    one = found["table5"]
    assert one.refused.startswith("30 candidates are asked for")
    assert not one.folder.exists()
    assert len(one.result["left_out"]) == 12
    assert "77.1" in one.table()


# ---- a classifier that looks at clips


class MeanOfFrames(nn.Module):
    """A network of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


def test_rows_that_need_more_than_clips_are_left_out(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", stored=10, train=4, dev=4)
    classifier = so.wrap_classifier(MeanOfFrames(), input_size=32, name="clips", class_names=list(CLASSES))
    so.add_teacher(bank, classifier)
    (place,) = find_places({"activitynet": bank}, {"timesformer": classifier})
    assert (place.data, place.paper_classifier, place.classifier) == ("activitynet", "timesformer", classifier)
    plan = make_plan(EXPERIMENTS["table3"], place, changes=SMALL, weights="x")
    why = {one.recipe.row: one.why for one in plan.left_out}
    assert set(why) == {"liteeval", "frameexit", "ocsampler"}
    assert "clips does not" in why["ocsampler"]
    assert "looks at clips as a whole" in why["frameexit"]
    (one,) = reproduce(
        "table1", {"activitynet": bank}, classifiers={"timesformer": classifier}, out=tmp_path / "out", bootstrap=0
    )
    assert one.result["paper"]["column"] == "the paper on ActivityNet v1.3 with TimeSformer"
    rows = {row["row"]: row for row in one.result["rows"]}
    assert rows["optimal"]["paper"]["score"] == 91.5
    assert rows["optimal"]["versus_uniform"] is not None
    assert rows["optimal"]["score_ci95"] is None
    # Only its answers: nothing can be judged, and that is told for this teacher alone.
    found = reproduce("table1", bank, out=tmp_path / "all", bootstrap=0)
    assert {one.result["classifier"]["name"]: bool(one.refused) for one in found} == {"by-hand": False, "clips": True}


def test_two_teachers_of_one_name_get_folders_of_their_own(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", stored=8, train=4, dev=4)
    answers = [bank.teacher()[place].features for place in range(len(bank))]
    teach(bank, answers, name="ab" * 8)
    teach(bank, answers, name="cd" * 8)
    places = find_places(bank)
    assert [place.classifier_name for place in places] == ["by-hand", "given-abababab", "given-cdcdcdcd"]
    named = find_places([bank], ["resnet50=" + "ab" * 8, "by hand"])
    assert [place.classifier_name for place in named] == ["resnet50", "by-hand"]
    assert [place.teacher for place in named] == ["ab" * 8, "a" * 16]
    assert [place.paper_classifier for place in named] == ["resnet50", None]
