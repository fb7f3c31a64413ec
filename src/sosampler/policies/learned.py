"""Learned samplers as policies: on torch, or without it through onnxruntime."""

from __future__ import annotations

import copy
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

import sosampler.samplers
from sosampler._util.arrays import Indices
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError
from sosampler.policies.auto import AUTO, Auto
from sosampler.policies.base import (
    AnswerSource,
    Batch,
    Numbers,
    Policy,
    Scores,
    expected_by_belief,
    expected_by_confidence,
)
from sosampler.policies.visual import blends, edge_maps, typical_order
from sosampler.samplers.answer import Evidence, beliefs_in_order, combine, sure_for
from sosampler.samplers.onnx_sampler import OnnxSampler, log_belief, sigmoid
from sosampler.samplers.registry import (
    ANSWERS,
    BELIEFS,
    CONFIG,
    FUSED,
    MEAN,
    MODEL,
    PROBED,
    WEIGHTS,
    has_belief,
    load_sampler,
)

# One batch at a time goes through a sampler: it uses all cores or the whole device, while other threads decode.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()
_MAX_LOADED = 4  # samplers that stay in memory after they were loaded from a folder
ONNX = "onnx"  # the device that is the CPU without torch
# What answers need besides a classifier that averages the logits of single frames.
_NEEDS = {FUSED: ", and needs a class head", PROBED: ", and needs a class head and a probe"}
ENOUGH = 0.5  # k frames are enough for a sampler with a budget head where that is as likely as not: the median
_TORCH = ("torch", "torchvision", "safetensors")  # what a torch sampler needs; torchcodec's extra brings torch alone


class SamplerOutputs(NamedTuple):
    """Outputs of a sampler for a batch: NumPy arrays, or tensors on its device."""

    scores: Any  # [B, T]
    importance: Any = None  # [B, T]
    class_logits: Any = None  # [B, T, C]
    features: Any = None  # [B, T, D]


