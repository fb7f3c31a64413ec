"""Asking a network for the features of stored frames."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from sosampler.data.asking import Asker, Tables, blank_frame, kept_features
from sosampler.data.bank_format import FEATURES_KIND, VERSION, AnswersFolder, BankFolder, features_schema
from sosampler.data.feature_networks import FeatureNetwork


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
