"""What users give by mistake, from the command line and from Python: one sentence that says what to do."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import sosampler as so
from sosampler.cli.main import app, main
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.inference.options import SelectOptions
from sosampler.samplers import export as exporting
from tests.cli.conftest import Ran
from tests.factories import believing


def test_notes_are_no_video(tmp_path: Path, clip: Path, command: Callable[..., Ran]) -> None:
    """FFmpeg itself would draw them as a film of letters."""
    notes = tmp_path / "notes.txt"
    notes.write_text("Notes about the match, a line of usual length.\n" * 200)
    said = f"{notes}: a text file, not a video; give a video file such as .mp4, .mkv or .webm"
    alone = command("select", notes, "-n", 2)
    assert (alone.code, alone.err) == (2, f"sosampler: {said}\n")
    beside = command("select", notes, clip, "-n", 2, "--json")
    assert beside.code == 1
    assert [row["video"] for row in beside.json["selections"]] == [str(clip)]
    assert said in beside.err
    notes.write_bytes(clip.read_bytes())
    found = command("select", notes, "-n", 2, "--policy", "uniform", "--json")
    assert found.json["frame_indices"] == [22, 67]


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
    believing().save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**told, "attention": 8}), encoding="utf-8")
    said = r"config\.json: holds unknown settings \(attention\); .* newer sosampler"
    with pytest.raises(WeightsError, match=said):
        so.load_sampler(folder)
    with pytest.raises(WeightsError, match=said):
        so.select(clip, 2, policy=str(folder))


def test_an_export_to_a_place_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the sampler's own folder on a read-only disk; told before the work begins."""
    folder = tmp_path / "sampler"
    believing().save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def read_only(*_: Any, dir: Path, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.setattr(exporting, "onnx_bytes", None)
    with pytest.raises(
        InvalidArgument, match=r"cannot be written \(Read-only file system\); give a writable location with out"
    ):
        exporting.export_sampler(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_more_frames_than_there_are(clip: Path, command: Callable[..., Ran]) -> None:
    """The requested number by repeating, with a note; an error where that is wanted."""
    done = command("select", clip, "-n", 100, "--policy", "uniform", "--json")
    assert len(done.json["frame_indices"]) == 100
    assert done.json["notes"] == ["90 frames for 100 candidates; frames are repeated evenly"]
    refused = command("select", clip, "-n", 100, "--policy", "uniform", "--on-short", "error")
    assert refused.code == 2
    assert refused.err.endswith(
        "100 candidates were requested but only 90 frames are there; "
        'ask for fewer, or allow on_short="repeat" or "fewer"\n'
    )
    assert len(refused.err.splitlines()) == 1


# ---- one spelling for all commands


def test_summaries_are_printed_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["sosampler", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    assert "..." not in text.partition("Commands:")[2]
    assert "--install-completion" in text
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"{name} {' '.join(command.get_short_help_str(limit=1000).split())}" in text


def test_a_misspelt_command_is_corrected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sosampler", "slect", "a.mp4"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "Did you mean 'select'?" in capsys.readouterr().err


def test_select_and_classify_share_their_options() -> None:
    """The same flags, types and defaults, which are those of `select` in Python."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    select, classify = ({one.name: one for one in commands[name].params} for name in ("select", "classify"))
    own = {"num_frames", "num_candidates", "policy", "size"}  # with defaults of their own
    for name in (set(select) & set(classify)) - own:
        assert select[name].opts == classify[name].opts, name
        assert select[name].default == classify[name].default, name
        assert getattr(select[name], "help", None) == getattr(classify[name], "help", None), name
    for field in dataclasses.fields(SelectOptions):
        if field.name in select and field.name != "decoder":
            assert select[field.name].default == field.default, field.name
    for name, flags in {"out": ["--out", "-o"], "sampler": ["--sampler", "-s"], "json_output": ["--json"]}.items():
        assert select[name].opts == classify[name].opts == flags
