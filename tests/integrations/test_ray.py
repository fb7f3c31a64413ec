"""Videos on a Ray cluster: here of one machine, then of two of which one is killed in the middle."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
pytest.importorskip("pyarrow")
import pyarrow.parquet as pq
import ray
import torch
import typer
from typer.testing import CliRunner

import sosampler as so
from sosampler.bank.inspect import verify_bank
from sosampler.cli.select import select_command
from sosampler.inference.decode import DecodeStep
from sosampler.inference.many import SelectJob
from sosampler.inference.options import SelectOptions
from sosampler.inference.pipeline import Pipeline
from sosampler.inference.select import select_with
from sosampler.integrations.ray.bank import Teacher, prepare_on_ray
from sosampler.integrations.ray.cluster import RaySettings
from sosampler.integrations.ray.rows import NetworkStep, classify_on_ray, select_on_ray, stream_rows
from sosampler.policies.base import Batch, Policy
from sosampler.samplers.sosampler import SOSampler
from sosampler.video.synthetic import numbered_video
from tests import ray_steps, web_server

STORE = 200 * 1024 * 1024
ONE_OF_EACH = RaySettings(decoders=1, networks=1, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def known_to_workers() -> Iterator[None]:
    """The folder of the steps that these tests send."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """A cluster of this machine alone, with two processors on paper."""
    start(address="local", num_cpus=2, object_store_memory=STORE, include_dashboard=False)
    yield
    ray.shutdown()


def start(**how: Any) -> None:
    ray.init(log_to_driver=False, logging_level="ERROR", **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    SOSampler(backbone="timm:resnet10t", input_size=32).save_pretrained(folder / "sampler")
    made = so.create_classifier("timm:resnet10t", class_names=("x", "y"), input_size=32)
    with torch.no_grad():  # a fresh last layer is small, and all answers would be nearly the same
        made.net.get_classifier().weight.mul_(40)
    so.save_classifier(made, folder / "classifier")
    return folder


def make_videos(folder: Path, count: int) -> list[str]:
    """The last of them is none."""
    for number in range(count - 1):
        numbered_video(folder / f"v{number:02d}.mp4", num_frames=12 + number % 5)
    (folder / f"v{count - 1:02d}.mp4").write_bytes(b"not a video at all" * 40)
    return [str(video) for video in sorted(folder.glob("*.mp4"))]


def table(out: Path) -> dict[str, dict[str, Any]]:
    """Rows by video; fails where a video has two."""
    rows = pq.read_table(out).to_pylist()
    by_video = {row["video"]: row for row in rows}
    assert len(by_video) == len(rows)
    return by_video


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# ---- one machine


@pytest.mark.slow
def test_select_from_the_command_line(machine: None, tmp_path: Path) -> None:
    """Rows of the local engine, the bad video told; a second run does what is missing and nothing else."""
    videos = make_videos(tmp_path, 6)
    out = tmp_path / "rows"

    def run() -> dict[str, Any]:
        app = typer.Typer()
        app.command()(select_command)
        done = CliRunner().invoke(app, [str(tmp_path), "-n", "3", "--engine", "ray", "--out", str(out), "--json"])
        assert done.exit_code == 1, done.output  # a video failed
        return json.loads(done.stdout)

    told = run()
    assert (told["num_videos"], told["num_done_before"], told["num_written"], told["num_failed"]) == (6, 0, 5, 1)
    assert [failure["video"] for failure in told["failures"]] == [videos[-1]]
    for video, row in table(out).items():
        expected = select_with(video, SelectOptions(num_frames=3)).to_dict()  # by the sampler that ships
        assert row["policy"] == expected["policy"] == "general"
        assert row["frame_indices"] == expected["frame_indices"]
        assert row["pts_seconds"] == expected["pts_seconds"]
    before = contents(out)
    numbered_video(tmp_path / "new.mp4", num_frames=9)
    told = run()
    assert (told["num_done_before"], told["num_written"], told["num_failed"]) == (5, 6, 1)
    after = contents(out)
    assert {name: after[name] for name in before if name.startswith("part")} == {
        name: data for name, data in before.items() if name.startswith("part")
    }
    assert len(table(out)) == 6


@pytest.mark.slow
def test_classify_with_a_sampler(machine: None, tmp_path: Path, runs: Path) -> None:
    videos = make_videos(tmp_path, 7)
    pipeline = Pipeline(runs / "sampler", runs / "classifier", num_candidates=8, num_frames=3, device="cpu")

    def classify() -> Any:
        return classify_on_ray(videos, tmp_path / "rows", pipeline, settings=ONE_OF_EACH)

    done = classify()
    assert (done.num_rows, len(done.failures)) == (6, 1)
    rows = table(tmp_path / "rows")
    for expected in pipeline(videos[:-1]):
        row = rows[expected.video]
        assert row["label"] == expected.label
        assert row["probability"] == pytest.approx(expected.probability, abs=1e-5)
        assert row["frame_indices"] == expected.selection.frame_indices.tolist()
        assert row["policy"] == expected.selection.policy
    assert classify().num_before == 6


@pytest.mark.slow
def test_a_deadly_video_costs_itself_alone(machine: None) -> None:
    videos = [f"/v/{name}.mp4" for name in ("a", "b", "deadly", "c", "d", "e")]
    settings, step = RaySettings(decoders=1), ray_steps.DiesAt("deadly")
    rows = {row["video"]: row for row in stream_rows(videos, step, None, settings)}
    assert sorted(rows) == sorted(videos)
    error = rows.pop("/v/deadly.mp4")["error"]
    assert error.startswith(
        "/v/deadly.mp4: the process that decoded it ended with exit code 9; its output above tells why"
    )
    assert all(row["number"] == len(video) for video, row in rows.items())


class Last(Policy):
    """A policy of the user's; the actors get it by value."""

    name = "last"

    def choose(self, batch: Batch, num_frames: int) -> Any:
        return batch.counts[:, None] - num_frames + torch.arange(num_frames).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_files_and_a_policy_of_the_user(machine: None, tmp_path: Path, name: str) -> None:
    """Every format is written by every engine, with the rows in the order of the videos."""
    videos = make_videos(tmp_path, 4)
    options = SelectOptions(num_frames=2, num_candidates=5, policy=Last())
    done = select_on_ray(videos, tmp_path / name, options, settings=RaySettings(decoders=1))
    assert (done.num_rows, len(done.failures)) == (3, 1)
    SelectJob(options, tmp_path / f"local_{name}").run([Path(video) for video in videos])
    if name.endswith(".jsonl"):
        rows, local = (
            [json.loads(line) | {"timing": None} for line in (tmp_path / file).read_text().splitlines()]
            for file in (name, f"local_{name}")
        )
        assert rows == local
        assert [row["video"] for row in rows] == videos[:-1]
    else:
        assert (tmp_path / name).read_bytes() == (tmp_path / f"local_{name}").read_bytes()


