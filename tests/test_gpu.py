"""Classifiers on a GPU: the same answers as on the CPU, and training in half precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import sosampler as so

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NETWORKS = {
    "resnet50": ("resnet50", {}),
    "frameexit": ("resnet50", {"head": "frameexit"}),
    "slowonly": ("slowonly_r50", {}),
    "x3d": ("x3d_s", {}),
    "i3d": ("i3d", {}),
    "timesformer": ("timesformer", {}),
    "vit": ("timm:vit_tiny_patch16_224", {}),
    "mvit": ("torchvision:mvit_v2_s", {}),
}


def frames(batch: int, count: int, seed: int = 0) -> Tensor:
    """Smooth pictures, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(batch * count, 3, 8, 10, generator=generator)
    large = torch.nn.functional.interpolate(small, size=(180, 240), mode="bicubic").clamp(0, 1)
    return (large * 255).to(torch.uint8).unflatten(0, (batch, count))


@pytest.mark.parametrize("network", NETWORKS)
def test_same_answers_as_on_the_cpu(network: str) -> None:
    name, options = NETWORKS[network]
    torch.manual_seed(0)
    classifier = so.create_classifier(name, num_classes=10, **options)
    clip = frames(2, 4)
    expected, alone = classifier.clip_probs(clip), classifier.frame_probs(clip)
    fingerprint, cost = classifier.fingerprint(), classifier.gmacs(4)
    classifier.to("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = classifier.clip_probs(clip)
    assert found.device.type == "cuda"
    # torchvision resizes uint8 in whole numbers on the CPU, in float on the GPU: pixels may differ by one grey level.
    assert torch.allclose(found.cpu(), expected, atol=2e-3)
    assert torch.allclose(classifier.frame_probs(clip).cpu(), alone, atol=2e-3)
    classifier.precision = "bfloat16"
    assert torch.allclose(classifier.clip_probs(clip).cpu(), expected, atol=3e-2)
    assert (classifier.fingerprint(), classifier.gmacs(4)) == (fingerprint, cost)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("dev", 10), ("test", 10)):
        for label, colour in enumerate(((200, 60, 60), (60, 200, 60), (60, 60, 200))):
            folder = tmp_path / "pictures" / split / f"colour {label}"
            folder.mkdir(parents=True)
            for number in range(count):
                noise = rng.normal(0, 40, (72, 96, 3)) + np.array(colour)
                Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg")
    return tmp_path / "pictures"


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_training_learns_in_every_precision(pictures: Path, tmp_path: Path, precision: str) -> None:
    trained = so.train_classifier(
        pictures,
        "timm:resnet18",
        out=tmp_path / "run",
        epochs=4,
        batch_size=16,
        input_size=64,
        precision=precision,
        workers=2,
    )
    assert trained.result["test"] > 0.9
    assert trained.classifier.device.type == "cuda"
    again = so.create_classifier(tmp_path / "run")
    assert again.fingerprint() == trained.result["fingerprint"]


def test_large_inputs_stay_within_bounded_memory() -> None:
    classifier = so.create_classifier("resnet50", num_classes=10, device="cuda", precision="bfloat16")
    torch.cuda.reset_peak_memory_stats()
    classifier.frame_probs(frames(8, 16).repeat(8, 1, 1, 1, 1))
    few = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    classifier.frame_probs(frames(8, 16).repeat(32, 1, 1, 1, 1))
    assert torch.cuda.max_memory_allocated() < few * 1.1
