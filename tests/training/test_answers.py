"""Answers that are fitted on dev: a problem whose truth is known, and the training of a sampler."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.bank.format import Shown, shown_text
from sosampler.bank.pixels import Shape
from sosampler.evaluation.result import SharedSources, top1
from sosampler.samplers.answer import Evidence, frames_to_ask
from sosampler.samplers.sosampler import Scoring
from sosampler.training.answers import (
    DevAnswers,
    _apart,
    _folds,
    _is_better,
    find_sure,
    fit,
    fit_answers,
    standard_error,
    with_groups,
)
from sosampler.training.dev import DevOutputs, DevSet, choose_ranking, fit_calibration
from sosampler.training.sampler_data import open_frames
from sosampler.training.train_sampler import train
from tests.factories import SAMPLER_QUICK, make_bank


def logistic(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


@cache
def problem(videos: int, seed: int, *, multi_label: bool = False, candidates: int = 10, classes: int = 8) -> DevAnswers:
    """A third of the frames show the class, the others something else; all answers are noisy, the sampler's more so."""
    rng = np.random.default_rng(seed)
    label = rng.integers(classes, size=videos)
    shows = rng.random((videos, candidates)) < 0.3
    shows[np.arange(videos), rng.integers(candidates, size=videos)] = True
    peak = np.where(shows, label[:, None], rng.integers(classes, size=shows.shape))
    height = np.where(shows, 2.2, 2.5 * rng.random(shows.shape))

    def said(strength: float) -> np.ndarray:
        logits = rng.normal(0, 1, (*shows.shape, classes))
        logits[(*np.indices(shows.shape), peak)] += strength * height
        return logits - (2 if multi_label else 0)

    logits, own = 1.5 * said(1.0), said(0.5)
    scores = np.where(shows, 1.0, -1.0) + rng.normal(0, 1, shows.shape)
    labels = np.arange(classes) == label[:, None]
    slope, offset = fit_calibration(scores, shows.astype(float))
    evidence = Evidence(logistic(slope * scores + offset), own, np.ones(shows.shape, dtype=bool))
    metric = "mAP" if multi_label else "top1"
    return DevAnswers(evidence, logits, scores, labels, list(range(videos)), multi_label, metric)


@cache
def fitted() -> tuple[dict[str, Any], dict[str, Any]]:
    return fit_answers(problem(300, seed=0))


def test_fused_beats_weighted_beats_mean() -> None:
    """On videos that the fit has not seen; and more frames never cost more than half a point."""
    settings, measured = fitted()
    assert settings["default"] == "fused"
    test = problem(4000, seed=1)
    curve = {kind: test.score(test.answers(kind, settings.get(kind, {}))) for kind in ("mean", "weighted", "fused")}
    assert curve["mean"][-1] < curve["mean"][-2]  # what this is about: the mean gets worse with more frames
    assert np.mean(curve["weighted"]) > np.mean(curve["mean"]) + 0.01
    assert curve["weighted"][-1] > curve["mean"][-1] + 0.03
    for better, worse in zip(curve["fused"], curve["weighted"], strict=True):
        assert better > worse + 0.02
    for kind in ("weighted", "fused"):
        assert (np.diff(curve[kind]) > -0.005).all(), (kind, curve[kind])
    losses = [test.loss(test.answers(kind, settings.get(kind, {}))) for kind in ("fused", "weighted", "mean")]
    assert losses == sorted(losses)
    # What was measured by cross-validation is what new videos give, and probabilities mean what they say.
    for kind, expected in curve.items():
        np.testing.assert_allclose(measured[kind]["score"], expected, atol=0.07)
    assert max(measured["fused"]["ece"]) < 0.12


def test_the_fit_is_a_minimum_and_repeats() -> None:
    dev = problem(300, seed=0)
    assert fit("fused", dev) == fit("fused", dev) == fitted()[0]["fused"]
    for kind in ("weighted", "fused"):
        best = fitted()[0][kind]
        least = dev.loss(dev.answers(kind, best))
        for name in best:
            for factor in (0.7, 1.4):
                assert dev.loss(dev.answers(kind, {**best, name: factor * best[name]})) > least - 1e-3


