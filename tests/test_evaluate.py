"""Evaluation of policies on banks: every number against a slow computation of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from banks import small_net
from sosampler import create_classifier, save_classifier, wrap_classifier
from sosampler.data.bank import Bank
from sosampler.data.positions import uniform_positions
from sosampler.data.prepare import add_teacher
from sosampler.errors import InvalidArgument
from sosampler.evaluation import frames
from sosampler.evaluation.choosers import RULES
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.metrics import mean_average_precision, top1
from sosampler.evaluation.policies import ALLOWED
from sosampler.evaluation.rows import Cell, Evaluation
from sosampler.evaluation.views import candidate_slots
from sosampler.policies import get_policy, rules
from sosampler.policies.difference import change_scores
from sosampler.policies.diverse import dpp_diverse, farthest_first, pixel_features
from sosampler.policies.redundancy import dpp, gaussian_kernel, median_bandwidth, mmr
from sosampler.policies.selectors import METHODS, difference_peaks
from sosampler.video.candidates import segment_centres
from taught_banks import FINGERPRINT, random_logits, sigmoid, softmax, teach, write_bank

# The third is shorter than T and the last is shorter than N.
LENGTHS = [12, 9, 5, 16, 8, 8, 11, 3]
LABELS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0,), (1,), (2,), (1,), (0,)]
MANY: list[tuple[int, ...]] = [(0, 1), (1,), (0, 2), (0,), (1, 2), (2,), (0, 1, 2), (1,)]
N, T = 4, 8


@pytest.fixture(scope="module")
def logits() -> list[np.ndarray]:
    return random_logits(LENGTHS, LABELS)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, logits: list[np.ndarray]) -> Bank:
    found = write_bank(tmp_path_factory.mktemp("evaluate") / "bank", LENGTHS, LABELS, wide=(1, 4))
    teach(found, logits)
    return found


@pytest.fixture(scope="module")
def found(bank: Bank) -> Evaluation:
    policies = ["uniform", "random", "centre", "frameexit", "all", "semi-optimal-max", "semi-optimal", "optimal"]
    return evaluate(bank, policies, num_frames=[1, N], num_candidates=T, bootstrap=50, seed=3)


# ---- the slow way, video by video


def distinct(length: int, count: int = T) -> list[int]:
    """Stored frames that are offered."""
    return sorted(set(uniform_positions(length, count).tolist()))


def clip(chosen: list[int], wanted: int) -> list[int]:
    """What is shown of chosen stored frames: repeated evenly where they are too few."""
    return chosen if len(chosen) >= wanted else [chosen[place] for place in segment_centres(len(chosen), wanted)]


def confidence(probs: np.ndarray, labels: tuple[int, ...]) -> float:
    return float(np.exp(np.mean(np.log(probs[list(labels)]))))


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
    expected = [uniform_positions(length, T).tolist() for length in LENGTHS]
    assert found.chosen("all").tolist() == expected
    probs = np.stack([softmax(one[places].mean(0)) for one, places in zip(logits, expected, strict=True)])
    assert rows[0].top1 == pytest.approx(top1(probs, np.eye(3)[[label for (label,) in LABELS]]))
    assert rows[0].versus_uniform is None  # there are two N that it could be compared with


def test_random_draws_distinct_candidates_by_seed(bank: Bank, found: Evaluation) -> None:
    chosen = found.chosen("random", N)
    for row, length in zip(chosen.tolist(), LENGTHS, strict=True):
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
    assert row.versus_uniform == {"metric": "top1", "difference": 0.0, "ci95": None}


def test_intervals_are_those_of_resampled_videos(found: Evaluation, logits: list[np.ndarray]) -> None:
    truth = np.eye(3)[[label for (label,) in LABELS]]
    drawn = np.random.default_rng(3).integers(len(LENGTHS), size=(50, len(LENGTHS)))

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
    assert found.row("uniform", N).versus_uniform == {"metric": "top1", "difference": 0.0, "ci95": (0.0, 0.0)}


def test_short_videos_repeat_nothing_while_another_frame_is_left(found: Evaluation) -> None:
    for policy in ("uniform", "random", "centre", "frameexit", "semi-optimal", "optimal"):
        for row, length in zip(found.chosen(policy, N).tolist(), LENGTHS, strict=True):
            assert len(set(row)) == min(N, length)
    assert found.chosen("optimal", N)[-1].tolist() == [0, 1, 1, 2]
    assert any("2 of 8 videos have fewer than 8" in note for note in found.notes)
    assert candidate_slots(3, 5)[0].tolist() == [0, 1, 2, 2, 2]


def test_several_labels(tmp_path: Path) -> None:
    logits = random_logits(LENGTHS, MANY, seed=5)
    made = write_bank(tmp_path / "bank", LENGTHS, MANY, multi_label=True)
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
    logits = random_logits(LENGTHS, labels)
    made = write_bank(tmp_path / "bank", LENGTHS, labels, multi_label=True)
    teach(made, logits, multi_label=True)
    said: list[str] = []
    found = evaluate(made, num_frames=N, num_candidates=T, bootstrap=0, say=said.append)
    kept = [place for place in range(8) if place != 3]
    assert found.ids == tuple(f"v{place}" for place in kept)
    assert any("1 of 8 videos have no label" in text for text in said)
    check_row(found, "optimal", N, [logits[place] for place in kept], [labels[place] for place in kept], sigmoid)


def test_chunks_of_videos_change_nothing(bank: Bank, found: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosampler.evaluation.evaluate._NUMBERS_AT_ONCE", 100)
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
        ({"classifier": Path("nowhere")}, "no folder of a saved classifier"),
    ],
)
def test_wrong_arguments(bank: Bank, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        evaluate(bank, "uniform", **{"num_candidates": T, "num_frames": N, **options})


@pytest.mark.parametrize(
    "policy", ["keyframe", "unifrom", "uniform+mmr", "dpp+nms", "runs/nothing", "mine=runs/nothing", 7]
)
def test_unknown_policies_list_the_allowed(bank: Bank, policy: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        evaluate(bank, [policy], num_frames=N, num_candidates=T)
    assert all(name in str(raised.value) for name in ALLOWED)


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


# ---- classifiers that have to be at hand


class MeanOfFrames(nn.Module):
    """The mean of a frame network's logits, as a network of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net(classes=3)

    def forward(self, clips: Tensor) -> Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """A bank without a teacher, with pictures of two sizes."""
    return write_bank(tmp_path_factory.mktemp("pictured") / "bank", LENGTHS, LABELS, wide=(1, 4))


