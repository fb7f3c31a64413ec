"""Features that baselines are trained on: those in the bank, or those of a network that is then run on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sosampler._util.progress import progress_bar
from sosampler._util.validation import check_int
from sosampler.bank.annotate import feature_network
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_features
from sosampler.baselines.base import Views, candidates_of_ranks, light_network, refuse_baseline_folder
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.registry import load_sampler
from sosampler.training.sampler_data import bank_labels, stratified
from sosampler.video.candidates import uniform_positions

# The kind of network in a bank's features, by its role.
_KINDS = {"heavy": "classifier", "light": "sampler"}
_PRECISION = "float16"  # in which features are stored, unless they are too large for it
_TOO_LARGE = "too large for half precision"  # part of the error about these


@dataclass(frozen=True)
class FeatureSource:
    """Features that are in the bank under a name, or will be once their network has run."""

    name: str  # in the bank
    fingerprint: str  # of the network
    network: Any = None  # None where only its features are known
    network_name: str = ""
    computed_in: str = ""  # precision in which the network would run now

    def identity(self, bank: Bank) -> dict[str, Any]:
        """Return what decides the features, the same before they are computed and after."""
        about = bank.feature_sets.get(self.name) or {"computed_in": self.computed_in, "precision": _PRECISION}
        identity = {"name": self.name, "fingerprint": self.fingerprint}
        return identity | {key: about.get(key) for key in ("computed_in", "precision")}

    def describe(self, bank: Bank) -> dict[str, Any]:
        """Return the entry about these features in the folder of a baseline."""
        features = bank.features(self.name)
        return {
            "name": self.name,
            "network": features.about["network_name"],
            "fingerprint": self.fingerprint,
            "width": features.width,
            "gmacs": features.gmacs,
        }


def heavy_source(bank: Bank, classifier: Any) -> FeatureSource:
    """Find the features before the class layer of a classifier.

    It is given itself, as its saved folder, or as its features in the bank: their name, its fingerprint or its name;
    None where the bank has features of one classifier alone.
    """
    if classifier is not None:
        return _given_source(bank, classifier, "heavy")
    names = [name for name, about in bank.feature_sets.items() if about["network"] == _KINDS["heavy"]]
    if len(names) != 1:
        raise InvalidArgument(
            f"{bank.path}: has no features of a classifier, or of several; give classifier (--classifier): a saved "
            f"folder, or one of: {_feature_names(bank)}"
        )
    return FeatureSource(names[0], bank.feature_sets[names[0]]["fingerprint"])


def light_source(bank: Bank, light: Any, weights: str | Path | None) -> FeatureSource:
    """Find the features of a light network.

    `light`: a `SOSampler` without shift or its saved folder (or a classifier or its folder), or the name of features in
    the bank; None: MobileNetV2 with `weights`.
    """
    if light is not None:
        return _given_source(bank, light, "light")
    if weights is None:
        raise InvalidArgument(
            "this baseline has a light network, whose weights are not given; give weights "
            "(--weights): a file of MobileNetV2 or 'pretrained'; or light (--light): a sampler without shift, or "
            f"one of: {_feature_names(bank)}"
        )
    return _of_network(bank, light_network(weights))


def keep_features(bank: Bank, source: FeatureSource, *, device: str, say: Callable[[str], None]) -> None:
    """Run the network on every frame of the whole bank, unless that was done; a killed run resumes.

    Features that are too large for half precision are stored in float32.
    """
    bank = Bank(bank.path)
    if source.network is None:
        bank.features(source.name)  # raises where some are missing
        return
    about = bank.feature_sets.get(source.name)
    if about is not None and bank.has_all_features(source.name):
        return
    say(f"{bank.path}: computing features of {len(bank)} videos with {source.network_name}, once")
    # With the settings of a run that was killed, if there was one.
    settings = {"precision": _PRECISION} if about is None else {key: about.get(key) for key in ("precision", "batch")}
    try:
        _compute(bank, source, device, settings)
    except ClassifierError as error:
        if settings["precision"] != _PRECISION or _TOO_LARGE not in str(error):
            raise
        say(f"{bank.path}: features of {source.network_name} are {_TOO_LARGE}; they are stored in float32")
        # What was written so far is of no use.
        shutil.rmtree(bank.folder.features(source.name).path)
        _compute(bank, source, device, settings | {"precision": "float32"})


def _compute(bank: Bank, source: FeatureSource, device: str, settings: dict[str, Any]) -> None:
    with progress_bar("features", len(bank) + len(bank.failures)) as bar:
        options = {"name": source.name, "device": device, **settings}
        add_features(bank, source.network, on_progress=lambda progress: bar.reach(progress.done), **options)


def _given_source(bank: Bank, given: Any, role: str) -> FeatureSource:
    """Find the features of a network that is given itself, as its folder or by what the bank calls it."""
    refuse_baseline_folder("classifier" if role == "heavy" else "light", given)
    if isinstance(given, str) and (known := _in_bank(bank, given, role)) is not None:
        return known
    if isinstance(given, (str, Path)):
        if role == "light" and is_sampler_folder(given):
            given = load_sampler(given)
        elif saved_folder(given) is not None:
            given = create_classifier(given)
        else:
            called, kind, folder = (
                ("of a classifier", "classifier", "its saved folder")
                if role == "heavy"
                else ("called", "sampler", "the folder of a sampler without shift")
            )
            raise InvalidArgument(
                f"{bank.path}: there are no features {called} {str(given)!r}, and no saved {kind} in that folder; "
                f"give {folder}, or one of: {_feature_names(bank)}"
            )
    return _of_network(bank, given)


def _in_bank(bank: Bank, given: str, role: str) -> FeatureSource | None:
    """Find features in the bank by their name, or by fingerprint or name of their network."""
    known = bank.feature_sets
    if given in known:
        return FeatureSource(given, known[given]["fingerprint"])
    for key, kinds in (("fingerprint", list(_KINDS.values())), ("network_name", [_KINDS[role]])):
        names = [name for name, about in known.items() if about[key] == given and about["network"] in kinds]
        if len(names) > 1:
            raise InvalidArgument(
                f"{bank.path}: {given!r} fits several features: {', '.join(names)}; give one of these"
            )
        if names:
            return FeatureSource(names[0], known[names[0]]["fingerprint"])
    return None


def _of_network(bank: Bank, network: Any) -> FeatureSource:
    """Find the features of a network; new ones are named by its fingerprint."""
    with feature_network(network, None) as ready:  # raises where it has none
        fingerprint, network_name, computed_in = ready.fingerprint, ready.name, ready.precision
    names = [name for name, about in bank.feature_sets.items() if about["fingerprint"] == fingerprint]
    names.sort(key=lambda name: name != fingerprint)  # those that `train` named before those that the user did
    finished = [name for name in names if bank.has_all_features(name)]
    return FeatureSource((finished or names or [fingerprint])[0], fingerprint, network, network_name, computed_in)


def _feature_names(bank: Bank) -> str:
    known = [f"{name} ({about['network']} {about['network_name']})" for name, about in bank.feature_sets.items()]
    return "; ".join(known) or "(the bank has no features yet)"


def bank_views(bank: Bank, *, heavy: Any, light: Any = None, num_candidates: int | None = 10) -> tuple[Views, Tensor]:
    """Return features of T candidates of each video, evenly spread, and the labels [V, C].

    All are in memory, in the precision of the bank: 2 bytes a number in half precision, else 4.
    A video with fewer stored frames has each once; the rest of its row is padding. Videos without a label are left out.
    Networks are given as for `Bank.features`; without a light one its features have width 0. Without `num_candidates`,
    T is the number of stored frames of the longest video.
    """
    rows = [row for row, item in enumerate(bank.items) if item.labels]
    if not rows:
        raise InvalidArgument(f"{bank.path}: no video of this split has a label; give another split")
    stored = [len(bank[row]) for row in rows]
    count = max(stored) if num_candidates is None else check_int("num_candidates", num_candidates)
    positions = [np.unique(uniform_positions(frames, count)) for frames in stored]
    mask = torch.arange(count) < torch.tensor([len(chosen) for chosen in positions])[:, None]
    first = _features(bank, heavy, rows, positions, count)
    second = first[:, :, :0] if light is None else _features(bank, light, rows, positions, count)
    return Views(first, second, None if mask.all() else mask), bank_labels(bank, rows)


def _features(bank: Bank, name: Any, rows: list[int], positions: list[np.ndarray], count: int) -> Tensor:
    """Return [V, T, D], zeros where a video has no more frames."""
    stored = bank.features(name)
    values = np.zeros((len(rows), count, stored.width), dtype=stored.precision)
    for video, (row, chosen) in enumerate(zip(rows, positions, strict=True)):
        values[video, : len(chosen)] = stored[row][chosen]
    return torch.from_numpy(values)


class Drawn(NamedTuple):
    """Candidates of V videos, drawn from all of their frames."""

    positions: Tensor  # int64 [V, K], in the views
    real: Tensor  # bool [V, K], False = the video has fewer


def draw_candidates(real: Tensor, count: int, rng: np.random.Generator) -> Drawn:
    """Draw a frame of each of `count` equal segments of each video, in time order, as for samplers.

    A video with fewer frames has each of them once. `real`: bool [V, T], which positions of the views hold a frame.
    """
    available, steps = real.sum(dim=1, keepdim=True), torch.arange(count, device=real.device)
    # Segments are counted in real frames.
    drawn = torch.from_numpy(stratified(available[:, 0].cpu().numpy(), count, rng)).to(real.device)
    used = steps < available
    ranks = torch.where(used, torch.where(available < count, steps, drawn), 0)
    return Drawn(candidates_of_ranks(ranks, real), used)


class BaselineBatches:
    """Labels [B, C] and views of the batches of every epoch; `seed` is that of a phase."""

    def __init__(self, views: Views, labels: Tensor, *, num_candidates: int, steps: int, seed: list[int]) -> None:
        self.labels, self.seed = labels, seed
        self._views, self._num_candidates, self._steps = views, num_candidates, steps

    def __len__(self) -> int:
        return self._steps

    def epoch(self, number: int, begin: int = 0) -> Iterator[tuple[Tensor, Views]]:
        rng, views = np.random.default_rng([*self.seed, number]), self._views
        real = views.real
        order = rng.permutation(len(real))
        drawn = draw_candidates(real, self._num_candidates, rng) if self._num_candidates < real.shape[1] else None
        for part in np.array_split(order, self._steps)[begin:]:
            rows = torch.from_numpy(part).to(real.device)
            labels = self.labels[rows.to(self.labels.device)]
            if drawn is None:
                yield labels, views.some(rows)
                continue
            index, used = (rows[:, None], drawn.positions[rows]), drawn.real[rows]
            yield labels, Views(views.heavy[index], views.light[index], None if bool(used.all()) else used)
