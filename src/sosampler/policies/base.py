"""`Policy`, the one protocol by which N of T candidates are chosen, and `Batch`, what a policy sees. NumPy only.

`select` calls a policy with a batch of one video, `evaluate` with many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import AUTO, Auto
from sosampler.samplers.answer import Evidence
from sosampler.samplers.registry import ANSWERS, FUSED, MEAN, PROBED

Scores = NDArray[np.floating[Any]]
Numbers = NDArray[np.float64]
_T = TypeVar("_T")


class AnswerSource(NamedTuple):
    """What an answer must know of the classifier that it is made with."""

    pooled: bool  # whether it has answers for single frames
    class_names: Sequence[str]
    multi_label: bool
    name: str
    # Fingerprint of the classifier whose features of single frames are at hand, for the answer "probed"; else why not
    features_of: str = ""
    no_features: str = ""


@dataclass(eq=False)
class Batch:
    """The candidates of B videos, T each; short videos are padded at the end."""

    num_candidates: int  # T
    counts: Indices  # int64 [B], real candidates of each video
    frames: Frames | None = None  # uint8 [B, T, H, W, 3], for policies that need "frames"; padding repeats the last
    pts_seconds: Seconds | None = None  # [B, T], where they are known
    seed: int = 0
    indices: Indices | None = None  # [B], position of each video in the evaluated split; None in `select`
    teacher: Any = None  # the teacher's outputs, for policies that need "teacher" or "labels"
    # What was computed from this batch, to be shared by policies and numbers of frames: arrays [B, ...], or tuples of
    # them.
    cache: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Bool [B, T], True for a real candidate."""
        return np.asarray(np.arange(self.num_candidates) < self.counts[:, None])

    def cached(self, key: Any, compute: Callable[[], _T]) -> _T:
        """Return what `compute` gives, computed once for each key."""
        if key not in self.cache:
            self.cache[key] = compute()
        value: _T = self.cache[key]
        return value

    def rows(self, rows: NDArray[Any]) -> Batch:
        """Return some of the videos, with what is cached about them; `rows` as NumPy indexes."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        arrays = {name: _rows_of(getattr(self, name), rows) for name in ("counts", "frames", "pts_seconds", "indices")}
        teacher = None if self.teacher is None else self.teacher.rows(rows)
        cache = {key: _rows_of(value, rows) for key, value in self.cache.items()}
        return replace(self, **arrays, teacher=teacher, cache=cache)


def _rows_of(value: Any, rows: Indices) -> Any:
    if isinstance(value, tuple):
        parts = [_rows_of(part, rows) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return None if value is None else value[rows]


class Policy:
    """Chooses N of T candidates. Subclass it and write `scores` or `choose`.

    Args of both are batches of videos, so that one policy serves `select`, `Pipeline` and `evaluate`.

    Examples:
        >>> class Brightest(Policy):
        ...     name, needs = "brightest", frozenset({"frames"})
        ...
        ...     def scores(self, batch):
        ...         return batch.frames.mean(axis=(2, 3, 4))
        >>> frames = np.zeros((1, 4, 8, 8, 3), dtype=np.uint8)
        >>> frames[0, 2] = 200
        >>> Brightest().choose(Batch(4, np.array([4]), frames), 1).tolist()
        [[2]]
    """

    name: str = ""  # the class's own name if not given
    description: str = ""
    needs: Collection[str] = frozenset()  # of "frames", "teacher" (outputs of the teacher) and "labels"
    candidate_mode: str | None = None  # "keyframe" for a policy that makes sense among keyframes only
    default_mode: str = "exact"  # candidates where the user names none: "auto" where any frame nearby will do
    min_size: int | None = None  # short side of the frames that it must see, where the video has that
    view_size: int | None = None  # short side of what `select` shows it; None: 256, or `min_size` where that is more
    has_weights: bool = False  # whether `fingerprint` gives one
    has_own_number: bool = False  # whether `own_number` replaces N; `evaluate` then has one row for each T
    # Text by which `get_policy` gives the same policy in another process; None where it cannot.
    spec: str | None = None

    def __init_subclass__(cls) -> None:
        if not cls.name:
            cls.name = cls.__name__

    def prepare(self) -> None:
        """Begin, without waiting, what `choose` will need: `select` calls it before it opens the video."""
        return None

    def default_candidates(self, num_frames: int) -> int:
        """Return T where the user gives none: enough to choose from, at least four a frame."""
        return max(32, 4 * num_frames)

    def scores(self, batch: Batch) -> Scores | None:
        """Return the scores [B, T] of all candidates, higher is better; None for a policy without scores."""
        return None

    def choose(self, batch: Batch, num_frames: int) -> Indices:
        """Return N positions among the candidates of each video in time order, int64 [B, N].

        Every video of the batch has N real candidates. Default: the N highest scores, of equal ones the earlier.
        """
        scores = scores_of(self, batch)
        if scores is None:
            raise InvalidArgument(f"the policy {self.name!r} has neither scores nor choose; write one of them")
        return top(scores, num_frames, batch.counts)

    def own_number(self, batch: Batch) -> Indices:
        """Return how many frames it takes of each video [B], for a policy with `has_own_number`."""
        raise InvalidArgument(f"the policy {self.name!r} takes as many frames as it is given; leave out has_own_number")

    def features(self, batch: Batch) -> NDArray[Any]:
        """Return features [B, T, D] whose distances show how redundant frames are, for "+mmr" and "+dpp"."""
        from sosampler.policies.visual import pixel_features

        if batch.frames is None:
            raise InvalidArgument(f"the policy {self.name!r} sees no frames, so its choice cannot be diversified")
        frames = batch.frames
        return batch.cached("pixel features", lambda: np.stack([pixel_features(video) for video in frames]))

    def unit_scores(self, batch: Batch) -> Scores:
        """Return the scores [B, T] in 0..1, for methods. Default: from each video's lowest (0) to its highest (1)."""
        scores = scores_of(self, batch)
        if scores is None:
            raise InvalidArgument(f"the policy {self.name!r} has no scores; leave the method out")
        table = np.asarray(scores, dtype=np.float64)
        low = np.where(batch.mask, table, np.inf).min(1, keepdims=True)
        high = np.where(batch.mask, table, -np.inf).max(1, keepdims=True)
        return np.asarray(((table - low) / np.maximum(high - low, 1e-9)).clip(0, 1))

    def expected(self, batch: Batch) -> NDArray[np.float64] | None:
        """Return at [:, k - 1] the accuracy expected of the k best candidates, -inf beyond the real ones, [B, T].

        For num_frames="auto". None: this policy cannot decide how many frames are needed.
        """
        return None

    def query_result(self, batch: Batch) -> dict[str, Any] | None:
        """Return whether the text of a query has its moments in a single video, ready for JSON; None without one."""
        return None

    # ---- the answer from the frames that it chooses, of a classifier with answers for single frames

    @property
    def answer(self) -> str:
        """How the classifier's answers for the chosen frames become one: "mean", or of samplers another."""
        return MEAN

    @property
    def answer_given(self) -> str | None:
        """The answer where the user named it, else None."""
        return None

    def answering(self, answer: str) -> Policy:
        """Return the same policy with another answer."""
        if one_of("answer", answer, ANSWERS) == MEAN:
            return self
        raise InvalidArgument(
            f"answer={answer!r} is for trained samplers, and not for the policy {self.name!r}; give {MEAN!r}, or the "
            "folder of a sampler"
        )

    def answer_refusal(self, source: AnswerSource) -> str | None:
        """Return why its answer cannot be made with a classifier, or None where it can."""
        return None

    def evidence(self, batch: Batch) -> Evidence | None:
        """Return what its answer needs to know of the candidates besides the classifier's answers; None for a mean."""
        return None

    @property
    def probe_of(self) -> str | None:
        """Fingerprint of the classifier that the probe of its sampler reads; None where there is no probe."""
        return None

    def frame_classifier(self, classifier: Any) -> Any:
        """Return what runs on the chosen frames for its answer: the classifier, or one with further outputs."""
        return classifier

    def frame_logits(self, batch: Batch) -> Numbers:
        """Return what the classifier would say about every candidate alone [B, T, C], by the teacher's outputs."""
        logits: Numbers = batch.cached("frame logits", batch.teacher.frame_logits)
        return logits

    def combined(self, evidence: Evidence, logits: NDArray[Any], seen: NDArray[np.bool_]) -> Numbers:
        """Return its answer [B, C] from the classifier's logits for single frames [B, T, C] that were seen [B, T]."""
        raise InvalidArgument(f"the policy {self.name!r} answers by the mean, which is the classifier's own")

    def sure_enough(self, auto: Auto) -> float | None:
        """Return the belief at which it stops to ask; None where it decides on the number of frames beforehand."""
        if auto.sure is not None:
            raise InvalidArgument(
                f"auto_sure={auto.sure:g} is for samplers with answer={FUSED!r} or {PROBED!r} and exclusive classes, "
                f"which ask for one frame after another, and not for {self.name!r} with answer={self.answer!r}; leave "
                "it out"
            )
        return None

    def beliefs(self, evidence: Evidence, logits: NDArray[Any], order: Indices) -> Numbers:
        """Return its answer after the first 1, 2, ..., K frames of an order [B, K]: [B, K, C]."""
        raise InvalidArgument(f"the policy {self.name!r} does not ask for one frame after another")

    def auto_refusal(self) -> str | None:
        """Return why num_frames="auto" cannot be used, or None where it can."""
        if type(self).expected is not Policy.expected:
            return None
        return (
            f"num_frames={AUTO!r} is for trained samplers, which expect an accuracy of each number of frames, and for "
            f"'general', not for the policy {self.name!r}; give a number, or the folder of a sampler without a method "
            "behind it"
        )

    def gmacs(self, num_candidates: int) -> float | None:
        """Return the giga multiply-adds of scoring one video's candidates; None where unknown, as of oracles."""
        return None if self.needs_teacher else 0.0

    def fingerprint(self) -> str | None:
        """Return what changes with the weights of a learned policy; None for policies without weights."""
        return None

    @property
    def needs_frames(self) -> bool:
        return "frames" in self.needs

    @property
    def needs_teacher(self) -> bool:
        """Whether it is an oracle, which only `evaluate` can run."""
        return "teacher" in self.needs or "labels" in self.needs

    @property
    def has_scores(self) -> bool:
        return type(self).scores is not Policy.scores

    def renamed(self, name: str) -> Policy:
        """Return the same policy under another name."""
        renamed = copy.copy(self)
        renamed.name, renamed.spec = name, None
        return renamed

    def __repr__(self) -> str:
        return f"<policy {self.name!r}>"


