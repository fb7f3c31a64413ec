"""The one table of policies by name, oracles included, and NAME+METHOD. Torch is imported only for a sampler."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Indices
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.policies.base import AnswerSource, Batch, Policy, Scores, scores_of, top
from sosampler.policies.learned import General, GeneralText, LearnedPolicy, check_light_device, load_policy, policy_of
from sosampler.policies.positional import Centre, Everything, FrameExitOrder, Keyframe, Random, Uniform
from sosampler.policies.score_rules import METHODS, dpp, facility_location, gaussian_kernel, median_bandwidth, mmr
from sosampler.policies.visual import (
    DifferencePeaks,
    Dpp,
    FarthestFirst,
    FrameDifference,
    Kts,
    MotionUniform,
    Thumbnail,
)
from sosampler.samplers.answer import Evidence
from sosampler.samplers.registry import ANSWERS, FUSED, MEAN, PROBED

# ---- oracles: they know the teacher's outputs, and the labels but for "semi-optimal-max" and "attainable".
# `Batch.teacher` computes what they need; `sosampler.evaluation` provides it.


class SemiOptimal(Policy):
    """pi_s: scores are log confidences of single frames, so that close ones near 1 stay apart."""

    name = "semi-optimal"
    description = "the N frames whose own confidence in the labels is highest"
    needs = frozenset({"teacher", "labels"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("label confidence", batch.teacher.label_log_confidence)

    def unit_scores(self, batch: Batch) -> Scores:
        return np.exp(self.scores(batch))

    def features(self, batch: Batch) -> NDArray[Any]:
        """The features or logits that the teacher pools, or else its probabilities."""
        features: NDArray[Any] = batch.teacher.frame_features()
        return features


class SemiOptimalMax(SemiOptimal):
    name = "semi-optimal-max"
    description = "the N frames that are most confident in any class"
    needs = frozenset({"teacher"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("max confidence", batch.teacher.max_log_confidence)


class Attainable(SemiOptimal):
    """pi_s with the label replaced by the belief b of the teacher, its own answer from all T frames.

    Scores are log E[p_t(c)] = log sum_c b(c) p_t(c). With the label known for certain this is pi_s.
    """

    name = "attainable"
    description = "the N frames with the highest confidence expected under the classifier's own answer from all frames"
    needs = frozenset({"teacher"})

    def scores(self, batch: Batch) -> Scores:
        return batch.cached("expected confidence", batch.teacher.expected_log_confidence)


class ClassFrames(Policy):
    """The frames that are known to show the class, as of reels; all frames where a video has none."""

    name = "class-frames"
    description = "all frames that are known to show the class, however many"
    needs = frozenset({"labels"})
    has_own_number = True

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        return top(batch.teacher.shows_class, num_frames, batch.counts)

    def own_number(self, batch: Batch) -> Indices:
        known = (batch.teacher.shows_class & batch.mask).sum(1)
        return np.where(known > 0, known, batch.counts)


class Optimal(Policy):
    """pi_o: by enumeration, certified search or beam search, whichever the teacher and T allow."""

    name = "optimal"
    description = "the N frames whose clip is most confident in the labels"
    needs = frozenset({"teacher", "labels"})

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        positions: Indices = batch.teacher.optimal(num_frames)
        return positions


# ---- the table

_SIMPLE = (Uniform, Random, Everything, Centre, Keyframe, FrameDifference, FrameExitOrder, DifferencePeaks)
_VISUAL = (MotionUniform, FarthestFirst, Dpp, Kts, Thumbnail, General, GeneralText)
_ORACLES = (SemiOptimalMax, SemiOptimal, Attainable, ClassFrames, Optimal)
# Policies of the package, and those that are registered.
_POLICIES: dict[str, Policy] = {policy.name: policy() for policy in (*_SIMPLE, *_VISUAL, *_ORACLES)}
for _policy in _POLICIES.values():
    _policy.spec = _policy.name  # registered ones are not known in other processes

_REDUNDANCY: dict[str, Callable[..., Indices]] = {"mmr": mmr, "dpp": dpp, "facility": facility_location}
METHOD_NAMES = (*METHODS, *_REDUNDANCY)
OF_SAMPLER = "sampler"  # what rows of FOLDER+answer name as their answer
ANSWER = "answer"  # behind the + of a sampler in `evaluate`: its own answer, without the classifier
_IMPORT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:Class
_CONFIG = "config.json"  # what a folder must hold to be taken for a saved sampler or baseline


class MethodPolicy(Policy):
    """Choose from the scores of another policy by a method: NAME+METHOD."""

    def __init__(self, base: Policy, method: str) -> None:
        self.base, self.method = base, method
        self.name, self.description = f"{base.name}+{method}", f"{base.description}, by {method}"
        self.needs = base.needs
        if self.reduces_redundancy and not base.needs_teacher:
            self.needs = {*base.needs, "frames"}
        self.candidate_mode, self.min_size, self.has_weights = base.candidate_mode, base.min_size, base.has_weights
        self.default_mode, self.view_size = base.default_mode, base.view_size
        self.spec = None if base.spec is None else f"{base.spec}+{method}"

    @property
    def reduces_redundancy(self) -> bool:
        return self.method in _REDUNDANCY

    def prepare(self) -> None:
        self.base.prepare()

    def default_candidates(self, num_frames: int) -> int:
        return self.base.default_candidates(num_frames)

    def scores(self, batch: Batch) -> Scores | None:
        return scores_of(self.base, batch)

    def unit_scores(self, batch: Batch) -> Scores:
        return self.base.unit_scores(batch)

    def features(self, batch: Batch) -> NDArray[Any]:
        return self.base.features(batch)

    @property
    def answer(self) -> str:
        return self.base.answer

    @property
    def answer_given(self) -> str | None:
        return self.base.answer_given

    def answering(self, answer: str) -> MethodPolicy:
        changed = copy.copy(self)
        changed.base = self.base.answering(answer)
        return changed

    def answer_refusal(self, source: AnswerSource) -> str | None:
        return self.base.answer_refusal(source)

    def evidence(self, batch: Batch) -> Evidence | None:
        return self.base.evidence(batch)

    @property
    def probe_of(self) -> str | None:
        return self.base.probe_of

    def frame_classifier(self, classifier: Any) -> Any:
        return self.base.frame_classifier(classifier)

    def frame_logits(self, batch: Batch) -> NDArray[np.float64]:
        return self.base.frame_logits(batch)

    def combined(self, evidence: Evidence, logits: NDArray[Any], seen: NDArray[np.bool_]) -> NDArray[np.float64]:
        return self.base.combined(evidence, logits, seen)

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        values = self.unit_scores(batch)
        if self.reduces_redundancy:
            similarity = batch.cached(("similarity", id(self.base)), lambda: self._similarity(batch))
            return _REDUNDANCY[self.method](values.astype(np.float32), similarity, num_frames, mask=batch.mask)
        rows = zip(values.astype(np.float64), batch.counts.tolist(), strict=True)
        return np.stack([METHODS[self.method](row[:count], num_frames) for row, count in rows])

    def _similarity(self, batch: Batch) -> NDArray[Any]:
        """The width of the kernel is the median distance within each video: its own measure of what is alike."""
        features = self.features(batch)
        return gaussian_kernel(features, median_bandwidth(features, batch.mask)).astype(np.float32)

    def gmacs(self, num_candidates: int) -> float | None:
        return self.base.gmacs(num_candidates)

    def fingerprint(self) -> str | None:
        fingerprint = self.base.fingerprint()
        return None if fingerprint is None else f"{fingerprint}+{self.method}"


class OwnAnswer(Policy):
    """The answer of a sampler's own class head for the video, in place of the classifier's: FOLDER+answer."""

    needs = frozenset({"frames"})
    has_own_number, has_weights, method = True, True, ANSWER

    def __init__(self, base: Policy) -> None:
        refusal = base.own_answer_refusal() if isinstance(base, LearnedPolicy) else "is no trained sampler"
        if not isinstance(base, LearnedPolicy) or refusal:
            raise InvalidArgument(
                f"policy={base.name + '+' + ANSWER!r}: {base.name!r} {refusal}, so it has no answer of its own; give "
                "the folder of a sampler with a class head, such as one that the recipe 'default' trained"
            )
        self.base, self.name, self.min_size = base, f"{base.name}+{ANSWER}", base.min_size
        self.description = "the answer of the sampler's own class head, without the classifier"

    @property
    def answer(self) -> str:
        return OF_SAMPLER

    def own_answer(self, batch: Batch) -> NDArray[np.float64]:
        """Return the probabilities of the classes [B, C]."""
        return self.base.own_answer(batch)

    def own_number(self, batch: Batch) -> Indices:
        return np.zeros(len(batch), dtype=np.int64)

    def gmacs(self, num_candidates: int) -> float | None:
        return self.base.answering(MEAN).gmacs(num_candidates)  # without a probe, which the classifier would run

    def fingerprint(self) -> str | None:
        return f"{self.base.fingerprint()}+{ANSWER}"


def with_method(policy: Policy, method: str) -> Policy:
    """Return the policy that chooses from another one's scores by a method, answers otherwise, or answers itself."""
    if method == ANSWER:
        return OwnAnswer(policy)
    if method in ANSWERS:
        answered = policy.answering(method).renamed(f"{policy.name}+{method}")
        answered.spec = None if policy.spec is None else f"{policy.spec}+{method}"
        return answered
    if method not in METHOD_NAMES:
        raise InvalidArgument(f"method={method!r} is unknown; choose one of: {', '.join(METHOD_NAMES)}")
    if not policy.has_scores or isinstance(policy, MethodPolicy):
        scored = ", ".join(name for name, known in _POLICIES.items() if known.has_scores)
        why = "has a method already" if isinstance(policy, MethodPolicy) else "has no scores"
        raise InvalidArgument(
            f"policy={policy.name + '+' + method!r}: {policy.name!r} {why}, so +{method} cannot choose from them; put "
            f"one method behind a policy with scores: {scored}, or the folder of a trained sampler"
        )
    return MethodPolicy(policy, method)


