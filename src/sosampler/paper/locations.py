"""Which banks and classifiers an experiment is run with, and where its files go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument
from sosampler.paper.experiments import data_sets, named_data_set, paper_classifier
from sosampler.training.checkpoints import bank_identity

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, eq=False)
class Place:
    """One bank and one classifier."""

    bank: Bank
    bank_name: str
    data: str | None  # one of the paper's data sets, where the user says so
    classifier_name: str
    teacher: str  # name of the classifier's answers in the bank
    classifier: Any  # itself, or None where only its answers are at hand
    named: bool = False  # whether the user gave the bank a name

    def folder(self, out: Path) -> Path:
        return out / self.bank_name / self.classifier_name

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the teacher's head says."""
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
        """What `train` takes as classifier of a system: itself, or its fingerprint, by which the bank has features."""
        return self.about["fingerprint"] if self.classifier is None else self.classifier

    @cached_property
    def asks_about_clips(self) -> bool:
        """Whether the classifier is run for every clip, because the bank keeps nothing that clips follow from."""
        from sosampler.evaluation.clip_scores import clips_for

        return clips_for(self.bank.teacher(self.teacher), self.classifier).needs_frames

    @property
    def judge(self) -> Any:
        """What `evaluate` takes as classifier."""
        return self.teacher if self.classifier is None else self.classifier

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Labelled videos by split."""
        found: dict[str, int] = {}
        for item in self.bank.items:
            if item.labels:
                split = item.split or "train"
                found[split] = found.get(split, 0) + 1
        return found

    @property
    def split(self) -> str:
        """What is measured on, as `evaluate` chooses it."""
        return next((name for name in ("test", "dev", "train") if self.sizes.get(name)), "test")

    @cached_property
    def most_stored(self) -> dict[str, int]:
        """The most frames that a labelled video of each split has."""
        found = dict.fromkeys(self.sizes, 0)
        for place, item in enumerate(self.bank.items):
            if item.labels:
                split = item.split or "train"
                found[split] = max(found[split], len(self.bank[place]))
        return found


def sentence_of_name(place: Place) -> str:
    """What follows from a name that is none of the paper's data sets; empty where it is one, or none was given."""
    if place.data is not None or not place.named:
        return ""
    return (
        f"--bank {place.bank_name}: none of the paper's data sets ({', '.join(data_sets())}), so its figures are of "
        "another one and for orientation only"
    )


def find_places(
    banks: Any, classifiers: Any = None, *, device: str | None = None, precision: str | None = None
) -> list[Place]:
    """Every bank with every classifier.

    Args:
        banks: folders, "NAME=FOLDER", banks, or {name: folder or bank}. A name of `data_sets()`, in any
            spelling that `named_data_set` knows, says that it is that data set.
        classifiers: folders of saved ones, names of teachers, "NAME=" and either, classifiers, or {name: any of them};
            None: all teachers of each bank.
        device, precision: of the classifiers that are loaded.
    """
    found: list[Place] = []
    named_banks = _named(banks, "bank", "the folder of a bank")
    given = (
        None if classifiers is None else _named(classifiers, "classifier", "a saved folder or a teacher of the bank")
    )
    loaded = None if given is None else [(name, _loaded(one, device, precision)) for name, one in given]
    for name, one in named_banks:
        bank = one if isinstance(one, Bank) else _opened(one)
        bank_name = name or _plain(bank.path.resolve().name)
        if any(place.bank_name == bank_name for place in found):
            raise InvalidArgument(f"two banks are called {bank_name!r}; name them apart: --bank NAME=FOLDER")
        asked: Sequence[tuple[str | None, Any]] = [(None, key) for key in bank.teachers] if loaded is None else loaded
        if not asked:
            raise InvalidArgument(
                f"{bank.path}: has no teacher; run `sosampler prepare` with a classifier, whose answers it then keeps"
            )
        here = [_place(bank, bank_name, name, label, classifier) for label, classifier in asked]
        found += _named_apart(here)
    return found