def scores_of(policy: Policy, batch: Batch) -> Scores | None:
    """Return the policy's scores [B, T], computed once a batch."""

    def compute() -> Scores | None:
        scores = policy.scores(batch)
        if scores is not None and np.shape(scores) != (len(batch), batch.num_candidates):
            raise InvalidArgument(
                f"the scores of the policy {policy.name!r} have shape {list(np.shape(scores))}; return a number for "
                f"each candidate of each video, here [{len(batch)}, {batch.num_candidates}]"
            )
        return None if scores is None else np.asarray(scores)

    return batch.cached(("scores", id(policy)), compute)


def top(scores: Scores, num_frames: int, counts: Indices | None = None) -> Indices:
    """Return the positions of the N highest scores [..., T] in time order; of equal ones the earlier, NaN last.

    `counts` [B]: real candidates of each row; those behind them are never chosen.
    """
    worst_last = -np.where(np.isnan(scores), -np.inf, scores)  # integers become floats
    last = worst_last.shape[-1] if counts is None else np.asarray(counts)[:, None]
    padding = np.broadcast_to(np.arange(worst_last.shape[-1]) >= last, worst_last.shape)
    order = np.lexsort((worst_last, padding), axis=-1)
    return np.sort(order[..., :num_frames], axis=-1).astype(np.int64)