def with_answer(policy: Policy, answer: str | None, source: AnswerSource, note: Callable[[str], None]) -> Policy:
    """Return the policy with the answer that is asked for, or else with the best on dev that this classifier allows.

    Policies without a sampler have the mean whatever is asked for. An answer that was asked for and cannot be given is
    refused; one that only was the best on dev gives way to a fused one or else to the mean, with a note.
    """
    if answer is not None:
        one_of("answer", answer, ANSWERS)
        if policy.answer_given is None and isinstance(_sampler_policy(policy), LearnedPolicy):
            policy = policy.answering(answer)
    refusal = policy.answer_refusal(source)
    if refusal is None:
        return policy
    if policy.answer_given is not None:
        raise InvalidArgument(
            f"{policy.name}: answer={policy.answer!r} cannot be used, since {refusal}; give {MEAN!r}, or leave it out"
        )
    if policy.answer == PROBED:
        fused = policy.answering(FUSED)
        if fused.answer_refusal(source) is None:
            note(f"{policy.name}: the answer is {FUSED!r} instead of {PROBED!r}, since {refusal}")
            return fused
    note(f"{policy.name}: the answer is the mean over frames instead of {policy.answer!r}, since {refusal}")
    return policy.answering(MEAN)


def _sampler_policy(policy: Policy) -> Policy:
    return policy.base if isinstance(policy, MethodPolicy) else policy


