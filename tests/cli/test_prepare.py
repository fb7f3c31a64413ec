"""`sosampler prepare`, `sosampler bank`, their progress, and the benchmark."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from sosampler._util.progress import Progress
from sosampler.bank.bank import Bank
from sosampler.cli import prepare as bank_cli
from sosampler.cli.options import line_of, show_progress
from sosampler.cli.prepare import prepare_command
from sosampler.errors import InvalidArgument
from sosampler.video.synthetic import numbered_video
from tests.clips import click_at, video_with_sound
from tests.factories import make_videos


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videos(tmp_path_factory.mktemp("videos"))


def run(app: typer.Typer, *arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def prepare_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(prepare_command)
    return app


def test_commands(videos: Path, tmp_path: Path, prepare_app: typer.Typer) -> None:
    from sosampler import create_classifier, save_classifier

    torch.manual_seed(0)
    classifier = create_classifier("timm:test_resnet", num_classes=2, input_size=32)
    save_classifier(classifier, tmp_path / "clf")
    out = tmp_path / "bank"
    done = run(prepare_app, videos / "m.csv", "--out", out, "-c", tmp_path / "clf", "-t", 4, "--workers", 1, "--json")
    assert done.exit_code == 1, done.output  # a video failed
    told = json.loads(done.stdout)
    assert (told["num_videos"], told["num_failed"], told["num_frames"]) == (5, 1, 20)
    assert [failure["id"] for failure in told["failures"]] == ["broken.mp4"]
    assert "6 of 6 videos, 1 failed" in done.stderr
    weights = tmp_path / "clf" / "model.safetensors"
    names = ["-c", "timm:test_resnet", "--weights", weights, "--input-size", 32]
    assert run(prepare_app, "--out", out, *names).exit_code == 1
    assert list(Bank(out).teachers) == [classifier.fingerprint()]

    info = run(bank_cli.app, "info", out)
    assert info.exit_code == 0
    assert "5 videos (3 train, 2 dev), 1 failed" in info.stdout
    assert "timm:test_resnet" in info.stdout
    assert json.loads(run(bank_cli.app, "info", out, "--json").stdout)["teachers"][0]["pooling"] == "mean"
    assert run(bank_cli.app, "verify", out).stdout.strip().endswith("sound")
    small = run(bank_cli.app, "subset", out, "--out", tmp_path / "small", "--classes", "x", "--limit", 1, "--json")
    assert json.loads(small.stdout)["num_videos"] == 1
    os.truncate(out / "frames" / "00000.arrow", 1000)
    broken = run(bank_cli.app, "verify", out, "--json")
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["sound"] is False


def test_options_of_a_classifier_need_one(videos: Path, tmp_path: Path, prepare_app: typer.Typer) -> None:
    done = run(prepare_app, videos / "m.csv", "--out", tmp_path / "bank", "--weights", "w.pt")
    assert isinstance(done.exception, InvalidArgument)
    assert "--weights configures a classifier" in str(done.exception)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_people_see_a_bar_and_log_files_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        line_of("preparing", Progress(total=100, done=30, failed=2, before=10), 10.0)
        == "preparing: 30 of 100 videos, 2 failed, 2.00 a second, 0:35 left"
    )
    monkeypatch.setattr(sys, "stderr", Screen())
    with show_progress("preparing") as tell:
        for done in range(1, 4):
            tell(Progress(total=3, done=done, failed=done // 2))
    assert "preparing" in sys.stderr.getvalue()
    assert "3/3" in sys.stderr.getvalue()
    assert "1 failed" in sys.stderr.getvalue()


def test_the_first_video_counts_in_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with show_progress("preparing") as tell:
        for done in (1, 2):
            now[0] += 4
            tell(Progress(total=2, done=done))
    assert capsys.readouterr().err == "preparing: 2 of 2 videos, 0.25 a second\n"


def test_failures_say_how_to_try_again(videos: Path, tmp_path: Path, prepare_app: typer.Typer) -> None:
    arguments = (videos / "m.csv", "--out", tmp_path / "bank", "-t", 2, "--workers", 0)
    assert "--retry-failed tries them again" in run(prepare_app, *arguments).stderr
    again = run(prepare_app, "--out", tmp_path / "bank", "--size", 32, "-c", "timm:test_resnet")
    assert "size controls how videos are decoded" in str(again.exception)


def test_damaged_banks_end_with_exit_code_2(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sosampler.cli.main import main

    def code_of(*arguments: Any) -> Any:
        monkeypatch.setattr(sys, "argv", ["sosampler", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert code_of("prepare", videos / "m.csv", "--out", tmp_path / "bank", "-t", 2, "--workers", 0) == 1
    assert code_of("bank", "verify", tmp_path / "bank") == 0
    (tmp_path / "bank" / "items.jsonl").write_text("x")
    assert code_of("bank", "info", tmp_path / "bank") == 2
    assert "items.jsonl, line 1: is damaged" in capsys.readouterr().err
    assert code_of("bank", "verify", tmp_path / "bank") == 1


def test_the_benchmark_runs(videos: Path, tmp_path: Path) -> None:
    from benchmarks.speed.prepare import bench_prepare, table

    work = tmp_path / "new"
    (work / "prepare.bank").mkdir(parents=True)  # of somebody else
    clips = [videos / "a.mp4", videos / "b.mp4"]
    result = bench_prepare(
        clips, classifier="timm:test_resnet", work=work, videos=3, num_candidates=4, workers=(1,), rounds=1
    )
    assert set(result["videos_a_second"]) == {"plain loop", "prepare, 1 worker"}
    assert "times the plain loop" in table(result)
    json.dumps(result)
    assert list(work.iterdir()) == [work / "prepare.bank"]
    bench_prepare(clips, classifier="timm:test_resnet", work=tmp_path / "x/y", videos=1, num_candidates=2, rounds=1)


def test_sound(tmp_path: Path, prepare_app: typer.Typer) -> None:
    video_with_sound(tmp_path / "a.mp4", click_at(0.5, seconds=1.0))
    numbered_video(tmp_path / "b.mp4", num_frames=10, width=64, height=48)
    (tmp_path / "m.csv").write_text("path,label\na.mp4,x\nb.mp4,y\n")
    out = tmp_path / "bank"
    done = run(prepare_app, tmp_path / "m.csv", "--out", out, "-t", 4, "--audio", "--workers", 0)
    assert done.exit_code == 0, done.output
    assert "1 of 2 videos have no sound; the notes of Bank.audio() say why" in done.output
    assert "preparing sound: 2 of 2 videos" in done.output
    shown = run(bank_cli.app, "info", out).output
    assert "sound log-mel: 64 bands x 100 columns for the 1 s around each frame" in shown
    assert "1 videos without sound" in shown
