"""Intervals by resampling videos, and the metrics behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from sosampler.errors import InvalidArgument
from sosampler.evaluation.result import (
    Measured,
    Resamples,
    SharedSources,
    confidences,
    interval,
    mean_average_precision,
    multi_hot,
    resample_counts,
    shared_share,
    top1,
    top1_hits,
    weighted_average_precision,
)


def example(seed: int, videos: int = 40, classes: int = 5, *, multi_label: bool = True, steps: int = 0) -> tuple:
    """Scores [V, C] (of few distinct values where `steps`), truth [V, C] with a label in every row."""
    rng = np.random.default_rng(seed)
    scores = rng.random((videos, classes)).astype(np.float32)
    if steps:
        scores = np.round(scores * steps) / np.float32(steps)
    truth = np.zeros((videos, classes), dtype=bool)
    truth[np.arange(videos), rng.integers(classes, size=videos)] = True
    if multi_label:
        truth |= rng.random((videos, classes)) < 0.2
    return scores, truth


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 6), st.booleans())
def test_weighted_average_precision_is_scikit_learns(seed: int, steps: int, multi_label: bool) -> None:
    scores, truth = example(seed, videos=17, classes=4, multi_label=multi_label, steps=steps)
    weights = np.random.default_rng(seed).integers(0, 3, size=(17, 3))
    weights[:, 0] = 1
    found = weighted_average_precision(torch.from_numpy(scores), torch.from_numpy(truth), torch.from_numpy(weights))
    assert float(found[0]) == pytest.approx(mean_average_precision(scores, truth), abs=1e-9)
    for column in range(3):
        weight = weights[:, column]
        expected = [
            average_precision_score(truth[:, label], scores[:, label], sample_weight=weight)
            for label in range(4)
            if weight[truth[:, label]].sum()
        ]
        assert float(found[column]) == pytest.approx(np.mean(expected), abs=1e-6)


def test_average_precision_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, truth = (torch.from_numpy(array) for array in example(3))
    weights = torch.from_numpy(resample_counts(40, 7, 0))
    whole = weighted_average_precision(scores, truth, weights)
    monkeypatch.setattr("sosampler.evaluation.result._MAX_WEIGHTINGS", 3)
    torch.testing.assert_close(weighted_average_precision(scores, truth, weights), whole)


def test_top1_by_hand() -> None:
    probabilities = [[0.6, 0.4, 0.0], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]]
    truth = [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert top1_hits(probabilities, truth).tolist() == [True, False, True]
    assert top1(probabilities, truth) == pytest.approx(2 / 3)


def test_confidence_is_the_geometric_mean_over_labels() -> None:
    found = confidences([[0.5, 0.125, 0.4], [0.0, 1.0, 0.0]], [[1, 1, 0], [0, 1, 0]])
    assert found.tolist() == pytest.approx([0.25, 1.0])
    assert confidences([[0.0, 1.0]], [[1, 0]])[0] == pytest.approx(1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_shared_share_is_that_of_sets(seed: int, wanted: int) -> None:
    rng = np.random.default_rng(seed)
    ours, theirs = np.sort(rng.integers(0, 8, (9, wanted)), 1), np.sort(rng.integers(0, 8, (9, wanted)), 1)
    expected = [len(set(a) & set(b)) / len(set(b)) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
    assert shared_share(ours, theirs).tolist() == pytest.approx(expected)


def test_multi_hot() -> None:
    assert multi_hot([(1,), (0, 2)], 3).tolist() == [[False, True, False], [True, False, True]]


# ---- resampling


def test_counts_are_resamples_with_replacement() -> None:
    counts = resample_counts(30, 400, seed=1)
    assert counts.shape == (30, 400)
    assert (counts.sum(0) == 30).all()
    # Each count is binomial with mean 1 and variance 29 / 30.
    assert counts.var() == pytest.approx(29 / 30, abs=0.05)
    assert (counts == 0).mean() == pytest.approx((29 / 30) ** 30, abs=0.02)
    assert (resample_counts(30, 400, seed=1) == counts).all()
    assert (resample_counts(30, 400, seed=2) != counts).any()


def test_counts_are_those_of_the_drawn_numbers_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(5).integers(11, size=(20, 11))
    expected = np.stack([np.bincount(row, minlength=11) for row in drawn], 1)
    assert (resample_counts(11, 20, seed=5) == expected).all()
    monkeypatch.setattr("sosampler.evaluation.result._MAX_NUMBERS", 40)
    assert (resample_counts(11, 20, seed=5) == expected).all()


def test_metrics_of_resamples_are_those_of_drawn_videos() -> None:
    """The paired bootstrap, against taking the drawn videos one by one."""
    ours, truth = example(0, videos=25)
    theirs, _ = example(1, videos=25)
    resamples = Resamples(truth, 50, seed=9)
    drawn = np.random.default_rng(9).integers(25, size=(50, 25))
    for measure, metric in ((resamples.top1, top1), (resamples.mean_average_precision, mean_average_precision)):
        first, second = measure(ours), measure(theirs)
        assert first.value == pytest.approx(metric(ours, truth))
        expected = [metric(ours[rows], truth[rows]) for rows in drawn]
        assert first.draws.tolist() == pytest.approx(expected, abs=1e-6)
        both = [metric(ours[rows], truth[rows]) - metric(theirs[rows], truth[rows]) for rows in drawn]
        difference = first.minus(second)
        assert difference.value == pytest.approx(metric(ours, truth) - metric(theirs, truth))
        assert difference.draws.tolist() == pytest.approx(both, abs=1e-6)
        moved = difference.value - np.mean(both) if metric is mean_average_precision else 0.0
        assert difference.ci95 == pytest.approx(np.percentile(both, [2.5, 97.5]) + moved, abs=1e-6)


def test_intervals_cover_a_known_proportion() -> None:
    """Of 95 % intervals about 95 % hold the truth, here the proportion of a coin."""
    rng = np.random.default_rng(0)
    truth = np.zeros((200, 2), dtype=bool)
    truth[:, 0] = True
    resamples = Resamples(truth, 500, seed=0)
    covered = 0
    for _ in range(300):
        right = rng.random(200) < 0.7
        probabilities = np.stack([right, ~right], 1).astype(np.float32)
        bounds = resamples.top1(probabilities).ci95
        assert bounds is not None
        covered += bounds[0] <= 0.7 <= bounds[1]
    assert 0.90 <= covered / 300 <= 0.985


def test_intervals_of_average_precision_cover_it_with_few_videos_a_class() -> None:
    rng = np.random.default_rng(0)
    classes = np.arange(400) % 40
    resamples = Resamples(np.eye(40, dtype=bool)[classes], 200, seed=0)
    found = []
    for _ in range(60):
        scores = rng.standard_normal((400, 40)).astype(np.float32)
        scores[np.arange(400), classes] += 2
        found.append(resamples.mean_average_precision(scores))
    expected = np.mean([one.value for one in found])
    inside = [one.ci95 is not None and one.ci95[0] <= expected <= one.ci95[1] for one in found]
    plain = [np.percentile(one.draws, [2.5, 97.5]) for one in found]
    assert np.mean(inside) >= 0.88
    assert np.mean([low <= expected <= high for low, high in plain]) < np.mean(inside)


def test_a_paired_interval_is_narrower_than_two_of_their_own() -> None:
    rng = np.random.default_rng(0)
    truth = np.zeros((300, 2), dtype=bool)
    truth[:, 0] = True
    resamples = Resamples(truth, 500, seed=0)
    right = rng.random(300) < 0.6
    better = right | (rng.random(300) < 0.05)
    first, second = (resamples.top1(np.stack([one, ~one], 1).astype(np.float32)) for one in (better, right))
    paired, alone = first.minus(second).ci95, first.ci95
    assert paired is not None
    assert alone is not None
    assert paired[1] - paired[0] < 0.6 * (alone[1] - alone[0])
    assert paired[0] > 0


# ---- videos that are not independent


def right_or_wrong(right: np.ndarray) -> np.ndarray:
    return np.stack([right, ~right], 1).astype(np.float32)


def coverage(resamples: Resamples, outcomes: list[np.ndarray]) -> float:
    """The share of intervals that hold the mean over all worlds; `outcomes`: which videos are right in each."""
    truth = np.mean([right.mean() for right in outcomes])
    bounds = [resamples.top1(right_or_wrong(right)).ci95 for right in outcomes]
    return float(np.mean([ends is not None and ends[0] <= truth <= ends[1] for ends in bounds]))


def test_videos_of_a_group_are_resampled_together() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 6)
    truth = np.tile([True, False], (360, 1))
    worlds = []
    for _ in range(200):  # a video is like the others of its group in nine of ten cases
        of_group = rng.random(60) < 0.7
        worlds.append(np.where(rng.random(360) < 0.9, of_group[groups], rng.random(360) < 0.7))
    plain, grouped = Resamples(truth, 300, 0), Resamples(truth, 300, 0, groups=[f"g{group}" for group in groups])
    assert (plain.units, grouped.units) == ("videos", "groups")
    assert coverage(plain, worlds) < 0.7
    assert 0.91 <= coverage(grouped, worlds) <= 0.985


def test_groups_of_one_and_sources_of_one_change_nothing() -> None:
    scores, truth = example(4)
    expected = Resamples(truth, 60, 3)
    for more in ({"groups": range(40)}, {"sources": [[n] for n in range(40)]}, {"sources": [[]] * 40}):
        found = Resamples(truth, 60, 3, **more)  # type: ignore[arg-type]
        assert found.units == "videos"
        assert found.top1(scores).ci95 == expected.top1(scores).ci95
        assert found.mean_average_precision(scores).ci95 == expected.mean_average_precision(scores).ci95


def test_groups_of_unequal_size_keep_the_value() -> None:
    scores, truth = example(5, videos=9)
    groups = [0, 0, 0, 0, 1, 1, 2, 2, 3]
    drawn = np.random.default_rng(2).integers(4, size=(30, 4))
    rows = [np.concatenate([np.flatnonzero(np.equal(groups, group)) for group in row]) for row in drawn]
    resamples = Resamples(truth, 30, 2, groups=groups)
    for measure, metric in ((resamples.top1, top1), (resamples.mean_average_precision, mean_average_precision)):
        assert measure(scores).value == pytest.approx(metric(scores, truth))
        expected = [metric(scores[some], truth[some]) for some in rows]
        assert measure(scores).draws.tolist() == pytest.approx(expected, abs=1e-6)


def test_videos_of_the_same_pictures_are_not_independent() -> None:
    """Reels of ten pictures each, of classes that differ in difficulty; a reel is right if its pictures are clear."""
    rng = np.random.default_rng(0)
    videos, classes, pictures, distractors = 800, 6, 50, 100
    label = rng.integers(classes, size=videos)
    shown = [rng.integers(pictures, size=4) for _ in range(videos)]
    sources = [
        [*(f"{own}/{picture}" for picture in some), *(f"distractor/{rng.integers(distractors)}" for _ in range(6))]
        for own, some in zip(label, shown, strict=True)
    ]
    truth = np.eye(classes, dtype=bool)[label]

    def worlds(effect: float) -> list[np.ndarray]:
        outcomes = []
        for _ in range(200):
            clear = effect * rng.standard_normal((classes, pictures))
            of_pictures = clear[label[:, None], np.stack(shown)].mean(1)
            outcomes.append(0.3 * label + of_pictures + 0.8 * rng.standard_normal(videos) > 0)
        return outcomes

    def covered(resamples: Resamples, outcomes: list[np.ndarray]) -> tuple[float, float]:
        """Coverage, and the mean width of intervals."""
        expected, bounds = np.mean(outcomes), []
        for right in outcomes:
            answer = np.where(right, label, (label + 1) % classes)
            ends = resamples.top1(np.eye(classes, dtype=np.float32)[answer]).ci95
            assert ends is not None
            bounds.append(ends)
        table = np.array(bounds)
        inside = (table[:, 0] <= expected) & (expected <= table[:, 1])
        return float(inside.mean()), float((table[:, 1] - table[:, 0]).mean())

    plain, aware = Resamples(truth, 300, 0), Resamples(truth, 300, 0, sources=sources)
    assert aware.units == "videos and pictures"
    strong = worlds(2.0)
    assert covered(plain, strong)[0] < 0.75
    assert 0.90 <= covered(aware, strong)[0] <= 0.985
    # Without an effect of pictures the interval is hardly wider, though classes differ.
    none = worlds(0.0)
    assert covered(aware, none)[1] < 1.12 * covered(plain, none)[1]


def test_the_stretch_is_that_of_pairs_that_share() -> None:
    scores, truth = example(6, videos=12, classes=3, multi_label=False)
    sources = [{n % 5, 5 + n % 3} for n in range(12)]
    shared = SharedSources(sources, truth)
    right = top1_hits(scores, truth)
    influence = (right - right.mean()) / 12
    classes = truth.argmax(1)
    centred = influence.copy()
    for label in range(3):
        centred[classes == label] -= influence[classes == label].mean()
    total = (influence**2).sum()
    for i in range(12):
        for j in range(12):
            if i == j:
                continue
            common = len(sources[i] & sources[j])
            same = classes == classes[i]
            own = (centred[same] ** 2).sum() / max(same.sum() - 1, 1) / same.sum() if same[j] else 0.0
            total += common * (centred[i] * centred[j] + own)
    assert shared.stretch(influence) == pytest.approx(np.sqrt(max(1, total / (influence**2).sum())))
    everywhere = [{0}] * 12  # one picture in all: the more alike, the wider
    alike = SharedSources(everywhere, np.ones((12, 1), bool)).stretch(np.where(np.arange(12) < 6, 1.0, -1.0))
    assert alike == pytest.approx(1.0)


def test_the_influence_on_average_precision_is_its_slope() -> None:
    scores, truth = example(7, videos=30)
    measured = Resamples(truth, 5, 0, sources=[{n % 7} for n in range(30)]).mean_average_precision(scores)
    assert measured._influence is not None
    tables = torch.from_numpy(scores), torch.from_numpy(truth)
    for row in (0, 11, 29):
        weights = torch.ones(30, 2)
        weights[row] += torch.tensor([0.01, -0.01])
        up, down = weighted_average_precision(*tables, weights).tolist()
        assert measured._influence[row] == pytest.approx((up - down) / 0.02, rel=0.02, abs=1e-6)
    difference = measured.minus(measured)
    assert difference.ci95 == (0.0, 0.0)


def test_without_resamples_there_is_a_value_and_no_interval() -> None:
    scores, truth = example(0)
    measured = Resamples(truth, 0, seed=0).top1(scores)
    assert measured.value == pytest.approx(top1(scores, truth))
    assert measured.ci95 is None
    assert measured.minus(measured).ci95 is None
    assert interval([]) is None


def test_wrong_numbers_are_told() -> None:
    with pytest.raises(InvalidArgument, match="draws=-1"):
        resample_counts(3, -1, 0)
    with pytest.raises(InvalidArgument, match="seed"):
        resample_counts(3, 1, -1)
    assert Measured(np.array([0.5])).ci95 is None
