"""`sosampler select` and `classify` on addresses and on parts of a list: rows, names, counters and refusals."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sosampler.cli.main import main
from sosampler.inference import counters
from sosampler.inference.counters import RunCounters
from sosampler.video.discover import in_shard, labels, listed_videos
from sosampler.video.synthetic import numbered_video
from tests import web_server as web
from tests.doc_blocks import ROOT

SECRET = "s3cret"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[web.WebServer]:
    with web.serving() as server:
        yield server


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`sosampler select` in this process: exit code, standard output and standard error, without secrets."""

    def run(*words: object, command: str = "select") -> tuple[int, str, str]:
        options = ["--policy", "uniform", "-n", "2", "--retries", "0"] if command == "select" else []
        monkeypatch.setattr(sys, "argv", ["sosampler", command, *map(str, words), *options])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        assert "Traceback" not in err
        return int(stopped.value.code or 0), out, err

    return run


def secret(address: str) -> str:
    return address.replace("://", f"://me:{SECRET}@") + f"?signature={SECRET}"


def test_one_address(server: web.WebServer, clip_bytes: bytes, cli: Cli) -> None:
    address = server.add("/a.mp4", clip_bytes)
    code, out, _ = cli(secret(address), "--allow-scheme", "http", "--json")
    row = json.loads(out)
    assert (code, row["video"], row["frame_indices"]) == (0, address, [22, 67])
    assert row["transfer"] == {"bytes_read": len(clip_bytes), "file_bytes": len(clip_bytes), "requests": 1}
    code, out, _ = cli(secret(address), "--allow-scheme", "http")
    assert f"{address}: 2 of 2 exact candidates" in out
    assert re.search(r"read 0\.0 of 0\.0 MB \(100\.00 %\) in 1 requests", out)
    code, _, err = cli(secret(address))
    assert code == 2
    assert "add --allow-scheme http or" in err
    code, _, err = cli(secret(address), "--allow-scheme", "ftp")
    assert code == 2
    assert "the scheme 'ftp' is unknown; choose of: https, http, s3, gs, hf" in err


def test_a_list_of_addresses_resumes_whatever_their_signatures(
    server: web.WebServer, clip_bytes: bytes, tmp_path: Path, cli: Cli
) -> None:
    good = [server.add(f"/{number}.mp4", clip_bytes) for number in range(3)]
    missing = f"{server.url}/none.mp4"
    (tmp_path / "here.mp4").write_bytes(clip_bytes)
    names = [*good, missing]

    def write(signature: str) -> Path:
        path = tmp_path / "videos.csv"
        lines = [f"{name.replace('://', f'://me:{SECRET}@')}?signature={SECRET}{signature}" for name in names]
        path.write_text("\n".join(["path", *lines, "here.mp4"]) + "\n")
        return path

    out = tmp_path / "rows.csv"
    metrics = tmp_path / "sosampler.prom"
    allowed = ("--allow-scheme", "http", "--out", out, "--metrics", metrics)
    code, _, err = cli(write("1"), *allowed)
    assert code == 1
    assert f"failed: {missing}: not found (HTTP 404); check the address" in err
    with open(out, newline="") as file:
        assert [row["video"] for row in csv.DictReader(file)] == [*good, str(tmp_path / "here.mp4")]
    values = dict(line.rsplit(" ", 1) for line in metrics.read_text().splitlines() if line[0] != "#")
    assert values['sosampler_videos_total{result="done"}'] == "4"
    assert values['sosampler_videos_total{result="failed"}'] == "1"
    assert values["sosampler_bytes_read_total"] == str(3 * len(clip_bytes))
    assert values["sosampler_requests_total"] == "3"
    assert values["sosampler_frames_chosen_total"] == "8"
    assert values["sosampler_run_finished"] == "1"
    for path in tmp_path.iterdir():
        if path.name != "videos.csv":
            assert SECRET.encode() not in path.read_bytes(), path


