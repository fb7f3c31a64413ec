"""The benchmark of num_frames="auto", on made-up heads; and what is published of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sosampler.policies.auto import DEFAULT_TOLERANCE, Auto
from sosampler.policies.base import SHARE, SPREAD, count_frames, expected_by_belief
from sosampler.samplers.onnx_sampler import log_belief, scores_of
from sosampler.samplers.recipe import read_recipe

ROOT = Path(__file__).parents[2]
SETTINGS = dict(read_recipe("default").scoring)
VIDEOS, T, CLASSES = 60, 10, 4


@pytest.fixture
def modules() -> tuple[ModuleType, ModuleType]:
    from benchmarks.accuracy import adaptive
    from benchmarks.tables import adaptive_table

    return adaptive, adaptive_table


def write(path: Path, seed: int, labels_seed: int) -> Path:
    """Heads that know a little of what the classifier says, of which half of the frames show the label."""
    rng = np.random.default_rng(seed)
    label = np.random.default_rng(labels_seed).integers(0, CLASSES, VIDEOS)
    shows = rng.random((VIDEOS, T)) < 0.5
    seen = np.where(shows, label[:, None], rng.integers(0, CLASSES, (VIDEOS, T)))
    teacher = rng.normal(0, 1, (VIDEOS, T, CLASSES)) + 3 * (seen[..., None] == np.arange(CLASSES))
    logits = teacher + rng.normal(0, 1, teacher.shape)
    importance = np.where(shows, 1.0, -1.5) + rng.normal(0, 0.7, shows.shape)
    score = scores_of(SETTINGS, importance, logits)
    np.savez(path, importance=importance, class_logits=logits, score=score, teacher=teacher, label=label)
    return path


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(module, "DRAWS", 200)
    monkeypatch.setattr(sys, "argv", ["adaptive.py", *map(str, arguments)])
    module.main()


def test_figures(
    modules: tuple[ModuleType, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    dev = [write(tmp_path / f"dev{seed}.npz", seed, 1) for seed in (0, 1)]
    test = [write(tmp_path / f"test{seed}.npz", 10 + seed, 2) for seed in (0, 1)]
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    costs = ("--classifier-gmacs", 2.0, "--sampler-gmacs", 0.5)
    run(modules[0], monkeypatch, "--dev", *dev, "--test", *test, "--out", out, "--picture", picture, *costs)
    told = json.loads(out.read_text())
    rule = told["rules"]["belief"]
    tolerance = 0.05
    (row,) = (row for row in rule["auto"] if row["tolerance"] == tolerance)
    frames, right, three = [], [], []
    for path in test:
        stored = np.load(path)
        belief = log_belief(SETTINGS, stored["importance"], stored["class_logits"], multi_label=False)
        expected = expected_by_belief(stored["score"], stored["class_logits"], belief)
        counts = count_frames(expected, Auto(tolerance=tolerance))
        for video, count in enumerate(counts.tolist()):
            order = np.argsort(-stored["score"][video], kind="stable")
            answers = [stored["teacher"][video][order[:k]].mean(0).argmax() for k in (count, 3)]
            right.append(answers[0] == stored["label"][video])
            three.append(answers[1] == stored["label"][video])
            frames.append(count)
    assert row["mean_frames"]["value"] == pytest.approx(np.mean(frames), abs=1e-5)
    assert row["test_top1"]["value"] == pytest.approx(np.mean(right), abs=1e-5)
    assert row["gmacs"] == pytest.approx(0.5 + 2 * np.mean(frames), abs=1e-4)
    difference = row["minus_fixed"]["3"]
    assert difference["value"] == pytest.approx(np.mean(right) - np.mean(three), abs=1e-5)
    low, high = difference["ci95"]
    assert low <= difference["value"] <= high
    assert sum(row["share_of_videos"]) == pytest.approx(1)
    assert rule["fixed"][2]["test_top1"]["value"] == pytest.approx(np.mean(three), abs=1e-5)
    assert capsys.readouterr().out.strip() == modules[1].table(told)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_scores_and_other_videos_are_refused(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = write(tmp_path / "a.npz", 0, 1), write(tmp_path / "b.npz", 0, 2)
    with pytest.raises(SystemExit, match="show different videos"):
        run(modules[0], monkeypatch, "--dev", one, other, "--test", one, one, "--out", tmp_path / "o.json")
    stored = dict(np.load(one))
    np.savez(one, **{**stored, "score": stored["score"][:, ::-1]})
    with pytest.raises(SystemExit, match="its scores are not those"):
        run(modules[0], monkeypatch, "--dev", one, "--test", one, "--out", tmp_path / "o.json")


def test_the_page_says_what_was_measured(modules: tuple[ModuleType, ModuleType]) -> None:
    told = json.loads(modules[1].RESULTS.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "adaptive.md").read_text(encoding="utf-8")
    assert modules[1].table(told) in page
    assert (ROOT / "docs" / "images" / "adaptive.png").is_file()


def test_the_defaults_are_those_that_were_measured(modules: tuple[ModuleType, ModuleType]) -> None:
    told = json.loads(modules[1].RESULTS.read_text(encoding="utf-8"))
    assert told["default"]["tolerance"] == DEFAULT_TOLERANCE
    assert told["rules"]["belief"]["constant"] == {"spread": SPREAD}
    assert told["rules"]["importance"]["constant"] == {"share": SHARE}
    for name, constant in (("belief", SPREAD), ("importance", SHARE)):
        best = told["rules"][name]["chosen_on_dev"]["best"]
        assert (best["constant"], best["tolerance"]) == (constant, DEFAULT_TOLERANCE)
