"""`retry_failed`: only what failed is decoded again, nothing good is lost, killed at any step it ends the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sosampler.bank import decode as decode_pool
from sosampler.bank.decode import decode_or_fail
from sosampler.bank.inspect import verify_bank
from sosampler.bank.prepare import add_teacher
from sosampler.errors import SosamplerError
from tests.factories import contents, made, make_videos, pooled


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def videos(originals: Path, tmp_path: Path) -> Path:
    """A copy in which one may break things: a, b | broken, wide | short, c."""
    return Path(shutil.copytree(originals, tmp_path / "videos"))


def mend(videos: Path) -> None:
    shutil.copy(videos / "a.mp4", videos / "broken.mp4")


def test_what_is_stored_stays_where_the_videos_are_away(videos: Path, tmp_path: Path) -> None:
    made(videos, tmp_path / "bank", pooled())
    before = contents(tmp_path / "bank")
    for video in videos.glob("*.mp4"):
        video.unlink()
    bank = made(videos, tmp_path / "bank", pooled(), retry_failed=True)
    assert len(bank) == 5
    assert "no such file" in bank.failures[0]["error"]
    changed = {name for name, data in contents(bank.path).items() if before[name] != data}
    assert changed == {"failed.jsonl", "frames/00001.failed.jsonl"}
    assert verify_bank(bank.path) == []


def test_only_the_failed_video_is_decoded(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(videos, tmp_path / "bank", pooled())
    mend(videos)
    seen: list[str] = []

    def noting(task: Any) -> Any:
        seen.append(task.video_id)
        return decode_or_fail(task)

    monkeypatch.setattr(decode_pool, "decode_or_fail", noting)
    bank = made(videos, tmp_path / "bank", pooled(), retry_failed=True)
    assert seen == ["broken.mp4"]
    monkeypatch.undo()
    assert contents(bank.path) == contents(made(videos, tmp_path / "fresh", pooled()).path)
    assert verify_bank(bank.path) == []


def test_other_teachers_keep_all_but_the_shard_that_gained(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank", pooled(0))
    add_teacher(bank, pooled(1))
    mend(videos)
    bank = made(videos, tmp_path / "bank", pooled(0), retry_failed=True)
    assert len(bank.teacher(pooled(0))) == 6
    with pytest.raises(SosamplerError, match="1 of 3 parts of this teacher are missing; run `sosampler prepare`"):
        bank.teacher(pooled(1))
    add_teacher(bank, pooled(1))
    fresh = made(videos, tmp_path / "fresh", pooled(0))
    add_teacher(fresh, pooled(1))
    assert contents(bank.path) == contents(fresh.path)


class Killed(BaseException):
    """Nothing in the package catches it."""


@pytest.mark.parametrize("step", range(1, 21))
def test_broken_off_at_any_step(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Every file that appears or goes is a step; before each of them the run ends once."""
    made(videos, tmp_path / "bank", pooled())
    mend(videos)
    expected = contents(made(videos, tmp_path / "fresh", pooled()).path)
    count = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    killed = False
    try:
        made(videos, tmp_path / "bank", pooled(), retry_failed=True)
    except Killed:
        killed = True
    monkeypatch.undo()
    assert killed, f"there are only {count} steps"
    # Resumed with or without the wish to retry: with it the end is that of an unbroken run.
    shutil.copytree(tmp_path / "bank", tmp_path / "plain")
    plain = made(videos, tmp_path / "plain", pooled())
    assert verify_bank(plain.path) == []
    assert len(plain) >= 5
    assert len(plain.teacher()) == len(plain)
    resumed = made(videos, tmp_path / "bank", pooled(), retry_failed=True)
    assert contents(resumed.path) == expected


def test_a_retry_that_an_earlier_version_left_half_done_begins_anew(videos: Path, tmp_path: Path) -> None:
    made(videos, tmp_path / "bank", pooled())
    (tmp_path / "bank" / "frames" / "00001.retried.arrow").write_bytes(b"staged")
    mend(videos)
    bank = made(videos, tmp_path / "bank", pooled(), retry_failed=True)
    assert contents(bank.path) == contents(made(videos, tmp_path / "fresh", pooled()).path)


def test_lists_of_failures_that_were_lost_or_damaged(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank")
    whole = contents(bank.path)
    bank.folder.failed_jsonl.write_bytes(b"\xff")
    assert "failed.jsonl, line 1: is damaged" in verify_bank(bank.path)[0]
    made(videos, tmp_path / "bank")  # joined anew from the shards'
    assert contents(bank.path) == whole
    bank.folder.failed(1).unlink()
    assert any("holds 1 videos instead of 2" in problem for problem in verify_bank(bank.path))
    with pytest.raises(
        SosamplerError, match=r"0 failed videos are listed, bank.json counts 1; `sosampler bank verify` reports"
    ):
        made(videos, tmp_path / "bank")
    bank.folder.frames(2).unlink()
    with pytest.raises(
        SosamplerError, match=r"00001.arrow: holds 1 videos and 0 are listed as failed, of 2; delete it"
    ):
        made(videos, tmp_path / "bank")
    bank.folder.frames(1).unlink()
    made(videos, tmp_path / "bank")
    assert contents(bank.path) == whole
