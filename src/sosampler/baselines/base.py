"""The base of adaptive baselines: from views to probabilities and what was used of each frame.

Shapes: B videos, T candidates in time order, C classes, D features a frame. Features come in named sets, one for each
network that a baseline may run on a frame. "heavy" are those of the frozen classifier (before its class layer), "light"
those of a small network; a baseline may have further sets of its own, "frames" are pixels, and "audio" is the sound
around each frame. It may read a frame in a set only if it marks it in `seen` of that set: these marks and the price of
a frame in each set decide its cost.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosampler._util.files import check_place, load_json, saved_kind, write_text
from sosampler._util.hardware import check_device
from sosampler._util.validation import check_int
from sosampler.baselines.registry import baseline_arguments, create_baseline, list_systems
from sosampler.classifiers.base import label_shares
from sosampler.classifiers.factory import CONFIG, WEIGHTS
from sosampler.classifiers.weights import build_within, check_numbers, load_weights, read_state, some_of, write_state
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.samplers.backbones import MOBILENET, load_backbone_weights
from sosampler.samplers.folder import not_finite
from sosampler.samplers.sosampler import SOSampler

Rng: TypeAlias = torch.Generator | None  # source of all random draws (`draw_uniform`, `draw_gumbel`)
Loss = tuple[Tensor, dict[str, Tensor]]  # what to minimise, and its parts without gradient


FRAMES = "frames"  # the set of pixels, which no network has seen
AUDIO = "audio"  # the set of spectra, which a bank has if it was prepared with sound
SPECTRUM = (64, 100)  # mel bands and columns of the sound around a frame
RAW = (FRAMES, AUDIO)  # no features, so they have neither a width nor a price


class LazySet(Protocol):
    """A set that is read when some videos of it are taken, such as pixels from the JPEGs of a bank."""

    @property
    def shape(self) -> Sequence[int]:
        """[B, T, ...]."""

    def __getitem__(self, index: Any) -> Tensor:
        """Read some of it: `index` is rows [K], int64 or bool, or (rows [K, 1], positions [K, N])."""


@dataclass(frozen=True, eq=False)
class Views:
    """What there is to see of the candidates of some videos, by named sets."""

    # [B, T, D] each; some [B, T, P, D]; "frames" uint8 [B, T, 3, H, W]; "audio" [B, T, 64, 100]
    sets: Mapping[str, Tensor | LazySet]
    mask: Tensor | None = None  # bool [B, T], True = a real candidate; None = all are

    def __getitem__(self, name: str) -> Tensor:
        values = self.sets[name]
        return values if isinstance(values, Tensor) else values[torch.arange(values.shape[0])]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def heavy(self) -> Tensor:
        return self["heavy"]

    @property
    def light(self) -> Tensor:
        return self["light"]

    @property
    def shape(self) -> tuple[int, int]:
        """B, T."""
        videos, candidates = next(iter(self.sets.values())).shape[:2]
        return videos, candidates

    @property
    def real(self) -> Tensor:
        """bool [B, T], True = a real candidate."""
        if self.mask is not None:
            return self.mask
        device = next((values.device for values in self.sets.values() if isinstance(values, Tensor)), None)
        return torch.ones(self.shape, dtype=torch.bool, device=device)

    def some(self, rows: Tensor, positions: Tensor | None = None) -> Views:
        """Select some of the videos, and read what is lazy for these alone.

        Args:
            rows: int64 [K] or bool [B], as torch indexes.
            positions: int64 [K, N], which candidates of each; None takes all.
        """
        index = rows if positions is None else (rows[:, None], positions)
        sets = {name: values[index] for name, values in self.sets.items()}
        return Views(sets, None if self.mask is None else self.mask[index])

    def filled(self) -> Views:
        """Set padding to 0, so that even NaN there reaches no sum and no gradient."""
        if self.mask is None:
            return self
        unreal = ~self.mask
        values = {name: self[name] for name in self.sets}
        shapes = {name: (*unreal.shape, *[1] * (part.dim() - 2)) for name, part in values.items()}
        return Views({name: part.masked_fill(unreal.view(shapes[name]), 0) for name, part in values.items()}, self.mask)

    def to(self, device: torch.device) -> Views:
        """Copy to a device, in at least float32; ints keep their type."""

        def moved(values: Tensor) -> Tensor:
            wide = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else values.dtype
            return values.to(device).to(wide)

        mask = None if self.mask is None else self.mask.to(device)
        return Views({name: moved(self[name]) for name in self.sets}, mask)


class BaselineOutput(NamedTuple):
    """Predictions of a baseline and what it used."""

    probabilities: Tensor  # [B, C]
    seen: Mapping[str, Tensor]  # bool [B, T] by set: frames that went through its network; sets left out: none
    steps: Tensor | None = None  # int64 [B], where the baseline's own layers do not run once a frame
    own: Tensor | None = None  # giga multiply-adds [B] of its own layers, where these do not follow from `seen`
    other_gmacs: Mapping[str, Tensor] | None = None  # [B] by name: the whole cost counted otherwise, such as "bits"

    @property
    def seen_heavy(self) -> Tensor:
        return self.seen_in("heavy")

    @property
    def seen_light(self) -> Tensor:
        return self.seen_in("light")

    def seen_in(self, name: str) -> Tensor:
        """bool [B, T], the frames that were seen in a set."""
        return self.seen[name] if name in self.seen else torch.zeros_like(next(iter(self.seen.values())))


class Baseline(nn.Module):
    """Base class.

    A subclass sets `name`, its `feature_sets`, and `phases` if it trains in several, calls `super().__init__(config)`
    with the JSON values that build it again, and defines `loss`, `decide`, `own_gmacs`, `classify_frames` and
    `frames_gmacs`. Arguments that follow from the bank are `SET_width` and `SET_gmacs` of each set but `RAW` ones,
    `num_classes`, `multi_label` and `num_candidates`, as far as it has them. It may have a threshold: a setting that
    trades accuracy for cost at run time and that no weight's shape depends on.
    """

    name: str = ""
    feature_sets: tuple[str, ...] = ("heavy",)  # the first is that of the network which classifies
    classifying_sets: tuple[str, ...] = ()  # whose frames count as classified; (): those of the first set
    light_size: int = 128  # side of the frames for MobileNetV2, where that is its light network
    frame_size: int = 224  # side of the centre squares in "frames", where it reads these
    takes_weights: bool = False  # whether `weights` of `train` are for a network of its own; see `take_networks`
    same_classes: bool = False  # whether the classifier must have the bank's classes in their order, as it answers so
    predict_batch: int = 256  # videos that `predict` runs at a time
    made_of: Mapping[str, str] = {}  # by set, what `frame_network` makes it of, for messages
    phases: tuple[str, ...] = ("all",)
    threshold: str = ""  # its key in the config
    threshold_values: tuple[float, ...] = ()  # usual ones, from cheap to costly

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config: dict[str, Any] = dict(config)
        self.about: dict[str, Any] = {}  # how a trained one was trained, from its folder
        self.multi_label = bool(config.get("multi_label", False))

    def loss(
        self, views: Views, labels: Tensor, *, generator: Rng = None, progress: float = 1.0, phase: str | None = None
    ) -> Loss:
        """Return the loss of a batch in float32 with multi-hot labels [B, C], at least one a video.

        `progress`: share of the phase that is done, 0 to 1, for what is annealed. `phase`: None = the first.
        """
        raise NotImplementedError

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        """Run on a batch; called by `run` in eval mode and without gradient."""
        raise NotImplementedError

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Return giga multiply-adds [B] of the own layers for each video, without the networks of the sets."""
        if seen.own is None:
            raise NotImplementedError
        return seen.own

    def classified(self, output: BaselineOutput) -> Tensor:
        """Return bool [B, T], the frames that went through a network which classifies."""
        return torch.stack([output.seen_in(name) for name in self.classifying_sets or self.feature_sets[:1]]).any(dim=0)

    def take_networks(self, networks: Mapping[str, Any], weights: str | Path | None) -> None:
        """Copy weights of networks into layers of its own; `train` calls it once, before the first phase.

        `networks`: the classifier or sampler of each set; None where only its features are known. A baseline without
        "heavy" features also gets the network that was given as classifier under that name. `weights`: of `train`.
        """

    def check_classifier(self, classifier: Any) -> None:
        """Refuse the classifier of `train` where it runs that network itself; None: none was given.

        `train` calls it for baselines without "heavy" features, before anything is computed.
        """

    def frame_network(self, name: str, classifier: Any, weights: str | Path | None) -> Any:
        """Return the network whose features of a further set the bank is to store, or None: `train` must be given one.

        `classifier`: of `train`, for baselines without "heavy" features; `weights`: of `train`.
        """
        return None

    def check_candidates(self, count: int) -> None:
        """Refuse T candidates a video where it can run with those of its training alone.

        Such a baseline has `num_candidates` in its config; all others run with any.
        """
        trained = self.config.get("num_candidates", count)
        if trained != count:
            raise InvalidArgument(
                f"{self.name} was trained for {trained} candidates a video and cannot run with {count}; give "
                f"num_candidates={trained}, or train one with num_candidates={count}"
            )

    def classify_frames(self, views: Views, chosen: Tensor) -> BaselineOutput:
        """Classify from the frames `chosen`, bool [B, T], by the own layers, without any decision of its own.

        At least one real candidate of every video is chosen. `UniformFrames` calls it.
        """
        raise NotImplementedError

    def frames_gmacs(self, seen: BaselineOutput) -> Tensor:
        """Return what `own_gmacs` does, for `classify_frames`: layers that only decide are not counted."""
        raise NotImplementedError

    def with_each_step(self) -> Iterator[tuple[int, Baseline]]:
        """Yield (k, the baseline with exactly k steps) for each k it can have, where it takes a frame a step."""
        yield from ()

    def run(self, views: Views, *, generator: Rng = None) -> BaselineOutput:
        """Classify videos, one decision after another; the same views give the same output."""
        self.check_shapes(views)
        self.check_candidates(views.shape[1])
        views = views.to(self.device)
        modes = [(module, module.training) for module in self.modules()]  # they differ within a phase
        self.eval()
        try:
            with torch.no_grad():
                return self.decide(views, generator)
        finally:
            for module, training in modes:
                module.training = training

    def with_threshold(self, value: float) -> Baseline:
        """Return a baseline with the same weights in the same memory and another threshold.

        Training one of the two, or moving it to a device, changes both.
        """
        if not self.threshold:
            raise InvalidArgument(f"{self.name} has no threshold that could be set to {value!r}; leave it as it is")
        return self._with_settings({self.threshold: value})

    turned = with_threshold  # its public name until 0.1

    def _with_settings(self, changes: Mapping[str, Any]) -> Baseline:
        """Return a baseline with the same weights in the same memory; no weight's shape may depend on the changes."""
        with torch.device("meta"):  # layers without memory, which are then replaced by these
            other = type(self)(**{**self.config, **changes})
        other._parameters, other._buffers, other._modules = self._parameters, self._buffers, self._modules
        other.training, other.about = self.training, self.about
        return other

    def phase_parameters(self, phase: str) -> Iterator[nn.Parameter]:
        """Yield the parameters that are trained in a phase."""
        yield from self.parameters()

    def lr_factors(self, phase: str) -> Mapping[nn.Parameter, float]:
        """Return by parameter what its learning rate is multiplied by; those left out have that of the recipe."""
        return {}

    def train_phase(self, phase: str) -> None:
        """Set train mode for what is trained in a phase; a subclass leaves the rest in eval mode."""
        self.train()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def activate(self, logits: Tensor) -> Tensor:
        """Return probabilities of classes from logits [..., C]."""
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)

    def label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits [..., C] and labels [..., C], [...].

        Cross-entropy, where several true labels share the target. For `multi_label` the binary one, summed over classes
        for each true label: a mean over classes would shrink with their number, and what is weighed against it (a
        budget, a reward) or compared with it (the loss at which FrameExit exits) would change its meaning.
        """
        if self.multi_label:
            wanted = labels.to(logits.dtype).expand_as(logits)
            losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(dim=-1)
            return losses / (wanted > 0).sum(dim=-1).clamp_min(1)
        return -(label_shares(labels, logits.dtype) * logits.log_softmax(dim=-1)).sum(dim=-1)

    def check_training(self, frames: Tensor, *, smallest_batch: int, phases: Collection[str]) -> None:
        """Refuse data from which a subclass cannot learn; `frames`: int64 [V], candidates of each video."""

    def check_shapes(self, views: Views) -> None:
        """Refuse views whose sets or shapes do not fit the config."""
        shapes = {name: list(views.sets[name].shape) for name in self.feature_sets if name in views.sets}
        missing = [name for name in self.feature_sets if name not in shapes]
        if missing:
            raise InvalidArgument(
                f"{self.name} needs {' and '.join(missing)} features, but these views have {', '.join(views.sets)}; "
                "give a set of that name"
            )
        for name, given in shapes.items():
            frame = [self.config.get(f"{name}_width", given[-1])]
            if name == FRAMES:
                frame = [3, self.frame_size, self.frame_size]
            elif name == AUDIO:
                frame = list(SPECTRUM)
            if len(given) < 3 or given[-len(frame) :] != frame:
                raise InvalidArgument(
                    f"{name} features of shape {given} do not fit {self.name}; "
                    f"give [videos, candidates, {', '.join(map(str, frame))}]"
                )
        first, shape, mask = self.feature_sets[0], torch.Size(views.shape), views.mask
        for name, given in shapes.items():
            if given[:2] != shapes[first][:2] or not given[1]:
                raise InvalidArgument(
                    f"{first} and {name} features are of {shapes[first][:2]} and {given[:2]} "
                    "videos and candidates; give both for the same candidates, at least one"
                )
        if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
            raise InvalidArgument(
                f"a mask of shape {list(mask.shape)} and type {mask.dtype} does not fit; give bool {list(shape)}"
            )
        if mask is not None and not bool(mask.any(dim=1).all()):
            raise InvalidArgument("a video has no real candidate in the mask; leave out such videos")


class UniformFrames(Baseline):
    """A trained baseline without its search: its own layers classify N evenly spread frames.

    Its search is worth what it gains over this, since its layers were trained on frames that the classifier of the
    policies may never have seen. Its threshold is N, up to the candidates of the training.
    """

    threshold = "num_frames"

    def __init__(self, system: Baseline, num_frames: int = 1) -> None:
        super().__init__({**system.config, "num_frames": check_int("num_frames", num_frames)})
        self.name, self.about, self.system = system.name, system.about, system
        self.feature_sets, self.classifying_sets = system.feature_sets, system.classifying_sets
        self.frame_size, self.predict_batch = system.frame_size, system.predict_batch
        self.threshold_values = tuple(range(1, 1 + int(self.about.get("num_candidates") or 10)))

    def with_threshold(self, value: float) -> Baseline:
        return UniformFrames(self.system, check_int("num_frames", value))

    def decide(self, views: Views, generator: Rng) -> BaselineOutput:
        positions = evenly_spread(views.real, self.config["num_frames"])[0]
        return self.system.classify_frames(views, torch.zeros_like(views.real).scatter_(1, positions, True))

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        return self.system.frames_gmacs(seen)


def matrix_gmacs(*modules: nn.Module) -> float:
    """Count giga multiply-adds of one row through Linear, LSTMCell and GRUCell layers."""
    weights = [weight for module in modules for weight in module.parameters() if weight.dim() == 2]
    return sum(int(weight.numel()) for weight in weights) / 1e9


def candidates_of_ranks(ranks: Tensor, real: Tensor) -> Tensor:
    """Return the positions [B, K] of the real candidates with these ranks [B, K] in their video, counted from 0."""
    real_first = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    return real_first.gather(1, ranks)


def evenly_spread(real: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, count] of evenly spread real candidates, and a mask [B, count]: a video may have fewer.

    Those that a video does not have repeat its first one.
    """
    available = real.sum(dim=1, keepdim=True)
    number = torch.arange(count, device=real.device)
    # The middles of equal segments; a video with fewer candidates than segments gives each of them once.
    ranks = torch.where(available > count, ((2 * number + 1) * available) // (2 * count), number)
    used = ranks < available
    return candidates_of_ranks(torch.where(used, ranks, 0), real), used


def draw_uniform(shape: tuple[int, ...], generator: Rng, device: torch.device) -> Tensor:
    """Draw numbers in 0..1 on the generator's device, so that every device gets the same from one of the CPU."""
    source = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=source).to(device)