class LearnedPolicy(Policy):
    """Choose the N candidates to which a sampler gives the highest scores."""

    name = "sosampler"
    description = "the N candidates to which a trained sampler gives the highest scores"
    needs = frozenset({"frames"})
    has_weights = True

    def __init__(self, sampler: Any, name: str = "sosampler") -> None:
        self.sampler, self.name = sampler, name
        self._answer: str | None = None  # where the user named it
        preprocessing = getattr(sampler, "preprocessing", None)
        self.min_size = None if preprocessing is None else min_short_side(preprocessing)

    def outputs(self, batch: Batch) -> SamplerOutputs:
        """Run the sampler, once a batch."""
        return batch.cached(("sampler", id(self.sampler)), lambda: run_sampler(self.sampler, batch))

    def scores(self, batch: Batch) -> Scores:
        scores = _array(self.outputs(batch).scores)
        if not np.isfinite(scores[batch.mask]).all():
            raise SosamplerError(
                f"{self.name}: the sampler gives scores that are not finite; train it again, or load it again"
            )
        return scores

    def unit_scores(self, batch: Batch) -> Scores:
        """Confidences where the sampler is calibrated; else only the order of its scores means something."""
        if getattr(self.sampler, "calibration", None) is None:
            return super().unit_scores(batch)
        scores = _array(self.outputs(batch).scores).astype(np.float64)
        if isinstance(self.sampler, OnnxSampler):
            return self.sampler.confidences(scores)
        import torch

        return _array(self.sampler.confidences(torch.from_numpy(scores)))

    def features(self, batch: Batch) -> NDArray[Any]:
        features = self.outputs(batch).features
        return super().features(batch) if features is None else _array(features)

    def expected(self, batch: Batch) -> Numbers | None:
        return expected_of(self.sampler, self.outputs(batch), batch.counts)

    def auto_refusal(self) -> str | None:
        sampler = self.sampler
        if not hasattr(sampler, "look") or not hasattr(sampler, "config"):
            return (
                f"{self.name}: the scores of a {type(sampler).__name__} only rank, so that num_frames={AUTO!r} cannot "
                "be used; give a number, or an SOSampler"
            )
        decides = has_belief(sampler.config["scoring"]) or sampler.config.get("budget")
        if not decides and sampler.calibration is None:
            return (
                f"{self.name}: this sampler is not calibrated, so that num_frames={AUTO!r} cannot be used; give a "
                "number, or train it again, which calibrates it"
            )
        return None

    def own_answer_refusal(self) -> str | None:
        """Return why the sampler has no answer of its own, or None where it has one."""
        config = getattr(self.sampler, "config", None) or {}
        return None if config.get("num_classes") and hasattr(self.sampler, "look") else "has no class head"

    def own_answer(self, batch: Batch) -> Numbers:
        """Return the sampler's own probabilities of the video's classes [B, C]."""
        return own_answer_of(self.sampler, self.outputs(batch), batch.counts)

    # ---- the answer from the frames that it chooses

    @property
    def answer(self) -> str:
        return self._answer or str(self._answer_settings.get("default", MEAN))

    @property
    def answer_given(self) -> str | None:
        return self._answer

    @property
    def method(self) -> str:
        """What stands behind the + of its name."""
        return self._answer or ""

    @property
    def _answer_settings(self) -> dict[str, Any]:
        return (getattr(self.sampler, "config", None) or {}).get("answer") or {}

    def answering(self, answer: str) -> LearnedPolicy:
        if one_of("answer", answer, ANSWERS) not in (MEAN, *self._answer_settings):
            raise InvalidArgument(
                f"{self.name}: this sampler has no answer {answer!r}, which training fits on the dev split for "
                f"a classifier that averages the logits of single frames{_NEEDS.get(answer, '')}; "
                f"train it again on such a bank, or give {MEAN!r}"
            )
        changed = copy.copy(self)
        changed._answer = answer
        return changed

    def answer_refusal(self, source: AnswerSource) -> str | None:
        config = getattr(self.sampler, "config", None) or {}
        if self.answer == MEAN:
            return None
        if self.sampler.calibration is None:
            return "this sampler is not calibrated, so that it cannot tell how relevant a frame is"
        if not source.pooled:
            return f"the classifier {source.name} sees whole clips and has no answers for single frames"
        if config["multi_label"] != source.multi_label:
            return "one of sampler and classifier has classes that exclude each other, and the other has not"
        names, wanted = config.get("class_names"), list(source.class_names)
        if self.answer in BELIEFS and (config["num_classes"] != len(wanted) or (names and list(names) != wanted)):
            return f"the sampler has other classes ({config['num_classes']}) than the classifier ({len(wanted)})"
        return self._probe_refusal(source) if self.answer == PROBED else None

    def _probe_refusal(self, source: AnswerSource) -> str | None:
        if getattr(self.sampler, "probe", None) is None:
            return "the exported network has no probe; load the sampler with torch"
        if not source.features_of:
            return source.no_features
        if source.features_of != self.sampler.probe_of:
            return (
                f"its probe reads features of the classifier {self.sampler.probe_of}, and {source.name} is "
                f"{source.features_of}"
            )
        return None

    def evidence(self, batch: Batch) -> Evidence | None:
        if self.answer == MEAN:
            return None
        return self.evidence_of(self.scores(batch), self.outputs(batch).class_logits, batch.mask)

    def evidence_of(self, scores: Any, class_logits: Any, real: NDArray[np.bool_]) -> Evidence:
        """Return the evidence by outputs of the sampler: scores [B, T], class logits [B, T, C]."""
        slope, offset = self.sampler.calibration
        relevance = sigmoid(slope * _array(scores).astype(np.float64) + offset)
        return Evidence(relevance, None if class_logits is None else _array(class_logits).astype(np.float64), real)

    @property
    def probe_of(self) -> str | None:
        return getattr(self.sampler, "probe_of", None)

    def frame_classifier(self, classifier: Any) -> Any:
        if self.answer != PROBED:
            return classifier
        from sosampler.classifiers.probed import ProbedClassifier

        return ProbedClassifier(classifier, self.sampler.probe.weight, self.sampler.probe.bias)

    def frame_logits(self, batch: Batch) -> Numbers:
        """Return the classifier's logits [B, T, C]; for "probed" [B, T, 2 C + 1], as of a `ProbedClassifier`."""
        logits = super().frame_logits(batch)
        if self.answer != PROBED:
            return logits
        key = ("probe", id(self.sampler))
        outputs = batch.cached(key, lambda: probe_outputs(self.sampler.probe, batch.teacher.probed_features()))
        return np.concatenate([logits, outputs], axis=-1)

    def combined(self, evidence: Evidence, logits: NDArray[Any], seen: NDArray[np.bool_]) -> Numbers:
        settings, multi_label = self._answer_settings[self.answer], self.sampler.config["multi_label"]
        return combine(self.answer, settings, evidence, logits, seen, multi_label=multi_label)

    def sure_enough(self, auto: Auto) -> float | None:
        if self.answer not in BELIEFS or self.sampler.config["multi_label"]:
            return super().sure_enough(auto)
        return sure_for(self._answer_settings, auto.tolerance, self.answer) if auto.sure is None else auto.sure

    def beliefs(self, evidence: Evidence, logits: NDArray[Any], order: Indices) -> Numbers:
        return beliefs_in_order(self._answer_settings[self.answer], evidence, logits, order)

    def gmacs(self, num_candidates: int) -> float | None:
        if not hasattr(self.sampler, "gmacs"):
            return None
        # At most: the probe runs on the chosen frames alone.
        probe = num_candidates * self.sampler.probe.weight.numel() / 1e9 if self.answer == PROBED else 0.0
        return float(self.sampler.gmacs(num_candidates)) + probe

    def fingerprint(self) -> str | None:
        return str(self.sampler.fingerprint())


