"""What users give by mistake, from the command line and from Python: one sentence that says what to do."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sosampler as so
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.samplers import export as exporting
from tests.exported_samplers import believing_folder


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sosampler", *map(str, words)], capture_output=True, text=True)


def test_notes_are_no_video(tmp_path: Path, clip: Path) -> None:
    """FFmpeg itself would draw them as a film of letters."""
    notes = tmp_path / "notes.txt"
    notes.write_text("Notes about the match, a line of usual length.\n" * 200)
    said = f"{notes}: a text file, not a video; give a video file such as .mp4, .mkv or .webm"
    alone = command("select", notes, "-n", 2)
    assert (alone.returncode, alone.stderr) == (2, f"sosampler: {said}\n")
    beside = command("select", notes, clip, "-n", 2, "--json")
    assert beside.returncode == 1
    told = json.loads(beside.stdout)
    assert [row["video"] for row in told["selections"]] == [str(clip)]
    assert said in beside.stderr
    notes.write_bytes(clip.read_bytes())
    found = command("select", notes, "-n", 2, "--policy", "uniform", "--json")
    assert json.loads(found.stdout)["frame_indices"] == [22, 67]


def test_an_id_of_the_hub_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the hub's own library is replaced but the way there."""

    def no_way(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_way)
    with pytest.raises(WeightsError, match=r"someone/sports: .*Name or service not known") as told:
        so.SOSampler.from_pretrained("someone/sports", cache_dir=tmp_path)
    assert "copy the sampler's folder (config.json, model.safetensors) to this machine and give its path" in str(
        told.value
    )
    assert "\n" not in str(told.value)


def test_a_sampler_of_another_version(clip: Path, tmp_path: Path) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(believing_folder()[0], folder)
    (folder / "model.onnx").unlink()
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**told, "attention": 8}), encoding="utf-8")
    said = r"config\.json: holds unknown settings \(attention\); .* if a newer sosampler wrote them, install that one"
    with pytest.raises(WeightsError, match=said):
        so.load_sampler(folder)
    with pytest.raises(WeightsError, match=said):
        so.select(clip, 2, policy=str(folder))


def test_an_export_to_a_place_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the sampler's own folder on a read-only disk; told before the work begins."""
    folder = tmp_path / "sampler"
    shutil.copytree(believing_folder()[0], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def read_only(*_: Any, dir: Path, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.setattr(exporting, "onnx_bytes", None)
    with pytest.raises(InvalidArgument, match=r"cannot be written \(Read-only file system\); give a place .* with out"):
        exporting.export_sampler(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_more_frames_than_there_are(clip: Path) -> None:
    """As many as asked for by repeating, with a note; fewer or an error where that is wanted."""
    done = command("select", clip, "-n", 100, "--policy", "uniform", "--json")
    told = json.loads(done.stdout)
    assert len(told["frame_indices"]) == 100
    assert told["notes"] == ["90 frames for 100 candidates; frames are repeated evenly"]
    refused = command("select", clip, "-n", 100, "--policy", "uniform", "--on-short", "error")
    assert refused.returncode == 2
    assert refused.stderr.startswith("sosampler: 100 candidates were requested but only 90 frames are there; ask for")
    assert len(refused.stderr.splitlines()) == 1