def draw_gumbel(shape: tuple[int, ...], generator: Rng, device: torch.device) -> Tensor:
    """Draw Gumbel noise, −log(−log u)."""
    tiny = torch.finfo(torch.float32).tiny
    return -(-draw_uniform(shape, generator, device).clamp_min(tiny).log()).clamp_min(tiny).log()


def decoded_frames(output: BaselineOutput) -> Tensor:
    """Count the frames of each video that were seen in any set and that must be decoded, int64 [B].

    Sound is heard without its frame.
    """
    return torch.stack([seen for name, seen in output.seen.items() if name != AUDIO]).any(dim=0).sum(dim=1)


def video_gmacs(baseline: Baseline, output: BaselineOutput, prices: Mapping[str, float]) -> Tensor:
    """Return giga multiply-adds of each video [B], from those of one frame in the network of each set.

    Pixels and sound have no price: what a baseline computes of them are its own layers.
    """
    seen = [prices[name] * frames.sum(dim=1) for name, frames in output.seen.items() if name not in RAW]
    return sum(seen, baseline.own_gmacs(output))


def predict(baseline: Baseline, views: Views, *, batch_size: int | None = None, seed: int = 0) -> BaselineOutput:
    """Run on any number of videos, some at a time; the output is on the CPU."""
    size = baseline.predict_batch if batch_size is None else check_int("batch_size", batch_size)
    generator, batches = torch.Generator().manual_seed(seed), torch.arange(len(views)).split(size)
    outputs = [baseline.run(views.some(rows), generator=generator) for rows in batches]
    return BaselineOutput(*map(_joined, zip(*outputs, strict=True)))