def test_a_classifier_that_must_be_run_gives_what_a_pooled_one_gives(pictured: Bank) -> None:
    pooled = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW", name="pooled")
    clips = wrap_classifier(MeanOfFrames(), input_size=32, name="clips")
    for classifier in (pooled, clips):
        add_teacher(pictured, classifier)
    policies = ["uniform", "random", "all", "semi-optimal", "optimal", "frame-difference"]
    options: dict[str, Any] = {"num_frames": 3, "num_candidates": [5, 6], "bootstrap": 20, "policies": policies}
    fast = evaluate(pictured, classifier=pooled, **options)
    slow = evaluate(pictured, classifier=clips, **options)
    assert (fast.facts["teacher"]["pooling"], slow.facts["teacher"]["pooling"]) == ("mean", None)
    for row, other in zip(fast.rows, slow.rows, strict=True):
        assert (fast.choices[_cell(row)] == slow.choices[_cell(row)]).all()
        assert row.confidence == pytest.approx(other.confidence, abs=1e-5)
        assert row.top1 == other.top1
    assert slow.row("optimal").method == "enumeration"
    assert (fast.chosen("optimal") == slow.chosen("optimal")).all()
    # Unasked for, nothing is run for comparison.
    alone = evaluate(pictured, ["centre"], num_frames=3, num_candidates=6, bootstrap=0, classifier=clips).row("centre")
    assert (alone.fidelity, alone.recovered, alone.versus_uniform) == (None, None, None)


def _cell(row: Any) -> Cell:
    return Cell(row.policy, row.num_frames, row.num_candidates)


class Counting(MeanOfFrames):
    def __init__(self) -> None:
        super().__init__()
        self.clips = 0

    def forward(self, clips: Tensor) -> Tensor:
        self.clips += len(clips) if clips.device.type != "meta" else 0  # its cost is counted without numbers
        return super().forward(clips)


