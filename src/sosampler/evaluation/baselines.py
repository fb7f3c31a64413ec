"""Baselines: trained systems that decide how many frames they need, evaluated on the same videos as policies.

A baseline has a classifier of its own, so its predictions are evaluated as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sosampler._util.arrays import Indices
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.baselines.base import Baseline, Views, decoded_frames, predict, video_gmacs
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import Videos
from sosampler.evaluation.result import Cell, Spent, Tally
from sosampler.policies.registry import EVERY, number_of

NOT_SEEN = -1  # pads the row of a video in the table of chosen frames

# Numbers of features that are stacked at a time (128 MiB of float16, or 256 of float32).
_MAX_NUMBERS = 1 << 26


@dataclass(frozen=True, eq=False)
class BaselineRow:
    """A baseline under the name of its row."""

    name: str
    system: Baseline
    base: str  # the name without the threshold

    def facts(self) -> dict[str, Any]:
        """Return what identifies the baseline and its threshold, as JSON values."""
        system, about = self.system, self.system.about
        facts = {
            "system": system.name,
            "multi_label": system.multi_label,
            "num_candidates": about.get("num_candidates"),
            "heavy": about.get("heavy"),
        }
        if about.get("light") is not None:
            facts["light"] = about["light"]
        if system.threshold:
            facts[system.threshold] = system.config[system.threshold]
        return facts


def baseline_rows(name: str, system: Baseline, value: str) -> list[BaselineRow]:
    """Return one row, or with "all" one for each threshold; an empty `value` leaves the threshold as it is."""
    if not value:
        return [BaselineRow(name, system, name)]
    if not system.threshold:
        raise InvalidArgument(
            f"{name}: {system.name} has no threshold that could be set to {value}; leave out @{value}"
        )
    if value == EVERY:
        values = list(system.threshold_values)
    else:
        number = number_of(value)
        if number is None:
            raise InvalidArgument(
                f"{name}@{value} cannot be read; @VALUE must be a number for {system.threshold} of {system.name}, "
                f"for example {', '.join(map(str, system.threshold_values))}, or {EVERY} for all of these"
            )
        values = [number]
    return [BaselineRow(f"{name}@{threshold}", system.with_threshold(threshold), name) for threshold in values]


def same_but_for_threshold(first: Baseline, other: Baseline) -> bool:
    """Return whether two baselines differ in their thresholds alone: points of one curve."""

    def without_threshold(system: Baseline) -> str:
        settings = {key: value for key, value in system.config.items() if key != system.threshold}
        return json.dumps([system.name, settings, system.about.get("heavy"), system.about.get("light")], sort_keys=True)

    if without_threshold(first) != without_threshold(other):
        return False
    weights, others = first.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(weight.cpu(), others[key].cpu()) for key, weight in weights.items()
    )


# ---- stored features


def _stored_features(row: BaselineRow, bank: Bank) -> list[Features]:
    """Return the features that a baseline needs: of its heavy network, and of the light one where it has one."""
    system, about = row.system, row.system.about
    if not isinstance(about.get("heavy"), dict):
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
    if system.multi_label != bank.multi_label:
        labels = {True: "several labels (multi_label)", False: "one label"}
        raise InvalidArgument(
            f"{row.name} was trained for videos with {labels[system.multi_label]}, but those of {bank.path} have "
            f"{labels[bank.multi_label]}; give a bank of that kind, or train the baseline on this one"
        )
    parts = ("heavy", "light") if "light_width" in system.config else ("heavy",)
    return [_stored(row, bank, part) for part in parts]


def _classes_in_words(classes: Sequence[str]) -> str:
    some = ", ".join(map(str, classes[:3]))
    return f"{len(classes)} classes ({some}{', ...' if len(classes) > 3 else ''})"


def _stored(row: BaselineRow, bank: Bank, part: str) -> Features:
    """Return the features of the network that a baseline was trained on; their name may differ from bank to bank."""
    wanted = row.system.about.get(part) or {}
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
        if heavy.get("fingerprint") != teacher.about["fingerprint"]:
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


# ---- the run


def run_baselines(
    rows: Sequence[BaselineRow], candidates: Sequence[int], bank: Bank, videos: Videos
) -> dict[Cell, tuple[Tally, Spent]]:
    """Run every baseline with each number of candidates, on the videos in their order.

    Features are read for some videos at a time, once for all baselines, in the precision of the bank.

    Returns:
        By cell its predictions and its cost. `Tally.slots` [V, T] are the stored frames that went through the heavy
        network, in time order, padded with -1.
    """
    ready = [(row, _stored_features(row, bank)) for row in rows]
    sets = {stored.name: stored for _, feature_sets in ready for stored in feature_sets}
    results: dict[Cell, tuple[Tally, Spent]] = {}
    for num_candidates in candidates:
        runs = [_Run(row, feature_sets, num_candidates, videos) for row, feature_sets in ready]
        size = max(1, _MAX_NUMBERS // (num_candidates * max(1, sum(stored.width for stored in sets.values()))))
        for begin in range(0, len(videos) if runs else 0, size):
            indices = np.arange(begin, min(begin + size, len(videos)))
            slots, counts = videos.candidates(indices, num_candidates)
            features = {name: _features(stored, videos, indices, slots) for name, stored in sets.items()}
            mask = torch.from_numpy(np.arange(num_candidates) < counts[:, None])
            for run in runs:
                run.predict(indices, slots, features, mask)
        results |= {run.cell: (run.tally, run.spent()) for run in runs}
    return results


def _features(stored: Features, videos: Videos, indices: Indices, slots: Indices) -> Tensor:
    """[B, T, D] in the precision of the set; padding repeats the last candidate and is masked."""
    table = np.empty((*slots.shape, stored.width), dtype=stored.precision)
    for row, index in enumerate(indices.tolist()):
        table[row] = stored[videos.positions[index]][slots[row]]
    return torch.from_numpy(table)


class _Run:
    """One baseline with one number of candidates."""

    def __init__(self, row: BaselineRow, feature_sets: list[Features], num_candidates: int, videos: Videos) -> None:
        self._row, self._feature_sets, self._videos = row, feature_sets, videos
        self.cell = Cell(row.name, None, num_candidates)
        self.tally = Tally.empty(videos.labels, num_candidates)
        self._frames, self._decoded, self._side = (np.zeros(len(videos)) for _ in range(3))

    def predict(self, indices: Indices, slots: Indices, features: dict[str, Tensor], mask: Tensor) -> None:
        heavy, *lights = [features[stored.name] for stored in self._feature_sets]
        light = lights[0] if lights else heavy[:, :, :0]
        begun = time.perf_counter()
        output = predict(self._row.system, Views(heavy, light, None if bool(mask.all()) else mask))
        self.tally.seconds += time.perf_counter() - begun
        strange = indices[~torch.isfinite(output.probabilities).all(dim=1).numpy()]
        if len(strange):  # they would count as some class
            item = self._feature_sets[0].bank.rows[self._videos.positions[strange[0]]].item
            raise InvalidArgument(
                f"{self._row.name}: probabilities of {len(strange)} of {len(indices)} videos are not finite, "
                f"{item.id!r} the first; check the features "
                f"{' and '.join(stored.name for stored in self._feature_sets)}, or train the baseline again"
            )
        self.tally.probs[indices] = output.probabilities.float().numpy()
        self.tally.slots[indices] = _packed(slots, output.seen_heavy.numpy())
        self._frames[indices] = output.seen_heavy.sum(dim=1).numpy()
        self._decoded[indices] = decoded_frames(output).numpy()
        light_gmacs = self._feature_sets[1].gmacs if lights else 0.0
        gmacs = video_gmacs(self._row.system, output, heavy_gmacs=0.0, light_gmacs=light_gmacs)
        self._side[indices] = gmacs.cpu().numpy()

    def spent(self) -> Spent:
        """Return the mean cost of a video."""
        return Spent(
            frames_classified=float(self._frames.mean()),
            frames_decoded=float(self._decoded.mean()),
            sampler_gmacs=float(self._side.mean()),
            classifier_gmacs=float(self._frames.mean()) * self._feature_sets[0].gmacs,
        )


def _packed(slots: Indices, seen: NDArray[np.bool_]) -> Indices:
    """Move those of [B, T] that were seen to the front of each row.

    >>> _packed(np.array([[0, 3, 6], [1, 2, 2]]), np.array([[False, True, True], [True, False, False]])).tolist()
    [[3, 6, -1], [1, -1, -1]]
    """
    order = np.argsort(~seen, axis=1, kind="stable")
    return np.take_along_axis(np.where(seen, slots, NOT_SEEN), order, axis=1)