def _joined(parts: Sequence[Any]) -> Any:
    """Join a field of the outputs of several batches: tensors, mappings of tensors, or None."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], Mapping):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts).cpu()


def light_network(weights: str | Path, input_size: int = 128) -> SOSampler:
    """Return MobileNetV2 without shift, frozen; the same weights always give the same fingerprint.

    It is a sampler because banks store features of these; its score is not used. `weights`: a safetensors file with
    torchvision's or timm's names, or "pretrained".
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the head that is not used is part of the fingerprint
        network = SOSampler(backbone=MOBILENET, shift=0, input_size=input_size)
    load_backbone_weights(network.backbone, weights)
    return network.freeze()


# ---- the folder of a trained baseline: config.json and model.safetensors; never pickled weights

KIND = "sosampler system"  # of the folder, in config.json


def save_baseline(folder: str | Path, baseline: Baseline, about: Mapping[str, Any]) -> None:
    """Write a baseline; each file is written atomically, config.json last.

    Another baseline in the folder is replaced: its config.json is deleted first, so that a kill never leaves new
    weights with old settings. A folder that holds something else is refused. `about`: how it was trained, as JSON.
    """
    folder = Path(folder)
    check_place(folder, KIND, "baseline")
    if baseline.name not in list_systems():
        raise InvalidArgument(
            f"a {type(baseline).__name__} cannot be loaded by its name {baseline.name!r}, so it is not saved; "
            f"give one of: {', '.join(list_systems())}"
        )
    config = {"kind": KIND, "name": baseline.name, "config": baseline.config, "about": dict(about)}
    try:
        text = json.dumps(config, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"about={about!r} must be JSON values ({error}); convert them") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_state(folder / WEIGHTS, baseline.state_dict(), metadata={"format": "pt"})
    write_text(folder / CONFIG, text)


