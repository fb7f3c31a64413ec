"""`prepare`: the right frames, the classifier's own numbers, failures named, the same bytes on every way there."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import nn

from sosampler import select, wrap_classifier
from sosampler._util.progress import Progress
from sosampler.bank import decode as decode_pool
from sosampler.bank import decode as decode_worker
from sosampler.bank.bank import Bank
from sosampler.bank.format import BankFolder
from sosampler.bank.inspect import verify_bank
from sosampler.bank.prepare import add_teacher, prepare
from sosampler.bank.writer import writing_bank
from sosampler.datasets.manifest import Item, Manifest
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.video.limits import Limits
from sosampler.video.synthetic import read_number
from tests.factories import LENGTHS, Told, contents, made, make_videos, pooled, small_net


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_videos(tmp_path_factory.mktemp("videos"))


# ---- frames


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_candidates": 3},
        {"num_candidates": None, "fps": 4.0},
        {"candidates": "keyframe", "num_candidates": 2},
        {"grid": "linspace"},
        {"candidates": "snap", "num_candidates": 5, "snap_tolerance": 0.5},
    ],
)
def test_stored_frames_are_those_that_select_offers(videos: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    bank = made(videos, tmp_path / "bank", **options)
    assert bank.ids == [name for name in LENGTHS if name != "broken.mp4"]
    for item in bank:
        asked = {"num_candidates": 12} | options
        offered = select(videos / item.id, policy="all", on_short="fewer", **asked)
        assert item.frame_indices.tolist() == offered.frame_indices.tolist()
        assert item.pts_seconds.tolist() == offered.pts_seconds.tolist()
        assert [read_number(frame) for frame in item.frames()] == offered.frame_indices.tolist()
        assert item.duration == offered.metadata.duration
        assert np.abs(item.frames().astype(int) - offered.frames.astype(int)).mean() < 3


def test_random_frames_differ_between_videos_but_not_between_runs(videos: Path, tmp_path: Path) -> None:
    first = made(videos, tmp_path / "a", grid="stratified", seed=3)
    again = made(videos, tmp_path / "b", grid="stratified", seed=3)
    other = made(videos, tmp_path / "c", grid="stratified", seed=4)
    assert contents(first.path) == contents(again.path)
    assert first[0].frame_indices.tolist() != other[0].frame_indices.tolist()


@pytest.mark.parametrize(
    ("size", "shape"), [(256, (128, 192)), (64, (64, 96)), ((50, 60), (50, 60)), (None, (128, 192))]
)
def test_sizes_and_no_enlarging(videos: Path, tmp_path: Path, size: Any, shape: tuple[int, int]) -> None:
    item = made(videos, tmp_path / "bank", size=size, num_candidates=2)[0]
    assert (item.height, item.width) == shape
    assert item.frames().shape == (2, *shape, 3)


def test_parts_of_a_video(videos: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.csv"
    manifest.write_text(f"path,label,start,end\n{videos}/c.mp4,x,1,2\n{videos}/c.mp4,x,2,\n")
    bank = prepare(manifest, out=tmp_path / "bank", num_candidates=5, workers=0)
    assert [read_number(frame) for frame in bank[0].frames()] == [33, 39, 45, 51, 57]
    np.testing.assert_allclose(bank[0].positions, [0.1, 0.3, 0.5, 0.7, 0.9], atol=1e-6)
    assert bank[1].frame_indices[0] >= 60
    assert bank[1].duration == pytest.approx(100 / 30 - 2)


def test_parts_of_a_video_at_a_rate(videos: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "m.csv"
    manifest.write_text(f"path,label,start,end\n{videos}/c.mp4,x,1,2\n")
    bank = prepare(manifest, out=tmp_path / "bank", fps=5, workers=0)
    assert [read_number(frame) for frame in bank[0].frames()] == [30, 36, 42, 48, 54]


def test_folders_of_frames(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "x" / "clip"
    folder.mkdir(parents=True)
    for number in range(6):
        Image.fromarray(np.full((32, 48, 3), 40 * number, np.uint8)).save(folder / f"{number:03d}.png")
    bank = prepare(tmp_path / "data", out=tmp_path / "bank", num_candidates=3, folder_fps=2.0, workers=0)
    assert bank.ids == ["x/clip"]
    assert bank[0].frame_indices.tolist() == [1, 3, 5]
    np.testing.assert_allclose(bank[0].pts_seconds, [0.5, 1.5, 2.5])
    np.testing.assert_allclose(bank[0].frames().mean((1, 2, 3)), [40, 120, 200], atol=2)


def test_the_way_does_not_change_the_bytes(videos: Path, tmp_path: Path) -> None:
    """Processes or none, frames and classifier together or one after the other, one thread or three."""
    children = psutil.Process().children()
    together = made(videos, tmp_path / "a", pooled(), workers=2)
    assert psutil.Process().children() == children
    later = made(videos, tmp_path / "b")
    assert later.teachers == {}
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        add_teacher(later, pooled())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert contents(together.path) == contents(later.path)
    assert verify_bank(together.path) == []


# ---- failures


def test_unreadable_videos_are_listed_with_the_reason(videos: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def tell(progress: Progress) -> None:
        seen.append((progress.done, progress.failed))

    bank = made(videos, tmp_path / "bank", on_progress=tell)
    (failure,) = bank.failures
    assert failure["id"] == "broken.mp4"
    assert "not a video" in failure["error"]
    assert bank.header.counts == {"videos": 5, "failed": 1, "frames": 4 * 12 + 7}
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)]


def test_a_bank_of_failures_only_and_another_try(videos: Path, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,label\nnew.mp4,x\nother.mp4,y\n")
    bank = prepare(tmp_path / "m.csv", pooled(), tmp_path / "bank", workers=0, videos_per_shard=1)
    assert len(bank) == 0
    assert len(bank.teacher()) == 0
    assert ["no such file" in failure["error"] for failure in bank.failures] == [True, True]
    (tmp_path / "new.mp4").write_bytes((videos / "a.mp4").read_bytes())
    options: dict[str, Any] = {"workers": 0, "videos_per_shard": 1}
    assert len(prepare(tmp_path / "m.csv", pooled(), tmp_path / "bank", **options)) == 0
    bank = prepare(tmp_path / "m.csv", pooled(), tmp_path / "bank", retry_failed=True, **options)
    assert bank.ids == ["new.mp4"]
    assert len(bank.teacher()[0].frame_probs) == 64
    assert verify_bank(bank.path) == []


def test_whatever_a_file_leads_to_is_its_failure(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = decode_worker.decode_video

    def odd(task: Any) -> Any:
        if "wide" in task.path:
            raise IndexError("index 7 is out of bounds")
        return good(task)

    monkeypatch.setattr(decode_worker, "decode_video", odd)
    bank = made(videos, tmp_path / "bank")
    assert [failure["id"] for failure in bank.failures] == ["broken.mp4", "wide.mp4"]
    assert "wide.mp4: an unexpected error (IndexError: index 7 is out of bounds)" in bank.failures[1]["error"]


def test_failures_do_not_depend_on_the_working_folder(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = made(videos, tmp_path / "here")
    monkeypatch.chdir(videos)
    there = made(Path(), tmp_path / "there")
    assert contents(here.path) == contents(there.path)


def test_names_with_odd_ends_of_lines_are_one_failure(tmp_path: Path) -> None:
    items = (Item("gone\u2028x\x85\x0c.mp4", str(tmp_path / "gone\u2028x\x85.mp4"), (0,)),)
    bank = prepare(Manifest(items, ("x",)), out=tmp_path / "bank", workers=0)
    assert bank.header.counts == {"videos": 0, "failed": 1, "frames": 0}
    assert verify_bank(bank.path) == []


def test_a_rate_that_asks_for_too_many_moments(tmp_path: Path, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker, "_MAX_TIMES", 100)
    bank = made(videos, tmp_path / "bank", num_candidates=None, fps=40.0)
    assert bank.ids == ["b.mp4", "wide.mp4", "short.mp4"]  # up to 100 / 40 s
    assert "fps=40 gives 120 times" in bank.failures[0]["error"]


def test_a_video_that_kills_its_decoder_is_a_failure(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_VIDEO_SERVER", "tests.process_server:deadly")
    bank = made(videos, tmp_path / "bank", workers=2)
    assert [failure["id"] for failure in bank.failures] == ["broken.mp4", "wide.mp4"]
    assert "ended with signal SIGSEGV" in bank.failures[1]["error"]
    assert bank.ids == ["a.mp4", "b.mp4", "short.mp4", "c.mp4"]


_LIMITED = """
import resource, sys
from sosampler.bank.prepare import prepare
from sosampler.errors import SosamplerError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    prepare(sys.argv[1], out=sys.argv[2], num_candidates=12, videos_per_shard=2, workers=0)
except SosamplerError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="file size limits are of Unix")
def test_a_full_disk_keeps_what_is_finished(videos: Path, tmp_path: Path) -> None:
    whole = made(videos, tmp_path / "whole")
    sizes = [whole.folder.frames(shard).stat().st_size for shard in range(3)]
    # The largest shard does not fit; the limit acts as a full disk does.
    limit = max(sizes) - 1000
    first_large = sizes.index(max(sizes))
    command = [sys.executable, "-c", _LIMITED, str(videos / "m.csv"), str(tmp_path / "bank"), str(limit)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"cannot be written any further \(File too large\), [0-9.]+ MB are free", said)
    partial = Bank(tmp_path / "bank", partial=True)
    assert len(partial) == sum(name != "broken.mp4" for name in list(LENGTHS)[: 2 * first_large])
    assert not list((tmp_path / "bank" / "frames").glob(".*"))
    assert contents(made(videos, tmp_path / "bank").path) == contents(whole.path)