def run_sampler(sampler: Any, batch: Batch) -> SamplerOutputs:
    """Return a sampler's outputs for all candidates of a batch; those of padding mean nothing."""
    assert batch.frames is not None, "a sampler needs frames"
    with _locks_guard:
        lock = _locks.setdefault(sampler, threading.Lock())
    with lock:
        if isinstance(sampler, OnnxSampler):
            return _run_onnx(sampler, batch)
        import torch

        frames = torch.from_numpy(batch.frames).permute(0, 1, 4, 2, 3)  # [B, T, 3, H, W]
        padded = bool((batch.counts < batch.num_candidates).any())
        inputs = (frames, torch.from_numpy(batch.mask)) if padded else (frames,)
        if not hasattr(sampler, "look"):
            return SamplerOutputs(sampler.score(*inputs))
        outputs = sampler.look(*inputs)
        return SamplerOutputs(*(getattr(outputs, name, None) for name in SamplerOutputs._fields))


def _run_onnx(sampler: OnnxSampler, batch: Batch) -> SamplerOutputs:
    """One video after the other: the network takes no mask, and its outputs then do not depend on the batch."""
    assert batch.frames is not None
    videos = zip(batch.frames.transpose(0, 1, 4, 2, 3), batch.counts.tolist(), strict=True)
    outputs = [sampler.look(frames[None, :count]) for frames, count in videos]

    def stacked(name: str) -> Any:
        first = getattr(outputs[0], name)
        if first is None:
            return None
        table = np.zeros((len(batch), batch.num_candidates, *first.shape[2:]), dtype=first.dtype)
        for row, output in enumerate(outputs):
            table[row, : batch.counts[row]] = getattr(output, name)[0]
        return table

    return SamplerOutputs(*(stacked(name) for name in SamplerOutputs._fields))


def _array(values: Any) -> np.ndarray:
    """Return a float array of a tensor on any device; an array as it is."""
    return values if isinstance(values, np.ndarray) else values.detach().float().cpu().numpy()


def min_short_side(preprocessing: Any) -> int:
    """Return the short side of frames that lose nothing when they are resized to a network's input."""
    resize = preprocessing.resize
    return int(resize) if isinstance(resize, int) else int(max(resize))


def probe_outputs(probe: Any, features: NDArray[Any]) -> Numbers:
    """Return what a probe, a linear layer, makes of a classifier's features [..., D]: [..., C + 1]."""
    weight, bias = (_array(part).astype(np.float64) for part in (probe.weight, probe.bias))
    return np.asarray(features.astype(np.float64) @ weight.T + bias)


# ---- num_frames="auto"


