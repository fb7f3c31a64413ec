"""From policies as users write them to choosers and systems."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sosampler.errors import InvalidArgument
from sosampler.evaluation.choosers import (
    RULES,
    Chooser,
    MethodChooser,
    OptimalChooser,
    RandomChooser,
    RedundancyChooser,
    RuleChooser,
    ScoreChooser,
    SemiOptimalChooser,
)
from sosampler.evaluation.clips import Clips
from sosampler.evaluation.dials import split_dial
from sosampler.evaluation.scorers import ORDERS, DifferenceScorer, DiverseScorer, GeneralScorer, SamplerScorer
from sosampler.evaluation.systems import SystemPolicy, same_but_for_dial, system_policies
from sosampler.policies import SCORED
from sosampler.policies.selectors import METHODS, difference_peaks, split_method
from sosampler.systems import list_systems
from sosampler.systems.base import System
from sosampler.systems.folder import is_system_folder, load_system

REDUNDANCY = ("mmr", "dpp")
SUFFIXES = (*REDUNDANCY, *METHODS)
SEMI_OPTIMAL = ("semi-optimal", "semi-optimal-max")
NAMES = (*RULES, "random", "frame-difference", "difference-peaks", *ORDERS, "general", *SEMI_OPTIMAL, "optimal")
ALLOWED = (
    *NAMES,
    *(f"{name}+{method}" for name in SCORED for method in METHODS),
    *(f"{name}+{method}" for name in SEMI_OPTIMAL for method in SUFFIXES),
)
DEFAULT_POLICIES = ("uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal")
_CONFIG = "config.json"  # what a folder must hold to be taken for a saved sampler or system


@dataclass
class ChooserMaker:
    """What choosers are made of besides their names. A sampler is loaded and asked once, whoever uses it."""

    clips: Clips
    num_videos: int
    seed: int
    beam_width: int
    device: torch.device
    precision: str | None = None
    _loaded: dict[str, Any] = field(default_factory=dict)
    _scorers: dict[int, SamplerScorer] = field(default_factory=dict)

    def named(self, name: str) -> Chooser:
        """One of `ALLOWED`."""
        base, _, method = name.partition("+")
        if base in RULES:
            return RuleChooser(base, RULES[base])
        if base == "random":
            return RandomChooser(self.seed, self.num_videos)
        if base == "optimal":
            return OptimalChooser(self.clips, self.beam_width)
        if base in ORDERS:
            return ScoreChooser(base, DiverseScorer(base))
        if base == "general":
            return ScoreChooser(base, GeneralScorer())
        if base == "difference-peaks":
            return MethodChooser(base, ScoreChooser(base, DifferenceScorer()), difference_peaks)
        if base == "frame-difference":
            return _with_method(ScoreChooser(base, DifferenceScorer()), name, method)
        return _with_method(SemiOptimalChooser(base, self.clips), name, method)

    def learned(self, name: str, sampler: Any, method: str) -> Chooser:
        if name in ALLOWED:
            raise InvalidArgument(f"a sampler cannot be called {name!r}, which is another policy; give another name")
        scorer = self._scorers.setdefault(id(sampler), SamplerScorer(sampler))
        if method in REDUNDANCY:
            scorer.wants_similarity = True
        return _with_method(ScoreChooser(name, scorer), name, method)

    def loaded_system(self, folder: str) -> System:
        if folder not in self._loaded:
            self._loaded[folder] = load_system(folder, device=str(self.device))
        system: System = self._loaded[folder]
        return system

    def loaded(self, folder: str) -> Any:
        if folder not in self._loaded:
            from sosampler.samplers import load_sampler

            sampler = load_sampler(folder, device=str(self.device))
            if self.precision is not None:
                sampler.precision = self.precision
            self._loaded[folder] = sampler
        return self._loaded[folder]


def _with_method(base: SemiOptimalChooser | ScoreChooser, name: str, method: str) -> Chooser:
    """`base` itself, or under this name what chooses from its values by one of `SUFFIXES`."""
    if not method:
        return base
    return RedundancyChooser(name, base, method) if method in REDUNDANCY else MethodChooser(name, base, METHODS[method])


def policies_of(policies: Any, maker: ChooserMaker) -> tuple[list[Chooser], list[SystemPolicy]]:
    """Policies as they are given: names, samplers, systems, what `train` made of them, folders of them, "NAME=FOLDER",
    or {name: any of them}.
    """
    policies = _what_was_trained(policies)
    if isinstance(policies, (str, os.PathLike, System)) or _is_sampler(policies):
        policies = [policies]
    if not isinstance(policies, Iterable):
        raise InvalidArgument(
            f"policies={policies!r} is not allowed; give a list of names and samplers, or {{name: sampler}}"
        )
    given: Iterable[tuple[str | None, Any]] = (
        policies.items() if isinstance(policies, Mapping) else ((None, policy) for policy in policies)
    )
    choosers: list[Chooser] = []
    systems: list[SystemPolicy] = []
    for name, policy in given:
        found = _found(name, policy, maker)
        if isinstance(found, list):
            systems += found
        else:
            choosers.append(found)
    names = [*(chooser.name for chooser in choosers), *(policy.name for policy in systems)]
    if not names:
        raise InvalidArgument(f"policies are empty; choose from: {', '.join(ALLOWED)}, or give samplers")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"two policies are called {twice!r}; name them apart: NAME=FOLDER, or {{name: sampler}} in Python"
        )
    _check_lines(choosers, systems)
    return choosers, systems


def _check_lines(choosers: Sequence[Chooser], systems: Sequence[SystemPolicy]) -> None:
    """All rows NAME@VALUE make one curve called NAME, so nothing else may be called NAME."""
    others = {chooser.name for chooser in choosers}
    first_of: dict[str, SystemPolicy] = {}
    for policy in systems:
        line = split_dial(policy.name)[0]
        if line in others:
            raise InvalidArgument(
                f"the policy {line!r} and the system {policy.name!r} would be one curve called {line!r}; give the "
                "system another name: NAME=FOLDER, or {name: system} in Python"
            )
        first = first_of.setdefault(line, policy)
        if first is not policy and not same_but_for_dial(first.system, policy.system):
            raise InvalidArgument(
                f"{first.name!r} and {policy.name!r} are two systems, but would be one curve called {line!r}; name "
                "them apart: NAME=FOLDER, or {name: system} in Python"
            )


def _what_was_trained(policy: Any) -> Any:
    """The sampler or system in what `train` returns; anything else as it is."""
    if not (hasattr(policy, "folder") and hasattr(policy, "result")):
        return policy
    from sosampler.training.train_sampler import TrainedSampler
    from sosampler.training.train_system import TrainedSystem

    if isinstance(policy, TrainedSystem):
        return policy.system
    return policy.sampler if isinstance(policy, TrainedSampler) else policy


def _is_sampler(policy: Any) -> bool:
    return hasattr(policy, "look") and hasattr(policy, "gmacs")


def _found(name: str | None, policy: Any, maker: ChooserMaker) -> Chooser | list[SystemPolicy]:
    """One policy, or the rows of one system."""
    policy = _what_was_trained(policy)
    if isinstance(policy, System):
        return _systems(name or policy.name, policy, "")
    if _is_sampler(policy):
        name = name or "sosampler"
        return maker.learned(name, policy, split_method(name, SUFFIXES)[1])
    if not isinstance(policy, (str, os.PathLike)):
        raise InvalidArgument(
            f"a policy is a {type(policy).__name__}; choose from: {', '.join(ALLOWED)}, "
            "or give a sampler or a trained system, or the folder of one"
        )
    text = os.fspath(policy)
    if text in ALLOWED:
        if name not in (None, text):
            raise InvalidArgument(f"the policy {text!r} cannot be called {name!r}; only samplers take other names")
        return maker.named(text)
    label, _, rest = text.partition("=")
    if name is None and rest and not _is_folder(_parts(text)[0]):
        name, text = label, rest
    folder, method, value = _parts(text)
    if not _is_folder(folder):
        raise InvalidArgument(
            f"policy={text!r} is unknown, and no folder of a trained sampler or system; choose from: "
            f"{', '.join(ALLOWED)}, or give such a folder, also as NAME=FOLDER, and with "
            f"{', '.join('+' + way for way in SUFFIXES)} behind that of a sampler, or @VALUE behind that of a system"
        )
    if is_system_folder(folder):
        if method:
            raise InvalidArgument(f"{text!r}: +{method} is for samplers; a system decides for itself, so leave it out")
        return _systems(name or folder, maker.loaded_system(folder), value, taken_as_it_is=name is None)
    if value:
        raise InvalidArgument(f"{text!r}: {folder} holds no trained system, and only these have a dial; leave out @")
    # A row's name says what was done, so what a name ends in is done too.
    in_name = split_method(name or "", SUFFIXES)[1]
    if in_name and method and in_name != method:
        raise InvalidArgument(f"the name {name!r} says {in_name}, but {text!r} says {method}; write one of them")
    return maker.learned(name or text, maker.loaded(folder), method or in_name)


def _systems(name: str, system: System, value: str, *, taken_as_it_is: bool = False) -> list[SystemPolicy]:
    """The rows of a system. As with samplers, what its name ends in is done; unless the name is that of its folder."""
    name, in_name = (name, "") if taken_as_it_is else split_dial(name)
    if in_name and value and in_name != value:
        raise InvalidArgument(f"the name {name}@{in_name} says {in_name}, but the policy {value}; write one of them")
    # The rule "frameexit" may be left out, and then a system may have the name of its class.
    if name in ALLOWED and name not in list_systems():
        raise InvalidArgument(f"a system cannot be called {name!r}, which is another policy; give another name")
    method = "" if taken_as_it_is else split_method(name, SUFFIXES)[1]
    if method:
        raise InvalidArgument(f"a system cannot be called {name!r}: it decides for itself, so leave out +{method}")
    return system_policies(name, system, value or in_name)


def _parts(text: str) -> tuple[str, str, str]:
    """Folder, method and value of the dial.

    A folder may itself be called like one with a method or a value behind it, and is then taken as it is.
    """
    folder, method = (text, "") if _is_folder(text) else split_method(text, SUFFIXES)
    if not _is_folder(folder):
        before, _, value = text.rpartition("@")
        if before and value and _is_folder(before):
            return before, "", value
    return folder, method, ""


def _is_folder(text: str) -> bool:
    return (Path(text) / _CONFIG).is_file()