def load_system(folder: str | Path, device: str | None = None) -> Baseline:
    """Load a trained baseline, frozen and in evaluation mode; its attribute `about` holds how it was trained.

    Args:
        folder: of `train`.
        device: None: the CPU.
    """
    target = check_device("cpu" if device is None else device)
    if not isinstance(folder, (str, Path)):
        raise InvalidArgument(f"folder={folder!r} must be a path; give the folder of a trained baseline")
    folder = Path(folder)
    name, config, about = _read_config(folder)
    allowed = baseline_arguments(name)
    if unknown := sorted(set(config) - set(allowed)):
        raise WeightsError(
            f"{folder / CONFIG}: holds unknown settings ({some_of(unknown)}); allowed are {', '.join(allowed)}; "
            "if a newer sosampler wrote them, install that one"
        )
    check_numbers(config, str(folder / CONFIG))
    if not (folder / WEIGHTS).is_file():
        raise WeightsError(f"{folder}: has no {WEIGHTS}; copy the whole folder, or train the baseline again")
    state = read_state(folder / WEIGHTS, names_as_they_are=True)
    if broken := not_finite(state):
        raise WeightsError(
            f"{folder / WEIGHTS}: {len(broken)} tensors hold numbers that are not finite: {some_of(broken)}; "
            "train or copy the baseline again"
        )
    try:
        with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
            baseline = build_within(lambda: create_baseline(name, **config), folder / WEIGHTS, folder / CONFIG)
    except (InvalidArgument, TypeError) as error:
        raise WeightsError(f"{folder / CONFIG}: {first_line(error)}; fix it, or train the baseline again") from error
    load_weights(baseline, state, where=str(folder / WEIGHTS))
    baseline.about = about
    baseline.requires_grad_(False).eval().to(target)
    return baseline