def test_no_clip_is_asked_about_twice(pictured: Bank) -> None:
    net = Counting()
    classifier = wrap_classifier(net, input_size=32, name="counting")
    add_teacher(pictured, classifier)
    net.clips = 0
    evaluate(
        pictured,
        ["uniform", "random", "centre", "semi-optimal", "optimal"],
        num_frames=2,
        num_candidates=5,
        classifier=classifier,
        bootstrap=0,
    )
    # All frames alone and all pairs of five; of the shortest video those of three, and one of padding.
    assert net.clips == 7 * (5 + 10) + 3 + 4


def test_beam_search_where_subsets_are_too_many(pictured: Bank) -> None:
    clips = wrap_classifier(MeanOfFrames(), input_size=32, name="clips")
    if clips.fingerprint() not in pictured.teachers:
        add_teacher(pictured, clips)
    found = evaluate(
        pictured,
        ["semi-optimal", "optimal"],
        num_frames=8,
        num_candidates=16,
        classifier=clips,
        bootstrap=0,
        beam_width=1,
    )
    row = found.row("optimal")
    assert row.method == "beam"
    assert row.confidence >= found.row("semi-optimal").confidence - 1e-3


def test_a_max_pool_is_the_classifiers_own(pictured: Bank, tmp_path: Path) -> None:
    torch.manual_seed(0)
    classifier = create_classifier("timm:test_resnet", num_classes=3, head="frameexit", input_size=32)
    classifier.requires_grad_(False)
    classifier.net.fc.weight.mul_(30)  # otherwise all answers are alike
    add_teacher(pictured, classifier)
    found = evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier, bootstrap=0)
    teacher = pictured.teacher(classifier)
    assert teacher.pooling == "max"

    def probs(number: int, places: Any) -> np.ndarray:
        features = torch.from_numpy(teacher[number].features[list(places)].astype(np.float32))
        found: np.ndarray = classifier.pool(features).numpy()
        return found

    for number, (label,) in enumerate(LABELS):
        offered = distinct(LENGTHS[number], 6)
        count = min(3, len(offered))
        subsets = list(combinations(offered, count))
        best = max(float(probs(number, subset)[label]) for subset in subsets)
        chosen = found.chosen("optimal")[number].tolist()
        assert float(probs(number, chosen)[label]) == pytest.approx(best, abs=1e-5)
        alone = sorted(offered, key=lambda place: -float(probs(number, [place])[label]))[:count]
        assert set(found.chosen("semi-optimal")[number].tolist()) == set(alone)
    uniform = found.chosen("uniform")
    expected = np.mean([float(probs(number, uniform[number])[label]) for number, (label,) in enumerate(LABELS)])
    assert found.row("uniform").confidence == pytest.approx(expected, abs=1e-5)
    save_classifier(classifier, tmp_path / "saved")
    again = evaluate(
        pictured, "uniform", num_frames=3, num_candidates=6, classifier=tmp_path / "saved", bootstrap=0, device="cpu"
    )
    assert again.row("uniform").confidence == pytest.approx(expected, abs=1e-5)
    assert again.row("uniform").gmacs == pytest.approx(classifier.gmacs(3))
    with pytest.raises(InvalidArgument, match="'max' pool, so the classifier itself is needed"):
        evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier.fingerprint())


def test_a_teacher_without_features_needs_its_classifier(pictured: Bank) -> None:
    classifier = wrap_classifier(small_net(1, classes=3), input_size=32, layout="BCHW", name="bare")
    add_teacher(pictured, classifier, features=False)
    with pytest.raises(InvalidArgument, match="keeps no features"):
        evaluate(pictured, num_frames=3, num_candidates=6, classifier=classifier.fingerprint())
    found = evaluate(pictured, "uniform", num_frames=3, num_candidates=6, classifier=classifier, bootstrap=0)
    expected = []
    for number, (label,) in enumerate(LABELS):
        shown = torch.from_numpy(pictured[number].frames(found.chosen("uniform")[number])).permute(0, 3, 1, 2)[None]
        expected.append(float(classifier.clip_probs(shown)[0, label]))
    assert found.row("uniform").confidence == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.row("uniform").classifier_gmacs == pytest.approx(classifier.gmacs(3))


