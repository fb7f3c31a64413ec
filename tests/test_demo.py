"""The demonstration goes from videos to a report, goes on where it was stopped, and shows a sampler that helps."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sosampler import SOSampler, create_classifier, demo, open_video
from sosampler.bank.bank import Bank
from sosampler.cli.main import main
from sosampler.demo import DemoSettings, run_demo
from sosampler.errors import InvalidArgument, MissingDependency

SMALL = DemoSettings(
    num_classes=3,
    videos={"train": 16, "dev": 6, "test": 12},
    clips={"train": 64, "dev": 12},
    classifier_size=48,
    classifier_epochs=2,
    sampler_size=32,
    sampler_epochs=2,
    num_candidates=8,
    num_frames=(1, 2),
    headline=2,
    num_strips=2,
    workers=0,
)
POLICIES = ["uniform", "random", "semi-optimal-max", "semi-optimal", "optimal", "sosampler"]


class Stopped(BaseException):
    """As Ctrl-C."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "made" / "here"


@pytest.fixture(scope="module")
def run(out: Path) -> tuple[dict[str, Any], list[str], dict[str, int]]:
    """Stopped before the bank is made, then run again: what it returned, what it said, when files had been written."""

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sosampler.bank.prepare.prepare", stop)
        with pytest.raises(Stopped):
            run_demo(out, seed=1, settings=SMALL)
    before = {str(file): file.stat().st_mtime_ns for file in out.rglob("*.*") if file.is_file()}
    said: list[str] = []
    return run_demo(out, seed=1, settings=SMALL, say=said.append), said, before


def test_a_stopped_demonstration_goes_on(run: Any, out: Path) -> None:
    _, said, before = run
    kept = [name for name in before if name.endswith((".mp4", ".safetensors")) or "/clips/" in name]
    assert sum(name.endswith(".mp4") for name in kept) == 34
    assert any(name.endswith("model.safetensors") for name in kept)
    assert all(Path(name).stat().st_mtime_ns == before[name] for name in kept)
    assert f"    {out / 'classifier'}: this run is finished" in said


def test_every_part_is_there_and_can_be_opened(run: Any, out: Path) -> None:
    parts = {
        "bank",
        "classifier",
        "clips",
        "demo.json",
        "evaluation.json",
        "report",
        "sampler",
        "videos",
        "videos.jsonl",
    }
    assert {entry.name for entry in out.iterdir()} == parts
    bank = Bank(out / "bank")
    assert [len(bank.split(name)) for name in ("train", "dev", "test")] == [16, 6, 12]
    assert len(bank.classes) == 3
    assert len(bank[0]) == 8
    classifier = create_classifier(str(out / "classifier"))
    assert bank.teacher(classifier).pooling == "mean"
    assert SOSampler.from_pretrained(out / "sampler").num_classes == 3
    with_times = open_video(sorted((out / "videos" / "videos").glob("*.mp4"))[0])
    try:
        assert with_times.metadata.width == 80
        assert with_times.metadata.duration >= 4
    finally:
        with_times.close()


def test_the_evaluation_has_every_policy(run: Any, out: Path) -> None:
    told = run[0]
    assert json.loads((out / "evaluation.json").read_text(encoding="utf-8")) == told
    assert (told["num_candidates"], told["num_frames"], told["split"], told["num_videos"]) == (8, [1, 2], "test", 12)
    shown = [(row["policy"], row["num_frames"]) for row in told["rows"]]
    assert sorted(shown) == sorted([(name, frames) for name in POLICIES for frames in (1, 2)] + [("all", 8)])
    learned = next(row for row in told["rows"] if row["policy"] == "sosampler")
    assert 0 < learned["sampler_gmacs"] < 8 * learned["classifier_gmacs"]
    assert learned["frames_decoded"] == 8


