"""Videos in stores that fsspec knows: what it raises becomes a sentence, and S3 by a server of its own."""

from __future__ import annotations

import fnmatch
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.video import remote
from sosampler.video.discover import listed_videos
from sosampler.video.synthetic import read_number
from tests.s3_server import s3_server

SECRET = "s3cret"


class Store:
    """A file system of fsspec, as far as it is used, with files in memory; `failures` are raised first."""

    def __init__(self, **files: bytes) -> None:
        self.files = {f"bucket/{name}.mp4": data for name, data in files.items()}
        self.failures: list[Exception] = []
        self.cut = 0

    def _strip_protocol(self, address: str) -> str:
        return address.removeprefix(f"{address.split(':')[0].lower()}://").rstrip("/")

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def info(self, path: str) -> dict[str, Any]:
        self._fail()
        if path in ("bucket", "bucket/"):
            return {"type": "directory", "size": 0}
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"type": "file", "size": len(self.files[path])}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self._fail()
        return self.files[path][start : end - self.cut]

    def glob(self, pattern: str) -> list[str]:
        self._fail()
        return [path for path in reversed(self.files) if fnmatch.fnmatch(path, pattern)]

    def find(self, path: str) -> list[str]:
        return [*self.files, f"{path}/notes.txt"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, clip_bytes: bytes) -> Store:
    store = Store(a=clip_bytes, b=clip_bytes)
    monkeypatch.setattr(remote, "store_of", lambda _: store)
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    return store


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_frames_equal_those_of_the_file(scheme: str, store: Store, clip_bytes: bytes) -> None:
    sel = so.select(f"{scheme}://bucket/a.mp4", 3, policy="uniform", schemes=(scheme,))
    assert np.array_equal(sel.frames, so.select(clip_bytes, 3, policy="uniform").frames)
    assert sel.video == f"{scheme}://bucket/a.mp4"
    assert sel.transfer == {"bytes_read": len(clip_bytes), "file_bytes": len(clip_bytes), "requests": 2}