# ---- samplers


class Bright:
    """A stand-in for a sampler: scores frames by their brightness, and counts what it is shown."""

    def __init__(self, sign: float = 1.0, calibration: tuple[float, float] | None = None) -> None:
        self.sign, self.calibration, self.shown = sign, calibration, 0

    def look(self, frames: Tensor, mask: Tensor | None = None) -> Any:
        self.shown += frames.shape[0] * frames.shape[1]
        light = frames.float().mean((2, 3, 4))
        features = torch.stack([light, light.sin()], -1)
        return type("Said", (), {"scores": self.sign * light, "features": features})

    def confidences(self, scores: Tensor) -> Tensor:
        assert self.calibration is not None
        return torch.sigmoid(self.calibration[0] * scores + self.calibration[1])

    def gmacs(self, num_candidates: int) -> float:
        return 0.5 * num_candidates


def brightest(bank: Bank, number: int, count: int, wanted: int, sign: float = 1.0) -> list[int]:
    offered = distinct(len(bank[number]), count)
    light = {place: sign * bank[number].frames([place]).astype(np.float64).mean() for place in offered}
    chosen = sorted(sorted(offered, key=lambda place: -light[place])[: min(wanted, len(offered))])
    return clip(chosen, wanted)


def test_samplers_see_the_candidates(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, list[int]]] = []

    def reading(bank: Bank, place: int, stored: np.ndarray) -> Any:
        read.append((place, stored.tolist()))
        return read_pictures(bank, place, stored)

    read_pictures = frames._read
    monkeypatch.setattr(frames, "_read", reading)
    policies: dict[str, Any] = {"bright": Bright(), "dark": Bright(-1.0), "uniform": "uniform"}
    done: list[int] = []
    found = evaluate(
        bank,
        policies,
        num_frames=[2, N],
        num_candidates=[5, T],
        bootstrap=0,
        on_progress=lambda progress: done.append(progress.done),
    )
    assert done == list(range(1, 9))
    for count in (5, T):
        for wanted in (2, N):
            for name, sign in (("bright", 1.0), ("dark", -1.0)):
                expected = [brightest(bank, number, count, wanted, sign) for number in range(8)]
                assert found.chosen(name, wanted, count).tolist() == expected
    row = found.row("bright", N, T)
    assert (row.frames_decoded, row.sampler_gmacs) == (T, 4.0)
    # Two samplers and two T, and each picture is read once.
    assert sorted(read) == [
        (place, sorted({*distinct(length, 5), *distinct(length)})) for place, length in enumerate(LENGTHS)
    ]
    assert policies["bright"].shown == 8 * (5 + T)


def test_chunks_of_pictures_change_nothing(bank: Bank) -> None:
    wanted = [np.arange(length) for length in LENGTHS]
    places = list(range(len(LENGTHS)))
    whole = list(frames.read_chunks(bank, places, wanted))
    small = list(frames.read_chunks(bank, places, wanted, chunk_bytes=1))
    assert [len(chunk.videos) for chunk in whole] == [8]
    assert [chunk.numbers.tolist() for chunk in small] == [[place] for place in places]
    for place, chunk in enumerate(small):
        pictures = chunk.videos[place]
        assert (pictures.frames == whole[0].videos[place].frames).all()
        assert (pictures.frames == bank[place].frames()).all()
        assert (pictures.positions == bank[place].positions).all()


def test_frame_difference_is_the_policy_of_that_name(bank: Bank) -> None:
    found = evaluate(bank, "frame-difference", num_frames=2, num_candidates=T, bootstrap=0)
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        places = rules.top(change_scores(item.frames(offered)), 2)
        assert found.chosen("frame-difference")[number].tolist() == [offered[place] for place in places]
    assert found.row("frame-difference").sampler_gmacs == 0.0


def _by_change(method: str, pictures: np.ndarray, count: int) -> np.ndarray:
    return METHODS[method](change_scores(pictures).astype(np.float64), count)