def expected_of(sampler: Any, outputs: Any, counts: NDArray[np.int64] | None = None) -> Numbers:
    """Return the accuracy expected of the k best candidates at [:, k - 1], [B, T]; −inf where a video has fewer.

    `outputs` are those of the `look` of a sampler that `auto_refusal` does not refuse. The first `counts` [B]
    candidates of each video are real; all are if not given. A sampler with a budget head gives the probability that k
    frames are enough, as a share of `ENOUGH`.
    """
    settings, multi_label = sampler.config["scoring"], sampler.config["multi_label"]
    scores = _array(outputs.scores).astype(np.float64)
    expected = np.full(scores.shape, -np.inf)
    counts = np.full(len(scores), scores.shape[1]) if counts is None else counts
    if sampler.config.get("budget"):
        import torch

        real = torch.from_numpy(np.arange(scores.shape[1]) < counts[:, None])
        needed = _array(sampler.frames_needed(outputs.features, real))
        return expected_by_budget(needed, counts, scores.shape[1])
    for count in np.unique(counts).tolist():
        part = np.flatnonzero(counts == count), slice(count)
        if has_belief(settings):  # drawn from both heads
            importance, logits = (
                _array(head)[part].astype(np.float64) for head in (outputs.importance, outputs.class_logits)
            )
            belief = log_belief(settings, importance, logits, multi_label=multi_label)
            expected[part] = expected_by_belief(scores[part], logits, belief, multi_label=multi_label)
        else:
            slope, offset = sampler.calibration
            expected[part] = expected_by_confidence(scores[part], sigmoid(slope * scores[part] + offset))
    return expected


def expected_by_budget(needed: NDArray[Any], counts: NDArray[np.int64], num_candidates: int) -> Numbers:
    """Return the probability that k frames are enough at [:, k - 1], as a share of `ENOUGH`, at most 1; [B, T].

    `needed` [B, N]: the probabilities that a video needs 1..N frames. −inf beyond the `counts` [B] of its candidates.

    >>> expected_by_budget(np.array([[0.25, 0.5, 0.25]]), np.array([4]), 5).tolist()
    [[0.5, 1.0, 1.0, 1.0, -inf]]
    """
    expected = np.ones((len(needed), num_candidates))
    known = min(needed.shape[1], num_candidates)
    expected[:, :known] = np.minimum(needed.astype(np.float64).cumsum(1)[:, :known] / ENOUGH, 1.0)
    return np.where(np.arange(num_candidates) < counts[:, None], expected, -np.inf)


# ---- the sampler's own answer


def own_answer_of(sampler: Any, outputs: Any, counts: NDArray[np.int64]) -> Numbers:
    """Return the probabilities of a video's classes [B, C] by the class head, of the first `counts` [B] candidates.

    With a belief they are that belief. Otherwise the mean of the frames' class logits answers.
    """
    settings, multi_label = sampler.config["scoring"], sampler.config["multi_label"]
    logits = _array(outputs.class_logits).astype(np.float64)
    importance = _array(outputs.importance).astype(np.float64)
    answer = np.zeros((len(logits), logits.shape[2]))
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        frames = logits[rows, :count]
        if has_belief(settings):
            answer[rows] = np.exp(log_belief(settings, importance[rows, :count], frames, multi_label=multi_label))
        else:
            mean = frames.mean(1)
            odds = np.exp(mean - mean.max(1, keepdims=True))
            answer[rows] = sigmoid(mean) if multi_label else odds / odds.sum(1, keepdims=True)
    return answer


# ---- loading


def policy_of(sampler: Any, *, device: Any = None) -> LearnedPolicy:
    """Return the policy of a sampler object, which is moved to `device` if that is given."""
    if isinstance(sampler, OnnxSampler):
        check_light_device(device)
    elif device is not None:
        from sosampler._util.hardware import check_device

        sampler = sampler.to(check_device(device))
    return LearnedPolicy(sampler)