def split_method(text: str) -> tuple[str, str]:
    """Split NAME+METHOD, NAME+answer or NAME+fused (mean, weighted, probed); the method is "" where there is none.

    >>> split_method("runs/first+nms"), split_method("runs/a+b")
    (('runs/first', 'nms'), ('runs/a+b', ''))
    """
    base, _, method = text.rpartition("+")
    return (base, method) if base and method in (*METHOD_NAMES, ANSWER, *ANSWERS) else (text, "")


def is_saved_folder(text: str) -> bool:
    """Return whether this is the folder of a saved sampler or baseline."""
    return (Path(text) / _CONFIG).is_file()


def split_label(text: str) -> tuple[str | None, str]:
    """Split LABEL=POLICY; the label is None where there is none, or where the whole text names a folder.

    >>> split_label("mine=runs/first+nms"), split_label("uniform")
    (('mine', 'runs/first+nms'), (None, 'uniform'))
    """
    label, _, rest = text.partition("=")
    whole = [text, split_method(text)[0], text.rpartition("@")[0]]
    return (None, text) if not rest or any(is_saved_folder(part) for part in whole if part) else (label, rest)


def get_policy(policy: Any, *, device: Any = None, precision: str | None = None, teacher: bool = False) -> Policy:
    """Return the policy that is meant.

    Args:
        policy: a name, NAME+METHOD, the folder of a saved sampler, "module:Class", a sampler, or a `Policy`.
        device: where a sampler runs: an object stays where it is unless given, one that is loaded goes to the GPU if
            there is one. "onnx" loads a folder without torch, as is done anyway where torch is not installed.
        precision: of a sampler that is loaded.
        teacher: whether the teacher's outputs are at hand; without them oracles are refused.
    """
    if isinstance(policy, (str, os.PathLike)):
        resolved = _from_text(policy, device, precision, teacher)
    elif isinstance(policy, Policy) or (isinstance(policy, type) and issubclass(policy, Policy)):
        resolved = _instance(policy)
    else:
        if hasattr(policy, "sampler") and hasattr(policy, "folder"):
            policy = policy.sampler  # as `train` returns it
        if not (hasattr(policy, "look") or hasattr(policy, "score")):
            raise InvalidArgument(
                f"policy is a {type(policy).__name__}; give one of: {', '.join(list_policies(oracles=teacher))}, "
                "a sampler, the folder of one, or a Policy"
            )
        resolved = policy_of(policy, device=device)
    if isinstance(resolved, OwnAnswer) and not teacher:
        raise InvalidArgument(f"policy={resolved.name!r} chooses no frames; use it in evaluate, or leave out +{ANSWER}")
    if resolved.needs_teacher and not teacher:
        raise InvalidArgument(
            f"policy={resolved.name!r} needs the outputs of a teacher, which only a bank has; use it in evaluate, or "
            f"choose one of: {', '.join(list_policies())}"
        )
    return resolved


