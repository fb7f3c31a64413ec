"""The benchmark on streams of real clips, here of drawn ones, and the examples in scripts of benchmarks/accuracy."""

from __future__ import annotations

import csv
import doctest
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

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
    own = [_line("few-clips", count, 0.4 + count / 100, top1_sd=0.01) for count in (1, 2, 3, 6)]
    auto = _line("few-clips+auto@0.01", None, 0.5, dial="0.01")
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
        {**auto, "policy": "few-clips+auto", "dev": 0.44, "dev_gmacs": 5.0},
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
    assert "| **SOSampler+ (few clips)** | N=2 | 2 | 3.9 | 45.0 | 42.0 ± 1.0 | 10.0 to 90.0 | 53 % | 3 |" in text
    assert "Trained with fewer than three seeds: SOSampler (paper) 1." in text
    assert "names 50.0 % of single frames and 55.0 % of clips right" in text
    assert tables.cells_of(result, "uniform", (1, 6, 10)) == ["21.0", "26.0", "30.0"]
    assert tables.cells_of(result, "few-clips", (1, 10)) == ["41.0", ""]
    result["at_budget"][1]["dev"] = 0.46
    assert tables.best(result)["policy"] == "few-clips+auto"
    assert "2.5 frames on average" in tables.headline(result)
