"""What an evaluation measures: which policies and baselines, with which N of which T, compared with what.

Baselines are trained systems that decide how many frames they need. Each has a classifier of its own, so they run here,
on the same videos as the policies, and their predictions are evaluated as they are.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler._util.arrays import Indices
from sosampler._util.files import saved_kind
from sosampler._util.limits import check_count
from sosampler._util.validation import check_float
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.bank.pixels import StoredFrames, StoredSpectra
from sosampler.baselines.base import (
    AUDIO,
    FRAMES,
    RAW,
    Baseline,
    LazySet,
    UniformFrames,
    Views,
    decoded_frames,
    load_system,
    predict,
    trained_on,
    video_gmacs,
)
from sosampler.baselines.base import KIND as BASELINE_KIND
from sosampler.baselines.registry import list_systems
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import Clips, Videos
from sosampler.evaluation.result import Cell, Spent, Tally
from sosampler.inference.options import auto_of
from sosampler.policies.auto import AUTO, Auto
from sosampler.policies.base import Policy
from sosampler.policies.registry import (
    AUTO_SUFFIX,
    EVERY,
    MethodPolicy,
    get_policy,
    is_policy_name,
    is_saved_folder,
    list_policies,
    number_of,
    split_label,
    split_method,
    split_threshold,
    with_method,
)

Pair = tuple[int | None, int]  # N, T; None where the policy decides on N
NOT_SEEN = -1  # pads the row of a video in the table of chosen frames

_UNIFORM = "uniform"  # behind the @ of a baseline: its own layers on N evenly spread frames, without its search

# Numbers of a baseline's features that are stacked at a time (128 MiB of float16, or 256 of float32).
_MAX_NUMBERS = 1 << 26


# ---- numbers


def pairs_of(num_frames: Any, num_candidates: Any, pairs: Any = None) -> list[Pair]:
    """Return the (N, T) to evaluate: the given pairs, or all combinations; N is None for "auto".

    >>> pairs_of([1, "auto"], 10), pairs_of(6, 10, pairs=[(8, 30)])
    ([(1, 10), (None, 10)], [(8, 30)])
    """
    if pairs is None:
        counts = _listed("num_candidates", num_candidates)
        pairs = [(frames, count) for count in counts for frames in _listed("num_frames", num_frames)]
    elif not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise InvalidArgument(f"pairs={pairs!r} must be a list of (num_frames, num_candidates), for example [(8, 30)]")
    result: list[Pair] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgument(f"pairs hold {pair!r}; give (num_frames, num_candidates), for example (8, 30)")
        decides = isinstance(pair[0], Auto) or pair[0] == AUTO
        frames = None if decides else check_count("num_frames", pair[0], "MAX_CANDIDATES")
        result.append((frames, check_count("num_candidates", pair[1], "MAX_CANDIDATES")))
    if not result:
        raise InvalidArgument("pairs are empty; give at least one pair of num_frames and num_candidates")
    for frames, candidates in result:
        if frames is not None and frames > candidates:
            raise InvalidArgument(
                f"num_frames={frames} is more than num_candidates={candidates}; choose at most as many frames as "
                "there are candidates, or name the combinations as pairs"
            )
    return list(dict.fromkeys(result))


def _listed(name: str, given: Any) -> list[Any]:
    values = list(given) if isinstance(given, (list, tuple, range)) else [given]
    if not values:
        raise InvalidArgument(f"{name} is empty; give at least one int")
    return values


def autos_of(
    num_frames: Any, pairs: Any, auto_min: Any, auto_max: Any, auto_tolerance: Any, auto_sure: Any = None
) -> dict[str, Auto]:
    """Return each `Auto` by the suffix of its rows; none where all N are numbers.

    >>> list(autos_of("auto", None, 1, 4, [0.01, 0.05]))
    ['+auto@0.01', '+auto@0.05']
    """
    numbers = _listed("num_frames", num_frames) if pairs is None else [pair[0] for pair in pairs]
    tolerances = list(auto_tolerance) if isinstance(auto_tolerance, (list, tuple)) else [auto_tolerance]
    if not tolerances:
        raise InvalidArgument("auto_tolerance is empty; give a number, or leave it out")
    autos = [number for number in numbers if isinstance(number, Auto)]
    given = any(value is not None for value in (auto_min, auto_max, auto_sure, *tolerances))
    if given and (autos or AUTO not in numbers):
        auto_of(numbers[0], auto_min, auto_max, tolerances[0], auto_sure)  # the auto_* arguments are for "auto" alone
    for tolerance in tolerances if AUTO in numbers else ():
        value = None if tolerance is None else check_float("auto_tolerance", tolerance, at_least=0)
        auto = auto_of(AUTO, auto_min, auto_max, value, auto_sure)
        assert auto is not None, "it is"
        autos.append(auto)
    autos = list(dict.fromkeys(autos))
    if len({auto.tolerance for auto in autos}) < len(autos):
        raise InvalidArgument("several Auto have one tolerance, which their rows are named by; give each another one")
    if len(autos) == 1:
        return {AUTO_SUFFIX: autos[0]}
    return {f"{AUTO_SUFFIX}@{auto.tolerance:g}": auto for auto in autos}


# ---- names


@dataclass(frozen=True, eq=False)
class BaselineRow:
    """A baseline under the name of its row."""

    name: str
    system: Baseline
    base: str  # the name without the threshold

    @property
    def num_frames(self) -> int:
        """The frames that a baseline without its search sees; 1 for those that decide themselves."""
        return int(self.system.config["num_frames"]) if isinstance(self.system, UniformFrames) else 1

    def facts(self) -> dict[str, Any]:
        """Return what identifies the baseline and its threshold, as JSON values."""
        system, about = self.system, self.system.about
        facts = {
            "system": system.name,
            "multi_label": system.multi_label,
            "num_candidates": about.get("num_candidates"),
            "heavy": about.get("heavy"),
            **trained_on(about),
        }
        if system.threshold:
            facts[system.threshold] = system.config[system.threshold]
        return facts


class Resolver:
    """Makes policies and baselines of what the user gives. A folder is loaded once."""

    def __init__(self, device: Any, where: torch.device, precision: str | None) -> None:
        self._device, self._where, self._precision = device, where, precision
        self._policies: dict[str, Policy] = {}
        self._baselines: dict[str, Baseline] = {}

    def resolve(self, policies: Any) -> tuple[list[Policy], list[BaselineRow]]:
        """Resolve names, policies, samplers, baselines, what `train` returns, folders, "NAME=FOLDER", {name: any}."""
        policies = _unwrapped(policies)
        is_sampler = hasattr(policies, "look") or hasattr(policies, "score")
        if is_sampler or isinstance(policies, (str, os.PathLike, Baseline, Policy)):
            policies = [policies]
        if not isinstance(policies, Iterable):
            raise InvalidArgument(f"policies={policies!r} must be a list of names and samplers, or {{name: sampler}}")
        given = policies.items() if isinstance(policies, Mapping) else ((None, policy) for policy in policies)
        results = [self._one(name, _unwrapped(policy)) for name, policy in given]
        resolved = [result for result in results if not isinstance(result, list)]
        baselines = [row for result in results if isinstance(result, list) for row in result]
        names = [*(policy.name for policy in resolved), *(row.name for row in baselines)]
        if not names:
            raise InvalidArgument(
                f"policies are empty; choose from: {', '.join(list_policies(oracles=True))}, or give samplers"
            )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidArgument(
                f"two policies are called {twice!r}; name them apart: NAME=FOLDER, or {{name: sampler}} in Python"
            )
        _check_curves(resolved, baselines)
        return resolved, baselines

    def _one(self, name: str | None, policy: Any) -> Policy | list[BaselineRow]:
        if isinstance(policy, Baseline):
            return _baseline(name or policy.name, policy, "")
        if not isinstance(policy, (str, os.PathLike)):
            resolved = get_policy(policy, teacher=True)
            return self._named(name, resolved, name or resolved.name)
        text = os.fspath(policy)
        if isinstance(policy, str) and is_policy_name(text):
            if name not in (None, text):
                raise InvalidArgument(f"the policy {text!r} cannot be called {name!r}; only samplers take other names")
            return get_policy(text, teacher=True)
        if name is None:
            name, text = split_label(text)
        # A folder may itself be called like one with a method or a threshold behind it, and is then taken as it is.
        folder, method = (text, "") if is_saved_folder(text) else split_method(text)
        before, _, value = text.rpartition("@")
        if before.endswith(f"@{_UNIFORM}") and not is_saved_folder(before):  # FOLDER@uniform@N
            before, value = before.removesuffix(f"@{_UNIFORM}"), f"{_UNIFORM}@{value}"
        if not is_saved_folder(folder) and before and value and is_saved_folder(before):
            if saved_kind(before) != BASELINE_KIND:
                raise InvalidArgument(
                    f"{text!r}: {before} holds no trained baseline, and only these have a threshold; leave out @"
                )
            folder, method = before, ""
        else:
            value = ""
        if saved_kind(folder) == BASELINE_KIND:
            if method:
                raise InvalidArgument(f"{text!r}: +{method} is for samplers, not for baselines; leave it out")
            if folder not in self._baselines:
                self._baselines[folder] = load_system(folder, device=str(self._where))
            return _baseline(name or folder, self._baselines[folder], value, name_is_folder=name is None)
        if folder not in self._policies:
            self._policies[folder] = get_policy(folder, device=self._device, precision=self._precision, teacher=True)
        resolved = self._policies[folder]
        return self._named(name, with_method(resolved, method) if method else resolved, name or text)

    def _named(self, name: str | None, policy: Policy, called: str) -> Policy:
        """Apply the method that a name ends in, since rows are read by their names."""
        method = getattr(policy, "method", "")
        in_name = split_method(name or "")[1]
        if in_name and method and in_name != method:
            raise InvalidArgument(
                f"the name {name!r} has the method {in_name}, but {policy.name!r} has {method}; write one of them"
            )
        if is_policy_name(called) and get_policy(split_method(called)[0], teacher=True) is not policy:
            raise InvalidArgument(f"a sampler cannot be called {called!r}, which is another policy; give another name")
        if in_name and not method:
            policy = with_method(policy, in_name)
        return policy if policy.name == called else policy.renamed(called)


def _unwrapped(policy: Any) -> Any:
    """Return the sampler or baseline in what `train` returns; anything else as it is."""
    for part in ("sampler", "system"):
        if hasattr(policy, "folder") and hasattr(policy, "result") and hasattr(policy, part):
            return getattr(policy, part)
    return policy


def _baseline(name: str, system: Baseline, value: str, *, name_is_folder: bool = False) -> list[BaselineRow]:
    """Return the row of a baseline, or with "all" one for each threshold; an empty `value` leaves it as it is.

    A threshold that its name ends in is set, unless the name is its folder's. "uniform" gives it N evenly spread frames
    instead of its search; "uniform@3" three of them.
    """
    name, in_name = (name, "") if name_is_folder else split_threshold(name)
    searching, _, frames = value.partition("@")
    if searching == _UNIFORM or (name.endswith(f"@{_UNIFORM}") and not name_is_folder):
        value = (frames if searching == _UNIFORM else value) or in_name or EVERY
        name, system = f"{name.removesuffix(f'@{_UNIFORM}')}@{_UNIFORM}", UniformFrames(system)
    if in_name and value and in_name != value:
        raise InvalidArgument(
            f"the name {name}@{in_name} has the threshold {in_name}, but the policy {value}; write one of them"
        )
    # The policy "frameexit" may be left out, and then a baseline may have the name of its class.
    if is_policy_name(name) and name not in list_systems():
        raise InvalidArgument(f"a baseline cannot be called {name!r}, which is another policy; give another name")
    method = "" if name_is_folder else split_method(name)[1]
    if method:
        raise InvalidArgument(f"a baseline cannot be called {name!r}: +{method} is for samplers, so leave it out")
    value = value or in_name
    if not value:
        return [BaselineRow(name, system, name)]
    if not system.threshold:
        raise InvalidArgument(
            f"{name}: {system.name} has no threshold that could be set to {value}; leave out @{value}"
        )
    number = number_of(value)
    if number is None and value != EVERY:
        raise InvalidArgument(
            f"{name}@{value} cannot be read; @VALUE must be a number for {system.threshold} of {system.name}, "
            f"for example {', '.join(map(str, system.threshold_values))}, or {EVERY} for all of these; "
            f"@{_UNIFORM} gives it evenly spread frames"
        )
    values = system.threshold_values if number is None else [number]
    return [BaselineRow(f"{name}@{threshold}", system.with_threshold(threshold), name) for threshold in values]


def _check_curves(policies: Sequence[Policy], baselines: Sequence[BaselineRow]) -> None:
    """All rows NAME@VALUE make one curve called NAME, so nothing else may be called NAME."""
    others = {policy.name for policy in policies}
    first_of: dict[str, BaselineRow] = {}
    for row in baselines:
        curve = split_threshold(row.name)[0]
        if curve in others:
            raise InvalidArgument(
                f"the policy {curve!r} and the baseline {row.name!r} would be one curve called {curve!r}; give the "
                "baseline another name: NAME=FOLDER, or {name: system} in Python"
            )
        first = first_of.setdefault(curve, row)
        if first is not row and not _same_but_for_threshold(first.system, row.system):
            raise InvalidArgument(
                f"{first.name!r} and {row.name!r} are two baselines, but would be one curve called {curve!r}; name "
                "them apart: NAME=FOLDER, or {name: system} in Python"
            )


def _same_but_for_threshold(first: Baseline, other: Baseline) -> bool:
    """Return whether two baselines differ in their thresholds alone: points of one curve."""

    def without_threshold(system: Baseline) -> str:
        settings = {key: value for key, value in system.config.items() if key != system.threshold}
        return json.dumps([system.name, settings, trained_on(system.about)], sort_keys=True)

    if without_threshold(first) != without_threshold(other):
        return False
    weights, others = first.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(weight.cpu(), others[key].cpu()) for key, weight in weights.items()
    )


# ---- cells


@dataclass(frozen=True)
class Entry:
    """A policy under the name of its rows; with `auto` it decides on N."""

    name: str
    policy: Policy
    auto: Auto | None = None


def auto_entries(policies: Sequence[Policy], autos: Mapping[str, Auto], pairs: Sequence[Pair]) -> list[Entry]:
    """Return the policies that can decide on N, once for each `Auto`."""
    entries: list[Entry] = []
    for policy in policies:
        if policy.name.partition("@")[0].endswith(AUTO_SUFFIX):
            raise InvalidArgument(
                f"a sampler cannot be called {policy.name!r}, as rows of num_frames={AUTO!r} are; give another name"
            )
        if not autos:
            continue
        refusal = policy.auto_refusal() or _sure_refusal(policy, autos)
        if refusal is None:
            entries += [Entry(f"{policy.name}{suffix}", policy, auto) for suffix, auto in autos.items()]
        elif policy.name != "all" and not policy.has_own_number and all(frames is None for frames, _ in pairs):
            why = refusal.partition("; ")[0]
            raise InvalidArgument(f"{why}; add a number, for example num_frames=[3, {AUTO!r}], or leave it out")
    if autos and policies and not entries:
        if any(auto.sure is not None for auto in autos.values()):
            raise InvalidArgument(
                "auto_sure is for samplers with answer='fused' or 'probed', which ask for one frame after another, and "
                "there is none among the policies; add one as FOLDER+fused, or leave it out"
            )
        raise InvalidArgument(
            f"num_frames={AUTO!r} is for trained samplers, and there is none among the policies; add one"
        )
    return entries


def _sure_refusal(policy: Policy, autos: Mapping[str, Auto]) -> str | None:
    """Return why a policy does not ask for one frame after another, where an `Auto` wants that."""
    try:
        for auto in autos.values():
            policy.sure_enough(auto)
    except InvalidArgument as error:
        return str(error)
    return None


class Plan:
    """All cells of an evaluation: those that are shown, and those that are only compared with.

    With N = None come the entries that decide on N; policies with a number of their own have one cell for each T.
    Uniform and semi-optimal choices are evaluated beside any policy where that needs no run of the classifier, and the
    optimal ones where there are few subsets.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        policies: Sequence[Policy],
        autos: Sequence[Entry],
        clips: Clips,
        note: Callable[[str], None],
    ) -> None:
        self.candidates = list(dict.fromkeys(count for _, count in pairs))
        self.frames_of = {count: [frames for frames, same in pairs if same == count] for count in self.candidates}
        self.shown: list[tuple[Cell, Entry]] = []
        self.cells: dict[Cell, Entry] = {}
        self._clips, self._note = clips, note
        self._uniform_frames: dict[Cell, int] = {}  # of cells that decide on N: N of uniform, rounded up
        if not policies:
            return  # baselines alone, which are compared with uniform once the frames that they need are known
        entries = [Entry(policy.name, policy) for policy in policies]
        names = {entry.name for entry in entries}
        with_number = [entry for entry in entries if entry.name != "all" and not entry.policy.has_own_number]
        references = [_entry(name) for name in ("uniform", "semi-optimal") if name not in names]
        if clips.needs_frames and references:
            missing = " and ".join(repr(reference.name) for reference in references)
            note(f"no comparison with {missing}, which needs runs of the classifier: add it to the policies")
        for count in self.candidates:
            for frames in self.frames_of[count]:
                if frames is None:
                    self.shown += [(Cell(entry.name, None, count), entry) for entry in autos]
                    continue
                self.shown += [(Cell(entry.name, frames, count), entry) for entry in with_number]
                hidden = [] if clips.needs_frames else list(references)
                if "optimal" not in names:
                    if clips.enumerable(count, frames):
                        hidden.append(_entry("optimal"))
                    else:
                        note(
                            f"no fidelity for {frames} of {count}: add the policy 'optimal', whose search takes a while"
                        )
                self.cells |= {Cell(entry.name, frames, count): entry for entry in hidden}
            # All candidates are the same clip for every N, so they have one row.
            self.shown += [(Cell(entry.name, count, count), entry) for entry in entries if entry.name == "all"]
            self.shown += [(Cell(entry.name, None, count), entry) for entry in entries if entry.policy.has_own_number]
        self.cells |= dict(self.shown)

    def compare(self, mean_frames: Mapping[Cell, float]) -> None:
        """Compare cells that decide on N with uniform, which gets their mean number of frames, rounded up."""
        missing: dict[int, dict[str, int]] = {}  # by T and the name of the row
        for cell, mean in mean_frames.items():
            if not mean:  # a sampler's own answer: the classifier saw nothing
                continue
            frames = min(cell.num_candidates, max(1, math.ceil(mean)))
            uniform = Cell("uniform", frames, cell.num_candidates)
            if uniform not in self.cells:
                if self._clips.needs_frames:
                    missing.setdefault(cell.num_candidates, {})[cell.policy] = frames
                    continue
                self.cells[uniform] = _entry("uniform")
            self._uniform_frames[cell] = frames
        for count, frames_of in missing.items():
            self._note(
                f"no comparison of {', '.join(frames_of)} with 'uniform', which needs runs of the classifier: add it "
                f"to the policies with num_frames={','.join(map(str, sorted(set(frames_of.values()))))} of {count}"
            )

    def numbers_a_video(self, a_candidate: int) -> int:
        """Return how many float32 the batches of one video take, with `a_candidate` of them for each candidate."""
        kernels = any(
            isinstance(entry.policy, MethodPolicy) and entry.policy.reduces_redundancy for entry in self.cells.values()
        )
        # Similarities of all pairs in float32 and, with what is factored from them, in float64.
        return sum(count * a_candidate + (6 * count * count if kernels else 0) for count in self.candidates)

    def against(self, cell: Cell) -> int | None:
        """Return N of the uniform and semi-optimal choices that a cell is compared with; None where several fit."""
        if cell.num_frames is None:
            return self._uniform_frames.get(cell)
        if cell.policy != "all":
            return cell.num_frames
        numbers = [frames for frames in self.frames_of[cell.num_candidates] if frames is not None]
        return numbers[0] if len(numbers) == 1 else None


