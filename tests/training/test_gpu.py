"""On a GPU: the same answers of classifiers and samplers, the same choices, the same measures as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import sosampler as so
from sosampler.bank.prepare import add_teacher
from sosampler.evaluation.result import _flat
from sosampler.policies.optimal import OptimalChoice, beam_search, optimal_mean_logits, optimal_pooled
from sosampler.samplers.sosampler import log_confidence, top_n
from tests.factories import random_logits, small_net, teach, write_bank

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


# ---- policies

# Six videos with twelve candidates at most, four classes.
COUNTS = torch.tensor([12, 9, 12, 7, 5, 12])
CHOICES: dict[str, Callable[..., Tensor | OptimalChoice]] = {
    "top_n": lambda at: top_n(at["scores"], 4, at["mask"]),
    "top_n without a mask": lambda at: top_n(at["scores"], 4),
    "semi-optimal": lambda at: top_n(at["logits"].softmax(-1).amax(-1), 4, at["mask"]),
    "enumeration": lambda at: optimal_mean_logits(at["logits"], at["labels"], 4, mask=at["mask"]),
    "enumeration, sigmoid": lambda at: optimal_mean_logits(
        at["logits"], at["labels"], 4, mask=at["mask"], activation="sigmoid"
    ),
    "certified": lambda at: optimal_mean_logits(at["logits"], at["labels"], 4, mask=at["mask"], max_subsets=1),
    "pooled": lambda at: optimal_pooled(
        at["logits"], at["labels"], 4, pool_logits=lambda some: some.amax(-2), mask=at["mask"]
    ),
    "beam": lambda at: beam_search(
        lambda sets: log_confidence(at["logits"][at["videos"], sets].amax(-2), at["labels"]),
        *(6, 12, 4),
        width=3,
        mask=at["mask"],
        device=at["mask"].device,
    ),
}


def offered(device: str) -> dict[str, Tensor]:
    """Scores with many ties, logits, labels; the same numbers on each device."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (6, 12), generator=generator).double() / 4
    logits = 3 * torch.randn(6, 12, 4, generator=generator, dtype=torch.float64)
    logits[:, 3] = logits[:, 2]
    labels = torch.eye(4, dtype=torch.bool)[torch.tensor([0, 1, 2, 3, 0, 1])]
    labels[2, 0] = True
    mask = torch.arange(12) < COUNTS[:, None]
    table = {"scores": scores, "logits": logits, "labels": labels, "mask": mask}
    return {name: value.to(device) for name, value in (table | {"videos": torch.arange(6)[:, None, None]}).items()}


@pytest.mark.parametrize("name", CHOICES)
def test_policies_choose_the_same(name: str) -> None:
    expected, found = CHOICES[name](offered("cpu")), CHOICES[name](offered("cuda"))
    if isinstance(expected, OptimalChoice):
        assert isinstance(found, OptimalChoice)
        assert found.method == expected.method
        assert torch.allclose(found.log_confidence.exp().cpu(), expected.log_confidence.exp(), atol=1e-3)
        assert (found.log_bound >= found.log_confidence - 1e-9).all()
        found, expected = found.positions, expected.positions
        if name == "certified":  # any set within the tolerance will do
            expected = found.cpu()
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), expected)
    assert (found.cpu() < COUNTS[:, None]).all() or "without" in name


# ---- evaluation

LENGTHS = [12, 9, 5, 16, 8, 2]
LABELS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0,), (1,), (2,)]
MANY: list[tuple[int, ...]] = [(0, 1), (1,), (0, 2), (0,), (1, 2), (2,)]
RULES_AND_ORACLES = ["uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal"]


def same_rows(found: so.Evaluation, expected: so.Evaluation, *, within: float) -> None:
    assert [row.policy for row in found.rows] == [row.policy for row in expected.rows]
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert {**_flat(row), "seconds": 0} == pytest.approx({**_flat(other), "seconds": 0}, abs=within)
    for cell, chosen in expected.choices.items():
        assert (found.choices[cell] == chosen).all(), cell


