"""What an evaluation measures: which policies and baselines, with which N of which T, compared with what."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sosampler._util.validation import check_float, check_int
from sosampler.baselines.base import Baseline, is_baseline_folder, load_system
from sosampler.baselines.registry import list_systems
from sosampler.errors import InvalidArgument
from sosampler.evaluation.baselines import BaselineRow, baseline_rows, same_but_for_threshold
from sosampler.evaluation.clip_scores import Clips
from sosampler.evaluation.result import Cell
from sosampler.policies.auto import AUTO, Auto, auto_of
from sosampler.policies.base import Policy
from sosampler.policies.registry import (
    AUTO_SUFFIX,
    MethodPolicy,
    get_policy,
    is_policy_name,
    is_saved_folder,
    list_policies,
    split_label,
    split_method,
    split_threshold,
    with_method,
)

Pair = tuple[int | None, int]  # N, T; None where the policy decides on N


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
        result.append((None if decides else check_int("num_frames", pair[0]), check_int("num_candidates", pair[1])))
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


def autos_of(num_frames: Any, pairs: Any, auto_min: Any, auto_max: Any, auto_tolerance: Any) -> dict[str, Auto]:
    """Return each `Auto` by the suffix of its rows; none where all N are numbers.

    >>> list(autos_of("auto", None, 1, 4, [0.01, 0.05]))
    ['+auto@0.01', '+auto@0.05']
    """
    numbers = _listed("num_frames", num_frames) if pairs is None else [pair[0] for pair in pairs]
    tolerances = list(auto_tolerance) if isinstance(auto_tolerance, (list, tuple)) else [auto_tolerance]
    if not tolerances:
        raise InvalidArgument("auto_tolerance is empty; give a number, or leave it out")
    autos = [number for number in numbers if isinstance(number, Auto)]
    given = any(value is not None for value in (auto_min, auto_max, *tolerances))
    if given and (autos or AUTO not in numbers):
        auto_of(numbers[0], auto_min, auto_max, tolerances[0])  # the auto_* arguments are for "auto" alone
    for tolerance in tolerances if AUTO in numbers else ():
        value = None if tolerance is None else check_float("auto_tolerance", tolerance, at_least=0)
        auto = auto_of(AUTO, auto_min, auto_max, value)
        assert auto is not None, "it is"
        autos.append(auto)
    autos = list(dict.fromkeys(autos))
    if len({auto.tolerance for auto in autos}) < len(autos):
        raise InvalidArgument("several Auto have one tolerance, which their rows are named by; give each another one")
    if len(autos) == 1:
        return {AUTO_SUFFIX: autos[0]}
    return {f"{AUTO_SUFFIX}@{auto.tolerance:g}": auto for auto in autos}


# ---- names


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
        resolved = [result for result in results if isinstance(result, Policy)]
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
        if not is_saved_folder(folder) and before and value and is_saved_folder(before):
            if not is_baseline_folder(before):
                raise InvalidArgument(
                    f"{text!r}: {before} holds no trained baseline, and only these have a threshold; leave out @"
                )
            folder, method = before, ""
        else:
            value = ""
        if is_saved_folder(folder) and is_baseline_folder(folder):
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
        method = policy.method if isinstance(policy, MethodPolicy) else ""
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
    """Return the rows of a baseline. A threshold that its name ends in is set, unless the name is its folder's."""
    name, in_name = (name, "") if name_is_folder else split_threshold(name)
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
    return baseline_rows(name, system, value or in_name)


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
        if first is not row and not same_but_for_threshold(first.system, row.system):
            raise InvalidArgument(
                f"{first.name!r} and {row.name!r} are two baselines, but would be one curve called {curve!r}; name "
                "them apart: NAME=FOLDER, or {name: system} in Python"
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
        refusal = policy.auto_refusal()
        if refusal is None:
            entries += [Entry(f"{policy.name}{suffix}", policy, auto) for suffix, auto in autos.items()]
        elif policy.name != "all" and all(frames is None for frames, _ in pairs):
            why = refusal.partition("; ")[0]
            raise InvalidArgument(f"{why}; add a number, for example num_frames=[3, {AUTO!r}], or leave it out")
    if autos and policies and not entries:
        raise InvalidArgument(
            f"num_frames={AUTO!r} is for trained samplers, and there is none among the policies; add one"
        )
    return entries


class Plan:
    """All cells of an evaluation: those that are shown, and those that are only compared with.

    With N = None come the entries that decide on N. Uniform and semi-optimal choices are evaluated beside any policy
    where that needs no run of the classifier, and the optimal ones where there are few subsets.
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
        references = [_entry(name) for name in ("uniform", "semi-optimal") if name not in names]
        if clips.needs_frames and references:
            missing = " and ".join(repr(reference.name) for reference in references)
            note(f"no comparison with {missing}, which needs runs of the classifier: add it to the policies")
        for count in self.candidates:
            for frames in self.frames_of[count]:
                if frames is None:
                    self.shown += [(Cell(entry.name, None, count), entry) for entry in autos]
                    continue
                self.shown += [(Cell(entry.name, frames, count), entry) for entry in entries if entry.name != "all"]
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
        self.cells |= dict(self.shown)

    def compare(self, mean_frames: Mapping[Cell, float]) -> None:
        """Compare cells that decide on N with uniform, which gets their mean number of frames, rounded up."""
        missing: dict[int, dict[str, int]] = {}  # by T and the name of the row
        for cell, mean in mean_frames.items():
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
