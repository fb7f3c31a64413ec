"""From policies as users write them to choosers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
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
from sosampler.evaluation.scorers import ORDERS, DifferenceScorer, DiverseScorer, SamplerScorer
from sosampler.policies import SCORED
from sosampler.policies.selectors import METHODS, difference_peaks, split_method

REDUNDANCY = ("mmr", "dpp")
SUFFIXES = (*REDUNDANCY, *METHODS)
SEMI_OPTIMAL = ("semi-optimal", "semi-optimal-max")
NAMES = (*RULES, "random", "frame-difference", "difference-peaks", *ORDERS, *SEMI_OPTIMAL, "optimal")
ALLOWED = (
    *NAMES,
    *(f"{name}+{method}" for name in SCORED for method in METHODS),
    *(f"{name}+{method}" for name in SEMI_OPTIMAL for method in SUFFIXES),
)
DEFAULT_POLICIES = ("uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal")
_CONFIG = "config.json"  # what a folder must hold to be taken for a saved sampler


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


def choosers_of(policies: Any, maker: ChooserMaker) -> list[Chooser]:
    """Policies as they are given: names, samplers, folders of samplers, "NAME=FOLDER", or {name: any of them}."""
    if isinstance(policies, (str, os.PathLike)) or _is_sampler(policies):
        policies = [policies]
    if not isinstance(policies, Iterable):
        raise InvalidArgument(
            f"policies={policies!r} is not allowed; give a list of names and samplers, or {{name: sampler}}"
        )
    given: Iterable[tuple[str | None, Any]] = (
        policies.items() if isinstance(policies, Mapping) else ((None, policy) for policy in policies)
    )
    found = [_chooser(name, policy, maker) for name, policy in given]
    if not found:
        raise InvalidArgument(f"policies are empty; choose from: {', '.join(ALLOWED)}, or give samplers")
    names = [chooser.name for chooser in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"two policies are called {twice!r}; name them apart: NAME=FOLDER, or {{name: sampler}} in Python"
        )
    return found


def _is_sampler(policy: Any) -> bool:
    return hasattr(policy, "look") and hasattr(policy, "gmacs")


def _chooser(name: str | None, policy: Any, maker: ChooserMaker) -> Chooser:
    if _is_sampler(policy):
        name = name or "sosampler"
        return maker.learned(name, policy, split_method(name, SUFFIXES)[1])
    if not isinstance(policy, (str, os.PathLike)):
        raise InvalidArgument(
            f"a policy is a {type(policy).__name__}; choose from: {', '.join(ALLOWED)}, "
            "or give a sampler or the folder of one"
        )
    text = os.fspath(policy)
    if text in ALLOWED:
        if name not in (None, text):
            raise InvalidArgument(f"the policy {text!r} cannot be called {name!r}; only samplers take other names")
        return maker.named(text)
    label, _, rest = text.partition("=")
    if name is None and rest and not _is_folder(_folder_and_method(text)[0]):
        name, text = label, rest
    folder, method = _folder_and_method(text)
    if not _is_folder(folder):
        raise InvalidArgument(
            f"policy={text!r} is unknown, and no folder of a trained sampler; choose from: {', '.join(ALLOWED)}, "
            f"or give such a folder, also as NAME=FOLDER, and with {', '.join('+' + way for way in SUFFIXES)} behind it"
        )
    # A row's name says what was done, so what a name ends in is done too.
    in_name = split_method(name or "", SUFFIXES)[1]
    if in_name and method and in_name != method:
        raise InvalidArgument(f"the name {name!r} says {in_name}, but {text!r} says {method}; write one of them")
    return maker.learned(name or text, maker.loaded(folder), method or in_name)


def _folder_and_method(text: str) -> tuple[str, str]:
    """A folder may itself be called like one with a method behind it, and is then taken as it is."""
    return (text, "") if _is_folder(text) else split_method(text, SUFFIXES)


def _is_folder(text: str) -> bool:
    return (Path(text) / _CONFIG).is_file()
