"""Every policy behind one interface: `choose(view, num_frames)` -> positions among the candidates.

Rules know the number of candidates alone, oracles know what the classifier says and the labels, samplers have looked
at the pictures before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler._util.validation import real_number
from sosampler.baselines.base import Baseline
from sosampler.baselines.folder import is_baseline_folder, load_system
from sosampler.baselines.registry import list_systems
from sosampler.errors import InvalidArgument
from sosampler.evaluation.baselines import SystemPolicy, same_but_for_dial, system_policies
from sosampler.evaluation.batches import CandidateView
from sosampler.evaluation.clip_scores import Clips
from sosampler.evaluation.scorers import (
    ORDERS,
    DifferenceScorer,
    DiverseScorer,
    GeneralScorer,
    SamplerScorer,
    Scorer,
    kernel,
)
from sosampler.policies import positional as rules
from sosampler.policies.auto import AUTO, AutoFrames, auto_of, count_frames
from sosampler.policies.learned import why_no_number
from sosampler.policies.names import AUTO_SUFFIX, split_dial
from sosampler.policies.registry import SCORED
from sosampler.policies.score_rules import METHODS, difference_peaks, split_method
from sosampler.policies.semi_optimal import log_label_confidence, top_n
from sosampler.video.candidates import segment_centres
from sosampler.video.timeline import Indices

RULES: dict[str, Callable[[int, int], Indices]] = {
    "uniform": rules.uniform,
    "centre": rules.centre,
    "frameexit": rules.frameexit,
    "all": segment_centres,
}


@dataclass(frozen=True)
class Chosen:
    """Positions among the candidates, in time order."""

    positions: Tensor  # int64 [B, N]
    gap: NDArray[np.float64] | None = None  # [B], the confidence that the optimal policy may have missed
    method: str | None = None  # how the optimal policy searched


class Chooser(Protocol):
    """A policy; `looks` if it needs all candidates decoded."""

    @property
    def name(self) -> str: ...

    @property
    def looks(self) -> bool: ...

    @property
    def scorer(self) -> Scorer | None: ...

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        """N of the candidates of each video; every video has as many real ones."""
        ...


class RuleChooser:
    """A rule on positions; of a short video on those that it has."""

    looks, scorer = False, None

    def __init__(self, name: str, rule: Callable[[int, int], Indices]) -> None:
        self.name, self._rule = name, rule

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        by_count = {count: self._rule(count, num_frames) for count in np.unique(view.counts).tolist()}
        positions = np.stack([by_count[count] for count in view.counts.tolist()])
        return Chosen(torch.from_numpy(positions).to(view.mask.device))


class RandomChooser:
    """N candidates by chance, the same for the same seed, number of candidates and place in the split."""

    name, looks, scorer = "random", False, None

    def __init__(self, seed: int, num_videos: int) -> None:
        self._seed, self._num_videos = seed, num_videos
        self._scores: dict[int, NDArray[np.float64]] = {}  # by T: [V, T]

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        count = view.num_candidates
        if count not in self._scores:
            self._scores[count] = np.random.default_rng([self._seed, count]).random((self._num_videos, count))
        scores = torch.from_numpy(self._scores[count][view.numbers]).to(view.mask.device)
        return Chosen(top_n(scores, num_frames, view.real))


class SemiOptimalChooser:
    """The N frames that are most confident alone: in the labels, or in whatever they show most ("max")."""

    looks, scorer = True, None

    def __init__(self, name: str, clips: Clips) -> None:
        self.name, self._clips = name, clips

    def log_confidence(self, view: CandidateView) -> Tensor:
        """[B, T]"""
        if self.name not in view.cache:
            log_probs = self._clips.frame_log_probs(view)
            of_max = self.name == "semi-optimal-max"
            view.cache[self.name] = log_probs.amax(-1) if of_max else log_label_confidence(log_probs, view.labels)
        return view.cache[self.name]

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(self.log_confidence(view), num_frames, view.real))

    def values(self, view: CandidateView) -> Tensor:
        """In 0..1, for policies that weigh them against redundancy."""
        return self.log_confidence(view).exp()

    def similarity(self, view: CandidateView) -> Tensor:
        if "similarity" not in view.cache:
            features = view.frame_probs if view.features is None else view.features
            view.cache["similarity"] = kernel(features, view.mask)
        return view.cache["similarity"]


class OptimalChooser:
    """The N frames whose clip is most confident in the labels."""

    name, looks, scorer = "optimal", True, None

    def __init__(self, clips: Clips, beam_width: int) -> None:
        self._clips, self._beam_width = clips, beam_width

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        found = self._clips.optimal(view, num_frames, self._beam_width)
        return Chosen(found.positions, found.gap.double().cpu().numpy(), found.method)


class ScoreChooser:
    """The N highest scores of whoever looked at the pictures."""

    looks = True

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name, self.scorer = name, scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(view.scores[self.scorer.key], num_frames, view.real))

    def values(self, view: CandidateView) -> Tensor:
        # In double precision, in which scores that differ stay apart.
        return self.scorer.in_unit(view.scores[self.scorer.key].double(), view.mask)

    def similarity(self, view: CandidateView) -> Tensor:
        return view.similarity[self.scorer.key]


class AutoChooser:
    """The highest scores of a sampler that decides for each video how many."""

    looks = True

    def __init__(self, name: str, base: ScoreChooser, auto: AutoFrames) -> None:
        self.name, self._auto = name, auto
        self.scorer = base.scorer

    def count(self, view: CandidateView) -> NDArray[np.int64]:
        """N of each video, [B]; none has more than its real candidates."""
        return count_frames(view.expected[self.scorer.key], self._auto)

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        return Chosen(top_n(view.scores[self.scorer.key], num_frames, view.real))


class RedundancyChooser:
    """Another policy's values, weighed against the likeness of what is chosen already."""

    looks = True

    def __init__(self, name: str, base: SemiOptimalChooser | ScoreChooser, method: str) -> None:
        self.name, self._base, self._method = name, base, method
        self.scorer = base.scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        from sosampler.policies.redundancy import dpp, mmr

        pick = mmr if self._method == "mmr" else dpp
        values, similarity = self._base.values(view).float(), self._base.similarity(view).float()
        return Chosen(pick(values, similarity, num_frames, mask=view.real))