@pytest.mark.slow
def test_interrupted_and_run_again(machine: None, tmp_path: Path) -> None:
    videos = make_videos(tmp_path, 9)

    def interrupt(progress: Any) -> None:
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select_on_ray(videos, tmp_path / "rows", SelectOptions(num_frames=2, policy="uniform"), on_progress=interrupt)
    kept = len(table(tmp_path / "rows"))
    assert kept in (3, 4)  # the bad video may have been among them
    done = select_on_ray(videos, tmp_path / "rows", SelectOptions(num_frames=2, policy="uniform"))
    assert (done.num_before, done.num_rows, len(done.failures)) == (kept, 8, 1)
    assert len(table(tmp_path / "rows")) == 8


@pytest.mark.slow
def test_addresses_and_what_they_cost(machine: None, tmp_path: Path) -> None:
    counted: list[dict[str, Any]] = []
    with web_server.serving() as server:
        good = [server.add(f"/{number}.mp4", numbered_video(num_frames=12)) for number in range(2)]
        bad = server.add("/bad.mp4", answer=web_server.status(403))
        videos = [each.replace("://", "://me:s3cret@") + "?key=s3cret" for each in (*good, bad)]
        options = SelectOptions(num_frames=2, policy="uniform", schemes=("http",), limits=so.Limits(retries=0))
        done = select_on_ray(videos, tmp_path / "rows", options, settings=ONE_OF_EACH, on_result=counted.append)
    assert set(table(tmp_path / "rows")) == set(good)
    assert [failure["video"] for failure in done.failures] == [bad]
    assert sum(row["transfer"]["bytes_read"] for row in counted if "error" not in row) > 0
    assert not any(b"s3cret" in data for data in contents(tmp_path / "rows").values())


# ---- a bank