def load_policy(folder: str | os.PathLike[str], *, device: Any = None, precision: str | None = None) -> LearnedPolicy:
    """Return the policy of a saved sampler. A folder is read once a process, and again when its files have changed.

    Torch runs it if it is installed, without `device` on the GPU if there is one. Without torch, with device="onnx",
    and where the folder has no other network, onnxruntime runs its model.onnx on the CPU.
    """
    path = Path(folder).resolve()
    # Training again into the same folder changes one or the other.
    stamp = tuple(_stamp(path / file) for file in (CONFIG, WEIGHTS, MODEL))
    only_onnx = (path / MODEL).is_file() and not (path / WEIGHTS).is_file()
    if device == ONNX or only_onnx or not _installed(_TORCH):
        check_light_device(device)
        policy = LearnedPolicy(_load_onnx(path, stamp), os.fspath(folder))
    else:
        from sosampler._util.hardware import resolve_device

        sampler = _load_torch(path, stamp[:2], resolve_device(device), precision)
        policy = LearnedPolicy(sampler, os.fspath(folder))
    policy.spec = os.fspath(folder)
    return policy


def _installed(packages: tuple[str, ...]) -> bool:
    """Return whether all can be imported, without importing them."""
    try:
        return all(find_spec(package) is not None for package in packages)
    except ModuleNotFoundError:
        return False


def check_light_device(device: Any) -> None:
    """Check that a sampler which onnxruntime runs can run on this device."""
    if device is None or str(device) in (ONNX, "cpu"):
        return
    if not _installed(_TORCH):
        raise MissingDependency(
            f"device={str(device)!r} needs torch; install it with: pip install 'sosampler[train]', or leave it out"
        )
    raise InvalidArgument(
        f"device={str(device)!r} is not for a sampler that onnxruntime runs; give cpu, or leave it out; "
        f"on torch it runs from a folder with {WEIGHTS}"
    )


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat() if path.is_file() else None  # loading reports what is missing
    return (0, 0) if stat is None else (stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=_MAX_LOADED)
def _load_torch(path: Path, stamp: tuple[tuple[int, int], ...], device: Any, precision: str | None) -> Any:
    sampler = load_sampler(path).to(device)
    if precision is not None:
        sampler.precision = precision
    return sampler


@lru_cache(maxsize=_MAX_LOADED)
def _load_onnx(path: Path, stamp: tuple[tuple[int, int], ...]) -> OnnxSampler:
    return OnnxSampler.from_pretrained(path)


# ---- the general sampler, which ships with the package

FOLDER = Path(sosampler.samplers.__file__).parent / "general"
GENERAL_SIZE = 128  # short side of its input
GENERAL_GMACS = 0.098  # multiply-adds of its network at that size, in billions a frame

# Chosen on images and clips that were held out of its training (benchmarks/results/general_sampler.json).
CHOICE: dict[str, float] = {
    "clearness": 0.3,
    "clear": 0.65,
    "sharpness": 4.0,
    "movement": 8.0,
    "most_movement": 0.1,
    "redundancy": 0.3,
    "alike": 0.7,
    "coverage": 2.0,
    "reach": 0.0625,
    "still": 0.003,
}
# Where text is the content: the fullest slides count, nothing moves, and slides of one talk share much of their layout.
TEXT_CHOICE = CHOICE | {"clearness": 1.0, "clear": 1.0, "movement": 0.0, "redundancy": 1.0, "alike": 0.4}
# Frames this similar show the same, for num_frames="auto".
_SHOWN = 0.95