class MethodChooser:
    """Another policy's values, from which a rule chooses in another way than the N highest."""

    looks = True

    def __init__(
        self, name: str, base: SemiOptimalChooser | ScoreChooser, rule: Callable[[NDArray[np.float64], int], Indices]
    ) -> None:
        self.name, self._base, self._rule = name, base, rule
        self.scorer = base.scorer

    def choose(self, view: CandidateView, num_frames: int) -> Chosen:
        values = self._base.values(view).double().cpu().numpy()
        counts = view.counts.tolist()
        rows = [self._rule(row[:count], num_frames) for row, count in zip(values, counts, strict=True)]
        return Chosen(torch.from_numpy(np.stack(rows)).to(view.mask.device))


def choose_all(chooser: Chooser, view: CandidateView, num_frames: int) -> Chosen:
    """The choice for every video. One with fewer frames than are wanted gives all of them, repeated evenly."""
    enough = view.counts >= num_frames
    if enough.all():
        return chooser.choose(view, num_frames)
    positions = np.stack([segment_centres(count, num_frames) for count in view.counts.tolist()])
    some = chooser.choose(view.some(enough), num_frames) if enough.any() else Chosen(view.labels.new_empty(0).long())
    gap = None
    if some.gap is not None or (chooser.name == "optimal" and not enough.any()):
        gap = np.zeros(len(view))  # with all frames chosen nothing can be missed
    if enough.any():
        positions[enough] = some.positions.cpu().numpy()
        if gap is not None and some.gap is not None:
            gap[enough] = some.gap
    return Chosen(torch.from_numpy(positions).to(view.mask.device), gap, some.method)


