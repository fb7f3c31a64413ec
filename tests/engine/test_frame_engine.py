"""The frame engine agrees with its sampler and classifier, in every layout and by every backend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosampler as so
from benchmarks.speed.frames import agreement, lively_sampler, smooth_frames
from sosampler.engine import frame_engine as module
from sosampler.engine.frame_engine import EngineResult, FrameEngine
from sosampler.errors import ClassifierError, InvalidArgument, WeightsError


@pytest.fixture(autouse=True)
def _float32_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not depend on the CPU that runs the tests."""
    monkeypatch.setattr(module, "cpu_is_fast_in_bfloat16", lambda: False)


@pytest.fixture(scope="module")
def sampler() -> Any:
    return lively_sampler(input_size=64)


@pytest.fixture(scope="module")
def classifier() -> Any:
    torch.manual_seed(0)
    return so.create_classifier("timm:resnet18", num_classes=7, input_size=64)


@pytest.fixture(scope="module")
def frames() -> Tensor:
    return smooth_frames(3, 6, (72, 100))


def plain(sampler: Any, classifier: Any, frames: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run the objects themselves, one video at a time: chosen, scores, probabilities."""
    planes = frames.movedim(-1, -3).contiguous()
    scores = torch.cat([sampler.score(planes[video : video + 1]) for video in range(len(planes))])
    chosen = torch.stack([row.topk(count).indices.sort().values for row in scores])
    clips = torch.stack([planes[video, chosen[video]] for video in range(len(planes))])
    return chosen, scores, classifier.clip_probs(clips)


@pytest.mark.parametrize("layout", ["numpy, pixels", "torch, pixels", "torch, planes", "numpy, read only"])
def test_agrees_with_sampler_and_classifier(sampler: Any, classifier: Any, frames: Tensor, layout: str) -> None:
    chosen, scores, probabilities = plain(sampler, classifier, frames, 4)
    given: Any = frames
    if layout == "torch, planes":
        given = frames.movedim(-1, -3).contiguous()
    if layout.startswith("numpy"):
        given = frames.numpy().copy()
        given.flags.writeable = layout == "numpy, pixels"
    result = FrameEngine(sampler, classifier, num_frames=4).run(given)
    assert scores.std() > 1e-3, "the test needs scores that differ"
    assert torch.equal(result.chosen, chosen)
    assert result.chosen.dtype == torch.int64
    assert torch.allclose(result.scores, scores, atol=1e-4)
    assert result.probabilities is not None
    assert torch.allclose(result.probabilities, probabilities, atol=1e-5)


@pytest.mark.parametrize("scoring", [{}, {"saliency": "max"}])
@pytest.mark.parametrize("shift", [0, 8])
def test_every_scoring_and_the_shift(scoring: dict[str, Any], shift: int, frames: Tensor) -> None:
    sampler = lively_sampler(input_size=64, shift=shift, scoring=scoring)
    engine = FrameEngine(sampler, num_frames=2)
    expected = sampler.score(frames.movedim(-1, -3))
    assert torch.allclose(engine.score(frames), expected, atol=1e-4 * float(expected.abs().max()))
    assert engine.run(frames).probabilities is None


def test_batches_do_not_change_results(sampler: Any, classifier: Any) -> None:
    """More frames than one forward pass takes, in numbers that do not divide."""
    many = smooth_frames(5, 7, (64, 64), seed=3)
    engine = FrameEngine(sampler, classifier, num_frames=3)
    together = engine.run(many)
    alone = [engine.run(many[video : video + 1]) for video in range(5)]
    assert torch.equal(together.chosen, torch.cat([result.chosen for result in alone]))
    assert together.probabilities is not None
    for row, result in zip(together.probabilities, alone, strict=True):
        assert result.probabilities is not None
        assert torch.allclose(row, result.probabilities[0], atol=1e-5)


def test_the_originals_do_not_change(sampler: Any, classifier: Any, frames: Tensor) -> None:
    before = sampler.fingerprint(), classifier.fingerprint()
    engine = FrameEngine(sampler, classifier, num_frames=3)
    first = engine.run(frames)
    assert (sampler.fingerprint(), classifier.fingerprint()) == before
    assert type(classifier.net).__name__ == "ResNet"
    assert hasattr(sampler, "backbone")
    again = engine.run(frames)  # and results are not overwritten by the next run
    engine.run(frames.flip(0))
    assert torch.equal(first.scores, again.scores)


class BrightnessNet(nn.Module):
    """Classify by the mean pixel value of a clip."""

    def forward(self, clips: Tensor) -> Tensor:
        level = clips.mean((1, 2, 3, 4))
        return torch.stack([level, -level], 1)


def test_clip_classifiers_get_frames_and_positions(sampler: Any, frames: Tensor) -> None:
    wrapped = so.wrap_classifier(BrightnessNet(), input_size=32, num_classes=2)
    seen: list[Tensor] = []
    original = wrapped.clip_logits

    def recording(clips: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        seen.append(positions)
        return original(clips, positions)

    wrapped.clip_logits = recording  # type: ignore[method-assign]
    engine = FrameEngine(sampler, wrapped, num_frames=2)
    positions = torch.linspace(0, 1, 6).repeat(3, 1)
    result = engine.run(frames, positions)
    expected = plain(sampler, so.wrap_classifier(BrightnessNet(), input_size=32, num_classes=2), frames, 2)[2]
    assert result.probabilities is not None
    assert torch.allclose(result.probabilities, expected, atol=1e-5)
    assert torch.allclose(torch.cat(seen), positions.gather(1, result.chosen))


def test_frameexit_keeps_the_layer_after_its_pool(sampler: Any, frames: Tensor) -> None:
    torch.manual_seed(0)
    classifier = so.create_classifier("timm:resnet18", num_classes=5, head="frameexit", input_size=64)
    result = FrameEngine(sampler, classifier, num_frames=3).run(frames)
    assert result.probabilities is not None
    assert torch.allclose(result.probabilities, plain(sampler, classifier, frames, 3)[2], atol=1e-5)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_backends_agree(sampler: Any, classifier: Any, frames: Tensor, backend: str) -> None:
    pytest.importorskip(backend)
    if backend == "onnxruntime":
        pytest.importorskip("onnxscript")
    engine = FrameEngine(sampler, classifier, num_frames=4, backend=backend)
    chosen, scores, probabilities = plain(sampler, classifier, frames, 4)
    result = engine.run(frames.numpy())
    assert torch.equal(result.chosen, chosen)
    assert torch.allclose(result.scores, scores, atol=1e-3)
    assert result.probabilities is not None
    assert torch.allclose(result.probabilities, probabilities, atol=1e-4)
    assert agreement(engine, sampler, frames, 4).videos == 1.0


AFTER_TWO_NETWORKS = """
import os, signal, torch
import sosampler as so
from sosampler.engine.backends import OpenVINONet

first, second = (OpenVINONet(torch.nn.Conv2d(3, 2, 3), so.Preprocessing(size=(8, 8), resize=8)) for _ in range(2))
del first
del second
signal.signal(signal.SIGINT, lambda *_: print("received", flush=True))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_signals_are_handled_after_openvino() -> None:
    """Networks are deleted in the order of creation: the stack for signal handlers must still exist."""
    pytest.importorskip("openvino")
    done = subprocess.run([sys.executable, "-c", AFTER_TWO_NETWORKS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["received"], done.stderr
    assert done.returncode == 0, done.stderr


def test_any_object_with_score_and_clip_probs(frames: Tensor) -> None:
    class Sampler:
        def score(self, given: Tensor) -> Tensor:
            return given.float().mean((2, 3, 4))

    class Classifier:
        name = "mine"

        def clip_probs(self, given: Tensor, positions: Tensor | None = None) -> Tensor:
            return torch.full((len(given), 2), 0.5)

    result = FrameEngine(Sampler(), Classifier(), num_frames=2).run(frames)
    brightest = frames.float().mean((2, 3, 4)).topk(2, dim=1).indices.sort(dim=1).values
    assert torch.equal(result.chosen, brightest)
    assert result.probabilities is not None
    assert result.probabilities.shape == (3, 2)


def test_wrong_input(sampler: Any, classifier: Any, frames: Tensor) -> None:
    engine = FrameEngine(sampler, classifier, num_frames=6)
    with pytest.raises(InvalidArgument, match="more than the 5 real candidates"):
        engine.run(frames[:, :5])
    with pytest.raises(InvalidArgument, match="uint8"):
        engine.run(frames.float())
    with pytest.raises(InvalidArgument, match="uint8"):
        engine.run(frames.numpy().astype(np.float32))
    with pytest.raises(InvalidArgument, match="give one per frame"):
        engine.run(frames, torch.zeros(3, 5))
    for wrong, message in (
        ({"num_frames": 0}, "must be an int"),
        ({"num_frames": 2, "backend": "tensorrt"}, "openvino"),
        ({"num_frames": 2, "precision": "int4"}, "float32"),
        ({"num_frames": 2, "compiled": "graphs"}, "CUDA"),
        ({"num_frames": 2, "device": "cuda:99"}, "cpu"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            FrameEngine(sampler, classifier, **wrong)
    with pytest.raises(InvalidArgument, match="no score"):
        FrameEngine(object(), classifier, num_frames=2)
    with pytest.raises(InvalidArgument, match="no classifier"):
        FrameEngine(sampler, num_frames=2).classify(frames)


def test_nan(sampler: Any, classifier: Any, frames: Tensor) -> None:
    good = FrameEngine(sampler, classifier, num_frames=2).run(frames)
    assert good.check() is good
    assert good.probabilities is not None
    with pytest.raises(WeightsError, match="NaN"):
        EngineResult(good.chosen, good.scores * float("nan"), None).check()
    with pytest.raises(ClassifierError, match="NaN"):
        EngineResult(good.chosen, good.scores, good.probabilities * float("inf")).check("it")
