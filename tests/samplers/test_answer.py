"""The answer from all that was seen, against loops over frames and classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.errors import InvalidArgument, WeightsError
from sosampler.policies.base import AnswerSource
from sosampler.policies.learned import LearnedPolicy
from sosampler.policies.registry import with_answer
from sosampler.samplers.answer import (
    Evidence,
    beliefs_in_order,
    check_answer,
    combine,
    frames_to_ask,
    log_answers,
    sure_for,
)
from sosampler.samplers.export import export_sampler
from sosampler.samplers.onnx_sampler import OnnxSampler
from sosampler.samplers.sosampler import SOSampler
from tests.factories import BELIEF, EXPORT_TINY, scattered, scenes

WEIGHTED = {"power": 1.7, "scale": 0.8}
FUSED = {"power": 1.3, "strength": 1.9, "classifier": 0.7, "sampler": 0.4}
MULTI = {**FUSED, "prior": 0.2}
PROBE = {"probe": 0.8, "relevance": 0.6}
SETTINGS = {"default": "fused", "weighted": WEIGHTED, "fused": FUSED, "sure": [[0.0, 0.99], [0.01, 0.8]]}


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def weighted_by_hand(relevance: Any, logits: Any, seen: list[int], *, multi_label: bool) -> list[float]:
    weights = {t: relevance[t] ** WEIGHTED["power"] for t in seen}
    total = sum(weights.values())
    classes = range(len(logits[0]))
    mean = [WEIGHTED["scale"] * sum(weights[t] * logits[t][c] for t in seen) / total for c in classes]
    return [logistic(value) for value in mean] if multi_label else softmax(mean)


def fused_by_hand(
    relevance: Any, own: Any, logits: Any, seen: list[int], real: int, *, multi_label: bool, probed: bool = False
) -> list[float]:
    """`probed`: logits are those of the classifier, of the probe, and the log-odds of its relevance."""
    classes = len(own[0])
    total = [0.0] * classes
    if multi_label:
        total = [math.log(MULTI["prior"] / (1 - MULTI["prior"]))] * classes
    rest = real - len(seen)
    for t in range(real):
        share = min(len(seen), 10) / len(seen) if t in seen else min(rest, 10) / rest
        r = relevance[t] ** FUSED["power"]
        values = [
            FUSED["sampler"] * own[t][c] + (FUSED["classifier"] * logits[t][c] if t in seen else 0)
            for c in range(classes)
        ]
        if probed and t in seen:
            values = [value + PROBE["probe"] * logits[t][classes + c] for c, value in enumerate(values)]
            odds = r / (1 - r) * math.exp(PROBE["relevance"] * logits[t][-1])
            r = odds / (1 + odds)
        for c in range(classes):
            if multi_label:
                p, prior = logistic(values[c]), MULTI["prior"]
                evidence = math.log(max(1 - r + r * p / prior, 1e-4))
                evidence -= math.log(max(1 - r + r * (1 - p) / (1 - prior), 1e-4))
            else:
                evidence = math.log(max(1 - r + r * classes * softmax(values)[c], 1e-4))
            total[c] += FUSED["strength"] * share * evidence
    return [logistic(value) for value in total] if multi_label else softmax(total)


def some(
    videos: int = 5, candidates: int = 14, classes: int = 4, seed: int = 0
) -> tuple[Evidence, np.ndarray, np.ndarray]:
    """Evidence of videos of several lengths, padding being nonsense; the classifier's logits; an order of frames."""
    rng = np.random.default_rng(seed)
    real = np.arange(candidates) < rng.integers(4, candidates + 1, videos)[:, None]
    real[0] = True
    relevance = np.where(real, rng.uniform(0.01, 0.99, real.shape), np.nan)
    own = np.where(real[..., None], 2 * rng.standard_normal((*real.shape, classes)), np.nan)
    logits = 3 * rng.standard_normal((*real.shape, classes))
    order = np.where(real, rng.random(real.shape), np.inf).argsort(1)
    return Evidence(np.nan_to_num(relevance, nan=0.5), own, real), logits, order


