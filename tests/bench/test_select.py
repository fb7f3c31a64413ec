"""`bench select`: the bare loop does the work it stands for, and the result adds up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sosampler as so
from benchmarks.tables.select_chart import draw, medians
from sosampler.bench import select as bench
from sosampler.cli.main import app
from sosampler.video.synthetic import numbered_video


@pytest.fixture
def video(tmp_path: Path) -> Path:
    numbered_video(tmp_path / "clip.mp4", num_frames=60, width=256, height=144, gop=20)
    return tmp_path / "clip.mp4"


def test_the_bare_loop_sees_the_same_candidates(video: Path) -> None:
    sel = so.select(video, 4, num_candidates=8)
    outputs = bench.bare_loop(video, sel.candidates.pts_seconds.tolist())
    frames = so.select(video, policy="all", num_candidates=8, candidates="auto", size=128).frames
    assert frames is not None
    expected = bench.general_sampler().look(frames.transpose(0, 3, 1, 2)[None])
    np.testing.assert_allclose(outputs["importance"], expected.importance, atol=0.2)  # cropped a pixel beside it
    assert np.corrcoef(outputs["features"].ravel(), expected.features.ravel())[0, 1] > 0.99


def test_its_result_adds_up(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "looped_videos", lambda clips, work, say: ((clip, clip, "gop30") for clip in clips))
    monkeypatch.setattr(bench.shutil, "which", lambda name: None)
    out = tmp_path / "r.json"
    ran = CliRunner().invoke(app, ["bench", "select", str(video), "--rounds", "2", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    result = json.loads(out.read_text())
    (row,) = result["videos"]
    assert (row["clip"], row["num_keyframes"], row["num_candidates"]) == ("clip.mp4", 3, 32)
    assert set(row["seconds"]) == {bench.AUTO, bench.EXACT, bench.KEYFRAME, bench.AUTO_ALONE, bench.BARE, bench.PROCESS}
    assert {len(times) for times in (*row["seconds"].values(), *row["cpu_seconds"].values())} == {2}
    for comparison in row["comparisons"]:
        ours, theirs = (np.array(row["seconds"][comparison[name]]) for name in ("way", "reference"))
        assert comparison["times_faster"] == pytest.approx(np.median(theirs / ours))
        if comparison["bar"] is not None:
            assert comparison["met"] == (comparison["times_faster"] >= comparison["bar"])
    assert [comparison["bar"] for comparison in row["comparisons"]] == [2, None, pytest.approx(1 / 1.3)]
    assert medians(result) == {(bench.PROCESS, "gop30"): np.median(row["seconds"][bench.PROCESS])}
    draw(result, tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text()


def test_the_published_chart_is_that_of_the_result() -> None:
    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks" / "results" / "select.json").read_text(encoding="utf-8"))
    chart = (root / "docs" / "images" / "select_speed.svg").read_text(encoding="utf-8")
    written = re.findall(r"<!--  (\d+\.\d) s -->", chart)  # matplotlib names each text that it draws
    assert sorted(written) == sorted(f"{seconds:.1f}" for seconds in medians(result).values())
    assert len(written) == 12  # four tools in three keyframe layouts


def test_peers_that_are_not_there(video: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="--peers /no/python must be a Python with PySceneDetect and video-"):
        bench.bench_select([video], work=video.parent, peers=Path("/no/python"))


def test_the_command_of_the_thumbnail_filter() -> None:
    command = bench.thumbnail_command("ffmpeg", Path("v.mp4"), 1093, "-skip_frame", "nokey")
    assert command.index("-skip_frame") < command.index("-i")  # an option of the decoder
    assert "scale=-2:128,thumbnail=n=1093" in command
