"""Broken banks: every damage is named in a sentence by whoever meets it, and `verify` finds all of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sosampler import wrap_classifier
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder
from sosampler.bank.from_arrays import subset, write_frames
from sosampler.bank.inspect import bank_info, verify_bank
from sosampler.bank.prepare import add_teacher
from sosampler.bank.writer import writing_bank
from sosampler.errors import InvalidArgument, SosamplerError
from tests.factories import CLASSES, contents, entries, small_net, teacher_by_hand


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return write_frames(tmp_path / "bank", entries(), classes=CLASSES, videos_per_shard=4)


def test_another_version_is_refused(bank: Bank) -> None:
    told = json.loads(bank.folder.bank_json.read_text())
    bank.folder.bank_json.write_text(json.dumps({**told, "version": 2}))
    with pytest.raises(SosamplerError, match="has version 2, this sosampler reads version 1"):
        Bank(bank.path)


def test_what_is_no_bank_is_refused(tmp_path: Path, bank: Bank) -> None:
    with pytest.raises(InvalidArgument, match="holds no bank"):
        Bank(tmp_path)
    (tmp_path / "bank.json").write_text('{"kind": "recipe"}')
    with pytest.raises(SosamplerError, match="not the header of a sosampler bank"):
        Bank(tmp_path)
    (tmp_path / "bank.json").write_text("{")
    with pytest.raises(SosamplerError, match="not JSON"):
        Bank(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "bank.json").unlink()
    shutil.rmtree(bank.path)
    with pytest.raises(InvalidArgument, match="holds other files"):
        write_frames(tmp_path, entries(1), classes=CLASSES)
    with pytest.raises(InvalidArgument, match="is a file"):
        write_frames(tmp_path / "notes.txt", entries(1), classes=CLASSES)


def test_one_writer_at_a_time(bank: Bank) -> None:
    with (
        writing_bank(BankFolder(bank.path)),
        pytest.raises(SosamplerError, match=r"process \d+, this one, is writing this bank"),
    ):
        write_frames(bank.path, entries(), classes=CLASSES, videos_per_shard=4)
    write_frames(bank.path, entries(), classes=CLASSES, videos_per_shard=4)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _scribble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.rindex(b"\xff\xd8\xff")  # the last JPEG's head
    data[place : place + 40] = bytes(40)
    path.write_bytes(data)


def _rename_rows(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"v5", b"vX"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, r"00001.arrow: is damaged"),
        (Path.unlink, r"00001.arrow: this part of the bank is missing"),
        (_scribble, r"00001.arrow: row 3, 'v7', image 9 is damaged"),
        (_rename_rows, r"00001.arrow: row 1, 'v5', is 'vX'"),
    ],
)
def test_verify_names_the_damaged_shard(bank: Bank, damage: Any, said: str) -> None:
    assert verify_bank(bank.path) == []
    damage(bank.folder.frames(1))
    (problem,) = verify_bank(bank.path)
    assert said in problem
    assert "sosampler prepare" in problem


def test_verify_knows_teachers(bank: Bank) -> None:
    teacher_by_hand(bank)
    assert verify_bank(bank.path) == []
    shards = [bank.folder.teacher("f" * 16).shard(shard) for shard in range(3)]
    shutil.copy(shards[0], shards[1])
    shards[2].unlink()
    problems = verify_bank(bank.path)
    assert any("'v4', is 'v0'" in problem for problem in problems)
    assert any("00002.arrow: is missing" in problem for problem in problems)
    teacher = Bank(bank.path, partial=True).teacher()
    with pytest.raises(SosamplerError, match="row 0 is 'v0' where the bank has 'v4'"):
        teacher[4]


def test_rows_that_moved_are_noticed(bank: Bank) -> None:
    shutil.copy(bank.folder.frames(0), bank.folder.frames(1))
    with pytest.raises(SosamplerError, match="row 1 is 'v1' where the bank has 'v5'"):
        bank[5]


# ---- damage by whoever meets it


def _garbage(path: Path) -> None:
    path.write_bytes(b'{"id": 3}\n\xff\xfe\n')


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        told = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in told.items() if value != "gone"}))

    return edit


def _zeros_inside(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 4000 : middle + 4000] = bytes(8000)
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[BankFolder], Path], Callable[[Path], None]]] = {
    "items": (lambda folder: folder.items_jsonl, _garbage),
    "half of the items": (lambda folder: folder.items_jsonl, _cut),
    "no items": (lambda folder: folder.items_jsonl, Path.unlink),
    "failures": (lambda folder: folder.failed_jsonl, _garbage),
    "no videos in a shard": (lambda folder: folder.bank_json, _edit(videos_per_shard=0)),
    "no counts": (lambda folder: folder.bank_json, _edit(counts=None)),
    "no classes": (lambda folder: folder.bank_json, _edit(classes=None)),
    "no views": (lambda folder: folder.teacher("f" * 16).header, _edit(views="gone")),
    "odd features": (lambda folder: folder.teacher("f" * 16).header, _edit(features=3)),
    "a directory": (lambda folder: folder.teacher("f" * 16).header, lambda path: (path.unlink(), path.mkdir())),
    "inside of frames": (lambda folder: folder.frames(1), _zeros_inside),
    "inside of answers": (lambda folder: folder.teacher("f" * 16).shard(1), _zeros_inside),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_a_sentence_everywhere(bank: Bank, tmp_path: Path, what: str) -> None:
    teacher_by_hand(bank)
    path_of, damage = DAMAGES[what]
    damage(path_of(bank.folder))
    assert verify_bank(bank.path) != []
    with pytest.raises(SosamplerError):
        subset(bank.path, tmp_path / "small")
    if not what.startswith("inside"):
        with pytest.raises(SosamplerError):
            bank_info(bank.path)


def test_a_damaged_picture_is_told_with_its_video(bank: Bank) -> None:
    _scribble(bank.folder.frames(1))
    assert len(Bank(bank.path)[7].frames([8])) == 1
    with pytest.raises(SosamplerError, match=r"'v7', stored frame 9: a JPEG is damaged .*bank verify"):
        Bank(bank.path)[7].frames()
    with pytest.raises(SosamplerError, match=r"'v7': a JPEG is damaged .*bank verify"):
        add_teacher(bank, wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW"))


# ---- checksums


def test_every_shard_has_the_checksum_of_its_bytes(bank: Bank, tmp_path: Path) -> None:
    teacher_by_hand(bank)
    subset(bank, tmp_path / "small", limit=5)
    shards = list(tmp_path.rglob("0*.arrow"))
    assert len(shards) == 2 * 3 + 2 * 2
    for shard in shards:
        told = shard.with_suffix(".sha256").read_text()
        assert told == f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}\n"


def _change_a_picture(folder: BankFolder) -> Path:
    path = folder.frames(1)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"\xff\xd9") - 60  # inside of the last JPEG's scan
    for offset in range(4):
        data[place + offset] ^= 0x15
    path.write_bytes(data)
    return path


def _change_a_probability(folder: BankFolder) -> Path:
    path = folder.teacher("f" * 16).shard(2)
    probs = Bank(folder.path).teacher()[9].frame_probs
    data = path.read_bytes()
    assert data.count(probs.tobytes()) == 1
    path.write_bytes(data.replace(probs.tobytes(), probs[::-1].tobytes()))
    return path


def _forget_a_checksum(folder: BankFolder) -> Path:
    folder.frames(0).with_suffix(".sha256").unlink()
    return folder.frames(0)


@pytest.mark.parametrize("change", [_change_a_picture, _change_a_probability, _forget_a_checksum])
def test_verify_finds_changed_bytes(bank: Bank, change: Callable[[BankFolder], Path]) -> None:
    teacher_by_hand(bank)
    assert verify_bank(bank.path) == []
    changed = change(bank.folder)
    (problem,) = verify_bank(bank.path)
    assert problem.startswith(f"{changed}: ")
    assert "sosampler prepare" in problem


def test_verify_compares_labels_with_the_rows(bank: Bank) -> None:
    items = bank.folder.items_jsonl
    items.write_text(items.read_text().replace('"v5", "labels": [2]', '"v5", "labels": [0]'))
    (problem,) = verify_bank(bank.path)
    assert "row 1, 'v5', has {'labels': [2]" in problem


# ---- folders of others


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    for name in (".movie.part.mp4", "a.txt", "items.jsonl", "frames/00000.arrow", "frames/.0.1.part.arrow"):
        (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(InvalidArgument, match=r"holds other files \(.movie.part.mp4, a.txt, frames\)"):
        write_frames(tmp_path, entries(1), classes=CLASSES)
    assert contents(tmp_path) == before
    (tmp_path / "bank.json").write_text('{"kind": "recipe"}')
    with pytest.raises(SosamplerError, match="not the header of a sosampler bank"):
        write_frames(tmp_path, entries(1), classes=CLASSES)
    assert contents(tmp_path).keys() == before.keys() | {"bank.json"}


def test_what_a_killed_run_left_is_cleared_away_and_nothing_else(bank: Bank) -> None:
    whole = contents(bank.path)
    left = ("bank.7.part.json", "items.7.part.jsonl", "failed.7.part.jsonl")
    in_frames = ("00001.7.part.arrow", "00001.7.part.sha256", "00001.failed.7.part.jsonl", "00001.retry.7.part.arrow")
    for name in left:
        (bank.path / f".{name}").touch()
    for name in in_frames:
        (bank.folder.frames_folder / f".{name}").touch()
    (bank.path / ".mine.part.txt").touch()
    write_frames(bank.path, entries(), classes=CLASSES, videos_per_shard=4)
    assert contents(bank.path).keys() == whole.keys() | {".mine.part.txt"}


def test_a_bank_killed_at_its_very_beginning_is_begun_again(tmp_path: Path, bank: Bank) -> None:
    out = tmp_path / "again"
    (out / "frames").mkdir(parents=True)
    for name in (".lock", ".items.12.part.jsonl", ".bank.12.part.json", "items.jsonl"):
        (out / name).write_text("")
    again = write_frames(out, entries(), classes=CLASSES, videos_per_shard=4)
    assert contents(again.path) == contents(bank.path)


def test_a_lost_list_of_failures(bank: Bank) -> None:
    whole = contents(bank.path)
    bank.folder.failed_jsonl.unlink()
    (problem,) = verify_bank(bank.path)
    assert "failed.jsonl: is missing" in problem
    with pytest.raises(SosamplerError, match=r"failed.jsonl: is missing.*sosampler prepare"):
        Bank(bank.path)
    write_frames(bank.path, entries(), classes=CLASSES, videos_per_shard=4)
    assert contents(bank.path) == whole


@pytest.mark.parametrize("index", [1.7, "1", None])
def test_only_whole_numbers_name_a_video(bank: Bank, index: Any) -> None:
    teacher_by_hand(bank)
    for sequence in (bank, bank.teacher()):
        with pytest.raises(InvalidArgument, match="must be an int from 0 to 9"):
            sequence[index]