def test_too_little_free_space_is_refused_before_anything_is_written(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(SosamplerError, match=r"only 1\.0 MB of disk space are free; free at least"):
        made(videos, tmp_path / "bank")
    assert not (tmp_path / "bank" / "bank.json").exists()


class Full(Told):
    """A classifier whose answers meet a full disk."""

    def frame_probs(self, frames: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if frames.shape[-1] > 64:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().frame_probs(frames, positions)


def test_a_full_disk_while_a_classifier_is_added(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank")
    with pytest.raises(SosamplerError, match=r"any further .No space left on device.*What is finished stays valid"):
        add_teacher(bank, Full())
    with pytest.raises(SosamplerError, match=r"any further .No space left on device"):
        made(videos, tmp_path / "other", Full())


# ---- bad input


def test_two_at_once_are_refused(videos: Path, tmp_path: Path) -> None:
    with (
        writing_bank(BankFolder(tmp_path / "bank")),
        pytest.raises(SosamplerError, match=r"process \d+, this one, is writing this bank"),
    ):
        made(videos, tmp_path / "bank")


def test_other_videos_under_the_same_names_are_refused(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(videos, tmp_path / "bank")
    before = contents(tmp_path / "bank")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "m.csv").write_text((videos / "m.csv").read_text())
    with pytest.raises(InvalidArgument, match=rf"of the videos in {videos}, now {tmp_path}/other; .*videos_root.txt"):
        made(tmp_path / "other", tmp_path / "bank")
    with pytest.raises(InvalidArgument, match=r"give that folder \(root\)"):
        made(videos, tmp_path / "bank", root=tmp_path)
    (tmp_path / "linked").symlink_to(videos)
    made(tmp_path / "linked", tmp_path / "bank")
    monkeypatch.chdir(videos)
    made(Path(), tmp_path / "bank")
    assert contents(tmp_path / "bank") == before
    (tmp_path / "bank" / "videos_root.txt").unlink()  # the videos were moved
    assert len(made(tmp_path / "other", tmp_path / "bank")) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_candidates": 3, "size": 32}, "num_candidates, size control how videos are decoded"),
        ({"fps": 2.0}, "fps controls how"),
        ({"retry_failed": True}, "retry_failed controls"),
        ({"limits": Limits(max_frames=3)}, "limits controls"),
    ],
)
def test_without_a_manifest_nothing_is_said_about_decoding(
    videos: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    made(videos, tmp_path / "bank", num_candidates=2)
    with pytest.raises(InvalidArgument, match=said):
        prepare(None, pooled(), tmp_path / "bank", **options)


def test_other_settings_or_videos_are_refused(videos: Path, tmp_path: Path) -> None:
    made(videos, tmp_path / "bank")
    before = contents(tmp_path / "bank")
    with pytest.raises(InvalidArgument, match="prepared with quality=90, now 80; size=256, now 128"):
        made(videos, tmp_path / "bank", size=128, quality=80)
    other = videos / "other.csv"
    other.write_text((videos / "m.csv").read_text().replace("c.mp4,y,dev", "c.mp4,x,dev"))
    with pytest.raises(InvalidArgument, match="another manifest"):
        prepare(other, out=tmp_path / "bank", num_candidates=12, videos_per_shard=2, workers=0)
    other.write_text("".join((videos / "m.csv").read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InvalidArgument, match="another manifest"):
        prepare(other, out=tmp_path / "bank", num_candidates=12, videos_per_shard=2, workers=0)
    assert contents(tmp_path / "bank") == before
    classifier = pooled()
    add_teacher(tmp_path / "bank", classifier)
    with pytest.raises(InvalidArgument, match="this teacher was prepared with features="):
        add_teacher(tmp_path / "bank", classifier, features=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_candidates": 0}, "num_candidates=0"),
        ({"num_candidates": 5000}, "4096 frames"),
        ({"fps": 2.0}, "both given"),
        ({"num_candidates": None, "fps": -1.0}, "fps=-1.0"),
        ({"quality": 101}, "from 1 to 100"),
        ({"size": 0}, "size=0"),
        ({"candidates": "best"}, "exact, keyframe, snap"),
        ({"workers": -1}, "workers=-1"),
        ({"videos_per_shard": 0}, "videos_per_shard=0"),
        ({"seed": -1}, "seed=-1"),
        ({"folder_fps": float("nan")}, "folder_fps=nan"),
        ({"folder_fps": -5.0}, "folder_fps=-5.0"),
        ({"num_candidates": None, "fps": 1e9}, r"fps=1000000000.0 must be at most 10000 \(limits.MAX_FPS\)"),
    ],
)
def test_bad_arguments_leave_nothing_behind(videos: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        made(videos, tmp_path / "bank", **options)
    assert not (tmp_path / "bank").exists()


def test_empty_manifests(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="manifest is empty"):
        prepare(Manifest((), ("x",)), out=tmp_path / "bank")
    (tmp_path / "m.csv").write_text("path,label\n")
    with pytest.raises(InvalidArgument):
        prepare(tmp_path / "m.csv", out=tmp_path / "bank")
    assert not (tmp_path / "bank").exists()


def test_classes_must_fit(videos: Path, tmp_path: Path) -> None:
    three = wrap_classifier(small_net(classes=3), input_size=64, layout="BCHW", name="three")
    with pytest.raises(
        InvalidArgument, match=r"has 2 classes \(x, y\), but the classifier three 3 classes \(0, 1, 2\)"
    ):
        made(videos, tmp_path / "bank", three)
    swapped = pooled(class_names=["y", "x"])
    with pytest.raises(InvalidArgument, match="class 0 is 'x' here and 'y' there"):
        made(videos, tmp_path / "bank", swapped)
    assert not (tmp_path / "bank").exists()
    assert made(videos, tmp_path / "bank", pooled(class_names=["x", "y"])).teachers
    with pytest.raises(InvalidArgument, match="class 0 is 'x' here and 'y' there"):
        add_teacher(tmp_path / "bank", swapped)
    with pytest.raises(InvalidArgument, match="a Linear has no frame_probs"):
        add_teacher(tmp_path / "bank", nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="holds no bank"):
        prepare(None, pooled(), tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="without a manifest only a classifier can be run"):
        prepare(None, None, tmp_path / "bank")


def test_a_finished_bank_with_a_lost_shard(videos: Path, tmp_path: Path) -> None:
    bank = made(videos, tmp_path / "bank")
    whole = contents(bank.path)
    bank.folder.frames(1).unlink()
    with pytest.raises(SosamplerError, match=r"frames of 2 videos are missing, 'broken.mp4' is the first"):
        add_teacher(bank, pooled())
    for teacher in bank.path.glob("teachers/*/*"):
        teacher.unlink()
    made(videos, tmp_path / "bank")
    assert {name: data for name, data in contents(bank.path).items() if "teachers" not in name} == whole


# ---- memory


_PEAK = """
import sys
import time
from pathlib import Path
from sosampler._util.environment import peak_memory_mb
from sosampler.datasets.manifest import Item, Manifest
from sosampler.bank.prepare import prepare
count, video, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
items = tuple(Item(id=str(number), path=video, labels=(0,)) for number in range(count))
prepare(Manifest(items, ("x",)), out=out, quality=100, workers=1)
print(peak_memory_mb())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    from sosampler.video.synthetic import encode_video

    rng = np.random.default_rng(0)
    noise = (rng.integers(0, 256, (128, 192, 3), dtype=np.uint8) for _ in range(64))
    encode_video(noise, tmp_path / "noise.mp4", codec_options={"preset": "ultrafast", "crf": "10"})

    def peak(count: int) -> float:
        command = [sys.executable, "-c", _PEAK, str(count), str(tmp_path / "noise.mp4"), str(tmp_path / str(count))]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    few, many = peak(20), peak(200)
    held = sum(path.stat().st_size for path in (tmp_path / "200").rglob("*")) / 2**20
    assert held > 200  # so that keeping everything would show
    assert many - few < 40
    assert many < 1000
