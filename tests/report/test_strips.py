"""Pictures of a report come from the bank that was evaluated, or there are none."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sosampler.bank.bank import Bank
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.evaluation.evaluate import evaluate
from tests.factories import LABELS, TAUGHT_LENGTHS, random_logits, teach, write_bank
from tests.report.runs import CLASSES, text_of, write_made_up_run

IDS = ("a", "b", "c")
RED, BLUE = (200, 0, 0), (0, 0, 200)


def make_bank(
    path: Path,
    colour: tuple[int, int, int] = RED,
    *,
    frames: int = 6,
    times: Any = None,
    ids: Sequence[str] = IDS,
    **options: Any,
) -> Path:
    entries = [
        FrameEntry(
            id=name,
            labels=(number % 3,),
            frames=np.full((frames, 48, 64, 3), colour, np.uint8),
            pts_seconds=times,
            split="test",
        )
        for number, name in enumerate(ids)
    ]
    return write_frames(path, entries, classes=CLASSES, **options).path


def colours(text: str) -> set[tuple[bool, ...]]:
    """Of all pictures: which of red, green and blue are bright."""
    found = re.findall(r'data:image/jpeg;base64,([^"]+)', text)
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in found]
    return {tuple(bool(part > 100) for part in picture[5, 5]) for picture in pictures}


IS_RED, IS_BLUE = {(True, False, False)}, {(False, False, True)}


# ---- a bank that is another one


def test_frames_of_other_times_are_not_shown(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, bank=str(tmp_path / "bank"))
    make_bank(tmp_path / "bank")
    assert colours(text_of(tmp_path / "run", out=tmp_path)) == IS_RED
    others: dict[str, dict[str, Any]] = {
        "finer": {"frames": 12, "times": 0.5 * np.arange(12)},
        "shifted": {"times": np.arange(6) + 0.002},
        "fewer": {"frames": 4},
    }
    for name, options in others.items():
        shutil.rmtree(tmp_path / "bank")
        make_bank(tmp_path / "bank", **options)
        notes: list[str] = []
        text = text_of(tmp_path / "run", out=tmp_path, say=notes.append)
        assert "<img" not in text, name
        assert "but it has other frames" in notes[0]
        with pytest.raises(InvalidArgument, match=r"--bank .*: it has other frames; give the bank"):
            text_of(tmp_path / "run", out=tmp_path, bank=tmp_path / "bank")


def test_times_may_differ_by_what_was_rounded(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, bank=str(tmp_path / "bank"))
    make_bank(tmp_path / "bank", times=np.arange(6) + 0.0004)
    assert colours(text_of(tmp_path / "run", out=tmp_path)) == IS_RED


def test_a_bank_without_the_classifier_is_another_one(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, LABELS)
    teach(bank, random_logits(TAUGHT_LENGTHS, LABELS))
    found = evaluate(Bank(bank.path), ["uniform"], num_frames=2, num_candidates=6, bootstrap=0, say=lambda text: None)
    run = found.write_run(tmp_path / "run")
    assert "<img" in text_of(run, out=tmp_path)
    shutil.rmtree(bank.path / "teachers")
    notes: list[str] = []
    assert "<img" not in text_of(run, out=tmp_path, say=notes.append)
    assert "but it lacks the outputs of the classifier" in notes[0]


def test_a_relative_path_is_first_looked_for_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bank(tmp_path / "here" / "bank", RED)
    make_bank(tmp_path / "demo" / "bank", BLUE)
    write_made_up_run(tmp_path / "demo", ids=IDS, bank="bank")
    monkeypatch.chdir(tmp_path / "here")
    assert colours(text_of(tmp_path / "demo", out=tmp_path)) == IS_BLUE
    shutil.rmtree(tmp_path / "demo" / "bank")
    assert colours(text_of(tmp_path / "demo", out=tmp_path)) == IS_RED  # what it meant where it was started


@pytest.mark.parametrize("told", ["b" * 5000, "\0", None, 3, ""])
def test_what_can_be_no_path_is_no_bank(tmp_path: Path, told: Any) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, bank=told)
    notes: list[str] = []
    text_of(tmp_path / "run", out=tmp_path, say=notes.append)
    assert notes[0].startswith("No frames are shown")


# ---- a bank with damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_what_cannot_be_read_is_left_out_and_told(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, bank=str(tmp_path / "bank"))
    make_bank(tmp_path / "bank", videos_per_shard=1)
    shards = sorted((tmp_path / "bank" / "frames").glob("*.arrow"))
    assert len(shards) == 3
    damage(shards[1])
    notes: list[str] = []
    text = text_of(tmp_path / "run", out=tmp_path, say=notes.append)
    assert text.count("<img") == 2 * 6
    assert text.count('class="strip"') == 3
    (note,) = notes
    assert note.startswith("No frames are shown of b, because they cannot be read: ")
    with pytest.raises(SosamplerError, match=re.escape(shards[1].name)):
        text_of(tmp_path / "run", out=tmp_path, bank=tmp_path / "bank")


# ---- one bank for several runs


def test_a_given_bank_is_used_where_it_fits(tmp_path: Path) -> None:
    make_bank(tmp_path / "other", BLUE, ids=("d", "e", "f"))
    write_made_up_run(tmp_path / "mine", ids=IDS, bank="not/there")
    write_made_up_run(tmp_path / "theirs", ids=("d", "e", "f"), bank=str(tmp_path / "other"))
    runs = tmp_path / "mine", tmp_path / "theirs"
    given = make_bank(tmp_path / "given", RED)
    assert colours(text_of(*runs, out=tmp_path, bank=given)) == IS_RED | IS_BLUE
    with pytest.raises(InvalidArgument, match=r"--bank .*holds other videos"):
        text_of(*runs, out=tmp_path, bank=make_bank(tmp_path / "neither", ids=("x",)))


def test_a_given_bank_must_be_there(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS)
    for run in (tmp_path / "run", tmp_path / "run" / "evaluation.json"):
        for bank in (tmp_path / "no", tmp_path / ("b" * 300)):
            with pytest.raises(InvalidArgument, match=r"--bank .*it is not there"):
                text_of(run, out=tmp_path, bank=bank)
