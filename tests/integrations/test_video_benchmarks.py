"""Frames of rows as lmms-eval and VLMEvalKit take them, by stand-ins of how both call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.inference.rows import SELECTION_COLUMNS, open_rows, write_rows
from sosampler.integrations.video_benchmarks import ChosenFrames
from sosampler.video.synthetic import numbered_video, read_number

NUMBERS = [7, 22]  # of 30 frames, uniform


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    (folder / "b").mkdir()
    for name in ("one.mp4", "two.mp4", "b/two.mp4"):
        (folder / name).write_bytes(numbered_video(num_frames=30))
    return folder


def rows_of(videos: Path, *names: str, num_frames: int = 2) -> list[dict[str, Any]]:
    return [so.select(videos / name, num_frames, policy="uniform", decode=False).to_dict() for name in names]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if not path.suffix:
        with open_rows(path, "selections", {}) as parts:
            for row in rows:
                parts.add(row)
            parts.finish([])
    else:
        write_rows(path, rows, SELECTION_COLUMNS)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows"])
def test_every_kind_of_rows(videos: Path, tmp_path: Path, name: str) -> None:
    if not name.endswith(("jsonl", "csv")):
        pytest.importorskip("pyarrow")
    chosen = ChosenFrames(write(tmp_path / name, rows_of(videos, "one.mp4", "two.mp4")))
    assert len(chosen) == 2
    for video in (videos / "one.mp4", str(videos / "one.mp4"), "one.mp4", "one", "/elsewhere/one.mp4"):
        assert chosen.frame_indices(video) == NUMBERS
        assert [read_number(np.asarray(image)) for image in chosen.images(video)] == NUMBERS


def called_by_lmms_eval(function: Callable[..., list[Any]], doc: dict[str, Any], kwargs: dict[str, Any] | None) -> Any:
    """As `ConfigurableTask.doc_to_visual` of lmms-eval 0.7 calls it."""
    if kwargs is not None and len(inspect.signature(function).parameters) == 2:
        return function(doc, kwargs)
    return function(doc)


def test_lmms_eval(videos: Path, tmp_path: Path) -> None:
    chosen = ChosenFrames(write(tmp_path / "rows.jsonl", rows_of(videos, "one.mp4")), size=64)

    def plain(doc: dict[str, Any]) -> list[Any]:
        return [str(videos / f"{doc['videoID']}.mp4")]

    image = Image.new("RGB", (4, 4))

    def with_kwargs(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any]) -> list[Any]:
        assert lmms_eval_specific_kwargs == {"pre_prompt": ""}
        return [image, *plain(doc)]

    doc, kwargs = {"videoID": "one"}, {"pre_prompt": ""}
    images = called_by_lmms_eval(chosen.doc_to_visual(plain), doc, kwargs)
    assert [(type(each), min(each.size)) for each in images] == [(Image.Image, 64)] * 2
    images = called_by_lmms_eval(chosen.doc_to_visual(with_kwargs), doc, kwargs)
    assert images[0] is image
    assert len(images) == 3
    with pytest.raises(so.InvalidArgument, match=r"two.mp4: has no row in .*rows.jsonl; run `sosampler select` on it"):
        called_by_lmms_eval(chosen.doc_to_visual(plain), {"videoID": "two"}, kwargs)


def sampled_by_vlmevalkit(frame_root: Path, video: str, nframe: int) -> list[Path] | None:
    """As `VideoBaseDataset.save_video_frames` of VLMEvalKit finds frames; None: it decodes the video."""
    paths = [frame_root / video / f"frame-{number}-of-{nframe}.jpg" for number in range(1, nframe + 1)]
    return paths if all(path.exists() for path in paths) else None


def test_vlmevalkit(videos: Path, tmp_path: Path) -> None:
    chosen = ChosenFrames(write(tmp_path / "rows.jsonl", rows_of(videos, "one.mp4", "two.mp4")))
    root = tmp_path / "LMUData" / "images" / "Video-MME"
    assert sampled_by_vlmevalkit(root, "one", 2) is None
    written = chosen.write_for_vlmevalkit(root, num_frames=2)
    assert len(written) == 4
    for name in ("one", "two"):
        paths = sampled_by_vlmevalkit(root, name, 2)
        assert paths is not None
        assert [read_number(np.asarray(Image.open(path))) for path in paths] == NUMBERS
    assert sampled_by_vlmevalkit(root, "one", 3) is None
    with pytest.raises(so.InvalidArgument, match=r"one: has 2 frames in .*, but num_frames=3; select with -n 3"):
        chosen.write_for_vlmevalkit(root, num_frames=3)


def test_bad_rows(videos: Path, tmp_path: Path) -> None:
    both = write(tmp_path / "rows.jsonl", rows_of(videos, "two.mp4", "b/two.mp4"))
    assert ChosenFrames(both).frame_indices(videos / "two.mp4") == NUMBERS
    with pytest.raises(so.InvalidArgument, match=r"two: 2 videos of .* have this name"):
        ChosenFrames(both).images("two")
    with pytest.raises(so.InvalidArgument, match="no such file"):
        ChosenFrames(tmp_path / "missing.jsonl")
    (tmp_path / "other.jsonl").write_text(json.dumps({"video": "a"}))
    (tmp_path / "other.csv").write_text("video,label\na,b\n")
    for name in ("other.jsonl", "other.csv"):
        with pytest.raises(so.InvalidArgument, match="has rows without video or frame_indices"):
            ChosenFrames(tmp_path / name)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(so.InvalidArgument, match="cannot be read"):
        ChosenFrames(tmp_path / "broken.jsonl")


TASK = """
dataset_path: json
dataset_kwargs:
  data_files: docs.jsonl
task: chosen
test_split: train
output_type: generate_until
doc_to_visual: !function visuals.doc_to_visual
doc_to_text: question
doc_to_target: answer
metric_list:
  - metric: exact_match
"""
VISUALS = """
from sosampler.integrations.video_benchmarks import ChosenFrames

def by_path(doc):
    return [doc["path"]]

doc_to_visual = ChosenFrames({rows!r}).doc_to_visual(by_path)
"""


def test_a_task_of_lmms_eval_itself(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the task's YAML to the messages that every model gets; skipped where lmms-eval is not installed."""
    task_module = pytest.importorskip("lmms_eval.api.task")
    utils = pytest.importorskip("lmms_eval.utils")
    pytest.importorskip("lmms_eval.api.metrics")  # registers them
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    rows = write(tmp_path / "rows.jsonl", rows_of(videos, "one.mp4"))
    doc = {"path": str(videos / "one.mp4"), "question": "What number?", "answer": "7"}
    (tmp_path / "docs.jsonl").write_text(json.dumps(doc) + "\n")
    (tmp_path / "visuals.py").write_text(VISUALS.format(rows=str(rows)))
    (tmp_path / "chosen.yaml").write_text(TASK)
    config = utils.load_yaml_config(str(tmp_path / "chosen.yaml"))
    task = task_module.ConfigurableMessagesTask(config=config)
    (message,) = task.doc_to_messages(next(iter(task.test_docs())))
    images = [part["url"] for part in message["content"] if part["type"] == "image"]
    assert [read_number(np.asarray(image)) for image in images] == NUMBERS
    assert message["content"][-1] == {"type": "text", "text": "What number?"}
