"""Accuracy against the mean number of frames: samplers that decide on N for each video, beside fixed N.

    python benchmarks/accuracy/adaptive.py --dev SCORES... --test SCORES... --out benchmarks/results/adaptive.json \
        --picture docs/images/adaptive.png

SCORES are .npz files, one for each training of a sampler and each set of videos: importance [V, T] and class_logits
[V, T, C] as its heads say, score [V, T], teacher [V, T, C] the logits of a mean-logit classifier for each frame alone,
and label [V]. Files of dev, and of test, are of the same videos in the same order. The kth of dev and the kth of test
belong to one training; a single one of dev stands for all.

The constants of `sosampler.policies.auto` and the default tolerance are chosen on dev alone: the highest top-1, of
which each frame in the mean takes off half a point; spread and tolerance together, then share with that tolerance. Test
is measured with what is in the package. Intervals are of a bootstrap over videos, paired, on the mean over trainings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.environment import circumstances
from sosampler.evaluation.result import interval, resample_counts
from sosampler.policies.auto import DEFAULT_MAX, DEFAULT_MIN, DEFAULT_TOLERANCE, Auto
from sosampler.policies.base import SHARE, SPREAD, count_frames, expected_by_belief, expected_by_confidence
from sosampler.samplers.onnx_sampler import log_belief, scores_of, sigmoid
from sosampler.samplers.recipe import read_recipe
from sosampler.training.dev import fit_calibration

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import Results
from benchmarks.tables.adaptive_table import table, write_picture

Numbers = NDArray[np.float64]

TOLERANCES = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2)
A_FRAME = 0.005  # what a frame must bring in top-1 to be worth it
SPREADS = (0.3, 0.4, 0.5, 0.7, 1.0)
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7)
DRAWS = 10_000
SEED = 0


@dataclass(frozen=True, eq=False)
class Heads:
    """What one sampler says about the candidates of V videos, and what is true of them."""

    importance: Numbers  # [V, T]
    class_logits: Numbers  # [V, T, C]
    score: Numbers  # [V, T]
    teacher: Numbers  # [V, T, C]
    label: NDArray[np.int64]  # [V]

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> Heads:
        with np.load(path) as stored:
            numbers = {name: stored[name].astype(np.float64) for name in ("importance", "class_logits", "teacher")}
            result, label = stored["score"].astype(np.float64), stored["label"].astype(np.int64)
        score = scores_of(settings, numbers["importance"], numbers["class_logits"]).astype(np.float64)
        if np.abs(score - result).max() > 0.05:
            raise SystemExit(f"{path}: its scores are not those of the recipe's settings {settings}; give others")
        return cls(numbers["importance"], numbers["class_logits"], result, numbers["teacher"], label)

    def hits(self, by: Numbers) -> Numbers:
        """Whether the classifier names the label from the k best by these scores [V, T]: 0 or 1 at [:, k - 1]."""
        order = np.argsort(-by, axis=1, kind="stable")
        mean = np.cumsum(np.take_along_axis(self.teacher, order[..., None], axis=1), axis=1)  # k times it
        return np.asarray(mean.argmax(-1) == self.label[:, None], dtype=np.float64)

    def confidence(self) -> Numbers:
        """Of the classifier in the label, from each frame alone [V, T]."""
        powers = np.exp(self.teacher - self.teacher.max(-1, keepdims=True))
        shares = powers / powers.sum(-1, keepdims=True)
        return np.asarray(np.take_along_axis(shares, self.label[:, None, None], axis=2)[..., 0])


@dataclass(frozen=True, eq=False)
class Rule:
    """A way to decide: by what frames are ranked, and what is expected of the k best with one constant."""

    rank: Callable[[int, Heads], Numbers]
    expected: Callable[[int, Heads, float], Numbers]  # [V, T]
    constant: float
    tried: tuple[float, ...]
    name: str  # of the constant
    tolerances: tuple[float, ...] = TOLERANCES  # of which the default was chosen


def rules(dev: Sequence[Heads], settings: dict[str, Any]) -> dict[str, Rule]:
    """By belief, as the default recipe scores; and by the importance head alone, calibrated on dev."""
    calibrations = [fit_calibration(heads.importance, heads.confidence()) for heads in dev]

    def by_belief(_: int, heads: Heads, spread: float) -> Numbers:
        belief = log_belief(settings, heads.importance, heads.class_logits, multi_label=False)
        return expected_by_belief(heads.score, heads.class_logits, belief, spread=spread)

    def by_importance(training: int, heads: Heads, share: float) -> Numbers:
        slope, offset = calibrations[min(training, len(calibrations) - 1)]
        return expected_by_confidence(heads.importance, sigmoid(slope * heads.importance + offset), share=share)

    return {
        "belief": Rule(lambda _, heads: heads.score, by_belief, SPREAD, SPREADS, "spread"),
        "importance": Rule(
            lambda _, heads: heads.importance, by_importance, SHARE, SHARES, "share", (DEFAULT_TOLERANCE,)
        ),
    }


class Measured:
    """One rule on one set of videos, over all trainings."""

    def __init__(self, rule: Rule, trainings: Sequence[Heads]) -> None:
        self._rule, self._trainings = rule, trainings
        self.hits = np.stack([heads.hits(rule.rank(number, heads)) for number, heads in enumerate(trainings)])
        self.num_videos, self.num_candidates = self.hits.shape[1:]  # of [S, V, T]

    def fixed(self) -> Numbers:
        """Right answers [V, T] of k frames at k - 1, mean over trainings."""
        return np.asarray(self.hits.mean(0))

    def counts(self, tolerance: float, constant: float | None = None) -> NDArray[np.int64]:
        """Frames [S, V] that are taken."""
        used = self._rule.constant if constant is None else constant
        auto = Auto(tolerance=tolerance)
        return np.stack(
            [
                count_frames(self._rule.expected(number, heads, used), auto)
                for number, heads in enumerate(self._trainings)
            ]
        )

    def auto(self, counts: NDArray[np.int64]) -> Numbers:
        """Right answers [V] with so many frames, mean over trainings."""
        return np.asarray(np.take_along_axis(self.hits, counts[..., None] - 1, axis=2)[..., 0].mean(0))


def chosen_on(dev: Measured, tried: Sequence[float], tolerances: Sequence[float]) -> dict[str, Any]:
    """All constants with all tolerances on dev, and the best of those with `tolerances`."""
    fixed = dev.fixed().mean(0)
    rows = []
    for constant in tried:
        for tolerance in TOLERANCES:
            counts = dev.counts(tolerance, constant)
            rows.append((constant, tolerance, float(counts.mean()), float(dev.auto(counts).mean())))
    best = max((row for row in rows if row[1] in tolerances), key=lambda row: row[3] - A_FRAME * row[2])
    return {
        "best_fixed": {"num_frames": int(fixed.argmax()) + 1, "top1": float(fixed.max())},
        "columns": ["constant", "tolerance", "mean_frames", "top1"],
        "rows": rows,
        "best": dict(zip(("constant", "tolerance", "mean_frames", "top1"), best, strict=True)),
    }


class Bootstrap:
    """Resamples of the videos, the same for all that is compared."""

    def __init__(self, num_videos: int) -> None:
        self._weights = resample_counts(num_videos, DRAWS, SEED).astype(np.float64) / num_videos  # [V, R]

    def __call__(self, values: Numbers) -> dict[str, Any]:
        """Mean over videos of values [V], with its 95 % interval."""
        bounds = interval(values @ self._weights)
        assert bounds is not None, "there are draws"
        return {"value": float(values.mean()), "ci95": list(bounds)}


def figures(rule: Rule, dev: Measured, test: Measured, classifier: float | None, sampler: float) -> dict[str, Any]:
    """Everything about one rule; `classifier`, `sampler`: giga multiply-adds of a frame, and of all candidates."""
    resampled = Bootstrap(test.num_videos)
    on_dev, fixed = dev.fixed().mean(0), test.fixed()

    def cost(frames: float) -> dict[str, float]:
        return {} if classifier is None else {"gmacs": sampler + classifier * frames}

    rows = [
        {"num_frames": k + 1, "dev_top1": float(on_dev[k]), "test_top1": resampled(fixed[:, k]), **cost(k + 1)}
        for k in range(test.num_candidates)
    ]
    best = int(on_dev.argmax()) + 1  # the fixed N that dev would choose
    by_itself = []
    for tolerance in TOLERANCES:
        counts, counts_of_dev = test.counts(tolerance), dev.counts(tolerance)
        right, frames = test.auto(counts), float(counts.mean())
        by_itself.append(
            {
                "tolerance": tolerance,
                "dev_mean_frames": float(counts_of_dev.mean()),
                "dev_top1": float(dev.auto(counts_of_dev).mean()),
                "mean_frames": resampled(counts.mean(0).astype(np.float64)),
                "test_top1": resampled(right),
                **cost(frames),
                "share_of_videos": (np.bincount(counts.ravel())[1:] / counts.size).tolist(),
                "minus_fixed": {
                    str(k): resampled(right - fixed[:, k - 1])
                    for k in sorted({1, 2, 3, 4, best})
                    if k <= fixed.shape[1]
                },
                # Fixed N of which some videos get one frame more, by chance, so that the mean is the same.
                "minus_mixed": resampled(right - _mixed(fixed, frames)),
            }
        )
    return {
        "constant": {rule.name: rule.constant},
        "chosen_on_dev": chosen_on(dev, rule.tried, rule.tolerances),
        "dev_best_fixed": best,
        "fixed": rows,
        "auto": by_itself,
    }


def _mixed(fixed: Numbers, frames: float) -> Numbers:
    """Right answers [V] to expect where floor(frames) or one more are taken by chance."""
    low = min(int(frames), fixed.shape[1])
    share = frames - low
    return np.asarray((1 - share) * fixed[:, low - 1] + (share * fixed[:, low] if share else 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", type=Path, nargs="+", required=True)
    parser.add_argument("--test", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, default=None)
    parser.add_argument("--data", default="", help="What the videos are, in words.")
    parser.add_argument("--classifier-gmacs", type=float, default=None, help="Of one frame.")
    parser.add_argument("--sampler-gmacs", type=float, default=0.0, help="Of all candidates of a video.")
    given = parser.parse_args()
    if len(given.dev) not in (1, len(given.test)):
        raise SystemExit(f"{len(given.dev)} files of dev and {len(given.test)} of test; give as many, or one of dev")
    settings = dict(read_recipe("default").scoring)
    dev, test = ([Heads.read(path, settings) for path in paths] for paths in (given.dev, given.test))
    for heads in (dev, test):
        if any(not np.array_equal(one.label, heads[0].label) for one in heads):
            raise SystemExit("files of one set show different videos; give one set of videos as --dev, one as --test")
    results = Results(given.out)
    results.data = {}
    results.put(
        **circumstances(("numpy",)),
        data={
            "words": given.data,
            "dev": {"files": [path.name for path in given.dev], "videos": len(dev[0].label)},
            "test": {"files": [path.name for path in given.test], "videos": len(test[0].label)},
            "num_candidates": test[0].score.shape[1],
            "num_classes": test[0].class_logits.shape[2],
            "scoring": settings,
        },
        default={"min": DEFAULT_MIN, "max": DEFAULT_MAX, "tolerance": DEFAULT_TOLERANCE},
        bootstrap={"draws": DRAWS, "seed": SEED},
        rules={
            name: figures(rule, Measured(rule, dev), Measured(rule, test), given.classifier_gmacs, given.sampler_gmacs)
            for name, rule in rules(dev, settings).items()
        },
    )
    if given.picture is not None:
        write_picture(results.data, given.picture)
    print(table(results.data))


if __name__ == "__main__":
    main()
