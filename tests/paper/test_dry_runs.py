"""Dry runs of every table with the paper's kinds of classifiers: only systems not in the package are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import TimesformerConfig
from typer.testing import CliRunner

import sosampler as so
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.cli.reproduce import reproduce_command
from sosampler.paper.experiments import EXPERIMENTS, data_sets, read_paper
from tests.factories import SAMPLER_CLASSES, TINY, make_networks

TABLES = [f"table{name}" for name in (*range(1, 8), "I", "II")]
OF_LARGE_FRAMES = {"adafocus", "ada2d"}  # they run the classifier itself, at 224 pixels; those of `place` see 32
NOT_IN_THE_PACKAGE: set[str] = set()  # the paper prints no Listen-to-Look
TIMESFORMER = TimesformerConfig(
    image_size=32,
    patch_size=16,
    num_frames=6,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
)

app = typer.Typer()
app.command()(reproduce_command)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank that stores 100 frames of each video, tiny classifiers whose outputs it has, and a light network."""
    folder = tmp_path_factory.mktemp("dry")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (100, 32, 32, 3), np.uint8)
    videos = [
        FrameEntry(id=f"v{number}", labels=(number % 2,), frames=images, split=split)
        for number, split in enumerate(("train", "train", "test"))
    ]
    bank = write_frames(folder / "bank", videos, classes=SAMPLER_CLASSES, multi_label=False, videos_per_shard=4)
    named: dict[str, tuple[Any, dict[str, Any]]] = {
        "resnet50": ("timm:test_resnet", {"head": "frameexit", "input_size": 32}),
        "slowonly50": ("slowonly_r50", {"input_size": 32}),
        "x3d_s": ("x3d_s", {"input_size": 32}),
        "timesformer": (TIMESFORMER, {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, (network, options) in named.items():
            classifier = so.create_classifier(network, class_names=list(SAMPLER_CLASSES), **options)
            so.add_teacher(bank, classifier)
            so.save_classifier(classifier, folder / name)
        so.SOSampler(backbone=TINY, shift=0, input_size=32).save_pretrained(folder / "light")
        network = so.create_classifier("any_precision:test_resnet", class_names=list(SAMPLER_CLASSES), input_size=32)
        for bits in (32, 4, 2):
            so.save_classifier(network.with_bits(bits), folder / f"bits{bits}")
    return folder


Plans = dict[tuple[str, str], dict[str, Any]]  # by data set and table


@pytest.fixture(scope="module")
def plans(place: Path) -> dict[str, Plans]:
    """What `sosampler reproduce --dry-run` prints for each classifier, with the bank as each of the data sets."""
    found = {}
    for classifier in read_paper()["classifiers"]:
        arguments = [*TABLES, *(f"--bank={data}={place / 'bank'}" for data in data_sets())]
        arguments += ["--classifier", f"{classifier}={place / classifier}", "--light", str(place / "light")]
        arguments += [f"--features={name}={place / 'resnet50'}" for name in ("r34", "r18")]
        arguments += [f"--features={name}={place / name}" for name in ("bits32", "bits4", "bits2")]
        arguments += ["--out", str(place / "out"), "--device", "cpu", "--seeds", "0", "--dry-run", "--json"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        listed = json.loads(result.stdout)["plans"]
        found[classifier] = {(plan["bank"]["name"], plan["experiment"]): plan for plan in listed}
    assert not (place / "out").exists(), "nothing is written"
    return found


def test_no_row_is_missing(plans: dict[str, Plans]) -> None:
    assert set(read_paper()["elsewhere"]) == NOT_IN_THE_PACKAGE
    for classifier, of_classifier in plans.items():
        assert set(of_classifier) == {(data, name) for data in data_sets() for name in TABLES}
        for (data, name), plan in of_classifier.items():
            assert plan["refused"] is None, (data, name, classifier)
            assert {row["row"] for row in plan["left_out"]} <= OF_LARGE_FRAMES, (data, name, classifier)
            assert all("--set size=" in row["why"] for row in plan["left_out"])
            made = {
                (recipe.paper_row, row["num_frames"], row["num_candidates"])
                for row in [*plan["rows"], *plan["left_out"]]
                for recipe in EXPERIMENTS[name].rows
                if recipe.row == row["row"]
            }
            for row in read_paper()["rows"]:
                if (row["table"], row["data"]) != (name, data) or row["classifier"] not in (None, classifier):
                    continue
                wanted = {None: {n for _, n, _ in made}}.get(row["num_frames"], {row["num_frames"]})
                if row["row"] == "all":  # of all N
                    wanted = {6}
                counts = {row["num_candidates"]} if row["num_candidates"] else {t for _, _, t in made}
                found = any((row["row"], n, t) in made for n in wanted for t in counts)
                assert found or row["row"] in NOT_IN_THE_PACKAGE, row


@pytest.mark.parametrize(
    ("name", "network", "options", "row"),
    [
        ("resnet50", "timm:test_resnet", {"head": "frameexit"}, "adafocus"),
        pytest.param("slowonly50", "slowonly_r50", {}, "ada2d", marks=pytest.mark.slow),
    ],
)
def test_no_row_is_missing_with_a_classifier_of_large_frames(
    tmp_path: Path, name: str, network: str, options: dict[str, Any], row: str
) -> None:
    """The two baselines that run the classifier itself."""
    images = np.random.default_rng(0).integers(0, 255, (10, 224, 224, 3), np.uint8)
    videos = [
        FrameEntry(id=f"v{number}", labels=(number % 2,), frames=images, split=split)
        for number, split in enumerate(("train", "train", "test"))
    ]
    bank = write_frames(tmp_path / "bank", videos, classes=SAMPLER_CLASSES, multi_label=False, videos_per_shard=4)
    classifier = so.create_classifier(network, class_names=list(SAMPLER_CLASSES), input_size=224, **options)
    so.add_teacher(bank, classifier)
    so.save_classifier(classifier, tmp_path / name)
    networks = make_networks(tmp_path)
    arguments = ["table3", "--bank", f"activitynet={bank.path}", "--classifier", f"{name}={tmp_path / name}"]
    arguments += ["--weights", str(networks.weights), "--out", str(tmp_path / "out"), "--device", "cpu"]
    arguments += [f"--features={other}={tmp_path / name}" for other in ("r34", "r18", "bits32", "bits4", "bits2")]
    result = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"], catch_exceptions=False)
    (plan,) = json.loads(result.stdout)["plans"]
    assert [left["why"] for left in plan["left_out"]] == []
    assert OF_LARGE_FRAMES & {planned["row"] for planned in plan["rows"]} == {row}


def test_systems_are_made_with_the_networks_for_which_the_paper_prints_them(plans: dict[str, Plans]) -> None:
    systems = {"liteeval", "frameexit", "adaframe", "ar-net", "videoiq"}
    made = {
        classifier: {
            row["row"]
            for (data, name), plan in of_classifier.items()
            if data == "activitynet" and name in ("table3", "tableII")
            for row in plan["rows"]
        }
        for classifier, of_classifier in plans.items()
    }
    assert {classifier: systems & rows for classifier, rows in made.items()} == {
        "resnet50": systems,
        "slowonly50": set(),
        "x3d_s": {"frameexit"},
        "timesformer": set(),
    }
    for rows in made.values():
        assert {"ocsampler", "sosampler", "sosampler-authors", "sosampler-default"} <= rows


def test_every_table_of_sosampler_has_three_rows(plans: dict[str, Plans]) -> None:
    titles = {
        "sosampler": "SOSampler (paper)",
        "sosampler-authors": "SOSampler (authors' code)",
        "sosampler-default": "SOSampler+",
    }
    for (_, name), plan in plans["resnet50"].items():
        rows = {(row["row"], row["num_frames"], row["num_candidates"]): row for row in plan["rows"]}
        pairs = {key[1:] for key, row in rows.items() if key[0] in titles and row["training"]}
        assert bool(pairs) == (name not in ("table1", "table2", "table6"))
        for pair in pairs:
            assert {key: rows[key, *pair]["title"] for key in titles} == titles
