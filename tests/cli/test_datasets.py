"""`sosampler datasets` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sosampler.cli.datasets import app
from sosampler.datasets.manifest import read_manifest
from sosampler.errors import InvalidArgument


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """ActivityNet's form, with three of four videos."""
    entries = {
        name: {"subset": subset, "annotations": [{"label": label, "segment": [0, 1]}] if label else []}
        for name, subset, label in (
            ("one", "training", "Archery"),
            ("two", "training", "Ballet"),
            ("three", "validation", "Archery"),
            ("four", "validation", "Ballet"),
            ("five", "testing", ""),
        )
    }
    (tmp_path / "anet.json").write_text(json.dumps({"database": entries}), encoding="utf-8")
    (tmp_path / "videos").mkdir()
    for name in ("v_one.mp4", "v_two.mp4", "three.webm"):
        (tmp_path / "videos" / name).write_bytes(b"x")
    return tmp_path


def test_the_list_names_counts_metric_and_source() -> None:
    text = run()
    for words in (
        ["activitynet-v1.3", "14,950", "200", "mAP", "activity-net.org"],
        ["mini-kinetics", "top-1"],
        ["coin"],
    ):
        assert any(all(word in line for word in words) for line in text.splitlines()), words


def test_the_list_as_json() -> None:
    listed = json.loads(run("--json"))["datasets"]
    coin = next(known for known in listed if known["name"] == "coin")
    assert (coin["videos"], coin["classes"], coin["metric"], coin["reader"]) == (11_827, 180, "top-1", "coin")
    assert coin["where"].startswith("http")


def test_import_writes_manifest_classes_and_what_is_missing(dataset: Path) -> None:
    out = dataset / "manifest.csv"
    text = run("import", "activitynet", dataset / "anet.json", "--videos", dataset / "videos", "--out", out)
    assert f"3 videos of 2 classes (2 train, 1 test) written to {out}" in text
    assert f"1 videos are missing, listed in {out}.missing.txt" in text
    assert "1 without a label" in text
    assert Path(f"{out}.missing.txt").read_text() == "four\n"
    assert (dataset / "classes.txt").read_text() == "Archery\nBallet\n"
    assert out.read_text() == (
        "id,path,labels,split,exclusive\none,videos/v_one.mp4,Archery,train,true\n"
        "two,videos/v_two.mp4,Ballet,train,true\nthree,videos/three.webm,Archery,test,true\n"
    )
    assert all(read_manifest(out).path_of(item).exists() for item in read_manifest(out).items)


def test_import_as_json_with_every_option(dataset: Path) -> None:
    classes, subset, out = dataset / "order.txt", dataset / "subset.txt", dataset / "new" / "m.jsonl"
    classes.write_text("Ballet\nArchery\n")
    subset.write_text("one\ntwo\nthree\n")
    options: list[str | Path] = [
        "--classes",
        classes,
        "--subset",
        subset,
        "--map",
        "validation=dev",
        "--segments",
        "--seed",
        "3",
    ]
    arguments: list[str | Path] = [
        "import",
        "activitynet",
        dataset / "anet.json",
        "--videos",
        dataset / "videos",
        "--out",
        out,
    ]
    result = json.loads(run(*arguments, *options, "--json"))
    assert result == {
        "dataset": "activitynet",
        "out": str(out),
        "classes_file": str(out.parent / "classes.txt"),
        "missing_file": f"{out}.missing.txt",
        "videos": 3,
        "classes": 2,
        "groups": 3,
        "multi_label": True,
        "exclusive": True,
        "splits": {"train": 2, "dev": 1},
        "missing": 0,
        "unlabelled": 1,
        "overlapping": 0,
        "repeated": 0,
        "unknown_in_subset": 0,
    }
    assert read_manifest(out).classes == ("Ballet", "Archery")
    assert Path(f"{out}.missing.txt").read_text() == ""


