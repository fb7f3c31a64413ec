"""`sosampler bench pipeline`: all ways are gone, ratios and accuracy are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sosampler as so
from benchmarks.speed.same_keyframes import ratios_of
from sosampler.bench import decode, pipeline
from sosampler.bench.pipeline import (
    OURS,
    OURS_PLAIN,
    TRANSFORMERS,
    UNIFORM,
    UNIFORM_FAST,
    bench_pipeline,
    table,
)
from sosampler.cli.bench import app
from sosampler.errors import InvalidArgument
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video

pytestmark = pytest.mark.usefixtures("torchcodec")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reels of three drawn classes, and two networks that have not learned anything."""
    made = tmp_path_factory.mktemp("bench")
    recipe = {"size": 64, "num_shots": 3, "fps": 4, "seconds_per_shot": 0.5}
    reels = so.make_reels("procedural", made / "reels", to="mp4", recipe=recipe, counts={"test": 6}, num_classes=3)
    torch.manual_seed(0)
    SOSampler(backbone="timm:test_resnet", input_size=32).save_pretrained(made / "sampler")
    classifier = so.create_classifier("timm:test_resnet", class_names=reels.classes, input_size=48)
    with torch.no_grad():
        classifier.net.get_classifier().weight.mul_(40)
    so.save_classifier(classifier, made / "classifier")
    numbered_video(made / "clip.mp4", num_frames=40, width=96, height=64, gop=4)
    return made


@pytest.fixture
def no_encoding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip as it is instead of minutes of it."""
    monkeypatch.setattr(decode, "looped_videos", lambda clips, work, say: ((clip, clip, "gop4") for clip in clips))


@pytest.mark.usefixtures("no_encoding")
def test_speed_and_accuracy_in_one_file(folder: Path) -> None:
    said: list[str] = []
    result = bench_pipeline(
        [folder / "clip.mp4"],
        sampler=folder / "sampler",
        classifier=folder / "classifier",
        reels=folder / "reels",
        work=folder / "work",
        rounds=2,
        streamed=3,
        say=said.append,
    )
    json.dumps(result, allow_nan=False)
    (video,) = result["videos"]
    assert set(video["seconds"]) == set(result["ways"]) >= {OURS, OURS_PLAIN, UNIFORM, UNIFORM_FAST, TRANSFORMERS}
    assert all(len(times) == 2 for times in video["seconds"].values())
    row = next(row for row in video["comparisons"] if (row["way"], row["reference"]) == (OURS, UNIFORM))
    ours, theirs = sorted(video["seconds"][OURS]), sorted(video["seconds"][UNIFORM])
    assert row["times_faster"] == pytest.approx(sum(theirs) / sum(ours))  # of two, the median is the mean
    assert row["met"] == (row["times_faster"] > 1)

    manifest = so.read_manifest(folder / "reels" / "manifest.csv")
    classifier = so.create_classifier(folder / "classifier")
    right = 0
    for item in manifest.items:
        chosen = so.select(manifest.path_of(item), 6, policy="uniform")
        right += int(classifier.clip_probs(chosen.to_torch()[None])[0].argmax()) == item.labels[0]
    accuracy = result["accuracy"]
    assert accuracy["reels"] == 6
    assert accuracy["top1_percent"][UNIFORM] == pytest.approx(100 * right / 6)
    assert accuracy["share_of_equal_labels_with_networks_as_they_are"] == 1
    assert accuracy["met"] == (accuracy["top1_percent"][OURS] > accuracy["top1_percent"][UNIFORM])

    assert set(result["workers"]["seconds"]) == {f"{n} decoding" for n in (1, 2)} | {
        f"{n} labelling" for n in (0, 1, 2)
    }
    rounds = [
        theirs / ours for ours, theirs in zip(video["seconds"][OURS], video["seconds"][UNIFORM_FAST], strict=True)
    ]
    assert result["baselines"]["torchcodec_uniform"]["1 thread"] == [pytest.approx(rounds)]
    threads = result["baselines"]["torchcodec_uniform"]["2 threads"]
    assert [len(values) for values in (*threads, *result["baselines"]["transformers"])] == [2, 2]
    told = table(result)
    assert f"top-1 on 6 reels as mp4: torchcodec {100 * right / 6:.1f} %" in told
    assert "2 decoding against 1 decoding" in told


def test_random_networks_are_right_about_nothing(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="accuracy on reels needs networks that know them; give sampler and"):
        bench_pipeline([folder / "clip.mp4"], reels=folder / "reels", work=folder / "work")


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def bench(clips: list[Path], **options: Any) -> dict[str, Any]:
        given.update(options, clips=clips)
        return {"videos": []}

    monkeypatch.setattr(pipeline, "bench_pipeline", bench)
    arguments = ["pipeline", str(folder / "clip.mp4"), "--streamed", "0", "--out", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "accuracy: not measured" in done.output
    assert json.loads((tmp_path / "p.json").read_text()) == {"videos": []}
    assert (given["streamed"], given["sampler"]) == (0, None)


@pytest.mark.usefixtures("no_encoding")
def test_keyframes_stand_beside_the_same_keyframes_by_torchcodec(folder: Path) -> None:
    result = decode.bench_decode([folder / "clip.mp4"], work=folder / "work", rounds=1, hour=False)
    (video,) = result["videos"]
    (row,) = [row for row in video["comparisons"] if "torchcodec_same_keyframes" in row]
    assert (row["way"], row["reference"]) == ("keyframe T=32", "torchcodec exact T=32")
    (ours,) = video["seconds"]["keyframe T=32"]
    theirs = [video["seconds"][f"torchcodec same keyframes T=32, {mode}"][0] for mode in ("approximate", "exact")]
    assert row["torchcodec_same_keyframes"] == pytest.approx([seconds / ours for seconds in theirs])
    assert all(ratio > 0 for ratio in ratios_of(folder / "clip.mp4", rounds=1))
    mine = decode.read_keyframes(folder / "clip.mp4", 32, 1)
    for mode in ("approximate", "exact"):
        other = decode.read_torchcodec_indices(folder / "clip.mp4", mine.frame_indices.tolist(), mode)
        assert other.pts_seconds.tolist() == mine.pts_seconds.tolist()
