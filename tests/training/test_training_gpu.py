"""Training a sampler on a GPU: it learns in every precision, resumes, and learns alike with compiled steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sosampler as so
from sosampler.training import loop as loop_module
from sosampler.training.checkpoints import LOG
from sosampler.training.train_sampler import SamplerLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OPTIONS: dict[str, Any] = {"recipe": "paper", "device": "cuda", "input_size": 64, "batch_size": 20, "lr": 1e-4}


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> so.Bank:
    folder = tmp_path_factory.mktemp("data") / "bank"
    bank = so.make_reels("procedural", folder, counts={"train": 20, "dev": 4}, num_classes=3, recipe={"size": 64})
    classifier = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
    return so.add_teacher(bank, classifier)


def losses(folder: Path) -> torch.Tensor:
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return torch.tensor([json.loads(line)["loss"] for line in lines])


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recipe", ["default", "paper", "ocsampler", "scsampler-rank"])
def test_samplers_train_in_channels_last_memory(bank: so.Bank, tmp_path: Path, recipe: str, precision: str) -> None:
    options = OPTIONS | {"recipe": recipe, "precision": precision, "epochs": 2, "batch_size": 10}
    formats: list[bool] = []
    real = SamplerLoop.inputs

    def watching(loop: SamplerLoop, batch: Any) -> Any:
        inputs = real(loop, batch)
        weights = [weight for weight in loop.sampler.parameters() if weight.ndim == 4]
        tensors = [inputs[0].flatten(0, 1), *weights]
        formats.append(all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors))
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplerLoop, "inputs", watching)
        trained = so.train(bank, out=tmp_path / "run", **options)
    assert formats == [True] * 4
    assert losses(tmp_path / "run").isfinite().all()
    assert so.load_sampler(tmp_path / "run").fingerprint() == trained.sampler.fingerprint()


def test_a_gpu_starts_as_a_cpu_does(bank: so.Bank, tmp_path: Path) -> None:
    """The loss of the first step, before rounding errors add up."""
    options = OPTIONS | {"precision": "float32", "epochs": 1}
    for device in ("cpu", "cuda"):
        so.train(bank, out=tmp_path / device, **options | {"device": device})
    assert torch.allclose(losses(tmp_path / "cuda"), losses(tmp_path / "cpu"), rtol=0.01)


def test_a_stopped_training_resumes(bank: so.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_SAVE_EVERY", -1.0)  # after every step
    options = OPTIONS | {"epochs": 3, "batch_size": 10, "ema": 0.9}
    so.train(bank, out=tmp_path / "whole", **options)
    real = SamplerLoop.train_step

    def stopping(loop: SamplerLoop, batch: Any) -> torch.Tensor:
        if loop.step == 3:
            raise KeyboardInterrupt
        return real(loop, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SamplerLoop, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            so.train(bank, out=tmp_path / "run", **options)
    said: list[str] = []
    so.train(bank, out=tmp_path / "run", say=said.append, **options)
    assert "resuming at step 3 of 6" in said
    # Atomic additions on a GPU make the last bits differ.
    assert torch.allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=0.05)