@pytest.mark.parametrize("wanted", [1, 2, N])
def test_rules_that_look_are_those_of_select(bank: Bank, wanted: int) -> None:
    slow: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
        "farthest-first": lambda pictures, count: farthest_first(pixel_features(pictures), count),
        "dpp": lambda pictures, count: dpp_diverse(pixel_features(pictures), count),
        "difference-peaks": lambda pictures, count: difference_peaks(change_scores(pictures), count),
    }
    for method in METHODS:
        slow[f"frame-difference+{method}"] = partial(_by_change, method)
    found = evaluate(bank, list(slow), num_frames=wanted, num_candidates=T, bootstrap=0)
    for policy, rule in slow.items():
        for number, item in enumerate(bank):
            offered = distinct(len(item))
            pictures = item.frames(offered)
            places = rule(pictures, min(wanted, len(offered))).tolist()
            assert places == get_policy(policy).choose(len(offered), len(places), pictures, 0).positions.tolist()
            assert found.chosen(policy)[number].tolist() == clip([offered[place] for place in places], wanted)
        row = found.row(policy)
        assert (row.sampler_gmacs, row.frames_decoded) == (0.0, T)


@pytest.mark.parametrize("method", METHODS)
def test_methods_on_what_the_oracles_know(bank: Bank, logits: list[np.ndarray], method: str) -> None:
    plain = ["semi-optimal", "semi-optimal-max"]
    given = [f"{policy}+{method}" for policy in plain]
    found = evaluate(bank, [*given, *plain], num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for number, (one, labels) in enumerate(zip(logits, LABELS, strict=True)):
        offered = distinct(len(one))
        probs = [softmax(one[place].astype(np.float64)) for place in offered]
        for policy, values in (
            (given[0], [confidence(each, labels) for each in probs]),
            (given[1], [each.max() for each in probs]),
        ):
            expected = [offered[place] for place in METHODS[method](np.array(values), 3)]
            assert found.chosen(policy)[number].tolist() == expected
    assert any((found.chosen(one) != found.chosen(other)).any() for one, other in zip(given, plain, strict=True))


@pytest.mark.parametrize("calibration", [(0.02, -3.0), None])
@pytest.mark.parametrize("method", METHODS)
def test_methods_on_what_samplers_say(bank: Bank, method: str, calibration: tuple[float, float] | None) -> None:
    sampler, name = Bright(calibration=calibration), f"a+{method}"
    found = evaluate(
        *(bank, {name: sampler, "a": sampler, "a+mmr": sampler}),
        num_frames=3,
        num_candidates=T,
        bootstrap=0,
        classifier=FINGERPRINT,
    )
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        scores = sampler.look(torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None]).scores[0]
        values = scores if calibration is None else sampler.confidences(scores)
        expected = [offered[place] for place in METHODS[method](values.double().numpy(), 3)]
        assert found.chosen(name)[number].tolist() == expected
    assert (found.chosen(name) != found.chosen("a")).any()
    assert found.row(name).sampler_gmacs == found.row("a").sampler_gmacs


def test_a_saved_sampler_by_its_folder(bank: Bank, tmp_path: Path) -> None:
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(0)
    sampler = SOSampler(backbone="mobilenet_v2", input_size=32, shift=8).freeze()
    sampler.save_pretrained(tmp_path / "runs")
    classifier = wrap_classifier(small_net(classes=3), input_size=32, layout="BCHW")
    add_teacher(bank, classifier)
    found = evaluate(
        bank,
        [f"mine={tmp_path / 'runs'}", tmp_path / "runs", sampler, "uniform"],
        num_frames=3,
        num_candidates=6,
        classifier=classifier,
        bootstrap=0,
        device="cpu",
    )
    assert [row.policy for row in found.rows] == ["mine", str(tmp_path / "runs"), "sosampler", "uniform"]
    for number, item in enumerate(bank):
        offered = distinct(len(item), 6)
        frames = torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None]
        places = sampler.choose(frames, min(3, len(offered)))[0].tolist()
        assert found.chosen("mine")[number].tolist() == clip([offered[place] for place in places], 3)
    assert (found.chosen("mine") == found.chosen("sosampler")).all()
    row, uniform = found.row("mine"), found.row("uniform")
    assert row.sampler_gmacs == pytest.approx(sampler.gmacs(6))
    assert row.classifier_gmacs == uniform.gmacs == pytest.approx(classifier.gmacs(3))
    assert row.gmacs == pytest.approx(sampler.gmacs(6) + classifier.gmacs(3))
    assert "GMACs" in found.table().splitlines()[0]
    with pytest.raises(InvalidArgument, match="cannot be called 'optimal'"):
        evaluate(bank, {"optimal": sampler}, num_frames=3, num_candidates=6, classifier=classifier)