def _entry(name: str) -> Entry:
    return Entry(name, get_policy(name, teacher=True))


# ---- baselines: stored features


def _stored_features(row: BaselineRow, bank: Bank) -> dict[str, Features]:
    """Return the features that a baseline needs, by the name of their set; pixels and sound are not among them."""
    system, about = row.system, row.system.about
    needed = [name for name in system.feature_sets if name not in RAW]
    if any(name not in trained_on(about) for name in needed):
        raise InvalidArgument(
            f"{row.name}: this {system.name} has no record of the features it was trained on; give one that so.train "
            "made or so.load_system read"
        )
    classes = about.get("classes")
    if not isinstance(classes, (list, tuple)):
        raise InvalidArgument(
            f"{row.name}: this {system.name} has no record of its class names (classes={classes!r}), so they cannot be "
            "compared with those of the bank; give one that so.train made or so.load_system read"
        )
    if list(classes) != list(bank.classes):
        raise InvalidArgument(
            f"{row.name} was trained for {_classes_in_words(classes)}, but {bank.path} has "
            f"{_classes_in_words(bank.classes)}; give a bank with the same classes in the same order"
        )
    if AUDIO in system.feature_sets and bank.audio().fingerprint != about.get(AUDIO):
        raise InvalidArgument(
            f"{row.name} was trained on sound with other settings ({about.get(AUDIO)}) than {bank.path} has "
            f"({bank.audio().fingerprint}); train the baseline again on a bank that this version prepared"
        )
    return {name: _stored(row, bank, name) for name in needed}


