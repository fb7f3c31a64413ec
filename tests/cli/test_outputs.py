"""What commands write: one run at a time, nothing of others replaced, whole or absent on a full disk, nothing left."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet
import pytest

import sosampler as so
from sosampler.video.synthetic import numbered_video
from tests._util.test_files import holding
from tests.cli.conftest import Ran
from tests.factories import TINY, make_bank

pytestmark = pytest.mark.skipif(os.name == "nt", reason="limits of files and signals")

Command = Callable[..., Ran]
SMALL = ("--set", f"backbone={TINY}", "--set", "input_size=32", "--batch-size", 8, "--epochs", 1, "--device", "cpu")
EVALUATE = ("--policies", "uniform", "-n", 2, "-t", 4, "--bootstrap", 0, "--device", "cpu")


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bank(tmp_path_factory.mktemp("data") / "bank", train=8, dev=4, stored=14).path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "classifier"
    so.save_classifier(so.create_classifier(TINY, num_classes=2, input_size=32), folder)
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in ("a", "b", "c"):
        numbered_video(folder / f"{name}.mp4", num_frames=12, width=64, height=48)
    return folder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Refuse to write files of more bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*"))


class TestOneRunAtATime:
    def refused(self, kind: str, path: Path, run: Callable[[], Ran]) -> None:
        with holding(kind, path) as other:
            ran = run()
            assert ran.code == 2, ran
            assert f"{path}: process {other.pid} is writing " in ran.err
            assert "Traceback" not in ran.err
            assert ran.err.count("\n") == 1

    @pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet", "folder"])
    def test_select(self, command: Command, videos: Path, tmp_path: Path, name: str) -> None:
        out = tmp_path / name
        run = lambda: command("select", videos, "-n", 2, "--out", out, "--policy", "uniform")  # noqa: E731
        self.refused("file" if out.suffix else "folder", out, run)
        assert not out.exists() or not list(out.glob("[!.]*"))
        assert run().code == 0
        assert hidden(tmp_path) == []

    def test_classify(self, command: Command, videos: Path, classifier: Path, tmp_path: Path) -> None:
        out = tmp_path / "rows.csv"
        run = lambda: command("classify", videos, "-c", classifier, "--out", out, "--device", "cpu")  # noqa: E731
        self.refused("file", out, run)
        assert run().code == 0

    def test_prepare(self, command: Command, videos: Path, tmp_path: Path) -> None:
        (tmp_path / "m.csv").write_text("path,label\n" + "".join(f"{videos}/{name}.mp4,x\n" for name in "abc"))
        out = tmp_path / "bank"
        run = lambda: command("prepare", tmp_path / "m.csv", "--out", out, "-t", 4, "--workers", 0)  # noqa: E731
        self.refused("folder", out, run)
        assert run().code == 0
        assert hidden(out) == []

    def test_train(self, command: Command, bank: Path, tmp_path: Path) -> None:
        self.refused("folder", tmp_path / "run", lambda: command("train", bank, "--out", tmp_path / "run", *SMALL))
        assert list((tmp_path / "run").glob("[!.]*")) == []

    def test_train_a_baseline(self, command: Command, bank: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.refused("folder", out, lambda: command("train", bank, "--out", out, "--sampler", "frameexit"))

    def test_train_classifier(self, command: Command, bank: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.refused("folder", out, lambda: command("train-classifier", bank, "--out", out, "-c", TINY))

    @pytest.mark.parametrize("option", ["--out", "--csv", "--curve", "--run"])
    def test_evaluate(self, command: Command, bank: Path, tmp_path: Path, option: str) -> None:
        path = tmp_path / {"--out": "e.json", "--csv": "e.csv", "--curve": "e.png", "--run": "run"}[option]
        kind = "folder" if option == "--run" else "file"
        self.refused(kind, path, lambda: command("evaluate", bank, *EVALUATE, option, path))

    def test_reproduce(self, command: Command, bank: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        folder = out / "mini_kinetics" / "by-hand" / "table1"
        options = ("--bank", f"mini_kinetics={bank}", "--out", out, "--bootstrap", 0, "--device", "cpu")
        self.refused("folder", folder, lambda: command("reproduce", "table1", *options))

    def test_report(self, command: Command, bank: Path, tmp_path: Path) -> None:
        run, out = tmp_path / "run", tmp_path / "report.html"
        assert command("evaluate", bank, *EVALUATE, "--run", run).code == 0
        self.refused("file", out, lambda: command("report", run, "--out", out))
        assert command("report", run, "--out", out).code == 0
        assert hidden(tmp_path) == []


class TestForeignFiles:
    def kept(self, path: Path, run: Callable[..., Ran]) -> None:
        """Refused over a file of the user, done with --overwrite, and done again over its own."""
        for text in ("a note\n", "path,label\na.mp4,x\n", '{"mine": 1}\n'):
            path.write_text(text)
            ran = run()
            assert ran.code == 2, ran
            assert f"{path}: exists" in ran.err
            assert "--overwrite" in ran.err
            assert path.read_text() == text
        assert run("--overwrite").code == 0
        assert path.read_bytes() != text.encode()
        assert run().code == 0
        assert hidden(path.parent) == []

    @pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
    def test_select(self, command: Command, videos: Path, tmp_path: Path, name: str) -> None:
        out = tmp_path / name
        self.kept(out, lambda *more: command("select", videos, "-n", 2, "--policy", "uniform", "--out", out, *more))

    @pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
    def test_classify_does_not_replace_selections(
        self, command: Command, videos: Path, classifier: Path, tmp_path: Path, name: str
    ) -> None:
        out = tmp_path / name
        run = lambda *more: command("classify", videos, "-c", classifier, "--out", out, "--device", "cpu", *more)  # noqa: E731
        assert command("select", videos, "-n", 2, "--policy", "uniform", "--out", out).code == 0
        before = out.read_bytes()
        assert run().code == 2
        assert out.read_bytes() == before
        assert run("--overwrite").code == 0
        assert run().code == 0
        assert command("select", videos, "-n", 2, "--policy", "uniform", "--out", out).code == 2

    def test_a_folder_of_rows_begins_anew(self, command: Command, videos: Path, tmp_path: Path) -> None:
        out = tmp_path / "rows"
        run = lambda count, *more: command("select", videos, "-n", count, "--policy", "uniform", "-o", out, *more)  # noqa: E731
        assert run(2).code == 0
        told = run(3)
        assert (told.code, "rows made with num_frames=2, now 3" in told.err) == (2, True)
        assert run(3, "--overwrite").code == 0
        rows = pyarrow.parquet.read_table(out / "part-000000.parquet").to_pylist()
        assert [row["num_frames"] for row in rows] == [3, 3, 3]
        (out / "notes.txt").write_text("mine")
        assert run(4, "--overwrite").code == 0
        assert (out / "notes.txt").read_text() == "mine"

    def test_evaluate(self, command: Command, bank: Path, tmp_path: Path) -> None:
        self.kept(
            tmp_path / "e.json", lambda *more: command("evaluate", bank, *EVALUATE, "--out", tmp_path / "e.json", *more)
        )
        self.kept(
            tmp_path / "e.csv", lambda *more: command("evaluate", bank, *EVALUATE, "--csv", tmp_path / "e.csv", *more)
        )
        run = tmp_path / "run"
        run.mkdir()
        (run / "evaluation.json").write_text('{"mine": 1}')
        assert command("evaluate", bank, *EVALUATE, "--run", run).code == 2
        assert (run / "evaluation.json").read_text() == '{"mine": 1}'

    def test_report(self, command: Command, bank: Path, tmp_path: Path) -> None:
        assert command("evaluate", bank, *EVALUATE, "--run", tmp_path / "run").code == 0
        out = tmp_path / "page" / "index.html"
        out.parent.mkdir()
        self.kept(out, lambda *more: command("report", tmp_path / "run", "--out", out, *more))


class TestFullDisk:
    """A limit on the size of files gives the same errors; nothing of them is swallowed."""

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            ("rows.csv", 100),
            ("rows.parquet", 2500),
            ("folder", 100),
            *(("rows.jsonl", size) for size in (0, 100, 2500)),
        ],
    )
    def test_select(self, command: Command, videos: Path, tmp_path: Path, name: str, size: int) -> None:
        out, whole = tmp_path / name, tmp_path / "whole.jsonl"
        arguments = ("select", videos, "-n", 2, "--policy", "uniform", "--out")
        with largest_file(size):
            ran = command(*arguments, out)
        assert ran.code == 2, ran
        assert "File too large" in ran.err
        assert ran.err.count("\n") == 1
        assert not out.exists() if out.suffix else not list(out.glob("*.parquet"))
        assert command(*arguments, out).code == 0
        assert command(*arguments, whole).code == 0
        assert hidden(tmp_path) == []
        names = [json.loads(line)["video"] for line in whole.read_text().splitlines()]
        if name == "rows.jsonl":
            assert [json.loads(line)["video"] for line in out.read_text().splitlines()] == names
        elif name == "rows.csv":
            assert [row["video"] for row in csv.DictReader(out.open())] == names

    @pytest.mark.parametrize("option", ["--save-frames", "--contact-sheet"])
    def test_images(self, command: Command, videos: Path, tmp_path: Path, option: str) -> None:
        path = tmp_path / ("frames" if option == "--save-frames" else "sheet.png")
        with largest_file(100):
            ran = command("select", videos / "a.mp4", "-n", 2, option, path)
        assert (ran.code, "cannot be written" in ran.err) == (2, True)
        assert not [one for one in tmp_path.rglob("*") if one.is_file()]

    @pytest.mark.parametrize("size", [0, 3000])
    def test_prepare(self, command: Command, videos: Path, tmp_path: Path, size: int) -> None:
        (tmp_path / "m.csv").write_text("path,label\n" + "".join(f"{videos}/{name}.mp4,x\n" for name in "abc"))
        arguments = ("prepare", tmp_path / "m.csv", "-t", 4, "--workers", 0, "--out")
        with largest_file(size):
            ran = command(*arguments, tmp_path / "bank")
        assert ran.code == 2, ran
        assert "File too large" in ran.err
        assert command(*arguments, tmp_path / "bank").code == 0
        assert command(*arguments, tmp_path / "other").code == 0
        for path in (tmp_path / "other").rglob("*"):
            same = tmp_path / "bank" / path.relative_to(tmp_path / "other")
            assert path.is_dir() or same.read_bytes() == path.read_bytes()
        assert hidden(tmp_path) == []

    @pytest.mark.parametrize("size", [3000, 100_000])
    def test_train(self, command: Command, bank: Path, tmp_path: Path, size: int) -> None:
        """At the settings or the checkpoint."""
        out = tmp_path / "run"
        with largest_file(size):
            ran = command("train", bank, "--out", out, *SMALL)
        assert ran.code == 2, ran
        assert "File too large" in ran.err
        assert "Traceback" not in ran.err
        assert not (out / "model.safetensors").exists()
        assert not (out / "result.json").exists()
        assert command("train", bank, "--out", out, *SMALL).code == 0
        assert hidden(out) == []

    def test_evaluate_and_report(self, command: Command, bank: Path, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for option, path in {"--out": "e.json", "--csv": "e.csv", "--curve": "e.png", "--run": "run"}.items():
            with largest_file(50):
                ran = command("evaluate", bank, *EVALUATE, option, tmp_path / path)
            assert (ran.code, "File too large" in ran.err) == (2, True), ran
            assert "uniform" in ran.out  # the numbers are not lost
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        assert command("evaluate", bank, *EVALUATE, "--run", run).code == 0
        with largest_file(50):
            ran = command("report", run, "--out", tmp_path / "report.html")
        assert (ran.code, "File too large" in ran.err) == (2, True)
        assert not (tmp_path / "report.html").exists()


class TestLeftovers:
    """What a killed run was writing goes when the next one begins."""

    def test_rows(self, command: Command, videos: Path, tmp_path: Path) -> None:
        for name in (".rows.1.part.csv", ".rows.csv.failed.1.part.jsonl", ".rows.csv.lock"):
            (tmp_path / name).write_text("half")
        assert command("select", videos, "-n", 2, "--policy", "uniform", "--out", tmp_path / "rows.csv").code == 0
        assert hidden(tmp_path) == []

    def test_frames(self, command: Command, videos: Path, tmp_path: Path) -> None:
        arguments = ("select", videos / "a.mp4", "-n", 2, "--policy", "uniform", "--save-frames", tmp_path)
        assert command(*arguments).code == 0
        first, second = sorted(tmp_path.iterdir())
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        (tmp_path / f".{first.stem}.{ended.pid}.part.jpg").write_text("half")
        alive = tmp_path / f".{second.stem}.{os.getppid()}.part.jpg"
        alive.write_text("half")  # another process may be writing this one
        assert command(*arguments).code == 0
        assert hidden(tmp_path) == [alive.name]

    def test_a_run(self, command: Command, bank: Path, tmp_path: Path) -> None:
        for name in (".run.1.part.json", ".checkpoint.1.part.pt", ".model.1.part.safetensors", ".README.1.part.md"):
            (tmp_path / name).write_text("half")
        assert command("train", bank, "--out", tmp_path, *SMALL).code == 0
        assert hidden(tmp_path) == []

    def test_an_evaluation(self, command: Command, bank: Path, tmp_path: Path) -> None:
        for name in (".evaluation.1.part.json", ".videos.1.part.jsonl"):
            (tmp_path / name).write_text("half")
        assert command("evaluate", bank, *EVALUATE, "--run", tmp_path).code == 0
        assert hidden(tmp_path) == []
