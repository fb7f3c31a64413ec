"""The benchmark on streams of real clips, here of drawn ones, and the examples in scripts of benchmarks/accuracy."""

from __future__ import annotations

import csv
import doctest
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sosampler.evaluation.result import Cell
from sosampler.video.synthetic import encode_video


@pytest.mark.parametrize("script", ["streams", "systems_trials", "labelling"])
def test_examples_of_scripts(script: str) -> None:
    result = doctest.testmod(importlib.import_module(f"benchmarks.accuracy.{script}"))
    assert result.attempted
    assert not result.failed


def test_streams_of_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group with clips in two splits goes to that with most of them, and no stream of train shows a test clip."""
    clips = tmp_path / "clips"
    clips.mkdir()
    rows = [("path", "label", "group", "split", "set")]
    for label, value in (("red", 200), ("blue", 90), ("", 20)):
        for split, groups in (("train", 3), ("dev", 2), ("test", 1)):
            for number in range(groups):
                name = f"{label or 'none'}-{split}-{number}"
                frame = np.full((48, 64, 3), value, dtype=np.uint8)
                encode_video([frame] * 14, clips / f"{name}.mp4", fps=10)
                rows.append((f"{name}.mp4", label, name, split, "drawn"))
    for number, split in enumerate(("test", "train", "train")):  # one group, in two splits
        encode_video([np.full((48, 64, 3), 150, dtype=np.uint8)] * 14, clips / f"torn-{number}.mp4", fps=10)
        rows.append((f"torn-{number}.mp4", "red", "torn", split, "drawn"))
    with (clips / "manifest.csv").open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)
    script, work, out = importlib.import_module("benchmarks.accuracy.streams"), tmp_path / "work", tmp_path / "out.json"
    options = ["--weights", "none", "--work", str(work), "--out", str(out), "--workers", "1"]
    options += ["--counts", "2", "1", "1", "--long-count", "0"]
    for stage in ("clips", "streams"):
        monkeypatch.setattr(sys, "argv", ["streams.py", str(clips), *options, "--stage", stage])
        script.main()
    result = json.loads(out.read_text())
    assert result["clips"] == {"train": 9, "dev": 4, "test": 2}
    assert (result["num_classes"], result["background"], result["moved_to_the_split_of_their_group"]) == (2, 6, 1)
    with (work / "streams" / "manifest.csv").open(newline="") as lines:
        streams = {row["id"]: row["split"] for row in csv.DictReader(lines)}
    assert sorted(streams.values()) == ["dev", "test", "train", "train"]
    splits = {Path(path).stem: "train" if group == "torn" else split for path, _, group, split, _ in rows[1:]}
    for line in (work / "streams" / "segments.jsonl").read_text().splitlines():
        record = json.loads(line)
        shown = {Path(segment["clip"]).stem for segment in record["segments"]}
        assert {splits[clip] for clip in shown} == {streams[record["id"]]}


def _line(policy: str, count: int | None, value: float, **more: object) -> dict[str, object]:
    line = {"policy": policy, "num_frames": count, "top1": value, "gmacs": 1.97 * (count or 2.5), "seeds": 3}
    line |= {"num_candidates": 10, "frames_classified": float(count or 2.5), "dial": None, "ci95": {"top1": [0.1, 0.9]}}
    return {**line, **more}


def _result() -> dict[str, object]:
    own = [_line("default", count, 0.4 + count / 100, top1_sd=0.01) for count in (1, 2, 3, 6)]
    auto = _line("default+auto@0.01", None, 0.5, dial="0.01")
    table = [
        *(_line("uniform", count, 0.2 + count / 100) for count in (1, 2, 3, 6)),
        _line("all", 10, 0.3),
        *own,
        auto,
        _line("kts", 6, 0.22),
        *(_line("paper", count, 0.21, seeds=1) for count in (1, 2, 3, 6)),
        _line("class-frames", None, 0.56),
        *(_line("semi-optimal", count, 0.7) for count in (1, 2, 3, 6)),
    ]
    at_budget = [
        {**own[1], "dev": 0.45, "dev_gmacs": 4.0},
        {**auto, "policy": "default+auto", "dev": 0.44, "dev_gmacs": 5.0},
        {**_line("kts", 6, 0.22), "dev": 0.9, "dev_gmacs": 12.0},
    ]
    trial = {"frames": 0.6, "clips": 0.7, "sizes": {"train": 5, "dev": 4, "test": 3}}
    return {
        "table": table,
        "at_budget": at_budget,
        "budget_gmacs": 12.0,
        "num_classes": 34,
        "streams": {"train": 5, "dev": 7, "test": 9},
        "classifiers": {"head": trial, "best": {**trial, "test": {"frames": 0.5, "clips": 0.55}}},
        "classifier": "best",
    }


def own_line(result: dict[str, object], count: int) -> dict[str, object]:
    lines: list[dict[str, object]] = result["table"]  # type: ignore[assignment]
    return next(line for line in lines if (line["policy"], line["num_frames"]) == ("default", count))


def test_page_of_streams() -> None:
    """N is chosen on dev among the rows of the own recipe, and the figures of the page follow the file."""
    tables = importlib.import_module("benchmarks.tables.streams_table")
    assert not doctest.testmod(tables).failed
    result = _result()
    assert tables.best(result)["num_frames"] == 2  # not what is best on test, and not another method
    # From uniform frames at N=6 (0.26) to the class frames (0.56).
    assert tables.of_the_way(result, 0.41) == pytest.approx(0.5)
    text = "\n".join(tables.sections(result))
    assert "with 2 frames (chosen on dev, 3.9 GMACs) has 42.0 ± 1.0 %" in text
    assert "53 % of the way is covered" in text
    assert "| **SOSampler+** | N=2 | 2 | 3.9 | 45.0 | 42.0 ± 1.0 | 10.0 to 90.0 | 53 % | 3 |" in text
    # Another training of the classifier in the table of trials than in the figures
    recipes = {**_result(), "half_precision": "Half.", "dev_trials": [{"dev": 0.4}, {"dev": 0.5}, {"dev": 0.3}]}
    recipes["classifiers"] = {"best": {"frames": 0.61, "clips": 0.72}, "head": {"frames": 0.41, "clips": 0.52}}
    text = "\n".join(tables.sections(result, recipes))
    assert "`best` has 60.0 and 70.0 %" in text
    assert "| **best** | 61.0 | 72.0 |" in text
    # 0.41 - 0.21 at N=1, and more at others
    assert "found by 3 trials" in text
    assert "is the first recipe: 40.0 %, the one that was taken has 50.0 %" in text
    assert "the other two recipes are at least 20.0 points behind" in text
    assert "| SOSampler (paper) | 21.0 | 21.0 | 21.0 | 21.0 | 1 |" in text
    assert "names 50.0 % of single frames and 55.0 % of clips right" in text
    assert tables.cells_of(result, "uniform", (1, 6, 10)) == ["21.0", "26.0", "30.0"]
    assert tables.cells_of(result, "default", (1, 10)) == ["41.0", ""]
    assert not tables.seen_of_test(result)
    result["first_answer_rule"] = {"kept": ["fused", "weighted", "weighted"], "line": own_line(result, 3)}
    result["at_budget"].append({**_line("default+fused", 1, 0.35), "dev": 0.3, "dev_gmacs": 2.0})
    assert not tables.seen_of_test(result)  # no probe
    result["table"].append(_line("default+probed", 2, 0.42))
    _, text = tables.seen_of_test(result)
    assert "kept `fused` for 1 and `weighted` for 2 of 3 seeds, 43.0 ± 1.0 % with 3 frames." in text
    # From 0.26 to 0.56, 0.35 is at 9/30.
    assert "Without it `fused` has 35.0 % with 1 frame, chosen on dev, 30 % of the way." in text
    assert "in 42.0 % (35.0 % without a layer of the sampler's own on the classifier's features)." in tables.headline(
        result
    )
    assert text in "\n".join(tables.sections(result))
    result["at_budget"][1]["dev"] = 0.46
    assert tables.best(result)["policy"] == "default+auto"
    assert "2.5 frames on average" in tables.headline(result)


def test_page_of_streams_with_what_may_be_missing() -> None:
    """What is not measured is named; what is measured stands there with its intervals, by class and from the file."""
    tables = importlib.import_module("benchmarks.tables.streams_table")
    result = _result()
    text = "\n".join(tables.sections(result))
    assert "LiteEval" in text.split("Not measured on streams: ")[1]
    assert "the time from a long file to its label" in text
    assert "## By class" not in text
    result["test"] = {
        "by_class": {
            "golf": {"uniform@6": 0.5, "default@2": 0.4, "class-frames@None": 0.6},
            "walk": {"uniform@6": 0.1, "default@2": 0.7, "class-frames@None": 0.8},
        },
        "rows": [
            {"policy": "default#0", "num_frames": 2, "ece": 0.04},
            {"policy": "default#1", "num_frames": 2, "ece": 0.06},
            {"policy": "default#0+mean", "num_frames": 6, "ece": 0.2},
            {"policy": "default#0+auto@0.01", "num_frames": None, "ece": 0.9},
            {"policy": "kts", "num_frames": 2, "ece": 0.9},
        ],
    }
    rows = [
        {"variant": "uniform 8", "gmacs": 15.7, "top1": 0.2, "ci95": [0.15, 0.25], "above_reference": 0.0},
        {"variant": "keyframes 32, chosen 4", "gmacs": 11.0, "top1": 0.3, "ci95": [0.2, 0.4], "above_reference": 0.1},
    ]
    common = {"reference": "uniform 8", "above_reference_ci95": [0.05, 0.15], "times_as_fast": 1.5}
    files = {"rows": [{**row, **common} for row in rows], "minutes": [3.0, 5.0], "threads": 2, "videos": 9}
    files["machine"] = {"cores": 2, "cpu": "some"}
    chosen = {"liteeval": 1, "marl": 0}
    trials = {
        "liteeval#0": {"settings": {}},
        "liteeval#1": {"settings": {"light": "sosampler"}},
        "marl#0": {"settings": {}},
    }
    trials = {name: {"dev": 0.4, **trial} for name, trial in trials.items()}
    systems = {"table": [{"policy": "liteeval@0.5"}], "chosen": chosen, "trials": trials} | _systems()
    assert tables.with_own_network(systems) == ["LiteEval"]
    # Only what is better than the own recipe at the N of dev, which has 42.0
    measured = {**systems, "budget_gmacs": 12.0, "table": []}
    page = tables._systems({**measured, "at_budget": _at_budget(0.43)}, None, result)
    assert "Ahead of SOSampler+ (42.0 ± 1.0 % at 3.9 GMACs) are LiteEval (43.0 % at 11.8)." in "\n".join(page)
    page = tables._systems({**measured, "at_budget": _at_budget(0.42)}, None, result)
    assert "Ahead of" not in "\n".join(page)
    assert "None of them is ahead of SOSampler+ at any cost" in "\n".join(page)
    # One frame of the own recipe costs 1.97 GMACs and has 41.0, two cost twice as much and have 42.0.
    for cost, value, ahead in ((1.97, 0.41, 0), (1.97, 0.42, 1), (3.93, 0.415, 1), (3.94, 0.42, 0), (1.9, 0.1, 1)):
        line = {**_line("liteeval@0.5", None, value), "gmacs": cost}
        assert len(tables.ahead_at_their_cost(result, {"table": [line, _line("uniform", 6, 0.9)]})) == ahead
    line = {**_line("marl, uniform frames@3", None, 0.9), "gmacs": 3.0}
    page = tables._systems({**measured, "table": [line], "at_budget": _at_budget(0.42)}, None, result)
    assert "None of them" not in "\n".join(page)
    text = "\n".join(tables.sections(result, None, systems, files))
    assert "LiteEval" not in text.split("Not measured on streams: ")[1].split("\n")[0]
    assert "the time from a long file to its label" not in text
    row = {"top1": {"1": 0.5, "6": 0.75}}
    both = {"videos": {kind: {"train": 3, "dev": 2} for kind in ("reels", "streams")}, "epochs": 4}
    both |= {
        "reels": {"uniform": row, "default": {"top1": {"1": 0.9, "6": 0.8}}},
        "streams": {"uniform": row, "default": row},
    }
    known = {**_line("class-frames", None, 0.5), "num_candidates": 32}
    result["other_banks"] = {"long32": {"table": [_line("uniform", 2, 0.1), _line("uniform", 16, 0.2), known]}}
    long = "\n".join(tables.sections(result)).split("## Long streams with 32 candidates")[1]
    assert "|  | N=2 | N=16 |\n|---|---|---|\n| uniform frames | 10.0 | 20.0 |" in long
    assert "The mean over the frames that show the class: 50.0 %" in long
    assert "| default | 90.0 | 80.0 | 50.0 | 75.0 |" in "\n".join(tables.sections(result, both=both))
    del both["streams"]
    reels_alone = "\n".join(tables.sections(result, both=both))
    assert "on 2 dev reels (3 to train), one seed" in reels_alone
    assert "| default | 90.0 | 80.0 |" in reels_alone
    # The class that gains most comes first.
    walk, golf = text.index("| walk | 10 | 70 | +60 | 80 |"), text.index("| golf | 50 | 40 | -10 | 60 |")
    assert walk < golf
    assert "1 of 2 classes lose." in text
    assert "| **SOSampler+** | 5.0 |  |\n| SOSampler+, mean over frames |  | 20.0 |" in text
    assert "| keyframes 32, chosen 4 | 11 | 30.0 (20.0 to 40.0) | +10.0 (+5.0 to +15.0) | 1.50 |" in text
    assert "| uniform 8 | 15.7 | 20.0 (15.0 to 25.0) |  | 1.50 |" in text


def _at_budget(value: float) -> list[dict[str, object]]:
    more = {"dev": 0.4, "dev_gmacs": 11.8, "frames_decoded": 10}
    return [_line(name, 6, value, **more) for name in ("liteeval", "uniform")]


def _systems() -> dict[str, object]:
    return {
        "videos": {"dev": 7, "test": 9},
        "num_classes": 2,
        "asked": {},
        "trials_each": 1,
        "seeds": [0],
        "device": "cpu",
        "metric": "top1",
    }


def test_shares_of_each_class() -> None:
    """Of two seeds the mean, class by class; other policies stay out, and so do classes without a video."""
    script = importlib.import_module("benchmarks.accuracy.streams")
    labels = [0, 0, 2]
    rows = [SimpleNamespace(item=SimpleNamespace(labels=[label])) for label in labels]
    right = {"default#0": [1, 0, 1], "default#1": [1, 1, 0], "uniform": [0, 0, 1], "kts": [1, 1, 1]}
    predictions = {Cell(name, 2, 10): SimpleNamespace(right=np.array(hits, bool)) for name, hits in right.items()}
    bank = SimpleNamespace(rows=rows, classes=["golf", "run", "walk"])
    result = SimpleNamespace(per_video=SimpleNamespace(bank=bank, positions=(0, 1, 2), predictions=predictions))
    assert script.by_class(result, ["uniform", "default#0", "default#1"]) == {
        "golf": {"default@2": 0.75, "uniform@2": 0.0},
        "walk": {"default@2": 0.5, "uniform@2": 1.0},
    }
