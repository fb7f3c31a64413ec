"""From a video file to its label: candidates, the frames a policy chooses, and the classifier's prediction."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from sosampler._util.hardware import check_device, resolve_device
from sosampler._util.limits import check_count
from sosampler._util.validation import check_bool, check_int, one_of
from sosampler.classifiers.base import INT8, PRECISIONS, VideoClassifier, check_finite
from sosampler.classifiers.probed import probe_refusal
from sosampler.engine.backends import int8_classifier, int8_file_of
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.decode import Decoded, DecodeStep, FrameTask, attempt, attempt_each, decoded_batches
from sosampler.inference.options import SelectOptions, auto_of
from sosampler.inference.select import choose_frames
from sosampler.inference.selection import CandidateFrames, Selection, build_selection
from sosampler.policies.auto import Auto
from sosampler.policies.base import AnswerSource, Choice, Policy
from sosampler.policies.learned import LearnedPolicy, min_short_side
from sosampler.policies.registry import can_travel, get_policy, with_answer
from sosampler.samplers.answer import log_answers
from sosampler.samplers.registry import MEAN, PROBED
from sosampler.video.candidates import positions_of

log = logging.getLogger("sosampler")

ON_ERROR = ("raise", "return")
DEFAULT_NUM_FRAMES, DEFAULT_NUM_CANDIDATES = 6, 10
# Short side of the frames that sampler and classifier get, unless one of them takes larger ones: what banks hold.
_MIN_SIZE = 256
# Arguments of `select` that a pipeline sets itself. Without fps, N is the same for all videos, so they share calls.
_SET_HERE = (
    "policy",
    "prefer",
    "num_frames",
    "num_candidates",
    "min_candidates",
    "candidates",
    "size",
    "decode",
    "fps",
)
_OF_SAMPLERS = ("score", "preprocessing")  # what the engine needs of a sampler
# On a CPU the engine is made after this many candidates: making it costs as much as scoring a few videos.
_ENGINE_AFTER = 48


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a classifier predicts from the chosen frames of one video."""

    video: str
    label: str  # the most probable class
    probability: float
    top: tuple[tuple[str, float], ...]  # the most probable classes, best first
    probabilities: np.ndarray  # [C] float32, in the order of the classifier's class names
    selection: Selection
    timing: dict[str, float] = field(default_factory=dict)  # seconds; of a shared call this video's part
    answer: str = MEAN  # how the classifier's answers for the frames became one

    def __repr__(self) -> str:
        frames = self.selection.frame_indices.tolist()
        return f"Prediction({self.video!r}, {self.label!r}, probability={self.probability:.4f}, frame_indices={frames})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pixels and the classes that are not among the top, ready for JSON."""
        return {
            "video": self.video,
            "label": self.label,
            "probability": self.probability,
            "answer": self.answer,
            "top": [{"label": label, "probability": probability} for label, probability in self.top],
            "selection": self.selection.to_dict(),
            "timing": dict(self.timing),
        }


Result = Prediction | SosamplerError


