"""What classifiers said about the frames of a bank, read from disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sosampler.data.bank_answers import BankAnswers, read_answers_head
from sosampler.data.bank_format import TEACHER_KIND, BankFolder, matrix_of, teacher_schema
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.data.bank import Bank

# What every teacher.json says.
_KEYS = ("name", "fingerprint", "num_classes", "pooling", "views", "precision", "features")


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
    told = read_answers_head(folder.teacher_answers(name), TEACHER_KIND, _KEYS, remedy)
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
