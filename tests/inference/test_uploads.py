"""Rows at an address of a store, by an S3 server on this machine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sosampler as so
from sosampler.inference import uploads
from sosampler.video.synthetic import numbered_video
from tests.s3_server import s3_server

SECRET = "s3cret"
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server(secret=SECRET) as client:
        yield client


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sosampler" / "uploads"


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number, count in enumerate((30, 40, 50)):
        (folder / f"{number}.mp4").write_bytes(numbered_video(num_frames=count))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `select` and return the exit code and all that it printed."""

    def run(*words: Any) -> tuple[int, str]:
        from sosampler.cli.main import main

        common = ["-n", "2", "--policy", "uniform", "--no-decode"]
        monkeypatch.setattr(sys, "argv", ["sosampler", "select", *map(str, words), *common])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = "".join(capsys.readouterr())
        assert SECRET not in printed
        return int(stopped.value.code or 0), printed

    return run


def content(s3: Any, name: str) -> bytes:
    data: bytes = s3.get_object(Bucket="videos", Key=name)["Body"].read()
    return data


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_file_at_the_address_is_that_of_a_run_here(
    suffix: str, s3: Any, run: Run, videos: Path, tmp_path: Path, cache: Path
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    address, here = f"s3://videos/rows/all{suffix}", tmp_path / f"here{suffix}"
    code, printed = run(videos, "--out", address)
    assert (code, run(videos, "--out", here)[0]) == (0, 0)
    assert f"3 selections written to {address}" in printed
    found, wanted = content(s3, f"rows/all{suffix}"), here.read_bytes()
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        assert pq.read_table(io.BytesIO(found)).equals(pq.read_table(here))
    elif suffix == ".jsonl":
        rows, same = ([json.loads(line) | {"timing": None} for line in text.splitlines()] for text in (found, wanted))
        assert rows == same
    else:
        assert found == wanted
    assert not list(cache.iterdir())  # nothing is left here


def test_json_names_the_address(s3: Any, run: Run, videos: Path) -> None:
    code, printed = run(videos, "--out", "s3://videos/told.jsonl", "--json")
    assert code == 0
    assert json.loads(printed.splitlines()[0])["out"] == "s3://videos/told.jsonl"


def test_failures_are_beside_the_rows(s3: Any, run: Run, videos: Path) -> None:
    (videos / "bad.mp4").write_bytes(b"no video")
    code, printed = run(videos, "--out", "s3://videos/some.jsonl")
    assert code == 1
    assert "see s3://videos/some.jsonl.failed.jsonl" in printed
    assert len(content(s3, "some.jsonl").splitlines()) == 3
    (failure,) = map(json.loads, content(s3, "some.jsonl.failed.jsonl").splitlines())
    assert failure["video"] == str(videos / "bad.mp4")


def test_what_is_there_is_replaced_only_if_asked(s3: Any, run: Run, videos: Path) -> None:
    s3.put_object(Bucket="videos", Key="mine.jsonl", Body=b"precious")
    code, printed = run(videos, "--out", "s3://videos/mine.jsonl")
    assert code == 2
    assert "--out s3://videos/mine.jsonl: is there already; give another name, or add --overwrite" in printed
    assert content(s3, "mine.jsonl") == b"precious"
    assert run(videos, "--out", "s3://videos/mine.jsonl", "--overwrite")[0] == 0
    assert len(content(s3, "mine.jsonl").splitlines()) == 3


def test_a_run_that_was_stopped_resumes(s3: Any, run: Run, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sosampler.inference.rows.Journal.finish", stop)
        assert run(videos, "--out", "s3://videos/late.jsonl")[0] != 0
    code, printed = run(videos, "--out", "s3://videos/late.jsonl")
    assert code == 0
    assert "continuing: 3 of 3 videos are done" in printed
    assert len(content(s3, "late.jsonl").splitlines()) == 3


def test_rows_stay_here_if_the_upload_fails(
    s3: Any, run: Run, videos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads.time, "sleep", lambda _: None)

    class Broken:
        def exists(self, _: str) -> bool:
            return False

        def put_file(self, *_: str) -> None:
            raise OSError(f"https://key:{SECRET}@host")

        def _strip_protocol(self, address: str) -> str:
            return address

    monkeypatch.setattr(uploads, "store_of", lambda _: Broken())
    code, printed = run(videos, "--out", "s3://videos/lost.jsonl")
    assert code == 2
    (kept,) = cache.glob("*/lost.jsonl")
    assert "--out s3://videos/lost.jsonl: cannot be written (OSError); check" in printed
    assert f"the rows are in {kept}: upload them from there" in printed
    assert len(kept.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("https://h/rows.jsonl", "--out https://h/rows.jsonl: nothing can be written there"),
        ("s3://videos/rows", "--out s3://videos/rows: the name must end in one of: .parquet, .jsonl, .csv"),
        ("s3://videos/rows.txt", "the name must end in one of"),
        (f"s3://key:{SECRET}@videos/rows", "the name must end in one of"),
    ],
)
def test_bad_addresses(address: str, sentence: str, run: Run, videos: Path, cache: Path) -> None:
    code, printed = run(videos, "--out", address)
    assert code == 2
    assert sentence in printed
    assert not cache.exists()


def test_in_python_rows_go_to_files(videos: Path) -> None:
    from sosampler.inference.many import SelectJob
    from sosampler.inference.options import SelectOptions

    with pytest.raises(so.InvalidArgument, match="is an address; give a file or a folder here"):
        SelectJob(SelectOptions(), Path("s3://videos/rows.jsonl"))
