"""Checkpoints in the layout that FrameExit's authors released, compared with a forward pass by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from typer.testing import CliRunner

import sosampler as so
from sosampler.baselines.frameexit import read_release
from sosampler.cli.main import app
from sosampler.errors import WeightsError
from tests.factories import two_sets

CLASSES, FRAMES, VIDEOS = 3, 10, 40
ORDER = [5, 0, 9, 2, 7, 4, 6, 3, 8, 1]  # in which the released code visits ten frames


class ReleasedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4096, 128, 1), nn.Conv2d(128, 64, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(128), nn.BatchNorm2d(64)
        self.linear = nn.Linear(128, 1)

    def forward(self, now: Tensor, before: Tensor) -> Tensor:
        sides = []
        for side in (now, before):
            hidden = self.bn1(self.conv1(side[:, :, None, None])).relu()
            sides.append(self.bn2(self.conv2(hidden)).relu().flatten(1))
        return self.linear(torch.cat(sides, dim=1)).sigmoid()[:, 0]


class Released(nn.Module):
    """The layers of the released network under their released names."""

    def __init__(self) -> None:
        super().__init__()
        resnet = torchvision.models.resnet50(weights=None)
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.mlp = nn.Module()
        self.mlp.layers = nn.Sequential(nn.Linear(2048, 4096), nn.BatchNorm1d(4096), nn.ReLU())
        self.classifiers = nn.ModuleList(nn.Linear(4096, CLASSES) for _ in range(FRAMES))
        self.exit_selector = nn.ModuleList(ReleasedGate() for _ in range(FRAMES - 1))

    def exit(self, frames: Tensor, first_exit: float) -> tuple[Tensor, int]:
        """Return probabilities and the number of frames seen, for features [T, 2048] of one video."""
        pooled = torch.zeros(0)
        for step, position in enumerate(ORDER):
            features, before = self.mlp.layers(frames[None, position]), pooled
            pooled = features if step == 0 else torch.maximum(features, before)
            probabilities = self.classifiers[step](pooled).softmax(-1)[0]
            if step == 0:
                leaves = float(probabilities.max()) > first_exit
            else:
                leaves = step == FRAMES - 1 or float(self.exit_selector[step - 1](pooled, before)) < 0.5
            if leaves:
                return probabilities, step + 1
        raise AssertionError("it exits at the last frame")


def random_features() -> Tensor:
    return torch.randn(VIDEOS, FRAMES, 2048, generator=torch.Generator().manual_seed(2)).relu()


@pytest.fixture(scope="module")
def released() -> Released:
    torch.manual_seed(0)
    net = Released().eval()
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.normal_(module.bias, std=0.1)
    for classifier in net.classifiers:
        nn.init.normal_(classifier.weight, std=0.1)  # type: ignore[arg-type]
    net.requires_grad_(False)
    # So that each gate lets about half of the videos go.
    features = net.mlp.layers(random_features().flatten(0, 1)).unflatten(0, (VIDEOS, FRAMES))  # type: ignore[operator]
    for step, gate in enumerate(net.exit_selector, start=1):
        now, before = (features[:, ORDER[:count]].amax(1) for count in (step + 1, step))
        gate.linear.bias -= gate(now, before).logit().median()  # type: ignore[union-attr, operator]
    return net


@pytest.fixture(scope="module")
def checkpoint(released: Released, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("released") / "activitynet.pth"
    torch.save({f"module.{key}": tensor for key, tensor in released.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("exit_frames", [None, 3])
def test_classifier(released: Released, checkpoint: Path, tmp_path: Path, exit_frames: int | None) -> None:
    options: dict[str, Any] = {} if exit_frames is None else {"exit_frames": exit_frames}
    classifier = so.create_classifier("resnet50", head="frameexit", weights=checkpoint, **options)
    assert classifier.num_classes == CLASSES
    clip = torch.randint(0, 255, (1, 2, 3, 240, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    features = released.mlp.layers(released.backbone(classifier.preprocessing(clip)[0]).flatten(1))  # type: ignore[operator]
    expected = released.classifiers[(exit_frames or FRAMES) - 1](features.amax(0)).softmax(-1)
    assert torch.allclose(classifier.clip_probs(clip)[0], expected, atol=1e-5)
    if exit_frames is not None:  # it is saved with the classifier, which no longer needs the checkpoint
        so.save_classifier(classifier, tmp_path / "saved")
        again = so.create_classifier(tmp_path / "saved")
        assert (again.options["exit_frames"], again.fingerprint()) == (3, classifier.fingerprint())


def test_baseline_exits_where_the_released_code_does(released: Released, checkpoint: Path) -> None:
    heavy = random_features()
    # Of both kinds of features: before the layer of 4096, and after it.
    after = released.mlp.layers(heavy.flatten(0, 1)).unflatten(0, (VIDEOS, FRAMES))  # type: ignore[operator]
    expected = [released.exit(video, 0.8) for video in heavy]
    seen = [count for _, count in expected]
    assert len(set(seen)) > 3
    assert 1 in seen
    for features in (heavy, after):
        system = read_release(checkpoint, heavy_width=features.shape[2], first_exit=0.8)
        assert (len(system.gates), system.config["gate_widths"]) == (FRAMES - 2, [128, 64])
        output = system.run(two_sets(features, features[:, :, :0]))
        assert output.seen_heavy.sum(1).tolist() == seen
        assert torch.allclose(output.probabilities, torch.stack([each for each, _ in expected]), atol=1e-5)


def test_imported_by_the_command_and_evaluated(released: Released, checkpoint: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    entries = [
        so.FrameEntry(
            id=f"v{number}", labels=(number,), frames=rng.integers(0, 255, (4, 48, 48, 3), dtype=np.uint8), split="test"
        )
        for number in range(2)
    ]
    bank = so.write_frames(tmp_path / "bank", entries, classes=("run", "jump", "swim"))
    command = ["train", str(bank.path), "--sampler", "frameexit", "--weights", str(checkpoint), "--device", "cpu"]
    command += ["--out", str(tmp_path / "exit"), "--set", "first_exit=0.7"]
    refused = CliRunner().invoke(app, command)
    assert "not trained here; add --epochs 0" in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--epochs", "0"])
    assert done.exit_code == 0, done.exception
    system = so.load_system(tmp_path / "exit")
    assert (system.config["first_exit"], system.config["neck_width"]) == (0.7, None)
    assert (system.about["classes"], system.about["num_candidates"]) == (["run", "jump", "swim"], FRAMES)
    stored = so.Bank(bank.path).features(system.about["heavy"]["name"])
    assert stored.width == 4096
    classifier = so.create_classifier("resnet50", head="frameexit", weights=checkpoint, class_names=bank.classes)
    assert classifier.fingerprint() == stored.about["fingerprint"]
    so.add_teacher(so.Bank(bank.path), classifier)
    options: dict[str, Any] = {"num_frames": 2, "num_candidates": 4, "bootstrap": 0, "device": "cpu"}
    result = so.evaluate(bank.path, {"exit": system}, classifier=classifier, **options)
    assert not any("differ in more than the choice" in note for note in result.notes)
    assert 1 <= result.row("exit").frames_classified <= 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "is a checkpoint of FrameExit; give head='frameexit'"),
        ({"head": "frameexit", "exit_frames": 11}, "exit_frames=11: the checkpoint has classifiers for up to 10"),
        ({"head": "frameexit", "exit_frames": 0}, "exit_frames=0"),
        ({"head": "frameexit", "num_classes": 5}, "give the num_classes of the file"),
    ],
)
def test_mistakes(checkpoint: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(so.SosamplerError, match=says):
        so.create_classifier("resnet50", weights=checkpoint, **options)


def test_what_is_no_release(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(so.InvalidArgument, match="exit_frames is for a checkpoint of FrameExit's authors"):
        so.create_classifier("timm:test_resnet", head="frameexit", exit_frames=3)
    torch.save({"fc.weight": torch.zeros(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match="is not a checkpoint of FrameExit's authors"):
        read_release(tmp_path / "other.pth", heavy_width=2)
    with pytest.raises(WeightsError, match="is for features of 2048 or 4096 numbers, but these have 512"):
        read_release(checkpoint, heavy_width=512)