def autos_of(
    pairs: Sequence[tuple[int | None, int]], least: int | None, most: int | None, tolerance: Any
) -> dict[str, AutoFrames]:
    """By what stands behind a sampler's name how it decides; nothing where nobody is to decide.

    >>> list(autos_of([(None, 10)], 1, 4, [0.01, 0.05]))
    ['+auto@0.01', '+auto@0.05']
    """
    several = isinstance(tolerance, (list, tuple)) and len(tolerance) != 1
    listed = list(tolerance) if isinstance(tolerance, (list, tuple)) else [tolerance]
    if not listed:
        raise InvalidArgument("auto_tolerance is empty; give a number, or leave it out")
    if all(wanted is not None for wanted, _ in pairs):
        auto_of(None, least, most, listed[0])  # says that it goes with "auto" alone
        return {}
    found: dict[str, AutoFrames] = {}
    for one in listed:
        value = None if one is None else real_number("auto_tolerance", one, at_least=0)
        auto = auto_of(AUTO, least, most, value)
        assert auto is not None, "auto was asked for"
        found[f"{AUTO_SUFFIX}@{auto.tolerance:g}" if several else AUTO_SUFFIX] = auto
    return found


def by_themselves(
    choosers: Sequence[Chooser], autos: Mapping[str, AutoFrames], pairs: Sequence[tuple[int | None, int]]
) -> list[AutoChooser]:
    """The samplers among the choosers, once for each way to decide on N."""
    for chooser in choosers:
        if chooser.name.partition("@")[0].endswith(AUTO_SUFFIX):
            raise InvalidArgument(
                f"a sampler cannot be called {chooser.name!r}, as rows of num_frames={AUTO!r} are; give another name"
            )
    if not autos:
        return []
    found: list[AutoChooser] = []
    for chooser in choosers:
        why_not = _why_not(chooser)
        if why_not is None:
            assert isinstance(chooser, ScoreChooser), "checked"
            assert isinstance(chooser.scorer, SamplerScorer), "checked"
            chooser.scorer.wants_expected = True
            found += [AutoChooser(f"{chooser.name}{behind}", chooser, auto) for behind, auto in autos.items()]
        elif chooser.name != "all" and all(wanted is None for wanted, _ in pairs):
            raise InvalidArgument(f"{why_not}; add a number, for example num_frames=[3, {AUTO!r}], or leave it out")
    if choosers and not found:
        raise InvalidArgument(
            f"num_frames={AUTO!r} is for trained samplers, and there is none among the policies; add one"
        )
    return found


def _why_not(chooser: Chooser) -> str | None:
    """None for a sampler whose best frames are taken and that can decide how many."""
    if isinstance(chooser, ScoreChooser) and isinstance(chooser.scorer, SamplerScorer):
        lacks = why_no_number(chooser.scorer.sampler, chooser.name)
        return None if lacks is None else lacks.partition("; ")[0]
    return f"num_frames={AUTO!r} is for trained samplers, which know what a frame is worth, not for {chooser.name!r}"


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

    def loaded_system(self, folder: str) -> Baseline:
        if folder not in self._loaded:
            self._loaded[folder] = load_system(folder, device=str(self.device))
        system: Baseline = self._loaded[folder]
        return system

    def loaded(self, folder: str) -> Any:
        if folder not in self._loaded:
            from sosampler.samplers.registry import load_sampler

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
    if isinstance(policies, (str, os.PathLike, Baseline)) or _is_sampler(policies):
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
    from sosampler.training.train_baseline import TrainedSystem
    from sosampler.training.train_sampler import TrainedSampler

    if isinstance(policy, TrainedSystem):
        return policy.system
    return policy.sampler if isinstance(policy, TrainedSampler) else policy


def _is_sampler(policy: Any) -> bool:
    return hasattr(policy, "look") and hasattr(policy, "gmacs")


def _found(name: str | None, policy: Any, maker: ChooserMaker) -> Chooser | list[SystemPolicy]:
    """One policy, or the rows of one system."""
    policy = _what_was_trained(policy)
    if isinstance(policy, Baseline):
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
    if is_baseline_folder(folder):
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


def _systems(name: str, system: Baseline, value: str, *, taken_as_it_is: bool = False) -> list[SystemPolicy]:
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