def seen_of(order: np.ndarray, real: np.ndarray, count: int) -> np.ndarray:
    seen = np.zeros(real.shape, dtype=bool)
    np.put_along_axis(seen, order[:, :count], True, axis=1)
    return seen & real


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("count", [1, 3, 11, 14])
def test_both_answers_equal_loops(count: int, multi_label: bool) -> None:
    evidence, logits, order = some()
    seen = seen_of(order, evidence.real, count)
    hidden = np.where(seen[..., None], logits, np.nan)  # what was not seen cannot matter
    settings = MULTI if multi_label else FUSED
    weighted = combine("weighted", WEIGHTED, evidence, hidden, seen, multi_label=multi_label)
    fused = combine("fused", settings, evidence, hidden, seen, multi_label=multi_label)
    for video, real in enumerate(evidence.real.sum(1).tolist()):
        frames = np.flatnonzero(seen[video]).tolist()
        given = evidence.relevance[video].tolist(), logits[video].tolist()
        expected = weighted_by_hand(*given, frames, multi_label=multi_label)
        np.testing.assert_allclose(weighted[video], expected, rtol=1e-9, atol=1e-12)
        own = evidence.class_logits[video].tolist()
        expected = fused_by_hand(given[0], own, given[1], frames, real, multi_label=multi_label)
        np.testing.assert_allclose(fused[video], expected, rtol=1e-9, atol=1e-12)
    if not multi_label:
        np.testing.assert_allclose([weighted.sum(1), fused.sum(1)], 1)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("count", [1, 3, 14])
def test_probed_equals_loops(count: int, multi_label: bool) -> None:
    evidence, logits, order = some()
    seen = seen_of(order, evidence.real, count)
    wide = np.concatenate([logits, 2 * np.random.default_rng(1).standard_normal((*seen.shape, 5))], axis=2)
    plain = MULTI if multi_label else FUSED
    settings = {**plain, **PROBE}
    found = combine(
        "probed", settings, evidence, np.where(seen[..., None], wide, np.nan), seen, multi_label=multi_label
    )
    for video, real in enumerate(evidence.real.sum(1).tolist()):
        frames = np.flatnonzero(seen[video]).tolist()
        given = (each[video].tolist() for each in (evidence.relevance, evidence.class_logits, wide))
        expected = fused_by_hand(*given, frames, real, multi_label=multi_label, probed=True)
        np.testing.assert_allclose(found[video], expected, rtol=1e-9, atol=1e-12)
    # A probe that counts for nothing leaves the fused answer; frame by frame it is the same as from scratch.
    nothing = {**settings, "probe": 0.0, "relevance": 0.0}
    fused = combine("fused", plain, evidence, logits, seen, multi_label=multi_label)
    without = combine("probed", nothing, evidence, wide, seen, multi_label=multi_label)
    np.testing.assert_allclose(without, fused, rtol=1e-9, atol=1e-12)
    beliefs = beliefs_in_order(settings, evidence, wide, order, multi_label=multi_label)
    np.testing.assert_allclose(beliefs[:, count - 1], found, rtol=1e-8, atol=1e-12)


def test_a_relevance_of_zero_or_one_stays() -> None:
    evidence = Evidence(np.array([[1.0, 0.0]]), np.log([[[0.5, 0.5], [0.8, 0.2]]]), np.ones((1, 2), dtype=bool))
    wide = np.array([[[0.0, 0.0, 1.0, 0.0, -3.0], [0.0, 0.0, 0.0, 5.0, 9.0]]])
    settings = {"power": 1.0, "strength": 1.0, "classifier": 1.0, "sampler": 1.0, "probe": 1.0, "relevance": 1.0}
    (found,) = combine("probed", settings, evidence, wide, np.ones((1, 2), dtype=bool))
    np.testing.assert_allclose(found, softmax([1.0, 0.0]), rtol=1e-9)  # the first frame alone says something


def test_all_frames_seen_by_hand() -> None:
    """Two frames of two classes: e = log(1 - r + 2 r p), with p the product of both, normalised."""
    evidence = Evidence(np.array([[0.9, 0.4]]), np.log([[[0.5, 0.5], [0.8, 0.2]]]), np.ones((1, 2), dtype=bool))
    logits = np.log([[[0.9, 0.1], [0.3, 0.7]]])
    settings = {"power": 1.0, "strength": 1.0, "classifier": 1.0, "sampler": 1.0}
    second = 0.8 * 0.3 / (0.8 * 0.3 + 0.2 * 0.7)
    odds = (0.1 + 1.8 * 0.9) * (0.6 + 0.8 * second) / ((0.1 + 1.8 * 0.1) * (0.6 + 0.8 * (1 - second)))
    (found,) = combine("fused", settings, evidence, logits, np.ones((1, 2), dtype=bool))
    np.testing.assert_allclose(found, [odds / (1 + odds), 1 / (1 + odds)])


