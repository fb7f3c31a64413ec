"""Sound in a bank: the second around each frame, silent and damaged files, resuming, and banks without it."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler._util.progress import Progress
from sosampler.bank import audio as bank_audio
from sosampler.bank.bank import Bank
from sosampler.bank.from_arrays import subset, write_frames
from sosampler.bank.inspect import bank_info, verify_bank
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.video.audio import sound_around
from sosampler.video.synthetic import numbered_video
from tests.clips import click_at, video_with_sound
from tests.factories import CLASSES, contents, entries

RATE = 16_000


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four that can be read: a click at 1.0 s, one at 3.0 s, no audio track, a part of the second; and a broken one."""
    folder = tmp_path_factory.mktemp("videos")
    video_with_sound(folder / "one.mp4", click_at(1.0, seconds=4.0))
    video_with_sound(folder / "three.mkv", click_at(3.0, seconds=4.0), codec="flac")
    numbered_video(folder / "silent.mp4", num_frames=40, width=64, height=48)
    (folder / "broken.mp4").write_bytes(b"this is not a video")
    rows = ["one.mp4,a,x,,", "broken.mp4,b,y,,", "silent.mp4,c,x,,", "three.mkv,d,y,,", "three.mkv,e,y,2.0,4.0"]
    (folder / "m.csv").write_text("path,id,label,start,end\n" + "\n".join(rows) + "\n")
    return folder


def prepared(videos: Path, out: Path, **options: Any) -> Bank:
    options = {"num_candidates": 8, "videos_per_shard": 2, "workers": 0, "audio": True} | options
    return so.prepare(videos / "m.csv", out=out, **options)


