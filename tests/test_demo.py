"""The demonstration writes a film, a picture and the details, and they agree with each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sosampler import demo, open_video
from sosampler.cli.main import main

NUM_FRAMES, FPS = 1152, 24  # 48 seconds


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "made" / "here"


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    return demo.run_demo(out)


def test_three_files_are_written_and_nothing_else(out: Path, result: dict[str, Any]) -> None:
    assert {path.name for path in out.iterdir()} == {"film.mp4", "contact_sheet.png", "selection.json"}
    assert [Path(result[key]) for key in ("video", "contact_sheet", "json")] == [
        out / "film.mp4",
        out / "contact_sheet.png",
        out / "selection.json",
    ]


def test_the_details_are_the_json_of_what_was_returned(out: Path, result: dict[str, Any]) -> None:
    assert json.loads((out / "selection.json").read_text(encoding="utf-8")) == result


def test_the_film_has_the_length_it_should_have(out: Path, result: dict[str, Any]) -> None:
    reader = open_video(out / "film.mp4")
    try:
        assert reader.metadata.total_num_frames == NUM_FRAMES
        assert reader.metadata.duration == pytest.approx(NUM_FRAMES / FPS)
        assert (reader.metadata.width, reader.metadata.height) == (480, 270)
    finally:
        reader.close()


def test_each_row_chooses_eight_frames_in_time_order(result: dict[str, Any]) -> None:
    assert [row["policy"] for row in result["rows"]] == ["uniform", "keyframe", "frame-difference"]
    for row in result["rows"]:
        indices = np.array(row["frame_indices"])
        assert len(indices) == row["num_frames"] == 8
        assert (np.diff(indices) > 0).all()
        assert 0 <= indices[0] < indices[-1] < NUM_FRAMES
        assert row["pts_seconds"] == pytest.approx((indices / FPS).tolist())
        assert set(row["frame_indices"]) <= set(row["candidates"]["frame_indices"])


def test_the_rows_differ_in_the_way_their_policies_say(out: Path, result: dict[str, Any]) -> None:
    uniform, keyframe, difference = result["rows"]
    assert uniform["frame_indices"] == [72 + 144 * place for place in range(8)]
    reader = open_video(out / "film.mp4")
    try:
        keyframes = set(reader.timeline().keyframe_indices.tolist())
    finally:
        reader.close()
    assert set(keyframe["frame_indices"]) <= keyframes
    assert keyframe["candidates"]["mode"] == "keyframe"
    assert difference["num_candidates"] == 64
    assert sorted(difference["scores"]) == sorted(difference["candidates"]["scores"])[-8:]


def test_the_contact_sheet_opens_and_holds_three_blocks_of_eight(out: Path, result: dict[str, Any]) -> None:
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    assert 8 * 240 <= pixels.shape[1] <= 2400
    # Pictures of the film are strongly coloured all over; paper and text are not.
    coloured = (pixels.max(axis=2) - pixels.min(axis=2) > 40).mean(axis=1) > 0.8
    bands = np.flatnonzero(np.diff(coloured.astype(int), prepend=0, append=0))
    heights = (bands[1::2] - bands[::2]).tolist()
    assert heights == [135, 135, 135]  # 270 lines at half size


@pytest.fixture
def done_already(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> list[Path]:
    """The command gives back what the demonstration gave once; encoding the film again would show nothing new."""
    asked: list[Path] = []

    def give(out: Path) -> dict[str, Any]:
        asked.append(out)
        return result

    monkeypatch.setattr(demo, "run_demo", give)
    return asked


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sosampler", "demo", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any],
    done_already: list[Path],
) -> None:
    assert command(monkeypatch, "--out", "somewhere", "--json") == 0
    assert json.loads(capsys.readouterr().out) == result
    assert done_already == [Path("somewhere")]


def test_the_command_tells_people_what_was_chosen_and_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any],
    done_already: list[Path],
) -> None:
    assert command(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "uniform (exact): 3.00, 9.00, 15.00, 21.00, 27.00, 33.00, 39.00, 45.00 s" in printed
    assert all(result[key] in printed for key in ("video", "contact_sheet", "json"))
    assert done_already == [Path("demo")]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert command(monkeypatch, "--out", str(tmp_path / name)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"sosampler: --out {tmp_path / name}: the folder cannot be made")