def manifest_of(folder: Path, videos: list[str]) -> Path:
    lines = [f"{Path(video).name},{'xy'[number % 2]}" for number, video in enumerate(videos)]
    (folder / "m.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    return folder / "m.csv"


FRAMES: dict[str, Any] = {"num_candidates": 4, "videos_per_shard": 2}


@pytest.mark.slow
def test_a_bank_has_the_same_bytes(machine: None, tmp_path: Path, runs: Path) -> None:
    manifest = manifest_of(tmp_path, make_videos(tmp_path, 7))
    so.prepare(manifest, so.create_classifier(runs / "classifier"), tmp_path / "here", workers=0, **FRAMES)
    teacher = Teacher(str(runs / "classifier"))
    bank = prepare_on_ray(manifest, teacher, tmp_path / "bank", settings=ONE_OF_EACH, **FRAMES)
    assert contents(tmp_path / "bank") == contents(tmp_path / "here")
    assert len(bank.failures) == 1

    # A shard that is missing is made again, alone; so are answers.
    shard, answers = tmp_path / "bank/frames/00001.arrow", next((tmp_path / "bank/teachers").glob("*/00002.arrow"))
    shard.unlink()
    answers.unlink()
    other = tmp_path / "bank/frames/00000.arrow"
    made = other.stat().st_mtime_ns
    prepare_on_ray(manifest, teacher, tmp_path / "bank", settings=ONE_OF_EACH, **FRAMES)
    assert contents(tmp_path / "bank") == contents(tmp_path / "here")
    assert other.stat().st_mtime_ns == made


# ---- two machines, one of which dies


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes, and the one that may be killed."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    how = {"num_cpus": 2, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**how, "include_dashboard": False})
    victim = cluster.add_node(**how)
    start(address=cluster.address)
    yield cluster, victim
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("with_network", [False, True])
def test_a_dead_node_loses_nothing(two_nodes: tuple[Any, Any], tmp_path: Path, runs: Path, with_network: bool) -> None:
    """Decoders alone, then decoders with a sampler behind them."""
    cluster, victim = two_nodes
    videos, notes = make_videos(tmp_path, 48), tmp_path / "notes"
    notes.mkdir()
    options = SelectOptions(num_frames=2, threads=1, policy="uniform")
    step: Any = DecodeStep(options)
    network, settings = None, RaySettings(decoders=4)
    if with_network:
        options = replace(options, policy=str(runs / "sampler"))
        step = DecodeStep(replace(options.with_all_candidates(), size=256), choose=False)  # more than these videos have
        network = NetworkStep(str(runs / "sampler"), str(runs / "sampler"), {"num_frames": 2}, device="cpu")
        settings = RaySettings(decoders=2, networks=2, batch_size=4)
    slow: Any = ray_steps.Slowly(step, 1.0, str(notes))
    rows: dict[str, dict[str, Any]] = {}
    killed = None
    for row in stream_rows(videos, slow, network, settings):
        assert row["video"] not in rows
        rows[row["video"]] = row
        if killed is None and len({note.name.split("-")[1] for note in notes.iterdir()}) == 2:
            killed = len(rows)
            cluster.remove_node(victim, allow_graceful=False)
    assert killed is not None, "both nodes must have worked"
    assert killed < len(videos) * 2 // 3, "the node must have had work left"
    assert len(cluster.list_all_nodes()) == 1
    assert sorted(rows) == videos
    failed = {video: row["error"] for video, row in rows.items() if "error" in row}
    assert list(failed) == videos[-1:], "\n".join(failed.values())
    for video in videos[:-1]:
        expected = select_with(video, options).to_dict()
        assert rows[video]["frame_indices"] == expected["frame_indices"]
        assert rows[video]["scores"] == expected["scores"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bank_survives_a_dead_node(two_nodes: tuple[Any, Any], tmp_path: Path, runs: Path) -> None:
    cluster, victim = two_nodes
    manifest = manifest_of(tmp_path, make_videos(tmp_path, 41))
    so.prepare(manifest, so.create_classifier(runs / "classifier"), tmp_path / "here", workers=0, **FRAMES)
    killed = []

    def kill(progress: Any) -> None:
        if not killed:
            killed.append(progress.done)
            cluster.remove_node(victim, allow_graceful=False)

    wide = RaySettings(decoders=2, networks=2)
    teacher = Teacher(str(runs / "classifier"))
    prepare_on_ray(manifest, teacher, tmp_path / "bank", settings=wide, on_progress=kill, **FRAMES)
    assert killed
    assert killed[0] < 20
    assert contents(tmp_path / "bank") == contents(tmp_path / "here")
    assert verify_bank(tmp_path / "bank") == []