@pytest.mark.parametrize("multi_label", [False, True])
def test_equal_weights_are_the_mean(multi_label: bool) -> None:
    evidence, logits, order = some()
    seen = seen_of(order, evidence.real, 3)
    activate = torch.sigmoid if multi_label else lambda values: values.softmax(-1)
    mean = np.stack(
        [activate(torch.from_numpy(row[mask]).mean(0)).numpy() for row, mask in zip(logits, seen, strict=True)]
    )
    same = evidence._replace(relevance=np.full_like(evidence.relevance, 1e-9))  # also where all are irrelevant
    for settings, given in (({"power": 0.0, "scale": 1.0}, evidence), ({"power": 2.0, "scale": 1.0}, same)):
        found = combine("weighted", settings, given, logits, seen, multi_label=multi_label)
        np.testing.assert_allclose(found, mean, atol=1e-12)


def test_logits_of_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (20, 4))
    for multi_label in (False, True):
        tensor = torch.from_numpy(logits).float()
        probs = (tensor.sigmoid() if multi_label else tensor.softmax(-1)).numpy()
        found = log_answers(probs, multi_label=multi_label)
        again = torch.from_numpy(found)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(again.sigmoid() if multi_label else again.softmax(-1), probs, atol=1e-6)
    assert np.isfinite(log_answers(np.array([0.0, 1.0], dtype=np.float32), multi_label=True)).all()


@pytest.mark.parametrize("multi_label", [False, True])
def test_frame_by_frame_equals_from_scratch(multi_label: bool) -> None:
    evidence, logits, order = some(candidates=13)
    settings = MULTI if multi_label else FUSED
    beliefs = beliefs_in_order(settings, evidence, logits, order, multi_label=multi_label)
    for step in range(order.shape[1]):
        seen = seen_of(order, evidence.real, step + 1)
        found = combine("fused", settings, evidence, logits, seen, multi_label=multi_label)
        np.testing.assert_allclose(beliefs[:, step], found, rtol=1e-8, atol=1e-12)
    counts = evidence.real.sum(1)
    for sure in (0.3, 0.7, 0.95, 1.0):
        for at_least in (1, 3):
            needed = frames_to_ask(beliefs, sure, at_least=at_least, counts=counts)
            for video, count in enumerate(counts.tolist()):
                steps = [k for k in range(at_least, count + 1) if beliefs[video, k - 1].max() >= sure]
                assert needed[video] == (steps[0] if steps else count)


def test_tolerances() -> None:
    assert [sure_for(SETTINGS, tolerance) for tolerance in (0.0, 0.005, 0.01, 1.0)] == [0.99, 0.99, 0.8, 0.8]
    assert sure_for({}, 0.01) is None


