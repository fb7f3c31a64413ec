"""Rows beside the policies: what the classifier's belief attains, the known class frames, a sampler's own answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from sosampler.bank.bank import Bank
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import confidences, mean_average_precision, multi_hot, top1
from sosampler.report.run_report import write_run_report
from tests.factories import (
    CLASSES,
    LABELS,
    TAUGHT_LENGTHS,
    believing,
    clip,
    distinct,
    frames,
    random_logits,
    shifted,
    sigmoid,
    softmax,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T

N = 3


def flags_of(length: int, number: int) -> np.ndarray:
    """Some frames; none of the last video."""
    return (np.arange(length) * (number + 2) % 3 == 0) & (number < len(TAUGHT_LENGTHS) - 1)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    videos = [
        FrameEntry(f"v{n}", LABELS[n], frames(n, length), split="test", shows_class=flags_of(length, n))
        for n, length in enumerate(TAUGHT_LENGTHS)
    ]
    made = write_frames(tmp_path_factory.mktemp("oracles") / "bank", videos, classes=CLASSES, videos_per_shard=4)
    teach(made, random_logits(TAUGHT_LENGTHS, LABELS))
    return made


# ---- attainable


@pytest.mark.parametrize("multi_label", [False, True])
def test_attainable_is_semi_optimal_under_the_classifiers_own_belief(tmp_path: Path, multi_label: bool) -> None:
    labels: list[Any] = [(0, 1), (1,), (0, 2), (0,), (1, 2), (2,), (0, 1, 2), (1,)] if multi_label else LABELS
    logits = random_logits(TAUGHT_LENGTHS, labels)
    made = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, labels, multi_label=multi_label)
    teach(made, logits, multi_label=multi_label)
    found = evaluate(made, ["attainable", "semi-optimal"], num_frames=N, num_candidates=T, bootstrap=0)
    activate = sigmoid if multi_label else softmax
    for number, table in enumerate(logits):
        offered = distinct(len(table))
        exact = table[offered].astype(np.float64)
        belief = activate(exact.mean(0))
        scores = (belief / belief.sum() * activate(exact)).sum(1)
        best = sorted(offered[place] for place in np.argsort(-scores, kind="stable")[:N])
        assert found.chosen("attainable")[number].tolist() == clip(best, N)
    assert found.row("attainable").gmacs is None
    assert found.row("attainable").frames_decoded == T


def test_attainable_needs_no_labels_and_reaches_semi_optimal_where_the_belief_is_right(tmp_path: Path) -> None:
    """With a belief that is certain of the label both choose alike; of another class, attainable follows that."""
    lengths, labels = [8, 8], [(0,), (0,)]
    rng = np.random.default_rng(0)
    sure = np.zeros((8, 3), dtype=np.float32)
    sure[:, 0] = 10 + rng.permutation(8)
    wrong = np.roll(sure, 1, axis=1)
    wrong[:, 0] = rng.permutation(8)
    made = write_bank(tmp_path / "bank", lengths, labels)
    teach(made, [sure, wrong])
    found = evaluate(made, ["attainable", "semi-optimal"], num_frames=2, num_candidates=8, bootstrap=0)
    ours, knows = found.chosen("attainable"), found.chosen("semi-optimal")
    assert ours[0].tolist() == knows[0].tolist() == sorted(np.argsort(-sure[:, 0])[:2].tolist())
    surest = sorted(np.argsort(-softmax(wrong.astype(np.float64))[:, 1])[:2].tolist())
    assert ours[1].tolist() == surest
    assert knows[1].tolist() != surest


def test_attainable_of_a_classifier_that_must_see_the_frames(tmp_path: Path) -> None:
    made = write_bank(tmp_path / "bank", [6, 4], [(0,), (1,)])
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.LazyLinear(3))  # per frame, then a mean of squares

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, clips: torch.Tensor) -> torch.Tensor:
            return self.inner(clips).square().mean(1)  # [B, T, 3, h, w] -> [B, C]

    net = Net()
    net(torch.zeros(1, 1, 3, 16, 16))
    classifier = so.wrap_classifier(net, input_size=16, resize=16, layout="BTCHW", class_names=CLASSES)
    made = so.add_teacher(made, classifier)
    found = evaluate(made, ["attainable", "all"], num_frames=2, num_candidates=5, classifier=classifier, bootstrap=0)
    for number in range(2):
        video = made[number]
        slots = distinct(len(video), 5)
        seen = torch.from_numpy(video.frames(slots)).permute(0, 3, 1, 2)
        positions = torch.from_numpy(video.positions[slots])
        belief = classifier.clip_probs(seen[None], positions[None])[0].double()
        alone = classifier.clip_probs(seen[:, None], positions[:, None]).double()  # [T, C]
        scores = (alone * belief).sum(1).numpy()
        assert found.chosen("attainable")[number].tolist() == sorted(slots[place] for place in np.argsort(-scores)[:2])


# ---- class frames known


def test_class_frames_are_all_that_show_the_class(bank: Bank) -> None:
    found = evaluate(bank, ["uniform", "class-frames"], num_frames=[1, 2], num_candidates=[5, T], bootstrap=20)
    assert [(row.num_frames, row.num_candidates) for row in found.rows if row.policy == "class-frames"] == [
        (None, 5),
        (None, T),
    ]
    logits = random_logits(TAUGHT_LENGTHS, LABELS)
    labels = multi_hot(LABELS, 3)
    for count in (5, T):
        probs, numbers = [], []
        for number, table in enumerate(logits):
            offered = distinct(len(table), count)
            known = [slot for slot in offered if flags_of(len(table), number)[slot]] or offered
            chosen = found.chosen("class-frames", None, count)[number]
            assert [slot for slot in chosen.tolist() if slot >= 0] == known
            probs.append(softmax(table[known].astype(np.float64).mean(0)))
            numbers.append(len(known))
        row = found.row("class-frames", None, count)
        assert row.top1 == top1(probs, labels)
        assert row.mAP == pytest.approx(mean_average_precision(probs, labels))
        assert row.confidence == pytest.approx(confidences(probs, labels).mean(), rel=1e-5)
        assert row.frames_classified == pytest.approx(np.mean(numbers))
        assert row.frames_decoded == count
        assert row.versus_uniform is not None
        assert row.versus_uniform["num_frames"] == int(np.ceil(np.mean(numbers)))


def test_a_report_shows_rows_without_a_number(tmp_path: Path, bank: Bank) -> None:
    torch.manual_seed(0)
    sampler = so.SOSampler(backbone="timm:test_resnet", input_size=32, num_classes=3)
    policies = {"uniform": "uniform", "class-frames": "class-frames", "mine": sampler, "mine+answer": sampler}
    found = evaluate(bank, policies, num_frames=[1, 2], num_candidates=T, bootstrap=20)
    found.write_run(tmp_path / "run")
    found.write_curve(tmp_path / "curve.svg")
    text = write_run_report(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    assert "class-frames" in text
    assert "mine+answer" in text
    assert "ci units" in text


def test_class_frames_are_refused_where_they_are_not_known(tmp_path: Path, bank: Bank) -> None:
    made = write_bank(tmp_path / "bank", [4], [(0,)])
    teach(made, random_logits([4], [(0,)]))
    with pytest.raises(InvalidArgument, match=r"does not know which frames of 'v0' show its class.*make_reels"):
        evaluate(made, "class-frames", num_frames=1, num_candidates=4)
    with pytest.raises(InvalidArgument, match="has no scores"):
        evaluate(bank, "class-frames+nms", num_frames=1, num_candidates=4)
    with pytest.raises(InvalidArgument, match="needs the outputs of a teacher"):
        so.select("x.mp4", 2, policy="class-frames")


# ---- the sampler's own answer


def test_the_own_answer_is_the_samplers_belief(tmp_path: Path, bank: Bank) -> None:
    folder = str(tmp_path / "sampler")
    believing().save_pretrained(folder)
    found = evaluate(
        bank, ["uniform", folder, f"{folder}+answer"], num_frames=[1, 2], num_candidates=T, bootstrap=20, device="cpu"
    )
    rows = [row for row in found.rows if row.policy.endswith("+answer")]
    assert [(row.num_frames, row.num_candidates) for row in rows] == [(None, T)]
    sampler, probs = believing(), []
    for video in bank:
        seen = torch.from_numpy(video.frames(distinct(len(video)))).permute(0, 3, 1, 2)[None]
        output = sampler.look(seen)
        probs.append(sampler.scoring.log_belief(output.importance, output.class_logits)[0].exp().numpy())
    labels = multi_hot(LABELS, 3)
    (row,) = rows
    assert row.top1 == top1(probs, labels)
    assert row.mAP == pytest.approx(mean_average_precision(probs, labels))
    assert row.confidence == pytest.approx(confidences(probs, labels).mean(), rel=1e-3)
    assert (row.frames_classified, row.frames_decoded, row.classifier_gmacs) == (0, T, 0.0)
    assert row.gmacs == row.sampler_gmacs == pytest.approx(sampler.gmacs(T))
    assert row.versus_uniform is None
    assert (found.chosen(f"{folder}+answer") == -1).all()
    assert "+answer" in found.table()


def test_without_a_belief_the_mean_logits_answer(bank: Bank) -> None:
    torch.manual_seed(0)
    sampler = so.SOSampler(backbone="timm:test_resnet", input_size=32, num_classes=3)
    found = evaluate(bank, {"mine+answer": sampler}, num_frames=1, num_candidates=T, bootstrap=0)
    probs = []
    for video in bank:
        seen = torch.from_numpy(video.frames(distinct(len(video)))).permute(0, 3, 1, 2)[None]
        probs.append(sampler.look(seen).class_logits[0].mean(0).softmax(-1).numpy())
    assert found.row("mine+answer").confidence == pytest.approx(
        confidences(probs, multi_hot(LABELS, 3)).mean(), rel=1e-4
    )


def test_own_answers_that_cannot_be(tmp_path: Path, bank: Bank) -> None:
    with pytest.raises(InvalidArgument, match=r"'s\+answer'|has no class head.*recipe 'default'"):
        evaluate(bank, {"s+answer": shifted()}, num_frames=1, num_candidates=T)
    with pytest.raises(InvalidArgument, match="'uniform' is no trained sampler"):
        evaluate(bank, "uniform+answer", num_frames=1, num_candidates=T)
    folder = str(tmp_path / "sampler")
    believing().save_pretrained(folder)
    with pytest.raises(InvalidArgument, match=r"chooses no frames; use it in evaluate"):
        so.select("x.mp4", 2, policy=f"{folder}+answer")
    videos = [replace(entry, labels=(0,)) for entry in [FrameEntry("v", (0,), frames(0, 4), split="test")]]
    other = write_frames(tmp_path / "other", videos, classes=("jump", "run", "swim"))
    teach(other, random_logits([4], [(0,)]))
    with pytest.raises(InvalidArgument, match=r"knows 3 classes \(run, \.\.\.\).*has 3 \(jump"):
        evaluate(other, f"{folder}+answer", num_frames=1, num_candidates=4)


# ---- intervals


def test_evaluate_resamples_what_is_not_independent(tmp_path: Path) -> None:
    """Every reel is of one of two pictures, whose quality decides."""
    lengths, labels = [4] * 12, [(n % 3,) for n in range(12)]
    logits = random_logits(lengths, labels)
    found = {}
    for name, changes in {
        "plain": [{} for _ in range(12)],
        "groups": [{"group": f"g{n // 4}"} for n in range(12)],
        "pictures": [{"sources": [f"p{n // 4}"]} for n in range(12)],
        "some": [{"sources": [f"p{n // 4}"]} for n in range(11)] + [{}],
    }.items():
        videos = [
            replace(FrameEntry(f"v{n}", labels[n], frames(n, 4), split="test"), **change)
            for n, change in enumerate(changes)
        ]
        made = write_frames(tmp_path / name, videos, classes=CLASSES)
        teach(made, logits)
        found[name] = evaluate(made, "uniform", num_frames=2, num_candidates=4, bootstrap=200)
    assert {name: each.facts["ci_units"] for name, each in found.items()} == {
        "plain": "videos",
        "groups": "groups",
        "pictures": "videos and pictures",
        "some": "videos",
    }
    values = {(row.top1, row.mAP) for each in found.values() for row in each.rows}
    assert len(values) == 1
    assert found["some"].rows[0].ci95 == found["plain"].rows[0].ci95 != found["groups"].rows[0].ci95
