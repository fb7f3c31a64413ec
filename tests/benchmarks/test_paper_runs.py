"""The runs on real data: what is trained for which table, in which order, and differences that are paired by video."""

from __future__ import annotations

import importlib
import json
import shutil
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder
from sosampler.bank.writer import locked
from sosampler.paper.experiments import EXPERIMENTS
from sosampler.paper.locations import find_locations
from sosampler.paper.plan import Request, make_plan
from sosampler.paper.run import reproduce
from tests.factories import make_bank

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_NAMES = ("paper_runs", "paper_worker", "paper_places", "paper_contrasts", "golf_events")


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    return {name: importlib.import_module(f"benchmarks.paper.{name}") for name in _NAMES}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("paper_runs") / "bank", stored=16, train=8, dev=24)


@pytest.fixture(scope="module")
def labelled_twice(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    folder = tmp_path_factory.mktemp("paper_runs") / "several"
    return make_bank(folder, stored=12, train=4, dev=24, multi_label=True)


# ---- what is trained


@pytest.mark.parametrize("experiment", ["table5", "table6", "table7", "tableI", "figure4", "figureI", "figureII"])
def test_what_is_trained_is_what_reproduce_asks_for(
    scripts: dict[str, ModuleType], bank: Bank, experiment: str
) -> None:
    (place,) = find_locations({"any": bank.path})
    changes = {"batch_size": 8, "epochs": 40}
    asked = make_plan(EXPERIMENTS[experiment], place, Request(Path("out"), (0,), changes, light="light"))
    places = scripts["paper_places"]
    spec = places.Spec("x", "x", "any", "bank", 16, "by-hand", "c", (), epochs=40, settings={"batch_size": 8})
    # Systems need features, which this bank has none of.
    ours = [training for training in spec.trainings(experiment) if not training.is_baseline]
    assert sorted(ours, key=lambda one: one.name) == sorted(asked.trainings, key=lambda one: one.name)
    assert bool(ours) == (experiment not in ("table5", "tableI")), "these ask for 30 and more candidates"


def test_a_network_of_clips_trains_no_systems(scripts: dict[str, ModuleType]) -> None:
    spec = scripts["paper_places"].Spec("x", "x", "x", "x", 10, "x", "x", (), pooling=None)
    names = {training.sampler for training in spec.trainings("figureI")}
    assert names == {"scsampler", "ocsampler", "sosampler"}


def test_every_table_of_the_plan_waits_for_its_own_trainings(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    runs, places = scripts["paper_runs"], scripts["paper_places"]
    tasks = runs.plan(common(scripts, tmp_path), list(places.SPECS.values()))
    for task in tasks.values():
        assert set(task.needs) <= set(tasks)
        assert {name for names in task.trainings.values() for name in names} <= set(tasks)
    wanted = {f"measure {spec.name}/{one.experiment}" for spec in places.SPECS.values() for one in spec.wanted}
    assert wanted == {name for name in tasks if name.startswith("measure ")}
    table6 = tasks["measure reels10/table6"]
    assert list(table6.trainings) == [0, 1, 2]
    assert all(len(names) == 5 for names in table6.trainings.values())
    assert tasks["measure yoga/table1"].needs == ("rebuild yoga",)
    assert tasks["network slowonly50"].needs == ("resnet50", "reels cls10")


def common(scripts: dict[str, ModuleType], folder: Path, **changes: Any) -> Any:
    told: dict[str, Any] = {
        **{"work": str(folder), "pictures": str(folder / "pictures"), "resnet50": "r", "mobilenet": "m", "i3d": "i"},
        **{"precision": None, "reel_counts": {"bank10": [2, 0, 2]}, "classifier_epochs": 1, "sampler_epochs": None},
    }
    return scripts["paper_worker"].Common(**told | changes)


# ---- the order


def small_schedule(scripts: dict[str, ModuleType], limit: float = 1000, reserve: float = 100) -> Any:
    """One bank, two seeds of one training, a table of them, and a speed that is measured alone."""
    runs, places = scripts["paper_runs"], scripts["paper_places"]
    tasks = [
        runs.Task("bank", {"do": "reels"}),
        runs.Task("b-1", {"do": "train"}, ("bank",), rank=(2, 1)),
        runs.Task("b-0", {"do": "train"}, ("bank",), rank=(0, 1)),
        runs.Task(
            "table",
            {"do": "measure"},
            ("bank",),
            rank=(-1, 0),
            measures=places.Wanted("table6", (0, 1)),
            trainings={0: ("b-0",), 1: ("b-1",)},
        ),
        runs.Task("free", {"do": "measure"}, ("bank",), rank=(-1, 1), measures=places.Wanted("table1")),
        runs.Task(
            "speed",
            {"do": "measure"},
            ("bank",),
            rank=(99, 0),
            measures=places.Wanted("tableII", (0,), alone=True),
            trainings={0: ("b-0",)},
        ),
    ]
    return runs.Schedule({task.name: task for task in tasks}, limit, reserve)


def step(schedule: Any, reply: dict[str, Any] | None = None, **options: Any) -> tuple[str, Any] | None:
    """Take the next task and end it at once."""
    found = schedule.next(only_measuring=options.get("only_measuring", False))
    if found is None:
        return None
    task, job = found
    schedule.ended(task, {"seconds": 1.0} if reply is None else reply)
    return task.name, job.get("seeds")


def test_first_what_has_a_lower_rank_and_speed_alone(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    order = [step(schedule) for _ in range(6)]
    assert order == [("bank", None), ("free", []), ("b-0", None), ("b-1", None), ("table", [0, 1]), ("speed", [0])]
    assert schedule.is_over


def test_processes_for_measuring_train_nothing(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    assert step(schedule, only_measuring=True) is None
    assert step(schedule) == ("bank", None)
    assert step(schedule, only_measuring=True) == ("free", [])
    assert step(schedule, only_measuring=True) is None


def test_speed_waits_while_anything_runs(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    for _ in range(4):
        step(schedule)
    running, _ = schedule.next(only_measuring=False)
    assert running.name == "table"
    assert schedule.next(only_measuring=False) is None
    schedule.ended(running, {"seconds": 1.0})
    assert step(schedule) == ("speed", [0])


def test_when_time_runs_out_the_finished_seeds_are_measured(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    for _ in range(3):
        step(schedule)  # the bank, what needs no training, and the first seed
    schedule.begun -= 950
    assert [step(schedule) for _ in range(3)] == [("table", [0]), ("speed", [0]), None]
    assert (schedule.tasks["b-1"].state, schedule.tasks["b-1"].why) == ("left out", "no time was left")
    assert schedule.is_over


def test_a_table_without_any_finished_seed_is_left_out(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    step(schedule)
    schedule.begun -= 950
    assert [step(schedule) for _ in range(2)] == [("free", []), None]
    assert schedule.tasks["table"].state == schedule.tasks["speed"].state == "left out"
    assert schedule.is_over


def test_what_fails_takes_with_it_what_needs_it(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    assert step(schedule, {"failed": "InvalidArgument: no such pictures", "seconds": 0.1}) == ("bank", None)
    assert step(schedule) is None
    assert {task.state for task in schedule.tasks.values()} == {"failed", "left out"}
    assert schedule.is_over


def test_one_failed_seed_leaves_the_other(scripts: dict[str, ModuleType]) -> None:
    schedule = small_schedule(scripts)
    assert [step(schedule) for _ in range(2)] == [("bank", None), ("free", [])]
    assert step(schedule, {"failed": "out of memory", "seconds": 1.0}) == ("b-0", None)
    assert [step(schedule) for _ in range(3)] == [("b-1", None), ("table", [1]), None]
    assert schedule.tasks["speed"].state == "left out"


def test_banks_of_clips_have_one_writer_each(
    scripts: dict[str, ModuleType], bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies by links: what is written in one must not be held by another."""
    work = tmp_path / "work"
    shutil.copytree(bank.path, work / "clips10")
    (work / "clips10" / ".lock").touch()
    entered = []

    def teach_one(folder: Path, classifier: Path) -> None:
        with locked(BankFolder(folder).lock, "this bank"):
            if not entered:
                entered.append(classifier.name)
                scripts["paper_worker"].teach(common(scripts, work), "clips10_x3d_s")
            entered.append(classifier.name)

    monkeypatch.setattr(importlib.import_module("benchmarks.paper.paper_classifiers"), "teach_one", teach_one)
    scripts["paper_worker"].teach(common(scripts, work), "clips10_slowonly50")
    assert entered == ["slowonly50", "x3d_s", "slowonly50"]


def test_places_that_share_a_bank_have_it_taught_once(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    places = scripts["paper_places"].SPECS
    shared = [places["reels10"], places["reels10_cost"]]
    tasks = scripts["paper_runs"].plan(common(scripts, tmp_path), shared)
    assert [name for name in tasks if name.startswith("teach")] == ["teach bank10"]
    assert all("teach bank10" in tasks[f"measure {one}"].needs for one in ("reels10/table1", "reels10_cost/figureI"))


def test_a_head_learns_from_features_that_are_kept(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network below it stays as it is, and what was done is found again."""
    reels = {"counts": {"train": 12, "dev": 4}, "num_classes": 2, "recipe": {"size": 48}}
    bank: Any = so.make_reels("procedural", tmp_path / "bank", **reels)
    heads = importlib.import_module("benchmarks.paper.paper_heads")
    kind = importlib.import_module("benchmarks.paper.paper_classifiers").Kind(
        "timm:test_resnet", input_size=32, options={"head": "frameexit"}
    )
    monkeypatch.setattr(heads, "BATCH", 4)
    told = heads.train_head(bank.path, kind, None, tmp_path / "head", epochs=12, lr=1e-2)
    found = so.create_classifier(tmp_path / "head")
    assert (found.pooling, found.fingerprint()) == ("max", told["fingerprint"])
    first = next(iter(bank.split("dev")))
    kept = load_file(tmp_path / "head-features.safetensors")
    frames = torch.from_numpy(first.frames()).movedim(-1, -3)[:, None]
    with torch.no_grad():
        seen = found.net.backbone(found.preprocessing(frames).flatten(0, 1))
    torch.testing.assert_close(seen, kept["dev"][0], rtol=1e-4, atol=1e-4)
    assert heads.train_head(bank.path, kind, None, tmp_path / "head", epochs=12) == told


def test_processes_do_jobs_and_tell_what_failed(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = scripts["paper_runs"]
    tasks = [runs.Task("bank", {"do": "reels", "bank": "bank10"}), runs.Task("next", {"do": "resnet50"}, ("bank",))]
    schedule = runs.Schedule({task.name: task for task in tasks}, 600, 5)
    runs.work(schedule, common(scripts, tmp_path), 1, 0)
    assert schedule.tasks["bank"].state == "failed"
    assert "pictures" in schedule.tasks["bank"].why, (tmp_path / "logs" / "worker-0.log").read_text()
    assert schedule.tasks["next"].state == "left out"
    assert "bank failed" in capsys.readouterr().out


# ---- differences paired by video


@pytest.mark.parametrize("several", [False, True])
def test_differences_to_uniform_are_those_of_evaluate(
    scripts: dict[str, ModuleType], bank: Bank, labelled_twice: Bank, tmp_path: Path, several: bool
) -> None:
    used = labelled_twice if several else bank
    (one,) = reproduce("table1", {"any": used.path}, out=tmp_path, seeds=0, device="cpu")
    found = scripts["paper_contrasts"].write_contrasts(one.folder, used.path)
    by_name = {told["name"]: told for told in found}
    rows = {row["row"]: row for row in one.result["rows"]}
    for who, row in (("pi_o", "optimal"), ("pi_s", "semi-optimal")):
        told = by_name[f"{who} - uniform"]
        assert told["metric"] == ("mAP" if several else "top1")
        assert told["difference"] == pytest.approx(rows[row]["versus_uniform"], abs=2e-3)
        assert told["ci95"] == pytest.approx(rows[row]["versus_uniform_ci95"], abs=0.05)
        assert told["videos"] == 24
    ours, best, half = (
        by_name[name]["difference"] for name in ("pi_s - uniform", "pi_o - uniform", "pi_s - half way to pi_o")
    )
    assert best > 5, "there is something to be gained"
    assert half == pytest.approx(ours - best / 2, abs=2e-3)
    low, high = by_name["pi_o - pi_s"]["ci95"]
    assert low <= by_name["pi_o - pi_s"]["difference"] <= high


def test_the_small_file_holds_tables_and_no_videos(scripts: dict[str, ModuleType], bank: Bank, tmp_path: Path) -> None:
    reproduce(["table1", "table2"], {"any": bank.path}, out=tmp_path, seeds=0, device="cpu", bootstrap=20)
    contrasts = scripts["paper_contrasts"]
    place = tmp_path / "any" / "by-hand"
    contrasts.write_contrasts(place / "table1", bank.path)
    (place / "table5").mkdir()
    (place / "table5" / "run.json").write_text("{}")  # begun, not finished
    told = contrasts.collected(place, {"name": "x"})
    assert list(told["experiments"]) == ["table1", "table2"]
    assert [one["name"] for one in told["experiments"]["table1"]["contrasts"]][:1] == ["pi_o - uniform"]
    text = json.dumps(told)
    assert str(tmp_path) not in text
    assert str(bank.path) not in text
    assert "v008" not in text, "a video"
    assert contrasts.collected(tmp_path / "nowhere", {}) is None


# ---- golf


def test_chance_is_what_all_draws_give(scripts: dict[str, ModuleType]) -> None:
    golf = scripts["golf_events"]
    rng = np.random.default_rng(0)
    near = rng.random((8, 7)) < 0.3
    for wanted in (1, 3, 7, 9):
        draws = list(combinations(range(7), min(wanted, 7)))
        slow = np.mean([near[:, list(draw)].any(1) for draw in draws], axis=0)
        assert golf.chance_of(near, wanted) == pytest.approx(slow)


def test_a_moment_is_hit_if_its_nearest_frame_is_chosen(scripts: dict[str, ModuleType]) -> None:
    golf = scripts["golf_events"]
    rng = np.random.default_rng(1)
    frames = np.arange(0, 160, 10)
    moments = rng.integers(0, 150, 8) + 0.25  # never half way
    near = golf.within(frames.tolist(), moments.tolist())
    assert near.argmax(1).tolist() == [int(np.abs(frames - moment).argmin()) for moment in moments]
    assert (near.sum(1) == 1).all()
    hits = golf.hit_shares([near], [[int(near[0].argmax()), -1]])
    assert hits[0].tolist() == [bool((near[event] & near[0]).any()) for event in range(8)]


def test_golf_on_a_bank(scripts: dict[str, ModuleType], bank: Bank, tmp_path: Path) -> None:
    golf = scripts["golf_events"]
    rng = np.random.default_rng(2)
    events = {
        item.id: sorted(rng.integers(0, 8 * int(bank[place].frame_indices[-1]), 10).tolist())
        for place, item in enumerate(bank.items)
    }
    path = tmp_path / "events.json"
    path.write_text(json.dumps({"native_frames_a_frame": 8, "events": events}))
    told = golf.measure(bank.path, bank.teacher().name, path, {}, split="dev", num_candidates=12)
    assert told["videos"] == 24
    rows = {(row["policy"], row["num_frames"]): row for row in told["rows"]}
    part = so.Bank(bank.path).split("dev")
    evaluation = so.evaluate(bank.path, ["uniform"], pairs=[(4, 12)], split="dev", bootstrap=0, device="cpu")
    slow = []
    for place, (item, slots) in enumerate(zip(part.items, evaluation.chosen("uniform", 4), strict=True)):
        frames = part[place].frame_indices * 8
        tolerance = np.diff(frames).mean() / 2
        chosen = frames[slots]
        slow.append(np.mean([np.abs(chosen - moment).min() <= tolerance for moment in events[item.id][1:-1]]))
    assert rows["uniform", 4]["hit"] == pytest.approx(np.mean(slow), abs=1e-4)
    low, high = rows["uniform", 4]["ci95"]
    assert low <= rows["uniform", 4]["hit"] <= high
    for row in told["rows"]:
        assert row["above_chance"] == pytest.approx(row["hit"] - row["by_chance"], abs=2e-4)
    assert rows["random", 2]["by_chance"] < rows["random", 8]["by_chance"]
    assert np.mean(rows["optimal", 6]["by_event"]) == pytest.approx(rows["optimal", 6]["hit"], abs=1e-3)


def test_where_all_candidates_are_taken_nothing_is_compared(scripts: dict[str, ModuleType]) -> None:
    rows = [
        {"row": name, "num_frames": 6, "num_candidates": count}
        for name in ("sosampler", "uniform")
        for count in (6, 10)
    ]
    contrasts = scripts["paper_contrasts"]
    assert contrasts._pairs({"rows": rows}, contrasts.OF_EXPERIMENT["table7"][0]) == [(6, 10)]
