"""Independence of frames: videos whose changes are known, and every figure against a plain loop."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from sosampler import create_classifier, open_video, wrap_classifier
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.cli.evaluate import independence_command
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.evaluation.frame_features import FrameFeatures, find_sources
from sosampler.evaluation.independence import (
    Independence,
    cross_distances,
    density,
    far_pairs,
    independence,
    kernels,
    later_by,
    redundant_pairs,
)
from sosampler.video.synthetic import encode_video

SIDE, BLOCKS, FPS = 64, 4, 10
MEAN, STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))


def blocks(rng: np.random.Generator) -> np.ndarray:
    """A picture of 4 x 4 plain blocks."""
    colours = rng.integers(40, 216, size=(BLOCKS, BLOCKS, 3), dtype=np.uint8)
    return colours.repeat(SIDE // BLOCKS, 0).repeat(SIDE // BLOCKS, 1)


def film(path: Path, *, held: int, seconds: int = 16, seed: int = 0) -> Path:
    """A new picture every `held` frames, at 10 frames a second."""
    rng = np.random.default_rng(seed)
    pictures = [blocks(rng) for _ in range(-(-seconds * FPS // held))]
    frames = (pictures[number // held] for number in range(seconds * FPS))
    encode_video(frames, path, fps=FPS, codec_options={"preset": "ultrafast", "crf": "6"})
    return path


def films(folder: Path, count: int = 5, **how: Any) -> list[Path]:
    return [film(folder / f"{number}.mp4", seed=number, **how) for number in range(count)]


def block_classifier() -> Any:
    """Its features are the 48 normalised colours of the blocks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(BLOCKS), nn.Flatten(), nn.Linear(3 * BLOCKS**2, 3))
    return wrap_classifier(net, input_size=SIDE, layout="BCHW", name="blocks")


def block_features(frame: np.ndarray) -> np.ndarray:
    """The same by hand."""
    step, found = SIDE // BLOCKS, []
    for channel in range(3):
        for row in range(0, SIDE, step):
            for column in range(0, SIDE, step):
                mean = frame[row : row + step, column : column + step, channel].astype(float).mean() / 255
                found.append((mean - MEAN[channel]) / STD[channel])
    return np.array(found)


@pytest.fixture(scope="module")
def independent(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Independence]:
    paths = films(tmp_path_factory.mktemp("independent"), held=1)
    return paths, independence(paths, classifiers=block_classifier(), rates=(1, 2, 5, 10))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Independence]:
    paths = films(tmp_path_factory.mktemp("slow"), held=FPS, seconds=15)  # a new picture each second
    return paths, independence(paths, classifiers=[block_classifier()], rates=(0.5, 1, 2, 5, 10))


# ---- verdicts


def test_frames_that_never_repeat_pass_at_every_rate(independent: tuple[list[Path], Independence]) -> None:
    found = independent[1]
    assert found.classifiers[0].verdict == 10
    assert [row.passes for row in found.rows] == [True] * 4
    # Chance alone gives 10 %.
    assert np.mean([row.redundant for row in found.rows]) == pytest.approx(0.1, abs=0.05)


def test_pictures_held_for_a_second_pass_up_to_one_fps(slow: tuple[list[Path], Independence]) -> None:
    found = slow[1]
    assert {row.rate: row.passes for row in found.rows} == {0.5: True, 1: True, 2: False, 5: False, 10: False}
    assert found.classifiers[0].verdict == 1
    means = [row.kernel.values.mean() for row in found.rows]
    assert means[1] < means[2] < means[3] < means[4]


