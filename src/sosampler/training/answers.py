"""Which answer suits a trained sampler: its settings are fitted on dev, and the best by cross-validation is kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices
from sosampler.evaluation.result import SharedSources, calibration_error, mean_average_precision, top1, top1_hits
from sosampler.policies.auto import DEFAULT_MAX
from sosampler.samplers.answer import FITTED, PRIOR, SURE, Evidence, beliefs_in_order, combine, frames_to_ask
from sosampler.samplers.registry import BELIEFS, FUSED, MEAN, PROBED, WEIGHTED

NUM_FRAMES = (1, 2, 3, 6)  # that one set of numbers is fitted for
TOLERANCES = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.05)  # of accuracy, for each of which the belief to stop at is found
MIN_VIDEOS = 20  # fewer are too few to fit on
# More videos, or logits, change little but the time: with these a fit takes a minute at most.
_MAX_VIDEOS, _MAX_NUMBERS = 2000, 1 << 20
_FOLDS = 5
_BOUNDS = (0.02, 20.0)  # of every number but the prior
_PRIOR_BOUNDS = (1e-4, 0.5)
_FIRST = {PRIOR: 0.05}  # where the fit begins; the others at 1
_RIDGE = 1e-3  # on logarithms of what is fitted: keeps them finite where dev is answered without a mistake
_SMALLEST_PROBABILITY = 1e-12
# Beliefs to stop at, ascending. Where small dev splits say that even less than a half is enough, that is chance.
_SURE = 1 - np.logspace(np.log10(0.5), -4, 50)


@dataclass(frozen=True, eq=False)
class DevAnswers:
    """All that answers of dev videos are made of."""

    evidence: Evidence
    logits: NDArray[np.float64]  # [V, T, C] of the classifier, for single frames
    scores: NDArray[np.float64]  # [V, T] of the sampler
    labels: NDArray[np.bool_]  # [V, C]
    groups: Sequence[Hashable]  # [V]
    multi_label: bool  # classes do not exclude each other
    metric: str  # "top1" or "mAP"
    sources: Sequence[Sequence[Hashable]] = ()  # [V] of the pictures or clips that each is made of, where that is known
    probe: NDArray[np.float64] | None = None  # [V, T, C + 1], what the sampler's probe says, where it has one

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Indices) -> DevAnswers:
        arrays = {name: getattr(self, name)[rows] for name in ("logits", "scores", "labels")}
        arrays["probe"] = None if self.probe is None else self.probe[rows]
        parts = [None if part is None else part[rows] for part in self.evidence]
        listed = {
            "groups": [self.groups[row] for row in rows.tolist()],
            "sources": [self.sources[row] for row in rows.tolist()] if self.sources else (),
        }
        return replace(self, evidence=Evidence(*parts), **listed, **arrays)  # type: ignore[arg-type]

    @cached_property
    def shared(self) -> SharedSources:
        return SharedSources(with_groups(self.sources, self.groups), self.labels)

    @cached_property
    def numbers(self) -> list[int]:
        return [number for number in NUM_FRAMES if number <= self.scores.shape[1]]

    @cached_property
    def order(self) -> Indices:
        """Candidates by their score, the best first, padding last: [V, T]."""
        return np.where(self.evidence.real, -self.scores, np.inf).argsort(axis=1, kind="stable")

    def seen(self, num_frames: int) -> NDArray[np.bool_]:
        seen = np.zeros(self.scores.shape, dtype=bool)
        np.put_along_axis(seen, self.order[:, :num_frames], True, axis=1)
        return seen & self.evidence.real

    def answers(self, kind: str, settings: dict[str, Any]) -> NDArray[np.float64]:
        """Return the probabilities for each of `numbers`, [V, K, C]."""
        if kind in BELIEFS:
            return self.beliefs(kind, settings, self.numbers[-1])[:, [number - 1 for number in self.numbers]]
        evidence = self.evidence
        if kind == MEAN:  # with equal weights and as it is
            kind, settings = WEIGHTED, {"power": 0.0, "scale": 1.0}
        options = {"multi_label": self.multi_label}
        each = [combine(kind, settings, evidence, self.logits, self.seen(number), **options) for number in self.numbers]
        return np.stack(each, axis=1)

    def beliefs(self, kind: str, settings: dict[str, Any], last: int) -> NDArray[np.float64]:
        """Return the belief after the first 1, 2, ..., `last` frames by score, [V, last, C]."""
        logits = self.logits
        if kind == PROBED:
            assert self.probe is not None, "an answer of samplers with a probe"
            logits = np.concatenate([logits, self.probe], axis=2)
        return beliefs_in_order(settings, self.evidence, logits, self.order[:, :last], multi_label=self.multi_label)

    def losses(self, probs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log loss of each video [V], the mean over `numbers`, of probabilities [V, K, C]."""
        truth = self.labels[:, None].astype(np.float64)
        logs = np.log(np.maximum(probs, _SMALLEST_PROBABILITY))
        if self.multi_label:
            each = np.where(truth > 0, logs, np.log(np.maximum(1 - probs, _SMALLEST_PROBABILITY)))
            return np.asarray(-each.mean((1, 2)))
        return np.asarray(-(logs * truth / truth.sum(2, keepdims=True)).sum(2).mean(1))

    def loss(self, probs: NDArray[np.float64]) -> float:
        """Return the mean log loss of probabilities [V, K, C]."""
        return float(self.losses(probs).mean())

    def hits(self, probs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for how many of `numbers` each video is named right, as a share [V]."""
        each = [top1_hits(probs[:, index], self.labels) for index in range(probs.shape[1])]
        return np.asarray(np.mean(each, axis=0))

    def score(self, probs: NDArray[np.float64]) -> list[float]:
        """Return the metric of probabilities [V, K, C] for each of `numbers`."""
        measure = mean_average_precision if self.metric == "mAP" else top1
        return [measure(probs[:, index], self.labels) for index in range(probs.shape[1])]


def fit(kind: str, dev: DevAnswers) -> dict[str, float]:
    """Return the numbers of an answer that have the lowest log loss, over all numbers of frames together."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    names = (*FITTED[kind], PRIOR) if kind in BELIEFS and dev.multi_label else FITTED[kind]
    begin = np.log([_FIRST.get(name, 1.0) for name in names])

    def loss(point: NDArray[np.float64]) -> float:
        settings = dict(zip(names, np.exp(point).tolist(), strict=True))
        return dev.loss(dev.answers(kind, settings)) + _RIDGE * float(np.square(point - begin).sum())

    bounds = [np.log(_PRIOR_BOUNDS if name == PRIOR else _BOUNDS) for name in names]
    best = minimize(loss, begin, method="L-BFGS-B", bounds=bounds, options={"maxiter": 50})
    return {name: float(f"{number:.4g}") for name, number in zip(names, np.exp(best.x), strict=True)}


def fit_answers(dev: DevAnswers) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of all answers, the default among them, and what each measures on dev.

    What is measured, and what is kept, goes by videos that the fit has not seen: groups of dev in five parts, each
    answered by what was fitted on the others, with all of `NUM_FRAMES`. The parts are of whole classes where videos are
    made of the same pictures or clips. The default is probed if there is a probe, else fused if there is a class head,
    otherwise the mean, unless another is better by more than chance (`_is_better`).
    """
    most = min(_MAX_VIDEOS, max(MIN_VIDEOS, _MAX_NUMBERS // dev.logits[0].size))
    if len(dev) > most:
        dev = dev.rows(np.linspace(0, len(dev) - 1, most).astype(np.int64))
    kinds = [WEIGHTED]
    if dev.evidence.class_logits is not None:
        kinds += [FUSED] if dev.probe is None else [FUSED, PROBED]
    believing = [] if dev.multi_label else [kind for kind in kinds if kind in BELIEFS]
    folds = _folds(_apart(dev))
    probs = {MEAN: dev.answers(MEAN, {})}
    probs |= {kind: np.empty_like(probs[MEAN]) for kind in kinds}
    last = min(DEFAULT_MAX, dev.scores.shape[1])
    beliefs = {kind: np.empty((len(dev), last, dev.labels.shape[1])) for kind in believing}
    for fold in range(folds.max() + 1):
        others, these = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        held_out = dev.rows(these)
        for kind in kinds:
            settings = fit(kind, dev.rows(others))
            probs[kind][these] = held_out.answers(kind, settings)
            if kind in believing:
                beliefs[kind][these] = held_out.beliefs(kind, settings, last)
    measured: dict[str, Any] = {"num_frames": dev.numbers, "metric": dev.metric}
    for kind, each in probs.items():
        errors = [calibration_error(each[:, index], dev.labels) for index in range(each.shape[1])]
        measured[kind] = {"score": dev.score(each), "log_loss": dev.loss(each), "ece": errors}
    best = kinds[-1] if kinds[-1] in BELIEFS else MEAN
    for kind in probs:
        if _is_better(dev, probs[kind], probs[best]):
            best = kind
    answer: dict[str, Any] = {"default": best, **{kind: fit(kind, dev) for kind in kinds}}
    real = dev.evidence.real.sum(1)
    return answer | {SURE[kind]: find_sure(beliefs[kind], dev.labels, real) for kind in believing}, measured


def _is_better(dev: DevAnswers, probs: NDArray[np.float64], than: NDArray[np.float64]) -> bool:
    """Whether top-1 says so by more than chance; where it says nothing, whether the log loss does.

    Chance is two standard errors, paired by video. Videos that are made of the same pictures or clips count as less
    than as many.
    """
    hits = dev.hits(probs) - dev.hits(than)
    if abs(hits.mean()) > 2 * standard_error(hits, dev.shared):
        return bool(hits.mean() > 0)
    gains = dev.losses(than) - dev.losses(probs)
    return float(gains.mean()) > 2 * standard_error(gains, dev.shared)


def with_groups(sources: Sequence[Sequence[Hashable]], groups: Sequence[Hashable]) -> list[list[Hashable]]:
    """Return what each video shares with others [V]: its group, and what it is made of.

    >>> with_groups([["clip 3"], ["clip 3"]], ["a", "b"])
    [['clip 3', ('group', 'a')], ['clip 3', ('group', 'b')]]
    """
    made_of = sources or [()] * len(groups)
    return [[*names, ("group", group)] for names, group in zip(made_of, groups, strict=True)]


def standard_error(values: NDArray[np.float64], shared: SharedSources) -> float:
    """Return the standard error of the mean of values [V], larger where videos share sources.

    Where videos are made of several sources, most videos of a class may show the same few. What these do to the class
    cannot be told from the class itself, so the error is at least that over classes.
    """
    centred = values - values.mean()
    error = float(values.std() / np.sqrt(len(values))) * shared.stretch(centred)
    return max(error, shared.spread_of_classes(centred) / len(values)) if shared.overlapping else error


def _apart(dev: DevAnswers) -> list[Hashable]:
    """Return the groups [V] that parts of dev are made of.

    Where videos share what they are made of, no parts of groups are apart. The numbers of an answer are the same for
    all classes, and clips of a class are in its videos only, so whole classes are left out.
    """
    labels = [row.tobytes() for row in dev.labels]
    made_of_the_same = bool(SharedSources(dev.sources, dev.labels)) if dev.sources else False
    return labels if made_of_the_same and len(set(labels)) >= _FOLDS else list(dev.groups)


def _folds(groups: Sequence[Hashable]) -> Indices:
    """Return the part [V] that each video is in; those of a group are in one."""
    number: dict[Hashable, int] = {}
    group_of = np.array([number.setdefault(group, len(number)) for group in groups])
    part_of: Indices = np.random.default_rng(0).permutation(len(number)) % _FOLDS
    return np.asarray(part_of[group_of])


def find_sure(beliefs: NDArray[np.float64], labels: NDArray[np.bool_], counts: Indices) -> list[list[float]]:
    """Return [tolerance, belief] pairs: from that belief on, stopping loses at most the tolerance of top-1.

    `beliefs` [V, K, C] after each frame; the reference asks for all K, or as many as the video has, `counts` [V].
    """
    videos = np.arange(len(beliefs))

    def accuracy(sure: float) -> float:
        needed = frames_to_ask(beliefs, sure, counts=counts)
        return top1(beliefs[videos, needed - 1], labels)

    reference = top1(beliefs[:, -1], labels)
    lost = np.array([reference - accuracy(sure) for sure in _SURE])
    pairs = []
    for tolerance in TOLERANCES:
        too_much = np.flatnonzero(lost > tolerance + 1e-9)
        first = int(too_much[-1]) + 1 if len(too_much) else 0
        pairs.append([tolerance, float(f"{_SURE[first]:.5g}") if first < len(_SURE) else 1.0])
    return pairs
