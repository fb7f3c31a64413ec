"""The step of a few decoded videos, for workers with networks; the steps before it are in `sosampler.steps`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sosampler.classifiers.base import INT8
from sosampler.errors import SosamplerError
from sosampler.inference.batch import Answer, Looking
from sosampler.inference.decode import Decoded, OfferedVideo
from sosampler.inference.options import SelectOptions
from sosampler.inference.pipeline import Prediction, load_classifier
from sosampler.inference.selection import Selection
from sosampler.inference.steps import Failed, Row
from sosampler.policies.base import Policy
from sosampler.policies.learned import policy_of
from sosampler.policies.registry import get_policy
from sosampler.samplers.registry import load_sampler
from sosampler.video.reader import Frames


@dataclass(frozen=True)
class NetworkStep:
    """Decoded videos become rows: a sampler chooses if there is one, a classifier answers if there is one."""

    options: SelectOptions  # as the frames were offered
    sampler: str | None = None  # folder of a saved one, perhaps with +aks, +its or +nms behind it
    classifier: str | None = None  # folder or name
    settings: dict[str, Any] = field(default_factory=dict)  # of the classifier: weights, input_size, ...
    precision: str | None = None
    device: str | None = None  # None: the GPU if the worker has one
    top: int = 5  # classes that a prediction lists

    @cached_property
    def looking(self) -> Looking:
        """The networks, loaded once."""
        policy, sampler = self._policy()
        return Looking(policy, sampler, self._network(), self.options, precision=self.precision)

    def _policy(self) -> tuple[Policy, Any]:
        """Who chooses; and the network, where its N best are taken for a classifier."""
        name = self.options.rule.name  # as the user called it, wherever the folder lies on this machine
        if self.sampler is None:
            return self.options.rule, None
        if self.classifier is None or not os.path.isdir(self.sampler):
            return get_policy(self.sampler, device=self.device).renamed(name), None
        sampler = load_sampler(Path(self.sampler))
        return policy_of(
            sampler, name=name, device=self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        ), sampler

    def _network(self) -> Any:
        if self.classifier is None:
            return _NobodyAsked()
        classifier: Any = load_classifier(self.classifier, device=self.device, **self.settings)
        if self.precision not in (None, INT8):
            classifier.precision = self.precision
        return classifier

    def __getstate__(self) -> dict[str, Any]:
        """Without the networks, which are loaded where they are used."""
        return {name: value for name, value in self.__dict__.items() if name != "looking"}

    def __call__(self, videos: Sequence[Selection | OfferedVideo | Failed]) -> list[Row]:
        """One row a video, in their order."""
        good = [_Arrived(video) for video in videos if not isinstance(video, Failed)]
        answers = iter(self.looking.at(good))
        return [video.to_dict() if isinstance(video, Failed) else self._row(video, next(answers)) for video in videos]

    def _row(self, video: Selection | OfferedVideo, answer: Answer | SosamplerError) -> Row:
        if isinstance(answer, SosamplerError):
            return Failed(video.video, str(answer)).to_dict()
        selection = replace(answer.selection, frames=None)
        if self.classifier is None:
            return selection.to_dict()
        probabilities, names = answer.probabilities, self.looking.classifier.class_names
        order = np.argsort(-probabilities, kind="stable")[: self.top]
        top = tuple((str(names[place]), float(probabilities[place])) for place in order)
        choosing = selection.timing["total"]
        timing = {"select": choosing, "classify": answer.seconds, "total": choosing + answer.seconds}
        return Prediction(video.video, *top[0], top, probabilities, selection, timing).to_dict()


class _Arrived(Decoded):
    """A video that another process decoded: its frames are here."""

    def __init__(self, outcome: Selection | OfferedVideo) -> None:
        assert outcome.frames is not None, "frames travel with the video"
        self.outcome, self._frames = replace(outcome, frames=None), outcome.frames
        self.shape, self.nbytes = outcome.frames.shape, outcome.frames.nbytes

    def take(self, out: Frames | None = None) -> Frames:
        if out is None:
            return self._frames
        out[:] = self._frames
        return out


class _NobodyAsked:
    """In the place of a classifier where only frames are chosen."""

    name, class_names, preprocessing = "none", ("",), None

    def clip_probs(self, frames: Any, positions: Any = None) -> Any:
        return frames.new_zeros((len(frames), 1))