@pytest.mark.parametrize("multi_label", [False, True])
def test_evaluation_is_the_same(multi_label: bool, tmp_path: Path) -> None:
    labels = MANY if multi_label else LABELS
    bank = write_bank(tmp_path / "bank", LENGTHS, labels, multi_label=multi_label)
    teach(bank, random_logits(LENGTHS, labels), multi_label=multi_label)
    policies = [*RULES_AND_ORACLES, "frame-difference", "semi-optimal+mmr", "semi-optimal+dpp"]
    options: dict[str, Any] = {"num_frames": [1, 3, 8], "num_candidates": 8, "bootstrap": 50}
    found, expected = (so.evaluate(bank, policies, device=device, **options) for device in ("cuda", "cpu"))
    assert found.facts["device"] == "cuda"
    same_rows(found, expected, within=1e-6)
    for policy in ("semi-optimal", "optimal"):  # all frames are the same clip, whoever chooses
        assert found.row(policy, 8).recovered is None
        assert found.row(policy, 8).versus_uniform["difference"] == 0  # type: ignore[index]


@pytest.mark.parametrize("name", ["i3d", "slowonly_r50", "x3d_s", "timm:test_resnet"])
def test_networks_of_pictures_and_of_clips_are_trained(name: str, tmp_path: Path) -> None:
    so.make_reels(
        "procedural",
        tmp_path / "bank",
        recipe={"num_shots": 4, "num_candidates": 4, "size": 64},
        counts={"train": 8, "dev": 4},
    )
    options: dict[str, Any] = {"epochs": 1, "batch_size": 4, "num_frames": 4, "input_size": 64, "device": "cuda"}
    trained = so.train_classifier(tmp_path / "bank", name, out=tmp_path / "run", **options)
    assert np.isfinite(trained.result["dev"])