def test_redundancy_aware_forms(bank: Bank) -> None:
    given = ["semi-optimal", "semi-optimal+mmr", "semi-optimal+dpp", "semi-optimal-max+mmr"]
    found = evaluate(bank, given, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    for policy in given:
        for row, length in zip(found.chosen(policy).tolist(), LENGTHS, strict=True):
            assert set(row) <= set(distinct(length))
            assert len(set(row)) == 3
    # The most confident frame is always among them.
    first = evaluate(bank, given, num_frames=1, num_candidates=T, bootstrap=0, classifier=FINGERPRINT)
    assert (first.chosen("semi-optimal+mmr") == first.chosen("semi-optimal")).all()


@pytest.mark.parametrize("calibration", [(0.02, -3.0), None])
@pytest.mark.parametrize(("method", "pick"), [("mmr", mmr), ("dpp", dpp)])
def test_samplers_that_mind_redundancy(
    bank: Bank, method: str, pick: Callable[..., Tensor], calibration: tuple[float, float] | None
) -> None:
    """However it is written, and against the rule itself, video by video."""
    sampler = Bright(calibration=calibration)
    name = f"a+{method}"
    found = evaluate(
        bank, {name: sampler, "a": sampler}, num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT
    )
    assert [row.policy for row in found.rows] == [name, "a"]
    for number, item in enumerate(bank):
        offered = distinct(len(item))
        said = sampler.look(torch.from_numpy(item.frames(offered)).permute(0, 3, 1, 2)[None])
        if calibration is None:
            low, high = said.scores.min(), said.scores.max()
            values = (said.scores - low) / (high - low)
        else:
            values = sampler.confidences(said.scores)
        alike = gaussian_kernel(said.features, median_bandwidth(said.features))
        expected = [offered[place] for place in pick(values, alike, 3)[0].tolist()]
        assert found.chosen(name)[number].tolist() == expected
    assert (found.chosen(name) != found.chosen("a")).any()


@pytest.mark.parametrize("method", ["mmr", "dpp", *METHODS])
def test_a_method_is_heeded_wherever_it_is_written(bank: Bank, method: str, tmp_path: Path) -> None:
    from sosampler.samplers.sosampler import SOSampler

    torch.manual_seed(0)
    sampler = SOSampler(backbone="timm:test_resnet", input_size=32, calibration=(1.0, 0.0)).freeze()
    with torch.no_grad():
        sampler.importance_head.weight.mul_(20)
    folder, name = tmp_path / "runs", f"mine+{method}"
    sampler.save_pretrained(folder)

    def chosen(policy: Any, called: str = name) -> list[list[int]]:
        found = evaluate(
            *(bank, policy), num_frames=3, num_candidates=T, bootstrap=0, classifier=FINGERPRINT, device="cpu"
        )
        rows: list[list[int]] = found.chosen(called).tolist()
        return rows

    expected = chosen({name: sampler})
    assert chosen({"mine": sampler}, "mine") != expected
    assert chosen({name: folder}) == chosen({name: str(folder)}) == chosen([f"{name}={folder}"]) == expected
    assert chosen([f"mine={folder}+{method}"], "mine") == expected
    assert chosen([f"{name}={folder}+{method}"]) == expected
    assert chosen([f"{folder}+{method}"], f"{folder}+{method}") == expected
    if method in METHODS:  # and select chooses the same
        policy = get_policy(f"{folder}+{method}", device="cpu")
        for number, item in enumerate(bank):
            offered = distinct(len(item))
            places = policy.choose(len(offered), 3, item.frames(offered), 0).positions
            assert [offered[place] for place in places] == expected[number]
    other = "nms" if method == "mmr" else "mmr"
    with pytest.raises(InvalidArgument, match=f"says {method}, but .* says {other}; write one of them"):
        chosen([f"{name}={folder}+{other}"])