def test_each_step_is_told_with_its_time(run: Any) -> None:
    told, said, _ = run
    assert [line[:4] for line in said if re.match(r"\d/6 ", line)] == [f"{step}/6 " for step in range(1, 7)]
    times = [line for line in said if re.fullmatch(r" +done in \d+\.\d s", line)]
    assert len(times) == 6
    assert [f"    done in {step['seconds']:.1f} s" for step in told["steps"]] == times
    table = next(line for line in said if "top-1 %" in line)
    assert all(name in table for name in POLICIES)
    assert said[-1].startswith(f"report: {told['report']}; numbers: {told['evaluation']}; ")
    uniform = next(row for row in told["rows"] if (row["policy"], row["num_frames"]) == ("uniform", 2))
    assert f"2 of 8 frames: right on {100 * uniform['top1']:.1f} % of the videos" in said[-2]


def test_the_report_shows_what_was_measured(run: Any, out: Path) -> None:
    told = run[0]
    assert Path(told["report"]) == out / "report" / "index.html"
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert page.count('class="strip"') == 2
    assert page.count("<svg") == 3
    assert page.count("sosampler</span>") >= 1
    for row in told["rows"]:
        assert f"<b>{100 * row['top1']:.1f}</b>" in page


def test_a_finished_demonstration_is_not_made_again(run: Any, out: Path) -> None:
    told, _, _ = run
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert len(before) == 2
    again = run_demo(out, seed=1, settings=SMALL)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert [{**row, "seconds": 0} for row in again["rows"]] == [{**row, "seconds": 0} for row in told["rows"]]


def test_other_settings_are_refused(run: Any, out: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"other settings \(seed was 1, is 2\); give the same"):
        run_demo(out, seed=2, settings=SMALL)
    with pytest.raises(InvalidArgument, match=r"num_classes was 3, is 5"):
        run_demo(out, seed=1)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_bytes(b"mine")
    with pytest.raises(InvalidArgument, match=r"holds other files \(holiday.mp4\); give a new folder"):
        run_demo(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["holiday.mp4"]
    (tmp_path / "demo.json").write_text("mine too")
    with pytest.raises(InvalidArgument, match=r"demo.json: is not JSON"):
        run_demo(tmp_path)
    assert (tmp_path / "demo.json").read_text() == "mine too"


def test_what_is_not_installed_is_told_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_NEEDED", ("json", "no_such_package"))
    with pytest.raises(
        MissingDependency, match=r"needs no_such_package; install it with: pip install 'sosampler\[train\]'"
    ):
        run_demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- the command


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sosampler", "demo", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """The command's own part alone: what it asks for, and what it does with what it is told."""
    found: list[tuple[Path, int]] = []

    def give(out: Path, *, seed: int, say: Any) -> dict[str, Any]:
        found.append((out, seed))
        say("a line")
        return {"rows": [1, 2]}

    monkeypatch.setattr(demo, "run_demo", give)
    return found


def test_the_command_prints_one_json_object(monkeypatch: Any, capsys: Any, asked: list[tuple[Path, int]]) -> None:
    assert command(monkeypatch, "--out", "somewhere", "--seed", "3", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": [1, 2]}
    assert captured.err == "a line\n"
    assert asked == [(Path("somewhere"), 3)]


def test_the_command_tells_people_what_happens(monkeypatch: Any, capsys: Any, asked: list[tuple[Path, int]]) -> None:
    assert command(monkeypatch) == 0
    assert capsys.readouterr().out == "a line\n"
    assert asked == [(Path("demo"), 0)]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(monkeypatch: Any, capsys: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    assert command(monkeypatch, "--out", str(tmp_path / name), "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"sosampler: {tmp_path / name}: the folder cannot be made")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_learned_sampler_is_clearly_ahead_of_uniform(tmp_path: Path) -> None:
    told = run_demo(tmp_path / "demo")
    rows = {row["policy"]: row for row in told["rows"] if row["num_frames"] == DemoSettings().headline}
    gain = rows["sosampler"]["versus_uniform"]
    assert gain["difference"] > 0.1
    assert gain["ci95"][0] > 0
    assert rows["semi-optimal"]["top1"] > rows["sosampler"]["top1"]