def test_a_pool_of_a_classifier_on_the_other_device(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", LENGTHS, LABELS)
    torch.manual_seed(0)
    classifier = so.create_classifier("timm:test_resnet", num_classes=3, head="frameexit", input_size=32)
    classifier.net.fc.weight.mul_(30)  # otherwise all answers are alike
    add_teacher(bank, classifier)
    options: dict[str, Any] = {"num_frames": [1, 3], "num_candidates": 8, "bootstrap": 50, "classifier": classifier}
    expected = so.evaluate(bank, RULES_AND_ORACLES, device="cpu", **options)
    same_rows(so.evaluate(bank, RULES_AND_ORACLES, device="cuda", **options), expected, within=1e-5)
    classifier.to("cuda")
    for device in ("cpu", "cuda"):
        found = so.evaluate(bank, RULES_AND_ORACLES, device=device, **options)
        assert classifier.device.type == "cuda"
        for row, other in zip(found.rows, expected.rows, strict=True):
            assert row.confidence == pytest.approx(other.confidence, abs=1e-3)


class MeanOfFrames(nn.Module):
    """A network of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)

    def forward(self, clips: Tensor) -> Tensor:
        return 20 * self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


@pytest.mark.usefixtures("exact")
def test_a_classifier_that_must_be_run(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", LENGTHS, LABELS)
    classifier = so.wrap_classifier(MeanOfFrames(), input_size=32, name="clips")
    add_teacher(bank, classifier)
    options: dict[str, Any] = {"num_frames": [1, 2], "num_candidates": 5, "bootstrap": 0, "classifier": classifier}
    expected = so.evaluate(bank, RULES_AND_ORACLES, device="cpu", **options)
    classifier.to("cuda")
    for device in ("cpu", "cuda"):
        found = so.evaluate(bank, RULES_AND_ORACLES, device=device, **options)
        assert found.row("semi-optimal", 1).fidelity == 1.0
        for row, other in zip(found.rows, expected.rows, strict=True):
            assert row.confidence == pytest.approx(other.confidence, abs=1e-3)


# ---- samplers


@pytest.fixture
def exact() -> None:
    """Without the rounding of matrix products and convolutions that a GPU is allowed by default."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


# Samplers here take frames in the size that they are given: on the CPU torchvision resizes uint8 in whole numbers, on
# the GPU in float, and random networks make much of a grey level.


def scattered(size: int = 32, **settings: Any) -> so.SOSampler:
    """Random weights whose norms know their input, so that scores differ clearly between frames."""
    torch.manual_seed(0)
    sampler = so.SOSampler(input_size=size, **settings)
    norms = [part for part in sampler.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        sampler.train()(torch.randn(4, 8, 3, size, size))
    for norm in norms:
        norm.momentum = 0.1
    return sampler.freeze()


BELIEF = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("settings", [{}, {"shift": 10}, {"num_classes": 3, "scoring": BELIEF}])
def test_a_sampler_scores_the_same(settings: dict[str, Any]) -> None:
    sampler = scattered(**settings)
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(0, 256, (3, 9, 3, 32, 32), dtype=torch.uint8, generator=generator)
    mask = torch.arange(9) < torch.tensor([[9], [6], [4]])
    expected = sampler.look(pictures, mask)
    sampler.to("cuda")
    for some, real in ((pictures, mask), (pictures.to("cuda"), mask), (pictures, mask.to("cuda"))):
        found = sampler.look(some, real)
        assert found.scores.device.type == "cuda"
        assert torch.allclose(found.scores.cpu()[mask], expected.scores[mask], rtol=1e-3, atol=1e-3)
        chosen = sampler.choose(some, 4, real)
        assert torch.equal(chosen, top_n(found.scores, 4, mask.to("cuda")))
        assert (chosen.cpu() < torch.tensor([[9], [6], [4]])).all()
    sampler.precision = "bfloat16"
    rounded = sampler.score(pictures, mask)
    assert rounded.dtype == torch.float32
    assert rounded.cpu()[mask].isfinite().all()


@pytest.mark.usefixtures("exact")
def test_a_sampler_on_either_device_is_evaluated_on_either(tmp_path: Path) -> None:
    bank = write_bank(tmp_path / "bank", LENGTHS, LABELS)
    teach(bank, random_logits(LENGTHS, LABELS))
    sampler = scattered(calibration=(1.0, 0.0))
    sampler.save_pretrained(tmp_path / "run")
    options: dict[str, Any] = {"num_frames": 3, "num_candidates": 8, "bootstrap": 0}
    policies = {"mine": sampler, "mine+mmr": sampler, "folder": tmp_path / "run", "uniform": "uniform"}
    expected = so.evaluate(bank, policies, device="cpu", **options)
    for of_sampler, device in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")):
        sampler.to(of_sampler)
        found = so.evaluate(bank, policies, device=device, **options)
        assert sampler.device.type == of_sampler
        assert [row.sampler_gmacs for row in found.rows] == [row.sampler_gmacs for row in expected.rows]
        for policy in ("mine", "mine+mmr", "folder"):  # rounding may turn a narrow decision
            assert (found.chosen(policy) == expected.chosen(policy)).mean() > 0.9
    assert (found.chosen("mine") == found.chosen("folder")).all()


def test_a_sampler_takes_little_memory() -> None:
    sampler = so.SOSampler().freeze().to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    sampler.gmacs(2000)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20, "its cost is counted without arithmetic"
    large = torch.zeros(1, 1, 3, 2160, 3840, dtype=torch.uint8).expand(1, 48, -1, -1, -1)
    sampler.score(large)
    assert torch.cuda.max_memory_allocated() - before < 3 << 30  # as float32 all of them would be 4.8 GB


# ---- from file to label


@pytest.mark.usefixtures("exact")
def test_pipeline_in_half_precision(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("av")  # GPU machines may have no decoder
    clip: Path = request.getfixturevalue("clip")
    torch.manual_seed(0)
    classifier = so.create_classifier("timm:resnet10t", num_classes=3, input_size=128)
    sampler = scattered(128)
    sampler.save_pretrained(tmp_path / "run")
    options: dict[str, Any] = {"num_frames": 3, "num_candidates": 8}
    expected = so.Pipeline("uniform", classifier, **options)(clip)
    for policy in ("uniform", sampler, tmp_path / "run"):
        pipe = so.Pipeline(policy, classifier, device="cuda", precision="bfloat16", **options)
        found = pipe(clip)
        assert classifier.device.type == "cuda"
        assert classifier.precision == "bfloat16"
        assert found.probabilities.sum() == pytest.approx(1, abs=1e-3)
        assert len(found.selection.frame_indices) == 3
        if policy == "uniform":
            assert found.selection.frame_indices.tolist() == expected.selection.frame_indices.tolist()
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=3e-2)
    assert sampler.device.type == "cuda"
    both = pipe([clip, clip])
    np.testing.assert_allclose(both[0].probabilities, both[1].probabilities, atol=1e-6)
    # What was asked for a device goes there, and stays beside what is on another.
    on_cpu = so.select(clip, 3, num_candidates=8, policy=so.load_sampler(tmp_path / "run", device="cpu"))
    on_gpu = so.select(clip, 3, num_candidates=8, policy=tmp_path / "run")
    assert on_cpu.candidates.scores is not None
    assert on_gpu.candidates.scores is not None
    np.testing.assert_allclose(on_cpu.candidates.scores, on_gpu.candidates.scores, rtol=1e-3, atol=1e-3)
