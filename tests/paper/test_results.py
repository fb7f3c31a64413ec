"""The parts of a reproduction: means over seeds, speed, single videos; and what needs the classifier."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import Cell
from sosampler.paper.experiments import EXPERIMENTS, column_for
from sosampler.paper.folder import TrainingChecks, git_state
from sosampler.paper.locations import find_locations
from sosampler.paper.plan import Request, checked_request, make_plan, train_one
from sosampler.paper.results import applies_here, empty_result, mean_rows, missing_uniform, result_rows
from sosampler.paper.run import Reproduction, chosen_cases, reproduce
from sosampler.report.load import read_run_videos
from sosampler.video.synthetic import numbered_video
from tests.factories import SAMPLER_CLASSES, TINY, make_bank, small_net

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
        classifier = so.create_classifier("timm:test_resnet", class_names=list(SAMPLER_CLASSES), input_size=32)
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
        "versus_uniform": {
            "num_frames": 6,
            "metric": "top1",
            "difference": difference,
            "ci95": (difference - 0.1, difference + 0.1),
        },
        **more,
    }


def test_means_and_deviations_over_seeds(taught: Bank) -> None:
    (place,) = find_locations({"own": taught})
    plan = make_plan(EXPERIMENTS["table6"], place, Request(Path("out"), (0, 1, 2), SMALL))
    scores, differences = [0.5, 0.6, 0.8], [0.1, 0.25, 0.4]
    names = {cell.training.name for cell in plan.cells if cell.training}
    rows = [
        row(f"{name}#{seed}", score, difference, gmacs=2.0)
        for name in names
        for seed, (score, difference) in enumerate(zip(scores, differences, strict=True))
    ]
    rows.append(row("uniform", 0.4, 0.0))
    column = column_for(("table6",), "activitynet", "timesformer")
    found = result_rows(plan, {"T=10": {"rows": rows}}, "top1", column)
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
    # In another metric than the one that the evaluation compares by: from the scores of each seed.
    others = result_rows(plan, {"T=10": {"rows": rows}}, "mAP", column)[1]
    points = [100 * (score / 2 - 0.2) for score in scores]
    assert others["versus_uniform"] == pytest.approx(np.mean(points))
    assert others["versus_uniform_sd"] == pytest.approx(np.std(points, ddof=1))
    assert others["versus_uniform_ci95"] is None
    without = [one for one in rows if one["policy"] != "uniform"]
    assert missing_uniform(without, "mAP") == [(6, 10)]
    assert (
        missing_uniform(rows, "mAP") == missing_uniform(without, "top1") == missing_uniform(without, "fidelity") == []
    )


def test_values_of_a_dial_are_rows_of_their_own(taught: Bank) -> None:
    (place,) = find_locations({"own": taught})
    plan = make_plan(EXPERIMENTS["figureI"], place, Request(Path("out"), (0,), SMALL, light="x"))
    recipe = next(one.recipe for one in plan.left_out if one.recipe.row == "frameexit")
    assert "features" in next(one.why for one in plan.left_out if one.recipe.row == "frameexit")
    from sosampler.paper.plan import PlannedCell, Training
    from sosampler.paper.results import rows_of_cell

    cell = PlannedCell(recipe, 6, 10, Training.of("frameexit", None, {}, {}))
    rows = [row(f"frameexit#{seed}@{value}", 0.5, 0.0, num_frames=None) for seed in (0, 1) for value in (0.9, 0.5)]
    found = rows_of_cell(cell, (0, 1), [*rows, row("frameexit#10@0.9", 0.1, 0.0)])
    assert [[one["policy"] for one in group] for group in found] == [
        ["frameexit#0@0.9", "frameexit#1@0.9"],
        ["frameexit#0@0.5", "frameexit#1@0.5"],
    ]


def test_figures_of_the_paper_beside_rows_that_are_left_out(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", stored=10, train=0, dev=4)
    (place,) = find_locations({"activitynet": bank})
    found = {}
    for name in ("figureI", "table3"):
        plan = make_plan(EXPERIMENTS[name], place, Request(tmp_path / "out", (0,), SMALL))
        left_out = empty_result(plan)["left_out"]
        found |= {(name, row["row"], row["num_frames"]): row["paper"] for row in left_out}
    assert found["figureI", "sosampler", 4]["score"] == 76.2
    assert found["figureI", "scsampler", 6] is None, "nobody knows for which of the N it would be"
    assert found["figureI", "frameexit", None] is None, "nor for which value of the dial"
    assert found["table3", "scsampler", 6]["score"] == 72.9
    assert found["table3", "frameexit", None]["score"] == 76.1, "a system has no N of its own"


def test_advice_that_cannot_be_followed_is_dropped(taught: Bank) -> None:
    said: list[str] = []
    evaluate(taught, ["uniform"], num_frames=6, num_candidates=10, split="dev", bootstrap=0, say=said.append)
    assert said
    assert all(applies_here(note) for note in said)
    for note in ("no comparison with 'semi-optimal': add it to the policies", "no fidelity: add the policy 'optimal'"):
        assert not applies_here(note)


def test_the_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "nowhere") is None


# ---- single videos


def test_cases_are_chosen_by_the_difference_of_confidence(taught: Bank, tmp_path: Path) -> None:
    found = evaluate(taught, ["uniform", "random", "optimal"], num_frames=1, num_candidates=8, split="dev", bootstrap=0)
    assert found.per_video is not None
    videos = read_run_videos(found.write_run(tmp_path) / "videos.jsonl")
    by = {name: found.per_video.predictions[Cell(name, 1, 8)] for name in ("optimal", "uniform")}
    seen = 0
    for success, (better, worse) in ((True, ("optimal", "uniform")), (False, ("uniform", "optimal"))):
        slow = sorted(
            (video for video in range(len(found.ids)) if by[better].right[video] and not by[worse].right[video]),
            key=lambda video: (by[worse].confidence[video] - by[better].confidence[video], video),
        )
        assert chosen_cases(videos, "optimal", (1, 8), success=success) == slow
        seen += len(slow)
    assert seen
    assert chosen_cases(videos, "uniform", (1, 8), success=True) == []


# ---- with the classifier at hand


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Reproduction]:
    results = reproduce(
        ["tableII", "figure1", "figure2", "table5"],
        {"own": folder / "bank"},
        classifiers=f"resnet50={folder / 'classifier'}",
        out=folder / "out",
        light=str(folder / "light"),
        features={"r34": folder / "classifier", "r18": str(folder / "light")},
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
    listed = [(one["row"], one["num_frames"]) for one in found["tableII"].result["rows"]]
    recipes = [(name, count) for name in ("sosampler", "sosampler-authors", "sosampler-default") for count in (5, 6)]
    decide = [("adaframe", None), ("ar-net", None), ("frameexit", None)]
    assert listed == [("uniform", 6), *decide, ("ocsampler", 6), *recipes]
    rows = {one["row"]: one for one in found["tableII"].result["rows"] if one["num_frames"] != 5}
    rows["of five"] = next(one for one in found["tableII"].result["rows"] if one["num_frames"] == 5)
    assert rows["uniform"]["times_uniform"] == 1.0
    assert all(one["videos_per_second"] > 0 for one in rows.values())
    assert all(one["times_uniform"] > 0 for one in rows.values())
    assert rows["of five"]["gmacs"] < rows["sosampler"]["gmacs"]
    assert rows["uniform"]["gmacs"] == pytest.approx(rows["sosampler"]["classifier_gmacs"])
    assert rows["frameexit"]["num_frames"] is None
    assert 1 <= rows["frameexit"]["frames_classified"] <= 10
    assert rows["of five"]["paper"]["videos_per_second"] == 123.9
    assert (rows["sosampler"]["paper"]["table"], rows["sosampler"]["paper"]["score"]) == ("table3", 77.7)
    assert rows["sosampler-default"]["paper"] is None
    assert found["tableII"].result["elsewhere"] == []
    (left_out,) = found["tableII"].result["left_out"]  # the classifier here sees smaller frames
    assert (left_out["row"], left_out["paper"]["videos_per_second"]) == ("adafocus", 44.9)
    assert "adafocus of 224 pixels" in left_out["why"]
    assert rows["ar-net"]["paper"]["videos_per_second"] == 23.1
    text = found["tableII"].table()
    line = next(line for line in text.splitlines() if line.startswith("AdaFocus"))
    assert line.split()[-3:] == ["75.0", "26.6", "44.9"]
    assert "for orientation only" in text
    assert "the paper's videos a second are of one NVIDIA TITAN Xp" in text
    assert "uniform with 6 of 10 frames is 1, whatever N a row has" in text


def test_systems_are_compared_with_what_lies_there(
    folder: Path, found: dict[str, Reproduction], tmp_path: Path
) -> None:
    (place,) = find_locations({"own": folder / "bank"}, f"resnet50={folder / 'classifier'}", device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        so.SOSampler(backbone=TINY, shift=0, input_size=32).save_pretrained(tmp_path / "light")
    others: dict[str, Any] = {"device": "cpu", "precision": None, "workers": 1, "bootstrap": 10, "num_cases": 2}
    for light, sentence in ((folder / "light", ""), (tmp_path / "light", "liteeval|adaframe.*light.fingerprint was")):
        request = checked_request(folder / "out", 0, 1, SMALL, None, light, **others)
        plan = make_plan(EXPERIMENTS["tableII"], place, request)
        assert {"frameexit", "adaframe"} <= {training.sampler for training in plan.trainings}
        with pytest.raises(InvalidArgument, match=sentence) if sentence else nullcontext():
            TrainingChecks(request).check(plan)
    # Weights of another backbone, which samplers begin with, are none for the light network.
    network = timm.create_model(TINY.removeprefix("timm:"), pretrained=False)
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, tmp_path / "tiny.safetensors")
    request = checked_request(tmp_path / "out", 0, 1, SMALL, tmp_path / "tiny.safetensors", None, **others)
    plan = make_plan(EXPERIMENTS["tableII"], place, request)
    with pytest.raises(WeightsError, match=r"the light network of baselines, MobileNetV2.*; give --light as well"):
        TrainingChecks(request).check(plan)


def test_points_above_uniform_in_the_metric_of_the_paper(folder: Path) -> None:
    """The bank has one label a video, and the paper measures its data set in mAP."""
    (one,) = reproduce(
        "tableII",
        {"activitynet-v1.3": folder / "bank"},
        classifiers=f"resnet50={folder / 'classifier'}",
        out=folder / "points",
        light=str(folder / "light"),
        seeds=(0, 1),
        epochs=1,
        settings=SMALL,
        device="cpu",
        workers=1,
        bootstrap=0,
    )
    assert (one.result["metric"], one.result["bank"]["data"]) == ("mAP", "activitynet")
    told = json.loads((one.folder / "evaluation.json").read_text())["parts"]["T=10"]["rows"]
    uniform = {row["num_frames"]: 100 * row["mAP"] for row in told if row["policy"] == "uniform"}
    for row in one.result["rows"]:
        name = row["row"]
        if name != "uniform":
            of_seeds = [other for other in told if other["policy"].rpartition("#")[0] == row["trained"]]
            of_seeds = [other for other in of_seeds if other["num_frames"] == row["num_frames"]]
            points = [100 * other["mAP"] - uniform[other["versus_uniform"]["num_frames"]] for other in of_seeds]
            assert len(points) == 2
            assert row["versus_uniform"] == pytest.approx(np.mean(points)), name
            assert row["versus_uniform_sd"] == pytest.approx(np.std(points, ddof=1)), name


def test_how_alike_frames_are(found: dict[str, Reproduction]) -> None:
    told = found["figure1"].result
    assert [one["rate"] for one in told["rows"]] == [0.1, 0.2, 0.5, 1, 2, 5, 10, 25]
    assert {"independence.json", "independence.png"} <= set(told["files"])
    assert "frames are independent" in found["figure1"].table()
    assert told["paper"] is None


def test_pages_of_single_videos(found: dict[str, Reproduction]) -> None:
    one = found["figure2"]
    assert len(one.result["videos"]) == 2
    page = (one.folder / "report" / "index.html").read_text(encoding="utf-8")
    assert all(video in page for video in one.result["videos"])
    assert "The paper claims: Each frame is scored by itself" in page
    assert one.result["seeds"] == [0]


def test_what_nothing_can_be_had_of_is_told_and_leaves_no_folder(found: dict[str, Reproduction]) -> None:
    one = found["table5"]
    assert one.refused.startswith("30 candidates are needed")
    assert not one.folder.exists()
    assert len(one.result["left_out"]) == 15
    assert "77.1" in one.table()


# ---- a classifier that looks at clips


class Trained:
    """What `train` returns."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}


