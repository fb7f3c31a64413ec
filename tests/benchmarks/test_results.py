"""Work on many videos that is killed goes on where it was, and ends with the file of an unbroken run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sosampler.cli.main import main
from sosampler.errors import InvalidArgument
from sosampler.inference import many
from sosampler.inference.rows import SELECTION_COLUMNS
from sosampler.inference.rows import Journal as RowsJournal
from sosampler.video.synthetic import numbered_video

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`sosampler select` inside this process; gives the exit code."""

    def run(*args: object) -> int:
        words = list(map(str, args))
        policy = [] if "--policy" in words else ["--policy", "uniform"]
        monkeypatch.setattr(sys, "argv", ["sosampler", "select", *words, *policy])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return run


@pytest.fixture(scope="module")
def clips() -> list[bytes]:
    """Five videos of different lengths: 12, 15, 18, 21 and 24 frames."""
    return [numbered_video(num_frames=count) for count in range(12, 25, 3)]


@pytest.fixture
def videos(tmp_path: Path, clips: list[bytes]) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number, data in enumerate(clips):
        (folder / f"{number}.mp4").write_bytes(data)
    return folder


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the videos on which work was done, as it happens."""
    names: list[str] = []
    real = many.select_with

    def watched(source: Path, options: Any, **more: Any) -> Any:
        names.append(Path(source).name)
        return real(source, options, **more)

    monkeypatch.setattr(many, "select_with", watched)
    return names


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Callable[..., None]:
    """Run the command line until it reaches a video, and leave what a kill at this moment leaves."""

    def run(name: str, *args: object) -> None:
        real = many.select_with

        def until(source: Path, options: Any, **more: Any) -> Any:
            if Path(source).name == name:
                raise KeyboardInterrupt
            return real(source, options, **more)

        with monkeypatch.context() as patch:
            patch.setattr(many, "select_with", until)
            assert cli(*args, "--workers", 1) != 0

    return run


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file without what differs from run to run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        assert row.pop("timing")["total"] > 0
    return rows


def journal_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.journal")


def journal_lines(out: Path) -> list[str]:
    return journal_of(out).read_text(encoding="utf-8").splitlines()


def Journal(out: Path, options: dict[str, Any]) -> RowsJournal:
    return RowsJournal(out, options, SELECTION_COLUMNS)


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", ["", '{"video": "', '{"video": "videos/3.mp4", "policy": "unifo', "\x00\x00"])
def test_a_killed_run_goes_on_and_ends_like_an_unbroken_one(
    cli: Cli,
    killed_at: Callable[..., None],
    selected: list[str],
    videos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    torn: str,
) -> None:
    unbroken, out = tmp_path / "unbroken.jsonl", tmp_path / "x.jsonl"
    assert cli(videos, "-n", 4, "--out", unbroken) == 0
    killed_at("3.mp4", videos, "-n", 4, "--out", out)
    assert not out.exists()
    finished = len(journal_lines(out)) - 1
    assert 1 <= finished <= 3
    with open(journal_of(out), "a", encoding="utf-8") as file:
        file.write(torn)

    selected.clear()
    capsys.readouterr()
    assert cli(videos, "-n", 4, "--out", out) == 0
    assert sorted(selected) == [f"{number}.mp4" for number in range(finished, 5)]
    assert f"continuing: {finished} of 5 videos are done" in capsys.readouterr().err
    assert rows_of(out) == rows_of(unbroken)
    assert beside(tmp_path) == {"videos", "unbroken.jsonl", "x.jsonl"}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_resume_as_well(
    cli: Cli, killed_at: Callable[..., None], selected: list[str], videos: Path, tmp_path: Path, suffix: str
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    unbroken, out = tmp_path / f"unbroken{suffix}", tmp_path / f"x{suffix}"
    cli(videos, "-n", 4, "--out", unbroken)
    killed_at("3.mp4", videos, "-n", 4, "--out", out)
    selected.clear()
    assert cli(videos, "-n", 4, "--out", out) == 0
    assert "0.mp4" not in selected
    assert out.read_bytes() == unbroken.read_bytes()  # tables hold no timing


@pytest.mark.parametrize(
    "others",
    [["-n", 3], ["-n", 4, "--policy", "random"], ["-n", 4, "--candidates", "keyframe"], ["-n", 4, "--seed", 1]],
)
def test_a_journal_of_other_options_is_not_continued(
    cli: Cli,
    killed_at: Callable[..., None],
    selected: list[str],
    videos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    others: Sequence[object],
) -> None:
    unbroken, out = tmp_path / "unbroken.jsonl", tmp_path / "x.jsonl"
    cli(videos, *others, "--out", unbroken)
    killed_at("3.mp4", videos, "-n", 4, "--out", out)
    selected.clear()
    capsys.readouterr()
    assert cli(videos, *others, "--out", out) == 0
    assert sorted(selected) == [f"{number}.mp4" for number in range(5)]
    assert "continuing" not in capsys.readouterr().err
    assert rows_of(out) == rows_of(unbroken)


def test_rows_of_videos_that_are_not_asked_for_any_more_are_left_out(
    cli: Cli, killed_at: Callable[..., None], videos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    killed_at("3.mp4", videos, "-n", 4, "--out", out)
    assert len(journal_lines(out)) > 1
    assert cli(videos / "3.mp4", videos / "4.mp4", "-n", 4, "--out", out) == 0
    assert [Path(row["video"]).name for row in rows_of(out)] == ["3.mp4", "4.mp4"]


def test_rows_keep_the_order_of_the_videos_when_an_earlier_failure_succeeds(
    cli: Cli, killed_at: Callable[..., None], videos: Path, tmp_path: Path, clips: list[bytes]
) -> None:
    out = tmp_path / "x.jsonl"
    (videos / "0.mp4").write_bytes(b"")
    killed_at("4.mp4", videos, "-n", 4, "--out", out)
    assert len(journal_lines(out)) > 1
    (videos / "0.mp4").write_bytes(clips[0])
    assert cli(videos, "-n", 4, "--out", out) == 0
    assert [Path(row["video"]).name for row in rows_of(out)] == [f"{number}.mp4" for number in range(5)]


def test_frames_of_all_videos_are_saved_when_only_the_second_run_asks_for_them(
    cli: Cli, killed_at: Callable[..., None], videos: Path, tmp_path: Path
) -> None:
    out, frames = tmp_path / "x.jsonl", tmp_path / "frames"
    killed_at("3.mp4", videos, "-n", 2, "--out", out)
    assert cli(videos, "-n", 2, "--out", out, "--save-frames", frames) == 0
    assert {path.name: len(list(path.iterdir())) for path in frames.iterdir()} == {f"{n}.mp4": 2 for n in range(5)}


def test_a_contact_sheet_of_a_resumed_run_shows_all_videos(
    cli: Cli, killed_at: Callable[..., None], videos: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole.png", tmp_path / "resumed.png"
    cli(videos, "-n", 2, "--contact-sheet", whole)
    options = (videos, "-n", 2, "--out", tmp_path / "x.jsonl", "--contact-sheet", resumed)
    killed_at("3.mp4", *options)
    assert cli(*options) == 0
    assert Image.open(resumed).tobytes() == Image.open(whole).tobytes()


def test_a_single_video_is_written_once_after_a_kill(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, videos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)  # the last step before the file stands there
        assert cli(videos / "0.mp4", "-n", 4, "--out", out) != 0
    assert not out.exists()
    assert cli(videos / "0.mp4", "-n", 3, "--out", out) == 0
    assert [row["num_frames"] for row in rows_of(out)] == [3]
    assert beside(tmp_path) == {"videos", "x.jsonl"}


# --- what failed -----------------------------------------------------------------------------------------------------


def test_failures_are_listed_beside_the_file_until_a_clean_run(
    cli: Cli, videos: Path, tmp_path: Path, clips: list[bytes]
) -> None:
    out, failed, bad = tmp_path / "x.jsonl", tmp_path / "x.jsonl.failed.jsonl", videos / "1.mp4"
    bad.write_bytes(b"this is no video" * 50)
    assert cli(videos, "-n", 2, "--out", out) == 1
    (failure,) = [json.loads(line) for line in failed.read_text(encoding="utf-8").splitlines()]
    assert failure["video"] == str(bad)
    assert str(bad) in failure["error"]
    assert [Path(row["video"]).name for row in rows_of(out)] == ["0.mp4", "2.mp4", "3.mp4", "4.mp4"]
    assert beside(tmp_path) == {"videos", out.name, failed.name}

    bad.write_bytes(clips[1])
    assert cli(videos, "-n", 2, "--out", out) == 0
    assert beside(tmp_path) == {"videos", out.name}
    assert len(rows_of(out)) == 5


def test_a_failure_before_the_kill_is_tried_and_listed_again(
    cli: Cli, killed_at: Callable[..., None], selected: list[str], videos: Path, tmp_path: Path
) -> None:
    out, failed, bad = tmp_path / "x.jsonl", tmp_path / "x.jsonl.failed.jsonl", videos / "0.mp4"
    bad.write_bytes(b"")
    killed_at("4.mp4", videos, "-n", 2, "--out", out)
    selected.clear()
    assert cli(videos, "-n", 2, "--out", out) == 1
    assert "0.mp4" in selected
    assert "1.mp4" not in selected
    assert [json.loads(line)["video"] for line in failed.read_text(encoding="utf-8").splitlines()] == [str(bad)]
    assert [Path(row["video"]).name for row in rows_of(out)] == ["1.mp4", "2.mp4", "3.mp4", "4.mp4"]


# --- the journal alone -----------------------------------------------------------------------------------------------


def test_a_row_is_in_the_journal_as_soon_as_it_is_added(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    journal = Journal(out, {"seed": 0})
    journal.add({"video": "a.mp4", "scores": [0.5]})
    assert [json.loads(line) for line in journal_lines(out)[1:]] == [{"video": "a.mp4", "scores": [0.5]}]
    journal.close()


def test_a_journal_knows_what_is_done(tmp_path: Path) -> None:
    first = Journal(tmp_path / "x.jsonl", {"seed": 0})
    assert (list(first.rows()), first.num_rows) == ([], 0)
    first.add({"video": "a.mp4"})
    first.add({"video": "b ü.mp4"})
    first.close()
    again = Journal(tmp_path / "x.jsonl", {"seed": 0})
    assert [again.done(name) for name in ("a.mp4", "b ü.mp4", "c.mp4")] == [True, True, False]
    assert again.num_rows == 2
    again.add({"video": "c.mp4"})
    again.finish([])
    written = (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == [{"video": "a.mp4"}, {"video": "b ü.mp4"}, {"video": "c.mp4"}]


def test_a_journal_survives_more_than_one_kill(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        journal = Journal(out, {"seed": 0})
        journal.add({"video": name})
        journal.close()
        with open(journal_of(out), "a", encoding="utf-8") as file:
            file.write('{"video": "torn')
    last = Journal(out, {"seed": 0})
    assert all(last.done(name) for name in ("a.mp4", "b.mp4", "c.mp4"))
    assert [row["video"] for row in last.rows()] == ["a.mp4", "b.mp4", "c.mp4"]
    last.close()


@pytest.mark.parametrize(
    "left_behind",
    [
        pytest.param("", id="nothing"),
        pytest.param('{"options": {"se', id="torn first line"),
        pytest.param('{"options": {"seed": 1}}\n{"video": "a.mp4"}\n', id="other options"),
        pytest.param("something else\n", id="no journal at all"),
    ],
)
def test_a_journal_that_cannot_be_continued_is_begun_again(tmp_path: Path, left_behind: str) -> None:
    out = tmp_path / "x.jsonl"
    journal_of(out).write_text(left_behind, encoding="utf-8")
    journal = Journal(out, {"seed": 0})
    assert (journal.done("a.mp4"), journal.num_rows) == (False, 0)
    journal.add({"video": "b.mp4"})
    assert list(journal.rows()) == [{"video": "b.mp4"}]
    journal.finish([])
    assert json.loads(out.read_text(encoding="utf-8")) == {"video": "b.mp4"}


@pytest.mark.parametrize("damage", ['\x00\x00{"video": "b.mp4"}', '{"video": "b.mp', "[]", '{"policy": "uniform"}'])
def test_rows_behind_a_damaged_line_are_done_again(tmp_path: Path, damage: str) -> None:
    """A power cut can leave a whole line of nonsense where a kill cannot."""
    out = tmp_path / "x.jsonl"
    first = Journal(out, {"seed": 0})
    first.add({"video": "a.mp4"})
    first.close()
    with open(journal_of(out), "a", encoding="utf-8") as file:
        file.write(f"{damage}\n")
    again = Journal(out, {"seed": 0})
    assert again.done("a.mp4")
    assert not again.done("b.mp4")
    again.add({"video": "b.mp4"})
    assert list(again.rows()) == [{"video": "a.mp4"}, {"video": "b.mp4"}]
    again.close()


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"x\.jsonl: cannot be written"):
        Journal(tmp_path / "nowhere" / "x.jsonl", {})


# --- a real kill -----------------------------------------------------------------------------------------------------


# From inside, so that the kill never comes too late on a busy machine: it ends itself after its fourth result.
DIES_AFTER_FOUR = """
import os, signal
from sosampler.cli.main import main
from sosampler.inference.rows import Journal

