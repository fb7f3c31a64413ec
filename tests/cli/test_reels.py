"""`sosampler reels`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sosampler.bank.bank import Bank
from sosampler.cli.main import main
from sosampler.datasets.manifest import read_manifest
from sosampler.reels.make import make_reels
from tests.reels.clip_world import make_clips

FEW = ["--count-train", 3, "--count-dev", 1, "--count-test", 2, "--classes", 2, "--workers", 1]
SMALL = ["--size", 48, "--num-shots", 3, 3, "--fps", 6, "-t", 4]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, standard output and standard error of a command line."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sosampler", "reels", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bank(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "bank"
    code, said, progress = run("procedural", "--out", out, *FEW, *SMALL, "--share", 0.3, 0.6, "--no-moves", "--json")
    assert code == 0, progress
    told = json.loads(said)
    assert (told["num_videos"], told["num_frames"], told["num_classes"]) == (6, 24, 2)
    assert told["splits"] == {"train": 3, "dev": 1, "test": 2}
    assert "making reels: 6 of 6 videos" in progress
    recipe = told["settings"]["made_by"]["recipe"]
    assert (recipe["num_shots"], recipe["share"], recipe["fps"]) == (3, [0.3, 0.6], 6)
    assert (recipe["size"], recipe["picture_size"], recipe["num_candidates"]) == (48, 51, 4)
    assert [recipe[move] for move in ("pan", "zoom", "blur", "fade")] == [0, 0, 0, 0]

    # The same as from Python, and the second time there is nothing to do.
    changes = {"size": 48, "num_shots": 3, "fps": 6, "num_candidates": 4, "share": (0.3, 0.6)}
    still = dict.fromkeys(("pan", "zoom", "blur", "fade"), 0.0)
    counts = {"train": 3, "dev": 1, "test": 2}
    made = make_reels("procedural", tmp_path / "p", recipe={**changes, **still}, counts=counts, num_classes=2)
    assert isinstance(made, Bank)
    assert contents(made.path) == contents(out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.arrow")}
    code, said, _ = run("procedural", "--out", out, *FEW, *SMALL, "--share", 0.3, 0.6, "--no-moves")
    assert (code, said) == (0, f"Bank({str(out)!r}, 6 videos, 2 classes, 0 teachers)\n")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.arrow")} == before

    code, said, error = run("procedural", "--out", out, *FEW, *SMALL, "--share", 0.3, 0.6)
    assert (code, said) == (2, "")
    assert "blur=0.0, now 0.04; fade=0.0, now 0.4" in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_files(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "films"
    code, said, progress = run("procedural", "--out", out, "--to", "mp4", *FEW, *SMALL, "--json")
    assert code == 0, progress
    told = json.loads(said)
    assert (told["videos"], told["classes"], told["splits"]) == (6, 2, {"train": 3, "dev": 1, "test": 2})
    assert told["bytes"] == sum(map(len, contents(out).values()))
    manifest = read_manifest(told["manifest"])
    assert all(manifest.path_of(item).is_file() for item in manifest.items)
    code, said, _ = run("procedural", "--out", out, "--to", "mp4", *FEW, *SMALL)
    assert (code, said) == (0, f"{out}/manifest.csv: Manifest(6 videos, 2 classes: 3 train, 1 dev, 2 test)\n")
    code, _, error = run("procedural", "--out", out, "--to", "mp4", *FEW, *SMALL, "--seed", 5)
    assert code == 2
    assert "holds reels made with" in error


def test_counts_left_out_are_the_presets(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "bank"
    arguments = ["--size", 16, "--num-shots", 1, 1, "-t", 1, "--no-moves", "--count-test", 0, "--count-dev", 2]
    code, said, error = run("procedural", "--classes", 1, "--out", out, *arguments, "--json")
    assert code == 0, error
    assert json.loads(said)["splits"] == {"train": 300, "dev": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: cannot be listed"),
        (["procedural", "--to", "avi"], "choose one of: bank, mp4"),
        (["procedural", "--preset", "film"], "choose one of: sports22, demo"),
        (["procedural", "--preset", "sports22"], "give the folder with the pictures of the 22 sports"),
        (["procedural", "--share", "0.5", "1.5"], "low <= high <= 1"),
        (["procedural", "--pan", "0.1", "--no-moves"], "--pan cannot be given with --no-moves"),
        (["procedural", "--count-train", "-1"], "the count of train=-1"),
        (["procedural", "--classes", "0"], "num_classes=0"),
        (["procedural", "--size", "63", "--to", "mp4"], "must be an even number of pixels"),
        (["procedural", "--quality", "101"], "quality=101"),
    ],
)
def test_bad_input(run: Any, tmp_path: Path, arguments: list[str], said: str) -> None:
    code, out, error = run(*arguments, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert said in error
    assert error.startswith("sosampler: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_is_light() -> None:
    code = "import sys\nfrom sosampler.cli import reels\nprint(' '.join(sys.modules))"
    loaded = {name.split(".")[0] for name in subprocess.check_output([sys.executable, "-c", code], text=True).split()}
    assert "typer" in loaded
    assert not loaded & {"numpy", "torch", "pyarrow", "av", "PIL", "rich"}


# ---- streams


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    make_clips(folder)
    return folder / "clips.csv"


OF_STREAMS = ["--to", "mp4", "--preset", "streams", "--fps", 10, "--size", 48, "--num-shots", 4, 4, "--workers", 1]


def test_streams(run: Any, clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "streams"
    counts = ["--count-train", 2, "--count-dev", 0, "--count-test", 1]
    arguments = [clips, "--out", out, *OF_STREAMS, *counts, "--fades", 0, "--share", 0.3, 0.5]
    code, said, progress = run(*arguments, "--json")
    assert code == 0, progress
    assert json.loads(said)["splits"] == {"train": 2, "test": 1}
    assert "making reels (clips): 36 of 36 videos" in progress
    assert "making reels: 3 of 3 videos" in progress
    recipe = json.loads((out / "reels.json").read_text())["recipe"]
    assert (recipe["size"], recipe["fps"], recipe["fades"], recipe["share"]) == (48, 10, 0.0, [0.3, 0.5])
    code, said, progress = run(*arguments)
    assert (code, said) == (0, f"{out}/manifest.csv: Manifest(3 videos, 2 classes: 2 train, 1 test)\n")
    videos = sorted((out / "videos").iterdir())
    videos[0].unlink()
    code, _, progress = run(*arguments)
    assert code == 0
    assert "continuing: 2 of 3 videos are done" in progress


def rows_without(clips: Path, *words: str) -> list[str]:
    lines = clips.read_text().splitlines()
    return [lines[0], *(f"{clips.parent}/{line}" for line in lines[1:] if not any(word in line for word in words))]


@pytest.mark.parametrize(
    ("left_out", "more", "arguments", "said"),
    [
        (["other"], [], [], "there is no background for streams of train; give videos without a class"),
        (["ant2", "ant3", "ant4", "ant5", "ant6", "ant7"], [], [], "class 'ant' has one group only (anttrain0)"),
        ([], ["x.mp4,ant,anttest1,train"], [], "groups are in two splits: 'anttest1' (test, train); put all"),
        ([], ["x.mp4,ant;bee,g,train"], [], "x.mp4: shows ant, bee; a clip must have one label"),
        ([], [], ["--size", 63], "both an even number of pixels"),
        ([], [], ["--to", "bank"], "composes mp4 files from a manifest of clips; give to='mp4' (--to mp4)"),
        ([], [], ["--preset", "demo"], "for clips give one of: streams, long-streams"),
        ([], [], ["--pan", 0.1], "a name in recipe='pan' is unknown"),
        ([], [], ["--classifier-share", 1], "classifier_share=1.0 must be at least 0 and below 1"),
        ([], [], ["--background", "nowhere.csv"], "nowhere.csv: cannot be read"),
        ([], [], ["--share", 0.05, 0.05], "share=0.05 cannot be reached by 4 shots"),
        (["train/"], [], [], "there is no clip with a label for streams of train"),
    ],
)
def test_bad_input_of_streams(
    run: Any, clips: Path, tmp_path: Path, left_out: list[str], more: list[str], arguments: list[Any], said: str
) -> None:
    (tmp_path / "clips.csv").write_text("\n".join([*rows_without(clips, *left_out), *more]))
    code, out, error = run(tmp_path / "clips.csv", "--out", tmp_path / "out", *OF_STREAMS, *arguments)
    assert (code, out) == (2, "")
    assert said in error
    assert error.splitlines()[-1].startswith("sosampler: ")
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_background_of_one_of_the_classes(run: Any, clips: Path, tmp_path: Path) -> None:
    code, _, error = run(clips, "--background", clips, "--out", tmp_path / "out", *OF_STREAMS)
    assert code == 2
    assert "is background of class 'ant', which the clips have too; remove it" in error