def _place(bank: Bank, bank_name: str, given_name: str | None, label: str | None, classifier: Any) -> Place:
    teacher = _teacher(bank, classifier)
    return Place(
        bank=bank,
        bank_name=bank_name,
        data=None if given_name is None else named_data_set(given_name),
        classifier_name=label or _own_name(bank, teacher),
        teacher=teacher,
        classifier=None if isinstance(classifier, str) else classifier,
        named=given_name is not None,
    )


def _own_name(bank: Bank, teacher: str) -> str:
    """What the network is called; of several teachers of one name the first keeps it, whichever come later."""
    known = bank.teachers
    name = _plain(str(known[teacher]["name"]))
    same = [other for other, about in known.items() if _plain(str(about["name"])) == name]
    oldest = min(same, key=lambda other: (_written(bank, other), other))
    return name if teacher == oldest else f"{name}-{teacher[:8]}"


def _written(bank: Bank, teacher: str) -> int:
    """When a teacher began to answer, in nanoseconds."""
    return (bank.folder.teacher(teacher).path / "teacher.json").stat().st_mtime_ns


def _teacher(bank: Bank, classifier: Any) -> str:
    """The name of the answers that are meant; a text may also be what a network is called."""
    known = bank.teachers
    if isinstance(classifier, str) and classifier not in known:
        called = [name for name, about in known.items() if about["name"] == classifier]
        if len(called) == 1:
            return called[0]
    return bank.teacher(classifier).name


def _named_apart(places: list[Place]) -> list[Place]:
    """Where two names are one still, the later place gets the beginning of its teacher's name behind it."""
    teachers = [place.teacher for place in places]
    twice = next((place for place in places if teachers.count(place.teacher) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"{twice.bank.path}: the teacher {twice.teacher} ({twice.about['name']}) is asked for twice; name it once"
        )
    apart: list[Place] = []
    for place in places:
        if any(place.classifier_name == other.classifier_name for other in apart):
            place = replace(place, classifier_name=f"{place.classifier_name}-{place.teacher[:8]}")
        apart.append(place)
    return apart


def _named(given: Any, what: str, meant: str) -> list[tuple[str | None, Any]]:
    """(name or None, value) of each."""
    found: list[tuple[str | None, Any]]
    if isinstance(given, dict):
        found = [(_checked(str(name), what), value) for name, value in given.items()]
    else:
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        found = [_split(one, what) for one in listed]
    if not found:
        raise InvalidArgument(f"no {what} is given; give {meant}")
    return found


def _split(given: Any, what: str) -> tuple[str | None, Any]:
    """ "NAME=VALUE" in two, unless all of it is a place on disk."""
    if not isinstance(given, str) or "=" not in given or Path(given).exists():
        return None, given
    name, _, value = given.partition("=")
    if not value:
        raise InvalidArgument(f"--{what} {given!r} has nothing behind the =; write NAME=FOLDER")
    return _checked(name, what), value


def _checked(name: str, what: str) -> str:
    if not _PLAIN.fullmatch(name) or name.endswith(".") or name == "samplers":
        raise InvalidArgument(
            f"--{what} {name!r} is not allowed as a name; give letters, digits, '.', '_' and '-', beginning with a "
            "letter or a digit"
        )
    return name


def _plain(text: str) -> str:
    """A name that any file system takes.

    >>> _plain("hf:facebook/timesformer-base"), _plain("by hand")
    ('hf-facebook-timesformer-base', 'by-hand')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "unnamed"


def _opened(given: Any) -> Bank:
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgument(f"bank={given!r} is not allowed; give a bank, or the folder of one")
    return Bank(given)


def _loaded(given: Any, device: str | None, precision: str | None) -> Any:
    """The classifier of a saved folder; names of teachers and classifiers stay what they are."""
    from sosampler.classifiers.factory import create_classifier, saved_folder

    folder = saved_folder(given)
    if folder is None:
        if isinstance(given, os.PathLike):
            raise InvalidArgument(f"classifier={os.fspath(given)!r} is no folder of a saved classifier; give one")
        return given
    import torch

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return create_classifier(str(folder), device=where, precision=precision)