add, added = Journal.add, []

def dying(self, *arguments):
    add(self, *arguments)
    added.append(None)
    if len(added) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.add = dying
main()
"""


def test_a_process_that_is_killed_can_be_started_again(tmp_path: Path, clips: list[bytes]) -> None:
    videos, out, unbroken = tmp_path / "videos", tmp_path / "x.jsonl", tmp_path / "unbroken.jsonl"
    videos.mkdir()
    for number in range(40):
        (videos / f"{number:02d}.mp4").write_bytes(clips[number % len(clips)])
    arguments = ["select", str(videos), "-n", "12", "--policy", "uniform", "--workers", "1", "--out"]
    command = [sys.executable, "-m", "sosampler", *arguments]

    killed = subprocess.run(
        [sys.executable, "-c", DIES_AFTER_FOUR, *arguments, str(out)], capture_output=True, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not out.exists()
    finished = journal_of(out).read_bytes().count(b"\n") - 1
    assert finished == 4

    again = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert f"continuing: {finished} of 40 videos are done" in again.stderr
    assert f"40 selections written to {out}" in again.stdout
    assert subprocess.run([*command, str(unbroken)], capture_output=True, timeout=60, check=False).returncode == 0
    assert rows_of(out) == rows_of(unbroken)
    assert len(rows_of(out)) == 40
    assert beside(tmp_path) == {"videos", "x.jsonl", "unbroken.jsonl"}
