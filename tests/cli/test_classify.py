"""`sosampler classify` as a user meets it: exit codes, what is printed, and what is written."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sosampler as so
from sosampler.inference.pipeline import Pipeline, Prediction
from sosampler.inference.rows import PREDICTION_COLUMNS
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video
from tests.cli.conftest import Ran

CLASSES = ("diving", "football", "judo")


Cli = Callable[..., Ran]


@pytest.fixture
def cli(command: Cli, classifier: Path) -> Cli:
    """`sosampler classify` on the CPU, with the classifier of these tests unless another is named."""

    def run(*args: object, classifier: object = classifier) -> Ran:
        return command("classify", *args, "--classifier", classifier, "--device", "cpu")

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    SOSampler(backbone="timm:resnet10t", input_size=32).save_pretrained(folder / "sampler")
    made = so.create_classifier("timm:resnet10t", class_names=CLASSES, input_size=32)
    with torch.no_grad():  # a fresh last layer is small, and all answers would be nearly the same
        made.net.get_classifier().weight.mul_(40)
    so.save_classifier(made, folder / "classifier")
    return folder


@pytest.fixture(scope="module")
def sampler(runs: Path) -> Path:
    return runs / "sampler"


@pytest.fixture(scope="module")
def classifier(runs: Path) -> Path:
    return runs / "classifier"


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for name, frames in (("a", 20), ("b", 24), ("c", 30)):
        numbered_video(root / f"{name}.mp4", num_frames=frames)
    return root


@pytest.fixture
def with_a_bad_one(videos: Path, tmp_path: Path) -> Path:
    root = tmp_path / "mixed"
    root.mkdir()
    for video in sorted(videos.iterdir()):
        (root / video.name).write_bytes(video.read_bytes())
    (root / "b.mp4").write_bytes(b"not a video at all" * 40)
    return root


def matches(row: dict[str, Any], expected: Prediction) -> None:
    assert Path(row["video"]).name == Path(expected.video).name
    assert row["label"] == expected.label
    assert row["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert row["selection"]["frame_indices"] == expected.selection.frame_indices.tolist()


def test_one_video(cli: Cli, videos: Path, sampler: Path, classifier: Path) -> None:
    ran = cli(videos / "a.mp4", "--sampler", sampler, "-n", 3, "-t", 8, "--top", 2, "--json")
    expected = Pipeline(sampler, classifier, num_frames=3, num_candidates=8, device="cpu")(videos / "a.mp4")
    assert ran.code == 0
    matches(ran.json, expected)
    assert [each["label"] for each in ran.json["top"]] == [label for label, _ in expected.top[:2]]
    assert ran.json["selection"]["policy"] == str(sampler)
    assert len(ran.json["selection"]["scores"]) == 3
    assert ran.err == ""


def test_told_in_words(cli: Cli, videos: Path, sampler: Path, classifier: Path) -> None:
    ran = cli(videos / "a.mp4", "-s", sampler)
    expected = Pipeline(sampler, classifier, device="cpu")(videos / "a.mp4")
    first, *others = ran.out.splitlines()
    assert first.startswith(f"{videos / 'a.mp4'}: {expected.label} {expected.probability:.3f} (6 of 10 exact cand")
    assert [line.split()[1] for line in others] == [label for label, _ in expected.top[1:]]


def test_many_videos(cli: Cli, videos: Path, sampler: Path, classifier: Path) -> None:
    ran = cli(videos, "--sampler", sampler, "-n", 3, "--batch-size", 2, "--workers", 2, "--json")
    pipe = Pipeline(sampler, classifier, num_frames=3, device="cpu")
    assert ran.code == 0
    assert (ran.json["num_videos"], ran.json["num_failed"], ran.json["failures"]) == (3, 0, [])
    for row, name in zip(ran.json["predictions"], "abc", strict=True):
        matches(row, pipe(videos / f"{name}.mp4"))
    words = cli(videos, "--sampler", sampler, "-n", 3)
    assert words.code == 0
    assert [line.split(": ")[0] for line in words.out.splitlines() if ": " in line] == [
        str(videos / f"{name}.mp4") for name in "abc"
    ]


def test_a_rule_instead_of_a_sampler(cli: Cli, videos: Path) -> None:
    row = cli(videos / "c.mp4", "--policy", "centre", "-n", 2, "-t", 6, "--json").json
    assert (
        row["selection"]["frame_indices"]
        == so.select(videos / "c.mp4", 2, policy="centre", num_candidates=6).frame_indices.tolist()
    )
    row = cli(videos / "c.mp4", "--json").json
    assert row["selection"]["policy"] == "uniform"
    assert (row["selection"]["num_frames"], row["selection"]["num_candidates"]) == (6, 10)
    row = cli(videos / "c.mp4", "--policy", "all", "-t", 4, "--candidates", "keyframe", "--grid", "linspace", "--json")
    assert row.json["selection"]["candidates"]["mode"] == "keyframe"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ""])
def test_rows_in_a_file(cli: Cli, videos: Path, sampler: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"rows{suffix}"
    ran = cli(videos, "--sampler", sampler, "-n", 2, "--out", out, "--json")
    assert ran.code == 0
    assert ran.json == {
        "num_videos": 3,
        "num_failed": 0,
        "num_with_notes": 0,
        "out": str(out),
        "num_written": 3,
        "num_done_before": 0,
        "failures": [],
    }
    assert f"3 predictions written to {out}" in ran.err
    printed = cli(videos, "--sampler", sampler, "-n", 2, "--json").json["predictions"]
    if suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["selection"]["frame_indices"] for row in rows] == [
            row["selection"]["frame_indices"] for row in printed
        ]
    elif suffix in (".parquet", ""):  # a file, or a folder of files
        rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
        assert list(rows[0]) == list(PREDICTION_COLUMNS)
        assert [row["frame_indices"] for row in rows] == [row["selection"]["frame_indices"] for row in printed]
        assert [row["top_labels"][0] for row in rows] == [row["label"] for row in printed]
    else:
        rows = list(csv.DictReader(out.open(newline="")))
        assert list(rows[0]) == list(PREDICTION_COLUMNS), "the same columns in every format"
        assert [json.loads(row["frame_indices"]) for row in rows] == [
            row["selection"]["frame_indices"] for row in printed
        ]
        assert [json.loads(row["top_labels"])[0] for row in rows] == [row["label"] for row in printed]
        assert [float(row["probability"]) for row in rows] == [row["probability"] for row in printed]
    assert [row["video"] for row in rows] == [row["video"] for row in printed]
    assert [row["label"] for row in rows] == [row["label"] for row in printed]
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "nothing else is left behind"


def test_bad_files_among_good_ones(cli: Cli, with_a_bad_one: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    ran = cli(with_a_bad_one, "--out", out)
    assert ran.code == 1
    assert "1 of 3 videos failed; the rest are done" in ran.err
    assert "b.mp4" in ran.err
    assert [Path(row["video"]).name for row in csv.DictReader(out.open(newline=""))] == ["a.mp4", "c.mp4"]
    failed = tmp_path / "rows.csv.failed.jsonl"
    (failure,) = [json.loads(line) for line in failed.read_text().splitlines()]
    assert Path(failure["video"]).name == "b.mp4"
    assert failure["error"] in ran.err

    ran = cli(with_a_bad_one, "--json")
    assert ran.code == 1
    assert (ran.json["num_failed"], len(ran.json["predictions"])) == (1, 2)
    assert ran.json["failures"] == [failure]

    (with_a_bad_one / "b.mp4").unlink()
    assert cli(with_a_bad_one, "--out", out).code == 0
    assert not failed.exists(), "what failed before is mended"


def test_a_single_bad_file(cli: Cli, with_a_bad_one: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    ran = cli(with_a_bad_one / "b.mp4", "--json", "--out", out)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("sosampler: ")
    assert "Traceback" not in ran.err
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mixed"]


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ends the work at the third video; how many were begun since it was last emptied."""
    begun: list[int] = []

    def stop(*args: Any) -> Prediction:
        begun.append(len(begun))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return Prediction(*args)

    monkeypatch.setattr("sosampler.inference.pipeline.Prediction", stop)
    return begun


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_run_that_breaks_off_leaves_the_old_file_and_goes_on(
    cli: Cli, videos: Path, tmp_path: Path, stopping: list[int], suffix: str
) -> None:
    out = tmp_path / f"rows.{suffix}"
    out.write_text("old")
    cli(videos, "--out", out, "--batch-size", 1, "--overwrite")
    assert len(stopping) == 3
    assert out.read_text() == "old"
    stopping.clear()
    again = cli(videos, "--out", out, "--batch-size", 1, "--overwrite", "--json")
    assert again.code == 0
    assert len(stopping) == 1
    assert "continuing: 2 of 3 videos are done" in again.err
    assert (again.json["num_videos"], again.json["num_written"]) == (3, 3)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    stopping.clear()
    stopping += [7, 7, 7]  # no more stops
    cli(videos, "--out", tmp_path / f"whole.{suffix}", "--batch-size", 1)
    found, whole = (_without_seconds(path) for path in (out, tmp_path / f"whole.{suffix}"))
    assert found == whole
    assert len(found) == 3


