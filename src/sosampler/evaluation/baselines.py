"""Systems that decide for themselves how many frames they look at, measured on the same videos as everybody else.

A system has a classifier of its own, so nobody judges its choice: what it says is its answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.baselines.base import Baseline, Views, decoded_frames, predict, video_gmacs
from sosampler.errors import InvalidArgument
from sosampler.evaluation.batches import Videos
from sosampler.evaluation.result import Cell, Spent, Tally
from sosampler.policies.names import EVERY, number_of
from sosampler.video.timeline import Indices

NOT_SEEN = -1  # fills up the row of a video in the table of seen frames

# Numbers of features that are laid out at once (128 MiB of float16, or 256 of float32).
_NUMBERS_AT_ONCE = 1 << 26


@dataclass(frozen=True, eq=False)
class SystemPolicy:
    """A system under the name of its row."""

    name: str
    system: Baseline
    base: str  # the name without the value of its dial

    def facts(self) -> dict[str, Any]:
        """What a reader of its row should be able to look up, as JSON values."""
        system, about = self.system, self.system.about
        told = {
            "system": system.name,
            "multi_label": system.multi_label,
            "num_candidates": about.get("num_candidates"),
            "heavy": about.get("heavy"),
        }
        if about.get("light") is not None:
            told["light"] = about["light"]
        if system.threshold:
            told[system.threshold] = system.config[system.threshold]
        return told


def system_policies(name: str, system: Baseline, value: str) -> list[SystemPolicy]:
    """One row, or with "all" one for each value of the dial; an empty `value` leaves the dial where it is."""
    if not value:
        return [SystemPolicy(name, system, name)]
    if not system.threshold:
        raise InvalidArgument(f"{name}: {system.name} has no dial that could be turned to {value}; leave out @{value}")
    if value == EVERY:
        values = list(system.threshold_values)
    else:
        number = number_of(value)
        if number is None:
            raise InvalidArgument(
                f"{name}@{value} is not allowed; write a number for {system.threshold} of {system.name} behind the @, "
                f"for example {', '.join(map(str, system.threshold_values))}, or {EVERY} for all of these"
            )
        values = [number]
    return [SystemPolicy(f"{name}@{one}", system.with_threshold(one), name) for one in values]


def same_but_for_dial(one: Baseline, other: Baseline) -> bool:
    """Whether two systems would be the same with their dials at one place: points of one curve."""
    if _told_without_dial(one) != _told_without_dial(other):
        return False
    weights, others = one.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(weight.cpu(), others[key].cpu()) for key, weight in weights.items()
    )


def _told_without_dial(system: Baseline) -> str:
    settings = {key: value for key, value in system.config.items() if key != system.threshold}
    looks_with = [system.about.get("heavy"), system.about.get("light")]
    return json.dumps([system.name, settings, looks_with], sort_keys=True)


# ---- what they need


@dataclass(frozen=True, eq=False)
class _Ready:
    """A system with the features that it looks at."""

    policy: SystemPolicy
    heavy: Features
    light: Features | None

    @property
    def feature_sets(self) -> list[Features]:
        return [self.heavy] if self.light is None else [self.heavy, self.light]


def _ready(policy: SystemPolicy, bank: Bank) -> _Ready:
    system, about = policy.system, policy.system.about
    if not isinstance(about.get("heavy"), dict):
        raise InvalidArgument(
            f"{policy.name}: this {system.name} does not say on which features it was trained; give one that so.train "
            "made or so.load_system read"
        )
    classes = about.get("classes")
    if not isinstance(classes, (list, tuple)):
        raise InvalidArgument(
            f"{policy.name}: this {system.name} does not say the names of its classes (classes={classes!r}), so nobody "
            "knows whether they are those of the bank; give one that so.train made or so.load_system read"
        )
    if list(classes) != list(bank.classes):
        raise InvalidArgument(
            f"{policy.name} was trained for {_classes_in_words(classes)}, but {bank.path} has "
            f"{_classes_in_words(bank.classes)}; give a bank with the same classes in the same order"
        )
    if system.multi_label != bank.multi_label:
        raise InvalidArgument(
            f"{policy.name} was trained for videos with {_labels_in_words(system.multi_label)}, but those of "
            f"{bank.path} have {_labels_in_words(bank.multi_label)}; give a bank of that kind, or train the system "
            "on this one"
        )
    needs_light = "light_width" in system.config
    return _Ready(policy, _kept(policy, bank, "heavy"), _kept(policy, bank, "light") if needs_light else None)


def _labels_in_words(multi_label: bool) -> str:
    return "several labels (multi_label)" if multi_label else "one label"


def _classes_in_words(classes: Sequence[str]) -> str:
    some = ", ".join(map(str, classes[:3]))
    return f"{len(classes)} classes ({some}{', ...' if len(classes) > 3 else ''})"


def _kept(policy: SystemPolicy, bank: Bank, part: str) -> Features:
    """The features of the network that a system was trained on; their name may be another in another bank."""
    wanted = policy.system.about.get(part) or {}
    fingerprint = wanted.get("fingerprint")
    sets = bank.feature_sets
    matching = [name for name, told in sets.items() if told["fingerprint"] == fingerprint]
    if not matching:
        there = "; ".join(f"{name} ({told['network_name']})" for name, told in sets.items()) or "none"
        raise InvalidArgument(
            f"{bank.path}: features of the {part} network {wanted.get('network') or wanted.get('name')} "
            f"({fingerprint}), which {policy.name} looks at, are not in this bank; it has: {there}. "
            "`sosampler train` of a system or so.add_features with that network writes them"
        )
    # The set that it was trained on, or else another of that network; but one that is finished.
    matching.sort(key=lambda name: (not bank.has_all_features(name), name != wanted.get("name")))
    kept = bank.features(matching[0])
    if kept.width != policy.system.config[f"{part}_width"]:
        raise InvalidArgument(
            f"{bank.path}: the features {kept.name} have {kept.width} numbers a frame, but {policy.name} looks at "
            f"{policy.system.config[f'{part}_width']}; train the system again on these"
        )
    return kept


def tell_of_differences(
    systems: Sequence[SystemPolicy], teacher: Teacher, candidates: Sequence[int], note: Callable[[str], None]
) -> None:
    """Note what differs from training, once a system: another number of candidates, another classifier as judge."""
    for policy in {policy.base: policy for policy in systems}.values():
        about = policy.system.about
        heavy, trained = about.get("heavy") or {}, about.get("num_candidates")
        if heavy.get("fingerprint") != teacher.about["fingerprint"]:
            note(
                f"{policy.base} looks with {about.get('classifier')} ({heavy.get('fingerprint')}), but "
                f"{teacher.about['name']} ({teacher.about['fingerprint']}) judges the policies: they differ in more "
                "than the choice of frames"
            )
        others = [str(count) for count in candidates if count != trained]
        if trained is not None and others:
            note(
                f"{policy.base} was trained with {trained} candidates, but is offered {' and '.join(others)} here: it "
                "may do worse than one that was trained with as many"
            )


# ---- the run


def run_systems(
    systems: Sequence[SystemPolicy], candidates: Sequence[int], bank: Bank, videos: Videos
) -> dict[Cell, tuple[Tally, Spent]]:
    """Every system with each number of candidates, on the videos in their order.

    Features are read for some videos at a time, once for all systems, and as precise as the bank keeps them.

    Returns:
        By cell what was said and what was spent. `Tally.slots` [V, T] are the stored frames that went through the heavy
        network, in time order, filled up with -1.
    """
    ready = [_ready(policy, bank) for policy in systems]
    sets = {kept.name: kept for one in ready for kept in one.feature_sets}
    found: dict[Cell, tuple[Tally, Spent]] = {}
    for count in candidates:
        runs = [_Run(one, count, videos) for one in ready]
        at_once = max(1, _NUMBERS_AT_ONCE // (count * max(1, sum(kept.width for kept in sets.values()))))
        for begin in range(0, len(videos) if runs else 0, at_once):
            numbers = np.arange(begin, min(begin + at_once, len(videos)))
            both = [videos.slots(number, count) for number in numbers.tolist()]
            slots, counts = np.stack([slots for slots, _ in both]), np.array([count for _, count in both])
            rows = {name: _rows(kept, videos, numbers, slots) for name, kept in sets.items()}
            mask = torch.from_numpy(np.arange(count) < counts[:, None])
            for run in runs:
                run.look(numbers, slots, rows, mask)
        found |= {run.cell: (run.tally, run.spent()) for run in runs}
    return found


def _rows(kept: Features, videos: Videos, numbers: Indices, slots: Indices) -> Tensor:
    """[B, T, D] in the precision of the set; padding repeats the last candidate and is masked."""
    found = np.empty((*slots.shape, kept.width), dtype=kept.precision)
    for row, number in enumerate(numbers.tolist()):
        found[row] = kept[videos.places[number]][slots[row]]
    return torch.from_numpy(found)


class _Run:
    """One system with one number of candidates."""

    def __init__(self, ready: _Ready, num_candidates: int, videos: Videos) -> None:
        self._ready, self._videos = ready, videos
        self.cell = Cell(ready.policy.name, None, num_candidates)
        num_videos, num_classes = videos.labels.shape
        self.tally = Tally.empty(num_videos, num_classes, num_candidates)
        self._frames, self._decoded, self._side = (np.zeros(num_videos) for _ in range(3))

    def look(self, numbers: Indices, slots: Indices, rows: dict[str, Tensor], mask: Tensor) -> None:
        system, heavy = self._ready.policy.system, rows[self._ready.heavy.name]
        light = heavy[:, :, :0] if self._ready.light is None else rows[self._ready.light.name]
        begun = time.perf_counter()
        output = predict(system, Views(heavy, light, None if bool(mask.all()) else mask))
        self.tally.seconds += time.perf_counter() - begun
        self._check(numbers, output.probabilities)
        self.tally.probs[numbers] = output.probabilities.float().numpy()
        self.tally.slots[numbers] = _packed(slots, output.seen_heavy.numpy())
        self._frames[numbers] = output.seen_heavy.sum(dim=1).numpy()
        self._decoded[numbers] = decoded_frames(output).numpy()
        light_gmacs = 0.0 if self._ready.light is None else self._ready.light.gmacs
        self._side[numbers] = video_gmacs(system, output, heavy_gmacs=0.0, light_gmacs=light_gmacs).cpu().numpy()

    def _check(self, numbers: Indices, probabilities: Tensor) -> None:
        """Numbers that are not finite would count as some class."""
        strange = numbers[~torch.isfinite(probabilities).all(dim=1).numpy()]
        if len(strange):
            heavy = self._ready.heavy
            item = heavy.bank.rows[self._videos.places[strange[0]]].item
            raise InvalidArgument(
                f"{self._ready.policy.name}: probabilities of {len(strange)} of {len(numbers)} videos are not finite, "
                f"{item.id!r} the first; look for such numbers in the features "
                f"{' and '.join(kept.name for kept in self._ready.feature_sets)}, or train the system again"
            )

    def spent(self) -> Spent:
        """Means over videos."""
        return Spent(
            frames_classified=float(self._frames.mean()),
            frames_decoded=float(self._decoded.mean()),
            sampler_gmacs=float(self._side.mean()),
            classifier_gmacs=float(self._frames.mean()) * self._ready.heavy.gmacs,
        )


def _packed(slots: Indices, seen: NDArray[np.bool_]) -> Indices:
    """Of [B, T] those that were seen, at the front of each row.

    >>> _packed(np.array([[0, 3, 6], [1, 2, 2]]), np.array([[False, True, True], [True, False, False]])).tolist()
    [[3, 6, -1], [1, -1, -1]]
    """
    order = np.argsort(~seen, axis=1, kind="stable")
    return np.take_along_axis(np.where(seen, slots, NOT_SEEN), order, axis=1)


def whole_frames(mean: float, num_candidates: int) -> int:
    """The least number of frames, 1 to T, that is no smaller than a mean: who is compared with it has no more.

    >>> whole_frames(2.1, 10), whole_frames(3.0, 10), whole_frames(0.0, 10), whole_frames(9.0, 8)
    (3, 3, 1, 8)
    """
    return min(num_candidates, max(1, math.ceil(mean)))