class Choice(NamedTuple):
    """What a policy chose of one video."""

    positions: Indices  # [N] in time order
    scores: Scores | None = None  # [T], where the policy has scores
    expected: NDArray[np.float64] | None = None  # [T], of the k best at k - 1, where it decided on N
    query: dict[str, Any] | None = None  # what `query_result` gives
    evidence: Evidence | None = None  # of a batch of this video, where the answer is not the mean


def choose(policy: Policy, batch: Batch, num_frames: int) -> Indices:
    """Let a policy choose, and check what it returns: int64 [B, N], N distinct real candidates in time order."""
    positions = np.asarray(policy.choose(batch, num_frames))
    good = (
        positions.ndim == 2
        and len(positions) == len(batch)
        and np.issubdtype(positions.dtype, np.integer)
        and (positions.shape[1] == num_frames or policy.name == "all")
        and (np.diff(positions, axis=1) > 0).all()
        and (positions >= 0).all()
        and (positions < batch.counts[:, None]).all()
    )
    if not good:
        raise InvalidArgument(
            f"the policy {policy.name!r} chose {positions.tolist()!r:.200}; it must return {num_frames} distinct "
            f"positions below the number of candidates for each video, in time order"
        )
    return positions.astype(np.int64, copy=False)


def choose_one(
    policy: Policy,
    num_candidates: int,
    num_frames: int,
    frames: Frames | None = None,
    *,
    seed: int = 0,
    pts_seconds: Seconds | None = None,
    auto: Auto | None = None,
) -> Choice:
    """Let a policy choose among the candidates of one video: frames uint8 [T, H, W, 3], pts_seconds [T].

    With `auto` the policy decides how many, at most `num_frames`.
    """
    batch = Batch(
        num_candidates,
        np.array([num_candidates], dtype=np.int64),
        None if frames is None else frames[None],
        None if pts_seconds is None else pts_seconds[None],
        seed,
    )
    expected = None
    if auto is not None:
        if refusal := policy.auto_refusal():
            raise InvalidArgument(refusal)
        expected = policy.expected(batch)
        assert expected is not None, "checked"
        largest = min(auto.max, num_frames)
        num_frames = int(count_frames(expected, replace(auto, min=min(auto.min, largest), max=largest))[0])
    positions = choose(policy, batch, num_frames)[0]
    scores = scores_of(policy, batch) if policy.has_scores else None
    of_one = None if scores is None else scores[0], None if expected is None else expected[0]
    return Choice(positions, *of_one, policy.query_result(batch), policy.evidence(batch))


