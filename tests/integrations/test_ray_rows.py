"""The folder of Parquet files that a cluster's rows go to, and lists of videos. No cluster is needed here."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

import sosampler as so
from sosampler.cli.main import main
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference import rows as parts_module
from sosampler.inference.options import SelectOptions
from sosampler.inference.rows import SELECTION_COLUMNS, Column, Journal, write_parquet, writing_parts
from sosampler.integrations.ray import rows as ray_rows
from sosampler.integrations.ray.cluster import RaySettings, pool_sizes
from sosampler.video.discover import listed_videos
from sosampler.video.synthetic import numbered_video
from tests import web_server

COLUMNS = {"video": SELECTION_COLUMNS["video"], "number": Column("int", lambda row: row["number"])}
ABOUT = {"what": "numbers", "options": {"seed": 0}}


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"video": f"/v/{number}.mp4", "number": number} for number in numbers]


def write(folder: Path, *numbers: int, about: dict[str, Any] = ABOUT) -> None:
    with writing_parts(folder, about, COLUMNS) as parts:
        for row in rows(*numbers):
            parts.add(row)


def found(folder: Path) -> list[int]:
    return sorted(pq.read_table(folder).column("number").to_pylist())


def test_a_second_run_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "ROWS_A_PART", 2)
    out = tmp_path / "rows"
    write(out, 0, 1, 2)
    assert sorted(path.name for path in out.glob("*.parquet")) == ["part-000000.parquet", "part-000001.parquet"]
    with writing_parts(out, ABOUT, COLUMNS) as parts:
        assert [parts.done(f"/v/{number}.mp4") for number in range(5)] == [True, True, True, False, False]
        parts.add(rows(3)[0])
        assert parts.num_rows == 3  # not yet written
    assert found(out) == [0, 1, 2, 3]  # as any reader of Parquet folders sees it


def test_what_was_added_before_an_error_is_kept(tmp_path: Path) -> None:
    def work() -> None:
        with writing_parts(tmp_path / "rows", ABOUT, COLUMNS) as parts:
            parts.add(rows(0)[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert found(tmp_path / "rows") == [0]


def test_half_written_files_never_count(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    write(out, 0)
    write(out, 1)
    whole = (out / "part-000001.parquet").read_bytes()
    (out / "part-000001.parquet").write_bytes(whole[: len(whole) // 2])  # what a full disk or a power cut can leave
    (out / ".part-000002.77.part.parquet").write_bytes(whole)  # what a kill leaves
    with writing_parts(out, ABOUT, COLUMNS) as parts:
        assert parts.done("/v/0.mp4")
        assert not parts.done("/v/1.mp4")
        assert parts.damaged == [1]
        parts.add(rows(1)[0])
    assert found(out) == [0, 1]
    assert not list(out.glob(".part*"))


def test_no_number_is_used_twice(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    for number in range(3):
        write(out, number)
    (out / "part-000001.parquet").unlink()
    write(out, 9)
    assert found(out) == [0, 2, 9]


def test_other_options_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows", 0)
    with pytest.raises(InvalidArgument, match="made with seed=0, now 1; give the same again to resume"):
        write(tmp_path / "rows", 1, about={"what": "numbers", "options": {"seed": 1}})
    with pytest.raises(InvalidArgument, match="what='numbers', now 'letters'"):
        write(tmp_path / "rows", 1, about={"what": "letters", "options": {"seed": 0}})
    assert found(tmp_path / "rows") == [0]


def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    with (
        writing_parts(tmp_path / "rows", ABOUT, COLUMNS),
        pytest.raises(SosamplerError, match=r"process \d+, this one, is writing here"),
    ):
        write(tmp_path / "rows", 0)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"holds other files \(notes.txt\)"):
        write(tmp_path, 0)
    with pytest.raises(InvalidArgument, match="is a file"):
        write(tmp_path / "notes.txt", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_failures_are_those_of_the_last_run(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    with writing_parts(out, ABOUT, COLUMNS) as parts:
        parts.finish([{"video": "/v/0.mp4", "error": "broken"}])
    assert json.loads((out / "_failed.jsonl").read_text()) == {"video": "/v/0.mp4", "error": "broken"}
    with writing_parts(out, ABOUT, COLUMNS) as parts:
        parts.finish([])
    assert not (out / "_failed.jsonl").exists()


def test_columns_are_those_of_the_local_file(tmp_path: Path) -> None:
    """The same names, types and values as `sosampler select --out rows.parquet` on one machine."""
    row = so.select(numbered_video(num_frames=9), 3, policy="frame-difference").to_dict() | {"video": "/v/\udcff.mp4"}
    journal = Journal(tmp_path / "local.parquet", {}, SELECTION_COLUMNS)
    journal.add(row)
    journal.finish([])
    write_parquet(tmp_path / "cluster.parquet", [row], SELECTION_COLUMNS)
    assert pq.read_table(tmp_path / "cluster.parquet").equals(pq.read_table(tmp_path / "local.parquet"))


# ---- lists of videos


def test_lists_name_videos(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for name in ("a.mp4", "deeper/b.mp4"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "l.csv").write_text("label,path\nx,a.mp4\ny,deeper/b.mp4\n")
    (tmp_path / "l.jsonl").write_text('{"path": "a.mp4"}\n\n{"path": "deeper/b.mp4", "label": 3}\n')
    pq.write_table(pa.table({"n": [1, 2], "video": ["a.mp4", "deeper/b.mp4"]}), tmp_path / "l.parquet")
    expected = [tmp_path / "a.mp4", tmp_path / "deeper/b.mp4"]
    for name in ("l.csv", "l.jsonl", "l.parquet"):
        assert listed_videos([str(tmp_path / name)]) == expected
    both = [str(tmp_path / "deeper"), str(tmp_path / "l.csv"), str(tmp_path / "l.jsonl")]
    assert listed_videos(both) == expected[::-1]  # each once, where it is first named


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("l.csv", "", "the column 'path' is missing, found: nothing"),
        ("l.csv", "file\na.mp4\n", "the column 'path' is missing, found: file"),
        ("l.csv", "path\n", "names no video"),
        ("l.csv", "path,label\na.mp4,x\n  ,y\n", "line 3: the path '  ' must be a non-empty path"),
        ("l.jsonl", "[1]\n", "line 1: is not a JSON object"),
        ("l.jsonl", '{"path": 3}\n', "line 1: the path 3 must be a non-empty path"),
        ("l.parquet", "no parquet", "cannot be read as Parquet"),
    ],
)
def test_bad_lists(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        listed_videos([str(tmp_path / name)])


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    for name in ("no.csv", "no.jsonl", "no.parquet"):
        with pytest.raises(InvalidArgument, match=r"no\."):
            listed_videos([str(tmp_path / name)])


# ---- the command line, as far as it comes without a cluster


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr("sys.argv", ["sosampler", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "ray"], "write them with --out FOLDER"),
        (["--engine", "ray", "--out", "rows.txt"], "the ending '.txt' is unknown"),
        (["--engine", "ray", "--out", "rows", "--contact-sheet", "s.png"], "--contact-sheet does not go with"),
        (["--engine", "dask", "--out", "rows"], "choose one of: local, ray"),
        (["--address", "auto"], "is of --engine ray"),
        (["--engine", "ray", "--out", "rows", "--policy", "uniform", "--device", "cuda"], "is for trained samplers"),
        (["--engine", "ray", "--out", "rows", "--workers", "0"], "decoders=0 must be"),
        (["--engine", "ray", "--out", "rows", "--address", "127.0.0.1:1"], "no Ray cluster answers there"),
    ],
)
def test_refused(
    clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "select", clip, *words) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "rows").exists()


def test_a_list_on_one_machine(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l.csv").write_text("path\nclip.mp4\nclip.mp4\ngone.mp4\n")
    assert run(monkeypatch, "select", tmp_path / "l.csv", "-n", 2, "--out", tmp_path / "o.jsonl") == 1
    (line,) = (tmp_path / "o.jsonl").read_text().splitlines()
    assert json.loads(line)["video"] == str(clip)


# ---- how wide


def test_addresses_are_known_by_what_is_shown_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker does is done here; nothing of a cluster is needed."""

    def execute(rows: list[dict[str, Any]], decode: Any, *_: Any, **__: Any) -> Iterator[Any]:
        work = ray_rows.serve((pickle.dumps(decode.arguments[0]), True))
        for row in rows:
            yield ray_rows._table([row["video"]], [work(row["video"].decode())])

    monkeypatch.setattr(ray_rows, "execute", execute)
    monkeypatch.setattr(ray_rows, "connected", lambda _: nullcontext())
    with web_server.serving() as server:
        good, bad = server.add("/a.mp4", numbered_video(num_frames=12)), f"{server.url}/none.mp4"
        options = SelectOptions(num_frames=2, policy="uniform", schemes=("http",))
        for signature in ("1", "2"):
            videos = [each.replace("://", "://me:s3cret@") + f"?key=s3cret{signature}" for each in (good, bad)]
            done = ray_rows.select_on_ray(videos, tmp_path / "rows", options)
            assert [failure["video"] for failure in done.failures] == [bad]
            assert "s3cret" not in str(done)
        assert done.num_before == 1
    assert pq.read_table(tmp_path / "rows").column("video").to_pylist() == [good]