class NoCredentialsError(Exception):
    """As botocore calls it."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(SECRET), "not found; check the address"),
        (PermissionError(f"Access Denied for {SECRET}"), r"access is denied \(PermissionError\); put a credential"),
        (NoCredentialsError(f"Unable to locate {SECRET}"), r"access is denied \(NoCredentialsError\)"),
        (PermissionError(f"The provided token has expired: {SECRET}"), "the credential has expired; get a new one"),
        (
            OSError(5, f"https://key:{SECRET}@host"),
            r"cannot be read \(OSError\); check the address",
        ),
        (RuntimeError(SECRET), r"cannot be read \(RuntimeError\)"),
    ],
)
def test_errors_are_sentences_without_secrets(error: Exception, sentence: str, store: Store) -> None:
    store.failures = [error]
    with pytest.raises(so.VideoError, match=f"^s3://bucket/a.mp4: {sentence}") as caught:
        so.select("s3://bucket/a.mp4", schemes=("s3",), limits=so.Limits(retries=0))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    store.failures = [error]
    with pytest.raises(so.VideoError) as caught:
        listed_videos(["s3://bucket/*.mp4"], schemes=("s3",))
    assert SECRET not in str(caught.value)


def test_what_may_pass_is_tried_again(store: Store) -> None:
    store.failures = [OSError("busy"), OSError("busy")]
    sel = so.select("s3://bucket/a.mp4", 2, schemes=("s3",), limits=so.Limits(retries=2))
    assert sel.transfer is not None
    assert sel.transfer["requests"] == 4
    store.failures = [FileNotFoundError(), AssertionError("is not reached")]
    with pytest.raises(so.VideoError, match="not found"):
        so.select("s3://bucket/a.mp4", 2, schemes=("s3",))
    assert len(store.failures) == 1


def test_a_store_that_stalls_lies_or_is_a_folder(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(address: str, sentence: str, **limits: Any) -> None:
        with pytest.raises(so.VideoError, match=sentence):
            so.select(address, schemes=("s3",), limits=so.Limits(retries=0, **limits))

    refused("s3://bucket", "is a folder; end it with / to take all videos below it")
    refused("s3://bucket/a.mp4", "max_read=100 bytes", max_read=100)
    store.files["bucket/empty.mp4"] = b""
    refused("s3://bucket/empty.mp4", r"the file is empty \(zero bytes\)")
    store.cut = 1
    refused("s3://bucket/a.mp4", r"\d+ bytes came where \d+ were requested")
    from sosampler._util import workers

    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "MAX_STALL_SECONDS", 0.1)
    monkeypatch.setattr(remote, "LISTING_SECONDS", 0.2)
    for name in ("info", "glob"):
        monkeypatch.setattr(store, name, lambda _: threading.Event().wait(1))
    begin = time.monotonic()
    refused("s3://bucket/a.mp4", "does not answer within 0.1 seconds")
    with pytest.raises(so.VideoError, match=r"does not answer within 0\.2 seconds"):
        listed_videos(["s3://bucket/*"], schemes=("s3",))
    assert time.monotonic() - begin < 1.8


def test_patterns_and_folders(store: Store, clip_bytes: bytes) -> None:
    def found(*addresses: str) -> list[Any]:
        return listed_videos(addresses, schemes=("s3",))

    assert found("s3://bucket/*.mp4") == ["s3://bucket/a.mp4", "s3://bucket/b.mp4"]
    assert found("s3://bucket/[b]*") == ["s3://bucket/b.mp4"]
    assert found("S3://bucket/b*") == ["s3://bucket/b.mp4"]
    assert found("s3://bucket/") == ["s3://bucket/a.mp4", "s3://bucket/b.mp4"]
    assert found("s3://bucket/a.mp4", "s3://bucket/*.mp4") == ["s3://bucket/a.mp4", "s3://bucket/b.mp4"]
    with pytest.raises(so.InvalidArgument, match=r"s3://bucket/\*.avi: there is no video; check the address"):
        found("s3://bucket/*.avi")
    with pytest.raises(so.VideoError, match="add --allow-scheme gs"):
        found("gs://bucket/*.mp4")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "'sosampler[remote]'"), ("gs", "'sosampler[gcs]'")])
def test_missing_packages_are_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(so.MissingDependency, match="pip install") as caught:
        so.select(f"{scheme}://bucket/a.mp4", schemes=(scheme,))
    assert package in str(caught.value)


# ---- S3


@pytest.fixture(scope="module")
def s3(clip_bytes: bytes) -> Iterator[Callable[..., None]]:
    """An S3 server on this machine; gives a function that uploads."""
    with s3_server(secret=SECRET) as client:
        for name in ("some/a.mp4", "some/b.mp4", "c.mp4", "notes.txt"):
            client.put_object(Bucket="videos", Key=name, Body=clip_bytes)
        yield lambda name, data: client.put_object(Bucket="videos", Key=name, Body=data)


def test_s3(s3: Callable[..., None], clip_bytes: bytes) -> None:
    sel = so.select("s3://videos/some/a.mp4", 3, policy="uniform", schemes=("s3",))
    assert [read_number(frame) for frame in sel.frames] == sel.frame_indices.tolist() == [15, 45, 75]
    assert sel.transfer == {"bytes_read": len(clip_bytes), "file_bytes": len(clip_bytes), "requests": 2}
    s3("long.mp4", clip_bytes + bytes(40 * remote.BLOCK))  # bytes behind its last box are not needed
    sel = so.select("s3://videos/long.mp4", 2, policy="uniform", candidates="keyframe", schemes=("s3",))
    assert sel.transfer is not None
    assert sel.transfer["bytes_read"] < sel.transfer["file_bytes"] / 2
    for address, sentence in (
        ("s3://videos/none.mp4", "not found"),
        ("s3://nobody/none.mp4", "not found"),
        ("s3://videos/some", "is a folder"),
    ):
        with pytest.raises(so.VideoError, match=f"^{address}: {sentence}"):
            so.select(address, schemes=("s3",))


def test_s3_patterns_on_the_command_line(
    s3: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sosampler.cli.main import main

    out = tmp_path / "rows.jsonl"
    words = ["s3://videos/some/*.mp4", "s3://videos/c.mp4", "-n", "2", "--policy", "uniform", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["sosampler", "select", *words, "--allow-scheme", "s3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code, capsys.readouterr().err
    names = [json.loads(line)["video"] for line in out.read_text().splitlines()]
    assert names == ["s3://videos/some/a.mp4", "s3://videos/some/b.mp4", "s3://videos/c.mp4"]
    assert SECRET not in out.read_text() + "".join(capsys.readouterr())


def test_an_expired_token_of_s3(s3: Callable[..., None], store: Store) -> None:
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    answer = {"Error": {"Code": "ExpiredToken", "Message": f"The provided token {SECRET} has expired."}}
    store.failures = [translate_boto_error(ClientError(answer, "GetObject"))]
    with pytest.raises(so.VideoError, match="the credential has expired; get a new one") as caught:
        so.select("s3://bucket/a.mp4", schemes=("s3",))
    assert SECRET not in str(caught.value)