def _instance(policy: Any) -> Policy:
    resolved = policy() if isinstance(policy, type) else policy
    if not isinstance(resolved, Policy):
        raise InvalidArgument(f"{resolved!r} is a {type(resolved).__name__}; give a Policy, or a class of one")
    unknown = set(resolved.needs) - {"frames", "teacher", "labels"}
    if unknown:
        raise InvalidArgument(
            f"the policy {resolved.name!r} needs {', '.join(sorted(unknown))}; "
            'needs must be a set of "frames", "teacher" and "labels"'
        )
    return resolved


def _from_text(given: str | os.PathLike[str], device: Any, precision: str | None, teacher: bool) -> Policy:
    text = os.fspath(given)
    if isinstance(given, str) and text in _POLICIES:  # a path is a folder, whatever it is called
        if device is not None and _POLICIES[text].has_weights:
            check_light_device(device)
        return _POLICIES[text]
    # A folder may itself be called like one with a method behind it, and is then taken as it is.
    if is_saved_folder(text):
        return load_policy(text, device=device, precision=precision)
    base, method = split_method(text)
    if method:
        if not is_policy_name(base) and not Path(base).is_dir() and not _IMPORT.fullmatch(base):
            raise _unknown(text, teacher)
        return with_method(_from_text(base, device, precision, teacher), method)
    if _IMPORT.fullmatch(text):
        return _imported(text)
    if Path(text).is_dir():
        raise InvalidArgument(
            f"policy={text!r} is a folder without {_CONFIG}, so it holds no sampler; "
            f"give the folder of a trained one, or one of: {', '.join(list_policies())}"
        )
    raise _unknown(text, teacher)