def test_redundant_share_of_held_pictures_is_that_of_pairs_within_a_second(
    slow: tuple[list[Path], Independence],
) -> None:
    starts = [int((place + 0.5) * 150 / 16) for place in range(16)]
    for row in slow[1].rows[2:]:
        step = round(FPS / row.rate)
        within = [start // FPS == (start + step) // FPS for start in starts if start + step < 150]
        assert row.redundant == pytest.approx(np.mean(within), abs=0.12)  # a few others are so by chance
        assert row.redundant >= np.mean(within)


def test_a_still_video_passes_nowhere(tmp_path: Path) -> None:
    found = independence(films(tmp_path, 3, held=1000), classifiers=block_classifier(), rates=(0.5, 2))
    assert [row.redundant for row in found.rows] == [1, 1]
    assert found.classifiers[0].verdict is None
    assert "no rate" in found.table()
    assert found.classifiers[0].far_duplicates == 1
    assert any("still cameras" in note for note in found.notes)


def test_a_rate_that_passes_above_one_that_fails_is_not_the_verdict(tmp_path: Path) -> None:
    # Two pictures that alternate each half second: the same again after one second, another after half of one.
    paths = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        pair = [blocks(rng), blocks(rng)]
        paths.append(tmp_path / f"{seed}.mp4")
        frames = (pair[number // 5 % 2] for number in range(160))
        encode_video(frames, paths[-1], fps=FPS, codec_options={"crf": "6"})
    found = independence(paths, classifiers=block_classifier(), rates=(1, 2))
    assert [row.passes for row in found.rows] == [False, True]
    assert found.classifiers[0].verdict is None


# ---- the figures against a loop


def test_kernels_bandwidth_and_references_equal_a_plain_loop(slow: tuple[list[Path], Independence]) -> None:
    paths, found = slow
    starts = [int((place + 0.5) * 150 / 16) for place in range(16)]
    features = []
    for path in paths:
        reader = open_video(path)
        features.append([block_features(frame) for frame in reader.read(np.arange(150)).frames])
        reader.close()
    across = [np.linalg.norm(one[start] - other[start]) for start in starts for one, other in combinations(features, 2)]
    facts = found.classifiers[0]
    sigma = float(np.median(across))
    assert facts.bandwidth == pytest.approx(sigma, rel=1e-5)
    assert facts.width == 48

    def kernel(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.exp(-((one - other) ** 2).sum() / (2 * sigma**2)))

    for row in found.rows:
        step = round(FPS / row.rate)
        expected = [kernel(one[s], one[s + step]) for one in features for s in starts if s + step < 150]
        np.testing.assert_allclose(row.kernel.values, expected, atol=1e-4)
        assert row.seconds_apart == pytest.approx(1 / row.rate, rel=1e-6)
        assert row.to_dict()["mean"] == pytest.approx(np.mean(expected), abs=1e-5)
        assert row.to_dict()["quantiles"]["0.95"] == pytest.approx(np.quantile(expected, 0.95), abs=1e-4)
    far = [kernel(one[a], one[b]) for one in features for a, b in combinations(starts, 2) if b - a >= 150 // 4]
    np.testing.assert_allclose(np.sort(facts.far.values), np.sort(far), atol=1e-4)
    assert np.median(facts.cross.values) == pytest.approx(np.exp(-0.5), abs=1e-3)


def test_kernel_of_a_distance() -> None:
    np.testing.assert_allclose(kernels(np.array([0.0, 1.0, 2.0, 4.0]), 2.0), np.exp([0, -0.125, -0.5, -2]), rtol=1e-9)


def test_bandwidth_is_the_median_over_pairs_of_videos() -> None:
    features = torch.randn(5, 6, 9, generator=torch.Generator().manual_seed(0))  # [M, V, D]: 75 pairs of videos
    expected = float(torch.stack([torch.pdist(moment) for moment in features]).median())
    assert np.median(cross_distances(list(features.unbind(1)))) == pytest.approx(expected, rel=1e-6)


def test_redundant_by_rank_or_as_near_duplicate() -> None:
    far = np.linspace(0.2, 0.6, 101)  # 90 % lie at or below 0.56
    assert redundant_pairs(np.array([0.55, 0.57]), far).tolist() == [False, True]
    still = np.full(50, 0.999)
    assert redundant_pairs(np.array([0.998, 0.96]), still).tolist() == [True, False]


def test_pairs_by_time_follow_variable_rates() -> None:
    times = np.array([0.0, 0.1, 0.2, 1.0, 1.9, 3.0])
    assert later_by(times, np.arange(6), 1.0).tolist() == [[0, 3], [1, 3], [2, 3], [3, 4], [4, 5]]
    assert later_by(times, np.arange(6), 0.1).tolist() == [[0, 1], [1, 2]]
    assert later_by(times, np.arange(6), 9.0).tolist() == []
    assert all(second - first >= 3 for first, second in far_pairs(10))
    assert len(far_pairs(10)) == 28


# ---- features


def test_features_stand_before_the_class_layer_of_timm_networks() -> None:
    classifier = create_classifier("timm:test_resnet", num_classes=7)
    frames = torch.randint(256, (3, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    clips = classifier.preprocessing(frames)
    with torch.no_grad():
        expected = classifier.net.forward_head(classifier.net.forward_features(clips), pre_logits=True)
    torch.testing.assert_close(FrameFeatures(classifier)(frames), expected)


def test_features_of_frameexit_and_of_clip_networks_have_one_row_a_frame() -> None:
    frames = torch.randint(256, (2, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exit_head = create_classifier("timm:test_resnet", num_classes=4, head="frameexit", input_size=64)
    expected = exit_head.frame_features(frames[:, None])[:, 0]
    torch.testing.assert_close(FrameFeatures(exit_head)(frames), expected)
    x3d = FrameFeatures(create_classifier("x3d_s", num_classes=4, input_size=64))
    assert x3d(frames).shape == (2, 2048)


def test_features_of_timesformer_are_its_class_token() -> None:
    from tests.classifiers import hf_networks  # skips where transformers is missing

    classifier = hf_networks.build("timesformer", num_frames=1)
    frames = hf_networks.frames(3, 1)
    with torch.no_grad():
        expected = classifier.net.timesformer(classifier.preprocessing(frames)).last_hidden_state[:, 0]
    torch.testing.assert_close(FrameFeatures(classifier)(frames[:, 0]), expected, atol=1e-5, rtol=1e-4)


def test_a_network_without_a_class_layer_is_refused() -> None:
    net = wrap_classifier(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), input_size=16, layout="BCHW")
    with pytest.raises(InvalidArgument, match="no layer with 3 outputs"):
        FrameFeatures(net)
    with pytest.raises(InvalidArgument, match="wrap_classifier"):
        independence([__file__], classifiers=nn.Linear(1, 1), rates=(1,))


# ---- sources


def test_a_bank_measures_only_the_rates_that_it_stores(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = [
        FrameEntry(
            id=f"v{number}",
            labels=(0,),
            frames=np.stack([blocks(rng) for _ in range(20)]),
            pts_seconds=np.arange(20) / 2,
        )
        for number in range(4)
    ]
    write_frames(tmp_path / "bank", stored, classes=("x",))
    found = independence(tmp_path / "bank", classifiers=block_classifier(), rates=(1, 2, 4))
    assert [(row.rate, row.videos, len(row.kernel.values)) for row in found.rows] == [(1, 4, 56), (2, 4, 60), (4, 0, 0)]
    assert found.rows[2].passes is None
    assert found.classifiers[0].verdict == 2
    assert any("4 fps in 0" in note and "bank" in note for note in found.notes)
    assert found.settings["source"] == "bank"


def test_a_manifest_names_parts_of_videos(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", held=FPS)
    (tmp_path / "m.csv").write_text("path,label,start,end\na.mp4,x,0,8\na.mp4,y,8,16\n")
    sources = find_sources(tmp_path / "m.csv", max_videos=None, seed=0)
    times = []
    for source in sources.videos:
        with source.open() as video:
            times.append(video.times)
    assert (times[0][0], times[1][0], len(times[0]), len(times[1])) == (0, 8, 80, 80)
    found = independence(tmp_path / "m.csv", classifiers=block_classifier(), rates=(1,))
    assert found.videos == 2


def test_videos_are_drawn_by_the_seed_and_that_is_said(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.mp4").write_bytes(b"")
    drawn = [[one.name for one in find_sources(tmp_path, max_videos=3, seed=seed).videos] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(set(drawn[0]))


def test_broken_videos_are_told_and_the_rest_is_measured(tmp_path: Path) -> None:
    good = films(tmp_path, 2, held=1, seconds=4)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    film(tmp_path / "short.mp4", held=1, seconds=1)
    found = independence(
        [*good, tmp_path / "broken.mp4", tmp_path / "short.mp4"],
        classifiers=block_classifier(),
        rates=(2, 50),
        moments=8,
    )
    assert found.videos == 3
    assert [Path(failure["video"]).name for failure in found.failures] == ["broken.mp4"]
    assert any("50 fps in 0" in note for note in found.notes)
    with pytest.raises(VideoError, match="none of 1 videos"):
        independence(tmp_path / "broken.mp4", classifiers=block_classifier())


def test_one_video_takes_the_bandwidth_from_itself_and_says_so(tmp_path: Path) -> None:
    found = independence(film(tmp_path / "a.mp4", held=1), classifiers=block_classifier(), rates=(1,))
    facts = found.classifiers[0]
    assert np.median(facts.far.values) == pytest.approx(np.exp(-0.5), abs=1e-3)
    assert "only video" in facts.bandwidth_of
    assert any("one video alone" in note for note in found.notes)
    assert found.rows[0].redundant_ci95 is None


def test_short_videos_are_said_to_tell_little(tmp_path: Path) -> None:
    found = independence(films(tmp_path, 6, held=1, seconds=4), classifiers=block_classifier(), rates=(0.5,))
    assert found.rows[0].nearer_than_far == 0
    assert any("longer videos would show more" in note for note in found.notes)


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    classifier = block_classifier()
    for wrong in ((), "1,2", (0,), (-1.0,), ("x",), (float("nan"),)):
        with pytest.raises(InvalidArgument, match="rate"):
            independence(path, classifiers=classifier, rates=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="moments=3"):
        independence(path, classifiers=classifier, moments=3)
    with pytest.raises(InvalidArgument, match="cannot be read as videos"):
        independence(7, classifiers=classifier)
    with pytest.raises(InvalidArgument, match="2 weights were given for 1"):
        independence(path, classifiers=["resnet50"], weights=["a", "b"])
    with pytest.raises(InvalidArgument, match="by name"):
        independence(path, classifiers=classifier, weights="a.safetensors")
    with pytest.raises(InvalidArgument, match="no classifier"):
        independence(path, classifiers=[])


def test_features_that_never_differ_are_refused(tmp_path: Path) -> None:
    paths = [film(tmp_path / f"{name}.mp4", held=1000, seconds=2) for name in "ab"]
    with pytest.raises(SosamplerError, match="no bandwidth"):
        independence(paths, classifiers=block_classifier(), rates=(1,))


# ---- the figure and the command


@pytest.mark.parametrize("values", [[0.5], [1.0] * 20, [0.0, 1.0], np.linspace(0, 1, 9000) ** 0.1])
def test_densities_add_up_to_one(values: Any) -> None:
    grid = np.linspace(0, 1, 2001)
    found = density(values, grid)
    assert np.trapezoid(found, grid) == pytest.approx(1, abs=2e-3)
    assert (found >= 0).all()


def test_density_is_that_of_scipy_away_from_the_borders() -> None:
    stats = pytest.importorskip("scipy.stats")
    data = np.random.default_rng(0).normal(0.5, 0.03, 200)
    data = data[abs(data - 0.5) < 0.1]
    spread = min(data.std(ddof=1), np.subtract(*np.quantile(data, (0.75, 0.25))) / 1.34)
    width = 0.9 * spread * len(data) ** -0.2
    grid = np.linspace(0.3, 0.7, 50)
    expected = stats.gaussian_kde(data, bw_method=width / data.std(ddof=1))(grid)
    np.testing.assert_allclose(density(data, grid), expected, rtol=1e-6, atol=1e-9)


def test_densities_of_nothing_and_of_strange_values_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one value"):
        density([], [0.5])
    with pytest.raises(InvalidArgument, match=r"0\.\.1"):
        density([1.5], [0.5])


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(independence_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_one_object_and_writes_figure_and_json(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    films(tmp_path / "videos", 2, held=1, seconds=2)
    where = ["--out", str(tmp_path / "out"), "--moments", "4", "--device", "cpu"]
    ran = run(str(tmp_path / "videos"), "-c", "timm:test_resnet", "--rates", "1,5", *where, "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    written = json.loads((tmp_path / "out" / "independence.json").read_text())
    assert told.pop("files") == [str(tmp_path / "out" / f"independence.{suffix}") for suffix in ("json", "png")]
    assert told == written
    assert [row["rate"] for row in told["rows"]] == [1, 5]
    assert told["classifiers"][0]["untrained"] is True
    assert "RANDOM weights" in ran.stderr
    assert any("RANDOM weights" in note for note in told["notes"])
    assert (tmp_path / "out" / "independence.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_tells_failures_and_wrong_rates(tmp_path: Path) -> None:
    good = films(tmp_path, 2, held=1, seconds=2)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    ran = run(str(tmp_path), "-c", "timm:test_resnet", "--rates", "5", "--moments", "4")
    assert ran.exit_code == 1
    assert "broken.mp4" in ran.stderr
    assert "bandwidth" in ran.stdout
    assert isinstance(run(str(good[0]), "-c", "timm:test_resnet", "--rates", "1,x").exception, InvalidArgument)
    assert run(str(good[0])).exit_code == 2  # without a classifier


def test_weights_make_a_network_trained(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    paths = films(tmp_path, 2, held=1, seconds=2)
    save_file(create_classifier("timm:test_resnet").net.state_dict(), tmp_path / "w.safetensors")
    found = independence(
        paths,
        classifiers=["timm:test_resnet", "timm:test_resnet"],
        weights=[tmp_path / "w.safetensors", None],
        rates=(5,),
        moments=4,
    )
    names = ("timm:test_resnet", "timm:test_resnet (2)")
    assert [(facts.classifier, facts.untrained) for facts in found.classifiers] == [(names[0], False), (names[1], True)]
    assert [row.classifier for row in found.rows] == list(names)
    assert found.table().count("RANDOM") == 1
