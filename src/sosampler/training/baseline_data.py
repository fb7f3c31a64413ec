"""The features a system is trained on: those that the bank keeps, or those of a network that is then asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosampler._util.progress import Bar, Progress, progress_bar
from sosampler._util.validation import whole_number
from sosampler.bank.annotate import feature_network
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_features
from sosampler.baselines.base import Views, light_network
from sosampler.baselines.folder import refuse_system_folder
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.registry import load_sampler
from sosampler.training.examples import multi_hot
from sosampler.video.candidates import uniform_positions

# What the features of a network are called where it is not said what for.
_KINDS = {"heavy": "classifier", "light": "sampler"}
_PRECISION = "float16"  # in which they are kept, unless they are too large for it
_TOO_LARGE = "too large for half precision"  # what is said of these


@dataclass(frozen=True)
class FeatureSource:
    """Features that are in the bank under a name, or will be once their network was asked."""

    name: str  # in the bank
    fingerprint: str  # of the network
    network: Any = None  # None where only the bank knows it
    network_name: str = ""
    computed_in: str = ""  # of a network: the precision in which it would be asked now

    def identity(self, bank: Bank) -> dict[str, Any]:
        """What decides the features, but for their last bits; the same before they are computed and after."""
        about = bank.feature_sets.get(self.name) or {"computed_in": self.computed_in, "precision": _PRECISION}
        told = {"name": self.name, "fingerprint": self.fingerprint}
        return told | {key: about.get(key) for key in ("computed_in", "precision")}

    def told(self, bank: Bank) -> dict[str, Any]:
        """What is written about them."""
        kept = bank.features(self.name)
        return {
            "name": self.name,
            "network": kept.about["network_name"],
            "fingerprint": self.fingerprint,
            "width": kept.width,
            "gmacs": kept.gmacs,
        }


def heavy_source(bank: Bank, classifier: Any) -> FeatureSource:
    """What stands before the class layer of a classifier.

    Args:
        bank: where features are, or will be.
        classifier: itself, its saved folder, or what the bank calls its features: their name, its fingerprint or its
            name; None where the bank has features of one classifier alone.
    """
    if classifier is None:
        return _only_one(bank)
    refuse_system_folder("classifier", classifier)
    known = _kept(bank, classifier, "heavy")
    if known is not None:
        return known
    if isinstance(classifier, (str, Path)):
        folder = saved_folder(classifier)
        if folder is None:
            raise InvalidArgument(
                f"{bank.path}: there are no features of a classifier {str(classifier)!r}, and no saved one at that "
                f"place that could be asked; give its saved folder, or one of: {_there(bank)}"
            )
        classifier = create_classifier(folder)
    return _of_network(bank, classifier)


def light_source(bank: Bank, light: Any, weights: str | Path | None) -> FeatureSource:
    """What a light network sees in a frame.

    Args:
        bank: where features are, or will be.
        light: a `SOSampler` without shift or its saved folder (a classifier or its folder will do too), or what the
            bank calls its features; None: MobileNetV2 with `weights`.
        weights: of that one.
    """
    if light is None:
        if weights is None:
            raise InvalidArgument(
                "this system glances at frames with a light network, whose weights are not given; give weights "
                "(--weights): a file of MobileNetV2 or 'pretrained'; or light (--light): a sampler without shift, or "
                f"one of: {_there(bank)}"
            )
        return _of_network(bank, light_network(weights))
    refuse_system_folder("light", light)
    known = _kept(bank, light, "light")
    if known is not None:
        return known
    if isinstance(light, (str, Path)):
        if is_sampler_folder(light):
            light = load_sampler(light)
        elif saved_folder(light) is not None:
            light = create_classifier(light)
        else:
            raise InvalidArgument(
                f"{bank.path}: there are no features called {str(light)!r}, and no saved sampler at that place that "
                f"could be asked; give the folder of a sampler without shift, or one of: {_there(bank)}"
            )
    return _of_network(bank, light)


def keep_features(bank: Bank, source: FeatureSource, *, device: str, say: Callable[[str], None]) -> None:
    """Ask the network about every frame of the whole bank, unless that was done; a killed run goes on.

    Features that half precision cannot hold are kept in float32.
    """
    bank = Bank(bank.path)
    if source.network is None:
        bank.features(source.name)  # says what is missing
        return
    about = bank.feature_sets.get(source.name)
    if about is not None and bank.has_all_features(source.name):
        return
    say(f"{bank.path}: asking {source.network_name} for the features of {len(bank)} videos, once and for all")
    # As they were begun, if they were.
    begun = {"precision": _PRECISION} if about is None else {key: about.get(key) for key in ("precision", "batch")}
    try:
        _ask(bank, source, device, begun)
    except ClassifierError as error:
        if begun["precision"] != _PRECISION or _TOO_LARGE not in str(error):
            raise
        say(f"{bank.path}: features of {source.network_name} are {_TOO_LARGE}; they are kept in float32")
        # What was written until now can never be brought to an end.
        shutil.rmtree(bank.folder.features(source.name).path)
        _ask(bank, source, device, begun | {"precision": "float32"})


def _ask(bank: Bank, source: FeatureSource, device: str, how: dict[str, Any]) -> None:
    with ExitStack() as stack:
        add_features(bank, source.network, name=source.name, device=device, on_progress=_shown(stack), **how)


def _shown(stack: ExitStack) -> Callable[[Progress], None]:
    """A bar that appears with the first video."""
    bars: list[Bar] = []

    def tell(progress: Progress) -> None:
        if not bars:
            bars.append(stack.enter_context(progress_bar("features", progress.total, done=progress.before)))
        bars[0].advance()

    return tell


def _only_one(bank: Bank) -> FeatureSource:
    found = [name for name, about in bank.feature_sets.items() if about["network"] == _KINDS["heavy"]]
    if len(found) != 1:
        raise InvalidArgument(
            f"{bank.path}: whose features the system is to look at is not clear; give classifier (--classifier): a "
            f"saved folder, or one of: {_there(bank)}"
        )
    return FeatureSource(found[0], bank.feature_sets[found[0]]["fingerprint"])


def _kept(bank: Bank, given: Any, role: str) -> FeatureSource | None:
    """The features that a name or a fingerprint means, where the bank has them."""
    if not isinstance(given, str):
        return None
    known = bank.feature_sets
    if given in known:
        return FeatureSource(given, known[given]["fingerprint"])
    for key, kinds in (("fingerprint", list(_KINDS.values())), ("network_name", [_KINDS[role]])):
        found = [name for name, about in known.items() if about[key] == given and about["network"] in kinds]
        if len(found) > 1:
            raise InvalidArgument(
                f"{bank.path}: {given!r} fits several features: {', '.join(found)}; name one of these"
            )
        if found:
            return FeatureSource(found[0], known[found[0]]["fingerprint"])
    return None


def _of_network(bank: Bank, network: Any) -> FeatureSource:
    """Features of a network under the name they have; under its fingerprint where there are none yet."""
    with feature_network(network, None) as ready:  # says what is wrong with it
        fingerprint, called, computed_in = ready.fingerprint, ready.name, ready.precision
    found = [name for name, about in bank.feature_sets.items() if about["fingerprint"] == fingerprint]
    found.sort(key=lambda name: name != fingerprint)  # those of `train` before those of the user's own name
    finished = [name for name in found if bank.has_all_features(name)]
    return FeatureSource((finished or found or [fingerprint])[0], fingerprint, network, called, computed_in)


def _there(bank: Bank) -> str:
    known = [f"{name} ({about['network']} {about['network_name']})" for name, about in bank.feature_sets.items()]
    return "; ".join(known) or "(the bank has no features yet)"


def bank_views(bank: Bank, *, heavy: Any, light: Any = None, num_candidates: int | None = 10) -> tuple[Views, Tensor]:
    """Features of T candidates of each video, evenly spread, and the labels [V, C].

    All are in memory, as precise as they are kept: 2 bytes a number in half precision, else 4.
    A video with fewer stored frames offers each once; the rest of its row is padding. Videos without a label are left
    out.

    Args:
        bank: a bank or one split of it, with features that `add_features` wrote.
        heavy, light: which features: names, fingerprints or the networks themselves, as `Bank.features` takes them.
            None for light: a system that looks at no light features gets some of width 0.
        num_candidates: T; None: every stored frame, T is then the number of the longest video.
    """
    rows = [row for row, item in enumerate(bank.items) if item.labels]
    if not rows:
        raise InvalidArgument(f"{bank.path}: no video of this part has a label; give another split")
    stored = [len(bank[row]) for row in rows]
    count = max(stored) if num_candidates is None else whole_number("num_candidates", num_candidates)
    places = [np.unique(uniform_positions(one, count)) for one in stored]
    mask = torch.zeros(len(rows), count, dtype=torch.bool)
    for video, chosen in enumerate(places):
        mask[video, : len(chosen)] = True
    first = _features(bank, heavy, rows, places, count)
    second = first[:, :, :0] if light is None else _features(bank, light, rows, places, count)
    labels = torch.stack([multi_hot(bank.rows[row].item.labels, len(bank.classes)) for row in rows])
    return Views(first, second, None if mask.all() else mask), labels


def _features(bank: Bank, name: Any, rows: list[int], places: list[np.ndarray], count: int) -> Tensor:
    """[V, T, D], zeros where a video has no more frames."""
    kept = bank.features(name)
    found = np.zeros((len(rows), count, kept.width), dtype=kept.precision)
    for video, (row, chosen) in enumerate(zip(rows, places, strict=True)):
        found[video, : len(chosen)] = kept[row][chosen]
    return torch.from_numpy(found)