@lru_cache(maxsize=1)
def _general_loading() -> Future[OnnxSampler]:
    """Begin to read the general sampler in a thread, while others open and decode a video."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="sosampler-load")
    loading = pool.submit(OnnxSampler.from_pretrained, FOLDER)
    pool.shutdown(wait=False)
    return loading


def general_sampler() -> OnnxSampler:
    """Return the general sampler, read once a process."""
    with _locks_guard:
        loading = _general_loading()
    return loading.result()


class _Seen(NamedTuple):
    """What is known of the candidates of a batch, padding at the end."""

    order: Indices  # [B, T], the order of choice
    value: Numbers  # [B, T]
    features: NDArray[Any]  # [B, T, D]
    quality: Numbers  # [B, T], 0..1


class General(Policy):
    """Choose clear and typical frames that differ, by the quality and the features that a network gives."""

    name = "general"
    description = "clear frames that show what the video shows, none twice: a sampler that ships with the package"
    needs = frozenset({"frames"})
    min_size = view_size = GENERAL_SIZE
    default_mode = "auto"
    has_weights = True
    settings = CHOICE

    def prepare(self) -> None:
        if self.has_weights:
            with _locks_guard:
                _general_loading()

    def scores(self, batch: Batch) -> Scores:
        return self._seen(batch).value

    def features(self, batch: Batch) -> NDArray[Any]:
        return self._seen(batch).features

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        return np.sort(self._seen(batch).order[:, :num_frames], axis=1)

    def quality(self, batch: Batch) -> Numbers:
        """Return how clear each candidate is, 0..1, [B, T]."""
        return self._seen(batch).quality

    def expected(self, batch: Batch) -> Numbers:
        """Return at [:, k - 1] the share of what the video shows that the first k of the order show, [B, T].

        A candidate counts by its quality, and is shown where a chosen one has a similarity of `_SHOWN` or more.
        """
        order, _, features, quality = self._seen(batch)
        table = np.full(order.shape, -np.inf)
        for row, count in enumerate(batch.counts.tolist()):
            unit = features[row, :count] / np.maximum(
                np.linalg.norm(features[row, :count], axis=1, keepdims=True), 1e-9
            )
            similarity = np.clip(unit @ unit[order[row, :count]].T / _SHOWN, 0, 1)  # [T, k]
            weight = quality[row, :count] / max(quality[row, :count].sum(), 1e-9)
            table[row, :count] = weight @ np.maximum.accumulate(similarity, axis=1)
        return table

    def _seen(self, batch: Batch) -> _Seen:
        """Look at a batch, once."""
        return batch.cached(self.name, lambda: self._look(batch))

    def _look(self, batch: Batch) -> _Seen:
        assert batch.frames is not None, "it needs frames"
        quality, features = self._outputs(batch)
        order = np.tile(np.arange(batch.num_candidates), (len(batch), 1))
        value = np.zeros(order.shape)
        for row, count in enumerate(batch.counts.tolist()):
            quality[row, :count] *= 1 - blends(batch.frames[row, :count])
            times = None if batch.pts_seconds is None else batch.pts_seconds[row, :count]
            order[row, :count], value[row, :count] = typical_order(
                quality[row, :count], features[row, :count], count, times=times, **self.settings
            )
        return _Seen(order, value, features, quality)

    def _outputs(self, batch: Batch) -> tuple[Numbers, NDArray[Any]]:
        """Return the quality [B, T] and the features [B, T, D] of each candidate by itself."""
        outputs = run_sampler(general_sampler(), batch)
        quality = sigmoid(outputs.scores.astype(np.float64))
        if not (np.isfinite(quality).all() and np.isfinite(outputs.features).all()):
            raise SosamplerError("the scores of the general sampler are not finite; install sosampler again")
        return quality, outputs.features

    def gmacs(self, num_candidates: int) -> float:
        return GENERAL_GMACS * num_candidates

    def fingerprint(self) -> str:
        return str(general_sampler().fingerprint())


class GeneralText(General):
    """Choose slides and screens by their text: for videos in which text is the content, not a caption or a title.

    Quality is how much is written or drawn on a frame, so that of a slide that builds up the fullest is taken, and a
    blank one is not. Features are small edge maps: to the network all slides of a talk look alike. No network is run.
    """

    name = "general-text"
    description = "slides and screens that differ, the fullest of each: for videos whose content is text"
    settings = TEXT_CHOICE
    has_weights = False

    def _outputs(self, batch: Batch) -> tuple[Numbers, NDArray[Any]]:
        assert batch.frames is not None, "it needs frames"
        edges = np.stack([edge_maps(video) for video in batch.frames])  # [B, T, D]
        detail = edges.mean(axis=2, dtype=np.float64)
        most = np.where(batch.mask, detail, 0).max(axis=1, keepdims=True)
        return detail / np.maximum(most, 1e-9), edges

    def gmacs(self, num_candidates: int) -> float:
        return 0.0

    def fingerprint(self) -> None:  # type: ignore[override]
        return None