def test_a_killed_run_resumes_by_shown_names(
    server: web.WebServer, clip_bytes: bytes, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sosampler.inference.rows import Journal

    addresses = [server.add(f"/{number}.mp4", clip_bytes) for number in range(3)]
    out = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "finish", lambda *_: sys.exit(9))
        assert cli(*map(secret, addresses), "--allow-scheme", "http", "--out", out)[0] == 9
    server.requests.clear()
    code, _, err = cli(*(f"{secret(address)}2" for address in addresses), "--allow-scheme", "http", "--out", out)
    assert (code, server.requests) == (0, [])
    assert "continuing: 3 of 3 videos are done" in err
    assert [json.loads(line)["video"] for line in out.read_text().splitlines()] == addresses


def test_frames_are_saved_below_the_folder(server: web.WebServer, clip_bytes: bytes, tmp_path: Path, cli: Cli) -> None:
    for path in ("/a/1.mp4", "/b/../../../1.mp4"):
        server.add(path, clip_bytes)
    where = [f"{server.url}/a/1.mp4", f"{server.url}/b/../../../1.mp4"]
    code, _, err = cli(*where, "--allow-scheme", "http", "--save-frames", tmp_path / "x" / "frames")
    assert code == 0, err
    assert len(list((tmp_path / "x" / "frames").rglob("*.jpg"))) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert labels(["https://h/a.mp4?x=1"]) == ["a.mp4"]


def test_addresses_that_would_share_a_name_are_refused(server: web.WebServer, cli: Cli) -> None:
    address = f"{server.url}/get"
    code, _, err = cli(f"{address}?id={SECRET}1", f"{address}?id={SECRET}2", "--allow-scheme", "http")
    assert code == 2
    assert f"{address}: two addresses differ only in what is not shown" in err
    assert listed_videos([f"{address}?id=1"] * 2, schemes=("http",)) == [f"{address}?id=1"]


def test_a_text_file_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a b.mp4\n\n  http://h/c.mp4  \n/d.mp4\r\n")
    found = listed_videos([str(tmp_path / "list.txt")], schemes=("http",))
    assert found == [tmp_path / "a b.mp4", "http://h/c.mp4", Path("/d.mp4")]


def test_other_commands_open_no_addresses(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"path,label\nhttps://u:{SECRET}@h/a.mp4,x\n")
    code, _, err = cli("https://h/a.mp4", command="ui")
    assert code == 2
    assert "by `select`, `classify` and `watch`" in err


# ---- parts


