"""Training a sampler on a GPU: kernels of our own and graphs of whole steps give what plain steps give."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sosampler as so
from sosampler.samplers.losses import SamplerLoss
from sosampler.samplers.recipe import read_recipe
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import preparation
from sosampler.training.checkpoints import LOG
from sosampler.training.fused_norm import FusedNorm
from sosampler.training.gpu_network import prepare_network
from sosampler.training.graphed_steps import GraphedSteps
from tests.training.test_fused_norm import check_same, check_same_shift
from tests.training.test_training_kernels import check_autocast, check_same_crops, check_same_depthwise, check_same_stem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("relu6", [True, False])
@pytest.mark.parametrize(("channels", "frames", "side"), [(24, 64, 32), (144, 16, 32), (960, 64, 4), (1280, 5, 1)])
def test_norms_are_the_same(channels: int, frames: int, side: int, relu6: bool) -> None:
    check_same(channels, frames, side, relu6, "cuda", torch.float32)


def test_shifts_are_the_same() -> None:
    for frames, candidates, mask in ((40, 5, None), (7, 7, None), (6, 3, [[1, 1, 0], [1, 0, 1]])):
        check_same_shift(frames, candidates, mask, "cuda")


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(64, 32, 64, 64), (16, 144, 32, 32), (64, 960, 4, 4), (5, 24, 7, 9), (3, 16, 1, 1)])
def test_depthwise_convolutions_are_the_same(shape: tuple[int, ...], stride: int) -> None:
    check_same_depthwise(shape, stride, "cuda", torch.float32)
    check_same_depthwise(shape, stride, "cuda", torch.bfloat16)


def test_first_convolutions_and_crops_are_the_same() -> None:
    for kernel, padding, side in ((3, 1, 128), (7, 3, 64), (3, 1, 31)):
        check_same_stem(kernel, padding, side, "cuda")
    check_autocast("cuda")
    for times in (1, 2, 8):
        check_same_crops(times, "cuda")


def inputs(batch: int, candidates: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    frames = torch.randn(batch * candidates, 3, 64, 64).to(memory_format=torch.channels_last)
    labels = torch.nn.functional.one_hot(torch.arange(batch) % 5, 5).float()
    probs = torch.rand(batch, candidates, 5).softmax(-1)
    return frames.unflatten(0, (batch, candidates)).cuda(), probs.cuda(), labels.cuda()


@pytest.mark.parametrize("name", [name for name in so.list_recipes() if name != "ocsampler"])
def test_a_graph_gives_the_same_gradients(name: str) -> None:
    recipe = read_recipe(name, dropout=0.0, input_size=64)
    classes = 5 if recipe.class_head else None
    torch.manual_seed(0)
    sampler = SOSampler(
        backbone=recipe.backbone, shift=recipe.shift, input_size=64, num_classes=classes, scoring=dict(recipe.scoring)
    )
    sampler.to("cuda", memory_format=torch.channels_last).train()
    loss_of = SamplerLoss(recipe)

    def steps_of(network: SOSampler) -> Any:
        def step(frames: Tensor, probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            loss, parts = loss_of(network(frames), probs, labels)
            loss.backward()
            return {"loss": loss.detach(), **parts}

        return step

    plain, fused = sampler, copy.deepcopy(sampler)
    prepare_network(fused)
    graphs = GraphedSteps(steps_of(fused), fused)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for seed, (batch, candidates) in enumerate(((6, 10), (4, 7), (6, 10))):
            given = inputs(batch, candidates, seed)
            plain.zero_grad()
            expected = steps_of(plain)(*given)
            found = graphs(*given)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, atol=1e-3, rtol=1e-3)
            ours = torch.cat([one.grad.flatten() for one in fused.parameters() if one.grad is not None])
            theirs = torch.cat([one.grad.flatten() for one in plain.parameters() if one.grad is not None])
            assert len(ours) == len(theirs)
            assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.999
    assert len(graphs) == 2
    for one, other in zip(fused.buffers(), plain.buffers(), strict=True):  # followed once a step, not in warming up
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"num_candidates": [3, 6], "dropout": 0.3, "ema": 0.9}])
def test_a_long_training_is_prepared_and_learns_alike(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step as in a short training, which is not prepared; then the loss falls as it does there."""
    bank = so.make_reels(
        "procedural", tmp_path / "bank", counts={"train": 20, "dev": 4}, num_classes=3, recipe={"size": 64}
    )
    classifier = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
    bank = so.add_teacher(bank, classifier)
    replayed: list[int] = []
    plain_call = GraphedSteps.__call__

    def counted(steps: GraphedSteps, *given: Tensor) -> dict[str, Tensor]:
        assert sum(isinstance(layer, FusedNorm) for layer in steps._network.modules()) == 52
        replayed.append(len(given))
        return plain_call(steps, *given)

    monkeypatch.setattr(GraphedSteps, "__call__", counted)
    losses = []
    told = {"input_size": 64, "epochs": 3, "batch_size": 20, "lr": 1e-4, **settings}  # one step an epoch
    for steps, name in ((10**9, "plain"), (0, "prepared")):
        monkeypatch.setattr(preparation, "STEPS_THAT_PAY", steps)
        assert not replayed
        trained = so.train(bank, out=tmp_path / name, recipe="paper", device="cuda", precision="float32", **told)
        log = (tmp_path / name / LOG).read_text(encoding="utf-8").splitlines()
        losses.append(torch.tensor([json.loads(line)["loss"] for line in log]))
        assert so.load_sampler(tmp_path / name).fingerprint() == trained.sampler.fingerprint()
    assert len(replayed) == 3
    assert torch.allclose(losses[0][0], losses[1][0], rtol=0.02)
    assert torch.allclose(losses[0], losses[1], rtol=0.5)  # convolutions round to TF32, and what differs grows


def test_dropout_differs_from_replay_to_replay() -> None:
    """And is the same for the same seed."""
    layer = torch.nn.Dropout(0.5)
    weight = torch.nn.Linear(1, 64, bias=False).cuda()

    def step(x: Tensor) -> dict[str, Tensor]:
        found = layer(weight(x))
        found.sum().backward()
        return {"loss": found.detach()}

    graphs = GraphedSteps(step, weight)
    x = torch.ones(1, 1, device="cuda")
    kept = []
    for seed in (1, 2, 1):
        torch.cuda.manual_seed(seed)
        kept.append(graphs(x)["loss"].clone() != 0)
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])