# ---- the accuracy expected of the k best frames, and the number of frames to choose by it

# Chosen on the dev reels of benchmarks/adaptive.py, as the tolerance was.
SPREAD = 0.7  # error of the sampler about one frame, in units of the softmax's logits
SHARE = 0.6


def expected_by_belief(
    scores: ArrayLike,
    class_logits: ArrayLike,
    log_belief: ArrayLike,
    *,
    multi_label: bool = False,
    spread: float = SPREAD,
) -> Numbers:
    """Return the accuracy E_k expected of the k best frames, by scores [B, T], at [:, k - 1].

    `class_logits` [B, T, C] are the sampler's prediction of the classifier's logits for each frame, `log_belief` [B, C]
    log probabilities of the video's classes, which are independent (sigmoid) or exclude each other (softmax).
    """
    ranked = np.take_along_axis(np.asarray(class_logits, dtype=np.float64), _best_first(scores)[..., None], axis=1)
    if not multi_label:
        ranked = _log_softmax(ranked)
    taken = np.arange(1, ranked.shape[1] + 1, dtype=np.float64)[:, None]  # [T, 1]
    sharpened = np.cumsum(ranked, axis=1) / np.sqrt(taken) / spread  # √k times the mean over k
    wins = 0.5 * (1 + np.tanh(sharpened / 2)) if multi_label else np.exp(_log_softmax(sharpened))
    belief = np.exp(np.asarray(log_belief, dtype=np.float64))[:, None]  # [B, 1, C]
    return np.asarray((wins * belief).sum(-1))


def expected_by_confidence(scores: ArrayLike, confidences: ArrayLike, *, share: float = SHARE) -> Numbers:
    """Return the accuracy E_k expected of the k best frames, by scores [B, T], at [:, k - 1].

    `confidences` [B, T] in 0..1 are those of each frame alone; below `share` of the first one's a frame adds nothing.

    >>> expected_by_confidence([[3.0, 1.0, 2.0]], [[0.8, 0.1, 0.5]]).round(2).tolist()
    [[0.8, 0.9, 0.9]]
    """
    ranked = np.take_along_axis(np.asarray(confidences, dtype=np.float64), _best_first(scores), axis=1)
    adds = np.where(ranked >= share * ranked[:, :1], ranked, 0.0)
    return np.asarray(1 - np.cumprod(1 - adds, axis=1))


def count_frames(expected: ArrayLike, auto: Auto) -> NDArray[np.int64]:
    """Return the number of frames [B] by the expected accuracy [B, T]; a video with fewer than `min` gives all.

    >>> count_frames([[0.5, 0.8, 0.81, 0.3]], Auto(tolerance=0.02)).tolist()
    [2]
    """
    table = np.asarray(expected, dtype=np.float64)
    possible = np.isfinite(table).sum(1)  # [B]
    lowest = np.minimum(auto.min, possible)
    number = np.arange(1, table.shape[1] + 1)
    allowed = (number >= lowest[:, None]) & (number <= np.minimum(auto.max, possible)[:, None])
    inside = np.where(allowed, table, -np.inf)
    best = inside.max(1, keepdims=True)
    return np.asarray(1 + (allowed & (inside >= best - auto.tolerance)).argmax(1), dtype=np.int64)


def _best_first(scores: ArrayLike) -> Indices:
    """Return the candidates [B, T] from the highest score to the lowest."""
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or not table.shape[1]:
        raise InvalidArgument(f"scores have shape {list(table.shape)}; give [videos, candidates] with a candidate each")
    return np.argsort(-table, axis=1, kind="stable")


def _log_softmax(logits: Numbers) -> Numbers:
    highest = logits.max(-1, keepdims=True)
    return np.asarray(logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True)))