# ---- in a sampler


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"default": "best"}, "'best' is unknown"),
        ({"fused": {"power": 1.0}}, "must have exactly these numbers: power, strength, classifier, sampler"),
        ({"fused": {**FUSED, "prior": 0.1}}, "must have exactly"),
        ({"weighted": {"power": -1.0, "scale": 1.0}}, "must be a number of at least 0"),
        ({"sure": [[0.0]]}, "must hold pairs"),
        ({"sure": [[0.0, 1.2]]}, "at most 1"),
        ({"probed": FUSED}, "must have exactly these numbers: power, strength, classifier, sampler, probe, relevance"),
        ({"sure_probed": [[0.0, 0.0]]}, "above 0"),
        ({"more": 1}, "holds more"),
        ({"weighted": {"power": float("nan"), "scale": 1.0}}, "JSON values"),
    ],
)
def test_bad_settings(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_answer({**SETTINGS, **changes})


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(InvalidArgument, match="has no settings"):
        check_answer({"default": "weighted"})
    with pytest.raises(InvalidArgument, match="needs a class head"):
        SOSampler(backbone=EXPORT_TINY, input_size=32, answer=SETTINGS)
    with pytest.raises(InvalidArgument, match="prior"):
        check_answer({"default": "mean", "fused": FUSED}, multi_label=True)
    with pytest.raises(InvalidArgument, match="between 0 and 1"):
        check_answer({"default": "mean", "fused": {**MULTI, "prior": 1.5}}, multi_label=True)


def test_a_sampler_with_a_probe(tmp_path: Path) -> None:
    """Is saved and loaded; without torch it answers as well as it can. A probe of strange settings is refused."""
    sampler = scattered(seed=1, backbone=EXPORT_TINY, num_classes=3, scoring=BELIEF, calibration=(0.7, 0.1)).freeze()
    before = sampler.fingerprint()
    with pytest.raises(InvalidArgument, match="needs a probe"):
        sampler.answer = {**SETTINGS, "default": "probed", "probed": {**FUSED, **PROBE}}
    sampler.set_probe(torch.randn(4, 6), torch.randn(4), "f" * 16)
    sampler.answer = {**SETTINGS, "default": "probed", "probed": {**FUSED, **PROBE}}
    assert sampler.fingerprint() != before
    sampler.save_pretrained(tmp_path / "probed")
    export_sampler(tmp_path / "probed")
    assert f"| probe | of the classifier {'f' * 16}, 6 features |" in (tmp_path / "probed" / "README.md").read_text()
    loaded, light = so.load_sampler(tmp_path / "probed"), OnnxSampler.from_pretrained(tmp_path / "probed")
    assert loaded.fingerprint() == light.fingerprint() == sampler.fingerprint()
    assert torch.equal(loaded.probe.weight, sampler.probe.weight)
    source = AnswerSource(True, ("a", "b", "c"), False, "mine", features_of="f" * 16)
    notes: list[str] = []
    assert with_answer(LearnedPolicy(loaded), None, source, notes.append).answer == "probed"
    assert not notes
    assert with_answer(LearnedPolicy(light), None, source, notes.append).answer == "fused"
    assert "the exported network has no probe" in notes[0]
    with pytest.raises(InvalidArgument, match="no probe"):
        with_answer(LearnedPolicy(light), "probed", source, notes.append)
    for probe, text in (
        ({"classifier": "f"}, "exactly these settings"),
        ({"classifier": 3, "width": 6}, "must be a fingerprint"),
        ({"classifier": "f", "width": 0}, "width"),
        ({"classifier": "f", "width": 1 << 40}, "width"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            SOSampler(backbone=EXPORT_TINY, input_size=32, num_classes=3, probe=probe)
    with pytest.raises(InvalidArgument, match="a probe needs a class head"):
        SOSampler(backbone=EXPORT_TINY, input_size=32, probe={"classifier": "f", "width": 6})


def test_folder_and_export(tmp_path: Path) -> None:
    """What was saved comes back, on torch and without it; both answer alike. Older folders stay as they are."""
    sampler = scattered(seed=1, backbone=EXPORT_TINY, num_classes=3, scoring=BELIEF, calibration=(0.7, 0.1)).freeze()
    before = sampler.fingerprint()
    sampler.save_pretrained(tmp_path / "old")
    assert "answer" not in json.loads((tmp_path / "old" / "config.json").read_text())
    assert so.load_sampler(tmp_path / "old").fingerprint() == before
    assert LearnedPolicy(so.load_sampler(tmp_path / "old")).answer == "mean"
    sampler.answer = SETTINGS
    assert sampler.fingerprint() != before
    sampler.save_pretrained(tmp_path / "new")
    export_sampler(tmp_path / "new")
    loaded, light = so.load_sampler(tmp_path / "new"), OnnxSampler.from_pretrained(tmp_path / "new")
    assert loaded.answer == SETTINGS == light.config["answer"]
    assert "answer | fused" in (tmp_path / "new" / "README.md").read_text()
    frames = scenes(2, 5)
    logits = np.random.default_rng(0).normal(size=(2, 5, 3))
    seen = np.zeros((2, 5), dtype=bool)
    seen[:, 1:3] = True
    answers = []
    for each, given in ((loaded, frames), (light, frames.numpy())):
        policy, output = LearnedPolicy(each), each.look(given)
        assert policy.answer == "fused"
        evidence = policy.evidence_of(output.scores, output.class_logits, np.ones((2, 5), dtype=bool))
        answers.append(policy.combined(evidence, logits, seen))
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-4)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    config["answer"]["fused"] = {"power": 1}
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="must have exactly"):
        so.load_sampler(tmp_path / "new")
