"""What a network said about the frames of a bank, read from disk: the base of teachers and of features."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sosampler.bank.format import (
    FEATURES_KIND,
    TEACHER_KIND,
    AnswersFolder,
    BankFolder,
    OpenShards,
    checked_index,
    features_schema,
    matrix_of,
    read_json,
    teacher_schema,
)
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank


Answer = TypeVar("Answer")


class BankAnswers(Sequence[Answer]):
    """One network's answers, in the order of the bank's videos. Pickles as its name, so that workers reopen it."""

    def __init__(self, bank: Bank, name: str, folder: AnswersFolder, about: dict[str, Any], schema: Any) -> None:
        self.bank, self.name, self.folder, self.about = bank, name, folder, about
        self.schema = schema  # columns of its shards
        self._shards = OpenShards(folder.shard, folder.again)

    def __reduce__(self) -> Any:
        return type(self), (self.bank, self.name)

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, index: Any) -> Any:
        """Of one video; a list for a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return self._answer(self.batch(index))

    def batch(self, index: Any) -> Any:
        """The row of a video as Arrow keeps it."""
        row = self.bank.rows[checked_index(index, len(self), self.bank.path)]
        batch = self._shards.batch(row)
        if batch.schema != self.schema:
            raise SosamplerError(
                f"{self.folder.shard(row.shard)}: does not hold what {self.folder.head.name} says; "
                f"delete the folder of both and {self.folder.again}"
            )
        return batch

    @property
    def fingerprint(self) -> str:
        return str(self.about["fingerprint"])

    @abstractmethod
    def _answer(self, batch: Any) -> Answer:
        """What a row says."""


def read_answers_head(folder: AnswersFolder, kind: str, keys: Sequence[str], remedy: str) -> dict[str, Any]:
    """teacher.json or features.json, with all keys."""
    told = read_json(folder.head, kind, remedy)
    missing = [key for key in keys if key not in told]
    if missing:
        raise SosamplerError(f"{folder.head}: lacks {missing[0]!r}; {remedy}")
    return told


def check_finished(folder: AnswersFolder, num_shards: int, what: str, remedy: str) -> None:
    """All shards are there, or say how many are not."""
    missing = folder.missing(num_shards)
    if missing:
        raise SosamplerError(f"{folder.path}: {len(missing)} of {num_shards} parts of {what} are missing; {remedy}")


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


# What every teacher.json says.
_bank_teachers_KEYS = ("name", "fingerprint", "num_classes", "pooling", "views", "precision", "features")


@dataclass(frozen=True, eq=False)
class TeacherItem:
    """What a classifier said about the frames of one video."""

    frame_probs: np.ndarray  # [T, C] float16, each frame as a clip of one
    features: np.ndarray | None  # [T, D]; pooled classifiers only: `classifier.pool` of any of them is their clip


class Teacher(BankAnswers[TeacherItem]):
    """One classifier's answers, in the order of the bank's videos: a `TeacherItem` of each."""

    def __init__(self, bank: Bank, name: str) -> None:
        about = read_teacher(bank.folder, name)
        kept = about["features"]
        schema = teacher_schema(about["num_classes"], kept and kept["precision"], kept and kept["width"])
        super().__init__(bank, name, bank.folder.teacher_answers(name), about, schema)

    def __repr__(self) -> str:
        return f"Teacher({self.about['name']!r}, fingerprint={self.fingerprint!r}, {len(self)} videos)"

    def _answer(self, batch: Any) -> TeacherItem:
        features = matrix_of(batch, "features") if self.about["features"] else None
        return TeacherItem(matrix_of(batch, "frame_probs"), features)

    @property
    def pooling(self) -> str | None:
        """How the classifier joins frames: "mean" of logits, "max" of features, or None where it is no pooled one."""
        pooling: str | None = self.about["pooling"]
        return pooling

    @property
    def num_classes(self) -> int:
        return int(self.about["num_classes"])


def teacher_folder_name(fingerprint: str, views: int) -> str:
    return fingerprint if views == 1 else f"{fingerprint}-{views}views"


def read_teacher(folder: BankFolder, name: str) -> dict[str, Any]:
    remedy = "delete its folder and prepare it again"
    told = read_answers_head(folder.teacher_answers(name), TEACHER_KIND, _bank_teachers_KEYS, remedy)
    kept = told["features"]
    if kept is not None and not (isinstance(kept, dict) and {"precision", "width"} <= kept.keys()):
        raise SosamplerError(f"{folder.teacher_json(name)}: features={kept!r} is not a precision and a width; {remedy}")
    return told


def find_teacher(classifier: Any, views: int | None, known: dict[str, dict[str, Any]], path: Path) -> str:
    """The one teacher that is meant, or say which there are."""
    there = "; ".join(f"{name} ({about['name']}, views={about['views']})" for name, about in known.items()) or "none"
    if isinstance(classifier, str) and classifier in known and views is None:
        return classifier  # a name is exact; that of a teacher with one view is also the fingerprint of all of them
    if classifier is None:
        matching, wanted = list(known), "a teacher"
    else:
        fingerprint = classifier if isinstance(classifier, str) else classifier.fingerprint()
        called = "" if isinstance(classifier, str) else f" of {classifier.name!r}"
        wanted = f"the teacher{called} with fingerprint {fingerprint}"
        matching = [name for name, about in known.items() if fingerprint in (name, about["fingerprint"])]
    if views is not None:
        wanted += f" and views={views}"
        matching = [name for name in matching if known[name]["views"] == views]
    if not matching:
        raise InvalidArgument(
            f"{path}: {wanted} is not in this bank; it has: {there}. "
            "Run `sosampler prepare` with this classifier to add it"
        )
    if len(matching) > 1:
        raise InvalidArgument(
            f"{path}: {wanted} was asked for, but several fit: {there}. Name one of them, or its views"
        )
    _check_names(classifier, known[matching[0]], path)
    return matching[0]


def _check_names(classifier: Any, about: dict[str, Any], path: Path) -> None:
    """The fingerprint is of the weights alone; with its classes in another order a classifier says something else."""
    names, told = getattr(classifier, "class_names", None), about.get("class_names")
    if names is None or told is None:
        return
    place = first_difference(tuple(names), tuple(told))
    if place is not None:
        raise InvalidArgument(
            f"{path}: the teacher of {classifier.name!r} was prepared with class {place} called {told[place]!r}, now "
            f"{names[place]!r}; give the classifier its classes in the same order"
        )


def first_difference(names: tuple[str, ...], others: tuple[str, ...]) -> int | None:
    """The first class that two lists of one length call differently; plain numbers from 0 are no names.

    >>> first_difference(("run", "jump"), ("run", "fly")), first_difference(("run", "jump"), ("0", "1"))
    (1, None)
    """
    if _only_numbers(names) or _only_numbers(others):
        return None
    return next((place for place, (name, other) in enumerate(zip(names, others, strict=False)) if name != other), None)


def _only_numbers(names: tuple[str, ...]) -> bool:
    return names == tuple(str(number) for number in range(len(names)))