def trained_on(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a trained baseline records about the features of each of its sets, "heavy" first.

    "heavy" and "light" are keys of `about`, further sets are in its "sets".
    """
    named = {name: about.get(name) for name in ("heavy", "light")} | dict(about.get("sets") or {})
    return {name: facts for name, facts in named.items() if isinstance(facts, dict)}


def is_baseline_folder(path: Any) -> bool:
    """Return whether this is a folder with the config.json of a trained baseline."""
    return saved_kind(path) == KIND


def refuse_baseline_folder(argument: str, given: Any) -> None:
    """Refuse the folder of a baseline where another network is expected."""
    if is_baseline_folder(given):
        raise InvalidArgument(
            f"{argument}={str(given)!r} holds a trained baseline, which has no features and classifies whole videos "
            f"only; give the folder of a {argument if argument == 'classifier' else 'sampler without shift'}"
        )


def _read_config(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return name, config and `about` of the baseline in a folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; give that of a trained baseline")
    if not path.is_file():
        raise WeightsError(f"{folder}: has no {CONFIG}, so it is no trained baseline; give a folder of `train`")
    try:
        config_file = load_json(path)
    except (ValueError, OSError) as error:
        raise WeightsError(
            f"{path}: is not JSON ({first_line(error)}); train the baseline again, or copy the file again"
        ) from error
    kind = config_file.get("kind") if isinstance(config_file, dict) else None
    if kind != KIND:
        what = f"a {kind}" if isinstance(kind, str) else "something else"
        raise WeightsError(
            f"{folder}: holds {what} instead of a baseline; give the folder of a trained {', '.join(list_systems())}"
        )
    missing = [key for key in ("name", "config", "about") if key not in config_file]
    name, config, about = (config_file.get(key) for key in ("name", "config", "about"))
    if missing or not isinstance(config, dict) or not isinstance(about, dict):
        lacks = f"lacks {', '.join(missing)}" if missing else "holds settings that are not those of a baseline"
        raise WeightsError(f"{path}: {lacks}; train the baseline again, or copy the file again")
    if name not in list_systems():
        raise WeightsError(
            f"{path}: {name!r} is no baseline of this version ({', '.join(list_systems())}); "
            "if a newer sosampler wrote it, install that one"
        )
    return name, config, about