def test_what_is_irrelevant_is_left_out() -> None:
    """With relevance and a class head that are noise, the answer is the mean or as good as that."""
    dev = problem(300, seed=0)
    rng = np.random.default_rng(5)
    noise = dev.evidence._replace(
        relevance=rng.uniform(0.3, 0.7, dev.scores.shape), class_logits=rng.normal(0, 1, dev.logits.shape)
    )
    bad = DevAnswers(noise, dev.logits, dev.scores, dev.labels, dev.groups, False, "top1")
    settings, measured = fit_answers(bad)
    scores = {kind: np.mean(measured[kind]["score"]) for kind in ("mean", "weighted", "fused")}
    assert scores[settings["default"]] >= scores["mean"] - 0.02
    assert settings["fused"]["sampler"] < 0.2


def test_independent_classes() -> None:
    settings, measured = fit_answers(problem(200, seed=0, multi_label=True))
    assert "sure" not in settings
    assert 0 < settings["fused"]["prior"] < 0.5
    assert measured["fused"]["log_loss"] < measured["mean"]["log_loss"]
    test = problem(1500, seed=1, multi_label=True)
    scores = [np.mean(test.score(test.answers(kind, settings.get(kind, {})))) for kind in ("mean", "weighted", "fused")]
    assert scores == sorted(scores)


def test_without_a_class_head() -> None:
    dev = problem(120, seed=0)
    settings, measured = fit_answers(
        DevAnswers(
            dev.evidence._replace(class_logits=None), dev.logits, dev.scores, dev.labels, dev.groups, False, "top1"
        )
    )
    assert set(settings) == {"default", "weighted"}
    assert settings["default"] == "weighted"  # by far better than the mean, which is kept otherwise
    assert "fused" not in measured


def test_groups_stay_together() -> None:
    groups = [f"g{number // 3}" for number in range(60)]
    folds = _folds(groups)
    assert sorted(set(folds.tolist())) == [0, 1, 2, 3, 4]
    assert all(len(set(folds[start : start + 3].tolist())) == 1 for start in range(0, 60, 3))


def test_videos_of_the_same_clips_are_parted_by_class() -> None:
    dev = problem(60, seed=0)
    groups, labels = list(dev.groups), [row.tobytes() for row in dev.labels]
    assert _apart(dev) == groups
    assert _apart(replace(dev, sources=[(f"clip {number}",) for number in range(60)])) == groups
    shared = replace(dev, sources=[(f"clip {number}", f"clip {number + 1}") for number in range(60)])
    assert _apart(shared) == labels
    # With fewer classes than parts there is nothing better than the groups.
    few = shared.rows(np.flatnonzero(dev.labels[:, :3].any(1)))
    assert _apart(few) == list(few.groups)
    # The fit takes them apart in that way, and so measures something else.
    assert fit_answers(shared)[1]["fused"]["log_loss"] != fit_answers(dev)[1]["fused"]["log_loss"]