def test_addresses_that_would_share_a_row_are_refused(tmp_path: Path) -> None:
    options = SelectOptions(num_frames=2, policy="uniform", schemes=("https",))
    videos = [f"https://example.org/get?id={number}" for number in (1, 1, 2)]
    with pytest.raises(InvalidArgument, match=r"https://example\.org/get: two addresses differ only in what is not"):
        ray_rows.select_on_ray(videos, tmp_path / "rows", options)
    assert not (tmp_path / "rows").exists()


def test_pools_fit_into_the_cluster() -> None:
    for cpus in (1, 2, 3, 8, 64):
        for gpus in (0, 1, 8):
            pools = pool_sizes({"CPU": cpus, "GPU": gpus}, RaySettings(), with_network=True)
            # One of each must fit at the same time, or nothing would ever begin.
            assert 2 * pools.cpus_each <= cpus
            assert pools.gpus_each <= gpus
            assert pools.decoders >= 1
            assert pools.networks >= 1
    alone = pool_sizes({"CPU": 8}, RaySettings(decoders=3), with_network=False)
    assert (alone.decoders, alone.networks) == (3, 0)
    with pytest.raises(InvalidArgument, match="more than the cluster has"):
        pool_sizes({"CPU": 8}, RaySettings(gpus_each=1), with_network=True)
