"""`sosampler select --total`: one budget for all videos."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sosampler.video.synthetic import numbered_video
from tests.cli.conftest import Ran

NUM_CANDIDATES = 4


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collection")
    for name in ("a.mp4", "b.mp4"):
        (folder / name).write_bytes(numbered_video(num_frames=20))
    return folder


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "frames.jsonl").read_text().splitlines()]


def test_the_command(collection: Path, tmp_path: Path, command: Callable[..., Ran]) -> None:
    out = tmp_path / "out"
    ran = command("select", collection, "--total", 4, "--at-least", 1, "-t", NUM_CANDIDATES, "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["num_frames"] == 4 == len(rows_of(out))
    assert ran.json["frames"] == rows_of(out)
    ran = command("select", collection / "a.mp4", "--total", 99, "--out", out)
    assert ran.out == f"4 of 4 candidates of 1 videos; see {out / 'frames.jsonl'}\n"
    assert "note: 4 candidates for a total of 99" in ran.err
    assert "have notes" not in ran.err


def test_notes_on_videos(collection: Path, tmp_path: Path, command: Callable[..., Ran]) -> None:
    short, out = tmp_path / "short.mp4", tmp_path / "out"
    short.write_bytes(numbered_video(num_frames=3))
    words = ("select", collection, short, "--total", 2, "-t", NUM_CANDIDATES, "--out", out)
    note = "3 frames for 4 candidates; each frame is listed once"
    ran = command(*words)
    assert ran.code == 0
    assert f"1 of 3 videos have notes, such as: {note}\n" in ran.err
    assert command(*words, "--json").json["video_notes"] == [{"video": str(short), "notes": [note]}]


def test_addresses_are_refused_without_wrong_advice(tmp_path: Path, command: Callable[..., Ran]) -> None:
    ran = command("select", "http://example.org/a.mp4", "--total", 2, "--out", tmp_path / "out")
    assert ran.code == 2
    assert "http://example.org/a.mp4: is an address; a total over videos (--total) takes files of this" in ran.err
    assert "--allow-scheme" not in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--total 4", "give a folder for them with --out FOLDER"),
        ("--at-least 1", "--at-least 1 is for --total"),
        ("--total 4 --out {out} -n 3", "--num-frames does not go with --total"),
        ("--total 4 --out {out} --query dog", "--query does not go with --total"),
        ("--total 4 --out {out} --contact-sheet {out}.png", "--contact-sheet does not go with --total"),
        ("--total 4 --out {out} --save-frames {out}", "--save-frames does not go with --total"),
        ("--total 4 --out {out} --no-decode", "--no-decode does not go with --total"),
        ("--total 4 --out {out} --allow-scheme https", "--allow-scheme does not go with --total"),
        ("--total 4 --out {out} --shard 1/2", "--shard does not go with --total"),
        ("--total 4 --out {out} --engine ray", "--engine does not go with --total"),
        ("--total 1 --at-least 1 --out {out}", "raise total, or lower at_least"),
    ],
)
def test_refusals_of_the_command(
    collection: Path, tmp_path: Path, command: Callable[..., Ran], words: str, message: str
) -> None:
    ran = command("select", collection, *words.format(out=tmp_path / "out").split())
    assert ran.code == 2
    assert message in ran.err
    assert not (tmp_path / "out").exists()
