"""The frame engine on a GPU agrees with its sampler and classifier, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sosampler as so
from benchmarks.speed.frames import agreement, lively_sampler, smooth_frames
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.engine.frame_engine import MODES, FrameEngine, GraphedCalls
from sosampler.engine.networks import InputMaker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def sampler() -> Any:
    return lively_sampler().to("cuda")


@pytest.fixture(scope="module")
def classifier() -> Any:
    torch.manual_seed(0)
    return so.create_classifier("resnet50", num_classes=10).to("cuda")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["pixels", "planes"])
def test_agrees_with_sampler_and_classifier(sampler: Any, classifier: Any, mode: str, layout: str) -> None:
    engine = FrameEngine(sampler, classifier, num_frames=6, compiled=mode)
    frames = smooth_frames(4, 10, (256, 340)).to("cuda")
    planes = frames.movedim(-1, -3).contiguous()
    given = frames if layout == "pixels" else planes
    result = engine.run(given).check()
    expected = sampler.score(planes)
    assert torch.isfinite(expected).all()
    assert result.scores.shape == expected.shape
    rows = torch.arange(4, device="cuda")[:, None]
    probabilities = classifier.clip_probs(planes[rows, result.chosen])
    assert result.probabilities is not None
    assert torch.allclose(result.probabilities, probabilities, atol=2e-2)
    again = engine.run(given.flip(0))  # another batch of the same shape does not overwrite the first
    assert torch.equal(again.chosen.flip(0), result.chosen)


def test_selections_agree_in_full_precision(sampler: Any) -> None:
    """Resizing and networks in float32: only the order of additions differs."""
    engine = FrameEngine(sampler, num_frames=6, sampler_precision="float32")
    frames = smooth_frames(100, 10, (160, 212)).to("cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert agreement(engine, sampler, frames, 6).videos >= 0.95


@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize(("precision", "share"), [(torch.float16, 0.15), (torch.float32, 1e-3)])
@pytest.mark.parametrize(
    ("side", "resize"), [(224, 240), (128, 128)]
)  # halved: many values lie halfway between two integers
def test_inputs(planes: bool, precision: torch.dtype, share: float, side: int, resize: int) -> None:
    wanted = Preprocessing(size=(side, side), resize=resize)
    frames = smooth_frames(1, 4, (256, 340))[0].movedim(-1, -3).to("cuda")
    frames = frames.contiguous() if planes else frames
    output = InputMaker(wanted, torch.device("cuda"), precision)(frames)
    level = 1 / (255 * torch.tensor(wanted.std, device="cuda")).view(3, 1, 1)
    difference = (output - wanted(frames)).abs() / level
    assert difference.max() < 1.5
    assert (difference > 0.5).float().mean() < share


def test_graphs_are_kept_for_a_few_shapes() -> None:
    calls = GraphedCalls(lambda x: (x * 2, None), max_graphs=2)
    results = []
    for size in (1, 2, 3, 1, 3):
        x = torch.arange(float(size), device="cuda")
        doubled, nothing = calls(x)
        assert nothing is None
        assert doubled is not None
        results.append((doubled, x * 2))
        assert len(calls) <= 2
    for doubled, expected in results:
        assert torch.equal(doubled, expected)