def _classes_in_words(classes: Sequence[str]) -> str:
    some = ", ".join(map(str, classes[:3]))
    return f"{len(classes)} classes ({some}{', ...' if len(classes) > 3 else ''})"


def _stored(row: BaselineRow, bank: Bank, part: str) -> Features:
    """Return the features of the network that a baseline was trained on; their name may differ from bank to bank."""
    wanted = trained_on(row.system.about)[part]
    fingerprint = wanted.get("fingerprint")
    sets = bank.feature_sets
    matching = [name for name, about in sets.items() if about["fingerprint"] == fingerprint]
    if not matching:
        there = "; ".join(f"{name} ({about['network_name']})" for name, about in sets.items()) or "none"
        raise InvalidArgument(
            f"{bank.path}: features of the {part} network {wanted.get('network') or wanted.get('name')} "
            f"({fingerprint}), which {row.name} needs, are not in this bank; it has: {there}. "
            "`sosampler train` of a baseline or so.add_features with that network writes them"
        )
    # The set that it was trained on, or else another of that network; but one that is finished.
    matching.sort(key=lambda name: (not bank.has_all_features(name), name != wanted.get("name")))
    stored = bank.features(matching[0])
    if stored.width != row.system.config[f"{part}_width"]:
        raise InvalidArgument(
            f"{bank.path}: the features {stored.name} have {stored.width} numbers a frame, but {row.name} needs "
            f"{row.system.config[f'{part}_width']}; train the baseline again on these"
        )
    return stored