class MeanOfFrames(nn.Module):
    """A network of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


def test_rows_of_a_network_of_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make_bank(tmp_path / "bank", stored=10, train=4, dev=4)
    classifier = so.wrap_classifier(MeanOfFrames(), input_size=32, name="clips", class_names=list(SAMPLER_CLASSES))
    so.add_teacher(bank, classifier)
    (place,) = find_locations({"activitynet": bank}, {"timesformer": classifier})
    assert (place.data, place.paper_classifier, place.classifier) == ("activitynet", "timesformer", classifier)
    request = Request(tmp_path / "out", (0,), SMALL, weights="x")
    plan = make_plan(EXPERIMENTS["table3"], place, request)
    assert plan.left_out == ()
    rows = [cell.recipe.row for cell in plan.cells]
    assert rows == ["uniform", "scsampler", "ocsampler", "sosampler", "sosampler-authors", "sosampler-default"]
    # The classifier itself goes where clips are drawn that it must see; its stored outputs are enough for the others.
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "sosampler.paper.plan.train", lambda **more: given.setdefault(more["sampler"], more) and Trained()
    )
    for training in plan.trainings:
        train_one(training, tmp_path / "x", 0, place, request)
    assert given["ocsampler"]["classifier"] is classifier
    assert given["sosampler"]["classifier"] == place.teacher
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


def test_a_baseline_sees_frames_as_clips_of_one(tmp_path: Path) -> None:
    """FrameExit with X3D-S, which the paper has, on features of single frames."""
    bank = make_bank(tmp_path / "bank", stored=10, train=6, dev=4)
    shutil.rmtree(bank.path / "teachers")
    classifier = so.wrap_classifier(MeanOfFrames(), input_size=32, name="clips", class_names=list(SAMPLER_CLASSES))
    so.add_teacher(bank, classifier)
    (place,) = find_locations({"activitynet": bank}, {"x3d_s": classifier})
    request = checked_request(tmp_path / "out", 0, 1, SMALL, device="cpu", workers=1, bootstrap=0)
    plan = make_plan(EXPERIMENTS["table3"], place, request)
    (cell,) = [cell for cell in plan.cells if cell.training and cell.training.is_baseline]
    assert cell.recipe.row == "frameexit"
    folder = cell.training.folder(plan.folder, 0)
    train_one(cell.training, folder, 0, place, request)
    evaluation = evaluate(bank, {"exit": str(folder)}, num_frames=6, num_candidates=10, classifier=classifier)
    (row,) = [row for row in evaluation.rows if row.policy == "exit"]
    assert row.gmacs is not None
    assert row.gmacs >= row.frames_classified * classifier.gmacs(1), "each frame is a clip of its own"
    # A network without a layer over the classes has no features: the row says so, and the others are made.
    headless = so.wrap_classifier(MeanOfLogits(), input_size=32, name="headless", class_names=list(SAMPLER_CLASSES))
    so.add_teacher(bank, headless)
    (place,) = find_locations({"own": bank}, {"headless": headless})
    plan = make_plan(EXPERIMENTS["table3"], place, replace(request, light="x"))
    why = {cell.recipe.row: cell.why for cell in plan.left_out}
    assert set(why) == {"liteeval", "ar-net", "videoiq", "adafocus", "ada2d", "frameexit"}
    assert "adafocus of 224 pixels" in why.pop("adafocus")
    assert "the classifier is headless; give classifier" in why.pop("ada2d")
    assert "the bank has no features bits2; give an any-precision network" in why.pop("videoiq")
    assert all("has no layer with 3 outputs" in reason for reason in why.values())


class MeanOfLogits(nn.Module):
    """A network without a layer: the mean of each colour."""

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        return clips.mean(dim=(1, 3, 4))


# ---- independence


def test_one_figure_of_all_networks_and_of_the_files_where_a_bank_is_sparse(tmp_path: Path) -> None:
    """Videos of 4 and 4.6 s: the bank stores a frame a second, the files have 10."""
    (tmp_path / "videos").mkdir()
    for name, count in (("a", 40), ("b", 46)):
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(numbered_video(num_frames=count, fps=10))
    (tmp_path / "list.csv").write_text("path,label\nvideos/a.mp4,x\nvideos/b.mp4,y\n")
    networks = {}
    for seed, name in enumerate(("resnet50", "timesformer")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            networks[name] = so.create_classifier("timm:test_resnet", class_names=["x", "y"], input_size=32)
    bank = so.prepare(tmp_path / "list.csv", out=tmp_path / "bank", classifier=networks["resnet50"], num_candidates=4)
    so.add_teacher(bank, networks["timesformer"])
    given: dict[str, Any] = {"classifiers": networks, "device": "cpu"}
    (one,) = reproduce("figure1", bank, out=tmp_path / "out", **given)
    assert one.folder == tmp_path / "out" / "bank" / "resnet50" / "figure1"
    rows = one.result["rows"]
    names = list(dict.fromkeys(row["classifier"] for row in rows))
    assert len(names) == 2
    for name in names:
        pairs = {row["rate"]: row["pairs"] for row in rows if row["classifier"] == name}
        assert pairs[1.0] > 0
        assert pairs[5.0] > 0, "0.2 s are two frames of the file"
    assert [network["classifier"] for network in one.result["networks"]] == names
    note = "most videos of the bank store no neighbours at 5 frames a second, so frames are read from the video files"
    assert note in one.result["notes"]
    text = one.table()
    assert f"classifier {' and '.join(names)}" in text
    assert all(f"for {name}: " in text for name in names)
    # Without the files the bank has to do, and the table says what that costs.
    shutil.rmtree(tmp_path / "videos")
    (one,) = reproduce("figure1", bank, out=tmp_path / "again", **given)
    pairs = {row["rate"]: row["pairs"] for row in one.result["rows"] if row["classifier"] == names[0]}
    assert (pairs[1.0] > 0, pairs[5.0]) == (True, 0)
    assert "the video files are not there" in one.result["notes"][-1]
