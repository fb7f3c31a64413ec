"""Features of a network for every stored frame of a bank, read from disk; needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sosampler.data.bank_answers import BankAnswers, read_answers_head
from sosampler.data.bank_format import FEATURES_KIND, BankFolder, features_schema, matrix_of
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.data.bank import Bank

# What every features.json says.
_KEYS = ("name", "network", "network_name", "fingerprint", "width", "precision", "gmacs")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Features(BankAnswers[np.ndarray]):
    """Features of one network, in the order of the bank's videos: [T, D] of each, a view of the file."""

    def __init__(self, bank: Bank, name: str) -> None:
        about = read_features(bank.folder, name)
        schema = features_schema(about["precision"], about["width"])
        super().__init__(bank, name, bank.folder.feature_answers(name), about, schema)

    def __repr__(self) -> str:
        return f"Features({self.name!r} of {self.about['network_name']}, {len(self)} videos, {self.width} a frame)"

    def _answer(self, batch: Any) -> np.ndarray:
        return matrix_of(batch, "features")

    @property
    def kind(self) -> str:
        """ "classifier": what stands before its class layer; "sampler": the features of its backbone."""
        return str(self.about["network"])

    @property
    def width(self) -> int:
        """D."""
        return int(self.about["width"])

    @property
    def precision(self) -> str:
        """ "float16" or "float32"."""
        return str(self.about["precision"])

    @property
    def gmacs(self) -> float:
        """Giga multiply-adds of the network for one frame."""
        return float(self.about["gmacs"])


def check_features_name(name: Any) -> str:
    """A name that is that of a folder on every system, or say what is allowed."""
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name.endswith("."):
        raise InvalidArgument(
            f"name={name!r} is not allowed for features; give letters, digits, '.', '_' and '-', beginning with a "
            "letter or a digit"
        )
    return name


def read_features(folder: BankFolder, name: str) -> dict[str, Any]:
    answers, remedy = folder.feature_answers(name), "delete its folder and add the features again"
    told = read_answers_head(answers, FEATURES_KIND, _KEYS, remedy)
    width, precision = told["width"], told["precision"]
    if not isinstance(width, int) or width < 1 or precision not in ("float16", "float32"):
        raise SosamplerError(f"{answers.head}: width={width!r} in precision={precision!r} cannot be; {remedy}")
    return told


def find_features(network: Any, known: dict[str, dict[str, Any]], path: Path) -> str:
    """The name of the features that are meant, or say which there are."""
    there = "; ".join(f"{name} ({about['network']} {about['network_name']})" for name, about in known.items()) or "none"
    if isinstance(network, str) and network in known:
        return network
    if network is None:
        matching, wanted = list(known), "features"
    else:
        if not isinstance(network, str) and not hasattr(network, "fingerprint"):
            raise InvalidArgument(
                f"{path}: a {type(network).__name__} does not tell which features are meant; give the network, or the "
                f"name of features in this bank: {there}"
            )
        fingerprint = network if isinstance(network, str) else network.fingerprint()
        wanted = f"features {network!r}" if isinstance(network, str) else f"features with fingerprint {fingerprint}"
        matching = [name for name, about in known.items() if about["fingerprint"] == fingerprint]
    if not matching:
        raise InvalidArgument(
            f"{path}: {wanted} are not in this bank; it has: {there}. Add them with so.add_features(bank, network)"
        )
    if len(matching) > 1:
        raise InvalidArgument(f"{path}: {wanted} were asked for, but several fit: {there}. Name one of them")
    return matching[0]