def note_differences(
    rows: Sequence[BaselineRow], teacher: Teacher, candidates: Sequence[int], note: Callable[[str], None]
) -> None:
    """Note once a baseline what differs from its training: the number of candidates, the classifier of the policies."""
    for row in {row.base: row for row in rows}.values():
        about = row.system.about
        heavy, trained = about.get("heavy") or {}, about.get("num_candidates")
        if heavy and heavy.get("fingerprint") != teacher.about["fingerprint"]:
            note(
                f"{row.base} classifies with {about.get('classifier')} ({heavy.get('fingerprint')}), but the policies "
                f"with {teacher.about['name']} ({teacher.about['fingerprint']}): they differ in more than the choice "
                "of frames"
            )
        others = [str(count) for count in candidates if count != trained]
        if trained is not None and others:
            note(
                f"{row.base} was trained with {trained} candidates, but has {' and '.join(others)} here: it may do "
                "worse than one that was trained with as many"
            )


# ---- baselines: the run


def run_baselines(
    rows: Sequence[BaselineRow], candidates: Sequence[int], bank: Bank, videos: Videos
) -> dict[Cell, tuple[Tally, Spent]]:
    """Run every baseline with each number of candidates, on the videos in their order.

    Features and pixels are read for some videos at a time, once for all baselines, in the precision of the bank.

    Returns:
        By cell its predictions and its cost. `Tally.slots` [V, T] are the stored frames that went through the heavy
        network, in time order, padded with -1.
    """
    ready = [(row, _stored_features(row, bank)) for row in rows]
    for row in rows:
        for num_candidates in candidates:
            row.system.check_candidates(num_candidates)
    for base in dict.fromkeys(row.base for row in rows):
        fewest = min(row.num_frames for row in rows if row.base == base)
        if fewest > max(candidates):
            raise InvalidArgument(
                f"{base}@{fewest} is more than the {max(candidates)} candidates; give at most as many"
            )
    stored_sets = {stored.name: stored for _, by_name in ready for stored in by_name.values()}
    sides = {row.system.frame_size for row in rows if FRAMES in row.system.feature_sets}
    results: dict[Cell, tuple[Tally, Spent]] = {}
    for num_candidates in candidates:
        runs = [
            _BaselineRun(row, features_of, bank, num_candidates, videos)
            for row, features_of in ready
            if row.num_frames <= num_candidates
        ]
        width = sum(stored.width for stored in stored_sets.values()) + sum(3 * side * side for side in sides)
        size = max(1, _MAX_NUMBERS // (num_candidates * max(1, width)))
        for begin in range(0, len(videos) if runs else 0, size):
            indices = np.arange(begin, min(begin + size, len(videos)))
            slots, counts = videos.candidates(indices, num_candidates)
            features = {name: _features(stored, videos, indices, slots) for name, stored in stored_sets.items()}
            rows_of_bank = [videos.positions[index] for index in indices.tolist()]
            # Decoded once for all runs, of which there is one a threshold.
            raw: dict[Any, Tensor | LazySet] = {
                side: StoredFrames(bank, rows_of_bank, slots, side)[torch.arange(len(indices))] for side in sides
            }
            if any(AUDIO in row.system.feature_sets for row in rows):
                raw[AUDIO] = StoredSpectra(bank, rows_of_bank, slots)
            mask = torch.from_numpy(np.arange(num_candidates) < counts[:, None])
            for run in runs:
                run.predict(indices, slots, features, raw, mask)
        results |= {run.cell: (run.tally, run.spent()) for run in runs}
    return results


def _features(stored: Features, videos: Videos, indices: Indices, slots: Indices) -> Tensor:
    """[B, T, D] in the precision of the set; padding repeats the last candidate and is masked."""
    table = np.empty((*slots.shape, stored.width), dtype=stored.precision)
    for row, index in enumerate(indices.tolist()):
        table[row] = stored[videos.positions[index]][slots[row]]
    return torch.from_numpy(table)


class _BaselineRun:
    """One baseline with one number of candidates."""

    def __init__(
        self, row: BaselineRow, features_of: dict[str, Features], bank: Bank, num_candidates: int, videos: Videos
    ) -> None:
        self._row, self._features_of, self._bank, self._videos = row, features_of, bank, videos
        self.cell = Cell(row.name, None, num_candidates)
        self.tally = Tally.empty(videos.labels, num_candidates)
        self._frames, self._decoded, self._side = (np.zeros(len(videos)) for _ in range(3))
        self._other: dict[str, NDArray[np.float64]] = {}
        self._prices = {name: stored.gmacs for name, stored in features_of.items()}
        classifying = row.system.classifying_sets or row.system.feature_sets[:1]
        self._classified = {name: np.zeros(len(videos)) for name in classifying}  # frames in each of these sets

    def predict(
        self,
        indices: Indices,
        slots: Indices,
        features: Mapping[str, Tensor],
        raw: Mapping[Any, Tensor | LazySet],  # pixels by the side of their squares, and sound
        mask: Tensor,
    ) -> None:
        system = self._row.system
        sets: dict[str, Tensor | LazySet] = {name: features[stored.name] for name, stored in self._features_of.items()}
        if FRAMES in system.feature_sets:
            sets[FRAMES] = raw[system.frame_size]
        if AUDIO in system.feature_sets:
            sets[AUDIO] = raw[AUDIO]
        begun = time.perf_counter()
        output = predict(system, Views(sets, None if bool(mask.all()) else mask))
        self.tally.seconds += time.perf_counter() - begun
        strange = indices[~torch.isfinite(output.probabilities).all(dim=1).numpy()]
        if len(strange):  # they would count as some class
            item = self._bank.rows[self._videos.positions[strange[0]]].item
            raise InvalidArgument(
                f"{self._row.name}: probabilities of {len(strange)} of {len(indices)} videos are not finite, "
                f"{item.id!r} the first; check the features "
                f"{' and '.join(stored.name for stored in self._features_of.values())}, or train the baseline again"
            )
        self.tally.probs[indices] = output.probabilities.float().numpy()
        seen = system.classified(output)
        self.tally.slots[indices] = _packed(slots, seen.numpy())
        self._frames[indices] = seen.sum(dim=1).numpy()
        self._decoded[indices] = decoded_frames(output).numpy()
        for name, frames_in in self._classified.items():
            frames_in[indices] = output.seen_in(name).sum(dim=1).numpy()
        side_prices = self._prices | dict.fromkeys(self._classified, 0.0)
        self._side[indices] = video_gmacs(system, output, side_prices).cpu().numpy()
        for name, cost in (output.other_gmacs or {}).items():
            self._other.setdefault(name, np.zeros(len(self._videos)))[indices] = cost.numpy()

    def spent(self) -> Spent:
        """Return the mean cost of a video."""
        return Spent(
            frames_classified=float(self._frames.mean()),
            frames_decoded=float(self._decoded.mean()),
            sampler_gmacs=float(self._side.mean()),
            classifier_gmacs=sum(
                float(frames.mean()) * self._prices.get(name, 0.0) for name, frames in self._classified.items()
            ),
            other_gmacs={name: float(costs.mean()) for name, costs in self._other.items()} or None,
        )


def _packed(slots: Indices, seen: NDArray[np.bool_]) -> Indices:
    """Move those of [B, T] that were seen to the front of each row.

    >>> _packed(np.array([[0, 3, 6], [1, 2, 2]]), np.array([[False, True, True], [True, False, False]])).tolist()
    [[3, 6, -1], [1, -1, -1]]
    """
    order = np.argsort(~seen, axis=1, kind="stable")
    return np.take_along_axis(np.where(seen, slots, NOT_SEEN), order, axis=1)
