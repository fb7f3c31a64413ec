"""The steps that an engine sends to its workers give what `select` and `Pipeline` give. No engine is needed here."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import sosampler as so
from sosampler.errors import MissingDependency, VideoError
from sosampler.inference.decode import DecodeStep, attempt
from sosampler.inference.many import row_of
from sosampler.inference.options import SelectOptions
from sosampler.inference.pipeline import Pipeline
from sosampler.inference.select import select_with
from sosampler.integrations.ray.cluster import absolute
from sosampler.integrations.ray.rows import NetworkStep
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    SOSampler(backbone="timm:resnet10t", input_size=32).save_pretrained(folder / "sampler")
    made = so.create_classifier("timm:resnet10t", class_names=("diving", "football", "judo"), input_size=32)
    with torch.no_grad():  # a fresh last layer is small, and all answers would be nearly the same
        made.net.get_classifier().weight.mul_(40)
    so.save_classifier(made, folder / "classifier")
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of several sizes and lengths, some with fewer frames than are asked for, and one that is none."""
    root = tmp_path_factory.mktemp("videos")
    for number, frames in enumerate((3, 7, 20, 24)):
        numbered_video(root / f"{number}.mp4", num_frames=frames, width=128 + 32 * (number % 2))
    (root / "bad.mp4").write_bytes(b"not a video at all" * 40)
    return [str(video) for video in sorted(root.iterdir())]


def travelled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def selected_row(video: str, options: SelectOptions) -> dict[str, Any]:
    return without_timing(row_of(video, attempt(video, lambda: select_with(video, options))))


def without_timing(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "timing"}


def test_a_rule_needs_one_step(videos: list[str]) -> None:
    options = SelectOptions(num_frames=4, threads=1, policy="uniform")
    step = travelled(DecodeStep(options))
    for video in videos:
        assert without_timing(row_of(video, step(video))) == selected_row(video, options)


@pytest.mark.parametrize("on_short", ["repeat", "fewer", "error"])
@pytest.mark.parametrize("candidates", [5, 8, None])
def test_a_sampler_chooses_as_in_select(runs: Path, videos: list[str], on_short: str, candidates: int | None) -> None:
    options = SelectOptions(
        num_frames=5, num_candidates=candidates, policy=str(runs / "sampler"), on_short=on_short, threads=1
    )
    policy = options.resolved_policy
    listed = replace(options.with_all_candidates(), size=256)  # more than these videos have
    frames = travelled(DecodeStep(listed, choose=False, min_size=policy.min_size or 1))
    arguments = {"num_frames": 5, "num_candidates": candidates, "on_short": on_short}
    network = travelled(NetworkStep(policy.name, str(runs / "sampler"), arguments, device="cpu"))
    rows = network([(video, travelled(frames(video))) for video in videos])
    assert [without_timing(row) for row in rows] == [selected_row(video, options) for video in videos]
    too_short = 0 if on_short != "error" else 2 if candidates == 8 else 1
    assert sum("error" in row for row in rows) == 1 + too_short


@pytest.mark.parametrize("chooser", ["sampler", "sampler+aks", "uniform", "frame-difference"])
def test_a_classifier_answers_as_in_a_pipeline(runs: Path, videos: list[str], chooser: str) -> None:
    given = str(runs / chooser) if "sampler" in chooser else chooser
    pipeline = Pipeline(given, runs / "classifier", num_candidates=8, num_frames=4, device="cpu", top=2)
    frames = pipeline.tasks(1)("").step
    arguments = {**pipeline.arguments, "classifier": str(runs / "classifier")}
    network = NetworkStep("named", arguments.pop("sampler"), arguments, with_classifier=True, device="cpu")
    rows = travelled(network)([(video, travelled(frames(video))) for video in videos])
    for row, expected in zip(rows, pipeline(videos), strict=True):
        if isinstance(expected, Exception):
            assert row == {"video": videos[-1], "error": str(expected)}
            continue
        told = expected.to_dict()
        assert row["label"] == told["label"]
        assert [each["label"] for each in row["top"]] == [each["label"] for each in told["top"]]
        assert row["probability"] == pytest.approx(told["probability"], abs=1e-5)
        assert row["selection"]["policy"] == "named"
        for key in ("video", "frame_indices", "pts_seconds", "notes", "metadata"):
            assert row["selection"][key] == told["selection"][key]


def test_what_is_wrong_is_told_with_the_name() -> None:
    def fails(error: Exception) -> Any:
        def work() -> None:
            raise error

        return work

    named = so.InvalidArgument("a.mp4: too short")
    assert attempt("a.mp4", fails(named)) is named
    for error, text in (
        (so.InvalidArgument("too short"), "a.mp4: too short"),
        (MemoryError(), "a.mp4: the frames do not fit into memory; ask for fewer"),
        (PermissionError(13, "denied"), "a.mp4: cannot be read (denied); check its permissions"),
        (ZeroDivisionError("odd"), "a.mp4: an unexpected error (ZeroDivisionError: odd); the file may be damaged"),
    ):
        failure = attempt("a.mp4", fails(error))
        assert isinstance(failure, (VideoError, so.InvalidArgument))
        assert str(failure).startswith(text)
        assert "\n" not in str(failure)
        assert failure.__cause__ is error
    with pytest.raises(MissingDependency):  # no other video would be spared
        attempt("a.mp4", fails(MissingDependency("no torchcodec")))


def test_a_name_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("saved") == str(tmp_path / "saved")
    assert absolute("resnet50") == "resnet50"
