"""benchmarks/accuracy/systems.py on a bank of a few drawn videos: every stage, an interruption, and its tables."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import mobilenet_v2

import sosampler as so
from sosampler.baselines.base import light_network

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Small enough for a blink; the second trial of the sampler cannot be trained.
SMALL_TRIALS = {
    "sosampler": (
        {"input_size": 32, "num_candidates": 4, "batch_size": 8},
        {"input_size": 32, "num_candidates": 4, "batch_size": 8, "lr": -1.0},
    ),
    "frameexit": ({"neck_width": 8, "gate_widths": [4, 4]}, {"neck_width": 8, "gate_widths": [4, 4], "lr": 0.01}),
    "ar-net": ({"hidden": 8}, {"hidden": 8, "alpha": 0.5}),
    "videoiq": ({"policy_width": 8}, {"policy_width": 8, "lr": 0.01}),
    "adafocus": (
        {"patch": 32, "grid": 2, "hidden": 8, "policy_width": 8, "policy_channels": 4},
        {"patch": 48, "grid": 2, "hidden": 8, "policy_width": 8, "policy_channels": 4},
    ),
    "adafuse": ({"gate_quota": 512}, {"gate_quota": 512, "efficiency": 0.5}),
}


@pytest.fixture(scope="module")
def scripts() -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three banks, a classifier and the weights that samplers start from."""
    folder = tmp_path_factory.mktemp("data")
    small = {"size": 48, "num_candidates": 10}
    bank = so.make_reels(
        "procedural", folder / "bank", recipe=small, counts={"train": 8, "dev": 4, "test": 6}, num_classes=3
    )
    so.make_reels(
        "procedural",
        folder / "long",
        recipe=small | {"num_candidates": 12},
        counts={"train": 4, "test": 3},
        num_classes=3,
    )
    so.make_reels("procedural", folder / "tune", recipe=small, counts={"train": 6, "dev": 5}, num_classes=3, seed=1)
    assert isinstance(bank, so.Bank)
    so.save_classifier(
        so.create_classifier("timm:resnet10t", class_names=bank.classes, input_size=64), folder / "classifier"
    )
    save_file(mobilenet_v2().state_dict(), folder / "mobilenet.safetensors")
    return folder


class Measurement:
    """Runs of the benchmark in this process; `events` are what was trained and measured, in order."""

    def __init__(self, folder: Path, data: Path, scripts: Callable[[str], ModuleType]) -> None:
        self.folder, self.data = folder, data
        self.systems, self.train_many = scripts("accuracy.systems"), scripts("accuracy.train_many")
        self.events: list[str] = []

    @property
    def out(self) -> Path:
        return self.folder / "systems.json"

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found

    def run(self, *more: str, interrupted_at: str | None = None) -> None:
        """One call; it is interrupted at the first event of this name."""
        bench = self

        def event(name: str) -> None:
            if name == interrupted_at:
                raise KeyboardInterrupt
            self.events.append(name)

        class Here:
            def __init__(self, parallel: int, logs: Path) -> None: ...

            def __enter__(self) -> Here:
                return self

            def __exit__(self, *error: object) -> None: ...

            def train(self, tasks: dict[str, Any], done: Callable[[str, Any], None]) -> dict[str, Any]:
                found = {}
                for name, task in tasks.items():
                    event(f"train {name}")
                    found[name] = bench.train_many.run(task)
                    done(name, found[name])
                return found

        real = self.systems.measured

        def measured(arguments: Any, policies: dict[str, str], split: str, **options: Any) -> Any:
            event(f"measure {split}")
            return real(arguments, policies, split, **options)

        given = ["tiny", self.data / "bank", "--classifier", self.data / "classifier", "--work", self.folder / "runs"]
        given += ["--sampler-weights", self.data / "mobilenet.safetensors", "--out", self.out, "--epochs", "1"]
        given += ["--trials", "2", "--curve", self.folder / "curve.svg"]
        if "--methods" not in more:
            given += ["--methods", "sosampler", "frameexit"]
        with pytest.MonkeyPatch.context() as patch:
            for name, trials in SMALL_TRIALS.items():
                patch.setitem(self.systems.TRIALS, name, trials)
            patch.setattr(self.systems, "PAIRS", ((1, 10), (2, 10), (6, 10)))
            patch.setattr(self.systems, "Trainers", Here)
            patch.setattr(self.systems, "measured", measured)
            patch.setattr(sys, "argv", ["systems.py", *map(str, given), *more])
            self.systems.main()