class BatchClassifier:
    """Chooses frames of decoded videos and classifies them, many in one call; without a classifier it only chooses.

    `sampler` is the network behind the policy, where the policy takes its N highest scores and nothing else. With
    `asking` and `sure` the classifier gets one frame after another until the belief is that sure.
    """

    def __init__(
        self,
        options: SelectOptions,
        classifier: VideoClassifier | None,
        *,
        sampler: Any = None,
        precision: str | None = None,
        batch_size: int = 1,
        top: int = 5,
        keep_frames: bool = False,
        asking: Auto | None = None,
        sure: float = 1.0,
    ) -> None:
        self.options, self.classifier = options, classifier
        self.policy = options.resolved_policy
        self.answer = MEAN if classifier is None else self.policy.answer
        self._asking, self._sure = asking, sure
        self._top, self._keep_frames = top, keep_frames
        # With "auto" each video has its own number of frames, which the engine cannot handle.
        self._sampler = sampler if options.auto is None and classifier is not None else None
        self._precision, self._batch_size = precision, batch_size
        self._engine: Any = None
        if precision == INT8:
            int8_file_of(classifier)  # raises where it is missing, before anything is decoded
        self._seen = 0  # candidates
        self._began_without = False
        self._lock = threading.Lock()  # streams of several threads take turns

    @property
    def engine(self) -> Any:
        """The `FrameEngine`, which is faster than the networks as they are; None where there is none, or not yet.

        It copies the networks when it is made. On a CPU that takes as long as scoring a few videos, so a single short
        video is classified without it.
        """
        if self._engine is None and self._sampler is not None:
            on_cpu = getattr(self._sampler, "device", torch.device("cpu")).type == "cpu"
            precision = self._precision
            if on_cpu and self._seen <= _ENGINE_AFTER and precision in (None, "float32"):
                self._began_without = True
                return None
            if on_cpu and self._began_without:
                precision = "float32"  # as for the first videos
            from sosampler.engine.frame_engine import FrameEngine

            num_frames = self.options.resolved_frames
            assert num_frames is not None
            self._engine = FrameEngine(
                self._sampler,
                self.classifier,
                num_frames=num_frames,
                precision=precision,
                by_frames=self.answer != MEAN,
            )
        return self._engine

    def warm_up(self) -> None:
        """Make the engine now, where there is one to be made."""
        with self._lock:
            self._seen = max(self._seen, _ENGINE_AFTER + 1)
            assert self._sampler is None or self.engine is not None

    def __call__(self, batch: Sequence[Decoded]) -> list[Prediction | Selection | SosamplerError]:
        """Return results in the order of the videos; those with equally many and large frames share a call."""
        with self._lock:
            outcomes = [decoded.outcome for decoded in batch]
            self._seen += sum(len(each.frame_indices) for each in outcomes if isinstance(each, CandidateFrames))
            results: dict[int, Prediction | Selection | SosamplerError] = {}
            groups: dict[tuple[bool, Any], list[int]] = {}  # that share a call: by the engine or not, of one shape
            waiting: list[int] = []
            for index, decoded in enumerate(batch):
                if isinstance(decoded.outcome, CandidateFrames) and self._suits_engine(decoded.outcome):
                    groups.setdefault((True, decoded.shape), []).append(index)
                    continue
                results[index] = selection = self._choose(decoded)
                if isinstance(selection, Selection) and self._asking is not None:
                    waiting.append(index)
                elif isinstance(selection, Selection):
                    groups.setdefault((False, getattr(selection.frames, "shape", None)), []).append(index)
            results |= zip(waiting, self._ask([results[index] for index in waiting]), strict=True)
            for (by_engine, _), indices in groups.items():
                if by_engine:
                    results |= zip(indices, self._run_engine([batch[index] for index in indices]), strict=True)
                else:
                    results |= zip(indices, self._classify([results[index] for index in indices]), strict=True)
            return [results[index] for index in range(len(batch))]

    def _suits_engine(self, video: CandidateFrames) -> bool:
        """Return whether the N highest scores are the choice: enough frames, in time order, none replaced."""
        wanted = self.options.resolved_frames or len(video.candidates)
        if self._asking is not None or self.engine is None or len(video.frame_indices) < wanted:
            return False
        return bool((np.diff(video.frame_indices) > 0).all())

    def _run_engine(self, group: Sequence[Decoded]) -> list[Prediction | SosamplerError]:
        """Score, choose and classify candidates of one shape in one call."""
        # A GPU is prepared for each shape anew, so shared calls are all of one size there, padded with black videos.
        if len(group) == 1:
            frames = group[0].take()[None]  # without a copy where it was decoded in this process
        else:
            size = max(len(group), self._batch_size if self.engine.device.type == "cuda" else 1)
            frames = np.zeros((size, *(group[0].shape or ())), dtype=np.uint8)  # [B, T, H, W, 3]
            for row, decoded in enumerate(group):
                decoded.take(frames[row])
        videos = [decoded.outcome for decoded in group if isinstance(decoded.outcome, CandidateFrames)]
        positions = np.zeros(frames.shape[:2], dtype=np.float32)  # [B, T]
        for row, video in enumerate(videos):
            positions[row] = self._positions(video)

        def run(rows: slice) -> list[Prediction]:
            begin = time.perf_counter()
            assert self.classifier is not None, "an engine has a classifier"
            output = self.engine.run(frames[rows], torch.from_numpy(positions[rows])).check(self.classifier.name)
            chosen, scores = output.chosen.cpu().numpy(), output.scores.float().cpu().numpy()
            choices = map(Choice, chosen, scores)
            selections = [
                build_selection(replace(video, frames=own), self.options, choice)
                for video, own, choice in zip(videos[rows], frames[rows], choices, strict=False)
            ]
            if self.answer == MEAN:
                return self._predictions(selections, output.probabilities, begin)
            return self._predictions(selections, self._combined(output, chosen, scores)[: len(selections)], begin)

        return attempt_each([video.video for video in videos], run)

    def _combined(self, output: Any, chosen: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the answers [B, C] from what an engine found about the frames chosen [B, N] by scores [B, T]."""
        assert isinstance(self.policy, LearnedPolicy), "an engine is for a sampler"
        evidence = self.policy.evidence_of(scores, output.class_logits, np.ones(scores.shape, dtype=bool))
        logits = self._logits(output.frame_probabilities)
        seen = np.zeros(scores.shape, dtype=bool)
        np.put_along_axis(seen, chosen, True, axis=1)
        table = np.zeros((*scores.shape, logits.shape[2]))  # [B, T, C]
        np.put_along_axis(table, chosen[..., None], logits, axis=1)
        return self.policy.combined(evidence, table, seen)

    def _choose(self, decoded: Decoded) -> Selection | SosamplerError:
        """Return the selection of one video, by the policy where its frames are not chosen yet."""
        if isinstance(decoded.outcome, SosamplerError):
            return decoded.outcome
        frames, outcome = decoded.take(), decoded.outcome
        if isinstance(outcome, Selection):
            return replace(outcome, frames=frames)
        assert isinstance(outcome, CandidateFrames)
        video = replace(outcome, frames=frames)
        return attempt(
            video.video, lambda: build_selection(video, self.options, choose_frames(video, self.options, frames))
        )

    def _classify(self, group: Sequence[Any]) -> Sequence[Prediction | Selection | SosamplerError]:
        """Classify selections of one shape in one call."""
        if self.classifier is None:
            return [replace(selection, frames=None) for selection in group]

        def run(rows: slice) -> list[Prediction]:
            begin, selections = time.perf_counter(), group[rows]
            assert self.classifier is not None
            frames = torch.stack([selection.to_torch() for selection in selections])  # [B, N, 3, H, W]
            positions = torch.from_numpy(np.stack([self._positions(selection) for selection in selections]))  # [B, N]
            if self.answer == MEAN:
                outputs = check_finite(self._run_classifier(frames, positions), self.classifier.name)
                return self._predictions(selections, outputs, begin)
            logits = self._frame_logits(frames.flatten(0, 1), positions.flatten()).reshape(*frames.shape[:2], -1)
            tables = [_FrameAnswers(selection, own) for selection, own in zip(selections, logits, strict=True)]
            return self._predictions(selections, np.stack([table.combined(self.policy) for table in tables]), begin)

        return attempt_each([selection.video for selection in group], run)

    def _ask(self, group: Sequence[Any]) -> list[Prediction | SosamplerError]:
        """Classify one frame of each selection after another, the best first, until the belief about it is sure."""
        return attempt_each([selection.video for selection in group], lambda rows: self._ask_all(group[rows]))

    def _ask_all(self, selections: Sequence[Any]) -> list[Prediction]:
        assert self._asking is not None
        begin = time.perf_counter()
        answers = [_FrameAnswers(selection) for selection in selections]
        open_ones = list(range(len(selections)))
        while open_ones:
            by_shape: dict[Any, list[int]] = {}
            for index in open_ones:
                by_shape.setdefault(selections[index].frames.shape[1:], []).append(index)
            for indices in by_shape.values():
                nexts = [(selections[index], answers[index].next()) for index in indices]
                frames = np.stack([selection.frames[frame].transpose(2, 0, 1) for selection, frame in nexts])
                positions = np.stack([self._positions(selection)[frame] for selection, frame in nexts])
                logits = self._frame_logits(torch.from_numpy(frames), torch.from_numpy(positions))
                for index, own in zip(indices, logits, strict=True):
                    answers[index].add(own, self.policy)
            open_ones = [index for index in open_ones if not answers[index].done(self._asking, self._sure)]
        settings = {**self._asking.to_dict(), "sure": self._sure}
        kept = [replace(answer.selection_of_seen(), asked={**settings, "belief": answer.beliefs}) for answer in answers]
        return self._predictions(kept, np.stack([answer.belief for answer in answers]), begin)

    def _frame_logits(self, frames: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
        """Frames [F, 3, H, W] and their positions [F] -> the classifier's logits for each alone [F, C]."""
        assert self.classifier is not None
        return self._logits(
            check_finite(self._run_classifier(frames[:, None], positions[:, None]), self.classifier.name)
        )

    def _logits(self, probabilities: torch.Tensor) -> np.ndarray:
        multi_label = bool(getattr(self.classifier, "multi_label", False))
        return log_answers(probabilities.float().cpu().numpy(), multi_label=multi_label, probed=self.answer == PROBED)

    def _run_classifier(self, frames: torch.Tensor, positions: torch.Tensor) -> Any:
        """Chosen frames [B, N, 3, H, W] and their positions [B, N] -> probabilities [B, C]."""
        assert self.classifier is not None
        if self.engine is not None:
            return self.engine.classify(frames, positions)
        return self._int8(frames) if self._precision == INT8 else self.classifier.clip_probs(frames, positions)

    @cached_property
    def _int8(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return int8_classifier(self.classifier, "onnxruntime")

    def _positions(self, video: Selection | CandidateFrames) -> np.ndarray:
        """Return for each frame the fraction, 0..1, of the video or of start..end that has passed."""
        return positions_of(video.pts_seconds, *video.metadata.span(self.options.start, self.options.end))

    def _predictions(self, selections: Sequence[Selection], outputs: Any, begin: float) -> list[Prediction]:
        """Return the predictions by probabilities [B, C], which a call that began then gave for these videos."""
        assert self.classifier is not None
        array = outputs if isinstance(outputs, np.ndarray) else outputs.float().cpu().numpy()
        probabilities = array.astype(np.float32, copy=False)
        seconds = (time.perf_counter() - begin) / len(selections)
        predictions = []
        for selection, row in zip(selections, probabilities, strict=False):
            order = np.argsort(-row, kind="stable")[: self._top]
            top = tuple((str(self.classifier.class_names[index]), float(row[index])) for index in order)
            kept = replace(selection, known=None, frames=selection.frames if self._keep_frames else None)
            selecting = selection.timing["total"]
            timing = {"select": selecting, "classify": seconds, "total": selecting + seconds}
            predictions.append(Prediction(selection.video, *top[0], top, row, kept, timing, self.answer))
        return predictions


class _FrameAnswers:
    """The classifier's answers for single frames of one selection, each distinct frame once."""

    def __init__(self, selection: Selection, logits: np.ndarray | None = None) -> None:
        assert selection.known is not None, "a policy whose answer is not the mean says what it knows"
        self.selection = selection
        self.evidence, self.positions = selection.known
        self._seen = np.zeros(self.evidence.relevance.shape, dtype=bool)  # [1, D]
        self._logits: np.ndarray | None = None  # [1, D, C]
        scores = np.zeros(len(selection)) if selection.scores is None else selection.scores
        distinct = np.unique(self.positions, return_index=True)[1]  # in the selection
        self._order = distinct[np.argsort(-scores[distinct], kind="stable")].tolist()
        self._asked: list[int] = []
        self.beliefs: list[float] = []  # in the most probable class, after each frame
        if logits is not None:
            self._set(np.arange(len(selection)), logits)

    def _set(self, frames: Any, logits: np.ndarray) -> None:
        """Note the logits [F, C] of some frames of the selection."""
        if self._logits is None:
            self._logits = np.zeros((*self._seen.shape, logits.shape[1]))
        self._logits[0, self.positions[frames]] = logits
        self._seen[0, self.positions[frames]] = True

    def combined(self, policy: Policy) -> np.ndarray:
        """Return the answer [C] from what was seen."""
        assert self._logits is not None
        answer: np.ndarray = policy.combined(self.evidence, self._logits, self._seen)[0]
        return answer

    # ---- one frame after another

    def next(self) -> int:
        """Return the frame of the selection that is asked for next."""
        return int(self._order[len(self._asked)])

    def add(self, logits: np.ndarray, policy: Policy) -> None:
        """Note the classifier's logits [C] for the next frame."""
        self._asked.append(self.next())
        self._set(self._asked[-1:], logits[None])
        self.belief = self.combined(policy)
        self.beliefs.append(round(float(self.belief.max()), 6))

    def done(self, auto: Auto, sure: float) -> bool:
        enough = len(self._asked) >= auto.min and float(self.belief.max()) >= sure
        return enough or len(self._asked) == len(self._order)

    def selection_of_seen(self) -> Selection:
        """Return the selection with the frames that the classifier saw, in time order."""
        frames, own = np.array(sorted(self._asked)), self.selection
        parts = {name: getattr(own, name)[frames] for name in ("frame_indices", "pts_seconds", "frames")}
        return replace(own, scores=None if own.scores is None else own.scores[frames], **parts)


class Pipeline:
    """Classifies videos from a few frames of each.

    Args:
        sampler: what chooses the frames: a sampler, the folder of a saved one, or a policy such as "uniform".
        classifier: a classifier, the folder of a saved one, or the name of one.
        num_candidates: T, candidate frames of each video.
        num_frames: N, frames that the classifier sees; 6 if not given, with policy "all" all candidates. "auto" or
            `so.Auto()`: the sampler decides, video by video, as in `select`, with auto_min, auto_max, auto_tolerance.
        candidates: "auto", "exact", "keyframe" or "snap", as in `select`.
        size: short side of the frames, never enlarged; None takes 256, or more where sampler or classifier take more.
            Both resize them to their own input.
        batch_size: videos that share one call of the classifier, as far as their frames are equally large.
        device: where both run. Without it objects stay where they are, and what is loaded goes to the GPU if there is
            one.
        precision: of the networks: "float32", "bfloat16" or "float16". None leaves the classifier as it is; where a
            sampler chooses, it takes what suits the device. "int8" is for a classifier that `quantize_classifier`
            was given, on a CPU; the sampler stays in float32.
        top: how many classes a prediction lists.
        workers: videos of a list that are decoded at a time; None takes one a core. Many videos are decoded in
            processes of their own, few in threads; 0 decodes one after the other, in this process.
        keep_frames: keep the pixels in each `prediction.selection`.
        answer: how the classifier's answers for the chosen frames become one: "mean", as it pools them; "weighted" by
            the sampler's relevance; "fused" with what the sampler's class head says about the other frames; or
            "probed", which adds what a linear layer of the sampler makes of the classifier's features. None takes what
            was best on dev in the sampler's training, and the mean where the classifier sees whole clips.
        auto_sure: with num_frames="auto" and answer "fused" or "probed" the classifier gets one frame after another
            until the most probable class has this probability; None takes the value that training found for
            auto_tolerance.
        classifier_options: arguments of `create_classifier` where `classifier` is a name: weights, input_size, ...
        options: other arguments of `select`: grid, start, end, seed, on_short, decoder, limits, ...

    Examples:
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_video
        >>> clf = so.create_classifier("timm:test_resnet", class_names=["ant", "bee"], input_size=32)
        >>> pipe = so.Pipeline("uniform", clf, num_candidates=10, num_frames=4)  # or the folders of both
        >>> prediction = pipe(numbered_video(num_frames=60))
        >>> prediction.label in clf.class_names, prediction.selection.frame_indices.tolist()
        (True, [9, 21, 39, 51])
    """

    def __init__(
        self,
        sampler: Any,
        classifier: Any,
        *,
        num_candidates: int = DEFAULT_NUM_CANDIDATES,
        num_frames: int | str | Auto | None = None,
        candidates: str | None = None,
        size: int | None = None,
        batch_size: int = 8,
        device: Any = None,
        precision: str | None = None,
        top: int = 5,
        workers: int | None = None,
        keep_frames: bool = False,
        answer: str | None = None,
        auto_sure: float | None = None,
        classifier_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.batch_size = check_int("batch_size", batch_size)
        self.top = check_int("top", top)
        self.workers = None if workers is None else check_count("workers", workers, "MAX_THREADS", at_least=0)
        self.num_candidates = check_count("num_candidates", num_candidates, "MAX_CANDIDATES")
        if size is not None:
            check_int("size", size)
        self.policy = _answering(get_policy(sampler, device=device), answer)
        if num_frames is None and self.policy.name != "all":
            num_frames = min(DEFAULT_NUM_FRAMES, num_candidates)
        allowed = [each.name for each in fields(SelectOptions) if each.name not in _SET_HERE]
        for name in options:
            if name not in allowed:
                raise InvalidArgument(
                    f"a pipeline has no option {name!r}; besides its own it takes: {', '.join(allowed)}"
                )
        bounds = [options.get(f"auto_{name}") for name in ("min", "max", "tolerance")]
        auto = auto_of(num_frames, bounds[0], bounds[1], bounds[2], auto_sure)
        # Wrong numbers are refused before a large network is loaded.
        self.options = SelectOptions(
            policy=self.policy,
            num_frames=replace(num_frames, sure=None) if isinstance(num_frames, Auto) else num_frames,
            num_candidates=num_candidates,
            candidates=candidates,
            size=size,
            **options,
        )
        self.classifier = _classifier(classifier, device, precision, classifier_options)
        source = AnswerSource(
            getattr(self.classifier, "pooling", None) is not None,
            self.classifier.class_names,
            bool(getattr(self.classifier, "multi_label", False)),
            self.classifier.name,
            *_probed_source(self.policy, self.classifier, precision),
        )
        self.policy = with_answer(self.policy, None, source, log.warning)
        frame_classifier = self.policy.frame_classifier(self.classifier)
        # What another machine needs to build the same pipeline.
        self.arguments = {"sampler": sampler, "classifier": classifier, "classifier_options": classifier_options}
        self.arguments |= {"batch_size": batch_size, "top": top, "precision": precision, "answer": answer}
        self.arguments |= {name: getattr(self.options, name) for name in ("num_candidates", "candidates", *allowed)}
        self.arguments |= {"num_frames": num_frames, "auto_sure": auto_sure}
        # Where the classifier is asked frame by frame, the policy only puts the best frames first.
        self._asking, self._sure = auto, None if auto is None else self.policy.sure_enough(auto)
        self.options = replace(self.options, policy=self.policy)
        if self._asking is not None and self._sure is not None:
            number = self.options.resolved_frames
            self.options = replace(self.options, num_frames=number, auto_min=None, auto_max=None, auto_tolerance=None)
        # Classifiers themselves have no int8; BatchClassifier does.
        self.precision = INT8 if precision == INT8 else getattr(self.classifier, "precision", None)
        # Short side of the frames that are decoded, where the video is not smaller.
        self.size = size or max(_MIN_SIZE, min_short_side(self.classifier.preprocessing), self.policy.min_size or 0)
        self.options = replace(self.options, size=self.size)
        length = getattr(self.classifier, "length", None)
        if length is not None:
            length.fitted(self.num_frames, self.classifier.name)
        self.arguments["size"] = self.size
        if precision is None and getattr(self.classifier, "precision", "float32") != "float32":
            precision = self.classifier.precision  # type: ignore[attr-defined]  # the object was made with it
        network = self.policy.sampler if type(self.policy) is LearnedPolicy else None
        # Networks on different devices stay there and are called one after the other.
        apart = getattr(self.classifier, "device", None) not in (None, getattr(network, "device", None))
        in_torch = isinstance(network, torch.nn.Module) and all(hasattr(network, name) for name in _OF_SAMPLERS)
        self.batch_classifier = BatchClassifier(
            self.options,
            frame_classifier,
            sampler=network if in_torch and not apart else None,
            precision=precision,
            batch_size=self.batch_size,
            top=self.top,
            keep_frames=check_bool("keep_frames", keep_frames),
            asking=None if self._sure is None else self._asking,
            sure=self._sure or 1.0,
        )

    @property
    def answer(self) -> str:
        """How the classifier's answers for the chosen frames become one: "mean", "weighted", "fused" or "probed"."""
        return self.policy.answer

    @property
    def num_frames(self) -> int:
        """N; for num_frames="auto" its maximum."""
        num_frames = self.options.resolved_frames
        assert num_frames is not None, "a pipeline has no fps, so there is a number"
        return num_frames

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.policy.name!r}, {self.classifier.name!r}, {self.num_frames} of {self.num_candidates} "
            f"{self.options.mode} candidates, short side {self.size})"
        )

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the rows of two runs to belong together."""
        from sosampler.classifiers.factory import classifier_identity

        identity = classifier_identity(self.classifier, self.precision)
        values = {**self.options.identity(), "classifier": identity, "precision": self.precision, "top": self.top}
        if self.answer != MEAN:
            values["answer"] = self.answer
        if self._asking is not None and self._sure is not None:
            values |= {**self._asking.to_dict(), "sure": self._sure}
        return values

    def warm_up(self) -> Pipeline:
        """Make the networks ready for speed now; otherwise that is done when there is more than a video or two.

        Only where a sampler chooses. The networks are copied as they are: later training has no effect.
        """
        self.batch_classifier.warm_up()
        return self

    def __call__(self, videos: Any, *, on_error: str | None = None) -> Any:
        """Return a `Prediction` for a video; for a list of videos a list in the same order.

        A video is whatever `select` takes. One that cannot be read raises `VideoError`; in a list that error is
        returned in its position and the others continue. `on_error` "raise" or "return" sets either behaviour.
        """
        if isinstance(videos, (list, tuple)):
            return list(self.stream(videos, on_error=on_error or "return"))
        one_of("on_error", on_error or "raise", ON_ERROR)
        task = self.tasks(self.options.threads)(videos)
        (result,) = self.batch_classifier([Decoded(task.run())])
        if isinstance(result, SosamplerError) and on_error != "return":
            raise result
        return result

    def stream(self, videos: Iterable[Any], *, on_error: str = "return") -> Iterator[Result]:
        """Yield results in the order of the videos, as they come: memory does not grow with their number.

        An error of one video, even one that kills the process decoding it, does not stop the others.
        """
        one_of("on_error", on_error, ON_ERROR)
        return self._stream(videos, on_error)

    def _stream(self, videos: Iterable[Any], on_error: str) -> Iterator[Result]:
        # One decoding thread a video and many videos at a time keeps every core busy and wastes nothing at seeks.
        tasks = map(self.tasks(self.options.threads or 1), videos)
        with closing(decoded_batches(tasks, workers=self.workers, batch_size=self.batch_size)) as batches:
            for batch in batches:
                for result in self.batch_classifier(batch):
                    assert not isinstance(result, Selection), "there is a classifier"
                    if isinstance(result, SosamplerError) and on_error == "raise":
                        raise result
                    yield result

    def tasks(self, threads: int | None) -> Callable[[Any], FrameTask]:
        """Return how a video is decoded: policies of the package choose meanwhile, a network gets all candidates."""
        options, otherwise = replace(self.options, threads=threads), None
        if can_travel(self.policy):
            step = DecodeStep(replace(options, policy=self.policy.spec))
        elif not self.policy.needs_frames:
            step = DecodeStep(options)
        else:
            step, otherwise = DecodeStep.of_candidates(options), DecodeStep(options)
        return lambda video: FrameTask(video, step, otherwise)


def _probed_source(policy: Policy, classifier: Any, precision: str | None) -> tuple[str, str]:
    """Return the fingerprint of a classifier that the policy's probe can stand beside, or "" and why it cannot."""
    if policy.answer != PROBED:
        return "", "it needs no probe"
    if not hasattr(classifier, "fingerprint"):
        return "", f"the classifier {classifier.name} has no fingerprint"
    if precision == INT8:
        return "", f"an int8 network of {classifier.name} has no outputs for a probe"
    fingerprint = str(classifier.fingerprint())
    # That of another classifier is refused by the policy, with its own words.
    refusal = probe_refusal(classifier) if fingerprint == policy.probe_of else None
    return (fingerprint, "") if refusal is None else ("", refusal)


def _answering(policy: Policy, answer: str | None) -> Policy:
    """Return the policy with the answer that is asked for, if any; its name may already say one."""
    if answer is None:
        return policy
    if policy.answer_given not in (None, answer):
        raise InvalidArgument(f"answer={answer!r} contradicts {policy.name!r}, which names another; give one of them")
    return policy.answering(answer)


def load_classifier(name: Any, *, device: Any = None, **settings: Any) -> VideoClassifier:
    """`create_classifier` on the GPU if there is one; a network without trained classes is refused."""
    from sosampler.classifiers.factory import create_classifier

    classifier = create_classifier(name, device=resolve_device(device), **settings)
    if classifier.fresh_head:
        raise InvalidArgument(
            f"classifier {str(name)!r} has a random last layer, so its answers mean nothing; give its weights, or the "
            "folder of a classifier that was trained"
        )
    return classifier


def _classifier(given: Any, device: Any, precision: str | None, options: dict[str, Any] | None) -> VideoClassifier:
    if precision is not None:
        one_of("precision", precision, (*PRECISIONS, INT8))
    float_precision = None if precision == INT8 else precision
    if isinstance(given, (str, os.PathLike)):
        return load_classifier(given, device=device, precision=float_precision, **(options or {}))
    for member in ("clip_probs", "class_names", "name", "preprocessing"):
        if not hasattr(given, member):
            raise InvalidArgument(
                f"a {type(given).__name__} has no {member}; give a classifier of so.create_classifier or "
                "so.wrap_classifier, or the name or folder of one"
            )
    if device is not None and hasattr(given, "to"):
        given = given.to(check_device(device))
    if float_precision is not None:
        given.precision = float_precision
    classifier: VideoClassifier = given
    return classifier
