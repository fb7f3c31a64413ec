"""The scripts of benchmarks/speed: what they compare does the same work, and their results add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.speed import optimal as bench_optimal
from benchmarks.speed import train as bench_train
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from sosampler.cli.main import app
from sosampler.policies.optimal import optimal_mean_logits
from sosampler.reels.make import make_reels
from sosampler.samplers.recipe import read_recipe


class TestOptimal:
    def test_the_plain_loop_finds_what_enumeration_finds(self) -> None:
        logits, labels = bench_optimal.made_up(30, 8, 5, seed=3)
        labels[::2, 1] = True  # several labels
        found = optimal_mean_logits(logits, labels, 3)
        assert found.method == "enumeration"
        torch.testing.assert_close(bench_optimal.plain_loop(logits, labels, 3), found.log_confidence)

    def test_a_beam_finds_no_better_than_the_proof_allows(self) -> None:
        logits, labels = bench_optimal.made_up(3, 24, 4, seed=1)
        found = optimal_mean_logits(logits, labels, 8, max_subsets=1)
        assert found.method == "certified"
        beam = bench_optimal.by_beam(logits, labels, 8)
        assert (beam <= found.log_bound + 1e-9).all()
        assert (beam > found.log_confidence - 0.1).all()

    def test_its_result_adds_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = ["--classes", "4", "--videos", "20", "--certified-videos", "2", "--rounds", "2"]
        monkeypatch.setattr("sys.argv", ["optimal.py", *options, "--out", str(tmp_path / "r.json")])
        bench_optimal.main()
        told = json.loads((tmp_path / "r.json").read_text())
        pairs = [(row["num_frames"], row["num_candidates"], row["method"], row["videos"]) for row in told["rows"]]
        assert pairs == [(6, 10, "enumeration", 20), (32, 100, "certified", 2)]
        for row in told["rows"]:
            ours, reference = row["seconds"]["pi_o"], row["seconds"][row["comparison"]["reference"]]
            assert len(ours) == len(reference) == 2
            assert row["videos_a_second"] == pytest.approx(row["videos"] / np.median(ours))
            assert row["comparison"]["times_faster"] == pytest.approx(np.median(reference) / np.median(ours))
            assert row["met"] == (row["videos_a_second"] >= row["bar"])
            assert 0 <= row["largest_gap"] < 1e-3
            assert row["reference_largest_shortfall"] > -1e-9  # nothing beats the proof
        assert {row["method"]: row["bar"] for row in told["rows"]} == {"enumeration": 1000, "certified": 20}
        assert bench_optimal.table(told).count("asked for") == 2


class TestTrain:
    def test_the_authors_pictures_are_those_of_the_bank(self, tmp_path: Path) -> None:
        made: Any = make_reels("procedural", tmp_path / "bank", counts={"train": 3}, recipe={"size": 64}, num_classes=3)
        pictures, labels = bench_train.Pictures(made, 5, (1.0, 1.0))[1]
        assert pictures.shape == (5, 3, 224, 224)
        assert pictures.dtype == np.float32
        assert labels.tolist() == [float(label in made[1].labels) for label in range(3)]
        shown = (pictures.transpose(0, 2, 3, 1) * np.array(IMAGENET_STD) + np.array(IMAGENET_MEAN)) * 255
        stored = made[1].frames(size=224)  # a crop of all is the whole picture, mirrored or not
        nearest = [
            min(np.abs(frame - other).mean() for frame in stored for other in (one, one[:, ::-1])) for one in shown
        ]
        assert max(nearest) < 1.0

    @pytest.mark.slow
    def test_its_result_adds_up(self, tmp_path: Path) -> None:
        small = read_recipe(
            "paper", backbone="timm:test_resnet.r160_in1k", shift=0, input_size=32, num_candidates=4, batch_size=3
        )
        said: list[str] = []
        options: dict[str, Any] = {"classifier": "timm:test_resnet.r160_in1k", "recipe": small, "videos": 6}
        told = bench_train.bench_train(
            work=tmp_path, **options, steps=1, rounds=2, device="cpu", workers=0, say=said.append
        )
        assert json.loads(json.dumps(told)) == told
        ours, authors = (told["videos_a_second"][way] for way in (bench_train.OURS, bench_train.AUTHORS))
        (row,) = told["comparisons"]
        assert row["times_faster"] == pytest.approx(ours / authors, rel=1e-6)
        assert told["videos_a_second_if_pictures_were_ready"][bench_train.AUTHORS] > authors
        assert (told["videos"], told["batch"], told["num_candidates"], told["rounds"]) == (6, 3, 4, 2)
        assert told["frames_asked_a_second"] == pytest.approx(60 / told["seconds_to_ask_once"])
        assert row["met"] == (row["times_faster"] >= row["bar"] == 12)
        assert "required 12" in bench_train.table(told)
        epochs = told["epochs_of_the_recipe"]
        once = told["seconds_to_ask_once"] / told["videos"] / epochs
        taken = np.median(told["seconds_a_video"][bench_train.OURS]) + once
        assert told["with_teacher"] == pytest.approx(np.median(told["seconds_a_video"][bench_train.AUTHORS]) / taken)
        assert told["with_teacher"] < row["times_faster"]
        assert len(said) == 5
        assert not (tmp_path / "run").exists()


def test_commands_of_the_package() -> None:
    run = CliRunner().invoke(app, ["bench", "--help"])
    listed = [line.split()[0] for line in run.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert {"decode", "pipeline"} <= set(listed)