@pytest.fixture(scope="module")
def finished(data: Path, scripts: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """Interrupted twice, then brought to its end."""
    measurement = Measurement(tmp_path_factory.mktemp("measurement"), data, scripts)
    seeds = ["--seeds", "0", "1"]
    with pytest.raises(KeyboardInterrupt):
        measurement.run(*seeds, interrupted_at="train frameexit#1")
    with pytest.raises(KeyboardInterrupt):
        measurement.run(*seeds, interrupted_at="measure test")
    measurement.run(*seeds, "--longer", f"3/12={data / 'long'}")
    return measurement


@pytest.mark.slow
def test_nothing_is_done_twice_and_test_is_looked_at_last(finished: Measurement) -> None:
    assert finished.events == [
        *("train sosampler#0", "train sosampler#1", "train frameexit#0"),  # interrupted
        # What failed is tried again. The finals of seed 0 are the trials themselves.
        *("train sosampler#1", "train frameexit#1", "measure dev"),
        *("train sosampler#1", "train frameexit#1", "measure dev"),  # interrupted
        *("train sosampler#1", "train sosampler 3/12", "measure test", "measure test"),
    ]


@pytest.mark.slow
def test_the_best_trial_is_that_of_dev_within_the_budget(finished: Measurement) -> None:
    results = finished.results
    assert results["videos"] == {"train": 8, "dev": 4, "test": 6}
    assert results["trials"]["sosampler#1"]["dev"] is None
    assert "lr=-1.0" in results["trials"]["sosampler#1"]["failed"]
    assert results["chosen"]["sosampler"] == 0
    frameexit = [results["trials"][f"frameexit#{place}"] for place in (0, 1)]
    assert frameexit[results["chosen"]["frameexit"]]["dev"] == max(trial["dev"] for trial in frameexit)
    for trial in (results["trials"]["sosampler#0"], *frameexit):
        within = [point for point in trial["curve"] if point["gmacs"] <= results["budget_gmacs"]]
        assert trial["dev"] == max(point["top1"] for point in within)
    classifier = so.create_classifier(finished.data / "classifier")
    assert results["budget_gmacs"] == pytest.approx(classifier.gmacs(6), rel=1e-4)


@pytest.mark.slow
def test_all_policies_are_measured_with_all_seeds(finished: Measurement) -> None:
    results = finished.results
    policies = {line["policy"].partition("@")[0]: line["seeds"] for line in results["table"]}
    by_change = ("frame-difference", "difference-peaks", "motion-uniform")
    once = ("uniform", "random", "all", *by_change, "farthest-first", "dpp", "kts", "thumbnail", "optimal")
    assert {name: policies[name] for name in once} == dict.fromkeys(once, 1)
    twice = ("sosampler", "sosampler+aks", "sosampler+its", "sosampler+nms", "frameexit")
    assert {name: policies[name] for name in twice} == dict.fromkeys(twice, 2)
    dials = [line for line in results["table"] if line["policy"].startswith("frameexit@")]
    assert len(dials) > 3
    assert all(1 <= line["frames_classified"] <= 10 for line in dials)
    chosen = {line["policy"]: line for line in results["at_budget"]}
    assert set(twice) <= set(chosen)
    assert not {"optimal", "semi-optimal", "all"} & set(chosen)
    assert all(line["dev_gmacs"] <= results["budget_gmacs"] + 1e-9 for line in chosen.values())
    for suffix in (".svg", ".png"):
        assert (finished.folder / "curve").with_suffix(suffix).stat().st_size > 1000


@pytest.mark.slow
def test_longer_videos_are_chosen_from_by_both_samplers(finished: Measurement) -> None:
    rows = {row["policy"]: row for row in finished.results["longer"]["3/12"]["rows"]}
    assert {"sosampler, T=10", "sosampler, T=12", "uniform", "optimal"} <= set(rows)
    assert rows["sosampler, T=12"]["num_candidates"] == 12


@pytest.mark.slow
def test_the_tables_hold_the_figures(finished: Measurement, scripts: Callable[[str], ModuleType]) -> None:
    table = scripts("tables.systems_table")
    text = "\n".join([*table.sections(finished.results), *table.longer_sections(finished.results)])
    uniform = next(
        line for line in finished.results["table"] if line["policy"] == "uniform" and line["num_frames"] == 6
    )
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("| ")]
    at = next(number for number, row in enumerate(rows) if row[:3] == ["top-1, %", "N=1", "N=2"])
    six = rows[at].index("N=6")
    found = next(row for row in rows[at:] if row[0] == "uniform")
    assert found[six] == f"{100 * uniform['top1']:.1f}"
    best = next(line for line in finished.results["at_budget"] if line["policy"] == "sosampler")
    cell = f"{100 * best['top1']:.1f} ± {100 * best['top1_sd']:.1f}"
    assert any(row[0] == "**SOSampler+**" and row[1] == f"N={best['num_frames']}" and row[-1] == cell for row in rows)
    assert any(row[0] == "**SOSampler+**, trained with as many" for row in rows)
    assert any(row[0] == "FrameExit" and row[1] == best_dial(finished) for row in rows if len(row) == 6)