def test_import_with_independent_classes(dataset: Path) -> None:
    out = dataset / "m.jsonl"
    arguments = ("activitynet", dataset / "anet.json", "--videos", dataset / "videos", "--out", out)
    assert json.loads(run("import", *arguments, "--independent", "--json"))["exclusive"] is False
    assert not read_manifest(out).exclusive
    assert "exclusive" not in out.read_text()  # the default of sets of labels


def test_an_import_that_was_killed_can_be_run_again(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = dataset / "m.csv"
    arguments = ("import", "activitynet", dataset / "anet.json", "--videos", dataset / "videos", "--out", out)
    (dataset / ".m.csv.missing.1000000000.part.txt").write_text("half")
    with monkeypatch.context() as killing:
        killing.setattr("sosampler.datasets.importers.build.write_text", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(*arguments)
    run(*arguments)
    assert sorted(path.name for path in dataset.glob(".*")) == []
    assert len(read_manifest(out)) == 3


def test_importing_again_replaces_what_was_missing(dataset: Path) -> None:
    out = dataset / "m.csv"
    arguments: list[str | Path] = [
        "import",
        "activitynet",
        dataset / "anet.json",
        "--videos",
        dataset / "videos",
        "--out",
        out,
    ]
    run(*arguments)
    (dataset / "videos" / "v_four.mp4").write_bytes(b"x")
    run(*arguments)
    assert Path(f"{out}.missing.txt").read_text() == ""
    assert len(read_manifest(out)) == 4
    Path(f"{out}.missing.txt").unlink()  # as beside a manifest that was written by hand
    with pytest.raises(InvalidArgument, match=r"m\.csv: exists and does not hold an imported data set"):
        run(*arguments)
    run(*arguments, "--overwrite")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"--out": "m.parquet"}, r"suffix of --out='.parquet' is unknown; choose one of: .csv, .jsonl"),
        ({"--map": "validation"}, r"--map 'validation' is not SUBSET=SPLIT"),
        ({"--map": "validation=best"}, r"'best' is unknown"),
        ({"--videos": "empty"}, "holds none of the 4 videos"),
        ({"--dev-share": "0.5"}, "takes no group"),
        ({"--classes": "anet.json"}, "is not among the 1 names"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], says: str
) -> None:
    monkeypatch.chdir(dataset)
    Path("empty").mkdir()
    before = sorted(Path().iterdir())
    options = {"--videos": "videos", "--out": "m.csv", **changed}
    with pytest.raises(InvalidArgument, match=says):
        run("import", "activitynet", "anet.json", *(word for pair in options.items() for word in pair))
    assert sorted(Path().iterdir()) == before


def test_the_files_to_import_are_not_overwritten(tmp_path: Path) -> None:
    train = tmp_path / "train.csv"
    train.write_text("label,youtube_id,time_start,time_end,split\na,v,0,9,train\n")
    (tmp_path / "v.mp4").write_bytes(b"x")
    with pytest.raises(InvalidArgument, match=r"train\.csv: is one of the files to import"):
        run("import", "kinetics", train, "--videos", tmp_path, "--out", tmp_path / "." / "train.csv")
    assert "youtube_id" in train.read_text()


def test_as_a_group_of_the_whole_command_line(dataset: Path) -> None:
    whole = typer.Typer(no_args_is_help=True)
    whole.add_typer(app, name="datasets")
    assert "mini-sports1m" in CliRunner().invoke(whole, ["datasets"]).stdout
    json.loads(CliRunner().invoke(whole, ["datasets", "--json"]).stdout)
    arguments = ["import", "activitynet", "anet.json", "--videos", "videos", "--out", "m.csv", "--json"]
    paths = [str(dataset / word) if (dataset / word).exists() or word == "m.csv" else word for word in arguments]
    assert json.loads(CliRunner().invoke(whole, ["datasets", *paths]).stdout)["videos"] == 3


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom sosampler.cli import datasets\n"
        "print(sorted({'numpy', 'torch', 'av', 'sosampler.datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_importing_needs_no_torch(dataset: Path) -> None:
    code = "import sys\nfrom sosampler.datasets.importers.build import import_dataset\n"
    code += "print({'torch', 'av'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
