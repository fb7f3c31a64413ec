"""From a video file to what it shows: candidates, the frames a policy chooses, and the classifier's answer."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from sosampler._select import select_with
from sosampler.checks import one_of, true_or_false, whole_number
from sosampler.classifiers.base import PRECISIONS, VideoClassifier
from sosampler.classifiers.devices import check_device
from sosampler.data.bank_format import positions_of
from sosampler.errors import InvalidArgument, SosamplerError, VideoError
from sosampler.options import SelectOptions
from sosampler.policies import get_policy
from sosampler.samplers.policy import least_size
from sosampler.selection import Selection
from sosampler.video.source import source_name

ON_ERROR = ("raise", "return")
# Short side of the frames that sampler and classifier look at, unless one of them takes larger ones: what banks hold.
_LEAST_SIZE = 256
_MAX_WORKERS = 32
# Arguments of `select` that a pipeline sets itself.
_OWN = ("policy", "num_frames", "num_candidates", "candidates", "size", "decode")


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a classifier says about the chosen frames of one video."""

    video: str
    label: str  # the most probable class
    probability: float
    top: tuple[tuple[str, float], ...]  # the most probable classes, best first
    probabilities: np.ndarray  # [C] float32, in the order of the classifier's class names
    selection: Selection
    timing: dict[str, float] = field(default_factory=dict)  # seconds; of a shared call this video's part

    def __repr__(self) -> str:
        frames = self.selection.frame_indices.tolist()
        return f"Prediction({self.video!r}, {self.label!r}, probability={self.probability:.4f}, frame_indices={frames})"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels and the classes that are not among the top, ready for JSON."""
        return {
            "video": self.video,
            "label": self.label,
            "probability": self.probability,
            "top": [{"label": label, "probability": probability} for label, probability in self.top],
            "selection": self.selection.to_dict(),
            "timing": dict(self.timing),
        }


Result = Prediction | SosamplerError


class Pipeline:
    """Names what videos show, from a few frames of each.

    Args:
        sampler: who chooses: a sampler, the folder of a saved one, or a policy such as "uniform".
        classifier: a classifier, the folder of a saved one, or the name of one.
        num_candidates: T, frames that are offered of each video.
        num_frames: N, frames that the classifier sees; 6 if not given, with policy "all" all candidates.
        candidates: "exact", "keyframe" or "snap", as in `select`.
        size: short side of the frames, never enlarged; None takes 256, or what sampler or classifier take where that
            is more. Both bring them to their own input from there.
        batch_size: videos that share one call of the classifier, as far as their frames are equally large.
        device: where both run. Without it what is given as an object stays where it is, and what is loaded goes to
            the GPU if there is one.
        precision: of the classifier: "float32", "bfloat16" or "float16".
        top: how many classes a prediction lists.
        workers: videos of a list that are decoded at a time; None takes one a core.
        keep_frames: keep the pixels in each `prediction.selection`.
        options: what else `select` takes: grid, start, end, seed, on_short, decoder, limits, ...

    Examples:
        >>> import sosampler as so
        >>> from sosampler.synthetic import numbered_video
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
        num_candidates: int = 10,
        num_frames: int | None = None,
        candidates: str | None = None,
        size: int | None = None,
        batch_size: int = 8,
        device: Any = None,
        precision: str | None = None,
        top: int = 5,
        workers: int | None = None,
        keep_frames: bool = False,
        **options: Any,
    ) -> None:
        self.batch_size = whole_number("batch_size", batch_size)
        self.top = whole_number("top", top)
        self.workers = None if workers is None else whole_number("workers", workers)
        self.keep_frames = true_or_false("keep_frames", keep_frames)
        whole_number("num_candidates", num_candidates)
        if size is not None:
            whole_number("size", size)
        self.policy = get_policy(sampler, device=device)
        if num_frames is None and self.policy.name != "all":
            num_frames = min(6, num_candidates)
        _check_options(options)
        # Wrong numbers are refused before a large network is loaded.
        self._options = SelectOptions(
            policy=self.policy,
            num_frames=num_frames,
            num_candidates=num_candidates,
            candidates=candidates,
            size=size,
            **options,
        )
        self.classifier = _classifier(classifier, device, precision)
        if size is None:
            needed = max(_LEAST_SIZE, least_size(self.classifier.preprocessing), self.policy.least_size or 0)
            self._options = replace(self._options, size=needed)
        length = getattr(self.classifier, "length", None)
        if length is not None:
            length.fitted(self.num_frames, self.classifier.name)

    @property
    def options(self) -> SelectOptions:
        """How frames are chosen."""
        return self._options

    @property
    def num_frames(self) -> int:
        wanted = self._options.num_wanted
        assert wanted is not None, "a pipeline takes no rate, so there is a number"
        return wanted

    @property
    def num_candidates(self) -> int:
        assert self._options.num_candidates is not None
        return self._options.num_candidates

    @property
    def size(self) -> int:
        """Short side of the frames that are decoded, where the video is not smaller."""
        assert isinstance(self._options.size, int)
        return self._options.size

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.policy.name!r}, {self.classifier.name!r}, {self.num_frames} of {self.num_candidates} "
            f"{self._options.mode} candidates, short side {self.size})"
        )

    def __call__(self, videos: Any, *, on_error: str | None = None) -> Any:
        """A `Prediction` for a video; for a list of videos a list in the same order.

        A video is whatever `select` takes. One that cannot be read raises `VideoError`; in a list its place holds that
        error and the others go on. `on_error` "raise" or "return" asks for one or the other in either case.
        """
        if isinstance(videos, (list, tuple)):
            return list(self.stream(videos, on_error=on_error or "return"))
        one_of("on_error", on_error or "raise", ON_ERROR)
        result = self._select(videos, self._options)
        if isinstance(result, SosamplerError):
            if on_error == "return":
                return result
            raise result
        return self._classified([result])[0]

    def stream(self, videos: Iterable[Any], *, on_error: str = "return") -> Iterator[Result]:
        """Results in the order of the videos, as they come: memory does not grow with their number."""
        one_of("on_error", on_error, ON_ERROR)
        return self._stream(videos, on_error)

    def _stream(self, videos: Iterable[Any], on_error: str) -> Iterator[Result]:
        with closing(self._selections(videos)) as selections:
            while some := list(islice(selections, self.batch_size)):
                good = iter(self._classified([one for one in some if isinstance(one, Selection)]))
                for one in some:
                    if isinstance(one, Selection):
                        yield next(good)
                    elif on_error == "return":
                        yield one
                    else:
                        raise one

    def _selections(self, videos: Iterable[Any]) -> Generator[Selection | SosamplerError, None, None]:
        """Chosen frames in the order of the videos, decoded side by side; so many ahead that the classifier is fed."""
        workers = self.workers or min(os.cpu_count() or 1, _MAX_WORKERS)
        # One decoding thread a video and many videos at a time keeps every core busy and wastes nothing at seeks.
        options = replace(self._options, threads=self._options.threads or 1)
        pending: deque[Future[Selection | SosamplerError]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="sosampler-pipeline") as pool:
            try:
                for video in videos:
                    pending.append(pool.submit(self._select, video, options))
                    if len(pending) > self.batch_size + workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _select(self, video: Any, options: SelectOptions) -> Selection | SosamplerError:
        """The chosen frames, or what is wrong with this video."""
        try:
            return select_with(video, options, no_larger=True)
        except (VideoError, InvalidArgument) as error:
            name = source_name(video)
            # An argument can be at fault for one video only: its length, its range. Then the text lacks the name.
            return error if name in str(error) else _because(error, type(error)(f"{name}: {error}"))
        except OSError as error:
            told = f"{source_name(video)}: cannot be read ({error.strerror or error}); check its permissions"
            return _because(error, VideoError(told))

    def _classified(self, selections: Sequence[Selection]) -> list[Prediction]:
        """Predictions in the order of the selections; those with equally large frames share a call."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, selection in enumerate(selections):
            assert selection.frames is not None, "a pipeline decodes"
            groups.setdefault(selection.frames.shape, []).append(place)
        found: dict[int, Prediction] = {}
        for places in groups.values():
            begin = time.perf_counter()
            some = [selections[place] for place in places]
            frames = torch.stack([selection.to_torch() for selection in some])  # [B, N, 3, H, W]
            positions = torch.from_numpy(np.stack([self._positions(selection) for selection in some]))  # [B, N]
            probabilities = self.classifier.clip_probs(frames, positions).float().cpu().numpy()
            seconds = (time.perf_counter() - begin) / len(places)
            for place, row in zip(places, probabilities, strict=True):
                found[place] = self._prediction(selections[place], row, seconds)
        return [found[place] for place in range(len(selections))]

    def _positions(self, selection: Selection) -> np.ndarray:
        """[N] in 0..1: the share of the video, or of the part that was asked for, that is over at each frame."""
        metadata, start, end = selection.metadata, self._options.start, self._options.end
        begins = metadata.start_seconds if start is None else max(start, metadata.start_seconds)
        ends = metadata.start_seconds + metadata.duration
        return positions_of(selection.pts_seconds, begins, (ends if end is None else min(end, ends)) - begins)

    def _prediction(self, selection: Selection, probabilities: np.ndarray, seconds: float) -> Prediction:
        order = np.argsort(-probabilities, kind="stable")[: self.top]
        top = tuple((str(self.classifier.class_names[place]), float(probabilities[place])) for place in order)
        choosing = selection.timing["total"]
        return Prediction(
            video=selection.video,
            label=top[0][0],
            probability=top[0][1],
            top=top,
            probabilities=probabilities,
            selection=selection if self.keep_frames else replace(selection, frames=None),
            timing={"select": choosing, "classify": seconds, "total": choosing + seconds},
        )


def _because(cause: Exception, error: SosamplerError) -> SosamplerError:
    error.__cause__ = cause
    return error


def _check_options(options: dict[str, Any]) -> None:
    # Without a rate N is the same for all videos, so that they can share a call.
    allowed = [each.name for each in fields(SelectOptions) if each.name not in (*_OWN, "fps")]
    for name in options:
        if name not in allowed:
            raise InvalidArgument(f"a pipeline has no option {name!r}; besides its own it takes: {', '.join(allowed)}")


def load_classifier(name: Any, *, device: Any = None, **settings: Any) -> VideoClassifier:
    """`create_classifier` on the GPU if there is one; a network that has not learned its classes is refused."""
    from sosampler.classifiers.registry import create_classifier

    where = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    classifier = create_classifier(name, device=where, **settings)
    if classifier.fresh_head:
        raise InvalidArgument(
            f"classifier {str(name)!r} has a random last layer, so its answers mean nothing; give its weights, or the "
            "folder of a classifier that was trained"
        )
    return classifier


def _classifier(given: Any, device: Any, precision: str | None) -> VideoClassifier:
    if precision is not None:
        one_of("precision", precision, PRECISIONS)
    if isinstance(given, (str, os.PathLike)):
        return load_classifier(given, device=device, precision=precision)
    for member in ("clip_probs", "class_names", "name", "preprocessing"):
        if not hasattr(given, member):
            raise InvalidArgument(
                f"a {type(given).__name__} has no {member}; give a classifier of so.create_classifier or "
                "so.wrap_classifier, or the name or folder of one"
            )
    if device is not None and hasattr(given, "to"):
        given = given.to(check_device(device))
    if precision is not None:
        given.precision = precision
    classifier: VideoClassifier = given
    return classifier
