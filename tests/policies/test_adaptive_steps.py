"""num_frames="auto" where videos are decoded elsewhere: steps for the workers of an engine, and many videos at once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.inference.decode import DecodeStep
from sosampler.inference.options import SelectOptions
from sosampler.integrations.ray.rows import NetworkStep
from sosampler.video.synthetic import numbered_video
from tests.policies.test_adaptive_samplers import Dark, believing

ASKED: dict[str, Any] = {"num_frames": "auto", "num_candidates": 8, "auto_min": 1, "auto_tolerance": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "sampler"
    believing().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """More than are decoded in one process; some have fewer frames than candidates."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(14):
        numbered_video(root / f"{number:02d}.mp4", num_frames=(3, 20, 41)[number % 3] + number)
    return [str(video) for video in sorted(root.iterdir())]


def test_steps_of_workers_decide_as_select_does(folder: Path, videos: list[str]) -> None:
    options = SelectOptions(policy=str(folder), size=128, threads=1, **ASKED)
    policy = options.resolved_policy
    first = DecodeStep(options.with_all_candidates(), choose=False, min_size=policy.min_size or 1)
    second = NetworkStep(policy.name, str(folder), {"size": 128, **ASKED}, device="cpu")
    first, second = pickle.loads(pickle.dumps((first, second)))
    rows = second([(video, first(video)) for video in videos[:6]])
    for video, row in zip(videos, rows, strict=False):
        alone = so.select(video, policy=str(folder), size=128, **ASKED).to_dict()
        assert row["frame_indices"] == alone["frame_indices"]
        assert {**row["asked"], "expected": 0} == {**alone["asked"], "expected": 0}
        np.testing.assert_allclose(row["asked"]["expected"], alone["asked"]["expected"], atol=1e-5)
    assert len({row["num_frames"] for row in rows}) > 1


def test_many_videos_of_a_pipeline(folder: Path, videos: list[str]) -> None:
    classifier = Dark()
    pipe = so.Pipeline(str(folder), classifier, size=128, device="cpu", workers=2, batch_size=4, **ASKED)
    assert pipe.warm_up() is pipe  # there is no engine to be made
    results = pipe(videos)
    for video, result in zip(videos, results, strict=True):
        alone = so.select(video, policy=str(folder), size=128, **ASKED)
        assert result.selection.frame_indices.tolist() == alone.frame_indices.tolist()
        assert result.selection.asked["max"] == 16
    assert sorted(classifier.lengths) == sorted(len(result.selection) for result in results)
    assert len(set(classifier.lengths)) > 2


def test_a_policy_that_cannot_decide_is_refused_before_it_travels() -> None:
    with pytest.raises(so.InvalidArgument, match="for the policy 'uniform'"):
        SelectOptions(policy="uniform", **ASKED)
