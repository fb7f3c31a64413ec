"""The banks and classifiers that experiments are run with, and the folders of their results."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sosampler._util.hardware import resolve_device
from sosampler.bank.bank import Bank
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.errors import InvalidArgument
from sosampler.paper.experiments import named_data_set, paper_classifier
from sosampler.training.checkpoints import bank_identity

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, eq=False)
class Location:
    """One bank and one classifier."""

    bank: Bank
    bank_name: str
    named: bool  # whether the user gave the bank a name
    classifier_name: str
    teacher: str  # name of the classifier's outputs in the bank
    classifier: Any  # itself, or None where only its outputs are available

    @property
    def data(self) -> str | None:
        """One of the paper's data sets, where the user named the bank after it."""
        return named_data_set(self.bank_name) if self.named else None

    def folder(self, out: Path) -> Path:
        return out / self.bank_name / self.classifier_name

    @property
    def title(self) -> str:
        return f"{self.bank_name}, {self.classifier_name}"

    @cached_property
    def about(self) -> dict[str, Any]:
        """The header of the teacher's outputs."""
        return self.bank.teachers[self.teacher]

    @property
    def paper_classifier(self) -> str | None:
        return paper_classifier(self.classifier_name) or paper_classifier(str(self.about["name"]))

    @cached_property
    def identity(self) -> dict[str, str]:
        """Of the bank, by its content."""
        return bank_identity(self.bank)

    @property
    def heavy(self) -> Any:
        """The classifier of a baseline for `train`: itself, or its fingerprint, by which the bank has features."""
        return self.about["fingerprint"] if self.classifier is None else self.classifier

    @property
    def has_one_teacher(self) -> bool:
        """Whether the classifier itself says which outputs are meant; earlier versions could average several views."""
        known = [about["fingerprint"] for about in self.bank.teachers.values()]
        return self.classifier is not None and known.count(self.about["fingerprint"]) == 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Labelled videos by split."""
        return Counter(item.split or "train" for item in self.bank.items if item.labels)

    @property
    def split(self) -> str:
        """The split to evaluate on, as `evaluate` chooses it."""
        return next((name for name in ("test", "dev", "train") if self.sizes.get(name)), "test")

    @cached_property
    def max_stored(self) -> dict[str, int]:
        """The largest number of stored frames among the labelled videos of each split."""
        largest = dict.fromkeys(self.sizes, 0)
        for index, item in enumerate(self.bank.items):
            if item.labels:
                split = item.split or "train"
                largest[split] = max(largest[split], len(self.bank[index]))
        return largest


def find_locations(
    banks: Any, classifiers: Any = None, *, device: str | None = None, precision: str | None = None
) -> list[Location]:
    """Return every bank with every classifier; `reproduce` documents how both are given.

    A name of `data_sets()`, in any spelling that `named_data_set` knows, marks a bank as that data set.
    """
    named_banks = _named(banks, "bank", "the folder of a bank")
    loaded: list[tuple[str | None, Any]] = []
    if classifiers is not None:
        listed = _named(classifiers, "classifier", "a saved folder or a teacher of the bank")
        loaded = [(name, _loaded(value, device, precision)) for name, value in listed]
    locations: list[Location] = []
    for name, value in named_banks:
        if not isinstance(value, (Bank, str, os.PathLike)):
            raise InvalidArgument(f"bank={value!r} must be a bank or the folder of one")
        bank = value if isinstance(value, Bank) else Bank(value)
        bank_name = name or _file_name(bank.path.resolve().name)
        if any(location.bank_name == bank_name for location in locations):
            raise InvalidArgument(f"two banks are called {bank_name!r}; name them apart: --bank NAME=FOLDER")
        wanted = loaded or [(None, key) for key in bank.teachers]
        if not wanted:
            raise InvalidArgument(
                f"{bank.path}: has no teacher; run `sosampler prepare` with a classifier, whose outputs it then keeps"
            )
        locations += _of_bank(bank, bank_name, name is not None, wanted)
    return locations


def _of_bank(bank: Bank, bank_name: str, named: bool, classifiers: Sequence[tuple[str | None, Any]]) -> list[Location]:
    """Return one bank with every classifier, each under a name of its own."""
    locations: list[Location] = []
    for label, classifier in classifiers:
        teacher = _teacher(bank, classifier)
        if any(teacher == other.teacher for other in locations):
            raise InvalidArgument(
                f"{bank.path}: the teacher {teacher} ({bank.teachers[teacher]['name']}) is given twice; name it once"
            )
        name = label or _network_name(bank, teacher)
        if any(name == other.classifier_name for other in locations):
            name = f"{name}-{teacher[:8]}"
        available = None if isinstance(classifier, str) else classifier
        locations.append(Location(bank, bank_name, named, name, teacher, available))
    return locations


def _network_name(bank: Bank, teacher: str) -> str:
    """Return the name of the network; of several teachers with one name the oldest keeps it."""
    names = {other: _file_name(str(about["name"])) for other, about in bank.teachers.items()}
    same = [other for other, name in names.items() if name == names[teacher]]
    files = {other: bank.folder.teacher(other).path / "teacher.json" for other in same}
    oldest = min(same, key=lambda other: (files[other].stat().st_mtime_ns, other))
    return names[teacher] if teacher == oldest else f"{names[teacher]}-{teacher[:8]}"


def _teacher(bank: Bank, classifier: Any) -> str:
    """Return the name of a classifier's outputs; a text may also be the name of a network."""
    if isinstance(classifier, str) and classifier not in bank.teachers:
        same = [name for name, about in bank.teachers.items() if about["name"] == classifier]
        if len(same) == 1:
            return same[0]
    return bank.teacher(classifier).name


def _named(given: Any, what: str, expected: str) -> list[tuple[str | None, Any]]:
    """Return (name or None, value) of each; a text "NAME=VALUE" is split unless all of it is a path that exists."""
    pairs: list[tuple[str | None, Any]] = []
    if isinstance(given, dict):
        pairs += [(str(name), value) for name, value in given.items()]
    else:
        for value in given if isinstance(given, (list, tuple)) else [given]:
            name, equals, behind = value.partition("=") if isinstance(value, str) else ("", "", "")
            if not equals or Path(value).exists():
                pairs.append((None, value))
            elif not behind:
                raise InvalidArgument(f"--{what} {value!r} has nothing behind the =; write NAME=FOLDER")
            else:
                pairs.append((name, behind))
    if not pairs:
        raise InvalidArgument(f"no {what} is given; give {expected}")
    for checked, _ in pairs:
        if checked is not None and (not _NAME.fullmatch(checked) or checked.endswith(".") or checked == "samplers"):
            raise InvalidArgument(
                f"--{what} {checked!r} must be a name of letters, digits, '.', '_' and '-' that begins with a letter "
                "or a digit"
            )
    return pairs


def _file_name(text: str) -> str:
    """Return a name that any file system takes.

    >>> _file_name("hf:facebook/timesformer-base"), _file_name("by hand")
    ('hf-facebook-timesformer-base', 'by-hand')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "unnamed"


def _loaded(given: Any, device: str | None, precision: str | None) -> Any:
    """Load the classifier of a saved folder; names of teachers and classifiers are returned as they are."""
    if saved_folder(given) is not None:
        return create_classifier(str(given), device=str(resolve_device(device)), precision=precision)
    if isinstance(given, os.PathLike):
        raise InvalidArgument(f"classifier={os.fspath(given)!r} must be the folder of a saved classifier")
    return given
