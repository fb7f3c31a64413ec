"""Networks as sources of features: frames go in, one row of numbers a frame comes out, from any number of threads."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler._util.devices import check_device
from sosampler.bank.annotate import Asker, Tables, blank_frame, kept_features
from sosampler.bank.format import FEATURES_KIND, VERSION, AnswersFolder, BankFolder, features_schema
from sosampler.classifiers.base import Classifier, Penultimate
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.outputs import check_finite
from sosampler.errors import InvalidArgument
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.registry import load_sampler
from sosampler.samplers.sosampler import SOSampler


class FeatureNetwork(ABC):
    """A network that says D numbers about each frame by itself."""

    kind: str  # "classifier" or "sampler"
    name: str  # of the network
    gmacs: float  # giga multiply-adds of one frame

    def __init__(self, network: Any) -> None:
        self.network = network
        self.fingerprint: str = network.fingerprint()

    @property
    def device(self) -> torch.device:
        found: torch.device = self.network.device
        return found

    @property
    def precision(self) -> str:
        """In which it computes."""
        return str(self.network.precision)

    @property
    @abstractmethod
    def net(self) -> nn.Module:
        """Where the work is done."""

    @abstractmethod
    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [F, 3, H, W] -> float32 [F, D]"""


class _ClassifierFeatures(FeatureNetwork):
    """What stands before the class layer of a classifier."""

    kind = "classifier"

    def __init__(self, before: Penultimate) -> None:
        super().__init__(before.classifier)
        self.name, self.gmacs = before.classifier.name, before.classifier.gmacs(1)
        self._before = before

    @property
    def net(self) -> nn.Module:
        found: nn.Module = self.network.net
        return found

    def __call__(self, frames: Tensor) -> Tensor:
        return self._before(frames)


class _SamplerFeatures(FeatureNetwork):
    """The features of a sampler's backbone."""

    kind = "sampler"

    def __init__(self, sampler: SOSampler) -> None:
        if sampler.backbone.reach:
            raise InvalidArgument(
                f"{sampler!r} has a temporal shift, so that its features of a frame depend on which frames are shown "
                "beside it and cannot be kept; give a sampler trained with shift=0"
            )
        super().__init__(sampler)
        self.name, self.gmacs = sampler.backbone.name, sampler.gmacs(1)

    @property
    def net(self) -> nn.Module:
        return self.network.backbone

    def __call__(self, frames: Tensor) -> Tensor:
        # Videos of one candidate each.
        features: Tensor = self.network.look(frames[:, None]).features[:, 0]
        return check_finite(features, self.name)


@contextmanager
def feature_network(network: Any, device: str | None) -> Iterator[FeatureNetwork]:
    """A classifier or a sampler, by itself, by its folder or, for classifiers, by name, ready to be asked."""
    if isinstance(network, (str, os.PathLike)):
        place = os.fspath(network)
        if isinstance(network, os.PathLike) and not Path(place).is_dir():
            raise InvalidArgument(f"{place}: no such folder; give that of a saved classifier or sampler")
        if is_sampler_folder(place):
            network = load_sampler(place, device=device)
        else:
            network = create_classifier(place, device=device)
    elif not isinstance(network, (Classifier, SOSampler)):
        raise InvalidArgument(
            f"a {type(network).__name__} shows no features; give a classifier of create_classifier or wrap_classifier, "
            "a SOSampler, or the folder of either"
        )
    elif device is not None:
        network = network.to(check_device(device))
    if isinstance(network, SOSampler):
        yield _SamplerFeatures(network)
        return
    before = Penultimate(network)
    with before.watching():
        yield _ClassifierFeatures(before)


class FeatureAsker(Asker):
    """A network, and how its features are kept."""

    made = "these features were made"
    remedy = "give the same again, or another name, or delete this folder"
    decisive = ("network", "fingerprint", "width", "precision", "computed_in", "batch")

    def __init__(self, source: FeatureNetwork, *, name: str | None, precision: str, batch: int | None) -> None:
        super().__init__(source.device, batch)
        self._source, self._precision = source, precision
        self.name = source.fingerprint if name is None else name
        self.width = int(source(blank_frame()[0]).shape[-1])

    @property
    def net(self) -> nn.Module:
        return self._source.net

    @property
    def schema(self) -> Any:
        return features_schema(self._precision, self.width)

    @property
    def bytes_a_frame(self) -> int:
        return self.width * (4 if self._precision == "float32" else 2)

    def answers_folder(self, folder: BankFolder) -> AnswersFolder:
        return folder.feature_answers(self.name)

    def about(self) -> dict[str, Any]:
        """features.json"""
        return {
            "kind": FEATURES_KIND,
            "version": VERSION,
            "name": self.name,
            "network": self._source.kind,
            "network_name": self._source.name,
            "fingerprint": self._source.fingerprint,
            "width": self.width,
            "precision": self._precision,
            "computed_in": self._source.precision,
            "batch": self.batch,  # decides the last bits
            "gmacs": self._source.gmacs,
            "preprocessing": self._source.network.preprocessing.to_dict(),
        }

    def _answers(self, frames: Tensor, positions: np.ndarray) -> Tables:
        features = self._source(frames[0])
        return (kept_features(features, self._precision, self._source.name, "give precision='float32'"),)