def _without_seconds(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [{**row, "seconds": None} for row in csv.DictReader(file)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**row, "timing": None, "selection": {**row["selection"], "timing": None}} for row in rows]


@pytest.mark.parametrize("options", [("--top", 2), ("-n", 5), ("--precision", "float16"), ("--policy", "centre")])
def test_another_run_does_not_go_on(
    cli: Cli, videos: Path, tmp_path: Path, stopping: list[int], options: tuple[Any, ...]
) -> None:
    out = tmp_path / "rows.csv"
    cli(videos, "--out", out, "--batch-size", 1)
    stopping += [7]
    ran = cli(videos, "--out", out, "--batch-size", 1, *options)
    assert ran.code == 0
    assert "continuing" not in ran.err
    assert len(stopping) == 4 + 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-n 11", "num_frames=11 is more than num_candidates=10"),
        ("--policy best", "policy='best' is unknown; choose one of: uniform"),
        ("--sampler nowhere", "--sampler nowhere: no such folder; give the folder of a trained sampler"),
        ("--sampler . --policy uniform", "--sampler . and --policy uniform were both given; give one of them"),
        ("--out rows.txt", "--out rows.txt: the ending '.txt' is unknown; choose one of: .parquet, .jsonl, .csv"),
        ("--out nowhere/rows.csv", "the folder nowhere does not exist; make it first"),
        ("--top 0", "top=0 must be"),
        ("--precision int4", "precision='int4' is unknown"),
        ("--max-frames 5", "over the limit max_frames=5"),
        ("--input-size 0", "input_size[0]=0 must be"),
        ("--option what", "--option 'what' must be KEY=VALUE"),
    ],
)
def test_wrong_options_end_with_a_sentence(
    cli: Cli, videos: Path, options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli(videos / "a.mp4", *options.split())
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_wrong_classifiers_end_with_a_sentence(cli: Cli, videos: Path, sampler: Path) -> None:
    ran = cli(videos / "a.mp4", classifier="timm:resnet10t")
    assert (ran.code, ran.out) == (2, "")
    assert "has a random last layer, so its answers mean nothing; give its weights" in ran.err
    ran = cli(videos / "a.mp4", classifier=sampler)
    assert (ran.code, ran.out) == (2, "")
    assert "is not a classifier that sosampler saved" in ran.err


def test_weights_and_options_of_the_classifier(cli: Cli, videos: Path, classifier: Path) -> None:
    weights = classifier / "model.safetensors"
    ran = cli(
        *(videos / "a.mp4", "--weights", weights, "--input-size", 32, "--option", "head=mean", "--json"),
        classifier="timm:resnet10t",
    )
    assert ran.code == 0
    expected = Pipeline("uniform", classifier, device="cpu")(videos / "a.mp4")
    assert ran.json["probability"] == pytest.approx(expected.probability, abs=1e-5)
    assert ran.json["label"] == str(CLASSES.index(expected.label)), "the weights hold no names"


def test_help_loads_no_torch() -> None:
    code = "import sys, sosampler.cli.select; assert not {'torch', 'numpy', 'av'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