def test_shards_are_a_partition_that_a_longer_list_keeps() -> None:
    names = [f"s3://bucket/{number}.mp4" for number in range(1000)]
    parts = [[name for name in names if in_shard(name, number, 7)] for number in range(7)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(100 < len(part) < 190 for part in parts)
    # Fixed for ever: machines with other versions share the work.
    assert [next(n for n in range(7) if in_shard(name, n, 7)) for name in names[:6]] == [1, 3, 1, 5, 3, 1]
    assert in_shard("https://u:p@h/a.mp4?x=1", 2, 5) == in_shard("https://h/a.mp4", 2, 5)


def test_shards_on_the_command_line(tmp_path: Path, clip_bytes: bytes, cli: Cli) -> None:
    for number in range(5):
        (tmp_path / f"{number}.mp4").write_bytes(clip_bytes)
    seen: list[str] = []
    for number in (1, 2, 3):
        out = tmp_path / f"rows{number}.jsonl"
        code, _, err = cli(tmp_path, "--shard", f"{number}/3", "--out", out)
        rows = out.read_text().splitlines()
        assert code == 0
        assert f"shard {number}/3: {len(rows)} of 5 videos" in err
        seen += [Path(json.loads(row)["video"]).name for row in rows]
    assert sorted(seen) == [f"{number}.mp4" for number in range(5)]
    code, out_text, _ = cli(tmp_path / "0.mp4", "--shard", "1/1000", "--json")  # none of them
    assert (code, json.loads(out_text)["num_videos"]) == (0, 0)
    for bad in ("0/3", "4/3", "1", "a/b", "1/0", "-1/2", "1/2/3"):
        code, _, err = cli(tmp_path, f"--shard={bad}")
        assert code == 2
        assert f"--shard {bad} must be I/N with I from 1 to N" in err


# ---- documents


def test_published_bytes_are_those_of_the_file() -> None:
    from benchmarks.speed.addresses import table

    result = json.loads((ROOT / "benchmarks" / "results" / "addresses.json").read_text(encoding="utf-8"))
    assert table(result) in (ROOT / "docs" / "addresses.md").read_text(encoding="utf-8")
    for measured in result["rows"]:
        if measured["candidates"] == "keyframe":
            assert measured["duration"] >= 3600
            assert measured["bytes_read"] < 0.03 * measured["file_bytes"]


# ---- counters


def row(**values: Any) -> dict[str, Any]:
    return {"num_frames": 2, "timing": {"total": 0.5}, **values}


def test_a_large_run_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])
    run = RunCounters(1000)
    lines = []
    for number in range(20):
        now[0] += 3.0
        failed = number in (2, 5)
        run.add({"error": "x"} if failed else row(transfer={"bytes_read": 2_000_000, "requests": 5}))
        lines.append(run.estimate(1000))
    text = "estimate for 1000 videos, from the first 10: 3 s each, 0:50:00; 2 MB read of each, 2 GB"
    assert [line for line in lines if line] == [text]
    assert lines[9] == text
    few = RunCounters(99)
    for _ in range(20):
        few.add(row())
        assert few.estimate(99) is None


def test_help_and_page_tell_when_a_run_is_estimated(cli: Cli) -> None:
    page = (ROOT / "docs" / "addresses.md").read_text(encoding="utf-8")
    assert f"over {counters.MANY} videos or more prints an estimate when the first {counters.SAMPLE} are done" in page
    for command in ("select", "classify"):
        told = " ".join(cli("--help", command=command)[1].split())
        assert f"Of {counters.MANY} videos or more, an estimate" in told
        assert f"when the first {counters.SAMPLE} are done" in told


def test_metrics_are_written_whole_and_not_over_other_files(
    tmp_path: Path, clip: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.prom"
    run = RunCounters(3, path)
    assert "sosampler_run_finished 0\n" in path.read_text()
    monkeypatch.setattr(counters, "_SECONDS_BETWEEN_WRITES", 0.0)
    run.add(row(selection=row()))
    lines = path.read_text().splitlines()
    assert 'sosampler_videos_total{result="done"} 1' in lines
    for line in lines:  # as node_exporter reads it
        assert re.fullmatch(r"# (HELP|TYPE) sosampler_\w+ .+|sosampler_\w+(\{result=\"\w+\"\})? [\d.]+", line), line
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {
        re.split(r"[ {]", line)[0] for line in lines if not line.startswith("#")
    }
    assert not list(tmp_path.glob(".*"))
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    code, _, err = cli(clip, "--metrics", other)
    assert (code, other.read_text()) == (2, "mine")
    assert "does not hold metrics" in err
    code, _, err = cli(clip, "--metrics", tmp_path / "none" / "m.prom")
    assert code == 2
    assert "--metrics" in err
    assert "give a file in a folder that exists" in err


def test_processes_open_addresses_too(server: web.WebServer, clip_bytes: bytes, cli: Cli) -> None:
    addresses = [server.add(f"/{number}.mp4", numbered_video(num_frames=12)) for number in range(12)]
    server.add("/5.mp4", b"", web.status(403))
    code, out, err = cli(*map(secret, addresses), "--allow-scheme", "http", "--json", "--workers", "2")
    assert code == 1
    summary = json.loads(out)
    assert [each["video"] for each in summary["selections"]] == addresses[:5] + addresses[6:]
    assert summary["failures"][0]["video"] == addresses[5]
    assert "access is denied (HTTP 403)" in err
