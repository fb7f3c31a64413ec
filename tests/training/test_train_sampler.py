"""Training a sampler: it learns, is written, and goes by its recipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import train_sampler
from sosampler.training.rewards import clip_outputs
from sosampler.training.sampler_data import crop
from sosampler.training.train_sampler import train
from tests.factories import SAMPLER_QUICK, SMALL, TEACHER, make_bank


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    return make_bank(tmp_path_factory.mktemp("data") / "bank")


# ---- the whole


def test_a_sampler_learns_and_is_written(bank: so.Bank, tmp_path: Path) -> None:
    said: list[str] = []
    trained = train(bank.path, out=tmp_path / "run", say=said.append, **SAMPLER_QUICK | {"epochs": 8})
    result = trained.result
    assert result["metric"] == "top1"
    assert result["dev_uniform"] < 0.6
    assert result["dev_semi_optimal"] == 1.0
    assert result["dev"] > 0.9
    assert result["sizes"] == {"train": 32, "dev": 16, "unlabelled": 0}
    assert (result["num_candidates"], result["num_frames"]) == (8, 4)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == list(range(8))
    assert log[-1]["loss"] < log[0]["loss"]
    assert max(line["dev_top1"] for line in log) == result["dev"]
    assert {"loss", "rank", "guidance", "distill", "lr", "seconds"} <= set(log[0])
    assert log[0]["loss"] == pytest.approx(log[0]["rank"] + log[0]["distill"])  # the weights of the recipe
    assert len([line for line in said if line.startswith("epoch ")]) == 8
    assert not (tmp_path / "run/checkpoint.pt").exists()

    again = SOSampler.from_pretrained(tmp_path / "run")
    assert again.fingerprint() == trained.sampler.fingerprint() == result["fingerprint"]
    assert again.about["classifier"] == "by hand"
    assert again.about["recipe"]["backbone"] == SAMPLER_QUICK["backbone"]
    assert again.about["dev"] == result["dev"]
    # From the bank's own frames, by the sampler's own way of preparing them: bright frames first, and by how much.
    dev = bank.split("dev")
    answers = dev.teacher()
    right = total = off = 0.0
    for number, video in enumerate(dev):
        frames = torch.from_numpy(video.frames()).movedim(-1, 1)[None]
        scores = again.score(frames)
        truth = answers[number].frame_probs[:, video.labels[0]].astype(np.float32)
        useful = np.flatnonzero(truth > 0.5)
        right += len(set(useful) & set(scores[0].topk(len(useful)).indices.tolist()))
        total += len(useful)
        off += float(np.abs(again.confidences(scores)[0].numpy() - truth).mean()) / len(dev)
    assert right / total > 0.9
    assert off < 0.2


def test_mixed_sizes_several_labels_and_a_teacher_that_keeps_no_logits(tmp_path: Path) -> None:
    sizes = ((40, 52), (64, 36), (28, 28))
    bank = make_bank(tmp_path / "bank", train=24, dev=12, sizes=sizes, multi_label=True, pooling=None)
    trained = train(bank, out=tmp_path / "run", **SAMPLER_QUICK | {"epochs": 6, "crop_per": "frame", "ema": 0.5})
    assert trained.result["metric"] == "confidence"
    assert trained.result["dev"] > trained.result["dev_uniform"] + 0.1
    assert trained.sampler.multi_label

    kept = make_bank(tmp_path / "kept", train=24, dev=12, multi_label=True)
    assert train(kept, out=tmp_path / "other", **SAMPLER_QUICK | {"epochs": 1}).result["metric"] == "mAP"


@pytest.mark.parametrize("recipe", ["default", "paper", "authors"])
def test_the_recipes_run(bank: so.Bank, tmp_path: Path, recipe: str) -> None:
    trained = train(bank, out=tmp_path / "run", recipe=recipe, **SMALL | {"epochs": 1, "shift": 0})
    assert 0 <= trained.result["dev"] <= 1
    assert (trained.sampler.num_classes is None) == (recipe == "authors")


def test_the_shifted_network_of_the_papers_runs(bank: so.Bank, tmp_path: Path) -> None:
    options = SAMPLER_QUICK | {
        "epochs": 1,
        "backbone": "mobilenet_v2",
        "shift": 10,
        "num_candidates": 4,
        "batch_size": 16,
    }
    assert train(bank, out=tmp_path / "run", **options).sampler.config["shift"] == 10


def test_the_best_epoch_is_kept_not_the_last(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.9, 0.5])
    states = []

    def of_scores(dev, found):
        return next(scores) if len(states) <= 3 else 0.0

    real = train_sampler.DevSet.scores

    def remembering(dev, sampler, precision):
        states.append({key: tensor.clone() for key, tensor in sampler.state_dict().items()})
        return real(dev, sampler, precision)

    monkeypatch.setattr(train_sampler.DevSet, "of_scores", of_scores)
    monkeypatch.setattr(train_sampler.DevSet, "of_semi_optimal", lambda dev: 1.0)
    monkeypatch.setattr(train_sampler.DevSet, "scores", remembering)
    trained = train(bank, out=tmp_path / "run", **SAMPLER_QUICK)
    assert trained.result["best_epoch"] == 1
    for key, tensor in trained.sampler.state_dict().items():
        assert torch.equal(tensor, states[1][key])
    assert not torch.equal(states[1]["importance_head.weight"], states[2]["importance_head.weight"])


def test_without_a_dev_split_the_last_epoch_is_kept(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", train=16, dev=0)
    said: list[str] = []
    trained = train(bank, out=tmp_path / "run", say=said.append, **SAMPLER_QUICK)
    assert trained.result["dev"] is None
    assert trained.result["best_epoch"] == 2
    assert "no dev split" in said[0]
    assert trained.sampler.about["calibrated_on"] == "train"
    assert trained.sampler.calibration is not None


def test_videos_without_labels_are_left_out(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", train=16, dev=4, multi_label=True, unlabelled=1)
    said: list[str] = []
    trained = train(bank.path, out=tmp_path / "run", say=said.append, **SAMPLER_QUICK | {"epochs": 1})
    assert trained.result["sizes"] == {"train": 15, "dev": 4, "unlabelled": 1}
    assert "1 without a label" in said[0]


def test_weights_are_the_start_of_the_backbone(bank: so.Bank, tmp_path: Path) -> None:
    first = train(bank, out=tmp_path / "first", **SAMPLER_QUICK | {"seed": 3})
    still = SAMPLER_QUICK | {"epochs": 1, "lr": 1e-12}
    second = train(bank, out=tmp_path / "second", weights=tmp_path / "first/model.safetensors", **still)
    before, after = first.sampler.state_dict(), second.sampler.state_dict()
    weights = [key for key in after if key.startswith("backbone.") and key.endswith("conv1.weight")]
    assert weights
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in weights)
    with pytest.raises(so.InvalidArgument, match="start was"):
        train(bank, out=tmp_path / "second", **still)


def test_the_classifier_is_asked_about_the_crops(bank: so.Bank, tmp_path: Path) -> None:
    """A classifier that is sure about bright pictures alone, asked online and from the bank."""
    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3))
    with torch.no_grad():
        net[2].weight.fill_(0)
        net[2].weight[0] = 2.0
        net[2].bias.copy_(torch.tensor([0.0, 1.0, 1.0]))
    classifier = so.wrap_classifier(net, input_size=24, layout="BCHW", class_names=bank.classes, name="bright")
    other = make_bank(tmp_path / "bank", train=16, dev=4)
    so.add_teacher(other.path, classifier)
    told = SAMPLER_QUICK | {"epochs": 1, "batch_size": 16, "num_candidates": 4}
    seen = []
    real = train_sampler.SamplerLoop.inputs

    def watching(loop, batch):
        found = real(loop, batch)
        seen.append((batch, *found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_sampler.SamplerLoop, "inputs", watching)
        train(other.path, out=tmp_path / "run", classifier=classifier, teacher="online", **told)
    batch, frames, probs, _ = seen[0]
    assert probs.shape == (16, 4, 3)
    # The same box at the classifier's size, from the pictures that the sampler's crops were cut from.
    crops = crop(batch.frames, batch.draw.crops, batch.sizes, (24, 24))
    expected = classifier.probabilities(net(classifier.preprocessing.normalised(crops)))
    assert torch.allclose(probs.flatten(0, 1), expected, atol=1e-5)
    assert frames.shape == (16, 4, 3, 32, 32)

    with pytest.raises(so.InvalidArgument, match="several fit"):
        train(other.path, out=tmp_path / "two", **told)
    for meant in ("bright", classifier, classifier.fingerprint()):
        said = train(other.path, out=tmp_path / "two", classifier=meant, overwrite=True, **told)
        assert said.sampler.about["classifier"] == "bright"
    with pytest.raises(so.InvalidArgument, match="give the classifier or its saved folder"):
        train(other.path, out=tmp_path / "three", classifier="bright", teacher="online", **told)


def test_the_callers_random_numbers_stay(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(seed: int) -> None:
        raise AssertionError("GPUs that are not used have random numbers of their own")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    torch.default_generator.manual_seed(5)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(5)
    train(bank, out=tmp_path / "run", **SAMPLER_QUICK | {"epochs": 1})
    assert torch.equal(torch.rand(3), expected)


def test_training_needs_no_video_decoder(bank: so.Bank, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['av'] = sys.modules['torchcodec'] = sys.modules['pytest'] = None\n"
        "from sosampler.training.train_sampler import train\n"
        f"train({str(bank.path)!r}, out={str(tmp_path / 'run')!r}, **{SAMPLER_QUICK | {'epochs': 1}!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_command_line(bank: so.Bank, tmp_path: Path) -> None:
    from typer import Typer
    from typer.testing import CliRunner

    from sosampler.cli.train import train_command

    app = Typer()
    app.command()(train_command)
    quick = ["--epochs", "2", "--batch-size", "8", "--lr", "0.003", "--device", "cpu", "--workers", "1"]
    sets = [f"--set={key}={SAMPLER_QUICK[key]}" for key in ("backbone", "input_size", "num_candidates")]
    done = CliRunner().invoke(
        app, [str(bank.path), "--out", str(tmp_path / "run"), "-c", TEACHER, *quick, *sets, "--json"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads(done.stdout)
    assert told["epochs"] == 2
    assert "epoch 2/2" in done.stderr
    assert SOSampler.from_pretrained(told["folder"]).fingerprint() == told["fingerprint"]
    wrong = CliRunner().invoke(app, [str(bank.path), "--out", str(tmp_path / "other"), "--set", "lr"])
    assert isinstance(wrong.exception, so.InvalidArgument)


def test_the_guide_goes_on_with_its_own_run() -> None:
    """Commands and Python of the guide that share a folder have the same start, or the second would be refused."""
    text = (Path(__file__).parents[2] / "docs/sampler.md").read_text(encoding="utf-8")
    starts: dict[str, set[str]] = {}
    for out, options in re.findall(r"sosampler train bank --out (\S+)(.*)", text):
        starts.setdefault(out, set()).update(re.findall(r"--weights (\S+)", options) or ["none"])
    for options in re.findall(r"so\.train\((.*?)\)", text):
        out = re.findall(r'out="(.*?)"', options)[0]
        starts.setdefault(out, set()).update(re.findall(r'weights="(.*?)"', options) or ["none"])
    assert starts == {out: {"mobilenet_v2.safetensors"} for out in ("runs/sampler", "runs/two", "runs/probed")}


def test_curves_go_to_tensorboard_where_it_is(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (Path(folder), purge_step) == (tmp_path / "run/tensorboard", 0)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.append((name, value, epoch))

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *error: object) -> None:
            written.append(("closed", 0.0, -1))

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    train(bank, out=tmp_path / "run", **SAMPLER_QUICK | {"epochs": 1})
    log = json.loads((tmp_path / "run/log.jsonl").read_text())
    assert ("dev_top1", log["dev_top1"], 0) in written
    assert ("loss", log["loss"], 0) in written
    assert written[-1][0] == "closed"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"sampler": "ocsampler", "reinforce": {"num_frames": 2, "reward": "label"}}, {"policy", "reward", "baseline"}),
        ({"sampler": "scsampler", "crop_scale": [0.5, 1.0]}, {"rank"}),
    ],
)
def test_other_samplers_learn_which_frames_are_useful(
    bank: so.Bank, tmp_path: Path, options: dict[str, Any], parts: set[str]
) -> None:
    told = SMALL | {"shift": 0, "epochs": 8, "optimizer": "adamw", "lr": 5e-3, "clip": 5.0} | options
    trained = so.train(bank, out=tmp_path / "run", **told)
    assert trained.result["dev"] > trained.result["dev_uniform"] + 0.2
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert parts <= set(log[-1])
    assert so.load_sampler(tmp_path / "run").scoring.settings == trained.sampler.scoring.settings


def test_a_light_classifier_learns_from_the_labels_alone(bank: so.Bank, tmp_path: Path) -> None:
    """The pictures of this bank do not show their classes, so it can only learn them by heart."""
    told = SMALL | {"recipe": "scsampler-ac", "epochs": 8, "lr": 5e-3}
    trained = so.train(bank, out=tmp_path / "run", **told)
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] == log[-1]["guidance"] < log[0]["guidance"]
    assert trained.sampler.scoring.settings == {"saliency": "max"}


@pytest.mark.parametrize("multi_label", [False, True])
def test_answers_about_clips_are_those_of_the_mean_logits(multi_label: bool) -> None:
    logits = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    activate = torch.sigmoid if multi_label else lambda values: values.softmax(-1)
    positions = torch.tensor([[0, 2, 5], [1, 2, 3], [0, 1, 4]])
    expected = activate(torch.stack([logits[row, chosen].mean(0) for row, chosen in enumerate(positions)]))
    found = clip_outputs(activate(logits), multi_label=multi_label)(positions)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
