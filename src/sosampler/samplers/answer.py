"""The answer for a video from all that was seen, NumPy only.

"mean" is the classifier's own answer for the chosen frames, as it pools them. The others need its answers for single
frames, and settings that `train` fits on dev. Relevance r is the calibrated confidence of the sampler in a frame.

"weighted": the mean of the logits l of the chosen frames, weighted by relevance,

    softmax(scale * sum_t w_t l_t),    w_t = r_t^power / sum_t r_t^power.

"fused": the sampler's belief about the class (`Scoring`), renewed by the classifier. With probability r a frame shows
the class, otherwise it says nothing. So it is evidence for class c of

    e_t(c) = log(1 - r_t^power + r_t^power p_t(c) / prior),    belief = softmax(strength * sum_t e_t).

p ~ q^sampler is by the sampler's class head q; for a frame that the classifier saw p ~ f^classifier q^sampler, where f
is its answer. Of the frames that it saw at most ten count, and as many of the rest. The prior is 1 / C. Classes that do
not exclude each other are judged one by one: with sigmoid for softmax, the evidence for c minus that against it, and
one prior that is fitted.

"probed": fused, and the sampler has a probe: a linear layer of its own on the classifier's features of a frame that it
saw. It gives a class answer h and the log-odds u that the frame shows the class. Then p ~ f^classifier q^sampler
h^probe, and the log-odds of r are those of r^power plus relevance * u.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices
from sosampler._util.validation import check_float, copy_json, one_of
from sosampler.errors import InvalidArgument
from sosampler.samplers.onnx_sampler import MAX_EVIDENCE_FRAMES, MIN_LIKELIHOOD, Numbers, log_softmax, sigmoid
from sosampler.samplers.registry import ANSWERS, BELIEFS, FUSED, MEAN, PROBED, WEIGHTED

# What is fitted for each; beliefs have a prior besides where classes do not exclude each other.
_OF_BELIEFS = ("power", "strength", "classifier", "sampler")
FITTED = {WEIGHTED: ("power", "scale"), FUSED: _OF_BELIEFS, PROBED: (*_OF_BELIEFS, "probe", "relevance")}
PRIOR = "prior"
SURE = {FUSED: "sure", PROBED: "sure_probed"}  # keys of the beliefs at which no further frame is needed
_SMALLEST_PROBABILITY = 1e-30  # of the classifier, before the logarithm: float32 has no smaller ones
_LEAST_RELEVANCE = 1e-6  # so that weights can be normalised

Mask = NDArray[np.bool_]


class Evidence(NamedTuple):
    """What a sampler says about the T candidates of B videos."""

    relevance: Numbers  # [B, T] in 0..1
    class_logits: Numbers | None  # [B, T, C], of a sampler with a class head
    real: Mask  # [B, T], False for padding


def check_answer(
    value: Any, *, multi_label: bool = False, class_head: bool = True, probe: bool = True
) -> dict[str, Any]:
    """Return a copy of a sampler's settings of answers, which must be complete.

    {"default": one of `ANSWERS`, "weighted": {power, scale}, "fused": {power, strength, classifier, sampler}, "probed":
    {the same, probe, relevance}, "sure" and "sure_probed": [[tolerance, belief], ...]}; all but the default may be
    missing.
    """
    settings = copy_json("answer", value)
    allowed = ("default", *SURE.values(), *FITTED)
    if unknown := sorted(set(settings) - set(allowed)):
        raise InvalidArgument(f"answer holds {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    for kind, names in FITTED.items():
        if kind not in settings:
            continue
        wanted = (*names, PRIOR) if kind in BELIEFS and multi_label else names
        given = settings[kind]
        if not isinstance(given, dict) or set(given) != set(wanted):
            raise InvalidArgument(f"answer[{kind!r}]={given!r} must have exactly these numbers: {', '.join(wanted)}")
        for name, number in given.items():
            check_float(f"answer[{kind!r}][{name!r}]", number, at_least=0.0)
    for kind in BELIEFS:
        if not 0 < settings.get(kind, {}).get(PRIOR, 0.5) < 1:
            raise InvalidArgument(f"answer[{kind!r}][{PRIOR!r}] must be between 0 and 1")
        if kind in settings and not class_head:
            raise InvalidArgument(f"answer[{kind!r}] needs a class head; give num_classes, or leave it out")
        for pair in settings.get(SURE[kind], []):
            if not isinstance(pair, list) or len(pair) != 2:
                raise InvalidArgument(f"answer[{SURE[kind]!r}] holds {pair!r}; it must hold pairs [tolerance, belief]")
            check_float(f"tolerance of answer[{SURE[kind]!r}]", pair[0], at_least=0.0)
            check_sure(pair[1])
    if PROBED in settings and FUSED not in settings:
        raise InvalidArgument(f"answer[{PROBED!r}] needs answer[{FUSED!r}] beside it; give both, or leave it out")
    if PROBED in settings and not probe:
        raise InvalidArgument(f"answer[{PROBED!r}] needs a probe; give the sampler one, or leave it out")
    if one_of("answer['default']", settings.get("default"), ANSWERS) not in (MEAN, *settings):
        raise InvalidArgument(f"answer['default']={settings['default']!r} has no settings; give them, or {MEAN!r}")
    return settings


def check_sure(value: Any) -> float:
    """Return how sure the belief must be, a number above 0 and at most 1."""
    if check_float("sure", value, above=0.0) > 1:
        raise InvalidArgument(f"sure={value!r} must be above 0 and at most 1")
    return float(value)


def log_answers(probabilities: NDArray[Any], *, multi_label: bool, probed: bool = False) -> Numbers:
    """Return a classifier's probabilities for single frames [..., C] as logits (softmax: up to a constant).

    `probed`: those of a `ProbedClassifier`, whose last one is a relevance and becomes its log-odds.
    """
    if probed:
        parts = (probabilities[..., :-1], multi_label), (probabilities[..., -1:], True)
        return np.concatenate([log_answers(part, multi_label=independent) for part, independent in parts], axis=-1)
    probs = np.asarray(probabilities, dtype=np.float64)
    logs = np.log(np.maximum(probs, _SMALLEST_PROBABILITY))
    if not multi_label:
        return logs
    # float32 cannot hold a probability closer to 1.
    return logs - np.log(np.maximum(1 - probs, float(np.finfo(np.float32).eps) / 2))


def combine(
    kind: str, settings: dict[str, Any], evidence: Evidence, logits: Numbers, seen: Mask, *, multi_label: bool = False
) -> Numbers:
    """Return the probabilities of the classes [B, C] by "weighted", "fused" or "probed".

    `logits` [B, T, C] are the classifier's for single frames, for "probed" those of a `ProbedClassifier` [B, T, 2 C +
    1]; those that it has not `seen` [B, T] have no effect.
    """
    logits = np.where(seen[..., None], np.asarray(logits, dtype=np.float64), 0.0)
    if kind == WEIGHTED:
        relevance = np.maximum(evidence.relevance, _LEAST_RELEVANCE)
        weights = seen * (relevance / np.where(seen, relevance, 0.0).max(1, keepdims=True)) ** settings["power"]
        weights /= weights.sum(1, keepdims=True)
        return _activate(settings["scale"] * (weights[..., None] * logits).sum(1), multi_label)
    of_seen, of_rest = frame_evidence(settings, evidence, logits, multi_label=multi_label)
    rest = evidence.real & ~seen
    sums = [(mask[..., None] * each).sum(1) for mask, each in ((seen, of_seen), (rest, of_rest))]
    return _belief(settings, sums, [seen.sum(1), rest.sum(1)], multi_label)


def frame_evidence(
    settings: dict[str, Any], evidence: Evidence, logits: Numbers, *, multi_label: bool = False
) -> tuple[Numbers, Numbers]:
    """Return the evidence of each frame if the classifier saw it, and if it did not, [B, T, C] each; 0 for padding."""
    assert evidence.class_logits is not None, "a sampler that fuses has a class head"
    own = np.where(evidence.real[..., None], evidence.class_logits, 0.0) * settings["sampler"]
    relevance = np.where(evidence.real, evidence.relevance ** settings["power"], 0.0)[..., None]
    both, relevance_of_seen = own + settings["classifier"] * logits[..., : own.shape[-1]], relevance
    if "probe" in settings:
        both += settings["probe"] * logits[..., own.shape[-1] : -1]
        relevance_of_seen = _shifted(relevance, settings["relevance"] * logits[..., -1:])
    answers = (relevance_of_seen, both), (relevance, own)
    if multi_label:
        prior = settings[PRIOR]
        parts = [_log_likelihood(r, sigmoid(each), prior) for r, each in answers]
        against = [_log_likelihood(r, sigmoid(-each), 1 - prior) for r, each in answers]
        return parts[0] - against[0], parts[1] - against[1]
    prior = 1 / own.shape[-1]
    seen, rest = (_log_likelihood(r, np.exp(log_softmax(each)), prior) for r, each in answers)
    return seen, rest


def _shifted(probability: Numbers, log_odds: Numbers) -> Numbers:
    """Return probabilities with log-odds added to their own; those of 0 and 1 stay."""
    with np.errstate(divide="ignore"):
        return sigmoid(np.log(probability) - np.log1p(-probability) + log_odds)


def _log_likelihood(relevance: Numbers, probs: Numbers, prior: float) -> Numbers:
    return np.asarray(np.log(np.maximum(1 - relevance + relevance * probs / prior, MIN_LIKELIHOOD)))


def _belief(settings: dict[str, Any], sums: list[Numbers], counts: list[Indices], multi_label: bool) -> Numbers:
    """Return the belief [B, C] by sums of evidence [B, C] over frames that were seen and over the rest."""
    total = np.zeros_like(sums[0])
    for evidence, count in zip(sums, counts, strict=True):
        # Many frames of one video repeat each other: beyond ten they count as ten.
        share = np.minimum(count, MAX_EVIDENCE_FRAMES) / np.maximum(count, 1)
        total += settings["strength"] * share[:, None] * evidence
    if multi_label:
        total += math.log(settings[PRIOR]) - math.log1p(-settings[PRIOR])
    return _activate(total, multi_label)


def _activate(logits: Numbers, multi_label: bool) -> Numbers:
    return sigmoid(logits) if multi_label else np.asarray(np.exp(log_softmax(logits)))


# ---- one frame after another


def beliefs_in_order(
    settings: dict[str, Any], evidence: Evidence, logits: Numbers, order: Indices, *, multi_label: bool = False
) -> Numbers:
    """Return the belief after the classifier saw the first 1, 2, ..., K frames of `order` [B, K]: [B, K, C].

    Where a video has fewer real candidates, the belief stays as it is after the last.
    """
    of_seen, of_rest = frame_evidence(settings, evidence, logits, multi_label=multi_label)
    real, videos = evidence.real.sum(1), np.arange(len(order))
    seen, rest = np.zeros_like(of_seen[:, 0]), of_rest.sum(1)
    beliefs = np.empty((*order.shape, of_seen.shape[2]))
    for step, frames in enumerate(order.T):
        there = (step < real)[:, None]
        seen = seen + np.where(there, of_seen[videos, frames], 0.0)
        rest = rest - np.where(there, of_rest[videos, frames], 0.0)
        known = np.minimum(step + 1, real)
        beliefs[:, step] = _belief(settings, [seen, rest], [known, real - known], multi_label)
    return beliefs


def frames_to_ask(beliefs: Numbers, sure: float, *, at_least: int = 1, counts: Indices | None = None) -> Indices:
    """Return after how many frames [B] the belief [B, K, C] is sure enough; all K, or the video's `counts`, if never.

    >>> frames_to_ask(np.array([[[0.6, 0.4], [0.9, 0.1], [0.99, 0.01]]]), 0.9).tolist()
    [2]
    """
    steps = beliefs.shape[1]
    last = np.full(len(beliefs), steps) if counts is None else np.minimum(counts, steps)
    enough = beliefs.max(2) >= sure
    enough[:, : at_least - 1] = False
    first = np.where(enough.any(1), enough.argmax(1) + 1, steps)
    return np.asarray(np.minimum(first, last), dtype=np.int64)


def sure_for(settings: dict[str, Any], tolerance: float, kind: str = FUSED) -> float | None:
    """Return how sure the belief must be to lose at most `tolerance` of accuracy on dev; None where it is unknown.

    >>> sure_for({"sure": [[0.0, 0.99], [0.01, 0.9]]}, 0.005)
    0.99
    """
    pairs = settings.get(SURE[kind], [])
    return next((float(sure) for least, sure in reversed(pairs) if least <= tolerance), None)
