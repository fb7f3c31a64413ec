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