def _unknown(text: str, teacher: bool) -> InvalidArgument:
    names = list_policies(oracles=teacher)
    close = get_close_matches(split_method(text)[0], list_policies(oracles=True), n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return InvalidArgument(
        f"policy={text!r} is unknown{hint} choose one of: {', '.join(names)}, or give the folder of a trained sampler"
        f"{' or baseline' if teacher else ''}; "
        f"{', '.join('+' + method for method in METHOD_NAMES)} go behind such a folder or a policy with scores"
    )


def _imported(text: str) -> Policy:
    module, _, name = text.partition(":")
    try:
        imported = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(
            f"policy={text!r} cannot be imported ({error}); give MODULE:CLASS of a module that Python finds, with "
            "a class that derives from sosampler.Policy"
        ) from error
    policy = _instance(imported)
    policy.spec = text
    return policy


def register_policy(policy: Policy) -> Policy:
    """Add a policy to the table, so that its name works in `select`, `Pipeline` and `evaluate`.

    The name is known in this process. Commands and other processes take "module:Class" instead.

    Examples:
        >>> import numpy as np, sosampler as so
        >>> class Last(so.Policy):
        ...     name, description = "last", "the last N candidates"
        ...
        ...     def choose(self, batch, num_frames):
        ...         return batch.counts[:, None] - num_frames + np.arange(num_frames)
        >>> so.register_policy(Last())
        <policy 'last'>
        >>> so.list_policies("la*")
        ['last']
    """
    policy = _instance(policy)
    if _POLICIES.get(policy.name, policy) is not policy:
        raise InvalidArgument(f"a policy called {policy.name!r} is there already; give another name")
    if not re.fullmatch(r"[^\s+=@:,/\\]+", policy.name):
        raise InvalidArgument(
            f"a policy cannot be called {policy.name!r}; its name must have no space and none of + = @ : , / \\"
        )
    _POLICIES[policy.name] = policy
    return policy


def list_policies(pattern: str = "*", *, oracles: bool = False) -> list[str]:
    """Return the names of the policies that match a pattern such as "frame*".

    `oracles` adds those that need a teacher, which `evaluate` takes. NAME+METHOD is not listed.

    Examples:
        >>> list_policies("frame*")
        ['frame-difference', 'frameexit']
    """
    return [
        name for name, policy in _POLICIES.items() if fnmatch(name, pattern) and (oracles or not policy.needs_teacher)
    ]


def describe_policies() -> dict[str, str]:
    """Return what each policy that `select` takes does, by its name."""
    return {name: _POLICIES[name].description for name in list_policies()}


def is_policy_name(text: str) -> bool:
    """Return whether this names a policy of the table, alone or with a method behind it: no folder, no module."""
    return split_method(text)[0] in _POLICIES or text in _POLICIES


def can_travel(policy: Policy) -> bool:
    """Return whether another process can run it, by its `spec`: not those registered here, nor large networks."""
    return policy.spec is not None and (not policy.has_weights or is_policy_name(policy.spec))


# ---- names of the rows of baselines: NAME@VALUE, where VALUE is the threshold

# Not all that Python reads as a number: "1_0", " 3" and "nan" are more likely names.
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

AUTO_SUFFIX = "+auto"  # ends the name of a sampler's rows with num_frames="auto", before any @
EVERY = "all"  # behind the @: every threshold of the baseline


def split_threshold(text: str) -> tuple[str, str]:
    """Split NAME@VALUE; a text that does not end in a number or "all" is a name as a whole.

    >>> split_threshold("runs/a@0.3"), split_threshold("a@all"), split_threshold("me@home"), split_threshold("a")
    (('runs/a', '0.3'), ('a', 'all'), ('me@home', ''), ('a', ''))
    """
    name, _, value = text.rpartition("@")
    return (name, value) if name and (value == EVERY or number_of(value) is not None) else (text, "")


def number_of(text: str) -> float | None:
    """Return an int where it is one, because some thresholds are counts; None for what is no number.

    >>> number_of("3"), number_of("0.30"), number_of("-1e-3"), number_of("1_0"), number_of("inf")
    (3, 0.3, -0.001, None, None)
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else None


def is_system(row: Mapping[str, Any]) -> bool:
    """Return whether a row of an evaluation, as in its JSON, has no N: a baseline, or NAME+auto."""
    return row["num_frames"] is None


def line_of(row: Mapping[str, Any]) -> str:
    """Return the name of the curve that a row is a point of: one for all thresholds.

    >>> line_of({"policy": "a@0.3", "num_frames": None}), line_of({"policy": "a@3", "num_frames": 4})
    ('a', 'a@3')
    """
    return split_threshold(row["policy"])[0] if is_system(row) else str(row["policy"])
