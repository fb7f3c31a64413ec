"""From a video file to what it shows: candidates, the frames a policy chooses, and the classifier's answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosampler._util.devices import check_device
from sosampler._util.validation import one_of, true_or_false, whole_number
from sosampler.classifiers.base import INT8, PRECISIONS, VideoClassifier
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.inference.batch import Answer, Looking, decoded_batches
from sosampler.inference.decode import FramePool, FrameTask
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import Selection
from sosampler.policies.auto import Auto
from sosampler.policies.base import Policy
from sosampler.policies.learned import ONNX, least_size, policy_of
from sosampler.policies.registry import get_policy, is_policy_name
from sosampler.samplers.registry import load_sampler

ON_ERROR = ("raise", "return")
# Short side of the frames that sampler and classifier look at, unless one of them takes larger ones: what banks hold.
_LEAST_SIZE = 256
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
        num_frames: N, frames that the classifier sees; 6 if not given, with policy "all" all candidates. "auto" leaves
            it to the sampler, video by video, as in `select`; auto_min, auto_max and auto_tolerance go with it.
        candidates: "exact", "keyframe" or "snap", as in `select`.
        size: short side of the frames, never enlarged; None takes 256, or what sampler or classifier take where that
            is more. Both bring them to their own input from there.
        batch_size: videos that share one call of the classifier, as far as their frames are equally large.
        device: where both run. Without it what is given as an object stays where it is, and what is loaded goes to
            the GPU if there is one.
        precision: of the networks: "float32", "bfloat16" or "float16". None leaves the classifier as it is; where a
            sampler chooses, it takes what the device is good at. "int8" is for a classifier that `quantize_classifier`
            was given, on a CPU; the sampler stays in float32.
        top: how many classes a prediction lists.
        workers: videos of a list that are decoded at a time; None takes one a core. Many videos are decoded in
            processes of their own, few in threads; 0 decodes one after the other, in this process.
        keep_frames: keep the pixels in each `prediction.selection`.
        options: what else `select` takes: grid, start, end, seed, on_short, decoder, limits, ...

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
        num_candidates: int = 10,
        num_frames: int | str | Auto | None = None,
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
        self.workers = None if workers is None else whole_number("workers", workers, at_least=0)
        self.keep_frames = true_or_false("keep_frames", keep_frames)
        whole_number("num_candidates", num_candidates)
        if size is not None:
            whole_number("size", size)
        self.policy, network = _policy(sampler, device)
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
        # Classifiers themselves know no int8; what looks at videos for the pipeline does.
        self.precision = INT8 if precision == INT8 else getattr(self.classifier, "precision", None)
        if size is None:
            needed = max(_LEAST_SIZE, least_size(self.classifier.preprocessing), self.policy.min_size or 0)
            self._options = replace(self._options, size=needed)
        length = getattr(self.classifier, "length", None)
        if length is not None:
            length.fitted(self.num_frames, self.classifier.name)
        if precision is None and getattr(self.classifier, "precision", "float32") != "float32":
            precision = self.classifier.precision  # type: ignore[attr-defined]  # somebody asked for it before
        # Networks that were put in different places stay there, and are asked one after the other.
        apart = getattr(self.classifier, "device", None) not in (None, getattr(network, "device", None))
        self._looking = Looking(
            self.policy,
            None if apart else network,
            self.classifier,
            self._options,
            precision=precision,
            batch_size=self.batch_size,
        )
        self._by_name = _name_of(sampler, self.policy)

    @property
    def options(self) -> SelectOptions:
        """How frames are chosen."""
        return self._options

    @property
    def num_frames(self) -> int:
        """N; of num_frames="auto" the most that it may be."""
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

    def warm_up(self) -> Pipeline:
        """Make the networks ready for speed now; otherwise that is done when there is more than a video or two.

        Only where a sampler chooses. The networks are copied as they are then: what is learned later is not seen.
        """
        self._looking.warm_up()
        return self

    def __call__(self, videos: Any, *, on_error: str | None = None) -> Any:
        """A `Prediction` for a video; for a list of videos a list in the same order.

        A video is whatever `select` takes. One that cannot be read raises `VideoError`; in a list its place holds that
        error and the others go on. `on_error` "raise" or "return" asks for one or the other in either case.
        """
        if isinstance(videos, (list, tuple)):
            return list(self.stream(videos, on_error=on_error or "return"))
        one_of("on_error", on_error or "raise", ON_ERROR)
        with (
            FramePool(1, processes=False, ahead=1, held=1) as pool,
            closing(pool.decoded([self._task(videos, self._options.threads)])) as decoded,
        ):
            (answer,) = self._looking.at(list(decoded))
        if isinstance(answer, Answer):
            return self._prediction(answer)
        if on_error == "return":
            return answer
        raise answer

    def stream(self, videos: Iterable[Any], *, on_error: str = "return") -> Iterator[Result]:
        """Results in the order of the videos, as they come: memory does not grow with their number.

        Whatever one video does, be it that the process decoding it dies, the others go on.
        """
        one_of("on_error", on_error, ON_ERROR)
        return self._stream(videos, on_error)

    def _stream(self, videos: Iterable[Any], on_error: str) -> Iterator[Result]:
        # One decoding thread a video and many videos at a time keeps every core busy and wastes nothing at seeks.
        threads = self._options.threads or 1
        batches = decoded_batches(
            videos, lambda video: self._task(video, threads), workers=self.workers, batch_size=self.batch_size
        )
        with closing(batches):
            for batch in batches:
                for answer in self._looking.at(batch):
                    if isinstance(answer, Answer):
                        yield self._prediction(answer)
                    elif on_error == "return":
                        yield answer
                    else:
                        raise answer

    def _task(self, video: Any, threads: int | None) -> FrameTask:
        """What is to be decoded of a video: what a rule chooses, or all candidates for a network that looks at them."""
        options = replace(self._options, threads=threads)
        if self._by_name is not None:
            return FrameTask(video, replace(options, policy=self._by_name), choose=True)
        if not self.policy.needs_frames:
            return FrameTask(video, options, choose=True)
        offered = options.offering_all()
        least = self.policy.min_size or 1
        return FrameTask(video, offered, choose=False, least_size=least, otherwise=options)

    def _prediction(self, answer: Answer) -> Prediction:
        selection, probabilities = answer.selection, answer.probabilities
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
            timing={"select": choosing, "classify": answer.seconds, "total": choosing + answer.seconds},
        )


def _policy(given: Any, device: Any) -> tuple[Policy, Any]:
    """Who chooses; and the network of torch, where it is a sampler whose N best are taken."""
    if isinstance(given, torch.nn.Module) and hasattr(given, "score") and hasattr(given, "preprocessing"):
        return policy_of(given, device=device), given
    if not _is_sampler_folder(given) or device == ONNX:
        return get_policy(given, device=device), None
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    sampler = load_sampler(Path(given)).to(check_device(where))
    return policy_of(sampler, name=os.fspath(given)), sampler


def _is_sampler_folder(given: Any) -> bool:
    """Whether it names the folder of a sampler with weights for torch, and no rule."""
    if isinstance(given, str) and is_policy_name(given):
        return False
    files = ("config.json", "model.safetensors")
    return isinstance(given, (str, os.PathLike)) and all((Path(given) / file).is_file() for file in files)


def _name_of(given: Any, policy: Policy) -> str | None:
    """By what name another process finds the same policy; None where it cannot."""
    return None if policy.has_weights else policy.spec


def _check_options(options: dict[str, Any]) -> None:
    # Without a rate N is the same for all videos, so that they can share a call.
    allowed = [each.name for each in fields(SelectOptions) if each.name not in (*_OWN, "fps")]
    for name in options:
        if name not in allowed:
            raise InvalidArgument(f"a pipeline has no option {name!r}; besides its own it takes: {', '.join(allowed)}")


def load_classifier(name: Any, *, device: Any = None, **settings: Any) -> VideoClassifier:
    """`create_classifier` on the GPU if there is one; a network that has not learned its classes is refused."""
    from sosampler.classifiers.factory import create_classifier

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
        one_of("precision", precision, (*PRECISIONS, INT8))
    own = None if precision == INT8 else precision
    if isinstance(given, (str, os.PathLike)):
        return load_classifier(given, device=device, precision=own)
    for member in ("clip_probs", "class_names", "name", "preprocessing"):
        if not hasattr(given, member):
            raise InvalidArgument(
                f"a {type(given).__name__} has no {member}; give a classifier of so.create_classifier or "
                "so.wrap_classifier, or the name or folder of one"
            )
    if device is not None and hasattr(given, "to"):
        given = given.to(check_device(device))
    if own is not None:
        given.precision = own
    classifier: VideoClassifier = given
    return classifier