def best_dial(finished: Measurement) -> str:
    line = next(line for line in finished.results["at_budget"] if line["policy"] == "frameexit")
    return f"setting {line['dial']}"


@pytest.mark.slow
def test_another_bank_to_choose_on(
    data: Path, scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = Measurement(tmp_path, data, scripts)
    asked = []
    evaluate = so.evaluate
    monkeypatch.setattr(
        so, "evaluate", lambda bank, *given, **more: asked.append(bank) or evaluate(bank, *given, **more)
    )
    measurement.run("--methods", "frameexit", "--seeds", "0", "--tune-bank", str(data / "tune"))
    # Trials and finals are trained on different banks, so nothing is shared; whoever saw a dev is not judged on it.
    assert measurement.events == [
        *("train frameexit#0", "train frameexit#1", "measure dev"),
        *("train frameexit#0", "measure dev", "measure test"),
    ]
    assert [bank.name for bank in asked] == ["tune", "tune", "bank"]
    results = measurement.results
    trial = results["trials"][f"frameexit#{results['chosen']['frameexit']}"]
    assert results["dev"]["runs"] == {"frameexit#trial": trial["run"]}
    assert trial["run"] != results["test"]["runs"]["frameexit#0"]
    assert results["dev"]["num_videos"] == 5


@pytest.mark.slow
def test_systems_with_networks_of_their_own(data: Path, scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    networks = data / "networks"
    classes = so.Bank(data / "bank").classes
    so.save_classifier(so.create_classifier("timm:resnet10t", class_names=classes, input_size=48), networks / "r34")
    light_network(data / "mobilenet.safetensors", 32).save_pretrained(networks / "r18")
    any_precision = so.create_classifier("any_precision:resnet10t", class_names=classes, input_size=48)
    so.save_classifier(any_precision, networks / "any_precision")
    methods = ["ar-net", "videoiq", "adafocus", "adafuse"]
    measurement = Measurement(tmp_path, data, scripts)
    with pytest.raises(SystemExit, match=r"ar-net, videoiq need networks of their own; make them with networks\.py"):
        measurement.run("--methods", *methods)
    measurement.run("--methods", "adafuse", "--seeds", "0")
    earlier = measurement.results["test"]["rows"]
    begun = len(measurement.events)
    measurement.run("--methods", *methods, "--networks", str(networks), "--seeds", "0")
    assert measurement.results["test"]["rows"][: len(earlier)] == earlier  # measured once
    found = {line["policy"].partition("@")[0]: line for line in measurement.results["table"]}
    assert {*methods, *(f"{name}, uniform frames" for name in methods)} <= set(found)
    assert found["videoiq"]["other_gmacs"].keys() == {"bits"}
    assert found["adafuse"]["dial"] is None
    assert found["ar-net"]["dial"] is not None
    # Those that compute features of their own come before others of their kind, one at a time.
    trained = [event.removeprefix("train ") for event in measurement.events[begun:] if event.startswith("train ")]
    assert trained[:4] == ["ar-net#0", "videoiq#0", "adafocus#0", "adafocus#1"]
    assert not any(name.startswith("adafuse") for name in trained)


@pytest.mark.slow
def test_another_measurement_is_not_mixed_in(finished: Measurement) -> None:
    with pytest.raises(SystemExit, match="give another --out"):
        finished.run("--trial-epochs", "3")


def test_the_number_of_frames_is_chosen_on_dev_and_seeds_are_averaged(scripts: Callable[[str], ModuleType]) -> None:
    trials = scripts("accuracy.systems_trials")

    def row(policy: str, num_frames: int | None, top1: float, gmacs: float) -> dict[str, Any]:
        return {
            **{"policy": policy, "num_frames": num_frames, "num_candidates": 10, "top1": top1, "gmacs": gmacs},
            **{"confidence": 0.5, "fidelity": None, "recovered": None, "frames_classified": 2.0, "frames_decoded": 2.0},
            "ci95": {"top1": (top1 - 0.1, top1 + 0.2)},
        }

    # On dev N=2 is best for at most 6; on test N=4 would be. N=8 is too dear.
    dev = [row("a#0", 2, 0.8, 3.0), row("a#0", 4, 0.7, 5.0), row("a#0", 8, 0.9, 9.0), row("b#0@0.5", None, 0.5, 2.0)]
    test = [row("a#0", 2, 0.5, 3.0), row("a#1", 2, 0.7, 3.0), row("a#0", 4, 0.9, 5.0), row("b#0@0.5", None, 0.4, 2.5)]
    lines = trials.means(test, "top1")
    assert [(line["policy"], line["num_frames"], line["seeds"]) for line in lines] == [
        *(("a", 2, 2), ("a", 4, 1), ("b@0.5", None, 1)),
    ]
    assert lines[0]["top1"] == pytest.approx(0.6)
    assert lines[0]["top1_sd"] == pytest.approx(0.14142, abs=1e-5)
    assert lines[0]["ci95"]["top1"] == pytest.approx([0.5, 0.8])
    found = trials.at_budget(trials.means(dev, "top1"), lines, "top1", 6.0)
    assert [(line["policy"], line["num_frames"], line["dial"], line["top1"], line["dev"]) for line in found] == [
        ("a", 2, None, pytest.approx(0.6), 0.8),
        ("b", None, "0.5", 0.4, 0.5),
    ]
    # Of equal trials the cheaper one.
    same = [{"dev": 0.5, "at": {"gmacs": 3.0}}, {"dev": 0.5, "at": {"gmacs": 2.0}}, {"dev": None}]
    assert trials.best_trial(same) == 1
    over = [{"method": "x", "dev": None, "curve": [{"gmacs": cost}, {"gmacs": 9.0}]} for cost in (4.0, 3.0, 5.0)]
    assert trials.best_trial(over) == 1  # nearest to the budget
    with pytest.raises(SystemExit, match="no trial of x"):
        trials.best_trial([{"method": "x", "dev": None, "failed": "broken"}])


def test_training_for_more_candidates_keeps_the_frames_of_a_step(scripts: Callable[[str], ModuleType]) -> None:
    systems = scripts("accuracy.systems")
    ours = systems.longer_settings("sosampler", {"lr": 3e-4}, 8, 30)
    assert ours == {"lr": 3e-4, "num_candidates": 30, "batch_size": 32}
    other = systems.longer_settings("ocsampler", {"reinforce": {"reward": "label"}}, 32, 100)
    assert other["reinforce"] == {"reward": "label", "num_frames": 32}
    assert other["batch_size"] == 9
    assert other["lr"] == pytest.approx(0.005 * 9 / 64)  # SGD's goes with the batch


@pytest.mark.slow
def test_trainers_tell_failures_and_deaths(scripts: Callable[[str], ModuleType], tmp_path: Path) -> None:
    train_many = scripts("accuracy.train_many")
    refused = {"bank": str(tmp_path / "none"), "out": str(tmp_path / "run")}
    told = []
    with train_many.Trainers(1, tmp_path / "logs") as trainers:
        replies = trainers.train({"a": refused, "b": refused}, lambda name, reply: told.append(name))
        assert told == ["a", "b"]
        assert "none" in replies["a"]["failed"]
        with pytest.raises(SystemExit, match="c: its process died"):
            trainers.train({"c": {"out": "no bank at all"}})
    assert "TypeError" in (tmp_path / "logs" / "trainer-0.log").read_text()


# --- the banks of real clips ------------------------------------------------------------------------------------------


def test_rare_labels_are_left_out_and_scenes_stay_together(
    scripts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    lines = ["set,path,label,group"]
    lines += [f"a,{number}.mp4,{'run|rare' if number < 3 else 'run'},scene {number // 2}" for number in range(40)]
    lines += [f"a,{number}.mp4,jump,scene {number // 2}" for number in range(40, 80)]
    lines += ["a,80.mp4,rare,alone", "b,81.mp4,other,elsewhere"]
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    manifest = scripts("accuracy.realvid").manifest_of(tmp_path, "a")
    assert manifest.classes == ("jump", "run")
    assert manifest.multi_label
    assert len(manifest) == 80  # one had no other label
    splits: dict[str, set[str]] = {}
    for item in manifest.items:
        splits.setdefault(item.group, set()).add(item.split)
    assert all(len(found) == 1 for found in splits.values())
    sizes = [sum(item.split == split for item in manifest.items) for split in ("train", "dev", "test")]
    assert sizes == [32, 16, 32]


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_class_layer_is_that_of_a_peer(scripts: Callable[[str], ModuleType], multi_label: bool) -> None:
    from sklearn.linear_model import LogisticRegression

    realvid = scripts("accuracy.realvid")
    draw = np.random.default_rng(0)
    classes = draw.integers(0, 3, 30)
    features = draw.normal(size=(30, 4, 5)) + classes[:, None, None] * draw.normal(size=5)
    labels = np.eye(3)[classes]
    clips = realvid.Clips(torch.tensor(features, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32))
    weight, bias = realvid.fit_head(clips, 0.1, multi_label=multi_label)
    scale = float(clips.features.flatten(0, 1).std())
    flat, each = features.reshape(120, 5) / scale, np.repeat(classes, 4)
    scores = torch.tensor(features.reshape(120, 5), dtype=torch.float32) @ weight.T + bias
    if multi_label:  # the mean over classes takes a third of each loss
        peers = [LogisticRegression(C=1 / (0.3 * 120), tol=1e-8).fit(flat, each == name) for name in range(3)]
        expected = np.stack([peer.predict_proba(flat)[:, 1] for peer in peers], axis=1)
        found = scores.sigmoid()
    else:
        expected = LogisticRegression(C=1 / (0.1 * 120), tol=1e-8).fit(flat, each).predict_proba(flat)
        found = scores.softmax(1)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-4)


def test_only_what_half_precision_holds_is_halved(scripts: Callable[[str], ModuleType]) -> None:
    state = {"exact": torch.tensor([0.5, 3.0]), "not": torch.tensor([0.1]), "count": torch.tensor(3)}
    found = scripts("accuracy.realvid").halved(state)
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        **{"exact": torch.float16, "not": torch.float32, "count": torch.int64},
    }
    assert all(torch.equal(tensor.to(state[key].dtype), state[key]) for key, tensor in found.items())
