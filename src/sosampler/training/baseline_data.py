"""Features that baselines are trained on: those in the bank, or those of a network that is then run on it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sosampler._util.progress import progress_bar
from sosampler._util.validation import check_int
from sosampler._util.workers import in_order
from sosampler.bank.annotate import feature_network
from sosampler.bank.bank import Bank
from sosampler.bank.pixels import StoredFrames, StoredSpectra
from sosampler.bank.prepare import add_features
from sosampler.baselines.base import (
    AUDIO,
    FRAMES,
    RAW,
    Baseline,
    LazySet,
    Views,
    candidates_of_ranks,
    light_network,
    refuse_baseline_folder,
)
from sosampler.baselines.patches import FrameFeatures
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.errors import ClassifierError, InvalidArgument
from sosampler.samplers.folder import is_sampler_folder
from sosampler.samplers.registry import load_sampler
from sosampler.training.sampler_data import bank_labels, stratified
from sosampler.video.candidates import uniform_positions

# The kinds of network whose features may be given by the network's name, by the set that they are for.
_KINDS = {"heavy": ["classifier"], "light": ["sampler"]}
_ALL_KINDS = ["classifier", "sampler"]
_VIDEOS_A_READ = 64  # whose pixels are in the memory of the CPU at a time, where a GPU has room for all
_BATCHES_AHEAD = 2  # that are read while the network trains
_PRECISION = "float16"  # in which features are stored, unless they are too large for it
_MAX_BYTES = 32 << 30  # of maps and patches, in half precision
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


def feature_sources(
    bank: Bank,
    baseline: Baseline,
    *,
    classifier: Any = None,
    light: Any = None,
    weights: str | Path | None = None,
    features: Mapping[str, Any] | None = None,
) -> dict[str, FeatureSource]:
    """Find the features of every set that a baseline needs, but `RAW` ones.

    `classifier`: see `heavy_source`; `light`, `weights`: see `light_source`. `features`: by the name of each further
    set a saved classifier or sampler, its folder, or the name of features in the bank. A set that is left out is made
    of classifier or weights, where the baseline says how, or takes the features of the bank that have its name.
    """
    further = [name for name in baseline.feature_sets if name not in ("heavy", "light", *RAW)]
    given = dict(features or {})
    if unknown := [name for name in given if name not in further]:
        has = f"takes these: {', '.join(further)}" if further else "has no further features, so leave them out"
        raise InvalidArgument(
            f"features of {baseline.name} hold {unknown[0]!r}; it {has} (the classifier and the light network have "
            "options of their own)"
        )
    sources = {}
    if "heavy" in baseline.feature_sets:
        sources["heavy"] = heavy_source(bank, classifier)
    if "light" in baseline.feature_sets:
        sources["light"] = light_source(bank, light, weights, baseline.light_size)
    own = None if "heavy" in baseline.feature_sets else own_classifier(classifier)
    for name in further:
        network = None if name in given else baseline.frame_network(name, own, weights)
        if network is not None:
            sources[name] = _of_network(bank, network)
            continue
        if name not in given and name not in bank.feature_sets and name in baseline.made_of:
            raise InvalidArgument(
                f"{bank.path}: has no features {name!r}, which {baseline.name} needs; give {baseline.made_of[name]}, "
                "of which they are computed once"
            )
        if name not in given and name not in bank.feature_sets:
            raise InvalidArgument(
                f"{bank.path}: has no features {name!r}, which {baseline.name} needs; give features "
                f"(--features {name}=FOLDER): a saved classifier or sampler, which computes them once; or add them with"
                f" `sosampler bank add-features {bank.path} --features {name}=FOLDER`. It has: {_feature_names(bank)}"
            )
        sources[name] = _given_source(bank, given.get(name, name), name)
    return sources


def own_classifier(given: Any) -> Any:
    """Return the classifier of a baseline that needs no features of it: given itself, or as its saved folder."""
    refuse_baseline_folder("classifier", given)
    if isinstance(given, (str, Path)):
        return create_classifier(given)
    return given


def heavy_source(bank: Bank, classifier: Any) -> FeatureSource:
    """Find the features before the class layer of a classifier.

    It is given itself, as its saved folder, or as its features in the bank: their name, its fingerprint or its name;
    None where the bank has features of one classifier alone.
    """
    if classifier is not None:
        return _given_source(bank, classifier, "heavy")
    names = [name for name, about in bank.feature_sets.items() if about["network"] in _KINDS["heavy"]]
    if len(names) != 1:
        raise InvalidArgument(
            f"{bank.path}: has no features of a classifier, or of several; give classifier (--classifier): a saved "
            f"folder, or one of: {_feature_names(bank)}"
        )
    return FeatureSource(names[0], bank.feature_sets[names[0]]["fingerprint"])


def light_source(bank: Bank, light: Any, weights: str | Path | None, input_size: int = 128) -> FeatureSource:
    """Find the features of a light network.

    `light`: a `SOSampler` without shift or its saved folder (or a classifier or its folder), or the name of features in
    the bank; None: MobileNetV2 with `weights`, which sees frames of `input_size`.
    """
    if light is not None:
        return _given_source(bank, light, "light")
    if weights is None:
        raise InvalidArgument(
            "this baseline has a light network, whose weights are not given; give weights "
            "(--weights): a file of MobileNetV2 or 'pretrained'; or light (--light): a sampler without shift, or "
            f"one of: {_feature_names(bank)}"
        )
    return _of_network(bank, light_network(weights, input_size))


def keep_features(bank: Bank, sources: Sequence[FeatureSource], *, device: str, say: Callable[[str], None]) -> None:
    """Run networks on every frame of the whole bank, unless that was done; a killed run resumes.

    All run in one pass over the frames. Features that are too large for half precision are stored in float32.
    """
    bank = Bank(bank.path)
    for source in sources:
        if source.network is None:
            bank.features(source.name)  # raises where some are missing
    missing = {
        source.name: source
        for source in sources
        if source.network is not None and not (source.name in bank.feature_sets and bank.has_all_features(source.name))
    }
    if not missing:
        return
    named = " and ".join(source.network_name for source in missing.values())
    say(f"{bank.path}: computing features of {len(bank)} videos with {named}, once")
    _check_bytes(bank, [source.network for source in missing.values()], say)
    # In the precision of a run that was killed, if there was one.
    stored_in = {name: (bank.feature_sets.get(name) or {"precision": _PRECISION})["precision"] for name in missing}
    together = [source for name, source in missing.items() if stored_in[name] == _PRECISION]
    try:
        if together:
            _compute(bank, together, device, _PRECISION)
    except ClassifierError as error:
        if _TOO_LARGE not in str(error):
            raise
    for name, source in missing.items():
        if name not in bank.feature_sets or not bank.has_all_features(name):
            _compute_alone(bank, source, device, stored_in[name], say)


def _check_bytes(bank: Bank, networks: Sequence[Any], say: Callable[[str], None]) -> None:
    """Say how large features are that are more than a vector a frame, and refuse too large ones."""
    numbers = sum(network.width for network in networks if isinstance(network, FrameFeatures))
    size = 2 * numbers * sum(len(video) for video in bank)
    if not size:
        return
    if size > _MAX_BYTES:
        raise InvalidArgument(
            f"{bank.path}: its maps and patches would take {size / 1e9:.0f} GB on disk and in memory, at most "
            f"{_MAX_BYTES / 1e9:.0f} are allowed; set inputs=frames (--set inputs=frames), which computes them from "
            "pixels for each batch, or a smaller grid"
        )
    say(f"{bank.path}: maps and patches take {size / 1e9:.1f} GB on disk, and in memory while a baseline is trained")


def _compute_alone(bank: Bank, source: FeatureSource, device: str, precision: str, say: Callable[[str], None]) -> None:
    try:
        _compute(bank, [source], device, precision)
    except ClassifierError as error:
        if precision != _PRECISION or _TOO_LARGE not in str(error):
            raise
        say(f"{bank.path}: features of {source.network_name} are {_TOO_LARGE}; they are stored in float32")
        # What was written so far is of no use.
        shutil.rmtree(bank.folder.features(source.name).path)
        _compute(bank, [source], device, "float32")


def _compute(bank: Bank, sources: Sequence[FeatureSource], device: str, precision: str) -> None:
    with progress_bar("features", len(bank) + len(bank.failures)) as bar:
        networks = {source.name: source.network for source in sources}
        options: dict[str, Any] = {"device": device, "precision": precision}
        add_features(bank, networks, on_progress=lambda progress: bar.reach(progress.done), **options)


def _given_source(bank: Bank, given: Any, role: str) -> FeatureSource:
    """Find the features of a network that is given itself, as its folder or by what the bank calls it."""
    refuse_baseline_folder("classifier" if role == "heavy" else role, given)
    if isinstance(given, str) and (known := _in_bank(bank, given, role)) is not None:
        return known
    if isinstance(given, (str, Path)):
        if role != "heavy" and is_sampler_folder(given):
            given = load_sampler(given)
        elif saved_folder(given) is not None:
            given = create_classifier(given)
        else:
            called, kind, folder = {
                "heavy": ("of a classifier", "classifier", "its saved folder"),
                "light": ("called", "sampler", "the folder of a sampler without shift"),
            }.get(role, ("called", "classifier or sampler", "the folder of a classifier or of a sampler without shift"))
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
    for key, kinds in (("fingerprint", _ALL_KINDS), ("network_name", _KINDS.get(role, _ALL_KINDS))):
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


def bank_views(bank: Bank, *, num_candidates: int | None = 10, **sets: Any) -> tuple[Views, Tensor]:
    """Return T candidates of each video, evenly spread, by named sets, and the labels [V, C].

    A video with fewer stored frames has each once; the rest of its row is padding. Videos without a label are left out.
    Features are in memory, in the precision of the bank: 2 bytes a number in half precision, else 4.

    Args:
        bank: or a split of it.
        num_candidates: T; None: the stored frames of the longest video.
        sets: by name the network, as for `Bank.features`; None leaves the set out. `frames=224`: centre squares of so
            many pixels a side, which are decoded when some videos are taken. `audio=True`: the sound around each frame,
            which is read likewise.
    """
    rows = [row for row, item in enumerate(bank.items) if item.labels]
    if not rows:
        raise InvalidArgument(f"{bank.path}: no video of this split has a label; give another split")
    stored = [len(bank[row]) for row in rows]
    count = max(stored) if num_candidates is None else check_int("num_candidates", num_candidates)
    positions = [np.unique(uniform_positions(frames, count)) for frames in stored]
    counts = np.array([len(chosen) for chosen in positions])
    mask = torch.from_numpy(np.arange(count) < counts[:, None])
    slots = np.stack([np.pad(chosen, (0, count - len(chosen)), mode="edge") for chosen in positions])
    values: dict[str, Tensor | LazySet] = {}
    for name, network in sets.items():
        if name == FRAMES and network is not None:
            values[name] = StoredFrames(bank, rows, slots, check_int(FRAMES, network))
        elif name == AUDIO and network is not None:
            values[name] = StoredSpectra(bank, rows, slots)
        elif network is not None:
            values[name] = _features(bank, network, rows, positions, count)
    return Views(values, None if mask.all() else mask), bank_labels(bank, rows)


def _features(bank: Bank, name: Any, rows: list[int], positions: list[np.ndarray], count: int) -> Tensor:
    """Return [V, T, D], zeros where a video has no more frames."""
    stored = bank.features(name)
    values = np.zeros((len(rows), count, stored.width), dtype=stored.precision)
    for video, (row, chosen) in enumerate(zip(rows, positions, strict=True)):
        values[video, : len(chosen)] = stored[row][chosen]
    return torch.from_numpy(values)


def near_device(views: Views, device: torch.device, max_bytes: int | None = None) -> Views:
    """Copy the features to a GPU that has room for them, so that batches need not be, and then pixels likewise.

    `max_bytes`: that they may take; None: a fourth of the memory that is free there, and none of the CPU's.
    """
    if max_bytes is None:
        max_bytes = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0
    features = {name: values for name, values in views.sets.items() if isinstance(values, Tensor)}
    free = max_bytes - sum(values.nbytes for values in features.values())
    if free < 0:
        return views
    moved = {name: values.to(device) for name, values in features.items()}
    frames = views.sets.get(FRAMES)
    if isinstance(frames, StoredFrames) and math.prod(frames.shape) <= free:  # uint8: a byte a number
        moved[FRAMES] = torch.empty(frames.shape, dtype=torch.uint8, device=device)
        for rows in torch.arange(len(views)).split(_VIDEOS_A_READ):
            moved[FRAMES][rows] = frames[rows].to(device)
    if not moved:
        return views
    return Views({**views.sets, **moved}, None if views.mask is None else views.mask.to(device))


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
        parts = np.array_split(order, self._steps)[begin:]

        def batch(part: np.ndarray) -> tuple[Tensor, Views]:
            rows = torch.from_numpy(part).to(real.device)
            labels = self.labels[rows.to(self.labels.device)]
            if drawn is None:
                return labels, views.some(rows)
            used = drawn.real[rows]
            some = views.some(rows, drawn.positions[rows])
            return labels, replace(some, mask=None if bool(used.all()) else used)

        if all(isinstance(values, Tensor) for values in views.sets.values()):
            yield from map(batch, parts)
            return
        with ThreadPoolExecutor(1, "sosampler-batches") as thread:  # reads while the network trains
            yield from in_order(
                lambda part: thread.submit(batch, part), parts, lambda pending: len(pending) < _BATCHES_AHEAD
            )
