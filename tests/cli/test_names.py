"""Names of files and classes are data: nothing in them moves the terminal, breaks a line or is run by a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sosampler as so
from sosampler._util.text import escaped
from sosampler.bank.from_arrays import write_frames
from sosampler.paper.tables import table
from tests.cli.conftest import Ran
from tests.factories import TINY, entries, make_bank

pytestmark = pytest.mark.skipif(os.name == "nt", reason="such names are not allowed there")

Command = Callable[..., Ran]
RED = "\x1b[31mred\x1b]0;title\x07"
NAMES = [f"{RED}.mp4", "two\nlines\r.mp4", "=cmd|' calc'!A0.mp4", "@x.mp4", "+1.mp4", "-1.mp4", "right\u202eleft.mp4"]


def assert_safe(text: str) -> None:
    assert escaped(text, lines=True) == text, repr(text)


@pytest.fixture
def videos(tmp_path: Path, clip: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(clip, folder / name)
    (folder / os.fsdecode(b"bytes\xff.mp4")).write_bytes(clip.read_bytes())
    (folder / "broken\x1b[2J\n.mp4").write_bytes(b"no video")
    return folder


def test_select_prints_and_writes_names_escaped(
    command: Command, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(videos)
    names = sorted(os.listdir())

    def select(*options: object) -> Ran:
        return command("select", "-n", 2, "--policy", "uniform", *options, "--", *names)

    ran = select()
    assert ran.code == 1
    assert_safe(ran.out + ran.err)
    assert r"\x1b[31mred\x1b]0;title\x07.mp4: 2 of 2" in ran.out
    assert r"two\nlines\r.mp4: 2 of 2" in ran.out
    assert r"bytes\xff.mp4: 2 of 2" in ran.out
    assert r"failed: broken\x1b[2J\n.mp4: not a video" in ran.err
    assert len(ran.out.splitlines()) == 3 * 8
    assert select("-o", tmp_path / "r.csv").code == 1
    text = (tmp_path / "r.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert_safe("".join(row["video"] for row in rows))
    written = {row["video"] for row in rows}
    assert {"'=cmd|' calc'!A0.mp4", "'@x.mp4", "'+1.mp4", "'-1.mp4", r"two\nlines\r.mp4", r"bytes\xff.mp4"} <= written
    assert not any(name.startswith(("=", "+", "-", "@")) for name in written)
    assert select("-o", tmp_path / "r.jsonl").code == 1
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {row["video"] for row in rows} >= set(NAMES)  # as they are
    for name in ("r.csv.failed.jsonl", "r.jsonl.failed.jsonl"):
        assert json.loads((tmp_path / name).read_text())["video"] == "broken\x1b[2J\n.mp4"


def test_a_refusal_is_one_line(command: Command, videos: Path) -> None:
    for path in (videos / "broken\x1b[2J\n.mp4", videos / "missing\x1b[2J\n.mp4"):
        ran = command("select", path)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        assert_safe(ran.err)


def test_classes_are_escaped(command: Command, clip: Path, tmp_path: Path) -> None:
    names = [f"{RED}", "=1+1", "plain"]
    classifier = so.create_classifier(TINY, class_names=names, input_size=32)
    so.save_classifier(classifier, tmp_path / "classifier")
    ran = command("classify", clip, "-c", tmp_path / "classifier", "--device", "cpu", "--top", 3)
    assert ran.code == 0
    assert_safe(ran.out + ran.err)
    assert r"\x1b[31mred\x1b]0;title\x07" in ran.out
    ran = command("classify", clip, "-c", tmp_path / "classifier", "--device", "cpu", "-o", tmp_path / "r.csv")
    (row,) = csv.DictReader((tmp_path / "r.csv").open(newline=""))
    assert row["label"] in (escaped(RED), "'=1+1", "plain")
    bank = write_frames(tmp_path / "bank", entries(3), classes=names)
    ran = command("bank", "info", bank.path)
    assert_safe(ran.out)
    assert r"\x1b[31mred" in ran.out


def test_names_of_policies_in_tables(command: Command, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", train=4, dev=4)
    sampler = so.SOSampler(backbone=TINY, input_size=32, num_classes=3, class_names=bank.classes)
    folder = tmp_path / "=evil\x1b[2J$x"
    sampler.save_pretrained(folder)
    out, curve = tmp_path / "e.csv", tmp_path / "e.svg"
    arguments = ("-p", "uniform", "-p", f"{folder}", "-n", 2, "-t", 4, "--bootstrap", 0, "--device", "cpu")
    ran = command("evaluate", bank.path, *arguments, "--csv", out, "--curve", curve)
    assert ran.code == 0, ran.err
    assert_safe(ran.out + ran.err)
    for row in csv.DictReader(out.open(newline="")):
        assert_safe(row["policy"])
        assert not row["policy"].startswith("=")
    assert "\x1b" not in curve.read_text(encoding="utf-8")
    row = {"title": "=1\x1b", "policy": "=1", "num_frames": 1, "num_candidates": 2, "score": -1.5, "paper": None}
    result = {
        **{"experiment": "table1", "kind": "accuracy", "title": "t", "claim": "c", "metric": "top1", "seeds": [0]},
        **{"bank": {"name": "<b>\n", "videos": 1, "split": "dev"}, "classifier": {"name": "=c"}, "paper": None},
        **{"rows": [row], "left_out": [], "elsewhere": [], "notes": [], "refused": ""},
    }
    for style in ("text", "markdown"):
        assert_safe(table(result, style))
    assert "<b>" not in table(result, "markdown")
    (line,) = csv.DictReader(io.StringIO(table(result, "csv")))
    assert (line["title"], line["classifier"], line["score"]) == (r"'=1\x1b", "'=c", "-1.5")


def test_the_log_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("sosampler").warning("left out: %s", "a\x1b[2J\nforged line")
    assert caplog.messages == [r"left out: a\x1b[2J\nforged line"]
