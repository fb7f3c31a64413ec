"""Banks: what is written is what is read, at random and by split; subsets; and what is said about broken ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sosampler._util.progress import Progress
from sosampler.bank.bank import Bank, decode_jpeg
from sosampler.bank.format import BankHeader
from sosampler.bank.from_arrays import FrameEntry, subset, write_frames
from sosampler.bank.inspect import bank_info, verify_bank
from sosampler.datasets.manifest import Item
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.video.candidates import stratified_positions, uniform_positions
from tests.factories import CLASSES, contents, entries, frames, teacher_by_hand


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return write_frames(tmp_path / "bank", entries(), classes=CLASSES, videos_per_shard=4)


# ---- positions


@given(st.integers(1, 200), st.integers(1, 200))
def test_uniform_positions_are_the_nearest_to_segment_centres(stored: int, count: int) -> None:
    got = uniform_positions(stored, count)
    middles = np.arange(stored) + 0.5
    for place, position in enumerate(got):
        centre = (place + 0.5) * stored / count
        assert abs(middles[position] - centre) <= np.abs(middles - centre).min() + 1e-9
    if count <= stored:
        assert len(set(got.tolist())) == count
    assert (np.diff(got) >= 0).all()


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 5))
def test_stratified_positions_take_one_of_each_segment(stored: int, count: int, seed: int) -> None:
    got = stratified_positions(stored, count, np.random.default_rng(seed))
    assert len(got) == count
    if count <= stored:
        edges = [place * stored // count for place in range(count + 1)]
        assert all(low <= position < high for position, (low, high) in zip(got, pairwise(edges), strict=True))
        assert len(set(got.tolist())) == count
    else:
        assert got.tolist() == uniform_positions(stored, count).tolist()


def test_stratified_positions_reach_every_stored_frame() -> None:
    rng = np.random.default_rng(0)
    seen = {int(position) for _ in range(200) for position in stratified_positions(10, 4, rng)}
    assert seen == set(range(10))


# ---- writing and reading


def test_what_is_written_is_read(bank: Bank) -> None:
    assert len(bank) == 10
    assert bank.classes == CLASSES
    for number, (item, entry) in enumerate(zip(bank, entries(), strict=True)):
        assert (item.id, item.labels, item.split, item.group) == (entry.id, entry.labels, entry.split, entry.group)
        assert item.pts_seconds.tolist() == (np.arange(3 + number) / 2).tolist()
        assert item.frame_indices.tolist() == list(range(3 + number))
        assert item.duration == (3 + number) / 2
        np.testing.assert_allclose(item.positions, np.arange(3 + number) / (3 + number), atol=1e-6)
        difference = np.abs(item.frames().astype(int) - np.asarray(entry.frames).astype(int))
        assert item.frames().shape == (3 + number, 32, 48, 3)
        assert difference.mean() < 6


def test_random_access_and_negative_numbers(bank: Bank) -> None:
    for number in (7, 0, 9, -1, 4, np.int64(3)):
        assert bank[number].id == f"v{number % 10}"
    with pytest.raises(IndexError, match=r"0\.\.9"):
        bank[10]


def test_slices_are_lists(bank: Bank) -> None:
    answers = teacher_by_hand(bank)
    assert [item.id for item in bank[2:9:3]] == ["v2", "v5", "v8"]
    assert [item.id for item in bank[-2:]] == ["v8", "v9"]
    assert [item.frame_probs.tolist() for item in bank.teacher()[:2]] == [answers[0].tolist(), answers[1].tolist()]


def test_frames_by_position_and_size(bank: Bank) -> None:
    item = bank[6]
    everything = item.frames()
    assert (item.frames([4, 1, 1]) == everything[[4, 1, 1]]).all()
    assert item.frames([], size=16).shape == (0, 16, 24, 3)
    assert item.frames([0], size=16).shape == (1, 16, 24, 3)
    assert item.frames([0], size=(10, 20)).shape == (1, 10, 20, 3)
    small, fast = item.frames([2], size=16).astype(int), item.frames([2], size=16, fast=True).astype(int)
    assert small.shape == fast.shape
    assert np.abs(small - fast).mean() < 4
    assert (decode_jpeg(item.jpegs[5]) == everything[5]).all()
    for bad in ([9], [-1], [[0, 1]]):
        with pytest.raises(InvalidArgument, match="from 0 to 8"):
            item.frames(bad)


def test_splits_and_pickles(bank: Bank) -> None:
    dev = bank.split("dev")
    assert [item.id for item in dev] == ["v2", "v6"]
    assert len(pickle.dumps(bank)) < 500
    assert [item.id for item in pickle.loads(pickle.dumps(dev))] == ["v2", "v6"]
    with pytest.raises(InvalidArgument, match="train, dev, test"):
        bank.split("val")


def test_teachers_stand_beside_their_videos(bank: Bank) -> None:
    answers = teacher_by_hand(bank)
    teacher = bank.teacher()
    for row in (9, 0, 5):
        assert (teacher[row].frame_probs == answers[row]).all()
        assert teacher[row].frame_probs.dtype == np.float16
        assert (teacher[row].features == 10 * answers[row].astype(np.float32)).all()
    of_test = pickle.loads(pickle.dumps(bank.split("test").teacher("f" * 16)))
    assert [item.frame_probs.tolist() for item in of_test] == [answers[3].tolist(), answers[7].tolist()]


def test_the_right_teacher_is_found_and_others_are_named(bank: Bank) -> None:
    class Other:
        name = "other"

        def fingerprint(self) -> str:
            return "0123456789abcdef"

    with pytest.raises(InvalidArgument, match=r"it has: none.*sosampler prepare"):
        bank.teacher()
    teacher_by_hand(bank)
    teacher_by_hand(bank, "f" * 16 + "-3views", views=3)
    with pytest.raises(InvalidArgument, match=r"'other' with fingerprint 0123456789abcdef is not in.*by hand"):
        bank.teacher(Other())
    with pytest.raises(InvalidArgument, match="several fit"):
        bank.teacher()
    assert bank.teacher("f" * 16).about["views"] == 1  # its name
    assert bank.teacher("f" * 16, views=3).about["views"] == 3
    bank.folder.teacher("f" * 16).shard(1).unlink()
    with pytest.raises(SosamplerError, match="1 of 3 parts of this teacher are missing"):
        bank.teacher(views=1)


def test_jpegs_are_stored_as_they_are(tmp_path: Path, bank: Bank) -> None:
    jpegs = bank[0].jpegs
    copy = write_frames(tmp_path / "copy", [FrameEntry("a", (0,), lambda: jpegs)], classes=CLASSES)
    assert copy[0].jpegs == jpegs
    assert copy[0].pts_seconds.tolist() == [0, 1, 2]


def test_a_bank_needs_no_torch_and_no_decoder(bank: Bank) -> None:
    hide = "import sys\nfor name in ('torch', 'av', 'torchvision', 'onnxruntime'): sys.modules[name] = None\n"
    code = f"{hide}from sosampler.bank.bank import Bank\nprint(Bank({str(bank.path)!r})[3].frames(size=20).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(6, 20, 30, 3)\n", done.stderr


def test_entries_are_called_once_each_and_not_again(tmp_path: Path) -> None:
    called: list[int] = []

    def entry(number: int, fails: bool = False) -> FrameEntry:
        def give() -> np.ndarray:
            if fails:
                raise KeyError("the power is gone")
            called.append(number)
            return frames(number, 2)

        return FrameEntry(f"v{number}", (0,), give)

    listed = [entry(number, fails=number == 5) for number in range(8)]
    with pytest.raises(KeyError, match="power"):
        write_frames(tmp_path / "bank", listed, classes=CLASSES, videos_per_shard=2, made_by={"seed": 1})
    assert sorted(path.name for path in (tmp_path / "bank" / "frames").iterdir()) == [
        f"0000{shard}.{suffix}" for shard in range(2) for suffix in ("arrow", "sha256")
    ]
    with pytest.raises(SosamplerError, match="not finished"):
        Bank(tmp_path / "bank")
    assert [item.id for item in Bank(tmp_path / "bank", partial=True)] == ["v0", "v1", "v2", "v3"]
    called.clear()
    mended = [entry(number) for number in range(8)]
    with pytest.raises(InvalidArgument, match=r"made_by=\{'seed': 1\}, now \{'seed': 2\}"):
        write_frames(tmp_path / "bank", mended, classes=CLASSES, videos_per_shard=2, made_by={"seed": 2})
    resumed = write_frames(tmp_path / "bank", mended, classes=CLASSES, videos_per_shard=2, made_by={"seed": 1})
    assert called == [4, 5, 6, 7]
    unbroken = write_frames(tmp_path / "other", mended, classes=CLASSES, videos_per_shard=2, made_by={"seed": 1})
    assert contents(resumed.path) == contents(unbroken.path)


def test_threads_change_nothing(tmp_path: Path, bank: Bank) -> None:
    threaded = write_frames(tmp_path / "b", entries(), classes=CLASSES, videos_per_shard=4, workers=3)
    assert contents(threaded.path) == contents(bank.path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"frames": np.zeros((2, 8, 8, 3), np.float32)}, r"float32 \[2, 8, 8, 3\]; must be uint8"),
        ({"frames": np.zeros((0, 8, 8, 3), np.uint8)}, "at least one frame"),
        ({"frames": [b"no picture"]}, "not a JPEG"),
        ({"frames": []}, "0 JPEGs"),
        ({"pts_seconds": [0.0]}, "pts_seconds of shape"),
        ({"pts_seconds": [1.0, 0.0]}, "in time order"),
        ({"frame_indices": [3, 3]}, "frame_indices"),
        ({"labels": (3,)}, "between 0 and 2"),
        ({"labels": ()}, "exactly one"),
        ({"labels": (0.5,)}, "must be ints"),
        ({"duration": float("nan")}, "duration of 'a'=nan"),
        ({"duration": -3.0}, "duration of 'a'=-3.0"),
        ({"total_num_frames": 0}, "total_num_frames of 'a'=0"),
    ],
)
def test_bad_entries(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    given_entry = {"id": "a", "labels": (0,), "frames": frames(0, 2)} | change
    with pytest.raises(InvalidArgument, match=said):
        write_frames(tmp_path / "bank", [FrameEntry(**given_entry)], classes=CLASSES)


def test_numbers_of_numpy_and_tuples_are_taken(tmp_path: Path) -> None:
    listed = [
        FrameEntry("a", (np.int64(1),), frames(0, 2), duration=np.float32(2), total_num_frames=np.int64(9)),
        FrameEntry("b", np.array([2]), frames(1, 2)),  # type: ignore[arg-type]
    ]
    made_by = {"sizes": (1, 2)}
    bank = write_frames(tmp_path / "bank", listed, classes=CLASSES, made_by=made_by)
    assert [item.labels for item in bank] == [(1,), (2,)]
    assert (bank[0].duration, bank[0].total_num_frames) == (2.0, 9)
    assert len(write_frames(tmp_path / "bank", listed, classes=CLASSES, made_by=made_by)) == 2
    with pytest.raises(InvalidArgument, match="made_by="):
        write_frames(tmp_path / "other", listed, classes=CLASSES, made_by={"rng": object()})


def test_no_entries_and_doubled_ids(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least one video"):
        write_frames(tmp_path / "bank", [], classes=CLASSES)
    with pytest.raises(InvalidArgument, match="already used"):
        write_frames(tmp_path / "bank", [entries(1)[0], entries(1)[0]], classes=CLASSES)


# ---- subsets


def test_a_subset_holds_the_same_videos_and_answers(tmp_path: Path, bank: Bank) -> None:
    answers = teacher_by_hand(bank)
    small = subset(bank, tmp_path / "small", classes=["jump"])
    assert small.ids == ["v1", "v4", "v7"]
    assert small.classes == CLASSES  # so that teachers still fit
    for place, row in enumerate((1, 4, 7)):
        assert small[place].jpegs == bank[row].jpegs
        assert small[place].pts_seconds.tolist() == bank[row].pts_seconds.tolist()
        assert (small.teacher()[place].frame_probs == answers[row]).all()
    assert verify_bank(small.path) == []
    assert subset(small, tmp_path / "smaller", splits=["test"]).ids == ["v7"]


def test_a_subset_of_teachers_that_differ_in_views_only(tmp_path: Path, bank: Bank) -> None:
    answers = teacher_by_hand(bank), teacher_by_hand(bank, "f" * 16 + "-3views", views=3, seed=1)
    small = subset(bank, tmp_path / "small", splits=["test"])
    for views, told in zip((1, 3), answers, strict=True):
        assert (small.teacher("f" * 16, views=views)[1].frame_probs == told[7]).all()
    assert verify_bank(small.path) == []


def test_a_subset_that_was_broken_off_goes_on(tmp_path: Path, bank: Bank) -> None:
    teacher_by_hand(bank)
    whole = subset(bank, tmp_path / "whole", limit=9)

    def stop(progress: Progress) -> None:
        if progress.done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subset(bank, tmp_path / "broken", limit=9, on_progress=stop)
    assert sorted(path.name for path in (tmp_path / "broken" / "frames").glob("*.arrow")) == ["00000.arrow"]
    assert contents(subset(bank, tmp_path / "broken", limit=9).path) == contents(whole.path)


def test_a_limit_is_spread_over_splits_and_classes(tmp_path: Path) -> None:
    # 30 videos of class 0 stand before 5 of class 1 and 5 of class 2.
    labels = [0] * 30 + [1] * 5 + [2] * 5
    listed = [FrameEntry(f"v{number}", (label,), frames(0, 1)) for number, label in enumerate(labels)]
    big = write_frames(tmp_path / "bank", listed, classes=CLASSES)
    small = subset(big, tmp_path / "small", limit=9)
    assert [item.labels[0] for item in small] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("max_mb", [0.1, 0.3, 10.0])
def test_a_subset_keeps_below_its_megabytes(tmp_path: Path, max_mb: float) -> None:
    listed = [FrameEntry(f"v{number}", (0,), frames(number, 4, height=240, width=320)) for number in range(12)]
    bank = write_frames(tmp_path / "bank", listed, classes=CLASSES, videos_per_shard=4)
    teacher_by_hand(bank)
    small = subset(bank, tmp_path / "small", max_mb=max_mb)
    size = sum(len(data) for data in contents(small.path).values())
    one_video = sum(len(data) for data in contents(bank.path).values()) / 12
    assert size <= max_mb * 1e6
    assert len(small) == 12 or size > max_mb * 1e6 - 2 * one_video
    assert (len(small) == 12) == (max_mb == 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"classes": ["fly"]}, "no class 'fly'"),
        ({"max_mb": 0.001}, "no video is left"),
        ({"limit": 0}, "limit=0"),
        ({"splits": ["val"]}, "train, dev, test"),
    ],
)
def test_bad_subsets(tmp_path: Path, bank: Bank, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        subset(bank, tmp_path / "small", **arguments)
    with pytest.raises(InvalidArgument, match="is the bank itself"):
        subset(bank, bank.path, limit=1)


# ---- a look inside


def test_info_counts(bank: Bank) -> None:
    teacher_by_hand(bank)
    info = bank_info(bank.path)
    assert info["num_videos"] == 10
    assert info["num_frames"] == sum(3 + number for number in range(10))
    assert info["splits"] == {"train": 6, "dev": 2, "test": 2}
    assert info["bytes"] == sum(len(data) for data in contents(bank.path).values())
    assert [teacher["complete"] for teacher in info["teachers"]] == [True]
    json.dumps(info)


def test_shards_are_plain_arrow(bank: Bank) -> None:
    table = pa.ipc.open_file(str(bank.folder.frames(1))).read_all()
    assert table.column("id").to_pylist() == ["v4", "v5", "v6", "v7"]
    assert table.column("labels").to_pylist() == [[1], [2], [0], [1]]


# ---- what frames show


def test_a_bank_knows_which_frames_show_the_class(tmp_path: Path) -> None:
    known = [
        replace(entry, shows_class=np.arange(3 + n) % 2 == 0, sources=["a", f"s{n}", "a"])
        for n, entry in enumerate(entries(4))
    ]
    known[2] = replace(known[2], shows_class=None, sources=None)
    plain, bank = write_frames(tmp_path / "plain", entries(4), classes=CLASSES), None
    for _ in range(2):  # written with what is known, and again with the same
        bank = write_frames(tmp_path / "bank", known, classes=CLASSES)
    assert bank is not None
    flags = bank[1].shows_class
    assert flags is not None
    assert flags.tolist() == [True, False, True, False]
    assert bank[1].sources == ("a", "s1")
    assert (bank[2].shows_class, bank[2].sources) == (None, None)
    assert (plain[1].shows_class, plain[1].sources) == (None, None)
    # Nothing else in the bank depends on it, and one that was written without gets it later.
    others = {name: data for name, data in contents(bank.path).items() if name != "shown.jsonl"}
    assert others == contents(plain.path)
    assert contents(write_frames(plain.path, known, classes=CLASSES).path) == contents(bank.path)
    assert verify_bank(bank.path) == []
    small = subset(bank, tmp_path / "small", splits=["train"])
    assert list(small.shown) == ["v0", "v1"]
    assert small.split("train")[1].sources == ("a", "s1")
    assert not subset(bank, tmp_path / "none", splits=["dev"]).folder.shown_jsonl.exists()


def test_what_frames_show_must_fit(tmp_path: Path) -> None:
    entry = replace(entries(1)[0], shows_class=[True, False])
    with pytest.raises(InvalidArgument, match=r"'v0': shows_class of shape \[2\] does not fit its 3 frames"):
        write_frames(tmp_path / "a", [entry], classes=CLASSES)
    right = replace(entry, shows_class=[True, False, False])
    bank = write_frames(tmp_path / "b", [right], classes=CLASSES)
    with pytest.raises(InvalidArgument, match="knows other shows_class or sources"):
        write_frames(tmp_path / "b", [replace(entry, shows_class=[True] * 3)], classes=CLASSES)
    assert write_frames(tmp_path / "b", entries(1), classes=CLASSES)[0].shows_class is not None
    text = bank.folder.shown_jsonl.read_text()
    bank.folder.shown_jsonl.write_text(text.replace("true, ", ""))
    with pytest.raises(SosamplerError, match="has 2 flags for 3 stored frames"):
        _ = Bank(bank.path)[0].shows_class
    assert verify_bank(bank.path) == [f"{bank.folder.shown_jsonl}: has 2 flags for the 3 frames of 'v0'"]


@given(st.integers(0, 30), st.integers(1, 9))
def test_shards_hold_all_items_in_turn_and_none_is_empty(num_items: int, per_shard: int) -> None:
    header = BankHeader("arrays", {}, CLASSES, False, num_items, per_shard)
    ranges = [header.shard_range(shard) for shard in range(header.num_shards)]
    assert [number for each in ranges for number in each] == list(range(num_items))
    assert all(len(each) == per_shard for each in ranges[:-1])
    assert all(len(each) for each in ranges)
    items = [Item(str(number), "x.mp4", (0,)) for number in range(num_items)]
    assert [[int(item.id) for item in header.shard_items(items, k)] for k in range(len(ranges))] == [*map(list, ranges)]