def test_standard_error_counts_clips_and_not_videos() -> None:
    rng = np.random.default_rng(0)
    labels = np.eye(2, dtype=bool)[np.zeros(400, dtype=int)]
    values = rng.normal(0, 1, 400)
    alone = SharedSources(with_groups([], range(400)), labels)
    assert standard_error(values, alone) == pytest.approx(values.std() / 20)
    # A hundred values, each four times: by a clip that they share, or by their group.
    repeated = np.repeat(values[:100], 4)
    by_clip = SharedSources(with_groups([(f"c{number // 4}",) for number in range(400)], range(400)), labels)
    by_group = SharedSources(with_groups([], [number // 4 for number in range(400)]), labels)
    for shared in (by_clip, by_group):
        assert standard_error(repeated, shared) == pytest.approx(values[:100].std() / 10, rel=0.02)


def test_standard_error_where_all_videos_of_a_class_show_the_same_clips() -> None:
    """The effect of the clips is that of the class, and cannot be seen within it."""
    rng = np.random.default_rng(0)
    of_class = np.arange(400) // 20
    labels = np.eye(20, dtype=bool)[of_class]
    made_of = [(f"clip {number} a", f"clip {number} b") for number in of_class]
    shared = SharedSources(with_groups(made_of, range(400)), labels)
    # Effects of clips and of videos, both with a standard deviation of 1, drawn again and again
    draws = [rng.normal(0, 1, 20)[of_class] + rng.normal(0, 1, 400) for _ in range(400)]
    found = np.mean([standard_error(draw, shared) for draw in draws])
    assert found == pytest.approx(np.sqrt(1 / 20 + 1 / 400), rel=0.05)
    # Plain groups, of which a class has several, are as before.
    groups = SharedSources(with_groups([], [number // 4 for number in range(400)]), labels)
    assert not groups.overlapping
    assert shared.overlapping


def test_an_answer_is_better_by_more_than_chance_or_not_at_all() -> None:
    def probs(right: int, sure: float, wrong_sure: float = 0.6) -> np.ndarray:
        """The first videos are named right, with this probability, the others wrong; [V, 1, 2]."""
        of_truth = np.where(np.arange(100) < right, sure, 1 - wrong_sure)
        return np.stack([of_truth, 1 - of_truth], axis=-1)[:, None]

    labels = np.eye(2, dtype=bool)[np.zeros(100, dtype=int)]
    evidence = Evidence(np.ones((100, 1)), None, np.ones((100, 1), dtype=bool))
    parts: Any = (evidence, np.zeros((100, 1, 2)), np.zeros((100, 1)), labels)
    dev = DevAnswers(*parts, list(range(100)), False, "top1")
    same = probs(50, 0.6)
    assert not _is_better(dev, same, same)
    # Three more of a hundred are right: 0.03 with a standard error of 0.017. With five it is 0.05 and 0.022.
    assert not _is_better(dev, probs(53, 0.6), same)
    assert not _is_better(dev, same, probs(53, 0.6))
    assert _is_better(dev, probs(55, 0.6), same)
    assert not _is_better(dev, same, probs(55, 0.6))
    # As many are right, with higher probabilities: the log loss decides.
    assert _is_better(dev, probs(50, 0.7), same)
    assert not _is_better(dev, same, probs(50, 0.7))
    # What the metric says counts more than a log loss that is lower by far.
    assert dev.loss(probs(55, 0.51, 0.99)) > dev.loss(same) + 1
    assert _is_better(dev, probs(55, 0.51, 0.99), same)
    assert not _is_better(dev, same, probs(55, 0.51, 0.99))
    # Fives of videos show the same clip, so those five are one.
    shared = replace(dev, sources=[(f"clip {number // 5}",) for number in range(100)])
    assert not _is_better(shared, probs(55, 0.6), same)


def test_without_a_clear_winner_the_fused_answer_is_kept() -> None:
    """On these thirty videos, with noise beside the classifier, another answer has the lower log loss by chance."""
    dev, rng = problem(300, seed=0).rows(np.arange(30, 60)), np.random.default_rng(1)
    noise = dev.evidence._replace(
        relevance=rng.uniform(0.3, 0.7, dev.scores.shape), class_logits=rng.normal(0, 1, dev.logits.shape)
    )
    settings, measured = fit_answers(replace(dev, evidence=noise))
    assert measured["weighted"]["log_loss"] < measured["fused"]["log_loss"]
    assert settings["default"] == "fused"


class KnownDev:
    """Videos of two frames, of which each ranking puts another one first; values are known."""

    metric, num_candidates = "top1", 1

    def __init__(self, belief: np.ndarray, importance: np.ndarray, groups: list[int]) -> None:
        self.right = torch.from_numpy(np.stack([belief, importance], axis=1))  # [V, 2], of either frame
        self.shared = SharedSources(with_groups([], groups), np.ones((len(groups), 1), dtype=bool))

    def outputs(self, sampler: Any, precision: str) -> DevOutputs:
        first = [0.0, 1.0] if sampler.scoring.settings == {} else [1.0, 0.0]
        return DevOutputs(torch.tensor([first] * len(self.right)), torch.zeros(0), None)

    def values(self, chosen: torch.Tensor) -> np.ndarray:
        return self.right.gather(1, chosen).double().mean(1).numpy()

    def measure(self, chosen: torch.Tensor) -> float:
        return float(self.values(chosen).mean())


@pytest.mark.parametrize(
    ("better", "worse", "a_group", "kept"),
    [
        (0, 0, 1, "belief"),
        (0, 50, 1, "belief"),
        (10, 4, 1, "belief"),  # ahead by 6 of 200: 1.6 standard errors
        (10, 2, 1, "importance"),  # by 8: 2.3
        (10, 2, 2, "belief"),  # the same in pairs that are counted once: 1.6
        (50, 0, 1, "importance"),
    ],
)
def test_the_belief_is_dropped_only_for_more_than_chance(better: int, worse: int, a_group: int, kept: str) -> None:
    """Of 200 videos the importance alone is right about some more, and about some fewer."""
    belief = np.zeros(200)
    belief[better : better + worse] = 1
    importance = np.zeros(200)
    importance[:better] = 1
    dev = KnownDev(belief, importance, [number // a_group for number in range(200)])
    settings = {"belief": 2.0, "relevance": [4.0, 1.0], "importance": 0.2}
    sampler = SimpleNamespace(scoring=Scoring(settings, num_classes=3))
    with_belief = dev.outputs(sampler, "float32")
    outputs, facts = choose_ranking(sampler, dev, with_belief, "float32")  # type: ignore[arg-type]
    assert facts["kept"] == kept
    assert facts["ahead"] == pytest.approx((better - worse) / 200)
    assert facts["belief"] == [pytest.approx(worse / 200)]
    assert facts["importance"] == [pytest.approx(better / 200)]
    assert sampler.scoring.settings == (settings if kept == "belief" else {})
    assert (outputs is with_belief) == (kept == "belief")


def test_where_to_stop() -> None:
    """The lowest belief from which on stopping costs at most the tolerance, by trying."""
    rng = np.random.default_rng(0)
    beliefs = rng.dirichlet([0.3] * 3, (80, 5))
    labels = np.eye(3, dtype=bool)[beliefs[:, -1].argmax(1)]
    labels[::5] = np.roll(labels[::5], 1, axis=1)
    counts = np.full(80, 5)
    reference = top1(beliefs[:, -1], labels)
    for tolerance, sure in find_sure(beliefs, labels, counts):
        for higher in np.linspace(sure, 1, 50):
            needed = frames_to_ask(beliefs, higher, counts=counts)
            assert top1(beliefs[np.arange(80), needed - 1], labels) >= reference - tolerance - 1 / 80
    found = [sure for _, sure in find_sure(beliefs, labels, counts)]
    assert found == sorted(found, reverse=True)


# ---- training


def test_training_measures_and_keeps_the_best(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", train=24, dev=24)
    said: list[str] = []
    options = SAMPLER_QUICK | {"epochs": 2}
    trained = train(bank, out=tmp_path / "run", answer="best", say=said.append, **options)
    (line,) = [text for text in said if text.startswith("answer: ")]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    kept = config["answer"]["default"]
    assert line.endswith(f"; {kept} is kept")
    assert all(f"{kind} " in line for kind in ("mean", "weighted", "fused"))
    assert trained.result["answers"]["kept"] == kept
    assert set(config["answer"]) == {"default", "weighted", "fused", "sure"}
    assert trained.sampler.answer == config["answer"]
    assert config["about"]["answers"]["mean"]["score"] == trained.result["answers"]["mean"]["score"]
    rows = so.evaluate(
        bank, trained.sampler, num_frames=2, num_candidates=8, split="dev", bootstrap=0, device="cpu"
    ).rows
    assert rows[0].answer == kept
    # A recipe may insist, as that of the paper does on the mean.
    plain = train(bank, out=tmp_path / "plain", say=said.append, answer="mean", **options)
    assert plain.sampler.answer is not None
    assert plain.sampler.answer["default"] == "mean"
    assert said[-2].endswith("mean is kept, as the recipe says")
    assert plain.sampler.answer["fused"] == config["answer"]["fused"]


def test_training_ranks_by_the_belief_only_where_it_helps_on_dev(tmp_path: Path) -> None:
    """A belief that knows nothing ranks frames first that are like no class, worse than the importance alone."""
    bank = make_bank(tmp_path / "bank", train=24, dev=24)
    kept, said = {}, []
    for relevance in ([4.0, 1.0], [0.0, -50.0]):
        scoring = {"belief": 2.0, "relevance": relevance, "importance": 0.0}
        options = {"lr": 3e-3, **SAMPLER_QUICK, "epochs": 6, "scoring": scoring}
        trained = train(bank, out=tmp_path / f"run{relevance[0]}", say=said.append, **options)
        result = trained.result["ranking"]
        ahead = np.mean(result["importance"]) - np.mean(result["belief"])
        assert result["ahead"] == pytest.approx(ahead)  # the metric is top-1
        helps = ahead <= 2 * result["standard_error"]
        kept[relevance[0]] = result["kept"]
        assert result["kept"] == ("belief" if helps else "importance")
        assert trained.sampler.scoring.settings == (scoring if helps else {})
        assert trained.sampler.config["scoring"] == trained.sampler.scoring.settings
        assert said[-3].startswith("ranking: ")
        assert said[-3].endswith(f"{result['kept']} is kept")
        assert f"(chance: {200 * result['standard_error']:.2f} points of top-1)" in said[-3]
    assert kept[0.0] == "importance"
    # What was measured is what `evaluate` finds on dev, by one frame alone.
    options = {"num_frames": 1, "num_candidates": trained.result["num_candidates"], "split": "dev", "bootstrap": 0}
    (row,) = so.evaluate(bank, trained.sampler, device="cpu", answer="mean", **options).rows
    assert row.top1 == pytest.approx(result["importance"][0])
    # The score of the run is by the ranking that was kept; epochs were compared by that with the belief.
    epochs = (trained.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(epoch)["dev_top1"] for epoch in epochs) < trained.result["dev"]
    # Without a belief there is nothing to decide.
    alone = train(bank, out=tmp_path / "alone", **(SAMPLER_QUICK | {"epochs": 1, "scoring": {}}))
    assert "ranking" not in alone.result


def test_the_bank_says_what_dev_videos_are_made_of(tmp_path: Path) -> None:
    """From there chance and the parts of dev know which videos share clips; where one is unknown, nothing is."""
    bank = make_bank(tmp_path / "bank", train=24, dev=24)
    rows = [index for index, row in enumerate(bank.rows) if row.item.split == "dev"]
    made_of = {bank.rows[row].item.id: Shown(sources=(f"clip {row % 3}", "another")) for row in rows}
    sampler = so.SOSampler(backbone="timm:test_resnet", input_size=32, calibration=(1.0, 0.0))

    def dev_set() -> DevSet:
        opened = so.Bank(bank.path)
        frames = open_frames(
            opened, rows, Shape(32, square=True), cache_bytes=1 << 30, device=torch.device("cpu"), workers=1
        )
        return DevSet(opened, rows, opened.teacher(), frames, num_candidates=4)

    assert not dev_set().shared
    bank.folder.shown_jsonl.write_text("".join(shown_text(made_of)), encoding="utf-8")
    dev = dev_set()
    assert dev.shared.overlapping
    answers = dev.answers(sampler, dev.outputs(sampler, "float32"))
    assert answers is not None
    assert [set(names) for names in answers.sources] == [{f"clip {row % 3}", "another"} for row in rows]
    made_of.popitem()
    bank.folder.shown_jsonl.write_text("".join(shown_text(made_of)), encoding="utf-8")
    assert not dev_set().shared


def test_recipes() -> None:
    answers = {name: so.read_recipe(name).answer for name in so.list_recipes()}
    assert answers.pop("default") == "best"
    assert set(answers.values()) == {"mean"}
    assert "answer" not in so.read_recipe("default").to_dict()  # as recipes of earlier versions
    with pytest.raises(so.InvalidArgument, match="choose one of: best, mean, weighted, fused"):
        so.read_recipe("default", answer="all")


@pytest.mark.parametrize(
    ("options", "text"), [({"dev": 6}, "dev has 6 videos"), ({"pooling": None}, "no stored logits")]
)
def test_where_nothing_can_be_fitted(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    bank = make_bank(tmp_path / "bank", **({"train": 12, "dev": 24} | options))
    said: list[str] = []
    trained = train(bank, out=tmp_path / "run", answer="fused", say=said.append, **SAMPLER_QUICK | {"epochs": 1})
    assert trained.sampler.answer is None
    assert any(text in line for line in said)