@pytest.fixture(scope="module")
def bank(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return prepared(videos, tmp_path_factory.mktemp("banks") / "bank")


def test_each_frame_has_the_second_around_it(bank: Bank, videos: Path) -> None:
    audio = bank.audio()
    assert len(audio) == len(bank) == 4
    for index, (path, click) in {0: ("one.mp4", 1.0), 2: ("three.mkv", 3.0), 3: ("three.mkv", 3.0)}.items():
        times, heard = bank[index].pts_seconds, audio[index]
        assert heard.spectra.shape == (len(times), 64, 100)
        assert heard.spectra.dtype == np.float16
        np.testing.assert_array_equal(heard.spectra, sound_around(videos / path, times).spectra)
        loud = heard.spectra.max(axis=(1, 2)) > 5
        assert loud.any()
        assert loud.tolist() == (np.abs(times - click) < 0.51).tolist()
        assert (heard.has_audio, heard.notes) == (True, ())
    assert bank[3].pts_seconds[0] >= 2.0


def test_silent_files_are_flagged_and_noted(bank: Bank) -> None:
    silent = bank.audio()[1]
    assert (silent.has_audio, silent.notes) == (False, ("the file has no audio track",))
    assert silent.spectra.shape == (8, 64, 100)
    assert not silent.spectra.any()
    assert [bank.audio().has_audio(index) for index in range(4)] == [True, False, True, True]


def test_what_is_said_of_it(bank: Bank) -> None:
    info = bank_info(bank.path)["audio"]
    assert (info["bands"], info["columns"], info["sample_rate"], info["seconds"]) == (64, 100, RATE, 1.0)
    assert (info["num_silent"], info["complete"]) == (1, True)
    assert bank.has_audio
    assert repr(bank.audio()) == "Audio('log-mel', 4 videos, 64 x 100 around each frame)"
    assert verify_bank(bank.path) == []
    again = pickle.loads(pickle.dumps(bank.audio()))
    np.testing.assert_array_equal(again[0].spectra, bank.audio()[0].spectra)
    np.testing.assert_array_equal(bank.split("train").audio()[0].spectra, bank.audio()[0].spectra)


def test_a_bank_without_sound_is_as_ever(bank: Bank, videos: Path, tmp_path: Path) -> None:
    """Sound is a folder of its own; added later, it is the same."""
    plain = prepared(videos, tmp_path / "plain", audio=False)
    with_sound = contents(bank.path)
    assert contents(plain.path) == {name: data for name, data in with_sound.items() if not name.startswith("audio/")}
    assert bank_info(plain.path)["audio"] is None
    with pytest.raises(InvalidArgument, match=rf"no sound; .*: sosampler prepare MANIFEST --audio --out {plain.path}$"):
        plain.audio()
    before = (plain.path / "frames" / "00000.arrow").stat().st_mtime_ns
    prepared(videos, plain.path)
    assert contents(plain.path) == with_sound
    assert (plain.path / "frames" / "00000.arrow").stat().st_mtime_ns == before  # no frame was decoded again


def test_a_bank_of_arrays_has_no_sound(tmp_path: Path) -> None:
    bank = write_frames(tmp_path / "bank", entries(2), classes=CLASSES)
    with pytest.raises(InvalidArgument, match="this bank has no sound; its frames do not come from video files"):
        bank.audio()
    with pytest.raises(InvalidArgument, match="audio controls how videos are decoded, but without a manifest none is"):
        so.prepare(None, None, bank.path, audio=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_was_interrupted_continues(
    bank: Bank, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    calls: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        if progress.stage == "sound":
            calls.append(progress)
            if len(calls) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(videos, tmp_path / "bank", workers=workers, on_progress=interrupt)
    partial = Bank(tmp_path / "bank")
    with pytest.raises(SosamplerError, match=r"2 of 3 parts of its sound are missing; .* with --audio"):
        partial.audio()
    assert bank_info(partial.path)["audio"]["complete"] is False
    steps: list[tuple[str, int, int]] = []
    prepared(videos, partial.path, workers=workers, on_progress=lambda at: steps.append((at.stage, at.done, at.before)))
    assert steps == [("sound", 3, 2), ("sound", 4, 2), ("sound", 5, 2)]
    assert contents(partial.path) == contents(bank.path)


def test_a_broken_track_and_a_dead_process_end_no_run(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sound_around

    def breaks(path: Path, pts_seconds: np.ndarray, **options: Any) -> Any:
        if path.name == "three.mkv":
            raise ValueError("strange data")
        return real(path, pts_seconds, **options)

    monkeypatch.setattr(bank_audio, "sound_around", breaks)
    audio = prepared(videos, tmp_path / "bank").audio()
    assert [audio.has_audio(index) for index in range(4)] == [True, False, False, False]
    (note,) = audio[2].notes
    assert note.startswith("its audio cannot be decoded: an unexpected error (ValueError: strange data); the file may")
    died = bank_audio.AudioTask("/v/a.mp4", np.zeros(3), so.Limits())
    with bank_audio.AudioReader(1) as reader:
        reader._first = b"no server"  # the process ends at once
        (sound,) = reader.results([died])
    assert not sound.has_audio
    assert sound.spectra.shape == (3, 64, 100)
    assert "the process that decoded it ended with" in sound.notes[0]
    assert "/v/" not in sound.notes[0]


def test_a_file_that_has_gone_is_named(videos: Path, tmp_path: Path) -> None:
    for name in ("one.mp4", "silent.mp4", "three.mkv", "broken.mp4", "m.csv"):
        (tmp_path / name).write_bytes((videos / name).read_bytes())
    prepared(tmp_path, tmp_path / "bank", audio=False)
    (tmp_path / "silent.mp4").unlink()
    with pytest.raises(InvalidArgument, match=r"silent\.mp4: no such file, although the bank has frames of it"):
        prepared(tmp_path, tmp_path / "bank")


def test_retried_videos_get_their_sound(bank: Bank, videos: Path, tmp_path: Path) -> None:
    for name in ("one.mp4", "silent.mp4", "three.mkv", "broken.mp4", "m.csv"):
        (tmp_path / name).write_bytes((videos / name).read_bytes())
    first = prepared(tmp_path, tmp_path / "bank")
    (tmp_path / "broken.mp4").write_bytes((videos / "one.mp4").read_bytes())
    retried = prepared(tmp_path, first.path, retry_failed=True)
    assert len(retried) == 5
    np.testing.assert_array_equal(retried.audio()[1].spectra, bank.audio()[0].spectra)
    assert verify_bank(retried.path) == []


def test_a_subset_keeps_it(bank: Bank, tmp_path: Path) -> None:
    small = subset(bank, tmp_path / "small", classes=["y"])
    assert small.ids == ["d", "e"]
    np.testing.assert_array_equal(small.audio()[1].spectra, bank.audio()[3].spectra)


def test_damage_is_found(bank: Bank, videos: Path, tmp_path: Path) -> None:
    copy = prepared(videos, tmp_path / "bank")
    shard = copy.path / "audio" / "log-mel" / "00000.arrow"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x7C
    shard.write_bytes(data)
    (problem,) = verify_bank(copy.path)
    assert str(shard) in problem
    shard.unlink()
    (problem,) = verify_bank(copy.path)
    assert re.search(r"is missing; run the same `sosampler prepare` with --audio", problem)
    header = copy.path / "audio" / "log-mel" / "audio.json"
    header.write_text(header.read_text().replace('"hop": 160', '"hop": 80'))
    with pytest.raises(InvalidArgument, match="this sound was prepared with hop=80, now 160; delete this folder"):
        prepared(videos, copy.path)
