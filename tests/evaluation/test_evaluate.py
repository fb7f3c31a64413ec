"""Evaluation of policies on banks: every number against a slow computation of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import candidate_slots
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import Cell, Evaluation, mean_average_precision, top1
from sosampler.policies.positional import centre, frameexit, uniform
from sosampler.policies.registry import list_policies
from sosampler.video.candidates import uniform_positions
from tests.factories import (
    FINGERPRINT,
    LABELS,
    TAUGHT_LENGTHS,
    clip,
    confidence,
    distinct,
    random_logits,
    sigmoid,
    softmax,
    teach,
    write_bank,
)
from tests.factories import NUM_CANDIDATES as T

RULES: dict[str, Callable[[int, int], np.ndarray]] = {"uniform": uniform, "centre": centre, "frameexit": frameexit}
MANY: list[tuple[int, ...]] = [(0, 1), (1,), (0, 2), (0,), (1, 2), (2,), (0, 1, 2), (1,)]
N = 4


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    return random_logits(TAUGHT_LENGTHS, LABELS)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, logits: list[np.ndarray]) -> Bank:
    found = write_bank(tmp_path_factory.mktemp("evaluate") / "bank", TAUGHT_LENGTHS, LABELS, wide=(1, 4))
    teach(found, logits)
    return found


@pytest.fixture(scope="module")
def found(bank: Bank) -> Evaluation:
    policies = ["uniform", "random", "centre", "frameexit", "all", "semi-optimal-max", "semi-optimal", "optimal"]
    return evaluate(bank, policies, num_frames=[1, N], num_candidates=T, bootstrap=50, seed=3)


# ---- the slow way, video by video


def slow_choice(
    policy: str, logits: np.ndarray, labels: tuple[int, ...], wanted: int, activate: Callable[..., Any] = softmax
) -> list[int]:
    offered = distinct(len(logits))
    count = min(wanted, len(offered))
    exact = logits.astype(np.float64)
    if policy in RULES:
        places = RULES[policy](len(offered), count).tolist()
    elif policy == "optimal":
        best = [
            confidence(activate(exact[[offered[place] for place in subset]].mean(0)), labels)
            for subset in combinations(range(len(offered)), count)
        ]
        places = list(list(combinations(range(len(offered)), count))[int(np.argmax(best))])
    else:
        alone = [
            confidence(activate(exact[place]), labels) if policy == "semi-optimal" else activate(exact[place]).max()
            for place in offered
        ]
        places = sorted(sorted(range(len(offered)), key=lambda place: -alone[place])[:count])
    return clip([offered[place] for place in places], wanted)


def check_row(
    found: Evaluation,
    policy: str,
    wanted: int,
    logits: list[np.ndarray],
    labels: list[tuple[int, ...]],
    activate: Callable[..., Any] = softmax,
) -> None:
    row, chosen = found.row(policy, wanted), found.chosen(policy, wanted)
    truth = np.array([[label in positives for label in range(3)] for positives in labels])
    expected = [
        slow_choice(policy, one, positives, wanted, activate) for one, positives in zip(logits, labels, strict=True)
    ]
    assert chosen.tolist() == expected
    probs = np.stack([activate(one[places].mean(0)) for one, places in zip(logits, expected, strict=True)])
    assert row.top1 == pytest.approx(top1(probs, truth))
    assert row.mAP == pytest.approx(mean_average_precision(probs, truth))
    assert row.confidence == pytest.approx(
        np.mean([confidence(one, positives) for one, positives in zip(probs, labels, strict=True)]), abs=1e-6
    )
    best = [
        slow_choice("optimal", one, positives, wanted, activate) for one, positives in zip(logits, labels, strict=True)
    ]
    shares = [len(set(a) & set(b)) / len(set(b)) for a, b in zip(expected, best, strict=True)]
    assert row.fidelity == pytest.approx(np.mean(shares))


@pytest.mark.parametrize("wanted", [1, N])
@pytest.mark.parametrize("policy", ["uniform", "centre", "frameexit", "semi-optimal-max", "semi-optimal", "optimal"])
def test_rows_against_loops(found: Evaluation, logits: list[np.ndarray], policy: str, wanted: int) -> None:
    check_row(found, policy, wanted, logits, LABELS)


def test_all_is_every_candidate_once_for_every_n(found: Evaluation, logits: list[np.ndarray]) -> None:
    rows = [row for row in found.rows if row.policy == "all"]
    assert [(row.num_frames, row.num_candidates) for row in rows] == [(T, T)]
    expected = [uniform_positions(length, T).tolist() for length in TAUGHT_LENGTHS]
    assert found.chosen("all").tolist() == expected
    probs = np.stack([softmax(one[places].mean(0)) for one, places in zip(logits, expected, strict=True)])
    assert rows[0].top1 == pytest.approx(top1(probs, np.eye(3)[[label for (label,) in LABELS]]))
    assert rows[0].versus_uniform is None  # there are two N that it could be compared with


def test_random_draws_distinct_candidates_by_seed(bank: Bank, found: Evaluation) -> None:
    chosen = found.chosen("random", N)
    for row, length in zip(chosen.tolist(), TAUGHT_LENGTHS, strict=True):
        assert set(row) <= set(distinct(length))
        assert len(set(row)) == min(N, length)
        assert row == sorted(row)
    again = evaluate(bank, "random", num_frames=N, num_candidates=T, bootstrap=0, seed=3)
    assert (again.chosen("random") == chosen).all()
    assert again.row("random").top1 == found.row("random", N).top1
    other = evaluate(bank, "random", num_frames=N, num_candidates=T, bootstrap=0, seed=4)
    assert (other.chosen("random") != chosen).any()


def test_random_is_uniform_over_candidates(tmp_path: Path) -> None:
    lengths, labels = [4] * 200, [(number % 3,) for number in range(200)]
    made = write_bank(tmp_path / "bank", lengths, labels)
    teach(made, random_logits(lengths, labels))
    found = evaluate(made, "random", num_frames=2, num_candidates=4, bootstrap=0)
    share = np.bincount(found.chosen("random").ravel(), minlength=4) / 200
    assert np.abs(share - 2 / 4).max() < 0.11  # three standard deviations
    assert found.row("random").fidelity == pytest.approx(2 / 4, abs=0.09)  # N / T


def test_semi_optimal_is_optimal_for_one_frame(found: Evaluation) -> None:
    assert (found.chosen("semi-optimal", 1) == found.chosen("optimal", 1)).all()
    assert found.row("semi-optimal", 1).fidelity == 1.0
    assert found.row("optimal", N).fidelity == 1.0
    assert found.row("optimal", N).confidence >= found.row("semi-optimal", N).confidence


def test_recovered_is_the_share_of_the_semi_optimal_gain(bank: Bank, found: Evaluation) -> None:
    for wanted in (1, N):
        uniform, best = found.row("uniform", wanted), found.row("semi-optimal", wanted)
        assert best.top1 > uniform.top1
        assert (uniform.recovered, best.recovered) == (0.0, 1.0)
        for policy in ("random", "centre", "optimal"):
            row = found.row(policy, wanted)
            assert row.recovered == pytest.approx((row.top1 - uniform.top1) / (best.top1 - uniform.top1))
    # Neither needs to be among the policies.
    alone = evaluate(bank, ["centre"], num_frames=N, num_candidates=T, bootstrap=50, seed=3)
    assert [row.policy for row in alone.rows] == ["centre"]
    told, expected = alone.row("centre").to_dict(), found.row("centre", N).to_dict()
    assert {**told, "seconds": 0} == {**expected, "seconds": 0}


def test_nothing_is_recovered_where_there_is_nothing_to_gain(tmp_path: Path) -> None:
    lengths, labels = [4, 4, 4], [(0,), (1,), (2,)]
    made = write_bank(tmp_path / "bank", lengths, labels)
    teach(made, [10 * np.tile(np.eye(3, dtype=np.float32)[label], (4, 1)) for (label,) in labels])
    row = evaluate(made, ["random"], num_frames=2, num_candidates=4, bootstrap=0).row("random")
    assert (row.top1, row.recovered) == (1.0, None)
    assert row.versus_uniform == {"num_frames": 2, "metric": "top1", "difference": 0.0, "ci95": None}


def test_intervals_are_those_of_resampled_videos(found: Evaluation, logits: list[np.ndarray]) -> None:
    truth = np.eye(3)[[label for (label,) in LABELS]]
    drawn = np.random.default_rng(3).integers(len(TAUGHT_LENGTHS), size=(50, len(TAUGHT_LENGTHS)))

    def probs_of(policy: str) -> np.ndarray:
        chosen = found.chosen(policy, N)
        return np.stack([softmax(one[places].mean(0)) for one, places in zip(logits, chosen, strict=True)])

    uniform, centre = probs_of("uniform"), probs_of("centre")
    row = found.row("centre", N)
    for name, metric in (("top1", top1), ("mAP", mean_average_precision)):
        draws = [metric(centre[rows], truth[rows]) for rows in drawn]
        moved = metric(centre, truth) - np.mean(draws) if name == "mAP" else 0.0  # resamples are too high for mAP
        expected = np.clip(np.percentile(draws, [2.5, 97.5]) + moved, 0, 1)
        assert row.ci95[name] == pytest.approx(expected, abs=1e-6)
    differences = [top1(centre[rows], truth[rows]) - top1(uniform[rows], truth[rows]) for rows in drawn]
    assert row.versus_uniform is not None
    assert row.versus_uniform["difference"] == pytest.approx(top1(centre, truth) - top1(uniform, truth))
    assert row.versus_uniform["ci95"] == pytest.approx(np.percentile(differences, [2.5, 97.5]), abs=1e-6)
    nothing = {"num_frames": N, "metric": "top1", "difference": 0.0, "ci95": (0.0, 0.0)}
    assert found.row("uniform", N).versus_uniform == nothing


def test_short_videos_repeat_nothing_while_another_frame_is_left(found: Evaluation) -> None:
    for policy in ("uniform", "random", "centre", "frameexit", "semi-optimal", "optimal"):
        for row, length in zip(found.chosen(policy, N).tolist(), TAUGHT_LENGTHS, strict=True):
            assert len(set(row)) == min(N, length)
    assert found.chosen("optimal", N)[-1].tolist() == [0, 1, 1, 2]
    assert any("2 of 8 videos have fewer than 8" in note for note in found.notes)
    assert candidate_slots(3, 5)[0].tolist() == [0, 1, 2, 2, 2]


def test_several_labels(tmp_path: Path) -> None:
    logits = random_logits(TAUGHT_LENGTHS, MANY, seed=5)
    made = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, MANY, multi_label=True)
    teach(made, logits, multi_label=True)
    found = evaluate(made, num_frames=N, num_candidates=T, bootstrap=20)
    assert found.metric == "mAP"
    for policy in ("uniform", "semi-optimal-max", "semi-optimal", "optimal"):
        check_row(found, policy, N, logits, MANY, sigmoid)
    uniform, best, row = (found.row(policy, N) for policy in ("uniform", "semi-optimal", "optimal"))
    assert row.versus_uniform is not None
    assert row.versus_uniform["metric"] == "mAP"
    assert row.recovered == pytest.approx((row.mAP - uniform.mAP) / (best.mAP - uniform.mAP))
    every = found.row("all")  # compared with the only N there is
    assert every.versus_uniform is not None
    assert every.versus_uniform["difference"] == pytest.approx(every.mAP - uniform.mAP)
    assert every.recovered == pytest.approx((every.mAP - uniform.mAP) / (best.mAP - uniform.mAP))


def test_videos_without_a_label_are_left_out_and_told(tmp_path: Path) -> None:
    labels = [*MANY[:3], (), *MANY[4:]]
    logits = random_logits(TAUGHT_LENGTHS, labels)
    made = write_bank(tmp_path / "bank", TAUGHT_LENGTHS, labels, multi_label=True)
    teach(made, logits, multi_label=True)
    said: list[str] = []
    found = evaluate(made, num_frames=N, num_candidates=T, bootstrap=0, say=said.append)
    kept = [place for place in range(8) if place != 3]
    assert found.ids == tuple(f"v{place}" for place in kept)
    assert any("1 of 8 videos have no label" in text for text in said)
    check_row(found, "optimal", N, [logits[place] for place in kept], [labels[place] for place in kept], sigmoid)


def test_chunks_of_videos_change_nothing(bank: Bank, found: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosampler.evaluation.evaluate._MAX_NUMBERS", 100)
    policies = ["uniform", "random", "centre", "frameexit", "all", "semi-optimal-max", "semi-optimal", "optimal"]
    again = evaluate(bank, policies, num_frames=[1, N], num_candidates=T, bootstrap=50, seed=3)
    for one, other in zip(found.rows, again.rows, strict=True):
        assert {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}


def test_pairs_and_many_candidates(tmp_path: Path) -> None:
    """Beyond enumeration the optimal policy says how much it may have missed."""
    lengths, labels = [40, 40, 28, 40], [(0,), (1,), (2,), (0,)]
    logits = random_logits(lengths, labels)
    made = write_bank(tmp_path / "bank", lengths, labels)
    teach(made, logits)
    found = evaluate(made, ["semi-optimal", "optimal"], pairs=[(2, 8), (10, 40)], bootstrap=0)
    assert [(row.policy, row.num_frames, row.num_candidates) for row in found.rows] == [
        ("semi-optimal", 2, 8),
        ("optimal", 2, 8),
        ("semi-optimal", 10, 40),
        ("optimal", 10, 40),
    ]
    few, many = found.row("optimal", 2, 8), found.row("optimal", 10, 40)
    assert (few.method, many.method) == ("enumeration", "certified")
    assert few.gap == {"max": 0.0, "mean": 0.0, "share_below_1e-3": 1.0}
    assert many.gap is not None
    assert many.gap["share_below_1e-3"] == 1.0
    assert many.confidence >= found.row("semi-optimal", 10, 40).confidence
    assert 0 < (found.row("semi-optimal", 10, 40).fidelity or 0) <= 1
    # Unasked, the search is left out, and said so.
    short = evaluate(made, ["semi-optimal"], pairs=[(10, 40)], bootstrap=0)
    assert short.row("semi-optimal").fidelity is None
    assert any("add the policy 'optimal'" in note for note in short.notes)


def test_evaluation_needs_neither_a_decoder_nor_scikit_learn(bank: Bank) -> None:
    """GPU servers often lack both."""
    code = (
        "import sys; sys.modules.update(av=None, torchcodec=None, sklearn=None)\n"
        "from sosampler.evaluation.evaluate import evaluate\n"
        f"found = evaluate({str(bank.path)!r}, ['uniform', 'frame-difference'], num_frames=2, num_candidates=8,"
        f" bootstrap=5, classifier={FINGERPRINT!r})\n"
        "print(found.row('uniform').mAP)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = evaluate(bank, "uniform", num_frames=2, num_candidates=8, bootstrap=0, classifier=FINGERPRINT)
    assert float(done.stdout) == pytest.approx(found.row("uniform").mAP)


# ---- splits, sizes and names


def test_missing_splits(tmp_path: Path) -> None:
    lengths, labels = [4] * 4, [(0,), (1,), (2,), (0,)]
    made = write_bank(tmp_path / "bank", lengths, labels, splits=["train", "train", "dev", "dev"])
    teach(made, random_logits(lengths, labels))
    said: list[str] = []
    found = evaluate(made, "uniform", num_frames=2, num_candidates=4, bootstrap=0, say=said.append)
    assert (found.facts["split"], found.ids) == ("dev", ("v2", "v3"))
    assert "no test split" in said[0]
    asked = evaluate(made.path, "uniform", num_frames=2, num_candidates=4, bootstrap=0, split="train")
    assert asked.ids == ("v0", "v1")
    assert evaluate(made.split("train"), "uniform", num_frames=2, num_candidates=4, bootstrap=0).ids == asked.ids
    with pytest.raises(InvalidArgument, match="no video in the split 'test', but 2 in train, 2 in dev"):
        evaluate(made, "uniform", num_frames=2, num_candidates=4, split="test")
    with pytest.raises(InvalidArgument, match="split='val' is unknown"):
        evaluate(made, "uniform", split="val")


def test_more_candidates_than_any_video_stores(bank: Bank) -> None:
    assert evaluate(bank, "uniform", num_frames=2, num_candidates=16, bootstrap=0).rows
    with pytest.raises(InvalidArgument, match=r"num_candidates=17 .*at most 16\)"):
        evaluate(bank, "uniform", num_frames=2, num_candidates=17)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 9}, "num_frames=9 is more than num_candidates=8"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": []}, "num_frames is empty"),
        ({"pairs": [(3,)]}, "give \\(num_frames, num_candidates\\)"),
        ({"pairs": []}, "pairs are empty"),
        ({"bootstrap": -1}, "bootstrap=-1"),
        ({"precision": "float8"}, "precision='float8'"),
        ({"device": "gpu"}, "device='gpu' cannot be used"),
        ({"classifier": "nobody"}, "nobody is not in this bank"),
        ({"classifier": Path("nowhere")}, "is no folder of a saved classifier"),
    ],
)
def test_wrong_arguments(bank: Bank, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        evaluate(bank, "uniform", **{"num_candidates": T, "num_frames": N, **options})


@pytest.mark.parametrize("policy", ["unifrom", "runs/nothing", "runs/nothing+nms", "mine=runs/nothing", 7])
def test_unknown_policies_list_the_allowed(bank: Bank, policy: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        evaluate(bank, [policy], num_frames=N, num_candidates=T)
    assert all(name in str(raised.value) for name in list_policies(oracles=True))
    assert ("did you mean 'uniform'?" in str(raised.value)) == (policy == "unifrom")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("uniform+mmr", r"policy='uniform\+mmr': 'uniform' has no scores, .*with scores: frame-difference, .*general"),
        ("dpp+nms", r"policy='dpp\+nms': 'dpp' has no scores"),
        ("general+nms+aks", r"'general\+nms' has a method already"),
        ("keyframe", "chooses among keyframes, but .* prepare a bank with --candidates keyframe"),
    ],
)
def test_policies_that_do_not_fit(bank: Bank, policy: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        evaluate(bank, [policy], num_frames=N, num_candidates=T)


def test_keyframes_of_a_bank_of_keyframes(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bank, "settings", property(lambda self: {**self.header.settings, "candidates": "keyframe"}))
    found = evaluate(bank, ["keyframe", "uniform"], num_frames=N, num_candidates=T, bootstrap=0)
    assert (found.chosen("keyframe") == found.chosen("uniform")).all()


def test_policies_have_names_of_their_own(bank: Bank) -> None:
    with pytest.raises(InvalidArgument, match="two policies are called 'uniform'"):
        evaluate(bank, ["uniform", "uniform"], num_frames=N, num_candidates=T)
    with pytest.raises(InvalidArgument, match="policies are empty"):
        evaluate(bank, [], num_frames=N, num_candidates=T)
    with pytest.raises(InvalidArgument, match="cannot be called 'even'"):
        evaluate(bank, {"even": "uniform"}, num_frames=N, num_candidates=T)


# ---- what comes back


def test_results_can_be_written_and_read(found: Evaluation, tmp_path: Path) -> None:
    told = json.loads(found.write_json(tmp_path / "new" / "e.json").read_text())
    assert told == json.loads(json.dumps(found.to_dict()))
    assert (told["num_candidates"], told["num_frames"]) == (T, [1, N])
    assert {"bank", "split", "seed", "teacher", "versions", "notes", "metric"} <= told.keys()
    lines = found.write_csv(tmp_path / "e.csv").read_text().splitlines()
    assert len(lines) == len(found.rows) + 1
    cells = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert (cells["policy"], float(cells["top1"])) == (found.rows[0].policy, found.rows[0].top1)
    assert float(cells["mAP_high"]) == found.rows[0].ci95["mAP"][1]
    text = found.table().splitlines()
    assert len(text) == len(found.rows) + 1
    assert text[0].split()[:3] == ["policy", "N", "T"]
    assert "GMACs" not in text[0]  # nobody knows them here
    assert f"{100 * found.rows[0].top1:.1f}" in text[1]
    assert found.choices[Cell("uniform", N, T)].shape == (8, N)
    with pytest.raises(KeyError):
        found.row("uniform", 7)


def test_frames_decoded_and_cost(bank: Bank, found: Evaluation) -> None:
    decoded = {row.policy: row.frames_decoded for row in found.rows if row.num_frames in (N, T)}
    assert decoded == {
        **dict.fromkeys(("uniform", "random", "centre", "frameexit"), N),
        **dict.fromkeys(("all", "semi-optimal-max", "semi-optimal", "optimal"), T),
    }
    assert (found.row("uniform").sampler_gmacs, found.row("uniform").classifier_gmacs) == (0.0, None)
    assert found.row("optimal").sampler_gmacs is None
